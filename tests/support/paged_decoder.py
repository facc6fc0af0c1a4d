"""The CPU's decoder with a paged KV cache of its own, for tests of single forward passes."""

from __future__ import annotations

import itertools

import numpy as np
import torch

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import KVDtype
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.registry import read_spec
from inflight_kernels.torch_ops.transformer import AttentionPlan

BLOCK_SIZE = 4


def load(
    checkpoint: Checkpoint,
    max_len: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: KVDtype = "auto",
) -> Decoder:
    """The weights dequantised."""
    spec = read_spec(checkpoint)
    return Decoder(
        checkpoint, spec, dtype, max_len, lambda what, done: None, "none", kv_cache_dtype
    )


class Paged:
    """A model with a cache; `run` computes some tokens of some sequences and scores every row."""

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype = torch.float32,
        kv_dtype: KVDtype | None = None,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.cache = tiny.make_cache(model.spec, 64, BLOCK_SIZE, dtype, kv_dtype=kv_dtype)

    def run(
        self,
        *parts: tuple[list[int], int, int, list[int]],
        sampled: list[int] | None = None,
        num_layers: int | None = None,
    ) -> list[torch.Tensor]:
        """Each part: (tokens, start, end, blocks). Returns logits [end - start, V] of each; of the
        sampled rows of all parts together where these are given."""
        ids, positions, slots, starts = [], [], [], [0]
        tables = np.zeros((len(parts), max(len(part[3]) for part in parts)), np.int64)
        for i, (tokens, start, end, blocks) in enumerate(parts):
            tables[i, : len(blocks)] = blocks
            ids += tokens[start:end]
            positions += range(start, end)
            slots += [
                blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)
            ]
            starts.append(starts[-1] + end - start)
        ends = np.array([part[2] for part in parts])
        plan = AttentionPlan(tables, np.array(starts), ends, BLOCK_SIZE, self.dtype)
        with torch.inference_mode():
            logits = self.model.forward(
                torch.tensor(ids),
                torch.tensor(positions),
                [TableInputs(torch.tensor(slots), plan)],
                torch.arange(len(ids)) if sampled is None else torch.tensor(sampled).long(),
                self.cache,
                num_layers,
            )
        if sampled is not None:
            return [logits]
        return [logits[a:b] for a, b in itertools.pairwise(starts)]


def blocks_for(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + -(-num_tokens // BLOCK_SIZE)))
