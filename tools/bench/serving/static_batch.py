"""A backend of static batches: the most that a server without continuous batching could reach.

When all of its requests have arrived, all prompts are prefilled in one step; then all rows decode in lock step until
the longest answer ends. There is no schedule. Runs as a child of `penstock bench static`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import FROM_SLOT, PassOptions, SamplingParams, SlotInit, StepBatch
from penstock.backend.options import BackendOptions
from penstock.backend.start.startup import locate_model
from penstock.process.options import make_app
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.events import Submission, carries
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import Finish, Generate, ModelCard, Started
from penstock.tools.processes import exit_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import IBatchedForwardPass

_TURN_S = 0.5
"""The server beats its heartbeat at least this often."""

app = make_app("static_batch", "A backend that serves its requests in batches of --rows.")


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A pass with the pages of a whole batch: row r owns pages_per_row pages from r * pages_per_row."""

    forward_pass: IBatchedForwardPass
    page_size_tokens: int
    pages_per_row: int

    def run(self, prompts: Sequence[NDArray[np.int32]], num_tokens: int, deliver: Callable[[list[int]], None]) -> None:
        """Generate num_tokens for each prompt. deliver receives the tokens of each step, in the prompts' order."""
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        order = np.argsort(lengths > 1, kind="stable")  # rows of one token come first in a step
        places, lengths = np.argsort(order), lengths[order]
        ordered = [prompts[row] for row in order]
        greedy = SamplingParams(temperature=0.0)
        inits = tuple(SlotInit(row, greedy, tokens, len(tokens)) for row, tokens in enumerate(ordered))
        tokens = self._step(np.concatenate(ordered), lengths, np.zeros_like(lengths), inits)
        deliver(tokens[places].tolist())
        from_slot, ones = np.full_like(lengths, FROM_SLOT), np.ones_like(lengths)
        for step in range(num_tokens - 1):
            tokens = self._step(from_slot, ones, lengths + np.int32(step))
            deliver(tokens[places].tolist())

    def _step(
        self,
        input_ids: NDArray[np.int32],
        query_lens: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        slot_inits: tuple[SlotInit, ...] = (),
    ) -> NDArray[np.int32]:
        rows = np.arange(len(query_lens), dtype=np.int32)
        used = -(-(context_lens + query_lens) // self.page_size_tokens)
        page_table = rows[:, None] * np.int32(self.pages_per_row) + np.arange(used.max(), dtype=np.int32)
        page_table[np.arange(used.max()) >= used[:, None]] = 0
        batch = StepBatch(
            input_ids=input_ids,
            query_starts=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            context_lens=context_lens,
            page_table=page_table,
            slots=rows,
            logit_rows=rows,
            slot_inits=slot_inits,
        )
        return self.forward_pass.sample(self.forward_pass.forward(batch), batch).wait().token_ids


class StaticServer:
    """Serves the requests of frontends in batches of num_rows. One thread does it all."""

    def __init__(self, batch: StaticBatch, link: BackendLink, board: BackendBoard, num_rows: int) -> None:
        self._batch = batch
        self._link = link
        self._board = board
        self._num_rows = num_rows
        self._wake_fd = os.eventfd(0)
        self._arrived: list[Submission[Generate]] = []

    def run(self) -> None:
        while True:
            self._receive()
            self._link.flush()
            while len(self._arrived) >= self._num_rows:
                submissions, self._arrived = self._arrived[: self._num_rows], self._arrived[self._num_rows :]
                self._serve(submissions)
            self._link.wait(_TURN_S, self._wake_fd)

    def _receive(self) -> None:
        self._board.beat()
        events = self._link.receive()
        self._arrived += [event for event in events if isinstance(event, Submission) and carries(event, Generate)]

    def _serve(self, submissions: Sequence[Submission[Generate]]) -> None:
        """Run the requests as one batch. Each step's tokens leave at once, except those that may be held."""
        prompts = [np.frombuffer(submission.tokens, np.int32) for submission in submissions]
        num_tokens = [submission.message.max_tokens for submission in submissions]
        num_delivered = 0

        def deliver(token_ids: list[int]) -> None:
            nonlocal num_delivered
            for submission, length, token_id in zip(submissions, num_tokens, token_ids, strict=True):
                if num_delivered < length:
                    finish = Finish.LENGTH if num_delivered + 1 == length else Finish.NONE
                    started = None if num_delivered else Started(submission.request_id, 0, 0.0)
                    self._link.push(submission.frontend, submission.request_id, token_id, finish, started)
            num_delivered += 1
            self._link.flush()
            self._receive()

        self._batch.run(prompts, max(num_tokens), deliver)


def load(options: BackendOptions, num_rows: int, prompt_tokens: int, context_tokens: int) -> StaticBatch:
    """Load the pass that `backend` would serve, with a cache for num_rows sequences of context_tokens each."""
    from penstock.backend.forward_pass.plugins import find_forward_pass
    from penstock.backend.passes.cuda.device.device_choice import choose_device

    pages_per_row = -(-context_tokens // options.page_tokens())
    pass_options = PassOptions(
        choose_device(options.gpu),
        options.dtype,
        num_rows,
        num_rows * prompt_tokens,
        context_tokens,
        quantize=options.quantize,
        cpu_path=options.cpu_path,
    )
    forward_pass = find_forward_pass(options.forward_pass).load(locate_model(options), pass_options)
    kv_dtype = next(iter(forward_pass.spec.kv_bytes_per_token)) if options.kv_dtype == "auto" else options.kv_dtype
    forward_pass.create_cache(num_rows * pages_per_row, options.page_tokens(), kv_dtype)
    return StaticBatch(forward_pass, options.page_tokens(), pages_per_row)


@app.default
def run(*, rows: int, longest_prompt: int, longest_context: int, options: BackendOptions = BackendOptions()) -> None:
    exit_on_sigterm()
    batch = load(options, rows, longest_prompt, longest_context)
    board = BackendBoard.create()
    board.pid = os.getpid()
    vocab_size = batch.forward_pass.spec.vocab_size
    card = ModelCard(options.model_id(), str(locate_model(options)), 0, vocab_size, longest_context, rows)
    link = BackendLink(options.socket, card, board)
    try:
        StaticServer(batch, link, board, rows).run()
    finally:
        link.close()


if __name__ == "__main__":
    app()
