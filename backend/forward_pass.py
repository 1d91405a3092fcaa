"""The interface of a model that the engine serves. `pass_extensions` has its optional parts.

The engine owns sequences, pages and the schedule; a pass owns the weights, the memory of the KV cache and its layout. A
step is one call of `forward` over rows of any query length (decode is length 1), then one call of `sample`. There is no
prefill call and no decode call.

This module imports typing and dataclasses only, so importing it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

FROM_SLOT = -1
"""In `StepBatch.input_ids`: the last token sampled for the row's slot, which the host may not know yet."""
FROM_EMBEDDINGS = -2
"""In `StepBatch.input_ids` and in a sequence's tokens: no token; its embedding is given directly."""
NOT_FINITE = -1
"""In `StepOutput.token_ids`: no token, because the row's logits are not finite."""
NO_ADAPTER = -1
"""In `StepBatch.adapters`: the row's sequence uses the model alone."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that changes the distribution of a sequence's next token. Bounds are checked where requests enter.

    temperature 0 is greedy. top_k 0, top_p 1, typical_p 1 and min_p 0 are off. Filters apply in the order temperature →
    top_k → typical_p (arXiv 2202.00666) → top_p → min_p. Presence and frequency penalties are those of the OpenAI API
    reference, over generated tokens. The repetition penalty is that of CTRL (arXiv 1909.05858), over prompt and
    generated tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    num_logprobs: int = -1
    """Top log probabilities to report per token, in addition to the token's own; -1 for none."""
    logprob_token_ids: tuple[int, ...] = ()
    """Distinct tokens to report instead of the top ones. No effect if num_logprobs is -1."""

    @property
    def num_reported(self) -> int:
        """Tokens to report in addition to the sampled one; -1 for none."""
        if self.num_logprobs < 0:
            return -1
        return len(self.logprob_token_ids) or self.num_logprobs


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence takes a slot. Sent once, with the first step that has a row for it.

    token_ids is int32 [n]: the prompt and, for a sequence that resumes, the tokens generated so far; the first
    num_prompt_tokens of them are the prompt. Penalties do not count FROM_EMBEDDINGS.
    """

    slot: int
    sampling: SamplingParams
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Consecutive tokens of one row whose embeddings are given."""

    first: int
    """Index in `StepBatch.input_ids`."""
    values: EmbeddingRows


