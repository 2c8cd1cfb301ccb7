"""The encoding of a text file, found out where it is not told."""

from typing import Final

from app.errors import UnreadableFile

_BOMS: Final = (
    (b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe\x00\x00", "utf-32-le"), (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"),
)  # fmt: skip
_CANDIDATES: Final = (
    "gb18030", "big5hkscs", "shift_jis", "euc_jp", "euc_kr", "cp1252", "cp1251", "koi8_r",
)  # fmt: skip
_SAMPLE: Final = 65_536


def decode(data: bytes, *, declared: str | None = None) -> tuple[str, str | None]:
    r"""Return the text and, where its encoding had to be guessed, which one was taken.

    In this order: its byte order mark, UTF-8, what the file itself declares, UTF-16 by its zero bytes, the likeliest.
    Line breaks come out as `\n`. Raises UnreadableFile for what is no text.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return _clean(_decoded(data[len(mark) :], encoding)), None
    try:
        return _clean(data.decode("utf-8")), None
    except UnicodeDecodeError:
        pass
    zeros = data[:_SAMPLE].count(0)
    if zeros:
        even, odd = data[:_SAMPLE:2].count(0), data[1:_SAMPLE:2].count(0)
        if max(even, odd) > 4 * min(even, odd) and zeros * 20 > len(data[:_SAMPLE]):
            encoding = "utf-16-le" if odd > even else "utf-16-be"
            return _clean(_decoded(data, encoding)), encoding
        raise UnreadableFile(
            "the file is no text: it holds NUL bytes", remedy="send it in a format that is read"
        )
    if declared is not None:
        try:
            return _clean(data.decode("gb18030" if declared.lower() in ("gb2312", "gbk") else declared)), None
        except (LookupError, UnicodeDecodeError):
            pass
    encoding = _likeliest(data)
    return _clean(data.decode(encoding, "replace")), encoding


def encoding_of(head: bytes, *, whole: bool) -> tuple[str, bool]:
    """Return the encoding of a text whose beginning this is, by Python's name, and whether it had to be guessed.

    `whole`: there is no more. Found out as `decode` does, but where some lines are UTF-8 and others are not, the more count:
    so one damaged line changes how no other is read. Raises UnreadableFile for what is no text in any of them.
    """
    for mark, encoding in _BOMS:
        if head.startswith(mark):
            # Python's names of those that take the mark away.
            return {"utf-8": "utf-8-sig"}.get(encoding, encoding[:6]), False
    if not whole and (end := head.rfind(b"\n")) > 0:
        head = head[: end + 1]
    if 0 in head[:_SAMPLE]:
        try:
            found = decode(head[: len(head) // 2 * 2])[1]
        except UnreadableFile:
            found = None  # no UTF-16: UTF-8 with NULs, which is told where it is read
        return found or "utf-8", found is not None
    good = bad = 0
    for line in head.split(b"\n"):
        if not line.isascii():
            try:
                line.decode("utf-8")
                good += 1
            except UnicodeDecodeError:
                bad += 1
    return (_likeliest(head), True) if bad > good else ("utf-8", False)


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as cause:
        raise UnreadableFile(
            f"the file begins as {encoding} text and is not: {cause.reason} at byte {cause.start}",
            remedy="save it as UTF-8",
        ) from cause


def _likeliest(data: bytes) -> str:
    from charset_normalizer import from_bytes

    # Cut where a character surely begins: after a line break, if there is one.
    sample = data[:_SAMPLE]
    if len(data) > _SAMPLE and (end := sample.rfind(b"\n")) > 0:
        sample = sample[: end + 1]
    if _is_chinese(sample, whole=len(data) <= _SAMPLE):
        return "gb18030"
    best = from_bytes(sample, cp_isolation=list(_CANDIDATES)).best()
    if best is None:
        raise UnreadableFile("the file is no text in any encoding known here", remedy="save it as UTF-8")
    return str(best.encoding)


def _is_chinese(sample: bytes, *, whole: bool) -> bool:
    """Tell whether this is Chinese in GB 2312's rows, which short texts give statistics too little to tell by.

    Its punctuation stands in rows 0xA1 to 0xA3, its common characters in 0xB0 to 0xD7, those of Korean in 0xB0 to 0xC8
    alone; Japanese uses kana, and most of Big5 has second bytes that are none here.
    """
    try:
        text = sample.decode("gb18030", "strict" if whole else "ignore")
    except UnicodeDecodeError:
        return False
    wide = [character.encode("gb18030") for character in text[:4_000] if ord(character) > 0x7F]
    common = [pair for pair in wide if len(pair) == 2 and pair[1] >= 0xA1 and 0xB0 <= pair[0] <= 0xD7]
    marks = [pair for pair in wide if len(pair) == 2 and pair[1] >= 0xA1 and 0xA1 <= pair[0] <= 0xA3]
    return len(common) + len(marks) >= 0.98 * len(wide) and any(pair[0] > 0xC8 for pair in common)


def _clean(text: str) -> str:
    if "\0" in text:
        raise UnreadableFile(
            "the file is no text: it holds NUL characters", remedy="send it in a format that is read"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
