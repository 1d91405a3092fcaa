"""Time and memory to load a model on the CPU, and its decoding speed: measured in a process that does nothing else.

`python -m penstock.tools.bench.harness.load_profile MODEL_DIR STEPS ROWS …` prints a LoadProfile, as JSON.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.options import BackendOptions
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cpu.native_ops import NativeOps, TimedOperations
from penstock.backend.passes.decoder.cpu.native_structs import Linear, LinearOutput, OperationKind
from penstock.backend.passes.decoder.cpu.path_choice import load_kernels
from penstock.process.failure import fail
from penstock.process.supervisor import module_argv
from penstock.tools.bench.errors import COMMAND, BenchError
from penstock.tools.bench.harness.decode_steps import commit_cache, decode_steps
from penstock.tools.random_model import ModelDims, write_random_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backend.forward_pass import StepBatch

_TINY = ModelDims(hidden_size=64, layers=1, heads=1, kv_heads=1, intermediate_size=64, vocab_size=512)
_CONTEXT_TOKENS = 128
_WARM_UP_STEPS = 3


class LoadProfile(msgspec.Struct, frozen=True):
    """Memory is above that of the process after it has loaded a tiny model: interpreter, torch, modules and kernels."""

    kernels: list[str]
    """Forms that the linears of the layers run in."""
    weight_bytes: int
    """As served: packed linears and embedding."""
    peak_bytes: int
    """The largest resident memory while loading."""
    resident_bytes: int
    """Resident memory afterwards."""
    load_s: float
    tokens_per_s: dict[int, float]
    """Rows that decode together → tokens per second of all, from the median step."""

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / self.weight_bytes


def profile_load(model_dir: Path, steps: int, rows: Sequence[int]) -> LoadProfile:
    """Load the model in a process of its own, in bf16. Raises BenchError; the child prints the reason."""
    arguments = [str(model_dir), str(steps), *map(str, rows)]
    child = subprocess.run(module_argv(__name__, arguments), stdout=subprocess.PIPE, check=False)
    if child.returncode != 0:
        raise BenchError(f"{model_dir} could not be loaded")
    return msgspec.json.decode(child.stdout, type=LoadProfile)


def main(model_dir: Path, steps: int, rows: Sequence[int]) -> LoadProfile:
    """Raises StartupError."""
    load_kernels()
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), _TINY)
        CpuDecoderPass.load(Path(directory), PassOptions(dtype="bf16")).close()
    before = _memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    started_s = time.perf_counter()
    options = PassOptions(dtype="bf16", max_running=max(rows), max_batch_tokens=max(rows))
    forward_pass = CpuDecoderPass.load(model_dir, options)
    load_s = time.perf_counter() - started_s
    peak_bytes, resident_bytes = _memory_bytes("VmHWM") - before, _memory_bytes("VmRSS") - before
    page_size = BackendOptions().page_tokens()
    pages_per_row = -(-(_CONTEXT_TOKENS + 1) // page_size)
    forward_pass.create_cache(max(rows) * pages_per_row, page_size, next(iter(forward_pass.spec.kv_bytes_per_token)))
    ops = forward_pass.ops
    if not isinstance(ops, NativeOps):
        raise StartupError("this machine has no native kernels")
    commit_cache(ops)
    found = LoadProfile(
        kernels=_kernels(forward_pass, ops, next(decode_steps(1, _CONTEXT_TOKENS, page_size, 1))),
        weight_bytes=sum(part.numel() for part in ops.weights.memory()),
        peak_bytes=peak_bytes,
        resident_bytes=resident_bytes,
        load_s=load_s,
        tokens_per_s={count: count / _median_step_s(forward_pass, count, page_size, steps) for count in rows},
    )
    forward_pass.close()
    return found


def _memory_bytes(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise StartupError(f"/proc/self/status has no {key}")
    return int(match[1]) * 1024


def _kernels(forward_pass: CpuDecoderPass, ops: NativeOps, batch: StepBatch) -> list[str]:
    timed: list[TimedOperations] = []
    ops.timed = timed
    forward_pass.forward(batch)
    ops.timed = None
    linears = [
        Linear.from_address(operation.weights)
        for run in timed
        for operation in run.operations
        if operation.kind == OperationKind.LINEAR and operation.form != LinearOutput.STORE_FLOAT
    ]
    packings = [part.packing for linear in linears for part in linear.parts[: linear.num_parts]]
    return sorted({f"{each.bits} bits, groups of {each.group_size}" if each.bits else "float" for each in packings})


def _median_step_s(forward_pass: CpuDecoderPass, rows: int, page_size: int, steps: int) -> float:
    times_s = []
    for batch in decode_steps(rows, _CONTEXT_TOKENS, page_size, _WARM_UP_STEPS + steps):
        started_s = time.perf_counter()
        forward_pass.sample(forward_pass.forward(batch), batch).wait()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s[_WARM_UP_STEPS:])


if __name__ == "__main__":
    try:
        profile = main(Path(sys.argv[1]), int(sys.argv[2]), [int(count) for count in sys.argv[3:]])
    except StartupError as error:
        fail(COMMAND, str(error))
    sys.stdout.buffer.write(msgspec.json.encode(profile))
