"""The local stack: its processes start, are noticed when they die, keep their data, and are all gone at the end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.settings import Settings
from scripts import serving, stack, supervisor
from scripts.node import PortTaken, free_ports
from scripts.stack import Process, StackFailed, State
from tests.conftest import ROOT
from tests.fakes import FarEnd, Reply

SAMPLE = ROOT / "scripts" / "sample" / "corpus.jsonl"
HALFLIFE = (sys.executable, "-P", "-m", "scripts.cli")
# A busy machine takes its time; nothing is asserted about it.
PATIENCE_S = 240.0
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is tested


def halflife(*arguments: str, data: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*HALFLIFE, *arguments, "--data", str(data)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        # On a busy machine the real model takes its time too.
        env={**os.environ, "HALFLIFE_EMBEDDING_QUERY_TIMEOUT_S": "60", **environment},
    )


def until_it_succeeds(*arguments: str, data: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command again until it ends with 0, and return the last one: its looks at the parts are given up after seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while (done := halflife(*arguments, data=data)).returncode and time.monotonic() < deadline:
        time.sleep(0.2)
    return done


def status(data: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(halflife("status", "--json", data=data).stdout)
    return told


def eventually(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx2.HTTPError):
            if found := what():
                return found
        time.sleep(0.2)
    raise AssertionError("it did not come about in time")


def everyone(data: Path) -> list[Process]:
    state = stack.read_state(data)
    assert state is not None
    return [state.supervisor, *state.processes]


# ---- without a node -------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that is none of ours."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_known_by_its_birth(sleeper: "subprocess.Popen[bytes]") -> None:
    birth = stack.birth_of(sleeper.pid)
    assert birth is not None
    assert birth == stack.birth_of(sleeper.pid)
    assert birth != stack.birth_of(os.getpid())
    os.kill(sleeper.pid, signal.SIGKILL)
    # Not collected yet, it is a zombie: its id is taken, and it doesn't live.
    eventually(lambda: stack.birth_of(sleeper.pid) is None)


@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps")
def test_ps_tells_a_birth_alike_in_every_language_and_zone(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stack.birth_by_ps(sleeper.pid)
    assert here is not None
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert stack.birth_by_ps(sleeper.pid) == here
    sleeper.kill()
    eventually(lambda: stack.birth_by_ps(sleeper.pid) is None)


def test_a_foreign_process_with_the_same_id_is_left_alone(
    sleeper: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    stranger = Process("api", sleeper.pid, "another birth", "log")
    State("running", stranger, str(tmp_path), processes=[stranger]).write()
    assert stack.running(tmp_path) is None
    assert stack.stop(tmp_path, print) is False
    stranger.signal(signal.SIGKILL)
    time.sleep(0.2)
    assert sleeper.poll() is None
    assert stack.read_state(tmp_path) is None


def test_what_is_left_of_a_stack_whose_supervisor_is_gone_is_ended(
    sleeper: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Process.of("node-1", sleeper.pid, log=tmp_path)
    assert ours is not None
    State("running", Process("supervisor", 2**22 + 1, "gone", "log"), str(tmp_path), processes=[ours]).write()
    told: list[str] = []
    assert stack.stop(tmp_path, told.append) is True
    assert sleeper.wait(10) == -signal.SIGKILL
    assert "node-1" in told[0]


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"phase": "running"}', '{"supervisor": 1, "processes": []}']
)
def test_a_state_that_cant_be_read_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(content)
    assert stack.read_state(tmp_path) is None
    assert stack.check(tmp_path).status == "stopped"


@pytest.mark.parametrize(
    "embedder, base",
    [("http://127.0.0.1:9400", "http://127.0.0.1:9400/v1"), ("https://e.example/v1", "https://e.example/v1")],
)
def test_a_stack_of_an_earlier_version_is_understood(embedder: str, base: str, tmp_path: Path) -> None:
    State("running", Process("supervisor", 1, "x", "log"), str(tmp_path), embedder=embedder).write()
    written = json.loads((tmp_path / "stack.json").read_text())
    del written["embedding_base_url"]
    (tmp_path / "stack.json").write_text(json.dumps(written))
    state = stack.read_state(tmp_path)
    assert state is not None
    assert state.embedding_base_url == base


@pytest.mark.parametrize("elsewhere", ["https://e.example/v1", "https://me:pw@e.example/openai/", " "])
def test_an_embedders_address_is_written_down_whole(
    elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFLIFE_EMBEDDING_BASE_URL", elsewhere)
    state = supervisor.Supervisor(stack.Options(tmp_path), print)._write()
    assert state.embedding_base_url == (
        elsewhere.replace("me:pw@", "").rstrip("/") if elsewhere.strip() else None
    )


def test_two_supervisors_never_share_a_folder(tmp_path: Path) -> None:
    with stack.exclusive(tmp_path), pytest.raises(StackFailed, match="runs on"):
        stack.exclusive(tmp_path).__enter__()
    with stack.exclusive(tmp_path):
        pass


def test_a_start_that_another_was_quicker_than_leaves_its_log_alone(tmp_path: Path) -> None:
    log = stack.log_folder(tmp_path) / "stack.log"
    log.write_text("the first one's\n")
    told: list[str] = []
    with stack.exclusive(tmp_path), pytest.raises(stack.RunsAlready, match="runs on"):
        stack.launch(stack.Options(tmp_path), told.append)
    assert told == []
    assert [(path.name, path.read_text()) for path in log.parent.iterdir()] == [
        ("stack.log", "the first one's\n")
    ]


def test_a_stack_that_is_about_to_say_that_it_runs_is_waited_for(tmp_path: Path) -> None:
    assert stack.wait_until_healthy(tmp_path, print).status == "stopped"
    me = Process.of("supervisor", os.getpid(), log=tmp_path)
    assert me is not None
    with stack.exclusive(tmp_path):
        late = threading.Timer(0.7, State("running", me, str(tmp_path)).write)
        late.start()
        assert stack.wait_until_healthy(tmp_path, print).status == "ok"
        late.join()
        state, process, health = stack.obtain(stack.Options(tmp_path), print)
    assert (state.supervisor, process, health and health.status) == (me, None, "ok")


def test_a_failed_start_tells_its_log(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = stack.Options(tmp_path, embedder_port=int(taken.getsockname()[1]))
        for _ in range(2):
            with pytest.raises(StackFailed, match="is taken") as told:
                stack.launch(options, print)
            assert not isinstance(told.value, stack.RunsAlready)
    log = tmp_path / "logs" / "stack.log"
    assert f"Its log is {log}." in str(told.value)
    assert "is taken" in log.read_text()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S", line) for line in log.read_text().splitlines())
    assert not re.search(r"\d\d:\d\d:\d\d", str(told.value))
    assert {path.name for path in log.parent.iterdir()} == {"stack.log", "stack.log.1"}


def test_a_part_that_died_is_told_to_answer_again_once(tmp_path: Path) -> None:
    class Part(supervisor.Program):
        alive = False

        @property
        def pid(self) -> int | None:
            return 1 if self.alive else None

        def spawn(self) -> None:
            self.alive = True

    told: list[str] = []
    with FarEnd() as server:
        part = Part("embedder", [], port=server.port, question="/health", log=tmp_path / "log")
        ready = False
        server.answer = lambda seen: Reply(200 if ready else 503, {})
        watched = supervisor.Supervisor(stack.Options(tmp_path), told.append)
        watch = supervisor.Watch(part)
        watched._look(watch)
        watch.due = 0.0
        watched._look(watch)
        watched._look(watch)
        assert [line.split(";")[0] for line in told] == ["embedder died"]
        ready = True
        watched._look(watch)
        watched._look(watch)
    assert len(told) == 2
    assert told[1].startswith("embedder answers again, ")


DRAINS = {
    "left out": ({}, 1.0),
    "blank": ({"HALFLIFE_DRAIN_S": " "}, 1.0),
    "said": ({"HALFLIFE_DRAIN_S": "30"}, 30.0),
    "in a file": ({"HALFLIFE_SECRETS_DIR": "FOLDER"}, 12.5),
    "no number": ({"HALFLIFE_DRAIN_S": "soon"}, 1.0),
    "more than may be": ({"HALFLIFE_DRAIN_S": "1e9"}, 60.0),
}


@pytest.mark.parametrize("environment, seconds", DRAINS.values(), ids=DRAINS.keys())
def test_an_api_is_given_the_time_that_it_drains(
    tmp_path: Path, environment: dict[str, str], seconds: float
) -> None:
    (tmp_path / "halflife_drain_s").write_text("12.5\n")
    environment = {name: value.replace("FOLDER", str(tmp_path)) for name, value in environment.items()}
    assert supervisor.drain_s(environment) == seconds
    drain = Settings.model_fields["drain_s"]
    assert drain.default == supervisor.drain_s({})
    assert Settings(drain_s=60).drain_s == supervisor.drain_s({"HALFLIFE_DRAIN_S": "61"})


def test_an_api_whose_supervisor_is_gone_drains_before_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[float] = []
    monkeypatch.setenv("HALFLIFE_DRAIN_S", "30")
    monkeypatch.setattr(serving, "end_with_stdin", forced.append)
    monkeypatch.setattr(serving, "serve", lambda **_: None)
    assert serving.main(["--end-with-stdin"]) == 0
    # The pause, and the 9 s that ending takes at most after it.
    assert forced[0] > 30 + 9


def test_ports_are_chosen_by_wish_then_memory_then_liking() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = int(taken.getsockname()[1])
        free, other = free_ports(2)
        assert supervisor.choose_port(free, other, what="x", liked=busy) == free
        assert supervisor.choose_port(None, free, what="x", liked=other) == free
        assert supervisor.choose_port(None, busy, what="x", liked=free) == free
        assert supervisor.choose_port(None, busy, what="x", liked=busy) not in {busy, free}
        with pytest.raises(PortTaken, match=f"Port {busy}"):
            supervisor.choose_port(busy, free, what="x")


def test_addresses_are_told_without_passwords() -> None:
    assert stack.without_password("https://me:secret@es.example:9200/?x=y") == "https://es.example:9200"


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = halflife("up", "--detach", "--embedder-port", port, data=tmp_path)
    assert done.returncode == 1
    assert f"Port {port}" in done.stderr
    assert "choose another port" in done.stderr
    assert "Traceback" not in done.stderr
    assert stack.read_state(tmp_path) is None


def test_a_taken_port_for_the_api_is_told_before_a_part_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(PortTaken, match=f"Port {port} .* which the API was to have"):
            supervisor.Supervisor(stack.Options(tmp_path, port=port), print).start()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_service_that_cant_start_is_told_with_the_reason(tmp_path: Path) -> None:
    """The API waits for no cluster here, finds none, and ends: so does the stack, with the API's own words."""
    nowhere = f"http://127.0.0.1:{supervisor.free_port()}"
    done = halflife(
        "up", "--detach", data=tmp_path,
        HALFLIFE_ELASTICSEARCH_URL=nowhere, HALFLIFE_EMBEDDING_BASE_URL=f"{nowhere}/v1", HALFLIFE_STARTUP_WAIT_S="0",
    )  # fmt: skip
    assert done.returncode == 1
    assert "Elasticsearch does not answer" in done.stderr
    assert "Remedy: " in done.stderr
    assert done.stderr.count("Its log is ") == 1
    assert "api.log" in done.stderr
    assert "Traceback" not in done.stderr
    assert stack.read_state(tmp_path) is None


