"""Prompts as embeddings in the CUDA pass, from the host and from the device; kernels and device are emulated."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import NOT_FINITE, DeviceRows
from tests.backend.passes.cuda.deferred_device import DeferredCudaPass, DeferredDevice
from tests.backend.passes.cuda.tiny_models import checkpoint, generated, make_driver, options, oracle, prompts
from tests.backend.passes.decoder.driver import Driver, RowsOnHost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.backend.passes.cuda.emulated_device import EmulatedDevice


@dataclass
class RowsOnDevice(RowsOnHost):
    """Rows in the emulator's device memory, which is memory of this process."""

    device: EmulatedDevice
    device_reads = True

    def read(self) -> NDArray[np.float32]:
        raise AssertionError("rows on the device are read by the host")

    def copy_to(self, target: DeviceRows) -> None:
        assert target.stream == self.device.stream
        values = self.values.copy()

        def copy() -> None:
            ctypes.memmove(target.pointer, values.ctypes.data, values.nbytes)

        if isinstance(self.device, DeferredDevice):
            self.device.queue.append(copy)
        else:
            copy()


@pytest.fixture(params=["from the host", "from the device"])
def driver(request: pytest.FixtureRequest) -> Driver:
    made = make_driver()
    if request.param == "from the device":
        made.give = lambda values: RowsOnDevice(values, made.forward_pass.device)
    return made


def looked_up(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the tokens' embeddings in the checkpoint, [n, hidden]."""
    with torch.inference_mode():
        rows: NDArray[np.float32] = oracle("llama3").get_input_embeddings()(torch.tensor(tokens)).numpy()
    return rows


def choice(embeddings: NDArray[np.float32], tokens: Sequence[int] = ()) -> int:
    """Return the greedy token of transformers after embeddings and then tokens."""
    rows = np.concatenate([embeddings, looked_up(tokens)]) if tokens else embeddings
    with torch.inference_mode():
        return int(oracle("llama3")(inputs_embeds=torch.from_numpy(rows)[None]).logits[0, -1].argmax())


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_embeddings_give_the_greedy_tokens_of_their_tokens_and_of_transformers(
    driver: Driver, chunk: int | None
) -> None:
    """A chunk of one token that samples is a captured step, also if the token is an embedding."""
    prompt = prompts((20,))[0]
    width = driver.forward_pass.spec.embedding_size
    no_tokens = np.random.default_rng(2).normal(0.0, 0.2, (18, width)).astype(np.float32)
    by_tokens, by_embeddings = driver.add(prompt), driver.add_embedded(looked_up(prompt))
    other = driver.add_embedded(no_tokens)
    logits = driver.prefill(chunk)
    np.testing.assert_allclose(logits[by_tokens.slot], logits[by_embeddings.slot], atol=1e-4, rtol=0)
    driver.decode(5)
    assert generated(by_tokens) == generated(by_embeddings)
    for row, embeddings in ((by_embeddings, looked_up(prompt)), (other, no_tokens)):
        tokens = generated(row)
        assert tokens == [choice(embeddings, tokens[:count]) for count in range(6)]


@pytest.mark.parametrize("num_others", [0, 1])
def test_a_single_embedding_that_samples_uses_the_captured_step(driver: Driver, num_others: int) -> None:
    """The step also has decode rows and padding."""
    row = driver.add(prompts((9,))[0])
    driver.prefill()
    others = [driver.add_embedded(looked_up([number + 3])) for number in range(num_others)]
    embeddings = looked_up([17])
    last = driver.add_embedded(embeddings)
    graphs = driver.forward_pass.device.graphs
    before = sum(graph.num_replays for graph in graphs)
    driver.step([(row, 1), *((other, 1) for other in others), (last, 1)])
    assert sum(graph.num_replays for graph in graphs) == before + 1
    assert generated(last) == [choice(embeddings)]
    assert len(generated(row)) == 2
    assert generated(row)[1] == choice(looked_up(row.tokens[:-1]))


@pytest.mark.parametrize("is_on_device", [False, True])
def test_steps_far_ahead_of_the_device_keep_their_own_embeddings(*, is_on_device: bool) -> None:
    """If memory were reused before the device has read it, a step would get a later step's embeddings."""
    forward_pass = DeferredCudaPass.load(checkpoint("llama3"), options())
    driver = Driver(forward_pass, num_pages=32, page_size=16)
    if is_on_device:
        driver.give = lambda values: RowsOnDevice(values, forward_pass.device)
    given = [looked_up(prompt) for prompt in prompts((7, 11, 9), seed=4)]
    rows = [driver.add_embedded(embeddings) for embeddings in given]
    pending = []
    for row in rows:
        batch = driver.build([(row, row.num_prompt_tokens)])
        pending.append(forward_pass.sample(forward_pass.forward(batch), batch))
    tokens = [int(output.wait().token_ids[0]) for output in pending]
    assert tokens == [choice(embeddings) for embeddings in given]


def test_tokens_and_their_embeddings_agree_in_16_bits() -> None:
    driver = make_driver(dtype="bf16")
    table = driver.forward_pass._model._embedding.float().numpy()
    pairs = [(driver.add(prompt), driver.add_embedded(table[list(prompt)])) for prompt in prompts((12, 30))]
    logits = driver.prefill()
    for by_tokens, by_embeddings in pairs:
        np.testing.assert_allclose(logits[by_tokens.slot], logits[by_embeddings.slot], atol=1e-4, rtol=0)


def test_nan_embeddings_affect_only_their_own_row(driver: Driver) -> None:
    prompt = prompts((20,))[0]
    embeddings = looked_up(prompt).copy()
    embeddings[3] = np.nan
    bad, good = driver.add_embedded(embeddings), driver.add(prompt)
    driver.prefill()
    expected = choice(looked_up(prompt))
    assert (bad.tokens[-1], good.tokens[-1]) == (NOT_FINITE, expected)
    pages = bad.pages
    driver.remove(bad)
    driver.free_pages = pages  # these pages contain NaN
    after = driver.add(prompt)
    driver.prefill(7)
    assert after.tokens[-1] == expected
