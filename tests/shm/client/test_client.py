"""Submitting to a scripted backend over the real link: tokens, refusals, readiness."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from penstock.shm.client import BackendClient, BackendUnavailable, GenerationRequest
from penstock.shm.messages import PROTOCOL_VERSION, Constraints, FailureCode, Finish, Grammar, Sampling
from tests.shm.client.harness import GREEDY, ROOT, connected, read, request, tokens_of, until
from tests.shm.scripted_backend import (
    FAILING_TOKEN,
    BackendProcess,
    Script,
    ScriptedBackend,
    expected_tokens,
    model_card,
)


async def test_tokens_arrive_in_order_and_complete(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1, n + 2] for n in range(50)]
            results = await asyncio.gather(*(tokens_of(client.submit(request(p, 40))) for p in prompts))
            assert results == [expected_tokens(p, 40) for p in prompts]
        await until(lambda: len(backend.engine.deaths) == 1)
        assert backend.engine.link.balance() == {}
        # One message per step for all streams: the backend made few steps for 2,000 tokens.
        counters = backend.engine.link.counters
        assert counters.events_out == 2000
        assert counters.messages_out <= backend.engine.board.steps


def test_client_runs_on_uvloop(socket_path: Path) -> None:
    async def main() -> None:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1, n + 2] for n in range(20)]
            readers = [asyncio.create_task(tokens_of(client.submit(request(p, 60)))) for p in prompts]
            await until(lambda: client.balance().get("stream", 0) < 20 or backend.engine.board.generated_tokens > 100)
            assert await asyncio.gather(*readers) == [expected_tokens(p, 60) for p in prompts]

    with (
        ScriptedBackend(socket_path, Script(step_s=0.001)) as backend,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main())


async def test_stop_token_is_the_last(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            undisturbed = expected_tokens([5, 6], 30)
            tokens, last = await read(client.submit(request([5, 6], 30, undisturbed[7])))
            assert tokens == undisturbed[:8]
            assert last.finish is Finish.STOP


async def test_failures_and_rejections_carry_their_reason(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(model_card(max_context_tokens=100))):
        async with connected(socket_path) as client:
            _, last = await read(client.submit(request([1] * 60, 50)))
            assert (last.finish, last.failure, last.failure_limit) == (
                Finish.REJECTED,
                FailureCode.CONTEXT_TOO_LONG,
                50,
            )
            _, last = await read(client.submit(request([1000], 5)))
            assert (last.finish, last.failure, last.failure_limit) == (Finish.REJECTED, FailureCode.BAD_TOKEN, 1000)
            tokens, last = await read(client.submit(request([FAILING_TOKEN], 5)))
            assert (len(tokens), last.finish, last.failure) == (1, Finish.FAILED, FailureCode.INTERNAL)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GenerationRequest([], 5, GREEDY), "token_ids is empty"),
        (GenerationRequest([1 << 31], 5, GREEDY), "token_ids: "),
        (GenerationRequest([1], 0, GREEDY), "at max_tokens$"),
        (GenerationRequest([1], 1 << 40, GREEDY), "at max_tokens$"),
        (GenerationRequest([1], 5, Sampling(temperature=-1.0)), "at sampling.temperature$"),
        (GenerationRequest([1], 5, Sampling(temperature=float("nan"))), "at sampling.temperature$"),
        (GenerationRequest([1], 5, Sampling(seed=1 << 63)), "at sampling.seed$"),
        (GenerationRequest([1], 5, Sampling(logit_bias=((1, 0.0),) * 301)), "at sampling.logit_bias$"),
        (GenerationRequest([1], 5, Sampling(logit_bias=((1, 101.0),))), "at sampling.logit_bias$"),
        (GenerationRequest([1], 5, GREEDY, tuple(range(65))), "at stop_token_ids$"),
        (GenerationRequest([1], 5, GREEDY, salt=bytes(17)), "at salt$"),
        (GenerationRequest([1], 5, GREEDY, tenant=bytes(17)), "at tenant$"),
        (GenerationRequest([1], 5, GREEDY, weight=0.001), "0.01 - at weight$"),
        (GenerationRequest([1], 5, GREEDY, weight=float("nan")), "0.01 - at weight$"),
        (GenerationRequest([1], 5, GREEDY, weight=float("inf")), "100.0 - at weight$"),
        (GenerationRequest([1], 5, GREEDY, priority=1001), "at priority$"),
        (GenerationRequest([1], 5, GREEDY, constraints=Constraints(Grammar("regex", ""))), "constraints.grammar.text$"),
    ],
)
async def test_request_outside_its_bounds_is_refused_before_it_is_sent(
    socket_path: Path, bad: GenerationRequest, message: str
) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            with pytest.raises(ValueError, match=message):
                client.submit(bad)
            assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)
            assert backend.engine.link.counters.faults == 0


async def test_first_batch_brings_cached_tokens_and_queue_time(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 3))
            await anext(stream)
            assert stream.cached_tokens == 0
            assert stream.queue_s > 0
            stream.cancel()


async def test_progress_of_the_prompt_comes_before_the_tokens_and_only_if_asked_for(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            backend.engine.paused = True
            stream = client.submit(replace(request([1, 2], 3), reports_progress=True))
            batch = await anext(stream)
            assert (batch.token_ids, batch.finish) == ([], Finish.NONE)
            assert batch.progress is not None
            assert (batch.progress.computed_tokens, batch.progress.spent_s) == (1, 0.5)
            plain = client.submit(request([1, 2], 3))
            backend.engine.paused = False
            assert await tokens_of(stream) == await tokens_of(plain) == expected_tokens([1, 2], 3)
            assert plain.progress is stream.progress is None


async def test_stream_learns_that_it_is_coalesced(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(is_coalesced=True)):
        async with connected(socket_path) as client:
            stream = client.submit(request([1], 3))
            assert stream.is_coalesced is None
            await tokens_of(stream)
            assert stream.is_coalesced is True


async def test_client_is_ready_once_the_first_backend_starts(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    await asyncio.sleep(0.01)
    assert not client.ready
    assert client.model is None
    with pytest.raises(BackendUnavailable):
        client.submit(request([1], 1))
    with ScriptedBackend(socket_path):
        await until(lambda: client.ready)
        assert client.model == model_card()
        assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)
    await until(lambda: not client.ready)
    assert client.model == model_card()
    await client.close()
    assert client.balance() == {}


async def test_waiting_until_ready_returns_the_card_or_raises_after_the_time(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    with pytest.raises(RuntimeError, match="not started"):
        await client.wait_until_ready()
    await client.start()
    with pytest.raises(BackendUnavailable, match=f"no backend is ready at {socket_path} after 0.05 s"):
        await client.wait_until_ready(0.05)
    waiting = asyncio.create_task(client.wait_until_ready())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    with ScriptedBackend(socket_path):
        assert await waiting == model_card()
        assert client.ready
    await client.close()


async def test_backend_without_progress_is_not_ready(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            monkeypatch.setattr(backend.engine.board, "beat", lambda: None)
            backend.engine.board.heartbeat_ns -= 3_000_000_000
            await until(lambda: not client.ready)
            with pytest.raises(BackendUnavailable):
                client.submit(request([1], 1))
            monkeypatch.undo()
            await until(lambda: client.ready)


async def test_draining_backend_is_not_ready(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            backend.engine.board.draining = 1
            assert not client.ready


async def test_backend_of_another_protocol_version_is_logged_and_not_used(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.shm.link.join.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with BackendProcess(socket_path):
        client = BackendClient(socket_path)
        await client.start()
        await until(lambda: f"protocol version {PROTOCOL_VERSION}, the frontend {PROTOCOL_VERSION + 1}" in caplog.text)
        assert not client.ready
        await client.close()


LIGHT = """
import asyncio, json, sys
from pathlib import Path
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.messages import Sampling

async def main() -> None:
    client = BackendClient(Path(sys.argv[1]))
    await client.start()
    while not client.ready:
        await asyncio.sleep(0.005)
    async for batch in client.submit(GenerationRequest([1, 2], 50, Sampling())):
        pass
    await client.close()

asyncio.run(main())
with open("/proc/self/status") as status:
    rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
print(json.dumps({"rss_kib": rss, "modules": sorted(name.partition(".")[0] for name in sys.modules)}))
"""


def test_client_process_is_small_and_imports_no_numpy_torch_or_pickle_codec(socket_path: Path) -> None:
    with BackendProcess(socket_path):
        result = subprocess.run(
            [sys.executable, "-c", LIGHT, str(socket_path)], capture_output=True, text=True, check=True, cwd=ROOT
        )
    report = json.loads(result.stdout)
    assert not {"numpy", "torch", "cupy", "cloudpickle", "dill"} & set(report["modules"])
    assert report["rss_kib"] < 48 << 10
