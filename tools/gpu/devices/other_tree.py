"""Another checkout's modules in this process, whose kernels are timed in turns with ours, over the same buffers.

Both have a package `penstock`. Ours is in sys.modules, except while code of the other one is imported or called.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LEAST_BYTES = 16 << 20


class OtherTree:
    def __init__(self, directory: Path, packages: tuple[str, ...] = ("penstock",)) -> None:
        """packages: the top packages that both trees have."""
        self.directory = directory
        self._packages = packages
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        ours = self._taken_out()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.directory))
        try:
            yield
        finally:
            sys.path.remove(str(self.directory))
            self._modules = self._taken_out()
            sys.modules.update(ours)

    def _taken_out(self) -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in self._packages]
        return {name: sys.modules.pop(name) for name in names}

    def load(self, name: str) -> Any:
        """Return the other tree's module."""
        with self.entered():
            return import_module(name)

    def calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls one of the other tree's, which may import modules."""

        def call(*arguments: Any) -> Any:
            with self.entered():
                return function(*arguments)

        return call


class SharedBuffers(TorchFunctionMode):
    """Gives the large tensors of `torch.empty` again, in the same order, after each `rewind`.

    Caches and weights are then at one address for all candidates: those who come later fill them anew. Small tensors,
    such as plans and tickets, stay each candidate's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: defaultdict[Any, list[Tensor]] = defaultdict(list)
        self.rewind()

    def rewind(self) -> None:
        self._free = {key: deque(tensors) for key, tensors in self._made.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.empty:
            return func(*args, **kwargs)
        key = str((args, sorted(kwargs.items(), key=lambda each: each[0])))
        if self._free.get(key):
            return self._free[key].popleft()
        made: Tensor = func(*args, **kwargs)
        if made.nbytes >= _LEAST_BYTES:
            self._made[key].append(made)
        return made
