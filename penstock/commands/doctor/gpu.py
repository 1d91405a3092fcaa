"""The GPU: its driver, the match of torch, CuPy and CUDA, and its free memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.memory import cuda_memory
from penstock.backend.passes.cuda.device.device_choice import choose_device, find_gpus, why_no_gpu
from penstock.commands.doctor.finding import Finding, Level
from penstock.process.options import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backend.kv_cache.budget.memory import MemoryInfo
    from penstock.backend.passes.cuda.device.device_choice import Gpu


def examine_gpu(
    gpu: str,
    find: Callable[[], list[Gpu]] = find_gpus,
    memory_of: Callable[[int], MemoryInfo] = cuda_memory,
) -> Iterator[Finding]:
    """Examine the GPU.

    gpu is an option as in `choose_device`. A machine without a GPU is fine, unless the option names one.
    """
    if gpu == "none":
        yield Finding(Level.OK, "GPU", "not asked for; the CPU computes")
        return
    try:
        device = choose_device(gpu, find)
    except StartupError as error:
        yield Finding(Level.ERROR, "GPU", str(error), "choose a GPU that is here, or --gpu none")
        return
    if device == "cpu":
        remedy = "nothing, if the CPU is what you want"
        yield Finding(Level.NOTE, "GPU", f"the CPU computes: {why_no_gpu(find)}", remedy)
        return
    gpus = find()
    index = int(device.removeprefix("cuda:"))
    chosen = next(each for each in gpus if each.index == index)
    major, minor = chosen.capability
    yield Finding(Level.OK, "GPU", f"{chosen}, compute capability {major}.{minor}, of {len(gpus)} found")
    try:
        found = memory_of(index)
    except StartupError as error:
        yield Finding(
            Level.ERROR, "GPU memory", str(error), "end the programs that use the GPU (nvidia-smi lists them)"
        )
        return
    text = f"{format_size(found.free_bytes)} of {format_size(found.total_bytes)} are free"
    if found.free_bytes < found.total_bytes / 2:
        remedy = "nvidia-smi lists the programs that hold the rest; --kv-budget auto takes what is free"
        yield Finding(Level.WARNING, "GPU memory", text, remedy)
    else:
        yield Finding(Level.OK, "GPU memory", text)
