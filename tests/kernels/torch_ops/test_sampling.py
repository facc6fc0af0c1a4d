"""The sampling ops of the CPU against exact probabilities, and against those of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inflight_kernels.torch_ops import sampling as ops
from inflight_kernels.torch_ops.sampling import Filters

VOCAB = 700  # more than the prefix that `draw` looks at first


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------- random numbers


def test_philox_gives_the_published_vectors() -> None:
    """Known answers of the Random123 distribution for philox4x32-10."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        assert ops.philox(counter, key) == expected


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    values = [ops.uniform(seed, position) for seed in range(40) for position in range(50)]
    assert len(set(values)) == len(values)
    counts, _ = np.histogram(values, 20, (0.0, 1.0))
    assert counts.sum() == len(values)
    chi_square = ((counts - 100.0) ** 2 / 100.0).sum()
    assert chi_square < 45  # 19 degrees of freedom: p < 0.001
    top = 2**64 - 1
    assert ops.uniform(top, 5) != ops.uniform(top - (1 << 32), 5)
    assert ops.uniform(3, 5) == ops.uniform(3, 5)


# ---------------------------------------------------------------- shaping the logits


def test_finite_rows_tells_nan_and_infinity_from_large_numbers() -> None:
    logits = torch.randn(6, 50)
    logits[1, 7] = float("nan")
    logits[2, 7] = float("inf")
    logits[3, 7] = float("-inf")
    logits[4] = 3e38  # finite, though the sum is not
    assert ops.finite_rows(logits).tolist() == [True, False, False, False, True, True]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    row = torch.randn(VOCAB)
    tokens = [3, 3, 50, 699, 0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), row[None].clone())[
        0
    ]
    none = np.array([], np.int64)
    ops.apply_penalties(row, np.unique(tokens), none, none, ops.Penalties(penalty))
    torch.testing.assert_close(row, expected)


def test_presence_and_frequency_penalties_subtract() -> None:
    row = torch.randn(VOCAB)
    before = row.clone()
    ids, counts = np.array([4, 9]), np.array([1, 3])
    ops.apply_penalties(row, ids, ids, counts, ops.Penalties(1.0, 0.5, 0.25))
    assert row[4] == pytest.approx(before[4] - 0.75)
    assert row[9] == pytest.approx(before[9] - 1.25)
    others = [i for i in range(VOCAB) if i not in (4, 9)]
    assert torch.equal(row[others], before[others])


# ---------------------------------------------------------------- the draw


def draw(logits: torch.Tensor, uniforms: np.ndarray, **filters: float) -> torch.Tensor:
    """Draw from one row [V] once per uniform."""
    n = len(uniforms)
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | filters
    return ops.draw(
        logits.expand(n, -1),
        np.full(n, values["temperature"]),
        np.full(n, int(values.get("top_k", 0))),
        np.full(n, values["top_p"]),
        np.full(n, values["min_p"]),
        uniforms,
    )


