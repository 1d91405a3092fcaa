"""`penstock serve` with an embedding model and two rerankers: what HTTP answers is what transformers computes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from tests.checkpoints import make_model
from tests.encoder_checkpoints import make_encoder, make_sentence_encoder
from tests.frontend.harness import byte_level_tokenizer
from tests.frontend.pooled_backend import ENCODER_TOKENIZER
from tests.system.processes import Command, running

VOCAB_SIZE = ENCODER_TOKENIZER.get_vocab_size()
TEXTS = ["the cat sat on the mat", "été 猫 🐈", "x", "the cat sat on the mat"]
DOCUMENTS = ["the mat", "a dog", "the cat sat", "on"]
JUDGE_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The texts of Qwen3-Reranker's model card."""


BROKEN = "~"
"""The models' weights for this character are NaN."""


@dataclass
class Server:
    client: httpx.Client
    embedder: Any
    reranker: Any
    judge: Any
    """A decoder that answers yes or no, as Qwen3-Reranker."""
    judge_tokenizer: Tokenizer

    def post(self, path: str, body: dict[str, Any]) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folders = [tmp_path_factory.mktemp(name) / name for name in ("embedder", "reranker", "judge")]
    pooling = {"pooling_mode_mean_tokens": True}
    embedder = make_sentence_encoder("bert", folders[0], pooling, vocab_size=VOCAB_SIZE)
    reranker = make_encoder("bert", "ForSequenceClassification", folders[1], vocab_size=VOCAB_SIZE, num_labels=1)
    for model, folder in zip((embedder, reranker), folders, strict=False):
        with torch.no_grad():
            model.get_input_embeddings().weight[ENCODER_TOKENIZER.token_to_id(BROKEN)] = torch.nan
        model.save_pretrained(folder)
        ENCODER_TOKENIZER.save(str(folder / "tokenizer.json"))
    judge_tokenizer = byte_level_tokenizer()
    judge_tokenizer.add_tokens(["yes", "no"])
    judge = make_model("qwen3", vocab_size=judge_tokenizer.get_vocab_size(), max_position_embeddings=1024)
    judge.save_pretrained(folders[2])
    judge_tokenizer.save(str(folders[2] / "tokenizer.json"))
    options = ("serve", "--gpu", "none", "--port", "0", "--dtype", "fp32", "--state-dir", "none")
    models = ("--model", folders[2], "--task", "rerank", "--embedding-model", folders[0], "--rerank-model", folders[1])
    serve = Command("penstock.main", *options, "--kv-budget", "8MB", *map(str, models))
    with running(serve):
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Server(client, embedder, reranker, judge, judge_tokenizer)


def embedding(model: Any, text: str) -> torch.Tensor:
    ids = torch.tensor([ENCODER_TOKENIZER.encode(text).ids])
    with torch.inference_mode():
        mean = model(input_ids=ids).last_hidden_state[0].mean(dim=0)
    return torch.nn.functional.normalize(mean, dim=0)


def score(model: Any, first: str, second: str) -> float:
    encoding = ENCODER_TOKENIZER.encode(first, second)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])).logits
    return float(torch.sigmoid(logits)[0, 0])


def test_embeddings_are_those_of_transformers(server: Server) -> None:
    expected = torch.stack([embedding(server.embedder, text) for text in TEXTS])
    found = server.post("/v1/embeddings", {"input": TEXTS})
    torch.testing.assert_close(torch.tensor([item["embedding"] for item in found["data"]]), expected)
    torch.testing.assert_close(torch.tensor(server.post("/embed", {"inputs": TEXTS})), expected)
    cut = torch.nn.functional.normalize(expected[:, :8], dim=1)
    torch.testing.assert_close(torch.tensor(server.post("/embed", {"inputs": TEXTS, "dimensions": 8})), cut)
    tokens = server.post("/embed_all", {"inputs": TEXTS[0]})
    assert len(tokens[0]) == len(ENCODER_TOKENIZER.encode(TEXTS[0]).ids)


