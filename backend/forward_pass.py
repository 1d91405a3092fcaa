"""The plugin interface: what a model must offer to be served. Everything a plugin's author needs is in this one file.

The engine owns sequences, pages and the schedule; a pass owns the weights, the memory of the KV cache and its layout.
A step is one call of `forward` over rows of any query length (decode is length 1), then one call of `sample`. There is
no prefill call and no decode call.

This module imports typing and dataclasses only, so that importing it costs nothing and pulls in nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

FROM_SLOT = -1
"""In `StepBatch.input_ids`: the token last sampled for the row's slot, which the host may not know yet."""
FROM_EMBEDDINGS = -2
"""In `StepBatch.input_ids`, and in a sequence's tokens: no token; what its embedding would be is given itself."""
NOT_FINITE = -1
"""In `StepOutput.token_ids`: no token, for the row's logits are no numbers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """All that changes the distribution of a sequence's next token. Bounds are enforced where requests enter.

    temperature 0 is greedy. top_k 0, top_p 1, typical_p 1 and min_p 0 are off. Filters apply in the order temperature →
    top_k → typical_p (arXiv 2202.00666) → top_p → min_p. Penalties as in the OpenAI API reference (presence, frequency:
    over generated tokens) and in CTRL, arXiv 1909.05858 (repetition: over prompt and generated tokens).
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
    """Reported beside each token: its own log probability, and this many of the likeliest; -1 is nothing at all."""


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence takes a slot: sent once, with the first step that has a row for it, before that step's `forward`.

    token_ids is int32 [n]: prompt and, for a sequence that resumes, the tokens generated so far; the first
    num_prompt_tokens of them are the prompt. FROM_EMBEDDINGS among them is none that a penalty counts.
    """

    slot: int
    sampling: SamplingParams
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Neighbouring tokens of one row whose embeddings are given."""

    first: int
    """Index in `StepBatch.input_ids`."""
    values: EmbeddingRows