class EmbeddingRows(Protocol):
    """float32 [num_rows, embedding_size] in the memory of a client, which may take it away at any time.

    After a sequence ends, reads may return zeros or stale data.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def device_reads(self) -> bool:
        """The rows are in memory that the pass's device can read: use `copy_to`. Otherwise use `read`."""
        ...

    def read(self) -> NDArray[np.float32]:
        """A copy."""
        ...

    def copy_to(self, there: DeviceRows) -> None:
        """Enqueue a copy in the stream of `there`. Raises `penstock.shm.buffers.device_api.DeviceError`."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A step's output on the GPU: float32 [L, n], contiguous. Valid once the work now in the stream is done."""

    pointer: int
    stream: int
    """The driver's handle, as an integer."""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of a step after which the sequence's next token is known: the step reports its log probability."""

    tokens: NDArray[np.int32]
    """[S] ascending indices into input_ids, S >= 1; none is the last token of a row in logit_rows."""
    next_ids: NDArray[np.int32]
    """[S] the token that follows each."""
    num_top: int
    """Top log probabilities to report for each, in addition to that of next_ids; at least 0."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of a step whose result is a vector or one vector per token, not a sampled token. Their sequences end with
    it.

    Kinds: "embed" is one vector, pooled and projected according to the model's files, not normalised; "token_embed" is
    one vector for each token; "sparse" is one weight for each entry of the vocabulary (SPLADE, arXiv 2109.10086);
    "classify" is the logits of the labels, "token_classify" those of each token.
    """

    rows: NDArray[np.int32]
    """[Q] ascending indices of rows, each with the last token of its sequence; none is in logit_rows."""
    kinds: tuple[str, ...]
    """[Q] each is a key of `PassSpec.pooled`."""
    second_starts: NDArray[np.int32]
    """[Q] position of the first token of a pair's second text; 0 if the sequence is one text."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: R rows with T tokens in total. The arrays belong to the pass until `sample` has returned.

    Rows of query length 1 come first. A row's tokens are at positions context_lens[r] … context_lens[r] + length - 1 of
    its sequence. The KV of position p goes to page page_table[r, p // page_size], place p % page_size. A token attends
    to all positions of its sequence up to its own.
    """

    input_ids: NDArray[np.int32]
    """[T] token ids, rows back to back. FROM_SLOT is the last token sampled for the row's slot; the embedding of a
    FROM_EMBEDDINGS is in `embeddings`."""
    query_starts: NDArray[np.int32]
    """[R + 1] start of each row in input_ids; the last entry is T."""
    context_lens: NDArray[np.int32]
    """[R] tokens of the sequence whose KV was computed before this step."""
    page_table: NDArray[np.int32]
    """[R, P] page numbers; entries after a row's pages, and those behind the window, are void and must not be used.
    With G groups of layers [R, P, G]: pages of the same tokens, one for each entry of `PassSpec.kv_windows`."""
    slots: NDArray[np.int32]
    """[R] the sequence's slot in [0, max_running): constant while it runs, reused afterwards."""
    logit_rows: NDArray[np.int32]
    """[L] ascending indices of the rows that need logits for their last token, and a sampled token."""
    slot_inits: tuple[SlotInit, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) pages: copy the source's content, over all layers, before the step writes anything. No page
    is both, and no page is a destination twice."""
    page_restores: tuple[tuple[int, int], ...] = ()
    """(host page, page): copy what `IHostPages.save_pages` saved there back to the page, before page_copies. Only for
    passes that have host pages. No page is a destination twice, or a destination of page_copies too."""
    embeddings: tuple[EmbeddedTokens, ...] = ()
    """Ascending; covers exactly the tokens that are FROM_EMBEDDINGS. Only if the spec has an embedding_size."""
    scored: ScoredTokens | None = None
    """Tokens of prompts whose log probabilities a client requests. Only for passes whose spec says scores_prompts."""
    pooled: PooledRows | None = None
    """Rows that give vectors. Only for passes whose spec has `pooled`."""
    adapters: NDArray[np.int32] | None = None
    """[R] index into PassOptions.adapters, or NO_ADAPTER; constant for a sequence. None if no row has an adapter."""

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def logit_tokens(self) -> NDArray[np.int32]:
        """[L + S] indices into input_ids: the last token of each of logit_rows, then the scored tokens."""
        last_tokens: NDArray[np.int32] = self.query_starts[1:][self.logit_rows] - 1
        if self.scored is None:
            return last_tokens
        from numpy import concatenate  # here, so that importing this module costs nothing

        return concatenate([last_tokens, self.scored.tokens])


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that some rows of a step may sample."""

    rows: NDArray[np.int32]
    """[M] ascending indices into batch.logit_rows."""
    bits: NDArray[np.uint32]
    """[M, ceil(vocab_size / 32)] bit i % 32 of word i // 32 is set if token i is allowed; at least one bit is set."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities in the raw logits: before bias, penalties, masks and filters."""

    rows: NDArray[np.int32]
    """[K] ascending indices into batch.logit_rows, where num_logprobs is not -1; for scored tokens, all
    their places."""
    chosen: NDArray[np.float32]
    """[K] of the sampled or scored token; NaN for a scored one whose logits are not finite, and then the
    rest is void."""
    ranks: NDArray[np.int32]
    """[K] number of tokens that are at least as likely as that one, itself included."""
    top_ids: NDArray[np.int32]
    """[K, N] the most likely tokens, most likely first, equal ones by id, or a row's logprob_token_ids in their order;
    N is the largest num_reported, or num_top. Entries behind a row's own num_reported are void."""
    top: NDArray[np.float32]
    """[K, N] log probabilities of top_ids."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens of a step."""

    token_ids: NDArray[np.int32]
    """[L] one per entry of batch.logit_rows; NOT_FINITE for a row whose logits have a NaN or no finite value."""
    logprobs: TokenLogprobs | None = None
    """None when no row requests log probabilities."""
    scored: TokenLogprobs | None = None
    """Log probabilities of batch.scored.next_ids; None without batch.scored."""
    pooled: tuple[NDArray[np.float32], ...] | None = None
    """One per entry of batch.pooled.rows: [width], or [tokens, width] of a kind with a vector a token. A value that is
    not finite fails the row's requests. None without batch.pooled."""

    def wait(self) -> StepOutput:
        """Return itself: the output is already complete."""
        return self


