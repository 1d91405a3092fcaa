"""OpenVINO GenAI's continuous batching behind an OpenAI endpoint: a peer for `penstock bench compare`.

PYTHON openvino_peer.py MODEL_DIR PORT [PRECISION]

Runs in the Python environment of openvino-genai and imports nothing of Penstock. It takes prompts of token ids, and
sends a token's number instead of its text, so that only the pipeline and a few lines of HTTP are measured.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

STEP_TOKENS = 192
"""As Penstock's steps on a CPU."""

Deliver = Callable[[list[int], bool], object]
"""Takes new tokens, and whether they are the last."""


class Asked(Protocol):
    def ask(self, prompt: list[int], body: dict[str, Any], deliver: Deliver) -> None: ...


class Pipeline:
    """Runs steps on a thread of its own as long as there are requests."""

    def __init__(self, model_dir: str, precision: str) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens = 2, STEP_TOKENS
        settings = {"INFERENCE_PRECISION_HINT": precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model_dir, scheduler, "CPU", settings)
        self._asked: queue.SimpleQueue[tuple[list[int], dict[str, Any], Deliver]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, prompt: list[int], body: dict[str, Any], deliver: Deliver) -> None:
        self._asked.put((prompt, body, deliver))

    def _run(self) -> None:
        running: list[tuple[Any, Deliver]] = []
        num_asked = 0
        while True:
            while not running or not self._asked.empty():
                prompt, body, deliver = self._asked.get()
                num_asked += 1
                running.append((self._add(num_asked, prompt, body), deliver))
            self._pipeline.step()
            running = [each for each in running if not self._deliver(*each)]

    def _add(self, number: int, prompt: list[int], body: dict[str, Any]) -> Any:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig(max_new_tokens=body["max_tokens"], ignore_eos=True)
        if body["temperature"] > 0:
            config.do_sample, config.temperature, config.rng_seed = True, body["temperature"], number
            config.top_p, config.top_k = body.get("top_p", 1.0), body.get("top_k", sys.maxsize)
        return self._pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), config)

    def _deliver(self, handle: Any, deliver: Deliver) -> bool:
        """True when the request has ended."""
        tokens = []
        while handle.can_read():
            (output,) = handle.read().values()
            tokens += output.generated_ids
        has_ended: bool = handle.get_status() != self._genai.GenerationStatus.RUNNING
        if tokens or has_ended:
            deliver(tokens, has_ended)
        return has_ended


class Server:
    """The part of the completions API that the load generator uses."""

    def __init__(self, pipeline: Asked) -> None:
        self._pipeline = pipeline

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((line[15:] for line in head.splitlines() if line.startswith("content-length:")), "0")
                body = await reader.readexactly(int(length))
                if head.startswith("get"):
                    models = b'{"data": [{"id": "model"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
                else:
                    await self._complete(json.loads(body), writer)
        except asyncio.IncompleteReadError:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [1]
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        num_tokens = 0

        def write(tokens: list[int], is_last: bool) -> None:
            nonlocal num_tokens
            num_tokens += len(tokens)
            events: list[dict[str, object]] = []
            if tokens:
                finish = "length" if is_last else None
                text = "".join(f" {token}" for token in tokens)
                events.append({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})
            if is_last:
                usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
                events.append({"choices": [], "usage": usage})
            data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n" * is_last
            writer.write(f"{len(data):x}\r\n{data}\r\n".encode() + b"0\r\n\r\n" * is_last)
            if is_last:
                ended.set()

        self._pipeline.ask(prompt, body, lambda tokens, is_last: loop.call_soon_threadsafe(write, tokens, is_last))
        await ended.wait()


async def main(model_dir: str, port: str, precision: str = "bf16") -> None:
    server = Server(Pipeline(model_dir, precision))
    async with await asyncio.start_server(server.serve, "127.0.0.1", int(port)) as listening:
        await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
