"""What streaming a token costs when the model costs nothing: the fake pass behind one frontend."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tools.bench.harness.processes import process_use
from penstock.tools.bench.harness.server import BenchServer
from penstock.tools.bench.load_generator.sending import Target, measure, warm_up
from penstock.tools.bench.load_generator.stats import LoadSummary
from penstock.tools.bench.load_generator.workload import Lengths, Workload

NUM_STREAMS = 64
_LENGTHS = Lengths(256, 256)


@dataclass(frozen=True, slots=True)
class FrontendCost:
    """CPU time, user and system, of all threads of each part, for each token that reached a client."""

    streams: int
    output_tokens: int
    tokens_per_s: float
    tokens_per_event: float
    """A frontend that lags behind puts what has come meanwhile into one event."""
    frontend_cpu_us_per_token: float
    backend_cpu_us_per_token: float
    generator_cpu_us_per_token: float
    frontend_rss_bytes: int
    """Of the largest of the frontend's processes, after the run."""
    backend_rss_bytes: int


async def measure_frontend_cost(
    target: Target, server: BenchServer, num_requests: int, seed: int
) -> tuple[FrontendCost, LoadSummary]:
    workload = Workload(Lengths(32, 32), _LENGTHS, target.vocab_size)
    await warm_up(target, workload, NUM_STREAMS, NUM_STREAMS, seed)
    frontend_pids, backend_pid = server.frontend_pids(), server.backend_pid()
    frontend_before = [process_use(pid) for pid in frontend_pids]
    backend_before = process_use(backend_pid)
    summary = await measure(target, workload, num_requests, NUM_STREAMS, seed)
    backend_after = process_use(backend_pid)
    frontend_after = [process_use(pid) for pid in frontend_pids]
    frontend_s = sum(after.cpu_s - before.cpu_s for before, after in zip(frontend_before, frontend_after, strict=True))
    tokens = max(summary.output_tokens, 1)
    cost = FrontendCost(
        streams=NUM_STREAMS,
        output_tokens=summary.output_tokens,
        tokens_per_s=summary.output_tokens_per_s,
        tokens_per_event=summary.output_tokens / max(summary.events, 1),
        frontend_cpu_us_per_token=1e6 * frontend_s / tokens,
        backend_cpu_us_per_token=1e6 * (backend_after.cpu_s - backend_before.cpu_s) / tokens,
        generator_cpu_us_per_token=summary.generator_cpu_us_per_token,
        frontend_rss_bytes=max(use.rss_bytes for use in frontend_after),
        backend_rss_bytes=backend_after.rss_bytes,
    )
    return cost, summary
