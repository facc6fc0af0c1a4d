"""Llama on a GPU: the forward pass over the kernels, in buffers that stay where they are.

Nothing is allocated in a step and nothing waits for the host, so a CUDA graph may hold one. What
follows the last layer's attention is computed for the rows that get logits alone.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.config import GPU_HEAD_DIMS
from inflight.errors import ConfigError
from inflight.models.config import ModelConfig
from inflight.models.kv_cache import KVCache
from inflight.models.layers import attention, linear
from inflight.models.layers.attention import Attention, ForwardInputs
from inflight.models.layers.linear import INVARIANT_ROWS, Linear
from inflight.models.layers.residual import Residual, WideResidual
from inflight.models.llama import Layer, load_weights, weight_shapes
from inflight.models.loader import Progress, open_weights
from inflight_kernels.ops import embedding as embeddings
from inflight_kernels.ops.embedding import embedding

_MAX_WIDE_HIDDEN_SIZE = 2048
"""Up to here the residual stream is in float32. A small model's logits lie close together, and this
is the rounding that moves them most: SmolLM2's, 576 wide, are off by 0.13 with it and by 0.08
without (standard deviations, emulated). Decoding launches as many kernels either way. A prefill
moves 6 bytes more for each value of the stream, twice a layer.
"""


def kernels_of(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_tokens: int,
    max_rows: int,
    batch_invariant: bool = False,
) -> list[tuple[str, str]]:
    """Stem and name of the kernels that a model may launch, as they are compiled.

    Args:
        config, dtype, max_tokens, max_rows, batch_invariant: see `Model`.
    """
    head = (config.vocab_size, config.hidden_size)
    return [
        *layer_kernels_of(config, dtype, max_tokens=max_tokens, batch_invariant=batch_invariant),
        *_residual_kind(config).kernels_of(config.hidden_size, dtype),
        *linear.kernels_of(head, dtype, torch.float32, False, max_rows, batch_invariant),
    ]


def layer_kernels_of(
    config: ModelConfig, dtype: torch.dtype, *, max_tokens: int, batch_invariant: bool
) -> list[tuple[str, str]]:
    """The same of the tokens and the layers, but for their norms."""
    hidden, q_width = config.hidden_size, config.num_heads * config.head_dim
    found = attention.kernels_of(config, dtype)
    for shape, gated in (
        ((2 * config.intermediate_size, hidden), True),
        ((q_width + 2 * config.num_kv_heads * config.head_dim, hidden), False),
        ((hidden, q_width), False),
        ((hidden, config.intermediate_size), False),
    ):
        found += linear.kernels_of(shape, dtype, dtype, gated, max_tokens, batch_invariant)
    return found + embeddings.kernels_of(torch.int64)


def _residual_kind(config: ModelConfig) -> type[Residual]:
    return WideResidual if config.hidden_size <= _MAX_WIDE_HIDDEN_SIZE else Residual


class GpuPlacement:
    """In the GPU's memory, rows as they are stored."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def vector(self, stored: Tensor) -> Tensor:
        return stored.to(self._device, self._dtype)

    def joined(self, stored: list[Tensor]) -> Tensor:
        rows = sum(len(part) for part in stored)
        whole = torch.empty((rows, *stored[0].shape[1:]), dtype=self._dtype, device=self._device)
        first = 0
        for part in stored:
            whole[first : first + len(part)].copy_(part)
            first += len(part)
        return whole

    def matrix(self, stored: list[Tensor]) -> Tensor:
        if len(stored) == 1:  # an embedding that is the head as well stays one
            return self.vector(stored[0])
        return self.joined(stored)


