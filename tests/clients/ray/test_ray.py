"""`penstock ray` on a Ray cluster of several nodes, which are processes of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.cluster_utils import Cluster

from penstock.tools.free_port import free_port

NUM_NODES, NUM_SERVERS = 3, 2
OBJECT_STORE_BYTES = 80 << 20
PASS = ("--forward-pass", "penstock.backend.passes.fake:PacedFakePass", "--kv-budget", "64MB", "--gpu", "none")
"""Steps of 4 ms: a stream of 500 tokens lasts two seconds."""
WAIT_S = 120.0


def wait_until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


class Fleet:
    """`penstock ray up` in its own process, and the other commands."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.common = ("--address", cluster.address, "--router-dir", str(directory / "router"))
        self.up: subprocess.Popen[str] | None = None

    def start(self, *options: str, replicas: int = NUM_SERVERS) -> None:
        own = ("--listen", f"127.0.0.1:{self.port}", "--nodes-with", "cpu", "--replicas", str(replicas))
        argv = [_program(), "ray", "up", *self.common, *own, *PASS, *options]
        self.up = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.up.stdout is not None
        assert self.up.stdout.readline() == f"Ready: {self.url}/v1\n"

    def stop(self) -> int:
        """Servers and router go on."""
        assert self.up is not None
        with self.up:
            self.up.terminate()
        return self.up.returncode

    def run(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        argv = [_program(), "ray", command, *self.common, *options]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=WAIT_S)

    def reports(self) -> dict[int, dict[str, Any]]:
        lines = map(json.loads, self.run("status", "--json").stdout.splitlines())
        return {line["number"]: line["report"] for line in lines if line["report"] is not None}

    def complete(self, prompt: str, max_tokens: int = 4) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S)

    def node(self, node_id: str) -> Any:
        return next(node for node in self.cluster.worker_nodes if node.node_id == node_id)


def _program() -> str:
    return str(Path(sys.executable).with_name("penstock"))


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path)
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
        for _ in range(NUM_NODES):
            cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        fleet = Fleet(cluster, tmp_path)
        yield fleet
        if fleet.up is not None:
            fleet.stop()
            fleet.run("down", "--timeout-s", "1")
    finally:
        cluster.shutdown()


