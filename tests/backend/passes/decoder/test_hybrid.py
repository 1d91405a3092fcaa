"""Layers with a gated delta rule: states of slots, and files. Logits are compared in test_decoder_pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config_json import parse_decoder_config, read_decoder_config
from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.scheduling.drafting import MAX_STATE_DRAFTS
from penstock.shm.messages import Sampling
from tests.backend.engine.test_speculation import Foretold
from tests.backend.harness import Bench, Received
from tests.backend.passes.conftest import MakeOps, make_native_ops
from tests.backend.passes.decoder.driver import Driver, run_in_a_used_slot
from tests.backend.passes.decoder.test_decoder_pass import make_pass, oracle_logits, prompts, run_prompts
from tests.checkpoints import make_checkpoint, make_config

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.tensors import LayerWeights


def state_tensors(decoder: CpuDecoderPass) -> list[torch.Tensor]:
    ops: Any = decoder.ops
    return [torch.from_numpy(array) for array in ops.delta_net.states]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("qwen3.5", torch.float32), ("qwen3.5-vision", torch.bfloat16)],
    ids=["fp32", "bf16"],
)
def test_logits_are_the_same_bits_in_any_chunks_and_slots(
    architecture: str, dtype: torch.dtype, make_deterministic: MakeOps
) -> None:
    """Alone, in a batch with chunks, and begun again in the slot of another sequence, as after a preemption.

    What a slot contains before a sequence begins is not read.
    """
    prompt, *others = prompts((45, 1, 30), seed=4)
    expected = run_prompts(Driver(make_pass(architecture, make_deterministic, dtype), 16, 16), [prompt])[0]
    decoder = make_pass(architecture, make_deterministic, dtype)
    driver = Driver(decoder, 32, 16, seed=3)
    for state in state_tensors(decoder):
        state.fill_(float("nan"))
    np.testing.assert_array_equal(run_in_a_used_slot(driver, prompt, others), expected)


def test_states_have_the_announced_bytes_and_pages_only_layers_with_attention(make_usual_ops: MakeOps) -> None:
    decoder = make_pass("qwen3.5", make_usual_ops)
    decoder.create_cache(num_pages=1, page_size_tokens=16, kv_dtype="fp32")
    spec = decoder.spec
    num_bytes = sum(state.numel() * state.element_size() for state in state_tensors(decoder))
    assert num_bytes == 32 * spec.state_bytes_per_sequence
    assert spec.kv_bytes_per_token["fp32"] == 1 * 2 * 2 * 32 * 4
    assert not spec.verifies_drafts
    decoder.close()


def test_experts_of_a_layer_may_be_in_two_tensors(tmp_path: Path) -> None:
    """As in the hub's files of Qwen3.5; transformers writes each expert's own."""
    model_dir = make_checkpoint("qwen3.5-moe", tmp_path)
    config = read_decoder_config(model_dir)

    def layer() -> LayerWeights[Any]:
        with open_weights(model_dir, config) as weights:
            return weights.layer(1, Dtype.FP32)

    before, tensors = layer(), load_file(model_dir / "model.safetensors")
    for index in range(3):
        start = f"model.layers.{index}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{start}.{i}.{part}_proj.weight") for i in range(5)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{start}.gate_up_proj": torch.cat([gate, up], dim=1), f"{start}.down_proj": down}
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    after = layer()
    assert torch.equal(after.expert_gate_up, before.expert_gate_up)  # type: ignore[arg-type]
    assert torch.equal(after.expert_down, before.expert_down)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types has linear_attention"),
        ("qwen3.5", {"layer_types": ["linear_attention"] * 3}, "at least one layer"),
        ("qwen3.5", {"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ("qwen3.5", {"linear_num_value_heads": 5}, "linear_num_value_heads is 5, not a multiple"),
    ],
)
def test_other_layers_and_heads_are_refused(architecture: str, change: dict[str, Any], message: str) -> None:
    name = {"qwen3": "Qwen3ForCausalLM", "qwen3.5": "Qwen3_5ForCausalLM"}[architecture]
    values = make_config(architecture).to_dict() | {"architectures": [name]}
    with pytest.raises(StartupError, match=message):
        parse_decoder_config(values | change)


def test_every_fourth_layer_has_attention_by_default() -> None:
    values = make_config("qwen3.5").to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 8}
    config = parse_decoder_config(values | {"layer_types": None})
    assert config.delta_net is not None
    assert config.delta_net.layers == (True, True, True, False) * 2


def test_adapters_of_gguf_files_are_refused(tmp_path: Path) -> None:
    """Their heads have another order."""
    config = parse_decoder_config(make_config("qwen3.5").to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]})
    assert config.delta_net is not None
    config = replace(config, delta_net=replace(config.delta_net, has_log_decay=False))
    with pytest.raises(StartupError, match="adapters of a GGUF file with delta rules are not supported"):
        PeftAdapter(tmp_path, config)


def test_steps_of_one_token_and_of_many_use_the_states_of_their_slots() -> None:
    """Two sequences take turns, each in its slot."""
    decoder = make_pass("qwen3.5", make_native_ops)
    driver = Driver(decoder, 16, 16)
    rows = [driver.add(prompt) for prompt in prompts((20, 20), seed=6)]
    logits: dict[int, Any] = {}
    for count in (5, 1, 14):
        for row in rows:
            logits |= driver.step([(row, count)])
    alone = [
        run_prompts(Driver(make_pass("qwen3.5", make_native_ops), 8, 16), [tuple(row.tokens[:20])])[0] for row in rows
    ]
    np.testing.assert_array_equal([logits[row.slot] for row in rows], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sequences_that_go_on_from_checkpoints_have_the_bits_of_those_computed_alone(dtype: torch.dtype) -> None:
    """Turns of conversations whose prompts part, come together, are preempted and choose several times."""
    system, *users = prompts((21, 7, 9, 30), seed=8)

    def run(
        num_checkpoints: int, num_pages: int, *, together: bool, drafting: Foretold | None = None
    ) -> tuple[list[Received], int]:
        decoder = make_pass("qwen3.5", make_native_ops, dtype, num_state_drafts=MAX_STATE_DRAFTS)
        sizes: dict[str, Any] = {"page_size": 4, "max_batch_tokens": 24, "vocab_size": 256, "drafting": drafting}
        bench = Bench(forward_pass=decoder, num_checkpoints=num_checkpoints, num_pages=num_pages, **sizes)
        first = [[*system, *user] for user in users]
        for turn in range(2):
            for index, prompt in enumerate(first if not turn else [*first, first[0]]):
                answer = bench.received(index).token_ids if turn else []
                num_logprobs = 2 if drafting is None else -1
                sampling = Sampling(temperature=float(index == 3), seed=5, num_logprobs=num_logprobs)
                bench.submit([*prompt, *answer, *([9, 8] * turn)], 26, request_id=10 * turn + index, sampling=sampling)
                if not together:
                    bench.run_dry()
            bench.run_dry()
        num_preemptions = bench.board.preemptions
        assert (bench.board.accepted_tokens > 50) is (drafting is not None)
        bench.close()
        decoder.close()
        return [bench.received(request_id) for request_id in (0, 1, 2, 10, 11, 12, 13)], num_preemptions

    alone, _ = run(0, 128, together=False)
    shared, num_preemptions = run(8, 40, together=True)
    assert [(each.token_ids, each.logprobs) for each in shared] == [(each.token_ids, each.logprobs) for each in alone]
    assert [each.started.cached_tokens for each in alone if each.started is not None] == [0] * 7
    assert [each.started.cached_tokens for each in shared if each.started is not None][:3] == [0, 0, 20]
    assert sum(each.started.cached_tokens > 40 for each in shared[3:] if each.started is not None) >= 3
    assert num_preemptions
    ids = (0, 1, 2, 10, 11, 12, 13)
    foretold = {number: answer.token_ids for number, answer in zip(ids, alone, strict=True)}
    drafted, num_preemptions = run(8, 40, together=True, drafting=Foretold(foretold, max_drafts=MAX_STATE_DRAFTS))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in alone]
    assert sum(each.started.cached_tokens > 0 for each in drafted if each.started is not None) >= 3
    assert num_preemptions
    if dtype == torch.float32:
        tokens = [*system, *users[2], *shared[2].token_ids]
        choices = oracle_logits("qwen3.5", tuple(tokens[:-1])).argmax(axis=1)[len(system) + len(users[2]) - 1 :]
        assert choices.tolist() == shared[2].token_ids
