"""Outputs with drafts have the same distribution as without: the model's own.

A Markov model of eight tokens is sampled as in the engine: logits of a step's rows, sampling,
verification of drafts. Transition counts are compared with the exact probabilities (Pearson's
chi-square test).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight.core.batch import Batch, Chunk, StepOutput
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.execution import cpu_runner
from inflight.execution.batch.grammar_masks import GrammarMasks
from inflight.execution.cpu_runner import CpuRunner
from inflight.execution.sampler import LogitsRow, SamplerOutput, sample
from inflight.sampling.params import SamplingParams

VOCAB_SIZE = 8
NUM_POSITIONS = 3
NUM_DRAFTS = 2
AT_ONCE = 1000
FIRST = 0
MIN_P = 0.01

LOGITS = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5

OPTIONS = [
    pytest.param({"temperature": 1.0}, id="as it is"),
    pytest.param({"temperature": 0.6}, id="cold", marks=pytest.mark.long),
    pytest.param({"temperature": 1.6, "top_p": 0.9}, id="hot, top_p"),
    pytest.param({"temperature": 0.9, "top_p": 0.6}, id="top_p", marks=pytest.mark.long),
    pytest.param({"temperature": 1.2, "top_k": 5, "min_p": 0.05}, id="top_k, min_p"),
]


all_draws = pytest.mark.parametrize(
    "num_draws", [10_000, pytest.param(20_000, marks=pytest.mark.long)]
)


def exact(params: SamplingParams) -> npt.NDArray[np.float64]:
    """[V, V]: probability of each token after each."""
    probs = torch.softmax(LOGITS.double() / params.effective_temperature, -1).numpy()
    for row in probs:
        order = np.argsort(-row, kind="stable")
        kept = np.zeros(VOCAB_SIZE, bool)
        kept[order[: params.top_k or None]] = True
        row[~kept] = 0.0
        row /= row.sum()
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= params.top_p]] = 0.0
        row[row < params.min_p * row.max()] = 0.0
        row /= row.sum()
    return probs


def draws(
    params: SamplingParams, drafter: np.random.Generator, num_draws: int
) -> npt.NDArray[np.int64]:
    """[num_draws, NUM_POSITIONS] tokens, drawn by as many requests with drafts."""
    runner = object.__new__(CpuRunner)  # without a model: its choice needs none
    # Half of what it drafts is likely, half of it is not.
    guesses = (torch.softmax(LOGITS, -1) + torch.softmax(-LOGITS, -1)).cumsum(-1).numpy()
    guesses /= guesses[:, -1:]
    found = []
    accepted = 0
    for first in range(0, num_draws, AT_ONCE):
        running = [
            Sequence(Request(i, [FIRST], params), 100, seed=7 * i + 1)
            for i in range(first, first + AT_ONCE)
        ]
        while True:
            active = [one for one in running if one.num_output_tokens < NUM_POSITIONS]
            if not active:
                break
            chunks, drafts, contexts = [], [], []
            for one in active:
                last = len(one.token_ids) - 1
                chunks.append(Chunk(one, last, 1 + NUM_DRAFTS, True, num_drafts=NUM_DRAFTS))
                tail = [one.token_ids[-1]]
                for _ in range(NUM_DRAFTS):
                    tail.append(int(guesses[tail[-1]].searchsorted(drafter.random())))
                drafts.append(tail[1:])
                contexts += tail
            output = StepOutput([[] for _ in chunks], [[] for _ in chunks])
            batch = Batch(chunks)
            masks = GrammarMasks(batch, drafts)
            runner._sample(batch, drafts, LOGITS[contexts].clone(), masks, output)
            assert not output.errors
            for one, chosen in zip(active, output.token_ids, strict=True):
                one.token_ids += chosen
                accepted += len(chosen) - 1
        found += [one.token_ids[1 : 1 + NUM_POSITIONS] for one in running]
    assert 0.1 * num_draws < accepted < 2 * num_draws
    return np.array(found)


def p_values(tokens: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> list[float]:
    """Per position: p-value of the counts."""
    found = []
    for position in range(NUM_POSITIONS):
        before = tokens[:, position - 1] if position else np.full(len(tokens), FIRST)
        statistic, freedom = 0.0, 0
        for token in range(VOCAB_SIZE):
            counts = np.bincount(tokens[before == token, position], minlength=VOCAB_SIZE)
            expected = counts.sum() * probs[token]
            assert not counts[expected == 0].any(), "a token that is never drawn"
            cells = expected >= 5
            if cells.sum() > 1:
                rest = expected[~cells].sum()
                statistic += float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
                if rest >= 5:
                    statistic += float((counts - expected)[~cells].sum() ** 2 / rest)
                freedom += int(cells.sum()) - (rest < 5)
        half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
        found.append(float(torch.special.gammaincc(half[0], half[1])))
    return found


@all_draws
@pytest.mark.parametrize("options", OPTIONS)
def test_sampling_with_drafts_equals_sampling_without(
    options: dict[str, float], num_draws: int
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    tokens = draws(params, np.random.default_rng(2), num_draws)
    assert min(p_values(tokens, exact(params))) > MIN_P


@all_draws
@pytest.mark.parametrize("options", OPTIONS[:1])
def test_an_accepted_draft_that_was_not_sampled_is_detected(
    options: dict[str, float], num_draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong draft in twenty is taken: the test above is sharp enough to see that."""
    mistakes = np.random.default_rng(3)

    def careless(logits: torch.Tensor, rows: list[LogitsRow]) -> SamplerOutput:
        choices = sample(logits, rows)
        for index, after in enumerate(rows[1:]):
            if after.tail and mistakes.random() < 0.05:
                choices.token_ids[index] = after.tail[-1]
        return choices

    monkeypatch.setattr(cpu_runner, "sample", careless)
    params = SamplingParams(**options)  # type: ignore[arg-type]
    tokens = draws(params, np.random.default_rng(2), num_draws)
    assert min(p_values(tokens, exact(params))) < MIN_P**3