def test_an_address_for_others_is_refused_without_keys(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{supervisor.free_port()}"
    done = halflife(
        "up", "--detach", data=tmp_path,
        HALFLIFE_ELASTICSEARCH_URL=nowhere, HALFLIFE_EMBEDDING_BASE_URL=f"{nowhere}/v1", HALFLIFE_HOST=EVERYWHERE,
    )  # fmt: skip
    assert done.returncode == 1
    assert "no keys are configured, and 0.0.0.0 can be reached from other machines" in done.stderr
    assert "halflife keys create" in done.stderr


HOSTS = {
    "127.0.0.1": "127.0.0.1", EVERYWHERE: "127.0.0.1", "::": "[::1]", "::1": "[::1]", "[::1]": "[::1]", "box": "box"
}  # fmt: skip


@pytest.mark.parametrize("listening, reached", HOSTS.items())
def test_a_service_is_asked_where_it_listens(listening: str, reached: str) -> None:
    assert supervisor.reached_at(listening) == reached


def test_keys_are_seen_wherever_they_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not supervisor.keyed({"HALFLIFE_KEYS": "", "HALFLIFE_SECRETS_DIR": str(tmp_path)})
    assert supervisor.keyed({"HALFLIFE_KEYS": "[]"})
    assert supervisor.keyed({"HALFLIFE_KEYS_FILE": "keys.json"})
    (tmp_path / "halflife_keys").write_text("\n")
    assert not supervisor.keyed({"HALFLIFE_SECRETS_DIR": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halflife_keys").write_text("[]")
    assert not supervisor.keyed({"HALFLIFE_SECRETS_DIR": ""})
    assert supervisor.keyed({"HALFLIFE_SECRETS_DIR": str(tmp_path)})


# ---- with a node ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a stack that runs in the background, with the sample loaded; ended after the module's tests."""
    folder = tmp_path_factory.mktemp("stack")
    try:
        # Two at once: one starts it, the other waits for that one.
        with ThreadPoolExecutor(2) as pool:
            up = [pool.submit(halflife, "up", "--detach", "--no-prepare", data=folder) for _ in range(2)]
        done, other = sorted((each.result() for each in up), key=lambda done: "runs already" in done.stdout)
        assert (done.returncode, other.returncode) == (0, 0), done.stderr + other.stderr
        assert ("runs already" in done.stdout, "runs already" in other.stdout) == (False, True)
        assert "api            http://127.0.0.1:" in done.stdout
        done = halflife("load", str(SAMPLE), "-c", "handbook", "--json", data=folder)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["created"] == len(SAMPLE.read_text("utf-8").splitlines())
        yield folder
    finally:
        halflife("down", data=folder)


def upsert(api: str, name: str) -> None:
    body = {"documents": [{"id": name, "text": f"marker {name}", "creation_time": "2026-01-02"}]}
    answer = httpx2.post(f"{api}/v1/collections/handbook/documents", json=body, timeout=60)
    assert answer.json()["failed"] == 0, answer.text


def stored(api: str, name: str) -> bool:
    answer = httpx2.get(f"{api}/v1/collections/handbook/documents/{name}", timeout=10)
    return answer.status_code == 200


@pytest.mark.node
def test_the_stack_runs_and_says_where(data: Path) -> None:
    done = until_it_succeeds("status", "--json", data=data)
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["status"] == "ok"
    assert told["nodes"] == 1
    assert httpx2.get(f"{told['api']}/livez", timeout=60).status_code == 200
    assert httpx2.get(told["elasticsearch"], timeout=60).json()["version"]["number"].startswith("9.")
    assert httpx2.get(f"{told['embedder']}/v1/models", timeout=60).status_code == 200
    secret = data / "cursor.secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert len(secret.read_text().strip()) >= 32
    assert {path.name for path in (data / "logs").iterdir()} >= {"api.log", "embedder.log", "stack.log"}


@pytest.mark.node
def test_starting_twice_says_where_it_runs(data: Path) -> None:
    before = status(data)
    again = halflife("up", "--detach", data=data)
    assert again.returncode == 0
    assert before["api"] in again.stdout
    assert "runs already" in again.stdout
    assert status(data)["pids"] == before["pids"]
    in_front = halflife("up", data=data)
    assert in_front.returncode == 1
    assert "already" in in_front.stderr
    assert before["api"] in in_front.stdout


@pytest.mark.node
def test_the_command_line_and_http_show_the_same_ranking(data: Path) -> None:
    query = "How many days of unused annual leave may I carry over into the next year?"
    request = {
        "collection": "handbook",
        "query": query,
        "top_k": 5,
        "decay": {"half_life": "365d"},
        "as_of": "2026-06-30",
    }
    api = status(data)["api"]
    curled = httpx2.post(f"{api}/v1/search", json=request, timeout=60).json()
    options = ("-c", "handbook", "-k", "5", "--decay", "365d", "--as-of", "2026-06-30")
    done = halflife("search", query, *options, "--json", data=data)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [(hit["id"], hit["score"]) for hit in said["hits"]] == [
        (hit["id"], hit["score"]) for hit in curled["hits"]
    ]
    assert said["hits"][0]["id"] == "leave-policy-2026"
    table = halflife("search", query, *options, data=data).stdout
    places = [table.index(hit["id"]) for hit in said["hits"]]
    assert places == sorted(places)
    why = halflife("why", query, "leave-policy-2021", *options, data=data)
    assert why.returncode == 0, why.stderr
    assert "leave-policy-2021" in why.stdout


@pytest.mark.node
def test_the_doctor_finds_nothing_wrong_and_leaves_nothing_behind(data: Path) -> None:
    elasticsearch = status(data)["elasticsearch"]
    before = httpx2.get(f"{elasticsearch}/_cat/indices?h=index&expand_wildcards=all", timeout=60).text
    done = until_it_succeeds("doctor", "--json", data=data)
    checks = json.loads(done.stdout)["checks"]
    assert done.returncode == 0, checks
    assert {check["check"]: check["verdict"] for check in checks} == dict.fromkeys(
        (
            "settings", "cluster", "health", "features", "template halflife-settings", "template halflife-mappings",
            "template halflife-collections", "collection handbook", "clocks", "disks", "embedder", "api",
        ),
        "ok",
    )  # fmt: skip
    after = httpx2.get(f"{elasticsearch}/_cat/indices?h=index&expand_wildcards=all", timeout=60).text
    assert after == before


@pytest.mark.node
def test_the_doctor_sees_an_embedder_that_does_not_fit(data: Path) -> None:
    told = halflife("doctor", "--json", data=data, HALFLIFE_EMBEDDING_DIMS="12")
    checks = {check["check"]: check for check in json.loads(told.stdout)["checks"]}
    assert told.returncode == 1
    assert checks["embedder"]["verdict"] == "failed"
    assert checks["collection handbook"]["verdict"] == "failed"
    assert "384" in checks["collection handbook"]["detail"]
    assert checks["collection handbook"]["remedy"]


@pytest.mark.node
def test_a_folder_is_loaded_with_file_times_and_found(data: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "quokka.md").write_text(
        "# About quokkas\nA quokka is small and smiles.", encoding="utf-8"
    )
    os.utime(tmp_path / "sub" / "quokka.md", (1_700_000_000, 1_700_000_000))
    loaded = halflife("load", str(tmp_path), "-c", "folder", data=data)
    assert loaded.returncode == 0, loaded.stderr
    assert "1 new" in loaded.stdout
    assert "1 unchanged" in halflife("load", str(tmp_path), "-c", "folder", data=data).stdout
    [hit] = json.loads(halflife("search", "quokka", "-c", "folder", "--json", data=data).stdout)["hits"]
    assert (hit["id"], hit["title"], hit["creation_time"]) == (
        "sub/quokka.md",
        "About quokkas",
        "2023-11-14T22:13:20.000Z",
    )


@pytest.mark.node
def test_an_api_in_the_foreground_against_services_elsewhere_ends_with_ctrl_c(
    data: Path, tmp_path: Path
) -> None:
    there = status(data)
    environment = {
        **os.environ,
        "HALFLIFE_ELASTICSEARCH_URL": there["elasticsearch"],
        "HALFLIFE_EMBEDDING_BASE_URL": f"{there['embedder']}/v1",
    }
    process = subprocess.Popen(
        [*HALFLIFE, "up", "--data", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        # As in a terminal: the whole group gets the signal, and nobody below the supervisor may be confused by it.
        start_new_session=True,
    )
    try:
        eventually(lambda: stack.check(tmp_path).status == "ok")
        here = status(tmp_path)
        assert (here["nodes"], here["elasticsearch"]) == (0, there["elasticsearch"])
        assert set(here["pids"]) == {"api"}
        assert here["api"] != there["api"]
        processes = everyone(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "Ctrl-C ends it." in output
    assert "Traceback" not in output
    assert not any(found.alive for found in processes)
    assert stack.read_state(tmp_path) is None
    assert until_it_succeeds("status", data=data).returncode == 0


@pytest.mark.node
def test_keys_and_host_reach_the_api_that_up_starts(data: Path, tmp_path: Path) -> None:
    there, keys = status(data), tmp_path / "keys.json"
    made = subprocess.run(
        [*HALFLIFE, "keys", "create", "reader", "--collections", "handbook", "--file", str(keys)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    token = made.stdout.strip()
    folder = tmp_path / "stack"
    try:
        up = halflife(
            "up", "--detach", data=folder,
            HALFLIFE_ELASTICSEARCH_URL=there["elasticsearch"], HALFLIFE_EMBEDDING_BASE_URL=f"{there['embedder']}/v1",
            HALFLIFE_KEYS_FILE=str(keys), HALFLIFE_HOST=EVERYWHERE,
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        assert "HALFLIFE_KEY or --key" in up.stdout
        assert until_it_succeeds("status", data=folder).returncode == 0
        assert status(folder)["api"].startswith("http://127.0.0.1:")
        # Another address of this machine answers too.
        elsewhere = status(folder)["api"].replace("127.0.0.1", "127.0.0.2")
        assert httpx2.get(f"{elsewhere}/livez", timeout=60).status_code == 200
        unknown = halflife("search", "leave", "-c", "handbook", data=folder)
        assert unknown.returncode == 1
        known = halflife("search", "leave", "-c", "handbook", data=folder, HALFLIFE_KEY=token)
        assert known.returncode == 0, known.stderr
    finally:
        halflife("down", data=folder)


@pytest.mark.node
def test_parts_that_are_killed_are_started_again_and_nothing_acknowledged_is_missing(data: Path) -> None:
    before = status(data)
    upsert(before["api"], "before-the-kill")
    for name in ("node-1", "api"):
        os.kill(before["pids"][name], signal.SIGKILL)
    eventually(lambda: status(data)["restarts"] >= 2)
    health = stack.wait_until_healthy(data, print, PATIENCE_S)
    assert health.status == "ok", health
    after = status(data)
    assert {name: after[name] for name in ("api", "elasticsearch", "embedder")} == {
        name: before[name] for name in ("api", "elasticsearch", "embedder")
    }
    assert after["pids"]["node-1"] != before["pids"]["node-1"]
    assert eventually(lambda: stored(after["api"], "before-the-kill"))
    log = data / "logs" / "stack.log"
    assert "node-1 died; starting it again" in log.read_text("utf-8")
    assert eventually(lambda: "node-1 answers again" in log.read_text("utf-8"))


@pytest.mark.node
def test_no_part_outlives_its_supervisor_and_the_next_start_finds_everything(data: Path) -> None:
    before = status(data)
    upsert(before["api"], "before-the-crash")
    processes = everyone(data)
    os.kill(processes[0].pid, signal.SIGKILL)
    eventually(lambda: not any(process.alive for process in processes))
    assert halflife("status", data=data).returncode == 3
    done = halflife("up", "--detach", "--no-prepare", data=data)
    assert done.returncode == 0, done.stderr
    after = status(data)
    assert {name: after[name] for name in ("api", "elasticsearch", "embedder")} == {
        name: before[name] for name in ("api", "elasticsearch", "embedder")
    }
    assert stored(after["api"], "before-the-crash")
    assert stored(after["api"], "leave-policy-2026")


@pytest.mark.node
def test_down_leaves_no_process(data: Path) -> None:
    processes = everyone(data)
    assert len(processes) == 4
    assert all(process.alive for process in processes)
    done = halflife("down", data=data)
    assert done.returncode == 0
    assert "Stopped" in done.stdout
    assert not any(process.alive for process in processes)
    assert stack.read_state(data) is None
    again = halflife("down", data=data)
    assert (again.returncode, "No stack runs" in again.stdout) == (0, True)
