"""The model's own logprobs at each position of a text, on the CPU in float32."""

from __future__ import annotations

import torch
from torch import Tensor

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.registry import read_spec
from inflight_kernels.torch_ops import transformer as ops

_BLOCK_SIZE = 16


class Teacher:
    """A model that is given the whole text.

    Args:
        checkpoint: of the model.
        max_len: of the texts.
        quantization: as in the settings; with `none` products are of 32 bits.
    """

    def __init__(
        self, checkpoint: Checkpoint, max_len: int, quantization: Quantization = "auto"
    ) -> None:
        self.spec = read_spec(checkpoint)
        self._model = Decoder(
            checkpoint,
            self.spec,
            torch.float32,
            max_len,
            lambda what, fraction: None,
            quantization,
        )
        self._num_blocks = -(-max_len // _BLOCK_SIZE)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, vocab_size]: row i scores what follows token i."""
        count = len(token_ids)
        cache = tiny.make_cache(self.spec, self._num_blocks, _BLOCK_SIZE)
        rows = torch.arange(count)
        plan = ops.AttentionPlan(
            torch.arange(self._num_blocks)[None].numpy(),
            torch.tensor([0, count]).numpy(),
            torch.tensor([count]).numpy(),
            _BLOCK_SIZE,
            torch.float32,
        )
        tables = [TableInputs(rows, plan)]
        found: Tensor = self._model.forward(torch.tensor(token_ids), rows, tables, rows, cache)
        return found

    def gaps(self, prompt: list[int], output: list[int]) -> list[float]:
        """How far each output token's logit is below the best one's; 0 where it is the best."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return (logits.amax(1) - chosen).tolist()
