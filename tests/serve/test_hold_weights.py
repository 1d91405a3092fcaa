"""`penstock serve --hold-weights`: weights in memory that outlives backends."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from penstock.backend.options import BackendOptions
from penstock.serve.backend_children import BackendChildren, SharedWeights
from tests.serve.serve_process import Serve, Start
from tests.serve.streams import samples
from tests.system.processes import wait_until

MAPPED = "of packed weights that an earlier backend left"


EMULATED = "tests.backend.passes.cuda.emulated_pass:EmulatedCudaPass"
MEMFDS = {"decoder": "memfd:penstock-weights", EMULATED: "memfd:penstock-stub-block"}
"""Forward pass → the memory that its backends share."""


def weights_memory(pid: int, name: str) -> tuple[int, int]:
    """Resident and proportional kilobytes of a process's mappings of shared weights."""
    sums = {"Rss:": 0, "Pss:": 0}
    is_weights = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word, *others = line.split()
        if not word.endswith(":"):
            is_weights = name in line
        elif is_weights and word in sums:
            sums[word] += int(others[0])
    return sums["Rss:"], sums["Pss:"]


def check_that_both_share(serve: Serve, client: httpx.Client, name: str) -> list[int]:
    """Wait for the next backend that maps weights, and for both to serve; return their pids."""
    serve.errors.wait_for(MAPPED)
    wait_until(lambda: sum(samples(client, "penstock_backend_up")) == 2, 60.0)
    pids = serve.pids("penstock.backend.main")
    held_bytes = samples(client, "penstock_held_weights_bytes")[0]
    for resident_kb, proportional_kb in (weights_memory(pid, name) for pid in pids):
        assert resident_kb * 1024 > 0.9 * held_bytes > 0
        assert proportional_kb < 0.6 * resident_kb
    return pids


@pytest.mark.parametrize("forward_pass", MEMFDS, ids=["cpu", "emulated GPU"])
def test_replicas_share_weights_and_the_successor_of_a_killed_backend_maps_them(
    start: Start, forward_pass: str
) -> None:
    options = ("--forward-pass", forward_pass, "--gpu", "none", "--kv-budget", "4MB", "--replicas", "2")
    options += ("--max-running", "2", "--max-batch-tokens", "16", "--hold-weights")
    serve = start(*options, environment={"PYTHONPATH": str(Path(__file__).parents[2])})
    serve.wait_until_ready()
    serve.errors.wait_for("of packed weights are left for the next backend")
    expected = serve.complete()
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        os.kill(check_that_both_share(serve, client, MEMFDS[forward_pass])[0], signal.SIGKILL)
        check_that_both_share(serve, client, MEMFDS[forward_pass])
    assert serve.complete() == expected
    assert serve.stop() == 0


def waiting_backends(serve: Serve) -> list[int]:
    pids = serve.pids("penstock.backend.main")
    return [pid for pid in pids if b"--turn-fd" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_waiting_backend_takes_the_place_of_a_killed_one(start: Start) -> None:
    serve = start("--forward-pass", "decoder", "--gpu", "none", "--kv-budget", "4MB", "--hold-weights")
    serve.wait_until_ready()
    expected = serve.complete()
    wait_until(lambda: len(waiting_backends(serve)) == 1, 60.0)
    (waiting,) = waiting_backends(serve)
    (running,) = set(serve.pids("penstock.backend.main")) - {waiting}
    os.kill(running, signal.SIGKILL)
    serve.errors.wait_for(MAPPED)
    assert serve.complete() == expected
    assert waiting in serve.pids("penstock.backend.main")
    assert serve.stop() == 0


def test_backends_of_one_model_share_a_place_for_weights_until_the_last_is_closed() -> None:
    lines: list[str] = []
    children = BackendChildren(lines.append, 30.0, 2, may_die_often=False, crashes=None, weights=SharedWeights())
    options = BackendOptions(flight_recorder=0)
    first, second = (children.prepare(replace(options, socket=Path(name))) for name in ("a", "b"))
    other = children.prepare(replace(options, quantize="int8"))
    assert first.weights is not None
    assert second.weights is first.weights is not other.weights
    assert set(first.weights.fds) <= set(first.spec("backend").pass_fds)
    assert first.spec("backend").standby_option is None  # the other replica goes on meanwhile
    fd = os.memfd_create("test")
    first.weights.leave([fd])
    os.close(fd)
    first.close()
    for returncode in (-signal.SIGKILL, 1, -signal.SIGBUS):
        assert not second.weights.is_empty
        on_crash = second.spec("backend").on_crash
        assert on_crash is not None
        on_crash(returncode)
    assert second.weights.is_empty  # a page that is broken would kill each backend that maps it
    assert "dropped: their memory may be broken" in lines[-1]
    second.close()
    assert second.weights.fds == (-1, -1)
    other.close()
