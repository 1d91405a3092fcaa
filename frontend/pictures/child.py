"""A process that decodes pictures and runs the model's image processor: each picture in a fork of its own.

A fork is killed by the kernel when it takes too much CPU time, and when the other end of its result's socket closes.
It imports no torch, so transformers takes its processors of Pillow and numpy.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

from penstock.frontend.pictures.families import FAMILIES
from penstock.frontend.pictures.messages import (
    MAX_MESSAGE_BYTES,
    MEMORY_BYTES,
    READY,
    PictureJob,
    PictureResult,
)
from penstock.process.children import stop_with_parent
from penstock.process.risky_children import ChannelClosed, begin_child, limit, receive_with_fds, send
from penstock.shm.messages import picture_digest

_NICE = 5
"""Requests that have no pictures come first."""
_MAX_REASON = 300


@cache
def _processor(model_dir: str, family: str) -> tuple[Any, dict[str, Any]]:
    """Return the model's image processor, and the settings of its processor's file. Raises whatever files can cause."""
    kind = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{kind.module}.image_processing_pil_{kind.module}")
    path = Path(model_dir) / "processor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return getattr(module, f"{kind.class_name}ImageProcessorPil").from_pretrained(model_dir), settings


def _result(job: PictureJob, memory: int) -> PictureResult:
    """Decode and process a picture; write its pixels to the file. Raises MemoryError."""
    from penstock.frontend.pictures.decoding import BadPicture, decode_picture, from_base64

    kind = FAMILIES[job.family]
    processor, settings = _processor(job.model_dir, job.family)
    try:
        data = os.pread(memory, os.fstat(memory).st_size, 0)
        image = decode_picture(from_base64(data) if job.is_base64 else data, job.media_type)
    except BadPicture as error:
        return PictureResult(str(error)[:_MAX_REASON])
    images = [image] if job.is_alone or not kind.depends_on_others else [[image, image]]
    try:
        outputs = processor(
            images, do_rescale=False, do_normalize=False, **kind.arguments(settings, processor, job.max_bytes)
        )
    except (ValueError, ZeroDivisionError, OSError) as error:
        # Processors raise these for sizes that they cannot use, such as a line of pixels.
        size = f"{image.width} x {image.height}"
        return PictureResult(f"the model's image processor takes no picture of {size}: {error}"[:_MAX_REASON])
    pixels = _pixels(kind.pixels(outputs))
    if pixels.nbytes > job.max_bytes:
        return PictureResult(f"it makes {pixels.nbytes} bytes of pixels; the limit of this model is {job.max_bytes}")
    expansion = kind.expand(outputs, processor, settings, kind.image_token)
    digest = picture_digest(pixels.shape, expansion.grid, pixels.data)
    os.ftruncate(memory, pixels.nbytes)
    os.pwrite(memory, pixels.data, 0)
    return PictureResult("", pixels.shape, expansion.grid, expansion.text, tuple(expansion.counts), digest)


def _pixels(values: Any) -> Any:
    """Return one picture's pixels as bytes."""
    import numpy as np

    pixels = np.asarray(values[0] if np.ndim(values) > 4 else values)  # tiles of a batch of one picture
    return np.ascontiguousarray(pixels if pixels.dtype == np.uint8 else np.rint(pixels).clip(0, 255), np.uint8)


def _work(job: PictureJob, memory: int, channel: socket.socket) -> None:
    """Runs in the fork."""
    stop_with_parent(signal.SIGKILL)
    os.nice(_NICE)
    for number in (signal.SIGIO, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # ends the process
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO when the other end closes
    with contextlib.suppress(BlockingIOError):
        if not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return  # it closed before the line above: no signal comes
    signal.setitimer(signal.ITIMER_PROF, job.cpu_time_s)
    limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    try:
        result = _result(job, memory)
    except MemoryError:
        result = PictureResult(f"decoding it takes more memory than the limit of {MEMORY_BYTES >> 20} MiB")
    except Exception as error:  # noqa: BLE001 - the model's files can cause anything
        result = PictureResult(f"{type(error).__name__}: {error}"[:_MAX_REASON], is_client_fault=False)
    send(channel, result)


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


def main(arguments: list[str]) -> None:
    """arguments are the descriptor of the socket and the parent's process id."""
    channel = begin_child(arguments)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets forks that have ended
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to make an import fail
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):  # forks would import it each for itself
        importlib.import_module("transformers.image_processing_backends")
        importlib.import_module("penstock.frontend.pictures.decoding")
    channel.send(READY)
    while True:
        try:
            job, (memory, result_fd) = receive_with_fds(channel, PictureJob, MAX_MESSAGE_BYTES, 2)
        except ChannelClosed:
            return
        with contextlib.suppress(Exception):  # the fork meets the same error, and reports it
            _processor(job.model_dir, job.family)
        with socket.socket(fileno=result_fd) as result:
            if os.fork() == 0:
                try:
                    channel.close()  # the jobs of others
                    _work(job, memory, result)
                finally:
                    os._exit(0)
        os.close(memory)


if __name__ == "__main__":
    main(sys.argv[1:])
