"""Plants a bug: replaces a function of the engine with a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


class BrokenPlant(BaseException):
    """The planted code does not fit the engine any more. It is no Exception, so that the engine does not handle it."""


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Plant:
    """Replace owner.name by wrapper(original, *args)."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def planted(*args: Any, **options: Any) -> Any:
            try:
                return wrapper(original, *args, **options)
            except (TypeError, AttributeError, NameError) as error:
                raise BrokenPlant(str(error)) from error

        patch.setattr(owner, name, planted)

    return plant
