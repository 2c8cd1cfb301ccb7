"""Own the command lines that move whole collections: `halflife reindex`, `export`, `import` and `purge`.

They speak to Elasticsearch directly, with the service's own settings, and need no running API. Each shows its plan,
asks before it changes anything, and can be stopped with Ctrl-C and run again. What happens, in which order, is in
`app`; `scripts.cli` takes the commands in with `register`.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

from scripts import stack
from scripts.options import CollectionArgument, DataOption, JsonOption, YesOption, named_collection

if TYPE_CHECKING:
    from app import transfer
    from app.collection import Collection
    from app.elastic import Cluster
    from app.embedding import Embedder
    from app.main import Embedders
    from app.moves import Standing, State
    from app.reindex import Changes, Outcome, Plan, Progress, Reindexer
    from app.settings import Settings

DONE, FAILED, UNREACHABLE, UNDER_WAY, INTERRUPTED = 0, 1, 3, 4, 130
PANEL = "Whole collections"
Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]
T = TypeVar("T")


def register(command: Register) -> None:
    """Add the commands to a command line; `command` is `scripts.cli.command`."""
    command(PANEL)(reindex)
    command(PANEL)(export)
    command(PANEL, name="import")(import_)
    command(PANEL)(purge)


def say(line: str) -> None:
    """Print a line on standard error: standard output is for results."""
    typer.echo(line, err=True)


# ---- reindex --------------------------------------------------------------------------------------------------------


def reindex(
    collection: CollectionArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and end.")] = False,
    shards: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Primary shards. Default: as many as now.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=0, max=5, metavar="N", help="Copies of each. Default: as now.")
    ] = None,
    declare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TYPE", help="Type a metadata key: long, double, date, keyword, boolean. Repeatable."
        ),
    ] = None,
    undeclare: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Type it no longer. Repeatable.")
    ] = None,
    reembed: Annotated[
        bool, typer.Option("--reembed", help="Make all vectors anew with the configured model.")
    ] = False,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Make all vectors anew with this model: one of HALFLIFE_EMBEDDING_MODELS, else of the configured server.",
            show_default=False,
        ),
    ] = None,
    similarity: Annotated[
        str | None,
        typer.Option(
            metavar="cosine|dot_product|…",
            help="How vectors are compared. Default: as now.",
            show_default=False,
        ),
    ] = None,
    rechunk: Annotated[bool, typer.Option("--rechunk", help="Cut texts anew by today's sizes.")] = False,
    rate: Annotated[
        float | None, typer.Option(min=0.1, metavar="N", help="At most so many documents a second.")
    ] = None,
    allow_missing: Annotated[
        int, typer.Option(min=0, metavar="N", help="Leave up to N documents behind that don't fit.")
    ] = 0,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Only try: copy the first N documents into a new index, tell what it refuses, delete it. Never swaps.",
            show_default=False,
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Say how far it is.")] = False,
    pause: Annotated[
        bool, typer.Option("--pause", help="Ask the process that works on it to stop; what it did is kept.")
    ] = False,
    abort: Annotated[
        bool, typer.Option("--abort", help="End it before the swap, delete the new index.")
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="After the swap: back to the old index, with all writes since.")
    ] = False,
    finish: Annotated[bool, typer.Option("--finish", help="After the swap: delete the old index.")] = False,
    from_index: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Bring the documents of another index or alias into the collection instead.",
            show_default=False,
        ),
    ] = None,
    mapped: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="FIELD=PATH",
            help="With --from-index: where it has a field, such as text=body; FIELD= leaves it out. Repeatable.",
        ),
    ] = None,
    yes: YesOption = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Move a collection into a new index while it is read and written.

    The new index gets the mapping and text analysis that this version ships, and what the options change: shards,
    replicas, declared fields, the embedding model. Reads never stop; writes wait for the moment of the swap (usually
    below a second). Nothing is swapped unless every document is there with its version and its vectors.

    Ctrl-C, or a kill at any point, loses nothing: run the same command again to go on. After the swap the old index
    stays until --finish deletes it; until then --rollback goes back without losing what was written since.

    --from-index brings in an index that Halflife did not make: ids and versions stay, fields of the same name are taken,
    others named with --map, all else becomes metadata; it makes the collection if need be. Run it again to bring what
    has changed since. An index that is called halflife-COLLECTION itself is replaced in one step. Two documents of one id, in several
    indices or under different routings, are told: a collection keeps one.

    With another model: name it in HALFLIFE_EMBEDDING_MODELS of the service and of this command, and run this with
    --embedding-model NAME: reads and writes go on throughout. Or, without that, run this with the new model's HALFLIFE_EMBEDDING_… settings while the service runs with the
    old ones, and restart the service with the new ones when this ends.

    \b
    Examples:
      halflife reindex handbook --dry-run
      halflife reindex handbook --declare price=double --limit 1000
      halflife reindex handbook --shards 3 --declare price=double
      halflife reindex handbook --reembed --rate 200
      halflife reindex handbook --status
      halflife reindex handbook --rollback
      halflife reindex handbook --finish
      halflife reindex handbook --from-index wiki --map text=body --map creation_time=published

    One that has begun and fails, on documents that do not fit say, changes nothing that searches or writes see, but stays
    under way, and purge waits for it: run the same command again to go on, or --abort to end it; --status tells.

    \b
    Exit codes: 0 done; 1 refused or failed, the collection serves as it did; 2 wrong usage; 3 Elasticsearch does not
    answer; 4 (--status) one is under way or waits to be finished, (--limit) nothing was moved; 130 stopped, run it again
    to go on.
    """
    actions = {
        "--status": status,
        "--pause": pause,
        "--abort": abort,
        "--rollback": rollback,
        "--finish": finish,
    }
    chosen = [name for name, given in actions.items() if given]
    asked = _Asked(
        shards=shards,
        replicas=replicas,
        declare=_declared(declare or []),
        undeclare=undeclare or [],
        reembed=reembed or embedding_model is not None,
        model=embedding_model,
        similarity=_similarity(similarity),
        rechunk=rechunk,
    )
    if from_index is not None and (
        chosen or asked.undeclare or asked.reembed or asked.rechunk or rate is not None
    ):
        raise typer.BadParameter(
            "goes with --map, --declare, --shards, --replicas, --similarity, --allow-missing and --dry-run",
            param_hint="--from-index",
        )
    if mapped and from_index is None:
        raise typer.BadParameter("goes with --from-index", param_hint="--map")
    if limit is not None and (chosen or from_index is not None or dry_run or allow_missing):
        raise typer.BadParameter("goes with what is to change, and --rate", param_hint="--limit")
    if len(chosen) > 1 or (chosen and asked.given):
        raise typer.BadParameter("one thing at a time", param_hint=", ".join(chosen))
    if chosen:
        beside = {"--dry-run": dry_run, "--rate": rate is not None, "--allow-missing": allow_missing > 0}
        for option in [name for name, given in beside.items() if given]:
            raise typer.BadParameter(f"has no meaning beside {chosen[0]}: leave it out", param_hint=option)
    settings, whose = read_settings(data)
    say(f"Elasticsearch: {settings.elasticsearch_url} ({whose})")

    async def work() -> int:
        async with (
            _doors(settings, model=asked.model) as (cluster, embedder),
            _models(settings, embedder) as embedders,
        ):
            if from_index is not None:
                paths = _paths(mapped or [])
                return await _adopt(
                    cluster, embedder, settings, collection, from_index, paths, asked,
                    allow_missing=allow_missing, dry_run=dry_run, yes=yes, as_json=as_json,
                )  # fmt: skip
            with _progress(hidden=as_json) as report:
                made = _reindexer(cluster, collection, embedders, settings, rate=rate, report=report)
                match chosen:
                    case ["--status"]:
                        return _tell_status(*(await made.status()), as_json=as_json)
                    case ["--pause"]:
                        await made.pause()
                        typer.echo("It was asked to pause. Run `halflife reindex` again to go on.")
                        return DONE
                    case ["--abort"]:
                        _confirm(f"End the reindex of {collection} and delete its new index?", yes)
                        return _tell_state(await made.abort(), as_json)
                    case ["--rollback"]:
                        _confirm(f"Take {collection} back to its old index?", yes)
                        return _tell_state((await made.roll_back()).state, as_json)
                    case ["--finish"]:
                        _confirm(f"Delete the old index of {collection}? It can't be undone then.", yes)
                        return _tell_state(await made.finish(), as_json)
                changes = await _changes(asked, embedder)
                if limit is not None:
                    return _tell_trial(collection, limit, await made.trial(changes, limit), as_json=as_json)
                state, _ = await made.status()
                going_on = state is not None and state.phase == "copying"
                if dry_run or not going_on:
                    plan = await made.plan(changes)
                    _show_plan(plan, as_json and dry_run)
                    if dry_run:
                        return DONE
                    _confirm("Go on?", yes)
                else:
                    assert state is not None
                    say(
                        f"Going on with the reindex of {state.started_at} ({state.done} of {state.total} done)."
                    )
                outcome = await made.run(
                    None if going_on and not asked.given else changes, allow_missing=allow_missing
                )
                return _tell_outcome(outcome, as_json)

    return _run(work())


