"""The shipped demo model: agreement with transformers, its training text, and its limits."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.frontend.parsing.syntax.model_syntax import choose_model_syntax
from penstock.frontend.schemas.chat import ChatBody, ChatMessage
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.tools.demo_model.corpus import HELD_OUT, ChatTurn, Corpus, build_corpus
from penstock.tools.demo_model.network import Dimensions, Network
from penstock.tools.demo_model.train import (
    BOS_ID,
    END_ID,
    LONG_WINDOW,
    MODEL_DIR,
    SPECIAL_TOKENS,
    TrainingOptions,
    encode_documents,
    held_out_loss,
    train,
    train_tokenizer,
    windows,
    write_checkpoint,
)

MAX_BYTES = 8_000_000
MAX_BITS = 2.3
PROMPTS = (
    "Help on function json.dumps:\n\n",
    'The "for" statement',
    "Return a list of",
    "class Stack:\n",
    "def read_file(path):\n",
)
CHAT: list[ChatTurn] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": " What does os.path.join do?\n"},
    {"role": "assistant", "content": "It joins paths."},
    {"role": "user", "content": "Merci, très bien! 🐍"},
]
RENDERED = (
    "<|system|>You are a helpful assistant.<|end|><|user|>What does os.path.join do?<|end|>"
    "<|assistant|>It joins paths.<|end|><|user|>Merci, très bien! 🐍<|end|>"
)


def load_network(folder: Path) -> Network:
    """The training network with the weights of a checkpoint, in float32."""
    config = AutoModelForCausalLM.from_pretrained(folder).config
    network = Network(
        Dimensions(
            vocab_size=config.vocab_size,
            hidden=config.hidden_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            intermediate=config.intermediate_size,
            max_positions=config.max_position_embeddings,
        )
    )
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.to(torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build_corpus(seed=0)


def complete(
    model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int, **options: Any
) -> list[list[int]]:
    """The new tokens of each prompt, without what fills up those that end first."""
    batch = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    output: torch.Tensor = model.generate(**batch, max_new_tokens=max_new_tokens, **options)
    return [end_at_stop(row) for row in output[:, batch.input_ids.shape[1] :].tolist()]


def end_at_stop(ids: list[int]) -> list[int]:
    """The ids to the first one that ends a generation."""
    return ids[: next((i + 1 for i, token in enumerate(ids) if token in (BOS_ID, END_ID)), len(ids))]


def test_folder_is_at_most_eight_megabytes_of_plain_data() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= MAX_BYTES


def test_weights_are_bf16_and_tied() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_transformers_computes_the_logits_of_the_training_network(hf_model: Any, hf_tokenizer: Any) -> None:
    ids = torch.tensor([hf_tokenizer("".join(PROMPTS)).input_ids])
    with torch.inference_mode():
        torch.testing.assert_close(load_network(MODEL_DIR)(ids), hf_model(ids).logits, atol=1e-4, rtol=1e-4)


@given(st.text())
def test_tokenizer_restores_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@given(st.text())
def test_transformers_and_tokenizers_agree_on_the_ids(tokenizer: Tokenizer, hf_tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids[0] == BOS_ID
    assert hf_tokenizer(text).input_ids == ids


def test_special_tokens_match_the_configuration(tokenizer: Tokenizer, hf_tokenizer: Any, hf_model: Any) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert hf_tokenizer.bos_token_id == hf_tokenizer.pad_token_id == BOS_ID
    assert hf_tokenizer.eos_token_id == END_ID
    assert hf_model.generation_config.eos_token_id == [BOS_ID, END_ID]
    assert hf_model.config.vocab_size == tokenizer.get_vocab_size()
    everything = tokenizer.encode("".join(SPECIAL_TOKENS) + "x", add_special_tokens=False).ids
    assert tokenizer.decode(everything, skip_special_tokens=True) == "x"


@pytest.mark.parametrize("first", [0, 1], ids=["with a system message", "without"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_template_renders_the_documented_format(
    hf_tokenizer: Any, first: int, add_generation_prompt: bool
) -> None:
    expected = (
        SPECIAL_TOKENS[BOS_ID] + RENDERED.split("<|end|>", first)[first] + "<|assistant|>" * add_generation_prompt
    )
    options = {"add_generation_prompt": add_generation_prompt}
    assert hf_tokenizer.apply_chat_template(CHAT[first:], tokenize=False, **options) == expected
    ids = hf_tokenizer.apply_chat_template(CHAT[first:], return_dict=False, **options)
    assert ids == hf_tokenizer(expected, add_special_tokens=False).input_ids


@pytest.mark.parametrize("first", [0, 1], ids=["with a system message", "without"])
def test_frontend_renders_chats_as_transformers_does(hf_tokenizer: Any, first: int) -> None:
    template = ModelTokenizer.load(MODEL_DIR).chat_template
    assert template is not None
    rendered = template.render(ChatBody(messages=[ChatMessage(**message) for message in CHAT[first:]]))
    assert rendered == hf_tokenizer.apply_chat_template(CHAT[first:], tokenize=False, add_generation_prompt=True)


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city <é>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
TOOL_HEAD = (
    "You may call these functions:\n<tools>\n"
    '{"type": "function", "function": {"name": "get_weather", "description": "Current weather of a city <é>.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}\n'
    '{"type": "function", "function": {"name": "get_time", "description": "", '
    '"parameters": {"type": "object", "properties": {}}}}\n</tools>\n'
    'To call a function, write:\n<tool_call>\n{"name": "function name", "arguments": {}}\n</tool_call><|end|>'
)


def called(name: str, arguments: Any, identifier: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_chat(arguments: Any) -> list[dict[str, Any]]:
    """Two turns with calls: two calls without text, then one call after a text."""
    return [
        {"role": "user", "content": "Weather and time in Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [called("get_weather", arguments, "a"), called("get_time", {}, "b")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "18 degrees"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "assistant", "content": "Once more.", "tool_calls": [called("get_time", {}, "c")]},
        {"role": "tool", "tool_call_id": "c", "content": "1 pm"},
    ]


TOOL_CHAT = (
    "<|user|>Weather and time in Rome?<|end|>"
    '<|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|end|>'
    "<|user|><tool_response>\n18 degrees\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|end|>"
    '<|assistant|>Once more.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call><|end|>'
    "<|user|><tool_response>\n1 pm\n</tool_response><|end|><|assistant|>"
)


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'], ids=["an object", "a text"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_calls_and_results_render_the_documented_format(
    hf_tokenizer: Any, system: str | None, arguments: Any
) -> None:
    chat = tool_chat(arguments)
    head = f"<|endoftext|><|system|>{TOOL_HEAD}"
    if system is not None:
        chat = [{"role": "system", "content": system}, *chat]
        head = f"<|endoftext|><|system|>{system}\n\n{TOOL_HEAD}"
    options = {"tokenize": False, "add_generation_prompt": True}
    assert hf_tokenizer.apply_chat_template(chat, tools=TOOLS, **options) == head + TOOL_CHAT
    without = "<|endoftext|>" if system is None else f"<|endoftext|><|system|>{system}<|end|>"
    assert hf_tokenizer.apply_chat_template(chat, **options) == without + TOOL_CHAT


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_frontend_renders_tools_and_calls_as_transformers_does(
    hf_tokenizer: Any, role: str, tools: list[dict[str, Any]] | None
) -> None:
    template = ModelTokenizer.load(MODEL_DIR).chat_template
    assert template is not None
    chat = [{"role": role, "content": "Be brief."}, *tool_chat('{"city": "Rome"}')]
    for message in chat:
        for call in message.get("tool_calls", ()):
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = "{}"
    rendered = template.render(msgspec.convert({"messages": chat, "tools": tools}, ChatBody))
    options = {"tokenize": False, "add_generation_prompt": True}
    assert rendered == hf_tokenizer.apply_chat_template(chat, tools=tools, **options)


def test_frontend_recognises_the_tool_format() -> None:
    template = ModelTokenizer.load(MODEL_DIR).chat_template
    assert template is not None
    syntax = choose_model_syntax(template, {})
    assert syntax.tools is not None
    assert syntax.tools.name == "hermes"


def test_end_of_turn_token_ends_a_generation(hf_tokenizer: Any) -> None:
    ends = json.loads((MODEL_DIR / "generation_config.json").read_text())["eos_token_id"]
    assert json.loads((MODEL_DIR / "config.json").read_text())["eos_token_id"] == ends
    for chat in (CHAT[:3], tool_chat({"city": "Rome"})[:2]):
        assert hf_tokenizer.apply_chat_template(chat, return_dict=False)[-1] in ends


def test_training_chats_are_rendered_by_the_template(tokenizer: Tokenizer, hf_tokenizer: Any) -> None:
    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    text, chat = encode_documents(Corpus(texts=["import this"], chats=[CHAT], held_out_texts=[]), tokenizer, template)
    assert text.tolist() == tokenizer.encode("import this").ids
    assert chat.tolist() == hf_tokenizer.apply_chat_template(CHAT, return_dict=False)


def test_template_refuses_unknown_roles(hf_tokenizer: Any) -> None:
    with pytest.raises(Exception, match="not critic"):
        hf_tokenizer.apply_chat_template([{"role": "critic", "content": "x"}], tokenize=False)


def test_greedy_completions_consist_of_words_of_the_corpus(hf_tokenizer: Any, hf_model: Any, corpus: Corpus) -> None:
    known = set(re.findall(r"[a-z]+", "\n".join(corpus.texts).lower()))
    completions = complete(hf_model, hf_tokenizer, PROMPTS, 64, do_sample=False)
    for completion in hf_tokenizer.batch_decode(completions, skip_special_tokens=True):
        words = re.findall(r"[a-z]+", completion.lower())
        assert len(words) >= 8, completion
        assert sum(word in known for word in words) >= 0.8 * len(words), completion


def test_completions_with_default_sampling_do_not_repeat_themselves(hf_tokenizer: Any, hf_model: Any) -> None:
    torch.manual_seed(0)
    sampled = complete(hf_model, hf_tokenizer, PROMPTS * 2, 64)
    pairs = [pair for ids in sampled for pair in itertools.pairwise(ids)]
    assert len(pairs) >= 200
    assert len(set(pairs)) >= 0.5 * len(pairs)


def test_chats_are_answered_and_ended(hf_tokenizer: Any, hf_model: Any) -> None:
    questions = ("Hello!", "What does os.path.join do?", "What is a generator?")
    prompts = [
        hf_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        ).removeprefix(SPECIAL_TOKENS[BOS_ID])
        for question in questions
    ]
    for answer in complete(hf_model, hf_tokenizer, prompts, 200, do_sample=False):
        assert answer[-1] == END_ID
        assert len(re.findall(r"\w+", hf_tokenizer.decode(answer, skip_special_tokens=True))) >= 3


def test_held_out_loss_is_within_its_limit(tokenizer: Tokenizer, corpus: Corpus) -> None:
    sample = Corpus(texts=[], chats=[], held_out_texts=corpus.held_out_texts[::5])
    _, bits_per_character = held_out_loss(load_network(MODEL_DIR), sample, tokenizer)
    assert bits_per_character < MAX_BITS


def test_late_positions_are_predicted_about_as_well_as_early_ones(tokenizer: Tokenizer, corpus: Corpus) -> None:
    template = (MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    some = Corpus(texts=corpus.texts[::30], chats=corpus.chats[::30], held_out_texts=[])
    source = windows(encode_documents(some, tokenizer, template), LONG_WINDOW, np.random.default_rng(0))
    ids = torch.from_numpy(np.stack([next(source) for _ in range(6)])).long()
    with torch.inference_mode():
        logits = load_network(MODEL_DIR)(ids[:, :-1])
        losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    assert losses[:, LONG_WINDOW // 2 :].mean() < 1.5 * losses[:, 64:512].mean()


def test_held_out_modules_are_in_no_training_text(corpus: Corpus) -> None:
    modules = "|".join(sorted(HELD_OUT))
    heading = re.compile(rf"Help on \w+ ({modules})[.:]")
    assert corpus.held_out_texts
    assert all(heading.match(text) for text in corpus.held_out_texts)
    assert not [text for text in corpus.texts if heading.match(text)]
    questions = [message["content"] for chat in corpus.chats for message in chat if message["role"] == "user"]
    assert not [question for question in questions if re.search(rf"\b({modules})\.\w", question)]


def test_the_corpus_is_the_same_every_time(corpus: Corpus) -> None:
    assert build_corpus(seed=0) == corpus


def test_training_learns_and_writes_a_checkpoint_that_transformers_reads(tmp_path: Path) -> None:
    corpus = Corpus(texts=["for name in names:\n    print(name)\n"] * 200, chats=[], held_out_texts=[])
    tokenizer = train_tokenizer(corpus, vocab_size=300)
    documents = [np.array(tokenizer.encode(text).ids, np.int32) for text in corpus.texts]
    torch.manual_seed(0)
    network = Network(Dimensions(tokenizer.get_vocab_size(), 64, 2, 2, 1, 64, 2048))
    assert train(network, documents, TrainingOptions(steps=30, batch_tokens=2048)) == 30
    network.to(torch.bfloat16).to(torch.float32)
    probe = Corpus(texts=[], chats=[], held_out_texts=corpus.texts[:1])
    assert held_out_loss(network, probe, tokenizer)[0] < 0.5 * np.log(tokenizer.get_vocab_size())
    write_checkpoint(network, tokenizer, tmp_path)
    ids = torch.tensor([documents[0].tolist()])
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
        torch.testing.assert_close(network(ids), expected, atol=1e-4, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path)(corpus.texts[0]).input_ids == documents[0].tolist()
