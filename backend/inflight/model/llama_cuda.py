"""Llama on a GPU: the forward pass over the kernels, in buffers that stay where they are.

Nothing is allocated in a step and nothing waits for the host, so a CUDA graph may hold one. The
residual stream `hidden` is added to by the linear layers that end a block, where the sum costs
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.checkpoint import Checkpoint
from inflight.config import GPU_HEAD_DIMS
from inflight.errors import ConfigError
from inflight.model.config import ModelConfig
from inflight.model.cuda_linear import INVARIANT_ROWS, Linear
from inflight.model.kv_cache import KVCache
from inflight.model.llama import load_weights, weight_shapes
from inflight.model.rope import inverse_frequencies
from inflight.model.weights import Progress, open_weights
from inflight_kernels import attention
from inflight_kernels.batch_state import BatchState, Step
from inflight_kernels.embedding import embedding
from inflight_kernels.norm import rms_norm
from inflight_kernels.reference import rotary_tables
from inflight_kernels.rope import rope_write_kv


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
        max_chunks: n at most.
        batch_invariant: a token's numbers do not depend on the other tokens of its step.

    Attributes:
        logits: [max_chunks or more, vocab_size] float32, the last step's in its first rows.

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
        max_chunks: int,
        batch_invariant: bool = False,
    ) -> None:
        if config.head_dim not in GPU_HEAD_DIMS:
            raise ConfigError(
                f"{checkpoint.path}: head_dim {config.head_dim} has no kernel on a GPU; allowed: "
                f"{', '.join(map(str, GPU_HEAD_DIMS))}"
            )
        self.config = config
        self._scale = config.head_dim**-0.5
        self._batch_invariant = batch_invariant
        frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim, max_len)
        self._cos, self._sin = rotary_tables(
            frequencies, max_len, attention_factor, torch.float32, device
        )
        stored = open_weights(checkpoint, config, weight_shapes(config), device)
        self._weights = load_weights(stored, config, DevicePlace(dtype, device), progress)

        rows = -(-max_tokens // INVARIANT_ROWS) * INVARIANT_ROWS

        def buffer(width: int, num_rows: int = rows, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_rows, width, dtype=kind, device=device)

        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        q_width, kv_width = (count * config.head_dim for count in heads[:2])
        self._hidden = buffer(config.hidden_size)
        self._normed = buffer(config.hidden_size)
        self._qkv = buffer(q_width + 2 * kv_width)
        self._attended = buffer(q_width)
        self._gate_up = buffer(2 * config.intermediate_size)
        self._gated = buffer(config.intermediate_size)
        last_rows = -(-max_chunks // INVARIANT_ROWS) * INVARIANT_ROWS
        self._last = buffer(config.hidden_size, last_rows)
        self._last_normed = buffer(config.hidden_size, last_rows)
        self.logits = buffer(config.vocab_size, last_rows, torch.float32)
        # For any mix of chunks, and for steps of one token each.
        sizes = [
            attention.workspace_size(
                max_chunks, tokens, *heads, max_q_len, batch_invariant=batch_invariant
            )
            for tokens, max_q_len in ((max_tokens, None), (max_chunks, 1))
        ]
        self._attention_workspace = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        self._linear = Linear(device, batch_invariant)

    def forward(
        self,
        step: Step,
        state: BatchState,
        num_tokens: int,
        num_chunks: int,
        max_q_len: int,
        cache: KVCache,
    ) -> None:
        """Write the keys and values of a step into the cache; what follows each chunk -> logits.

        Args:
            step: what the host sent.
            state: what `begin_step` made of it.
            num_tokens: T.
            num_chunks: n; T where max_q_len is 1.
            max_q_len: no chunk has more tokens.
            cache: of all layers; changed in place.
        """
        config, weights, linear = self.config, self._weights, self._linear
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        q_width = config.num_heads * config.head_dim
        hidden, normed = self._hidden[:num_tokens], self._normed[:num_tokens]
        qkv, attended = self._qkv[:num_tokens], self._attended[:num_tokens]
        q = qkv[:, :q_width].view(num_tokens, config.num_heads, config.head_dim)
        query_start, seq_lens = step.query_start[: num_chunks + 1], step.seq_lens[:num_chunks]
        tables = state.step_tables[:num_chunks]
        workspace = self._attention_workspace

        embedding(state.token_ids[:num_tokens], weights.embedding, out=hidden, pdl=True)
        attention.plan(
            query_start,
            seq_lens,
            workspace,
            num_tokens,
            *heads,
            max_q_len=max_q_len,
            batch_invariant=self._batch_invariant,
            pdl=True,
        )
        for layer, (k_cache, v_cache) in zip(weights.layers, cache.layers, strict=True):
            rms_norm(hidden, layer.attention_norm, config.rms_norm_eps, out=normed, pdl=True)
            linear.product(self._normed, layer.qkv, layer.qkv_bias, self._qkv, num_tokens)
            rope_write_kv(
                qkv,
                state.positions[:num_tokens],
                self._cos,
                self._sin,
                state.slot_mapping[:num_tokens],
                k_cache,
                v_cache,
                q_out=q,
                pdl=True,
            )
            attention.attend(
                q,
                k_cache,
                v_cache,
                tables,
                query_start,
                seq_lens,
                attended,
                workspace,
                self._scale,
                max_q_len=max_q_len,
                batch_invariant=self._batch_invariant,
                planned=True,
                pdl=True,
            )
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

        last, last_normed = hidden, self._last_normed[:num_chunks]
        if max_q_len > 1:
            last = self._last[:num_chunks]
            embedding(state.last_rows[:num_chunks], hidden, out=last, pdl=True)
        rms_norm(last, weights.norm, config.rms_norm_eps, out=last_normed, pdl=True)
        linear.product(self._last_normed, weights.head, None, self.logits, num_chunks)
