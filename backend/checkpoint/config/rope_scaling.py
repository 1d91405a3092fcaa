"""The inverse frequencies of rotary position embedding, for every supported scaling rule.

All arithmetic is in fp32, in the same order as in transformers: checkpoints were trained with these roundings, and at
position 100,000 the last bit of fp32 changes a phase by 0.01. Only powers are rounded correctly; torch's are off by the
last bit once in 100 to 200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import RopeConfig
from penstock.backend.errors import StartupError

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")

_Positive = Annotated[float, Meta(ge=1e-6, le=1e9)]
_Section = Annotated[int, Meta(ge=0, le=512)]
_Factors = Annotated[tuple[_Positive, ...], Meta(min_length=1, max_length=4096)]


class RopeSettings(Struct, frozen=True):
    """rope_parameters (or the older rope_scaling) of a config.json. Keys that a rope type does not use are ignored."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Annotated[float, Meta(gt=1.0, le=1e15)] | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    original_max_position_embeddings: Annotated[int, Meta(ge=2, le=1 << 24)] | None = None
    factor: _Positive | None = None
    attention_factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    mscale: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    mscale_all_dim: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    truncate: bool | None = None
    llama_4_scaling_beta: Annotated[float, Meta(ge=0.0, le=1e3)] | None = None
    short_factor: _Factors | None = None
    long_factor: _Factors | None = None
    mixed_b: float | None = None
    mrope_section: tuple[_Section, _Section, _Section] | None = None

    @property
    def kind(self) -> str:
        """The rope type, under either key. "su" is an older name of LongRoPE.

        "mrope" rotates by up to three positions (Qwen-VL), which are equal for text: then it is the default.
        """
        kind = self.rope_type or self.type or "default"
        return {"su": "longrope", "mrope": "default"}.get(kind, kind)


@dataclass(frozen=True, slots=True)
class RopeAxes:
    """How a model's pairs are divided among the three positions of a token: frame, row and column of a picture."""

    sections: tuple[int, int, int]
    """Pairs of each axis, where the file has no mrope_section."""
    take_turns: bool
    """Pairs 3 i + 1 and 3 i + 2 turn by row and column, as many as these have. Otherwise the sections follow each
    other."""

    def of_pairs(self, given: tuple[int, int, int] | None, num_pairs: int) -> tuple[int, ...]:
        """The axis of each pair. Raises StartupError."""
        sections = given or self.sections
        if self.take_turns:
            return tuple(i % 3 if i // 3 < sections[i % 3] else 0 for i in range(num_pairs))
        if sum(sections) != num_pairs:
            raise StartupError(f"mrope_section is {list(sections)}; its sum must be {num_pairs}, half of what rotates")
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def compute_rope(
    settings: RopeSettings,
    *,
    theta: float,
    rotary_dim: int,
    max_position_embeddings: int,
    original_max_positions: int,
    context_tokens: int,
) -> RopeConfig:
    """Frequencies for sequences of up to context_tokens.

    LongRoPE (arXiv 2402.13753) has two sets of frequencies. A sequence must use one set from its first token to its
    last, so the choice is made here: the short set if no sequence can exceed original_max_positions, else the long
    one. Dynamic NTK does not change frequencies up to max_position_embeddings, the longest sequence here.

    Raises StartupError naming the setting that is missing, unknown or of the wrong length.
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    wave_scales = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    attention_factor = 1.0
    match settings.kind:
        case "default" | "dynamic":
            inv_freq = 1.0 / wave_scales
        case "linear":
            inv_freq = (1.0 / wave_scales) / _required(settings, "factor")
        case "llama3":
            inv_freq = _llama3(1.0 / wave_scales, settings, original_max_positions)
        case "yarn":
            factor = settings.factor or max_position_embeddings / original_max_positions
            inv_freq = _yarn(wave_scales, settings, factor, theta, original_max_positions)
            attention_factor = settings.attention_factor or _yarn_attention_factor(settings, factor)
        case "longrope":
            factors = _longrope_factors(settings, rotary_dim, use_long=context_tokens > original_max_positions)
            inv_freq = 1.0 / (factors * wave_scales)
            factor = settings.factor or max_position_embeddings / original_max_positions
            attention_factor = settings.attention_factor or (
                math.sqrt(1 + math.log(factor) / math.log(original_max_positions)) if factor > 1 else 1.0
            )
        case "proportional":
            # All dimensions are in the table; those that do not turn have the frequency 0.
            num_turned = int((settings.partial_rotary_factor or 1.0) * rotary_dim // 2)
            inv_freq = 1.0 / wave_scales / (settings.factor or 1.0)
            inv_freq[num_turned:] = 0.0
        case unknown:
            raise StartupError(f'rope type "{unknown}" is not supported; {", ".join(SUPPORTED_ROPE_TYPES)} are')
    return RopeConfig(rotary_dim, tuple(inv_freq.tolist()), attention_factor)


def _required(settings: RopeSettings, field: str) -> float:
    value: float | None = getattr(settings, field)
    if value is None:
        raise StartupError(f'rope type "{settings.kind}" needs {field}, which is missing')
    return value


def _llama3(inv_freq: NDArray[np.float32], settings: RopeSettings, original_max_positions: int) -> NDArray[np.float32]:
    """Llama 3.1: long waves are stretched by factor, short ones are kept, those between are blended."""
    factor = _required(settings, "factor")
    low, high = _required(settings, "low_freq_factor"), _required(settings, "high_freq_factor")
    if high <= low:
        raise StartupError(f"high_freq_factor is {high}; it must be above low_freq_factor, {low}")
    wavelengths = 2 * math.pi / inv_freq
    blend = (original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    stretched = np.where(wavelengths > original_max_positions / low, inv_freq / factor, blended)
    return np.where(wavelengths < original_max_positions / high, inv_freq, stretched)


def _yarn(
    wave_scales: NDArray[np.float32], settings: RopeSettings, factor: float, theta: float, original_max_positions: int
) -> NDArray[np.float32]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions, from kept frequencies to frequencies divided by factor."""
    rotary_dim = 2 * len(wave_scales)

    def dimension_turning(rotations: float) -> float:
        return (rotary_dim * math.log(original_max_positions / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension_turning(settings.beta_fast or 32), dimension_turning(settings.beta_slow or 1)
    if settings.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # Equal ends would divide by zero; the width is the reference implementation's.
    width = (high + 0.001 if low == high else high) - low
    ramp = (np.arange(rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    kept: NDArray[np.float32] = 1 - np.clip(ramp, 0, 1)
    return 1.0 / (factor * wave_scales) * (1 - kept) + 1.0 / wave_scales * kept


def _yarn_attention_factor(settings: RopeSettings, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.mscale and settings.mscale_all_dim:
        return scale(settings.mscale) / scale(settings.mscale_all_dim)
    return scale(1.0)


def _longrope_factors(settings: RopeSettings, rotary_dim: int, *, use_long: bool) -> NDArray[np.float32]:
    for name, factors in (("short_factor", settings.short_factor), ("long_factor", settings.long_factor)):
        if factors is None or len(factors) != rotary_dim // 2:
            found = "is missing" if factors is None else f"has {len(factors)} numbers"
            raise StartupError(f'rope type "longrope" needs {name} with {rotary_dim // 2} numbers; it {found}')
    return np.array(settings.long_factor if use_long else settings.short_factor, np.float32)
