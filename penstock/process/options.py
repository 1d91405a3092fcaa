"""Declares options for all commands, their groups in --help, and the notation of sizes."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Dict, Env
from cyclopts.help.formatters import DefaultFormatter

from penstock.process.failure import USAGE_STATUS, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from cyclopts import ArgumentCollection, Token
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

T = TypeVar("T")

_GROUP_TITLES = (
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
_GROUPS = {title: Group(title, sort_key=number) for number, title in enumerate(_GROUP_TITLES)}
"""The groups in which --help shows options, in their order."""
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B?)", re.IGNORECASE)
_CANONICAL_UNIT = {unit.lower(): unit for unit in _UNITS}


def parse_size(text: str) -> int:
    """Bytes from "6GB" (powers of 1000), "512MiB" (powers of 1024) or a plain number. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    unit = _CANONICAL_UNIT.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f'"{text}" is not a size; write 6GB, 512MiB or a number of bytes')
    return int(float(match[1]) * _UNITS[unit])


def format_size(num_bytes: int) -> str:
    """ "6.00 GB" for 6_000_000_000."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def shown_size(num_bytes: int) -> str:
    """The size as an option takes it, exactly: "2MiB" for 2 << 20, "256MB" for 256_000_000."""
    units = sorted(_UNITS.items(), key=lambda item: item[1])
    exact = [(num_bytes // size, unit) for unit, size in units if num_bytes % size == 0 and unit != "B"]
    return "0" if num_bytes == 0 else "{}{}".format(*exact[-1])


def _convert_size(_type: Any, tokens: Sequence[Token]) -> int:
    return parse_size(tokens[0].value)


OptionalByteSize = Annotated[int | None, Parameter(converter=_convert_size, metavar="SIZE")]
ByteSize = Annotated[int, Parameter(converter=_convert_size, show_default=shown_size, metavar="SIZE")]
"""An option in bytes, such as 6GB or 512MiB."""

_SHORT_FLAG = "-h"


class _ShortHelp(DefaultFormatter):
    """Shows panels as cyclopts does; with -h only the first sentences of one panel, and not the further ones."""

    def __init__(self, shown: str, further: Collection[str]) -> None:
        super().__init__()
        self._shown = shown
        self._further = further

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if _SHORT_FLAG not in sys.argv or panel.title not in (self._shown, *self._further):
            super().__call__(console, options, panel)
        elif panel.title == self._shown:
            self._show_briefly(console, panel)

    def _show_briefly(self, console: Console, panel: HelpPanel) -> None:
        from rich.table import Table

        # The negative of a flag, and further names, are in the long help.
        rows = [(f"{entry.positive_names[0]} {entry.metavar or ''}", entry.description) for entry in panel.entries]
        table = Table(box=None, show_header=False, pad_edge=False, expand=True)
        table.add_column(no_wrap=True, min_width=max(len(names) for names, _ in rows))
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for names, description in sorted(rows, key=lambda row: not row[0].startswith("--model ")):
            table.add_row(names, _first_sentence(description))
        console.print(f"{self._shown}:")
        console.print(table, markup=False)
        console.print("--help shows all options.")


def _first_sentence(description: Any) -> str:
    text = " ".join(description.primary_renderable.markup.split())
    return str(text.partition(". ")[0].removesuffix("."))


ENV_PREFIX = "PENSTOCK_"
_CONFIG_OPTION = "--config"
_OTHER_VARIABLES = {"PENSTOCK_CUBINS", "PENSTOCK_FRONTEND_WORKER"}


def _read_config_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Set the options that neither the command line nor the environment sets."""
    found = [argument for argument in arguments if argument.name == _CONFIG_OPTION and argument.tokens]
    for path in [argument.tokens[-1].value for argument in found]:
        file = Path(path).expanduser().absolute()
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CycloptsError(msg=f"{_CONFIG_OPTION} {path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CycloptsError(msg=f"{_CONFIG_OPTION} {path} is not TOML: {error}") from None
        Dict(content, source=str(file), use_commands_as_keys=False)(app, commands, arguments)


NO_ENVIRONMENT = ()
"""The config of a command whose options no variable sets: --model and --json mean something else in each."""


def unknown_variables(apps: Iterable[App]) -> list[str]:
    """Return a line about each environment variable PENSTOCK_… that none of these commands reads."""
    given = {name for name in os.environ if name.startswith(ENV_PREFIX)} - _OTHER_VARIABLES
    if not given:
        return []
    known: set[str] = set()
    for app in apps:
        for argument in app.assemble_argument_collection() if app.default_command else ():
            own = argument.parameter.env_var
            known.update((own,) if isinstance(own, str) else own or ())
            if app.config != NO_ENVIRONMENT:
                known.update(_variable(name) for name in argument.names if name.startswith("--"))
    lines = []
    for name in sorted(given - known):
        close = difflib.get_close_matches(name, known, n=1)
        lines.append(f"{name} in the environment is no option{f'; did you mean {close[0]}?' if close else ''}")
    return lines


def _variable(option: str) -> str:
    return ENV_PREFIX + option.lstrip("-").upper().replace("-", "_")


def from_environment(option: str) -> Parameter:
    """Let this one variable set an option of a command with NO_ENVIRONMENT: PENSTOCK_URL means the same in all."""
    return Parameter(env_var=_variable(option))


def make_app(name: str, help_text: str, explain: Callable[[CycloptsError], str | None] | None = None) -> App:
    """A command whose options can also be set by environment variables PENSTOCK_<OPTION>, and in the TOML file of its
    option --config, if it has one; --version prints ours.

    An invalid value ends the process with one line on standard error and exit status 2. explain may return a better
    message for an error. -h shows the options that are used most, --help all.
    """

    def fail_in_one_line(error: CycloptsError) -> NoReturn:
        explained = None if explain is None else explain(error)
        fail(name, explained or " ".join(str(error).split()), USAGE_STATUS)

    def describe_version() -> str:
        import importlib.metadata  # a tenth of a command's imports

        return f"{name} {importlib.metadata.version('penstock')}"

    return App(
        name=name,
        help=help_text,
        help_formatter=_ShortHelp(_GROUP_TITLES[0], _GROUP_TITLES[1:]),
        config=(Env(ENV_PREFIX, command=False), _read_config_file),
        version=describe_version,
        version_flags=["--version"],
        error_formatter=fail_in_one_line,
    )


def to_argv(options: Any) -> list[str]:
    """The command line for these options, with which a supervisor starts a child.

    options is a dataclass whose fields are options; None and empty tuples are omitted.
    """
    argv: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        name = "--" + field.name.replace("_", "-")
        if value is None or value == ():
            continue
        if isinstance(value, bool):
            argv.append(name if value else f"--no-{name[2:]}")
        else:
            for item in value if isinstance(value, tuple) else (value,):
                argv += [name, str(item)]
    return argv


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
