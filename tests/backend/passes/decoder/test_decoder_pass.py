"""CpuDecoderPass against transformers, for every architecture, with any prefill chunks and in any batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from tests.backend.passes.conftest import DETERMINISTIC, MakeOps, groups_for, make_native_ops, make_torch_ops
from tests.backend.passes.decoder.driver import Driver
from tests.checkpoints import load_oracle, make_checkpoint
from tests.presets import PRESETS
from tests.temporary import make_shared_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

Prompt = tuple[int, ...]

# A LongRoPE model has two sets of frequencies. If the context may exceed the first set's, the second is used from the
# start, as transformers does for a prompt of that length.
LENGTHS = {"phi3-longrope": (65, 70, 81)}
RAGGED = (1, 7, 16, 17, 45, 70)
SHORT = (1, 7, 16, 17, 35)
"""Token by token: across pages, and twice the windows."""
ON_ALL_PATHS = (
    *("llama3", "llama-bias", "mistral", "qwen3", "phi3-partial", "gemma2"),
    *("cohere-qk-norm", "starcoder2", "olmo3", "qwen2-moe", "gpt-oss", "gemma3n", "gemma4-moe", "qwen3.5"),
)
"""Presets that together use every operation, with every variation."""
KV_DTYPES = ("fp32", "bf16", "q8_0")
OF_EVERY_KIND = ("llama3/32", "mistral/32", "qwen3", "gemma2", "cohere-qk-norm/32", "qwen2-moe/32")


@cache
def checkpoint(architecture: str) -> Path:
    """A preset's checkpoint; "mistral/32" is the preset with heads of 32, which q8_0 needs."""
    preset, _, head_dim = architecture.partition("/")
    overrides = {"head_dim": int(head_dim)} if head_dim else {}
    return make_checkpoint(preset, make_shared_directory(), **overrides)


@cache
def oracle(architecture: str) -> Any:
    return load_oracle(checkpoint(architecture))


@cache
def oracle_logits(architecture: str, tokens: Prompt) -> NDArray[np.float32]:
    """[n, vocab]"""
    with torch.inference_mode():
        logits: NDArray[np.float32] = oracle(architecture)(torch.tensor([tokens])).logits[0].numpy()
    return logits


def make_pass(
    architecture: str,
    make_ops: MakeOps,
    dtype: torch.dtype = torch.float32,
    max_context_tokens: int | None = None,
    num_state_drafts: int = 0,
) -> CpuDecoderPass:
    model_dir = checkpoint(architecture)
    config = read_decoder_config(model_dir, max_context_tokens)
    with open_weights(model_dir, config) as weights:
        ops = make_ops(config, dtype)
        groups = groups_for(ops, config)
        return CpuDecoderPass(
            config, weights, ops, Dtype.of(dtype), 32, groups=groups, num_state_drafts=num_state_drafts
        )


def prompts(lengths: tuple[int, ...] = RAGGED, seed: int = 0) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 256, n).tolist()) for n in lengths]


def run_prompts(driver: Driver, batch: list[Prompt], chunk: int | None = None) -> list[NDArray[np.float32]]:
    """The logits of each prompt's last token."""
    rows = [driver.add(prompt) for prompt in batch]
    logits = driver.prefill(chunk)
    return [logits[row.slot] for row in rows]


def assert_near_oracle(architecture: str, prompt: Prompt, logits: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(logits, oracle_logits(architecture, prompt)[-1], atol=1e-3, rtol=0)


def name_of(value: object) -> str:
    """A parameter's part of a test's name."""
    return {make_torch_ops: "torch", make_native_ops: "native"}.get(value, str(value))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("architecture", "chunk", "make"),
    [
        (architecture, chunk, make_torch_ops if place == i % 2 else make_native_ops)
        for i, architecture in enumerate(PRESETS)
        for place, chunk in enumerate((1, 7))
    ],
    ids=name_of,
)
def test_logits_of_ragged_prompts_equal_those_of_transformers(architecture: str, chunk: int, make: MakeOps) -> None:
    """Each preset in chunks of both sizes: one of them in torch, the other on this machine's kernels."""
    batch = prompts(LENGTHS.get(architecture, SHORT if chunk == 1 else RAGGED))
    driver = Driver(make_pass(architecture, make), num_pages=64, page_size=8)
    for prompt, logits in zip(batch, run_prompts(driver, batch, chunk), strict=True):
        assert_near_oracle(architecture, prompt, logits)


