"""Captures steps as CUDA graphs, one for each padded size, and replays them: whole decode steps, and mixed steps up to
the last cache write."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.files.progress import GRAPHS, MIXED_GRAPHS, make_progress
from penstock.backend.passes.cuda.attention.delta_net import NUM_LAUNCHES as LAUNCHES_OF_RULES
from penstock.backend.passes.cuda.ops.expert_ops import NUM_LAUNCHES as LAUNCHES_OF_EXPERTS
from penstock.backend.passes.cuda.ops.side_ops import LAUNCHES_BESIDE, LAUNCHES_OF_INPUTS, LAUNCHES_OF_STREAMS
from penstock.backend.passes.cuda.step.step_packing import MixedPadding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.files.progress import Work
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.passes.cuda.device.device import Device, Graph
    from penstock.backend.passes.cuda.device.transfers import Ints
    from penstock.backend.passes.cuda.ops.activations import Residual
    from penstock.backend.passes.cuda.ops.cuda_ops import CudaOps
    from penstock.backend.passes.cuda.ops.matmul import Matmul
    from penstock.backend.passes.cuda.step.step_buffers import StepBuffers
    from penstock.backend.passes.cuda.step.step_rows import CudaStep
    from penstock.backend.passes.decoder.model import DecoderModel


MAX_GRAPH_ROWS = 512
"""Larger steps keep the device busy for long enough to launch their kernels one by one."""
USUAL_GRAPH_ROWS = 256
"""Most decodes of a captured mixed step; decode steps with more rows have fewer sizes."""
_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_LARGE_SIZE_STEP = 32
"""Beyond USUAL_GRAPH_ROWS."""
_MATMULS_PER_LAYER = 4
_OTHER_NODES_PER_LAYER = 5


def graph_sizes(max_rows: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24 and so on; the last size is the largest captured decode step."""
    most = min(max_rows, MAX_GRAPH_ROWS)
    small = *_SMALL_SIZES, *range(_SIZE_STEP, USUAL_GRAPH_ROWS, _SIZE_STEP)
    sizes = *small, *range(USUAL_GRAPH_ROWS, MAX_GRAPH_ROWS, _LARGE_SIZE_STEP), most
    return sorted({size for size in sizes if size <= most})


def num_nodes_of(config: DecoderConfig, matmul: Matmul, num_rows: int) -> int:
    """Return the number of kernels in a captured step."""
    launches = matmul.num_launches(num_rows)
    per_layer = _MATMULS_PER_LAYER * launches + _OTHER_NODES_PER_LAYER
    per_layer += (config.qk_norm == "projection") + config.parallel_blocks + config.gated_attention
    per_layer += sum(norm is not None for norm in (config.names.attention_output_norm, config.names.mlp_output_norm))
    if config.layer_input_size:
        per_layer += 2 * launches + LAUNCHES_OF_INPUTS
    if config.streams is not None:
        per_layer += 2 * launches + LAUNCHES_OF_STREAMS
    per_layer += LAUNCHES_BESIDE * config.has_experts_beside
    of_rules = 0 if config.delta_net is None else sum(config.delta_net.layers) * (launches + LAUNCHES_OF_RULES)
    softcap = 0 if config.scales.logits_softcap is None else 3
    of_experts = sum(config.layer_has_experts) * (launches + LAUNCHES_OF_EXPERTS)
    return per_layer * config.num_layers + of_experts + of_rules + launches + softcap + bool(config.rope.axes) + 4


class StepGraphs:
    """Each graph reads its step from fixed addresses. Rows or tokens beyond the step's own are padding."""

    def __init__(self, device: Device, sizes: Sequence[int], run: Callable[[int], None], work: Work = GRAPHS) -> None:
        """Capture all sizes, which ascend, largest first.

        run(n) launches a step of size n. It runs once before each capture, because libraries load and allocate at their
        first call, which is not allowed during a capture.
        """
        self._sizes = sizes
        self._graphs: dict[int, Graph] = {}
        if not sizes:
            return
        with closing(make_progress(len(sizes), work)) as progress:
            for size in reversed(sizes):
                run(size)
                device.synchronize()
                self._graphs[size] = device.capture(partial(run, size))
                progress.advance(1)

    def size_for(self, size: int) -> int | None:
        """Return the smallest graph size that is at least `size`; None if there is none."""
        index = bisect_left(self._sizes, size)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int) -> None:
        self._graphs[size].replay()


