"""Checks of several residual streams against float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Argument, Launcher, int32
from penstock.backend.passes.cuda.ops.side_ops import stream_kernel
from penstock.tools.gpu.cases.check import Check, check_of, require, require_close
from penstock.tools.gpu.cases.elementwise import DTYPES, check_close, ints

COUNT, EPS = 4, 1e-5


def check_streams(launcher: Launcher, dtype: torch.dtype, hidden: int) -> float:
    """Check all kernels, first for all rows, then for two of them in another order."""
    torch.manual_seed(4)
    act, shape = ACT_MACRO[dtype], (int32(COUNT), int32(hidden))
    router, scale = torch.randn(COUNT, hidden) / hidden, torch.randn(hidden)
    predictions, corrections = torch.randn(COUNT**2, COUNT), torch.randn(COUNT, COUNT)
    rows, residual = torch.full((3, COUNT, hidden), torch.nan), 3 * torch.randn(3, hidden)
    projected, added = torch.randn(3, (COUNT - 1) * hidden).to(dtype), torch.randn(3, hidden)

    def launch(entry: str, num_rows: int, *arguments: Argument) -> None:
        kernel, eps = stream_kernel(act, entry), (np.float32(EPS),) * entry.startswith(("predict", "correct"))
        launcher.prepare([kernel])
        launcher.launch(kernel, (num_rows, 1, 1), rows, *arguments, *shape, *eps)

    def modes(x: Tensor) -> Tensor:
        return torch.tanh((functional.rms_norm(x, (hidden,), eps=EPS)[:, None] * router).sum(-1))

    launch("begin_streams", 3, residual, projected)
    first, others = residual.double()[:, None], projected.double().view(3, -1, hidden)
    sizes = (each.square().mean(-1, keepdim=True) for each in (first, others))
    expected = torch.cat([first, others * torch.sqrt(next(sizes) / next(sizes))], dim=1)
    error = check_close("the streams that begin", rows, expected, torch.float32)
    for tokens in (None, ints(2, 0)):
        given = ints(0) if tokens is None else tokens, int32(tokens is not None)
        chosen = [0, 1, 2] if tokens is None else [2, 0]
        num_rows, of_rows = len(chosen), expected[chosen]
        factors = (modes(of_rows[:, 0]) @ predictions.double().T).view(-1, COUNT, COUNT)
        of_rows = of_rows + factors @ of_rows
        launch("predict_streams", num_rows, residual, router, predictions, *given)
        check_close("the predicted residual", residual[:num_rows], of_rows[:, 0], torch.float32)
        result = residual[:num_rows].normal_()
        change, factors = result.double() - of_rows[:, 0], 1 + modes(result.double()) @ corrections.double().T
        of_rows = of_rows + factors[..., None] * change[:, None]
        launch("correct_streams", num_rows, residual, router, corrections, scale, *given)
        check_close("the layer's input", residual[:num_rows], of_rows[:, 0] * scale, torch.float32)
        launch("add_to_streams", num_rows, added, *given)
        of_rows[:, 1:] += added[:num_rows, None]
        expected[chosen] = of_rows
        # What the device's tanh and roots round is multiplied by the factors of two layers.
        error = max(error, require_close("the streams", rows, expected, 3e-5, 3e-6))
        taken = torch.empty(num_rows, hidden, dtype=dtype)
        mean = of_rows[:, 0]
        for stream in range(1, COUNT):
            launch("take_stream", num_rows, taken, *given, int32(stream))
            require("the taken stream differs", torch.equal(taken, rows[chosen, stream].to(dtype)))
            launch("end_stream", num_rows, residual, taken, *given, int32(stream))
            sizes = (each.square().mean(-1, keepdim=True) for each in (of_rows[:, 0], taken.double()))
            mean = mean + taken.double() * torch.sqrt(next(sizes) / next(sizes))
        check_close("the mean", residual[:num_rows], mean / COUNT, torch.float32)
    return error


def check_cut_gates(launcher: Launcher, dtype: torch.dtype, size: int) -> float:
    torch.manual_seed(5)
    gate_up, out = (3 * torch.randn(3, 2 * size) + 1).to(dtype), torch.full((3, size), torch.nan, dtype=dtype)
    kernel = stream_kernel(ACT_MACRO[dtype], "cut_gates")
    launcher.prepare([kernel])
    launcher.launch(kernel, (3, 1, 1), gate_up, out, int32(size), np.float32(0.7))
    gate, up = gate_up.double().chunk(2, dim=-1)
    std, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
    left = functional.relu(gate - (mean + 0.7 * std))
    require("all or no gates are cut", 0 < int((left > 0).sum()) < left.numel() // 2)
    return check_close("cut gates", out, functional.gelu(left, approximate="tanh") * up, dtype)


def checks(hidden: int) -> Iterator[Check]:
    for name, dtype in DTYPES.items():
        yield check_of("streams", name, check_streams, dtype=dtype, hidden=hidden)
        yield check_of("streams", f"gates.{name}", check_cut_gates, dtype=dtype, size=hidden)
