"""Arguments passed to kernels and rejected operands, as far as testable without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from inflight_kernels.ops.activation import gelu_tanh, gelu_tanh_mul, relu2, silu_mul
from inflight_kernels.ops.cache import clear_slots, copy_blocks
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.logits import scale_cap
from inflight_kernels.ops.norm import MAX_HIDDEN_BYTES, block_of, rms_norm
from inflight_kernels.ops.residual_norm import (
    Addend,
    Affine,
    NormParams,
    add_norm,
    norm_columns,
)
from inflight_kernels.ops.rope import PagedKV, QkNorm, RopeInputs, _group, _threads, rope_write_kv
from inflight_kernels.runtime import launch
from inflight_kernels.runtime.compile import CompileError
from inflight_kernels.runtime.launch import Int64, Kernel, check, check_memory, name_of, vectors_in
from inflight_kernels.runtime.recording import record_launches


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call a kernel on a pretended device; returns (stream, config, handle, arguments)."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(launch, "_enter", lambda device: None)
    monkeypatch.setattr(launch, "launch", lambda *args: calls.append(args))
    monkeypatch.setattr(launch, "supports_pdl", lambda: True)

    def call(*args: Any, **options: Any) -> tuple[Any, ...]:
        Kernel("k", "handle")(*args, **options)
        return calls.pop()

    return call


# ---------------------------------------------------------------- arguments


def test_arguments_reach_the_kernel_as_its_parameters_expect(packed: Any) -> None:
    tensor = torch.zeros(8)
    parameter = torch.nn.Parameter(tensor)
    _, config, handle, *args = packed(
        (3, 2), 128, tensor, parameter, -7, Int64(2**40), 0.5, True, pdl=True, shared=1024
    )
    assert handle == "handle"
    assert args[:4] == [tensor.data_ptr(), tensor.data_ptr(), -7, 2**40]
    assert isinstance(args[4], ctypes.c_float) and args[4].value == 0.5
    assert args[5] is True
    assert (config.grid, config.block) == ((3, 2, 1), (128, 1, 1))
    assert config.shmem_size == 1024
    assert config.programmatic_stream_serialization


def test_a_device_without_dependent_launch_gets_a_plain_one(
    packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "supports_pdl", lambda: False)
    assert not packed(1, 32, pdl=True)[1].programmatic_stream_serialization


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_int_that_would_overflow_is_rejected(packed: Any, value: int) -> None:
    with pytest.raises(OverflowError, match="Int64"):
        packed(1, 32, value)


@pytest.mark.parametrize("value", ["text", None, [1], b"bytes"])
def test_an_argument_of_another_type_is_refused(packed: Any, value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        packed(1, 32, value)


def test_a_stream_is_entered_once_per_thread(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never called CUDA has no context: the first launch makes torch's current."""
    entered: list[int] = []
    monkeypatch.setattr(launch, "_here", launch.threading.local())
    monkeypatch.setattr(launch, "_enter", entered.append)
    packed(1, 32)
    packed(1, 32)
    assert entered == [0]
    thread = launch.threading.Thread(target=packed, args=(1, 32))
    thread.start()
    thread.join()
    assert entered == [0, 0]


# ---------------------------------------------------------------- operands


def test_a_wrong_operand_is_described() -> None:
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 8\]; .*float16 \[2, 8\]"):
        check("x", torch.zeros(2, 8), (2, 8), torch.float16)
    with pytest.raises(ValueError, match=r"x is .*\[2, 8\]; expected .*\[2, 4\]"):
        check("x", torch.zeros(2, 8), (2, 4), torch.float32)
    with pytest.raises(ValueError, match=r"\[8, 2\], not contiguous"):
        check("x", torch.zeros(2, 8).t(), (8, 2), torch.float32)
    with pytest.raises(ValueError, match="x is on cpu"):
        check_memory("x", torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"x is torch.int8; allowed: torch.int32, torch.int64"):
        name_of(launch.ID_TYPES, "x", torch.zeros(1, dtype=torch.int8))


def test_a_row_is_whole_vectors() -> None:
    assert vectors_in("hidden", 576, torch.bfloat16) == 72
    assert vectors_in("hidden", 4, torch.float32) == 1
    with pytest.raises(ValueError, match=r"hidden: 4 values of torch.bfloat16 .* multiples of 8"):
        vectors_in("hidden", 4, torch.bfloat16)


