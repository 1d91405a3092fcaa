"""A backend without a model: the real BackendLink, and a next token that is a function of the tokens so far.

Runs in a thread (`ScriptedBackend`) or as a process (`BackendProcess`, or `python -m tests.shm.scripted_backend`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.shm.buffers.buffer_export import BufferExporter
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.events import Cancellation, FrontendDeath, Question, Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import (
    NO_TOKEN,
    AskQuote,
    AskStream,
    CancelOther,
    ChangeAdapter,
    Failure,
    FailureCode,
    Finish,
    Generate,
    ModelCard,
    Progress,
    Quote,
    Started,
    StreamRecord,
    VectorPart,
)

NextToken = Callable[["array[int]", int, int], int]
"""(tokens so far, number of prompt tokens, vocabulary size) → next token."""

FAILING_TOKEN = 13
"""A prompt of only this token ends FAILED after its first token."""
KILLING_TOKEN = 14
"""A prompt of only this token kills the backend's process."""
_FAILING_PROMPT = array("i", [FAILING_TOKEN])
_KILLING_PROMPT = array("i", [KILLING_TOKEN])


def hashed(tokens: array[int], num_prompt_tokens: int, vocab_size: int) -> int:
    """Depends on every token and its position: a lost, repeated or swapped token changes all later ones."""
    return zlib.crc32(tokens) % vocab_size


def echoed(tokens: array[int], num_prompt_tokens: int, vocab_size: int) -> int:
    """The prompt, repeated."""
    return tokens[(len(tokens) - num_prompt_tokens) % num_prompt_tokens]


NEXT_TOKEN: dict[str, NextToken] = {"hashed": hashed, "echoed": echoed}


def expected_tokens(
    prompt: Sequence[int], max_tokens: int, next_token: NextToken = hashed, vocab_size: int = 1000
) -> list[int]:
    """The tokens of an undisturbed run, ignoring stop tokens."""
    tokens = array("i", prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, len(prompt), vocab_size))
    return tokens[len(prompt) :].tolist()


def model_card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "model_id": "scripted",
        "model_dir": "",
        "created": 1,
        "vocab_size": 1000,
        "max_context_tokens": 32768,
        "max_waiting": 1000,
        "fingerprint": "scripted-1",
    }
    return ModelCard(**(fields | changes))


@dataclass(slots=True)
class _Running:
    submission: Submission
    tokens: array[int]
    received_s: float
    started: bool = False


@dataclass
class Script:
    """How the backend behaves. step_s is the pause between steps; requests beyond max_running wait."""

    card: ModelCard = field(default_factory=model_card)
    next_token: NextToken = hashed
    step_s: float = 0.0
    max_running: int = 1 << 16
    is_coalesced: bool = False
    credit: int = 256
    stall_limit_s: float = 5.0
    vector_parts: Callable[[Submission], list[VectorPart]] = lambda _: []
    """Returns the vectors that a pooled request receives before its end."""
    exporter: BufferExporter | None = None
    """Exports shared buffers on the host. A token's row of logits repeats the token; an embedding counts as token 0."""


