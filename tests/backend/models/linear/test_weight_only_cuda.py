"""Which kernels multiply weights of 8 bits with activations of 16, recorded without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quantized_models
import recorded_launches
import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.execution import cuda_runner, factory
from inflight.models.linear import unquantized_cuda
from inflight.models.linear.weight_only_cuda import (
    CudaWeightOnlyLinear,
    DequantizedWeight,
    can_widen,
)
from inflight.models.loader import linear_names
from inflight.models.quantization.matrix import QuantizedMatrix
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec
from inflight_kernels.ops.linear import gemm
from inflight_kernels.runtime.recording import Launched

META = torch.device("meta")
ROWS, N, K = 256, 8192, 2048


@pytest.fixture(params=[True, False], ids=["hopper", "others"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    with recorded_launches.recording(monkeypatch, hopper=request.param) as launched:
        yield launched


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def layer(batch_invariant: bool = False) -> CudaWeightOnlyLinear:
    weight = QuantizedMatrix(empty(N, K, dtype=torch.int8), empty(N, dtype=torch.float32))
    memory = DequantizedWeight(N * K, torch.bfloat16, META)
    return CudaWeightOnlyLinear(weight, empty(N), memory, batch_invariant)


def run(one: CudaWeightOnlyLinear, num_tokens: int) -> None:
    x, wide = empty(ROWS, K), empty(ROWS, N)
    assert one.input_rows(num_tokens) is None and not one.norms(num_tokens)
    one.product(x, wide, num_tokens)
    one.add(x, wide, num_tokens)
    half = empty(ROWS, N // 2)
    assert one.gated(x, wide, half, num_tokens, one) is half


def templates(launched: Launched) -> set[str]:
    return {name.partition("<")[0] for stem, name in launched if stem == "weight_only"}


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 65, 128])
def test_few_tokens_read_the_weight_as_it_is(launched: Launched, num_tokens: int) -> None:
    run(layer(), num_tokens)
    assert {stem for stem, _ in launched} == {"weight_only"}
    assert templates(launched) == {"weight_only_gemm"}


def test_more_tokens_than_a_kernel_takes_are_split(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int | None]] = []

    def linear(x: Tensor, weight: object, bias: object, residual: Any, **rest: object) -> None:
        taken.append((len(x), None if residual is None else len(residual)))

    monkeypatch.setattr("inflight_kernels.ops.linear.weight_only.linear", linear)
    layer().product(empty(ROWS, K), empty(ROWS, N), 100)
    layer().add(empty(ROWS, K), empty(ROWS, N), 65)
    assert taken == [(64, None), (36, None), (64, 64), (1, 1)]


@pytest.mark.parametrize(
    ("num_tokens", "batch_invariant"), [(129, False), (256, False), (1, True), (200, True)]
)
def test_others_dequantise_it(launched: Launched, num_tokens: int, batch_invariant: bool) -> None:
    run(layer(batch_invariant), num_tokens)
    assert templates(launched) == {"weight_only_dequantize"}


def test_no_product_begins_before_the_weight_is_dequantised(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    early: list[object] = []

    def linear(*operands: object, pdl: bool, **rest: object) -> None:
        early.append(pdl)

    monkeypatch.setattr(gemm, "linear", linear)
    monkeypatch.setattr(gemm, "prefers", lambda *shape: True)
    run(layer(), 200)
    assert early == [False, False]
    unquantized_cuda.CudaLinear(empty(N, K), None, False).product(
        empty(ROWS, K), empty(ROWS, N), 200
    )
    assert early.pop() is True


def test_rows_with_nan_have_a_scale_of_nan() -> None:
    """The kernels take e4m3's NaN for a number."""
    values = torch.tensor([[1.0, 448.0], [2.0, torch.nan]], device="cpu").to(torch.float8_e4m3fn)
    memory = DequantizedWeight(4, torch.bfloat16, torch.device("cpu"))
    one = CudaWeightOnlyLinear(QuantizedMatrix(values, torch.ones(2)), None, memory, False)
    assert one.weight.scales.isnan().tolist() == [False, True]


def test_rows_are_whole_vectors() -> None:
    assert can_widen(48) and not can_widen(56)


@pytest.mark.parametrize("weight_only", [True, False])
def test_an_engine_compiles_the_kernels_ahead_if_its_format_needs_them(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, launched: Launched, weight_only: bool
) -> None:
    source = tiny.write_llama(tmp_path / "in", hidden_size=256, head_dim=64)
    spec = read_spec(source)
    quantize_folder(source.path, tmp_path / "out", linear_names(spec), "int8")
    checkpoint = Checkpoint(tmp_path / "out", "huggingface") if weight_only else source
    if weight_only:
        quantized_models.keep_activations(checkpoint.path)
    ahead: list[tuple[str, str]] = []
    monkeypatch.setattr(cuda_runner, "precompile_kernels", ahead.extend)
    config = EngineConfig(
        model=str(checkpoint.path), device="cuda", num_blocks=64, max_num_seqs=8, max_model_len=128
    )
    factory.build(config, checkpoint, lambda what, fraction: None)
    found = {name.partition("<")[0] for stem, name in ahead if stem == "weight_only"}
    assert found == ({"weight_only_gemm", "weight_only_dequantize"} if weight_only else set())
