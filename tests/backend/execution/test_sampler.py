"""Each row matches a slow, straightforward implementation of its options, in any step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request import Candidate, Request
from inflight.core.sequence import Sequence
from inflight.execution.sampler import LogitsRow, sample
from inflight.sampling.logit_adjustments import LogitAdjustments
from inflight.sampling.params import SamplingParams
from inflight.sampling.repetition import DryPenalty, RepeatedNgrams
from inflight_kernels.torch_ops.sampling import NO_ALLOWED_TOKENS, NOT_FINITE, OK, XTC, uniform

VOCAB = 40
END = 39


class _Sequence(Sequence):
    """A sequence of a request, with its shaping."""

    shaping: LogitAdjustments


def sequence(
    params: SamplingParams,
    prompt: list[int],
    output: list[int] | None = None,
    seed: int = 0,
    bad: tuple[tuple[int, ...], ...] = (),
) -> _Sequence:
    made = _Sequence(Request(1, prompt, params), 100, seed, frozenset([END]), bad)
    made.logit_adjustments = LogitAdjustments(params, len(prompt), [END], bad)
    made.token_ids += output or []
    return made


def shaped(
    logits: np.ndarray[Any, Any],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    bad: tuple[tuple[int, ...], ...] = (),
) -> np.ndarray[Any, Any]:
    """Steps 1 to 3 of SamplingParams, token by token in float64."""
    tokens = prompt + output
    dry = DryPenalty(
        params.dry_multiplier, params.dry_base, params.dry_allowed_length, breakers=frozenset([END])
    ).penalties(tokens)
    ngrams = set()
    if params.no_repeat_ngram_size:
        ngrams = RepeatedNgrams(params.no_repeat_ngram_size).banned(tokens)
    found = logits.astype(np.float64)
    for token_id in range(len(found)):
        value = found[token_id]
        count = output.count(token_id)
        if token_id in tokens:
            penalty = params.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        if count:
            value -= params.presence_penalty + params.frequency_penalty * count
        value += dict(params.logit_bias).get(token_id, 0.0)
        if params.dry_multiplier:
            value -= dry.get(token_id, 0.0)
        is_banned = (
            (params.allowed_token_ids and token_id not in params.allowed_token_ids)
            or token_id in ngrams
            or (len(output) < params.min_tokens and token_id == END)
            or any(
                word[-1] == token_id and output[len(output) - len(word) + 1 :] == list(word[:-1])
                for word in bad
                if len(word) <= len(output) + 1
            )
        )
        found[token_id] = -math.inf if is_banned else value
    return found


def kept(logits: np.ndarray[Any, Any], params: SamplingParams, xtc: bool) -> dict[int, float]:
    """Steps 4 and 5: the tokens that are drawn from, in order of likelihood, and their weights."""
    temperature = params.effective_temperature
    finite = [float(x) for x in logits if x > -math.inf]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in finite) / len(finite))
    largest = max(finite)
    tokens = [i for i in range(len(logits)) if logits[i] > -math.inf]
    tokens.sort(key=lambda i: (-logits[i], i))
    weight = {i: math.exp((logits[i] - largest) / temperature) for i in tokens}
    if params.top_n_sigma:
        tokens = [i for i in tokens if logits[i] >= largest - params.top_n_sigma * sigma]
    if params.top_k > 0:
        tokens = tokens[: params.top_k]
    if params.typical_p < 1.0:
        total = sum(weight[i] for i in tokens)
        surprise = {i: -math.log(weight[i] / total) for i in tokens}
        entropy = sum(weight[i] / total * surprise[i] for i in tokens)
        sure = 0.0
        for i in sorted(tokens, key=lambda i: abs(surprise[i] - entropy)):
            furthest = abs(surprise[i] - entropy)
            sure += weight[i] / total
            if sure >= params.typical_p:
                break
        tokens = [i for i in tokens if abs(surprise[i] - entropy) <= furthest]
    if params.top_p < 1.0:
        total, before, some = sum(weight[i] for i in tokens), 0.0, []
        for i in tokens:
            if before < params.top_p * total:
                some.append(i)
            before += weight[i]
        tokens = some
    tokens = [i for i in tokens if weight[i] >= params.min_p * weight[tokens[0]]]
    total = sum(weight[i] for i in tokens)
    tokens = tokens[:1] + [i for i in tokens[1:] if weight[i] >= params.epsilon_cutoff * total]
    if xtc:
        total = sum(weight[i] for i in tokens)
        top = [i for i in tokens if weight[i] / total >= params.xtc_threshold]
        tokens = tokens[max(len(top) - 1, 0) :]
    return {i: weight[i] for i in tokens}


def expected(
    logits: np.ndarray[Any, Any],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    seed: int,
    bad: tuple[tuple[int, ...], ...] = (),
) -> int:
    found = shaped(logits, params, prompt, output, bad)
    if params.effective_temperature == 0.0:
        return int(found.argmax())
    position = len(prompt) + len(output)
    weights = kept(found, params, uniform(seed, position, XTC) < params.xtc_probability)
    cuts = 0 < params.top_k < len(logits) or params.top_p < 1.0 or params.has_rare_filters
    ids = list(weights) if cuts else sorted(weights)
    target = uniform(seed, position) * sum(weights.values())
    running = 0.0
    for token_id in ids:
        running += weights[token_id]
        if running > target:
            return token_id
    return ids[-1]


# Each option alone, then several.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"typical_p": 0.95, "temperature": 1.5},
    {"top_n_sigma": 0.7},
    {"top_n_sigma": 2.0, "temperature": 3.0},
    {"epsilon_cutoff": 0.02},
    {"epsilon_cutoff": 0.9, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 0.5, "xtc_threshold": 0.2},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"repetition_penalty": 1.3, "seed": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 1.0},
    {"logit_bias": ((3, 5.0), (4, -100.0), (30, 1.5))},
    {"logit_bias": ((3, 5.0), (END, 3.0)), "temperature": 1.0, "min_tokens": 50},
    {"allowed_token_ids": (1, 5, 20)},
    {"allowed_token_ids": (1, 5, 20, 21), "temperature": 2.0, "top_k": 2},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "temperature": 1.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"dry_multiplier": 0.8, "temperature": 1.0, "logit_bias": ((2, 0.5),)},
    {"typical_p": 0.8, "top_p": 0.9, "min_p": 0.02, "top_k": 20},
    {"top_n_sigma": 1.5, "typical_p": 0.9, "xtc_probability": 1.0, "xtc_threshold": 0.1},
    {"min_p": 0.02, "xtc_probability": 1.0, "xtc_threshold": 0.1, "temperature": 1.3},
    {
        "temperature": 1.2,
        "top_n_sigma": 2.5,
        "top_k": 30,
        "typical_p": 0.97,
        "top_p": 0.97,
        "min_p": 0.01,
        "epsilon_cutoff": 0.015,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": ((0, 1.0), (1, -1.0)),
        "no_repeat_ngram_size": 3,
        "dry_multiplier": 0.5,
        "dry_allowed_length": 1,
        "min_tokens": 9,
    },
]
BAD = ((7,), (2, 3), (1, 2, 0))


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.lists(st.integers(0, 6), max_size=12),
    st.integers(0, 12),
    st.sampled_from([(), BAD]),
)
@settings(max_examples=30, deadline=None)
def test_every_row_matches_the_reference(
    seed: int,
    prompt: list[int],
    output: list[int],
    num_drafted: int,
    bad: tuple[tuple[int, ...], ...],
) -> None:
    """Rows of all kinds in one call, each with the same tokens, of which some are drafted."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(OPTIONS), VOCAB)) * 2).astype(np.float32)
    known = output[: len(output) - min(num_drafted, len(output))]
    tail = output[len(known) :]
    options = [SamplingParams(**fields) for fields in OPTIONS]
    rows = [
        LogitsRow(sequence(params, prompt, known, seed + i, bad), tail)
        for i, params in enumerate(options)
    ]
    choices = sample(torch.from_numpy(logits.copy()), rows)
    assert choices.statuses == [OK] * len(rows)
    exact = logits.astype(np.float64)
    own = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    for i, params in enumerate(options):
        token_id = expected(logits[i], params, prompt, output, seed + i, bad)
        assert choices.token_ids[i] == token_id, params
        assert choices.logprobs[i] == pytest.approx(own[i, token_id], abs=1e-4)


