"""The longest suffix that occurs earlier is found, and its most frequent continuation drafted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.batch import Chunk
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.errors import ConfigError
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.drafters.methods import suffix
from inflight.execution.drafters.methods.suffix import SuffixDrafter, continuation
from inflight.execution.drafters.registry import find_method
from inflight.sampling.params import SamplingParams


def slow_continuation(tokens: list[int], count: int) -> list[int]:
    """The definition, as it reads."""
    last = len(tokens) - 1
    ends: list[int] = []
    for matched in range(min(suffix.MAX_MATCH, last), 0, -1):
        ends = [
            e for e in range(matched - 1, last) if tokens[: e + 1][-matched:] == tokens[-matched:]
        ]
        if ends:
            break
    drafts: list[int] = []
    probability = 1.0
    while len(drafts) < count:
        following = [tokens[e + 1] for e in ends if e + 1 < len(tokens)]
        if not following:
            break
        latest = {token: place for place, token in enumerate(following)}
        best = max(latest, key=lambda token: (following.count(token), latest[token]))
        probability *= following.count(best) / len(following)
        if probability < suffix.MIN_PROBABILITY:
            break
        drafts.append(best)
        ends = [e + 1 for e in ends if e + 1 < len(tokens) and tokens[e + 1] == best]
    return drafts


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=90), count=st.integers(1, 8))
def test_a_draft_is_that_of_the_definition(tokens: list[int], count: int) -> None:
    assert continuation(np.array(tokens), count) == slow_continuation(tokens, count)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 5, 1, 6, 1, 5, 1, 7, 1], [5, 1, 7]),  # the most frequent
        ([1, 5, 1, 6, 1], [6, 1]),  # of equally frequent ones, the latest
        ([5, 1, 2, 3, 6, 1, 2, 4, 1, 2, 4, 5, 1, 2], [3, 6, 1]),  # the longest match counts
        ([7, 7, 7], [7]),  # nothing stands behind the end
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts(tokens: list[int], drafts: list[int]) -> None:
    assert slow_continuation(tokens, 3) == drafts
    assert continuation(np.array(tokens), 3) == drafts


def test_an_improbable_draft_ends() -> None:
    tokens = [token for next_token in range(20, 31) for token in (1, next_token)]
    assert continuation(np.array([*tokens, 1]), 4) == []


def chunk(sequence: Sequence, num_drafts: int) -> Chunk:
    last = len(sequence.token_ids) - 1
    return Chunk(sequence, last, 1 + num_drafts, True, num_drafts=num_drafts)


def test_a_drafter_follows_its_sequences() -> None:
    drafter = SuffixDrafter()
    sequences = [Sequence(Request(i, [i, 5, i], SamplingParams()), 1000) for i in range(3)]
    for step in range(60):
        for one in sequences:
            expected = slow_continuation(one.token_ids, 4)
            assert drafter.propose([chunk(one, 4)]) == [expected]
            one.token_ids += [(step * step) % 7, one.request_id]
    drafter.forget(sequences[0])
    drafter.forget(sequences[0])
    fresh = Sequence(Request(0, [8, 9, 8], SamplingParams()), 10)  # an id may come again
    assert drafter.propose([chunk(fresh, 0), chunk(fresh, 1)]) == [[], [9]]


def test_a_gpu_is_refused_before_anything_is_loaded() -> None:
    config = EngineConfig(model="m", speculative_config=SpeculativeConfig(method="suffix"))
    assert config.speculative_config is not None
    spec = DrafterSpec(find_method(config.speculative_config), config.speculative_config)
    with pytest.raises(ConfigError, match="suffix is not supported on GPUs; allowed: "):
        spec.method.load_on_device(spec, None)  # type: ignore[arg-type]