def _rope_write_kv(**changes: torch.Tensor) -> None:
    """With operands on the CPU, but for that and the changes as they should be."""
    operands = {
        "qkv": torch.zeros(3, 8 * 64),
        "positions": torch.zeros(3, dtype=torch.int64),
        "cos": torch.zeros(10, 64),
        "sin": torch.zeros(10, 64),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
        "k_cache": torch.zeros(5, 16, 2, 64),
        "v_cache": torch.zeros(5, 16, 2, 64),
        "q_out": torch.zeros(3, 4, 64),
        "q_weight": torch.ones(64),
        "k_weight": torch.ones(64),
        **changes,
    }
    rope = RopeInputs(
        *(operands[name] for name in ("positions", "slot_mapping", "cos", "sin")),
    )
    rope_write_kv(
        operands["qkv"],
        rope,
        PagedKV(operands["k_cache"], operands["v_cache"]),
        q_out=operands["q_out"],
        qk_norm=QkNorm(operands["q_weight"], operands["k_weight"]),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(3, 7 * 64)}, r"qkv .* \[3, 512\]"),
        ({"q_out": torch.zeros(3, 64, 4).transpose(1, 2)}, "q_out"),
        ({"k_cache": torch.zeros(5, 16, 2, 32)}, r"k_cache .*\[5, 16, 2, 64\]"),
        ({"v_cache": torch.zeros(5, 16, 2, 64).half()}, "v_cache is torch.float16"),
        ({"v_cache": torch.zeros(5, 2, 16, 64).transpose(1, 2)}, "strides"),
        ({"cos": torch.zeros(10, 64).bfloat16()}, "cos is torch.bfloat16"),
        ({"sin": torch.zeros(9, 64)}, "sin"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions is torch.int32"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, r"slot_mapping .*\[4\].*\[3\]"),
        (
            {name: torch.zeros(4, dtype=torch.int64) for name in ("positions", "slot_mapping")},
            "positions of 4 tokens .* qkv has 3 tokens",
        ),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, r"slot_mapping .*\[4\]"),
        ({"cos": torch.zeros(10, 32), "sin": torch.zeros(10, 32)}, "tables of 32 values; qkv has"),
        ({"k_weight": torch.zeros(32)}, r"k_weight .*\[64\]"),
        (
            {name: torch.zeros(5, 16, 2, 64, dtype=torch.int8) for name in ("k_cache", "v_cache")},
            "k_cache is of torch.int8: scales belong to caches of 8 bits",
        ),
    ],
)
def test_rope_refuses_what_its_kernel_would_read_wrongly(
    changes: dict[str, torch.Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("inflight_kernels.runtime.launch", "inflight_kernels.ops.rope"):
        monkeypatch.setattr(f"{module}.check_memory", lambda *args, **options: None)
    with pytest.raises(ValueError, match=message):
        _rope_write_kv(**changes)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, ids: rms_norm(x, x[0], 1e-5, out=x),
        lambda x, ids: silu_mul(x, out=x[:, :16].contiguous()),
        lambda x, ids: gelu_tanh_mul(x, out=x[:, :16].contiguous()),
        lambda x, ids: gelu_tanh(x, out=x),
        lambda x, ids: relu2(x, out=x),
        lambda x, ids: add_norm(Addend(x), x, NormParams(1e-5), out=x, norm=Affine(x[0])),
        lambda x, ids: norm_columns(x, 0, x[0], 1e-5),
        lambda x, ids: scale_cap(x, 0.5, 30.0),
        lambda x, ids: embedding(ids, x, out=x),
        lambda x, ids: copy_blocks(x.view(2, 1, 1, 32), ids, ids),
        lambda x, ids: clear_slots(x.view(2, 1, 1, 32), ids),
        lambda x, ids: _rope_write_kv(),
    ],
    ids=[
        "rms_norm",
        "silu_mul",
        "gelu_tanh_mul",
        "gelu_tanh",
        "relu2",
        "add_norm",
        "norm_columns",
        "scale_cap",
        "embedding",
        "copy_blocks",
        "clear_slots",
        "rope_write_kv",
    ],
)
def test_a_tensor_on_the_cpu_never_reaches_a_kernel(call: Any) -> None:
    with pytest.raises(ValueError, match="is on cpu; it must be on a CUDA device"):
        call(torch.zeros(2, 32), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: add_norm(Addend(x), x.half(), NormParams(1e-5), out=x, norm=None), "total is"),
        (
            lambda x: add_norm(Addend(x, Affine(x[0, :16])), x, NormParams(1e-5), out=x, norm=None),
            r"addend.norm.weight .*\[32\]",
        ),
        (
            lambda x: add_norm(
                Addend(x), x, NormParams(1e-5), out=x, norm=Affine(x[0], x[0].half())
            ),
            "norm.bias is",
        ),
        (lambda x: norm_columns(x, 20, x[0, :16], 1e-5), "columns 20 to 36 of 32"),
        (lambda x: scale_cap(x.half(), 1.0, 0.0), "x is torch.float16"),
    ],
    ids=["total", "norm of the addend", "bias", "columns", "logits"],
)
def test_operands_of_the_residual_stream_are_checked(
    call: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight_kernels.runtime.launch.check_memory", lambda *args, **options: 0)
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 32))


