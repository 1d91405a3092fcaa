"""Requests that compute nothing: they are answered at once, and never wait for a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shm.client import (
    AdapterChange,
    BackendClient,
    BackendUnavailable,
    FailureCode,
    Finish,
    QuoteTerms,
    RequestName,
    StreamName,
    StreamQuestion,
)
from tests.shm.client.harness import connected, request, until
from tests.shm.scripted_backend import BackendProcess, ScriptedBackend


async def test_each_question_is_answered_with_what_it_asks_for(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            quoted = client.ask_quote(request([1, 2], 5), QuoteTerms(num_choices=3))
            stream = client.ask(StreamQuestion(StreamName(b"t", "chat-1"), "read"))
            cancelled = client.ask(RequestName(7, 8))
            ends = [await each.result() for each in (quoted, stream, cancelled)]
            assert [end.finish for end in ends] == [Finish.QUOTED, Finish.STOP, Finish.REJECTED]
            assert quoted.quote is not None
            assert quoted.quote.num_ahead == 3
            assert stream.record == b"chat-1"
            assert ends[2].failure is FailureCode.NOT_OPEN


async def test_question_is_not_held_for_the_next_backend(socket_path: Path) -> None:
    client = BackendClient(socket_path, max_held=8)
    await client.start()
    with pytest.raises(BackendUnavailable):
        client.ask(RequestName(7, 8))
    with pytest.raises(BackendUnavailable):
        client.ask_quote(request([1], 5), QuoteTerms())
    await client.close()


async def test_adapter_that_kills_its_backend_does_not_go_to_the_next(socket_path: Path) -> None:
    with BackendProcess(socket_path) as backend:
        async with connected(socket_path) as client:
            end = await client.ask(AdapterChange("new", "deadly")).result()
            assert (end.finish, end.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
            backend.restart()
            await until(lambda: client.ready)
            assert backend.alive


async def test_field_of_a_question_out_of_bounds_is_named(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            with pytest.raises(ValueError, match=r"target\.frontend"):
                client.ask(RequestName(-1, 8))
            with pytest.raises(ValueError, match=r"terms\.num_choices"):
                client.ask_quote(request([1], 5), QuoteTerms(num_choices=0))
