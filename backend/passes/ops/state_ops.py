"""The operations of layers that keep a state for each slot. Arrays and steps are the implementation's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """The weights of a layer with a delta rule, beside its linears of inputs and results."""

    gates: Tensor
    """[2 * num_value_heads, hidden]: strengths of updates, then decays."""
    conv: Tensor
    """[num_channels, conv_width]: the last is that of the token itself."""
    bias: Tensor
    """[num_value_heads], as decays."""
    decays: Tensor
    """A state is multiplied by exp(decay * softplus(gate + bias)); they are negative."""
    norm: Tensor
    """[value_dim]"""


class DeltaNetOps(Protocol):
    """The operations of layers with a delta rule (`DeltaNet`), and the states of all slots."""

    def pack(self, weights: DeltaNetWeights) -> Any:
        """Return the layer, for `run`. The caller drops its copy."""

    def create_states(self, num_states: int, num_spares: int = 0) -> None:
        """Allocate `DeltaNet.state_bytes` for each. Called again, it forgets the states before.

        Spares are behind the others: each keeps the state after one of `StepBatch.verified_tokens`, in their order.
        """

    @property
    def states(self) -> list[Any]:
        """Their memory, [slots, …] for each part of a layer's state; numpy arrays on the CPU."""

    def run(self, inputs: Any, x: Any, layer: Any, step: Any) -> Any:
        """Return the results of all tokens, [T, value_size], and change the states of the step's slots.

        inputs [T, num_channels + value_size] are [q | k | v | gates of results], and x [T, hidden] is what they were
        computed from. A row at position 0 begins with a state of zeros.
        """


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """What a layer that predicts the token after the next one has beside the others."""

    fc: Any
    embedding_norm: Any
    hidden_norm: Any
    norm: Any


class MtpOps(Protocol):
    """The operations of `DecoderConfig.has_mtp`, and what the model gave for the last token of each state."""

    def create_states(self, num_states: int, num_spares: int, num_guesses: int) -> None:
        """As `DeltaNetOps.create_states`, with more behind the spares, for rows of guesses."""

    @property
    def kept(self) -> Any:
        """Their memory, [states, hidden]; those of guesses begin at first_guess."""

    @property
    def first_guess(self) -> int: ...

    def begin(self, table: Any, weights: MtpWeights, given: Any) -> Any:
        """The residual stream of the head's layer, from the tokens' embeddings and what was given for those before.

        given: the final norm's result for all tokens of the step, which is kept for the next one. None for guesses:
        rows of one token, whose slots are those of guesses.
        """

    def keep(self, given: Any, *, is_guess: bool) -> None:
        """Keep the last of each row."""
