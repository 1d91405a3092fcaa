"""Loads models as `backend` does before it serves, each in a child of its own that can be killed.

    python -m penstock.tools.chaos.bad_models.loader

Each line of its standard input is a path, and perhaps a tab and the directory of an adapter; it answers with a line of
JSON (`Verdict`). It imports everything once, so a child costs a fork.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import device_memory
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cpu.library.thread_counts import configure_threads
from penstock.backend.start.lora_modules import announce, check_unchanged
from penstock.backend.start.model_card import ModelNames, make_card
from penstock.backend.start.paging import create_cache
from penstock.backend.start.pass_checks import check_first_step, check_vocabulary
from penstock.backend.start.startup import (
    check_memory,
    describe_pass,
    locate_config,
    locate_model,
    named_adapters,
    pass_name,
    pass_options,
    plan_memory,
)
from penstock.process.children import stop_with_parent
from penstock.serve.model_texts import why_unusable

CPU_LIMIT_S = 20
TIME_LIMIT_S = 120.0
"""By the clock, for a load that waits; machines that run this are busy."""
MAX_ADDRESS_BYTES = 2 << 30
"""Address space that a load may take besides what is mapped before."""
_KV_BYTES = 1 << 20


class Verdict(msgspec.Struct, frozen=True):
    """What came of one load."""

    status: int
    """0: it runs; 1: it was refused; else it failed, by a signal if negative."""
    told: str
    """The refusal, or what a failed load wrote."""
    took_s: float
    peak_bytes: int = 0
    """Growth of the resident memory, if the load ended by itself."""


def load(model: Path, adapter: Path | None) -> None:
    """Do what `backend` does before it serves, and the check of `penstock serve`. Raises StartupError."""
    options = BackendOptions(
        model=str(model), gpu="none", kv_budget=_KV_BYTES, lora_modules=(f"tuned={adapter}",) if adapter else ()
    )
    options.check()
    settings = pass_options(options)
    config_dir = locate_config(options)
    if (reason := why_unusable(config_dir, None)) is not None:
        raise StartupError(reason)
    name = pass_name(options, config_dir)
    pass_class = find_forward_pass(name)
    spec, settings = describe_pass(options, name, pass_class, config_dir, settings)
    plan = plan_memory(options, spec, settings, memory := device_memory(settings.device))
    check_memory(plan, memory, settings.device)
    model_dir = locate_model(options, config_dir)
    names = ModelNames(options.model_id(), options.aliases(), announce(named_adapters(options), spec.adapter_ranks))
    card = make_card(names, model_dir, spec, plan, options.max_waiting, options.numerics(name))
    check_vocabulary(spec, model_dir)
    forward_pass = pass_class.load(model_dir, settings)
    if isinstance(plan, KvPlan):
        create_cache(forward_pass, plan.num_pages, plan.page_size_tokens, plan.kv_dtype, plan.num_checkpoints)
    check_first_step(forward_pass, spec)
    check_unchanged(named_adapters(options), card.adapters)


def _resident_bytes(key: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10


def _load_in_child(model: Path, adapter: Path | None, answer_fd: int, errors_fd: int) -> None:
    """The child's whole life. What it writes to standard error is kept."""
    stop_with_parent(signal.SIGKILL)
    os.setpgid(0, 0)  # a compiler that it starts ends with it
    os.dup2(errors_fd, 2)
    before_bytes, status, told = _resident_bytes("VmRSS:"), 0, ""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (limit := _resident_bytes("VmSize:") + MAX_ADDRESS_BYTES, limit))
    try:
        load(model, adapter)
    except StartupError as error:
        status, told = 1, str(error)
    verdict = Verdict(status, told, 0.0, _resident_bytes("VmHWM:") - before_bytes)
    os.write(answer_fd, msgspec.json.encode(verdict))


def load_apart(model: Path, adapter: Path | None) -> Verdict:
    """Load in a child, which is killed when it takes too long."""
    started_s = time.monotonic()
    answer_read, answer_write = os.pipe()
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if not pid:
            try:
                _load_in_child(model, adapter, answer_write, errors.fileno())
            except BaseException:  # noqa: BLE001 - a library's panic is no Exception; the status tells of it
                os.write(2, traceback.format_exc().encode(errors="replace"))
                os._exit(2)
            os._exit(0)
        os.close(answer_write)
        pid_fd = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(pid_fd, select.POLLIN)
        is_late = not poller.poll(1000 * TIME_LIMIT_S)
        if is_late:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pid_fd)
        answer = os.read(answer_read, 1 << 16)
        os.close(answer_read)
        errors.seek(0)
        written = errors.read().decode(errors="replace")
    took_s = time.monotonic() - started_s
    if is_late:
        return Verdict(-signal.SIGKILL, f"it had not ended after {TIME_LIMIT_S:g} s", took_s)
    if status or not answer or "Traceback" in written or "panicked" in written:
        return Verdict(status or 2, written.strip()[-2000:], took_s)
    return msgspec.structs.replace(msgspec.json.decode(answer, type=Verdict), took_s=took_s)


def main() -> None:
    configure_threads()
    for name in ("decoder", "encoder"):
        find_forward_pass(name)
    print("ready", flush=True)
    for line in sys.stdin:
        model, _, adapter = line.rstrip("\n").partition("\t")
        verdict = load_apart(Path(model), Path(adapter) if adapter else None)
        print(msgspec.json.encode(verdict).decode(), flush=True)


if __name__ == "__main__":
    main()
