"""Orders to load and unload adapters, through the whole engine, with a pass whose tokens depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from penstock.backend.engine.requests.adapters import AdapterSet, AdapterTable
from penstock.backend.errors import StartupError
from penstock.backend.passes.fake import FakePass
from penstock.shm.link.events import Cancellation, FrontendDeath, Question
from penstock.shm.messages import MAX_ADAPTERS, Adapter, AdapterChange, ChangeAdapter, FailureCode, Finish
from tests.backend.harness import Bench
from tests.fake_passes import next_token

VOCAB_SIZE = 97
PROMPT = [7, 3, 9]
FIXED = Adapter("fixed", "id-of-fixed", 1)


@dataclass(frozen=True)
class Read:
    rank: int = 4


@dataclass
class Pass:
    """Notes what it is given."""

    put: list[tuple[int, Read | None]] = field(default_factory=list)

    def adapter_bytes(self, directory: Path) -> int:
        if directory.name == "broken":
            raise StartupError("it is truncated")
        return 10

    def read_adapter(self, directory: Path) -> Read:
        if directory.name == "hostile":
            raise ZeroDivisionError
        return Read()

    def put_adapter(self, index: int, adapter: Read | None) -> None:
        self.put.append((index, adapter))


@dataclass
class Rules:
    """A directory's name is the id of its weights."""

    remembered: dict[str, str] = field(default_factory=dict)
    num_announced: int = 0
    is_alone: bool = True

    def find_directory(self, name: str, path: str) -> Path:
        if name == "taken":
            raise StartupError("lora_name: taken")
        if name == "fatal":
            raise ZeroDivisionError
        return Path(path)

    def announce(self, name: str, directory: Path, rank: int) -> Adapter:
        self.num_announced += 1
        changing = str(self.num_announced) if directory.name == "changing" else ""
        return Adapter(name, directory.name + changing, rank)

    def check_room(self, num_bytes: int, taken_bytes: int) -> None:
        if num_bytes + taken_bytes > 30:
            raise StartupError("no room")

    def changing(self) -> AbstractContextManager[bool]:
        return nullcontext(self.is_alone)

    def remember(self, loaded: Mapping[str, tuple[Path, str]]) -> None:
        if "forgotten" in loaded:
            raise ZeroDivisionError
        self.remembered = {name: adapter_id for name, (_, adapter_id) in loaded.items()}


class Rig:
    """A bench whose adapters change. The files are read when `read` says so."""

    def __init__(self, adapters: tuple[Adapter, ...] = (FIXED,)) -> None:
        self.bench = Bench(vocab_size=VOCAB_SIZE, forward_pass=FakePass(VOCAB_SIZE, 8, num_adapters=1))
        self.forward_pass, self.rules, self.waiting = Pass(), Rules(), list[Callable[[], None]]()
        self.adapters = AdapterSet({each.adapter_id: at for at, each in enumerate(adapters)}, announced=adapters)
        requests = self.bench.requests
        requests.intake.limits = replace(
            requests.intake.limits, adapters=self.adapters.indexes, unloaded=self.adapters.unloaded
        )
        self.bench.engine._adapters = AdapterTable(
            self.bench.link, requests.table, self.adapters, self.forward_pass, self, self.rules, self.waiting.append
        )
        self._next_id = 100

    def call(self, work: Callable[[], None]) -> None:
        work()

    def wake(self) -> None:
        pass

    def order(self, name: str, directory: str = "") -> int:
        self._next_id += 1
        message = ChangeAdapter(request_id=self._next_id, change=AdapterChange(name, directory))
        self.bench.link.arrivals.append(Question(1, message))
        self.bench.turn()
        return self._next_id

    def read(self) -> None:
        """Read the files of all orders."""
        while self.waiting:
            self.waiting.pop(0)()
            self.bench.turn()

    def load(self, name: str, directory: str) -> int:
        request_id = self.order(name, directory)
        self.read()
        return request_id

    def failure(self, request_id: int) -> tuple[FailureCode, str]:
        received = self.bench.received(request_id)
        assert received.finishes == [Finish.REJECTED]
        assert received.failure is not None
        return FailureCode(received.failure.code), received.failure.text


