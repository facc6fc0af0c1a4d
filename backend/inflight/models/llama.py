"""Llama (arXiv:2302.13971, grouped-query attention as in Llama 2), and Mistral without windows.

The forward pass as a list of ops; how each is computed is the ops' affair.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.kv_cache import KVCache
from inflight.models.layers.rope import inverse_frequencies
from inflight.models.loader import Progress, Shape, WeightPlacement, Weights, open_weights
from inflight_kernels.torch_ops import transformer as ops


@dataclass(frozen=True, slots=True)
class Layer:
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


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights of a model, where its forward pass wants them."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


class CpuPlacement:
    """In this machine's memory, linear layers in the layout that its CPU multiplies with."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def vector(self, stored: Tensor) -> Tensor:
        # A copy even in the same type: what stays in memory must not depend on the file any more.
        return stored.to(self._dtype, copy=True)

    def joined(self, stored: list[Tensor]) -> Tensor:
        return torch.cat([self.vector(part) for part in stored])

    def matrix(self, stored: list[Tensor]) -> Tensor:
        return ops.pack(self.joined(stored))


class Model:
    """The weights of one model on this machine's CPU, ready to run.

    Args:
        checkpoint: where the weights are.
        config: what `read_config` said of it.
        dtype: of weights and activations.
        max_len: the longest sequence: the rotary tables reach that far.
        progress: called with ("weights", fraction) as layers arrive.

    Attributes:
        weights: of the model.
        features: [T, len(aux_layers) * hidden_size], of the last step; None where `set_aux_layers`
            asks for none.

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
        self.features: Tensor | None = None
        self._aux_layers: tuple[int, ...] = ()
        self._scale = config.head_dim**-0.5
        frequencies, attention_factor = inverse_frequencies(config.rope, config.head_dim, max_len)
        self._cos, self._sin = ops.rotary_tables(frequencies, max_len, attention_factor, dtype)
        stored = open_weights(checkpoint, config, weight_shapes(config))
        self.weights = load_weights(stored, config, CpuPlacement(dtype), progress)

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the hidden states before these layers, after the last one where that is their
        number: side by side, in `features`.
        """
        self._aux_layers = layers

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        plan: ops.AttentionPlan,
        sample_rows: Tensor,
        cache: KVCache,
        num_layers: int | None = None,
    ) -> Tensor:
        """Write the keys and values of T tokens into the cache and score what follows some.

        Args:
            token_ids, positions, slot_mapping: [T] int64.
            plan: of the attention over the cache.
            sample_rows: [s] int64, the rows to score.
            cache: of all layers; changed in place.
            num_layers: the first so many alone, then the norm and the head; None for all.

        Returns:
            Logits [s, vocab_size] float32.
        """
        config = self.config
        num_qk, last = config.num_heads + config.num_kv_heads, (num_layers or config.num_layers) - 1
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        weights = self.weights
        aux_layers = self._aux_layers if num_layers is None else ()
        # Keys and values apart, these rows are all that is wanted of the last layer.
        kept = None if config.num_layers in aux_layers else sample_rows
        x = ops.embedding(token_ids, weights.embedding)
        residual: Tensor | None = None
        aux: dict[int, Tensor] = {}
        layers = zip(weights.layers, cache.layers, strict=True)
        for index, (layer, (k_cache, v_cache)) in enumerate(islice(layers, last + 1)):
            x, residual = ops.rms_norm(x, layer.attention_norm, config.rms_norm_eps, residual)
            if index in aux_layers:
                aux[index] = residual
            heads = ops.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
            qk = ops.rotary(heads[:, :num_qk], cos, sin)
            q, k, v = qk[:, : config.num_heads], qk[:, config.num_heads :], heads[:, num_qk:]
            ops.write_kv(k, v, k_cache, v_cache, slot_mapping)
            if index == last and kept is not None and not len(kept):
                break
            x = ops.attend(q, k_cache, v_cache, plan, self._scale)
            if index == last and kept is not None:
                x, residual = x.index_select(0, kept), residual.index_select(0, kept)
            x = ops.linear(x, layer.out, layer.out_bias)
            x, residual = ops.rms_norm(x, layer.mlp_norm, config.rms_norm_eps, residual)
            x = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
            x = ops.linear(x, layer.down, layer.down_bias)
        assert residual is not None
        if kept is None:
            aux[config.num_layers] = x + residual
            x, residual = x.index_select(0, sample_rows), residual.index_select(0, sample_rows)
        if aux_layers:
            self.features = torch.cat([aux[tap] for tap in aux_layers], -1)
        if not len(sample_rows):
            return torch.empty(0, config.vocab_size)
        x, _ = ops.rms_norm(x, weights.norm, config.rms_norm_eps, residual)
        return ops.linear(x, weights.head).float()


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


def load_weights(
    stored: Weights, config: ModelConfig, place: WeightPlacement, progress: Progress
) -> LlamaWeights:
    """Read all weights of a model into a place.

    Args:
        stored: what `open_weights` found.
        config: of the model.
        place: where to.
        progress: called with ("weights", fraction) as layers arrive.
    """

    def layer(index: int) -> Layer:
        return _load_layer(stored, config, index, place)

    layers: list[Layer] = []
    # Reading is decompression in numpy, on one core each.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        embedding = pool.submit(lambda: place.vector(stored.read("model.embed_tokens.weight")))
        for done in pool.map(layer, range(config.num_layers)):
            layers.append(done)
            progress("weights", len(layers) / (config.num_layers + 1))
        table = embedding.result()
    tied = config.tie_word_embeddings
    head = place.matrix([table if tied else stored.read("lm_head.weight")])
    norm = place.vector(stored.read("model.norm.weight"))
    progress("weights", 1.0)
    return LlamaWeights(embedding=table, layers=layers, norm=norm, head=head)


def _load_layer(stored: Weights, config: ModelConfig, index: int, place: WeightPlacement) -> Layer:
    prefix = f"model.layers.{index}"

    def norm(name: str) -> Tensor:
        return place.vector(stored.read(f"{prefix}.{name}.weight"))

    def parts(group: str, names: tuple[str, ...], kind: str) -> list[Tensor]:
        return [stored.read(f"{prefix}.{group}.{name}.{kind}") for name in names]

    def product(group: str, *names: str) -> tuple[Tensor, Tensor | None]:
        bias = config.attention_bias if group == "self_attn" else config.mlp_bias
        return (
            place.matrix(parts(group, names, "weight")),
            place.joined(parts(group, names, "bias")) if bias else None,
        )

    qkv, qkv_bias = product("self_attn", "q_proj", "k_proj", "v_proj")
    out, out_bias = product("self_attn", "o_proj")
    gate_up, gate_up_bias = product("mlp", "gate_proj", "up_proj")
    down, down_bias = product("mlp", "down_proj")
    return Layer(
        attention_norm=norm("input_layernorm"),
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=out,
        out_bias=out_bias,
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
    )
