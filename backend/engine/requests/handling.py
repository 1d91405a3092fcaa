"""The parts that handle requests, and how they are connected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.backend.engine.interfaces import IEngineLink, ISequenceScheduler
from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.engine.quoting.history import QuoteErrors
from penstock.backend.engine.quoting.quoter import Quoter
from penstock.backend.engine.recorder import Recorder
from penstock.backend.engine.requests.adapters import AdapterSet, AdapterTable
from penstock.backend.engine.requests.cancellation import Canceller
from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.intake import Intake
from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.engine.requests.stream_table import StreamTable
from penstock.backend.engine.requests.vector_delivery import VectorCache, VectorDelivery
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.scheduling.restart_grace import RestartGrace
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.memory.board import BackendBoard


@dataclass(frozen=True, slots=True)
class RequestHandling:
    """Parts around one table of requests: they take in a request, deliver its result, or cancel it."""

    table: RequestTable
    intake: Intake
    delivery: Delivery
    canceller: Canceller
    vector_delivery: VectorDelivery
    streams: StreamTable
    adapters: AdapterTable
    step_timing: StepTiming = field(default_factory=StepTiming)
    """Filled by the loop, read for quotes."""
    pictures: PictureDesk | None = None
    """None if the model takes none."""

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
        restart_grace: RestartGrace | None = None,
        vector_cache: VectorCache | None = None,
        recorder: Recorder | None = None,
        make_adapters: Callable[[RequestTable], AdapterTable] | None = None,
        step_timing: StepTiming | None = None,
        make_pictures: Callable[[Delivery], PictureDesk | None] = lambda _: None,
    ) -> RequestHandling:
        """Without a grammar queue, requests with a grammar are refused. Without a restart grace, resumed requests are
        grouped within a turn of the loop."""
        grammar_queue = grammar_queue or GrammarQueue(None, lambda: None, 0)
        table = RequestTable(scheduler, board, grammar_queue, restart_grace or RestartGrace(clock), recorder)
        step_timing, quote_errors = step_timing or StepTiming(), QuoteErrors(board, clock)
        quoter = Quoter(scheduler, step_timing, quote_errors, clock)
        delivery = Delivery(link, board, table, quote_errors)
        pictures = make_pictures(delivery)
        vector_delivery = VectorDelivery(link, board, table, delivery, vector_cache)
        streams = StreamTable(link, board, table, delivery, clock)
        intake = Intake(scheduler, board, limits, table, delivery, vector_delivery, streams, clock, quoter, pictures)
        canceller = Canceller(board, table, delivery, streams, clock)
        adapters = AdapterTable(link, table, AdapterSet()) if make_adapters is None else make_adapters(table)
        return cls(table, intake, delivery, canceller, vector_delivery, streams, adapters, step_timing, pictures)