class PendingOutput(Protocol):
    """The result of `sample`: tokens that the device may still be computing."""

    def wait(self) -> StepOutput:
        """Block until the step is computed. Another thread than the pass's may call it. Raises DeviceLost."""
        ...


class DeviceLost(Exception):
    """The device cannot compute any more in this process: a fault has broken its context. The process must end."""


@dataclass(frozen=True, slots=True)
class PassSpec:
    """A model's properties for the engine. vocab_size is the width of the logits: at least the tokenizer's size."""

    vocab_size: int
    max_context_tokens: int
    kv_bytes_per_token: Mapping[str, int]
    """KV dtype ("fp32", "bf16", "q8_0") → bytes of KV cache per token over all layers, in the order in which "auto"
    tries them: first the weights' own precision, then narrower dtypes, and wider ones last. Empty for a pass without a
    KV cache (encoders): `create_cache` is not called, page tables have no columns, and each sequence is computed whole,
    in one step."""
    weight_bytes: int = 0
    """Memory of the loaded weights."""
    workspace_bytes: int = 0
    """The most device memory that the pass uses beside weights and KV cache, for steps within PassOptions: activations,
    step buffers, memory of libraries, and captured graphs."""
    graph_bytes: int = 0
    """The part of workspace_bytes that captured graphs take; an estimate."""
    page_sizes: tuple[int, ...] = ()
    """The page_size_tokens that `create_cache` takes; empty if it takes any."""
    quantization: str = "none"
    """The form of the weights. The backend refuses a pass whose form differs from PassOptions.quantize."""
    runs_ahead: bool = False
    """`forward` and `sample` return before the device has computed. The next step is launched behind the running one,
    whose tokens only the device knows yet. `sample` is called for steps without logit rows too, to wait for them."""
    scores_prompts: bool = False
    """The pass reports `StepBatch.scored`, for all tokens of a step if need be; workspace_bytes includes that memory.
    Otherwise requests for log probabilities of prompts are refused."""
    embedding_size: int = 0
    """Width of prompts that are embeddings, see `StepBatch.embeddings`; 0 if the pass takes none. A pass that is
    IDeviceLogits receives them on the device and on the host, others on the host only."""
    kv_windows: tuple[int | None, ...] = (None,)
    """An entry for each group of layers with pages of its own, which take equal parts of kv_bytes_per_token. In the
    group's layers a token attends to itself and at most so many tokens - 1 before it; None if a layer attends to all. A
    page behind the window is given away while its sequence runs. So nothing may be read there, not even what a mask
    hides: a pass that reads whole blocks adds their length. With several groups no step has page_copies or
    page_restores."""
    state_bytes_per_sequence: int = 0
    """Memory of the state that the pass keeps for each slot beside the pages, as linear attention does; 0 for none. A
    SlotInit resets it, and comes with the row that begins at position 0; each later row of the slot goes on where the
    last one ended. After an error the slot's next row is such a beginning. Nothing is shared between such sequences:
    no step has page_copies or page_restores."""
    pooled: Mapping[str, int] = field(default_factory=dict)
    """Kind of `PooledRows` → values per vector, for each kind that the pass computes."""
    generates: bool = True
    """The pass samples tokens. One that only pools never gets logit_rows; its vocab_size bounds the token ids."""
    adapter_ranks: tuple[int, ...] = ()
    """The rank of each of PassOptions.adapters, which weight_bytes includes. Empty if the pass applies none."""


