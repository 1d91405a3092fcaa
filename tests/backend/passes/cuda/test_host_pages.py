"""Host pages of the CUDA pass: when it allocates them, and that restored pages equal the saved ones bit for bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import DeviceLost, SamplingParams, StepBatch
from penstock.backend.forward_pass.extensions import IHostPages
from penstock.backend.passes.cuda.device.link_probe import LinkSpeed
from penstock.backend.passes.cuda.memory import page_moves
from penstock.backend.passes.cuda.memory.page_moves import TokenCosts, count_host_pages
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from tests.backend.passes.cuda.deferred_device import DeferredCudaPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, generated, greedy_choices, options, prompts
from tests.backend.passes.decoder.driver import Driver, DriverRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import StepOutput

NUM_HOST_PAGES = 7
PAGE_SIZE = 16
GREEDY_WITH_LOGPROBS = SamplingParams(temperature=0.0, num_logprobs=5)


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copying faster than any computation."""
    set_link(monkeypatch, 1e18)


def set_link(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    speed = LinkSpeed(bytes_per_s, bytes_per_s)
    monkeypatch.setattr("penstock.backend.passes.decoder.cuda_pass.forward_pass.measure_link", lambda _device: speed)


def make_driver(
    kv_dtype: str = "fp32",
    host_kv_bytes: int | None = None,
    pass_class: type[EmulatedCudaPass | DeferredCudaPass] = EmulatedCudaPass,
) -> Driver:
    """Make a driver; by default with host memory for NUM_HOST_PAGES pages and a part of another one."""
    settings = options()
    page_bytes = PAGE_SIZE * pass_class.describe(checkpoint("llama3"), settings).kv_bytes_per_token[kv_dtype]
    num_bytes = NUM_HOST_PAGES * page_bytes + page_bytes // 2 if host_kv_bytes is None else host_kv_bytes
    made = pass_class.load(checkpoint("llama3"), replace(settings, host_kv_bytes=num_bytes))
    return Driver(made, num_pages=32, page_size=PAGE_SIZE, kv_dtype=kv_dtype)


def run(
    driver: Driver,
    parts: Sequence[tuple[DriverRow, int]],
    restores: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
) -> NDArray[np.float32]:
    """Run a step without sampling, and return its logits [L, vocab]. The driver's rows do not advance."""
    batch = replace(driver.build(parts), page_restores=tuple(restores), page_copies=tuple(copies))
    return driver.forward_pass.host_logits(driver.forward_pass.forward(batch))  # type: ignore[no-any-return]


def poison(driver: Driver, pages: Sequence[int]) -> None:
    with torch.inference_mode():
        driver.forward_pass._ops.pages[:, list(pages)] = 0xFF  # NaN in every number


def expect_same_rows(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """Two rows must have the same bits, and those of one row alone up to the rounding of torch's products on the
    CPU."""
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[:1], expected, atol=1e-4, rtol=0)


# ---- Allocation ----


@pytest.mark.parametrize(
    ("copy_s", "compute_s", "budget_bytes", "expected"),
    [
        (1e-6, 2e-6, 1000, 10),
        (1e-6, 2e-6, 1099, 10),
        (1e-6, 2e-6, 99, 0),
        (1e-6, 2e-6, 0, 0),
        (2e-6, 2e-6, 1000, 0),
        (3e-6, 2e-6, 1000, 0),
    ],
)
def test_host_pages_are_allocated_if_copying_is_faster(
    copy_s: float, compute_s: float, budget_bytes: int, expected: int
) -> None:
    assert count_host_pages(TokenCosts(copy_s, compute_s), 100, budget_bytes) == expected


def test_host_memory_holds_whole_pages_and_is_freed_with_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        driver = make_driver("q8_0")
    made = driver.forward_pass
    assert isinstance(made, IHostPages)
    assert made.num_host_pages == NUM_HOST_PAGES
    (memory,) = made.device.host_memories
    num_bytes = NUM_HOST_PAGES * PAGE_SIZE * made.spec.kv_bytes_per_token["q8_0"]
    assert memory.bytes.numel() == num_bytes
    (line,) = [message for message in caplog.messages if message.startswith("host link: ")]
    assert str(made.token_costs) in line
    assert line.endswith(f"pages of preempted sequences are kept in {num_bytes / 1e9:.2f} GB of host memory")
    assert not memory.is_free
    made.close()
    assert memory.is_free


def test_pages_are_recomputed_over_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_link(monkeypatch, 1e-3)
    with caplog.at_level(logging.INFO):
        made = make_driver().forward_pass
    assert made.num_host_pages == 0
    assert made.device.host_memories == []
    assert caplog.messages[-1].endswith("pages of preempted sequences are recomputed")
    made.close()


@pytest.mark.parametrize("host_kv_bytes", [0, 1000])
def test_host_memory_too_small_for_a_page_is_not_allocated(
    host_kv_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        made = make_driver(host_kv_bytes=host_kv_bytes).forward_pass
    assert made.num_host_pages == 0
    assert made.device.host_memories == []
    assert caplog.messages[-1].endswith("recomputed: 0.00 GB of host memory do not hold one page")


def test_memory_that_cannot_be_locked_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    device = EmulatedDevice(lockable_bytes=0)
    made = CudaDecoderPass.load(checkpoint("llama3"), replace(options(), host_kv_bytes=1 << 20), device)
    made.create_cache(8, PAGE_SIZE, "fp32")
    assert made.num_host_pages == 0
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("0.00 GB of host memory cannot be page-locked (")
    assert warning.endswith("; pages of preempted sequences are recomputed")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in warning
    with pytest.raises(ValueError, match="host pages to save to are 0 … 0; there are 0"):
        made.save_pages(((1, 0),))
    made.close()


def test_host_pages_take_no_device_memory() -> None:
    settings = options()
    described = [
        CudaDecoderPass.describe(checkpoint("llama3"), replace(settings, host_kv_bytes=num_bytes))
        for num_bytes in (0, 1 << 30)
    ]
    assert described[0] == described[1]


# ---- Saves and restores ----


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "q8_0", "fp8"])
def test_pages_saved_overwritten_and_restored_elsewhere_give_the_same_bits(kv_dtype: str) -> None:
    driver = make_driver(kv_dtype)
    row, other = driver.add(prompts((40,))[0]), driver.add(prompts((9,), seed=1)[0])
    driver.prefill()
    expected = run(driver, [(row, 1), (other, 1)])
    held = driver.forward_pass._ops.pages.clone()
    pages, host_pages = list(row.pages), [5, 0, 3]
    driver.forward_pass.save_pages(tuple(zip(pages, host_pages, strict=True)))
    poison(driver, pages)
    row.pages = [driver.free_pages.pop() for _ in pages]
    found = run(driver, [(row, 1), (other, 1)], restores=list(zip(host_pages, row.pages, strict=True)))
    np.testing.assert_array_equal(found, expected)
    now = driver.forward_pass._ops.pages
    assert torch.equal(now[:, row.pages[:2]], held[:, pages[:2]]), "a page changed that received no token"
    untouched = [page for page in range(32) if page not in pages + row.pages]
    assert torch.equal(now[:, untouched], held[:, untouched])


