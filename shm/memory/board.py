"""One page of named counters per process: one writer, any number of readers, no locks, no messages.

A field is a 64-bit word that is written at once: a reader sees the old value or the new one. Fields are not consistent
with one another. Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import Any, ClassVar, Self

from penstock.shm.memory import region
from penstock.shm.memory.page_digest import PageDigest

_MAGIC = 0x50_4E_53_54_42_4F_41_31
_HEADER_WORDS = 8
_BOARD_BYTES = 4096
_MASK_64 = (1 << 64) - 1


class _Word:
    """A field's place in the page. The class annotation is the field's only declaration."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, board: Board | None, owner: type[Board]) -> Any:
        return self if board is None else board._words[self.index]

    def __set__(self, board: Board, value: int) -> None:
        board._words[self.index] = value


class Histogram:
    """One word per bucket, one for values above the last bound, and one for the sum of all values. With a bound below
    0 the values may be negative.

    The count is the sum of the buckets, so a reader never sees the two disagree.
    """

    def __init__(self, *bounds: int) -> None:
        self.bounds = bounds
        self.words: tuple[str, ...] = ()

    def __set_name__(self, owner: type[Board], name: str) -> None:
        self.words = (*(f"{name}_upto_{bound}" for bound in self.bounds), f"{name}_above", f"{name}_sum")

    def __get__(self, board: Board | None, owner: type[Board]) -> Any:
        return self if board is None else _Observer(board, self)

    def read(self, values: Mapping[str, int], prefix: str = "") -> tuple[list[int], int]:
        """(buckets, sum) from a board's `values`; the last bucket has no bound."""
        *buckets, total = (values[prefix + word] for word in self.words)
        is_negative = self.bounds[0] < 0 and total >> 63
        return buckets, total - (1 << 64) if is_negative else total


class _Observer:
    """Writes the histogram of one board."""

    __slots__ = ("_board", "_histogram")

    def __init__(self, board: Board, histogram: Histogram) -> None:
        self._board = board
        self._histogram = histogram

    def observe(self, value: int, count: int = 1) -> None:
        """Observe the same value, at least 0 unless a bound is negative, count times."""
        words = self._histogram.words
        self._board.increase(words[bisect_left(self._histogram.bounds, value)], count)
        self._board.increase(words[-1], value * count)


class Board:
    """Base of the boards. An annotated field of a subclass is an unsigned 64-bit counter; a Histogram is several.

    With totals_of, the board also has every field of that board except pid, with the prefix `TOTALS`.
    """

    TOTALS = "frontends_"
    fields: ClassVar[tuple[str, ...]] = ()
    _layout: ClassVar[int] = 0

    def __init_subclass__(cls, *, totals_of: type[Board] | None = None) -> None:
        histograms = [item for item in vars(cls).values() if isinstance(item, Histogram)]
        totals = [name for name in totals_of.fields if name != "pid"] if totals_of is not None else []
        cls.fields = (
            *cls.__annotations__,
            *(word for histogram in histograms for word in histogram.words),
            *(cls.TOTALS + name for name in totals),
        )
        if (_HEADER_WORDS + len(cls.fields)) * 8 > _BOARD_BYTES:
            raise TypeError(f"{cls.__name__} has {len(cls.fields)} fields, more than its page has words")
        cls._layout = zlib.crc32(" ".join((cls.__name__, *cls.fields)).encode())
        for index, name in enumerate(cls.fields, start=_HEADER_WORDS):
            setattr(cls, name, _Word(index))

    def __init__(self, mapping: mmap.mmap, fd: int = -1) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping)[:_BOARD_BYTES].cast("Q")
        self.behind = memoryview(mapping)[_BOARD_BYTES:]
        """Further memory of the same writer."""
        self.fd = fd
        """Readers can map it for reading only; -1 except in the writer."""

    @classmethod
    def create(cls, num_bytes_behind: int = 0) -> Self:
        """The writer's board, and zeroed memory behind it. Only this process can write them."""
        fd = cls._new_fd(num_bytes_behind)
        board = cls(mmap.mmap(fd, _BOARD_BYTES + num_bytes_behind), fd)
        region.seal(fd, region.F_SEAL_FUTURE_WRITE)
        return board

    @classmethod
    def private(cls, num_bytes_behind: int = 0) -> Self:
        """A board that is not shared."""
        return cls(mmap.mmap(-1, _BOARD_BYTES + num_bytes_behind))

    @classmethod
    def create_fd(cls) -> int:
        """An fd of a new board for another process to write; the caller closes it."""
        fd = cls._new_fd()
        region.seal(fd)
        return fd

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> Self:
        """Map a board that another process made; the fd stays the caller's. Raises RegionError for anything else."""
        mapping = region.attach(fd, max(_BOARD_BYTES, os.fstat(fd).st_size), writable=writable)
        board = cls(mapping)
        if (board._words[0], board._words[1]) != (_MAGIC, cls._layout):
            board.close()
            raise region.RegionError(f"the region is not a {cls.__name__} of this version")
        return board

    @classmethod
    def _new_fd(cls, num_bytes_behind: int = 0) -> int:
        fd = region.create("penstock-board", _BOARD_BYTES + num_bytes_behind)
        os.pwrite(fd, struct.pack("=QQ", _MAGIC, cls._layout), 0)
        return fd

    def values(self) -> dict[str, int]:
        return dict(zip(self.fields, self.numbers(), strict=True))

    def numbers(self) -> list[int]:
        """The values in the order of `fields`."""
        return self._words[_HEADER_WORDS : _HEADER_WORDS + len(self.fields)].tolist()

    def add(self, other: Self) -> None:
        """Add each of the other board's numbers."""
        for index, value in enumerate(other.numbers(), start=_HEADER_WORDS):
            self._words[index] = (self._words[index] + value) & _MASK_64

    def increase(self, field: str, count: int = 1) -> None:
        setattr(self, field, (getattr(self, field) + count) & _MASK_64)

    def close(self) -> None:
        """Idempotent. Other processes keep their mappings."""
        if not self._mapping.closed:
            self._words.release()
            self.behind.release()
            self._mapping.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


