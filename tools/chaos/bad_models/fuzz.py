"""Loads damaged models, some at a time, and says which of them did harm."""

from __future__ import annotations

import os
import queue
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock.process.children import module_argv
from penstock.tools.chaos.bad_models.good_models import ADAPTER_CONFIG, GGUF, make_good_models
from penstock.tools.chaos.bad_models.loader import Verdict
from penstock.tools.chaos.bad_models.mutations import Sample, draw_sample
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.processes import Child

MAX_GROWTH_BYTES = 256 << 20
"""Resident memory that a load may take; that of a good model takes about 60 MB."""
MAX_LINE = 1000
_NUM_LOADERS = max(1, min(8, os.cpu_count() or 1))


@dataclass
class FuzzOutcome:
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    largest_bytes: int = 0

    def tables(self) -> str:
        """The outcome as Markdown."""
        rows = [f"| loaded | {self.counts.total():,} |"]
        rows += [f"| {name} | {count:,} |" for name, count in sorted(self.counts.items())]
        rows += [f"| longest load | {self.longest_s:.1f} s |", f"| most memory | {self.largest_bytes >> 20} MiB |"]
        faults = "".join(f"* {fault}\n" for fault in self.faults) or "**Every file was refused in one line, or ran.**\n"
        return "| damaged models |  |\n|---|--:|\n" + "\n".join(rows) + f"\n\n{faults}"


def judge(sample: Sample, verdict: Verdict) -> tuple[str, str]:
    """Return how a load ended, and what was wrong with that; empty if nothing was."""
    match verdict.status:
        case 0 | 1 if verdict.peak_bytes > MAX_GROWTH_BYTES:
            return "took too much memory", f"{verdict.peak_bytes >> 20} MiB of memory"
        case 0:
            return "ran", ""
        case 1 if not verdict.told.strip() or not verdict.told.isprintable() or len(verdict.told) > MAX_LINE:
            return "refused badly", f"the refusal is not one printable line: {verdict.told[:300]!r}"
        case 1 if sample.told.endswith(": undamaged"):
            return "refused wrongly", verdict.told
        case 1:
            return "refused in one line", ""
        case status if status < 0:
            return "ended by a signal", f"signal {-status}; {verdict.told[-300:]!r}"
    return "failed", repr(verdict.told[-500:])


def write_sample(sample: Sample, folder: Path) -> tuple[Path, Path | None]:
    """Write the files; return the path of the model, and that of its adapter."""
    for name, content in sample.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    adapter = (folder / ADAPTER_CONFIG).parent
    return folder / GGUF if GGUF in sample.files else folder, adapter if adapter.is_dir() else None


def make_models_dir(folder: Path, count: int, seed: int) -> Path:
    """Write good models, and count damaged ones beside them: the attacks first. Return the folder."""
    models = [model for model in make_good_models() if model.name != "lora"]
    for index in range(len(models) + count):
        sample = draw_sample(seed, index, models)
        name = models[index].name if index < len(models) else f"bad-{index}"
        write_sample(sample, folder / name)
        if GGUF in sample.files:
            (folder / name / GGUF).rename(folder / f"{name}.gguf")
            (folder / name).rmdir()
    return folder


def fuzz(count: int, seed: int, lasts_s: float, keep: Path | None, say: Callable[[str], None]) -> FuzzOutcome:
    """Load count damaged models, or as many as the time allows. The bad ones stay in keep. Raises ChaosError."""
    outcome = FuzzOutcome()
    models = make_good_models()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-chaos-")))
        loaders: queue.SimpleQueue[Child] = queue.SimpleQueue()
        for _ in range(_NUM_LOADERS):
            loaders.put(_start_loader(stack))
        deadline_s = time.monotonic() + lasts_s

        def run(index: int) -> tuple[Sample, Verdict] | None:
            if time.monotonic() > deadline_s:
                return None
            sample = draw_sample(seed, index, models)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                paths = write_sample(sample, Path(place, "model"))
                loader = loaders.get()
                try:
                    answer = loader.ask("\t".join(str(path) for path in paths if path is not None).encode())
                finally:
                    loaders.put(loader)
            return sample, msgspec.json.decode(answer, type=Verdict)

        pool = stack.enter_context(ThreadPoolExecutor(_NUM_LOADERS))
        for number, result in enumerate(pool.map(run, range(count)), start=1):
            if result is not None:
                _note(outcome, *result, keep, say)
            if number % 200 == 0:
                say(f"{number:,} models, {len(outcome.faults)} faults")
    return outcome


def _start_loader(stack: ExitStack) -> Child:
    log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    argv = module_argv("penstock.tools.chaos.bad_models.loader")
    loader = _Loader("the loader", argv, environment, log, answers=True)
    stack.callback(loader.stop)
    loader.read_line()
    return loader


class _Loader(Child):
    failure = ChaosError


def _note(
    outcome: FuzzOutcome, sample: Sample, verdict: Verdict, keep: Path | None, say: Callable[[str], None]
) -> None:
    how, wrong = judge(sample, verdict)
    outcome.counts[how] += 1
    outcome.longest_s = max(outcome.longest_s, verdict.took_s)
    outcome.largest_bytes = max(outcome.largest_bytes, verdict.peak_bytes)
    if wrong:
        outcome.faults.append(f"model {sample.index}: {sample.told}: {how}: {wrong}")
        say(outcome.faults[-1])
        if keep is not None:
            write_sample(sample, keep / str(sample.index))
