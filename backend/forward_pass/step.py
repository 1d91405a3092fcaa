"""The input of a step: its rows, and the parameters with which their next tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.forward_pass.output import DeviceRows


FROM_SLOT = -1
"""In `StepBatch.input_ids`: the last token sampled for the row's slot, which the host may not know yet."""
FROM_EMBEDDINGS = -2
"""In `StepBatch.input_ids` and in a sequence's tokens: no token; its embedding is given directly."""
MAX_VERIFIED = 28
"""Most of logit_rows and drafts together, in a step with `StepBatch.drafts`."""
NO_ADAPTER = -1
"""In `StepBatch.adapters`: the row's sequence uses the model alone."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that changes the distribution of a sequence's next token. Bounds are checked where requests enter.

    temperature 0 is greedy. top_k 0, top_p 1, typical_p 1 and min_p 0 are off. Filters apply in the order temperature →
    top_k → typical_p (arXiv 2202.00666) → top_p → min_p. Presence and frequency penalties are those of the OpenAI API
    reference, over generated tokens. The repetition penalty is that of CTRL (arXiv 1909.05858), over prompt and
    generated tokens.

    DRY, XTC, top-n-sigma and dynamic temperature are llama.cpp's (`PassSpec.has_llama_cpp_sampling`). DRY comes after
    the penalties, top-n-sigma before top_k. With XTC or dynamic temperature the order is llama.cpp's: filters see the
    distribution at temperature 1; XTC and then the temperature come last.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    """0 is off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """The last tokens among which repetitions count; -1 for all."""
    dry_breakers: bytes = b""
    """int32 token ids; each run of them is followed by -1."""
    xtc_probability: float = 0.0
    """0 is off, as of top_n_sigma and dynatemp_range."""
    xtc_threshold: float = 0.1
    top_n_sigma: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    num_logprobs: int = -1
    """Top log probabilities to report per token, in addition to the token's own; -1 for none."""
    logprob_token_ids: tuple[int, ...] = ()
    """Distinct tokens to report instead of the top ones. No effect if num_logprobs is -1."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

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

    def read(self) -> NDArray[np.float32]:
        """A copy."""

    def copy_to(self, there: DeviceRows) -> None:
        """Enqueue a copy in the stream of `there`. Raises `penstock.shm.buffers.device_api.DeviceError`."""


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
    to all positions of its sequence up to its own, or up to `visible_ends`.
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
    passes that have host pages. No page is a destination twice, or a destination of page_copies too. Checkpoint n has
    the page number num_pages + n."""
    state_restores: tuple[tuple[int, int], ...] = ()
    """(checkpoint, slot): copy the checkpoint to the slot's state before the step, after page_restores. The slot has a
    SlotInit in this step. Only for passes whose spec says copies_states, as state_saves."""
    state_saves: tuple[tuple[int, int], ...] = ()
    """(slot, checkpoint): copy the slot's state to the checkpoint after the step. No checkpoint occurs twice; one that
    state_restores reads may occur."""
    embeddings: tuple[EmbeddedTokens, ...] = ()
    """Ascending; covers exactly the tokens that are FROM_EMBEDDINGS. Only if the spec has an embedding_size,
    or the pass takes pictures."""
    scored: ScoredTokens | None = None
    """Tokens of prompts whose log probabilities a client requests. Only for passes whose spec says scores_prompts."""
    pooled: PooledRows | None = None
    """Rows that give vectors. Only for passes whose spec has `pooled`."""
    rope_positions: NDArray[np.int32] | None = None
    """[T, 3] the positions by which rotary embeddings turn each token: frame, row and column for a picture's token, or
    three times the same. None if they are all the tokens' positions in their sequences; they never exceed these.
    Only for passes whose spec says has_picture_axes."""
    adapters: NDArray[np.int32] | None = None
    """[R] index into PassOptions.adapters, or NO_ADAPTER; constant for a sequence. None if no row has an adapter."""
    visible_ends: NDArray[np.int32] | None = None
    """[T] the position behind the last one that each token attends to, in layers that the pass chooses: a picture's
    tokens see the whole picture, which is in the step or computed before. None if each sees up to its own position.
    Only for passes whose spec has `whole_picture_tokens`."""
    drafts: NDArray[np.int32] | None = None
    """[L] number of tokens at the end of each of logit_rows that are drafts: guesses of the next tokens, to verify.
    0 for rows that report log probabilities. None if no row has drafts. Only for passes whose spec says
    verifies_drafts. L + D is at most MAX_VERIFIED.

    Each draft and the token before the first one need logits. Tokens are drawn at these positions in turn, as long as
    the drawn token is the draft that follows; so they are those of steps without drafts. KV of the other drafts is
    overwritten by later steps."""

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sampled(self) -> int:
        """L + D"""
        return len(self.logit_rows) + (0 if self.drafts is None else int(self.drafts.sum()))

    @property
    def logit_tokens(self) -> NDArray[np.int32]:
        """[L + D + S] indices into input_ids: the last token of each of logit_rows, `verified_tokens`, and the scored
        tokens."""
        last_tokens: NDArray[np.int32] = self.query_starts[1:][self.logit_rows] - 1
        if self.scored is None and self.drafts is None:
            return last_tokens
        from numpy import concatenate, empty  # here, so that importing this module costs nothing

        scored = empty(0, last_tokens.dtype) if self.scored is None else self.scored.tokens
        return concatenate([last_tokens, self.verified_tokens, scored])

    @property
    def verified_tokens(self) -> NDArray[np.int32]:
        """[D] ascending indices into input_ids: of each row with n drafts the n tokens before its last."""
        from numpy import array, int32

        if self.drafts is None:
            return array([], int32)
        ends, counts = self.query_starts[1:][self.logit_rows].tolist(), self.drafts.tolist()
        return array(
            [index for end, count in zip(ends, counts, strict=True) for index in range(end - 1 - count, end - 1)], int32
        )

    def check_page_moves(self) -> None:
        """Raises ValueError if a page is a destination twice, or source and destination of copies: a GPU makes all at
        once. Passes call it before they move anything. Such a batch is a bug of the engine."""
        copied = [page for _, page in self.page_copies]
        written = [page for _, page in self.page_restores] + copied
        if len(set(written)) < len(written):
            twice = next(page for page in written if written.count(page) > 1)
            raise ValueError(f"page {twice} is the destination of two copies or restores of a step; this is a bug")
        if both := {source for source, _ in self.page_copies}.intersection(copied):
            raise ValueError(f"page {min(both)} is source and destination of a step's copies; this is a bug")


def positions_to_verify(num_drafts: list[int]) -> list[list[int]]:
    """For each of logit_rows, indices of its positions, in their order, in the first L + D of batch.logit_tokens."""
    first, positions = len(num_drafts), []
    for index, count in enumerate(num_drafts):
        positions.append([*range(first, first + count), index])
        first += count
    return positions


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that may be sampled at some positions of a step."""

    rows: NDArray[np.int32]
    """[M] ascending indices into the first L + D of batch.logit_tokens. If a row has a mask at its first position, its
    drafts are verified only as far as it has masks."""
    bits: NDArray[np.uint32]
    """[M, ceil(vocab_size / 32)] bit i % 32 of word i // 32 is set if token i is allowed; at least one bit is set."""
