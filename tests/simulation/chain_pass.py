"""A forward pass that verifies each batch, breaks down on demand, and whose every token is known beforehand.

Its KV of a position is a hash chained from the position before. Its tokens depend on sampling parameters, history and
position, as those of a real sampler do. So a wrong page, position or slot gives a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.forward_pass import (
    FROM_SLOT,
    NO_ADAPTER,
    NOT_FINITE,
    PassSpec,
    SamplingParams,
    SlotInit,
    StepBatch,
    StepOutput,
    TokenLogprobs,
    TokenMasks,
    positions_to_verify,
)
from penstock.shm.messages import MAX_LOGPROBS, EventLogprobs
from tests.simulation.pictures import take_embeddings
from tests.simulation.skipping import LostStep, SkippableStep, Writers
from tests.simulation.states import States
from tests.simulation.violations import PlantedFault, Violation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import PendingOutput

_MASK = (1 << 64) - 1
ROOT = 0x243F6A8885A308D3
_GENERATED = 1 << 32
_NONSENSE = 0x0F0F0F0F


@dataclass(frozen=True)
class PassSizes:
    num_pages: int
    num_host_pages: int
    page_size: int
    max_running: int
    max_batch_tokens: int
    runs_ahead: bool
    num_checkpoints: int | None = None  # the pass keeps no state
    adapters: tuple[str, ...] = ()


def mix(state: int, value: int) -> int:
    state = (state ^ value) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019 & _MASK
    return state ^ state >> 29


def flavour_of(adapter: str) -> int:
    """What an adapter does to each cell: 0 for the model alone."""
    return mix(ROOT, ord(adapter)) if adapter else 0


class SlotState:
    """State of a slot: the last token, and a hash of all tokens for penalties."""

    __slots__ = ("flavour", "history", "last_token", "num_logprobs")

    def __init__(self, sampling: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.num_logprobs = sampling.num_logprobs
        self.flavour = 0
        if sampling.temperature > 0:
            self.flavour = mix(mix(sampling.seed, int(1000 * sampling.temperature)), sampling.top_k) | 1
        self.history: int | None = None
        if sampling.presence_penalty:
            self.history = int(1000 * sampling.presence_penalty)
            for index, token in enumerate(token_ids):
                self.note(token if index < num_prompt_tokens else token + _GENERATED)
        self.last_token = -1

    def note(self, token: int) -> None:
        if self.history is not None:
            self.history = mix(self.history, token)

    def choose(self, cell: int, position: int, vocab_size: int, allowed: set[int] | None = None) -> int:
        """The token at this position after a position with this cell: the next allowed one."""
        if self.flavour:
            cell = mix(cell, self.flavour + position)
        if self.history is not None:
            cell = mix(cell, self.history)
        token = (cell >> 16) % vocab_size
        while allowed is not None and token not in allowed:
            token = (token + 1) % vocab_size
        self.note(token + _GENERATED)
        self.last_token = token
        return token


def make_logprobs(cell: int, token: int, vocab_size: int, event: int = 0) -> EventLogprobs:
    """Log probabilities of a token after a position with this cell. float32 holds all numbers exactly."""
    top_ids = tuple((cell + index) % vocab_size for index in range(MAX_LOGPROBS))
    top = tuple(-index / 2 for index in range(MAX_LOGPROBS))
    return EventLogprobs(event, -((cell >> 20) % 4096 + token) / 16, 1 + token, top_ids, top)


def make_vector(cell: int) -> list[float]:
    """The vector of a sequence that ends with this cell. float32 holds its values exactly."""
    return [float((cell >> shift) % 4096) for shift in (8, 20, 32)]


@dataclass(slots=True)
class Fault:
    """The fault of the next step. "nan" spoils a row's logits, "poison" also its KV, and "raise at wait"
    everything that the step writes to the cache and to its slots."""

    kind: str
    row: int
    number: int


class ChainPass:
    """Checks each batch against the contract of `StepBatch`, and fails as `fault` says."""

    def __init__(self, vocab_size: int, sizes: PassSizes) -> None:
        self.num_host_pages = sizes.num_host_pages
        self.spec = PassSpec(
            vocab_size,
            1 << 16,
            {"fp32": 8},
            runs_ahead=sizes.runs_ahead,
            scores_prompts=True,
            has_llama_cpp_sampling=True,
            state_bytes_per_sequence=8 * (sizes.num_checkpoints is not None),
            copies_states=sizes.num_checkpoints is not None,
            pooled={"embed": len(make_vector(ROOT))},
            adapter_ranks=(1,) * len(sizes.adapters),
            verifies_drafts=True,
        )
        self._flavours = [*map(flavour_of, sizes.adapters), 0]
        """By adapter; the last one is NO_ADAPTER's."""
        self._num_pages = sizes.num_pages
        self._page_size = sizes.page_size
        self._max_running = sizes.max_running
        self._max_batch_tokens = sizes.max_batch_tokens
        self.cells = [0] * (sizes.num_pages * sizes.page_size)
        """Hash per position; 0 was never written, -n is poisoned by fault n."""
        self.saved_cells: dict[int, list[int]] = {}
        """Host place → cells of the page saved there."""
        self._slots: dict[int, SlotState] = {}
        self._states = States(sizes.num_checkpoints, sizes.page_size, ROOT)
        self._writers = Writers()
        self._scored: list[tuple[int, int, int]] = []
        """(row, cell, next token) of each scored token of the step between `forward` and `sample`."""
        self._written: list[list[int]] = []
        """By row, the cells of the step's tokens, between `forward` and `sample`."""
        self.fault: Fault | None = None

    def forward(self, batch: StepBatch) -> list[int]:
        """The cell at the end of each row."""
        fault = self.fault
        if fault is not None and fault.kind == "raise":
            raise PlantedFault("before anything was written")
        for init in batch.slot_inits:
            self._take_slot(init)
        starts, ids = batch.query_starts.tolist(), batch.input_ids.tolist()
        contexts, slots, table = batch.context_lens.tolist(), batch.slots.tolist(), batch.page_table.tolist()
        take_embeddings(batch, ids)
        self._check(starts, ids, slots, table)
        scored = self._scored_tokens(batch, starts, ids)
        self._scored = []
        # A step that samples and scores nothing is awaited only if the pass runs ahead.
        is_awaited = len(batch.logit_rows) or scored or self.spec.runs_ahead
        nonsense = _NONSENSE if fault is not None and fault.kind == "raise at wait" and is_awaited else 0
        self._restore_pages(batch.page_restores, contexts, table, nonsense)
        self._copy_pages(batch.page_copies, contexts, table, nonsense)
        self._states.restore(batch)
        ends, written, self._written = [], set[int](), []
        adapters = [NO_ADAPTER] * len(slots) if batch.adapters is None else batch.adapters.tolist()
        page_size, cells = self._page_size, self.cells
        for row, slot in enumerate(slots):
            position, pages = contexts[row], table[row]
            cell = self._cell_before(position, pages)
            if self.spec.state_bytes_per_sequence:
                cell = self._states.check(slot, position, cell, is_spoiled=bool(nonsense))
            if fault is not None and fault.kind == "poison" and fault.row == row:
                cell = -fault.number
            mine = set()
            self._written.append([])
            for index, token in enumerate(ids[starts[row] : starts[row + 1]], start=starts[row]):
                if token == FROM_SLOT:
                    token = self._slots[slot].last_token
                if cell >= 0:
                    cell = mix(cell ^ self._flavours[adapters[row]], token)
                    cell ^= nonsense
                page = pages[position // page_size]
                mine.add(page)
                cells[page * page_size + position % page_size] = cell
                self._writers.note([page * page_size + position % page_size])
                self._written[-1].append(cell)
                position += 1
                if index in scored:
                    self._scored.append((row, cell, scored[index]))
            if not mine.isdisjoint(written):
                raise Violation("two rows of a step write to one page")
            written |= mine
            ends.append(cell)
            self._states.of_slots[slot] = position, cell
        self._states.save(batch)
        return ends

    def _cell_before(self, position: int, pages: list[int]) -> int:
        if position == 0:
            return ROOT
        page, place = divmod(position - 1, self._page_size)
        return self.cells[pages[page] * self._page_size + place]

    def _scored_tokens(self, batch: StepBatch, starts: list[int], ids: list[int]) -> dict[int, int]:
        """Index of each scored token → the token that follows it."""
        if batch.scored is None:
            return {}
        tokens, next_ids = batch.scored.tokens.tolist(), batch.scored.next_ids.tolist()
        last = {starts[row + 1] - 1 for row in batch.logit_rows.tolist()}
        if not tokens or tokens != sorted(set(tokens)) or not last.isdisjoint(tokens) or len(next_ids) != len(tokens):
            raise Violation(f"the tokens {tokens} are scored for {next_ids}")
        for token, next_id in zip(tokens, next_ids, strict=True):
            if token + 1 not in starts and ids[token + 1] != next_id:
                raise Violation(f"token {token} is scored for {next_id}, not for the row's next token")
        return dict(zip(tokens, next_ids, strict=True))

    def _check(self, starts: list[int], ids: list[int], slots: list[int], table: list[list[int]]) -> None:
        lengths = [end - start for start, end in pairwise(starts)]
        if starts[0] != 0 or starts[-1] != len(ids) or min(lengths) < 1:
            raise Violation(f"query_starts {starts} for {len(ids)} tokens")
        if len(ids) > self._max_batch_tokens or len(slots) > self._max_running or len(set(slots)) != len(slots):
            raise Violation(f"{len(ids)} tokens in slots {slots}")
        if lengths != sorted(lengths, key=lambda length: length > 1):
            raise Violation(f"rows of lengths {lengths}: single tokens must come first")
        if any(not 0 <= page < self._num_pages for pages in table for page in pages):
            raise Violation("a page that does not exist")
        if any(slot not in self._slots for slot in slots):
            raise Violation("a slot that was not initialized")

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        size, places = self._page_size, [place for _, place in pairs]
        if len(set(places)) != len(places) or not set(places) <= set(range(self.num_host_pages)):
            raise Violation(f"pages are saved to the places {places} of {self.num_host_pages}")
        for page, place in pairs:
            self.saved_cells[place] = self.cells[page * size : (page + 1) * size]

    def _restore_pages(
        self, restores: tuple[tuple[int, int], ...], contexts: list[int], table: list[list[int]], nonsense: int
    ) -> None:
        """Each page must be full, belong to one row only, and lie before what that row computes."""
        size, cells = self._page_size, self.cells
        before = [page for context, pages in zip(contexts, table, strict=True) for page in pages[: context // size]]
        for place, page in restores:
            if before.count(page) != 1 or [to for _, to in restores].count(page) != 1:
                raise Violation(f"one of the page restores {restores} belongs to no row, or to two")
            if place not in self.saved_cells or 0 in self.saved_cells[place]:
                raise Violation("a page is restored that was not saved, or not when it was full")
            cells[page * size : (page + 1) * size] = _spoiled(self.saved_cells[place], nonsense)
            self._writers.note(range(page * size, (page + 1) * size))

    def _copy_pages(
        self, copies: tuple[tuple[int, int], ...], contexts: list[int], table: list[list[int]], nonsense: int
    ) -> None:
        """Each destination must belong to a row that continues within the page."""
        size, cells = self._page_size, self.cells
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        if len(set(destinations)) != len(destinations) or not sources.isdisjoint(destinations):
            raise Violation(f"page copies {copies}")
        current = [pages[context // size] for context, pages in zip(contexts, table, strict=True) if context % size]
        if any(current.count(page) != 1 for page in destinations):
            raise Violation(f"one of the page copies {copies} belongs to no row")
        for source, destination in copies:
            copied = _spoiled(cells[source * size : (source + 1) * size], nonsense)
            cells[destination * size : (destination + 1) * size] = copied
            self._writers.note(range(destination * size, (destination + 1) * size))

    def _take_slot(self, init: SlotInit) -> None:
        self._slots[init.slot] = SlotState(init.sampling, init.token_ids.tolist(), init.num_prompt_tokens)
        self._states.of_slots.pop(init.slot, None)

    def sample(self, logits: list[int], batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
        fault = self.fault
        if fault is not None and fault.kind == "raise late":
            raise PlantedFault("after the cache was written")
        allowed = self._allowed(masks)
        tokens: list[int] = []
        num_accepted: list[int] = []
        logprobs: list[tuple[int, int, EventLogprobs]] = []  # place, number of top tokens, entry
        num_drafts = [0] * len(batch.logit_rows) if batch.drafts is None else batch.drafts.tolist()
        places = positions_to_verify(num_drafts)
        for place, row in enumerate(batch.logit_rows.tolist()):
            slot = self._slots[int(batch.slots[row])]
            if num_drafts[place] and slot.num_logprobs >= 0:
                raise Violation("drafts of a row that may have none")
            if fault is not None and fault.kind == "nan" and fault.row == row:
                token, accepted = NOT_FINITE, 0
            else:
                token, accepted = self._verify(batch, row, num_drafts[place], [allowed.get(at) for at in places[place]])
            self._states.go_back(int(batch.slots[row]), num_drafts[place] - accepted, self._written[row])
            if token != NOT_FINITE and slot.num_logprobs >= 0:
                logprobs.append((place, slot.num_logprobs, make_logprobs(logits[row], token, self.spec.vocab_size)))
            tokens.append(token)
            num_accepted.append(accepted)
        if fault is not None and fault.kind == "raise at wait":
            return LostStep()
        if fault is not None and fault.kind == "miscount":
            tokens.append(0)
        scored = self._score(batch.scored.num_top) if batch.scored is not None else None
        found = np.array(tokens, np.int32), _in_columns(logprobs), scored, self._vectors(logits, batch)
        output = StepOutput(*found, num_accepted=() if batch.drafts is None else tuple(num_accepted))
        return SkippableStep(output, self.cells, self._writers.end_step()) if self.spec.runs_ahead else output

    def _verify(self, batch: StepBatch, row: int, num_drafts: int, allowed: list[set[int] | None]) -> tuple[int, int]:
        """The token after the drafts that come true, and the number of these."""
        end = int(batch.query_starts[row + 1])
        drafts = batch.input_ids[end - num_drafts : end].tolist()
        position = int(batch.context_lens[row] + end - batch.query_starts[row]) - num_drafts
        slot, cells = self._slots[int(batch.slots[row])], self._written[row][-1 - num_drafts :]
        for place, cell in enumerate(cells):
            if cell < 0:
                return NOT_FINITE, place
            token = slot.choose(cell, position + place, self.spec.vocab_size, allowed[place])
            is_last = place == num_drafts or (allowed[place] is not None and allowed[place + 1] is None)
            if is_last or token != drafts[place]:
                break
        return token, place

    def _vectors(self, logits: list[int], batch: StepBatch) -> tuple[NDArray[np.float32], ...] | None:
        if batch.pooled is None:
            return None
        rows, fault = batch.pooled.rows.tolist(), self.fault
        spoiled = fault.row if fault is not None and fault.kind == "nan" else -1
        bad = [float("nan")] * len(make_vector(ROOT))
        vectors = [bad if logits[row] < 0 or row == spoiled else make_vector(logits[row]) for row in rows]
        return tuple(np.array(vector, np.float32) for vector in vectors)

    def _score(self, num_top: int) -> TokenLogprobs | None:
        fault, entries = self.fault, []
        for place, (row, cell, next_id) in enumerate(self._scored):
            entry = make_logprobs(abs(cell), next_id, self.spec.vocab_size)
            if cell < 0 or (fault is not None and fault.kind == "nan" and fault.row == row):
                entry = msgspec.structs.replace(entry, logprob=float("nan"))
            entries.append((place, num_top, entry))
        return _in_columns(entries)

    def _allowed(self, masks: TokenMasks | None) -> dict[int, set[int]]:
        """Place in the logit rows → allowed tokens."""
        if masks is None:
            return {}
        places = masks.rows.tolist()
        if places != sorted(set(places)) or len(places) != len(masks.bits):
            raise Violation(f"masks of the places {places}")
        allowed = {}
        for place, bits in zip(places, masks.bits, strict=True):
            number = int.from_bytes(bits.tobytes(), "little")
            allowed[place] = {token for token in range(self.spec.vocab_size) if number >> token & 1}
            if not allowed[place]:
                raise Violation("a mask that allows no token")
        return allowed

    def poison_in(self, pages: list[int], num_tokens: int) -> set[int]:
        """Numbers of the faults that have poisoned any of the first num_tokens tokens."""
        size = self._page_size
        places = [(pages[i // size], i % size) for i in range(num_tokens)]
        return {-cell for page, place in places if (cell := self.cells[page * size + place]) < 0}


def _spoiled(cells: list[int], nonsense: int) -> list[int]:
    return [cell ^ nonsense if cell > 0 else cell for cell in cells]


def _in_columns(entries: list[tuple[int, int, EventLogprobs]]) -> TokenLogprobs | None:
    if not entries:
        return None
    width = max(num_top for _, num_top, _ in entries)
    return TokenLogprobs(
        rows=np.array([place for place, _, _ in entries], np.int32),
        chosen=np.array([entry.logprob for _, _, entry in entries], np.float32),
        ranks=np.array([entry.rank for _, _, entry in entries], np.int32),
        top_ids=np.array([entry.top_ids[:width] for _, _, entry in entries], np.int32).reshape(len(entries), width),
        top=np.array([entry.top_logprobs[:width] for _, _, entry in entries], np.float32).reshape(len(entries), width),
    )
