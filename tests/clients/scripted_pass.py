"""A forward pass that knows its answers: one call of a client's shell, and a sentence when the call's output is there.

Real agents begin with prompts that are longer than a small model's context, so a test of what they do needs no model.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from demo_models import ANSWER, COMMAND, OUTPUT
from tokenizers import Tokenizer

from penstock.backend.forward_pass import PassOptions, PassSpec, SlotInit, StepBatch
from penstock.backend.sampling.sampler import HostSampling

SHELLS = {"exec_command": {"cmd": COMMAND}, "Bash": {"command": COMMAND}}
"""The shells of Codex CLI and Claude Code, with the arguments of the call."""
_CONTEXT_TOKENS = 1 << 16
_EMPTY = np.empty(0, np.int32)


class ScriptedPass(HostSampling):
    """Computes nothing from tokens: an answer depends on the prompt's text alone."""

    def __init__(self, spec: PassSpec, model_dir: Path, max_running: int) -> None:
        super().__init__(spec.vocab_size, max_running)
        self.spec = spec
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        end = json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]
        self._ends = end if isinstance(end, list) else [end]
        self._answers = [_EMPTY] * max_running
        self._prompt_tokens = [0] * max_running

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:  # noqa: ARG003
        assert model_dir is not None
        config = json.loads((model_dir / "config.json").read_text())
        return PassSpec(config["vocab_size"], _CONTEXT_TOKENS, {"none": 4})

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> ScriptedPass:
        assert model_dir is not None
        return cls(cls.describe(model_dir, options), model_dir, options.max_running)

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        pass

    def forward(self, batch: StepBatch) -> np.ndarray:
        self.begin_step(batch)
        for init in batch.slot_inits:
            self._answers[init.slot] = self._answer(init)
            self._prompt_tokens[init.slot] = init.num_prompt_tokens
        logits = np.zeros((len(batch.logit_rows), self.spec.vocab_size), np.float32)
        ends = batch.context_lens + np.diff(batch.query_starts)
        for index, row in enumerate(batch.logit_rows.tolist()):
            slot = int(batch.slots[row])
            logits[index, self._answers[slot][ends[row] - self._prompt_tokens[slot]]] = 10.0
        return logits

    def _answer(self, init: SlotInit) -> np.ndarray:
        prompt = self._tokenizer.decode(init.token_ids[: init.num_prompt_tokens].tolist(), skip_special_tokens=False)
        offered = [name for name in SHELLS if f'"name": "{name}"' in prompt]
        text = ANSWER
        if offered and OUTPUT not in prompt:
            call = json.dumps({"name": offered[0], "arguments": SHELLS[offered[0]]})
            text = f"<tool_call>\n{call}\n</tool_call>"
        return np.array([*self._tokenizer.encode(text, add_special_tokens=False).ids, self._ends[0]], np.int32)

    def close(self) -> None:
        pass
