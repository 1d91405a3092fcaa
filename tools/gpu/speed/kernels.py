"""The section "kernels": times each kernel case, the library's products, and cuDNN's attention beside ours.

As a command it launches one case a few times, for Nsight Compute: docs/gpu/README.md has the line.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.tools.gpu.devices.device_context import DeviceContext, open_device_context
from penstock.tools.gpu.results import Results, is_wanted
from penstock.tools.gpu.speed.kernel_cases import KernelCase, KernelSizes, kernel_cases
from penstock.tools.gpu.speed.row_product_cases import row_product_cases

_WARM_UPS, _PROFILED = 2, 3


def run(results: Results) -> None:
    measure(results, open_device_context(), KernelSizes())


def measure(results: Results, context: DeviceContext, sizes: KernelSizes) -> None:
    results.sizes("kernels", sizes.describe())
    for case in (*kernel_cases(sizes), *row_product_cases(sizes)):
        if is_wanted(case.name):
            results.attempt(case.name, partial(_time, results, context, case))
    for name, *shape in sizes.peers:
        if is_wanted(f"peer.{name}"):
            results.attempt(f"peer.{name}", partial(_time_peer, results, context, sizes, name, *shape))


def _time(results: Results, context: DeviceContext, case: KernelCase) -> None:
    prepared = case.prepare(context)
    us = context.clock.work_us(prepared.works)
    if not prepared.unit:
        results.fact(case.name, us, "us", prepared.detail)
        return
    rate = prepared.amount / us / 1e6
    if prepared.leads_with_time:
        results.fact(case.name, us, "us", prepared.detail)
        results.fact(f"{case.name}.bandwidth", rate, prepared.unit)
    else:
        results.fact(case.name, rate, prepared.unit, prepared.detail)
        results.fact(f"{case.name}.time", us, "us")


def _time_peer(
    results: Results, context: DeviceContext, sizes: KernelSizes, name: str, rows: int, queries: int, tokens: int
) -> None:
    """Time cuDNN's attention through torch, on contiguous keys and values. It fails no check if it does not run."""
    heads = sizes.heads

    def draw(count: int, length: int) -> torch.Tensor:
        return torch.randn(rows, count, length, heads.head_dim, device=context.torch_device).bfloat16()

    num_bytes = 4 * rows * tokens * heads.num_kv_heads * heads.head_dim
    q, count = draw(heads.num_heads, queries), max(1, sizes.cold_bytes // num_bytes) if queries == 1 else 1
    sets = [[draw(heads.num_kv_heads, tokens) for _ in range(2)] for _ in range(count)]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=queries > 1, enable_gqa=True)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            us = context.clock.work_us([partial(attend, q, k, v) for k, v in sets])
    except RuntimeError as error:
        results.skipped(f"peer.{name}", str(error).strip().partition("\n")[0][:200])
        return
    flop = 2 * tokens * (tokens + 1) * heads.output_size
    results.fact(
        f"peer.{name}", (num_bytes if queries == 1 else flop) / us / 1e6, "TB/s" if queries == 1 else "TFLOP/s"
    )
    results.fact(f"peer.{name}.time", us, "us")


def run_case(context: DeviceContext, case: KernelCase, profiling: AbstractContextManager[object]) -> None:
    """Run the case. Only its own kernels run within `profiling`."""
    works = itertools.cycle(case.prepare(context).works)
    for work in itertools.islice(works, _WARM_UPS):
        work()
    context.device.synchronize()
    with profiling:
        for work in itertools.islice(works, _PROFILED):
            work()
        context.device.synchronize()


def main(argv: list[str]) -> int:
    sizes = KernelSizes()
    cases = {case.name: case for case in (*kernel_cases(sizes), *row_product_cases(sizes))}
    if len(argv) != 1 or argv[0] not in cases:
        print(f"give one case: {', '.join(cases)}", file=sys.stderr)
        return 2
    run_case(open_device_context(), cases[argv[0]], torch.cuda.profiler.profile())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
