"""Kept responses: retrieved, continued, run in the background, cancelled."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.frontend.endpoints.responses import endpoint
from penstock.frontend.schemas.chat import ChatBody, ChatMessage
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.transport.errors import ErrorKind, retry_later
from penstock.shm.client import Overloaded, TokenBatch
from penstock.shm.messages import FailureCode, Finish
from tests.frontend.endpoints.responses.test_responses import HI, MODEL, PATH, TIME, WEATHER, prompt, talking
from tests.frontend.harness import (
    END_TOKEN,
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
    says,
    silent,
    token_ids,
)
from tests.frontend.named_events import REASONED_CALLS, named_events, names


async def test_conversation_continues_from_a_response(connection: ClientConnection, backend: FakeBackend) -> None:
    first = (await connection.post(PATH, {**HI, "instructions": "be brief"})).json()
    second = (await connection.post(PATH, {"input": "and you?", "previous_response_id": first["id"]})).json()
    assert second["previous_response_id"] == first["id"]
    assert prompt(backend) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello, world!<|im_end|>\n"
        "<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (await connection.request("DELETE", f"{PATH}/{first['id']}")).json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    third = await connection.post(PATH, {"input": "?", "previous_response_id": second["id"]})
    assert third.status == 200
    assert prompt(backend).startswith("<|im_start|>user\nhi<|im_end|>")


async def test_long_conversation_is_rendered_in_a_thread(
    connect: Callable[..., ClientConnection], backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, translating = list[threading.Thread](), list[threading.Thread]()
    render, translate = ChatTemplate.render_marked, endpoint.as_chat

    def noted(template: ChatTemplate, body: ChatBody, *others: Any) -> Any:
        threads.append(threading.current_thread())
        return render(template, body, *others)

    def noted_translation(body: ResponsesBody, history: Sequence[ChatMessage]) -> ChatBody:
        translating.append(threading.current_thread())
        return translate(body, history)

    monkeypatch.setattr(ChatTemplate, "render_marked", noted)
    monkeypatch.setattr(endpoint, "as_chat", noted_translation)
    backend.model = model_card(max_context_tokens=1 << 20)
    connection = connect()
    threads.clear()  # loading the template has rendered short chats
    first = (await connection.post(PATH, {"input": "x" * 100_000})).json()
    for _ in range(2):
        first = (await connection.post(PATH, {"input": "and?", "previous_response_id": first["id"]})).json()
    assert threading.main_thread() not in (*threads, *translating)
    assert (len(threads), len(translating)) == (3, 3)


async def test_input_of_many_empty_parts_counts_for_its_memory(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.model = model_card(max_context_tokens=1 << 20)
    connection = connect(max_stored_response_bytes=400_000)
    for num_parts, status in ((200, 200), (2000, 404)):
        content = [{"type": "input_text", "text": ""}] * num_parts
        answer = (await connection.post(PATH, {"input": [{"role": "user", "content": content}] * 5})).json()
        assert (await connection.request("GET", f"{PATH}/{answer['id']}")).status == status


async def test_calls_of_a_response_are_answered_in_the_next() -> None:
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS))
    async with talking(backend) as connection:
        first = (await connection.post(PATH, {**HI, "tools": [WEATHER, TIME]})).json()
        calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call, "output": "fine"} for call in calls]
        body = {"input": outputs, "previous_response_id": first["id"], "tools": [WEATHER, TIME]}
        assert (await connection.post(PATH, body)).status == 200
    text = prompt(backend, MODEL)
    assert text.count("<tool_response>\nfine") == 2
    assert '{"name": "get_weather", "arguments": {"city": "été 🐈"}}' in text


async def test_item_reference_is_resolved() -> None:
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS))
    async with talking(backend) as connection:
        first = (await connection.post(PATH, {**HI, "tools": [WEATHER, TIME]})).json()
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        copies = [await connection.post(PATH, {"input": items}) for items in (references, first["output"])]
        assert [copy.status for copy in copies] == [200, 200]
        assert backend.streams[-2].request.token_ids == backend.streams[-1].request.token_ids
        assert '{"name": "get_weather", "arguments": {"city": "été 🐈"}}' in prompt(backend, MODEL)
        for item_id in ("msg_x", f"{first['output'][0]['id']}0", "msg_" + "0" * 32 + "_0"):
            missing = await connection.post(PATH, {"input": [{"type": "item_reference", "id": item_id}]})
            assert missing.status in (400, 404)
            assert missing.error["param"] == "input[0].id"


async def test_references_are_counted_as_often_as_they_are_made(
    connection: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = (await connection.post(PATH, HI)).json()
    references = [{"type": "item_reference", "id": answer["output"][0]["id"]}] * 5
    num_bytes = 5 * len(json.dumps(answer["output"][0], separators=(",", ":")))
    monkeypatch.setattr("penstock.frontend.endpoints.responses.kept_responses.MAX_REFERENCED_BYTES", num_bytes)
    assert (await connection.post(PATH, {"input": references})).status == 200
    refused = await connection.post(PATH, {"input": [*references, references[0]]})
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert f"more than {num_bytes} bytes" in refused.error["message"]


async def test_kept_response_is_retrieved(connection: ClientConnection) -> None:
    for stream in (False, True):
        response = await connection.post(PATH, {**HI, "stream": stream})
        answer = named_events(response)[-1]["response"] if stream else response.json()
        assert (await connection.request("GET", f"{PATH}/{answer['id']}")).json() == answer


@pytest.mark.parametrize("path", ["", "/cancel", "/input_items"])
async def test_response_that_is_not_kept_is_404(connection: ClientConnection, path: str) -> None:
    answer = (await connection.post(PATH, {**HI, "store": False})).json()
    assert answer["store"] is False
    method = "POST" if path == "/cancel" else "GET"
    for response_id, reason in ((answer["id"], "was unused for"), ("resp_" + "0" * 32, "another process")):
        missing = await connection.request(method, f"{PATH}/{response_id}{path}")
        assert (missing.status, missing.error["code"]) == (404, "response_not_found")
        assert reason in missing.error["message"]
    previous = await connection.post(PATH, {**HI, "previous_response_id": answer["id"]})
    assert (previous.status, previous.error["param"]) == (400, "previous_response_id")
    assert (await connection.request("DELETE", f"{PATH}/{answer['id']}")).status == 404


async def test_another_keys_response_does_not_exist(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(api_keys=("one", "two"))
    keys = [[("authorization", f"Bearer {key}")] for key in ("one", "two")]
    answer = (await connection.request("POST", PATH, {**HI, "background": True}, keys[0])).json()
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        refused = await connection.request(method, f"{PATH}/{answer['id']}{path}", headers=keys[1])
        assert refused.status == 404
    body = {**HI, "previous_response_id": answer["id"]}
    assert (await connection.request("POST", PATH, body, keys[1])).error["code"] == "previous_response_not_found"
    assert (await connection.request("POST", PATH, body, keys[0])).status == 200
    assert (await connection.request("GET", f"{PATH}/{answer['id']}", headers=keys[0])).status == 200


async def test_input_is_listed_in_pages(connection: ClientConnection) -> None:
    items = [{"role": "user", "content": f"{number}"} for number in range(5)]
    answer = (await connection.post(PATH, {"input": items})).json()
    path = f"{PATH}/{answer['id']}/input_items"
    whole = (await connection.request("GET", f"{path}?order=asc")).json()
    assert [item["content"] for item in whole["data"]] == [[{"type": "input_text", "text": f"{n}"}] for n in range(5)]
    assert (whole["object"], whole["has_more"]) == ("list", False)
    assert (await connection.request("GET", path)).json()["data"] == whole["data"][::-1]
    page = (await connection.request("GET", f"{path}?order=asc&limit=2&after={whole['data'][1]['id']}")).json()
    assert (page["data"], page["has_more"]) == (whole["data"][2:4], True)
    assert (page["first_id"], page["last_id"]) == (whole["data"][2]["id"], whole["data"][3]["id"])
    for query, field in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
        assert (await connection.request("GET", f"{path}?{query}")).error["param"] == field


# In the background


async def polled(connection: ClientConnection, response_id: str, status: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            current: dict[str, Any] = (await connection.request("GET", f"{PATH}/{response_id}")).json()
            if current["status"] == status:
                return current
            await asyncio.sleep(0)


async def test_background_response_continues_without_its_client(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend)
    first, second = ClientConnection(app), ClientConnection(app)
    answer = (await first.post(PATH, {**HI, "background": True})).json()
    assert (answer["status"], answer["output"], answer["background"]) == ("queued", [], True)
    await first.end()
    backend.streams[0].push(*token_ids("the"))
    half = await polled(second, answer["id"], "in_progress")
    assert half["output"][0]["content"][0]["text"] == "the"
    early = await second.post(PATH, {**HI, "previous_response_id": answer["id"]})
    assert (early.status, early.error["param"]) == (400, "previous_response_id")
    backend.streams[0].push(END_TOKEN, finish=Finish.STOP)
    whole = await polled(second, answer["id"], "completed")
    assert whole["output"][0]["content"][0]["text"] == "the"
    assert (await second.request("POST", f"{PATH}/{answer['id']}/cancel")).json() == whole
    assert len(app.exchanges) == 0
    await second.end()


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_background_response_is_cancelled(backend: FakeBackend, method: str) -> None:
    backend.script = silent
    app = make_app(backend)
    connection = ClientConnection(app)
    answer = (await connection.post(PATH, {**HI, "background": True})).json()
    backend.streams[0].push(*token_ids("the"))
    path = f"{PATH}/{answer['id']}"
    ended = await connection.request(method, f"{path}/cancel" if method == "POST" else path)
    assert ended.status == 200
    assert backend.streams[0].cancelled.is_set()
    if method == "POST":
        assert ended.json()["status"] == "cancelled"
        assert (await connection.request("GET", path)).json() == ended.json()
    else:
        assert (await connection.request("GET", path)).status == 404
    assert len(app.exchanges) == 0
    await connection.end()


async def test_response_of_the_foreground_cannot_be_cancelled(connection: ClientConnection) -> None:
    answer = (await connection.post(PATH, HI)).json()
    refused = await connection.request("POST", f"{PATH}/{answer['id']}/cancel")
    assert (refused.status, refused.error["param"]) == (400, "response_id")


async def test_background_stream_is_resumed_where_it_broke_off(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend)
    first, second = ClientConnection(app), ClientConnection(app)
    first.send(_request({**HI, "background": True, "stream": True}))
    await backend.submitted.wait()
    backend.streams[0].push(*token_ids("the"))
    await first.output(b"output_text.delta")
    response_id = first.transport.output.split(b'"id":"')[1].split(b'"')[0].decode()
    first.transport.reset()
    await first.idle()
    assert not backend.streams[0].cancelled.is_set()
    path = f"{PATH}/{response_id}?stream=true"
    resumed = asyncio.ensure_future(second.request("GET", f"{path}&starting_after=3"))
    await asyncio.sleep(0)
    backend.streams[0].push(*token_ids(" cat"))
    backend.streams[0].push(END_TOKEN, finish=Finish.STOP)
    events = named_events(await resumed)
    assert [event["sequence_number"] for event in events] == list(range(4, 4 + len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "the cat"
    again = named_events(await second.request("GET", path))
    assert again[4:] == events
    assert names(again)[0] == "response.created"
    await second.end()


async def test_only_background_streams_can_be_resumed(connection: ClientConnection) -> None:
    for body in ({**HI, "background": True}, HI):
        answer = (await connection.post(PATH, body)).json()
        refused = await connection.request("GET", f"{PATH}/{answer['id']}?stream=true")
        assert (refused.status, refused.error["param"]) == (400, "stream")
    refused = await connection.request("GET", f"{PATH}/{answer['id']}?stream=true&starting_after=-1")
    assert refused.error["param"] == "starting_after"


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_a_background_response_runs_is_its_answer(
    connection: ClientConnection, backend: FakeBackend, stream: bool
) -> None:
    backend.refusal, body = Overloaded(7, 1024), {**HI, "background": True, "stream": stream}
    refused = await connection.post(PATH, body)
    assert (refused.status, refused.headers["retry-after"]) == (429, "7")
    backend.refusal = None
    long = await connection.post(PATH, {**body, "max_output_tokens": 5000})
    assert (long.status, long.error["param"]) == (400, "max_output_tokens")


async def test_background_response_that_fails_says_so(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.REJECTED, FailureCode.OVERLOADED)]
    answer = (await connection.post(PATH, {**HI, "background": True})).json()
    failed = await polled(connection, answer["id"], "failed")
    assert failed["error"]["code"] == "rate_limit_exceeded"


async def test_shutdown_ends_background_responses(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend)
    connection = ClientConnection(app)
    answer = (await connection.post(PATH, {**HI, "background": True})).json()
    assert len(app.exchanges) == 1
    app.exchanges.end_all()
    failed = await polled(connection, answer["id"], "failed")
    assert "shutting down" in failed["error"]["message"]
    assert len(app.exchanges) == 0
    await connection.end()


async def test_answer_that_cannot_be_stored_at_its_end_is_stored_later(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.endpoints.responses.background.run._STORES_AGAIN_AFTER_S", 0.01)
    backend.script = silent
    app = make_app(backend)
    connection = ClientConnection(app)
    answer = (await connection.post(PATH, {**HI, "background": True})).json()
    end, failures = app.store.end, [retry_later(ErrorKind.UNAVAILABLE, "the disk is full", 1)] * 2

    async def end_or_fail(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await end(*arguments)

    monkeypatch.setattr(app.store, "end", end_or_fail)
    backend.streams[0].push(*token_ids("the"), END_TOKEN, finish=Finish.STOP)
    whole = await polled(connection, answer["id"], "completed")
    assert whole["output"][0]["content"][0]["text"] == "the"
    backend.script = says("ok")
    async with asyncio.timeout(60):
        while True:
            continued = await connection.post(PATH, {"input": "?", "previous_response_id": answer["id"]})
            if continued.status == 200:
                break
            assert continued.error["param"] == "previous_response_id"  # it runs, for all that the store knows
            await asyncio.sleep(0.01)
    assert not failures
    assert len(app.exchanges) == 0
    await connection.end()


async def test_shutdown_is_reported_to_followers(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend)
    connection = ClientConnection(app)
    answered = asyncio.ensure_future(connection.post(PATH, {**HI, "background": True, "stream": True}))
    await backend.submitted.wait()
    backend.streams[0].push(*token_ids("the"))
    await connection.output(b"output_text.delta")
    app.exchanges.end_all()
    events = named_events(await answered)
    assert events[-1]["type"] == "response.failed"
    await connection.end()


async def test_hang_up_cancels_the_response(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    connection.send(_request({**HI, "stream": True}))
    await backend.submitted.wait()
    connection.transport.reset()
    await asyncio.wait_for(backend.streams[0].cancelled.wait(), 60)


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/responses HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_background_responses_are_refused(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(
        "penstock.frontend.endpoints.responses.background_places.MAX_STREAMED_IN_BACKGROUND"
        if stream
        else "penstock.frontend.endpoints.responses.background_places.MAX_IN_BACKGROUND",
        2,
    )
    backend.script = silent
    app = make_app(backend)
    for _ in range(2):
        client = ClientConnection(app)
        backend.submitted.clear()
        client.send(_request({**HI, "background": True, "stream": stream}))
        await backend.submitted.wait()
        client.transport.reset()
        await client.idle()
    last = ClientConnection(app)
    refused = await last.post(PATH, {**HI, "background": True, "stream": stream})
    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert (await last.post(PATH, {**HI, "background": True, "stream": False})).status == (200 if stream else 429)
    await last.end()


async def test_background_stream_that_grows_too_large_fails(
    connection: ClientConnection, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.endpoints.responses.background_places.MAX_LOG_BYTES", 4000)
    backend.script = silent
    answered = asyncio.ensure_future(connection.post(PATH, {**HI, "background": True, "stream": True}))
    await backend.submitted.wait()
    for token_id in token_ids("the cat " * 30):
        backend.streams[0].push(token_id)
    events = named_events(await answered)
    assert events[-1]["type"] == "response.failed"
    assert "4000 bytes" in events[-1]["response"]["error"]["message"]
