"""Heads that predict the token after the next one (MTP): their logits, and answers with their guesses."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from penstock.backend.engine.steps.draft_model import DraftAsk, HeadModel
from penstock.backend.engine.steps.model_drafting import ModelDrafting
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import FROM_SLOT, PassOptions, SamplingParams, SlotInit, StepBatch
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.scheduling.drafting import MAX_STATE_DRAFTS
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.messages import Sampling
from tests.backend.harness import Bench
from tests.checkpoints import load_oracle, make_checkpoint
from tests.mtp import add_head
from tests.temporary import make_shared_directory

OPTIONS = PassOptions(
    dtype="fp32", max_running=4, max_batch_tokens=64, num_state_drafts=MAX_STATE_DRAFTS, guesses_tokens=True
)
PAGE = 16


def _fused(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With all experts in two tensors, as in transformers."""
    if "mlp.experts.0.down_proj.weight" not in weights:
        return weights
    count = sum(name.startswith("mlp.experts.") for name in weights) // 3
    gate, up, down = (
        torch.stack([weights.pop(f"mlp.experts.{i}.{part}_proj.weight") for i in range(count)])
        for part in ("gate", "up", "down")
    )
    return weights | {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}


def head_logits(model_dir: Path, tokens: list[int], num_guesses: int) -> list[NDArray[np.float32]]:
    """The formula in torch: of the token after tokens, and then of each token after the guessed ones."""
    model, weights = load_oracle(model_dir), load_file(model_dir / "model.safetensors")
    layer_index = next(i for i, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn"))
    layer = model.model.layers[layer_index]
    layer.load_state_dict(_fused({n.removeprefix("mtp.layers.0."): w for n, w in weights.items() if "mtp.layers" in n}))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * (1 + weights[f"mtp.{name}.weight"])

    with torch.no_grad():
        plain = load_oracle(model_dir)
        given = plain.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        found, tokens = [], list(tokens)
        for _ in range(num_guesses):
            embedded = plain.model.embed_tokens(torch.tensor(tokens[1:]))
            inputs = torch.cat([norm(embedded, "pre_fc_norm_embedding"), norm(given, "pre_fc_norm_hidden")], -1)
            x, count = (inputs @ weights["mtp.fc.weight"].T)[None], len(tokens) - 1
            positions = torch.arange(count)[None]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            turns = plain.model.rotary_emb(x, positions)
            x = layer(x, position_embeddings=turns, attention_mask=mask, position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
            results = norm(x.reshape(count, -1), "norm")
            logits = plain.lm_head(results[-1])
            found.append(logits.numpy())
            tokens.append(int(logits.argmax()))
            given = torch.cat([given, results[-1:]])
    return found


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3-next"])
def model_dir(request: pytest.FixtureRequest) -> Path:
    return add_head(make_checkpoint(request.param, make_shared_directory()))


def _load(model_dir: Path) -> CpuDecoderPass:
    loaded = CpuDecoderPass.load(model_dir, OPTIONS)
    assert loaded.spec == CpuDecoderPass.describe(model_dir, OPTIONS)
    if not loaded.spec.verifies_drafts:
        pytest.skip("this machine has no native kernels")
    return loaded


def _step(tokens: list[int], start: int, *, is_last: bool, drafts: int = 0) -> StepBatch:
    first = SlotInit(1, SamplingParams(temperature=0.0), np.array(tokens, np.int32), len(tokens))
    return StepBatch(
        input_ids=np.array(tokens, np.int32),
        query_starts=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([start], np.int32),
        page_table=np.array([[3, 1, 2]], np.int32),
        slots=np.array([1], np.int32),
        logit_rows=np.arange(int(is_last), dtype=np.int32),
        slot_inits=() if start else (first,),
        drafts=np.array([drafts], np.int32) if drafts else None,
    )


def test_logits_of_a_head_are_those_of_the_formula(model_dir: Path) -> None:
    """After a prompt in chunks, a step of one token, and a step whose drafts are rejected."""
    loaded = _load(model_dir)
    loaded.create_cache(4, PAGE, "fp32")
    text = np.random.default_rng(3).integers(3, 200, 30).tolist()
    for start, end in ((0, 13), (13, 27)):
        batch = _step(text[start:end], start, is_last=end == 27)
        loaded.sample(loaded.forward(batch), batch)
    text[27:] = [int(loaded._last_tokens[1])]
    batch = _step([FROM_SLOT], 27, is_last=True)
    text.append(int(loaded.sample(loaded.forward(batch), batch).wait().token_ids[0]))
    wrong = [(text[-1] + 1) % 200, 5, 6]
    batch = _step([FROM_SLOT, *wrong], 28, is_last=True, drafts=3)
    output = loaded.sample(loaded.forward(batch), batch).wait()
    text += [*wrong[: output.num_accepted[0]], int(output.token_ids[0])]
    guesser: Any = loaded.make_guesser()
    seen, forward = [], guesser.forward
    guesser.forward = lambda batch: seen.append(forward(batch).copy()) or seen[-1]
    ask = DraftAsk(array("i", text), 27, [3, 1, 2], 1, b"", SamplingParams(temperature=0.0), (), 4)
    (guessed,) = HeadModel(guesser, 4, PAGE, 64, 1e-30).guess([ask], 256).tokens
    expected = head_logits(model_dir, text, 4)
    np.testing.assert_allclose(np.concatenate(seen), np.stack(expected), atol=2e-4, rtol=0)
    assert guessed == [int(logits.argmax()) for logits in expected]
    loaded.close()


class Eager(ModelDrafting):
    """Always asks the head."""

    def __init__(self) -> None:
        super().__init__(StepTiming(), None, 1000, MAX_STATE_DRAFTS, is_alone=True)

    def _best_length(self, num_rows: int, rows: list[Sequence]) -> int:
        return 3

    def _best_count(self, num_rows: int, chances: list[float]) -> int:
        return len(chances)


@pytest.mark.parametrize("copies", [False, True], ids=["random head", "head that is often right"])
def test_answers_are_the_same_with_a_head(copies: bool) -> None:
    """With few pages sequences are preempted."""
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"]} if copies else {}
    model_dir = add_head(make_checkpoint("qwen3.5", make_shared_directory(), **layers), copies=copies)
    asks = (
        {},
        {"sampling": Sampling(temperature=0.0, frequency_penalty=0.3, repetition_penalty=1.1)},
        {"sampling": Sampling(temperature=0.4, top_p=0.9, seed=4)},
    )
    answers = []
    for num_pages, drafting in ((64, None), (64, Eager()), (14, Eager())):
        loaded = _load(model_dir)
        guesser = loaded.make_guesser() if drafting is not None else None
        sizes: dict[str, Any] = {
            "page_size": PAGE,
            "num_pages": num_pages,
            "vocab_size": 256,
            "max_running": 4,
            "min_chance": 1e-30,
        }
        bench = Bench(forward_pass=loaded, drafting=drafting, draft_pass=guesser, num_checkpoints=4, **sizes)
        for request_id, asked in enumerate(asks):
            prompt = np.random.default_rng(request_id).integers(3, 250, 25).tolist()
            bench.submit(prompt, 60 + request_id, request_id=request_id, **asked)
        bench.run_dry()
        if drafting is not None:
            assert (bench.board.accepted_tokens > 60) is copies
            assert bench.board.drafted_tokens > 40
        answers.append([bench.received(request_id).token_ids for request_id in range(len(asks))])
        bench.close()
        loaded.close()
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


def test_head_counts_in_the_plan_and_files_without_it_are_served(tmp_path: Path) -> None:
    """As those of fine-tuned models, whose config.json still speaks of one."""
    model_dir = add_head(make_checkpoint("qwen3.5", tmp_path))
    with_head = CpuDecoderPass.describe(model_dir, OPTIONS)
    without = CpuDecoderPass.describe(model_dir, replace(OPTIONS, guesses_tokens=False))
    assert (with_head.guesses_tokens, without.guesses_tokens) == (True, False)
    assert with_head.kv_bytes_per_token["fp32"] == 2 * without.kv_bytes_per_token["fp32"]
    assert with_head.state_bytes_per_sequence == without.state_bytes_per_sequence + 4 * 64
    num_bytes = sum(w.nbytes for n, w in load_file(model_dir / "model.safetensors").items() if n.startswith("mtp."))
    assert with_head.weight_bytes == without.weight_bytes + num_bytes
    assert with_head.workspace_bytes == MAX_STATE_DRAFTS * with_head.state_bytes_per_sequence
    tensors = load_file(model_dir / "model.safetensors")
    save_file({n: w for n, w in tensors.items() if not n.startswith("mtp.")}, model_dir / "model.safetensors")
    assert CpuDecoderPass.describe(model_dir, OPTIONS) == replace(without, verifies_drafts=False)
    loaded = CpuDecoderPass.load(model_dir, OPTIONS)
    assert loaded.make_guesser() is None
    loaded.close()
    (model_dir / "model.safetensors").unlink()  # before a hub's file is downloaded
    assert CpuDecoderPass.describe(model_dir, OPTIONS).guesses_tokens


def test_model_that_runs_on_torch_is_served_without_its_head(tmp_path: Path) -> None:
    model_dir = add_head(make_checkpoint("qwen3.5", tmp_path, linear_value_head_dim=24))
    loaded = CpuDecoderPass.load(model_dir, OPTIONS)
    assert loaded.spec == CpuDecoderPass.describe(model_dir, OPTIONS)
    loaded.create_cache(4, PAGE, "fp32")
    batch = _step([5, 6, 7], 0, is_last=True)
    assert len(loaded.sample(loaded.forward(batch), batch).wait().token_ids) == 1
    assert loaded.make_guesser() is None
    loaded.close()


@pytest.mark.parametrize("method", [{"quant_method": "awq", "group_size": 32}, {"quant_method": "fp8"}])
def test_plain_head_of_a_quantised_file_that_does_not_declare_it_is_not_read(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    model_dir = add_head(make_checkpoint("qwen3.5", tmp_path))
    config = json.loads((model_dir / "config.json").read_text())
    for skipped, has_head in ((["model", "lm_head"], False), (["model", "lm_head", "mtp"], True)):
        settings = {"quantization_config": method | {"modules_to_not_convert": skipped}}
        (model_dir / "config.json").write_text(json.dumps(config | settings))
        loaded = CpuDecoderPass.load(model_dir, OPTIONS)
        assert CpuDecoderPass.describe(model_dir, OPTIONS).guesses_tokens is has_head
        assert loaded.spec.guesses_tokens in (has_head, False)  # False without native kernels
        loaded.close()