def probabilities(logits: torch.Tensor, **filters: float) -> torch.Tensor:
    """The distribution that transformers' warpers leave, in the documented order."""
    scores = logits[None].double()
    ids = torch.zeros(1, 1, dtype=torch.int64)
    warpers: list[Any] = [TemperatureLogitsWarper(float(filters.get("temperature", 1.0)))]
    if filters.get("top_k"):
        warpers.append(TopKLogitsWarper(int(filters["top_k"])))
    if filters.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(filters["top_p"]))
    if filters.get("min_p"):
        warpers.append(MinPLogitsWarper(filters["min_p"]))
    for warper in warpers:
        scores = warper(ids, scores)
    return scores.softmax(-1)[0]


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0, "min_p": 0.02},
    {"top_k": 5},
    {"top_k": 400},
    {"top_k": VOCAB},
    {"top_k": -1, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.97, "temperature": 4.0},
    {"top_k": 300, "top_p": 0.95, "temperature": 3.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    {"top_p": 0.98, "min_p": 0.01, "temperature": 5.0},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_samples_follow_the_exact_distribution(filters: dict[str, float]) -> None:
    """Evenly spread uniforms hit each token in proportion to its probability, to one part in n."""
    logits = torch.randn(VOCAB) * 2
    n = 4000
    uniforms = (np.arange(n) + 0.5) / n
    shown = filters | ({"top_k": 0} if filters.get("top_k") == -1 else {})
    expected = probabilities(logits, **shown)
    counts = torch.bincount(draw(logits, uniforms, **filters), minlength=VOCAB)
    assert (counts - expected * n).abs().max() < 1.01
    assert not counts[expected == 0].any()


def test_random_draws_pass_a_chi_square_test() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, float("-inf")])
    n = 5000
    uniforms = np.array([ops.uniform(seed, 17) for seed in range(n)])
    counts = torch.bincount(draw(logits, uniforms), minlength=6).double()
    expected = logits.double().softmax(-1) * n
    chi_square = ((counts - expected)[:5] ** 2 / expected[:5]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: p < 0.001
    assert counts[5] == 0


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_draw_does_not_depend_on_the_other_rows(filters: dict[str, float]) -> None:
    random = np.random.default_rng(0)
    rows = []
    for other in FILTERS:
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | other
        rows.append((torch.randn(VOCAB) * 2, values, random.random()))
    together = ops.draw(
        torch.stack([logits for logits, _, _ in rows]),
        *(
            np.array([values[name] for _, values, _ in rows], dtype)
            for name, dtype in (
                ("temperature", np.float64),
                ("top_k", np.int64),
                ("top_p", np.float64),
                ("min_p", np.float64),
            )
        ),
        np.array([u for _, _, u in rows]),
    )
    index = FILTERS.index(filters)
    logits, _, u = rows[index]
    assert int(together[index]) == int(draw(logits, np.array([u]), **filters)[0])


def test_extreme_uniforms_stay_inside_what_is_kept() -> None:
    logits = torch.tensor([float("-inf"), 1.0, 0.0, float("-inf")])
    ends = np.array([0.0, 1.0 - 2.0**-52])
    assert draw(logits, ends).tolist() == [1, 2]
    assert draw(logits, ends, top_k=2).tolist() == [1, 2]
    wide = torch.zeros(VOCAB)
    wide[0] = wide[-1] = float("-inf")
    assert set(draw(wide, ends, top_p=0.99).tolist()) <= set(range(1, VOCAB - 1))


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_temperatures_and_logits_give_a_token(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 1.0, 2e38])
    for filters in ({}, {"top_k": 2.0}, {"top_p": 0.5}):
        (token,) = draw(logits, np.array([0.3]), temperature=temperature, **filters).tolist()
        assert token == 0


@given(st.integers(0, 10_000), st.floats(0.05, 0.9999), st.floats(0.2, 8.0))
@example(1696, 0.05078125, 0.203125)  # it ends between two that are equal
@settings(max_examples=60, deadline=None)
def test_the_wide_nucleus_is_the_sorted_one(seed: int, top_p: float, spread: float) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    weights = (logits - logits.max()).exp()
    inside = ops._nucleus(weights, top_p)
    ordered, ids = weights.double().sort(descending=True, stable=True)  # of equals, the first
    count = int((ordered.cumsum(0) - ordered < top_p * ordered.sum()).sum())
    assert set(torch.nonzero(inside).squeeze(1).tolist()) == set(ids[:count].tolist())


def test_a_nucleus_of_equal_weights_keeps_no_more_than_it_needs() -> None:
    spread = np.linspace(0.0, 0.999, 50)
    assert len(set(draw(torch.zeros(4), spread, top_p=0.5).tolist())) == 2
    weights = torch.ones(VOCAB)
    assert int(ops._nucleus(weights, 0.5).sum()) == math.ceil(VOCAB * 0.5)


def test_log_probs_and_greedy_are_those_of_the_logits() -> None:
    logits = torch.randn(3, VOCAB)
    expected = (logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)).log()
    torch.testing.assert_close(ops.log_probs(logits).double(), expected, atol=1e-5, rtol=1e-5)
    assert ops.greedy(logits).tolist() == [int(row.argmax()) for row in logits]


# ---------------------------------------------------------------- biases and masks


def test_biases_add_and_infinite_ones_ban() -> None:
    row = torch.randn(VOCAB)
    before = row.clone()
    ops.add_biases(row, [3, 7, 9], [1.5, -math.inf, -2.0])
    expected = before.clone()
    expected[3] += 1.5
    expected[7] = -math.inf
    expected[9] -= 2.0
    assert torch.equal(row, expected)


def test_only_allowed_tokens_remain() -> None:
    row = torch.randn(VOCAB)
    before = row.clone()
    ops.allow_only(row, torch.tensor([3, 7]))
    assert torch.equal(row.isfinite().nonzero().squeeze(1), torch.tensor([3, 7]))
    assert torch.equal(row[[3, 7]], before[[3, 7]])


# ---------------------------------------------------------------- rare filters

RESOLUTION = 2.0**-30


