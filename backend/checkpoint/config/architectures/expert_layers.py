"""The mixtures of experts of models, and which layers have them, from config.json.

A function is one architecture's rule, with the defaults that transformers uses for absent keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, Experts
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig

MAX_EXPERTS = 1 << 16
"""Experts of all layers together: each has its own tensors in the checkpoint, whose names are in memory
while it loads."""


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    experts: Experts
    layers: tuple[bool, ...]
    """Whether each layer has experts."""


def qwen3_experts(config: HfConfig) -> ExpertLayers:
    experts = Experts(
        count=_count(config, 128),
        per_token=config.num_experts_per_tok or 8,
        width=config.moe_intermediate_size or 768,
        normalises=bool(config.norm_topk_prob),
    )
    return checked(experts, _sparse_layers(config))


def qwen3_vl_experts(config: HfConfig) -> ExpertLayers:
    experts = Experts(
        count=_count(config, 60),
        per_token=config.num_experts_per_tok or 4,
        width=config.moe_intermediate_size or 1408,
        normalises=True,
    )
    return checked(experts, _sparse_layers(config))


def qwen2_experts(config: HfConfig) -> ExpertLayers:
    experts = Experts(
        count=_count(config, 60),
        per_token=config.num_experts_per_tok or 4,
        width=config.moe_intermediate_size or 1408,
        normalises=bool(config.norm_topk_prob),
        shared_width=config.shared_expert_intermediate_size or 5632,
    )
    return checked(experts, _sparse_layers(config))


def qwen3_next_experts(config: HfConfig) -> ExpertLayers:
    return checked(_with_shared(config, 512, 10, normalises=config.norm_topk_prob is not False), _sparse_layers(config))


def qwen35_experts(config: HfConfig) -> ExpertLayers:
    return checked(_with_shared(config, 256, 8, normalises=True), (True,) * config.num_hidden_layers)


def _with_shared(config: HfConfig, count: int, per_token: int, *, normalises: bool) -> Experts:
    return Experts(
        count=_count(config, count),
        per_token=config.num_experts_per_tok or per_token,
        width=config.moe_intermediate_size or 512,
        normalises=normalises,
        shared_width=config.shared_expert_intermediate_size or 512,
    )


def mixtral_experts(config: HfConfig) -> ExpertLayers:
    experts = Experts(
        count=_count(config, 8),
        per_token=config.num_experts_per_tok or 2,
        width=config.intermediate_size,
        normalises=True,
    )
    return checked(experts, (True,) * config.num_hidden_layers)


def gpt_oss_experts(config: HfConfig) -> ExpertLayers:
    experts = Experts(
        count=_count(config, 128),
        per_token=config.num_experts_per_tok or 4,
        width=config.intermediate_size,
        normalises=True,
        biased=True,
        clamped_gate=ClampedGate(config.swiglu_alpha or 1.702, config.swiglu_limit or 7.0),
    )
    return checked(experts, (True,) * config.num_hidden_layers)


def _count(config: HfConfig, default: int) -> int:
    first, second = config.num_experts, config.num_local_experts
    if first is not None and second is not None and first != second:
        raise StartupError(f"num_experts is {first} and num_local_experts {second}; they must be the same")
    return first or second or default


def _sparse_layers(config: HfConfig) -> tuple[bool, ...]:
    dense = frozenset(config.mlp_only_layers or ())
    step = config.decoder_sparse_step
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers))


def checked(experts: Experts, layers: tuple[bool, ...]) -> ExpertLayers:
    if experts.per_token > experts.count:
        raise StartupError(
            f"num_experts_per_tok is {experts.per_token}; it must be at most the number of experts, {experts.count}"
        )
    if sum(layers) * experts.count > MAX_EXPERTS:
        raise StartupError(
            f"{sum(layers)} layers have {experts.count} experts each; at most {MAX_EXPERTS} are supported in all layers"
        )
    return ExpertLayers(experts, layers)
