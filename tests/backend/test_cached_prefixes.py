"""Requests go where the beginning of their prompt is cached, also from a frontend that has sent nothing yet."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from pathlib import Path

from penstock.backend.passes.fake import FakePass
from penstock.shm.client import GenerationRequest, ReplicaSet
from penstock.shm.memory.page_digest import page_names
from tests.backend.served import served
from tests.fake_passes import next_token
from tests.shm.client.harness import GREEDY, tokens_of, until

VOCAB_SIZE = 512
NUM_PAGES, PAGE_SIZE = 128, 4
NUM_DOCUMENTS = 8
DOCUMENT_TOKENS = 40
"""Less than the first name of a table of what was sent, so only the backends' own tables can tell."""


def load() -> FakePass:
    loaded = FakePass(VOCAB_SIZE, 20)
    loaded.create_cache(NUM_PAGES, PAGE_SIZE, "fp32")
    return loaded


async def ask(replicas: ReplicaSet, prompt: list[int]) -> str:
    """Return the backend, once the right token is there."""
    stream = replicas.submit(GenerationRequest(prompt, 1, GREEDY))
    assert await tokens_of(stream) == [next_token(prompt, VOCAB_SIZE)]
    return stream.backend


def num_cached(replicas: ReplicaSet, document: list[int], salt: bytes) -> int:
    """The most that any backend says it has of the document."""
    names = page_names(array("i", [*document, 99]), salt, PAGE_SIZE)
    return max(replica.digest.num_cached_tokens(names) for replica in replicas.replicas if replica.digest is not None)


async def test_another_frontend_finds_the_backend_that_has_a_document_and_another_tenant_does_not() -> None:
    documents = [[number] * DOCUMENT_TOKENS for number in range(1, NUM_DOCUMENTS + 1)]
    with ExitStack() as backends:
        paths: list[Path] = [
            backends.enter_context(served(load, num_pages=NUM_PAGES, page_size=PAGE_SIZE)) for _ in range(2)
        ]
        first, second = ReplicaSet(paths), ReplicaSet(paths)
        try:
            for replicas in (first, second):
                await replicas.start()
                await until(lambda: all(replica.client.ready for replica in replicas.replicas))  # noqa: B023 - awaited
            # Each frontend has sent one document to each backend, by hand.
            owners = {}
            for number, document in enumerate(documents):
                client = first.replicas[number % 2].client
                await tokens_of(client.submit(GenerationRequest(document, 1, GREEDY)))
                owners[number] = str(number % 2 + 1)
            await until(lambda: all(num_cached(second, document, b"") for document in documents))
            for number, document in enumerate(documents):
                assert await ask(second, [*document, 99]) == owners[number]
            assert [num_cached(second, document, b"") for document in documents] == [DOCUMENT_TOKENS] * NUM_DOCUMENTS
            assert [num_cached(second, document, b"other") for document in documents] == [0] * NUM_DOCUMENTS
        finally:
            await first.close()
            await second.close()
