"""From --gpu to a device: what the machine has, and in one line what it lacks."""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_CAPABILITY = (8, 0)
"""The kernels use asynchronous copies and bf16 products, which came with it (Ampere)."""
_NEWEST_CUDA_EXTRA = 13


@dataclass(frozen=True, slots=True)
class Gpu:
    """uuid as nvidia-smi prints it. The index counts what CUDA_VISIBLE_DEVICES leaves."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def choose_device(gpu: str, find: Callable[[], list[Gpu]] | None = None) -> str:
    """A `PassOptions.device` from --gpu: an index, a UUID or its beginning, "auto" or "none".

    "auto" is the first GPU that serves, else the CPU, and one log line says why. find lists the GPUs and raises
    StartupError where there are none. Raises StartupError.
    """
    find = find or find_gpus
    if gpu == "none":
        return "cpu"
    if gpu != "auto" and not gpu.isdecimal() and not gpu.startswith("GPU-"):
        raise StartupError(f'--gpu is "{gpu}"; write an index such as 0, a UUID such as GPU-1234abcd, "none" or "auto"')
    try:
        gpus = find()
        return _device(_serving(gpus)[0] if gpu == "auto" else _pick(gpu, gpus))
    except StartupError as reason:
        if gpu != "auto":
            raise StartupError(f"--gpu is {gpu}: {reason}") from reason
        return "cpu"


def why_no_gpu(find: Callable[[], list[Gpu]] | None = None) -> str:
    """Why `--gpu auto` came to the CPU."""
    try:
        _serving((find or find_gpus)())
    except StartupError as reason:
        return str(reason)
    return "there is a GPU now"


def planned_device(gpu: str, find: Callable[[], list[Gpu]] | None = None) -> str:
    """As `choose_device`, for a plan that is printed and not run: a GPU that is named need not be there."""
    try:
        return choose_device(gpu, find)
    except StartupError:
        if gpu.isdecimal() or gpu.startswith("GPU-"):
            return f"cuda:{int(gpu) if gpu.isdecimal() else 0}"
        raise


def _device(gpu: Gpu) -> str:
    return f"cuda:{gpu.index}"


def _pick(wanted: str, gpus: list[Gpu]) -> Gpu:
    if wanted.isdecimal():
        matches = [gpu for gpu in gpus if gpu.index == int(wanted)]
    else:
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(wanted)]
    if len(matches) != 1:
        known = ", ".join(f"{gpu.index} {gpu.uuid} ({gpu.name})" for gpu in gpus)
        raise StartupError(f"it names {'several' if matches else 'none'} of this machine's GPUs: {known}")
    return _serving(matches)[0]


def _serving(gpus: list[Gpu]) -> list[Gpu]:
    """Those that can run the kernels; at least one. Raises StartupError."""
    serving = [gpu for gpu in gpus if gpu.capability >= MIN_CAPABILITY]
    if not serving:
        least = ".".join(map(str, MIN_CAPABILITY))
        found = ", ".join(f"{gpu} has {gpu.capability[0]}.{gpu.capability[1]}" for gpu in gpus)
        raise StartupError(f"the kernels need compute capability {least} or more; {found}")
    return serving


def find_gpus() -> list[Gpu]:
    """The GPUs of this machine, at least one. Raises StartupError naming what is missing: driver, torch or CuPy."""
    _check_driver()
    import torch  # only where there is a driver

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
    """Raises StartupError where the driver's library is not there or does not start."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise StartupError("no NVIDIA driver (libcuda.so.1 cannot be loaded)") from None
    if status := driver.cuInit(0):
        raise StartupError(f"the NVIDIA driver does not start (cuInit says {status}; nvidia-smi may say more)")
