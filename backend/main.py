"""The `backend` command: from options to a running engine, and back to an exit status."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.backend.buffers.options import check_shared_buffers, make_exporter, open_sharing_device
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.executor import Executor, ExecutorFailed
from penstock.backend.engine.intake import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.requests import Requests
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IHostPages, PassOptions
from penstock.backend.kv_cache.budget import CPU_BUDGET_BYTES, KvBudget, KvPlan, auto_budget, host_budget, plan_kv
from penstock.backend.kv_cache.budget_table import plan_tables
from penstock.backend.kv_cache.memory import MemoryInfo, device_memory, host_memory
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.model_card import make_card
from penstock.backend.options import BackendOptions
from penstock.backend.pass_checks import check_first_step, check_vocabulary
from penstock.backend.passes.decoder.cpu.thread_counts import configure_torch_threads
from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device, planned_device, why_no_gpu
from penstock.backend.plugins import find_forward_pass
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.structured_output.grammar_compiler import GrammarCompiler
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.rendezvous import CannotListen, check_free
from penstock.shm.memory.board import BackendBoard
from penstock.shm.process.logs import set_up_logging
from penstock.shm.process.options import fail, format_size, make_app

if TYPE_CHECKING:
    from types import FrameType

    from penstock.backend.forward_pass import IBatchedForwardPass, PassSpec

logger = logging.getLogger("penstock.backend")

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
_DRAIN_TIMEOUT_S = 30.0

app = make_app("backend", "Runs a model: owns the device and serves any number of frontends on this machine.")


@app.default
def run(*, options: BackendOptions = BackendOptions()) -> None:  # noqa: B008 - frozen; cyclopts reads the defaults from it
    configure_torch_threads()
    log = set_up_logging(options.log_level, as_json=options.log_json)
    try:
        serve(options)
    except (StartupError, CannotListen) as error:
        log.close()
        fail("backend", str(error))
    except ExecutorFailed:
        logger.critical("the backend ends, to be restarted", exc_info=True)
        log.close()
        os._exit(1)  # the device's thread may never return
    finally:
        log.close()


def main() -> None:
    app()


def serve(options: BackendOptions) -> None:
    """Runs until a signal and returns after draining. Raises StartupError or CannotListen when it cannot start."""
    started_s = time.monotonic()
    options.check()
    pass_class = find_forward_pass(options.forward_pass)
    settings = pass_options(options)
    check_shared_buffers(options.shared_buffers, settings.device)
    if not options.dry_run:
        check_free(options.socket)
    config_dir = locate_config(options)
    spec = pass_class.describe(config_dir, settings)
    # A plan that is only printed may be for a GPU that is elsewhere; auto alone has to ask it.
    is_asked = not options.dry_run or not isinstance(options.kv_budget, int)
    memory = device_memory(settings.device) if is_asked else MemoryInfo(0, 0, settings.device)
    plan = plan_cache(options, spec, settings.device, memory)
    if options.dry_run:
        Console().print(plan_tables(plan, settings.host_kv_bytes))
        return
    check_memory(plan, memory, settings.device)
    check_host_memory(settings.host_kv_bytes, host_memory())
    logger.info(plan.describe())
    model_dir = locate_model(options, config_dir)  # now that the plan is known to be possible
    numerics = f"{options.forward_pass} {options.dtype} {options.deterministic}"
    card = make_card(options.model_id(), model_dir, spec, plan, options.max_waiting, numerics)
    check_vocabulary(spec, model_dir)
    executor = Executor(options.batch_channel_capacity)
    forward_pass = _load(settings, pass_class, model_dir, spec, plan, executor)
    device = open_sharing_device(settings.device)
    exporter = make_exporter(options.shared_buffers, options.shared_buffer_budget, forward_pass, device)
    board = BackendBoard.create()
    board.pid = os.getpid()
    board.pages_total = plan.num_pages
    board.max_waiting = options.max_waiting
    link = BackendLink(options.socket, card, board, exporter=exporter)
    num_host_pages = forward_pass.num_host_pages if isinstance(forward_pass, IHostPages) else 0
    pool = PagePool(plan.num_pages, num_host_pages)
    scheduler = Scheduler(
        pool,
        plan.page_size_tokens,
        settings.max_running,
        settings.max_batch_tokens,
        num_plans_ahead=options.batch_channel_capacity,
    )
    limits = EngineLimits(
        card.vocab_size,
        plan.max_context_tokens,
        options.max_waiting,
        max_open=options.max_waiting + 16 * options.max_running,
        priority_step_s=options.priority_step_s,
    )
    tokenizer_json = model_dir / "tokenizer.json"
    is_readable = tokenizer_json.is_file()
    compiler = GrammarCompiler(tokenizer_json, card.vocab_size, card.eos_token_ids) if is_readable else None
    engine = Engine(
        link,
        executor,
        scheduler,
        BatchBuilder(options.max_running, plan.max_pages_per_sequence),
        Requests.make(
            link, scheduler, board, limits, grammar_queue=GrammarQueue(compiler, executor.wake, options.max_waiting)
        ),
        board,
    )
    _drain_on_signals(engine)
    # What start-up made lives as long as the process: the collector need not walk it in the step loop.
    gc.collect()
    gc.freeze()
    if options.gpu == "auto" and settings.device == "cpu":
        logger.info("on the CPU: %s", why_no_gpu())
    logger.info("ready: %s on %s after %.1f s", card.model_id, options.socket, time.monotonic() - started_s)
    try:
        engine.run()
    finally:
        link.close()
        if compiler is not None:
            compiler.close()
        executor.close()
    logger.info("drained after %d steps", board.steps)


def check_memory(plan: KvPlan, memory: MemoryInfo, device: str = "cpu") -> None:
    """Raises StartupError for more than there is; on the CPU it warns of more than is free, which others may yet give
    back. A GPU gives only what is free."""
    wanted = (
        f"a KV cache of {format_size(plan.num_bytes)}, weights of {format_size(plan.weight_bytes)} and a workspace of "
        f"{format_size(plan.workspace_bytes)}"
    )
    free = f"the {format_size(memory.free_bytes)} that are free on {memory.name}"
    if device != "cpu" and plan.device_bytes > memory.free_bytes:
        raise StartupError(f"{wanted} are more than {free}: lower --kv-budget")
    if plan.device_bytes > memory.total_bytes:
        raise StartupError(
            f"{wanted} are more than the {format_size(memory.total_bytes)} of {memory.name}: lower --kv-budget"
        )
    if plan.device_bytes > memory.free_bytes:
        logger.warning("%s are more than %s: lower --kv-budget if memory runs short", wanted, free)


def check_host_memory(host_kv_bytes: int, memory: MemoryInfo) -> None:
    """Raises StartupError for more than is free: what is page-locked is not swapped out for anyone."""
    if host_kv_bytes > memory.free_bytes:
        raise StartupError(
            f"--host-kv-budget is {format_size(host_kv_bytes)}; {format_size(memory.free_bytes)} are free on "
            f"{memory.name}: lower --host-kv-budget"
        )


def _load(
    settings: PassOptions,
    pass_class: type[IBatchedForwardPass],
    model_dir: Path,
    spec: PassSpec,
    plan: KvPlan,
    executor: Executor,
) -> IBatchedForwardPass:
    """Loads weights and allocates the KV cache on the executor's thread, which alone calls the pass from then on."""

    def load() -> IBatchedForwardPass:
        forward_pass = pass_class.load(model_dir, settings)
        try:
            forward_pass.create_cache(plan.num_pages, plan.page_size_tokens, plan.kv_dtype)
        except (MemoryError, OSError, RuntimeError) as error:  # torch says it with a RuntimeError
            raise StartupError(
                f"the KV cache of {format_size(plan.num_bytes)} cannot be allocated: lower --kv-budget"
            ) from error
        check_first_step(forward_pass, spec)
        return forward_pass

    return executor.start(load)


