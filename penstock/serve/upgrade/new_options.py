"""The options of a backend with some of them changed, as an operator types them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import App, CycloptsError

from penstock.backend.options import BackendOptions
from penstock.process.options import to_argv
from penstock.serve.foreign_options import explain

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIXED = {
    "socket": "frontends know the path",
    "dry-run": "it starts no backend",
    "heartbeat-fd": "the server sets it",
    "turn-fd": "the server sets it",
    "recorder-fd": "the server sets it",
    "weights-fds": "the server sets it",
    "persist-kv-fd": "the server sets it",
    "hand-over-fds": "the server sets it",
    "adapters-fd": "the server sets it",
    "beside-another": "the server sets it",
}
MAX_TOKENS = 256


class BadOptions(Exception):
    """The message names the option and is one line."""


def changed(options: BackendOptions, words: Sequence[str]) -> BackendOptions:
    """Return the options changed by words, such as ["--max-running", "32"]. Raises BadOptions."""
    if len(words) > MAX_TOKENS:
        raise BadOptions(f"{len(words)} words; the limit is {MAX_TOKENS}")
    given = {_name(word) for word in words if word.startswith("--")}
    for name in sorted(given & _FIXED.keys()):
        raise BadOptions(f"--{name} cannot be changed: {_FIXED[name]}")
    kept: list[str] = []
    is_kept = False
    for word in to_argv(options):
        if word.startswith("--"):
            is_kept = _name(word) not in given
        if is_kept:
            kept.append(word)
    app = App(name="penstock upgrade", help_flags=[], version_flags=[])
    app.default(_take)
    try:
        command, arguments, _ = app.parse_args([*kept, *words], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise BadOptions(" ".join((explain(error) or str(error)).split())) from None
    taken: BackendOptions = command(*arguments.args, **arguments.kwargs)
    return taken


def _take(*, options: BackendOptions = BackendOptions()) -> BackendOptions:  # noqa: B008 - frozen
    return options


def _name(word: str) -> str:
    """The option's name. For --no-deterministic and --deterministic=true it is "deterministic"."""
    return word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")
