"""Chooses the device that --gpu names, or explains in one line what the machine lacks."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from penstock.backend.errors import StartupError

MIN_CAPABILITY = (8, 0)
"""Ampere: the first architecture with the asynchronous copies and bf16 matrix products that the kernels use."""
_NEWEST_CUDA_EXTRA = 13


@dataclass(frozen=True, slots=True)
class Gpu:
    """uuid is as nvidia-smi prints it; index counts the GPUs that CUDA_VISIBLE_DEVICES shows."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def choose_device(gpu: str, find: Callable[[], list[Gpu]] | None = None) -> str:
    """Return the `PassOptions.device` for --gpu: an index, a UUID or its beginning, "auto" or "none".

    "auto" chooses the first supported GPU, or the CPU if there is none. find lists the GPUs and raises StartupError if
    there are none. Raises StartupError if the named GPU cannot be used.
    """
    find = find or find_gpus
    if gpu == "none":
        return "cpu"
    if gpu != "auto" and not gpu.isdecimal() and not gpu.startswith("GPU-"):
        raise StartupError(f'--gpu is "{gpu}"; write an index such as 0, a UUID such as GPU-1234abcd, "none" or "auto"')
    try:
        gpus = find()
        return _device(_supported(gpus)[0] if gpu == "auto" else _pick(gpu, gpus))
    except StartupError as reason:
        if gpu != "auto":
            raise StartupError(f"--gpu is {gpu}: {reason}") from reason
        return "cpu"


def why_no_gpu(find: Callable[[], list[Gpu]] | None = None) -> str:
    """Return why `--gpu auto` chose the CPU."""
    try:
        _supported((find or find_gpus)())
    except StartupError as reason:
        return str(reason)
    return "there is a GPU now"


def planned_device(gpu: str, find: Callable[[], list[Gpu]] | None = None) -> str:
    """Like `choose_device`, but for a plan that is only printed: a named GPU need not exist."""
    try:
        return choose_device(gpu, find)
    except StartupError:
        if gpu.isdecimal() or gpu.startswith("GPU-"):
            return f"cuda:{int(gpu) if gpu.isdecimal() else 0}"
        raise


def _device(gpu: Gpu) -> str:
    return f"cuda:{gpu.index}"


def _pick(name: str, gpus: list[Gpu]) -> Gpu:
    if name.isdecimal():
        matches = [gpu for gpu in gpus if gpu.index == int(name)]
    else:
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
    if len(matches) != 1:
        known = ", ".join(f"{gpu.index} {gpu.uuid} ({gpu.name})" for gpu in gpus)
        raise StartupError(f"it names {'several' if matches else 'none'} of this machine's GPUs: {known}")
    return _supported(matches)[0]


def _supported(gpus: list[Gpu]) -> list[Gpu]:
    """Return the GPUs that can run the kernels. Raises StartupError if there are none."""
    supported = [gpu for gpu in gpus if gpu.capability >= MIN_CAPABILITY]
    if not supported:
        least = ".".join(map(str, MIN_CAPABILITY))
        found = ", ".join(f"{gpu} has {gpu.capability[0]}.{gpu.capability[1]}" for gpu in gpus)
        raise StartupError(f"the kernels need compute capability {least} or more; {found}")
    return supported


def find_gpus() -> list[Gpu]:
    """Return this machine's GPUs. Raises StartupError that names what is missing: driver, torch, CuPy or a GPU."""
    _check_driver()
    import torch  # slow to import, so only after the driver is found

    if torch.version.cuda is None:
        raise StartupError(f"torch {torch.__version__} is built for the CPU only: install a build for CUDA")
    extra = f"cuda{min(int(torch.version.cuda.partition('.')[0]), _NEWEST_CUDA_EXTRA)}"
    if importlib.util.find_spec("cupy") is None:
        raise StartupError(f"CuPy is not installed: pip install 'penstock[{extra}]'")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    except RuntimeError as error:
        raise StartupError(f"torch cannot use the GPU: {str(error).splitlines()[0]}") from error
    if count == 0:
        raise StartupError("the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES may hide it)")
    gpus = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        gpus.append(Gpu(index, f"GPU-{properties.uuid}", properties.name, capability))
    return gpus


def _check_driver() -> None:
    """Raises StartupError if the driver's library is missing or does not start."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise StartupError("no NVIDIA driver (libcuda.so.1 cannot be loaded)") from None
    if status := driver.cuInit(0):
        raise StartupError(f"the NVIDIA driver does not start (cuInit says {status}; nvidia-smi may say more)")
