"""The parts that handle requests, and how they are connected."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.backend.engine.cancellation import Canceller
from penstock.backend.engine.delivery import Delivery
from penstock.backend.engine.intake import Intake
from penstock.backend.engine.lingering.streams import LingeringStreams
from penstock.backend.engine.open_requests import OpenRequests
from penstock.backend.engine.quoting.quote_errors import QuoteErrors
from penstock.backend.engine.quoting.quoter import Quoter
from penstock.backend.engine.step_timing import StepTiming
from penstock.backend.engine.vector_delivery import VectorDelivery
from penstock.backend.scheduling.settlement import Settlement
from penstock.backend.structured_output.grammar_queue import GrammarQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.interfaces import IEngineLink
    from penstock.backend.engine.limits import EngineLimits
    from penstock.backend.engine.recording.recorder import Recorder
    from penstock.backend.engine.vector_cache import VectorCache
    from penstock.backend.scheduling.interface import ISequenceScheduler
    from penstock.shm.memory.board import BackendBoard


@dataclass(frozen=True, slots=True)
class Requests:
    """Parts around one table of requests: they take in a request, deliver its result, or cancel it."""

    table: OpenRequests
    intake: Intake
    delivery: Delivery
    canceller: Canceller
    vector_delivery: VectorDelivery
    lingering: LingeringStreams
    step_timing: StepTiming = field(default_factory=StepTiming)
    """Filled by the loop, read for quotes."""

    @classmethod
    def make(
        cls,
        link: IEngineLink,
        scheduler: ISequenceScheduler,
        board: BackendBoard,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammar_queue: GrammarQueue | None = None,
        settlement: Settlement | None = None,
        vector_cache: VectorCache | None = None,
        recorder: Recorder | None = None,
    ) -> Requests:
        """Without a grammar queue, requests with a grammar are refused. Without a settlement, resumed requests are
        grouped within a turn of the loop."""
        grammar_queue = grammar_queue or GrammarQueue(None, lambda: None, 0)
        table = OpenRequests(scheduler, board, grammar_queue, settlement or Settlement(clock), recorder)
        step_timing, quote_errors = StepTiming(), QuoteErrors(board, clock)
        quoter = Quoter(scheduler, step_timing, quote_errors, clock)
        delivery = Delivery(link, board, table, quote_errors)
        vector_delivery = VectorDelivery(link, board, table, delivery, vector_cache)
        lingering = LingeringStreams(link, board, table, delivery, clock)
        intake = Intake(scheduler, board, limits, table, delivery, vector_delivery, lingering, clock, quoter)
        canceller = Canceller(board, table, delivery, lingering, clock)
        return cls(table, intake, delivery, canceller, vector_delivery, lingering, step_timing)
