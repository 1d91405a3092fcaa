"""A BackendLink with shared buffers that tests turn by hand, and clients of it in this process or another.

`python -m tests.shm.buffers.buffer_backend SOCKET DEVICE_DIRECTORY` is such a client: it opens the device's buffers,
prints `holding`, executes the commands on its standard input, and answers each with `done`.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.shm.buffers.buffer_export import BufferExporter
from penstock.shm.buffers.device_api import DeviceApi
from penstock.shm.buffers.shared_buffers import BufferSlice
from penstock.shm.client.session import Session
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.link.join import Invitation
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    PROTOCOL_VERSION,
    BufferContent,
    BufferKind,
    BufferRequest,
    ContentSpec,
    Generate,
    Hello,
    Refusal,
    Sampling,
    StepOutputs,
    decode_welcome,
    encode,
)
from tests.shm.buffers.fake_device import FakeDevice
from tests.shm.scripted_backend import model_card

ROOT = Path(__file__).parents[3]
VOCAB = 1000
HIDDEN = 8
CONTENTS = (
    ContentSpec(BufferContent.TOKENS, 1, "<i4"),
    ContentSpec(BufferContent.LOGITS, VOCAB, "<f4"),
    ContentSpec(BufferContent.PROMPT_EMBEDDINGS, HIDDEN, "<f4"),
)
BOTH = (BufferKind.CUDA, BufferKind.HOST)
BLOCK = 2 << 20


class WelcomeRefused(Exception):
    """The backend answered the Hello with a Refusal."""


class TurnedBackend:
    """One call of `turn` is one turn of its loop."""

    def __init__(
        self,
        socket_path: Path,
        device: DeviceApi | None = None,
        kinds: tuple[BufferKind, ...] | None = None,
        budget_bytes: int = 1 << 30,
    ) -> None:
        kinds = kinds or (BOTH if device is not None else (BufferKind.HOST,))
        self.exporter = BufferExporter(kinds, CONTENTS, budget_bytes, device)
        self.board = BackendBoard.create()
        self.link = BackendLink(socket_path, model_card(), self.board, exporter=self.exporter)
        self._path = socket_path
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.events: list[Submission | Cancellation | FrontendDeath] = []

    def turn(self, timeout_s: float = 0.0) -> None:
        self.link.wait(timeout_s, self._wake_fd)
        self.events += self.link.receive()
        self.link.flush()

    def until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end_s
            self.turn(0.02)

    def submission(self) -> Submission:
        """The next submission."""
        self.until(lambda: any(isinstance(event, Submission) for event in self.events))
        event = next(event for event in self.events if isinstance(event, Submission))
        self.events.remove(event)
        return event

    def invite(self, buffer_request: BufferRequest | None) -> Invitation:
        """Raises WelcomeRefused."""
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            control.connect(str(self._path))
            control.send(encode(Hello(PROTOCOL_VERSION, buffer_request)))
            self.until(lambda: select.select([control], [], [], 0)[0])
            data, fds, _, _ = socket.recv_fds(control, 1 << 16, 6)
            control.setblocking(False)
            answer = decode_welcome(data)
            if isinstance(answer, Refusal):
                raise WelcomeRefused(answer.reason)
        except BaseException:
            control.close()
            raise
        message_fd, arena_fd, backend_board_fd, frontend_board_fd, *buffer_fds = fds
        boards = backend_board_fd, frontend_board_fd
        return Invitation(control, answer, message_fd, arena_fd, *boards, tuple(buffer_fds))

    @contextmanager
    def visit(self, buffer_request: BufferRequest) -> Iterator[Invitation]:
        """A client that opens none of its memory and disconnects without a message."""
        invitation = self.invite(buffer_request)
        try:
            yield invitation
        finally:
            invitation.control.close()
            invitation.close_fds()

    @contextmanager
    def client(self, buffer_request: BufferRequest | None, device: DeviceApi | None = None) -> Iterator[TurnedClient]:
        session = Session(self.invite(buffer_request), Ledger(), None if device is None else lambda _uuid: device)
        try:
            yield TurnedClient(session, self)
        finally:
            session.close()

    def close(self) -> None:
        self.link.close()
        self.board.close()
        os.close(self._wake_fd)


class TurnedClient:
    """A session and the outputs that it received."""

    def __init__(self, session: Session, backend: TurnedBackend) -> None:
        self.session = session
        self._backend = backend
        self.outputs: list[StepOutputs] = []

    def send(self, message: Generate) -> None:
        assert self.session.send(message)

    def submit(
        self, request_id: int, prompt: BufferSlice | None = None, output: BufferSlice | None = None, **changes: object
    ) -> None:
        buffers = self.session.buffers
        assert buffers is not None
        self.send(make_generate(request_id, **(changes | buffers.lend(prompt, output))))

    def receive_until(self, condition: Callable[[], object]) -> None:
        """Receive outputs, and accept returned buffers, until the condition holds."""

        def received() -> object:
            for outputs in self.session.receive():
                self.outputs.append(outputs)
                if self.session.buffers is not None:
                    self.session.buffers.accept(outputs.returned)
            return condition()

        self._backend.until(received)


def make_generate(request_id: int, **changes: object) -> Generate:
    fields: dict[str, object] = {
        "request_id": request_id,
        "tokens": b"\x05\0\0\0",
        "num_prompt_tokens": 1,
        "max_tokens": 4,
        "sampling": Sampling(temperature=0.0),
    }
    return Generate(**(fields | changes))  # type: ignore[arg-type]


class ClientProcess:
    """A process that has a backend's device memory open. The context manager ends it."""

    def __init__(self, backend: TurnedBackend, socket_path: Path, directory: Path) -> None:
        argv = [sys.executable, "-m", "tests.shm.buffers.buffer_backend", str(socket_path), str(directory)]
        self._process = subprocess.Popen(argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._backend = backend
        self.pid = self._process.pid
        self.expect("holding")

    def expect(self, line: str) -> None:
        """Turn the backend until the process prints this line."""
        stdout = self._process.stdout
        assert stdout is not None
        self._backend.until(lambda: select.select([stdout], [], [], 0)[0])
        assert stdout.readline() == line + "\n"

    def do(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        self.expect("done")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


async def _be_client(socket_path: Path, directory: Path) -> None:
    device = FakeDevice(directory)
    buffer_request = BufferRequest(2, BLOCK, (BufferKind.CUDA,))
    session = await Session.open(socket_path, Ledger(), buffer_request, lambda _uuid: device)
    buffers = session.buffers
    assert buffers is not None
    held = buffers.take()
    pointer = buffers.device_array(held, (1,), "|u1", 0).__cuda_array_interface__["data"][0]
    print("holding", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["write", value]:
                device.poke(pointer, value.encode())
            case ["disconnect"]:  # the memory stays open
                os.close(session.control_fd)
            case ["close"]:  # the process goes on and holds a buffer
                session.close()
            case ["release"]:
                held.release()
                held.release()
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(_be_client(Path(sys.argv[1]), Path(sys.argv[2])))
