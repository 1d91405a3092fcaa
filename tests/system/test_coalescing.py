"""Equal requests over the real processes: computed once, separate per tenant, each with its own end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from penstock.frontend.schemas.chat import ChatBody, ChatMessage
from penstock.frontend.text.tokenizer import ModelTokenizer
from tests.system.processes import REPOSITORY, Frontend, descendants, running, start_backend, wait_until

ONE_AT_A_TIME = ("--max-running", "1", "--priority-step-s", "100")
PACED = ("--forward-pass", "penstock.backend.passes.fake:PacedFakePass", "--kv-budget", "64MB", *ONE_AT_A_TIME)
PAGE_SIZE = 32
NO_SHARING = {"X-Penstock-Coalesce": "off"}
KEYS = ("--api-key", "one", "--api-key", "two")


@dataclass(frozen=True)
class Servers:
    """One backend that runs one sequence at a time, two open frontends, and one that requires keys."""

    first: Frontend
    second: Frontend
    keyed: Frontend


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    socket = tmp_path_factory.mktemp("coalescing") / "private" / "backend.sock"
    backend = start_backend(socket, *PACED)
    frontends = Frontend(socket), Frontend(socket), Frontend(socket, *KEYS)
    with running(*frontends, backend):
        for frontend in frontends:
            frontend.wait_ready()
        yield Servers(*frontends)


@dataclass
class Answer:
    status: int
    text: str = ""
    usage: Any = None
    coalesced: str | None = None
    error: Any = None


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60.0, limits=httpx.Limits(max_connections=1000), verify=False)  # noqa: S501


async def ask(
    http: httpx.AsyncClient,
    frontend: Frontend,
    what: list[int] | str,
    max_tokens: int,
    *,
    stream: bool = True,
    headers: dict[str, str] | None = None,
    **fields: Any,
) -> Answer:
    """A completion of token ids, or a chat of one message."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream, **fields}
    if isinstance(what, str):
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": what}]
    else:
        path, body["prompt"] = "/v1/completions", what
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", frontend.url + path, json=body, headers=headers) as response:
        answer = Answer(response.status_code, coalesced=response.headers.get("x-penstock-coalesced"))
        if not stream or response.status_code != 200:
            whole = msgspec.json.decode(await response.aread())
            answer.error, answer.usage = whole.get("error"), whole.get("usage")
            for choice in whole.get("choices", ()):
                answer.text += choice["message"]["content"] if isinstance(what, str) else choice["text"]
            return answer
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = msgspec.json.decode(line[6:])
                answer.error, answer.usage = event.get("error"), event.get("usage")
                for choice in event.get("choices", ()):
                    answer.text += choice["delta"].get("content", "") if isinstance(what, str) else choice["text"]
    return answer


def metrics(frontend: Frontend) -> dict[str, float]:
    """Samples by name; a worker's samples without its pid."""
    worker = f'worker="{descendants(frontend.process.pid)[0]}"'
    lines = frontend.get("/metrics").text.replace(f"{{{worker},", "{").splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def counted(frontend: Frontend, name: str) -> float:
    return metrics(frontend)[f"penstock_{name}"]


async def until(frontend: Frontend, name: str, value: float) -> None:
    await asyncio.to_thread(wait_until, lambda: counted(frontend, name) == value, 20.0)


@asynccontextmanager
async def occupied(http: httpx.AsyncClient, frontend: Frontend) -> AsyncIterator[None]:
    """Inside the block another request holds the only slot, so all new requests wait."""
    blocker = asyncio.create_task(ask(http, frontend, [1], 10_000))
    await until(frontend, "sequences_running", 1)
    try:
        yield
    finally:
        blocker.cancel()


