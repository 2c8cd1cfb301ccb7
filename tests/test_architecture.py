"""The rooms: which module may import which, read from the source text; nothing is imported to be judged.

`ROOMS` is the map of the product. A module that is not on it fails: a new room needs a line here, with its reason.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """Modules that stand side by side: each may import every row below, and none beside or above it."""

    name: str
    rooms: dict[str, str]
    # No clock, no chance, no world: everything comes in as an argument. Such a room sees no door either.
    pure: bool = False


# Top to bottom.
ROOMS = (
    Row("wiring", {"main": "the factory and the lifespan: opens every client, hands it down"}),
    Row(
        "endpoints",
        {
            "api_search": "search, why and votes: parse, call, return",
            "api_documents": "documents and files: parse, call, return",
            "api_collections": "collections and synonyms: parse, call, return",
        },
    ),
    Row(
        "edge",
        {
            "api": "HTTP: what every endpoint shares; the one place where failures become answers",
            "edge": "what a request meets before it is read: keys, rates, bounds on size and load",
            "keyfile": "the file that keys are kept in, read again when it changes",
            "metering": "what is measured of every request, refused ones too",
            "openapi": "the published schema: what FastAPI cannot derive by itself",
            "logs": "how log lines look",
            "settings": "the environment, read once; nothing below knows that there is one",
        },
    ),
    # These run other use cases, so they stand above them.
    Row(
        "use cases over others",
        {
            "files": "an upload of files: read, made into documents, stored",
            "feedback": "votes on logged searches: stored, read into ratings, exported as judgements",
            "why": "what kept one document from standing higher: a search, then each route asked about it",
        },
    ),
    Row(
        "use cases",
        {
            "search": "what a search does, in order",
            "indexing": "what an upsert and a delete do, in order",
            "touches": "reads that refresh a memory: collected, written in the background",
            "targets": "where a collection's writes go: joins the catalog to the write protocol",
            "reindex": "a collection's move to another index while it is read and written",
            "adoption": "an index that somebody else made, brought into a collection",
            "transfer": "a collection out to lines of JSON and back in",
            "searchlog": "what was asked and shown, kept for a while and found again",
            "purge": "old tombstones and expired documents, really removed",
            "watching": "what operators are told: readiness of each dependency, counts",
        },
    ),
    # Below `search`, which has its answer by then, and above the words that it finds for it.
    Row(
        "hints",
        {
            "hints": "what is asked once an answer is made: other spellings, what may be wrong where nothing is found",
            # Between recall and the stages: `why` measures as a search does.
            "measuring": "what lists don't tell of their candidates: relevance of each, salience, recency",
        },
    ),
    # Below the use case that says when, above the steps and copies that it takes.
    Row(
        "lanes",
        {"lanes": "documents of one index brought into another of another shape, and the two compared"},
    ),
    # Between them: it reads what the steps made, and is read by the use case that explains.
    Row(
        "words",
        {
            "advice": "what one document's figures mean, in sentences, and what would lift it",
            "caveats": "what a whole answer warns of: options that did nothing, what may be wrong where nothing was found",
        },
    ),
    # Above the other steps: keys are declared behind the fence of `moves`.
    Row(
        "collections",
        {"catalog": "collections: templates, creation, checks, deletion; every use case starts from one"},
    ),
    # Below the use cases, which share them: paging, batches, `why` and every kind of write go through the same steps.
    Row(
        "steps",
        {
            "recall": "what a search asks the cluster, before anything is fused",
            "stages": "what happens to candidates after recall, in order",
            "moves": "aliases, fence and swap of a collection that changes its index",
            "writes": "versions and targets: how a document is written so that none that was acknowledged is lost",
        },
    ),
    # Below the steps: exchanging an index and every kind of transfer read and write in bulk the same patient way.
    Row(
        "copies",
        {
            "copying": "many documents out of an index and into one, through passing troubles",
            # Below both who need it: the catalog changes a collection's `_meta`, a reindex carries it over.
            "turns": "one writer at a time, where the cluster has no version to guard a change with",
        },
    ),
    # Parsers of strangers' files: a door to several vendors, but one that speaks to no server. It stands above the
    # others because its parts need each other: processes run the parsers, drafts are made of what they say.
    Row(
        "files in processes", {"sandbox": "files read in processes of their own, bounded in time and memory"}
    ),
    Row(
        "files into documents",
        {"drafts": "what files say, made into documents as upserts take them"},
        pure=True,
    ),
    Row("files", {"extracting": "bytes to text, title, dates: which format, and its reader"}),
    Row("bound formats", {"officefiles": "PDF, Word, EPUB: the only importer of their parsers"}),
    # Below them: an EPUB's chapters are web pages.
    Row(
        "formats",
        {
            "webpages": "the only importer of the HTML parser",
            "plainfiles": "text, Markdown, tables and JSON Lines",
        },
    ),
    Row("encodings", {"decoding": "a text file's encoding"}),
    Row("what files say", {"extracted": "what every reader tells, its dates read one way"}, pure=True),
    # Above the pure rooms, not beside them: it puts their parts together, for asking and for explaining alike.
    Row(
        "plans",
        {
            "planning": "one request into all that the cluster is asked, its answers into candidates",
            "recency": "how much time shall matter for one query: what it says and what was found, into one decision",
            "bulks": "the order and the fates of a bulk's items",
            # With the plans, since both read filters: a key's is checked where the key is read.
            "keys": "bearer keys: parsed, found by their hash, and what each allows",
            "limits": "what one request may cost and how often a caller may ask",
        },
        pure=True,
    ),
    Row(
        "pure",
        {
            "queries": "request bodies out of requests",
            "decay": "the arithmetic of age and its function_score",
            "filters": "the filter language and its translation",
            "spelling": "the suggester's words, counted within filters and made into queries",
            # Apart from `queries`, which writes bodies: this reads rules and texts, and knows no field.
            "synonyms": "a collection's synonyms, found in a query and made into other wordings of it",
            "ratings": "votes on hits made one bounded factor per document",
            "fusion": "ranks and scores of several routes made one order",
            "intent": "what a query says about time",
            "supersession": "which candidates say the same thing",
            "diversity": "near-duplicates and MMR over vectors",
            "cursor": "the sealed page token",
            "experiments": "which arm of an experiment a search belongs to",
            "chunking": "a document's text cut into what is embedded",
            "documents": "a document's shape in the index, written and read back",
        },
        pure=True,
    ),
    Row(
        "doors",
        {
            "elastic": "the only importer of the Elasticsearch client; translates its errors once",
            "embedding": "the only importer of openai; vectors checked before anyone sees them",
            "reranking": "the only speaker of the rerank HTTP forms",
            # Not in `embedding`, which reads vectors: another server, model, key and answer.
            "rewriting": "the only speaker of chat completions: a query's keywords, expansions, other wordings",
        },
    ),
    # Below the doors, which share them: what every dependency's calls pass, and where everything that is measured is named.
    Row(
        "dialling",
        {"dialling": "a far end's address and client, opened one way for every door that speaks HTTP itself"},
    ),
    # Below the door, not part of it: these know what Elasticsearch says, and nothing of the client that brings it.
    Row(
        "beside the doors",
        {
            "outcomes": "what Elasticsearch's errors and a bulk's items mean",
            "encoding": "documents and vectors as Elasticsearch takes and gives them",
            "points": "which points in time are open, for whom and how long",
        },
        pure=True,
    ),
    Row("guards", {"guarding": "one dependency's pool, breaker and retry budget"}),
    Row(
        "measures", {"observing": "metrics, spans and the request's id: the only importer of their libraries"}
    ),
    Row("answers", {"answers": "what callers get"}, pure=True),
    Row(
        "requests",
        {
            "asking": "what callers ask: searches, why, votes",
            "writing": "what callers write: documents, changes, deletions, files",
            "collection": "a collection's options, and what is told of it",
        },
        pure=True,
    ),
    # Below the requests: a search and a collection's profile both say how to rank.
    Row(
        "ranking",
        {"ranking": "decay, routes, fusion and the stages after it, as they are asked for"},
        pure=True,
    ),
    Row(
        "values", {"values": "what every request and answer is made of, checked where it is read"}, pure=True
    ),
    # Below the values: their own checks speak by it, and it knows none of them by name.
    Row(
        "wording",
        {"refusals": "what a refused value is told: its field, what is wrong and the remedy"},
        pure=True,
    ),
    Row(
        # Below the values, not beside them: values are written in these words, and these import nothing of ours.
        "words",
        {
            "addresses": "what a host's name tells",
            "breaker": "when to leave a dependency alone, and how often to ask it again",
            "errors": "the failures that callers are told about",
            "fields": "the names of the indexed fields, each written once",
            "names": "the names of indices, aliases and ids, and what they may consist of",
            "times": "instants and durations, parsed and printed; no clock",
            "vocabulary": "English words that hold a sentence together, each written once",
        },
        pure=True,
    ),
)

ROW_OF = {room: number for number, row in enumerate(ROOMS) for room in row.rooms}

# Outside packages that only some rooms may import. Everything not named here is free.
DOORS = {
    "elasticsearch": {"elastic"},
    "elastic_transport": {"elastic"},
    "openai": {"embedding"},
    # openai takes an httpx2 client for its timeouts and transport, so that door needs both.
    "httpx2": {"embedding", "reranking", "rewriting", "dialling"},
    "fastapi": {"main", "api_search", "api_documents", "api_collections", "api", "edge", "openapi"},
    "starlette": {"main", "api_documents", "api", "edge", "openapi"},
    "uvicorn": {"main"},
    "pydantic_settings": {"settings"},
    "lxml": {"webpages", "officefiles"},
    "docx": {"officefiles"},
    "pypdfium2": {"officefiles"},
    "markdownify": {"webpages"},
    "charset_normalizer": {"decoding"},
    "prometheus_client": {"observing"},
    "opentelemetry": {"observing"},
    "pythonjsonlogger": {"logs"},
    # A second HTTP stack, or a client of ours past the doors, belongs nowhere.
    "httpx": set(),
    "requests": set(),
    "aiohttp": set(),
    "urllib3": set(),
}

# What a pure module must not import: clocks, chance, concurrency, the network, files, the environment, processes.
IMPURE = frozenset(DOORS) | {
    "aiofiles",
    "asyncio",
    "concurrent",
    "http",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "sched",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
}
# Calls that read a clock through an innocent module.
CLOCK_CALLS = frozenset({"now", "utcnow", "today"})

# Vendors that the command lines reach through the doors of `app`, never by themselves.
BANNED_IN_SCRIPTS = frozenset(
    {"elasticsearch", "elastic_transport", "openai", "httpx", "requests", "aiohttp"}
)


# What a script measures us against.
MEASURED = {"bench_load": {"elasticsearch"}}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that a source imports, wherever in it, with the line; `from app import x` counts as `app.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), node.lineno
            elif node.module in ("app", "scripts", "es_mappings"):
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", node.lineno
            else:
                yield node.module or "", node.lineno


def calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The last name of everything that a source calls, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr, node.lineno
            elif isinstance(node.func, ast.Name):
                yield node.func.id, node.lineno


def reads_environment(tree: ast.AST) -> Iterator[int]:
    """Lines that touch `os.environ` or `os.getenv`, however it was imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (
                node.lineno for alias in node.names if alias.name in {"environ", "environb", "getenv"}
            )