def test_a_captured_step_reads_pages_restored_for_it() -> None:
    driver = make_driver()
    row = driver.add(prompts((35,))[0])
    driver.prefill()
    driver.decode(2)
    driver.forward_pass.save_pages(tuple((page, host_page) for host_page, page in enumerate(row.pages)))
    poison(driver, row.pages)
    pages, row.pages = row.pages, [driver.free_pages.pop() for _ in row.pages]
    graphs = driver.forward_pass.device.graphs
    before = sum(graph.num_replays for graph in graphs)
    run(driver, [(row, 1)], restores=list(enumerate(row.pages)))
    assert sum(graph.num_replays for graph in graphs) == before + 1
    poison(driver, pages)
    driver.decode(4)
    assert generated(row) == greedy_choices("llama3", row)


def test_a_page_is_restored_before_it_is_copied() -> None:
    driver = make_driver()
    prompt = prompts((40,))[0]
    row = driver.add(prompt)
    driver.prefill()
    expected = run(driver, [(row, 1)])
    driver.forward_pass.save_pages(((row.pages[1], 6),))
    poison(driver, row.pages[1:2])
    fork = driver.add(row.tokens)
    fork.computed = row.computed
    fork.pages = [row.pages[0], driver.free_pages.pop(), driver.free_pages.pop()]
    copies = list(zip(row.pages[1:], fork.pages[1:], strict=True))
    found = run(driver, [(row, 1), (fork, 1)], restores=[(6, row.pages[1])], copies=copies)
    expect_same_rows(found, expected)


