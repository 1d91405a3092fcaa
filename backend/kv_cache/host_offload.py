"""Pages that were moved to the host's memory: where which content lies, and what is to be copied there.

The memory itself belongs to the forward pass, see `IHostPages`; steps bring pages back. A place keeps its content when
that is copied back, until it is needed for something else.
"""

from __future__ import annotations

from collections import OrderedDict


class HostOffload:
    """A fixed number of places, which may be 0. Owned by the page pool; not shared between threads."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._place_of_key: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._salt_of_key: dict[bytes, bytes] = {}
        self._read: set[bytes] = set()
        """Keys of the places from which the step that is being planned copies."""
        self._saves: dict[int, int] = {}
        """Place → the page that is to be copied there before anything writes to it."""
        self.num_saved = 0
        self.num_restored = 0

    @property
    def num_used(self) -> int:
        return len(self._place_of_key)

    def contains(self, key: bytes) -> bool:
        return key in self._place_of_key

    def save(self, page: int, key: bytes, salt: bytes) -> None:
        """The page of this key is about to be used for something else: its content is kept, where there is a place
        that the step that is being planned does not use."""
        if key in self._place_of_key:
            self._place_of_key.move_to_end(key)
            return
        if (place := self._free_host_page()) is not None:
            self._place_of_key[key] = place
            self._salt_of_key[key] = salt
            self._saves[place] = page
            self.num_saved += 1

    def _free_host_page(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._place_of_key), None)
        if oldest is None or oldest in self._read:  # then the others too were used by the step that is being planned
            return None
        return self._forget(oldest)

    def _forget(self, key: bytes) -> int:
        del self._salt_of_key[key]
        return self._place_of_key.pop(key)

    def restore(self, key: bytes) -> int:
        """The place with this content, for the step that is being planned. Raises KeyError."""
        self._place_of_key.move_to_end(key)
        self._read.add(key)
        self.num_restored += 1
        return self._place_of_key[key]

    def end_plan(self) -> None:
        """The step is planned: what later ones save comes after what it reads."""
        self._read.clear()

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, place) of what is to be copied before the next step is launched. To be called only if it will be."""
        saves = tuple((page, place) for place, page in self._saves.items())
        self._saves.clear()
        return saves

    def invalidate_tenant(self, salt: bytes) -> None:
        """What a tenant's places hold is not to be trusted."""
        self._free += [self._forget(key) for key, its_salt in list(self._salt_of_key.items()) if its_salt == salt]

    def discard(self, keys: list[bytes]) -> None:
        """Nobody will read these again."""
        self._free += [self._forget(key) for key in keys if key in self._place_of_key]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each place is free or has one key, and no step is being planned."""
        used = list(self._place_of_key.values())
        if self._salt_of_key.keys() != self._place_of_key.keys():
            raise RuntimeError("a place's content has no tenant, or a tenant's has no place")
        if len(set(used) | set(self._free)) != self._num_places or len(used) + len(self._free) != self._num_places:
            raise RuntimeError(f"{len(used)} used and {len(self._free)} free of {self._num_places} places on the host")
        if self._read:
            raise RuntimeError("places are read by a step that is planned already")