class _Asked:
    """The changes that the options name, before the model was asked for its dims."""

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)

    shards: int | None
    replicas: int | None
    declare: dict[str, Any]
    undeclare: list[str]
    reembed: bool
    model: str | None
    similarity: Any
    rechunk: bool

    @property
    def given(self) -> bool:
        return any(value not in (None, False, [], {}) for value in self.__dict__.values())


async def _changes(asked: _Asked, embedder: "Embedder") -> "Changes":
    from app.reindex import Changes

    return Changes(
        declare=asked.declare,
        undeclare=frozenset(asked.undeclare),
        shards=asked.shards,
        replicas=asked.replicas,
        model=embedder.model if asked.reembed else None,
        dims=await embedder.check() if asked.reembed else None,
        similarity=asked.similarity,
        rechunk=asked.rechunk,
    )


def _declared(given: Sequence[str]) -> dict[str, Any]:
    from app.collection import DeclaredType

    declared = {}
    for item in given:
        name, _, kind = item.partition("=")
        if not name or kind not in get_args(DeclaredType):
            raise typer.BadParameter(
                f"'{item}' is not NAME=TYPE with a type of {', '.join(get_args(DeclaredType))}",
                param_hint="--declare",
            )
        declared[name] = kind
    return declared


def _similarity(given: str | None) -> Any:
    from app.collection import Similarity

    if given is not None and given not in get_args(Similarity):
        raise typer.BadParameter(
            f"choose one of {', '.join(get_args(Similarity))}", param_hint="--similarity"
        )
    return given


