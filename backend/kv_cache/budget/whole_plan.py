"""The memory of a pass without a KV cache, and the size of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.process.options import format_size


@dataclass(frozen=True, slots=True)
class WholePlan:
    """Each input is computed whole, in one step.

    Has the properties of `KvPlan` that parts other than schedulers read.
    """

    num_pages: ClassVar[int] = 0
    page_size_tokens: ClassVar[int] = 0
    kv_dtype: ClassVar[str] = "none"
    remedy: ClassVar[str] = "lower --max-context or --max-batch-tokens"

    max_context_tokens: int
    step_tokens: int
    """Tokens of a step with several inputs, at most. A longer input has its own step."""
    max_rows: int
    weight_bytes: int
    workspace_bytes: int
    quantization: str
    pooled: tuple[tuple[str, int], ...]
    """(kind, values per vector)."""

    @property
    def device_bytes(self) -> int:
        """All device memory that the backend takes."""
        return self.weight_bytes + self.workspace_bytes

    @property
    def parts(self) -> str:
        """The uses of the memory, for messages."""
        return f"weights of {format_size(self.weight_bytes)} and a workspace of {format_size(self.workspace_bytes)}"

    def describe(self) -> str:
        """One line for the log."""
        weights = "weights" if self.quantization == "none" else f"{self.quantization} weights"
        kinds = ", ".join(f"{kind} {width}" for kind, width in self.pooled)
        return (
            f"{weights}: {format_size(self.weight_bytes)}; no KV cache; inputs up to {self.max_context_tokens} tokens, "
            f"whole, in steps of up to {self.max_rows} inputs and {self.step_tokens} tokens; vectors: {kinds}"
        )


def plan_whole(spec: PassSpec, max_context_tokens: int | None, step_tokens: int, max_rows: int) -> WholePlan:
    """Raises StartupError for a longer context than the model's."""
    check_context(spec, max_context_tokens)
    return WholePlan(
        max_context_tokens or spec.max_context_tokens,
        step_tokens,
        max_rows,
        spec.weight_bytes,
        spec.workspace_bytes,
        spec.quantization,
        tuple(spec.pooled.items()),
    )


def check_context(spec: PassSpec, max_context_tokens: int | None) -> None:
    """Raises StartupError for a longer context than the model's."""
    if max_context_tokens is not None and max_context_tokens > spec.max_context_tokens:
        raise StartupError(
            f"--max-context is {max_context_tokens}; the model supports at most {spec.max_context_tokens}: "
            "lower --max-context"
        )
