"""The kernels of a step replaced by their torch definitions, to run the GPU runner on the CPU.

With `install` a `CudaRunner` runs without a GPU: its launches execute immediately and in order, in
float32, and a captured CUDA graph is a call that is repeated. The kernels themselves are tested on
a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import host_attention
import host_experts
import host_latent
import host_linear
from host_sampling import count_output_tokens, mark_prompt_tokens, sample, top_logprobs
from inflight.execution import cuda_runner, device_steps, step_timing
from inflight.execution.batch import device_batch
from inflight.execution.drafters import device_passes
from inflight.models import cuda_placement, decoder_cuda, eagle3_cuda
from inflight.models.layers import attention, residual
from inflight_kernels.ops import drafting, sampling
from inflight_kernels.ops.batch_state import NO_DRAFT, NOT_DRAFTED, BatchState, Step
from inflight_kernels.ops.drafting import DraftLimits, DraftPass, MatchLimits
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.residual_norm import Addend, Affine, NormParams
from inflight_kernels.torch_ops import transformer

# Words of a row's parameters.
_SLOT, _TYPICAL_P, _TOP_N_SIGMA, _EPSILON_CUTOFF, _XTC_PROBABILITY = (
    sampling.ROW_PARAMS.fields[name][1] // 4  # type: ignore[index]
    for name in ("slot", "typical_p", "top_n_sigma", "epsilon_cutoff", "xtc_probability")
)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the definitions in the kernels' places."""
    host_torch = HostTorch()
    for module in (cuda_runner, device_passes):
        monkeypatch.setattr(module, "torch", host_torch)
        monkeypatch.setattr(module, "capture_graph", Recorded)
    monkeypatch.setattr(cuda_runner, "_DTYPE", torch.float32)
    monkeypatch.setattr(cuda_runner, "OnStream", HostStream)
    monkeypatch.setattr(step_timing, "torch", host_torch)
    monkeypatch.setattr(step_timing, "_TIMINGS", 1)  # HostCuda's events always measure the same
    monkeypatch.setattr(cuda_runner, "find_kernels", lambda *engine: [])
    monkeypatch.setattr(cuda_runner, "precompile_kernels", lambda kernels: None)
    state = _Ops(upload, write_tables, write_row_params, begin_step, end_step)
    monkeypatch.setattr(device_steps, "batch_state", state)
    monkeypatch.setattr(device_batch, "batch_state", state)
    monkeypatch.setattr(device_batch, "cache", _Ops(copy_blocks, MAX_PAIRS=192))
    for op in (begin_drafting, advance_drafting, next_tokens, draft_ngram):
        monkeypatch.setattr(drafting, op.__name__, op)
    monkeypatch.setattr(sampling, "sample", sample)
    monkeypatch.setattr(sampling, "top_logprobs", top_logprobs)
    monkeypatch.setattr(sampling, "count_output_tokens", count_output_tokens)
    monkeypatch.setattr(sampling, "mark_prompt_tokens", mark_prompt_tokens)
    for model in (decoder_cuda, residual, eagle3_cuda, attention):
        monkeypatch.setattr(model, "embedding", embedding)
    monkeypatch.setattr(decoder_cuda, "_ACTIVATIONS", _ACTIVATIONS)
    for op in (norm_columns, scale_cap):
        monkeypatch.setattr(decoder_cuda, op.__name__, op)
    monkeypatch.setattr(eagle3_cuda, "norm_columns", norm_columns)
    monkeypatch.setattr(residual, "add_norm", add_norm)
    for model in (residual, eagle3_cuda):
        monkeypatch.setattr(model, "rms_norm", rms_norm)
    monkeypatch.setattr(cuda_placement, "CudaLinear", host_linear.HostLinear)
    monkeypatch.setattr(cuda_placement, "CudaScaledLinear", host_linear.HostScaledLinear)
    monkeypatch.setattr(cuda_placement, "CudaWeightOnlyLinear", host_linear.HostWeightOnlyLinear)
    monkeypatch.setattr(cuda_placement, "CudaGroupedLinear", host_linear.HostGroupedLinear)
    monkeypatch.setattr(cuda_placement, "can_multiply", lambda n, k: True)
    monkeypatch.setattr(decoder_cuda, "is_hopper", lambda: True)
    host_attention.install(monkeypatch)
    host_experts.install(monkeypatch, host_linear.HostLinear)
    host_latent.install(monkeypatch, host_attention.HostRopeInputs, norm_columns)