_LAUNCH_S = 15e-6
"""Host time of a launch outside a graph.

An H100's host takes about 25 us. With 15 the steps stay out that lose there by padding: an 8B gains 8 % from a graph
with 64 tokens of a prompt and 4 % with 128, and loses 5 % with 256 and 512; a 0.6B gains up to 2,048 tokens.
"""
_LAUNCHES_OF_LAYER = 9
_DEVICE_BYTES_PER_S, _DEVICE_OPERATIONS_PER_S = 4.3e12, 790e12
"""The rates of an H200. A slower device makes the host wait even longer."""
_SIZE_STEPS = ((512, 64), (1024, 128), (1 << 30, 256))
"""Sizes up to the first number are this far apart. A product of 64 tokens or fewer takes as long as one of 64: it reads
the weights. The library's own tiles have 64 to 256 rows, so up to 63 rows of padding add little to larger ones. Beyond
512 tokens at most a fifth of a captured step is padding."""


def mixed_sizes(max_tokens: int, max_rows: int, mixed_tokens: int) -> list[int]:
    """Return the numbers of tokens of captured steps with up to mixed_tokens of prompts beside max_rows decodes."""
    most = min(max_tokens, mixed_tokens + max_rows) if mixed_tokens else 0
    sizes, last = {most} if most else set[int](), 0
    for end, step in _SIZE_STEPS:
        sizes.update(range(last + step, min(end, most) + 1, step))
        last = end
    return sorted(sizes)


def launch_bound_tokens(weight_bytes: int, num_weights: int, num_layers: int) -> int:
    """Return the number of tokens up to which a step's launches take longer than its products.

    Larger steps gain nothing from a graph, because the host is a step ahead, and would compute their padding.
    """
    launches_s = num_layers * _LAUNCHES_OF_LAYER * _LAUNCH_S
    if launches_s < weight_bytes / _DEVICE_BYTES_PER_S:
        return 0
    first_size = _SIZE_STEPS[0][1]
    return int(launches_s * _DEVICE_OPERATIONS_PER_S / (2 * num_weights)) // first_size * first_size


class MixedGraphs:
    """The graphs of one pass."""

    is_used = True
    """False launches all mixed steps kernel by kernel, for comparison."""

    def __init__(
        self, device: Device, ops: CudaOps, model: DecoderModel, buffers: StepBuffers, sizes: Sequence[int]
    ) -> None:
        self._ops = ops
        self._model = model
        self._buffers = buffers
        self._num_tiles = {size: ops.tiling.captured_tiles(size) for size in sizes}
        self._graphs = StepGraphs(device, sizes, self._run, MIXED_GRAPHS)

    def fit(self, batch: StepBatch, num_decode: int, tiles: Ints) -> MixedPadding | None:
        """Return the graph for a step; None if no graph has enough tokens, or this one has too few tiles, or
        rows have adapters.

        num_decode, tiles: as `StepAttention.tiles` takes and returns them.
        """
        size = self._graphs.size_for(batch.num_tokens) if self.is_used else None
        if size is None or batch.adapters is not None or len(tiles) > self._num_tiles[size]:
            return None
        return MixedPadding(size, self._num_tiles[size], num_decode, tiles)

    def replay(self, padding: MixedPadding, num_logits: int, *, is_scored: bool) -> tuple[Tensor, Residual, CudaStep]:
        """Run a step that `StepBuffers.load` has sent, up to the last cache write. Return the arguments of `finish`."""
        self._graphs.replay(padding.num_tokens)
        buffers = self._buffers
        step = buffers.mixed_step(padding.num_tokens, padding.num_tiles)
        logit_rows, logit_tokens = buffers.logit_rows.cut(num_logits), buffers.logit_tokens[:num_logits]
        step = replace(step, logit_rows=logit_rows, logit_tokens=logit_tokens, is_scored=is_scored)
        return *self._ops.resume(step), step

    def _run(self, num_tokens: int) -> None:
        step = self._buffers.mixed_step(num_tokens, self._num_tiles[num_tokens])
        self._ops.begin(step)
        _, residual = self._model.store_tokens(step)
        residual.add_pending()  # of a delta rule
