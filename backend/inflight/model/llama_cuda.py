"""Llama on a GPU: the forward pass over the kernels, in buffers that stay where they are.

Nothing is allocated in a step and nothing waits for the host, so a CUDA graph may hold one. The
residual stream `hidden` is added to by the linear layers that end a block, where the sum costs
nothing.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from inflight.checkpoint import Checkpoint
from inflight.config import GPU_HEAD_DIMS
from inflight.errors import ConfigError
from inflight.model import cuda_attention, cuda_linear
from inflight.model.config import ModelConfig
from inflight.model.cuda_attention import Attention, Rows
from inflight.model.cuda_linear import INVARIANT_ROWS, Linear
from inflight.model.kv_cache import KVCache
from inflight.model.llama import load_weights, weight_shapes
from inflight.model.weights import Progress, open_weights
from inflight_kernels import embedding as embeddings
from inflight_kernels import norm
from inflight_kernels.embedding import embedding
from inflight_kernels.norm import rms_norm


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
    return layer_kernels_of(
        config, dtype, max_tokens=max_tokens, batch_invariant=batch_invariant
    ) + cuda_linear.kernels_of(head, dtype, torch.float32, False, max_rows, batch_invariant)


def layer_kernels_of(
    config: ModelConfig, dtype: torch.dtype, *, max_tokens: int, batch_invariant: bool
) -> list[tuple[str, str]]:
    """The same of all but the head: tokens, norms, layers."""
    hidden, q_width = config.hidden_size, config.num_heads * config.head_dim
    found = cuda_attention.kernels_of(config, dtype)
    for shape, gated in (
        ((2 * config.intermediate_size, hidden), True),
        ((q_width + 2 * config.num_kv_heads * config.head_dim, hidden), False),
        ((hidden, q_width), False),
        ((hidden, config.intermediate_size), False),
    ):
        found += cuda_linear.kernels_of(shape, dtype, dtype, gated, max_tokens, batch_invariant)
    found += norm.kernels_of(hidden, dtype, adds=False)
    return found + embeddings.kernels_of(torch.int64)


class DevicePlace:
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
        max_drafts: of a chunk that verifies drafts; 0 where none does.
        batch_invariant: a token's numbers do not depend on the other tokens of its step.

    Attributes:
        weights: of the model.
        logits: [max_rows or more, vocab_size] float32, the last step's in its first rows.
        features: [max_tokens or more, len(taps) * hidden_size], the last step's in its first rows;
            None where `tap` asks for none.

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
        max_drafts: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        if config.head_dim not in GPU_HEAD_DIMS:
            raise ConfigError(
                f"{checkpoint.path}: head_dim {config.head_dim} has no kernel on a GPU; allowed: "
                f"{', '.join(map(str, GPU_HEAD_DIMS))}"
            )
        self.config = config
        self.features: Tensor | None = None
        self._taps: dict[int, list[Tensor]] = {}
        stored = open_weights(checkpoint, config, weight_shapes(config), device)
        self.weights = load_weights(stored, config, DevicePlace(dtype, device), progress)

        rows = -(-max_tokens // INVARIANT_ROWS) * INVARIANT_ROWS

        def buffer(width: int, num_rows: int = rows, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_rows, width, dtype=kind, device=device)

        heads = (config.num_heads, config.num_kv_heads)
        q_width, kv_width = (count * config.head_dim for count in heads)
        self._hidden = buffer(config.hidden_size)
        self._normed = buffer(config.hidden_size)
        self._qkv = buffer(q_width + 2 * kv_width)
        self._attended = buffer(q_width)
        self._gate_up = buffer(2 * config.intermediate_size)
        self._gated = buffer(config.intermediate_size)
        last_rows = -(-max_rows // INVARIANT_ROWS) * INVARIANT_ROWS
        self._last = buffer(config.hidden_size, last_rows)
        self._last_normed = buffer(config.hidden_size, last_rows)
        self.logits = buffer(config.vocab_size, last_rows, torch.float32)
        self._attention = Attention(
            config,
            max_len,
            device,
            max_tokens=max_tokens,
            max_rows=max_rows,
            max_drafts=max_drafts,
            batch_invariant=batch_invariant,
        )
        self._linear = Linear(batch_invariant)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before these layers, after the last one where that is their
        number: side by side, in `features`.
        """
        width = self.config.hidden_size
        self.features = self._hidden.new_zeros(len(self._hidden), len(layers) * width)
        for place, layer in enumerate(layers):
            columns = slice(place * width, (place + 1) * width)
            self._taps.setdefault(layer, []).append(self.features[:, columns])

    def forward(
        self,
        rows: Rows,
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
        config, weights, linear = self.config, self.weights, self._linear
        hidden, normed = self._hidden[:num_tokens], self._normed[:num_tokens]
        qkv, attended = self._qkv[:num_tokens], self._attended[:num_tokens]

        embedding(rows.token_ids[:num_tokens], weights.embedding, out=hidden, pdl=True)
        attention = self._attention.begin(rows, num_tokens, num_chunks, max_q_len)
        layers = zip(weights.layers, cache.layers, strict=True)
        for index, (layer, (k_cache, v_cache)) in enumerate(islice(layers, num_layers)):
            for tapped in self._taps.get(index, ()):
                tapped[:num_tokens].copy_(hidden)
            rms_norm(hidden, layer.attention_norm, config.rms_norm_eps, out=normed, pdl=True)
            linear.product(self._normed, layer.qkv, layer.qkv_bias, self._qkv, num_tokens)
            attention.layer(qkv, k_cache, v_cache, attended)
            linear.add(self._attended, layer.out, layer.out_bias, self._hidden, num_tokens)
            rms_norm(hidden, layer.mlp_norm, config.rms_norm_eps, out=normed, pdl=True)
            linear.gated(
                self._normed,
                layer.gate_up,
                layer.gate_up_bias,
                self._gate_up,
                self._gated,
                num_tokens,
            )
            linear.add(self._gated, layer.down, layer.down_bias, self._hidden, num_tokens)

        for tapped in self._taps.get(config.num_layers, ()):
            tapped[:num_tokens].copy_(hidden)
        if not num_rows:
            return
        last, last_normed = hidden, self._last_normed[:num_rows]
        if num_rows < num_tokens:
            last = self._last[:num_rows]
            embedding(rows.sample_rows[:num_rows], hidden, out=last, pdl=True)
        rms_norm(last, weights.norm, config.rms_norm_eps, out=last_normed, pdl=True)
        linear.product(self._last_normed, weights.head, None, self.logits, num_rows)
