"""`penstock serve` with an embedding model and a reranker: what HTTP answers is what transformers computes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from tests.encoder_checkpoints import make_encoder, make_sentence_encoder
from tests.frontend.pooled_backend import ENCODER_TOKENIZER
from tests.system.processes import Command, running

VOCAB_SIZE = ENCODER_TOKENIZER.get_vocab_size()
TEXTS = ["the cat sat on the mat", "été 猫 🐈", "x", "the cat sat on the mat"]
DOCUMENTS = ["the mat", "a dog", "the cat sat", "on"]


@dataclass
class Server:
    client: httpx.Client
    embedder: Any
    reranker: Any

    def post(self, path: str, body: dict[str, Any]) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folders = [tmp_path_factory.mktemp(name) / name for name in ("embedder", "reranker")]
    pooling = {"pooling_mode_mean_tokens": True}
    embedder = make_sentence_encoder("bert", folders[0], pooling, vocab_size=VOCAB_SIZE)
    reranker = make_encoder("bert", "ForSequenceClassification", folders[1], vocab_size=VOCAB_SIZE, num_labels=1)
    for folder in folders:
        ENCODER_TOKENIZER.save(str(folder / "tokenizer.json"))
    options = ("serve", "--gpu", "none", "--port", "0", "--dtype", "fp32", "--state-dir", "none")
    serve = Command("penstock.tools.main", *options, "--model", str(folders[0]), "--rerank-model", str(folders[1]))
    with running(serve):
        url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Server(client, embedder, reranker)


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


def test_a_long_list_is_computed_beside_short_requests(server: Server) -> None:
    texts = [f"{number} cats" for number in range(500)]
    found = server.post("/v1/embeddings", {"input": texts, "encoding_format": "float"})["data"]
    for index in (0, 250, 499):
        expected = embedding(server.embedder, texts[index])
        torch.testing.assert_close(torch.tensor(array("f", found[index]["embedding"])), expected)


def test_each_model_does_what_it_can_and_says_what_the_others_cannot(server: Server) -> None:
    models = server.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["capabilities"]["rerank"]) for model in models] == [
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
