"""Weights are rounded to the nearest of 16 values of their group."""

from __future__ import annotations

from pathlib import Path

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
from inflight.models.quantization.rounding import (
    group_of,
    quantize_groups,
    quantize_symmetrically,
)
from inflight.models.registry import read_spec
from kept_groups import KEPT_TOLERANCE

NUMBERS = st.floats(-100, 100, width=32)


def drawn(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


@given(st.lists(NUMBERS, min_size=32, max_size=32))
def test_no_value_is_off_by_more_than_half_a_step(values: list[float]) -> None:
    matrix = quantize_groups(torch.tensor([values]), 32)
    step = (max(values) - min(values)) / 15
    found = matrix.dequantized()[0].tolist()
    assert all(abs(a - b) <= 0.5001 * step + 1e-4 for a, b in zip(found, values, strict=True))
    assert int(matrix.codes.max()) <= 15


def test_each_group_has_its_extremes() -> None:
    weight = drawn(6, 256).bfloat16()
    matrix = quantize_groups(weight, 64)
    assert (matrix.shape, matrix.group, matrix.bits, matrix.zero) == ((6, 256), 64, 4, 0)
    found, given_ = matrix.dequantized().view(6, 4, 64), weight.float().view(6, 4, 64)
    torch.testing.assert_close(found.amin(2), given_.amin(2), rtol=0, atol=0)
    torch.testing.assert_close(found.amax(2), given_.amax(2), rtol=1e-6, atol=1e-6)


def test_values_that_are_alike_stay_as_they_are() -> None:
    weight = torch.full((2, 32), 0.3)
    weight[1] = 0
    assert torch.equal(quantize_groups(weight, 32).dequantized(), weight)
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
    """Value by value."""
    n, k = weight.shape
    group = next(size for size in (128, 64, 32) if k % size == 0)
    found = torch.empty(n, k)
    for row in range(n):
        for first in range(0, k, group):
            values = weight[row, first : first + group]
            low, step = values.min(), (values.max() - values.min()) / 15
            found[row, first : first + group] = low + ((values - low) / step).round() * step
    return found


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
