"""Requests and misbehaviour of clients, and faults of the server: all drawn from one seed."""

from __future__ import annotations

import base64
import enum
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.tools.bench.load_generator.workload import draw_words

_LONG_PROMPT_WORDS = 600
_POOLING = ("/v1/embeddings", "/v1/rerank")
_ITEM_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["bolt", "gear", "spring"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of the key that a request carries. api_key is None where the server needs none."""

    name: str
    api_key: str | None = None
    is_limited: bool = False
    """Its key has limits, so 429 is an answer that it may get."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A request with one right answer. `body` has no `stream`: each of its requests adds its own."""

    name: str
    path: str
    body: dict[str, Any]
    choices: int = 1
    """Choices of the whole answer: those of all its prompts."""

    @property
    def can_stream(self) -> bool:
        """Whether its endpoint generates text."""
        return self.path not in _POOLING

    @property
    def has_token_ids(self) -> bool:
        """Whether answers contain the ids of their tokens. Those of the other endpoints have text and usage only."""
        return self.path.endswith("/completions")


class Stage(enum.Enum):
    """When a client hangs up."""

    CONNECTED = "connected"
    """Before a byte is sent."""
    IN_HEAD = "in the head"
    IN_BODY = "in the body"
    SENT = "sent"
    """While the request waits, or prefills."""
    STREAMING = "streaming"
    """After some events of a stream."""


@dataclass(frozen=True, slots=True)
class Hangup:
    stage: Stage
    delay_s: float
    """After the stage was reached; while streaming, the next event ends the delay."""
    after_events: int = 0


@dataclass(frozen=True, slots=True)
class Act:
    """One request as its client will send it."""

    index: int
    recipe: Recipe
    tenant: Tenant
    entrance: int
    is_stream: bool
    may_join: bool
    """False: `X-Penstock-Coalesce: off`."""
    hangup: Hangup | None = None
    pause_s: float = 0.0
    """A slow reader reads nothing for this long after the first event."""
    in_flood: bool = False
    cache_salt: str | None = None
    """A salt of its own: it shares no page with other requests, so that pages must be evicted."""


def make_recipes(
    model: str, vocab_size: int | None, seed: int, count: int, *, takes_pictures: bool = False
) -> list[Recipe]:
    """At least one recipe of each kind; the same arguments give the same recipes."""
    rng = random.Random(f"recipes {seed}")
    kinds = (
        *(_short, _chat, _seeded, _response, _message, _prompts),
        *(_structured, _short, _chat, _long_prompt, _long_answer, _response, _message),
        *((_pictures,) * 7 if takes_pictures else ()),
    )
    recipes = []
    for number in range(max(count, len(kinds))):
        name, path, choices, body = kinds[number % len(kinds)](rng, vocab_size)
        recipe = Recipe(f"{name} {number}", path, {"model": model, "temperature": 0} | body, choices)
        if recipe.has_token_ids:
            recipe.body["return_token_ids"] = True
        recipes.append(recipe)
    return recipes


def make_further_recipes(models: list[str], seed: int) -> list[Recipe]:
    """A few recipes for each further model: an adapter, a model that sleeps, embeds, or cannot be used.

    What it cannot do it refuses, and then the refusal is the right answer.
    """
    rng = random.Random(f"further recipes {seed}")
    recipes: list[Recipe] = []
    for model in models:
        texts = [draw_words(rng, rng.randint(2, 30)) for _ in range(2)]
        bodies: list[tuple[str, int, dict[str, Any]]] = [
            ("/v1/completions", 1, {"prompt": texts[0], "max_tokens": rng.randint(4, 40), "ignore_eos": True}),
            ("/v1/chat/completions", 1, {"messages": _messages(rng), "max_tokens": rng.randint(4, 40)}),
            ("/v1/embeddings", 2, {"input": texts, "encoding_format": "base64"}),
            ("/v1/rerank", 2, {"query": draw_words(rng, 4), "documents": texts}),
        ]
        for path, choices, body in bodies:
            own = {"model": model} | ({} if path in _POOLING else {"temperature": 0})
            recipe = Recipe(f"{model} {path} {len(recipes)}", path, own | body, choices)
            if recipe.has_token_ids:
                recipe.body["return_token_ids"] = True
            recipes.append(recipe)
    return recipes


_Drawn = tuple[str, str, int, dict[str, Any]]


def _prompt(rng: random.Random, vocab_size: int | None, length: int) -> Any:
    if vocab_size is None:
        return draw_words(rng, length)
    # Special tokens are at either end of a vocabulary.
    return [rng.randrange(vocab_size // 8, vocab_size - vocab_size // 8) for _ in range(length)]


def _messages(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": draw_words(rng, rng.randint(4, 40))}]


def _short(rng: random.Random, vocab_size: int | None) -> _Drawn:
    body = {"prompt": _prompt(rng, vocab_size, rng.randint(2, 80)), "max_tokens": rng.randint(4, 40)}
    return "completion", "/v1/completions", 1, body | {"ignore_eos": True}


def _long_answer(rng: random.Random, vocab_size: int | None) -> _Drawn:
    body = {"prompt": _prompt(rng, vocab_size, rng.randint(2, 40)), "max_tokens": rng.randint(200, 400)}
    return "long answer", "/v1/completions", 1, body | {"ignore_eos": True}


def _long_prompt(rng: random.Random, vocab_size: int | None) -> _Drawn:
    body = {"prompt": _prompt(rng, vocab_size, rng.randint(_LONG_PROMPT_WORDS // 2, _LONG_PROMPT_WORDS))}
    return "long prompt", "/v1/completions", 1, body | {"max_tokens": rng.randint(2, 16)}


def _chat(rng: random.Random, _vocab_size: int | None) -> _Drawn:
    return "chat", "/v1/chat/completions", 1, {"messages": _messages(rng), "max_tokens": rng.randint(4, 48)}


def _pictures(rng: random.Random, _vocab_size: int | None) -> _Drawn:
    parts = [{"type": "image_url", "image_url": {"url": _png(rng)}} for _ in range(rng.randint(1, 3))]
    content = [*parts, {"type": "text", "text": draw_words(rng, rng.randint(2, 20))}]
    rng.shuffle(content)
    messages = [{"role": "user", "content": content}]
    return "pictures", "/v1/chat/completions", 1, {"messages": messages, "max_tokens": rng.randint(4, 48)}


def _png(rng: random.Random) -> str:
    """A data URI of a gray picture of random size and content."""
    width, height = rng.randint(8, 300), rng.randint(8, 300)
    rows = b"".join(b"\0" + rng.randbytes(width) for _ in range(height))  # each row begins with its filter, none
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def _seeded(rng: random.Random, _vocab_size: int | None) -> _Drawn:
    n = rng.randint(2, 3)
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(1 << 31), "n": n}
    return "seeded", "/v1/chat/completions", n, {"messages": _messages(rng), "max_tokens": 24} | sampling


def _prompts(rng: random.Random, vocab_size: int | None) -> _Drawn:
    prompts = [_prompt(rng, vocab_size, rng.randint(2, 30)) for _ in range(2)]
    body = {"prompt": prompts, "max_tokens": rng.randint(4, 16), "n": 2, "seed": rng.randrange(1 << 31)}
    return "prompts", "/v1/completions", 4, body | {"temperature": 0.7, "ignore_eos": True}


def _response(rng: random.Random, _vocab_size: int | None) -> _Drawn:
    body = {"input": draw_words(rng, rng.randint(4, 40)), "max_output_tokens": rng.randint(4, 48)}
    return "response", "/v1/responses", 1, body | {"store": rng.random() < 0.5}


def _message(rng: random.Random, _vocab_size: int | None) -> _Drawn:
    return "message", "/v1/messages", 1, {"messages": _messages(rng), "max_tokens": rng.randint(4, 48)}


def _structured(rng: random.Random, _vocab_size: int | None) -> _Drawn:
    schema = {"type": "array", "items": _ITEM_SCHEMA, "minItems": 1, "maxItems": rng.randint(1, 3)}
    wanted = {"type": "json_schema", "json_schema": {"name": "parts", "schema": schema, "strict": True}}
    sampling = {"temperature": 0.9, "seed": rng.randrange(1 << 31)}
    return (
        "structured",
        "/v1/chat/completions",
        1,
        ({"messages": _messages(rng), "max_tokens": 96, "response_format": wanted} | sampling),
    )


@dataclass(frozen=True)
class Workload:
    """Draws the requests of a run. The n-th is always the same, whatever happened to those before it."""

    recipes: list[Recipe]
    tenants: list[Tenant]
    entrances: int
    seed: int
    drop_rate: float = 0.5
    flood_every: int = 400
    """One request in this many starts a flood."""
    flood_size: int = 32
    hot: int = 6
    """Number of recipes that are requested so often that their requests meet and share a sequence."""
    _weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        # A long answer costs as much as ten short ones.
        weights = [0.4 if recipe.name.startswith("long") else 1.0 for recipe in self.recipes]
        object.__setattr__(self, "_weights", weights)

    def groups(self, first: int, count: int) -> Iterator[list[Act]]:
        """Yield the acts numbered from first on.

        A group has one act, or the acts of a flood, which are sent at once.
        """
        index, end = first, first + count
        while index < end:
            rng = random.Random(f"act {self.seed} {index}")
            if self.flood_size and rng.randrange(self.flood_every) == 0:
                size = min(self.flood_size, end - index)
                tenant, entrance = rng.choice(self.tenants), rng.randrange(self.entrances)
                yield [self._act(index + place, tenant, entrance, in_flood=True) for place in range(size)]
                index += size
            else:
                yield [self._act(index, rng.choice(self.tenants), rng.randrange(self.entrances))]
                index += 1

    def _act(self, index: int, tenant: Tenant, entrance: int, *, in_flood: bool = False) -> Act:
        rng = random.Random(f"request {self.seed} {index}")
        if in_flood or rng.random() < 0.25:
            recipe = self.recipes[rng.randrange(min(self.hot, len(self.recipes)))]
        else:
            recipe = rng.choices(self.recipes, self._weights)[0]
        is_stream = rng.random() < 0.7 and recipe.can_stream
        hangup = _draw_hangup(rng, is_stream) if rng.random() < self.drop_rate else None
        pause_s = rng.uniform(0.1, 1.0) if is_stream and hangup is None and rng.random() < 0.03 else 0.0
        cache_salt = f"{self.seed}-{index}" if rng.random() < 0.15 and recipe.can_stream else None
        may_join = rng.random() < 0.8
        return Act(index, recipe, tenant, entrance, is_stream, may_join, hangup, pause_s, in_flood, cache_salt)


def _draw_hangup(rng: random.Random, is_stream: bool) -> Hangup:
    roll = rng.random()
    if roll < 0.02:
        return Hangup(Stage.CONNECTED, rng.uniform(0.0, 0.2))
    if roll < 0.06:
        return Hangup(Stage.IN_HEAD, rng.uniform(0.0, 0.2))
    if roll < 0.12:
        return Hangup(Stage.IN_BODY, rng.uniform(0.0, 0.2))
    if not is_stream or roll < 0.4:
        return Hangup(Stage.SENT, rng.choice((0.0, rng.uniform(0.0, 0.02))))
    return Hangup(Stage.STREAMING, rng.uniform(0.0, 0.02), rng.choice((1, 1, 2, 3, 5, 8, 20)))


class FaultKind(enum.Enum):
    """A fault of the server's processes, or an upgrade. A killed process gets SIGKILL, a terminated one SIGTERM."""

    KILL_BACKEND = "backend killed"
    TERMINATE_BACKEND = "backend terminated"
    STOP_BACKEND = "backend stopped"
    HANG_BACKEND = "backend hung"
    """Stopped for good: the supervisor must notice, kill and restart it."""
    KILL_WORKER = "worker killed"
    TERMINATE_WORKER = "worker terminated"
    STOP_WORKER = "worker stopped"
    HANG_UP_WORKER = "worker hung up"
    """SIGHUP: it reads its files again."""
    RELOAD = "keys reloaded"
    RESTART_FRONTEND_A = "frontend A restarted"
    RESTART_FRONTEND_B = "frontend B restarted"
    UPGRADE = "backends upgraded"
    UPGRADE_AND_KILL = "new backend of an upgrade killed"


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """After the start of the round."""
    kind: FaultKind
    pick: int
    """Chooses the victim among several."""
    lasts_s: float
    """How long a stopped process stays stopped."""


def draw_faults(
    seed: int, round_number: int, lasts_s: float, every_s: float, left_out: frozenset[FaultKind] = frozenset()
) -> list[Fault]:
    """One fault each every_s, more or less, and none in the last moments of a round. Every kind comes in its turn."""
    kinds = [kind for kind in FaultKind if kind not in left_out]
    random.Random(f"kinds {seed}").shuffle(kinds)
    rng = random.Random(f"faults {seed} {round_number}")
    count = max(1, int(lasts_s / every_s))
    faults = []
    for number in range(count):
        at_s = (number + rng.uniform(0.1, 0.6)) * every_s
        kind = kinds[(round_number * count + number) % len(kinds)]
        faults.append(Fault(at_s, kind, rng.randrange(1 << 16), rng.uniform(0.5, 2.5)))
    return faults
