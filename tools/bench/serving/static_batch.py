"""A static batch on the bare forward pass: the most that a server without continuous batching could reach.

All prompts are known in advance and prefilled in one step; then all rows decode in lock step until the longest answer
ends. There is no HTTP, no schedule and no other process. Runs as a child of `penstock bench static`, so that the load
generator holds no model, and reads one job per line of standard input.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.forward_pass import FROM_SLOT, PassOptions, SamplingParams, SlotInit, StepBatch
from penstock.backend.options import BackendOptions
from penstock.shm.process.options import make_app

if TYPE_CHECKING:
    from penstock.backend.forward_pass import IBatchedForwardPass

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

    def run(self, job: StaticJob) -> StaticTiming:
        """Run the batch. A row whose answer is complete keeps its place until the batch ends."""
        started_s = time.perf_counter()
        lengths = np.array([len(prompt) for prompt in job.prompts], np.int32)
        num_rows = len(lengths)
        order = np.argsort(lengths > 1, kind="stable")  # rows of one token come first in a step
        slots = np.arange(num_rows, dtype=np.int32)
        greedy = SamplingParams(temperature=0.0)
        prompts = [np.array(job.prompts[row], np.int32) for row in order]
        self._step(
            np.concatenate(prompts),
            lengths[order],
            np.zeros(num_rows, np.int32),
            tuple(SlotInit(row, greedy, tokens, len(tokens)) for row, tokens in enumerate(prompts)),
        )
        prefill_s = time.perf_counter() - started_s
        from_slot = np.full(num_rows, FROM_SLOT, np.int32)
        ones = np.ones_like(slots)
        for step in range(max(job.output_tokens) - 1):
            self._step(from_slot, ones, lengths[order] + step)
        return StaticTiming(prefill_s, time.perf_counter() - started_s)

    def _step(
        self,
        input_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
        query_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
        context_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
        slot_inits: tuple[SlotInit, ...] = (),
    ) -> None:
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
        self.forward_pass.sample(self.forward_pass.forward(batch), batch).wait()


def load(options: BackendOptions, num_rows: int, prompt_tokens: int, context_tokens: int) -> StaticBatch:
    """Load the pass that `backend` would serve, with a cache for num_rows sequences of context_tokens each."""
    from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device
    from penstock.backend.plugins import find_forward_pass
    from penstock.backend.startup import locate_model

    pages_per_row = -(-context_tokens // options.page_size)
    pass_options = PassOptions(
        choose_device(options.gpu), options.dtype, num_rows, num_rows * prompt_tokens, context_tokens
    )
    forward_pass = find_forward_pass(options.forward_pass).load(locate_model(options), pass_options)
    kv_dtype = next(iter(forward_pass.spec.kv_bytes_per_token)) if options.kv_dtype == "auto" else options.kv_dtype
    forward_pass.create_cache(num_rows * pages_per_row, options.page_size, kv_dtype)
    return StaticBatch(forward_pass, options.page_size, pages_per_row)


@app.default
def run(
    *,
    rows: int,
    longest_prompt: int,
    longest_context: int,
    options: BackendOptions = BackendOptions(),
) -> None:
    batch = load(options, rows, longest_prompt, longest_context)
    decoder = msgspec.json.Decoder(StaticJob)
    print("loaded", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(batch.run(decoder.decode(line))).decode(), flush=True)


if __name__ == "__main__":
    app()
