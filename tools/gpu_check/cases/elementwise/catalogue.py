"""Lists the checks of elementwise kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO
from penstock.backend.passes.decoder.ops import HeadShape, supports_q8_0
from penstock.tools.gpu_check.cases.check import Check
from penstock.tools.gpu_check.cases.elementwise import operations


def wide_checks() -> Iterator[Check]:
    return _checks(operations.DTYPES, (16, 32, 64), (64, 80, 96, 128, 256), (8, 72, 1024, 4104, 16384))


def small_checks() -> Iterator[Check]:
    return _checks({"bf16": torch.bfloat16}, (16,), (96,), (72,))


def _checks(
    dtypes: dict[str, torch.dtype], page_sizes: tuple[int, ...], head_dims: tuple[int, ...], widths: tuple[int, ...]
) -> Iterator[Check]:
    for name, dtype in dtypes.items():
        is_of_8b = dtype == torch.bfloat16
        for hidden in widths:
            run = partial(operations.check_norm, dtype=dtype, hidden=hidden)
            yield Check("norm", f"{name}.{hidden}", run, is_of_8b)
            yield Check(
                "norm", f"layer.{name}.{hidden}", partial(operations.check_layer_norm, dtype=dtype, hidden=hidden)
            )
            yield Check(
                "norm", f"added.{name}.{hidden}", partial(operations.check_added_norm, dtype=dtype, hidden=hidden)
            )
            embedding = partial(operations.check_embedding, dtype=dtype, hidden=hidden)
            yield Check("embed", f"{name}.{hidden}", embedding, is_of_8b)
        for gate in ("silu_mul", "gelu_mul"):
            run = partial(operations.check_gate, dtype=dtype, name=gate, size=1032)
            yield Check("gate", f"{gate}.{name}", run, is_of_8b)
        yield Check("gate", f"gelu.{name}", partial(operations.check_gelu, dtype=dtype, size=1032))
        for heads in (HeadShape(7, 1, 64), HeadShape(32, 8, 128)):
            run = partial(operations.check_norm_of_all_heads, dtype=dtype, heads=heads)
            yield Check("norm", f"heads.{name}.{heads.num_heads}", run)
        yield Check("gather", name, partial(operations.check_gather, dtype=dtype), is_of_8b)
        for kv_dtype in KV_MACRO:
            for number, head_dim in enumerate(head_dims):
                if kv_dtype == "q8_0" and not supports_q8_0(head_dim):
                    continue
                page_size = page_sizes[number % len(page_sizes)]
                case = partial(operations.StoreCase, HeadShape(7, 1, head_dim), kv_dtype, page_size, head_dim)
                run = partial(_store, dtype=dtype, make_case=case)
                name_of_case = f"{name}.{kv_dtype}.{head_dim}"
                yield Check("rope_and_store", name_of_case, run, is_of_8b and head_dim == 128)
    for kv_dtype in ("q8_0", "bf16"):
        yield Check("copy_pages", kv_dtype, partial(operations.check_page_copies, kv_dtype=kv_dtype))


def _store(launcher: Launcher, dtype: torch.dtype, make_case: Callable[[], operations.StoreCase]) -> float:
    operations.check_store(launcher, make_case(), dtype, norms=True, centres=True)
    return operations.check_store(launcher, make_case(), dtype, norms=True)