def test_a_row_alone_gets_the_same_as_among_others() -> None:
    logits = torch.randn(len(OPTIONS), VOCAB)
    rows = [
        LogitsRow(sequence(SamplingParams(**fields), [1, 2, 3], [1, 2], i), [])
        for i, fields in enumerate(OPTIONS)
    ]
    together = sample(logits.clone(), rows)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [row])
        assert alone.token_ids == together.token_ids[i : i + 1]


def test_equal_logits_stand_in_the_order_of_their_ids() -> None:
    params = SamplingParams(top_n_sigma=5.0, top_k=3, seed=1)
    for position in range(30):
        row = LogitsRow(sequence(params, [1] * (position + 1), seed=position), [])
        assert sample(torch.zeros(1, VOCAB), [row]).token_ids[0] < 3


def test_non_finite_and_fully_banned_rows_are_reported_individually() -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, 3] = float("nan")
    logits[3, 3] = float("inf")
    banned = {"allowed_token_ids": (END,), "min_tokens": 1, "num_logprobs": 2}
    options = [{"num_logprobs": 1}, {}, banned, {"seed": 1}, {"typical_p": 0.5}]
    rows = [LogitsRow(sequence(SamplingParams(**fields), [1]), []) for fields in options]
    choices = sample(logits, rows)
    assert choices.statuses == [NOT_FINITE, OK, NO_ALLOWED_TOKENS, NOT_FINITE, OK]
    assert [choices.token_ids[i] for i in (0, 2, 3)] == [0, 0, 0]
    assert [choices.logprobs[i] for i in (0, 2, 3)] == [0.0, 0.0, 0.0]
    assert choices.candidates == [[]] * 5