def _reindexer(
    cluster: "Cluster",
    collection: str,
    embedders: "Embedders",
    settings: "Settings",
    *,
    rate: float | None,
    report: Callable[["Progress"], None],
) -> "Reindexer":
    from app.chunking import Chunking
    from app.reindex import Reindexer

    return Reindexer(
        cluster,
        collection,
        embedder=lambda target: embedders.of(target) or _fitting(embedders.first, target),
        now=lambda: datetime.now(UTC),
        chunks=Chunking(settings.chunk_tokens, settings.chunk_overlap_tokens),
        rate=rate,
        report=report,
    )


def _fitting(embedder: "Embedder", target: "Collection") -> "Embedder":
    """Return the embedder if the index' vectors are its own."""
    from app.errors import InvalidRequest

    if target.model is not None and target.model != embedder.model:
        raise InvalidRequest(
            f"the index {target.index} needs vectors of {target.model}, the configured model is {embedder.model}",
            remedy=f"set HALFLIFE_EMBEDDING_MODEL={target.model} and its server, and run it again",
        )
    return embedder


# ---- an index of others ---------------------------------------------------------------------------------------------


def _paths(given: Sequence[str]) -> dict[str, str]:
    paths = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"'{item}' is not FIELD=PATH", param_hint="--map")
        paths[name] = path
    return paths


