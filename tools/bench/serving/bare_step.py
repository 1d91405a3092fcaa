"""The bare work of a decode step on the CPU: its linears and its attention, timed inside whole steps of the decoder.

Each implementation of the decoder's operations on this machine is measured, and the fastest counts for each part: a
slow implementation of ours must not raise the floor. Runs as a child of `penstock bench floor`, so that the load
generator holds no model, and prints JSON.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization.modes import find_cpu_quantization
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_served_weights
from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass, make_cpu_ops
from penstock.backend.passes.decoder.cpu.torch_ops import TorchOps
from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device
from penstock.backend.start.startup import locate_model
from penstock.process.failure import fail
from penstock.process.options import make_app
from penstock.tools.bench.harness.decode_steps import commit_cache, decode_steps
from penstock.tools.bench.options import Counts
from penstock.tools.bench.serving.floor import BareStep

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.passes.decoder.ops import CpuOps, Forward, Step

_WARM_UP_STEPS = 5
_STEPS = 40

_PART_OF = {
    "linear": "linears",
    "linear_add": "linears",
    "activated_linear": "linears",
    "logits": "linears",
    "attention": "attention",
}

app = make_app("bare_step", "Prints the bare work of a decode step, as JSON.")


class TimedOps:
    """Operations that add up the seconds they take, by part. Each returns when its work is done."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self.seconds = {"linears": 0.0, "attention": 0.0}

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)
        part = _PART_OF.get(name)
        return operation if part is None else self._timed(operation, part)

    def run_step(self, step: Step, forward: Forward, *, needs_logits: bool) -> Any:
        """Run the operations one by one, through this object."""
        return forward(step, needs_logits=needs_logits)

    def _timed(self, operation: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started_s = time.perf_counter()
            result = operation(*arguments)
            self.seconds[part] += time.perf_counter() - started_s
            return result

        return timed


@dataclass(frozen=True, slots=True)
class TimedDecoder:
    """One implementation of the operations, with its model."""

    forward_pass: CpuDecoderPass
    ops: TimedOps

    def step(self, batch: StepBatch) -> tuple[float, float, float]:
        """Run a step; return the seconds of its linears, of its attention and of all of it, sampling included."""
        self.ops.seconds = {"linears": 0.0, "attention": 0.0}
        started_s = time.perf_counter()
        self.forward_pass.sample(self.forward_pass.forward(batch), batch).wait()
        return self.ops.seconds["linears"], self.ops.seconds["attention"], time.perf_counter() - started_s

    def measure(
        self, batch_size: int, context_tokens: int, page_size_tokens: int, num_steps: int
    ) -> tuple[float, float, float]:
        """Return medians over steps of batch_size sequences at this context, in seconds as `step` does."""
        steps = decode_steps(batch_size, context_tokens, page_size_tokens, _WARM_UP_STEPS + num_steps)
        times = [self.step(batch) for batch in steps][_WARM_UP_STEPS:]
        linears, attention, whole = (statistics.median(column) for column in zip(*times, strict=True))
        return linears, attention, whole


def load_decoders(options: BackendOptions, max_batch: int, num_pages: int) -> list[TimedDecoder]:
    """Load the implementation that the backend would use, then plain torch if that is another one.

    Not torch for quantised weights, which it multiplies far more slowly. Raises StartupError.
    """
    if choose_device(options.gpu) != "cpu":
        raise StartupError("the bare work is measured on the CPU: give --gpu none")
    model_dir = locate_model(options)
    config = read_decoder_config(model_dir)
    decoders = []
    quantization = find_cpu_quantization(options.quantize)
    with open_served_weights(model_dir, config, quantization) as weights:
        dtype = weights.choose_dtype(options.dtype)
        offered = [
            make_cpu_ops(config, dtype, options.step_tokens("cpu"), options.cpu_path),
            TorchOps(config, dtype),
        ]
        if isinstance(offered[0], TorchOps) or quantization is not None:
            del offered[1]
        for ops in offered:
            timed = TimedOps(ops)
            forward_pass = CpuDecoderPass(config, weights, cast("CpuOps", timed), dtype, max_batch, quantization)
            kv_dtype = (
                next(iter(forward_pass.spec.kv_bytes_per_token)) if options.kv_dtype == "auto" else options.kv_dtype
            )
            forward_pass.create_cache(num_pages, options.page_tokens(), kv_dtype)
            commit_cache(ops)
            decoders.append(TimedDecoder(forward_pass, timed))
    return decoders


def measure_floor(
    options: BackendOptions, batch_sizes: tuple[int, ...], context_tokens: int, num_steps: int = _STEPS
) -> list[BareStep]:
    """Raises StartupError."""
    pages_per_row = -(-(context_tokens + 1) // options.page_tokens())
    decoders = load_decoders(options, max(batch_sizes), max(batch_sizes) * pages_per_row)
    found = []
    for batch_size in batch_sizes:
        times = [decoder.measure(batch_size, context_tokens, options.page_tokens(), num_steps) for decoder in decoders]
        linear_ms = 1000 * min(linears for linears, _, _ in times)
        attention_ms = 1000 * min(attention for _, attention, _ in times)
        found.append(BareStep(batch_size, linear_ms, attention_ms, linear_ms + attention_ms, 1000 * times[0][2]))
    return found


@app.default
def run(
    *,
    batch_sizes: Counts,
    context: int,
    options: BackendOptions = BackendOptions(),
) -> None:
    try:
        steps = measure_floor(options, batch_sizes, context)
    except StartupError as error:
        fail("bare step", str(error))
    print(msgspec.json.encode(steps).decode())


if __name__ == "__main__":
    app()
