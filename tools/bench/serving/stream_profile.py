"""Measures the parts of a decode step of one row on the CPU, beside the time to read the step's weights once.

Runs as a child of `penstock bench one-stream`: the load generator holds no model, and rounds of this and of the server
can take turns. Reads a number of steps per line from standard input and prints a StreamProfile, as JSON.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization.modes import find_cpu_quantization
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_served_weights
from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass, make_cpu_ops
from penstock.backend.passes.decoder.cpu.native_ops import NativeOps, TimedOperations
from penstock.backend.passes.decoder.cpu.thread_counts import num_usable_cores
from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device
from penstock.backend.start.startup import locate_model
from penstock.process.failure import fail
from penstock.process.options import make_app
from penstock.tools.bench.harness.decode_steps import commit_cache, decode_steps
from penstock.tools.bench.harness.step_parts import name_parts

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch

_WARM_UP_STEPS = 3
_READ_BYTES = 512
"""`WeightPacker.read_memory` reads multiples of this."""

app = make_app("stream_profile", "Profiles decode steps of one row; prints JSON.")


class PartTime(msgspec.Struct, frozen=True):
    """Operations of one kind in a step. idle_ms is without work for a thread, mean over threads; part of elapsed_ms."""

    name: str
    elapsed_ms: float
    idle_ms: float


class StreamProfile(msgspec.Struct, frozen=True):
    """Times are medians over steps, unless named least. Each step runs beside one reading of the weights."""

    weight_bytes: int
    """Size of all packed linears, which a step reads."""
    huge_page_share: float
    """Share of the weights' memory in huge pages."""
    num_threads: int
    read_ms: float
    """Reading weight_bytes once, with all threads."""
    least_read_ms: float
    step_ms: float
    """A step on the bare pass, with sampling."""
    least_step_ms: float
    sampling_ms: float
    python_ms: float
    """Time of a step outside operations and sampling."""
    ratio: float
    """step_ms / read_ms of neighbours in time."""
    parts: list[PartTime]
    """From steps with timed operations, which take slightly longer."""

    @property
    def gb_per_s(self) -> float:
        return self.weight_bytes / self.read_ms / 1e6


class Profiler:
    """A decoder over native kernels, with a cache for one sequence."""

    def __init__(self, options: BackendOptions, context_tokens: int) -> None:
        """Raises StartupError."""
        if choose_device(options.gpu) != "cpu":
            raise StartupError("one stream is profiled on the CPU: give --gpu none")
        model_dir = locate_model(options)
        config = read_decoder_config(model_dir)
        quantization = find_cpu_quantization(options.quantize)
        with open_served_weights(model_dir, config, quantization) as weights:
            dtype = weights.choose_dtype(options.dtype)
            ops = make_cpu_ops(config, dtype, options.step_tokens("cpu"), options.cpu_path)
            if not isinstance(ops, NativeOps):
                raise StartupError("one stream is profiled with the native kernels, which cannot run this model here")
            self._ops, self.weights = ops, ops.weights
            self._pass = CpuDecoderPass(config, weights, ops, dtype, 1, quantization)
        kv_dtypes = self._pass.spec.kv_bytes_per_token
        kv_dtype = next(iter(kv_dtypes)) if options.kv_dtype == "auto" else options.kv_dtype
        self._pass.create_cache(-(-(context_tokens + 1) // options.page_tokens()), options.page_tokens(), kv_dtype)
        commit_cache(ops)
        self._context_tokens, self._page_size_tokens = context_tokens, options.page_tokens()
        memory = ops.weights.memory()
        self._share = huge_page_share(memory)
        self._memory = [part[: len(part) // _READ_BYTES * _READ_BYTES].view(torch.float32) for part in memory]

    def profile(self, num_steps: int) -> StreamProfile:
        """Each of num_steps turns reads the weights, runs a step, and runs another with timed operations."""
        reads_ms, steps_ms, samplings_ms, pythons_ms, parts = [], [], [], [], []
        batches = decode_steps(1, self._context_tokens, self._page_size_tokens, 2 * (_WARM_UP_STEPS + num_steps))
        for index, (plain, timed) in enumerate(zip(batches, batches, strict=True)):
            read_ms = self._read_ms()
            forward_ms, sampling_ms = self._step_ms(plain)
            elapsed, idle, python_ms = self._timed_step(timed)
            if index >= _WARM_UP_STEPS:
                reads_ms.append(read_ms)
                steps_ms.append(forward_ms + sampling_ms)
                samplings_ms.append(sampling_ms)
                pythons_ms.append(python_ms)
                parts.append((elapsed, idle))
        median = statistics.median
        return StreamProfile(
            weight_bytes=self.weights.linear_bytes,
            huge_page_share=self._share,
            num_threads=num_usable_cores(),
            read_ms=median(reads_ms),
            least_read_ms=min(reads_ms),
            step_ms=median(steps_ms),
            least_step_ms=min(steps_ms),
            sampling_ms=median(samplings_ms),
            python_ms=median(pythons_ms),
            ratio=median(step / read for step, read in zip(steps_ms, reads_ms, strict=True)),
            parts=[
                PartTime(name, median(elapsed[name] for elapsed, _ in parts), median(idle[name] for _, idle in parts))
                for name in parts[0][0]
            ],
        )

    def _read_ms(self) -> float:
        started_s = time.perf_counter()
        for part in self._memory:
            self._ops.weights.read_memory(part)
        taken_s = time.perf_counter() - started_s
        return 1e3 * taken_s * self.weights.linear_bytes / sum(part.nbytes for part in self._memory)

    def _step_ms(self, batch: StepBatch) -> tuple[float, float]:
        started_s = time.perf_counter()
        logits = self._pass.forward(batch)
        computed_s = time.perf_counter()
        self._pass.sample(logits, batch).wait()
        return 1e3 * (computed_s - started_s), 1e3 * (time.perf_counter() - computed_s)

    def _timed_step(self, batch: StepBatch) -> tuple[Counter[str], Counter[str], float]:
        """Return elapsed and idle ms by part, and the ms of forward outside operations."""
        timed: list[TimedOperations] = []
        self._ops.timed = timed
        forward_ms, _ = self._step_ms(batch)
        self._ops.timed = None
        elapsed: Counter[str] = Counter()
        idle: Counter[str] = Counter()
        for run in timed:
            for name, taken in zip(name_parts(run.operations), run.times, strict=True):
                elapsed[name] += taken.elapsed_ns / 1e6
                idle[name] += taken.idle_ns / 1e6 / num_usable_cores()
        return elapsed, idle, forward_ms - elapsed.total()


def huge_page_share(memory: Sequence[torch.Tensor]) -> float:
    """Return the share of memory in huge pages, by /proc/self/smaps."""
    ranges = [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in memory]
    huge = resident = 0
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(text, 16) for text in found.groups())
            is_ours = any(first < part_end and part_first < end for part_first, part_end in ranges)
        elif is_ours and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1])
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1])
    return huge / resident if resident else 0.0


@app.default
def run(*, context: int, options: BackendOptions = BackendOptions()) -> None:
    try:
        profiler = Profiler(options, context)
    except StartupError as error:
        fail("stream profile", str(error))
    print("loaded", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(profiler.profile(int(line))).decode(), flush=True)


if __name__ == "__main__":
    app()
