"""Export, import and purge on a real node, and the command lines that move whole collections."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

from app import catalog, names, transfer
from app.collection import CollectionOptions, SynonymRule
from app.elastic import Cluster
from app.errors import Conflict, InvalidRequest
from app.purge import Purger
from app.reindex import Changes
from scripts import cli, reindexing
from scripts.archives import ArchiveWriter, read_lines
from tests.fakes import EmbeddingServer, vector_of
from tests.moving import DIMS, World, embedder_of, now, world_on

pytestmark = pytest.mark.node


@pytest.fixture
async def world(
    cluster: Cluster, unique: Callable[[str], str], server: EmbeddingServer
) -> AsyncIterator[World]:
    embedder = embedder_of(server)
    yield await world_on(cluster, unique("transfer"), {"fake": embedder}, declared={"n": "long"})
    await embedder.close()


METADATA = {
    "big": 10**19,
    "f": 1e22,
    "s": "é😀\u2028\n",
    "x": [1.0, {"y": None}],
    "a.b": {"": "empty"},
    "n": 7,
}


async def fill(world: World, count: int = 60) -> None:
    await world.upsert(
        *(
            {
                "id": f"d{i}",
                "title": f"Title {i}" if i % 3 else "",
                "text": f"text {i}. " + ("Another sentence with words. " * 20 if i % 5 == 0 else ""),
                "metadata": METADATA,
                "creation_time": "2026-01-02",
                "tags": ["a", "b"],
            }
            for i in range(count)
        ),
        {"id": "own", "text": "vector of the caller", "embedding": vector_of("x", DIMS), "revision": 5},
        {"id": "none", "text": "without", "embedding": None},
        {"id": "ünï/..?&#", "text": "odd id", "evergreen": True, "salience": 0.5},
    )
    await world.delete("d1")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".jsonl.gz"])
async def test_what_was_exported_comes_back_exactly(
    world: World, unique: Callable[[str], str], tmp_path: Path, suffix: str
) -> None:
    await fill(world)
    file = tmp_path / f"out{suffix}"
    before = await world.dump()
    assert before.pop("d1")[1]["deleted"]
    assert await reindexing.export_to(world.cluster, world.name, file) == len(before)
    other = World(world.cluster, unique("back"), world.embedders)
    tally = await reindexing.import_from(world.cluster, file, collection=other.name, embedder=world.embedder)
    assert (tally.stored, tally.newer, tally.failures) == (len(before), 0, {})
    after = await other.dump()
    assert after.keys() == before.keys()
    for id_, (version, source) in before.items():
        # Unit vectors come back bit by bit; Elasticsearch normalises others, and gives them back rounded.
        assert after[id_] == (version, source), id_
    collection = await other.collection()
    assert (collection.declared, collection.dims, collection.model) == ({"n": "long"}, DIMS, "fake")
    again = await reindexing.import_from(world.cluster, file, collection=other.name, embedder=world.embedder)
    assert (again.stored, again.newer) == (0, len(before))
    second = tmp_path / f"second{suffix}"
    await reindexing.export_to(world.cluster, other.name, second)
    ones, twos = list(read_lines(file)), list(read_lines(second))
    assert ones[1:-1] == twos[1:-1]


async def test_how_searches_rank_comes_back_with_a_new_collection_only(
    world: World, unique: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await fill(world, 3)
    options = {
        "profiles": {"news": {"decay": {"half_life": "7d"}}},
        "default_profile": "news",
        "experiment": {"name": "e", "arms": [{"profile": "news", "percent": 100}]},
    }
    before = await catalog.change(
        world.cluster, await world.collection(), CollectionOptions.model_validate(options), dims=DIMS
    )
    rules = [SynonymRule(synonyms="car, automobile"), SynonymRule(id="k", synonyms="k8s => kubernetes")]
    before = await catalog.put_synonyms(world.cluster, before, rules)
    file = tmp_path / "out.jsonl"
    await reindexing.export_to(world.cluster, world.name, file)
    made = World(world.cluster, unique("made"), world.embedders)
    await reindexing.import_from(world.cluster, file, collection=made.name, embedder=world.embedder)
    after = await made.collection()
    for name in (*options, "synonyms"):
        assert getattr(after, name) == getattr(before, name), name
    assert "keeps its own" not in capsys.readouterr().err
    # One that is there is not changed, and that is told.
    await catalog.put_synonyms(world.cluster, after, [])
    await reindexing.import_from(world.cluster, file, collection=made.name, embedder=world.embedder)
    assert (await made.collection()).synonyms == []
    assert "keeps its own ranking profiles and synonyms" in capsys.readouterr().err


def test_a_header_of_an_earlier_release_is_read() -> None:
    older = {
        "collection": "c", "dims": 3, "model": "m", "similarity": "cosine", "declared": {}, "documents": 1,
        "exported_at": "2026-01-01T00:00:00.000Z", "halflife_export": 1,
    }  # fmt: skip
    head = transfer.Header.parse(older)
    assert (head.profiles, head.rules()) == ({}, [])
    del older["dims"], older["model"]
    with pytest.raises(InvalidRequest) as lacking:
        transfer.Header.parse(older)
    assert lacking.value.detail == "the export's header lacks `dims`, `model`"
    assert "export the collection again" in str(lacking.value.remedy)


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "a profile": ({"profiles": {"p": {"fusion": {"method": "x"}}}}, "profiles.p.fusion.method"),
    "no profiles": ({"profiles": ["p"]}, "profiles"),
    "an experiment": ({"experiment": {"name": "e"}}, "experiment.arms"),
    "synonyms": ({"synonyms": [{"synonyms": 3}]}, "synonyms_set[0].synonyms"),
    "dims": ({"dims": "many"}, "dims"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_names_what_is_damaged(name: str) -> None:
    changes, field = DAMAGED[name]
    line = {
        "collection": "c", "dims": 3, "model": "m", "similarity": "cosine", "declared": {}, "documents": 1,
        "exported_at": "2026-01-01T00:00:00.000Z", "halflife_export": 1, **changes,
    }  # fmt: skip
    with pytest.raises(InvalidRequest) as damaged:
        transfer.Header.parse(line)
    assert damaged.value.field == field
    assert damaged.value.detail.startswith("the export's header is damaged: ")
    assert "Header" not in damaged.value.detail


async def test_an_export_shows_one_moment_and_goes_on_after_a_stop(world: World, tmp_path: Path) -> None:
    await fill(world)
    file = tmp_path / "out.jsonl.zst"
    before = await world.dump()
    before.pop("d1")

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await reindexing.export_to(world.cluster, world.name, file, report=stop)
    assert not file.exists()
    # What a kill left behind the checkpoint is cut off.
    part = tmp_path / "out.jsonl.zst.part"
    part.write_bytes(part.read_bytes() + b"half a frame")
    await world.delete("d59", "d2")
    await world.upsert(
        {"id": "d3", "text": "changed meanwhile"}, {"id": "zzz", "text": "new"}, refresh="true"
    )
    assert await reindexing.export_to(world.cluster, world.name, file) == len(before)
    head, *lines, end = (json.loads(line) for line in read_lines(file))
    assert (head["collection"], end["documents"]) == (world.name, len(before))
    assert {line["id"]: line["version"] for line in lines} == {id_: v for id_, (v, _) in before.items()}


async def test_an_export_whose_moment_is_gone_begins_anew(world: World, tmp_path: Path) -> None:
    await fill(world)
    file = tmp_path / "out.jsonl"

    def stop(progress: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await reindexing.export_to(world.cluster, world.name, file, report=stop)
    sidecar = tmp_path / "out.jsonl.part.json"
    await world.cluster.close_pit(json.loads(sidecar.read_text())["pit"])
    await world.upsert({"id": "zzz", "text": "new"}, refresh="true")
    await reindexing.export_to(world.cluster, world.name, file)
    ids = [json.loads(line).get("id") for line in read_lines(file)][1:-1]
    assert len(ids) == len(set(ids)) == 63
    assert "zzz" in ids


async def test_a_stopped_import_goes_on_and_a_cut_off_file_is_told(
    world: World, unique: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(world)
    monkeypatch.setattr(reindexing, "IMPORT_BATCH", 10)
    file = tmp_path / "out.jsonl.zst"
    count = await reindexing.export_to(world.cluster, world.name, file)
    other = World(world.cluster, unique("back"), world.embedders)
    batches = 0

    def stop(progress: Any) -> None:
        nonlocal batches
        batches += 1
        if batches == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await reindexing.import_from(
            world.cluster, file, collection=other.name, embedder=world.embedder, report=stop
        )
    tally = await reindexing.import_from(world.cluster, file, collection=other.name, embedder=world.embedder)
    assert (tally.stored, tally.newer) == (count - 30, 30)
    assert len(await other.dump()) == count
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b"\n".join(list(read_lines(file))[:20]))
    with pytest.raises(InvalidRequest, match="ends after 19 documents"):
        await reindexing.import_from(world.cluster, cut, collection=other.name, embedder=world.embedder)
    lines = list(read_lines(file))
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(b"\n".join(line.replace(b"text 2", b"tex! 2") for line in lines) + b"\n")
    third = World(world.cluster, unique("third"), world.embedders)
    with pytest.raises(InvalidRequest, match="not what was exported"):
        await reindexing.import_from(world.cluster, changed, collection=third.name, embedder=world.embedder)
    # An export of an earlier release has no checksum.
    end = {key: value for key, value in json.loads(lines[-1]).items() if key != "crc32"}
    changed.write_bytes(b"\n".join([*lines[:-1], json.dumps(end).encode()]))
    await reindexing.import_from(world.cluster, changed, collection=third.name, embedder=world.embedder)
    assert len(await third.dump()) == count
    damaged = tmp_path / "damaged.jsonl.zst"
    damaged.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InvalidRequest):
        await reindexing.import_from(world.cluster, damaged, collection=other.name, embedder=world.embedder)
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"id": "a", "text": "t"}\n')
    with pytest.raises(InvalidRequest, match="header"):
        await reindexing.import_from(world.cluster, foreign, collection=None, embedder=world.embedder)


async def test_a_stopped_import_is_gone_on_with_in_its_own_way_only(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With new versions everything is written, also what an import that lets newer ones win has passed by."""
    await fill(world)
    monkeypatch.setattr(reindexing, "IMPORT_BATCH", 10)
    file = tmp_path / "out.jsonl"
    count = await reindexing.export_to(world.cluster, world.name, file)
    ids = [json.loads(line)["id"] for line in list(read_lines(file))[1:-1]]
    await world.upsert(*({"id": id_, "text": "newer"} for id_ in ids[:30]))

    def stop(progress: Any) -> None:
        if progress.done >= 30:
            raise KeyboardInterrupt

    async def load(**given: Any) -> transfer.Tally:
        return await reindexing.import_from(
            world.cluster, file, collection=None, embedder=world.embedder, **given
        )

    with pytest.raises(KeyboardInterrupt):
        await load(report=stop)
    with pytest.raises(KeyboardInterrupt):
        await load(report=stop, new_versions=True)
    tally = await load(new_versions=True)
    assert (tally.stored, tally.newer) == (count - 30, 30)
    found = await world.dump()
    assert [id_ for id_ in ids if found[id_][1]["text"] == "newer"] == []


