"""Which kernels the experts of few tokens launch, and which operands they refuse; no GPU needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import E2M1, KINDS, GroupedKind, GroupedRows
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.moe import few, few_sizes
from inflight_kernels.ops.moe.products import SILU
from inflight_kernels.ops.moe.routing import Router
from inflight_kernels.runtime.recording import record_launches
from inflight_kernels.torch_ops.moe import Routing

EXPERTS, TOP_K, WIDTH, HIDDEN = 16, 2, 96, 208
ROUTER = Router(Routing(TOP_K, renormalize=True), EXPERTS)
META = torch.device("meta")
MXFP4 = GroupedKind(E2M1, 32, False)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "is_hopper", lambda: True)
    monkeypatch.setattr(few_sizes, "num_multiprocessors", lambda: 132)


def _rows(count: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(count, columns, dtype=dtype, device=META)


def _codes(rows: int, columns: int, kind: GroupedKind) -> GroupedRows:
    table = torch.empty(32, dtype=torch.uint8, device=META)
    is_table = kind.codes == grouped_rows.TABLE
    return grouped_rows.empty(EXPERTS, rows, columns, kind, META, table if is_table else None)


def _gate_up(weight: GroupedRows, x: Tensor | ScaledRows) -> list[str]:
    with record_launches() as launched:
        few.gate_up(
            x,
            _rows(2, EXPERTS, torch.float32),
            ROUTER,
            few.GateUp(weight, None, SILU),
            choice=few.new_choice(META),
            out=_rows(2 * TOP_K, WIDTH),
        )
    return [name for _, name in launched]


def _down(weight: GroupedRows) -> list[str]:
    layer, inner = few.Down(weight, None), _rows(2 * TOP_K, WIDTH)
    with record_launches() as launched:
        few.down(inner, few.new_choice(META), ROUTER, layer, total=_rows(2, HIDDEN))
    return [name for _, name in launched]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_experts_in_codes_have_kernels_of_their_kind(kind: GroupedKind) -> None:
    launched = _gate_up(_codes(2 * WIDTH, HIDDEN, kind), _rows(2, HIDDEN))
    launched += _down(_codes(HIDDEN, WIDTH, kind))
    assert [name.partition("<")[0] for name in launched] == ["few_gate_up", "few_down"]
    compiled = {name for _, names, _ in few.instantiations() for name in names}
    for name in launched:
        assert kind.name in name and name in compiled


def test_x_of_codes_is_not_quantised() -> None:
    x = ScaledRows.empty(2, HIDDEN, META, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"x is .*float8_e4m3fn.*expected torch.bfloat16"):
        _gate_up(_codes(2 * WIDTH, HIDDEN, MXFP4), x)


def test_codes_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is \[3328, 112\]; expected \[3328, 96\]"):
        _down(_codes(HIDDEN, 112, MXFP4))
    whole = _codes(HIDDEN, WIDTH, MXFP4)
    with pytest.raises(ValueError, match=r"weight\.records is"):
        _down(replace(whole, records=whole.records[1:]))
