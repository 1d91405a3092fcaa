"""Logits through the real engine, link and client: into shared memory, and onto a fake device without the host."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.buffers import check_shared_buffers, make_exporter, open_sharing_device
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import DeviceRows, EmbeddingRows, IBatchedForwardPass, PassOptions, StepBatch
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.fake import FakePass, embedded_token
from penstock.shm.client import BufferSlice, GenerationRequest
from penstock.shm.messages import BufferContent, BufferKind, BufferRequest, ContentSpec, Finish, Sampling
from tests.backend.served import MAX_RUNNING, connected, generate, served
from tests.checkpoints import load_oracle
from tests.shm.buffers.fake_device import FakeDevice

GREEDY = Sampling(temperature=0.0)
VOCAB, PAGE, NUM_PAGES = 64, 4, 24
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class DeviceFakePass(FakePass):
    """The fake pass with logits on a fake device. Its one stream runs queued work when the next step begins."""

    STREAM = 5
    _PROMPT_BYTES = 1 << 12

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(VOCAB, MAX_RUNNING)
        self._device = device
        self._prompts = device.allocate(self._PROMPT_BYTES + 4 * VOCAB * MAX_RUNNING)
        self._pointer = self._prompts + self._PROMPT_BYTES
        self.num_host_copies = 0

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        self._device.run(self.STREAM)
        logits = super().forward(batch)
        self._device.poke(self._pointer, logits.tobytes())
        return logits

    def _tokens_of(self, values: EmbeddingRows) -> list[int]:
        if not values.device_reads:
            self.num_host_copies += 1
            return super()._tokens_of(values)
        values.copy_to(DeviceRows(self._prompts, self.STREAM))
        self._device.run(self.STREAM)
        data = self._device.read(self._prompts, 4 * self.spec.embedding_size * values.num_rows)
        return [embedded_token(row) for row in np.frombuffer(data, np.float32).reshape(values.num_rows, -1)]

    def host_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        self.num_host_copies += 1
        return super().host_logits(logits)

    def device_logits(self, logits: NDArray[np.float32]) -> DeviceRows:
        return DeviceRows(self._pointer, self.STREAM)

    def close(self) -> None:
        self._device.run(self.STREAM)
        self._device.free(self._prompts)
        super().close()


def fake() -> IBatchedForwardPass:
    forward_pass = FakePass(VOCAB, MAX_RUNNING)
    forward_pass.create_cache(NUM_PAGES, PAGE, "fp32")
    return forward_pass


def decoder() -> IBatchedForwardPass:
    options = PassOptions(dtype="fp32", max_running=MAX_RUNNING, max_batch_tokens=32, deterministic=True)
    forward_pass = CpuDecoderPass.load(DEMO_MODEL_DIR, options)
    forward_pass.create_cache(NUM_PAGES, PAGE, "fp32")
    return forward_pass


def logits_alone(load: Callable[[], IBatchedForwardPass], tokens: list[int], num_rows: int) -> NDArray[np.float32]:
    """[num_rows, vocab] logits before each of the last num_rows tokens, each context computed alone in one step."""
    forward_pass = load()
    rows = []
    for count in range(len(tokens) - num_rows, len(tokens)):
        batch = StepBatch(
            input_ids=np.array(tokens[:count], np.int32),
            query_starts=np.array([0, count], np.int32),
            context_lens=np.zeros(1, np.int32),
            page_table=np.arange(NUM_PAGES, dtype=np.int32)[None],
            slots=np.zeros(1, np.int32),
            logit_rows=np.zeros(1, np.int32),
        )
        rows.append(forward_pass.host_logits(forward_pass.forward(batch))[0].copy())
    forward_pass.close()
    return np.stack(rows)


@pytest.mark.parametrize("load", [fake, decoder])
async def test_each_shared_row_holds_the_logits_of_its_token(load: Callable[[], IBatchedForwardPass]) -> None:
    """The batch is busy, with preemption and chunks; each row is compared with its context computed alone."""
    with served(load) as path:
        async with connected(path, BufferRequest(3, 1 << 17)) as client:
            buffers = [client.take_buffer() for _ in range(3)]
            prompts = [[*PROMPT, number] for number in range(3)]
            others = [generate(client, GenerationRequest([number] * 20, 20, GREEDY)) for number in range(4)]
            parts = [BufferSlice(buffer, BufferContent.LOGITS, 6) for buffer in buffers]
            requests = [
                generate(client, GenerationRequest(prompt, 10, GREEDY, output=part))
                for prompt, part in zip(prompts, parts, strict=True)
            ]
            tokens = (await asyncio.gather(*requests, *others))[:3]
            for prompt, generated, buffer in zip(prompts, tokens, buffers, strict=True):
                assert (len(generated), buffer.num_rows) == (10, 6)
                rows = np.asarray(buffer.rows()).reshape(6, -1)
                assert rows.argmax(1).tolist() == generated[:6]
                expected = logits_alone(load, prompt + generated[:6], 6)
                np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-4)


async def test_hidden_states_arrive_like_logits_and_beside_them() -> None:
    oracle = load_oracle(DEMO_MODEL_DIR)
    contents = (BufferContent.HIDDEN_STATES, BufferContent.LOGITS, BufferContent.HIDDEN_STATES)
    with served(decoder) as path:
        async with connected(path, BufferRequest(3, 1 << 17)) as client:
            buffers = [client.take_buffer() for _ in contents]
            prompts = [[*PROMPT, number] for number in range(3)]
            requests = [
                generate(client, GenerationRequest(prompt, 8, GREEDY, output=BufferSlice(buffer, content, 5)))
                for prompt, buffer, content in zip(prompts, buffers, contents, strict=True)
            ]
            answers = zip(prompts, buffers, contents, await asyncio.gather(*requests), strict=True)
            for prompt, buffer, content, tokens in answers:
                ids = torch.tensor([prompt + tokens[:4]])
                with torch.inference_mode():
                    if content is BufferContent.LOGITS:
                        expected = oracle(ids).logits[0, -5:].numpy()
                    else:
                        expected = oracle.model(ids).last_hidden_state[0, -5:].numpy()
                rows = np.asarray(buffer.rows()).reshape(expected.shape)
                np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-3)


def test_hidden_states_are_offered_only_if_the_pass_has_them_in_all_kinds_of_memory(tmp_path: Path) -> None:
    class OnHostOnly(DeviceFakePass):
        hidden_size = 8

        def host_hidden_states(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
            return logits[:, :8]

    class OnDevice(OnHostOnly):
        def device_hidden_states(self, logits: NDArray[np.float32]) -> DeviceRows:
            return self.device_logits(logits)

    device = FakeDevice(tmp_path)
    hidden_states = ContentSpec(BufferContent.HIDDEN_STATES, 8, "<f4")
    for choice, kind, is_offered in (
        ("auto", DeviceFakePass, False),
        ("auto", OnHostOnly, False),
        ("host", OnHostOnly, True),
        ("host", OnDevice, True),
        ("auto", OnDevice, True),
    ):
        assert (hidden_states in make_exporter(choice, 1, kind(device), device)._contents) is is_offered


async def test_request_with_shared_logits_reuses_prefixes_but_does_not_coalesce() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(2, 1 << 12)) as client:
            plain = GenerationRequest(PROMPT, 6, GREEDY, may_share=True)
            buffer = client.take_buffer()
            part = BufferSlice(buffer, BufferContent.LOGITS, 1)
            asking = GenerationRequest(PROMPT, 6, GREEDY, may_share=True, output=part)
            tokens = await asyncio.gather(generate(client, plain), generate(client, asking), generate(client, plain))
            assert tokens[0] == tokens[1] == tokens[2]
            assert np.asarray(buffer.rows()).argmax() == tokens[1][0]


async def test_first_row_is_the_first_generated_token_even_if_the_prompt_is_scored() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 14)) as client:
            buffer = client.take_buffer()
            part = BufferSlice(buffer, BufferContent.LOGITS, 3)
            stream = client.submit(GenerationRequest(PROMPT, 5, GREEDY, output=part, num_prompt_logprobs=0))
            tokens = [token for batch in [b async for b in stream] for token in batch.token_ids]
            assert len(stream.prompt_logprobs) == len(PROMPT) - 1
            assert np.asarray(buffer.rows()).reshape(3, -1).argmax(1).tolist() == tokens[:3]


async def test_prompt_in_a_buffer_is_validated_like_any_other() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 12)) as client:
            buffer = client.take_buffer()
            part = BufferSlice(buffer, BufferContent.TOKENS, len(PROMPT))
            buffer.view()[: 4 * len(PROMPT)] = array("i", PROMPT).tobytes()
            assert await generate(client, GenerationRequest(part, 5, GREEDY)) == await generate(
                client, GenerationRequest(PROMPT, 5, GREEDY)
            )
            buffer.view()[:4] = array("i", [VOCAB]).tobytes()
            (last,) = [batch async for batch in client.submit(GenerationRequest(part, 5, GREEDY))]
            assert (last.finish, last.failure_limit) == (Finish.REJECTED, VOCAB)


async def test_buffer_of_a_cancelled_request_can_be_used_again() -> None:
    with served(fake) as path:
        async with connected(path, BufferRequest(1, 1 << 14)) as client:
            for length in range(1, 20):
                async with asyncio.timeout(10):
                    while not client.num_free_buffers:  # noqa: ASYNC110 - the backend changes it
                        await asyncio.sleep(0.001)
                buffer = client.take_buffer()
                part = BufferSlice(buffer, BufferContent.LOGITS, 40)
                stream = client.submit(GenerationRequest(PROMPT * 4, 40, GREEDY, output=part))
                for _ in range(length % 4):
                    await anext(stream)
                stream.cancel()
                buffer.release()


@pytest.fixture
def device(tmp_path: Path) -> FakeDevice:
    return FakeDevice(tmp_path)


async def test_device_logits_and_prompts_are_never_copied_to_the_host(device: FakeDevice, tmp_path: Path) -> None:
    passes = []

    def load() -> IBatchedForwardPass:
        passes.append(DeviceFakePass(device))
        passes[0].create_cache(NUM_PAGES, PAGE, "fp32")
        return passes[0]

    clients_device = FakeDevice(tmp_path)
    with served(load, "cuda", device) as path:
        async with connected(path, BufferRequest(2, 1 << 12, (BufferKind.CUDA,)), clients_device) as client:
            prompt, output = client.take_buffer(), client.take_buffer()
            pointer = prompt.device_view().__cuda_array_interface__["data"][0]
            clients_device.poke(pointer, array("i", PROMPT).tobytes())
            request = GenerationRequest(
                BufferSlice(prompt, BufferContent.TOKENS, len(PROMPT)),
                6,
                GREEDY,
                output=BufferSlice(output, BufferContent.LOGITS, 4),
            )
            tokens = await generate(client, request)
            assert tokens == await generate(client, GenerationRequest(PROMPT, 6, GREEDY))
            rows = output.device_rows().__cuda_array_interface__
            assert rows["shape"] == (4, VOCAB)
            read = np.frombuffer(clients_device.read(rows["data"][0], 4 * 4 * VOCAB), np.float32).reshape(4, VOCAB)
            assert read.argmax(1).tolist() == tokens[:4]
            prompt.release()
            output.release()
        async with asyncio.timeout(20):
            while device.num_allocated > 1:  # noqa: ASYNC110 - the engine's thread handles the disconnect
                await asyncio.sleep(0.002)
    assert passes[0].num_host_copies == 0
    assert (device.num_allocated, clients_device.num_opened, device.registered) == (0, 0, {})


def test_kind_of_buffers_follows_the_option_and_the_pass(device: FakeDevice) -> None:
    on_device = DeviceFakePass(device)
    for choice, forward_pass, api, kinds in (
        ("auto", fake(), None, (BufferKind.HOST,)),
        ("auto", fake(), device, (BufferKind.HOST,)),
        ("auto", on_device, device, (BufferKind.CUDA, BufferKind.HOST)),
        ("host", on_device, device, (BufferKind.HOST,)),
        ("cuda", on_device, device, (BufferKind.CUDA,)),
    ):
        assert make_exporter(choice, 1, forward_pass, api)._kinds == kinds
    with pytest.raises(StartupError, match='--shared-buffers is "cuda"; this forward pass'):
        make_exporter("cuda", 1, fake(), device)
    with pytest.raises(StartupError, match='--shared-buffers is "cuda"; the model runs on the CPU'):
        check_shared_buffers("cuda", "cpu")
    check_shared_buffers("auto", "cpu")
    assert open_sharing_device("cpu") is None
