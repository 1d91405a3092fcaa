"""The scales of architectures that multiply what others leave as it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import UNSET

from penstock.backend.checkpoint.config.decoder_config import Scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import UnsetType

    from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig


def no_scales(_: HfConfig) -> Scales:
    return Scales()


def _cap(value: float | UnsetType | None, default: float | None) -> float | None:
    return default if value is UNSET else value


def gemma_scales(*, scores_cap: float | None = None, logits_cap: float | None = None) -> Callable[[HfConfig], Scales]:
    """Gemma's scales. The caps are the defaults of absent keys."""

    def scales(config: HfConfig) -> Scales:
        return Scales(
            scores=(config.query_pre_attn_scalar or 256.0) ** -0.5,
            scores_softcap=_cap(config.attn_logit_softcapping, scores_cap),
            logits_softcap=_cap(config.final_logit_softcapping, logits_cap),
            embedding=math.sqrt(config.hidden_size),
        )

    return scales


def gemma4_scales(config: HfConfig, *, logits_cap: float | None = None) -> Scales:
    return Scales(
        scores=1.0,
        logits_softcap=_cap(config.final_logit_softcapping, logits_cap),
        embedding=math.sqrt(config.hidden_size),
    )


def gemma3n_scales(config: HfConfig) -> Scales:
    return gemma4_scales(config, logits_cap=30.0)


def gemma1_scales(config: HfConfig) -> Scales:
    return Scales(embedding=math.sqrt(config.hidden_size))


def granite_scales(config: HfConfig) -> Scales:
    embedding = config.embedding_multiplier or 1.0
    return Scales(
        scores=config.attention_multiplier or 1.0,
        embedding=embedding,
        given_embeddings=embedding,
        residual=config.residual_multiplier or 1.0,
        logits=1 / (config.logits_scaling or 1.0),
    )


def cohere_scales(config: HfConfig) -> Scales:
    return Scales(logits=config.logit_scale or 0.0625)
