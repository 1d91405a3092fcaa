"""nano-vllm as a peer: the checkpoint we write for it, the FlashAttention 3 adapter, and how it is called."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.tools.gpu_check.checks import pass_agreement
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.engine_speed import nano_vllm
from penstock.tools.gpu_check.engine_speed.engine_runs import EnginePlan
from penstock.tools.gpu_check.engine_speed.offline_requests import draw_offline_requests
from penstock.tools.gpu_check.model_configs import TINY_FAMILY
from tests.tools.gpu_check.device_context import Record, make_device_context

if TYPE_CHECKING:
    from pathlib import Path

QWEN3 = TINY_FAMILY["qwen3"]
SIZES = nano_vllm.NanoVllmSizes(QWEN3, torch.float32, EnginePlan(requests=4, shortest=3, longest=9, batch_tokens=64))


def test_workload_equals_that_of_nano_vllms_benchmark() -> None:
    requests = draw_offline_requests(256, 100, 1024, 151_936)
    assert sum(request.num_new_tokens for request in requests) == 133_966
    assert {100 <= len(request.prompt) <= 1024 for request in requests} == {True}
    assert max(max(request.prompt) for request in draw_offline_requests(9, 3, 9, 200)) < 200


def test_transformers_computes_the_same_logits_from_the_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    weights = RandomWeights(QWEN3, torch.float32, torch.device("cpu"))
    nano_vllm.write_checkpoint(tmp_path, QWEN3, weights, torch.float32)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.torch_dtype, config.attention_bias, config.hidden_act) == (torch.float32, False, "silu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 0
    assert isinstance(tokenizer.decode([5, 199]), str)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = torch.from_numpy(pass_agreement._last_logits(pass_agreement._on_cpu(QWEN3), QWEN3))
    prompts = torch.tensor(np.stack(pass_agreement._prompts(QWEN3))).long()
    with torch.inference_mode():
        theirs = model(prompts).logits[:, -1].double()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of [tokens, heads, size] tensors; the queries are the last tokens."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)


def flash_attention_3() -> ModuleType:
    """A module with the names and arguments of `flash_attn_interface`, in plain torch."""
    module: Any = ModuleType("flash_attn_interface")

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        *, softmax_scale: float, causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert causal
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
        bounds = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
        return torch.cat([attend(q[a:b], k[c:d], v[c:d], softmax_scale) for a, b, c, d in bounds])

    def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, page_table: Any, softmax_scale: float, causal: bool,
        cu_seqlens_q: Any = None, max_seqlen_q: int | None = None,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert causal
        assert cache_seqlens.dtype == torch.int32
        rows = q.unbind() if cu_seqlens_q is None else q.split(cu_seqlens_q.diff().tolist())
        assert max_seqlen_q is None or max_seqlen_q == max(map(len, rows))
        outputs = [
            attend(row, k_cache[pages].flatten(0, 1)[:length], v_cache[pages].flatten(0, 1)[:length], softmax_scale)
            for row, pages, length in zip(rows, page_table, cache_seqlens.tolist(), strict=True)
        ]
        return (torch.stack if cu_seqlens_q is None else torch.cat)(outputs), None

    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    return module


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attention_3())
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    nano_vllm.install_flash_attention()
    yield sys.modules["flash_attn"]
    sys.modules.pop("flash_attn", None)


def test_flash_attention_3_adapter_computes_what_nano_vllm_expects(flash_attn: Any) -> None:
    """Calls it as nano-vllm's attention layer does: new prompts, prompts after cached prefixes, decodes."""
    torch.manual_seed(0)
    lengths, history = [5, 9], [6, 2]
    k, v = (torch.randn(sum(lengths) + sum(history), 2, 16) for _ in range(2))
    q = torch.randn(sum(lengths), 4, 16)
    totals = [new + old for new, old in zip(lengths, history, strict=True)]
    named = {"softmax_scale": 0.25, "causal": True}
    starts_q, starts_k = (torch.tensor([0, *np.cumsum(part)], dtype=torch.int32) for part in (lengths, totals))
    packed = {"cu_seqlens_q": starts_q, "max_seqlen_q": max(lengths)}
    fresh = flash_attn.flash_attn_varlen_func(
        q, k, v, **packed, cu_seqlens_k=starts_k, max_seqlen_k=max(totals), block_table=None, **named
    )
    pages, table = torch.zeros(2, 8, 4, 2, 16), torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
    for row, (start, end) in enumerate(pairwise(starts_k.tolist())):
        for position in range(end - start):
            block = table[row, position // 4]
            pages[0, block, position % 4], pages[1, block, position % 4] = k[start + position], v[start + position]
    behind = flash_attn.flash_attn_varlen_func(
        q, *pages, **packed, cu_seqlens_k=starts_k, max_seqlen_k=max(totals), block_table=table, **named
    )
    torch.testing.assert_close(behind, fresh)
    last = q[starts_q[1:].long() - 1]
    counts = torch.tensor(totals, dtype=torch.int32)
    decoded = flash_attn.flash_attn_with_kvcache(
        last.unsqueeze(1), *pages, cache_seqlens=counts, block_table=table, **named
    )
    torch.testing.assert_close(decoded.squeeze(1), fresh[starts_q[1:].long() - 1])


def fake_nanovllm(calls: list[Any]) -> dict[str, ModuleType]:
    package: Any = ModuleType("nanovllm")
    models: Any = ModuleType("nanovllm.models")
    qwen3: Any = ModuleType("nanovllm.models.qwen3")

    def get_rope(*lengths: int, rope_scaling: object = None) -> object:
        assert rope_scaling is None
        return lengths

    class LLM:
        def __init__(self, model: str, **named: Any) -> None:
            assert sys.modules["flash_attn"].flash_attn_with_kvcache is not None
            assert qwen3.get_rope(128, rope_scaling={"rope_type": "default"}) == (128,)
            calls.append((model, named))

        def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> None:
            assert not use_tqdm
            calls.append((prompts, sampling))

    package.LLM, package.SamplingParams, qwen3.get_rope = LLM, SimpleNamespace, get_rope
    package.models, models.qwen3 = models, qwen3
    return {module.__name__: module for module in (package, models, qwen3)}


def test_both_run_the_same_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_attn: ModuleType) -> None:
    assert flash_attn
    calls: list[Any] = []
    for name, module in fake_nanovllm(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    record = Record(tmp_path)
    nano_vllm.measure(record.results, make_device_context(), SIZES)
    found = record.findings()
    ours, theirs = found["peers.nano_vllm.ours"].value, found["peers.nano_vllm"].value
    assert isinstance(ours, float)
    assert isinstance(theirs, float)
    assert found["peers.nano_vllm_ratio"].value == pytest.approx(ours / theirs)
    (_, options), _, (prompts, sampling) = calls
    assert options == {"enforce_eager": False, "max_model_len": 4096}
    requests = draw_offline_requests(4, 3, 9, QWEN3.vocab_size)
    assert prompts == [request.prompt for request in requests]
    assert [params.max_tokens for params in sampling] == [request.num_new_tokens for request in requests]
    assert {(params.temperature, params.ignore_eos) for params in sampling} == {(0.6, True)}


def test_failing_nano_vllm_is_skipped_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_attn: ModuleType
) -> None:
    assert flash_attn
    modules: Any = fake_nanovllm([])

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("no process group")

    modules["nanovllm"].LLM = fail
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    record = Record(tmp_path)
    nano_vllm.measure(record.results, make_device_context(), SIZES)
    assert record.findings()["peers.nano_vllm_ratio"].detail == "not measured: AssertionError: no process group"


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"nanovllm"}
    monkeypatch.setattr(nano_vllm.importlib.util, "find_spec", lambda name: name in present or None)
    assert "neither is present" in str(nano_vllm.missing_package())
    present.add("flash_attn_interface")
    assert nano_vllm.missing_package() is None
    present.clear()
    assert "nanovllm is neither installed" in str(nano_vllm.missing_package())