async def _adopt(
    cluster: "Cluster",
    embedder: "Embedder",
    settings: "Settings",
    collection: str,
    origin: str,
    paths: dict[str, str],
    asked: _Asked,
    *,
    allow_missing: int,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Bring another index into the collection, having shown what its documents become."""
    from app import catalog
    from app.adoption import Adopter
    from app.chunking import Chunking
    from app.collection import Collection, CollectionOptions
    from app.reindex import Progress
    from app.values import check_collection

    check_collection(collection)
    dims = await embedder.check()
    given: dict[str, Any] = {"declared": asked.declare} if asked.declare else {}
    for name in ("shards", "replicas", "similarity"):
        if (value := getattr(asked, name)) is not None:
            given[name] = value
    options = CollectionOptions(**given)
    await catalog.install_templates(cluster, dims=dims)
    with _progress(hidden=as_json) as report:
        adopter = Adopter(
            cluster,
            collection,
            origin,
            mapping=paths,
            embedder=embedder,
            now=lambda: datetime.now(UTC),
            chunks=Chunking(settings.chunk_tokens, settings.chunk_overlap_tokens),
            report=lambda done, total: report(Progress("bringing in", done, total)),
        )
        shape = Collection(
            name=collection, index=origin, dims=dims, similarity=options.similarity,
            declared=options.declared, model=embedder.model, template_version=1,
        )  # fmt: skip
        preview = await adopter.preview(shape)
        if dry_run and as_json:
            typer.echo(json.dumps(asdict(preview), ensure_ascii=False))
            return DONE
        say(f"Plan: bring {preview.documents} documents of {origin} into {collection}")
        if preview.replaces:
            say(f"  {origin} is deleted in the same step in which the collection takes its name")
        if preview.example is not None:
            say(f"  for example {json.dumps(preview.example, ensure_ascii=False)[:600]}")
        say(f"  into the metadata: {', '.join(preview.metadata_keys[:30]) or 'nothing'}")
        for id_, reason in list(preview.failures.items())[:5]:
            say(f"  ✗ {id_}: {reason}")
        if dry_run:
            return DONE
        _confirm("Go on?", yes)
        adopted = await adopter.run(options, dims=dims, model=embedder.model, allow_missing=allow_missing)
    for id_, reason in list(adopted.failures.items())[:20]:
        say(f"✗ {id_} was left out: {reason}")
    told = {"documents": adopted.documents, "stored": adopted.stored, "failed": len(adopted.failures)}
    typer.echo(
        json.dumps(told)
        if as_json
        else f"{told['stored']} of {told['documents']} documents are in {collection}"
    )
    return DONE


# ---- export and import ----------------------------------------------------------------------------------------------


def export(
    collection: CollectionArgument,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Such as handbook.jsonl.zst; .gz and plain .jsonl work too.",
            show_default=False,
        ),
    ],
    keep_alive: Annotated[
        int,
        typer.Option(
            min=1, max=1440, metavar="MINUTES", help="How long a stopped export can be gone on with."
        ),
    ] = 30,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Write a collection to a file, with vectors and versions, as of one moment.

    Ranking profiles, experiment and synonyms are in it too. Deleted documents are left out. Ctrl-C or a kill loses nothing: run the same command again and it goes on, as of the
    same moment; where Elasticsearch no longer keeps that moment, it says so and begins anew.

    \b
    Example:
      halflife export handbook handbook.jsonl.zst

    Exit codes: 0 written; 1 failed; 3 Elasticsearch does not answer; 130 stopped, run it again to go on.
    """
    from app.errors import InvalidRequest

    if file.exists() and not force:
        raise InvalidRequest(f"{file} is there already", remedy="choose another name, or add --force")
    settings, whose = read_settings(data)
    say(f"Elasticsearch: {settings.elasticsearch_url} ({whose})")

    async def work() -> int:
        async with _doors(settings) as (cluster, _):
            with _progress(hidden=as_json) as report:
                written = await export_to(
                    cluster, collection, file, keep_alive_s=keep_alive * 60, report=report
                )
        if as_json:
            typer.echo(json.dumps({"collection": collection, "file": str(file), "documents": written}))
        else:
            typer.echo(
                f"{written} documents of {collection} in {file} ({file.stat().st_size / 2**20:.1f} MB)"
            )
        return DONE

    return _run(work())


async def export_to(
    cluster: "Cluster",
    collection: str,
    file: Path,
    *,
    keep_alive_s: float = 1800.0,
    report: "Callable[[Progress], None]" = lambda progress: None,
) -> int:
    """Write the collection to the file, going on where an earlier try left off; return how many documents it has."""
    from app import catalog, transfer
    from app.encoding import encode
    from app.errors import CursorExpired
    from app.reindex import Progress
    from scripts.archives import ArchiveWriter

    known = (await catalog.get(cluster, collection)).collection
    for option, fault in known.unreadable.items():
        say(f"`{option}` of {collection} can't be read, and the export goes without it: {fault}")
    with ArchiveWriter(file) as archive:
        left = archive.left_off()
        if left is not None and left.get("collection") != collection:
            left = None
        while True:
            done, pit, after = (left["documents"], left["pit"], left["after"]) if left else (0, None, None)
            # What an earlier release left off has none, and then neither has the whole.
            crc = left.get("crc32") if left else 0
            archive.open(at=left["bytes"] if left else None)
            if left is None:
                head = await transfer.header(cluster, known, now=datetime.now(UTC))
                total = head.documents
                first = [encode(asdict(head))]
                crc = transfer.checksum(first)
                archive.write(first, collection=collection, documents=0, pit=None, after=None, crc32=crc)
            else:
                total = left["total"]
            try:
                pages = transfer.export(cluster, known, pit=pit, after=after, keep_alive_s=keep_alive_s)
                async for page in pages:
                    done += len(page.lines)
                    crc = None if crc is None else transfer.checksum(page.lines, crc)
                    archive.write(
                        page.lines,
                        collection=collection,
                        documents=done,
                        pit=page.pit,
                        after=page.after,
                        total=total,
                        crc32=crc,
                    )
                    report(Progress("exporting", done, max(done, total)))
                break
            except CursorExpired:
                say("The moment that this export showed is gone; it begins anew.")
                left = None
        end = {"halflife_export_end": True, "documents": done}
        archive.write([encode(end if crc is None else {**end, "crc32": crc})], documents=done)
        archive.finish()
        return done


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `halflife export` wrote.", show_default=False)
    ],
    collection: Annotated[
        str | None,
        typer.Option(
            "--collection",
            "-c",
            callback=named_collection,
            metavar="NAME",
            help="Default: the one it was exported from.",
            show_default=False,
        ),
    ] = None,
    new_versions: Annotated[
        bool,
        typer.Option(
            "--new-versions", help="Overwrite what is there, instead of letting newer versions win."
        ),
    ] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Read an exported file into a collection, which is made if it is not there.

    Ids, versions, metadata and vectors come back as they were; a collection that is made gets the ranking profiles, experiment
    and synonyms too, one that is there keeps its own. Where the collection's model is another one, its vectors
    are made anew. Repeating an import changes nothing; after a stop it goes on where it was.

    \b
    Examples:
      halflife import handbook.jsonl.zst
      halflife import handbook.jsonl.zst --collection handbook-copy

    Exit codes: 0 all there; 1 some failed, or the file is damaged; 3 Elasticsearch does not answer; 130 stopped.
    """
    settings, whose = read_settings(data)
    say(f"Elasticsearch: {settings.elasticsearch_url} ({whose})")

    async def work() -> int:
        async with (
            _doors(settings) as (cluster, embedder),
            _models(settings, embedder) as embedders,
        ):
            with _progress(hidden=as_json) as report:
                tally = await import_from(
                    cluster,
                    file,
                    collection=collection,
                    embedder=lambda target: embedders.of(target) or _fitting(embedder, target),
                    new_versions=new_versions,
                    report=report,
                )
        for id_, reason in list(tally.failures.items())[:20]:
            say(f"✗ {id_}: {reason}")
        told = {"stored": tally.stored, "newer": tally.newer, "failed": len(tally.failures)}
        if as_json:
            typer.echo(json.dumps(told))
        else:
            typer.echo(
                f"{tally.stored} stored, {tally.newer} there already in this version or a newer one, "
                f"{len(tally.failures)} failed"
            )
        return FAILED if tally.failures else DONE

    return _run(work())


IMPORT_BATCH = 100
IMPORT_BYTES = 8 * 2**20


async def import_from(
    cluster: "Cluster",
    file: Path,
    *,
    collection: str | None,
    embedder: "Callable[[Collection], Embedder]",
    new_versions: bool = False,
    report: "Callable[[Progress], None]" = lambda progress: None,
) -> "transfer.Tally":
    """Read the file into the collection, going on where an earlier try left off. Raises InvalidRequest for other files."""
    import secrets

    from app import catalog, transfer
    from app.errors import InvalidRequest
    from app.reindex import Progress
    from app.targets import CatalogTargets
    from app.writes import Stamper
    from scripts.archives import read_lines, write_json

    _check_whole(file)
    entries = _entries(read_lines(file))
    first = next(entries, None)
    if first is None:
        raise InvalidRequest(
            f"{file} is damaged or cut off: not even its first line is there",
            remedy="export it again; nothing was stored",
        )
    head = transfer.Header.parse(first[1])
    name = collection or head.collection
    known = catalog.Catalog(cluster)
    await catalog.install_templates(cluster, dims=head.dims)
    made = await known.ensure(
        name,
        head.options(),
        dims=head.dims,
        model=head.model,
        moment=datetime.now(UTC),
        rules=head.rules(),
    )
    if (head.profiles or head.synonyms) and not head.ranks_as(made.collection):
        say(f"{name} keeps its own ranking profiles and synonyms; those of the export are others.")
    if made.collection.similarity != head.similarity and made.collection.dims == head.dims:
        say(
            f"The collection compares vectors by {made.collection.similarity}, the export did by {head.similarity}."
        )
    versions: transfer.Versions = "new" if new_versions else "keep"
    importer = transfer.Importer(
        cluster,
        name,
        targets=CatalogTargets(name, cluster=cluster, catalog=known, embedder=embedder),
        stamper=Stamper(secrets.randbelow(64), lambda: time.time_ns() // 1000),
        header=head,
        versions=versions,
    )
    sidecar = file.with_name(f"{file.name}.{name}.import.json")
    # The same file into the same index: a collection that was made anew since needs everything again.
    stat = file.stat()  # noqa: ASYNC240 - a local file's size
    # And to keep the versions or to draw new ones are two things: what the one stored, the other may not have.
    mark = {
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "index": made.collection.index,
        "versions": versions,
    }
    skip = _skip(sidecar, mark)
    done, batch, size, ended = 0, [], 0, None
    for line, entry in entries:
        if entry.get("halflife_export_end"):
            ended = entry["documents"]
            break
        done += 1
        if done <= skip:
            continue
        batch.append(entry)
        size += len(line)
        if len(batch) >= IMPORT_BATCH or size >= IMPORT_BYTES:
            await importer.put(batch)
            batch, size = [], 0
            if not importer.tally.failures:
                write_json(sidecar, {**mark, "lines": done})
            report(Progress("importing", done, max(done, head.documents)))
    if batch:
        await importer.put(batch)
    if ended != done:
        raise InvalidRequest(
            f"{file} ends after {done} documents, and was to have {ended if ended is not None else 'an end line'}",
            remedy="it was cut off: export it again; what it held has been stored",
        )
    importer.tally.newer += skip
    sidecar.unlink(missing_ok=True)
    return importer.tally


def _check_whole(file: Path) -> None:
    """Raise InvalidRequest where the lines are not those that were exported, before any is stored.

    Only where the last line tells their checksum: earlier releases wrote none, and what is cut off is told later.
    """
    from app.errors import InvalidRequest
    from app.transfer import checksum
    from scripts.archives import read_lines

    found, last = 0, None
    try:
        for line in read_lines(file):
            if last is not None:
                found = checksum([last], found)
            last = line
        end = json.loads(last or b"null")
    except ValueError:
        return
    if isinstance(end, dict) and end.get("halflife_export_end") and end.get("crc32", found) != found:
        raise InvalidRequest(
            f"{file} is damaged: what it holds is not what was exported",
            remedy="copy or export it again; nothing was stored",
        )


def _entries(lines: Iterator[bytes]) -> "Iterator[tuple[bytes, dict[str, Any]]]":
    """Yield the lines and what they say; a damaged file becomes a failure with a remedy."""
    from app.errors import InvalidRequest

    number = 0
    try:
        for line in lines:
            number += 1
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("it is no JSON object")
            yield line, entry
    except ValueError as cause:
        raise InvalidRequest(
            f"line {number} can't be read: {cause}",
            remedy="the file is damaged or cut off: export it again; what came before has been stored",
        ) from cause


def _skip(sidecar: Path, mark: dict[str, Any]) -> int:
    """Return how many lines an earlier try has stored."""
    try:
        noted = json.loads(sidecar.read_text("utf-8"))
    except (OSError, ValueError):
        return 0
    return int(noted["lines"]) if all(noted.get(key) == value for key, value in mark.items()) else 0


# ---- purge ----------------------------------------------------------------------------------------------------------


def purge(
    collection: CollectionArgument,
    older_than: Annotated[
        str, typer.Option(metavar="7d", help="Age of the tombstones that go; an hour or more.")
    ] = "7d",
    expired: Annotated[
        bool, typer.Option("--expired/--no-expired", help="Delete documents past their `expires_at` first.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count and end.")] = False,
    yes: YesOption = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Delete documents past their `expires_at`, and what deleted documents left behind.

    A deleted document leaves a tombstone, so that a late repeat of an older write can't bring it back; it takes a few
    hundred bytes. Those older than --older-than go. Refused while a reindex is under way or can be rolled back.

    \b
    Example:
      halflife purge handbook --older-than 30d --dry-run

    Exit codes: 0 done; 1 refused or failed; 3 Elasticsearch does not answer; 130 stopped.
    """
    settings, whose = read_settings(data)
    say(f"Elasticsearch: {settings.elasticsearch_url} ({whose})")
    age = _age(older_than)

    async def work() -> int:
        from app import catalog
        from app.purge import Purger

        async with _doors(settings) as (cluster, embedder):
            purger = Purger(cluster, collection, now=lambda: datetime.now(UTC))
            known = (await catalog.get(cluster, collection)).collection
            tombstones = await purger.count(age)
            past = await cluster.count(_read_alias(collection), _expired(datetime.now(UTC))) if expired else 0
            if not dry_run:
                _confirm(f"Delete {past} expired documents and {tombstones} tombstones of {collection}?", yes)
                if past:
                    past = await _delete_expired(cluster, known, embedder, settings)
                tombstones = await purger.purge(age)
        told = {"expired": past, "tombstones": tombstones, "dry_run": dry_run}
        if as_json:
            typer.echo(json.dumps(told))
        else:
            typer.echo(
                f"{past} expired documents and {tombstones} tombstones {'would go' if dry_run else 'deleted'}"
            )
        return DONE

    return _run(work())


