"""Estimates each model's memory while it is awake, as its backend plans it: weights, workspace and KV cache.

It runs in its own process, because a plan imports torch, which `penstock serve` does not need afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.process.supervisor import module_argv

if TYPE_CHECKING:
    from collections.abc import Sequence

PROCESS_BYTES = 300_000_000
"""Memory of a backend on the CPU without weights and cache: torch, the interpreter and the grammar compiler's
tokenizer."""
_FREE_SHARE = 0.9


class Sizes(msgspec.Struct, frozen=True):
    free_bytes: int
    """Nine tenths of the free memory on the models' device."""
    models: tuple[int | str, ...]
    """Bytes of each model, or why its size is unknown."""


def estimate(backends: Sequence[BackendOptions]) -> Sizes:
    """Raises StartupError if the device's memory is unknown."""
    encoded = msgspec.json.encode(list(backends), enc_hook=str)
    run = subprocess.run(module_argv("penstock.serve.sleeping_models.sizes"), input=encoded, capture_output=True)
    if run.returncode:
        lines = run.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        raise StartupError(f"the models' sizes cannot be estimated: {lines[-1]}")
    return msgspec.json.decode(run.stdout, type=Sizes)


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


def main() -> None:
    from penstock.backend.kv_cache.budget.memory import device_memory
    from penstock.backend.start.startup import pass_options

    backends = msgspec.json.decode(
        sys.stdin.buffer.read(), type=list[BackendOptions], dec_hook=lambda of, text: of(text)
    )
    models: list[int | str] = []
    for options in backends:
        try:
            models.append(_plan(options))
        except StartupError as error:
            models.append(str(error))
    try:
        memory = device_memory(pass_options(backends[0]).device)
    except StartupError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(Sizes(int(_FREE_SHARE * memory.free_bytes), tuple(models))))


if __name__ == "__main__":
    main()
