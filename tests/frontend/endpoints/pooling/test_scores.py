"""Reranking, scores of pairs and classes, in the formats of Cohere and Jina, vLLM and TEI."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
import torch

from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.text.pooling_files import QWEN3_RERANKER, PoolingFiles
from tests.frontend.endpoints.pooling.conftest import MAX_TOKENS
from tests.frontend.harness import ClientConnection, make_app, token_ids
from tests.frontend.pooled_backend import END, START, PooledBackend, encoder, encoder_card, normalized, vector_of

QUERY, DOCUMENTS = "which cat", ["the dog", "the cat", "", "sat on the mat"]


def pair(first: str, second: str) -> list[int]:
    return [START, *token_ids(first), END, *token_ids(second), END]


def logit(first: str, second: str) -> float:
    return vector_of("classify", pair(first, second), 1)[0]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


LOGITS = [logit(QUERY, document) for document in DOCUMENTS]
ORDER = sorted(range(len(DOCUMENTS)), key=lambda index: -LOGITS[index])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_as_cohere_and_jina_do(
    connection: ClientConnection, reranker: PooledBackend, path: str
) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "x"}, *DOCUMENTS[2:]]
    body = {"query": QUERY, "documents": documents, "model": "reranker"}
    answer = (await connection.post(path, body)).json()
    assert [item["index"] for item in answer["results"]] == ORDER
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == pytest.approx([sigmoid(LOGITS[index]) for index in ORDER])
    assert "document" not in answer["results"][0]
    assert answer["model"] == "reranker"
    assert answer["usage"]["total_tokens"] == sum(len(pair(QUERY, document)) for document in DOCUMENTS)
    assert answer["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")
    starts = [stream.request.second_start for stream in reranker.pooled_streams]
    assert starts == [len(token_ids(QUERY)) + 2] * len(DOCUMENTS)
    top = (await connection.post(path, {**body, "top_n": 2, "return_documents": True, "use_activation": False})).json()
    assert [item["relevance_score"] for item in top["results"]] == pytest.approx([LOGITS[index] for index in ORDER[:2]])
    assert [item["document"]["text"] for item in top["results"]] == [DOCUMENTS[index] for index in ORDER[:2]]


async def test_texts_are_ranked_as_tei_does(connection: ClientConnection) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS}
    response = await connection.post("/rerank", body)
    assert [item["index"] for item in response.json()] == ORDER
    assert [item["score"] for item in response.json()] == pytest.approx([sigmoid(LOGITS[index]) for index in ORDER])
    assert set(response.json()[0]) == {"index", "score"}
    assert int(response.headers["x-compute-tokens"]) == sum(len(pair(QUERY, document)) for document in DOCUMENTS)
    raw = (await connection.post("/rerank", {**body, "raw_scores": True, "return_text": True})).json()
    assert [item["score"] for item in raw] == pytest.approx([LOGITS[index] for index in ORDER])
    assert [item["text"] for item in raw] == [DOCUMENTS[index] for index in ORDER]


async def test_a_pair_loses_its_longer_text_first(connection: ClientConnection, reranker: PooledBackend) -> None:
    long = "z" * 200
    for path, body, hint in (
        ("/rerank", {"query": "ab", "texts": ["x", long]}, "truncate"),
        ("/v1/rerank", {"query": "ab", "documents": ["x", long]}, "truncate"),
        ("/score", {"text_1": "ab", "text_2": ["x", long]}, "truncate_prompt_tokens"),
    ):
        refused = (await connection.post(path, body)).json()
        message = refused["message"] if "message" in refused else refused["error"]
        text = message if isinstance(message, str) else message["message"]
        assert "[1]: 205 tokens, but the limit of this model is 64 tokens" in text
        changes = {hint: True if hint == "truncate" else -1}
        assert (await connection.post(path, {**body, **changes})).status == 200
        kept = list(reranker.pooled_streams[-1].request.token_ids)  # type: ignore[arg-type]
        assert kept == pair("ab", "z" * (MAX_TOKENS - 5))
    await connection.post("/v2/rerank", {"query": "ab", "documents": [long], "max_tokens_per_doc": 3})
    assert list(reranker.pooled_streams[-1].request.token_ids) == pair("ab", "zzz")  # type: ignore[arg-type]


async def test_scores_of_pairs_have_vllms_format(connection: ClientConnection) -> None:
    expected = [sigmoid(each) for each in LOGITS]
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        answer = (await connection.post("/v1/score", {first: QUERY, second: DOCUMENTS})).json()
        assert answer["object"] == "list"
        assert [item["score"] for item in answer["data"]] == pytest.approx(expected)
        assert [item["index"] for item in answer["data"]] == list(range(len(DOCUMENTS)))
    both = {"text_1": ["a", "b"], "text_2": ["c", "d"], "use_activation": False}
    answer = (await connection.post("/score", both)).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx([logit("a", "c"), logit("b", "d")])


async def test_an_embedding_model_scores_by_angle(connection: ClientConnection) -> None:
    def vector(text: str) -> torch.Tensor:
        ids = [START, *token_ids(text), END]
        return torch.tensor(normalized(vector_of("embed", ids, 8)), dtype=torch.float64)

    expected = [float(vector("a") @ vector(text)) for text in ("b", "a")]
    scored = (await connection.post("/score", {"text_1": "a", "text_2": ["b", "a"], "model": "bert"})).json()
    assert [item["score"] for item in scored["data"]] == pytest.approx(expected)
    body = {"inputs": {"source_sentence": "a", "sentences": ["b", "a"]}}
    assert (await connection.post("/similarity", body)).json() == pytest.approx(expected)
    prompted = await connection.post("/similarity", {**body, "parameters": {"prompt_name": "query"}})
    assert prompted.json()[0] == pytest.approx(float(vector("query: a") @ vector("query: b")))


async def test_classes_have_labels_and_sum_to_one(classifying: ClientConnection) -> None:
    logits = vector_of("classify", [START, *token_ids("x"), END], 3)
    probs = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    labels = ["bad", "fair", "good"]
    best = max(range(3), key=logits.__getitem__)
    classified = (await classifying.post("/classify", {"input": ["x"]})).json()["data"][0]
    assert (classified["label"], classified["num_classes"]) == (labels[best], 3)
    assert classified["probs"] == pytest.approx(probs)
    raw = (await classifying.post("/classify", {"input": "x", "use_activation": False})).json()["data"][0]
    assert raw["probs"] == pytest.approx(logits)
    predicted = (await classifying.post("/predict", {"inputs": "x"})).json()
    assert [item["label"] for item in predicted] == [labels[i] for i in sorted(range(3), key=lambda i: -logits[i])]
    assert {item["label"]: item["score"] for item in predicted} == pytest.approx(dict(zip(labels, probs, strict=True)))
    pooled = (await classifying.post("/pooling", {"input": "x"})).json()["data"][0]["data"]
    assert pooled == pytest.approx(probs, rel=1e-6)
    tokens = (await classifying.post("/pooling", {"input": "x", "task": "token_classify"})).json()["data"][0]["data"]
    assert [sum(row) for row in tokens] == pytest.approx([1.0] * 3)


async def test_predict_takes_texts_pairs_and_batches(classifying: ClientConnection, classifier: PooledBackend) -> None:
    cases: list[tuple[Any, list[list[int]]]] = [
        ("x", [[START, *token_ids("x"), END]]),
        (["a", "b"], [pair("a", "b")]),
        ([["a"], ["a", "b"]], [[START, *token_ids("a"), END], pair("a", "b")]),
    ]
    for given, inputs in cases:
        classifier.pooled_streams.clear()
        answer = (await classifying.post("/predict", {"inputs": given, "raw_scores": True})).json()
        assert [list(stream.request.token_ids) for stream in classifier.pooled_streams] == inputs  # type: ignore[arg-type]
        first = answer[0] if isinstance(given, list) and isinstance(given[0], list) else answer
        assert [item["score"] for item in first] == sorted(vector_of("classify", inputs[0], 3), reverse=True)


async def test_one_score_is_a_sigmoid_unless_the_config_says_otherwise(reranker: PooledBackend) -> None:
    ids = [START, *token_ids("x"), END]
    (raw,) = vector_of("classify", ids, 1)
    for files, expected in ((PoolingFiles(), sigmoid(raw)), (PoolingFiles(activation="none"), raw)):
        connection = ClientConnection(make_app(reranker, models=ServedModels(encoder(reranker, files))))
        (item,) = (await connection.post("/predict", {"inputs": "x"})).json()
        assert item == {"score": pytest.approx(expected), "label": "LABEL_0"}


async def test_a_decoder_reranker_gets_its_template(reranker: PooledBackend) -> None:
    """The template of Qwen3-Reranker's model card: prefix and suffix stay when the middle is cut."""
    reranker.model = encoder_card("qwen", ("classify", 1), max_context_tokens=600)
    files = PoolingFiles(pair_template=QWEN3_RERANKER)
    connection = ClientConnection(make_app(reranker, models=ServedModels(encoder(reranker, files))))
    prefix, suffix = token_ids(QWEN3_RERANKER.prefix), token_ids(QWEN3_RERANKER.suffix)
    for instruction in (None, "find cats"):
        middle = f"<Instruct>: {instruction or QWEN3_RERANKER.default_instruction}\n<Query>: q\n<Document>: d"
        body = {"query": "q", "documents": ["d"]} | ({} if instruction is None else {"instruction": instruction})
        assert (await connection.post("/v1/rerank", body)).status == 200
        sent = list(reranker.pooled_streams[-1].request.token_ids)  # type: ignore[arg-type]
        assert sent == prefix + token_ids(middle) + suffix
    long = {"query": "q", "documents": ["d" * 900], "truncate": True}
    assert (await connection.post("/v1/rerank", long)).status == 200
    sent = list(reranker.pooled_streams[-1].request.token_ids)  # type: ignore[arg-type]
    assert len(sent) == 600
    assert (sent[: len(prefix)], sent[-len(suffix) :]) == (prefix, suffix)


