"""An EAGLE-3 head on a GPU (see `models.eagle3`), in buffers that stay where they are.

As in `llama_cuda`, nothing is allocated in a pass and nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.config import GPU_HEAD_DIMS
from inflight.errors import ConfigError
from inflight.models.config import Eagle3Config
from inflight.models.eagle3 import UNDRAFTABLE, load_head
from inflight.models.kv_cache import KVCache
from inflight.models.layers import linear
from inflight.models.layers.attention import Attention, ForwardInputs
from inflight.models.layers.linear import INVARIANT_ROWS, Linear
from inflight.models.llama import LlamaWeights
from inflight.models.llama_cuda import GpuPlacement, layer_kernels_of
from inflight.models.loader import Progress
from inflight_kernels.ops import norm
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.norm import rms_norm


def kernels_of(
    config: Eagle3Config,
    dtype: torch.dtype,
    *,
    max_tokens: int,
    max_chunks: int,
    batch_invariant: bool = False,
) -> list[tuple[str, str]]:
    """Stem and name of the kernels that a head may launch.

    Args:
        config, dtype, max_tokens, max_chunks, batch_invariant: see `Model`.
    """
    hidden = config.layer.hidden_size
    fuse = (hidden, len(config.aux_layers) * config.target_hidden_size)
    found = layer_kernels_of(
        config.layer, dtype, max_tokens=max_tokens, batch_invariant=batch_invariant
    )
    for shape, out_dtype, most in (
        (fuse, dtype, max_tokens),
        ((config.draft_vocab_size, hidden), torch.float32, max_chunks),
    ):
        found += linear.kernels_of(shape, dtype, out_dtype, False, most, batch_invariant)
    return found + norm.kernels_of(hidden, dtype, dtype, adds=False)


class Model:
    """The weights of a head, and the buffers of its passes.

    Args:
        checkpoint: where its weights are.
        config: what `read_eagle3_config` said of it.
        target: the weights of the model that it drafts for.
        dtype: of weights and activations.
        max_len: the longest sequence.
        progress: called with ("weights", fraction).
        device: the GPU.
        max_tokens: T at most.
        max_chunks: of passes that draft, at most.
        max_rows: n at most.
        batch_invariant: a token's numbers do not depend on the other tokens of its pass.

    Attributes:
        hidden: [max_tokens or more, hidden_size], of the step that was followed last.
        drafted: [max_chunks or more, hidden_size], of the passes that draft.
        logits: [max_chunks or more, vocab_size] float32, of `score`.

    Raises:
        ConfigError: the weights are damaged or do not fit the config, or no kernel is there for
            the head's shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Eagle3Config,
        target: LlamaWeights,
        dtype: torch.dtype,
        max_len: int,
        progress: Progress,
        *,
        device: torch.device,
        max_tokens: int,
        max_chunks: int,
        max_rows: int,
        batch_invariant: bool = False,
    ) -> None:
        layer = config.layer
        if layer.head_dim not in GPU_HEAD_DIMS:
            raise ConfigError(
                f"{checkpoint.path}: head_dim {layer.head_dim} has no kernel on a GPU; allowed: "
                f"{', '.join(map(str, GPU_HEAD_DIMS))}"
            )
        self.config = config
        self._weights = load_head(checkpoint, config, target, GpuPlacement(dtype, device), device)
        progress("weights", 1.0)

        def buffer(width: int, num_rows: int, kind: torch.dtype = dtype) -> Tensor:
            rounded = -(-num_rows // INVARIANT_ROWS) * INVARIANT_ROWS
            return torch.zeros(rounded, width, dtype=kind, device=device)

        q_width = layer.num_heads * layer.head_dim
        kv_width = layer.num_kv_heads * layer.head_dim
        self.hidden = buffer(layer.hidden_size, max_tokens)
        self._embedded = buffer(layer.hidden_size, max_tokens)
        self._normed = buffer(layer.hidden_size, max_tokens)
        self._qkv = buffer(q_width + 2 * kv_width, max_tokens)
        self._attended = buffer(q_width, max_tokens)
        self._gate_up = buffer(2 * layer.intermediate_size, max_tokens)
        self._gated = buffer(layer.intermediate_size, max_tokens)
        self.drafted = buffer(layer.hidden_size, max_chunks)
        self._scores = buffer(config.draft_vocab_size, max_chunks, torch.float32)
        self.logits = self._scores
        if self._weights.targets is not None:
            self.logits = buffer(layer.vocab_size, max_chunks, torch.float32).fill_(UNDRAFTABLE)
        self._attention = Attention(
            layer,
            max_len,
            device,
            max_tokens=max_tokens,
            max_rows=max_rows,
            batch_invariant=batch_invariant,
        )
        self._linear = Linear(batch_invariant)

    def fuse(self, features: Tensor, num_tokens: int) -> None:
        """Hidden states of the target [T or more, len(aux_layers) * ...] -> `hidden`."""
        self._linear.product(features, self._weights.fuse, None, self.hidden, num_tokens)

    def take(self, rows: Tensor) -> None:
        """ForwardInputs [n] of `hidden` -> `drafted`."""
        embedding(rows, self.hidden, out=self.drafted[: len(rows)], pdl=True)

    def forward(
        self,
        rows: ForwardInputs,
        hidden: Tensor,
        num_tokens: int,
        num_chunks: int,
        max_q_len: int,
        cache: KVCache,
    ) -> None:
        """Write keys and values of T positions into the head's cache.

        Args:
            rows: of the pass; token_ids are those after each position.
            hidden: of `fuse`, or what this made of it for the positions before; changed in place
                to what it makes of these.
            num_tokens: T.
            num_chunks: n.
            max_q_len: no chunk has more tokens.
            cache: of one layer; changed in place.
        """
        weights, linear, layer = self._weights, self._linear, self.config.layer
        eps = layer.rms_norm_eps
        taken, normed = hidden[:num_tokens], self._normed[:num_tokens]
        embedded, qkv = self._embedded[:num_tokens], self._qkv[:num_tokens]
        ((k_cache, v_cache),) = cache.layers

        embedding(rows.token_ids[:num_tokens], weights.embedding, out=embedded, pdl=True)
        attention = self._attention.begin(rows, num_tokens, num_chunks, max_q_len)
        rms_norm(embedded, weights.embedding_norm, eps, out=embedded, pdl=True)
        rms_norm(taken, weights.hidden_norm, eps, out=normed, pdl=True)
        linear.product(self._embedded, weights.embedding_qkv, None, self._qkv, num_tokens)
        linear.add(self._normed, weights.hidden_qkv, None, self._qkv, num_tokens)
        if self.config.norm_before_residual:
            taken.copy_(normed)
        attention.layer(qkv, k_cache, v_cache, self._attended[:num_tokens])
        linear.add(self._attended, weights.out, None, hidden, num_tokens)
        rms_norm(taken, weights.mlp_norm, eps, out=normed, pdl=True)
        linear.gated(self._normed, weights.gate_up, None, self._gate_up, self._gated, num_tokens)
        linear.add(self._gated, weights.down, None, hidden, num_tokens)

    def score(self, num_rows: int) -> None:
        """What follows the first rows of `drafted` -> `logits`."""
        weights, taken = self._weights, self.drafted[:num_rows]
        normed = self._normed[:num_rows]
        rms_norm(taken, weights.norm, self.config.layer.rms_norm_eps, out=normed, pdl=True)
        self._linear.product(self._normed, weights.head, None, self._scores, num_rows)
        if weights.targets is not None:
            scores = self._scores[:num_rows]
            self.logits[:num_rows].index_copy_(1, weights.targets, scores)
