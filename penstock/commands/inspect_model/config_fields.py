"""The dimensions in any architecture's config.json, whether it is served or not."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert
from penstock.backend.checkpoint.formats.quant_method import quantization_settings

_Count = Annotated[int, Meta(ge=0, le=1 << 32)]


class Quantization(Struct, frozen=True):
    """quantization_config, in the forms of the formats on the hub."""

    quant_method: str | None = None
    bits: _Count | None = None
    group_size: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    weight_block_size: Annotated[tuple[_Count, ...], Meta(max_length=2)] | None = None
    format: str | None = None
    load_in_4bit: bool = False
    config_groups: dict[str, Any] | None = None
    quant_algo: str | None = None

    @property
    def bits_per_weight(self) -> int:
        """Bits of a weight in a packed tensor; 8 where the format does not specify them."""
        if self.load_in_4bit or self.quant_method == "mxfp4" or "NVFP4" in (self.quant_algo or ""):
            return 4
        return self.bits or self._in_groups("num_bits") or 8

    @property
    def text(self) -> str:
        """Such as "gptq, 4 bits, groups of 128"."""
        parts = [" ".join(filter(None, (self.quant_method or "unknown method", self.format, self.quant_algo)))]
        parts.append(f"{self.bits_per_weight} bits")
        if (size := self.group_size or self._in_groups("group_size")) and size > 0:
            parts.append(f"groups of {size}")
        if self.weight_block_size:
            parts.append(f"blocks of {' × '.join(map(str, self.weight_block_size))}")
        return ", ".join(parts)

    def _in_groups(self, key: str) -> int | None:
        """A setting of the weights in the first of compressed-tensors' groups that has it."""
        for group in (self.config_groups or {}).values():
            weights = group.get("weights") if isinstance(group, dict) else None
            value = weights.get(key) if isinstance(weights, dict) else None
            if isinstance(value, int) and 0 < value <= 1 << 20:
                return value
        return None


class ConfigFields(Struct, frozen=True):
    """Fields of config.json. Missing ones are None."""

    num_hidden_layers: _Count | None = None
    hidden_size: _Count | None = None
    intermediate_size: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    vocab_size: _Count | None = None
    max_position_embeddings: _Count | None = None
    sliding_window: _Count | None = None
    tie_word_embeddings: bool | None = None
    num_local_experts: _Count | None = None
    num_experts: _Count | None = None
    n_routed_experts: _Count | None = None
    num_experts_per_tok: _Count | None = None
    top_k_experts: _Count | None = None
    experts_per_token: _Count | None = None
    quantization_config: Quantization | None = None

    @property
    def experts(self) -> int:
        """Experts of a layer, 0 without any."""
        return self.num_experts or self.num_local_experts or self.n_routed_experts or 0

    @property
    def active_experts(self) -> int:
        """Experts that a token uses."""
        used = self.num_experts_per_tok or self.top_k_experts or self.experts_per_token
        return min(used or self.experts, self.experts)

    @property
    def kv_values_per_token(self) -> int | None:
        """Numbers in the KV cache for a token if every layer has attention; None if a dimension is unknown."""
        head_dim = self.head_dim
        if head_dim is None and self.hidden_size and self.num_attention_heads:
            head_dim = self.hidden_size // self.num_attention_heads
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if not (head_dim and kv_heads and self.num_hidden_layers):
            return None
        return 2 * self.num_hidden_layers * kv_heads * head_dim


def read_fields(values: dict[str, Any], where: object) -> ConfigFields:
    """Read the fields of config.json's object, or of its text model if it describes several. Raises StartupError."""
    text = values.get("text_config")
    own = {**values, **text} if isinstance(text, dict) else values
    if (settings := quantization_settings(values)) is not None:
        own = {**own, "quantization_config": settings}
    return convert(own, ConfigFields, where)