async def test_embedding_model_ranks_by_similarity_where_there_is_no_reranker() -> None:
    """As in vLLM; with the model's own prompts for queries and documents."""
    backend = PooledBackend(model=encoder_card("bert", ("embed", 16)))
    files = PoolingFiles(prompts={"query": "Q:", "document": "D:"})
    connection = ClientConnection(make_app(backend, models=ServedModels(encoder(backend, files))))
    body = {"query": QUERY, "documents": ["the dog", "the cat", "mat"], "max_tokens_per_doc": 8}
    answer = (await connection.post("/v1/rerank", body)).json()
    inputs = [token_ids("Q:" + QUERY), *(token_ids("D:" + text)[:6] for text in body["documents"])]
    query, *documents = [normalized(vector_of("embed", [START, *ids, END], 16)) for ids in inputs]
    expected = [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [item["index"] for item in answer["results"]] == order
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == pytest.approx([expected[index] for index in order])
    assert (await connection.post("/rerank", {"query": QUERY, "texts": ["x"]})).status == 424
    await connection.end()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query: required"),
        ("/v1/rerank", {"query": "a"}, "documents: required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents: expected array of length >= 1"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query: expected str of length >= 1"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents: at most 2048 inputs in one request"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "model": "bert", "instruction": "b"}, "instruction: this"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction: this model takes no"),
        ("/score", {"text_1": "a"}, "text_2: required, or data_2 or documents or items"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1: 2 texts and 1 in text_2"),
        ("/classify", {"input": "a", "model": "bert"}, "model: this endpoint needs one that can classify"),
        ("/pooling", {"input": "a", "task": "sparse"}, 'task: "sparse" is answered by /embed_sparse'),
        ("/predict", {"inputs": ["a", "b", "c"]}, "inputs: must be a text or two"),
        ("/predict", {"inputs": [["a"], ["a", "b", "c"]]}, "inputs[1]: must be a text or two"),
        ("/embed", {"inputs": "a", "dimensions": 9}, "dimensions: 9, but the embeddings of this model have 8"),
        ("/embed_all", {"inputs": "a", "dimensions": 2}, "dimensions: not supported"),
        ("/decode", {"ids": [[1], [9999]]}, "ids[1]: token id 9999 is outside the vocabulary"),
        ("/decode", {"ids": [[1], 2]}, "ids[1]: must be token ids, or lists"),
    ],
)
async def test_an_error_names_the_field_in_the_format_of_its_api(
    connection: ClientConnection, path: str, body: dict[str, Any], message: str
) -> None:
    response = await connection.post(path, body)
    answer = response.json()
    assert response.status == (422 if "error_type" in answer else 400)
    if path in ("/score", "/classify", "/pooling"):
        shown = answer["error"]["message"]
    elif "rerank" in path and "texts" not in body:
        assert answer["detail"] == answer["message"] == answer["error"]["message"]
        shown = answer["message"]
    else:
        assert set(answer) == {"error", "error_type"}
        assert answer["error_type"] == "Validation"
        shown = answer["error"]
    assert shown.startswith(message)


