"""A buffer belongs to one side at a time: loans and their ends, turn by turn."""

from __future__ import annotations

from array import array

import pytest

from penstock.shm.buffers.device_api import DeviceRow
from penstock.shm.client import BufferGone, BufferSlice
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import NO_TOKEN, Finish
from tests.shm.buffers.buffer_backend import HIDDEN, VOCAB, TurnedBackend, TurnedClient
from tests.shm.buffers.host.harness import EMBEDDINGS, LOGITS, ON_HOST, ROW_BYTES, TOKENS, row


def test_lent_buffer_returns_with_the_written_rows(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, output=BufferSlice(buffer, LOGITS, 4))
    with pytest.raises(BufferGone, match="lent"):
        buffer.rows()
    submission = backend.submission()
    assert submission.output is not None
    for index in range(3):
        submission.output.write(index, row(index))
    backend.link.push(submission.frontend, 1, 7, Finish.STOP)
    client.receive_until(lambda: buffers.num_returned == 1)
    assert buffer.num_rows == 3
    assert buffer.rows().shape == (3, VOCAB)
    assert buffer.rows().tolist() == [[0.0] * VOCAB, [1.0] * VOCAB, [2.0] * VOCAB]
    buffer.release()
    with pytest.raises(BufferGone, match="free"):
        buffer.rows()


def test_writes_after_the_end_beyond_the_loan_or_out_of_order_are_dropped(
    backend: TurnedBackend, client: TurnedClient
) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, output=BufferSlice(buffer, LOGITS, 2))
    loan = backend.submission().output
    assert loan is not None
    loan.write(1, row(9.0))  # row 0 is not written yet
    loan.write(0, row(1.0))
    loan.write(0, row(2.0))  # a repeated step
    assert not loan.needs_row(2)
    loan.write(2, row(9.0))
    backend.link.push(client.session.epoch, 1, NO_TOKEN, Finish.LENGTH)
    loan.write(1, row(9.0))
    client.receive_until(lambda: buffers.num_returned == 1)
    assert buffer.rows().tolist() == [[2.0] * VOCAB]
    assert bytes(buffer.view()[ROW_BYTES:]) == bytes(4096 * 4 - ROW_BYTES)


def test_later_loan_shows_nothing_of_an_earlier_one(backend: TurnedBackend, client: TurnedClient) -> None:
    """Only rows written in this loan can be read, so no tenant sees another's logits."""
    buffers = client.session.buffers
    assert buffers is not None
    for request_id, num_written in ((1, 4), (2, 1), (3, 0)):
        buffer = buffers.take()
        assert buffer.index == 0
        with pytest.raises(BufferGone, match="was not lent with a request"):
            buffer.rows()
        client.submit(request_id, output=BufferSlice(buffer, LOGITS, 4))
        loan = backend.submission().output
        assert loan is not None
        for index in range(num_written):
            loan.write(index, row(request_id))
        backend.link.push(client.session.epoch, request_id, NO_TOKEN, Finish.LENGTH)
        client.receive_until(lambda number=request_id: buffers.num_returned == number)  # type: ignore[misc]
        assert buffer.rows().shape == (num_written, VOCAB)
        assert buffer.rows().tolist() == [[float(request_id)] * VOCAB] * num_written
        buffer.release()


def test_cancelled_request_returns_its_buffer(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, output=BufferSlice(buffer, LOGITS, 2))
    loan = backend.submission().output
    assert loan is not None
    buffer.release()
    assert buffers.num_free == 1  # not before it returns
    client.session.send_cancel(1)
    client.receive_until(lambda: buffers.num_free == 2)
    loan.write(0, row(1.0))
    assert buffers.num_lent == buffers.num_returned == 1


def test_buffer_of_a_prompt_returns_once_it_is_copied(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    tokens = array("i", [3, 1, 4, 1, 5])
    buffer.view()[:20] = tokens.tobytes()
    client.submit(1, prompt=BufferSlice(buffer, TOKENS, 5), num_prompt_tokens=5)
    assert backend.submission().tokens == tokens.tobytes()
    client.receive_until(lambda: buffers.num_returned == 1)
    buffer.release()


def embeddings(num_rows: int, first: float = 1.0) -> bytes:
    """Row i is filled with first + i."""
    return b"".join((array("f", [first + index]) * HIDDEN).tobytes() for index in range(num_rows))


@pytest.mark.parametrize("with_output", [False, True])
def test_embeddings_are_read_in_place_and_return_at_the_end(
    backend: TurnedBackend, client: TurnedClient, *, with_output: bool
) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    prompt, output = buffers.take(), buffers.take()
    prompt.view()[: 5 * 4 * HIDDEN] = embeddings(5)
    logits = BufferSlice(output, LOGITS, 2) if with_output else None
    client.submit(1, BufferSlice(prompt, EMBEDDINGS, 5), logits, num_prompt_tokens=5)
    submission = backend.submission()
    loan = submission.embeddings
    assert loan is not None
    assert (submission.tokens, loan.device_reads, submission.output is not None) == (b"", False, with_output)
    for first, num_rows in ((3, 2), (0, 5), (1, 1), (3, 2)):  # in any order, repeatedly
        assert loan.read_rows(first, num_rows) == embeddings(num_rows, 1.0 + first)
    for first, num_rows in ((0, 6), (-1, 2), (5, 1), (2, -1)):
        with pytest.raises(ValueError, match="5 are lent"):
            loan.read_rows(first, num_rows)
    with pytest.raises(TypeError, match="not page-locked"):
        loan.copy_rows(0, 1, DeviceRow(0, 0))
    backend.link.push(submission.frontend, 1, 7)
    client.receive_until(lambda: client.outputs)
    assert buffers.num_returned == 0
    with pytest.raises(BufferGone, match="lent"):
        prompt.view()
    backend.link.push(submission.frontend, 1, 7, Finish.STOP)
    client.receive_until(lambda: buffers.num_returned == 1 + with_output)
    prompt.view()[:4] = b"next"
    assert loan.read_rows(0, 2) == bytes(2 * 4 * HIDDEN)


def test_embeddings_of_a_rejected_or_cancelled_request_return(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, BufferSlice(buffer, EMBEDDINGS, 2), num_prompt_tokens=2)
    client.session.send_cancel(1)
    client.receive_until(lambda: buffers.num_returned == 1)
    backend.submission()
    client.submit(2, BufferSlice(buffer, EMBEDDINGS, 2), num_prompt_tokens=2)
    backend.link.push(backend.submission().frontend, 2, NO_TOKEN, Finish.REJECTED)
    client.receive_until(lambda: buffers.num_returned == 2)
    (exported,) = [peer.buffers for peer in backend.link._frontends.values()]
    assert exported is not None
    assert exported.num_lent == exported.num_returned == 2
    assert not any(peer._loans for peer in backend.link._frontends.values())


def test_loans_of_a_dead_client_end(backend: TurnedBackend) -> None:
    with backend.client(ON_HOST) as client:
        buffers = client.session.buffers
        assert buffers is not None
        client.submit(1, output=BufferSlice(buffers.take(), LOGITS, 1))
        loan = backend.submission().output
        assert loan is not None
    backend.until(lambda: any(isinstance(event, FrontendDeath) for event in backend.events))
    assert not loan.needs_row(0)
    loan.write(0, row(1.0))