async def test_an_import_lets_newer_documents_win_and_embeds_for_another_model(
    world: World, unique: Callable[[str], str], tmp_path: Path
) -> None:
    await fill(world)
    file = tmp_path / "out.jsonl"
    await reindexing.export_to(world.cluster, world.name, file)
    await world.upsert({"id": "d2", "text": "newer"})
    await world.delete("d3")
    tally = await reindexing.import_from(world.cluster, file, collection=None, embedder=world.embedder)
    assert tally.stored == 0
    found = await world.dump()
    assert (found["d2"][1]["text"], found["d3"][1].get("deleted")) == ("newer", True)
    tally = await reindexing.import_from(
        world.cluster, file, collection=None, embedder=world.embedder, new_versions=True
    )
    assert tally.newer == 0
    assert (await world.dump())["d2"][1]["text"].startswith("text 2")
    with EmbeddingServer(dims=16) as wide:
        embedder = embedder_of(wide, "fake-16")
        other = World(world.cluster, unique("wide"), {"fake-16": embedder})
        await catalog.create(
            world.cluster, other.name, CollectionOptions(), dims=16, model="fake-16", moment=now()
        )
        tally = await reindexing.import_from(
            world.cluster, file, collection=other.name, embedder=other.embedder
        )
        assert tally.failures == {}
        vector = (await other.dump())["own"][1]["chunks"][0]["embedding"]
        assert np.allclose(vector, vector_of("vector of the caller", 16), atol=1e-6)
        await embedder.close()


