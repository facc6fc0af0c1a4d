"""Which kernels multiply weights of codes with scales of groups, recorded without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import recorded_launches
from inflight.models.cuda_placement import CudaPlacement
from inflight.models.layers.linear import CudaWeight
from inflight.models.linear.grouped_cuda import CudaGroupedLinear, ValidTokens
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight.models.linear.weight_only_cuda import DequantizedWeight
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.floats import E2M1
from inflight.models.quantization.rounding import quantize_groups
from inflight_kernels.ops.linear import gemm, grouped, grouped_rows
from inflight_kernels.ops.linear.grouped_rows import KINDS, GroupedKind, dequantized
from inflight_kernels.runtime.recording import Launched

META, CPU = torch.device("meta"), torch.device("cpu")
ROWS, N, K = 512, 8192, 2048
INT4 = GroupedKind(grouped_rows.INT4, 128, True)

ONE, FEW, SOME = {"grouped_stream"}, {"grouped_gemm"}, {"grouped_product"}
DEQUANTIZING = {"grouped_dequantize"}
"""Kernels for one token or two, for a few and for some, and for more."""

SOURCES = {"grouped_stream": "grouped_stream", "grouped_product": "grouped_gemm_hopper"}


@pytest.fixture(params=[True, False], ids=["hopper", "others"])
def is_hopper(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def launched(is_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    with recorded_launches.recording(monkeypatch, hopper=is_hopper) as launched:
        yield launched


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def layer(
    n: int = N, *, batch_invariant: bool = False, has_memory: bool = True, kind: GroupedKind = INT4
) -> CudaGroupedLinear:
    table = empty(32, dtype=torch.uint8) if kind.codes == grouped_rows.TABLE else None
    weight = grouped_rows.empty(1, n, K, kind, META, table)
    memory = DequantizedWeight(n * K, torch.bfloat16, META) if has_memory else None
    return CudaGroupedLinear(weight, empty(n), memory, batch_invariant, ValidTokens())


def run(one: CudaGroupedLinear, way: str, num_tokens: int) -> None:
    n = one.weight.n
    x, wide = empty(ROWS, K), empty(ROWS, n)
    assert not one.norms(num_tokens) and not one.sums(num_tokens)
    if way == "gated":
        half = empty(ROWS, n // 2)
        assert one.gated(x, wide, half, num_tokens, one) is half
    else:
        getattr(one, way)(x, wide, num_tokens)


def templates(launched: Launched) -> set[str]:
    return {name.partition("<")[0] for stem, name in launched if stem.startswith("grouped")}


ways = pytest.mark.parametrize("way", ["product", "add", "gated"])

# ---------------------------------------------------------------- kernels


@ways
@pytest.mark.parametrize(
    ("num_tokens", "on_hopper", "on_others"),
    [
        (1, ONE, ONE),
        (2, ONE, ONE),
        (3, FEW, FEW),
        (8, FEW, FEW),
        (9, SOME, FEW | ONE),  # 8 and 1
        (32, SOME, FEW),
        (33, SOME, DEQUANTIZING),
        (256, SOME, DEQUANTIZING),
        (257, DEQUANTIZING, DEQUANTIZING),
        (512, DEQUANTIZING, DEQUANTIZING),
    ],
)
def test_the_kernel_depends_on_the_number_of_tokens(
    launched: Launched,
    is_hopper: bool,
    way: str,
    num_tokens: int,
    on_hopper: set[str],
    on_others: set[str],
) -> None:
    run(layer(), way, num_tokens)
    expected = on_hopper if is_hopper else on_others
    assert templates(launched) == expected
    if expected != DEQUANTIZING:
        stems = {SOURCES.get(name, "grouped_gemm") for name in expected}
        assert {found for found, _ in launched} == stems, "and nothing else"


@ways
@pytest.mark.parametrize("num_tokens", [1, 9, 200, 300])
def test_batch_invariant_layers_have_the_dequantised_weight_alone(
    launched: Launched, way: str, num_tokens: int
) -> None:
    run(layer(batch_invariant=True), way, num_tokens)
    assert templates(launched) == DEQUANTIZING


@ways
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 257, 512])
def test_without_memory_any_number_of_tokens_is_multiplied_by_codes(
    launched: Launched, is_hopper: bool, way: str, num_tokens: int
) -> None:
    run(layer(has_memory=False), way, num_tokens)
    if is_hopper and num_tokens > 8:
        expected = SOME
    else:
        rest = num_tokens % grouped.MAX_TOKENS
        expected = (FEW if num_tokens >= 8 else set()) | (ONE if rest == 1 else set())
    assert templates(launched) == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_tokens", [1, 64, 300])
def test_kernels_are_those_of_the_kind(
    launched: Launched, kind: GroupedKind, num_tokens: int
) -> None:
    run(layer(kind=kind), "product", num_tokens)
    found = [name for stem, name in launched if stem.startswith("grouped")]
    assert found and all(f"<{kind.name}" in name for name in found)


@pytest.mark.parametrize("num_tokens", [1, 9, 20])
def test_halves_that_end_within_a_record_are_multiplied_as_one(
    launched: Launched, num_tokens: int
) -> None:
    run(layer(48), "gated", num_tokens)
    assert "activation" in {stem for stem, _ in launched}
    found = list(launched)
    run(layer(64), "gated", num_tokens)
    assert templates(launched) == templates(dict.fromkeys(found))


def test_more_tokens_than_a_kernel_takes_are_split(
    launched: Launched, is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int | None]] = []

    def linear(x: Tensor, weight: object, bias: object, residual: Any, **rest: object) -> None:
        taken.append((len(x), None if residual is None else len(residual)))

    for module in ("grouped", "grouped_gemm"):
        monkeypatch.setattr(f"inflight_kernels.ops.linear.{module}.linear", linear)
    run(layer(), "product", 20)
    run(layer(), "add", 17)
    run(layer(has_memory=False), "product", 300)
    if is_hopper:
        assert taken == [(20, None), (17, 17), (256, None), (44, None)]
    else:
        most = grouped.MAX_TOKENS
        lengths = [[min(most, count - i) for i in range(0, count, most)] for count in (20, 17, 300)]
        plain, added, head = lengths
        alone = [(length, None) for length in plain + head]
        both = [(length, length) for length in added]
        assert taken == [*alone[: len(plain)], *both, *alone[len(plain) :]]


def test_no_product_begins_before_the_weight_is_dequantised(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: list[object] = []

    def linear(*operands: object, pdl: bool, **rest: object) -> None:
        early.append(pdl)

    monkeypatch.setattr(gemm, "linear", linear)
    monkeypatch.setattr(gemm, "prefers", lambda *shape: True)
    for way in ("product", "gated"):
        run(layer(), way, 300)
    assert early == [False, False]


# ---------------------------------------------------------------- placement


def in_groups(rows: int, seed: int, group: int = 32, zero: int = 8) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 128), generator=generator, dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-3, 3, (rows, 128 // group), generator=generator)
    return GroupedMatrix(codes, 4, scales, zero=zero)


def placement(
    *, keeps_groups: bool = True, batch_invariant: bool = False, **settings: Any
) -> CudaPlacement:
    groups = DequantizedWeight(64 * 128, torch.bfloat16, CPU) if keeps_groups else None
    return CudaPlacement(torch.bfloat16, CPU, batch_invariant, groups=groups, **settings)


def values_of(weight: CudaWeight, is_kept: bool) -> Tensor:
    if is_kept:
        assert isinstance(weight, CudaGroupedLinear)
        return dequantized(weight.weight)
    assert isinstance(weight, CudaLinear)
    return weight.weight


@pytest.mark.parametrize(
    ("others", "is_kept"),
    [
        ([in_groups(16, 2)], True),
        ([in_groups(16, 2, group=16, zero=3)], True),
        ([in_groups(16, 2).dequantized()], False),
        ([dataclasses.replace(in_groups(16, 2), zero=0, levels=E2M1)], False),
        ([dataclasses.replace(in_groups(16, 2), columns=torch.arange(128).flip(0))], False),
    ],
    ids=["one kind", "two kinds", "16 bits", "levels", "columns"],
)
def test_parts_of_a_layer_stay_in_codes_if_these_can_be_of_one_kind(
    others: list[Any], is_kept: bool
) -> None:
    parts = [in_groups(32, 1), *others]
    exact = [part if isinstance(part, Tensor) else part.dequantized() for part in parts]
    found = placement().linear(parts, [])
    assert torch.equal(values_of(found, is_kept), torch.cat(exact).bfloat16())
    dequantised = placement(keeps_groups=False).linear(parts, [])
    assert torch.equal(values_of(dequantised, False), torch.cat(exact).bfloat16())


def test_layers_of_16_bits_are_rounded_by_the_setting() -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(3))
    found = placement(quantization="int4").linear([weight], [])
    rounded = quantize_groups(weight, 128).dequantized()
    torch.testing.assert_close(values_of(found, True).float(), rounded, rtol=0.02, atol=0.02)
    assert torch.equal(values_of(placement().linear([weight], []), False), weight.bfloat16())


def test_a_head_stays_in_codes_unless_it_is_batch_invariant() -> None:
    """It is dequantised once then: there is no memory for so large a weight."""
    stored = in_groups(80, 4)
    for batch_invariant in (False, True):
        found = placement(batch_invariant=batch_invariant).head(stored)
        exact = stored.dequantized().bfloat16()
        assert torch.equal(values_of(found, not batch_invariant), exact)
    plain = placement(quantization="int4").head(stored.dequantized())
    assert torch.equal(values_of(plain, False), stored.dequantized().bfloat16())


def test_a_head_has_no_memory_for_a_dequantised_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = DequantizedWeight(1, torch.bfloat16, META)
    place = CudaPlacement(torch.bfloat16, META, False, groups=groups)
    head = place.head(in_groups(N, 5))
    with recorded_launches.recording(monkeypatch) as launched:
        head.product(empty(ROWS, 128), empty(ROWS, N, dtype=torch.float32), 300)
    assert templates(launched) == SOME