def test_ranks_and_scores_are_those_of_transformers(server: Server) -> None:
    expected = [score(server.reranker, TEXTS[0], document) for document in DOCUMENTS]
    ranked = server.post("/v1/rerank", {"query": TEXTS[0], "documents": DOCUMENTS})["results"]
    assert [item["relevance_score"] for item in ranked] == pytest.approx(sorted(expected, reverse=True), rel=1e-4)
    assert [expected[item["index"]] for item in ranked] == sorted(expected, reverse=True)
    scored = server.post("/score", {"text_1": TEXTS[0], "text_2": DOCUMENTS})["data"]
    assert [item["score"] for item in scored] == pytest.approx(expected, rel=1e-4)


@torch.inference_mode()
def judged(server: Server, query: str, document: str, instruction: str) -> float:
    """The probability of "yes" by the recipe on the model card of Qwen3-Reranker."""

    def encode(text: str) -> list[int]:
        ids: list[int] = server.judge_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = encode(JUDGE_PREFIX) + encode(pair) + encode(JUDGE_SUFFIX)
    logits = server.judge(input_ids=torch.tensor([ids])).logits[0, -1]
    answers = [server.judge_tokenizer.token_to_id(word) for word in ("no", "yes")]
    return float(torch.log_softmax(logits[answers], dim=0)[1].exp())


def test_a_decoder_judges_as_the_published_recipe_of_qwen3_reranker(server: Server) -> None:
    default = "Given a web search query, retrieve relevant passages that answer the query"
    for changes, instruction in (({}, default), ({"instruction": "find cats"}, "find cats")):
        expected = [judged(server, TEXTS[0], document, instruction) for document in DOCUMENTS]
        body = {"query": TEXTS[0], "documents": DOCUMENTS, "model": "judge", **changes}
        found = {item["index"]: item["relevance_score"] for item in server.post("/v1/rerank", body)["results"]}
        assert [found[index] for index in range(len(DOCUMENTS))] == pytest.approx(expected, rel=1e-3)
        assert len(set(expected)) == len(expected)


def test_a_long_list_is_computed_beside_short_requests(server: Server) -> None:
    texts = [f"{number} cats" for number in range(500)]
    found = server.post("/v1/embeddings", {"input": texts, "encoding_format": "float"})["data"]
    for index in (0, 250, 499):
        expected = embedding(server.embedder, texts[index])
        torch.testing.assert_close(torch.tensor(array("f", found[index]["embedding"])), expected)


def test_each_model_does_what_it_can_and_says_what_the_others_cannot(server: Server) -> None:
    models = server.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["capabilities"]["rerank"]) for model in models] == [
        ("judge", True),
        ("embedder", False),
        ("reranker", True),
    ]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    refused = server.client.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert '"embedder" can compute embeddings' in refused.json()["error"]["message"]
    long = server.client.post("/v1/embeddings", json={"input": "z" * 200})
    assert "202 tokens, but the limit of this model is 160 tokens" in long.json()["error"]["message"]
    page = server.client.get("/metrics").text
    assert 'penstock_streams_total{model="embedder",outcome="stop"}' in page


def test_a_nan_of_the_model_is_an_error_of_the_endpoints_own_shape_and_leaves_others_alone(server: Server) -> None:
    mixed = [*TEXTS, f"a {BROKEN}"]
    reason = "an internal error ended the answer"
    openai = {"message": reason, "type": "server_error", "param": None, "code": "internal_error"}
    tei = {"error": reason, "error_type": "Backend"}
    cases: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": mixed}, 500, {"error": openai}),
        ("/v2/embed", {"texts": mixed, "input_type": "search_query"}, 500, {"message": reason, "error": openai}),
        ("/v2/rerank", {"query": "cats", "documents": mixed}, 500, {"message": reason, "error": openai}),
        ("/score", {"text_1": "cats", "text_2": mixed}, 500, {"error": openai}),
        ("/embed", {"inputs": mixed}, 424, tei),
        ("/rerank", {"query": "cats", "texts": mixed}, 424, tei),
    ]
    with ThreadPoolExecutor(2 * len(cases)) as threads:
        broken = [threads.submit(server.client.post, path, json=body) for path, body, _, _ in cases]
        others = [threads.submit(server.post, "/embed", {"inputs": TEXTS}) for _ in cases]
    for answer, (path, _, status, body) in zip(broken, cases, strict=True):
        response = answer.result()
        assert (path, response.status_code) == (path, status)
        assert response.json() | body == response.json()
    expected = torch.stack([embedding(server.embedder, text) for text in TEXTS])
    for other in others:
        torch.testing.assert_close(torch.tensor(other.result()), expected)