# ---------------------------------------------------------------- grids


@pytest.mark.parametrize(
    ("vectors", "sum_type"),
    [(count, torch.bfloat16) for count in (1, 31, 72, 512, 513, 1024, 1792, 2048, 4096)]
    + [(count, torch.float32) for count in (1, 31, 72, 512, 513, 1024, 1792, 2048)],
)
@pytest.mark.parametrize("fewest", [1, 2])
def test_a_norms_block_covers_its_row_once(
    vectors: int, sum_type: torch.dtype, fewest: int
) -> None:
    per_thread, threads = block_of(vectors, vectors * 8, sum_type, fewest)
    assert threads % 32 == 0 and threads <= 512
    assert per_thread * threads >= vectors
    assert per_thread == fewest or per_thread // 2 * 512 < vectors
    assert per_thread * threads // 32 <= 128, "sums of 32 vectors, as norm_row.cuh has room for"
    assert per_thread <= (8 if sum_type == torch.bfloat16 else 4)  # as it is compiled


@pytest.mark.parametrize(("sum_type", "vectors"), [(torch.bfloat16, 4097), (torch.float32, 2049)])
def test_a_row_that_no_block_holds_is_refused(sum_type: torch.dtype, vectors: int) -> None:
    with pytest.raises(ValueError, match=str(MAX_HIDDEN_BYTES)):
        block_of(vectors, vectors * 8, sum_type)


@pytest.mark.parametrize("tokens", [1, 511, 512, 8192])
@pytest.mark.parametrize(("heads", "head_dim"), [(48, 128), (80, 128), (9, 64), (3, 96), (20, 256)])
def test_a_ropes_block_is_whole_warps_of_whole_heads(
    tokens: int, heads: int, head_dim: int
) -> None:
    group = _group(head_dim, torch.bfloat16)
    threads = _threads(tokens, heads, group)
    assert 32 <= threads <= 512 and threads % 32 == 0 and 32 % group == 0
    assert group * 16 >= head_dim


@pytest.mark.parametrize("head_dim", [8, 72, 520])
def test_a_head_that_is_not_whole_vectors_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match="multiples of 16 up to 512"):
        _group(head_dim, torch.bfloat16)


# ---------------------------------------------------------------- launches that are recorded


def test_a_recording_notes_each_kernel_once_in_the_order_of_first_launches() -> None:
    x = torch.empty(4, 256, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, device="meta")
    with record_launches() as launched:
        for _ in range(2):
            rms_norm(x, weight, 1e-6, out=torch.empty_like(x))
            silu_mul(x, out=x[:, :128].contiguous())
    assert list(launched) == [
        ("norm", "rms_norm<__nv_bfloat16, __nv_bfloat16, 1, false>"),
        ("activation", "silu_mul<__nv_bfloat16>"),
    ]


def test_operands_without_memory_are_refused_where_nothing_is_recorded() -> None:
    x = torch.empty(4, 256, dtype=torch.bfloat16, device="meta")
    for _ in range(2):
        with pytest.raises(ValueError, match="x is on meta; it must be on a CUDA device"):
            silu_mul(x, out=x[:, :128].contiguous())
        with record_launches():
            silu_mul(x, out=x[:, :128].contiguous())


def test_a_recording_refuses_operands_on_the_host() -> None:
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    with record_launches() as launched, pytest.raises(ValueError, match="x is on cpu"):
        silu_mul(x, out=x[:, :128].contiguous())
    assert not launched


def test_kernels_of_a_recording_are_forgotten_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those from before it are not taken within, or launches there would go unnoticed."""

    def compiled(*args: Any, **settings: Any) -> Any:
        raise CompileError("asked for")

    monkeypatch.setattr(launch, "_architecture", lambda: "sm_90a")
    monkeypatch.setattr(launch, "cubin", compiled)
    with record_launches() as outer:
        launch.kernel("activation", "f")(1, 1)
        with pytest.raises(RuntimeError, match="in the middle"), record_launches() as inner:
            launch.kernel("activation", "f")(1, 1)
            raise RuntimeError("in the middle")
        launch.kernel("activation", "g")(1, 1)
    assert list(inner) == [("activation", "f")]
    assert list(outer) == [("activation", "f"), ("activation", "g")]
    with pytest.raises(CompileError, match="asked for"):
        launch.kernel("activation", "f")
