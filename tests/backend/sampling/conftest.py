"""The sampler in numpy, and in the kernels of two paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref

import pytest

from penstock.backend.passes.cpu.library.native_structs import Shape, declare_functions
from penstock.backend.passes.cpu.native_sampling import NativeSampler
from penstock.backend.sampling.sampler import HostSampling
from tests.backend.passes.cpu.path_libraries import open_path

MakeSampling = Callable[[int, int], HostSampling]
"""Receives vocab_size and max_slots."""


@pytest.fixture(scope="module", params=["numpy", "avx512_bf16", "avx2"])
def sampling(request: pytest.FixtureRequest) -> Iterator[MakeSampling]:
    if request.param == "numpy":
        yield HostSampling
        return
    library = open_path(request.param)
    declare_functions(library)
    engine = library.ps_create(2, 0, byref(Shape(num_heads=1, num_kv_heads=1, head_dim=16, page_size=16)))
    yield lambda vocab, slots: HostSampling(vocab, slots, NativeSampler(library, engine, vocab, slots))
    library.ps_destroy(engine)
