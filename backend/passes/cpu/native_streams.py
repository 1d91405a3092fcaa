"""Several residual streams by our own C++ kernels (kernels/rows/streams.h)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.library.native_structs import AddNorm, Buffer, LinearOutput, OperationKind, Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.config.decoder_config import Streams as Settings
    from penstock.backend.passes.cpu.native_side import NativeSideOps
    from penstock.backend.passes.cpu.weight_memory.native_weights import PackedLinear, WeightPacker
    from penstock.backend.passes.ops.interface import Laurel, LayerInput, StreamWeights


@dataclass(eq=False, slots=True)
class _Layer:
    struct: Streams
    vectors: tuple[NDArray[np.float32], ...]
    """They own the memory that the struct points to."""


class NativeStreamOps:
    """Implements `StreamOps`. The functions are those of `NativeOps`."""

    def __init__(
        self,
        config: DecoderConfig,
        settings: Settings,
        packer: WeightPacker,
        dtype: Dtype,
        side: NativeSideOps,
        gated: Buffer,
        do: Callable[..., int],
        linear: Callable[[int, PackedLinear, int, LinearOutput], int],
        norm: Callable[[int, NDArray[np.float32] | None], int],
        add_norm: Callable[..., None],
    ) -> None:
        self._count, self._packer, self._side, self._gated = settings.count, packer, side, gated
        self._do, self._linear, self._norm, self._add_norm = do, linear, norm, add_norm
        self._first: PackedLinear | None = None
        self._last: list[PackedLinear] = []
        self._ends = Streams(count=settings.count)
        self._cutoffs: dict[float, ctypes.c_float] = {}
        hidden, count = config.hidden_size, settings.count
        self._streams, self._low = Buffer(count * hidden, Dtype.FP32), Buffer(settings.laurel_rank, dtype)
        self._results = Buffer(max((count - 1) * hidden, 2 * config.intermediate_size), Dtype.FP32)
        """Results of three kinds of products: those that begin and end streams, cut gates, and LAuReL."""
        self.buffers = (self._streams, self._low, self._results)

    def pack_ends(self, first: Tensor, last: Tensor) -> None:
        pack = self._packer.pack
        self._first = pack(first, None, 1.0, is_gated=False)
        self._last = [pack(part, None, 1.0, is_gated=False) for part in last.chunk(self._count - 1)]

    def pack(self, weights: StreamWeights) -> _Layer:
        plain = (weights.router, weights.predictions, weights.corrections, weights.scale)
        router, predictions, corrections, scale = vectors = tuple(map(self._packer.vector, plain))
        struct = Streams(
            router=router.ctypes.data,
            predictions=predictions.ctypes.data,
            corrections=corrections.ctypes.data,
            scale=scale.ctypes.data,
            count=self._count,
        )
        return _Layer(struct, vectors)

    def _do_streams(self, kind: OperationKind, struct: Streams, x: int | None, out: int, stream: int = 0) -> int:
        struct.rows = self._streams.address  # Whenever a buffer moves, the operations are recorded again.
        return self._do(kind, ctypes.addressof(struct), x, out, stream)

    def begin(self, residual: int, step: object) -> None:  # noqa: ARG002 - ps_plan received the step
        if self._first is None:
            raise ValueError("pack_ends was not called")
        x = self._norm(residual, None)
        projected = self._linear(x, self._first, self._results.address, LinearOutput.STORE_FLOAT)
        self._do_streams(OperationKind.BEGIN_STREAMS, self._ends, projected, residual)

    def predict(self, layer: _Layer, residual: int, step: object) -> None:  # noqa: ARG002 - as above
        self._do_streams(OperationKind.PREDICT_STREAMS, layer.struct, None, residual)

    def add_laurel(self, laurel: Laurel, residual: int) -> None:
        low = self._linear(self._norm(residual, laurel.input_norm), laurel.left, self._low.address, LinearOutput.STORE)
        added = self._linear(low, laurel.right, self._results.address, LinearOutput.STORE_FLOAT)
        self._add_norm(residual, laurel.input_norm, residual)
        self._add_norm(added, laurel.norm, residual)

    def cut_linear(self, x: int, weights: PackedLinear, cutoff: float) -> int:
        width = weights.struct.outputs // 2
        gates = self._linear(x, weights, self._results.address, LinearOutput.STORE_FLOAT)
        number = self._cutoffs.setdefault(cutoff, ctypes.c_float(cutoff))
        return self._do(OperationKind.CUT_GATES, ctypes.addressof(number), gates, self._gated.address, width)

    def correct(self, layer: _Layer, index: int, own: LayerInput, residual: int, step: object) -> None:
        self._do_streams(OperationKind.CORRECT_STREAMS, layer.struct, None, residual)
        added = self._side.input_of(index, own, residual, step)
        self._add_norm(added, own.norm, added, AddNorm.STORE)
        self._do_streams(OperationKind.ADD_TO_STREAMS, layer.struct, added, 0)

    def end(self, residual: int, step: object) -> None:  # noqa: ARG002 - as above
        x = self._norm(residual, None)  # the buffer of rows in the weights' type
        for stream, linear in enumerate(self._last, 1):
            self._do_streams(OperationKind.TAKE_STREAM, self._ends, None, x, stream)
            projected = self._linear(x, linear, self._results.address, LinearOutput.STORE_FLOAT)
            self._do_streams(OperationKind.END_STREAM, self._ends, projected, residual, stream)