@pytest.mark.parametrize("architecture", ON_ALL_PATHS)
def test_logits_on_every_path_equal_those_of_transformers(architecture: str, make_ops: MakeOps) -> None:
    batch = prompts(LENGTHS.get(architecture, RAGGED))
    driver = Driver(make_pass(architecture, make_ops), num_pages=64, page_size=8)
    for prompt, logits in zip(batch, run_prompts(driver, batch, chunk=7), strict=True):
        assert_near_oracle(architecture, prompt, logits)


@pytest.mark.parametrize(
    ("architecture", "make"),
    [(architecture, (make_native_ops, make_torch_ops)[i % 2]) for i, architecture in enumerate(PRESETS)],
    ids=name_of,
)
def test_logits_of_a_mixed_batch_equal_those_of_transformers(architecture: str, make: MakeOps) -> None:
    """Rows in decode, within their prompts, at the end of a long one and with a whole one, in one step."""
    driver = Driver(make_pass(architecture, make), num_pages=64, page_size=8)
    decoding, long, waiting, whole = rows = [driver.add(prompt) for prompt in prompts((66, 80, 70, 68), seed=7)]
    driver.step([(decoding, 66), (long, 33)])
    tokens = {row.slot: tuple(row.tokens) for row in rows}
    found = driver.step([(decoding, 1), (long, 47), (waiting, 9), (whole, 68)])
    assert found.keys() == {decoding.slot, long.slot, whole.slot}
    for slot, logits in found.items():
        assert_near_oracle(architecture, tokens[slot], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama3", "qwen3"])
def test_hidden_states_equal_the_last_ones_of_transformers(
    architecture: str, dtype: torch.dtype, make_ops: MakeOps
) -> None:
    """Compares prefill, beside rows with unfinished prompts, and decode."""
    driver = Driver(make_pass(architecture, make_ops, dtype), num_pages=64, page_size=8)
    driver.read = driver.forward_pass.host_hidden_states
    rows = [driver.add(prompt) for prompt in prompts((1, 17, 40))]
    for counts, num_found in (((1, 17, 5), 2), ((1, 1, 35), 3), ((1, 1, 1), 3)):
        tokens = {row.slot: list(row.tokens) for row in rows}
        found = driver.step(list(zip(rows, counts, strict=True)))
        assert len(found) == num_found
        for slot, states in found.items():
            with torch.inference_mode():
                expected = oracle(architecture).model(torch.tensor([tokens[slot]])).last_hidden_state[0, -1].numpy()
            assert (states.dtype, states.shape) == (np.float32, (driver.forward_pass.hidden_size,))
            if dtype is torch.float32:
                np.testing.assert_allclose(states, expected, atol=1e-4, rtol=0)
            else:
                assert np.linalg.norm(states - expected) < 0.05 * np.linalg.norm(expected)


def test_step_without_logit_rows_has_no_hidden_states(make_ops: MakeOps) -> None:
    driver = Driver(make_pass("llama3", make_ops), num_pages=8, page_size=8)
    logits = driver.forward_pass.forward(driver.build([(driver.add(range(9)), 4)]))
    assert driver.forward_pass.host_hidden_states(logits).shape == (0, driver.forward_pass.hidden_size)


def test_short_longrope_contexts_use_the_short_factors(make_ops: MakeOps) -> None:
    batch = prompts((1, 17, 64))
    driver = Driver(make_pass("phi3-longrope", make_ops, max_context_tokens=64), num_pages=32, page_size=8)
    for prompt, logits in zip(batch, run_prompts(driver, batch), strict=True):
        np.testing.assert_allclose(logits, oracle_logits("phi3-longrope", prompt)[-1], atol=1e-3, rtol=0)


@pytest.mark.parametrize("architecture", PRESETS)
def test_64_greedy_tokens_equal_those_of_transformers(architecture: str) -> None:
    check_64_greedy_tokens(architecture, make_native_ops)


def check_64_greedy_tokens(architecture: str, make_ops: MakeOps) -> None:
    batch = prompts(LENGTHS.get(architecture, (3, 40)), seed=1)
    driver = Driver(make_pass(architecture, make_ops), num_pages=48, page_size=16)
    run_prompts(driver, batch)
    driver.decode(63)
    for row in driver.rows:
        generated = row.tokens[row.num_prompt_tokens :]
        # Each token is the oracle's choice after all tokens before it.
        choices = oracle_logits(architecture, tuple(row.tokens[:-1])).argmax(axis=1)[row.num_prompt_tokens - 1 :]
        assert generated == choices.tolist()
        assert len(generated) == 64


def for_all_dtypes(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test with every dtype of weights and of the cache."""
    for mark in (
        pytest.mark.parametrize("kv_dtype", KV_DTYPES),
        pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"]),
    ):
        test = mark(test)
    return test


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "architecture"),
    [
        (dtype, kv_dtype, architecture)
        for i, dtype in enumerate((torch.float32, torch.bfloat16))
        for j, kv_dtype in enumerate(KV_DTYPES)
        for architecture in OF_EVERY_KIND[(i + j) % 3 :: 3]
    ],
    ids=str,
)
def test_row_is_the_same_bits_alone_and_in_a_batch(
    architecture: str, dtype: torch.dtype, kv_dtype: str, make_deterministic: MakeOps
) -> None:
    """Compares prefill and decode, in other pages; a third of the pairs of dtypes for each architecture."""
    assert_same_bits_alone_and_in_a_batch(architecture, dtype, kv_dtype, make_deterministic)


@pytest.mark.parametrize(
    ("architecture", "dtype", "kv_dtype"),
    [
        ("qwen2-moe", torch.float32, "fp32"),
        ("qwen2-moe", torch.bfloat16, "fp32"),
        ("gpt-oss", torch.bfloat16, "q8_0"),
    ],
)
def test_row_that_uses_experts_is_the_same_bits_alone_and_in_a_batch(
    architecture: str, dtype: torch.dtype, kv_dtype: str, make_deterministic: MakeOps
) -> None:
    assert_same_bits_alone_and_in_a_batch(architecture, dtype, kv_dtype, make_deterministic)


def assert_same_bits_alone_and_in_a_batch(
    architecture: str, dtype: torch.dtype, kv_dtype: str, make_deterministic: MakeOps
) -> None:
    prompt, *others = prompts((37, *range(1, 60, 8)), seed=2)
    alone, busy = (
        Driver(make_pass(architecture, make_deterministic, dtype), 64, 16, kv_dtype, seed=seed) for seed in (0, 9)
    )
    expected = run_prompts(alone, [prompt])[0]
    found = run_prompts(busy, [*others[:7], prompt, *others[7:]])[7]
    np.testing.assert_array_equal(found, expected)
    for _ in range(3):
        expected = alone.step([(alone.rows[0], 1)])[0]
        np.testing.assert_array_equal(busy.step([(row, 1) for row in busy.rows])[7], expected)


@pytest.mark.parametrize(
    ("implementation", "dtype", "kv_dtype"),
    [
        (name, dtype, kv_dtype)
        for i, name in enumerate(DETERMINISTIC)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
        for k, kv_dtype in enumerate(KV_DTYPES)
        if (i + j + k) % 2 == 0
    ],
    ids=str,
)
def test_logits_are_the_same_bits_in_any_prefill_chunks(implementation: str, dtype: torch.dtype, kv_dtype: str) -> None:
    """Several prompts together in chunks of 1, 7 and 64, and each alone without chunks, in other pages. Each
    implementation has every dtype of weights and of the cache, and each pair of them has two implementations or more.
    """
    batch = prompts((90, 64, 65, 3), seed=3)

    def driver(num_pages: int, seed: int) -> Driver:
        return Driver(make_pass("mistral/32", DETERMINISTIC[implementation], dtype), num_pages, 16, kv_dtype, seed)

    whole = [run_prompts(driver(8, seed=0), [prompt])[0] for prompt in batch]
    for chunk in (1, 7, 64):
        np.testing.assert_array_equal(run_prompts(driver(32, seed=chunk), batch, chunk), whole)


@for_all_dtypes
def test_logits_after_a_cached_prefix_are_the_same_bits(
    dtype: torch.dtype, kv_dtype: str, make_deterministic: MakeOps
) -> None:
    """A sequence that reuses pages computed in a batch has the logits of one that ran alone."""
    prompt, other = prompts((45, 50), seed=8)
    alone, driver = (
        Driver(make_pass("qwen3", make_deterministic, dtype), 32, 16, kv_dtype, seed=seed) for seed in (0, 5)
    )
    expected = run_prompts(alone, [prompt])[0]
    first, _ = driver.add(prompt), driver.add(other)
    driver.prefill(chunk=13)
    second = driver.add(prompt)
    second.pages, second.computed = first.pages[:2], 32
    np.testing.assert_array_equal(driver.step([(second, 13)])[second.slot], expected)


def test_row_has_the_same_tokens_alone_and_in_a_batch(make_ops: MakeOps) -> None:
    prompt, *others = prompts((37, *range(1, 60, 4)), seed=2)
    tokens = []
    for batch in ([prompt], [prompt, *others]):
        driver = Driver(make_pass("llama3", make_ops), num_pages=128, page_size=16)
        run_prompts(driver, batch)
        driver.decode(20)
        tokens.append(driver.rows[0].tokens)
    assert tokens[0] == tokens[1]


@settings(max_examples=25)
@given(data=st.data())
def test_native_logits_are_the_same_bits_for_random_chunks(data: st.DataObject) -> None:
    prompt = prompts((90,), seed=3)[0]
    page_size = data.draw(st.sampled_from([1, 5, 16, 32, 48, 64]), label="page size")
    kv_dtype = data.draw(st.sampled_from(KV_DTYPES), label="KV dtype")
    driver = Driver(make_pass("mistral/32", make_native_ops), 200, page_size, kv_dtype, seed=4)
    row = driver.add(prompt)
    logits: dict[int, NDArray[np.float32]] = {}
    while row.computed < len(prompt):
        left = len(prompt) - row.computed
        logits = driver.step([(row, data.draw(st.integers(1, left), label="chunk"))])
    np.testing.assert_array_equal(logits[row.slot], whole_prompt_logits(prompt, kv_dtype))


@cache
def whole_prompt_logits(prompt: Prompt, kv_dtype: str) -> NDArray[np.float32]:
    return run_prompts(Driver(make_pass("mistral/32", make_native_ops), 8, 16, kv_dtype), [prompt])[0]


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_unwritten_cache_positions_are_never_read(page_size: int, kv_dtype: str, make_ops: MakeOps) -> None:
    """Every position of the cache without a token holds NaN."""
    batch = prompts((1, 15, 16, 17, 40), seed=5)
    results = []
    for poisoned in (False, True):
        decoder = make_pass("mistral/32", make_ops)
        driver = Driver(decoder, num_pages=64, page_size=page_size, kv_dtype=kv_dtype)
        if poisoned:
            poison(decoder)
        logits = run_prompts(driver, batch, chunk=7)
        driver.decode(18)
        results.append((logits, [row.tokens for row in driver.rows]))
    np.testing.assert_array_equal(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


def cache_tensors(decoder: CpuDecoderPass) -> list[torch.Tensor]:
    ops: Any = decoder._ops
    if isinstance(ops, TorchOps):
        return [tensor for heads in (*ops.cache.keys, *ops.cache.values) for tensor in heads.tensors]
    return [torch.from_numpy(layer) for layer in ops.cache.arrays]


def poison(decoder: CpuDecoderPass) -> None:
    """Fill the cache with NaN: all bits set are a NaN in fp32, bf16 and binary16."""
    for tensor in cache_tensors(decoder):
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 0xFF if tensor.dtype is torch.uint8 else -1)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        (torch.float32, "bf16", 0.02),
        (torch.float32, "q8_0", 0.03),
        (torch.bfloat16, "fp32", 0.06),
        (torch.bfloat16, "bf16", 0.06),
        (torch.bfloat16, "q8_0", 0.06),
    ],
)
def test_narrower_dtypes_stay_near_fp32(dtype: torch.dtype, kv_dtype: str, bound: float, make_ops: MakeOps) -> None:
    """The bound is the root mean square of the difference, relative to that of the logits. bf16 rounds to 0.004 of a
    value, q8_0 to 0.004 of a block's largest value."""
    batch = prompts(seed=6)
    driver = Driver(make_pass("qwen3", make_ops, dtype), num_pages=64, page_size=16, kv_dtype=kv_dtype)
    for prompt, logits in zip(batch, run_prompts(driver, batch), strict=True):
        exact = oracle_logits("qwen3", prompt)[-1]
        assert np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)) < bound


def test_cache_has_exactly_the_announced_bytes(make_ops: MakeOps) -> None:
    for kv_dtype in KV_DTYPES:
        decoder = make_pass("qwen3", make_ops)
        decoder.create_cache(num_pages=7, page_size_tokens=16, kv_dtype=kv_dtype)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in cache_tensors(decoder))
        assert num_bytes == 7 * 16 * decoder.spec.kv_bytes_per_token[kv_dtype]
        decoder.close()


def test_step_without_logit_rows_returns_no_logits_and_writes_its_keys(make_ops: MakeOps) -> None:
    prompt = prompts((20,))[0]
    driver = Driver(make_pass("llama3", make_ops), num_pages=8, page_size=16)
    row = driver.add(prompt)
    assert driver.step([(row, 19)]) == {}
    logits = driver.step([(row, 1)])[row.slot]
    np.testing.assert_allclose(logits, oracle_logits("llama3", prompt)[-1], atol=1e-3, rtol=0)
