"""Servers of other projects: how they are started, paused and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
from typing import Any

import pytest
import uvloop

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.peers import Peer, completion_probe, peer_server
from penstock.tools.bench.harness.server_process import server_process
from penstock.tools.bench.load_generator.sending import send_one
from penstock.tools.bench.load_generator.stats import ObservedRequest, Outcome
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.bench.load_generator.workload import PlannedRequest
from penstock.tools.bench.serving.openvino_peer import Deliver, Server
from penstock.tools.processes import descendants, state_of, tree_cpu_s
from tests.system.processes import wait_until
from tests.tools.bench.conftest import fake_peer

PROBE = completion_probe("completions")


def test_peer_is_a_name_a_command_and_an_address() -> None:
    peer = Peer.parse("vllm=OMP=2 python -m vllm --x 1,2,http://127.0.0.1:8000/v1")
    assert peer == Peer("vllm", "OMP=2 python -m vllm --x 1,2", "http://127.0.0.1:8000/v1")


@pytest.mark.parametrize("text", ["", "x", "x=run", "x=run,", "=run,http://h:1", "x=,http://h:1", "x='run,http://h:1"])
def test_peer_with_a_missing_part_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is not NAME=COMMAND,URL"):
        Peer.parse(text)


def test_peer_answers_when_its_context_begins_and_is_gone_afterwards() -> None:
    with peer_server(Peer.parse(fake_peer("one")), PROBE) as process:
        peer = os.pidfd_open(process.pid)
        assert not select.select([peer], [], [], 0)[0]
    assert select.select([peer], [], [], 0)[0]
    os.close(peer)


def test_peer_that_ends_at_its_start_shows_its_last_lines() -> None:
    peer = Peer.parse(fake_peer("one"))
    broken = Peer(peer.name, "sh -c 'echo no such model; exit 3'", peer.url)
    reason = r"one ended with status 3 before it answered\nno such model"
    with pytest.raises(BenchError, match=reason), peer_server(broken, PROBE):
        pytest.fail("it does not answer")


def test_peer_that_refuses_requests_ends_the_run_with_its_answer() -> None:
    peer = Peer.parse(fake_peer("one", "404"))
    reason = "one refuses a request: status 404: refused"
    with pytest.raises(BenchError, match=reason), peer_server(peer, PROBE):
        pytest.fail("it does not answer")


def test_peer_does_not_start_where_another_server_listens() -> None:
    first = Peer.parse(fake_peer("one"))
    with peer_server(first, PROBE):
        second = Peer("two", "true", first.url)
        with pytest.raises(BenchError, match="already listens at http"), peer_server(second, PROBE):
            pytest.fail("the first one answers")


def test_pause_stops_all_processes_of_a_server_and_keeps_them() -> None:
    with server_process("x", ["sh", "-c", "sleep 1000 & wait"], os.environ) as server:
        wait_until(lambda: len(descendants(server.pid)) == 1, 10.0)
        pids = [server.pid, *descendants(server.pid)]
        child = os.pidfd_open(pids[1])
        with server.paused():
            wait_until(lambda: [state_of(pid) for pid in pids] == ["T", "T"], 10.0)
            with server.running():
                wait_until(lambda: "T" not in [state_of(pid) for pid in pids], 10.0)
            wait_until(lambda: [state_of(pid) for pid in pids] == ["T", "T"], 10.0)
        wait_until(lambda: "T" not in [state_of(pid) for pid in pids], 10.0)
    assert select.select([child], [], [], 10)[0]  # the shell ends at SIGTERM and leaves its child behind
    os.close(child)


def test_server_that_ends_while_it_runs_ends_the_measurement() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(BenchError, match=r"x ended with status -15 during the run\nlast words"))
        argv = ["sh", "-c", "echo last words; exec sleep 1000"]
        server = stack.enter_context(server_process("x", argv, os.environ))
        wait_until(lambda: "last words" in server.log_text(), 10.0)
        with server.paused(), server.running():
            server.process.terminate()
            server.process.wait()
        pytest.fail("nobody noticed")


def test_killed_benchmark_leaves_no_paused_server() -> None:
    code = (
        "import os, signal\n"
        "from penstock.tools.bench.harness.server_process import server_process\n"
        "with server_process('x', ['sleep', '1000'], os.environ) as server, server.paused():\n"
        "    print(server.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    # In a session of its own: a server's group is orphaned only if nobody else in its session is its parent.
    benchmark = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert benchmark.stdout is not None
    pid = int(benchmark.stdout.readline())
    server = os.pidfd_open(pid)
    wait_until(lambda: state_of(pid) == "T", 10.0)
    benchmark.kill()
    benchmark.communicate()
    assert select.select([server], [], [], 60)[0]
    os.close(server)


def test_cpu_time_of_a_tree_includes_that_of_ended_children() -> None:
    burn = f"{sys.executable} -I -c 'import time\nwhile time.process_time() < 0.3: pass'"
    with server_process("x", ["sh", "-c", f"{burn}; echo burnt; sleep 1000"], os.environ) as server:
        assert tree_cpu_s(server.pid) < 0.3
        wait_until(lambda: "burnt" in server.log_text(), 60.0)
        assert tree_cpu_s(server.pid) >= 0.25


class InstantPipeline:
    """Generates five tokens for any prompt, the last two together."""

    def ask(self, prompt: list[int], body: dict[str, Any], deliver: Deliver) -> None:
        assert (prompt, body["max_tokens"]) == ([1, 2, 3], 5)
        for tokens in ([7], [8], [9]):
            deliver(tokens, False)
        deliver([10, 11], True)


def test_openvino_peer_streams_the_tokens_of_its_pipeline() -> None:
    async def ask() -> tuple[ObservedRequest, ObservedRequest]:
        server = await asyncio.start_server(Server(InstantPipeline()).serve, "127.0.0.1", 0)
        address = ServerAddress(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server, address.connect() as target:
            body = target.encode(PlannedRequest([1, 2, 3], 5))
            return await send_one(target.http, body, 0.0), await send_one(target.http, body, 0.0)

    for record in uvloop.run(ask()):  # on one connection
        assert record.outcome is Outcome.COMPLETED
        assert (record.prompt_tokens, record.output_tokens, len(record.event_times_s)) == (3, 5, 4)