def pass_options(options: BackendOptions) -> PassOptions:
    """What the forward pass is told. Raises StartupError for a device that cannot be named, for steps too small, and
    for host memory beside the CPU's."""
    device = planned_device(options.gpu) if options.dry_run else choose_device(options.gpu)
    return PassOptions(
        device,
        options.dtype,
        options.max_running,
        options.step_tokens(device),
        options.max_context,
        options.deterministic,
        host_kv_bytes=host_budget(options.host_kv_budget, device, host_memory()),
    )


def plan_cache(options: BackendOptions, spec: PassSpec, device: str, memory: MemoryInfo) -> KvPlan:
    """Raises StartupError where the budget cannot hold what is asked."""
    wanted = options.kv_budget
    if wanted is None:
        wanted = CPU_BUDGET_BYTES if device == "cpu" else "auto"
    return plan_kv(
        spec,
        budget=auto_budget(spec, memory) if wanted == "auto" else KvBudget(wanted),
        kv_dtype=options.kv_dtype,
        page_size_tokens=options.page_size,
        max_context_tokens=options.max_context,
        max_running=options.max_running,
    )


def locate_config(options: BackendOptions) -> Path:
    """A directory with the checkpoint's config.json; nothing else of a hub model is downloaded. Raises StartupError."""
    return DEMO_MODEL_DIR if options.model is None else resolve_config(options.model, options.revision)


def locate_model(options: BackendOptions, config_dir: Path | None = None) -> Path:
    """The checkpoint's directory; a hub model is downloaded first, of config_dir's commit. Raises StartupError."""
    return DEMO_MODEL_DIR if options.model is None else resolve_model(options.model, options.revision, config_dir)


def _drain_on_signals(engine: Engine) -> None:
    """The first SIGTERM or SIGINT lets running requests end, the second does not."""
    timeouts_s = [0.0, _DRAIN_TIMEOUT_S]

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        engine.drain(timeouts_s.pop() if timeouts_s else 0.0)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


if __name__ == "__main__":
    main()
