"""The decoder of GPUs on a tiny model of any family, without a GPU: the kernels' definitions are in
the kernels' place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import host_kernels
import mixed_step
from inflight.checkpoint.locate import Checkpoint
from inflight.models import gpu_support
from inflight.models.decoder_cuda import Decoder
from inflight_kernels.ops.attention import operands

MAX_LEN = 64
TEXTS = [
    [(7 * chunk + 11 * position) % 160 for position in range(end)]
    for chunk, (_, end) in enumerate(mixed_step.CHUNKS[:2])  # the third has a history of noise
]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions of kernels take heads of any width."""
    host_kernels.install(monkeypatch)
    monkeypatch.setattr(gpu_support, "GPU_HEAD_DIMS", (16, 32))
    monkeypatch.setattr(gpu_support, "_latent_obstacles", lambda latent: [])
    monkeypatch.setattr(operands, "check_heads", lambda *heads: None)


def decoder(checkpoint: Checkpoint) -> Decoder:
    return mixed_step.make_model(checkpoint, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def check(ours: Decoder, model: Any) -> None:
    """Logits and features are those of transformers, of all rows and of some."""
    layers = (0, 1, ours.spec.num_layers - 1)
    ours.set_aux_layers(layers)
    logits, _ = mixed_step.run(ours, mixed_step.EVERY_ROW)
    features = ours.features
    assert features is not None
    first = 0
    for text in TEXTS:
        # Further tokens, which no earlier one sees, make it longer than the trained context.
        found = model(torch.tensor([text + [0] * 16]), output_hidden_states=True)
        rows = slice(first, first + len(text))
        expected = found.logits[0, : len(text)]
        spread = min(1.0, float(expected.std()))
        torch.testing.assert_close(logits[rows], expected, rtol=2e-4, atol=2e-4 * spread)
        states = [found.hidden_states[layer][0, : len(text)] for layer in layers]
        torch.testing.assert_close(features[rows], torch.cat(states, -1), rtol=2e-4, atol=2e-4)
        first += len(text)
    sampled = mixed_step.SAMPLED[0]
    some, _ = mixed_step.run(ours, sampled)
    torch.testing.assert_close(some, logits[sampled], rtol=1e-5, atol=1e-5)
