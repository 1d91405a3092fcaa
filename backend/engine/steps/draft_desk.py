"""Asks the draft model before plans for which its guesses are wanted. Used by the main thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from penstock.backend.engine.steps.draft_model import DraftAsk, DraftModel, Guesses
from penstock.backend.engine.steps.model_drafting import ModelDrafting
from penstock.backend.forward_pass import DeviceLost
from penstock.backend.sequences.sequence import Sequence

logger = logging.getLogger("penstock.backend")


class IDraftExecutor(Protocol):
    """The part of the executor that the desk uses."""

    @property
    def is_busy(self) -> bool: ...

    def call(self, work: Callable[[], None]) -> None: ...

    def wake(self) -> None: ...


class DraftDesk:
    """At most one job is open. Guesses change no token, so it does not matter if a sequence ends meanwhile."""

    def __init__(
        self,
        model: DraftModel,
        executor: IDraftExecutor,
        drafting: ModelDrafting,
        next_decodes: Callable[[], Collection[Sequence]],
        vocab_size: int,
    ) -> None:
        """next_decodes: of the `Scheduler`. vocab_size: the target's."""
        self._model: DraftModel | None = model
        self._executor, self._drafting = executor, drafting
        self._next_decodes, self._vocab_size = next_decodes, vocab_size
        self._asked: list[Sequence] = []
        """Sequences of the open job."""
        self._guesses: Guesses | None = None
        """Set by the executor's thread, as its last act."""

    def holds_plan(self) -> bool:
        """Whether the next plan waits: for guesses, or for the result of the running step, which they continue.

        Asks for guesses where they are wanted. Whatever ends the waiting wakes the loop.
        """
        if not self._asked and not self._ask():
            return self._model is not None and self._executor.is_busy and bool(self._wanted())
        if self._guesses is None:
            return True
        self._take(self._guesses)
        return False

    def close(self) -> None:
        if self._model is not None:
            self._executor.call(self._model.close)

    def _wanted(self) -> dict[Sequence, int]:
        return self._drafting.wanted(self._next_decodes())

    def _ask(self) -> bool:
        if self._model is None or self._executor.is_busy:
            return False
        wanted = {each: num for each, num in self._wanted().items() if each.num_computed == len(each.tokens) - 1}
        if not wanted:
            return False
        self._asked = list(wanted)
        asks = [_ask_of(sequence, count) for sequence, count in wanted.items()]
        self._executor.call(partial(self._guess, self._model, asks))
        return True

    def _guess(self, model: DraftModel, asks: list[DraftAsk]) -> None:
        """On the executor's thread."""
        try:
            guesses = model.guess(asks, self._vocab_size)
        except DeviceLost:
            raise
        except Exception:  # whatever it is, the target does not need the draft model
            logger.exception("the draft model failed; from now on it guesses nothing")
            guesses, self._model = Guesses([]), None
            model.close()
        self._guesses = guesses
        self._executor.wake()

    def _take(self, guesses: Guesses) -> None:
        for sequence, tokens in zip(self._asked, guesses.tokens, strict=False):
            if tokens is not None and sequence.guesser is not None and not sequence.ended:
                sequence.guesser.take_guess(sequence.tokens, tokens)
        self._drafting.note_guessed(guesses.num_passes, guesses.seconds)
        self._asked, self._guesses = [], None


def _ask_of(each: Sequence, count: int) -> DraftAsk:
    slot = -1 if each.slot is None else each.slot
    of_target = each.tokens, each.num_prompt_tokens, list(each.kv.pages), slot, each.salt
    return DraftAsk(*of_target, each.sampling, each.common_stop_ids, count)