_TENS_OF_MS = (10_000, 20_000, 40_000, 60_000)
_UP_TO_A_MINUTE = (250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000)


_QUOTE_ERRORS_US = tuple(
    1000 * bound
    for bound in (-30_000, -10_000, -3_000, -1_000, -300, -100, -30, 0, 30, 100, 300, 1_000, 3_000, 10_000, 30_000)
)


class FrontendBoard(Board):
    """One frontend's numbers since it connected to this backend, including the time before without one.

    requests_open is a present value; everything else only grows. A request here is one stream of tokens, so a choice.
    """

    pid: int
    requests_open: int
    requests_stop: int
    requests_length: int
    requests_cancelled: int
    requests_rejected: int
    requests_failed: int
    requests_expired: int
    requests_quoted: int
    """Streams that asked for a quote alone."""
    requests_resumed: int
    tokens_streamed: int
    responses_200: int
    responses_204: int
    responses_400: int
    responses_401: int
    responses_404: int
    responses_405: int
    responses_408: int
    responses_413: int
    responses_415: int
    responses_429: int
    responses_499: int
    responses_500: int
    responses_503: int
    responses_529: int
    responses_other: int

    ttft_us = Histogram(1_000, 5_000, *_TENS_OF_MS, 100_000, *_UP_TO_A_MINUTE)
    """From a request's arrival to its first token."""
    itl_us = Histogram(1_000, 2_500, 5_000, *_TENS_OF_MS, 100_000, 250_000, 500_000, 1_000_000, 2_500_000)
    """Between tokens of a stream, as they arrive from the backend."""
    queue_us = Histogram(1_000, 5_000, *_TENS_OF_MS, 100_000, *_UP_TO_A_MINUTE)
    """From the backend's receipt to the first step, for streams that are not coalesced."""
    latency_us = Histogram(*_TENS_OF_MS, 100_000, *_UP_TO_A_MINUTE, 120_000_000, 300_000_000)
    """From a request's arrival to its end, for completely answered requests."""

    def count_response(self, status: int) -> None:
        name = f"responses_{status}"
        self.increase(name if name in RESPONSE_FIELDS else "responses_other")


RESPONSE_FIELDS = tuple(name for name in FrontendBoard.fields if name.startswith("responses_"))
_PRESENT = frozenset({"requests_open"})


class FrontendTotals:
    """The numbers of all frontends that a backend has had, including disconnected ones."""

    def __init__(self) -> None:
        self._of_retired = [0] * (len(FrontendBoard.fields) - 1)

    def retire(self, board: FrontendBoard) -> None:
        """Keep what a disconnected frontend counted."""
        kept = [0 if name in _PRESENT else value for name, value in board.values().items() if name != "pid"]
        self._of_retired = list(map(add, self._of_retired, kept))

    def sums(self, boards: Iterable[FrontendBoard]) -> list[int]:
        """Totals of these boards and the retired ones, for `FrontendBoard.fields` without pid, the first field."""
        totals = self._of_retired
        for board in boards:
            totals = list(map(add, totals, board.numbers()[1:]))
        return totals


