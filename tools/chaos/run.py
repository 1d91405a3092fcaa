"""One run: undisturbed answers first, then rounds of chaos with the books checked after each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HttpClient
from penstock.tools.bench.load_generator.target import offered_models
from penstock.tools.chaos.census import ProcessState, Watch, check_memory, take_census
from penstock.tools.chaos.client import ChaosClient
from penstock.tools.chaos.counters import (
    CountedRound,
    Numbers,
    Samples,
    StormTotals,
    check_counted,
    check_idle,
    check_storm,
    is_ready,
    num_frontends,
    wait_idle,
    wait_totals,
)
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.chaos.faults import FaultInjector
from penstock.tools.chaos.ledger import Allowance, Answer, EndKind, Ledger, difference
from penstock.tools.chaos.plan import Act, Recipe, Tenant, Workload, draw_faults, make_further_recipes, make_recipes
from penstock.tools.chaos.report import Outcome
from penstock.tools.chaos.server import Server

_START_TIMEOUT_S = 600.0
_SETTLE_TIMEOUT_S = 30.0
_GRACE_S = 90.0
"""Time that the last requests of a round may take to end. Later ones are lost."""
_CENSUS_TIMEOUT_S = 10.0
_SLEEP_TIMEOUT_S = 60.0
_REFERENCE_CLIENTS = 4
_MAX_IDLE_S = 0.25
"""Half of the time for which a worker that ends keeps an idle connection: no reused one may be reset."""
_ROUND_S = 60.0
_WARM_UP_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How much chaos, for how long."""

    lasts_s: float
    num_requests: int | None
    """None: as many as the time allows."""
    drop_rate: float
    seed: int
    concurrency: int
    num_recipes: int
    fault_every_s: float

    @property
    def num_rounds(self) -> int:
        """Without the warm-up. At least one with faults and one without."""
        return max(2, round(self.lasts_s / _ROUND_S))

    @property
    def num_quiet_rounds(self) -> int:
        """The last ones, in which no process dies: memory is measured over them."""
        return max(1, self.num_rounds // 4)


class ChaosRun:
    """A run against entrances, which lead to one server. server is given if we started it."""

    def __init__(
        self,
        plan: RunPlan,
        entrances: Sequence[str],
        tenants: list[Tenant],
        ledger: Ledger,
        *,
        server: Server | None = None,
        say: Callable[[str], None],
    ) -> None:
        """Raises ValueError for an entrance that is no URL."""
        self.outcome = Outcome(ledger)
        self._plan = plan
        self._tenants = tenants
        self._ledger = ledger
        self._server = server
        self._say = say
        self._entrances = list(entrances)
        self._clients = [ChaosClient(HttpClient(url, max_idle_s=_MAX_IDLE_S)) for url in entrances]
        # Numbers are read from the server itself where we know it: a proxy's choice of a frontend does not matter.
        self._numbers = Numbers(HttpClient(server.url_a if server is not None else entrances[0]))
        self._recipes: list[Recipe] = []
        self._references: dict[str, Answer] = {}
        self._watch = Watch()
        self._totals: StormTotals | None = None
        self._resumed: dict[int, int] = {}
        self._next_index = 0

    async def run(self) -> Outcome:
        """Run. Raises ChaosError if it cannot start. A later failure is an imbalance, so that the report is
        not lost."""
        self.outcome.started_s = time.monotonic()
        await self._start()
        workload = await self._learn()
        injector = FaultInjector(self._server, self._ledger) if self._server is not None else None
        try:
            await self._attack(workload, injector)
            await self._count()
        except ChaosError as error:
            self._ledger.imbalance("the run ended early", str(error))
        finally:
            if injector is not None:
                self.outcome.faults = injector.done
                injector.close()
        await self._finish()
        self.outcome.lasted_s = time.monotonic() - self.outcome.started_s
        return self.outcome

    async def _attack(self, workload: Workload, injector: FaultInjector | None) -> None:
        """The warm-up and the rounds. Raises ChaosError."""
        deadline_s = time.monotonic() + self._plan.lasts_s
        await self._storm(workload, self._share(_WARM_UP_SHARE), _WARM_UP_SHARE * self._plan.lasts_s)
        await self._settle("after the warm-up", is_base=True)
        for number in range(self._plan.num_rounds):
            await self._round(workload, number, deadline_s, injector)

    async def _start(self) -> None:
        """Wait for each part and start the next. Raises ChaosError."""
        server = self._server
        if server is None:
            return
        await self._wait_started(server, server.url_a)
        if not server.options.may_sleep:
            server.start_frontend_b()
            await self._wait_started(server, server.url_b)
        server.start_proxies()
        self._entrances = server.entrances
        self._clients = [ChaosClient(HttpClient(url, max_idle_s=_MAX_IDLE_S)) for url in self._entrances]
        for url in self._entrances:
            await self._wait_started(server, url)

    async def _wait_started(self, server: Server, url: str) -> None:
        """Raises ChaosError."""
        http = HttpClient(url)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        try:
            while not await is_ready(http):
                server.check_alive()
                if time.monotonic() > deadline_s:
                    raise ChaosError(f"{url}/ready was not green for {_START_TIMEOUT_S:g} s")
                await asyncio.sleep(0.05)
        finally:
            http.close()

    async def _learn(self) -> Workload:
        """Send every recipe once, undisturbed, to learn the right answers. Raises ChaosError."""
        key = self._tenants[0].api_key
        http = HttpClient(self._entrances[0], key)
        try:
            offered = await offered_models(http, "/v1/models")
        except BenchError as error:
            raise ChaosError(str(error)) from None
        finally:
            http.close()
        self.outcome.model = ", ".join(model.id for model in offered)
        self._numbers.may_sleep = any(model.state is not None for model in offered)
        first = offered[0]
        further = [model.id for model in offered[1:] if model.root in (None, model.id)]
        if first.vocab_size is not None and first.kv_cache_tokens is None:  # it generates no text
            further = [first.id] * (self._plan.num_recipes // 4) + further
            recipes = []
        else:
            shown, plan = "image" in first.input_modalities, self._plan
            recipes = make_recipes(first.id, first.vocab_size, plan.seed, plan.num_recipes, takes_pictures=shown)
        self._recipes = recipes = recipes + make_further_recipes(further, self._plan.seed)
        answers = await self._ask_all(recipes, is_stream=False)
        self._references = {recipe.name: answer for recipe, answer in zip(recipes, answers, strict=True)}
        tokens = sum(answer.received_tokens for answer in answers)
        refusals = Counter(answer.refusal for answer in answers if answer.refusal is not None)
        if refusals.total() == len(answers):
            raise ChaosError(f"every undisturbed request was refused, the first with {answers[0].refusal}")
        told = "".join(f", {count} refused with {status} {code}" for (status, code), count in refusals.items())
        self._say(f"{len(recipes)} undisturbed answers of {tokens:,} tokens{told}")
        return Workload(recipes, self._tenants, len(self._clients), self._plan.seed, self._plan.drop_rate)

    async def _ask_all(self, recipes: Sequence[Recipe], *, is_stream: bool) -> list[Answer]:
        """Raises ChaosError."""
        gate = asyncio.Semaphore(_REFERENCE_CLIENTS)

        async def ask(place: int, recipe: Recipe) -> Answer:
            async with gate:
                client = self._clients[place % len(self._clients)]
                return await client.ask(recipe, self._tenants[0].api_key, is_stream=is_stream)

        try:
            return await asyncio.gather(*(ask(place, recipe) for place, recipe in enumerate(recipes)))
        except (ConnectionBroken, ValueError) as error:
            raise ChaosError(f"an undisturbed request failed: {error}") from None

    def _share(self, part: float) -> int | None:
        return None if self._plan.num_requests is None else round(part * self._plan.num_requests)

    async def _round(self, workload: Workload, number: int, deadline_s: float, injector: FaultInjector | None) -> None:
        """Run a storm, with faults unless it is one of the last rounds, and then check the books."""
        plan = self._plan
        rounds_left = plan.num_rounds - number
        lasts_s = max(0.0, deadline_s - time.monotonic()) / rounds_left
        requests_left = None if plan.num_requests is None else max(0, plan.num_requests - self._next_index)
        count = None if requests_left is None else -(-requests_left // rounds_left)
        is_quiet = rounds_left <= plan.num_quiet_rounds
        overtime_s = _GRACE_S / 2 if rounds_left == 1 else 0.0
        storm = asyncio.create_task(self._storm(workload, count, lasts_s, overtime_s))
        try:
            if injector is not None and not is_quiet:
                faults = draw_faults(plan.seed, number, lasts_s, plan.fault_every_s, injector.left_out)
                await injector.run(faults, lasts_s, self._note_resumed)
            await storm
        finally:
            storm.cancel()
        await self._settle(f"after round {number + 1}", is_base=False, is_quiet=is_quiet)

    async def _storm(self, workload: Workload, count: int | None, lasts_s: float, overtime_s: float = 0.0) -> None:
        """Send requests at an even rate over the time; without a count, as fast as the clients allow.

        Requests for which a slow server leaves no time, overtime included, are sent in the next round.
        """
        started_s = time.monotonic()
        first = self._next_index
        groups = workload.groups(first, count if count is not None else 1 << 40)
        gap_s = lasts_s / count if count else 0.0

        async def client(mine: Iterator[list[Act]]) -> None:
            for group in mine:
                self._next_index = max(self._next_index, group[-1].index + 1)
                await asyncio.sleep(max(0.0, started_s + (group[0].index - first) * gap_s - time.monotonic()))
                await asyncio.gather(*map(self._perform, group))
                if time.monotonic() - started_s >= lasts_s + (overtime_s if count is not None else 0.0):
                    return

        clients = [asyncio.create_task(client(groups)) for _ in range(self._plan.concurrency)]
        try:
            _, late = await asyncio.wait(clients, timeout=lasts_s + overtime_s + _GRACE_S)
            if late:
                self._say(f"{len(late)} clients have not ended {_GRACE_S:g} s after the end of the round")
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        for task in clients:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _perform(self, act: Act) -> None:
        self.outcome.num_planned_drops += act.hangup is not None
        self._ledger.open(act.index, act.recipe.choices)
        ending = await self._clients[act.entrance].perform(act)
        right, allowance = self._references[act.recipe.name], _allowance(act)
        kind = self._ledger.end(ending, right, allowance)
        if kind is EndKind.COMPLETE:
            lasted_s = ending.ended_s - ending.started_s
            longest = self.outcome.longest_request
            if longest is None or lasted_s > longest.ended_s - longest.started_s:
                self.outcome.longest_request = ending

    async def _settle(self, when: str, *, is_base: bool, is_quiet: bool = True) -> None:
        """Compare the server's resources with those when it was warm; all clients have left."""
        self._close_connections()
        idle = await wait_idle(self._numbers, _SETTLE_TIMEOUT_S)
        self.outcome.longest_settle_s = max(self.outcome.longest_settle_s, idle.waited_s)
        check_idle(self._ledger, idle.samples, when)
        samples = (await wait_totals(self._numbers, _SETTLE_TIMEOUT_S)).samples
        totals = StormTotals.of(samples, self._ledger)
        if is_quiet and self._totals is not None and not self._numbers.may_sleep:
            check_storm(self._ledger, self._totals, totals, when)
        self._totals = totals
        self._close_connections()
        if self._server is not None:
            self._note_resumed_in(samples)
            await self._check_processes(self._server, when, is_base=is_base, is_quiet=is_quiet)
        ends = ", ".join(f"{count:,} {kind.value}" for kind, count in self._ledger.ends.items())
        self._say(f"{when}: {ends}; {sum(self._ledger.imbalances.values())} imbalances")

    async def _check_processes(self, server: Server, when: str, *, is_base: bool, is_quiet: bool) -> None:
        deadline_s = time.monotonic() + _SLEEP_TIMEOUT_S
        while self._numbers.may_sleep and "backend" in server.roles():
            if time.monotonic() > deadline_s:
                raise ChaosError(f"a model that nobody needs was still awake after {_SLEEP_TIMEOUT_S:g} s")
            await asyncio.sleep(0.2)
        states = take_census(server.roles())
        if is_base:
            self._watch.take_base(states)
            self.outcome.base_states = states
        deadline_s = time.monotonic() + _CENSUS_TIMEOUT_S
        # Sockets close a moment after their last byte, and a restarted worker registers a moment after it is ready.
        while (problems := await self._problems(server, states)) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.2)
            states = take_census(server.roles())
        for name, text in problems:
            self._ledger.imbalance(name, f"{when}: {text}")
        if is_quiet:
            self._watch.note_memory(states, self._ledger.num_ended)
        self.outcome.states = states

    async def _problems(self, server: Server, states: list[ProcessState]) -> list[tuple[str, str]]:
        problems = self._watch.problems(states)
        if zombies := server.zombies():
            problems.append(("zombie processes", str(zombies)))
        workers = sum(state.role == "worker" for state in states)
        samples = await self._numbers.read()
        self._numbers.http.close()
        known = None if samples is None else num_frontends(samples)
        if known != workers and not self._numbers.may_sleep:
            problems.append(("workers that the backend does not know", f"it knows {known} of {workers}"))
        return problems

    async def _note_resumed(self) -> None:
        samples = await self._numbers.read()
        if samples is not None:
            self._note_resumed_in(samples)

    def _note_resumed_in(self, samples: Samples) -> None:
        """A backend counts from its start, so each one's last number is kept."""
        if self._server is not None:
            for pid in self._server.roles().get("backend", ()):
                self._resumed[pid] = int(samples.get("penstock_streams_resumed_total", 0))

    async def _count(self) -> None:
        """Undisturbed requests once more: the server must count each request and each token that arrives."""
        before = await wait_totals(self._numbers, _SETTLE_TIMEOUT_S)
        started_s = time.monotonic()
        answers = await self._ask_all(self._recipes, is_stream=True)
        for recipe, answer in zip(self._recipes, answers, strict=True):
            if wrong := difference(answer, self._references[recipe.name], is_whole=True):
                self._ledger.imbalance("an undisturbed answer is wrong after the chaos", f"{recipe.name}: {wrong}")
        after = await wait_totals(self._numbers, _SETTLE_TIMEOUT_S)
        checks = None if self._server is None else self._server.most_checks(time.monotonic() - started_s)
        if self._numbers.may_sleep:
            return
        counted = CountedRound.of(answers, after.num_reads, checks)  # the last reading before, but not the last of all
        check_counted(self._ledger, before.samples, after.samples, counted)

    async def _finish(self) -> None:
        """Close the books. The proxies go first, so that no connection is left."""
        self._ledger.close()
        self.outcome.resumed = sum(self._resumed.values())
        self.outcome.growths = self._watch.growths()
        self.outcome.unmeasured_roles = self._watch.unmeasured_roles(self.outcome.growths)
        check_memory(self._ledger, self.outcome.growths)
        self._close_connections()
        if self._server is None:
            return
        for proxy in self._server.proxies:
            self._ledger.expect(f"exit status of {proxy.name} before its end", proxy.process.poll(), None)
            proxy.stop()
        held = await self._wait_unconnected(self._server)
        for role, count in held.items():
            self._ledger.imbalance("connections that nobody has any more", f"{count} of {role}")
        for traceback in self._server.tracebacks():
            self._ledger.imbalance("an unexpected exception in a log", traceback)

    async def _wait_unconnected(self, server: Server) -> dict[str, int]:
        """Return the TCP connections that are still held, by role."""
        deadline_s = time.monotonic() + _CENSUS_TIMEOUT_S
        while True:
            held: Counter[str] = Counter()
            for state in take_census(server.roles()):
                held[state.role] += state.connections
            if not +held or time.monotonic() > deadline_s:
                return dict(+held)
            await asyncio.sleep(0.2)

    def _close_connections(self) -> None:
        for client in self._clients:
            client.http.close()
        self._numbers.http.close()


def _allowance(act: Act) -> Allowance:
    """The refusals that the act may meet: only a limited tenant and a flood may be refused.

    The second code of each pair is that of /v1/messages.
    """
    refusals = set()
    if act.tenant.is_limited:
        refusals |= {(status, code) for status in (200, 429) for code in ("rate_limit_exceeded", "rate_limit_error")}
    if act.in_flood:
        refusals |= {(429, "overloaded"), (529, "overloaded_error")}
    return Allowance(frozenset(refusals))
