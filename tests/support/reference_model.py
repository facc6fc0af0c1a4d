"""What the model itself says of each position of a text, on the CPU in float32."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.models import ARCHITECTURES
from inflight.models.config import read_config
from inflight.models.kv_cache import KVCache
from inflight_kernels.torch_ops import transformer as ops

_BLOCK_SIZE = 16


class Teacher:
    """A model that is given the whole text.

    Args:
        checkpoint: of the model.
        max_len: of the texts.
    """

    def __init__(self, checkpoint: Checkpoint, max_len: int) -> None:
        self.config = read_config(checkpoint)
        architecture = importlib.import_module(ARCHITECTURES[self.config.architecture])
        self._model = architecture.Model(
            checkpoint, self.config, torch.float32, max_len, lambda what, fraction: None
        )
        self._num_blocks = -(-max_len // _BLOCK_SIZE)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, vocab_size]: row i scores what follows token i."""
        count = len(token_ids)
        cache = KVCache(self.config, self._num_blocks, _BLOCK_SIZE, torch.float32)
        rows = torch.arange(count)
        plan = ops.plan_attention(
            torch.arange(self._num_blocks)[None].numpy(),
            torch.tensor([0, count]).numpy(),
            torch.tensor([count]).numpy(),
            _BLOCK_SIZE,
            torch.float32,
        )
        found: Tensor = self._model.forward(torch.tensor(token_ids), rows, rows, plan, rows, cache)
        return found

    def gaps(self, prompt: list[int], output: list[int]) -> list[float]:
        """How far each output token's logit is below the best one's; 0 where it is the best."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return (logits.amax(1) - chosen).tolist()
