"""Own the reading of judged sets: documents, questions and the judgements that tie them together.

Reads three forms, told apart by what lies in the folder: `corpus.jsonl`, `queries.jsonl` and `qrels.tsv`; BEIR's
(`_id` for `id`, `qrels/test.tsv` with a header); TREC's (`qid 0 docid grade`, questions as `qid<TAB>text`). Scores
nothing and sends nothing.
"""

import gzip
import hashlib
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from scripts import sources

Grades = Mapping[str, Mapping[str, int]]

_CORPUS = ("corpus.jsonl", "corpus.jsonl.gz", "documents.jsonl", "documents.jsonl.gz")
_QUESTIONS = ("queries.jsonl", "queries.jsonl.gz", "queries.tsv", "topics.tsv", "queries.txt", "topics.txt")
_JUDGEMENTS = (
    "qrels.tsv",
    "qrels.txt",
    "qrels/test.tsv",
    "qrels/test.txt",
    "qrels/dev.tsv",
    "qrels/train.tsv",
)
_STRICT = "qrels_strict.tsv"


class UnreadableSet(Exception):
    """A folder is no judged set, or a line of it can't be read; the message says which and what is expected."""


@dataclass(frozen=True, slots=True)
class Question:
    """A judged question.

    `grades` holds what was judged for it, 0 and up. `current` and `superseded` are documents that say the same at
    different times; both are empty where time does not matter. `kind` groups questions of one sort.
    """

    id: str
    text: str
    grades: Mapping[str, int]
    as_of: str | None = None
    kind: str | None = None
    filter: Mapping[str, Any] | None = None
    current: tuple[str, ...] = ()
    superseded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of a set. `digest` names the file's content; `ids` are those that can be stored.

    `unusable` says where (file and line) nothing stands or what can't be read; of `repeated` lines, whose id an earlier
    one has, the last one is stored.
    """

    path: Path
    names: sources.Names
    digest: str
    ids: frozenset[str]
    unusable: frozenset[str]
    repeated: int


@dataclass(frozen=True, slots=True)
class JudgedSet:
    """A judged set, read. `questions` are those with at least one relevant document, in the file's order."""

    name: str
    questions: tuple[Question, ...]
    corpus: Corpus | None
    qrels: Path
    notes: tuple[str, ...] = field(default=())

    def sample(self, count: int | None, *, seed: int) -> "JudgedSet":
        """Return the set with at most so many questions, drawn by the seed alone, their order kept."""
        if count is None or count >= len(self.questions):
            return self
        chosen = sorted(random.Random(seed).sample(range(len(self.questions)), count))  # noqa: S311 - a fixed draw is wanted
        return replace(self, questions=tuple(self.questions[place] for place in chosen))


def read_set(folder: Path, *, qrels: Path | None = None) -> JudgedSet:
    """Return the judged set in a folder.

    `qrels` names other judgements than the folder's own: a file's name, looked for in the folder first, or a path. Raises
    UnreadableSet, naming file and line.
    """
    if not folder.is_dir():
        raise UnreadableSet(f"There is no folder {folder}.")
    asked = _first(folder, _QUESTIONS)
    if asked is None:
        raise UnreadableSet(f"{folder} holds no questions: one of {', '.join(_QUESTIONS)} is needed.")
    judged = _first(folder, _JUDGEMENTS) if qrels is None else _named(folder, qrels)
    if judged is None:
        raise UnreadableSet(
            f"{folder} holds no judgements: one of {', '.join(_JUDGEMENTS)} is needed, or --qrels FILE."
        )
    grades = read_grades(judged)
    found = _questions(asked, grades, _pairs(folder))
    notes = []
    unknown = len(grades.keys() - {question.id for question in found})
    if unknown == len(grades):
        raise UnreadableSet(f"No question of {asked} is judged in {judged}: their ids differ.")
    if unknown:
        notes.append(f"{unknown} judged questions are not in {asked.name}")
    useful = tuple(question for question in found if any(question.grades.values()))
    if not useful:
        raise UnreadableSet(f"No question of {asked} has a relevant document in {judged}.")
    if len(useful) < len(found):
        notes.append(f"{len(found) - len(useful)} questions have no relevant document and are left out")
    path = _first(folder, _CORPUS)
    corpus = None if path is None else read_corpus(path)
    if corpus is not None:
        wanted = {name for question in useful for name, grade in question.grades.items() if grade}
        if missing := len(wanted - corpus.ids):
            # They stay in the ideal ranking, as is usual: what can't be found counts as not found.
            notes.append(f"{missing} relevant documents are not in {corpus.path.name}")
        if odd := len(corpus.unusable) + corpus.repeated:
            notes.append(f"{odd} lines of {corpus.path.name} are empty, repeated or unreadable")
    return JudgedSet(folder.resolve().name, useful, corpus, judged, tuple(notes))