async def test_equal_requests_coalesce_across_frontends_and_endpoints(servers: Servers) -> None:
    tokenizer = ModelTokenizer.load(REPOSITORY / "backend" / "demo_model")
    assert tokenizer.chat_template is not None
    text = tokenizer.chat_template.render(ChatBody(messages=[ChatMessage(role="user", content="hello")]))
    (prompt,) = await tokenizer.encode([text], add_special_tokens=False)
    cases = [
        (frontend, what, max_tokens, stream)
        for frontend in (servers.first, servers.second)
        for what in ("hello", prompt)
        for max_tokens in (20, 40)
        for stream in (True, False)
    ]
    async with client() as http:
        async with occupied(http, servers.first):
            before = metrics(servers.first)
            joined = before["penstock_requests_coalesced_total"] + len(cases) - 1
            coming = [
                asyncio.create_task(ask(http, frontend, what, max_tokens, stream=stream))
                for frontend, what, max_tokens, stream in cases
            ]
            await until(servers.first, "requests_coalesced_total", joined)
        answers = await asyncio.gather(*coming)
        after = metrics(servers.first)
        alone = {n: await ask(http, servers.first, prompt, n, headers=NO_SHARING) for n in (20, 40)}
    assert after["penstock_prompt_tokens_total"] - before["penstock_prompt_tokens_total"] == len(prompt)
    for (_, _, max_tokens, _), answer in zip(cases, answers, strict=True):
        assert answer.text == alone[max_tokens].text
        assert answer.usage["completion_tokens"] == max_tokens
        assert answer.usage["penstock"]["coalesced"] is (answer.coalesced == "joined")
    assert sorted(answer.coalesced or "" for answer in answers) == ["joined"] * (len(cases) - 1) + ["none"]
    assert alone[40].coalesced == "none"


async def test_late_subscriber_receives_earlier_tokens_first(servers: Servers) -> None:
    async with client() as http:
        alone = await ask(http, servers.first, [5, 6], 100, headers=NO_SHARING)
        had = counted(servers.first, "generated_tokens_total")
        leader = asyncio.create_task(ask(http, servers.first, [5, 6], 400))
        await asyncio.to_thread(wait_until, lambda: counted(servers.first, "generated_tokens_total") >= had + 20, 20.0)
        late = await ask(http, servers.second, [5, 6], 100)
        assert (late.coalesced, late.text) == ("joined", alone.text)
        assert (await leader).text.startswith(alone.text[:-4])
        assert counted(servers.first, "generated_tokens_total") == had + 400


async def test_seeded_requests_coalesce_and_unseeded_ones_do_not(servers: Servers) -> None:
    async with client() as http:
        async with occupied(http, servers.first):
            joined = counted(servers.first, "requests_coalesced_total")
            seeded = [
                asyncio.create_task(ask(http, frontend, [8], 30, temperature=1.0, seed=11))
                for frontend in (servers.first, servers.second, servers.first)
            ]
            await until(servers.first, "requests_coalesced_total", joined + 2)
            free = [asyncio.create_task(ask(http, servers.first, [8], 30, temperature=2.0)) for _ in range(2)]
            await until(servers.first, "sequences_waiting", 3)
        assert len({(await answer).text for answer in seeded}) == 1
        assert {(await answer).coalesced for answer in free} == {"none"}


async def test_choices_of_a_greedy_request_coalesce(servers: Servers) -> None:
    async with client() as http:
        had = counted(servers.first, "generated_tokens_total")
        answer = await ask(http, servers.first, [9, 9], 40, stream=False, n=3)
        assert answer.usage["completion_tokens"] == 120
        assert counted(servers.first, "generated_tokens_total") - had == 40
        assert answer.coalesced == "none"


async def test_choices_of_a_sampled_request_compute_the_prompt_once(servers: Servers) -> None:
    prompt, num_choices, max_tokens = list(range(300, 400)), 4, 6
    async with client() as http:
        had = counted(servers.first, "computed_tokens_total")
        body = {"prompt": prompt, "n": num_choices, "max_tokens": max_tokens, "temperature": 2.0, "ignore_eos": True}
        response = await http.post(servers.first.url + "/v1/completions", json=body)
        assert len({choice["text"] for choice in response.json()["choices"]}) == num_choices
        # Each choice computes the prompt's last token for its own logits; an answer's last token is never computed.
        expected = len(prompt) + num_choices - 1 + num_choices * (max_tokens - 1)
        assert counted(servers.first, "computed_tokens_total") - had == expected
        assert response.headers["x-penstock-coalesced"] == "none"


async def test_request_that_opts_out_does_not_coalesce(servers: Servers) -> None:
    async with client() as http:
        had = counted(servers.first, "generated_tokens_total")
        answers = await asyncio.gather(
            *(ask(http, servers.first, [7, 7], 30, headers=headers) for headers in (NO_SHARING, {}, NO_SHARING))
        )
        assert {answer.coalesced for answer in answers} == {"none"}
        assert len({answer.text for answer in answers}) == 1
        assert counted(servers.first, "generated_tokens_total") - had == 90


