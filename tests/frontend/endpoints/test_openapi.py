"""The OpenAPI document is valid, complete and true; its page loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from penstock.frontend.endpoints.docs.field_docs import FIELD_DOCS, effective_fields
from penstock.frontend.endpoints.docs.openapi import document
from penstock.frontend.endpoints.routes import Route
from tests.frontend.formats.scoring import ScoringBackend
from tests.frontend.harness import ClientConnection, FakeBackend, Response, make_app
from tests.frontend.pooled_backend import PooledBackend, encoder, encoder_card

PAGE = Path(__file__).parents[3] / "frontend" / "endpoints" / "docs" / "page"
CHAT_PAGE = PAGE.parents[1] / "chat_page"
ENGINE_PAGE = PAGE.parents[1] / "server" / "engine_page"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/responses/compact": {"model": "test/model", "input": "x"},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": CHAT,
    "/invocations": CHAT,
    "/v1/quote": CHAT,
    "/api/chat": {**CHAT, "model": "test/model", "stream": False},
    "/api/generate": {"prompt": "x", "model": "test/model", "stream": False},
    "/api/show": {"model": "test/model"},
    "/api/pull": {"model": "test/model", "stream": False},
    "/completion": {"prompt": "x"},
}
POOLED_BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [{"input": ["x", "y"]}, {"input": "x", "encoding_format": "base64"}],
    "/v1/embed": [{"texts": ["x", "y"]}, {"texts": ["x"], "embedding_types": ["float", "int8"]}],
    "/v2/embed": [{"texts": ["x"], "input_type": "search_query"}, {"texts": ["x"], "embedding_types": ["base64"]}],
    "/v1/rerank": [{"query": "x", "documents": ["a", {"text": "b"}]}],
    "/v2/rerank": [{"query": "x", "documents": ["a", "b"], "return_documents": True}],
    "/rerank": [{"query": "x", "documents": ["a"]}, {"query": "x", "texts": ["a", "b"], "return_text": True}],
    "/v1/score": [{"text_1": "x", "text_2": ["a", "b"]}],
    "/score": [{"queries": "x", "documents": "a"}],
    "/classify": [{"input": "x"}],
    "/pooling": [{"input": "x"}, {"input": "x", "task": "token_embed"}, {"input": "x", "task": "classify"}],
    "/": [{"inputs": "x"}, {"query": "x", "texts": ["a", "b"]}],
    "/embed": [{"inputs": "x"}],
    "/embed_all": [{"inputs": ["x", "y"]}],
    "/embed_sparse": [{"inputs": "x"}],
    "/similarity": [{"inputs": {"source_sentence": "x", "sentences": ["a", "b"]}}],
    "/predict": [{"inputs": "x"}, {"inputs": [["x"], ["a", "b"]]}],
    "/decode": [{"ids": [1, 2]}],
    "/api/embed": [{"model": "encoder", "input": ["x", "y"]}],
    "/api/embeddings": [{"model": "encoder", "prompt": "x"}],
    "/tokenize": [{"inputs": ["x", "y"]}],
}
COMMANDS = (
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/api/delete",
    "/infill",
)
"""Refused by the server of these tests."""
GENERATING = [path for path in BODIES if path in list(BODIES)[:4]]


@pytest.fixture(scope="module")
def routes() -> dict[str, dict[str, Route]]:
    return make_app(FakeBackend()).routes


@pytest.fixture(scope="module")
def api(routes: dict[str, dict[str, Route]]) -> dict[str, Any]:
    """The document as a client receives it."""
    decoded: dict[str, Any] = json.loads(json.dumps(document(routes, "1.2.3")))
    return decoded


def schema_of(api: dict[str, Any], path: str, method: str, status: int, kind: str = "application/json") -> Any:
    found = api["paths"][path][method]["responses"][str(status)]["content"][kind]["schema"]
    return {**found, "components": api["components"]}


def check(api: dict[str, Any], response: Response, path: str, method: str = "get") -> None:
    jsonschema.validate(response.json(), schema_of(api, path, method, response.status))


def test_document_is_valid_openapi_3_1(api: dict[str, Any]) -> None:
    assert api["openapi"].startswith("3.1")
    OpenAPIV31SpecValidator(api).validate()
    ids = [operation["operationId"] for methods in api["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


def test_document_has_exactly_the_routes(api: dict[str, Any], routes: dict[str, dict[str, Route]]) -> None:
    listed = {(path, method.upper()) for path, methods in api["paths"].items() for method in methods}
    assert listed == {(path, method) for path, methods in routes.items() for method in methods if method != "HEAD"}
    for path, methods in routes.items():
        for method, route in methods.items():
            operation = api["paths"][path].get(method.lower())
            if operation is None:
                continue
            assert len(operation["summary"]) > 10
            assert bool(operation["security"]) == route.needs_key
            assert ("401" in operation["responses"]) == route.needs_key
            has_body = method in ("POST", "DELETE") and path in {*BODIES, *POOLED_BODIES, *COMMANDS}
            assert ("requestBody" in operation) == (route.doc.body is not None) == has_body


def test_document_explains_exactly_the_fields_with_an_effect(
    api: dict[str, Any], routes: dict[str, dict[str, Route]]
) -> None:
    docs = [route.doc for methods in routes.values() for route in methods.values()]
    bodies = {doc.body for doc in docs if doc.body is not None} | {
        doc.other[0] for doc in docs if doc.other is not None
    }
    fields = set().union(*(effective_fields(body) for body in bodies))
    assert fields == set(FIELD_DOCS)
    for body in bodies:
        properties = api["components"]["schemas"][body.__name__]["properties"]
        assert set(properties) <= effective_fields(body)
        assert all(field["description"] for field in properties.values())
    temperature = json.dumps(api["components"]["schemas"]["ChatBody"]["properties"]["temperature"])
    assert '"maximum": 2' in temperature
    assert "suffix" not in api["components"]["schemas"]["ChatBody"]["properties"]
    assert "n" not in api["components"]["schemas"]["MessagesBody"]["properties"]


@pytest.mark.parametrize("path", BODIES)
async def test_answers_and_errors_match_the_document(
    connection: ClientConnection, api: dict[str, Any], path: str
) -> None:
    answer = await connection.post(path, BODIES[path])
    assert answer.status == 200
    check(api, answer, path, "post")
    refused = await connection.post(path, b"no JSON")
    assert refused.status == 400
    check(api, refused, path, "post")


@pytest.mark.parametrize("path", POOLED_BODIES)
async def test_vectors_scores_and_their_errors_match_the_document(
    backend: FakeBackend, api: dict[str, Any], path: str
) -> None:
    pooled = (("embed", 8), ("token_embed", 4), ("sparse", 300), ("classify", 1))
    encoding = PooledBackend(model=encoder_card("encoder", *pooled))
    connection = ClientConnection(make_app(encoding, keeper=encoder(encoding)))
    for body in POOLED_BODIES[path]:
        answer = await connection.post(path, body)
        assert answer.status == 200, answer.body
        check(api, answer, path, "post")
        wrong = await connection.post(path, {**body, "model": 5})
        assert wrong.status in (400, 422)
        check(api, wrong, path, "post")
    check(api, await connection.request("GET", "/info"), "/info")


async def test_every_body_has_an_example_that_the_server_answers(api: dict[str, Any], backend: FakeBackend) -> None:
    """Sent as the page sends it: with the name of a served model."""
    pooled = (("embed", 8), ("token_embed", 4), ("sparse", 300), ("classify", 1))
    encoding = PooledBackend(model=encoder_card("encoder", *pooled))
    generating = ClientConnection(make_app(backend)), backend
    pooling = ClientConnection(make_app(encoding, keeper=encoder(encoding))), encoding
    scorer = ScoringBackend()
    scoring = ClientConnection(make_app(scorer)), scorer
    operations = {path: methods["post"] for path, methods in api["paths"].items() if "post" in methods}
    answered = 0
    for path, operation in operations.items():
        if "requestBody" not in operation or path in COMMANDS:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        for reference in schema.get("anyOf", [schema]):
            body = api["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
            (example,) = body["examples"]
            jsonschema.validate(example, {**reference, "components": api["components"]})
            answers = []
            for connection, served in [scoring] if "label_token_ids" in example else [generating, pooling]:
                name = {"model": served.model.model_id} if "model" in body["properties"] else {}
                answers.append(await connection.post(path, {**example, **name}))
            assert 200 in [answer.status for answer in answers], (path, example, [answer.body for answer in answers])
            answered += 1
    assert answered > 25


@pytest.mark.parametrize("path", GENERATING)
async def test_stream_events_match_the_document(connection: ClientConnection, api: dict[str, Any], path: str) -> None:
    extras = {} if path in ("/v1/responses", "/v1/messages") else {"return_timings": True}
    response = await connection.post(path, {**BODIES[path], "stream": True, **extras})
    data = re.findall(r"^data: (\{.*)$", response.body.decode(), flags=re.MULTILINE)
    assert len(data) > 5
    for event in data:
        jsonschema.validate(json.loads(event), schema_of(api, path, "post", 200, "text/event-stream"))


async def test_chat_answer_with_every_option_matches_the_document(
    connection: ClientConnection, api: dict[str, Any]
) -> None:
    body = {**CHAT, "return_timings": True, "return_token_ids": True, "stop": "o", "n": 2}
    answer = await connection.post("/v1/chat/completions", body)
    assert "timings" in answer.json()
    assert "stop_reason" in answer.json()["choices"][0]
    check(api, answer, "/v1/chat/completions", "post")


READABLE = [(path, path) for path in ("/v1/models", "/version", "/v1/load", "/health", "/ready")]
READABLE += [(path, path) for path in ("/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/lora-adapters")]
READABLE.append(("/v1/models/test/model", "/v1/models/{model}"))


@pytest.mark.parametrize(("url", "path"), READABLE)
async def test_get_answers_match_the_document(
    connection: ClientConnection, api: dict[str, Any], url: str, path: str
) -> None:
    answer = await connection.request("GET", url)
    assert answer.status == 200
    check(api, answer, path)


async def test_kept_response_matches_the_document(connection: ClientConnection, api: dict[str, Any]) -> None:
    made = (await connection.post("/v1/responses", {"input": "x"})).json()["id"]
    for suffix in ("", "/input_items"):
        path = "/v1/responses/{response_id}" + suffix
        check(api, await connection.request("GET", f"/v1/responses/{made}{suffix}"), path)
    path = "/v1/responses/{response_id}"
    check(api, await connection.request("DELETE", f"/v1/responses/{made}"), path, "delete")
    missing = await connection.request("GET", f"/v1/responses/{made}")
    assert missing.status == 404
    check(api, missing, path)


async def test_document_needs_no_key_and_says_which_routes_do(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(api_keys=("secret",))
    first, second = [await connection.request("GET", "/openapi.json") for _ in range(2)]
    assert (first.status, first.body) == (200, second.body)
    refused = await connection.request("GET", "/v1/models")
    check(first.json(), refused, "/v1/models")


# The page


PAGES = {
    "/docs": (PAGE, "/docs/", {"/docs/page.css", "/docs/page.js", "/openapi.json"}),
    "/": (CHAT_PAGE, "/page/", {"/page/chat.js", "/page/chat.css", "/page/penstock.webmanifest", "/openapi.json"}),
    "/engine": (ENGINE_PAGE, "/engine/", {"/engine/engine.css", "/engine/engine.js"}),
}
ON_ALL_PAGES = {"/page/page.css", "/page/icon.svg", "/", "/engine", "/docs", "/metrics"}
KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json",
}


@pytest.mark.parametrize("path", PAGES)
async def test_page_loads_only_from_this_server(connection: ClientConnection, path: str) -> None:
    folder, url, linked = PAGES[path]
    page = await connection.request("GET", path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page.body.decode())) == linked | ON_ALL_PAGES
    for file in folder.rglob("*.*"):
        answer = await connection.request("GET", url + str(file.relative_to(folder)))
        kind = KINDS.get(file.suffix[1:])
        assert (answer.status, answer.headers["content-type"]) == (
            (404, "application/json") if kind is None else (200, kind)
        )
    for missing in (url, f"{url}../pages.py", f"{url}vendor", f"{url}x.js", f"{url}%2e%2e/static_files.py"):
        assert (await connection.request("GET", missing)).status == 404


def test_page_names_no_other_site_and_writes_no_markup() -> None:
    paths = [*PAGE.glob("*.*"), *CHAT_PAGE.glob("*.*"), *ENGINE_PAGE.glob("*.*")]
    assert len(paths) >= 20
    for path in paths:
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//[a-z]|@import|url\(", text.replace("// ", "")), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function| style=", text)
        assert not re.search(r"<script(?! src=)|\son\w+=", text)
