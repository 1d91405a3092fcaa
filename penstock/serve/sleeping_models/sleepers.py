"""The models of `penstock serve` that sleep, from its options to the supervisor's attendant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.backend.errors import StartupError
from penstock.backend.options import BackendOptions
from penstock.process.options import format_size
from penstock.process.supervisor import Supervisor
from penstock.serve.backend_children import PreparedBackend
from penstock.serve.sleeping_models.attendant import ModelAttendant, SleepingModel
from penstock.serve.sleeping_models.sizes import estimate
from penstock.shm.memory.model_table import ModelState, ModelTable

_FOR_EVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Sleepers:
    """The table that workers share with this process, and the models' sizes in the order of its rows."""

    table_fd: int
    table: ModelTable
    sizes: tuple[int, ...]
    budget_bytes: int
    idle_s: float

    @classmethod
    def of(
        cls,
        backends: Sequence[BackendOptions],
        *,
        num_loaded: int,
        num_workers: int,
        idle_s: float,
        budget_bytes: int | None,
    ) -> Sleepers:
        """Make the table and estimate the sizes.

        The first num_loaded models are loaded at the start, as far as the budget goes. One of the others that cannot be
        used, or is larger than the budget, stays asleep with the reason. Raises StartupError for such a model among the
        first, and OSError without memory for the table.
        """
        estimated = estimate(backends)
        limit_bytes = estimated.free_bytes if budget_bytes is None else budget_bytes
        of = "nine tenths of the free memory are" if budget_bytes is None else "--models-memory is"
        fd, table = ModelTable.create(num_workers)
        sizes = []
        for index, (backend, size) in enumerate(zip(backends, estimated.models, strict=True)):
            reason = size if isinstance(size, str) else None
            if isinstance(size, int) and size > limit_bytes:
                reason = (
                    f"it takes {format_size(size)} with its KV cache, but {of} {format_size(limit_bytes)}: lower "
                    "--kv-budget, or leave the model out"
                )
            if reason is not None and index < num_loaded:
                raise StartupError(f"model {backend.model_id()}: {reason}")
            if reason is not None:
                table.fail(index, reason, _FOR_EVER_S)
            sizes.append(size if isinstance(size, int) else 0)
        left_bytes = limit_bytes
        for index, size in enumerate(sizes[:num_loaded]):
            if size <= left_bytes:
                left_bytes -= size
                table.set_state(index, ModelState.STARTING)
        return cls(fd, table, tuple(sizes), limit_bytes, idle_s)

    def attendant(
        self, supervisor: Supervisor, prepared: Sequence[PreparedBackend], log: Callable[[str], None]
    ) -> ModelAttendant:
        models = [
            SleepingModel(backend.options.model_id(), backend, size)
            for backend, size in zip(prepared, self.sizes, strict=True)
        ]
        return ModelAttendant(supervisor, self.table, models, log, idle_s=self.idle_s, budget_bytes=self.budget_bytes)