async def test_vectors_have_teis_format(connection: ClientConnection, embedder: PooledBackend) -> None:
    ids = [START, *token_ids("cat"), END]
    raw = vector_of("embed", ids, 8)
    for changes, expected in (
        ({}, normalized(raw)),
        ({"normalize": False}, raw),
        ({"dimensions": 3}, normalized(raw[:3])),
    ):
        (vector,) = (await connection.post("/embed", {"inputs": "cat", **changes})).json()
        assert list(array("f", vector)) == expected
    two = (await connection.post("/embed", {"inputs": ["cat", "x"], "prompt_name": "query", "truncate": True})).json()
    assert len(two) == 2
    (tokens,) = (await connection.post("/embed_all", {"inputs": "cat"})).json()
    assert [list(array("f", row)) for row in tokens] == [vector_of("token_embed", [each], 4) for each in ids]
    (sparse,) = (await connection.post("/embed_sparse", {"inputs": "cat"})).json()
    assert sparse == [{"index": each, "value": float(each)} for each in sorted(set(ids))]
    matrix = (await connection.post("/pooling", {"input": "cat", "task": "token_embed", "dimensions": 2})).json()
    assert [len(row) for row in matrix["data"][0]["data"]] == [2] * len(ids)


async def test_tokens_have_their_places_in_teis_format(connection: ClientConnection) -> None:
    text = "the été 猫"
    (tokens,) = (await connection.post("/tokenize", {"inputs": text, "model": "bert"})).json()
    assert [token["id"] for token in tokens] == [START, *token_ids(text), END]
    assert [token["special"] for token in tokens] == [True, *[False] * (len(tokens) - 2), True]
    for token in tokens[1:-1]:
        assert token["text"] == text[token["start"] : token["stop"]]
    assert (tokens[0]["text"], tokens[0]["start"]) == ("<|im_start|>", None)
    ids = [[token["id"] for token in tokens], token_ids("x")]
    assert (await connection.post("/decode", {"ids": ids, "model": "bert"})).json() == [text, "x"]
    kept = await connection.post("/decode", {"ids": ids[0], "skip_special_tokens": False})
    assert kept.json() == [f"<|im_start|>{text}<|im_end|>"]


async def test_teis_tokens_are_those_of_the_model_that_embeds_unless_another_is_named(
    connection: ClientConnection,
) -> None:
    async def tokens_of(**model: str) -> list[int]:
        (tokens,) = (await connection.post("/tokenize", {"inputs": "the cat"} | model)).json()
        return [token["id"] for token in tokens]

    of_llm = await tokens_of(model="llm")
    assert await tokens_of() == await tokens_of(model="bert") != of_llm
    assert (await connection.post("/decode", {"ids": of_llm, "model": "llm"})).json() == ["the cat"]


async def test_info_describes_the_model_that_embeds_or_scores(
    connection: ClientConnection, classifying: ClientConnection
) -> None:
    info = (await connection.request("GET", "/info")).json()
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("bert", MAX_TOKENS, 2048)
    assert info["model_type"] == {"embedding": {"pooling": None}}
    labels = (await classifying.request("GET", "/info")).json()["model_type"]["classifier"]["id2label"]
    assert labels == {"0": "bad", "1": "fair", "2": "good"}