def expected(count: int, adapter: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(next_token(tokens, VOCAB_SIZE, adapter=adapter))
    return tokens[len(PROMPT) :]


def test_loaded_adapter_serves_until_its_last_request_has_ended() -> None:
    rig = Rig()
    bench = rig.bench
    assert bench.received(rig.load("one", "dir-one")).finishes == [Finish.STOP]
    assert bench.link.adapters == (FIXED, Adapter("one", "dir-one", 4))
    assert rig.forward_pass.put == [(1, Read())]
    assert rig.rules.remembered == {"one": "dir-one"}
    bench.submit(PROMPT, 9, request_id=1, adapter="dir-one")
    bench.turn()
    assert bench.received(rig.order("one")).finishes == [Finish.STOP]
    assert (bench.link.adapters, rig.rules.remembered) == ((FIXED,), {})
    bench.submit(PROMPT, 9, request_id=2, adapter="dir-one")
    bench.turn()
    assert rig.failure(2)[0] is FailureCode.NO_ADAPTER
    assert rig.forward_pass.put == [(1, Read())]
    bench.run_dry()
    bench.turn()
    assert bench.received(1).token_ids == expected(9, 1)
    assert rig.forward_pass.put == [(1, Read()), (1, None)]
    assert rig.adapters.indexes == {"id-of-fixed": 0}


def test_request_that_an_earlier_backend_admitted_goes_on_with_an_adapter_that_is_leaving() -> None:
    rig = Rig()
    rig.load("one", "dir-one")
    rig.bench.submit(PROMPT, 30, request_id=1, adapter="dir-one")
    rig.bench.turn()
    rig.order("one")
    rig.bench.submit(PROMPT, 9, request_id=2, adapter="dir-one", admitted_ns=1)
    rig.bench.now_s = 10.0
    rig.bench.run_dry()
    assert rig.bench.received(2).token_ids == expected(9, 1)


def test_equal_weights_with_two_names_are_one_adapter() -> None:
    rig = Rig()
    rig.load("one", "same")
    rig.load("two", "same")
    assert rig.forward_pass.put == [(1, Read())]
    rig.order("one")
    rig.bench.turn()
    assert rig.forward_pass.put == [(1, Read())]
    rig.order("two")
    rig.bench.turn()
    assert rig.forward_pass.put == [(1, Read()), (1, None)]


def test_name_that_is_loaded_again_gets_other_weights() -> None:
    rig = Rig()
    rig.load("one", "first")
    rig.bench.submit(PROMPT, 30, request_id=1, adapter="first")
    rig.bench.turn()
    rig.order("one")
    rig.load("one", "second")
    assert rig.adapters.indexes == {"id-of-fixed": 0, "first": 1, "second": 2}
    rig.bench.run_dry()
    rig.bench.turn()
    assert rig.adapters.indexes == {"id-of-fixed": 0, "second": 2}
    rig.load("three", "third")
    assert rig.adapters.indexes["third"] == 1


@pytest.mark.parametrize(
    ("name", "directory", "text"),
    [
        ("taken", "x", "lora_name: taken"),
        ("fixed", "x", "lora_name: fixed has already been loaded"),
        ("new", "broken", "lora_path: it is truncated"),
        ("new", "hostile", "lora_path: ZeroDivisionError"),
        ("new", "changing", "lora_path: changing has changed while it was read: load it again"),
    ],
)
def test_adapter_that_cannot_be_loaded_changes_nothing(name: str, directory: str, text: str) -> None:
    rig = Rig()
    assert rig.failure(rig.load(name, directory)) == (FailureCode.BAD_ADAPTER, text)
    assert (rig.forward_pass.put, rig.bench.link.adapters, len(rig.adapters.indexes)) == ([], None, 1)


@pytest.mark.parametrize("name", ["fatal", "forgotten"])
def test_error_of_ours_fails_one_order_and_the_loop_goes_on(name: str) -> None:
    rig = Rig()
    received = rig.bench.received(rig.load(name, "x"))
    assert received.finishes == [Finish.REJECTED]
    assert received.failure is not None
    assert received.failure.code == FailureCode.INTERNAL
    assert (rig.forward_pass.put, rig.bench.link.adapters, rig.adapters.loaded) == ([], None, {})
    assert rig.adapters.announced == (FIXED,)
    rig.bench.submit(PROMPT, 9, request_id=1)
    rig.bench.run_dry()
    assert rig.bench.received(1).token_ids == expected(9, -1)


@pytest.mark.parametrize("event", [Cancellation(1, 101), FrontendDeath(1)])
def test_order_whose_request_has_ended_has_no_effect(event: Cancellation | FrontendDeath) -> None:
    rig = Rig()
    rig.order("one", "dir-one")
    (read,) = rig.waiting
    rig.order("two", "dir-two")
    rig.bench.link.arrivals += [event, Cancellation(1, 102)]
    rig.bench.turn()
    read()
    rig.bench.turn()
    assert (rig.forward_pass.put, rig.rules.remembered, rig.waiting) == ([], {}, [read])


def test_nothing_changes_while_another_backend_takes_over() -> None:
    rig = Rig()
    rig.load("one", "dir-one")
    request_id = rig.order("two", "dir-two")
    rig.rules.is_alone = False
    rig.read()
    for each in (request_id, rig.order("one"), rig.order("three", "dir-three")):
        assert rig.failure(each)[0] is FailureCode.UNAVAILABLE
    assert rig.rules.remembered == {"one": "dir-one"}


def test_adapters_share_the_budget_with_those_that_are_leaving() -> None:
    rig = Rig()
    for name in ("one", "two", "three"):
        rig.load(name, name)
    rig.bench.submit(PROMPT, 30, request_id=1, adapter="three")
    rig.bench.turn()
    rig.order("three")
    assert rig.failure(rig.load("four", "four")) == (FailureCode.BAD_ADAPTER, "lora_path: no room")
    rig.bench.run_dry()
    rig.bench.turn()
    assert rig.bench.received(rig.load("four", "four")).finishes == [Finish.STOP]


def test_limits_of_adapters_and_of_orders() -> None:
    rig = Rig(tuple(Adapter(str(number), str(number), 1) for number in range(MAX_ADAPTERS)))
    assert rig.failure(rig.load("new", "new"))[1] == "lora_name: 256 adapters are loaded, the limit"
    orders = [rig.order(f"a{number}", "x") for number in range(18)]
    assert rig.failure(orders[-1])[1] == "lora_name: 16 adapters wait to be loaded, the limit"


def test_fixed_and_unknown_adapters_are_not_unloaded() -> None:
    rig = Rig()
    assert rig.failure(rig.order("fixed"))[1] == "lora_name: fixed is an adapter of --lora-modules, which stays"
    assert rig.failure(rig.order("new"))[0] is FailureCode.NO_ADAPTER


def test_without_a_directory_of_adapters_none_is_loaded() -> None:
    bench = Bench()
    message = ChangeAdapter(request_id=1, change=AdapterChange("new", "x"))
    bench.link.arrivals.append(Question(1, message))
    bench.turn()
    failure = bench.received(1).failure
    assert failure is not None
    assert failure.text == "lora_name: adapters are loaded at run time only with --lora-dir"
