"""Lengths of ended answers and errors of earlier quotes, which correct later quotes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable

from penstock.backend.sequences.subscribers import Subscriber
from penstock.shm.memory.board import BackendBoard

_NUM_REMEMBERED = 256


class AnswerLengths:
    """Kaplan and Meier's estimate of the distribution of answers' lengths.

    An answer cut by its own limit only shows that it would have been longer; this estimate accounts for that. Beyond
    all known lengths an answer is assumed to reach its limit.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, bool]] = deque(maxlen=_NUM_REMEMBERED)
        """(generated tokens, whether a limit ended the answer)."""
        self._ends: list[int] = [0]
        """Ascending lengths from which on the survival is constant until the next."""
        self._survivals: list[float] = [1.0]
        """The part of all answers that are longer than the length in `_ends`."""
        self._areas: list[float] = [0.0]
        """The sum of the survivals of all lengths below the one in `_ends`."""
        self._is_stale = False

    def note(self, num_tokens: int, *, is_cut: bool) -> None:
        """Note that an answer has ended. Cheap: the estimate is computed when it is next used."""
        self._recent.append((num_tokens, is_cut))
        self._is_stale = True

    def expected(self, num_generated: int, limit: int) -> int | None:
        """The expected length of an answer that has num_generated tokens and continues; None without a history. Takes
        logarithmic time: a quote needs it of all sequences that run."""
        if not self._recent:
            return None
        self._update()
        now = self._survivals[bisect_right(self._ends, num_generated) - 1]
        if not now:  # it is longer than all answers known
            return min(limit, 2 * num_generated)
        num_more = max(0.0, self._area(limit) - self._area(num_generated)) / now
        return max(num_generated + 1, round(num_generated + num_more))

    def _area(self, length: int) -> float:
        place = bisect_right(self._ends, length) - 1
        return self._areas[place] + (length - self._ends[place]) * self._survivals[place]

    def expected_longest(self, num_answers: int, limit: int, num_generated: int = 0) -> int | None:
        """The expected length of the longest of several answers that have num_generated tokens; None without a
        history."""
        expected_of_one = self.expected(num_generated, limit)
        now = self._survivals[bisect_right(self._ends, num_generated) - 1]
        if expected_of_one is None or num_answers == 1 or not now:
            return expected_of_one
        expected = float(num_generated)
        for place in range(bisect_right(self._ends, num_generated) - 1, len(self._ends)):
            start = max(num_generated, self._ends[place])
            end = min(limit, self._ends[place + 1]) if place + 1 < len(self._ends) else limit
            if end > start:
                expected += (end - start) * (1.0 - (1.0 - self._survivals[place] / now) ** num_answers)
        return max(num_generated + 1, round(expected))

    def _update(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        num_at_risk, survival = len(self._recent), 1.0
        ended = Counter(length for length, is_cut in self._recent if not is_cut)
        all_lengths = Counter(length for length, _ in self._recent)
        self._ends, self._survivals, self._areas = [0], [1.0], [0.0]
        for length in sorted(all_lengths):
            if ended[length]:
                self._areas.append(self._areas[-1] + (length - self._ends[-1]) * survival)
                survival *= 1.0 - ended[length] / num_at_risk
                self._ends.append(length)
                self._survivals.append(survival)
            num_at_risk -= all_lengths[length]


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
    """Compares quotes with the actual times of the first token and of the complete answer. Errors are shown on the
    board, and correct the next quotes."""

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
