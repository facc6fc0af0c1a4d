"""Products with matrices of 4 and 8 bits are those of the dequantised matrix, row by row alike.

Inputs are rounded, unless codes stand for levels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inflight_kernels.cpu_ops.grouped_linear import PackedMatrix, can_pack

# Of quarters: exact in float16, and products of few of them exact in float32.
SHAPES = st.tuples(st.integers(1, 70), st.sampled_from([16, 32, 64]), st.integers(1, 5))


def drawn(
    bits: int,
    n: int,
    k: int,
    group: int,
    *,
    minimums: bool = False,
    zero: float = 0.0,
    levels: bool = False,
    seed: int = 0,
) -> tuple[PackedMatrix, Tensor]:
    """A packed matrix, and the same one dequantised by its formula."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.randint(-8, 9, (n, k // group), generator=generator) / 4
    least = torch.randint(-8, 9, (n, k // group), generator=generator) / 4 if minimums else None
    table = torch.randint(-8, 9, (16,), generator=generator) / 2 if levels else None
    values = codes.float() if table is None else table[codes.long()]
    whole = (values - zero).view(n, -1, group) * scales[:, :, None]
    if least is not None:
        whole = whole + least[:, :, None]
    return PackedMatrix(codes, bits, scales, least, zero, table), whole.view(n, k)


def rounded(x: Tensor, bits: int) -> Tensor:
    """Each 32 columns to 127 steps on either side of 0, or to 127 * 254.

    For codes of 4 bits the latter only in blocks whose largest square is more than twice the mean
    of those of its row.
    """
    blocks = x.view(len(x), -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    squares = largest.square()
    is_fine = (squares > 2 * squares.mean(1, keepdim=True)) | (bits > 4)
    steps = torch.where(is_fine, 127.0 * 254, 127.0)
    # Not in another order: a rounded quotient decides ties.
    factors = torch.where(largest < 1e-30, 0.0, steps / largest)
    return ((blocks * factors).round() * (largest / steps)).view(x.shape)


def product(matrix: PackedMatrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.full((len(x), matrix.shape[0]), torch.nan)
    matrix.product(x, bias, out)
    return out


FORMS = {
    "4 bits": (4, {}),
    "4 bits, zero": (4, {"zero": 8.0}),
    "4 bits, minimums": (4, {"minimums": True}),
    "4 bits, levels": (4, {"levels": True}),
    "4 bits, levels, minimums": (4, {"levels": True, "minimums": True}),
    "3 bits": (3, {"zero": 4.0}),
    "5 bits": (5, {"minimums": True}),
    "6 bits": (6, {"zero": 32.0}),
    "8 bits": (8, {"zero": 128.0}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_products_are_those_of_the_dequantised_matrix(form: str, group: int) -> None:
    bits, parts = FORMS[form]
    matrix, whole = drawn(bits, 75, 256, group, **parts)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(75, generator=generator)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 97, 200):
        x = torch.randn(rows, 256, generator=generator)
        x[:, 64:96] *= 5  # of which a row has more steps
        found, read = product(matrix, x, bias), x if "levels" in form else rounded(x, bits)
        expected = read.double() @ whole.double().T + bias
        terms = x.double().abs() @ whole.double().abs().T + bias.abs()
        assert ((found - expected).abs() <= 2**-17 * terms).all()
    exact = x.double() @ whole.double().T + bias
    assert (found - exact).square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()


@given(SHAPES, st.sampled_from(sorted(FORMS)), st.integers(0, 1 << 30))
def test_any_shape_is_exact_where_sums_are(
    shape: tuple[int, int, int], form: str, seed: int
) -> None:
    n, group, groups = shape
    bits, parts = FORMS[form]
    matrix, whole = drawn(bits, n, group * groups, group, seed=seed, **parts)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (4, group * groups), generator=generator).float()
    x[:, ::16] = 127.0  # a step is 1
    assert torch.equal(product(matrix, x), (x.double() @ whole.double().T).float())


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_dequantised_exactly(form: str) -> None:
    bits, parts = FORMS[form]
    matrix, whole = drawn(bits, 75, 128, 32, **parts)  # type: ignore[arg-type]
    index = torch.tensor([74, 0, 31, 32, 74])
    assert torch.equal(matrix.rows(index), whole[index])
    assert matrix.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 128)
    assert matrix.rows(torch.tensor([75, -1])).isnan().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(form: str, threads: int) -> None:
    bits, parts = FORMS[form]
    matrix, _ = drawn(bits, 1000, 192, 32, **parts)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    x = torch.randn(250, 192)
    alone = torch.cat([product(matrix, row[None]) for row in x])
    torch.set_num_threads(threads)
    try:
        for rows in (2, 3, 4, 6, 9, 96, 97, 250):
            assert torch.equal(product(matrix, x[:rows]), alone[:rows])
            assert torch.equal(product(matrix, x[-rows:].contiguous()), alone[-rows:])
    finally:
        torch.set_num_threads(before)


def test_an_output_may_be_a_part_of_a_wider_one() -> None:
    matrix, whole = drawn(4, 40, 64, 32, zero=8.0)
    out = torch.full((5, 100), 7.0)
    x = torch.full((5, 64), 127.0)
    matrix.product(x, None, out[:, 30:70])
    assert torch.equal(out[:, 30:70], (x.double() @ whole.double().T).float())
    assert (out[:, :30] == 7).all() and (out[:, 70:] == 7).all()


def test_scales_beyond_the_range_of_float16_keep_their_precision() -> None:
    codes = torch.full((3, 32), 9, dtype=torch.uint8)
    scales = torch.tensor([[3e-9], [1.5e30], [0.0]])
    matrix = PackedMatrix(codes, 4, scales, None, 8.0)
    rows = matrix.rows(torch.arange(3))
    torch.testing.assert_close(rows, scales.expand(3, 32), rtol=2**-11, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [0, 63])
def test_nan_and_infinity_of_an_input_reach_its_outputs_alone(form: str, place: int) -> None:
    bits, parts = FORMS[form]
    matrix, _ = drawn(bits, 40, 64, 32, **parts)  # type: ignore[arg-type]
    x = torch.ones(4, 64)
    x[1, place], x[3, place] = torch.nan, torch.inf
    out = product(matrix, x)
    assert out[1].isnan().all()
    assert not out[3].isfinite().all()
    assert out[[0, 2]].isfinite().all()


def test_inputs_of_any_magnitude_are_rounded() -> None:
    matrix, whole = drawn(4, 40, 96, 32, zero=8.0)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0))
    x[0] *= 1e-35
    x[1] *= 1e30
    x[2, :32] *= 1e-38
    x[3] = 0.0
    x[4, 32:64] = 0.0
    exact = x.double() @ whole.double().T
    error = (product(matrix, x) - exact).abs().amax(1)
    assert (error[1:] <= 0.01 * exact.abs().amax(1)[1:]).all()
    assert error[0] <= exact.abs().amax(1)[0], "too small for steps: 0"


def test_four_bits_take_four_bits() -> None:
    matrix, _ = drawn(4, 64, 256, 32, minimums=True)
    assert matrix.nbytes == 64 * 256 * 5 // 8 + 64 * 4
    matrix, _ = drawn(6, 64, 256, 16, zero=32.0)
    assert matrix.nbytes == 64 * 256 * 9 // 8 + 64 * 4


def test_groups_that_no_kernel_has_are_told() -> None:
    assert can_pack(64, 16) and can_pack(96, 96)
    assert not can_pack(64, 4) and not can_pack(20, 20)
