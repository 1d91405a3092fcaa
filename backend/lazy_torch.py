"""torch, imported when one of its names is first used: a start that maps packed weights needs none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("torch"), name)
            setattr(self, name, value)  # found without this method from now on
            return value

    torch = _Torch()
    Tensor = Any  # in annotations; `torch.Tensor` is the class
