"""`penstock bench ipc`: CPU time to carry a token from the backend's loop to a frontend's stream, over the link."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from penstock.process.children import stop_with_parent
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.events import Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import Finish, ModelCard, Sampling, Started
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.options import MEASUREMENT, Counts, ReportOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from rich.table import Table

    from penstock.shm.client import TokenStream

STEP_S = 0.004
NUM_STEPS = 500
_VOCAB_SIZE = 32_000


@MEASUREMENT
@dataclass(frozen=True)
class IpcOptions:
    concurrency: Counts = (1, 4, 16, 32)
    """Concurrent streams. The table gets one row for each count."""


@dataclass(frozen=True, slots=True)
class IpcCost:
    """CPU time, user and system, of all threads of each side. An event is one token of one stream."""

    streams: int
    events: int
    events_per_message: float
    backend_cpu_us_per_event: float
    client_cpu_us_per_event: float
    client_cpu_us_per_message: float


def ipc(*, options: IpcOptions = IpcOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run:
        costs = []
        for num_streams in options.concurrency:
            with run.status(f"{num_streams} streams over the link alone"):
                costs.append(measure_ipc(num_streams))
        run.add("ipc", costs, ipc_table(costs))
    return run.exit_status


def measure_ipc(num_streams: int) -> IpcCost:
    """Run num_streams streams for NUM_STEPS steps, one every STEP_S. No queue builds up, so each step is one message.

    Raises BenchError if the backend's process ends before it has served them.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="penstock-ipc-") as directory:
        socket_path = Path(directory) / "backend.sock"
        backend = context.Process(target=_serve, args=(socket_path, num_streams, theirs), daemon=True)
        backend.start()
        theirs.close()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            client_cpu_s = runner.run(_stream(socket_path, num_streams, backend))
        try:
            backend_cpu_s, num_messages = ours.recv()
        except EOFError:
            raise BenchError("the link's other process ended during the run") from None
        backend.join()
    events = num_streams * NUM_STEPS
    return IpcCost(
        streams=num_streams,
        events=events,
        events_per_message=events / num_messages,
        backend_cpu_us_per_event=1e6 * backend_cpu_s / events,
        client_cpu_us_per_event=1e6 * client_cpu_s / events,
        client_cpu_us_per_message=1e6 * client_cpu_s / num_messages,
    )


def _serve(socket_path: Path, num_streams: int, report: Connection) -> None:
    stop_with_parent()
    card = ModelCard("ipc", "", 0, _VOCAB_SIZE, 4096, num_streams)
    board = BackendBoard.create()
    link = BackendLink(socket_path, card, board)
    wake_fd = os.eventfd(0)
    submissions: list[Submission] = []
    while len(submissions) < num_streams:
        board.beat()
        link.wait(0.1, wake_fd)
        submissions += [event for event in link.receive() if isinstance(event, Submission)]
    before_s = time.process_time()
    due_s = time.monotonic()
    for step in range(NUM_STEPS):
        finish = Finish.LENGTH if step == NUM_STEPS - 1 else Finish.NONE
        for submission in submissions:
            started = Started(submission.request_id, 0, 0.0) if step == 0 else None
            link.push(submission.frontend, submission.request_id, step, finish, started)
        link.flush()
        due_s += STEP_S
        while (rest_s := due_s - time.monotonic()) > 0:
            link.wait(rest_s, wake_fd)
            link.receive()
    report.send((time.process_time() - before_s, link.counters.messages_out))
    while link.frontends:
        link.wait(0.1, wake_fd)
        link.receive()
    link.close()
    board.close()


async def _stream(socket_path: Path, num_streams: int, backend: BaseProcess) -> float:
    """Return the CPU seconds from the moment that all streams have a token until the last stream ends."""
    client = BackendClient(socket_path)
    await client.start()
    while not client.ready:
        if not backend.is_alive():
            raise BenchError("the link's other process did not start")
        await asyncio.sleep(0.01)
    streams = [client.submit(GenerationRequest([1], NUM_STEPS, Sampling())) for _ in range(num_streams)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    before_s = time.process_time()
    await asyncio.gather(*(_read(stream) for stream in streams))
    cpu_s = time.process_time() - before_s
    await client.close()
    return cpu_s


async def _read(stream: TokenStream) -> None:
    async for _ in stream:
        pass


def ipc_table(costs: Sequence[IpcCost]) -> Table:
    columns = ("streams", "events /\nmessage", "backend CPU\nµs / event", "frontend CPU\nµs / event")
    title = f"A token from the backend's loop to a frontend's stream, a step every {1000 * STEP_S:g} ms"
    table = make_table(title, *columns, "frontend CPU\nµs / message")
    for cost in costs:
        table.add_row(
            str(cost.streams),
            f"{cost.events_per_message:.1f}",
            f"{cost.backend_cpu_us_per_event:.2f}",
            f"{cost.client_cpu_us_per_event:.2f}",
            f"{cost.client_cpu_us_per_message:.1f}",
        )
    return table