class EmbeddingRows(Protocol):
    """float32 [num_rows, embedding_size], somewhere; its owner may take it away at any time, whatever is under way.
    What the rows of a sequence that has ended give is nobody's, so then zeros do, or what lies there."""

    @property
    def num_rows(self) -> int: ...

    @property
    def device_reads(self) -> bool:
        """They lie on the pass's device, or where it reads them in place: they are to be had by `copy_to`, else by
        `read`."""
        ...

    def read(self) -> NDArray[np.float32]:
        """A copy."""
        ...

    def copy_to(self, there: DeviceRows) -> None:
        """Puts a copy into the stream. Raises `penstock.shm.buffers.device_api.DeviceError`."""
        ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: R rows with T tokens in all. Arrays belong to the pass until `sample` has returned.

    Rows of query length 1 come first. A row's tokens stand at positions context_lens[r] … context_lens[r] + length - 1
    of its sequence; the KV of position p goes to page page_table[r, p // page_size], place p % page_size, and a row may
    attend to all positions of its sequence up to its own.
    """

    input_ids: NDArray[np.int32]
    """[T] token ids, rows back to back; FROM_SLOT stands for the last token sampled for the row's slot, and
    FROM_EMBEDDINGS for what `embeddings` says."""
    query_starts: NDArray[np.int32]
    """[R + 1] where each row begins in input_ids; the last entry is T."""
    context_lens: NDArray[np.int32]
    """[R] tokens of the sequence whose KV is computed before this step."""
    page_table: NDArray[np.int32]
    """[R, P] page ids; entries beyond a row's pages are 0 and must not be read."""
    slots: NDArray[np.int32]
    """[R] the sequence's slot in [0, max_running): stable while it runs, reused after."""
    logit_rows: NDArray[np.int32]
    """[L] ascending row indices whose last token wants logits, and so a sampled token."""
    slot_inits: tuple[SlotInit, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) pages: what the source holds, over all layers, is copied before the step writes anything.
    No page is both, and none is a destination twice."""
    page_restores: tuple[tuple[int, int], ...] = ()
    """(place, page): what `IHostPages.save_pages` put into the place is copied to the page, before page_copies. Only
    for passes that have places; no page is a destination twice, nor one of page_copies'."""
    embeddings: tuple[EmbeddedTokens, ...] = ()
    """Ascending, for exactly the tokens that are FROM_EMBEDDINGS. Only for passes that are IPromptEmbeddings."""

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows of a step may sample: what a grammar, or a list of the client's, leaves."""

    rows: NDArray[np.int32]
    """[M] ascending places in batch.logit_rows."""
    bits: NDArray[np.uint32]
    """[M, ceil(vocab_size / 32)] bit i % 32 of word i // 32 is set where token i is allowed; at least one is."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities that the raw logits give, before bias, penalties, masks and filters."""

    rows: NDArray[np.int32]
    """[K] ascending places in batch.logit_rows: those whose slot's num_logprobs is not -1."""
    chosen: NDArray[np.float32]
    """[K] of the sampled token."""
    ranks: NDArray[np.int32]
    """[K] how many tokens are at least as likely as the sampled one, itself included."""
    top_ids: NDArray[np.int32]
    """[K, N] the likeliest tokens, falling, equal ones by id; N is the largest num_logprobs of the rows."""
    top: NDArray[np.float32]
    """[K, N]"""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled."""

    token_ids: NDArray[np.int32]
    """[L], one for each of batch.logit_rows; NOT_FINITE for a row whose logits hold a NaN or nothing finite."""
    logprobs: TokenLogprobs | None = None
    """None where no row asks."""

    def wait(self) -> StepOutput:
        """A `PendingOutput` that is already there."""
        return self


class PendingOutput(Protocol):
    """What `sample` returns: tokens that the device may still be computing."""

    def wait(self) -> StepOutput:
        """Blocks until the step is computed. May be called from another thread than the pass's. Raises DeviceLost."""
        ...


class DeviceLost(Exception):
    """The device can compute no more in this process: a fault has poisoned its context. The process must end."""


@dataclass(frozen=True, slots=True)
class PassSpec:
    """What the engine must know about a model. vocab_size is the width of the logits."""

    vocab_size: int
    max_context_tokens: int
    kv_bytes_per_token: Mapping[str, int]
    """KV dtype ("fp32", "bf16", "q8_0") → bytes of KV cache of one token over all layers, in the order in which to try
    them: first the one that loses nothing the weights have, then narrower ones, and wider ones last."""
    weight_bytes: int = 0
    """Memory for the weights, as loaded."""
    workspace_bytes: int = 0
    """What the pass holds or may take of the device's memory besides weights and KV cache, for PassOptions's steps:
    activations, step buffers, what libraries keep, and captured work."""
    graph_bytes: int = 0
    """How much of workspace_bytes is captured work; an estimate."""
    page_sizes: tuple[int, ...] = ()
    """The page_size_tokens that `create_cache` takes, where not all are."""
    runs_ahead: bool = False
    """`forward` and `sample` return before the device has computed: the next step is launched behind the running one,
    whose tokens the device alone knows yet. `sample` is called for steps without logit rows too, to be waited for."""


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What an operator may choose for a pass. device is "cpu" or "cuda:N"; dtype is "auto", "bf16" or "fp32"."""

    device: str = "cpu"
    dtype: str = "auto"
    max_running: int = 64
    """Rows a step can have at most; slots are numbered below it."""
    max_batch_tokens: int = 512
    """Tokens a step can have at most."""
    max_context_tokens: int | None = None
    """The longest sequence that will be served, where the operator has said so."""
    deterministic: bool = False
    """A row's logits must be the same bits whatever else is in the step, however its sequence was cut into steps, and
    in whatever pages and slot it lies: no kernel may be chosen, and no sum be ordered, by the batch. Without the flag
    equal up to rounding is enough. A pass that cannot hold it ignores it and says so in its documentation."""
    host_kv_bytes: int = 0
    """The most memory of the host's that `IHostPages` may take for its places."""


class IBatchedForwardPass(Protocol):
    """One model on one device. All calls come from one thread, in order; nothing here needs a lock."""

    @property
    def spec(self) -> PassSpec: ...

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        """What `load` would give, from config.json alone: no weights are needed. Raises StartupError."""
        ...

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> IBatchedForwardPass:
        """Loads the weights. model_dir is None only for passes that need none.

        Raises `penstock.backend.errors.StartupError` with one clear line for anything the operator can put right.
        """
        ...

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """Allocates exactly num_pages * page_size_tokens * spec.kv_bytes_per_token[kv_dtype] bytes. Called once."""
        ...

    def forward(self, batch: StepBatch) -> Any:
        """Runs one step and returns logits of batch.logit_rows, [L, vocab_size], as a handle for `sample`.

        Copies batch.page_copies, then writes the KV of all T tokens. A row's result must not depend on the other rows.
        Raises DeviceLost, here or in `sample`, when no later step can succeed either.
        """
        ...

    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
        """Samples one token for each of batch.logit_rows and remembers it as its slot's last token.

        A function of (logits, the slot's SamplingParams, its tokens, the position, the row's mask) only.
        """
        ...

    def host_logits(self, logits: Any) -> NDArray[np.float32]:
        """The logits of a step on the host, [L, vocab_size]; for tests and diagnosis."""
        ...

    def close(self) -> None:
        """Gives back the device's memory. Called once, after the last step."""
        ...


@runtime_checkable
class IHostPages(Protocol):
    """What a pass on a GPU may be besides: pages that are to be used for something else can be kept on the host, and
    come back with `StepBatch.page_restores`. The engine says which and where."""

    @property
    def num_host_pages(self) -> int:
        """Places on the host, of a page each; fixed once the cache is made. 0 where computing a page again is quicker
        than copying it there and back, and where PassOptions.host_kv_bytes holds none."""
        ...

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """(page, place): copies what the pages hold after all steps launched so far; later ones may write to them. No
        place is there twice. Called between steps: not between `forward` and `sample`. Any error is the end of the
        process: pages that are believed to be there are not."""
        ...


@runtime_checkable
class IPromptEmbeddings(Protocol):
    """What a pass may be besides: a prompt may be given as embeddings, see `StepBatch.embeddings`. One that is
    IDeviceLogits as well is given them on the device and on the host, any other one on the host only."""

    @property
    def embedding_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A step's output on the GPU: float32 [L, n], contiguous, once the work that stream holds now is done."""

    pointer: int
    stream: int
    """The driver's handle, as an integer."""


@runtime_checkable
class IDeviceLogits(Protocol):
    """What a pass on a GPU may be besides: clients on the same GPU get its logits without a copy through the host."""

    def device_logits(self, logits: Any) -> DeviceRows:
        """Of what `forward` returned, [L, vocab_size]. Called before `sample`; copied in the stream's order."""
        ...


@runtime_checkable
class IHiddenStates(Protocol):
    """What a pass may be besides: clients get what its logits are made of, the last layer's normed output."""

    @property
    def hidden_size(self) -> int: ...

    def host_hidden_states(self, logits: Any) -> NDArray[np.float32]:
        """Of the step whose logits `forward` returned last, on the host: [L, hidden_size]. Called before `sample`."""
        ...


@runtime_checkable
class IDeviceHiddenStates(IHiddenStates, IDeviceLogits, Protocol):
    """And on a GPU: there they are offered only if they need no copy through the host, as its logits."""

    def device_hidden_states(self, logits: Any) -> DeviceRows:
        """As `host_hidden_states`, and as `device_logits`."""
        ...