def _age(text: str) -> timedelta:
    from pydantic import TypeAdapter, ValidationError

    from app.times import Duration

    try:
        return timedelta(milliseconds=TypeAdapter[int](Duration).validate_python(text))
    except ValidationError as cause:
        raise typer.BadParameter("give an age such as 7d or 36h", param_hint="--older-than") from cause


def _read_alias(collection: str) -> str:
    from app import names

    return names.read_alias(collection)


def _expired(now: datetime) -> dict[str, Any]:
    from app import fields
    from app.times import format_instant

    return {"range": {fields.EXPIRES_AT: {"lte": format_instant(now)}}}


async def _delete_expired(
    cluster: "Cluster", collection: "Collection", embedder: "Embedder", settings: "Settings"
) -> int:
    """Delete the documents that have expired as any client would, and return how many."""
    import secrets

    from app.catalog import Catalog
    from app.indexing import Indexer
    from app.targets import CatalogTargets
    from app.writes import Stamper

    known = Catalog(cluster)
    indexer = Indexer(
        cluster=cluster,
        targets=lambda name: CatalogTargets(
            name, cluster=cluster, catalog=known, embedder=lambda _: embedder
        ),
        stamper=Stamper(secrets.randbelow(64), lambda: time.time_ns() // 1000),
        now=lambda: datetime.now(UTC),
    )
    deleted = await indexer.delete_matching([_expired(datetime.now(UTC))], collection=collection)
    return deleted.deleted


# ---- what is told ---------------------------------------------------------------------------------------------------


def _show_plan(plan: "Plan", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(plan), ensure_ascii=False))
        return
    say(f"Plan: move {plan.collection} out of {plan.source}")
    for change in plan.changes or ["nothing changes but the index itself"]:
        say(f"  {change}")
    say(
        f"  {plan.documents} documents, {plan.chunks} vectors, {plan.tombstones} tombstones, "
        f"{plan.store_bytes / 2**20:.1f} MB on disk (as much again until --finish)"
    )
    if plan.reembeds:
        say(f"  embedding about {plan.tokens} tokens")
    say(f"  takes about {_duration(plan.seconds)}")


