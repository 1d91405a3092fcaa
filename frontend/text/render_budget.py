"""What one rendering of a chat template may use: work, which bounds its memory too, and time of the CPU."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

BYTES_PER_UNIT = 16
_EXACT_CHARACTERS = 4096
"""The bytes of longer texts are looked up: a character takes 1 to 4."""
_CONTAINER_UNITS = 8
ELEMENT_UNITS = 4
ESCAPED_UNITS = 12
"""Characters that escaping makes of one, at most."""
MAX_ARGUMENT = 10_000
"""Limit of whole numbers that operations of texts and filters take: widths, counts, precisions."""
MAX_BITS = 4096
"""Limit of a whole number that an operator makes."""


class OverBudget(Exception):
    """A rendering takes more than its budget."""


class Refused(Exception):
    """An operation is not allowed, whatever the budget. The message names the limit."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """A unit of work is a node of the template that is evaluated, or 16 bytes of a value that is made."""

    work: int
    cpu_s: float
    grows: bool = False
    """Whether more is allowed for a large input: _UNITS_PER_INPUT and _SECONDS_PER_INPUT for each unit of it."""


INLINE = RenderLimits(work=50_000, cpu_s=0.05)
"""On the event loop: about ten times what an ordinary chat takes."""
FULL = RenderLimits(work=2_000_000, cpu_s=2.0, grows=True)
"""In a thread. Two million units take about 32 MB if they are texts."""
_UNITS_PER_INPUT = 64
_SECONDS_PER_INPUT = 2e-5


class RenderBudget:
    """Counts the work of one rendering. Values are charged when they are made; inputs cost nothing."""

    def __init__(self, limits: RenderLimits, inputs: object) -> None:
        self._limits = limits
        self._inputs = inputs
        self._grows = limits.grows
        self._total = self.left = limits.work
        """Units that are left. Who takes some calls `look` if fewer than 0 are."""
        self._cpu_limit_s = limits.cpu_s
        self._cpu_start_s = time.thread_time()
        self._look_at_s = time.monotonic() + limits.cpu_s
        self._makes_containers = False
        self._sizes: dict[int, int] = {}
        self._measured: list[object] = []
        """Keeps measured containers alive: their addresses are keys of _sizes."""
        self._held: dict[int, object] = {}
        """Lists that another value may contain, by address. They must not grow: what contains them was measured."""

    def spend(self, units: int) -> None:
        """Count work before it is done. Raises OverBudget."""
        self.left -= units
        if self.left < 0 or time.monotonic() > self._look_at_s:
            self.look()

    def look(self) -> None:
        """Compare with the limits. Raises OverBudget."""
        now_s, used_s = time.monotonic(), time.thread_time() - self._cpu_start_s
        if self._grows and (self.left < 0 or used_s > self._cpu_limit_s):
            self._grows = False
            left, self.left, self._look_at_s = self.left, sys.maxsize, math.inf  # not while they are measured
            input_units = self.size(self._inputs)
            self._total += _UNITS_PER_INPUT * input_units
            self.left = left + _UNITS_PER_INPUT * input_units
            self._cpu_limit_s += _SECONDS_PER_INPUT * input_units
        if self.left < 0:
            raise OverBudget(f"it takes more than the limit of {self._total} units of work")
        if used_s > self._cpu_limit_s:
            raise OverBudget(f"it takes more than the limit of {self._cpu_limit_s:.1f} s")
        self._look_at_s = now_s + self._cpu_limit_s - used_s

    def size(self, value: object) -> int:
        """Return the units of a value written as a tree, the most that comparing, hashing or writing it can take.

        A container is measured once; what it contains is held.
        """
        if isinstance(value, str):
            return 1 + len(value) // BYTES_PER_UNIT
        if not isinstance(value, list | tuple | dict):
            return 1
        size = self._sizes.get(id(value))
        if size is None:
            self.spend(len(value))
            values = value.values() if type(value) is dict else value
            self._held.update((id(each), each) for each in values if isinstance(each, list))
            size = 1 + sum(map(self.size, values)) + (sum(map(self.size, value)) if type(value) is dict else 0)
            self._sizes[id(value)] = size
            self._measured.append(value)
        return size

    def made(self, value: Any) -> Any:
        """Count a value that was made, and return it. Raises OverBudget."""
        if isinstance(value, str):
            num_bytes = len(value)
            if num_bytes > _EXACT_CHARACTERS:
                num_bytes = sys.getsizeof(value)
            self.left -= 1 + num_bytes // BYTES_PER_UNIT
            if self.left < 0:
                self.look()
        elif isinstance(value, list | tuple | dict):
            self._makes_containers = True
            self.spend(_CONTAINER_UNITS + len(value))
            self.check_size(value)
        return value

    def hold(self, value: object) -> None:
        """Note that another value may contain this one from now on."""
        if isinstance(value, list):
            self._held[id(value)] = value

    def check_size(self, value: object) -> None:
        """Refuse a value that is small in memory and large as a tree. Raises OverBudget."""
        if self.size(value) > self._total:
            raise OverBudget(f"it makes a value of more than the limit of {self._total} units")

    def spend_on_writing(self, value: object) -> None:
        """Count what a value takes as text, before it is written. Raises OverBudget."""
        # Inputs are as small as their request.
        if self._makes_containers:
            self.spend(ESCAPED_UNITS * self.size(value))

    def change(self, values: list[Any], given: tuple[object, ...]) -> None:
        """Count a change of a list by these arguments. Raises OverBudget, and Refused unless the template made the
        list, no other value contains it, and it gets texts and numbers: so no list contains itself."""
        self.size(self._inputs)  # holds their lists
        if id(values) in self._held or not all(isinstance(value, str | int | float | None) for value in given):
            raise Refused("a template adds texts and numbers only, to its own lists that no other value contains")
        self.spend(ELEMENT_UNITS + len(values) // BYTES_PER_UNIT)
        self._sizes[id(values)] = self.size(values) + sum(map(self.size, given))
        self.check_size(values)
        self._makes_containers = True

    def metered(self, value: Any) -> Any:
        """Count the elements of what becomes a list, before there is one. Raises OverBudget."""
        if isinstance(value, str):
            self.spend(_CONTAINER_UNITS * len(value))  # each character becomes a text
        elif hasattr(value, "__len__"):
            self.spend(ELEMENT_UNITS * len(value))
        elif hasattr(value, "__iter__"):
            return self._metered(value)
        return value

    def _metered(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(ELEMENT_UNITS)
            self.hold(value)
            yield value

    def check_arguments(self, values: Iterable[object]) -> None:
        """Hold what a filter may put into lists. Raises Refused for a large number."""
        for value in values:
            self.hold(value)
            if isinstance(value, int) and abs(value) > MAX_ARGUMENT:
                raise Refused(f"an argument is {str(value)[:20]}; the limit is {MAX_ARGUMENT}")