async def test_subscribers_survive_the_death_of_the_first_ones_frontend(servers: Servers) -> None:
    async with client() as http:
        alone = await ask(http, servers.second, [4, 2], 200, headers=NO_SHARING)
        joined = counted(servers.second, "requests_coalesced_total")
        lost = asyncio.create_task(ask(http, servers.first, [4, 2], 10_000))
        await until(servers.second, "sequences_running", 1)
        kept = [asyncio.create_task(ask(http, servers.second, [4, 2], 200)) for _ in range(4)]
        await until(servers.second, "requests_coalesced_total", joined + 4)
        (worker,) = descendants(servers.first.process.pid)
        os.kill(worker, signal.SIGKILL)
        assert {answer.text for answer in await asyncio.gather(*kept)} == {alone.text}
        with pytest.raises(httpx.HTTPError):
            await lost
    await asyncio.to_thread(servers.second.wait_idle)
    await asyncio.to_thread(servers.first.wait_ready)


async def test_tenants_share_neither_tokens_nor_pages(servers: Servers) -> None:
    def key(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}"}

    prompt = list(range(100, 100 + 3 * PAGE_SIZE + 4))
    async with client() as http:
        had = counted(servers.keyed, "generated_tokens_total")
        one, two = await asyncio.gather(
            *(ask(http, servers.keyed, prompt, 30, headers=key(name)) for name in ("one", "two"))
        )
        assert (one.coalesced, two.coalesced) == ("none", "none")
        assert one.text == two.text
        assert counted(servers.keyed, "generated_tokens_total") - had == 60
        # Each tenant finds its own pages again; a third one without a key finds none.
        other = await ask(http, servers.second, prompt, 5)
        assert other.usage["prompt_tokens_details"]["cached_tokens"] == 0
        again = await ask(http, servers.keyed, prompt, 5, headers=key("one"))
        assert again.usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
        changed = [99, *prompt[1:]]
        await ask(http, servers.keyed, changed, 5, headers=key("one"))
        stranger = await ask(http, servers.keyed, changed, 5, headers=key("two"))
        assert stranger.usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_deadline_in_decode_ends_the_stream_and_frees_its_pages(servers: Servers) -> None:
    expired = 'worker_streams_total{outcome="expired"}'
    async with client() as http:
        had = counted(servers.second, expired)
        answer = await ask(http, servers.second, [3, 1], 10_000, timeout_ms=2_000)
        assert (answer.status, answer.error["code"]) == (200, "timeout")
        assert answer.text
        whole = await ask(http, servers.second, [3, 1], 10_000, stream=False, headers={"X-Request-Timeout-Ms": "100"})
        assert (whole.status, whole.error["code"]) == (499, "timeout")
        assert counted(servers.second, expired) == had + 2
    await asyncio.to_thread(servers.second.wait_idle)


async def test_one_subscriber_expires_alone(servers: Servers) -> None:
    async with client() as http:
        alone = await ask(http, servers.first, [6, 1], 100, headers=NO_SHARING)
        short, whole = await asyncio.gather(
            ask(http, servers.first, [6, 1], 10_000, timeout_ms=200), ask(http, servers.second, [6, 1], 100)
        )
        assert short.error["code"] == "timeout"
        assert whole.text == alone.text
    await asyncio.to_thread(servers.first.wait_idle)


async def test_deadline_expires_in_the_queue(servers: Servers) -> None:
    async with client() as http, occupied(http, servers.first):
        expired = await ask(http, servers.second, [2], 5, timeout_ms=100)
        assert (expired.status, expired.error["code"]) == (499, "timeout")
        await until(servers.first, "sequences_waiting", 0)


async def test_lower_priorities_run_sooner(servers: Servers) -> None:
    order: list[int] = []
    async with client() as http:

        async def in_turn(priority: int) -> None:
            assert (await ask(http, servers.first, [3, 50 + priority], 30, priority=priority)).status == 200
            order.append(priority)

        waiting = []
        async with occupied(http, servers.first):
            for num_waiting, priority in enumerate((0, 7, -7), start=1):
                waiting.append(asyncio.create_task(in_turn(priority)))
                await until(servers.first, "sequences_waiting", num_waiting)
        await asyncio.gather(*waiting)
    assert order == [-7, 0, 7]
    await asyncio.to_thread(servers.first.wait_idle)