def faults_of_room(room: str, source: str) -> list[str]:
    """Say what a module of `app` does that its place forbids; an empty list when nothing."""
    if room not in ROW_OF:
        return [f"app/{room}.py stands on no row of ROOMS: give it one, with its reason"]
    number = ROW_OF[room]
    row = ROOMS[number]
    tree = ast.parse(source)
    found = []
    for module, line in imports(tree):
        top, _, rest = module.partition(".")
        if not top:
            found.append(f"{line}: relative import; write app.<module>")
        elif top in {"scripts", "tests"}:
            found.append(f"{line}: imports {module}; app stands below {top}")
        elif top == "app":
            target = rest.partition(".")[0]
            if target not in ROW_OF:
                found.append(f"{line}: imports {module}, which stands on no row")
            elif target == room:
                found.append(f"{line}: imports itself")
            elif ROW_OF[target] < number:
                found.append(f"{line}: imports {module} from above")
            elif ROW_OF[target] == number:
                found.append(f"{line}: imports {module} from its own row")
            elif row.pure and ROOMS[ROW_OF[target]].name in {"doors", "guards", "measures"}:
                found.append(f"{line}: imports {module}; a pure room sees no doors")
        elif top in DOORS and room not in DOORS[top]:
            found.append(
                f"{line}: imports {module}, whose door is {' or '.join(sorted(DOORS[top])) or 'nowhere'}"
            )
        elif row.pure and top in IMPURE:
            found.append(f"{line}: imports {module}; a pure room has no clock, no chance and no world")
        elif top == "importlib" and module not in {"importlib.resources", "importlib.metadata"}:
            found.append(f"{line}: imports {module}; an import by name would pass these rules by")
    for name, line in calls(tree):
        if row.pure and name in CLOCK_CALLS:
            found.append(f"{line}: calls {name}(); a pure room is handed its origin")
        elif name == "__import__":
            found.append(f"{line}: calls __import__; an import by name would pass these rules by")
    if room != "settings":
        found += [f"{line}: reads the environment; only settings does" for line in reads_environment(tree)]
    return found