def read_corpus(path: Path) -> Corpus:
    """Return what is to be known about a file of documents before it is loaded."""
    names = sources.Names(id=_id_field(path))
    ids: set[str] = set()
    unusable: set[str] = set()
    repeated = 0
    for item in sources.read(sources.Source(path, path.name, path.stat().st_size, lines=True), names):
        document = item.document
        if document is None or not _says_something(document):
            unusable.add(item.where)
        elif document["id"] in ids:
            repeated += 1
        else:
            ids.add(document["id"])
    if not ids:
        raise UnreadableSet(f"{path} holds no document with an id and a text or title.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Corpus(path, names, digest, frozenset(ids), frozenset(unusable), repeated)


def read_grades(path: Path) -> dict[str, dict[str, int]]:
    """Return question -> document -> grade, of three columns (with or without a header) or TREC's four.

    Grades below 0 become 0; where a pair is judged twice the higher one counts.
    """
    grades: dict[str, dict[str, int]] = {}
    for number, line in _lines(path):
        cells = [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()
        if len(cells) not in {3, 4}:
            raise UnreadableSet(
                f"{path}:{number}: {len(cells)} columns; expected question, document, grade, or TREC's four."
            )
        question, document, told = cells[0], cells[-2], cells[-1]
        try:
            grade = max(0, int(float(told)))
        except (ValueError, OverflowError):
            if not grades:
                continue  # The header.
            raise UnreadableSet(f"{path}:{number}: the grade '{told}' is not a number.") from None
        held = grades.setdefault(question, {})
        held[document] = max(grade, held.get(document, 0))
    if not grades:
        raise UnreadableSet(f"{path} holds no judgement.")
    return grades


def _pairs(folder: Path) -> Grades:
    """Return the grades that tell superseded documents from current ones: 1 and 2.

    A strict variant beside the plain judgements exists for one reason: it takes the grade from what is superseded.
    """
    plain, strict = folder / "qrels.tsv", folder / _STRICT
    if not (plain.is_file() and strict.is_file()):
        return {}
    loose, hard = read_grades(plain), read_grades(strict)
    pairs: dict[str, dict[str, int]] = {}
    for question, judged in loose.items():
        kept = hard.get(question, {})
        for document, grade in judged.items():
            if grade > 0:
                pairs.setdefault(question, {})[document] = 2 if kept.get(document, 0) > 0 else 1
    return pairs


def _questions(path: Path, grades: Grades, pairs: Grades) -> list[Question]:
    found: list[Question] = []
    seen: set[str] = set()
    for where, entry in _entries(path):
        name = entry.get("id", entry.get("_id"))
        text = entry.get("text", entry.get("query"))
        if name is None or not isinstance(text, str):
            raise UnreadableSet(f"{where}: a question needs `id` and `text`.")
        name = str(name)
        if name in seen:
            raise UnreadableSet(f"{where}: the question '{name}' stands here a second time.")
        seen.add(name)
        if name not in grades or not text.strip():
            continue
        current, superseded = _ids(entry.get("current")), _ids(entry.get("superseded"))
        if not (current and superseded):
            told = pairs.get(name, {})
            current = tuple(document for document, grade in told.items() if grade == 2)
            superseded = tuple(document for document, grade in told.items() if grade == 1)
        if not (current and superseded):
            current = superseded = ()
        kind, only = entry.get("kind"), entry.get("filter")
        found.append(
            Question(
                id=name,
                text=text,
                grades=grades[name],
                as_of=entry.get("as_of") or None,
                kind=str(kind) if kind else None,
                filter=only if isinstance(only, dict) and only else None,
                current=current,
                superseded=superseded,
            )
        )
    return found


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in _lines(path):
        where = f"{path}:{number}"
        if ".jsonl" in path.suffixes:
            try:
                yield where, sources.parse(line.encode())
            except ValueError as fault:
                raise UnreadableSet(f"{where}: {fault}") from fault
        else:
            cells = re.split(r"\t", line, maxsplit=1)
            if len(cells) != 2:
                raise UnreadableSet(f"{where}: expected a question's id, a tab and its text.")
            yield where, {"id": cells[0].strip(), "text": cells[1].strip()}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    read: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8-sig") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as cause:
            raise UnreadableSet(f"{path} can't be read as UTF-8 text: {cause}") from cause


def _ids(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _id_field(path: Path) -> str:
    for where, entry in _entries(path):
        if "id" in entry or "_id" in entry:
            return "id" if "id" in entry else "_id"
        raise UnreadableSet(f"{where}: a document needs `id` (or `_id`).")
    raise UnreadableSet(f"{path} is empty.")


def _says_something(document: Mapping[str, Any]) -> bool:
    return bool(str(document.get("text") or "").strip() or str(document.get("title") or "").strip())


def _first(folder: Path, wanted: Sequence[str]) -> Path | None:
    return next((folder / name for name in wanted if (folder / name).is_file()), None)


def _named(folder: Path, given: Path) -> Path:
    # A bare name is the folder's file, wherever the caller stands.
    bare = len(given.parts) == 1
    for path in (folder / given, given) if bare else (given, folder / given):
        if path.is_file():
            return path
    raise UnreadableSet(f"There is no file {given}, nor {folder / given}.")