@pytest.mark.parametrize(("num_restored", "num_copied"), [(7, 0), (7, 1), (1, 7), (7, 5), (3, 3)])
def test_moves_beyond_one_launch_go_ahead_in_order(
    num_restored: int, num_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch takes 3 moves. The first copies have sources that are restored in the same step."""
    monkeypatch.setattr(page_moves, "MAX_PAGE_MOVES", 3)
    driver = make_driver("fp8")
    pages = driver.forward_pass._ops.pages
    with torch.inference_mode():
        pages.copy_(torch.randint(0, 256, pages.shape, dtype=torch.uint8))
    expected = pages.clone()
    driver.forward_pass.save_pages(tuple((page, page) for page in range(NUM_HOST_PAGES)))
    restores = [(host_page, 10 + host_page) for host_page in range(num_restored)]
    copies = [(10 + index if index < num_restored else index, 20 + index) for index in range(num_copied)]
    for sources in (restores, copies):
        for source, destination in sources:
            expected[:, destination] = expected[:, source]
    driver.free_pages = [30]
    row = driver.add([1, 2, 3])
    run(driver, [(row, 3)], restores, copies)
    kept = [page for page in range(32) if page != 30]
    assert torch.equal(pages[:, kept], expected[:, kept])


def moves_without_waiting(driver: Driver, *, keeps_pages: bool) -> list[StepOutput]:
    """Run steps of three sequences without waiting for any before the last one is launched.

    With keeps_pages, each sequence has its own pages. Otherwise all use the same ones in turn: the first two sequences
    are saved before the next one is computed, and are restored in turn.
    """
    forward_pass = driver.forward_pass
    first, second, third = (driver.add(prompt, GREEDY_WITH_LOGPROBS) for prompt in prompts((33, 40, 37), seed=4))
    host_pages = {first.slot: (0, 1, 2), second.slot: (3, 4, 5)}
    shared = [driver.free_pages.pop() for _ in range(3)]
    moving = [driver.free_pages.pop() for _ in range(3)]
    pending = []

    def step(row: DriverRow, count: int, restores: tuple[tuple[int, int], ...] = ()) -> None:
        batch: StepBatch = replace(driver.build([(row, count)]), page_restores=restores)
        pending.append(forward_pass.sample(forward_pass.forward(batch), batch))
        row.computed += count
        row.tokens.append(7 + len(row.tokens) % 90)  # the sampled token is not known yet

    def save(row: DriverRow) -> None:
        if not keeps_pages:
            forward_pass.save_pages(tuple(zip(row.pages, host_pages[row.slot], strict=True)))

    for row in (first, second, third):
        if not keeps_pages:
            row.pages = list(shared)
        step(row, len(row.tokens))
        if row is not third:
            save(row)
    for row in (first, second, first, second):
        if not keeps_pages:
            row.pages = list(moving)
        step(row, 1, () if keeps_pages else tuple(zip(host_pages[row.slot], moving, strict=True)))
        save(row)
    step(third, 1)
    return [output.wait() for output in pending]


@pytest.mark.parametrize("pass_class", [EmulatedCudaPass, DeferredCudaPass], ids=["work at once", "as late as can be"])
def test_saves_steps_and_restores_run_in_order(
    pass_class: type[EmulatedCudaPass | DeferredCudaPass],
) -> None:
    expected = moves_without_waiting(make_driver(), keeps_pages=True)
    found = moves_without_waiting(make_driver(pass_class=pass_class), keeps_pages=False)
    assert len(found) == len(expected) == 8
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs.top, other.logprobs.top)


def test_moves_stay_in_bounds() -> None:
    """Checked by the emulator's checking mode."""
    device = EmulatedDevice(mode="check")
    made = CudaDecoderPass.load(checkpoint("llama3"), replace(options(), host_kv_bytes=1 << 20), device)
    driver = Driver(made, num_pages=8, page_size=PAGE_SIZE, kv_dtype="bf16")
    row = driver.add(range(20))
    driver.prefill()
    expected = run(driver, [(row, 1)])
    last = made.num_host_pages - 1
    made.save_pages(((row.pages[0], last), (row.pages[1], 0)))
    poison(driver, row.pages)
    np.testing.assert_array_equal(run(driver, [(row, 1)], [(last, row.pages[0]), (0, row.pages[1])]), expected)
    assert device.launcher.launched.count("copy_pages") == 2


# ---- Invalid moves ----


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (((32, 0),), "pages to save are 32 … 32; there are 32"),
        (((-1, 0), (3, 1)), "pages to save are -1 … 3; there are 32"),
        (((3, 0), (4, NUM_HOST_PAGES)), f"host pages to save to are 0 … {NUM_HOST_PAGES}; there are {NUM_HOST_PAGES}"),
        (((3, -1),), "host pages to save to are -1 … -1"),
        (((3, 2), (4, 1), (5, 2)), "host page 2 is saved to twice"),
    ],
)
def test_invalid_saves_are_refused_and_nothing_is_saved(pairs: tuple[tuple[int, int], ...], message: str) -> None:
    driver = make_driver()
    with pytest.raises(ValueError, match=message):
        driver.forward_pass.save_pages(pairs)
    assert (driver.forward_pass.device.host_memories[0].bytes == 0xFF).all()
    driver.forward_pass.save_pages(())
    driver.forward_pass.save_pages(((3, 0), (3, 1)))