def test_top_logprobs_are_those_of_the_raw_model() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 3.0
    logits[:, [8, 4]] = 2.0
    options = [
        {"num_logprobs": 3},
        {"num_logprobs": 0, "logit_bias": ((9, 100.0),)},
        {"num_logprobs": 2, "logit_bias": ((9, 100.0),)},
    ]
    rows = [LogitsRow(sequence(SamplingParams(**fields), [1]), []) for fields in options]
    own = torch.log_softmax(logits[0], -1)
    first, second, third = sample(logits.clone(), rows).candidates
    assert first == [
        Candidate(5, float(own[5]), 1),
        Candidate(4, float(own[4]), 2),
        Candidate(8, float(own[8]), 3),
    ]
    # Of the equal ones 0 1 2 3 6 7 stand before it.
    assert second == [Candidate(9, float(own[9]), 10)]
    assert third == [Candidate(9, float(own[9]), 10), *first[:2]]


def test_a_given_token_is_scored_and_nothing_is_sampled() -> None:
    """Whatever the request's sampling options are."""
    logits = torch.randn(4, VOCAB)
    logits[2, 9] = float("nan")
    options = {
        "num_prompt_logprobs": 2,
        "temperature": 1.0,
        "repetition_penalty": 2.0,
        "logit_bias": ((7, -100.0),),
        "allowed_token_ids": (3,),
        "min_tokens": 1,
    }
    one = sequence(SamplingParams(**options), [1, 7, 8])
    rows = [
        LogitsRow(one, [], given=7),
        LogitsRow(one, [], given=8),
        LogitsRow(one, [], given=0),
        LogitsRow(one, []),
    ]
    own = torch.log_softmax(logits, -1)
    choices = sample(logits.clone(), rows)
    assert choices.statuses == [OK, OK, NOT_FINITE, OK]
    assert choices.token_ids == [7, 8, 0, 3]
    assert choices.candidates[2:] == [[], []]
    for row, token_id in ((0, 7), (1, 8)):
        first, *others = choices.candidates[row]
        assert (first.token_id, first.logprob) == (token_id, float(own[row, token_id]))
        assert first.rank == 1 + int((own[row] > own[row, token_id]).sum())
        most_probable = own[row].topk(2).indices.tolist()
        assert [one.token_id for one in others] == [id_ for id_ in most_probable if id_ != token_id]


def test_no_more_than_the_vocabulary_is_reported() -> None:
    row = LogitsRow(sequence(SamplingParams(num_logprobs=20), [1]), [])
    (candidates,) = sample(torch.randn(1, 7), [row]).candidates
    assert sorted(one.token_id for one in candidates) == list(range(7))


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    params = SamplingParams(logit_bias=((3, 50.0), (VOCAB, 100.0)), allowed_token_ids=(3, VOCAB))
    choices = sample(torch.randn(1, VOCAB), [LogitsRow(sequence(params, [1], bad=((99,),)), [])])
    assert (choices.statuses, choices.token_ids) == ([OK], [3])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "typical_p": 0.6},
        {"temperature": 1.0, "top_n_sigma": 1.0},
        {"temperature": 1.0, "epsilon_cutoff": 0.02},
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    ],
    ids=lambda fields: list(fields)[1],
)
def test_sample_frequencies_match_the_reference(fields: dict[str, Any]) -> None:
    n, vocab_size = 3000, 12
    params = SamplingParams(**fields)
    logits = np.linspace(-2, 2, vocab_size).astype(np.float32)
    rows = [LogitsRow(sequence(params, [1], seed=seed), []) for seed in range(n)]
    chosen = sample(torch.from_numpy(np.tile(logits, (n, 1))), rows).token_ids
    counts = np.bincount(chosen, minlength=vocab_size)
    frequencies = np.zeros(vocab_size)
    for xtc, share in ((True, params.xtc_probability), (False, 1.0 - params.xtc_probability)):
        weights = kept(logits, params, xtc)
        for token_id, weight in weights.items():
            frequencies[token_id] += share * weight / sum(weights.values())
    assert (counts[frequencies == 0] == 0).all()
    wanted = n * frequencies[frequencies > 0]
    assert ((counts[frequencies > 0] - wanted) ** 2 / wanted).sum() < 40  # < 12 degrees of freedom
