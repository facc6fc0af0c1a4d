"""Which kernels compute an MLP whose weights and inputs have 8 bits, recorded without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import recorded_launches
from inflight.models.layers.linear import CudaWeight
from inflight.models.linear.scaled_cuda import CudaScaledLinear, QuantizedInputs
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.runtime.recording import Launched

META = torch.device("meta")
FP8, INT8 = torch.float8_e4m3fn, torch.int8
ROWS, SIZE, WIDTH = 256, 1024, 2048


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    with recorded_launches.recording(monkeypatch, hopper=True) as launched:
        yield launched


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def weight(n: int, k: int, dtype: torch.dtype, batch_invariant: bool = False) -> CudaScaledLinear:
    rows = ScaledRows(empty(n, k, dtype=dtype), empty(n, dtype=torch.float32))
    return CudaScaledLinear(rows, None, QuantizedInputs(ROWS, WIDTH, META), batch_invariant)


def run(gate_up: CudaWeight, down: CudaWeight, num_tokens: int) -> None:
    inner = gate_up.gated(
        empty(ROWS, SIZE), empty(ROWS, 2 * WIDTH), empty(ROWS, WIDTH), num_tokens, down
    )
    down.add(inner, empty(ROWS, SIZE), num_tokens)


def templates(launched: Launched) -> list[str]:
    """In the order in which they were first launched."""
    return list(dict.fromkeys(name.partition("<")[0] for _, name in launched))


@pytest.mark.parametrize("num_tokens", [65, 200])
def test_the_gate_of_many_tokens_quantises_its_results(launched: Launched, num_tokens: int) -> None:
    run(weight(2 * WIDTH, SIZE, FP8), weight(SIZE, WIDTH, FP8), num_tokens)
    assert set(templates(launched)) == {
        "quantize_rows",
        "gemm::quantizing_gate",
        "settle_rows",
        "gemm::scaled_gemm",
    }


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "batch_invariant"),
    [(64, FP8, False), (200, INT8, False), (200, FP8, True)],
    ids=["few tokens", "integers", "batch-invariant"],
)
def test_other_results_are_quantised_by_a_kernel_of_their_own(
    launched: Launched, num_tokens: int, dtype: torch.dtype, batch_invariant: bool
) -> None:
    """Integers have no room for coarse scales; what is rounded twice depends on the tiles."""
    gate_up = weight(2 * WIDTH, SIZE, dtype, batch_invariant)
    run(gate_up, weight(SIZE, WIDTH, dtype, batch_invariant), num_tokens)
    assert not {"settle_rows", "gemm::quantizing_gate"} & set(templates(launched))
    assert "quantize_rows" in templates(launched)


def test_a_layer_that_is_not_quantised_gets_16_bits(launched: Launched) -> None:
    down = CudaLinear(empty(SIZE, WIDTH), None, False)
    gate_up, out = weight(2 * WIDTH, SIZE, FP8), empty(ROWS, WIDTH)
    assert gate_up.gated(empty(ROWS, SIZE), empty(ROWS, 2 * WIDTH), out, 200, down) is out
    assert set(templates(launched)) == {"quantize_rows", "gemm::scaled_gemm"}


def test_a_gate_that_is_not_quantised_leaves_16_bits(launched: Launched) -> None:
    run(CudaLinear(empty(2 * WIDTH, SIZE), None, False), weight(SIZE, WIDTH, FP8), 200)
    assert "quantize_rows" in templates(launched)
    assert not {"settle_rows", "gemm::quantizing_gate"} & set(templates(launched))
