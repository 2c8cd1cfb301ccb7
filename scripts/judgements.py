"""The command line `halflife judgements`: what the search log and its votes say, as a judged set for `halflife evaluate`."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scripts import reindexing
from scripts.options import CollectionArgument, DataOption, JsonOption

if TYPE_CHECKING:
    from app.feedback import JudgedQuery
    from app.settings import Settings

Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]
NOTHING = 1


def register(command: Register) -> None:
    """Make the command known; `command` is what registers one under a heading."""
    command("Quality")(judgements)


def judgements(
    collection: CollectionArgument,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Where the set is written; made if need be.", show_default=False
        ),
    ],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Write the judgements that the search log's votes make.

    Each logged question whose hits were voted on becomes a question, with the search's origin as `as_of`, each document whose votes
    say enough a judgement: 2 where somebody called it helpful and at least half of those who looked are for it, 1 for the
    latter alone, 0 for what was passed over. The log must hold the texts (HALFLIFE_SEARCH_LOG_TEXTS=true).

    Documents whose id holds a tab or a line break, or begins or ends with a blank, are left out, and counted: qrels.tsv can't
    name them.

    It speaks to the cluster that HALFLIFE_ELASTICSEARCH_URL names, else to the local stack's.

    \b
    Example:
      halflife judgements handbook judged/
      halflife evaluate judged/ --collection handbook

    Exit codes: 0 written; 1 no question of this collection has judgements, there is no such collection, or the cluster does
    not answer.
    """
    settings, _ = reindexing.read_settings(data)
    found = asyncio.run(_read(settings, collection))
    written = write(found, folder)
    if as_json:
        told = {
            "questions": written.questions,
            "judgements": written.judgements,
            "left_out": written.left_out,
        }
        typer.echo(json.dumps({**told, "folder": str(folder)}))
    elif written.questions:
        typer.echo(f"{written.questions} questions with {written.judgements} judgements in {folder}.")
    if written.left_out:
        reindexing.say(
            f"{written.left_out} judgements are left out: their documents' ids hold tabs, line breaks or outer blanks, which "
            "qrels.tsv can't name."
        )
    elif not written.questions:
        reindexing.say(
            f"No logged question of '{collection}' has votes and its text: see HALFLIFE_SEARCH_LOG_RATE and …_TEXTS."
        )
    return 0 if written.questions else NOTHING


@dataclass(frozen=True, slots=True)
class Written:
    """What a folder holds now, and how many grades it could not take."""

    questions: int
    judgements: int
    left_out: int


def write(found: "list[JudgedQuery]", folder: Path) -> Written:
    """Write the questions and their grades as `halflife evaluate` reads them.

    Grades of documents that a line of tab-separated cells can't name are left out, and questions that have no other.
    """
    from app.times import format_instant

    questions: list[str] = []
    grades = ["query\tdocument\tgrade"]
    left_out = 0
    for each in found:
        kept = {document: grade for document, grade in each.grades.items() if _fits_a_cell(document)}
        left_out += len(each.grades) - len(kept)
        if not kept:
            continue
        line = {"id": each.hash, "text": each.text, "as_of": format_instant(each.as_of)}
        questions.append(json.dumps(line, ensure_ascii=False))
        grades += [f"{each.hash}\t{document}\t{grade}" for document, grade in kept.items()]
    if questions:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "queries.jsonl").write_text("\n".join(questions) + "\n", encoding="utf-8")
        (folder / "qrels.tsv").write_text("\n".join(grades) + "\n", encoding="utf-8")
    return Written(len(questions), len(grades) - 1, left_out)


def _fits_a_cell(document: str) -> bool:
    """Tell whether the id is read back as it is: cells are stripped, lines end at any of the three line ends."""
    return document == document.strip() and not any(end in document for end in "\t\n\r")


async def _read(settings: "Settings", collection: str) -> "list[JudgedQuery]":
    from app import catalog
    from app.feedback import judgements as read
    from app.main import open_cluster

    cluster = open_cluster(settings)
    try:
        known = await catalog.get(cluster, collection)
        return [each async for each in read(cluster, known.collection)]
    finally:
        await cluster.close()
