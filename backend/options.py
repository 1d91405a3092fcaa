"""Every option of the backend, declared once: type, default, help text, environment variable PENSTOCK_<NAME>."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.backend.errors import StartupError
from penstock.shm.process.options import ByteSize, parse_size
from penstock.shm.process.socket_path import default_socket_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import Token


def _convert_budget(_type: Any, tokens: Sequence[Token]) -> int | str:
    text = tokens[0].value
    return "auto" if text.strip().lower() == "auto" else parse_size(text)


_CPU_STEP_TOKENS = 192
_GPU_STEP_TOKENS = 2048
Positive = Annotated[int, Parameter(validator=Number(gte=1, lte=1 << 24))]
Rows = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]
HostBudget = Annotated[int | Literal["auto"], Parameter(converter=_convert_budget, metavar="SIZE|auto")]
Budget = Annotated[int | Literal["auto"] | None, Parameter(converter=_convert_budget, metavar="SIZE|auto")]


@Parameter(name="*")
@dataclass(frozen=True)
class BackendOptions:
    """The one process that owns the device."""

    model: str | None = None
    """Checkpoint: a directory in the Hugging Face layout, or a hub id. Without it the small demo model is served."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    served_model_name: str | None = None
    """The model's name in the API. Default: the hub id, or the directory's name."""

    gpu: str = "auto"
    """Index or UUID (GPU-…, or its beginning) of a GPU, "none" for the CPU, or "auto": the first GPU that serves, else
    the CPU."""

    kv_budget: Budget = None
    """Memory for the KV cache, such as 6GB or 512MiB; never exceeded. auto takes what the device has free, less the
    weights and a reserve of a tenth of its memory (at least 512 MB); of the CPU's memory a container's limit counts.
    Default: 2GB on the CPU, auto on a GPU."""

    host_kv_budget: HostBudget = "auto"
    """Memory of the host's, such as 16GB, for pages of the KV cache that a GPU has no room for: taken at start where
    copying them there and back is measured to be quicker than computing them again. auto is 4GB on a GPU, but at most
    a quarter of what this machine has free (a container's limit counts). 0 is none, and all that the CPU can have."""

    kv_dtype: Literal["auto", "fp32", "bf16", "q8_0", "fp8"] = "auto"
    """Type of the cached keys and values. auto takes the weights' type, or a narrower one where --max-context times
    --max-running (or, without --max-context, one full context) would not fit the budget."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the weights; auto takes the checkpoint's."""

    deterministic: bool = False
    """Equal requests get equal tokens whatever runs beside them. The CPU's native kernels always do; plain torch
    operations, where those cannot run, and a GPU are slower for it."""

    page_size: Rows = 32
    """Tokens in a page of the KV cache."""

    max_context: Annotated[int | None, Parameter(validator=Number(gte=2, lte=1 << 24))] = None
    """Tokens of one sequence, prompt and output. Default: the model's own limit, as far as the KV budget holds it."""

    max_batch_tokens: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1 << 16))] = None
    """Tokens that one step may compute, at least one for each of --max-running; long prompts are prefilled in pieces
    beside running decodes. Default: 192 on the CPU, 2048 on a GPU."""

    max_running: Rows = 64
    """Sequences that may run at once; more wait."""

    max_waiting: Positive = 1024
    """Requests that may wait; beyond it the answer is 429."""

    priority_step_s: Annotated[float, Parameter(validator=Number(gte=0.0, lte=86_400.0))] = 0.0
    """Seconds of waiting that one step of a request's priority is worth: with 10, priority -1 goes before all that came
    up to 10 s earlier with priority 0, and nobody is overtaken for longer. 0 ignores priorities: first come, first
    served."""

    batch_channel_capacity: Annotated[int, Parameter(validator=Number(gte=0, lte=16))] = 1
    """Plans prepared ahead of the running step, each as late as it can be. 0 is no overlap; more than 1 is of use only
    where steps take less time than their planning varies by."""

    socket: Path = field(default_factory=default_socket_path)
    """Unix socket on which frontends find this backend; its directory is made private (0700)."""

    shared_buffers: Literal["auto", "host", "cuda"] = "auto"
    """Memory of the buffers in which local clients (docs/client.md) receive logits and hand in prompts: "cuda" is GPU
    memory, read without a copy through the host; "host" is shared memory; "auto" is what model and client can use."""

    shared_buffer_budget: ByteSize = 256_000_000
    """Memory for all clients' shared buffers, besides --kv-budget; taken as they are asked for, never exceeded."""

    forward_pass: str = "decoder"  # noqa: S105 - a pass, not a password
    """An installed forward pass by name, or "package.module:Class". "fake" needs no weights and serves tests."""

    dry_run: bool = False
    """Print what the KV budget holds, from the model's config.json alone, and exit."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    log_json: bool = False
    """Log one JSON object a line."""

    def model_id(self) -> str:
        """The model's name in the API."""
        if self.served_model_name:
            return self.served_model_name
        if self.model is None:
            return "penstock-demo"
        path = Path(self.model)
        return path.resolve().name if path.is_dir() else self.model

    def step_tokens(self, device: str) -> int:
        """--max-batch-tokens on a `PassOptions.device`. Raises StartupError for fewer than --max-running."""
        default = _CPU_STEP_TOKENS if device == "cpu" else _GPU_STEP_TOKENS
        num_tokens = default if self.max_batch_tokens is None else self.max_batch_tokens
        if num_tokens < self.max_running:
            raise StartupError(
                f"--max-batch-tokens is {num_tokens}; --max-running is {self.max_running}, and each running sequence "
                "takes a token of every step: raise --max-batch-tokens or lower --max-running"
            )
        return num_tokens

    def check(self) -> None:
        """Raises StartupError where one option contradicts another; each alone was checked as it was read."""
        if self.revision is not None and self.model is None:
            raise StartupError(
                f"--revision is {self.revision}; the demo model has none: give a hub id as --model, or leave it out"
            )