class Reader(threading.Thread):
    """A client of a stream that lingers. It comes back by itself, by sending its request again."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        super().__init__()
        self.fleet, self.number = fleet, number
        self.stream: str | None = None
        self.events: list[str] = []
        self.has_begun = threading.Event()
        self.num_cuts = 0

    def run(self) -> None:
        body = {
            "prompt": f"{self.number} " * 200,
            "max_tokens": 500,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
        }
        while not self.events or not self.events[-1].endswith("data: [DONE]"):
            headers = {"X-Penstock-Linger": "60"}
            if self.stream is not None:
                headers["X-Penstock-Stream"] = self.stream
            if self.events:
                headers["Last-Event-ID"] = str(len(self.events) - 1)
            try:
                self._read(body, headers)
            except httpx.TransportError:
                self.num_cuts += 1

    def _read(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        unread = ""
        url = f"{self.fleet.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=WAIT_S) as response:
            if response.status_code in (502, 503):  # at the moment of the death
                self.num_cuts += 1
                return
            assert response.status_code == 200, response.read()
            self.stream = response.headers["X-Penstock-Stream"]
            for text in response.iter_text():
                *whole, unread = (unread + text).split("\n\n")
                self.events += [event for event in whole if not event.startswith(":")]
                if len(self.events) > 20:
                    self.has_begun.set()

    def read_again(self) -> list[str]:
        """Return all events, without their time, of the same request sent once more."""
        assert self.stream is not None
        other = Reader(self.fleet, self.number)
        other.stream = self.stream
        other.run()
        return other.without_time()

    def without_time(self) -> list[str]:
        return [re.sub(r'"created":\d+', "", event) for event in self.events]

    @property
    def server(self) -> int:
        assert self.stream is not None
        return int(self.stream.removeprefix("cmpl-")[:4], 16)


def test_killed_node_costs_no_stream_and_no_later_request(fleet: Fleet) -> None:
    fleet.start()
    before = fleet.reports()
    assert sorted(before) == list(range(NUM_SERVERS))
    assert len({report["node_id"] for report in before.values()}) == NUM_SERVERS
    readers = [Reader(fleet, number) for number in range(12)]
    for reader in readers:
        reader.start()
    for reader in readers:
        assert reader.has_begun.wait(WAIT_S)
    victim = before[0]["node_id"]
    fleet.cluster.remove_node(fleet.node(victim), allow_graceful=False)
    with ThreadPoolExecutor(8) as pool:  # none of them learns of it
        later = list(pool.map(lambda number: fleet.complete(f"later {number}").status_code, range(64)))
    for reader in readers:
        reader.join(WAIT_S)
    assert set(later) == {200}
    for reader in readers:
        ids = [int(event.partition("\n")[0].removeprefix("id: ")) for event in reader.events]
        assert ids == list(range(len(ids)))
        whole = reader.read_again()  # by one server, in one go
        assert whole == reader.without_time()
    cut = [reader for reader in readers if reader.num_cuts]
    assert cut
    assert {reader.server for reader in cut} == {0}
    assert [reader.num_cuts for reader in readers if reader.server == 1] == [0] * sum(r.server == 1 for r in readers)
    wait_until(lambda: fleet.reports().get(0, {}).get("phase") == "up")
    after = fleet.reports()
    assert after[0]["node_id"] not in {victim, after[1]["node_id"]}
    wait_until(lambda: len(json.loads((Path(fleet.common[3]) / "servers.json").read_text())) == NUM_SERVERS)


def test_servers_and_router_outlive_the_command_and_down_ends_them(fleet: Fleet) -> None:
    fleet.start()
    before = fleet.reports()
    refused = fleet.run("down")  # while a keeper would restart what it ends
    assert (refused.returncode, "stop it first" in refused.stderr) == (1, True)
    assert fleet.stop() == 0
    assert fleet.complete("nobody keeps it").status_code == 200
    fleet.start(replicas=1)  # it finds both, and sends one away
    wait_until(lambda: sorted(fleet.reports()) == [0])
    assert fleet.reports()[0]["server"] == before[0]["server"]
    assert fleet.complete("one server").status_code == 200
    assert fleet.stop() == 0
    assert fleet.run("down").returncode == 0
    status = fleet.run("status")
    assert (status.returncode, status.stdout) == (1, "")
    with pytest.raises(httpx.TransportError):
        fleet.complete("nobody listens")
    fleet.up = None


def test_server_that_dies_is_started_again_by_ray(fleet: Fleet) -> None:
    fleet.start(replicas=1)
    before = fleet.reports()[0]
    assert fleet.stop() == 0  # without a keeper
    port = before["server"]["port"]
    pid = next(pid for pid in _pids("penstock.main") if _listens(pid, port))
    os.kill(pid, 9)
    wait_until(lambda: fleet.reports().get(0, before) != before and fleet.reports()[0]["phase"] == "up")
    assert fleet.reports()[0]["node_id"] == before["node_id"]
    fleet.start(replicas=1)  # a keeper tells the router the new address
    wait_until(lambda: fleet.complete("again").status_code == 200)


def test_bad_options_of_a_server_end_the_command(fleet: Fleet) -> None:
    ended = fleet.run("up", "--nodes-with", "cpu", "--router", "none", "--model", "/does/not/exist", "--gpu", "none")
    assert ended.returncode == 1
    assert "a server does not start: " in ended.stderr
    assert "/does/not/exist" in ended.stderr.splitlines()[-1]


def _pids(module: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if module.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _listens(pid: int, port: int) -> bool:
    """Whether one of the process's descriptors is the socket that listens on the port."""
    table = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inodes = {
        f"socket:[{entry[9]}]" for entry in table if entry[3] == "0A" and int(entry[1].partition(":")[2], 16) == port
    }
    return any(os.readlink(fd) in inodes for fd in Path(f"/proc/{pid}/fd").iterdir())
