"""--draft-model: a small model beside the target that guesses its next tokens. Its memory, checks and loading."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.backend.checkpoint.files.tokenizer_file import read_token_ids
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.engine.interfaces import ISequenceScheduler
from penstock.backend.engine.steps.draft_desk import DraftDesk, IDraftExecutor
from penstock.backend.engine.steps.draft_model import DraftModel, HeadModel, num_spare_pages
from penstock.backend.engine.steps.model_drafting import ModelDrafting
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions, PassSpec
from penstock.backend.forward_pass.extensions import IGuessesTokens
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.options import BackendOptions
from penstock.backend.scheduling.drafting import MAX_ROWS, StepTimes
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.start.pass_checks import check_first_step, check_vocabulary
from penstock.backend.start.startup import pass_name, plan_memory

logger = logging.getLogger("penstock.backend")

_NO_HEAD = "the model has no head of its own (MTP) that this forward pass can use"


@dataclass(slots=True)
class DraftChoice:
    """The draft model that the operator has chosen."""

    name: str
    config_dir: Path
    pass_class: type[IBatchedForwardPass]
    settings: PassOptions
    spec: PassSpec
    model: DraftModel | None = None
    """When it is loaded."""

    def added_to(self, spec: PassSpec) -> PassSpec:
        """The target's spec, with the memory of both. Raises StartupError."""
        mine = self.spec.kv_bytes_per_token
        both = {name: size + mine[name] for name, size in spec.kv_bytes_per_token.items() if name in mine}
        if not both:
            others = ", ".join(spec.kv_bytes_per_token)
            raise StartupError(
                f"--draft-model {self.name} has KV dtypes {', '.join(mine)}, the model {others}: one must be the same"
            )
        return replace(
            spec,
            kv_bytes_per_token=both,
            weight_bytes=spec.weight_bytes + self.spec.weight_bytes,
            workspace_bytes=spec.workspace_bytes + self.spec.workspace_bytes,
        )

    def spare_bytes(self, plan: KvPlan) -> int:
        """Bytes of its pages for guesses."""
        num_tokens = num_spare_pages(plan.page_size_tokens) * plan.page_size_tokens
        return num_tokens * self.spec.kv_bytes_per_token[plan.kv_dtype]

    def taken_from(self, plan: KvPlan | WholePlan) -> KvPlan | WholePlan:
        """The plan with pages of the target alone: those of the draft model count as workspace from here on."""
        if isinstance(plan, WholePlan):
            return plan
        bytes_per_token = self.spec.kv_bytes_per_token[plan.kv_dtype]
        num_bytes = plan.num_tokens * bytes_per_token + self.spare_bytes(plan)
        return replace(
            plan,
            bytes_per_token=plan.bytes_per_token - bytes_per_token,
            workspace_bytes=plan.workspace_bytes + num_bytes,
        )

    def load(self, forward_pass: IBatchedForwardPass, model_dir: Path, plan: KvPlan | WholePlan) -> None:
        """Load it beside the target, on the thread that will run it. Raises StartupError."""
        if not forward_pass.spec.verifies_drafts or isinstance(plan, WholePlan):
            raise StartupError(
                f"--draft-model is {self.name}, but {type(forward_pass).__name__} cannot verify guessed tokens "
                "of this model; leave it out"
            )
        draft_dir = resolve_model(self.name, None, self.config_dir)
        check_vocabulary(self.spec, draft_dir)
        mine, others = read_token_ids(draft_dir), read_token_ids(model_dir)
        if mine != others:
            differing = next((token for token in {**others, **mine} if mine.get(token) != others.get(token)), "")
            raise StartupError(
                f"--draft-model {self.name} has another tokenizer: token {differing[:40]!r} is {mine.get(differing)} "
                f"there and {others.get(differing)} in the model's: use a model of the same family"
            )
        loaded = self.pass_class.load(draft_dir, self.settings)
        try:
            loaded.create_cache(self._num_pages(plan), plan.page_size_tokens, plan.kv_dtype)
        except (MemoryError, OSError, RuntimeError) as error:  # torch raises RuntimeError
            raise StartupError(
                f"the KV cache of --draft-model {self.name} cannot be allocated: {plan.remedy}"
            ) from error
        check_first_step(loaded, self.spec)
        logger.info("the draft model %s guesses tokens of up to %d sequences", self.name, MAX_ROWS)
        self.model = DraftModel(loaded, plan.num_pages, plan.page_size_tokens, self.settings.max_batch_tokens)

    def _num_pages(self, plan: KvPlan) -> int:
        return plan.num_pages + num_spare_pages(plan.page_size_tokens)