class _Ops:
    """A module's place."""

    def __init__(self, *ops: Callable[..., Any], **others: Any) -> None:
        self.__dict__.update({op.__name__: op for op in ops} | others)


class Recorded:
    def __init__(self, pool: object, launch: Callable[..., None], *args: Any) -> None:
        self.replay = lambda: launch(*args)


class HostTorch:
    """torch, whose only device is the CPU."""

    def __init__(self) -> None:
        self.cuda = HostCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *names: object) -> torch.device:
        return torch.device("cpu")

    def zeros(self, *shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        return torch.zeros(*shape, **settings)


class HostStream:
    """In the place of `OnStream`."""

    def __init__(self, stream: object) -> None:
        self._mode = torch.inference_mode()

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)


class HostCuda:
    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            pass

        def record(self, stream: object = None) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: object) -> float:
            return 1.0

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def Stream(self, device: object) -> None:
        return None

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def synchronize(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 2 << 30, 2 << 30

    def memory_reserved(self, device: object) -> int:
        return 0

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 0


# ---------------------------------------------------------------- the batch


def upload(source: Tensor, step: Tensor, *, pdl: bool) -> None:
    step.copy_(source)


def write_tables(places: Tensor, blocks: Tensor, tables: Tensor) -> None:
    tables.view(-1)[places.long()] = blocks


def write_row_params(slots: Tensor, news: Tensor, row_params: Tensor) -> None:
    row_params[slots.long()] = news


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    transformer.copy_blocks(cache, sources.long(), targets.long())


def begin_step(
    step: Step,
    state: BatchState,
    num_chunks: int,
    block_size: int,
    num_tokens: int = 0,
    num_rows: int = 0,
) -> None:
    if num_chunks == 1 and num_rows > 1:
        _trim(step, state)
    own_chunks, _, own_tokens, own_rows = step.header.tolist()
    state.seq_lens[own_chunks:num_chunks] = 0
    for table in state.by_table:
        table.slot_mapping[own_tokens:num_tokens] = -1
    state.token_ids[own_tokens:num_tokens] = 0
    state.positions[own_tokens:num_tokens] = 0
    state.sample_rows[own_rows:num_rows] = torch.arange(own_rows, max(own_rows, num_rows))
    state.sample_positions[own_rows:num_rows] = 0
    state.tail_starts[own_rows:num_rows] = state.tail_lengths[own_rows:num_rows] = 0
    state.count_slots[own_rows:num_rows] = -1
    state.step_row_params[own_rows:num_rows] = 0
    state.step_row_params[own_rows:num_rows, _SLOT] = -1
    for chunk in range(own_chunks):
        slot = int(step.slots[chunk])
        first, end_token = step.query_start[chunk : chunk + 2].tolist()
        start = int(step.starts[chunk])
        start = start if start >= 0 else int(state.last_positions[slot])
        for i, token in enumerate(step.tokens[first:end_token].tolist()):
            if token < 0:
                draft = int(state.drafts[slot, i - 1]) if i else int(state.last_tokens[slot])
                token = max(draft, 0)
            state.token_ids[first + i] = token
            state.positions[first + i] = start + i
            for table in state.by_table:
                block = int(table.tables[slot, (start + i) // block_size])
                assert block >= 0, "a block that the sequence has not"
                table.slot_mapping[first + i] = block * block_size + (start + i) % block_size
        end = start + end_token - first
        blocks = -(-end // block_size)
        for table in state.by_table:
            table.step_tables[chunk, :blocks] = table.tables[slot, :blocks]
        state.seq_lens[chunk] = end
        first_row, end_row = step.row_start[chunk : chunk + 2].tolist()
        for i in range(end_row - first_row):
            offset = end_token - first - (end_row - first_row) + i
            state.sample_rows[first_row + i] = first + offset
            state.sample_positions[first_row + i] = start + offset + 1
            state.step_row_params[first_row + i] = state.row_params[slot]
            if step.given[first_row + i] >= 0:
                state.step_row_params[first_row + i] = 0
                state.step_row_params[first_row + i, _SLOT] = -1
            scores = bool(step.given[first_row] >= 0)
            state.tail_starts[first_row + i] = end_token - (end_row - first_row) + 1
            state.tail_lengths[first_row + i] = 0 if scores else i


def _trim(step: Step, state: BatchState) -> None:
    """Take what follows the first missing draft off a step of one chunk."""
    length, num_rows = int(step.query_start[1]), int(step.row_start[1])
    of_drafts = range(max(1, length - num_rows + 1), length)
    drafts = state.drafts[int(step.slots[0])]
    missing = (i for i in of_drafts if step.tokens[i] < 0 and drafts[i - 1] < 0)
    spare = length - next(missing, length)
    for counts in (step.header[2:4], step.query_start[1:2], step.row_start[1:2]):
        counts -= spare


def end_step(step: Step, state: BatchState, num_chunks: int, pdl: bool = False) -> None:
    result = state.results[int(step.header[1])]
    for chunk in range(min(num_chunks, int(step.header[0]))):
        slot = int(step.sample_slots[chunk])
        first, end = step.row_start[chunk : chunk + 2].tolist()
        state.count_slots[first:end] = -1
        if slot < 0:
            result[3, chunk] = 0
            continue
        if step.given[first] >= 0:
            first = end - 1
        for row in range(first, end):
            token, position = int(state.chosen[row]), int(state.sample_positions[row])
            result[0, row] = token
            result[1, row] = state.logprobs[row : row + 1].view(torch.int32)[0]
            result[2, row] = state.statuses[row]
            state.count_slots[row] = state.row_params[slot, _SLOT]
            if state.history is not None and position < state.history.shape[1]:
                state.history[slot, position] = token
            fine = int(state.statuses[row]) == sampling.OK
            if row + 1 == end or not fine or token != state.token_ids[state.sample_rows[row] + 1]:
                break
        result[3, chunk] = row + 1 - first
        state.last_tokens[slot], state.last_positions[slot] = token, position
        if state.drafts.shape[1]:
            own = state.drafts[slot]
            verified = row - first
            result[5, chunk] = verified < len(own) and int(own[verified]) == token
            result[4, chunk] = NOT_DRAFTED if own[0] == NOT_DRAFTED else int((own >= 0).sum())
            state.drafts[slot] = NOT_DRAFTED


# ---------------------------------------------------------------- drafting


def draft_ngram(
    slots: Tensor,
    last_positions: Tensor,
    history: Tensor,
    drafts: Tensor,
    limits: MatchLimits,
    copies: Tensor | None = None,
    pdl: bool = False,
) -> None:
    from inflight_kernels.torch_ops.drafting import Copy, propose

    for slot in slots.tolist():
        if slot < 0:
            continue
        tokens = history[slot, : int(last_positions[slot]) + 1].numpy().astype(np.int64)
        count, copy = drafts.shape[1], None
        if copies is not None and copies[slot, 0] >= 0:
            start, position = copies[slot].tolist()
            copy = Copy(start, position + 1)
        found, copy = propose(
            tokens,
            limits.max_match,
            limits.min_match,
            count,
            per_match=limits.per_match,
            copy=copy,
        )
        drafts[slot] = torch.tensor(found + [NO_DRAFT] * (count - len(found)))
        if copies is not None and copy is not None:
            copies[slot] = torch.tensor([copy.start, copy.length - 1])


def begin_drafting(
    step: Step,
    state: BatchState,
    rows: DraftPass,
    num_rows: int,
    limits: DraftLimits,
    *,
    pdl: bool = False,
) -> None:
    block_size, first_scratch = limits.block_size, limits.first_scratch
    num_chunks, width = int(step.header[0]), state.tables.shape[1]
    num_drafts = state.drafts.shape[1]
    for chunk in range(num_rows):
        slot = int(step.sample_slots[chunk]) if chunk < num_chunks else -1
        last = int(state.last_positions[slot]) if slot >= 0 else 0
        if slot < 0 or last >= limits.max_positions:
            rows.row_params[chunk] = 0
            rows.row_params[chunk, _SLOT] = -1
            rows.rows[chunk] = 0
            _retire(rows, chunk)
            continue
        rows.row_params[chunk] = state.row_params[slot]
        rows.row_params[chunk, _SLOT] = -1
        rows.row_params[chunk, _TYPICAL_P] = torch.tensor([1.0]).view(torch.int32)[0]
        for word in (_TOP_N_SIGMA, _EPSILON_CUTOFF, _XTC_PROBABILITY):
            rows.row_params[chunk, word] = 0
        ended = False
        begin = (last - 1) // block_size + 1
        for block in range(begin, min((last + num_drafts - 1) // block_size + 1, width)):
            known = int(state.tables[slot, block])
            ended = ended or known < 0
            state.step_tables[chunk, block] = first_scratch + chunk if ended else known
        first = int(step.query_start[chunk])
        rows.slots[chunk] = slot
        rows.rows[chunk] = first + last - 1 - int(state.positions[first])
        rows.sample_positions[chunk] = last + 1
        _place(state, rows, chunk, int(state.last_tokens[slot]), last - limits.behind, block_size)


def advance_drafting(
    state: BatchState,
    rows: DraftPass,
    num_rows: int,
    limits: DraftLimits,
    *,
    pdl: bool = False,
) -> None:
    num_drafts = state.drafts.shape[1]
    for chunk in range(num_rows):
        slot = int(rows.slots[chunk])
        if slot < 0:
            continue
        position = int(rows.positions[chunk])
        index = position - int(state.last_positions[slot]) + limits.behind
        fine = int(rows.statuses[chunk]) == sampling.OK
        if fine and index < num_drafts:
            state.drafts[slot, index] = rows.chosen[chunk]
        if not fine or index + 1 >= num_drafts or position + 1 >= limits.max_positions:
            _retire(rows, chunk)
            continue
        rows.sample_positions[chunk] += 1
        _place(state, rows, chunk, int(rows.chosen[chunk]), position + 1, limits.block_size)


def next_tokens(
    step: Step,
    state: BatchState,
    token_ids: Tensor,
    num_chunks: int,
    num_tokens: int = 0,
    pdl: bool = False,
) -> None:
    assert state.history is not None
    own_chunks, _, own_tokens, _ = step.header.tolist()
    token_ids[own_tokens:num_tokens] = 0
    for chunk in range(own_chunks):
        first, end = step.query_start[chunk : chunk + 2].tolist()
        history = state.history[int(step.slots[chunk])]
        for i in range(first, end):
            follows = int(state.positions[i]) + 1
            token_ids[i] = history[follows] if follows < len(history) else 0


def _place(
    state: BatchState, rows: DraftPass, chunk: int, token: int, position: int, block_size: int
) -> None:
    block = int(state.step_tables[chunk, position // block_size])
    rows.token_ids[chunk] = token
    rows.positions[chunk] = position
    rows.slot_mapping[chunk] = block * block_size + position % block_size
    rows.seq_lens[chunk] = position + 1


def _retire(rows: DraftPass, chunk: int) -> None:
    rows.slots[chunk] = rows.slot_mapping[chunk] = -1
    rows.token_ids[chunk] = rows.positions[chunk] = 0
    rows.seq_lens[chunk] = 1


# ---------------------------------------------------------------- the model


def embedding(token_ids: Tensor, table: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    out.copy_(transformer.embedding(token_ids.long(), table))


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    *,
    out: Tensor | ScaledRows,
    total: Tensor | None = None,
    pdl: bool = False,
) -> None:
    normed, found = transformer.rms_norm(x, weight, eps, residual)
    if isinstance(out, ScaledRows):
        host_experts.quantize_rows(normed, out=out)
    else:
        out.copy_(normed)
    if total is not None:
        total.copy_(found)


def add_norm(
    addend: Addend,
    total: Tensor,
    params: NormParams,
    *,
    out: Tensor,
    norm: Affine | None,
    is_new: bool = False,
    pdl: bool = False,
) -> None:
    def normed(values: Tensor, affine: Affine | None) -> Tensor:
        if affine is None:
            return values
        if params.centered:
            return transformer.layer_norm(values, affine.weight, affine.bias, params.eps)[0]
        return transformer.rms_norm(values, affine.weight, params.eps)[0]

    added = addend.scale * normed(addend.x, addend.norm)
    total.copy_(added if is_new else total + added)
    out.copy_(normed(total, norm))


def norm_columns(x: Tensor, first: int, weight: Tensor, eps: float, *, pdl: bool = False) -> None:
    columns = x[:, first : first + len(weight)]
    columns.copy_(transformer.rms_norm(columns, weight, eps)[0])


def scale_cap(x: Tensor, scale: float, cap: float, *, pdl: bool = False) -> None:
    x.mul_(scale)
    if cap:
        x.copy_(transformer.soft_cap(x, cap))


def _activation(definition: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def activate(x: Tensor, *, out: Tensor, pdl: bool) -> None:
        out.copy_(definition(x))

    return activate


_ACTIVATIONS = {
    ("gelu_tanh", True): _activation(transformer.gelu_tanh_mul),
    ("gelu_tanh", False): _activation(transformer.gelu_tanh),
    ("relu2", False): _activation(transformer.relu2),
}
