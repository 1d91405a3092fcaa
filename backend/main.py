"""The `backend` command: reads the options, starts the engine and returns an exit status."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import replace

from penstock.backend.passes.cpu.library.thread_counts import configure_threads
from penstock.process.garbage_collection import pause_collection, resume_collection, spare_imports

if __name__ == "__main__":  # before numpy is imported
    pause_collection()
    configure_threads()

from pathlib import Path
from types import FrameType

from penstock.backend.buffers import check_shared_buffers, make_exporter, open_sharing_device
from penstock.backend.engine.interfaces import ISequenceScheduler
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.pictures.desk import make_picture_desk
from penstock.backend.engine.pictures.device_turns import DeviceTurns
from penstock.backend.engine.pictures.tower_thread import TowerThread, start_tower
from penstock.backend.engine.recorder import Recorder
from penstock.backend.engine.requests.adapters import AdapterSet
from penstock.backend.engine.requests.handling import RequestHandling
from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.requests.vector_delivery import VectorCache
from penstock.backend.engine.steps.executor import SWITCH_INTERVAL_S, Executor, ExecutorFailed
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.errors import NO_ROOM_STATUS, NoRoomBeside, StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions, PassSpec
from penstock.backend.forward_pass.extensions import ISharedWeights
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import MemoryInfo, device_memory, host_memory
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cuda.device.device_choice import why_no_gpu
from penstock.backend.passes.cuda.device.kernel_choices import adopted_choices
from penstock.backend.passes.shared_weights.watch import WeightWatch
from penstock.backend.scheduling.restart_grace import grace_at_start
from penstock.backend.start.draft_model import DraftChoice, make_desk, plan_with_draft
from penstock.backend.start.lora_modules import announce, check_unchanged
from penstock.backend.start.model_card import ModelNames, make_card
from penstock.backend.start.paging import (
    count_host_pages,
    create_board,
    create_cache,
    create_kv_events,
    create_scheduler,
    leave_on_signal,
    open_pages,
)
from penstock.backend.start.pass_checks import check_first_step, check_vocabulary
from penstock.backend.start.runtime_adapters import RuntimeAdapters, adapter_set, make_adapter_table, with_kept_adapters
from penstock.backend.start.standby import import_and_wait
from penstock.backend.start.startup import (
    AUTO,
    check_host_memory,
    check_memory,
    check_room_beside,
    describe_pass,
    find_shared_bytes,
    locate_config,
    locate_model,
    named_adapters,
    pass_name,
    pass_options,
)
from penstock.backend.structured_output.compile_pool import CompilePool
from penstock.backend.structured_output.compiler_process import CompileLimits
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.process.admission import HARD_BOUND
from penstock.process.failure import fail
from penstock.process.heartbeat import Heartbeat
from penstock.process.logs import set_up_logging
from penstock.process.options import format_size, make_app
from penstock.process.service_manager import find_service_manager
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.listening_address import CannotListen, check_free
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.region import RegionError
from penstock.shm.memory.ring import RingWriter, create_fd
from penstock.shm.messages import PROTOCOL_VERSION, ModelCard
from penstock.shm.recording.events import BackendStarted
from penstock.shm.recording.records import FORMAT_VERSION

logger = logging.getLogger("penstock.backend")

_DECODER = "decoder"
_DRAIN_TIMEOUT_S = 30.0

app = make_app("backend", "Runs a model: owns the device and serves any number of frontends on this machine.")


@app.default
def run(*, options: BackendOptions = BackendOptions()) -> None:  # noqa: B008 - frozen; cyclopts reads the defaults from it
    configure_threads()
    if options.turn_fd is not None:
        forward_pass = _DECODER if options.forward_pass == AUTO else options.forward_pass
        if not import_and_wait(forward_pass, options.turn_fd):
            return
    log = set_up_logging(options.log_level, as_json=options.log_json)
    try:
        serve(options)
    except NoRoomBeside as error:
        logger.info("%s", error)
        log.close()
        sys.exit(NO_ROOM_STATUS)
    except (StartupError, CannotListen) as error:
        log.close()
        if options.heartbeat_fd is not None:
            Heartbeat(options.heartbeat_fd).leave_words(str(error))
        fail("backend", str(error))
    except ExecutorFailed:
        logger.critical("the backend exits, to be restarted", exc_info=True)
        log.close()
        os._exit(1)  # the device's thread may hang
    finally:
        log.close()


def main() -> None:
    pause_collection()
    app()


def serve(options: BackendOptions) -> None:
    """Serve until a signal, drain and return. Raises StartupError or CannotListen if the backend cannot start."""
    started_s = time.monotonic()
    options, rules, settings = _prepare(options)
    config_dir = locate_config(options)
    pass_class = find_forward_pass(name := pass_name(options, config_dir))
    spare_imports()
    spec, settings = describe_pass(options, name, pass_class, config_dir, settings, len(rules.kept) if rules else 0)
    memory = _measure_memory(options, spec, pass_class, config_dir, settings)
    plan, draft = plan_with_draft(options, spec, settings, memory)
    if options.dry_run:
        from penstock.backend.kv_cache.budget.budget_table import print_plan  # and rich, which no server needs

        print_plan(plan, settings.host_kv_bytes)
        return
    _check_all_memory(options, plan, memory, settings)
    model_dir = locate_model(options, config_dir)  # downloads only what can be served
    numerics = options.numerics(name) | adopted_choices(settings.device)[0].numerics()
    card = make_card(_names(options, spec), model_dir, spec, plan, options.max_waiting, numerics)
    check_vocabulary(spec, model_dir)
    executor = Executor(options.batch_channel_capacity, turns := DeviceTurns())
    forward_pass, token_step_s = _load_pass(executor, pass_class, model_dir, settings, spec, plan, options, draft)
    check_unchanged(named_adapters(options), card.adapters)
    store = open_pages(options, forward_pass, plan, model_dir, card)
    device = open_sharing_device(settings.device)
    exporter = make_exporter(options.shared_buffers, options.shared_buffer_budget, forward_pass, device)
    board = create_board(plan, options.max_waiting, token_step_s, count_host_pages(plan, forward_pass))
    link = BackendLink(options.socket, card, board, exporter=exporter)
    compiler = _create_compiler(model_dir, card, options.grammar_timeout_s) if spec.generates else None
    grammar_queue = GrammarQueue(compiler, executor.wake, options.max_waiting)
    kv_events, step_timing = create_kv_events(options, settings, plan), StepTiming()
    scheduler, builder = create_scheduler(plan, settings, forward_pass, options, board, kv_events, store, step_timing)
    tower = start_tower(forward_pass, turns, executor.wake)
    recorder = _create_recorder(options, card, settings, plan, forward_pass)
    cache = VectorCache(options.embedding_cache) if options.embedding_cache and spec.pooled else None
    adapters = adapter_set(card, forward_pass, rules)
    requests = RequestHandling.make(
        link, scheduler, board, _engine_limits(options, card, spec, adapters, tower),
        grammar_queue=grammar_queue, vector_cache=cache, recorder=recorder, step_timing=step_timing,
        restart_grace=grace_at_start(beside_another=options.beside_another),
        make_adapters=lambda table: make_adapter_table(link, table, adapters, forward_pass, executor, rules),
        make_pictures=lambda delivery: make_picture_desk(tower, spec, scheduler, delivery),
    )  # fmt: skip
    manager = find_service_manager("backend")
    heartbeat = manager if options.heartbeat_fd is None else Heartbeat(options.heartbeat_fd)
    engine = Engine(link, executor, scheduler, builder, requests, board, heartbeat=heartbeat, kv_events=kv_events)
    engine.draft_desk = desk = make_desk(draft, options, forward_pass, plan, executor, scheduler, step_timing)
    _watch_weights(forward_pass, settings, executor, board)
    _act_on_signals(engine, scheduler)
    resume_collection()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _log_ready(options, settings, card, time.monotonic() - started_s)
    if manager is not None:
        manager.ready()
    try:
        engine.run()
    finally:
        for part in (link, compiler, tower, desk, executor):
            if part is not None:
                part.close()
    logger.info("drained after %d steps", board.steps)


def _prepare(options: BackendOptions) -> tuple[BackendOptions, RuntimeAdapters | None, PassOptions]:
    """Check the options, and add what the last process leaves. Raises StartupError, CannotListen."""
    options.check()
    options, rules = with_kept_adapters(options)
    settings = pass_options(options)
    check_shared_buffers(options.shared_buffers, settings.device)
    if not options.dry_run:
        check_free(options.socket)
    return options, rules, settings


def _measure_memory(
    options: BackendOptions,
    spec: PassSpec,
    pass_class: type[IBatchedForwardPass],
    config_dir: Path,
    settings: PassOptions,
) -> MemoryInfo:
    """Return the free memory for the plan. Shared weights that the pass will only map count as free: the plan contains
    them."""
    # A dry run may plan for a GPU that this machine does not have. Only an automatic budget asks the device.
    asks_device = not options.dry_run or (bool(spec.kv_bytes_per_token) and not isinstance(options.kv_budget, int))
    shared_bytes = find_shared_bytes(pass_class, config_dir, settings)
    memory = device_memory(settings.device) if asks_device else MemoryInfo(0, 0, settings.device)
    return replace(memory, free_bytes=memory.free_bytes + shared_bytes)


def _names(options: BackendOptions, spec: PassSpec) -> ModelNames:
    return ModelNames(options.model_id(), options.aliases(), announce(named_adapters(options), spec.adapter_ranks))


def _log_ready(options: BackendOptions, settings: PassOptions, card: ModelCard, seconds: float) -> None:
    if options.gpu == "auto" and settings.device == "cpu":
        logger.info("on the CPU: %s", why_no_gpu())
    if names := ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in card.adapters):
        logger.info("adapters of %s: %s", card.model_id, names)
    logger.info("ready: %s on %s after %.1f s", card.model_id, options.socket, seconds)


def _check_all_memory(
    options: BackendOptions, plan: KvPlan | WholePlan, memory: MemoryInfo, settings: PassOptions
) -> None:
    """Log the plan, if there is memory for it.

    Raises StartupError, and NoRoomBeside if only another backend's memory is missing.
    """
    if options.beside_another:
        check_room_beside(plan, memory, options.kv_budget, settings.device)
    check_memory(plan, memory, settings.device)
    check_host_memory(settings.host_kv_bytes, host_memory())
    _log_plan(plan)


def _load_pass(
    executor: Executor,
    pass_class: type[IBatchedForwardPass],
    model_dir: Path,
    settings: PassOptions,
    spec: PassSpec,
    plan: KvPlan | WholePlan,
    options: BackendOptions,
    draft: DraftChoice | None,
) -> tuple[IBatchedForwardPass, float | None]:
    """Load the weights and allocate the KV cache on the executor's thread. No other thread calls the passes.

    Return the pass, and the duration in seconds of a step that samples one token; None if it generates none.
    """

    token_step_s = None

    def load() -> IBatchedForwardPass:
        nonlocal token_step_s
        forward_pass = pass_class.load(model_dir, settings)
        try:
            if isinstance(plan, KvPlan):
                create_cache(forward_pass, plan.num_pages, plan.page_size_tokens, plan.kv_dtype, plan.num_checkpoints)
        except (MemoryError, OSError, RuntimeError) as error:  # torch raises RuntimeError
            no_memory = NoRoomBeside if options.beside_another else StartupError
            raise no_memory(f"{plan.parts} cannot be allocated: {plan.remedy}") from error
        if draft is not None:
            draft.load(forward_pass, model_dir, plan)
        token_step_s = check_first_step(forward_pass, spec)
        return forward_pass

    forward_pass = executor.start(load)
    return forward_pass, token_step_s


def _log_plan(plan: KvPlan | WholePlan) -> None:
    logger.info(plan.describe())
    if isinstance(plan, KvPlan) and (warning := plan.narrowing) is not None:
        logger.warning(warning)


def _watch_weights(
    forward_pass: IBatchedForwardPass, settings: PassOptions, executor: Executor, board: BackendBoard
) -> None:
    """Check shared weights as long as the process lives. Damaged ones end it: its successor loads them from files."""
    weights = forward_pass.shared_weights if isinstance(forward_pass, ISharedWeights) else None
    if weights is None:
        if settings.weights_fds is not None:
            logger.info("the weights end with this process: its forward pass, or its operations, cannot leave them")
        return
    board.shared_weights_bytes, board.shared_weights_mapped = weights.num_bytes, int(weights.is_mapped)

    def note(num_checks: int) -> None:
        board.shared_weights_checks = num_checks

    WeightWatch(weights, note, executor.fail).start()


def _create_recorder(
    options: BackendOptions,
    card: ModelCard,
    settings: PassOptions,
    plan: KvPlan | WholePlan,
    forward_pass: IBatchedForwardPass,
) -> Recorder | None:
    """Raises StartupError if there is no memory for it, or the fd does not belong to a recorder."""
    if not options.flight_recorder:
        return None
    started = BackendStarted(
        FORMAT_VERSION,
        os.getpid(),
        time.time(),
        card.model_id,
        settings.max_running,
        settings.max_batch_tokens,
        plan.num_pages,
        plan.page_size_tokens if isinstance(plan, KvPlan) else 0,
        card.max_context_tokens,
        card.vocab_size,
        options.max_waiting,
        options.batch_channel_capacity,
        options.priority_step_s,
        forward_pass.spec.state_bytes_per_sequence > 0,
        forward_pass.spec.kv_windows,
        options.record_tokens,
        PROTOCOL_VERSION,
        tuple(adapter.adapter_id for adapter in card.adapters),
        plan.num_checkpoints if isinstance(plan, KvPlan) else 0,
    )
    try:
        fd = create_fd(options.flight_recorder) if options.recorder_fd is None else options.recorder_fd
        return Recorder.begin(RingWriter(fd), started)
    except (OSError, RegionError) as error:
        raise StartupError(f"--flight-recorder {format_size(options.flight_recorder)}: {error}") from error


def _create_compiler(model_dir: Path, card: ModelCard, timeout_s: float) -> GrammarCache | None:
    """None if the model has no tokenizer.json: then requests with a grammar are refused."""
    tokenizer_json = model_dir / "tokenizer.json"
    if not tokenizer_json.is_file():
        return None
    limits = CompileLimits(timeout_s)
    return GrammarCache(CompilePool(tokenizer_json, card.vocab_size, card.eos_token_ids, limits))


def _engine_limits(
    options: BackendOptions, card: ModelCard, spec: PassSpec, adapters: AdapterSet, tower: TowerThread | None
) -> EngineLimits:
    max_open = HARD_BOUND * options.max_waiting + 16 * options.num_running()
    return EngineLimits(
        *(card.vocab_size, card.max_context_tokens, options.max_waiting),
        max_open=max_open,
        # Requests that were open in the backend before, and as many that frontends held while there was no backend.
        max_open_resumed=2 * HARD_BOUND * max_open,
        priority_step_s=options.priority_step_s,
        scores_prompts=spec.scores_prompts,
        has_llama_cpp_sampling=spec.has_llama_cpp_sampling,
        pooled=spec.pooled,
        generates=spec.generates,
        adapters=adapters.indexes,
        tower=None if tower is None else tower.tower,
        unloaded=adapters.unloaded,
    )


def _act_on_signals(engine: Engine, scheduler: ISequenceScheduler) -> None:
    """On the first SIGTERM or SIGINT running requests may finish; the second one ends them."""
    leave_on_signal(engine, scheduler)
    timeouts_s = [0.0, _DRAIN_TIMEOUT_S]

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        engine.drain(timeouts_s.pop() if timeouts_s else 0.0)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)


if __name__ == "__main__":
    main()
