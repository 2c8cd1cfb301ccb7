"""PDF, Word and EPUB read."""

import io
import posixpath
import re
import zipfile
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from app.decoding import decode
from app.errors import UnreadableFile
from app.extracted import Extracted, Json, Limits, language, one_line, put_dates
from app.plainfiles import first_heading
from app.webpages import XML_CHARSET, html_tree, main_text

if TYPE_CHECKING:
    from lxml.etree import _Element


_JUNK_TITLE = re.compile(
    r"(?i)^(?:microsoft \w+ ?-.*|untitled.*|无标题.*|document\d*|.*\.(?:docx?|pdf|tex|dvi|indd|rtf|pptx?|wps))$"
)


def read_pdf(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return a PDF's text, page by page. Raises UnreadableFile if it is broken, encrypted, too long or a scan."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as cause:
        if "password" in str(cause).lower():
            raise UnreadableFile(
                "the PDF is encrypted and needs a password", remedy="save it without one"
            ) from cause
        raise UnreadableFile(f"the PDF is broken: {str(cause)[:200]}", remedy="repair it") from cause
    try:
        count = len(document)
        if count > limits.max_pages:
            raise UnreadableFile(
                f"the PDF has {count} pages, and {limits.max_pages} are read at most",
                remedy="split it, or raise HALFLIFE_FILE_MAX_PAGES",
            )
        pages: list[str] = []
        size = broken = 0
        for number in range(count):
            try:
                page = document[number]
                text = _reflowed(page.get_textpage().get_text_range())
                page.close()
            except pypdfium2.PdfiumError:
                broken += 1
                continue
            size += len(text)
            if size > limits.max_chars:
                raise UnreadableFile(
                    f"the PDF holds more than {limits.max_chars} characters of text", remedy="split it"
                )
            pages.append(text)
        told = document.get_metadata_dict(skip_empty=True)
    finally:
        document.close()
    text = "\n\n".join(page for page in pages if page)
    if not text.strip():
        raise UnreadableFile(
            f"the PDF's {count} pages hold no text: they are pictures, most likely",
            remedy="run text recognition (OCR) over it first",
        )
    warnings = [f"{broken} of {count} pages are broken and were passed over"] if broken else []
    fields: Json = {}
    put_dates(fields, warnings, [_pdf_date(told.get("CreationDate"))], [_pdf_date(told.get("ModDate"))])
    if author := one_line(told.get("Author")):
        fields["author"] = author[:1024]
    title = one_line(told.get("Title"))
    if title and _JUNK_TITLE.match(title):
        title = None
    return Extracted(
        "pdf", text=text, title=title, fields=fields, metadata={"pages": count}, warnings=warnings
    )


_WIDE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WIDE_END = re.compile(rf"[{_WIDE}，、；：]$")
_WIDE_BEGIN = re.compile(rf"^[{_WIDE}，、。；：！？）》」]")


def _reflowed(text: str) -> str:
    """Return a page's text with hyphens at line ends joined, and lines of Chinese and Japanese that go on.

    A line that is nearly as long as the page's longest goes on; a shorter one ends a paragraph or is a heading.
    """
    text = re.sub(r"[\ufffe\x02\u00ad]\r?\n?", "", text.replace("\0", ""))
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    longest = max((len(line) for line in lines), default=0)
    joined: list[str] = []
    full = False
    for line in lines:
        begins = line.lstrip()
        if joined and full and _WIDE_END.search(joined[-1]) and _WIDE_BEGIN.match(begins):
            joined[-1] += begins
        else:
            joined.append(line)
        full = longest >= 12 and len(line) >= 0.8 * longest
    return "\n".join(joined).strip("\n")


def _pdf_date(value: Any) -> str | None:
    """Return a PDF's date (`D:20250301080000+08'00'`) in ISO 8601; None if it is none."""
    match = re.match(
        r"\s*(?:D:)?(\d{4})(\d\d)?(\d\d)?(\d\d)?(\d\d)?(\d\d)?\s*(?:(Z)|([+-])(\d\d)'?(\d\d)?)?",
        str(value or ""),
    )
    if match is None:
        return None
    year, month, day, hour, minute, second, _, sign, hours, minutes = match.groups()
    zone = f"{sign}{hours}:{minutes or '00'}" if sign else "Z"
    return f"{year}-{month or '01'}-{day or '01'}T{hour or '00'}:{minute or '00'}:{second or '00'}{zone}"


def _open_zip(data: bytes, limits: Limits) -> zipfile.ZipFile:
    """Return the archive. Raises UnreadableFile for one that would unpack to more than the limit, or is encrypted."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    entries = archive.infolist()
    # zipfile never reads more of an entry than it declares.
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limits.max_unpacked_bytes or len(entries) > 20_000:
        raise UnreadableFile(
            f"the file would unpack to {unpacked} bytes in {len(entries)} parts, and {limits.max_unpacked_bytes} "
            "in 20000 are read at most",
            remedy="split it, or raise HALFLIFE_FILE_MAX_UNPACKED_BYTES",
        )
    if any(entry.flag_bits & 1 for entry in entries):
        raise UnreadableFile("the file is encrypted", remedy="save it without a password")
    return archive


def read_docx(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return a Word document's text as Markdown, tables and headings kept, and its properties."""
    import docx
    from docx.table import Table
    from lxml import etree

    with _open_zip(data, limits) as archive:
        has_properties = "docProps/core.xml" in archive.namelist()
    try:
        document = docx.Document(io.BytesIO(data))
        blocks: list[str] = []
        size = 0
        for block in document.iter_inner_content():
            text = _table(block) if isinstance(block, Table) else _paragraph(block)
            size += len(text)
            if size > limits.max_chars:
                raise UnreadableFile(
                    f"the file holds more than {limits.max_chars} characters of text", remedy="split it"
                )
            blocks.append(text)
        fields: Json = {}
        warnings: list[str] = []
        title = None
        if has_properties:
            told = document.core_properties
            put_dates(fields, warnings, [told.created], [told.modified])
            title = one_line(told.title)
            if author := one_line(told.author):
                fields["author"] = author[:1024]
            if lang := language(told.language):
                fields["lang"] = lang
    except UnreadableFile:
        raise
    except (
        KeyError,
        ValueError,
        AttributeError,
        IndexError,
        etree.LxmlError,
        docx.exceptions.PythonDocxError,
    ) as cause:
        raise UnreadableFile(f"the Word file is broken: {str(cause)[:200]}", remedy="repair it") from cause
    text = "\n\n".join(block for block in blocks if block.strip())
    text = re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", text)
    if title is None or title == "Word Document":
        title = first_heading(text)
    return Extracted("docx", text=text, title=title, fields=fields, warnings=warnings)


def _paragraph(paragraph: Any) -> str:
    text = str(paragraph.text).strip("\n")
    style = str(getattr(paragraph.style, "name", "") or "")
    if not text.strip():
        return ""
    if match := re.match(r"(?i)heading (\d)", style):
        return f"{'#' * min(6, int(match[1]))} {' '.join(text.split())}"
    if style == "Title":
        return f"# {' '.join(text.split())}"
    properties = paragraph._p.pPr
    if style.startswith("List") or (properties is not None and properties.numPr is not None):
        return f"- {text}"
    return text


def _table(table: Any) -> str:
    lines: list[str] = []
    for row in table.rows:
        cells: list[str] = []
        last = None
        for cell in row.cells:
            # A merged cell comes once for each place that it takes.
            if cell._tc is not last:
                cells.append(" ".join(cell.text.split()).replace("|", "\\|"))
            last = cell._tc
        lines.append(f"| {' | '.join(cells)} |")
        if len(lines) == 1:
            lines.append(f"|{' --- |' * len(cells)}")
    return "\n".join(lines)


_DC = "{http://purl.org/dc/elements/1.1/}"
_OPF = "{http://www.idpf.org/2007/opf}"
_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


def read_epub(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return a book's chapters in their order as Markdown, and its properties."""
    from lxml import etree

    with _open_zip(data, limits) as archive:
        names = set(archive.namelist())

        def tree(path: str) -> "_Element":
            parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
            try:
                return etree.fromstring(archive.read(path), parser)
            except (KeyError, etree.XMLSyntaxError) as cause:
                raise UnreadableFile(
                    f"the EPUB's {path} is missing or broken: {str(cause)[:200]}", remedy="repair it"
                ) from cause

        if "META-INF/encryption.xml" in names:
            methods = [
                node.get("Algorithm") for node in tree("META-INF/encryption.xml").iter("{*}EncryptionMethod")
            ]
            if any(method not in _FONTS for method in methods):
                raise UnreadableFile("the EPUB is protected (DRM)", remedy="send one without protection")
        package_path = next(
            (node.get("full-path") for node in tree("META-INF/container.xml").iter("{*}rootfile")), None
        )
        if not package_path:
            raise UnreadableFile("the EPUB names no package document", remedy="repair it")
        package = tree(package_path)
        manifest = {
            node.get("id"): (node.get("href") or "", node.get("media-type") or "")
            for node in package.iter("{*}item")
        }
        parts: list[str] = []
        warnings: list[str] = []
        size = 0
        for reference in package.iter("{*}itemref"):
            href, media = manifest.get(reference.get("idref"), ("", ""))
            if reference.get("linear") == "no" or "html" not in media:
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(package_path), unquote(href)))
            if path not in names:
                warnings.append(f"its part {path[:200]} is missing")
                continue
            declared = XML_CHARSET.search(raw[:200]) if (raw := archive.read(path)) else None
            text, _ = decode(raw, declared=declared[1].decode() if declared else None) if raw else ("", None)
            part = main_text(html_tree(text)) if text.strip() else ""
            size += len(part)
            if size > limits.max_chars:
                raise UnreadableFile(
                    f"the EPUB holds more than {limits.max_chars} characters of text", remedy="split it"
                )
            if part:
                parts.append(part)
    fields: Json = {}
    dates = list(package.iter(f"{_DC}date"))
    # The second edition tells what a date is of; the third has only one.
    dates.sort(key=lambda node: {"publication": 0, None: 1, "creation": 2}.get(node.get(f"{_OPF}event"), 3))
    born = [node.text for node in dates if node.get(f"{_OPF}event") != "modification"]
    changed = [node.text for node in package.iter("{*}meta") if node.get("property") == "dcterms:modified"]
    put_dates(fields, warnings, born, changed)
    if author := one_line(next((node.text for node in package.iter(f"{_DC}creator")), None)):
        fields["author"] = author[:1024]
    if lang := language(next((node.text for node in package.iter(f"{_DC}language")), None)):
        fields["lang"] = lang
    title = one_line(next((node.text for node in package.iter(f"{_DC}title")), None))
    if not parts:
        raise UnreadableFile("the EPUB holds no text", remedy="send one that says something")
    return Extracted(
        "epub",
        text="\n\n".join(parts),
        title=title,
        fields=fields,
        metadata={"parts": len(parts)},
        warnings=warnings,
    )