def support(logits: torch.Tensor, temperature: float = 1.0, **filters: float) -> set[int]:
    """The tokens with more than RESOLUTION of the draws.

    A draw inverts the distribution function, so each token has one interval of numbers, whose ends
    are found by bisection.
    """
    row_params = Filters(**filters)  # type: ignore[arg-type]

    def drawn(uniform: float) -> int:
        return int(ops.draw_filtered(logits, temperature, row_params, uniform, 0.0))

    def within(low: float, first: int, high: float, last: int) -> set[int]:
        if first == last or high - low <= RESOLUTION:
            return {first, last}
        middle = (low + high) / 2
        token = drawn(middle)
        return within(low, first, middle, token) | within(middle, token, high, last)

    end = 1 - 2.0**-52
    return within(0.0, drawn(0.0), end, drawn(end))


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_typical_p_matches_transformers(mass: float, temperature: float) -> None:
    for _ in range(5):
        logits = torch.randn(20)
        kept = TypicalLogitsWarper(mass)(torch.empty(1, 0), logits[None] / temperature)
        expected = set(kept.isfinite().nonzero()[:, 1].tolist())
        assert support(logits, temperature, typical_p=mass) == expected


@pytest.mark.parametrize("epsilon", [0.001, 0.02, 0.08, 0.5, 0.99])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_epsilon_cutoff_matches_transformers(epsilon: float, temperature: float) -> None:
    for _ in range(5):
        logits = torch.randn(20)
        kept = EpsilonLogitsWarper(epsilon)(torch.empty(1, 0), logits[None] / temperature)
        expected = set(kept.isfinite().nonzero()[:, 1].tolist())
        assert support(logits, temperature, epsilon_cutoff=epsilon) == expected


def test_epsilon_cutoff_applies_after_the_other_filters() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    assert support(logits, epsilon_cutoff=0.25) == {0, 1}
    assert support(logits, top_k=3, epsilon_cutoff=0.21) == {0, 1, 2}
    assert support(logits, top_k=3, epsilon_cutoff=0.23) == {0, 1}
    xtc = {"xtc_probability": 1.0, "xtc_threshold": 0.4}
    assert support(logits, epsilon_cutoff=0.25, **xtc) == {1}, "XTC comes after it"


@pytest.mark.parametrize("sigmas", [0.5, 1.0, 2.0])
def test_top_n_sigma_is_the_same_at_any_temperature(sigmas: float) -> None:
    for _ in range(5):
        logits = torch.randn(20).double()
        least = logits.max() - sigmas * logits.std(correction=0)
        expected = set((logits >= least).nonzero()[:, 0].tolist())
        for temperature in (0.7, 1.0, 3.0):
            assert support(logits.float(), temperature, top_n_sigma=sigmas) == expected


def test_banned_tokens_do_not_widen_the_deviation() -> None:
    logits = torch.linspace(-1, 1, 11)
    banned = torch.cat([logits, torch.full((50,), -math.inf)])
    assert support(banned, top_n_sigma=1.0) == support(logits, top_n_sigma=1.0)


def test_xtc_keeps_the_least_probable_top_choice() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    xtc = {"xtc_probability": 1.0}
    assert support(logits, xtc_threshold=0.1, **xtc) == {2, 3, 4}
    assert support(logits, xtc_threshold=0.25, **xtc) == {1, 2, 3, 4}
    assert support(logits, xtc_threshold=0.35, **xtc) == {0, 1, 2, 3, 4}, "one is no choice"
    assert support(logits, xtc_threshold=0.0, **xtc) == {4}
    # After a filter the shares are of what it left.
    assert support(logits, top_k=3, xtc_threshold=0.21, **xtc) == {2}


def test_xtc_happens_as_often_as_it_is_asked_to() -> None:
    logits = torch.tensor([0.5, 0.5]).log()
    filters = Filters(xtc_threshold=0.1, xtc_probability=0.3)
    assert ops.draw_filtered(logits, 1.0, filters, 0.0, 0.29) == 1
    assert ops.draw_filtered(logits, 1.0, filters, 0.0, 0.3) == 0


def test_numbers_for_different_ends_are_independent() -> None:
    pairs = [(ops.uniform(s, p), ops.uniform(s, p, ops.XTC)) for s in range(40) for p in range(50)]
    assert len({u for pair in pairs for u in pair}) == 2 * len(pairs)
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 0.1


# ---------------------------------------------------------------- the most probable tokens


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(0, 25))
def test_of_equal_values_the_first_is_the_largest(values: list[int], n: int) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    row = torch.tensor(values, dtype=torch.float32)
    assert ops.top(row, n).tolist() == order[:n]
    for place, token_id in enumerate(order, 1):
        assert ops.rank(row, token_id) == place
