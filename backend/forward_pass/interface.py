"""`IBatchedForwardPass`, a model's properties for the engine, and the operator's choices for a pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.forward_pass.output import PendingOutput
    from penstock.backend.forward_pass.step import StepBatch, TokenMasks


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
    runs_ahead: bool = field(default=False, compare=False)
    """`forward` and `sample` return before the device has computed. The next step is launched behind the running one,
    whose tokens only the device knows yet. `sample` is called for steps without logit rows too, to wait for them."""
    scores_prompts: bool = False
    """The pass reports `StepBatch.scored`, for all tokens of a step if need be; workspace_bytes includes that memory.
    Otherwise requests for log probabilities of prompts are refused."""
    has_llama_cpp_sampling: bool = False
    """The pass applies DRY, XTC, top-n-sigma and dynamic temperature, as `HostSampling` does. Otherwise requests for
    them are refused."""
    embedding_size: int = 0
    """Width of embeddings in prompts, see `StepBatch.embeddings`; 0 if the pass takes none. A pass that is
    IDeviceLogits receives them on the device and on the host, others on the host only."""
    kv_windows: tuple[int | None, ...] = (None,)
    """One entry for each group of layers with its own pages; the groups take equal parts of kv_bytes_per_token.

    In the group's layers a token attends to itself and at most window - 1 tokens before it; None means that a layer
    attends to all. A page behind the window is reused while its sequence runs, so nothing may be read there, not even
    values that a mask hides: a pass that reads whole blocks adds their length. With several groups no step has
    page_copies or page_restores.
    """
    state_bytes_per_sequence: int = 0
    """Memory of the state that the pass keeps for each slot in addition to pages, as linear attention does; 0 for none.

    A SlotInit resets the state, and comes with the row that begins at position 0, or with a restored checkpoint; each
    later row of the slot continues where the last one ended. After an error the slot's next row is such a beginning. No
    step has page_copies. Without copies_states nothing is shared between such sequences.
    """
    copies_states: bool = False
    """The pass keeps checkpoints of states, see `ICheckpointsStates`."""
    guesses_tokens: bool = False
    """The pass is `IGuessesTokens`, and the model has a head for it."""
    pooled: Mapping[str, int] = field(default_factory=dict)
    """Kind of `PooledRows` → values per vector, for each kind that the pass computes."""
    generates: bool = True
    """The pass samples tokens. One that only pools never gets logit_rows; its vocab_size bounds the token ids."""
    adapter_ranks: tuple[int, ...] = ()
    """The rank of each of PassOptions.adapters, which weight_bytes includes. Empty if the pass applies none."""
    max_picture_bytes: int = 0
    """The most pixels of one picture, for a pass that is IEncodesPictures; 0 if it takes none."""
    picture_bytes: int = 0
    """The part of weight_bytes and workspace_bytes that pictures take: the tower, its activations, embeddings."""
    picture_layers: int = 0
    """First layers behind which pictures add to the residual stream. A picture's token has 1 + picture_layers rows of
    embedding_size, back to back: the embedding, and what is added behind each of these layers."""
    has_picture_axes: bool = False
    """Tokens of pictures have positions on three axes, see `StepBatch.rope_positions`."""
    whole_picture_tokens: int = 0
    """The most tokens of one picture, if they attend to each other both ways: a step computes all of them. Otherwise 0.
    """
    verifies_drafts: bool = field(default=False, compare=False)
    """The loaded pass takes `StepBatch.drafts`: a token's logits have the same bits in a row of several tokens as
    alone, unless rounds_drafts. With state_bytes_per_sequence a state goes back to where the first rejected draft
    began: such a step has at most PassOptions.num_state_drafts drafts, and no state_saves of rows with drafts."""
    rounds_drafts: bool = field(default=False, compare=False)
    """These logits are equal only up to rounding: drafts may change tokens, so the operator must ask for them."""

    def __post_init__(self) -> None:
        if self.state_bytes_per_sequence and self.whole_picture_tokens:
            # A state ends where a checkpoint is due, a picture nowhere in between: the sequence could stall.
            raise StartupError(
                f"whole_picture_tokens is {self.whole_picture_tokens}; a pass with state_bytes_per_sequence, "
                f"{self.state_bytes_per_sequence}, computes pictures in parts"
            )


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
    adapter_budget_bytes: int = 0
    """Memory of the adapters that come later (`ILoadsAdapters`), beside workspace_bytes; 0 if none do."""
    may_run_ahead: bool = False
    """The caller waits for the output of each step, so a pass on the CPU may be `PassSpec.runs_ahead`."""
    num_state_drafts: int = 0
    """The most drafts of a step, if the pass keeps states: it needs memory for one more state each."""
    guesses_tokens: bool = False
    """Load the head of a checkpoint that predicts further tokens, for `IGuessesTokens`."""
    needs_pictures: bool = False
    """The operator names the file of the vision part: a pass that cannot read it refuses to load. Otherwise it warns
    and serves text."""
    weights_fds: tuple[int, int] | None = None
    """The fds of a `penstock.shm.memory.fd_mailbox` for `ISharedWeights`; None if weights end with the process."""


class IBatchedForwardPass(Protocol):
    """One model on one device. All calls come from one thread, in order, so no lock is needed."""

    @property
    def spec(self) -> PassSpec: ...

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        """The spec of what `load` would return, from config.json alone, without weights. Raises StartupError."""

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> IBatchedForwardPass:
        """Load the weights. The backend always gives a model_dir; tests of passes without weights may give None.

        Raises `penstock.backend.errors.StartupError` with one clear line for anything that the operator can fix.
        """

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """Allocate num_pages * page_size_tokens * spec.kv_bytes_per_token[kv_dtype] bytes, no more; with G groups of
        layers that divided by G, because any page may become any group's. Called once."""

    def forward(self, batch: StepBatch) -> Any:
        """Run one step and return logits of batch.logit_rows, [L, vocab_size], as a handle for `sample`.

        For `HostSampling` they are those of batch.logit_tokens, [L + D + S, vocab_size]. Copy batch.page_copies first,
        then write the KV of all T tokens. A row's result must not depend on the other rows. Raises DeviceLost, here or
        in `sample`, when no later step can succeed either.
        """

    def sample(self, logits: Any, batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample one token for each of batch.logit_rows and store it as its slot's last token.

        The token depends only on the logits, the slot's SamplingParams, its tokens, the position and the row's mask.
        With batch.scored or batch.pooled it is called for a step without logit rows too; its output has their results.
        """

    def host_logits(self, logits: Any) -> NDArray[np.float32]:
        """The logits of a step on the host, [L, vocab_size], from `forward`'s handle; rows behind these are ignored.

        Called between `forward` and `sample`, for clients that read logits and for the check at start. A pass may omit
        it if its handle is the numpy array itself.
        """
        array: NDArray[np.float32] = logits
        return array

    def close(self) -> None:
        """Free the device's memory. Called once, after the last step."""
