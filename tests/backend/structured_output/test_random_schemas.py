"""A model with random weights answers with what the schema allows, for any schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.messages import Constraints, Finish, Grammar, Sampling
from tests.backend.harness import Bench
from tests.backend.structured_output.constrained import EOS, TOKENIZER, compile_all, new_compiler
from tests.checkpoints import make_checkpoint

NUM_SCHEMAS = 200
MAX_RUNNING = 32
VOCAB_SIZE = TOKENIZER.get_vocab_size()
PATTERNS = ["^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{2}:[0-9]{2}$", "^x?y{2,3}$", "^é[a-z]?$"]
TEXTS = ["", "a", "été", 'a "quoted" text', "back\\slash", "two\nlines", "🐈", "0"]
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A tiny model with random weights over the demo model's vocabulary."""
    model_dir = make_checkpoint(
        "llama3",
        tmp_path_factory.mktemp("random") / "model",
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        eos_token_id=EOS,
    )
    compiler = new_compiler()
    forward_pass = CpuDecoderPass.load(model_dir, PassOptions(max_running=MAX_RUNNING, dtype="fp32"))
    bench = Bench(
        vocab_size=VOCAB_SIZE,
        num_pages=140,  # fewer than all requests need at once
        page_size=8,
        max_running=MAX_RUNNING,
        max_batch_tokens=64,
        forward_pass=forward_pass,
        grammar_queue=GrammarQueue(compiler, lambda: None, 1000),
    )
    yield bench
    compiler.close()
    forward_pass.close()
    bench.close()


def schema_of(rng: random.Random, depth: int) -> Schema:
    """A random schema whose values have bounded length."""
    simple = [_integer, _number, _string, _pattern, _enum, _fixed]
    nested = [_object, _object, _array, _tuple, _any_of]
    return rng.choice(simple + nested if depth else simple)(rng, depth)


def _integer(rng: random.Random, _: int) -> Schema:
    least = rng.randint(-1000, 1000)
    bounds = {"minimum": least, "maximum": least + rng.choice((0, 1, 9, 100, 12345))}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": least, "exclusiveMaximum": least + rng.randint(2, 50)}
    return {"type": "integer", **bounds}


def _number(rng: random.Random, _: int) -> Schema:
    least = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "maximum": round(least + rng.uniform(0.5, 20), 2)}


def _string(rng: random.Random, _: int) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _pattern(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _enum(rng: random.Random, _: int) -> Schema:
    return {"enum": rng.sample([None, True, False, 0, -7, 2.5, [], [1, "b"], {"k": None}, *TEXTS], rng.randint(1, 4))}


def _fixed(rng: random.Random, _: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": rng.choice(TEXTS)}, {"const": {"a": [1]}}])


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["name", "a", "b c", "é", 'q"', "x-y", "n_1"], rng.randint(0, 4))
    schema = {
        "type": "object",
        "properties": {name: schema_of(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["description"] = "what it is for"
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = schema_of(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 3)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [schema_of(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [schema_of(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def distinct_schemas(rng: random.Random) -> list[Schema]:
    leaves = {"$defs": {"leaf": _integer(rng, 0)}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3}
    schemas = {json.dumps(leaves): leaves}
    while len(schemas) < NUM_SCHEMAS:
        schema = schema_of(rng, 3)
        schemas[json.dumps(schema)] = schema
    return list(schemas.values())


@pytest.mark.parametrize("seed", [20])
def test_output_matches_each_of_200_random_schemas(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    schemas = distinct_schemas(rng)
    first_id = seed * NUM_SCHEMAS
    for number, schema in enumerate(schemas):
        bench.submit(
            [number % 50 + 5, 7, 9],
            1000,
            request_id=first_id + number,
            sampling=Sampling(temperature=rng.choice((0.7, 1.0, 2.0)), seed=number),
            stop_ids=(EOS,),
            constraints=Constraints(grammar=Grammar("json_schema", json.dumps(schema))),
        )
    compile_all(bench)
    bench.run_dry(20_000)
    assert bench.scheduler.num_preemptions > 0
    num_characters = 0
    for number, schema in enumerate(schemas):
        received = bench.received(first_id + number)
        assert received.finishes == [Finish.STOP], (schema, received.failure, len(received.token_ids))
        text = TOKENIZER.decode(received.token_ids)
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        num_characters += len(text)
    # Empty answers would prove nothing.
    assert num_characters > 10 * NUM_SCHEMAS
