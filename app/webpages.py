"""HTML read: its main text as Markdown, its title, language, author and dates."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from app.decoding import decode
from app.errors import UnreadableFile
from app.extracted import Extracted, Json, Limits, guessed, language, one_line, put_dates

if TYPE_CHECKING:
    from lxml.etree import _Element


_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{2,40})", re.IGNORECASE)
XML_CHARSET = re.compile(rb"<\?xml[^>]{0,100}?encoding\s*=\s*[\"']([A-Za-z0-9_.:-]{2,40})", re.IGNORECASE)
_NO_TEXT = (
    "script",
    "style",
    "noscript",
    "template",
    "nav",
    "svg",
    "form",
    "iframe",
    "object",
    "button",
    "select",
)
# Around the main text only: a header or footer of an article is its own.
_AROUND = ("aside", "footer", "header")
_DROPPED = "halflife-dropped"
_BORN = (
    "article:published_time", "og:article:published_time", "datepublished", "dc.date.issued", "dcterms.issued",
    "dcterms.created", "dc.date.created", "citation_publication_date", "citation_date", "publishdate", "publish_date",
    "publish-date", "pubdate", "date", "dc.date", "dcterms.date",
)  # fmt: skip
_CHANGED = (
    "article:modified_time",
    "og:updated_time",
    "datemodified",
    "dcterms.modified",
    "last-modified",
    "revised",
)


def read_html(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return a page's main text as Markdown, its title, author, language and dates."""
    declared = _META_CHARSET.search(data[:4096]) or XML_CHARSET.search(data[:200])
    text, encoding = decode(data, declared=declared[1].decode() if declared else None)
    if not text.strip():
        return Extracted("html")
    root = html_tree(text)
    meta = _meta_of(root)
    linked = list(_json_ld(root))
    title = meta.get("og:title") or _first_text(root, ".//title") or _first_text(root, ".//h1")
    fields: Json = {}
    warnings = guessed(encoding)
    born = [meta.get(key) for key in _BORN[:2]] + [item.get("datePublished") for item in linked]
    born += [meta.get(key) for key in _BORN[2:]] + [item.get("dateCreated") for item in linked]
    born += [element.get("datetime") for element in root.iter("time") if element.get("datetime")][:1]
    changed = [meta.get(key) for key in _CHANGED] + [item.get("dateModified") for item in linked]
    put_dates(fields, warnings, born, changed)
    author = (
        meta.get("author")
        or meta.get("article:author")
        or next((a for item in linked if (a := _author(item))), None)
    )
    if author:
        fields["author"] = author[:1024]
    if lang := language(root.get("lang") or root.get("{http://www.w3.org/XML/1998/namespace}lang")):
        fields["lang"] = lang
    for link in root.iter("link"):
        if "canonical" in (link.get("rel") or "").lower().split() and (
            href := (link.get("href") or "").strip()
        ):
            if len(href) <= 1024 and "://" in href:
                fields["url"] = href
            break
    return Extracted("html", text=main_text(root), title=one_line(title), fields=fields, warnings=warnings)


def html_tree(text: str) -> "_Element":
    """Return the root of a page, whatever is wrong with it. Raises UnreadableFile where nothing is there."""
    from lxml import etree, html

    # As bytes with their encoding told: text that declares another one would be refused.
    parser = html.HTMLParser(
        encoding="utf-8", no_network=True, huge_tree=False, remove_comments=True, remove_pis=True
    )
    try:
        root = html.document_fromstring(text.encode("utf-8", "replace"), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError) as cause:
        raise UnreadableFile(f"the HTML can't be read: {str(cause)[:200]}", remedy="repair it") from cause
    assert isinstance(root, etree._Element)
    return root


def _meta_of(root: "_Element") -> dict[str, str]:
    found: dict[str, str] = {}
    for element in root.iter("meta"):
        content = (element.get("content") or "").strip()
        for attribute in ("property", "name", "itemprop", "http-equiv"):
            key = (element.get(attribute) or "").strip().lower()
            if key and content:
                found.setdefault(key, content)
    for element in root.iter():
        if isinstance(element.tag, str) and element.tag != "meta":
            key = (element.get("itemprop") or "").lower()
            if key in ("datepublished", "datemodified") and (
                value := element.get("datetime") or element.get("content")
            ):
                found.setdefault(key, value.strip())
    return found


def _json_ld(root: "_Element") -> Iterator[Json]:
    """Yield the objects of the page's JSON-LD blocks that carry a date or an author."""
    for element in root.iter("script"):
        if (element.get("type") or "").lower() != "application/ld+json" or not element.text:
            continue
        try:
            value = json.loads(element.text)
        except (ValueError, RecursionError):
            continue
        waiting = [value]
        looked = 0
        while waiting and looked < 500:
            node = waiting.pop(0)
            looked += 1
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                if node.keys() & {"datePublished", "dateCreated", "dateModified"}:
                    yield node
                waiting += [
                    inner
                    for key, inner in node.items()
                    if key in ("@graph", "mainEntity", "mainEntityOfPage")
                ]


def _author(item: Json) -> str | None:
    value = item.get("author")
    value = value[0] if isinstance(value, list) and value else value
    value = value.get("name") if isinstance(value, dict) else value
    return value.strip() or None if isinstance(value, str) else None


def main_text(root: "_Element") -> str:
    """Return the main text as Markdown: what stands in the one `main` or `article`, else in the body without its frame."""
    import markdownify
    from lxml import etree

    _drop(root, list(root.iter(*_NO_TEXT)))
    hidden = [
        node for node in root.iter() if node.get("hidden") is not None or node.get("aria-hidden") == "true"
    ]
    _drop(root, [node for node in hidden if node.tag not in ("html", "body", "main", "article")])
    mains = [*root.iter("main"), *root.xpath(".//*[@role='main' and not(self::main)]")]
    articles = list(root.iter("article"))
    part = mains[0] if len(mains) == 1 else articles[0] if len(articles) == 1 else None
    if part is None or not "".join(part.itertext()).strip():
        part = next(iter(root.iter("body")), root)
        around = [
            node
            for node in root.iter(*_AROUND)
            if not any(True for _ in node.iterancestors("article", "main"))
        ]
        _drop(root, around)
    source = etree.tostring(part, encoding="unicode", method="html", with_tail=False)
    content = markdownify.markdownify(
        source,
        heading_style="ATX",
        bullets="-",
        # Addresses and emphasis are noise to a reader of passages and to what embeds them.
        strip=["a", "img", "b", "strong", "em", "i"],
        escape_asterisks=False,
        escape_underscores=False,
        bs4_options="lxml",
    )
    return _tidied(content)


def _drop(root: "_Element", elements: Iterable["_Element"]) -> None:
    """Take the elements out, leaving the text behind each where it is; all at once, or that text is copied each time."""
    from lxml import etree

    for element in elements:
        element.tag = _DROPPED
    etree.strip_elements(root, _DROPPED, with_tail=False)


def _tidied(text: str) -> str:
    lines = [line.rstrip() for line in text.replace("\u00a0", " ").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _first_text(root: "_Element", path: str) -> str | None:
    element = root.find(path)
    return None if element is None else "".join(element.itertext())
