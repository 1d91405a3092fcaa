"""The functions of a kernel library that a KernelDriver loaded, in the place of a `ctypes.CDLL`.

Every operation copies the arrays that it reads to the driver and those that it changes back, so `NativeOps` and its
tests work on the kernels of another CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from penstock.backend.passes.cpu.library.native_structs import (
    CACHE_FORMS,
    NORM_KINDS,
    PANEL,
    QK_NORM_SCOPES,
    Attention,
    Experts,
    Linear,
    LinearOutput,
    Minima,
    Operation,
    OperationKind,
    OperationTime,
    Shape,
)
from penstock.backend.passes.cpu.native_sampling import SampledSlot
from penstock.backend.passes.ops.interface import KV_BLOCK_BYTES, KV_BLOCK_VALUES
from tests.backend.passes.cpu.arm.kernel_driver import KernelDriver, RemoteArguments
from tests.backend.passes.cpu.arm.remote_delta_net import copy_delta_net

_INT32 = _FLOAT = 4
_CACHE_DTYPES = {form: dtype for dtype, form in CACHE_FORMS.items()}


class _Function:
    """Takes the types that are set on a function of a `ctypes.CDLL`, and does not need them."""

    restype: Any = None
    argtypes: Any = None

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


@dataclass(slots=True)
class _Engine:
    address: int
    shape: Any
    plan: RemoteArguments
    num_tokens: int = 0
    num_logits: int = 0
    num_last: int = 0
    num_narrowed: int = 0
    num_pages: int = 0
    num_slots: int = 0
    largest_id: int = 0
    is_narrowed: bool = False

    @property
    def rows(self) -> int:
        return self.num_narrowed if self.is_narrowed else self.num_tokens

    @property
    def number_bytes(self) -> int:
        """Bytes of one activation or weight."""
        return 2 if self.shape.act_bf16 else 4

    @property
    def norm_bytes(self) -> int:
        """Bytes of a residual norm's weight, with its bias."""
        return (1 + (self.shape.norm_kind == NORM_KINDS["layer"])) * self.shape.hidden * _FLOAT

    def qk_norm_bytes(self, num_heads: int) -> int:
        is_shared = self.shape.qk_norm_scope == QK_NORM_SCOPES["head"]
        return (1 if is_shared else num_heads) * self.shape.head_dim * _FLOAT

    @property
    def qkv_bytes(self) -> int:
        heads = self.shape.num_heads + self.shape.num_gates + 2 * self.shape.num_kv_heads
        return self.num_tokens * heads * self.shape.head_dim * self.number_bytes

    @property
    def attended_bytes(self) -> int:
        return self.rows * self.shape.num_heads * self.shape.head_dim * self.number_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of one layer's pages, as far as the step uses them."""
        values = 2 * self.shape.num_kv_heads * self.shape.page_size * self.shape.head_dim
        dtype = _CACHE_DTYPES[self.shape.cache_form]
        return self.num_pages * values * KV_BLOCK_BYTES[dtype] // KV_BLOCK_VALUES


