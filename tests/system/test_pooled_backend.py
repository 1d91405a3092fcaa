"""A backend process that pools, and a client: vectors of every kind arrive exact, an equal input is computed once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from penstock.shm.client import BackendClient, PooledFailed, PooledRequest
from penstock.shm.messages import FailureCode
from tests.fake_encoder import fake_vectors

PASS = "tests.fake_encoder:FakeEncoder"


def test_every_kind_of_vector_arrives_and_is_cached() -> None:
    with TemporaryDirectory(prefix="ps-") as directory:
        path = Path(directory) / "b.sock"
        argv = [sys.executable, "-m", "penstock.backend.main", "--socket", str(path), "--gpu", "none"]
        argv += ["--forward-pass", PASS, "--embedding-cache", "1MB", "--log-level", "error"]
        with subprocess.Popen(argv) as backend:
            try:
                asyncio.run(_check(path))
            finally:
                backend.terminate()
        assert backend.returncode == 0


async def _check(path: Path) -> None:
    client = BackendClient(path)
    await client.start()
    card = await client.wait_until_ready(60.0)
    assert not card.generates
    assert card.pooled[0].kind == "embed"
    cases = [(pooled.kind, [1, 2, number]) for pooled in card.pooled for number in range(100)]
    streams = [client.submit_pooled(PooledRequest(tokens, kind, 1, group=3)) for kind, tokens in cases]
    results = await asyncio.gather(*(stream.result() for stream in streams))
    for (kind, tokens), result in zip(cases, results, strict=True):
        expected = fake_vectors(tokens, kind, 1, card.vocab_size)
        values = np.array(result.values)
        if result.indices is not None:
            values = np.zeros(card.vocab_size, np.float32)
            values[result.indices] = result.values
        np.testing.assert_array_equal(values.reshape(result.num_vectors, -1), expected)
    again = await client.submit_pooled(PooledRequest([1, 2, 99], card.pooled[-1].kind, 1)).result()
    assert again.is_cached
    assert again.values == results[-1].values
    with pytest.raises(PooledFailed) as failed:
        await client.submit_pooled(PooledRequest([1] * (card.max_context_tokens + 1), "embed")).result()
    assert (failed.value.failure, failed.value.limit) == (FailureCode.CONTEXT_TOO_LONG, card.max_context_tokens)
    await client.close()
