"""Llama (arXiv:2302.13971, grouped-query attention as in Llama 2), and Mistral without windows.

The forward pass as a list of ops; how each is computed is the ops' affair.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.checkpoint import Checkpoint
from inflight.model.config import ModelConfig
from inflight.model.kv_cache import KVCache
from inflight.model.rope import inverse_frequencies
from inflight.model.weights import Progress, Shape, Weights, open_weights
from inflight_kernels import reference as ops


@dataclass(frozen=True, slots=True)
class _Layer:
    """One block's weights; q | k | v and gate | up are one product each."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Model:
    """The weights of one model on this machine's CPU, ready to run.

    Args:
        checkpoint: where the weights are.
        config: what `read_config` said of it.
        dtype: of weights and activations.
        max_len: the longest sequence: the rotary tables reach that far.
        progress: called with ("weights", fraction) as layers arrive.

    Raises:
        ConfigError: the weights are damaged or do not fit the config.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        max_len: int,
        progress: Progress,
    ) -> None:
        self.config = config
        self._dtype = dtype
        self._scale = config.head_dim**-0.5
        frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim, max_len)
        self._cos, self._sin = ops.rotary_tables(frequencies, max_len, attention_factor, dtype)
        weights = open_weights(checkpoint, config, weight_shapes(config))

        def layer(index: int) -> _Layer:
            return _read_layer(weights, config, index, dtype)

        self._layers: list[_Layer] = []
        # Reading is decompression in numpy, on one core each.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            embedding = pool.submit(_read, weights, "model.embed_tokens.weight", dtype)
            for done in pool.map(layer, range(config.num_layers)):
                self._layers.append(done)
                progress("weights", len(self._layers) / (config.num_layers + 1))
            self._embedding = embedding.result()
        self._norm = _read(weights, "model.norm.weight", dtype)
        head = self._embedding
        if not config.tie_word_embeddings:
            head = _read(weights, "lm_head.weight", dtype)
        self._head = ops.pack(head)
        progress("weights", 1.0)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        plan: ops.AttentionPlan,
        sample_rows: Tensor,
        cache: KVCache,
    ) -> Tensor:
        """Write the keys and values of T tokens into the cache and score what follows some.

        Args:
            token_ids, positions, slot_mapping: [T] int64.
            plan: of the attention over the cache.
            sample_rows: [s] int64, the rows to score.
            cache: of all layers; changed in place.

        Returns:
            Logits [s, vocab_size] float32.
        """
        config = self.config
        num_qk = config.num_heads + config.num_kv_heads
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        x = ops.embedding(token_ids, self._embedding)
        residual = None
        for layer, (k_cache, v_cache) in zip(self._layers, cache.layers, strict=True):
            x, residual = ops.rms_norm(x, layer.attention_norm, config.rms_norm_eps, residual)
            heads = ops.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
            qk = ops.rotary(heads[:, :num_qk], cos, sin)
            q, k, v = qk[:, : config.num_heads], qk[:, config.num_heads :], heads[:, num_qk:]
            ops.write_kv(k, v, k_cache, v_cache, slot_mapping)
            x = ops.attend(q, k_cache, v_cache, plan, self._scale)
            x = ops.linear(x, layer.out, layer.out_bias)
            x, residual = ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps, residual)
            x = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
            x = ops.linear(x, layer.down, layer.down_bias)
        if not len(sample_rows):
            return torch.empty(0, config.vocab_size)
        x = x.index_select(0, sample_rows)
        if residual is not None:
            residual = residual.index_select(0, sample_rows)
        x, _ = ops.rms_norm(x, self._norm, config.rms_norm_eps, residual)
        return ops.linear(x, self._head).float()


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this model must have, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    attention = {
        "q_proj": (q_width, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, q_width),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for group, projections, bias in (
            ("self_attn", attention, config.attention_bias),
            ("mlp", mlp, config.mlp_bias),
        ):
            for name, shape in projections.items():
                shapes[f"{prefix}.{group}.{name}.weight"] = shape
                if bias:
                    shapes[f"{prefix}.{group}.{name}.bias"] = shape[:1]
    return shapes


def _read(weights: Weights, name: str, dtype: torch.dtype) -> Tensor:
    tensor = weights.read(name)
    # A copy even in the same type: what stays in memory must not depend on the file any more.
    return tensor.to(dtype, copy=True)


def _read_layer(weights: Weights, config: ModelConfig, index: int, dtype: torch.dtype) -> _Layer:
    prefix = f"model.layers.{index}"

    def one(name: str) -> Tensor:
        return _read(weights, f"{prefix}.{name}", dtype)

    def joined(group: str, names: tuple[str, ...], kind: str) -> Tensor:
        return torch.cat([one(f"{group}.{name}.{kind}") for name in names])

    def product(group: str, *names: str) -> tuple[Tensor, Tensor | None]:
        bias = config.attention_bias if group == "self_attn" else config.mlp_bias
        return (
            ops.pack(joined(group, names, "weight")),
            joined(group, names, "bias") if bias else None,
        )

    qkv, qkv_bias = product("self_attn", "q_proj", "k_proj", "v_proj")
    out, out_bias = product("self_attn", "o_proj")
    gate_up, gate_up_bias = product("mlp", "gate_proj", "up_proj")
    down, down_bias = product("mlp", "down_proj")
    return _Layer(
        attention_norm=one("input_layernorm.weight"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        mlp_norm=one("post_attention_layernorm.weight"),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )
