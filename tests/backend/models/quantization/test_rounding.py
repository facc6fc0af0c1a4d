"""Weights are rounded to the nearest of 16 values of their group."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import family
import grouped_folders as folders
from family import relative_rms
from inflight.models import decoder_cpu
from inflight.models.loader import linear_names
from inflight.models.quantization import rounding
from inflight.models.quantization.rounding import (
    group_of,
    quantize_groups,
    quantize_symmetrically,
)
from inflight.models.registry import read_spec
from kept_groups import KEPT_TOLERANCE

NUMBERS = st.floats(-100, 100, width=32)
# In codes: where float32 and float64 may round differently.
TIES = (0.0, 1e-4, -1e-4)


def drawn(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


def errors_of(values: np.ndarray, ends: tuple[float, float], nudges: tuple[float, float]) -> float:
    """Sum of squares of a try, in float64; from the definition, for one group.

    Args:
        values: [group].
        ends: what the first codes cover, of the least and of the largest value.
        nudges: added to values before they are rounded to the first and to the last codes, in
            codes.
    """
    low, high = ends[0] * values.min(), ends[1] * values.max()
    scale = (high - low) / 15
    if scale == 0:
        return float(np.square(low - values).sum())
    codes = np.clip(np.rint((values - low) / scale + nudges[0]), 0, 15)
    if codes.min() < codes.max():
        fitted, minimum = np.polyfit(codes, values, 1)
        if fitted > 0:
            scale, low = fitted, minimum
    codes = np.clip(np.rint((values - low) / scale + nudges[1]), 0, 15)
    return float(np.square(codes * scale + low - values).sum())


def check_errors_are_the_least(values: list[float]) -> None:
    matrix = quantize_groups(torch.tensor([values]), 32)
    errors = (matrix.dequantized()[0].double() - torch.tensor(values).double()).square().sum()
    tries = [
        [errors_of(np.array(values), ends, nudges) for nudges in itertools.product(TIES, TIES)]
        for ends in itertools.product((1.0, 0.9, 0.8), repeat=2)
    ]
    least = min(max(of_one) for of_one in tries)
    # In the middle between two codes either is right, and both may be among the values of a try.
    is_tied = any(max(of_one) > 1.001 * min(of_one) + 1e-4 for of_one in tries)
    assert float(errors) <= (1.05 if is_tied else 1.001) * least + 1e-4
    assert int(matrix.codes.max()) <= 15
    assert (matrix.shape, matrix.group, matrix.bits, matrix.zero) == ((1, 32), 32, 4, 0)


@given(st.lists(NUMBERS, min_size=32, max_size=32))
def test_errors_are_the_least_of_all_tries(values: list[float]) -> None:
    check_errors_are_the_least(values)


def test_errors_with_ties_are_the_least_of_all_tries() -> None:
    """Of values of which float32 and float64 round some to other codes."""
    values = [4] * 6 + [8] * 3 + [5] * 2 + [1, 6, 7, 12, 21, 35, 47, 79, 83, 99]
    values += [0] * 4 + [-1] * 4 + [-29, -99]
    check_errors_are_the_least([*map(float, values), -5.960464477539063e-08])


def test_errors_of_each_end_are_the_least_of_all_tries() -> None:
    """Of random values: each of the ends is that of the best try in some groups."""
    normal = drawn(100, 32)
    for group in torch.cat((normal, normal * normal.abs())).tolist():
        check_errors_are_the_least(group)


@pytest.mark.parametrize("group", [32, 128])
def test_errors_are_smaller_than_from_extremes(group: int) -> None:
    """Of normally distributed values, and more so of those with heavier tails."""
    normal = drawn(64, 1024).bfloat16().float()
    for weight, most in ((normal, 0.93), (normal * normal.abs(), 0.85)):
        grouped = weight.view(64, -1, group)
        low = grouped.amin(2, keepdim=True)
        step = (grouped.amax(2, keepdim=True) - low) / 15
        extremes = ((grouped - low) / step).round() * step + low
        before = (extremes - grouped).square().mean()
        after = (quantize_groups(weight, group).dequantized() - weight).square().mean()
        assert after < most * before


def test_rows_are_rounded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = drawn(7, 256)
    whole = quantize_groups(weight, 64)
    monkeypatch.setitem(rounding._AT_ONCE, "cpu", 600)  # two rows
    parts = quantize_groups(weight, 64)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)
    assert parts.minimums is not None and whole.minimums is not None
    assert torch.equal(parts.minimums, whole.minimums)


def test_values_that_are_alike_stay_as_they_are() -> None:
    weight = torch.full((2, 32), 0.3)
    weight[1] = 0
    torch.testing.assert_close(quantize_groups(weight, 32).dequantized(), weight)
    assert torch.equal(quantize_symmetrically(weight, 32).dequantized()[1], weight[1])


def test_weights_are_left_as_they_were() -> None:
    weight = drawn(4, 64)
    before = weight.clone()
    quantize_groups(weight, 32)
    quantize_symmetrically(weight, 32)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_symmetric_codes_have_0_in_the_middle(dtype: torch.dtype) -> None:
    weight = drawn(8, 128).to(dtype)
    matrix = quantize_symmetrically(weight, 32)
    assert (matrix.zero, matrix.minimums, int(matrix.codes.max())) == (8, None, 15)
    assert torch.equal(matrix.scales, matrix.scales.to(dtype).float())
    step = matrix.scales.repeat_interleave(32, 1)
    assert ((matrix.dequantized() - weight.float()).abs() <= 0.54 * step).all()


def test_from_extremes_is_more_exact_than_about_0() -> None:
    weight = drawn(512, 128)
    errors = [
        float((quantize(weight, 128).dequantized() - weight).square().mean())
        for quantize in (quantize_groups, quantize_symmetrically)
    ]
    assert errors[0] < 0.85 * errors[1]


@pytest.mark.parametrize(
    ("width", "group"), [(4096, 128), (192, 64), (96, 32), (2880, 64), (80, None), (16, None)]
)
def test_the_largest_group_that_divides_the_width(width: int, group: int | None) -> None:
    assert group_of(width) == group


def test_without_memory_a_matrix_has_shapes_alone() -> None:
    matrix = quantize_groups(torch.empty(6, 64, device="meta"), 32)
    assert matrix.codes.is_meta and matrix.scales.shape == (6, 2) and matrix.minimums is not None


def rounded(weight: Tensor) -> Tensor:
    group = group_of(weight.shape[1])
    assert group is not None
    return quantize_groups(weight, group).dequantized()


def test_a_model_computes_with_rounded_linear_layers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly so where there are no kernels."""
    model = folders.qwen3()
    checkpoint = family.write_folder(model, tmp_path)
    names = linear_names(read_spec(checkpoint))
    state = model.state_dict()
    model.load_state_dict(
        {name: rounded(one) if name in names else one for name, one in state.items()}
    )
    text = family.tokens()
    (found,) = family.our_logits(checkpoint, [text], family.AT_ONCE[:1], quantization="int4")
    assert relative_rms(found, family.reference_logits(model, text)) < KEPT_TOLERANCE
    monkeypatch.setattr(decoder_cpu, "has_kernels", lambda: False)
    family.check(checkpoint, model, quantization="int4")