@dataclass(frozen=True, slots=True)
class PassOptions:
    """The operator's choices for a pass. device is "cpu" or "cuda:N"; dtype is "auto", "bf16" or "fp32"."""

    device: str = "cpu"
    dtype: str = "auto"
    max_running: int = 64
    """The most rows of a step; slot numbers are below it."""
    max_batch_tokens: int = 512
    """The most tokens of a step."""
    max_context_tokens: int | None = None
    """The longest sequence that will be served; None if the operator set no limit."""
    deterministic: bool = False
    """A row's logits have the same bits whatever the other rows, its sequence's chunks, its pages and its slot are.
    So the batch may not decide which kernel runs, or the order of a sum. Without the flag, equal up to rounding is
    enough. A pass that cannot do this ignores the flag and says so in its documentation."""
    host_kv_bytes: int = 0
    """The most host memory that `IHostPages` may use for its host pages."""
    quantize: str = "none"
    """The form that weights get while they are loaded: "none", or the name of a form, such as "int8"."""
    task: str = "auto"
    """The model's task: "generate", "embed", "rerank" or "classify"; "auto" is what its files say."""
    splits_layers: bool = False
    """Layers with other windows may be groups of their own, see `PassSpec.kv_windows`. The backend serves them so;
    callers that have one page table do not ask for it, and then get one group."""
    cpu_path: str = "auto"
    """The instruction set of the CPU kernels; other passes ignore it."""
    adapters: tuple[Path, ...] = ()
    """Directories of low-rank adapters (LoRA, arXiv 2106.09685) of the model, in the layout of PEFT."""
    weights_fds: tuple[int, int] | None = None
    """The fds of a `penstock.shm.memory.fd_mailbox` for `IHeldWeights`; None if weights end with the process."""


class IBatchedForwardPass(Protocol):
    """One model on one device. All calls come from one thread, in order, so no lock is needed."""

    @property
    def spec(self) -> PassSpec: ...

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        """The spec of what `load` would return, from config.json alone, without weights. Raises StartupError."""
        ...

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> IBatchedForwardPass:
        """Load the weights. The backend always gives a model_dir; tests of passes without weights may give None.

        Raises `penstock.backend.errors.StartupError` with one clear line for anything that the operator can fix.
        """
        ...

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """Allocate num_pages * page_size_tokens * spec.kv_bytes_per_token[kv_dtype] bytes, no more; with G groups of
        layers that divided by G, because any page may become any group's. Called once."""
        ...

    def forward(self, batch: StepBatch) -> Any:
        """Run one step and return logits of batch.logit_rows, [L, vocab_size], as a handle for `sample`.

        For `HostSampling` they are those of batch.logit_tokens, [L + S, vocab_size]. Copy batch.page_copies first, then
        write the KV of all T tokens. A row's result must not depend on the other rows. Raises DeviceLost, here or in
        `sample`, when no later step can succeed either.
        """
        ...

    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample one token for each of batch.logit_rows and store it as its slot's last token.

        The token depends only on the logits, the slot's SamplingParams, its tokens, the position and the row's mask.
        With batch.scored or batch.pooled it is called for a step without logit rows too; its output has their results.
        """
        ...

    def host_logits(self, logits: Any) -> NDArray[np.float32]:
        """The logits of a step on the host, [L, vocab_size], from `forward`'s handle; rows behind these are ignored.

        Called between `forward` and `sample`, for clients that read logits and for the check at start. A pass may omit
        it if its handle is the numpy array itself.
        """
        array: NDArray[np.float32] = logits
        return array

    def close(self) -> None:
        """Free the device's memory. Called once, after the last step."""
        ...