class ScriptedEngine:
    """One thread's loop over a BackendLink: receive, generate a token per running request, flush."""

    def __init__(self, socket_path: Path, script: Script) -> None:
        self.script = script
        self.board = BackendBoard.create()
        self.board.pid = os.getpid()
        self.board.max_waiting = script.card.max_waiting
        self.link = BackendLink(
            socket_path,
            script.card,
            self.board,
            credit=script.credit,
            stall_limit_s=script.stall_limit_s,
            exporter=script.exporter,
        )
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.running: dict[tuple[int, int], _Running] = {}
        self.deaths: list[int] = []
        self.num_cancellations = 0
        self.stopping = False
        self.paused = False
        """It receives but makes no steps, so requests pile up."""
        self.calls: deque[Callable[[], None]] = deque()
        """Calls from tests to the link, which belongs to this thread; done in the next turn."""

    def turn(self) -> None:
        busy = bool(self.running) and not self.paused
        self.link.wait(self.script.step_s if busy else 0.2, self.wake_fd)
        self.board.beat()
        for event in self.link.receive():
            match event:
                case Submission():
                    self._submit(event)
                case Question(_, ChangeAdapter()):
                    os.kill(os.getpid(), signal.SIGKILL)
                case Question(frontend, message):
                    self._answer(frontend, message)
                case Cancellation(frontend, request_id):
                    self.num_cancellations += 1
                    del self.running[frontend, request_id]
                    self.board.requests_cancelled += 1
                case FrontendDeath(frontend):
                    self.deaths.append(frontend)
                    for key in [key for key in self.running if key[0] == frontend]:
                        del self.running[key]
        if not self.paused:
            self._step()
        while self.calls:
            self.calls.popleft()()
        self.board.running = min(len(self.running), self.script.max_running)
        self.board.waiting = max(0, len(self.running) - self.script.max_running)
        self.link.flush()

    def _answer(self, frontend: int, message: AskQuote | AskStream | CancelOther) -> None:
        """Quote as many requests ahead as the client's has choices; a stream's record is its id; nothing is open."""
        request_id, finish, failure = message.request_id, Finish.STOP, None
        match message:
            case AskQuote(terms=terms):
                finish = Finish.QUOTED
                self.link.push_answer(frontend, Quote(request_id, terms.num_choices, 0, is_coalesced=False))
            case AskStream(question=question):
                self.link.push_answer(frontend, StreamRecord(request_id, question.stream.stream_id.encode()))
            case CancelOther():
                finish, failure = Finish.REJECTED, Failure(request_id, FailureCode.NOT_OPEN)
        self.link.push(frontend, request_id, NO_TOKEN, finish, failure=failure)

    def _submit(self, submission: Submission) -> None:
        tokens = array("i", submission.tokens or bytes(4 * submission.message.num_prompt_tokens))
        if tokens == _KILLING_PROMPT:
            os.kill(os.getpid(), signal.SIGKILL)
        card, message = self.script.card, submission.message
        if isinstance(message, AskQuote):
            self._answer(submission.frontend, message)
            return
        failure, max_tokens = None, message.max_tokens if isinstance(message, Generate) else 1
        if message.num_prompt_tokens + max_tokens > card.max_context_tokens:
            limit = max(0, card.max_context_tokens - max_tokens)
            failure = Failure(submission.request_id, FailureCode.CONTEXT_TOO_LONG, limit)
        elif not all(0 <= token < card.vocab_size for token in tokens):
            failure = Failure(submission.request_id, FailureCode.BAD_TOKEN, card.vocab_size)
        elif self.board.draining:
            failure = Failure(submission.request_id, FailureCode.SHUTTING_DOWN)
        if failure is not None:
            self.board.requests_rejected += 1
            self.link.push(submission.frontend, submission.request_id, NO_TOKEN, Finish.REJECTED, failure=failure)
            return
        self.board.requests_accepted += 1
        self.running[submission.frontend, submission.request_id] = _Running(submission, tokens, time.monotonic())
        if isinstance(message, Generate) and message.reports_progress:
            progress = Progress(submission.request_id, 0, 1, 0.5)
            self.link.push(submission.frontend, submission.request_id, NO_TOKEN, progress=progress)

    def _step(self) -> None:
        for key, running in list(self.running.items())[: self.script.max_running]:
            frontend, request_id = key
            submission, message = running.submission, running.submission.message
            num_prompt = message.num_prompt_tokens
            if not isinstance(message, Generate):
                started = Started(request_id, num_prompt, 0.0, self.script.is_coalesced)
                self.link.push_vectors(frontend, request_id, self.script.vector_parts(submission), started)
                del self.running[key]
                continue
            token = self.script.next_token(running.tokens, num_prompt, self.script.card.vocab_size)
            if (loan := submission.output) is not None:
                row = array("f", [token]) * self.script.card.vocab_size
                loan.write(len(running.tokens) - num_prompt, memoryview(row))
            running.tokens.append(token)
            finish, failure, started = Finish.NONE, None, None
            if token in message.stop_token_ids:
                finish = Finish.STOP
            elif len(running.tokens) - num_prompt >= message.max_tokens:
                finish = Finish.LENGTH
            elif running.tokens[:num_prompt] == _FAILING_PROMPT:
                finish, failure = Finish.FAILED, Failure(request_id, FailureCode.INTERNAL)
            if not running.started:
                running.started = True
                queue_s = time.monotonic() - running.received_s
                started = Started(request_id, 0, queue_s, self.script.is_coalesced)
            self.link.push(frontend, request_id, token, finish, started, failure)
            self.board.generated_tokens += 1
            if finish:
                del self.running[key]
                self.board.requests_finished += 1
        self.board.steps += 1

    def close(self) -> None:
        self.link.close()
        self.board.close()
        os.close(self.wake_fd)


class ScriptedBackend:
    """The engine in a thread of this process, for tests that look inside. A context manager."""

    def __init__(self, socket_path: Path, script: Script | None = None) -> None:
        self.engine = ScriptedEngine(socket_path, script or Script())
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self.engine.stopping:
                self.engine.turn()
        except BaseException as error:  # noqa: BLE001 - raised again after the join
            self._error = error

    def __enter__(self) -> ScriptedBackend:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stopping = True
        os.eventfd_write(self.engine.wake_fd, 1)
        self._thread.join(10)
        self.engine.close()
        if self._error is not None:
            raise self._error


class BackendProcess:
    """The engine as a process that can be killed, stopped and continued. A context manager.

    The process prints `ready` when its socket exists.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        next_token: str = "hashed",  # noqa: S107
        step_s: float = 0.001,
        max_running: int = 1 << 16,
        **card: Any,
    ) -> None:
        self._argv = [sys.executable, "-m", "tests.shm.scripted_backend", "--socket", str(socket_path)]
        self._argv += ["--next-token", next_token, "--step-s", str(step_s), "--max-running", str(max_running)]
        for name, value in card.items():
            self._argv += ["--card", name, str(value)]
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(self._argv, stdout=subprocess.PIPE, text=True, cwd=root)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait_for_death(self, timeout_s: float) -> None:
        """Return when the process has ended, or after timeout_s."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--next-token", choices=NEXT_TOKEN, default="hashed")
    parser.add_argument("--step-s", type=float, default=0.001)
    parser.add_argument("--max-running", type=int, default=1 << 16)
    parser.add_argument("--card", nargs=2, action="append", default=[], metavar=("FIELD", "VALUE"))
    options = parser.parse_args()
    card = {name: int(value) if value.isdecimal() else value for name, value in options.card}
    script = Script(model_card(**card), NEXT_TOKEN[options.next_token], options.step_s, options.max_running)
    engine = ScriptedEngine(options.socket, script)
    signal.signal(signal.SIGTERM, lambda *_: setattr(engine, "stopping", True))
    print("ready", flush=True)
    while not engine.stopping:
        engine.turn()
    engine.close()


if __name__ == "__main__":
    main()