def _tell_status(state: "State | None", standing: "Standing", *, as_json: bool) -> int:
    under_way = state is not None and state.under_way
    if as_json:
        told = {"state": None if state is None else asdict(state), "aliases": asdict(standing)}
        typer.echo(json.dumps(told, ensure_ascii=False))
    elif state is None:
        typer.echo("No reindex is known of this collection.")
    else:
        _tell_state(state, as_json=False)
        if standing.fenced is not None:
            typer.echo("writes are paused at this moment")
    return UNDER_WAY if under_way else DONE


def _tell_trial(collection: str, limit: int, failures: dict[str, str], *, as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps({"collection": collection, "limit": limit, "failures": failures}))
    else:
        for id_, reason in list(failures.items())[:20]:
            say(f"✗ {id_} would be left behind: {reason}")
        typer.echo(
            f"{collection}: {len(failures)} of the first {limit} documents don't fit. Nothing was moved: run it without "
            "--limit for that."
        )
    # Not 0: who chains commands must not take a trial for a move.
    return UNDER_WAY


_NEXT = {
    "copying": "Run `halflife reindex` to go on, or --abort.",
    "swapped": "The old index is kept: --finish deletes it, --rollback goes back to it.",
    "finishing": "Run --finish again to delete the old index, or --rollback to go back to it.",
    "returning": "Run --rollback again to go on, or --abort to stay with the new index.",
}


