"""Calls that wait to be made: by a captured step, which holds addresses and numbers, or by a device that works late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from penstock.backend.passes.cuda.device.launcher import TensorMap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from torch import Tensor


_CONTAINERS = (tuple, list, dict)


@dataclass(frozen=True)
class Call:
    """A call whose tensors live until it is made."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> object:
        return self.function(*self.arguments, **self.keywords)

    def captured(self, host_addresses: Set[int]) -> CapturedCall:
        """Return the call as a graph has it. Raises AssertionError if it uses memory at one of host_addresses, which
        the host writes for another step before the graph runs again."""

        def to_address(value: Any) -> Any:
            tensor = value.tensor if isinstance(value, TensorMap) else value
            if not isinstance(tensor, torch.Tensor):
                return value
            assert tensor.untyped_storage().data_ptr() not in host_addresses, f"{self} uses the host's memory"
            address = Address(tensor)
            return MapAddress(address, value.columns, value.box_rows) if isinstance(value, TensorMap) else address

        return CapturedCall(self.function, *_map(to_address, (self.arguments, dict(self.keywords))))


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Change what is in tuples, lists and dicts. torch's own function for it takes longer than a small step."""
    if isinstance(value, dict):
        return dict(zip(value, _map(change, list(value.values())), strict=True))
    return type(value)([_map(change, each) if isinstance(each, _CONTAINERS) else change(each) for each in value])


class Address:
    """A tensor's place. Like an address on a GPU, it does not keep the memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self._key = tensor.data_ptr(), self._dtype, self._view

    def tensor(self) -> Tensor:
        """Raises AssertionError if the memory has been freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, f"a captured step uses memory that has been freed: {self._key}"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(self._key)


@dataclass(frozen=True)
class MapAddress:
    """A `TensorMap` of an address."""

    address: Address
    columns: int
    box_rows: int

    def tensor(self) -> TensorMap:
        return TensorMap(self.address.tensor(), self.columns, self.box_rows)


def _at_address(value: Any) -> Any:
    return value.tensor() if isinstance(value, Address | MapAddress) else value


@dataclass(frozen=True)
class CapturedCall:
    function: Callable[..., object]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self) -> object:
        arguments, keywords = _map(_at_address, (self.arguments, self.keywords))
        return self.function(*arguments, **keywords)

    def leaves(self) -> list[Any]:
        """The function and all addresses and numbers."""
        return [self.function, *tree_flatten((self.arguments, self.keywords))[0]]


@dataclass
class RecordedGraph:
    """Implements `Graph`."""

    calls: list[CapturedCall]
    work: Callable[[], None]
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call()