class RemoteKernels:
    def __init__(self, driver: KernelDriver) -> None:
        self._driver = driver
        self._engines: dict[int, _Engine] = {}
        self.ps_create = _Function(self._create)
        self.ps_destroy = _Function(self._destroy)
        self.ps_set_cache = _Function(self._set_cache)
        self.ps_packed_bytes = _Function(self._packed_bytes)
        self.ps_pack = _Function(self._pack)
        self.ps_part_bytes = _Function(self._part_bytes)
        self.ps_pack_quantized = _Function(self._pack_quantized)
        self.ps_pack_blocks = _Function(self._pack_blocks)
        self.ps_wake = _Function(self._wake)
        self.ps_plan = _Function(self._plan)
        self.ps_run = _Function(self._run)
        self.ps_score = _Function(self._score)
        self.ps_sample = _Function(self._sample)
        self.ps_read_memory = _Function(self._read_memory)

    def destroy_engines(self) -> None:
        for engine in list(self._engines):
            self._destroy(engine)

    def _arguments(self) -> RemoteArguments:
        return RemoteArguments(self._driver)

    def _create(self, num_threads: int, spin_ns: int, shape: Any) -> int:
        own = Shape.from_buffer_copy(shape._obj)
        with self._arguments() as arguments:
            engine = self._driver.call("ps_create", num_threads, spin_ns, arguments.of_struct(own))
        self._engines[engine] = _Engine(engine, own, self._arguments())
        return engine

    def _destroy(self, engine: int) -> None:
        self._driver.call("ps_destroy", engine)
        self._engines.pop(engine).plan.free()

    def _set_cache(self, engine: int, page_size: int, form: int) -> None:
        self._engines[engine].shape.page_size, self._engines[engine].shape.cache_form = page_size, form
        self._driver.call("ps_set_cache", engine, page_size, form)

    def _packed_bytes(self, engine: int, linear: Any) -> int:
        with self._arguments() as arguments:
            return self._driver.call("ps_packed_bytes", engine, arguments.of_struct(linear._obj))

    def _part_bytes(self, engine: int, linear: Any, part: int) -> int:
        with self._arguments() as arguments:
            return self._driver.call("ps_part_bytes", engine, arguments.of_struct(linear._obj), part)

    def _pack(self, engine: int, linear: Any, weight: int) -> None:
        own = linear._obj
        with self._arguments() as arguments:
            num_bytes = own.inputs * own.outputs * (1 + own.gated) * self._engines[engine].number_bytes
            source = arguments.read_only(weight, num_bytes)
            packed = arguments.changed(own.parts[0].packed, self._packed_bytes(engine, linear))
            self._driver.call("ps_pack", engine, arguments.of_struct(_moved(own, packed)), source)

    def _pack_quantized(
        self, engine: int, linear: Any, part: int, values: int, in_pairs: bool, factors: int, multipliers: int | None
    ) -> None:
        own, packing = linear._obj, linear._obj.parts[part].packing
        outputs = _num_outputs(own, part)
        factor_kinds = 1 + (packing.minima == Minima.HALF)
        blocks = own.inputs // packing.block_size if packing.block_size else 1
        groups = own.inputs // packing.group_size if packing.group_size else 1
        with self._arguments() as arguments:
            sources = (
                arguments.read_only(values, outputs * own.inputs // (2 if in_pairs else 1)),
                in_pairs,
                arguments.read_only(factors, outputs * blocks * factor_kinds * _FLOAT),
                arguments.read_only(multipliers, outputs * groups * factor_kinds),
            )
            packed = arguments.changed(own.parts[0].packed, self._packed_bytes(engine, linear))
            self._driver.call("ps_pack_quantized", engine, arguments.of_struct(_moved(own, packed)), part, *sources)

    def _pack_blocks(self, engine: int, linear: Any, part: int, type_number: int, content: int) -> None:
        own = linear._obj
        values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_number)]
        with self._arguments() as arguments:
            source = arguments.read_only(content, _num_outputs(own, part) * own.inputs // values * block_bytes)
            packed = arguments.changed(own.parts[0].packed, self._packed_bytes(engine, linear))
            struct = arguments.of_struct(_moved(own, packed))
            self._driver.call("ps_pack_blocks", engine, struct, part, type_number, source)

    def _wake(self, engine: int) -> None:
        self._driver.call("ps_wake", engine)

    def _plan(self, engine: int, rows: Any) -> None:
        """The arrays stay with the driver until the next plan: the kernels keep their addresses."""
        own, state = rows._obj, self._engines[engine]
        state.num_tokens, state.num_logits = own.num_tokens, own.num_logit_rows + own.num_verified
        state.num_last, state.is_narrowed = state.num_logits + own.num_scored, False
        num_pages = own.num_groups * own.num_rows * own.table_width
        sizes = (own.num_tokens, own.num_rows + 1, own.num_rows, own.num_rows, num_pages, state.num_last)
        input_ids, starts, contexts, slots, page_table, _ = np.split(
            _int32s(own.arrays, sum(sizes)), np.cumsum(sizes[:-1])
        )
        state.num_pages, state.largest_id = int(page_table.max()) + 1, int(input_ids.max())
        state.num_slots = int(slots.max()) + 1
        num_positions = int((contexts + np.diff(starts)).max())
        numbers = {"arrays": sum(sizes), "rope": num_positions * state.shape.rope_width}
        state.plan.free()
        arrays = {name: state.plan.read_only(getattr(own, name), count * _INT32) for name, count in numbers.items()}
        with self._arguments() as arguments:
            self._driver.call("ps_plan", engine, arguments.of_struct(own, **arrays))

    def _run(self, engine: int, operations: Any, count: int, times: Any) -> None:
        start = operations if isinstance(operations, int) else ctypes.addressof(operations._obj)
        for index in range(count):
            operation = Operation.from_address(start + index * ctypes.sizeof(Operation))
            time = None if times is None else ctypes.addressof(times[index])
            with self._arguments() as arguments:
                changed = self._copy(arguments, self._engines[engine], operation)
                duration = 0 if time is None else arguments.changed(time, ctypes.sizeof(OperationTime))
                self._driver.call("ps_run", engine, arguments.of_struct(operation, **changed), 1, duration)

    def _score(self, engine: int, operations: int, count: int, rows: Any) -> None:
        """Each operation is a call of its own. A first call without any makes the step consist of these rows."""
        state = self._engines[engine]
        self._score_rows(engine, rows._obj)
        state.is_narrowed, state.num_narrowed = True, rows._obj.num_rows
        self._run(engine, operations, count, None)
        self._score_rows(engine, rows._obj)

    def _score_rows(self, engine: int, own: Any) -> None:
        with self._arguments() as arguments:
            copies = {
                "logits": arguments.read_only(own.logits, own.num_rows * own.vocab * _FLOAT),
                "next_ids": arguments.read_only(own.next_ids, own.num_rows * _INT32),
                "chosen": arguments.changed(own.chosen, own.num_rows * _FLOAT),
                "ranks": arguments.changed(own.ranks, own.num_rows * _INT32),
            }
            for name in ("top_ids", "top") if own.num_top else ():
                copies[name] = arguments.changed(getattr(own, name), own.num_rows * own.num_top * _FLOAT)
            self._driver.call("ps_score", engine, 0, 0, arguments.of_struct(own, **copies))

    def _sample(self, engine: int, rows: Any) -> None:
        own = rows._obj
        used = set((ctypes.c_int32 * own.num_rows).from_address(own.slot_of_row))
        slots = (SampledSlot * (max(used) + 1)).from_address(own.slots)
        sent = type(slots).from_buffer_copy(slots)
        row_bytes = own.num_rows * ctypes.sizeof(ctypes.c_int64)
        with self._arguments() as arguments:
            for slot in (sent[index] for index in used):
                if slot.num_biases:
                    slot.bias_ids = arguments.read_only(slot.bias_ids, slot.num_biases * _INT32)
                    slot.biases = arguments.read_only(slot.biases, slot.num_biases * _FLOAT)
                if slot.has_penalties:
                    slot.seen_ids = arguments.changed(slot.seen_ids, (slot.num_seen + 1) * _INT32)
                    slot.generated = arguments.changed(slot.generated, (slot.num_seen + 1) * _INT32)
            copies = {
                "logits": arguments.read_only(own.logits, own.num_rows * own.vocab * _FLOAT),
                "slots": arguments.changed(ctypes.addressof(sent), ctypes.sizeof(sent)),
                "slot_of_row": arguments.read_only(own.slot_of_row, own.num_rows * _INT32),
                "positions": arguments.read_only(own.positions, row_bytes),
                "tokens": arguments.changed(own.tokens, own.num_rows * _INT32),
            }
            if own.mask_of_row is not None:
                num_masks = 1 + max((ctypes.c_int64 * own.num_rows).from_address(own.mask_of_row))
                copies["masks"] = arguments.read_only(own.masks, num_masks * own.mask_words * _INT32)
                copies["mask_of_row"] = arguments.read_only(own.mask_of_row, row_bytes)
            if own.chosen is not None:
                copies["chosen"] = arguments.changed(own.chosen, own.num_rows * _FLOAT)
                copies["ranks"] = arguments.changed(own.ranks, own.num_rows * _INT32)
                for name in ("top_ids", "top") if own.num_top else ():
                    copies[name] = arguments.changed(getattr(own, name), own.num_rows * own.num_top * _FLOAT)
            self._driver.call("ps_sample", engine, arguments.of_struct(own, **copies))
        for index in used:
            slots[index].num_seen = sent[index].num_seen

    def _copy(self, arguments: RemoteArguments, state: _Engine, op: Any) -> dict[str, int]:
        """Copy the operation's arrays. Returns their addresses."""
        hidden_bytes = state.rows * state.shape.hidden
        match OperationKind(op.kind):
            case OperationKind.EMBED:
                table_bytes = (state.largest_id + 1) * state.shape.hidden * state.number_bytes
                return {
                    "weights": self._copy_weight(arguments, state, op.weights)
                    if op.form
                    else arguments.read_only(op.weights, table_bytes),
                    "out": arguments.changed(op.out, hidden_bytes * _FLOAT),
                }
            case OperationKind.NORM | OperationKind.ADD_NORM:
                number_bytes = state.number_bytes if op.kind == OperationKind.NORM else _FLOAT
                return {
                    "weights": arguments.read_only(op.weights, state.norm_bytes),
                    "x": arguments.read_only(op.x, hidden_bytes * _FLOAT),
                    "out": arguments.changed(op.out, hidden_bytes * number_bytes),
                }
            case OperationKind.CAP_LOGITS:
                return {"out": arguments.changed(op.out, state.rows * op.form * _FLOAT)}
            case OperationKind.LINEAR:
                return self._copy_linear(arguments, state, op)
            case OperationKind.ROTATE_AND_STORE:
                return {
                    "weights": self._copy_layer(arguments, state, op.weights, stores=True),
                    "out": arguments.changed(op.out, state.qkv_bytes),
                }
            case OperationKind.ATTENTION:
                return {
                    "weights": self._copy_layer(arguments, state, op.weights, stores=False),
                    "x": arguments.read_only(op.x, state.qkv_bytes),
                    "out": arguments.changed(op.out, state.attended_bytes),
                }
            case OperationKind.ROUTE | OperationKind.EXPERT_INPUTS | OperationKind.EXPERT_OUTPUTS:
                return self._copy_routed(arguments, state, op)
            case OperationKind.WEIGHT_ROWS:
                return {
                    "x": arguments.read_only(op.x, state.rows * _FLOAT),
                    "out": arguments.changed(op.out, state.rows * op.form * state.number_bytes),
                }
            case OperationKind.DELTA_NET:
                return copy_delta_net(arguments, op, state.num_slots, state.num_tokens, state.number_bytes)
            case OperationKind.KEEP_LOGITS:
                state.num_narrowed = state.num_logits
                return {}
            case OperationKind.TAKE_LAST:
                x = arguments.read_only(op.x, hidden_bytes * _FLOAT)
                state.is_narrowed, state.num_narrowed = True, state.num_last
                return {"x": x, "out": arguments.changed(op.out, state.rows * state.shape.hidden * _FLOAT)}

    def _copy_routed(self, arguments: RemoteArguments, state: _Engine, op: Any) -> dict[str, int]:
        own = Experts.from_buffer_copy(Experts.from_address(op.weights))
        for linear, num_bytes in ((own.gate_up, own.gate_up_bytes), (own.down, own.down_bytes)):
            linear.parts[0].packed = arguments.read_only(linear.parts[0].packed, own.count * num_bytes)
            bias_bytes = own.count * linear.outputs * (1 + linear.gated) * _FLOAT
            linear.bias = arguments.read_only(linear.bias, bias_bytes)
        arrays = {"weights": arguments.of_struct(own)}
        values = state.rows * state.shape.hidden
        if op.kind == OperationKind.ROUTE:
            arrays["x"] = arguments.read_only(op.x, values * state.number_bytes)
            arrays["out"] = arguments.changed(op.out, state.rows * own.count * _FLOAT)
        elif op.kind == OperationKind.EXPERT_OUTPUTS:
            arrays["out"] = arguments.changed(op.out, values * _FLOAT)
        return arrays

    def _copy_linear(self, arguments: RemoteArguments, state: _Engine, op: Any) -> dict[str, int]:
        own, number_bytes = Linear.from_address(op.weights), state.number_bytes
        out_bytes = _FLOAT if LinearOutput(op.form) in (LinearOutput.STORE_FLOAT, LinearOutput.ADD) else number_bytes
        return {
            "weights": self._copy_weight(arguments, state, op.weights),
            "x": arguments.read_only(op.x, state.rows * own.inputs * number_bytes),
            "out": arguments.changed(op.out, state.rows * own.outputs * out_bytes),
        }

    def _copy_weight(self, arguments: RemoteArguments, state: _Engine, address: int) -> int:
        own = Linear.from_address(address)
        packed = arguments.read_only(own.parts[0].packed, self._packed_bytes(state.address, ctypes.byref(own)))
        bias = arguments.read_only(own.bias, own.outputs * (1 + own.gated) * _FLOAT)
        return arguments.of_struct(_moved(own, packed), bias=bias)

    def _copy_layer(self, arguments: RemoteArguments, state: _Engine, layer: int, *, stores: bool) -> int:
        own = Attention.from_address(layer)
        copy = arguments.changed if stores else arguments.read_only
        q_norm = arguments.read_only(own.q_norm, state.qk_norm_bytes(state.shape.num_heads))
        k_norm = arguments.read_only(own.k_norm, state.qk_norm_bytes(state.shape.num_kv_heads))
        sinks = arguments.read_only(own.sinks, state.shape.num_heads * _FLOAT)
        cache = copy(own.cache, state.cache_bytes)
        return arguments.of_struct(own, cache=cache, q_norm=q_norm, k_norm=k_norm, sinks=sinks)

    def _read_memory(self, engine: int, memory: int, num_floats: int) -> float:
        with self._arguments() as arguments:
            copy = arguments.read_only(memory, num_floats * _FLOAT)
            return self._driver.call_float("ps_read_memory", engine, copy, num_floats)


def _num_outputs(linear: Any, part: int) -> int:
    """Rows of a part's weight. Only the last part may end within a panel."""
    first_panel = linear.parts[part - 1].end_panel if part else 0
    last = linear.outputs * (1 + linear.gated) - first_panel * PANEL
    return min((linear.parts[part].end_panel - first_panel) * PANEL, last)


def _moved(linear: Any, packed: int) -> Any:
    """The struct with its parts at another address."""
    copy: Any = Linear.from_buffer_copy(linear)
    first = copy.parts[0].packed
    for part in copy.parts[: copy.num_parts]:
        part.packed += packed - first
    return copy


def _int32s(address: int, count: int) -> Any:
    return np.frombuffer(ctypes.string_at(address, count * _INT32), np.int32)
