"""The tour that quickstart shows: real documents, both orders of each question, and commands that work when pasted."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pytest

from scripts import stack, tour
from scripts.client import Client
from scripts.stack import Process, StackFailed
from tests.fakes import FarEnd, Reply, Seen

PATIENCE_S = 300.0
TOUR = (sys.executable, "-P", "-m", "scripts.tour", "--no-prepare")


@dataclass
class Running:
    """A tour under way: its output so far, and the processes of its stack."""

    process: "subprocess.Popen[str]"
    data: Path
    output: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    waits: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if "until you press Ctrl-C" in line:
                self.waits.set()
        self.ended.set()
        self.waits.set()

    @property
    def text(self) -> str:
        return "".join(self.output)


def test_a_stack_that_is_ended_elsewhere_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`halflife down` in another terminal ends it with 0; what fails ends with something else."""
    tour._wait(subprocess.Popen([sys.executable, "-c", ""]), tmp_path)
    assert "ended in order" in capsys.readouterr().err
    with pytest.raises(StackFailed, match="by itself"):
        tour._wait(subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]), tmp_path)


@pytest.mark.parametrize("held, told", [
    (0, "67 new"), (1, "67 new"), (67, "holds 90 documents already"), (None, "documents of yours"),
])  # fmt: skip
def test_the_sample_is_loaded_beside_itself_only(held: int | None, told: str) -> None:
    ids = [line["id"] for line in tour.sample_lines("corpus.jsonl")]

    def answer(seen: Seen) -> Reply:
        if seen.method == "POST":
            return Reply(
                body={"items": [{"id": d["id"], "status": "created"} for d in seen.body["documents"]]}
            )
        if seen.path.endswith("/documents?size=1"):
            return Reply(body={"total": 0 if held == 0 else 90, "documents": []})
        return Reply() if unquote(seen.path).rpartition("/")[2] in ids[: held or 0] else Reply(status=404)

    with FarEnd(answer) as api, Client(api.url) as client:
        if held is None:
            with pytest.raises(StackFailed, match=told):
                tour.load_sample(client)
        else:
            assert told in tour.load_sample(client)
    assert any(seen.method == "POST" for seen in api.requests) == (held in (0, 1))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tour that has shown everything and waits for Ctrl-C."""
    data = tmp_path_factory.mktemp("tour")
    process = subprocess.Popen(
        [*TOUR, "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "140", "HALFLIFE_EMBEDDING_QUERY_TIMEOUT_S": "60"},
    )
    shown = Running(process, data)
    reader = threading.Thread(target=shown.read)
    reader.start()
    try:
        assert shown.waits.wait(PATIENCE_S), shown.text
        yield shown
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        process.kill()
        process.wait()
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()
        stack.stop(data, print)


def test_questions_of_the_tour_are_marked_and_say_what_to_look_at() -> None:
    asked = tour.questions()
    assert 3 <= len(asked) <= 6
    assert all(question["why"] and question["as_of"] and question["text"] for question in asked)
    assert any("filter" in tour.request_of(question, "off") for question in asked)


def test_next_steps_tell_the_folder_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = tour.next_steps("http://127.0.0.1:8080", tmp_path / ".halflife", runs_on=True)
    assert not any("--data" in line or "--url" in line for line in plain)
    other = tour.next_steps("http://127.0.0.1:8081", tmp_path / "x", runs_on=False)
    assert any(f"up --detach --data {tmp_path / 'x'}" in line for line in other)


@pytest.mark.node
def test_decay_is_seen_to_change_the_order(running: Running) -> None:
    text = running.text
    assert "Traceback" not in text
    assert "67 new" in text
    for question in tour.questions():
        assert question["text"] in text
    rows = [line for line in text.splitlines() if re.search(r"▲|▼", line)]
    # The current page of each changed subject rises to the first place, an outdated one falls.
    assert sum("▲ 1 " in row for row in rows) >= 3
    assert sum("▼" in row for row in rows) >= 3
    assert "leave-policy-2026" in next(row for row in rows if "▲ 1 " in row)
    assert "evergreen" in text


@pytest.mark.node
def test_the_lines_for_what_comes_next_work_when_pasted(running: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    lines = [line.strip().partition("          # ")[0] for line in running.text.splitlines()]
    curl = next(line for line in lines if line.startswith("curl "))
    answer = subprocess.run(
        ["sh", "-c", curl], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert json.loads(answer.stdout)["hits"][0]["id"] == "leave-policy-2026"
    docs = next(line for line in lines if line.endswith("/docs"))
    assert subprocess.run(["curl", "-sf", docs], capture_output=True, check=False).returncode == 0
    pasted = [line for line in lines if re.search(r"halflife (search|why|doctor) ", f"{line} ")]
    assert len(pasted) == 3
    for line in pasted:
        done = subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.mark.node
def test_a_second_tour_uses_the_stack_that_runs_and_leaves_it_running(running: Running) -> None:
    before = stack.read_state(running.data)
    done = subprocess.run(
        [*TOUR, "--once", "--data", str(running.data)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "Using the stack that runs" in done.stderr
    assert "holds 67 documents already" in done.stderr
    assert "▲ 1 " in done.stdout
    assert stack.read_state(running.data) == before


@pytest.mark.node
def test_ctrl_c_ends_the_tour_and_everything_it_started(running: Running) -> None:
    state = stack.read_state(running.data)
    assert state is not None
    processes: list[Process] = [state.supervisor, *state.processes]
    assert all(process.alive for process in processes)
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.process.wait(PATIENCE_S) == 0
    assert running.ended.wait(10)
    assert not any(process.alive for process in processes)
    assert stack.read_state(running.data) is None
    assert "Traceback" not in running.text
