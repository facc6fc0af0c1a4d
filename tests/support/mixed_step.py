"""One step of a GPU model with chunks of three texts, on any device."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.core.step_size import StepSize
from inflight.models.decoder_cuda import Decoder, DecoderSettings
from inflight.models.layers.attention import ForwardInputs, TableInputs
from inflight.models.registry import read_spec

# The beginning of one text, all of one, one token of another.
CHUNKS = [(0, 9), (0, 13), (5, 6)]
NUM_TOKENS = 23
EVERY_ROW = list(range(NUM_TOKENS))

SAMPLED = [[8, 21, 22], [22], [0, 9, 10, 22], [], EVERY_ROW]
"""Rows of the step that get logits: as in prefill, one, scored prompts, none, all."""

_BLOCK_SIZE, _BLOCKS_EACH = 16, 1
_MAX_TOKENS = 40
_MAX_ROWS = 32


def make_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool = False,
    quantization: Quantization = "auto",
) -> Decoder:
    settings = DecoderSettings(
        dtype, device, 64, _MAX_TOKENS, _MAX_ROWS, batch_invariant, quantization
    )
    return Decoder(checkpoint, read_spec(checkpoint), settings, lambda what, done: None)


@torch.inference_mode()
def run(model: Decoder, sampled: list[int], num_layers: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits of the sampled rows, and the cache after the step."""
    device, dtype = model.logits.device, model.settings.dtype
    cache = tiny.make_cache(model.spec, len(CHUNKS) * _BLOCKS_EACH, _BLOCK_SIZE, dtype, device)
    for data in cache.data:
        earlier = torch.linspace(-1, 1, data.numel(), device=device)
        data.copy_(earlier.view(data.shape))
    model.logits.fill_(torch.nan)
    rows = _rows(sampled, device)
    size = StepSize(NUM_TOKENS, len(CHUNKS), len(sampled), 13)
    model.forward(rows, size, cache, num_layers)
    return model.logits[: len(sampled)].clone(), torch.cat([data.flatten() for data in cache.data])


def _rows(sampled: list[int], device: torch.device) -> ForwardInputs:
    places = [
        (chunk, position)
        for chunk, (start, end) in enumerate(CHUNKS)
        for position in range(start, end)
    ]
    lengths = (end - start for start, end in CHUNKS)

    def ints(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardInputs(
        token_ids=ints([(7 * chunk + 11 * position) % 160 for chunk, position in places]),
        positions=ints([position for _, position in places]),
        query_start=ints([0, *itertools.accumulate(lengths)], torch.int32),
        seq_lens=ints([end for _, end in CHUNKS], torch.int32),
        tables=(
            TableInputs(
                ints([_BLOCK_SIZE * chunk + position for chunk, position in places]),
                ints(list(range(len(CHUNKS))), torch.int32).view(-1, _BLOCKS_EACH),
            ),
        ),
        sample_rows=ints([*sampled, *[0] * (_MAX_ROWS - len(sampled))]),
    )
