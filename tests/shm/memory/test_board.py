"""Boards: who can read and write them, histograms, and the totals of all frontends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.shm.memory import region
from penstock.shm.memory.board import BackendBoard, Board, FrontendBoard, FrontendTotals

ROOT = Path(__file__).parents[3]


def test_only_the_owner_writes_a_board() -> None:
    board = BackendBoard.create()
    reader = BackendBoard.attach(board.fd)
    board.steps += 3
    board.waiting = (1 << 64) - 1
    assert (reader.steps, reader.waiting) == (3, (1 << 64) - 1)
    assert reader.values()["steps"] == 3
    with pytest.raises(TypeError):
        reader.steps = 4
    with pytest.raises(PermissionError):
        BackendBoard.attach(board.fd, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(board.fd, b"x", 100)
    with pytest.raises(PermissionError):
        os.ftruncate(board.fd, 0)
    reader.close()
    board.close()
    board.close()


READER_PROCESS = """
import sys
from penstock.shm.memory.board import BackendBoard
board = BackendBoard.attach(int(sys.argv[1]))
print(board.generated_tokens, flush=True)
sys.stdin.readline()
print(board.generated_tokens, board.seconds_since_beat() < 60, flush=True)
"""


def test_another_process_reads_the_writers_values() -> None:
    board = BackendBoard.create()
    board.generated_tokens = 41
    with subprocess.Popen(
        [sys.executable, "-c", READER_PROCESS, str(board.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[board.fd],
        text=True,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "41\n"
        board.generated_tokens += 1
        board.beat()
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "42 True\n"
    board.close()


def test_board_of_another_kind_is_refused() -> None:
    fd = FrontendBoard.create_fd()
    with pytest.raises(region.RegionError, match="BackendBoard"):
        BackendBoard.attach(fd)
    board = FrontendBoard.attach(fd, writable=True)
    board.tokens_streamed = 5
    reader = FrontendBoard.attach(fd)
    assert reader.tokens_streamed == 5
    reader.close()
    board.close()
    os.close(fd)


def test_histogram_counts_each_value_under_the_first_bound_not_below_it() -> None:
    board = FrontendBoard.private()
    first, second = FrontendBoard.itl_us.bounds[:2]
    for value in (0, first, first + 1, second, FrontendBoard.itl_us.bounds[-1] + 1):
        board.itl_us.observe(value)
    board.itl_us.observe(3, 10)
    buckets, total = FrontendBoard.itl_us.read(board.values())
    assert (buckets[0], buckets[1], buckets[-1], sum(buckets)) == (12, 2, 1, 15)
    assert total == 2 * first + 1 + second + FrontendBoard.itl_us.bounds[-1] + 1 + 30


def test_backend_board_has_every_frontend_field_except_the_pid() -> None:
    totals = [name.removeprefix(Board.TOTALS) for name in BackendBoard.fields if name.startswith(Board.TOTALS)]
    assert totals == [name for name in FrontendBoard.fields if name != "pid"]


def test_totals_keep_counters_of_departed_frontends_but_not_present_values() -> None:
    totals, backend = FrontendTotals(), BackendBoard.create()
    stays, goes = FrontendBoard.private(), FrontendBoard.private()
    for board, number in ((stays, 5), (goes, 70)):
        board.pid = 1000
        board.requests_open = board.tokens_streamed = number
        board.ttft_us.observe(number)
    backend.show_totals(2, totals.sums([stays, goes]))
    assert (backend.frontends, backend.values()["frontends_tokens_streamed"]) == (2, 75)
    assert backend.values()["frontends_requests_open"] == 75
    totals.retire(goes)
    stays.tokens_streamed = 6
    backend.show_totals(1, totals.sums([stays]))
    values = backend.values()
    assert (values["frontends_tokens_streamed"], values["frontends_requests_open"]) == (76, 5)
    assert FrontendBoard.ttft_us.read(values, Board.TOTALS)[1] == 75
    assert (backend.pid, backend.heartbeat_ns, backend.steps) == (0, 0, 0)
    backend.close()


@pytest.mark.parametrize("number", [0, 1, (1 << 64) - 1])
def test_any_value_on_a_frontend_board_can_be_summed(number: int) -> None:
    totals, backend = FrontendTotals(), BackendBoard.create()
    boards = [FrontendBoard.private() for _ in range(3)]
    for board in boards:
        for name in FrontendBoard.fields:
            setattr(board, name, number)
    totals.retire(boards[0])
    backend.show_totals(2, totals.sums(boards[1:]))
    assert backend.values()["frontends_tokens_streamed"] == 3 * number % (1 << 64)
    backend.close()


def test_adding_a_board_adds_each_number() -> None:
    total, more = FrontendBoard.private(), FrontendBoard.private()
    total.tokens_streamed, more.tokens_streamed, more.pid = 3, 4, 9
    more.count_response(418)
    total.add(more)
    assert (total.tokens_streamed, total.pid, total.responses_other) == (7, 9, 1)