class BackendBoard(Board, totals_of=FrontendBoard):
    """The backend's numbers, and the totals of all its frontends (`FrontendTotals`).

    Counters only grow while the backend runs; the other fields are present values.
    """

    pid: int
    heartbeat_ns: int
    """Monotonic time of the loop's last turn: it shows progress, not just a living process."""
    draining: int
    """1 once the backend accepts nothing new."""
    steps: int
    running: int
    waiting: int
    max_waiting: int
    pages_used: int
    pages_total: int
    page_size_tokens: int
    requests_accepted: int
    requests_finished: int
    requests_cancelled: int
    requests_rejected: int
    requests_failed: int
    requests_expired: int
    requests_quoted: int
    """Requests that asked for a quote alone; they do not count as accepted."""
    requests_coalesced: int
    """Requests that joined a sequence of another request."""
    lingering_streams: int
    """Streams of which something is kept, whether or not they run or are read."""
    lingering_bytes: int
    """Their records, and the tokens of those that have ended."""
    streams_reattached: int
    """Times that another request continued a lingering stream."""
    pages_idle: int
    """Pages that no sequence holds; their content stays in the prefix cache."""
    checkpoint_bytes: int
    """Memory of states that are kept for the prefixes of other sequences."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    """Prompt and output tokens in all steps; recomputed tokens of a preempted sequence count again."""
    wasted_tokens: int
    """Computed tokens whose sequence had ended or was preempted when their step completed."""
    drafted_tokens: int
    """Guessed tokens that steps computed to verify them."""
    accepted_tokens: int
    """Those of them that came true."""
    preemptions: int
    host_pages_used: int
    """Pages with a copy in host memory."""
    pages_saved: int
    """Pages copied to host memory before they were reused."""
    pages_restored: int
    """Pages copied back from host memory."""
    vector_cache_hits: int
    """Pooled requests whose vector was computed for an equal input before."""
    vector_cache_misses: int
    vector_cache_bytes: int
    shared_weights_bytes: int
    """Packed weights in memory that outlives the backend."""
    shared_weights_mapped: int
    """1 if it found packed weights there, 0 if it loaded them."""
    shared_weights_checks: int
    """Blocks of packed weights that were compared with their checksums."""
    frontends: int
    """Connected now."""
    token_step_us: int
    """Duration of a step of one token, measured at the start; 0 for a model that does not generate."""

    cancel_to_free_us = Histogram(1_000, 5_000, 20_000, 100_000, 500_000)
    """From a frontend noticing that a client has disconnected to its pages being free."""
    step_us = Histogram(500, 1_000, 2_500, 5_000, *_TENS_OF_MS, 100_000, 250_000, 500_000, 1_000_000, 2_500_000)
    """From the launch of a step to its result."""
    step_rows = Histogram(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Sequences with tokens in a step."""
    step_tokens = Histogram(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    """Prompt and output tokens that a step computed."""

    quote_error_first_token_us = Histogram(*_QUOTE_ERRORS_US)
    """The first token's time as predicted on the request's arrival, minus the actual one."""
    quote_error_finish_us = Histogram(*_QUOTE_ERRORS_US)
    """The same for the end of the answer."""

    def __init__(self, mapping: mmap.mmap, fd: int = -1) -> None:
        super().__init__(mapping, fd)
        self._digest: PageDigest | None = None

    @property
    def digest(self) -> PageDigest | None:
        """The digest of the pages that can be found; None for a model without pages."""
        if self._digest is None:
            self._digest = PageDigest.read(self.behind)
        return self._digest

    def close(self) -> None:
        if self._digest is not None:
            self._digest.close()
            self._digest = None
        super().close()

    def observe_cancel(self, cancel_to_free_us: int) -> None:
        self.cancel_to_free_us.observe(cancel_to_free_us)

    def observe_step(self, duration_us: int, num_rows: int, num_tokens: int) -> None:
        """Call once per completed step."""
        self.step_us.observe(max(0, duration_us))
        self.step_rows.observe(num_rows)
        self.step_tokens.observe(num_tokens)

    def show_totals(self, num_frontends: int, totals: Sequence[int]) -> None:
        """totals come from `FrontendTotals.sums`."""
        self.frontends = num_frontends
        start = _HEADER_WORDS + len(self.fields) - len(totals)
        for index, total in enumerate(totals, start=start):
            self._words[index] = total & _MASK_64

    def beat(self) -> None:
        self.heartbeat_ns = time.monotonic_ns()

    def seconds_since_beat(self) -> float:
        return (time.monotonic_ns() - self.heartbeat_ns) / 1e9
