"""Plants a bug: replaces a function of the engine with a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]


class BrokenPlant(BaseException):
    """The planted code itself does not fit the engine any more, which finds nothing; no exception that the engine would
    take for a request's."""


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Plant:
    """Puts wrapper(original, *args) in the place of owner.name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def planted(*args: Any, **options: Any) -> Any:
            try:
                return wrapper(original, *args, **options)
            except (TypeError, AttributeError, NameError) as error:
                raise BrokenPlant(str(error)) from error

        patch.setattr(owner, name, planted)

    return plant
