"""Invalid operands that latent attention rejects before any launch, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import recorded_launches
from inflight_kernels.ops.latent.attention import (
    LatentMetadata,
    LatentParams,
    attend,
    plan,
    workspace_size,
)
from inflight_kernels.ops.latent.operands import DTYPE, KEY, RANK, LatentNorm, Projections
from inflight_kernels.ops.latent.products import (
    MAX_TOKENS,
    absorb,
    absorb_and_write,
    prepare,
    project_values,
)
from inflight_kernels.ops.latent.rows import write_latent
from inflight_kernels.ops.rope import RopeInputs
from inflight_kernels.runtime.recording import Launched, record_launches

HEADS, NOPE, VALUE = 16, 128, 128


@pytest.fixture(autouse=True, params=[True, False], ids=["hopper", "ampere"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    shared_kib = 228 if request.param else 164
    with recorded_launches.recording(
        monkeypatch, hopper=request.param, shared_kib=shared_kib
    ) as found:
        yield found


def empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


# ---------------------------------------------------------------- attention


def metadata(
    q_lens: list[int], num_bytes: int, *, planned: bool = False, **settings: Any
) -> LatentMetadata:
    count = len(q_lens)
    return LatentMetadata(
        LatentParams(HEADS, 1.0, settings.pop("batch_invariant", False)),
        empty(count + 1, dtype=torch.int32),
        empty(count, dtype=torch.int32),
        empty(count, 4, dtype=torch.int32),
        sum(q_lens),
        empty(num_bytes, dtype=torch.uint8),
        planned=planned,
        **settings,
    )


def size(q_lens: list[int], max_q_len: int | None = None, batch_invariant: bool = False) -> int:
    return workspace_size(len(q_lens), sum(q_lens), HEADS, max_q_len, batch_invariant)


def run(
    step: LatentMetadata,
    *,
    q: Tensor | None = None,
    cache: Tensor | None = None,
    out: Tensor | None = None,
    history_ready: bool = False,
) -> None:
    attend(
        empty(step.num_tokens, HEADS, KEY) if q is None else q,
        empty(4, 16, 1, KEY) if cache is None else cache,
        step,
        empty(step.num_tokens, HEADS, RANK) if out is None else out,
        history_ready=history_ready,
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("q_lens", [[1], [1] * 9, [5] * 3, [700], [1, 300]], ids=str)
def test_a_workspace_is_refused_if_it_is_a_byte_too_small_for_the_step(
    q_lens: list[int], batch_invariant: bool
) -> None:
    options = {"max_q_len": max(q_lens), "batch_invariant": batch_invariant}
    needed = metadata(q_lens, size(q_lens, **options), **options).parts[-1].end
    assert needed <= size(q_lens, **options) <= size(q_lens, None, batch_invariant)
    with pytest.raises(ValueError, match=f"workspace has {needed - 1} bytes; .* needs {needed}"):
        metadata(q_lens, needed - 1, **options)
    with record_launches() as found:
        run(metadata(q_lens, needed, **options))
    assert next(stem for stem, _ in found) == "attention_plan"
    assert {stem for stem, _ in found} == {"attention_plan", "latent_attention"}


def test_a_planned_step_is_not_planned_again() -> None:
    step = metadata([1, 300], size([1, 300]), planned=True)
    with record_launches() as found:
        run(step, history_ready=True)
    assert {stem for stem, _ in found} == {"latent_attention"}
    assert len(found) == 2, "decodes and prompts"
    with record_launches() as found:
        plan(step)
    assert {stem for stem, _ in found} == {"attention_plan"}


def test_a_step_without_chunks_launches_nothing(launched: Launched) -> None:
    assert workspace_size(0, 0, HEADS) == 0
    step = LatentMetadata(
        LatentParams(HEADS, 1.0),
        empty(1, dtype=torch.int32),
        empty(0, dtype=torch.int32),
        empty(0, 4, dtype=torch.int32),
        0,
        empty(0, dtype=torch.uint8),
    )
    plan(step)
    run(step)
    assert not launched


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_caches_of_8_bits_are_refused_by_name(dtype: torch.dtype, launched: Launched) -> None:
    with pytest.raises(ValueError, match=f"kv_dtype is {dtype}; latent attention supports None"):
        LatentParams(HEADS, 1.0, kv_dtype=dtype)
    step = metadata([1], size([1]))
    with pytest.raises(ValueError, match=f"latent cache is {dtype}; .* no cache of 8 bits"):
        run(step, cache=empty(4, 16, 1, KEY, dtype=dtype))
    assert not launched


def test_operands_of_other_shapes_are_refused(launched: Launched) -> None:
    for heads, scale in ((0, 1.0), (16, 0.0), (16, float("nan"))):
        with pytest.raises(ValueError, match=f"num_heads {heads}, scale {scale}"):
            LatentParams(heads, scale)
    step = metadata([1, 1], size([1, 1]))
    for message, operands in (
        (r"q is \[1, 16, 576\]; expected \[2, 16, 576\]", {"q": empty(1, HEADS, KEY)}),
        (r"q is \[2, 8, 576\]", {"q": empty(2, 8, KEY)}),
        ("q is torch.float16", {"q": empty(2, HEADS, KEY, dtype=torch.float16)}),
        ("heads of q have stride 584", {"q": empty(2, HEADS, 584)[..., :KEY]}),
        ("latent cache is torch.float16", {"cache": empty(4, 16, 1, KEY, dtype=torch.float16)}),
        (r"latent cache is .* \[4, 16, 1, 512\]", {"cache": empty(4, 16, 1, RANK)}),
        ("slots of the latent cache", {"cache": empty(4, 16, 2, KEY)[:, :, :1]}),
        ("block_size is 8; allowed: 16, 32, 64", {"cache": empty(4, 8, 1, KEY)}),
        ("out is .*; expected", {"out": empty(2, HEADS, KEY)}),
        ("history_ready requires", {"history_ready": True}),
    ):
        with pytest.raises(ValueError, match=message):
            run(step, **operands)  # type: ignore[arg-type]
    assert not launched


def test_tokens_of_queries_and_blocks_of_the_cache_may_be_strided(launched: Launched) -> None:
    step = metadata([1, 1], size([1, 1]))
    run(step, q=empty(2, 20, KEY)[:, :HEADS], cache=empty(4, 3, 16, 1, KEY)[:, 1])
    assert launched


# ---------------------------------------------------------------- around it


class Layer:
    """Operands of the kernels before attention, for some tokens."""

    def __init__(self, tokens: int) -> None:
        self.projections = Projections(empty(tokens, HEADS, NOPE + 64), empty(tokens, KEY))
        self.norm = LatentNorm(empty(RANK, dtype=torch.float32))
        self.rope = self.angles(64)
        self.cache = empty(4, 16, 1, KEY)
        self.queries = empty(tokens, HEADS, KEY)
        self.k_up = empty(HEADS, NOPE, RANK)

    def angles(self, columns: int) -> RopeInputs:
        tokens = len(self.projections.q)
        return RopeInputs(
            *(empty(tokens, dtype=torch.int64) for _ in range(2)),
            *(empty(9, columns, dtype=torch.float32) for _ in range(2)),
        )

    def write(self) -> None:
        write_latent(self.projections, self.norm, self.rope, self.cache, queries=self.queries)

    def absorb_and_write(self) -> None:
        absorb_and_write(
            self.projections, self.k_up, self.norm, self.rope, self.cache, queries=self.queries
        )


def test_few_tokens_take_one_launch_before_attention_and_many_two(launched: Launched) -> None:
    for tokens, invariant, stems in (
        (1, False, ["latent_products"]),
        (MAX_TOKENS, False, ["latent_products"]),
        (MAX_TOKENS + 1, False, ["latent_rows"]),  # and a product by cuBLAS
        (MAX_TOKENS + 1, True, ["latent_products"]),
    ):
        layer = Layer(tokens)
        with record_launches() as found:
            prepare(
                layer.projections,
                layer.k_up,
                layer.norm,
                layer.rope,
                layer.cache,
                queries=layer.queries,
                batch_invariant=invariant,
            )
        assert [stem for stem, _ in found] == stems
    Layer(0).write()
    Layer(0).absorb_and_write()
    assert not launched


@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_other_shapes_are_refused(fused: bool, launched: Launched) -> None:
    for message, name, value in (
        ("kv_a is", "projections", Projections(empty(2, HEADS, NOPE + 64), empty(2, RANK))),
        ("kv_a is", "projections", Projections(empty(2, HEADS, NOPE + 64), empty(3, KEY))),
        ("q is", "projections", Projections(empty(2, HEADS, 192).half(), empty(2, KEY))),
        ("strides", "projections", Projections(empty(2, HEADS, 192), empty(2, 580)[:, :KEY])),
        ("tables of 128 values", "rope", Layer(2).angles(128)),
        ("positions of 3 tokens", "rope", Layer(3).rope),
        ("latent cache is torch.int8", "cache", empty(4, 16, 1, KEY, dtype=torch.int8)),
        ("queries is", "queries", empty(2, HEADS, RANK)),
    ):
        layer = Layer(2)
        setattr(layer, name, value)
        with pytest.raises(ValueError, match=message):
            layer.absorb_and_write() if fused else layer.write()
    with pytest.raises(ValueError, match="the norm's weight is"):
        LatentNorm(empty(KEY, dtype=torch.float32))
    assert not launched


def test_matrices_of_other_shapes_are_refused(launched: Launched) -> None:
    layer = Layer(2)
    q, queries = layer.projections.q, layer.queries
    with pytest.raises(ValueError, match="k_up is"):
        absorb(q, empty(HEADS, RANK, NOPE), queries=queries)
    with pytest.raises(ValueError, match="96 columns without position; allowed: 128, 192"):
        absorb(empty(2, HEADS, 96 + 64), empty(HEADS, 96, RANK), queries=queries)
    attended = empty(2, HEADS, RANK)
    with pytest.raises(ValueError, match="v_up is"):
        project_values(attended, empty(8, VALUE, RANK), out=empty(2, HEADS, VALUE))
    with pytest.raises(ValueError, match="v must be a multiple of 64"):
        project_values(attended, empty(HEADS, 96, RANK), out=empty(2, HEADS, 96))
    with pytest.raises(ValueError, match="out is"):
        project_values(attended, empty(HEADS, VALUE, RANK), out=empty(2, HEADS * VALUE))
    assert not launched


def test_products_of_many_tokens_are_those_of_cublas_unless_invariant(launched: Launched) -> None:
    v_up = empty(HEADS, VALUE, RANK)
    for tokens, invariant, own in (
        (MAX_TOKENS, False, True),
        (MAX_TOKENS + 1, False, False),
        (MAX_TOKENS + 1, True, True),
    ):
        with record_launches() as found:
            project_values(
                empty(tokens, HEADS, RANK),
                v_up,
                out=empty(tokens, HEADS, VALUE),
                batch_invariant=invariant,
            )
        assert bool(found) == own