class Model:
    """The weights of one model on a GPU, and the buffers of its steps.

    Args:
        checkpoint: where the weights are.
        config: what `read_config` said of it.
        dtype: of weights and activations.
        max_len: the longest sequence: the rotary tables reach that far.
        progress: called with ("weights", fraction) as layers arrive.
        device: the GPU.
        max_tokens: T at most.
        max_rows: n and s at most.
        batch_invariant: a token's numbers do not depend on the other tokens of its step.

    Attributes:
        weights: of the model.
        logits: [max_rows or more, vocab_size] float32, the last step's in its first rows.
        features: [max_tokens or more, len(aux_layers) * hidden_size], the last step's in its first
            rows; None where `set_aux_layers` asks for none.

    Raises:
        ConfigError: the weights are damaged or do not fit the config, or no kernel is there for
            the model's shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        max_len: int,
        progress: Progress,
        *,
        device: torch.device,
        max_tokens: int,
        max_rows: int,
        batch_invariant: bool = False,
    ) -> None:
        if config.head_dim not in GPU_HEAD_DIMS:
            raise ConfigError(
                f"{checkpoint.path}: head_dim {config.head_dim} has no kernel on a GPU; allowed: "
                f"{', '.join(map(str, GPU_HEAD_DIMS))}"
            )
        self.config = config
        self.features: Tensor | None = None
        self._aux_layers: dict[int, list[Tensor]] = {}
        stored = open_weights(checkpoint, config, weight_shapes(config), device)
        self.weights = load_weights(stored, config, GpuPlacement(dtype, device), progress)

        rows = -(-max_tokens // INVARIANT_ROWS) * INVARIANT_ROWS

        def buffer(width: int, num_rows: int = rows, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_rows, width, dtype=kind, device=device)

        heads = (config.num_heads, config.num_kv_heads)
        q_width, kv_width = (count * config.head_dim for count in heads)
        self._normed = buffer(config.hidden_size)
        self._qkv = buffer(q_width + 2 * kv_width)
        self._attended = buffer(q_width)
        self._gate_up = buffer(2 * config.intermediate_size)
        self._gated = buffer(config.intermediate_size)
        last_rows = -(-max_rows // INVARIANT_ROWS) * INVARIANT_ROWS
        self._last_attended = buffer(q_width, last_rows)
        self._last_normed = buffer(config.hidden_size, last_rows)
        self.logits = buffer(config.vocab_size, last_rows, torch.float32)
        self._attention = Attention(
            config,
            max_len,
            device,
            max_tokens=max_tokens,
            max_rows=max_rows,
            batch_invariant=batch_invariant,
        )
        self._linear = Linear(batch_invariant)
        kind = _residual_kind(config)
        self._residual, self._last = (
            kind(count, config.hidden_size, dtype, device, self._linear)
            for count in (rows, last_rows)
        )

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before these layers, after the last one where that is their
        number: side by side, in `features`.
        """
        width = self.config.hidden_size
        self.features = self._normed.new_zeros(len(self._normed), len(layers) * width)
        for place, layer in enumerate(layers):
            columns = slice(place * width, (place + 1) * width)
            self._aux_layers.setdefault(layer, []).append(self.features[:, columns])

    def forward(
        self,
        rows: ForwardInputs,
        num_tokens: int,
        num_chunks: int,
        num_rows: int,
        max_q_len: int,
        cache: KVCache,
        num_layers: int | None = None,
    ) -> None:
        """Write the keys and values of a step into the cache; what follows its rows -> logits.

        Args:
            rows: of the step.
            num_tokens: T.
            num_chunks: n.
            num_rows: s; T where every token has a row of logits.
            max_q_len: no chunk has more tokens.
            cache: of all layers; changed in place.
            num_layers: the first so many alone, then the norm and the head; None for all.
        """
        config, weights = self.config, self.weights
        eps, last = config.rms_norm_eps, (num_layers or config.num_layers) - 1
        aux_layers = self._aux_layers if num_layers is None else {}
        # Keys and values apart, these rows are all that is wanted of the last layer.
        num_kept = num_tokens if config.num_layers in aux_layers else num_rows
        normed, qkv = self._normed[:num_tokens], self._qkv[:num_tokens]
        residual, attended = self._residual, self._attended

        residual.begin(rows.token_ids[:num_tokens], weights.embedding)
        attention = self._attention.begin(rows, num_tokens, num_chunks, max_q_len)
        layers = zip(weights.layers, cache.layers, strict=True)
        for index, (layer, (k_cache, v_cache)) in enumerate(islice(layers, last + 1)):
            residual.norm(layer.attention_norm, eps, normed)
            for aux in aux_layers.get(index, ()):
                aux[:num_tokens].copy_(residual.hidden[:num_tokens])
            self._linear.product(self._normed, layer.qkv, layer.qkv_bias, self._qkv, num_tokens)
            if index == last and not num_kept:
                attention.write(qkv, k_cache, v_cache)
                return
            attention.layer(qkv, k_cache, v_cache, attended[:num_tokens])
            num_left = num_tokens
            if index == last and num_kept < num_tokens:
                num_left, kept = num_kept, rows.sample_rows[:num_kept]
                residual, attended = self._last, self._last_attended
                residual.take(kept, self._residual, num_tokens)
                embedding(kept, self._attended[:num_tokens], out=attended[:num_kept], pdl=True)
            self._end_block(layer, attended, residual, num_left)

        last_normed = self._last_normed[:num_rows]
        if num_kept == num_rows:
            residual.norm(weights.norm, eps, last_normed)
        else:
            residual.norm(weights.norm, eps, normed)
            embedding(rows.sample_rows[:num_rows], normed, out=last_normed, pdl=True)
        for aux in aux_layers.get(config.num_layers, ()):
            aux[:num_tokens].copy_(residual.hidden[:num_tokens])
        if num_rows:
            self._linear.product(self._last_normed, weights.head, None, self.logits, num_rows)

    def _end_block(
        self, layer: Layer, attended: Tensor, residual: Residual, num_tokens: int
    ) -> None:
        """What comes after a layer's attention; `attended` is a whole buffer."""
        residual.add(attended, layer.out, layer.out_bias, num_tokens)
        residual.norm(layer.mlp_norm, self.config.rms_norm_eps, self._normed[:num_tokens])
        self._linear.gated(
            self._normed,
            layer.gate_up,
            layer.gate_up_bias,
            self._gate_up,
            self._gated,
            num_tokens,
        )
        residual.add(self._gated, layer.down, layer.down_bias, num_tokens)
