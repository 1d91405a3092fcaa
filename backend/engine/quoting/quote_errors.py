"""Errors of quotes: shown on the board, and used to correct the next quotes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.engine.quoting.answer_lengths import AnswerLengths

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.shm.memory.board import BackendBoard

_KEPT = 0.95
"""Weight of past predictions: one counts for about the next twenty."""
_MAX_CORRECTION = 8.0


class Correction:
    """The ratio of actual to predicted time: planning, delivery and later requests, which the model leaves out, take
    time too."""

    def __init__(self) -> None:
        self._predicted_s = self._actual_s = 0.0

    @property
    def factor(self) -> float:
        if not self._predicted_s:
            return 1.0
        return min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, self._actual_s / self._predicted_s))

    def note(self, predicted_s: float, actual_s: float) -> None:
        """predicted_s is the uncorrected prediction."""
        if not self._predicted_s:  # one prediction alone says little
            self._predicted_s = self._actual_s = predicted_s
        self._predicted_s = _KEPT * self._predicted_s + predicted_s
        self._actual_s = _KEPT * self._actual_s + actual_s


class QuoteErrors:
    """Compares quotes with the actual times of the first token and of the complete answer."""

    def __init__(self, board: BackendBoard, clock: Callable[[], float]) -> None:
        self._board = board
        self._clock = clock
        self.answer_lengths = AnswerLengths()
        self.first_token = Correction()
        self.finish = Correction()

    def note_first_token(self, subscriber: Subscriber) -> None:
        if (prediction := subscriber.prediction) is not None:
            actual_s = self._clock() - subscriber.arrived_s
            self._board.quote_error_first_token_us.observe(_error_us(prediction.first_token_s, actual_s))
            self.first_token.note(prediction.modelled_first_token_s, actual_s)

    def note_end(self, subscriber: Subscriber, num_generated: int, *, is_cut: bool) -> None:
        """The answer is complete. is_cut: its limit has ended it."""
        self.answer_lengths.note(num_generated, is_cut=is_cut)
        prediction = subscriber.prediction
        if prediction is not None and prediction.finish_s is not None and prediction.modelled_finish_s is not None:
            actual_s = self._clock() - subscriber.arrived_s
            self._board.quote_error_finish_us.observe(_error_us(prediction.finish_s, actual_s))
            self.finish.note(prediction.modelled_finish_s, actual_s)


def _error_us(predicted_s: float, actual_s: float) -> int:
    return round(1e6 * (predicted_s - actual_s))