def _tell_state(state: "State", as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps(asdict(state), ensure_ascii=False))
        return DONE
    typer.echo(
        f"{state.collection}: {state.phase}   {state.source} → {state.target}   begun {state.started_at}"
    )
    if state.phase == "copying":
        typer.echo(f"{state.done} of {state.total} documents copied")
    if state.phase in _NEXT:
        typer.echo(_NEXT[state.phase])
    return DONE


def _tell_outcome(outcome: "Outcome", as_json: bool) -> int:
    for id_, reason in list(outcome.failures.items())[:20]:
        say(f"✗ {id_} was left behind: {reason}")
    return _tell_state(outcome.state, as_json)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here: add --yes", param_hint="--yes")
    typer.confirm(question, abort=True, err=True)


@contextmanager
def _progress(*, hidden: bool) -> "Iterator[Callable[[Progress], None]]":
    """Yield what shows progress: a bar on a terminal, a line now and then elsewhere."""
    if hidden:
        yield lambda progress: None
        return
    if not sys.stderr.isatty():
        last = ("", 0.0)

        def line(progress: "Progress") -> None:
            nonlocal last
            if progress.step != last[0] or time.monotonic() - last[1] > 10:
                last = (progress.step, time.monotonic())
                say(f"{progress.step}: {progress.done}" + (f" of {progress.total}" if progress.total else ""))

        yield line
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from scripts import table

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=table.console(stderr=True), transient=True) as bar:
        task: TaskID | None = None
        shown, begun, first = "", 0.0, 0

        def show(progress: "Any") -> None:
            nonlocal task, shown, begun, first
            if task is None or progress.step != shown:
                if task is not None:
                    bar.remove_task(task)
                task = bar.add_task(progress.step, total=max(1, progress.total), rate="")
                shown, begun, first = progress.step, time.monotonic(), progress.done
            took = time.monotonic() - begun
            rate = f"{(progress.done - first) / took:.0f}/s" if took > 0.5 else ""
            bar.update(task, completed=progress.done, total=max(1, progress.total), rate=rate)

        yield show


