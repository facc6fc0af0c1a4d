"""Checks of the sampler against the reference without a GPU: its layout and its arithmetic.

`choose` and `choose_filtered` reimplement the kernels in numpy and Python integers: fixed-point
scores, integer masses, and filters and a draw that are exact from there on.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight_kernels.ops import sampling
from inflight_kernels.torch_ops import sampling as reference
from inflight_kernels.torch_ops.sampling import Filters

CSRC = Path(sampling.__file__).parents[1] / "csrc/sampling"
SOURCE = (CSRC / "sampling_job.cuh").read_text()

Scores = npt.NDArray[np.int64]

# (top_k, top_p, min_p)
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (1500, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (50, 0.9, 0.0),
    (0, 1.0, 0.05),
    (0, 0.95, 0.02),
    (300, 0.95, 0.001),
]


def scores_of(logits: npt.NDArray[np.float32], temperature: float) -> Scores:
    """Distance below the most probable token, over the temperature, in units of 2**-27."""
    scaled = (logits.max() - logits) / np.float32(temperature) * np.float32(2**27)
    return np.minimum(np.rint(scaled.astype(np.float64)), 2**32 - 1).astype(np.int64)


def masses_of(scores: Scores) -> Scores:
    weights = np.exp(-(scores.astype(np.float32) / 2**27).astype(np.float64))
    return np.rint(weights.astype(np.float32).astype(np.float64) * 2**40).astype(np.int64)


def choose(
    logits: npt.NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    scores = scores_of(logits, temperature)
    cuts_rank = 0 < top_k < len(logits)
    order = np.lexsort((np.arange(len(logits)), scores))
    masses = masses_of(scores[order])
    kept = min(top_k, len(logits)) if cuts_rank else len(logits)
    ranked = cuts_rank
    if top_p < 1.0:
        before = np.cumsum(masses) - masses
        kept = int((before[:kept] < top_p * int(masses[:kept].sum())).sum())
        ranked |= kept <= 256
    kept = int((np.exp(-scores[order][:kept] / 2**27) >= min_p).sum())
    ids = order[:kept] if ranked else np.sort(order[:kept])
    sums = np.cumsum(masses_of(scores[ids]))
    target = int(uniform * 2**52) * int(sums[-1]) >> 52
    return int(ids[np.searchsorted(sums, target, side="right")])


def choose_filtered(
    logits: npt.NDArray[np.float32], temperature: float, filters: Filters, u: float, xtc_u: float
) -> int:
    """With any filters: they keep [begin, end) of the tokens in order of score, then of id."""
    scores = scores_of(logits, temperature)
    order = np.lexsort((np.arange(len(logits)), scores))
    ranked, masses = scores[order], masses_of(scores[order])
    begin, end = 0, len(logits)
    if filters.top_n_sigma > 0:
        distances = logits.max().astype(np.float64) - logits
        sigma = math.sqrt(max((distances**2).mean() - distances.mean() ** 2, 0.0))
        limit = (
            np.float32(filters.top_n_sigma * sigma) / np.float32(temperature) * np.float32(2**27)
        )
        end = int((ranked <= np.rint(np.float64(limit))).sum())
    if 0 < filters.top_k < len(logits):
        end = min(end, filters.top_k)
    if filters.typical_p < 1:
        moments = sum(
            int(s) * int(m) >> 24 for s, m in zip(ranked[:end], masses[:end], strict=True)
        )
        mean = round(moments / int(masses[:end].sum()) * 2**24)
        distances = np.abs(ranked[:end] - mean)
        near = np.sort(distances)
        reached = np.cumsum(masses[:end][np.argsort(distances, kind="stable")])
        wanted = filters.typical_p * float(reached[-1])
        kept = np.flatnonzero(distances <= near[np.searchsorted(reached.astype(float), wanted)])
        begin, end = int(kept[0]), int(kept[-1]) + 1
    if filters.top_p < 1:
        some = masses[begin:end]
        end = begin + int((np.cumsum(some) - some < filters.top_p * int(some.sum())).sum())
    if filters.min_p > 0:
        weights = np.exp(-ranked[begin:end] / 2**27)
        end = begin + int((weights >= filters.min_p * weights[0]).sum())
    if filters.epsilon_cutoff > 0:
        some = masses[begin:end]
        end = begin + max(int((some >= filters.epsilon_cutoff * int(some.sum())).sum()), 1)
    if xtc_u < filters.xtc_probability:
        least = max(filters.xtc_threshold * int(masses[begin:end].sum()), 1.0)
        begin += max(int((masses[begin:end] >= least).sum()) - 1, 0)
    sums = np.cumsum(masses[begin:end])
    target = int(u * 2**52) * int(sums[-1]) >> 52
    return int(order[begin + np.searchsorted(sums, target, side="right")])


RARE = [
    Filters(typical_p=0.2),
    Filters(typical_p=0.95),
    Filters(top_n_sigma=1.0),
    Filters(top_n_sigma=2.5),
    Filters(epsilon_cutoff=0.0003),
    Filters(epsilon_cutoff=0.02),
    Filters(epsilon_cutoff=0.9),
    Filters(typical_p=0.9, min_p=0.05, epsilon_cutoff=0.003),
    Filters(epsilon_cutoff=0.003, xtc_probability=1.0, xtc_threshold=0.02),
    Filters(xtc_probability=1.0, xtc_threshold=0.05),
    Filters(xtc_probability=0.5, xtc_threshold=0.0001),
    Filters(top_n_sigma=3.0, top_k=300, typical_p=0.9, top_p=0.95, min_p=0.01),
    Filters(top_k=40, typical_p=0.5, min_p=0.2, xtc_probability=1.0, xtc_threshold=0.03),
    Filters(min_p=0.02, xtc_probability=1.0, xtc_threshold=0.01),
]


@pytest.mark.parametrize("filters", RARE, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_integer_sampling_matches_the_reference_with_rare_filters(
    filters: Filters, temperature: float, spread: float
) -> None:
    rng = np.random.default_rng(2)
    differ = 0
    for position in range(30):
        row = (rng.standard_normal(3000) * spread).astype(np.float32)
        u, xtc_u = (reference.uniform(7, position, purpose) for purpose in (0, 1))
        expected = reference.draw_filtered(torch.from_numpy(row), temperature, filters, u, xtc_u)
        differ += choose_filtered(row, temperature, filters, u, xtc_u) != expected
    assert differ <= 1  # a draw, or a filter, on the border between two tokens


def test_moments_of_the_largest_vocabulary_fit_64_bits() -> None:
    scores = np.arange(2**25, 2**29, 2**16, dtype=np.int64)
    terms = [int(s) * int(m) >> 24 for s, m in zip(scores, masses_of(scores), strict=True)]
    assert sampling.MAX_VOCAB_SIZE * max(terms) < 2**64


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_integer_sampling_matches_the_reference(
    filters: tuple[int, float, float], temperature: float, spread: float
) -> None:
    rng = np.random.default_rng(1)
    rows, vocab_size = 40, 5000
    logits = (rng.standard_normal((rows, vocab_size)) * spread).astype(np.float32)
    uniforms = np.array([reference.uniform(7, position) for position in range(rows)])
    top_k, top_p, min_p = filters
    expected = reference.draw(
        torch.from_numpy(logits),
        np.full(rows, temperature),
        np.full(rows, top_k),
        np.full(rows, top_p),
        np.full(rows, min_p),
        uniforms,
    )
    for row, u, token_id in zip(logits, uniforms, expected.tolist(), strict=True):
        found = choose(row, temperature, top_k, top_p, min_p, u)
        # The order of tokens whose weights are a rounding apart is the reference's own.
        weights = np.exp((row[[found, token_id]] - row.max()) / np.float32(temperature))
        assert found == token_id or math.isclose(*weights.tolist(), rel_tol=3e-7)


def test_the_masses_of_the_largest_vocabulary_fit_64_bits() -> None:
    assert sampling.MAX_VOCAB_SIZE * 2**40 < 2**63


def test_row_params_have_the_memory_layout_of_the_kernel() -> None:
    source = (CSRC / "row_params.cuh").read_text()
    body = re.search(r"struct RowParams \{(.*?)\};", source, re.DOTALL)
    assert body is not None
    fields = []
    for line in re.sub(r"//.*", "", body[1]).split(";")[:-1]:
        kind, name = line.strip().rsplit(" ", 1)
        fields.append((name, kind))
    types = {"unsigned long long": "<u8", "float": "<f4", "int": "<i4"}
    assert np.dtype([(name, types[kind]) for name, kind in fields]) == sampling.ROW_PARAMS
    assert f"sizeof(RowParams) == {sampling.ROW_PARAMS.itemsize}" in source
    assert sampling.ROW_PARAMS.itemsize % 8 == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CAPACITY", sampling._CAPACITY),
        ("VALUES", sampling._SLICE // sampling._THREADS),
        ("MAX_SLICES", sampling.num_slices(sampling.MAX_VOCAB_SIZE)),
    ],
)
def test_constants_are_the_same_on_both_sides(name: str, value: int) -> None:
    assert re.search(rf"constexpr int {name} = {value};", SOURCE)


def test_the_other_headers_constants_are_too() -> None:
    assert f"constexpr int THREADS = {sampling._THREADS};" in (CSRC / "sampling.cuh").read_text()
    source = (CSRC / "top_logprobs.cu").read_text()
    assert f"constexpr int MOST = {sampling.MAX_TOP};" in source


@pytest.mark.parametrize(
    ("struct", "size"), [("Bound", sampling._BOUND_BYTES), ("Partial", sampling._PARTIAL_BYTES)]
)
def test_scratch_is_large_enough_for_its_contents(struct: str, size: int) -> None:
    body = re.search(rf"struct {struct} \{{(.*?)\}};", SOURCE, re.DOTALL)
    assert body is not None
    found = 0
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        kind, *names = re.findall(r"\w+(?:\[\d+\])?", line) or [""]
        width = {"u64": 8, "": 0}.get(kind, 4)
        found += sum(width * int((re.findall(r"\[(\d+)\]", name) or [1])[0]) for name in names)
    assert found == size


def test_rows_of_scratch_stay_aligned() -> None:
    for vocab_size in (1, 8192, 8193, 128256, sampling.MAX_VOCAB_SIZE):
        assert sampling.scratch_bytes(vocab_size) % 16 == 0


def test_default_row_params_are_greedy_and_change_nothing() -> None:
    (params,) = sampling.greedy_row_params(1)
    assert params["temperature"] == 0 and params["slot"] == -1
    assert params["top_p"] == params["typical_p"] == params["repetition_penalty"] == 1
    assert params["min_p"] == params["presence_penalty"] == params["frequency_penalty"] == 0
    assert params["top_k"] == 0
    assert params["top_n_sigma"] == params["epsilon_cutoff"] == params["xtc_probability"] == 0