def _make_desk(
    model: DraftModel,
    executor: IDraftExecutor,
    scheduler: ISequenceScheduler,
    times: StepTimes,
    spec: PassSpec,
    max_context_tokens: int,
    *,
    is_alone: bool,
) -> DraftDesk:
    if not isinstance(scheduler, Scheduler) or (before := scheduler.drafting) is None:
        raise RuntimeError("a model guesses, and nothing drafts; this is a bug")
    texts = None if is_alone else before.texts
    drafting = ModelDrafting(times, texts, max_context_tokens, before.max_drafts, is_alone=is_alone)
    scheduler.drafting = drafting
    return DraftDesk(model, executor, drafting, scheduler.next_decodes, spec.vocab_size)


def make_desk(
    draft: DraftChoice | None,
    options: BackendOptions,
    forward_pass: IBatchedForwardPass,
    plan: KvPlan | WholePlan,
    executor: IDraftExecutor,
    scheduler: ISequenceScheduler,
    times: StepTimes,
) -> DraftDesk | None:
    """The desk of the draft model, or of the model's own head that guesses; None without either. Raises StartupError if
    there must be one."""
    is_alone, spec = options.speculation == "draft", forward_pass.spec
    if draft is not None and draft.model is not None:
        limit = draft.spec.max_context_tokens
        return _make_desk(draft.model, executor, scheduler, times, spec, limit, is_alone=is_alone)
    guesser = forward_pass.make_guesser() if isinstance(forward_pass, IGuessesTokens) else None
    if guesser is None or isinstance(plan, WholePlan):
        if is_alone:
            raise StartupError(f"--speculation is draft, but {_NO_HEAD}, and no --draft-model is given")
        return None
    logger.info("the model's own head guesses tokens of up to %d sequences", MAX_ROWS)
    model, limit = HeadModel(guesser, plan.num_pages, plan.page_size_tokens, MAX_ROWS), plan.max_context_tokens
    return _make_desk(model, executor, scheduler, times, spec, limit, is_alone=is_alone)


def plan_with_draft(
    options: BackendOptions, spec: PassSpec, settings: PassOptions, memory: MemoryInfo
) -> tuple[KvPlan | WholePlan, DraftChoice | None]:
    """`plan_memory` for the target, and for the draft model if one is chosen. Raises StartupError."""
    draft = find_draft(options, settings, spec)
    if draft is None:
        return plan_memory(options, spec, settings, memory), None
    both = draft.added_to(spec)
    plan = plan_memory(options, both, settings, memory)
    if isinstance(plan, KvPlan):  # the budget has room for the spare pages too
        left_bytes = max(1, plan.budget.num_bytes - draft.spare_bytes(plan))
        without_spare = plan_memory(replace(options, kv_budget=left_bytes), both, settings, memory)
        plan = replace(without_spare, budget=plan.budget) if isinstance(without_spare, KvPlan) else plan
    return draft.taken_from(plan), draft


def find_draft(options: BackendOptions, settings: PassOptions, spec: PassSpec) -> DraftChoice | None:
    """Return what --draft-model names. Raises StartupError."""
    name = options.draft_model
    if name is None:
        if options.speculation == "draft" and not spec.guesses_tokens:
            raise StartupError(
                f"--speculation is draft, but {_NO_HEAD}: name a small model with the same tokenizer as --draft-model"
            )
        return None
    if options.speculation in ("none", "ngram"):
        raise StartupError(
            f"--draft-model is {name}, but --speculation is {options.speculation}: use auto or draft, or leave it out"
        )
    if spec.kv_windows != (None,) or spec.state_bytes_per_sequence or not spec.generates:
        raise StartupError(
            f"--draft-model is {name}; it works beside models that generate and whose layers all attend to the whole "
            "text: leave it out"
        )
    config_dir = resolve_config(name)
    pass_class = find_forward_pass(pass_name(options, config_dir))
    settings = replace(
        settings,
        max_running=MAX_ROWS,
        max_context_tokens=None,
        deterministic=False,  # guesses may be rounded
        host_kv_bytes=0,
        quantize="none",
        task="generate",
        splits_layers=False,
        adapters=(),
        may_run_ahead=False,  # each guess is awaited
        weights_fds=None,
    )
    draft = pass_class.describe(config_dir, settings)
    if not draft.generates or len(draft.kv_windows) > 1 or draft.state_bytes_per_sequence:
        raise StartupError(f"--draft-model {name} must be a decoder with pages alone: it keeps a state, or pools")
    return DraftChoice(name, config_dir, pass_class, settings, draft)
