"""Estimates each model's memory while it is awake, as its backend plans it: weights, workspace and KV cache.

It runs in its own process: a plan imports torch, which `penstock serve` does not need afterwards, and a model's files
may end the process or take for ever. Then the model has a reason instead of a size, and another process does the rest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.process.children import module_argv, stop_with_parent
from penstock.process.native_libraries import guarded
from penstock.process.supervisor import describe_end

PROCESS_BYTES = 300_000_000
"""Memory of a backend on the CPU without weights and cache: torch, the interpreter and the grammar compiler's
tokenizer."""
_FREE_SHARE = 0.9
_MAX_REASON = 300


_MAX_ESTIMATE_S = 60
"""For one model. Until then its files are read, and small ones downloaded."""


@dataclass(frozen=True, slots=True)
class Sizes:
    free_bytes: int
    """Nine tenths of the free memory on the models' device."""
    models: tuple[int | str, ...]
    """Bytes of each model, or why its size is unknown."""


def estimate(backends: Sequence[BackendOptions]) -> Sizes:
    """Raises StartupError if the device's memory is unknown."""
    models: list[int | str] = []
    while True:
        free_bytes, estimated, end = _run(backends[len(models) :])
        models += estimated
        if len(models) < len(backends):
            is_late = end == -signal.SIGALRM
            reason = f"took longer than {_MAX_ESTIMATE_S} s" if is_late else describe_end(end)
            models.append(f"the estimate of its size {reason}")
        if len(models) == len(backends):
            return Sizes(free_bytes, tuple(models))


def _run(backends: Sequence[BackendOptions]) -> tuple[int, list[int | str], int]:
    """Return the free memory, the models up to one that ends the process, and how it ended. Raises StartupError."""
    own_pid = os.getpid()
    run = subprocess.run(
        module_argv("penstock.serve.sleeping_models.sizes"),
        input=msgspec.json.encode(list(backends), enc_hook=str),
        capture_output=True,
        preexec_fn=lambda: stop_with_parent(signal.SIGKILL, own_pid),
    )
    lines = run.stdout.splitlines()
    if not lines:
        reasons = run.stderr.decode(errors="replace").strip().splitlines() or [
            f"the estimate {describe_end(run.returncode)}"
        ]
        raise StartupError(f"the models' sizes cannot be estimated: {reasons[-1]}")
    return int(lines[0]), [msgspec.json.decode(line, type=int | str) for line in lines[1:]], run.returncode


def _plan(options: BackendOptions) -> int:
    from penstock.backend.forward_pass.plugins import find_forward_pass
    from penstock.backend.kv_cache.budget.memory import device_memory
    from penstock.backend.start.startup import describe_pass, locate_config, pass_name, pass_options, plan_memory
    from penstock.serve.model_texts import why_unusable

    settings = pass_options(options)
    if options.kv_budget == "auto" or (options.kv_budget is None and settings.device != "cpu"):
        raise StartupError("--kv-budget auto takes all memory that is free; name a size, so that models can share it")
    config_dir = locate_config(options)
    name = pass_name(options, config_dir)
    spec, settings = describe_pass(options, name, find_forward_pass(name), config_dir, settings)
    plan = plan_memory(options, spec, settings, device_memory(settings.device))
    if config_dir.joinpath(CONFIG_FILE).is_file() and Path(options.model or "").is_dir():
        reason = why_unusable(config_dir, None)
        if reason is not None:
            raise StartupError(reason)
    return plan.device_bytes + (PROCESS_BYTES if settings.device == "cpu" else 0)


def _describe(options: BackendOptions) -> int | str:
    try:
        return guarded(_plan)(options)
    except StartupError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - one model's files must not end the estimate of the others
        return f"its size cannot be estimated: {type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"


def main() -> None:
    from penstock.backend.kv_cache.budget.memory import device_memory
    from penstock.backend.start.startup import pass_options

    backends = msgspec.json.decode(
        sys.stdin.buffer.read(), type=list[BackendOptions], dec_hook=lambda of, text: of(text)
    )
    lines = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        memory = device_memory(pass_options(backends[0]).device)
    except StartupError as error:
        sys.exit(str(error))
    os.write(lines, b"%d\n" % int(_FREE_SHARE * memory.free_bytes))
    for options in backends:
        signal.alarm(_MAX_ESTIMATE_S)  # ends the process, whatever it is doing
        os.write(lines, msgspec.json.encode(_describe(options)) + b"\n")


if __name__ == "__main__":
    main()