def faults_of_script(name: str, source: str) -> list[str]:
    """Say what a module of `scripts` does that it must not; an empty list when nothing."""
    found = []
    for module, line in imports(ast.parse(source)):
        top = module.partition(".")[0]
        if not top:
            found.append(f"{line}: relative import; write scripts.<module>")
        elif top in BANNED_IN_SCRIPTS - MEASURED.get(name, set()):
            found.append(f"{line}: imports {module}; go through the door in app")
        elif top == "tests":
            found.append(f"{line}: imports {module}; scripts stand below tests")
        elif name == "bootstrap" and top not in sys.stdlib_module_names:
            found.append(f"{line}: imports {module}; nothing is installed yet when bootstrap runs")
    return found


def modules(folder: str) -> Sequence[Path]:
    """All Python sources below a folder of the project."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def test_the_rooms_are_flat() -> None:
    nested = [path for path in modules("app") if path.parent != ROOT / "app"]
    assert nested == [], "app holds flat modules; a folder in it hides rooms from the map"


def test_no_room_stands_twice() -> None:
    named = [room for row in ROOMS for room in row.rooms]
    assert sorted(named) == sorted(set(named))


def test_every_room_is_there() -> None:
    gone = [room for row in ROOMS for room in row.rooms if not (ROOT / "app" / f"{room}.py").is_file()]
    assert gone == [], "the map names rooms that were never built, or are gone: take them off"


def test_the_package_itself_holds_no_code() -> None:
    for package in ("app", "es_mappings", "scripts"):
        body = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
        assert all(isinstance(node, ast.Expr) for node in body), (
            f"{package}/__init__.py is a docstring, no room"
        )


@pytest.mark.parametrize("path", modules("app"), ids=lambda path: str(path.relative_to(ROOT)))
def test_room_keeps_to_its_place(path: Path) -> None:
    if path.stem == "__init__":
        return
    assert faults_of_room(path.stem, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", modules("scripts"), ids=lambda path: str(path.relative_to(ROOT)))
def test_script_goes_through_the_doors(path: Path) -> None:
    assert faults_of_script(path.stem, path.read_text(encoding="utf-8")) == []


# The rules themselves: each of these must be caught, or be allowed.
CAUGHT = {
    "unknown room": ("helpers", "import math", "no row"),
    "upwards": ("queries", "from app.search import run", "from above"),
    "upwards by module": ("elastic", "from app import queries", "from above"),
    "upwards, plain import": ("values", "import app.api", "from above"),
    "own row": ("queries", "from app.decay import factor", "own row"),
    "own row, at the edge": ("api", "from app import settings", "own row"),
    "itself": ("fusion", "import app.fusion", "itself"),
    "plan made by its parts": ("queries", "from app.planning import plan", "from above"),
    "plan sees a door": ("planning", "from app import elastic", "sees no doors"),
    "pure sees a door": ("queries", "from app.elastic import Cluster", "sees no doors"),
    "search reads settings": ("search", "from app.settings import Settings", "from above"),
    "inside a function": ("queries", "def f():\n    from app.elastic import Cluster", "sees no doors"),
    "for types only": (
        "queries",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import elasticsearch",
        "whose door is elastic",
    ),
    "a room not on the map": ("search", "from app.helpers import f", "no row"),
    "relative": ("search", "from . import queries", "relative"),
    "scripts": ("main", "from scripts.node import Node", "below scripts"),
    "cluster client past its door": (
        "indexing",
        "from elasticsearch.helpers import async_bulk",
        "door is elastic",
    ),
    "openai past its door": ("search", "import openai", "door is embedding"),
    "rerank HTTP past its door": ("search", "import httpx2", "door is dialling or embedding"),
    "old HTTP stack": ("reranking", "import httpx", "nowhere"),
    "web framework below the edge": ("search", "from fastapi import HTTPException", "door is api"),
    "clock in pure": ("decay", "import time", "no clock"),
    "chance in pure": ("fusion", "from random import random", "no clock"),
    "event loop in pure": ("filters", "import asyncio", "no clock"),
    "network in pure": ("cursor", "import urllib.request", "no clock"),
    "now in pure": ("decay", "from datetime import UTC, datetime\nx = datetime.now(UTC)", "calls now()"),
    "today in words": ("times", "from datetime import date\nx = date.today()", "calls today()"),
    "environment in a use case": ("search", "import os\nx = os.environ['A']", "only settings"),
    "environment by name": ("main", "from os import getenv", "only settings"),
    "import by name": ("search", "import importlib", "pass these rules by"),
    "import by builtin": ("search", "__import__('app.settings')", "pass these rules by"),
}

ALLOWED = {
    "downwards": (
        "search",
        "from app.queries import body\nfrom app import elastic, answers\nfrom app.errors import E",
    ),
    "past a row": ("main", "from app import errors"),
    "door to values": ("elastic", "import elasticsearch\nfrom app.answers import Hit"),
    "pure to values": (
        "queries",
        "import math\nfrom app.ranking import Route\nfrom datetime import datetime",
    ),
    "settings read the environment": (
        "settings",
        "import os\nx = os.environ\nfrom pydantic_settings import BaseSettings",
    ),
    "files of a package": ("search", "from importlib.resources import files"),
    "clock in a use case": (
        "search",
        "import time\nfrom datetime import UTC, datetime\nx = datetime.now(UTC)",
    ),
    "vendor words in a string": ("search", "x = 'import elasticsearch'"),
}


@pytest.mark.parametrize("room, source, told", CAUGHT.values(), ids=CAUGHT.keys())
def test_a_fault_is_caught(room: str, source: str, told: str) -> None:
    assert any(told in fault for fault in faults_of_room(room, source))


@pytest.mark.parametrize("room, source", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_is_right_passes(room: str, source: str) -> None:
    assert faults_of_room(room, source) == []


@pytest.mark.parametrize(
    "name, source, told",
    [
        ("doctor", "import elasticsearch", "door"),
        ("load", "from openai import OpenAI", "door"),
        ("bootstrap", "import rich", "nothing is installed"),
        ("bootstrap", "from app import errors", "nothing is installed"),
        ("up", "from tests.conftest import x", "below tests"),
    ],
)
def test_a_fault_of_a_script_is_caught(name: str, source: str, told: str) -> None:
    assert any(told in fault for fault in faults_of_script(name, source))


def test_a_script_may_use_app_and_http() -> None:
    assert (
        faults_of_script("doctor", "import httpx2\nfrom app import elastic\nfrom scripts import node") == []
    )
