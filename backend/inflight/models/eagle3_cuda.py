"""EAGLE-3 head on a GPU (see `eagle3`), in fixed buffers.

As in `decoder_cuda`, a pass allocates nothing and does not synchronise with the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.core.step_size import StepSize
from inflight.kv.cache import KVCache
from inflight.models.cuda_placement import CudaPlacement
from inflight.models.decoder_cuda import (
    Buffers,
    DecoderSettings,
    check_supported,
)
from inflight.models.eagle3 import UNDRAFTABLE, HeadWeights, load_head
from inflight.models.eagle3_spec import Eagle3Spec
from inflight.models.experts_cuda import CudaExperts
from inflight.models.layers.attention import Attention, ForwardInputs, RotaryTables
from inflight.models.layers.linear import INVARIANT_ROWS, CudaWeight
from inflight.models.layers.weights import ModelWeights
from inflight.models.loader import Progress
from inflight_kernels.ops.attention.operands import AttentionWeights
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.ops.residual_norm import norm_columns
from inflight_kernels.ops.rope import PagedKV


class Head:
    """The weights of a head, and the activation buffers of its passes.

    Args:
        checkpoint: where its weights are.
        spec: of the head.
        target: the weights of the model that it drafts for.
        settings: of both.
        max_chunks: maximum number of chunks in a draft pass.
        progress: called with ("weights", fraction).

    Attributes:
        hidden: [max_tokens or more, hidden_size], from the head's last update.
        drafted: [max_chunks or more, hidden_size], from the draft passes.
        logits: [max_chunks or more, vocab_size] float32, from `score`.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec, or its shape is not supported
            on GPUs.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: Eagle3Spec,
        target: ModelWeights[CudaWeight, CudaExperts, Tensor],
        settings: DecoderSettings,
        max_chunks: int,
        progress: Progress,
    ) -> None:
        layer = spec.layer
        check_supported(layer, checkpoint.path, settings)
        self.spec = spec
        device = settings.device
        placement = CudaPlacement(settings.dtype, device, settings.batch_invariant)
        self._weights: HeadWeights[CudaWeight, Tensor] = load_head(
            checkpoint, spec, target, placement, device
        )
        progress("weights", 1.0)
        buffers = self._buffers = Buffers(layer, settings.max_tokens, settings)
        self.hidden = buffers.new(layer.hidden_size)
        self._embedded = buffers.new(layer.hidden_size)
        rows = -(-max_chunks // INVARIANT_ROWS) * INVARIANT_ROWS
        self.drafted = self.hidden.new_zeros(rows, layer.hidden_size)
        self._scores = torch.zeros(rows, spec.draft_vocab_size, dtype=torch.float32, device=device)
        self.logits = self._scores
        if self._weights.targets is not None:
            self.logits = self._scores.new_full((rows, layer.vocab_size), UNDRAFTABLE)
        (attention,) = layer.attentions
        self._attention = Attention(
            attention,
            RotaryTables(layer, settings.max_len, device).of(attention.rope),
            settings.limits,
            batch_invariant=settings.batch_invariant,
            dtype=settings.dtype,
            kv_dtype=settings.quantized_kv,
        )

    def fuse(self, features: Tensor, num_tokens: int) -> None:
        """Project the target's hidden states [T or more, len(aux_layers) * ...] into `hidden`.

        They are normed in place before, if the head has norms of them.
        """
        first = 0
        for norm in self._weights.feature_norms:
            norm_columns(features[:num_tokens], first, norm, self.spec.layer.norm_eps, pdl=True)
            first += len(norm)
        self._weights.fuse.product(features, self.hidden, num_tokens)

    def take(self, rows: Tensor) -> None:
        """Rows [n] of `hidden` -> `drafted`."""
        embedding(rows, self.hidden, out=self.drafted[: len(rows)], pdl=True)

    def forward(
        self,
        inputs: ForwardInputs,
        hidden: Tensor,
        size: StepSize,
        cache: KVCache,
    ) -> None:
        """Run T positions; writes their keys and values into the head's cache.

        Args:
            inputs: of the pass; token_ids are those after each position.
            hidden: from `fuse`, or the output for the previous positions; replaced in place by the
                output.
            size: of the pass.
            cache: of one layer; updated in place.
        """
        weights, buffers, eps = self._weights, self._buffers, self.spec.layer.norm_eps
        num_tokens = size.num_tokens
        taken, normed = hidden[:num_tokens], buffers.normed[:num_tokens]
        embedded, qkv = self._embedded[:num_tokens], buffers.qkv[:num_tokens]
        gate_up, gated = buffers.mlp[self.spec.layer.layers[0].dense_mlp]
        (pair,) = cache.layers

        embedding(inputs.token_ids[:num_tokens], weights.embedding, out=embedded, pdl=True)
        attention = self._attention.begin(inputs, size)
        rms_norm(embedded, weights.embedding_norm, eps, out=embedded, pdl=True)
        rms_norm(taken, weights.hidden_norm, eps, out=normed, pdl=True)
        weights.embedding_qkv.product(self._embedded, buffers.qkv, num_tokens)
        weights.hidden_qkv.add(buffers.normed, buffers.qkv, num_tokens)
        if self.spec.norm_before_residual:
            taken.copy_(normed)
        attended = buffers.attended[:num_tokens]
        attention.layer(qkv, PagedKV(*pair), attended, AttentionWeights())
        weights.out.add(buffers.attended, hidden, num_tokens)
        rms_norm(taken, weights.mlp_norm, eps, out=normed, pdl=True)
        inner = weights.gate_up.gated(buffers.normed, gate_up, gated, num_tokens, weights.down)
        weights.down.add(inner, hidden, num_tokens)
        if self.spec.norm_output:
            rms_norm(taken, weights.norm, eps, out=taken, pdl=True)

    def score(self, num_rows: int) -> None:
        """Compute `logits` from the first rows of `drafted`."""
        weights, taken = self._weights, self.drafted[:num_rows]
        normed = self.drafted
        if not self.spec.norm_output:
            normed = self._buffers.normed
            eps = self.spec.layer.norm_eps
            rms_norm(taken, weights.norm, eps, out=normed[:num_rows], pdl=True)
        weights.head.product(normed, self._scores, num_rows)
        if weights.targets is not None and not weights.targets.is_meta:  # else recorded
            scores = self._scores[:num_rows]
            self.logits[:num_rows].index_copy_(1, weights.targets, scores)