@pytest.mark.parametrize(
    ("restores", "copies", "message"),
    [
        (
            [(NUM_HOST_PAGES, 3)],
            [],
            f"host pages to restore are {NUM_HOST_PAGES} … {NUM_HOST_PAGES}; there are {NUM_HOST_PAGES}",
        ),
        ([(-1, 3)], [], "host pages to restore are -1 … -1"),
        ([(0, 32)], [], "pages to restore to are 32 … 32; there are 32"),
        ([(0, -2), (1, 4)], [], "pages to restore to are -2 … 4"),
        ([(0, 3), (1, 4), (2, 3)], [], "page 3 is the destination of two"),
        ([(0, 3)], [(5, 4), (6, 3)], "page 3 is the destination of two"),
        ([], [(6, 7), (0, 6)], "page 6 is source and destination of a step's copies"),
        ([(0, 3)], [(5, 32)], "pages to copy are 5 … 32; there are 32"),
    ],
)
def test_a_step_with_invalid_restores_is_refused_and_moves_nothing(
    restores: list[tuple[int, int]], copies: list[tuple[int, int]], message: str
) -> None:
    driver = make_driver()
    row = driver.add(prompts((20,))[0])
    driver.prefill()
    held = driver.forward_pass._ops.pages.clone()
    with pytest.raises(ValueError, match=message):
        run(driver, [(row, 1)], restores, copies)
    assert torch.equal(driver.forward_pass._ops.pages, held)
    driver.decode(3)
    assert generated(row) == greedy_choices("llama3", row)


def test_a_host_page_can_be_restored_to_several_pages() -> None:
    driver = make_driver()
    row = driver.add(prompts((20,))[0])
    driver.prefill()
    expected = run(driver, [(row, 1)])
    driver.forward_pass.save_pages(tuple((page, host_page) for host_page, page in enumerate(row.pages)))
    poison(driver, row.pages)
    copy = driver.add(row.tokens)
    copy.computed, copy.pages = row.computed, [driver.free_pages.pop() for _ in row.pages]
    restores = [*enumerate(row.pages), *enumerate(copy.pages)]
    expect_same_rows(run(driver, [(row, 1), (copy, 1)], restores), expected)


def test_a_fault_while_saving_pages_loses_the_device() -> None:
    driver = make_driver()
    driver.forward_pass.device.fault = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="saving 1 pages: an illegal memory access"):
        # The third save waits until the device has read the block of the first one.
        [driver.forward_pass.save_pages(((1, 1),)) for _ in range(3)]
