"""Small real files, made here: PDF by hand, Word through python-docx, EPUB as the ZIP that it is."""

import io
import zipfile
import zlib
from collections.abc import Sequence
from datetime import datetime

import docx


def pdf(
    pages: Sequence[Sequence[str]],
    *,
    created: str | None = None,
    title: str | None = None,
    author: str | None = None,
    encrypted: bool = False,
) -> bytes:
    """Return a PDF of pages of lines. Every character is named by its Unicode code point, as word processors do."""
    characters = sorted({character for page in pages for line in page for character in line})
    mapping = "".join(f"<{ord(c):04x}> <{ord(c):04x}>\n" for c in characters)
    cmap = (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /X def /CMapType 2 def\n"
        "1 begincodespacerange <0000> <ffff> endcodespacerange\n"
        f"{len(characters)} beginbfchar\n{mapping}endbfchar\nendcmap end end"
    ).encode()
    objects: list[bytes] = [b"", b""]  # the catalog and the page tree, when their children are known

    def add(body: bytes) -> int:
        objects.append(body)
        return len(objects)

    def stream(body: bytes) -> bytes:
        packed = zlib.compress(body)
        return b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed)

    unicode_map = add(stream(cmap))
    descendant = add(
        b"<< /Type /Font /Subtype /CIDFontType2 /BaseFont /X /DW 1000 /CIDSystemInfo "
        b"<< /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> /FontDescriptor "
        b"<< /Type /FontDescriptor /FontName /X /Flags 4 /FontBBox [0 0 1000 1000] /ItalicAngle 0 /Ascent 800 "
        b"/Descent -200 /CapHeight 700 /StemV 80 >> >>"
    )
    font = add(
        b"<< /Type /Font /Subtype /Type0 /BaseFont /X /Encoding /Identity-H /DescendantFonts [%d 0 R] "
        b"/ToUnicode %d 0 R >>" % (descendant, unicode_map)
    )
    kids = []
    for page in pages:
        shown = b"".join(
            b"BT /F 10 Tf 40 %d Td <%s> Tj ET\n"
            % (780 - 14 * number, line.encode("utf-16-be").hex().encode())
            for number, line in enumerate(page)
        )
        content = add(stream(shown))
        kids.append(
            add(
                b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 1200 842] /Contents %d 0 R "
                b"/Resources << /Font << /F %d 0 R >> >> >>" % (content, font)
            )
        )
    told = {"CreationDate": created, "Title": title, "Author": author}
    entries = b"".join(
        b"/%s <feff%s> " % (key.encode(), value.encode("utf-16-be").hex().encode())
        for key, value in told.items()
        if value is not None
    )
    info = add(b"<< %s >>" % entries)
    objects[0] = b"<< /Type /Catalog /Pages 2 0 R >>"
    objects[1] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (
        len(kids),
        b" ".join(b"%d 0 R" % kid for kid in kids),
    )
    trailer = b""
    if encrypted:
        key = add(b"<< /Filter /Standard /V 1 /R 2 /O <%s> /U <%s> /P -44 >>" % (b"ab" * 32, b"cd" * 32))
        trailer = b" /Encrypt %d 0 R /ID [<%s> <%s>]" % (key, b"11" * 16, b"11" * 16)
    out = io.BytesIO()
    out.write(b"%PDF-1.5\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
    table = out.tell()
    out.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    out.write(b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(
        b"trailer\n<< /Size %d /Root 1 0 R /Info %d 0 R%s >>\nstartxref\n%d\n%%%%EOF"
        % (len(objects) + 1, info, trailer, table)
    )
    return out.getvalue()


def word(*, created: datetime | None = None, title: str = "", author: str = "") -> bytes:
    """Return a Word file with headings, a list, a table with a merged cell and both languages."""
    document = docx.Document()
    document.add_heading("Annual leave", level=1)
    document.add_paragraph("Five days may be carried over.")
    document.add_paragraph("until March", style="List Bullet")
    document.add_paragraph("never later", style="List Bullet")
    document.add_heading("差旅住宿标准", level=2)
    document.add_paragraph("一线城市每晚六百元。")
    table = document.add_table(rows=2, cols=3)
    for row, cells in zip(table.rows, (("city", "night", "note"), ("北京", "600", "")), strict=True):
        for cell, text in zip(row.cells, cells, strict=True):
            cell.text = text
    merged = table.rows[1].cells[1].merge(table.rows[1].cells[2])
    merged.text = "600 元"
    properties = document.core_properties
    properties.title, properties.author = title, author
    if created is not None:
        properties.created = created
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


CONTAINER = (
    '<?xml version="1.0"?><container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
    '<rootfiles><rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>'
)


def epub(*, date: str = "2024-05-01", extra: dict[str, str] | None = None, opf_head: str = "") -> bytes:
    """Return a book of two chapters, one in each language, with its contents' page left out of the reading order."""
    package = f"""<?xml version="1.0"?>{opf_head}<package xmlns="http://www.idpf.org/2007/opf" version="3.0">
      <metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>A small book</dc:title><dc:creator>Li Wei</dc:creator>
        <dc:language>zh-CN</dc:language><dc:date>{date}</dc:date>
        <meta property="dcterms:modified">2025-06-01T00:00:00Z</meta></metadata>
      <manifest><item id="n" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
        <item id="a" href="text/a%20b.xhtml" media-type="application/xhtml+xml"/>
        <item id="b" href="text/b.xhtml" media-type="application/xhtml+xml"/></manifest>
      <spine><itemref idref="n" linear="no"/><itemref idref="a"/><itemref idref="b"/></spine></package>"""
    head = '<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title>x</title></head>'
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/book.opf": package,
        "OEBPS/nav.xhtml": f"{head}<body><p>CONTENTS</p></body></html>",
        "OEBPS/text/a b.xhtml": f"{head}<body><h1>One</h1><p>It began.</p></body></html>",
        "OEBPS/text/b.xhtml": f"{head}<body><h1>第二章</h1><p>年假可以结转五天。</p></body></html>",
        **(extra or {}),
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()
