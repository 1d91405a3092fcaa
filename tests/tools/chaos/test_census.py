"""Descriptors, children and memory of real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from penstock.tools.chaos.census import ProcessState, Watch, check_memory, take_census
from penstock.tools.chaos.ledger import Ledger

MIB = 1 << 20
STATE = ProcessState("worker", 10, 1000, descriptors=20, connections=0, rss_bytes=50 * MIB)


def watched(*states: ProcessState) -> Watch:
    watch = Watch()
    watch.take_base(states)
    return watch


def own_state() -> ProcessState:
    (state,) = take_census({"test": [os.getpid()]})
    return state


def test_process_that_has_ended_is_not_counted_before_it_is_waited_for() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert take_census({"other": [ended.pid]}) == []
    ended.wait()


def test_leaked_descriptor_is_found_and_a_closed_one_is_not(tmp_path: Path) -> None:
    watch = watched(own_state())
    assert watch.problems([own_state()]) == []
    with (tmp_path / "file").open("w"):
        ((name, text),) = watch.problems([own_state()])
    assert name == "descriptors were leaked"
    assert str(os.getpid()) in text
    assert watch.problems([own_state()]) == []


def test_tcp_connections_are_counted_apart_from_other_descriptors() -> None:
    before = own_state()
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0],
    ):
        state = own_state()
        assert (state.connections, state.descriptors) == (before.connections + 2, before.descriptors + 1)
        client.close()
        assert own_state().connections == before.connections + 1  # the server's side still holds it


def test_missing_and_additional_processes_are_found() -> None:
    other = replace(STATE, pid=11)
    watch = watched(STATE, other)
    assert watch.problems([STATE, replace(STATE, pid=99)]) == []  # restarted
    assert watch.problems([STATE]) == [("processes are missing or left over", "1 of worker instead of 2")]
    child = replace(STATE, pid=12, role="child of worker")
    names = [text for _, text in watch.problems([STATE, other, child])]
    assert names == ["1 of child of worker instead of 0"]


def test_compilers_of_grammars_come_and_go_with_their_descriptor() -> None:
    backend = replace(STATE, role="backend", descriptors=30)
    compiler = replace(STATE, pid=12, role="grammar compiler", descriptors=3)
    watch = watched(backend)
    assert watch.problems([replace(backend, descriptors=31), compiler]) == []
    assert watch.problems([replace(backend, descriptors=32), compiler]) != []
    assert watched(backend, compiler).problems([backend]) == []


def test_memory_may_grow_by_a_fixed_amount_and_by_a_share_of_the_requests() -> None:
    def grown(num_mib: int, num_requests: int) -> Ledger:
        watch, ledger = Watch(), Ledger()
        watch.note_memory([STATE], 1000)
        watch.note_memory([replace(STATE, rss_bytes=STATE.rss_bytes + num_mib * MIB)], 1000 + num_requests)
        check_memory(ledger, watch.growths())
        return ledger

    assert grown(24, 100).imbalances == {}
    assert grown(25, 100).imbalances == {"a process grew beyond its bound": 1}
    assert grown(24 + 8, 10_000).imbalances == {}
    assert "34,603,008 bytes in 10,000 requests" in str(grown(33, 10_000).examples)


def test_slope_is_that_of_a_straight_line_and_a_restarted_process_starts_anew() -> None:
    watch = Watch()
    for requests, rss_bytes in ((0, 1000), (10_000, 3000), (20_000, 5000)):
        watch.note_memory([replace(STATE, rss_bytes=rss_bytes)], requests)
    watch.note_memory([replace(STATE, started_ticks=2000)], 20_000)
    (growth,) = watch.growths()
    assert (growth.from_bytes, growth.to_bytes, growth.requests) == (1000, 5000, 20_000)
    assert round(growth.bytes_per_10k) == 2000


def test_role_whose_processes_were_all_replaced_is_named() -> None:
    backend = replace(STATE, pid=11, role="backend")
    watch = watched(STATE, backend)
    watch.note_memory([STATE, backend], 0)
    watch.note_memory([STATE, replace(backend, pid=12)], 1000)
    assert watch.unmeasured_roles(watch.growths()) == ["backend"]
