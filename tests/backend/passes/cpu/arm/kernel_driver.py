"""A process that runs the kernels of another CPU, and memory there. See kernel_driver.cpp."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import subprocess
from pathlib import Path
from types import TracebackType
from typing import IO, Any

_ALLOCATE, _FREE, _WRITE, _READ, _CALL, _CALL_FLOAT = range(6)


class KernelDriver:
    """Calls functions of a library in a process of its own. command: the driver, its emulator before it if any."""

    def __init__(self, command: list[str], library: Path) -> None:
        self._process = subprocess.Popen([*command, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of zeroed memory."""
        self._send(_ALLOCATE, num_bytes)
        return self._receive_number()

    def free(self, address: int) -> None:
        self._send(_FREE, address)

    def write(self, address: int, content: bytes) -> None:
        self._send(_WRITE, address, len(content), more=content)

    def read(self, address: int, num_bytes: int) -> bytes:
        self._send(_READ, address, num_bytes)
        return self._receive(num_bytes)

    def call(self, name: str, *arguments: int) -> int:
        """Return the result, which means nothing if the function has none."""
        self._send(_CALL, len(arguments), *arguments, more=struct.pack("32s", name.encode()))
        return self._receive_number()

    def call_float(self, name: str, *arguments: int) -> float:
        self._send(_CALL_FLOAT, len(arguments), *arguments, more=struct.pack("32s", name.encode()))
        number: float = struct.unpack("<f", self._receive(4))[0]
        return number

    def close(self) -> None:
        """Wait for the process's end. Raises RuntimeError if it failed, now or before."""
        with self._process as process:
            self._pipe(process.stdin).close()
        if process.returncode != 0:
            raise self._has_ended()

    def _send(self, *numbers: int, more: bytes = b"") -> None:
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(struct.pack(f"<{len(numbers)}q", *numbers) + more)
            pipe.flush()
        except BrokenPipeError as error:
            raise self._has_ended() from error

    def _receive(self, num_bytes: int) -> bytes:
        content = self._pipe(self._process.stdout).read(num_bytes)
        if len(content) < num_bytes:
            raise self._has_ended()
        return content

    def _receive_number(self) -> int:
        number: int = struct.unpack("<q", self._receive(8))[0]
        return number

    def _has_ended(self) -> RuntimeError:
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        return RuntimeError(f"the kernels' process ended with status {self._process.wait()}; its message is on stderr")

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


class RemoteArguments:
    """The arrays of one call: copied to the driver's memory, and results back at the end."""

    def __init__(self, driver: KernelDriver) -> None:
        self._driver = driver
        self._allocated: list[int] = []
        self._results: list[tuple[int, int, int]] = []

    def __enter__(self) -> RemoteArguments:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        for remote, address, num_bytes in self._results:
            ctypes.memmove(address, self._driver.read(remote, num_bytes), num_bytes)
        self.free()

    def free(self) -> None:
        for remote in self._allocated:
            self._driver.free(remote)
        self._allocated.clear()

    def read_only(self, address: int | None, num_bytes: int) -> int:
        """Copy memory of this process. Returns the copy's address; 0 for a null pointer."""
        return 0 if not address else self.of_bytes(ctypes.string_at(address, num_bytes))

    def of_bytes(self, content: bytes) -> int:
        remote = self._driver.allocate(len(content))
        self._allocated.append(remote)
        self._driver.write(remote, content)
        return remote

    def changed(self, address: int, num_bytes: int) -> int:
        """Copy memory of this process there, and back at the end."""
        remote = self.read_only(address, num_bytes)
        self._results.append((remote, address, num_bytes))
        return remote

    def of_struct(self, struct: ctypes.Structure, **pointers: int) -> int:
        """Copy a struct whose pointers are replaced."""
        copy: Any = type(struct).from_buffer_copy(struct)
        for name, remote in pointers.items():
            setattr(copy, name, remote)
        return self.of_bytes(bytes(copy))