def test_a_line_holds_what_is_stored_and_nothing_twice() -> None:
    source = {
        "document_id": "a",
        "text": "one two",
        "chunks": [{"text": "one", "start": 0, "end": 3, "hash": "h", "embedding": [1.0, 0.5]}],
        "declared": {"n": 1},
        "metadata": {"n": 1},
    }
    line = transfer.line(source, 9)
    assert line == {
        "id": "a", "version": 9, "text": "one two", "metadata": {"n": 1},
        "chunks": [{"start": 0, "end": 3, "hash": "h", "embedding": "P4AAAD8AAAA="}],
    }  # fmt: skip
    id_, version, back = transfer.source_of(line)
    assert (id_, version, back["chunks"][0]["text"], "declared" in back) == ("a", 9, "one", False)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_damaged_archive_is_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    lines = [b'{"n": %d}' % number for number in range(200)]
    with ArchiveWriter(path).open() as archive:
        archive.write(lines)
        archive.finish()
    whole = path.read_bytes()
    told = 0
    for place in range(4, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert list(read_lines(path)) == lines
        except ValueError as cause:
            assert "damaged or cut off" in str(cause)  # noqa: PT017 - a few bytes may say nothing of the content
            told += 1
    assert told > len(whole) * 0.9


def test_an_archive_is_cut_back_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with ArchiveWriter(path).open() as archive:
        archive.write([b"1"], n=1)
        archive.write([b"2"], n=2)
    left = ArchiveWriter(path).left_off()
    assert left is not None
    assert left["n"] == 2
    with (tmp_path / "a.jsonl.zst.part").open("ab") as file:
        file.write(b"junk")
    with ArchiveWriter(path).open(at=left["bytes"]) as archive:
        archive.write([b"3"])
        archive.finish()
    assert list(read_lines(path)) == [b"1", b"2", b"3"]
    assert ArchiveWriter(path).left_off() is None


# --- purge -----------------------------------------------------------------------------------------------------------


async def test_old_tombstones_go_and_young_ones_stay(world: World) -> None:
    await fill(world, 20)
    past = Purger(world.cluster, world.name, now=lambda: now() + timedelta(days=8))
    assert await Purger(world.cluster, world.name, now=now).count() == 0
    assert await past.count() == 1
    assert await Purger(world.cluster, world.name, now=now).purge() == 0
    assert await past.purge() == 1
    found = await world.dump()
    assert "d1" not in found
    assert len(found) == 22
    await world.upsert({"id": "d1", "text": "written anew"})
    with pytest.raises(InvalidRequest, match="an hour"):
        await past.purge(timedelta(minutes=5))


async def test_no_purge_while_the_other_index_matters(world: World) -> None:
    await fill(world, 20)
    purger = Purger(world.cluster, world.name, now=lambda: now() + timedelta(days=8))
    await world.reindexer().run(Changes())
    with pytest.raises(Conflict, match="reindex"):
        await purger.purge()
    await world.reindexer().finish()
    assert await purger.purge() == 1


# --- command lines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(node_url: str, server: EmbeddingServer, tmp_path: Path) -> Callable[..., Any]:
    """Run `halflife …` and return its result; standard output is `.stdout`."""
    runner = CliRunner()
    if "reindex" not in runner.invoke(cli.app, ["--help"]).stdout:
        reindexing.register(cli.command)
    environment = {
        "HALFLIFE_ELASTICSEARCH_URL": node_url,
        "HALFLIFE_EMBEDDING_BASE_URL": server.base_url,
        "HALFLIFE_EMBEDDING_MODEL": "fake",
        "HALFLIFE_EMBEDDING_DOCUMENT_PREFIX": "",
        "HALFLIFE_DATA": str(tmp_path / "none"),
    }

    def invoke(*arguments: str) -> Any:
        return runner.invoke(cli.app, list(arguments), env=environment)

    return invoke


async def test_the_reindex_command_from_plan_to_finish(world: World, run: Callable[..., Any]) -> None:
    await fill(world, 20)
    old = (await world.collection()).index

    async def halflife(*arguments: str) -> Any:
        return await asyncio.to_thread(run, *arguments)

    plan = await halflife(
        "reindex", world.name, "--dry-run", "--json", "--declare", "big=double", "--shards", "2"
    )
    assert plan.exit_code == 0, plan.output
    told = json.loads(plan.stdout)
    assert told["changes"] == ["declared field big: none → double", "shards: 1 → 2"]
    assert (told["documents"], told["tombstones"]) == (22, 1)
    assert (await world.collection()).index == old
    unasked = await halflife("reindex", world.name, "--shards", "2")
    assert unasked.exit_code == 2, unasked.output
    done = await halflife("reindex", world.name, "--shards", "2", "--yes")
    assert done.exit_code == 0, done.output
    assert "--rollback" in done.stdout
    assert (await world.collection()).index != old
    status = await halflife("reindex", world.name, "--status", "--json")
    assert status.exit_code == 4
    assert json.loads(status.stdout)["state"]["phase"] == "swapped"
    assert (await halflife("reindex", world.name, "--yes")).exit_code == 1
    back = await halflife("reindex", world.name, "--rollback", "--yes")
    assert back.exit_code == 0, back.output
    assert (await world.collection()).index == old
    again = await halflife("reindex", world.name, "--reembed", "--yes")
    assert again.exit_code == 0, again.output
    finished = await halflife("reindex", world.name, "--finish", "--yes")
    assert finished.exit_code == 0, finished.output
    assert len(await world.indices()) == 1
    assert (await halflife("reindex", world.name, "--status")).exit_code == 0


async def test_commands_say_what_is_wrong_and_how_they_ended(
    world: World, run: Callable[..., Any], tmp_path: Path
) -> None:
    await fill(world, 20)

    async def halflife(*arguments: str) -> Any:
        return await asyncio.to_thread(run, *arguments)

    await world.upsert({"id": "odd", "text": "t", "metadata": {"k": "word"}})
    refused = await halflife("reindex", world.name, "--declare", "k=long", "--yes")
    assert refused.exit_code == 1
    assert "odd" in refused.output
    aborted = await halflife("reindex", world.name, "--abort", "--yes")
    assert aborted.exit_code == 0, aborted.output
    assert (await halflife("reindex", "nowhere", "--yes")).exit_code == 1
    mistyped = await halflife("judgements", "nowhere", str(tmp_path / "judged"))
    assert mistyped.exit_code == 1
    assert "there is no collection `nowhere`" in mistyped.output
    assert "no logged question" not in mistyped.output.lower()
    assert (await halflife("reindex", world.name, "--declare", "s=tall", "--yes")).exit_code == 2
    assert (await halflife("reindex", world.name, "--abort", "--finish")).exit_code == 2
    file = tmp_path / "out.jsonl.zst"
    exported = await halflife("export", world.name, str(file), "--json")
    assert exported.exit_code == 0, exported.output
    assert json.loads(exported.stdout)["documents"] == 23
    assert (await halflife("export", world.name, str(file))).exit_code == 1
    imported = await halflife("import", str(file), "--json")
    assert json.loads(imported.stdout) == {"stored": 0, "newer": 23, "failed": 0}
    await world.upsert({"id": "gone", "text": "t", "expires_at": "2020-01-01"}, refresh="true")
    purged = await halflife("purge", world.name, "--yes", "--json")
    assert json.loads(purged.stdout) == {"expired": 1, "tombstones": 0, "dry_run": False}, purged.output
    assert (await world.dump())["gone"][1]["deleted"]


async def test_without_elasticsearch_the_commands_end_with_3(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CliRunner()
    result = await asyncio.to_thread(
        runner.invoke,
        cli.app,
        ["reindex", "any", "--status"],
        env={"HALFLIFE_ELASTICSEARCH_URL": "http://127.0.0.1:9", "HALFLIFE_DATA": str(tmp_path)},
    )
    assert result.exit_code == 3
    assert names.PREFIX == "halflife-"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
async def test_an_export_of_which_hardly_anything_is_left_is_damaged_and_not_foreign(
    suffix: str, tmp_path: Path
) -> None:
    whole = tmp_path / f"whole{suffix}"
    with ArchiveWriter(whole) as archive:
        archive.open()
        archive.write([b'{"halflife_export": 1, "collection": "c"}'])
        archive.finish()
    cut = tmp_path / f"cut{suffix}"
    for size in (0, 10, whole.stat().st_size // 2):
        cut.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(InvalidRequest) as told:
            await reindexing.import_from(cast("Any", None), cut, collection=None, embedder=cast("Any", None))
        assert "cut off" in f"{told.value.detail} {told.value.remedy}"
        assert "header" not in told.value.detail
