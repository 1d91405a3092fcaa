"""Gated delta rules: sequences in chunks and slots, against the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, DeltaNet, RopeConfig
from penstock.backend.passes.cuda.attention.delta_net import CudaDeltaNetOps
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.step.step_rows import CudaStep, RowArrays
from penstock.backend.passes.ops.state_ops import DeltaNetWeights
from penstock.tools.gpu.cases.check import require_same_bits, require_within

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_HIDDEN, _EPS, _NUM_SLOTS = 16, 1e-6, 5
_SLOTS = (3, 0, 4)
Steps = tuple[tuple[tuple[int, int], ...], ...]
"""Each step's (sequence, tokens), those of one token first."""


@dataclass(frozen=True)
class DeltaCase:
    net: DeltaNet
    dtype: torch.dtype

    @classmethod
    def of(cls, key_dim: int, value_dim: int, dtype: torch.dtype, *, tiles: bool = False) -> DeltaCase:
        return cls(DeltaNet((True,), 2, 4, key_dim, value_dim, 4, tiles_key_heads=tiles), dtype)

    def weights(self) -> DeltaNetWeights:
        net, generator = self.net, torch.Generator().manual_seed(1)
        heads = net.num_value_heads
        return DeltaNetWeights(
            gates=torch.randn(2 * heads, _HIDDEN, generator=generator) * 0.3,
            conv=torch.randn(net.num_channels, net.conv_width, generator=generator) * 0.5,
            bias=torch.tensor([30.0, 0.5, -1.0, 0.0]),  # the first is beyond the softplus's bend
            decays=-torch.tensor([0.01, 0.3, 1.0, 0.1]),
            norm=torch.rand(net.value_dim, generator=generator) + 0.5,
        )

    def sequence(self, seed: int, length: int) -> tuple[Tensor, Tensor]:
        """[q | k | v | gates] and x of each token."""
        generator, width = torch.Generator().manual_seed(seed), self.net.num_channels + self.net.value_size
        return (
            torch.randn(length, width, generator=generator).to(self.dtype),
            torch.randn(length, _HIDDEN, generator=generator).to(self.dtype),
        )

    def run(self, launcher: Launcher, lengths: tuple[int, ...], steps: Steps) -> list[Tensor]:
        """Return each sequence's results. A padding row ends each step, and slots hold NaN at first."""
        rope, size, net = RopeConfig(16, (1.0,) * 8), self.net.value_size, self.net
        config = DecoderConfig("", 16, _HIDDEN, 16, 1, 1, 1, 16, _EPS, 64, rope, tie_embeddings=True, delta_net=net)
        most = max(sum(count for _, count in step) for step in steps) + 2
        attended = torch.empty(most, size, dtype=self.dtype)
        ops = CudaDeltaNetOps(
            launcher, torch.device("cpu"), config, net, self.dtype, most, most, lambda x: x.float().contiguous(),
            lambda x: x.float(), lambda x, weight, out: torch.mm(x, weight.t(), out=out), lambda *_: None,
            lambda _: attended,
        )  # fmt: skip
        layer = ops.pack(self.weights())
        ops.create_states(_NUM_SLOTS)
        for state in (layer.states, layer.inputs):
            state.fill_(torch.nan)
        sequences, done = [self.sequence(seed, length) for seed, length in enumerate(lengths)], [0] * len(lengths)
        found: list[list[Tensor]] = [[] for _ in lengths]
        for step in steps:
            parts = [sequences[index][0][done[index] : done[index] + count] for index, count in step]
            xs = [sequences[index][1][done[index] : done[index] + count] for index, count in step]
            starts = [0, *accumulate(count for _, count in step)]
            ints = [
                [*starts, starts[-1] + 2],
                [*(done[index] for index, _ in step), 7],
                [*(_SLOTS[i] for i, _ in step), -1],
            ]
            rows = RowArrays(*(torch.tensor(each, dtype=torch.int32) for each in ints))
            inputs, x = torch.cat([*parts, parts[0][:1].expand(2, -1)]), torch.cat([*xs, xs[0][:1].expand(2, -1)])
            now = CudaStep(len(x), rows, rows, None, rows, rows.slots[:0], is_decode_only=False)
            results = ops.run(inputs, x, layer, now)
            for (index, count), start in zip(step, starts, strict=False):
                found[index].append(results[start : start + count].clone())
                done[index] += count
        return [torch.cat(each) for each in found]

    def expected(self, seed: int, length: int) -> Tensor:
        """The definition, token by token, in float64."""
        net, weights = self.net, self.weights()
        inputs, x = (each.double() for each in self.sequence(seed, length))
        channels, keys = inputs[:, : net.num_channels], net.num_key_heads * net.key_dim
        padded = functional.pad(channels, (0, 0, net.conv_width - 1, 0))
        windows = padded.unfold(0, net.conv_width, 1)
        mixed = functional.silu((windows * weights.conv.double()).sum(-1))
        heads = torch.arange(net.num_value_heads)
        own = heads % net.num_key_heads if net.tiles_key_heads else heads // net.values_per_key
        q, k = (part.view(length, -1, net.key_dim)[:, own] for part in (mixed[:, :keys], mixed[:, keys : 2 * keys]))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v, z = (part.view(length, -1, net.value_dim) for part in (mixed[:, 2 * keys :], inputs[:, net.num_channels :]))
        strengths, rates = (x @ weights.gates.double().t()).chunk(2, dim=1)
        decays = (weights.decays.double() * functional.softplus(rates + weights.bias.double())).exp()
        state, results = torch.zeros(net.num_value_heads, net.key_dim, net.value_dim, dtype=torch.float64), []
        for t in range(length):
            state = state * decays[t, :, None, None]
            error = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * strengths[t].sigmoid()[:, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], error)
            results.append(torch.einsum("hkv,hk->hv", state, q[t]) * net.key_dim**-0.5)
        read = torch.stack(results)
        normed = read / (read.square().mean(-1, keepdim=True) + _EPS).sqrt() * weights.norm.double()
        return (normed * functional.silu(z)).flatten(1)


LENGTHS = (23, 1, 9)
_MIXED: Steps = (((1, 1), (0, 2)), ((0, 1), (2, 5)), ((0, 1), (2, 1)), ((2, 3), (0, 19)))
_WHOLE: Steps = (((1, 1), (0, 23), (2, 9)),)


def check_delta(launcher: Launcher, case: DeltaCase) -> float:
    """Check chunks shorter and longer than the convolution, beside other sequences."""
    errors = []
    for seed, (found, length) in enumerate(zip(case.run(launcher, LENGTHS, _MIXED), LENGTHS, strict=True)):
        expected = case.expected(seed, length)
        errors.append(float((found.double() - expected).abs().max() / expected.abs().max()))
    return require_within("relative to the largest result", max(errors), TOLERANCE[case.dtype])


def check_delta_cuts(launcher: Launcher, case: DeltaCase) -> None:
    """Check that results have the same bits however the sequences are cut."""
    for whole, cut in zip(case.run(launcher, LENGTHS, _WHOLE), case.run(launcher, LENGTHS, _MIXED), strict=True):
        require_same_bits("in chunks", cut, whole)
