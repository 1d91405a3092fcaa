"""The groups in which --help shows options, in their order. A module with options says which group each belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar, get_type_hints

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TITLES = (
    "Used most",
    "Model and weights",
    "Further models",
    "Memory and scheduling",
    "Listening",
    "Access",
    "Limits of requests",
    "Failures and restarts",
    "Processes",
    "Logs and traces",
)
_GROUPS = {title: Group(title, sort_key=number) for number, title in enumerate(_TITLES)}

T = TypeVar("T")


def grouped(groups: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Put the options of a dataclass into groups. groups maps a title to names of fields, separated by spaces.

    Raises KeyError for a title that does not exist, and for a field of the class without a group.
    """
    group_of = {name: _GROUPS[title] for title, names in groups.items() for name in names.split()}

    def decorate(cls: type[T]) -> type[T]:
        hints = get_type_hints(cls, include_extras=True)
        for name in cls.__annotations__:
            hints[name] = Annotated[hints[name], Parameter(group=group_of[name])]
            cls.__annotations__[name] = hints[name]
        # Inherited annotations use names of other modules, where cyclopts would not look them up.
        cls.__init__.__annotations__ = hints
        return cls

    return decorate
