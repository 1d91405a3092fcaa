"""A static batch on the bare forward pass: the most that a server without continuous batching could reach.

All prompts are known in advance and prefilled in one step; then all rows decode in lock step until the longest answer
ends. There is no schedule.

Runs as a child of `penstock bench static`, so that the load generator holds no model. A batch comes as a job, one per
line of standard input, and then has no HTTP and no other process. Or it comes from a frontend, as to any backend:
when all its requests have arrived they are one batch, which is served over the link like our own answers.
"""

from __future__ import annotations

import os
import select
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.forward_pass import FROM_SLOT, PassOptions, SamplingParams, SlotInit, StepBatch
from penstock.backend.options import BackendOptions
from penstock.backend.start.startup import locate_model
from penstock.process.options import make_app
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.events import Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import Finish, ModelCard, Started

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

    from penstock.backend.forward_pass import IBatchedForwardPass

_TURN_S = 0.5
"""The server beats its heartbeat at least this often."""

app = make_app("static_batch", "Runs static batches read from standard input, one JSON object a line.")


class StaticJob(msgspec.Struct, frozen=True):
    """prompts and output_tokens have one entry for each row."""

    prompts: list[list[int]]
    output_tokens: list[int]


class StaticTiming(msgspec.Struct, frozen=True):
    """Seconds from the batch's start to all first tokens, and to its end."""

    prefill_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """A pass with the pages of a whole batch: row r owns pages_per_row pages from r * pages_per_row."""

    forward_pass: IBatchedForwardPass
    page_size_tokens: int
    pages_per_row: int

    def run(self, job: StaticJob, deliver: Callable[[list[int]], None] = lambda _: None) -> StaticTiming:
        """Run the batch. A row whose answer is complete keeps its place until the batch ends.

        deliver receives the tokens of each step, in the order of the job's rows.
        """
        started_s = time.perf_counter()
        lengths = np.array([len(prompt) for prompt in job.prompts], np.int32)
        num_rows = len(lengths)
        order = np.argsort(lengths > 1, kind="stable")  # rows of one token come first in a step
        slots = np.arange(num_rows, dtype=np.int32)
        greedy = SamplingParams(temperature=0.0)
        prompts = [np.array(job.prompts[row], np.int32) for row in order]
        places = np.argsort(order)
        tokens = self._step(
            np.concatenate(prompts),
            lengths[order],
            np.zeros(num_rows, np.int32),
            tuple(SlotInit(row, greedy, tokens, len(tokens)) for row, tokens in enumerate(prompts)),
        )
        prefill_s = time.perf_counter() - started_s
        deliver(tokens[places].tolist())
        from_slot = np.full(num_rows, FROM_SLOT, np.int32)
        ones = np.ones_like(slots)
        for step in range(max(job.output_tokens) - 1):
            tokens = self._step(from_slot, ones, lengths[order] + step)
            deliver(tokens[places].tolist())
        return StaticTiming(prefill_s, time.perf_counter() - started_s)

    def _step(
        self,
        input_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        query_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
        context_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
        slot_inits: tuple[SlotInit, ...] = (),
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        num_rows = len(query_lens)
        rows = np.arange(num_rows, dtype=np.int32)
        used = -(-(context_lens + query_lens) // self.page_size_tokens)
        pages = np.arange(used.max(), dtype=np.int32)
        page_table = rows[:, None] * np.int32(self.pages_per_row) + pages
        page_table[pages >= used[:, None]] = 0
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
    """Runs jobs from a pipe, and serves the requests of frontends in batches of num_rows. One thread does it all."""

    def __init__(self, batch: StaticBatch, link: BackendLink, board: BackendBoard, num_rows: int) -> None:
        self._batch = batch
        self._link = link
        self._board = board
        self._num_rows = num_rows
        self._arrived: list[Submission] = []

    def run(self, jobs: BinaryIO) -> None:
        """Serve until jobs ends."""
        decoder = msgspec.json.Decoder(StaticJob)
        while True:
            self._receive()
            self._link.flush()
            while len(self._arrived) >= self._num_rows:
                submissions, self._arrived = self._arrived[: self._num_rows], self._arrived[self._num_rows :]
                self._serve(submissions)
            if select.select([jobs], [], [], 0)[0]:
                if not (line := jobs.readline()):
                    return
                print(msgspec.json.encode(self._batch.run(decoder.decode(line))).decode(), flush=True)
            self._link.wait(_TURN_S, jobs.fileno())

    def _receive(self) -> None:
        self._board.beat()
        self._arrived += [event for event in self._link.receive() if isinstance(event, Submission)]

    def _serve(self, submissions: Sequence[Submission]) -> None:
        """Run the requests as one batch. Each step's tokens leave at once, except those that may be held."""
        prompts = [np.frombuffer(submission.tokens, np.int32).tolist() for submission in submissions]
        num_tokens = [submission.submit.max_tokens for submission in submissions]
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

        self._batch.run(StaticJob(prompts, num_tokens), deliver)


def load(options: BackendOptions, num_rows: int, prompt_tokens: int, context_tokens: int) -> StaticBatch:
    """Load the pass that `backend` would serve, with a cache for num_rows sequences of context_tokens each."""
    from penstock.backend.forward_pass.plugins import find_forward_pass
    from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device

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
def run(
    *,
    rows: int,
    longest_prompt: int,
    longest_context: int,
    options: BackendOptions = BackendOptions(),
) -> None:
    batch = load(options, rows, longest_prompt, longest_context)
    board = BackendBoard.create()
    board.pid = os.getpid()
    vocab_size = batch.forward_pass.spec.vocab_size
    card = ModelCard(options.model_id(), str(locate_model(options)), 0, vocab_size, longest_context, rows)
    link = BackendLink(options.socket, card, board)
    print("loaded", flush=True)
    try:
        StaticServer(batch, link, board, rows).run(sys.stdin.buffer)
    finally:
        link.close()


if __name__ == "__main__":
    app()
