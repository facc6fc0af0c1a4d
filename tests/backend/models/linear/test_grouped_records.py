"""Matrices in groups become records with the same values, or none."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import tiny_gguf
from inflight.checkpoint.gguf import GgufTensor
from inflight.models.linear.grouped_records import joined_records
from inflight.models.quantization.gguf.kinds import KINDS
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.floats import E2M1
from inflight.models.stored.gguf_blocks import grouped
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedKind, dequantized

CPU, META = torch.device("cpu"), torch.device("meta")


def drawn(
    rows: int, width: int = 256, group: int = 32, bits: int = 4, seed: int = 0, **parts: object
) -> GroupedMatrix:
    """With scales of which products are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, width), dtype=torch.uint8, generator=generator)
    scales = 2.0 ** torch.randint(-4, 0, (rows, width // group), generator=generator)
    return GroupedMatrix(codes, bits, scales, **parts)  # type: ignore[arg-type]


def without_memory(matrix: GroupedMatrix) -> GroupedMatrix:
    """As shapes of stored weights are: levels follow from the format."""
    return dataclasses.replace(matrix.to(META), levels=matrix.levels)


def as_q4_k(rows: int, seed: int) -> GroupedMatrix:
    """As GGUF files have most matrices of a file."""
    matrix = drawn(rows, seed=seed)
    return dataclasses.replace(matrix, minimums=-4 * matrix.scales)


def as_q6_k(rows: int, seed: int) -> GroupedMatrix:
    """As they have those that matter most."""
    return drawn(rows, group=16, bits=6, seed=seed, zero=32)


FORMS = {
    "4 bits with zeros": (drawn(40, zero=8), GroupedKind(grouped_rows.INT4, 32, False)),
    "4 bits with minimums": (as_q4_k(40, 1), GroupedKind(grouped_rows.INT4, 32, True)),
    "6 bits": (as_q6_k(40, 2), GroupedKind(grouped_rows.INT6, 16, False)),
    "8 bits": (drawn(40, bits=8, group=128, zero=128), GroupedKind(grouped_rows.INT8, 128, False)),
    "groups of 64": (drawn(40, group=64, zero=8), GroupedKind(grouped_rows.INT4, 32, False)),
    "MXFP4": (drawn(40, levels=E2M1), GroupedKind(grouped_rows.E2M1, 32, False)),
    "doubled MXFP4": (drawn(40, levels=2 * E2M1), GroupedKind(grouped_rows.E2M1, 32, False)),
    "levels": (
        drawn(40, levels=torch.arange(-8.0, 8.0) ** 3 / 4),
        GroupedKind(grouped_rows.TABLE, 32, False),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_records_have_the_values_of_a_matrix(form: str) -> None:
    matrix, kind = FORMS[form]
    for parts in ([matrix], [matrix, matrix.rows(torch.arange(24))]):
        found = joined_records(parts, CPU)
        assert found is not None and found.kind == kind
        exact = torch.cat([part.dequantized() for part in parts])
        assert torch.equal(dequantized(found), exact.bfloat16())


def test_matrices_of_two_kinds_are_joined_in_one() -> None:
    parts = [as_q4_k(32, 1), as_q6_k(16, 2)]
    found = joined_records(parts, CPU)
    assert found is not None and found.kind == GroupedKind(grouped_rows.INT6, 16, True)
    exact = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(dequantized(found), exact.bfloat16())


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["Q2_K"], GroupedKind(grouped_rows.INT4, 16, True, units=True)),
        (["Q3_K"], GroupedKind(grouped_rows.INT4, 16, True, units=True)),
        (["Q4_K"], GroupedKind(grouped_rows.INT4, 32, True, units=True)),
        (["Q5_K"], GroupedKind(grouped_rows.INT6, 32, True, units=True)),
        (["Q6_K"], GroupedKind(grouped_rows.INT6, 16, False, units=True)),
        (["Q4_K", "Q6_K"], GroupedKind(grouped_rows.INT6, 16, True, units=True)),
        (["Q5_K", "Q4_K"], GroupedKind(grouped_rows.INT6, 32, True, units=True)),
        (["Q4_K", "Q4_1"], GroupedKind(grouped_rows.INT4, 32, True)),
    ],
    ids=str,
)
def test_scales_of_superblocks_stay_integers(names: list[str], kind: GroupedKind) -> None:
    generator = np.random.default_rng(0)
    parts = []
    for name in names:
        length, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        blocks = tiny_gguf.drawn_blocks(gguf.GGMLQuantizationType[name], 16 * 512 // length)
        # Of scales and minimums: small numbers of either sign.
        for first in KINDS[name].units or ():
            if first is not None:
                units = generator.normal(0, 1e-4, (len(blocks), 1)).astype(np.float16)
                blocks[:, first : first + 2] = units.view(np.uint8)
        stored = GgufTensor((16, 512), gguf.GGMLQuantizationType[name], blocks.reshape(-1))
        matrix = grouped(stored)
        assert matrix is not None
        parts.append(matrix)
    found = joined_records(parts, CPU)
    assert found is not None and found.kind == kind
    exact = torch.cat([part.dequantized() for part in parts]).double()
    # Scales, minimums and values are rounded to 8 bits.
    wide = torch.cat([_largest_terms(part) for part in parts])
    assert ((dequantized(found).double() - exact).abs() <= 2.0**-7 * wide).all()


def _largest_terms(matrix: GroupedMatrix) -> Tensor:
    """[n, k] float64: of each value, the sum of the absolute values of its terms."""
    codes, low = matrix.codes.double() + max(matrix.zero, 8), 0.0
    if matrix.minimums is not None:
        low = matrix.minimums.double().abs().repeat_interleave(matrix.group, 1)
    return codes * matrix.scales.double().abs().repeat_interleave(matrix.group, 1) + low


def test_rows_are_in_the_order_that_is_asked_for() -> None:
    parts = [drawn(16, seed=1, zero=8), drawn(16, seed=2, zero=8)]
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3))
    found = joined_records(parts, CPU, order)
    assert found is not None
    exact = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(dequantized(found), exact[order].bfloat16())


@pytest.mark.parametrize(
    "parts",
    [
        [drawn(16, zero=8), torch.zeros(16, 256)],
        [torch.zeros(16, 256)],
        [drawn(16, levels=E2M1), drawn(16, zero=8)],
        [drawn(16, zero=8, columns=torch.arange(256).flip(0))],
        [drawn(16, group=8, zero=8)],
        [drawn(16, width=36, group=36, zero=8)],
        [drawn(16, levels=E2M1, minimums=torch.zeros(16, 8))],
        [drawn(16, bits=8, levels=torch.arange(256.0))],
    ],
    ids=[
        *("some 16 bits", "all 16 bits", "levels and none", "columns", "small groups"),
        *("no whole vectors", "levels and minimums", "levels of 8 bits"),
    ],
)
def test_what_kernels_do_not_take_has_no_records(parts: list[GroupedMatrix | Tensor]) -> None:
    assert joined_records(parts, CPU) is None


@pytest.mark.parametrize("form", FORMS)
def test_without_memory_records_are_of_the_same_kind(form: str) -> None:
    matrix, _ = FORMS[form]
    parts = matrix.split([32, 8])
    kept = joined_records(parts, CPU)
    order = torch.arange(40).flip(0)
    shaped = joined_records([without_memory(part) for part in parts], META, order)
    assert kept is not None and shaped is not None
    assert shaped.records.is_meta and shaped.records.shape == kept.records.shape
    assert (shaped.kind, shaped.n, shaped.k) == (kept.kind, 40, 256)