# ---- where it works -------------------------------------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Run it and return the exit code; foreseen failures other than an absent cluster are told by the caller."""
    from app.errors import ClusterUnavailable
    from app.moves import Paused

    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        say("Stopped; what was done so far is kept. Run it again to go on.")
        return INTERRUPTED
    except Paused as error:
        say(f"{error.detail}. {error.remedy}.")
        return INTERRUPTED
    except ClusterUnavailable as error:
        say(f"error: {error.title}: {error.detail}")
        if error.remedy:
            say(f"remedy: {error.remedy}")
        return UNREACHABLE
    finally:
        # Interrupted before it began, it would complain of never having been awaited.
        work.close()


def read_settings(data: Path | None) -> "tuple[Settings, str]":
    """Return the environment's settings, completed by the local stack, and whose they are.

    A stack on a folder that was given goes before what the environment names. Raises NothingRuns if none runs there, or
    if it is still starting.
    """
    from scripts import serving

    settings = serving.read_settings()
    found = stack.addresses(data)
    whose = f"the local stack on {stack.data_folder(data)}" if found else "the environment and the defaults"
    return settings.model_copy(update=found), whose


@asynccontextmanager
async def _doors(
    settings: "Settings", *, model: str | None = None
) -> "AsyncIterator[tuple[Cluster, Embedder]]":
    """Open the cluster and the embedder as the service would; nothing is asked of the embedder yet."""
    from app.main import open_cluster, open_embedder

    cluster = open_cluster(settings)
    embedder = open_embedder(settings.with_model(model))
    try:
        await cluster.check_version()
        yield cluster, embedder
    finally:
        await embedder.close()
        await cluster.close()


@asynccontextmanager
async def _models(settings: "Settings", first: "Embedder") -> "AsyncIterator[Embedders]":
    """Yield the embedders by the collections' models, so that a rollback finds the old one."""
    from app.main import Embedders

    embedders = Embedders(settings, first)
    try:
        yield embedders
    finally:
        await embedders.close()
