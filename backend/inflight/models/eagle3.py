"""EAGLE-3 head (arXiv:2503.01840): one layer that drafts from the target's hidden states.

At position t its inputs are the target's hidden states of token t, from a low, a middle and a high
layer, fused by `fc`, and the embedding of token t + 1, which is known by then; it scores token
t + 2. Beyond the target's last position, its own hidden state of position t - 1 replaces the fused
ones.

    hidden = fc(features)
    hidden += o_proj(attention(qkv_proj(input_layernorm(embedding) | hidden_norm(hidden))))
    hidden += mlp(post_attention_layernorm(hidden))
    logits = lm_head(norm(hidden))

Some heads norm the features before `fc`, all at once (`input_norm`) or those of each layer
(`fc_norm.N`), or keep hidden = norm(hidden) for the next position.

Format, as of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, of SGLang (python/sglang/srt/models/
llama_eagle3.py) and vLLM (vllm/model_executor/models/llama_eagle3.py): safetensors with the names
above, `midlayer.` or `layers.0.` before those of the layer. q, k and v take 2 * hidden_size inputs.
`lm_head` scores draft_vocab_size tokens, and draft token i is token i + d2t[i] of the target; t2d
is the inverse and is not read. If the head lacks embed_tokens, or lm_head with the full vocabulary,
the target's is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from inflight.checkpoint import safetensors
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import RotaryTables
from inflight.models.eagle3_spec import Eagle3Spec
from inflight.models.layers.linear import CpuEmbedding, CpuWeight
from inflight.models.layers.weights import CpuExperts, E, L, ModelWeights, X
from inflight.models.loader import CpuPlacement, Progress, WeightPlacement
from inflight.models.stored.weights import (
    EmptyWeights,
    RandomWeights,
    Shape,
    StoredWeights,
    Weights,
    check_shapes,
)
from inflight_kernels.torch_ops import transformer as ops

UNDRAFTABLE = -1e6
"""Logit of a token outside the draft vocabulary: finite for the sampler, and never sampled."""

_DTYPES = (*safetensors.WEIGHTS, *safetensors.TABLES)
_OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


@dataclass(frozen=True, slots=True)
class HeadWeights(Generic[L, E]):
    """All weights of a head, placed for its forward pass.

    Attributes:
        embedding: see `E`.
        feature_norms: norms of consecutive columns of what `fuse` takes; empty for none.
        fuse: fc, [hidden_size, len(aux_layers) * target_hidden_size].
        embedding_norm, hidden_norm: norms of the two halves of q, k and v's input.
        embedding_qkv, hidden_qkv: the columns of q | k | v for these halves.
        head: [draft_vocab_size, hidden_size].
        targets: [draft_vocab_size] int64, the target's id of each draft token; None if equal.
    """

    embedding: E
    feature_norms: list[Tensor]
    fuse: L
    embedding_norm: Tensor
    hidden_norm: Tensor
    embedding_qkv: L
    hidden_qkv: L
    out: L
    mlp_norm: Tensor
    gate_up: L
    down: L
    norm: Tensor
    head: L
    targets: Tensor | None


class Head:
    """An EAGLE-3 head on the CPU.

    Args:
        checkpoint: where its weights are.
        spec: of the head.
        target: the weights of the model that it drafts for.
        dtype: of weights and activations.
        max_len: maximum sequence length.
        progress: called with ("weights", fraction).

    Attributes:
        spec, dtype: as given.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: Eagle3Spec,
        target: ModelWeights[CpuWeight, CpuExperts, CpuEmbedding],
        dtype: torch.dtype,
        max_len: int,
        progress: Progress,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self._attention = spec.layer.layers[0].attention
        self._ropes = RotaryTables(spec.layer, max_len, dtype)
        self._weights: HeadWeights[CpuWeight, CpuEmbedding] = load_head(
            checkpoint, spec, target, CpuPlacement(dtype)
        )
        progress("weights", 1.0)

    def fuse(self, features: Tensor) -> Tensor:
        """Project the target's [T, len(aux_layers) * target_hidden_size] to [T, hidden_size]."""
        weights, eps = self._weights, self.spec.layer.norm_eps
        if weights.feature_norms:
            parts = torch.split(features, [len(norm) for norm in weights.feature_norms], -1)
            pairs = zip(parts, weights.feature_norms, strict=True)
            features = torch.cat([ops.rms_norm(part, norm, eps)[0] for part, norm in pairs], -1)
        return weights.fuse(features)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        plan: ops.AttentionPlan,
        cache: KVCache,
    ) -> Tensor:
        """Run T positions; writes their keys and values into the head's cache.

        Args:
            token_ids: [T] int64, the token after each position.
            hidden: [T, hidden_size], from `fuse`, or the output for the previous position.
            positions, slot_mapping: [T] int64.
            plan: attention plan.
            cache: of one layer; updated in place.

        Returns:
            Hidden states [T, hidden_size].
        """
        weights, attention, eps = self._weights, self._attention, self.spec.layer.norm_eps
        num_heads, num_qk = attention.num_heads, attention.num_heads + attention.num_kv_heads
        cos, sin = self._ropes.at(positions)[attention.rope]
        embedded = weights.embedding(token_ids)
        embedded, _ = ops.rms_norm(embedded, weights.embedding_norm, eps)
        normed, _ = ops.rms_norm(hidden, weights.hidden_norm, eps)
        residual = normed if self.spec.norm_before_residual else hidden
        qkv = weights.embedding_qkv(embedded) + weights.hidden_qkv(normed)
        heads = qkv.view(len(qkv), -1, attention.head_dim)
        qk = ops.rotary(heads[:, :num_qk], cos, sin)
        q, k, v = qk[:, :num_heads], qk[:, num_heads:], heads[:, num_qk:]
        ((k_cache, v_cache),) = cache.layers
        ops.write_kv(k, v, k_cache, v_cache, slot_mapping)
        x = weights.out(ops.attend(q, k_cache, v_cache, plan, attention.scale))
        x, residual = ops.rms_norm(x, weights.mlp_norm, eps, residual)
        hidden = residual + weights.down(ops.silu_mul(weights.gate_up(x)))
        return ops.rms_norm(hidden, weights.norm, eps)[0] if self.spec.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's tokens [s, vocab_size] float32 from hidden states [s, ...]."""
        weights, layer = self._weights, self.spec.layer
        if not self.spec.norm_output:
            hidden, _ = ops.rms_norm(hidden, weights.norm, layer.norm_eps)
        logits = weights.head(hidden).float()
        if weights.targets is None:
            return logits
        whole = torch.full((len(logits), layer.vocab_size), UNDRAFTABLE)
        return whole.index_copy_(1, weights.targets, logits)


def load_head(
    checkpoint: Checkpoint,
    spec: Eagle3Spec,
    target: ModelWeights[L, X, E],
    placement: WeightPlacement[L, X, E],
    device: torch.device | str = "cpu",
) -> HeadWeights[L, E]:
    """Load all weights of a head.

    Args:
        checkpoint: the head's.
        spec: of the head.
        target: weights of its target.
        placement: where and in which layout to keep them, as the target's.
        device: of the placement.

    Raises:
        ConfigError: see `Head`.
    """
    stored = _open(checkpoint, spec, device)

    def norm(name: str) -> Tensor:
        return placement.norm(stored.read(f"{name}.weight"))

    def linear(*names: str, columns: slice = slice(None)) -> L:
        parts = [stored.read(f"{name}.weight") for name in names]
        return placement.linear([part[:, columns].contiguous() for part in parts], [])

    found, hidden = stored.shapes, spec.layer.hidden_size
    embedding = target.embedding
    if "embed_tokens.weight" in found:
        embedding = placement.embedding(stored.read("embed_tokens.weight"))
    qkv = [f"midlayer.self_attn.{name}_proj" for name in "qkv"]
    return HeadWeights(
        embedding=embedding,
        feature_norms=[norm(name) for name, _ in spec.feature_norms],
        fuse=linear("fc"),
        embedding_norm=norm("midlayer.input_layernorm"),
        hidden_norm=norm("midlayer.hidden_norm"),
        embedding_qkv=linear(*qkv, columns=slice(hidden)),
        hidden_qkv=linear(*qkv, columns=slice(hidden, None)),
        out=linear("midlayer.self_attn.o_proj"),
        mlp_norm=norm("midlayer.post_attention_layernorm"),
        gate_up=linear("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
        down=linear("midlayer.mlp.down_proj"),
        norm=norm("norm"),
        head=linear("lm_head") if "lm_head.weight" in found else target.head,
        targets=_targets(checkpoint, spec, stored, device),
    )


def head_shapes(spec: Eagle3Spec) -> dict[str, Shape]:
    """Shapes of all tensors that a head may have, by name; `_OPTIONAL` may be absent."""
    layer, reduced = spec.layer, spec.draft_vocab_size
    hidden, inner, vocab = layer.hidden_size, layer.layers[0].dense_mlp.width, layer.vocab_size
    q_width, kv_width = layer.layers[0].attention.q_width, layer.layers[0].attention.kv_width
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    return {
        **{f"{name}.weight": (width,) for name, width in spec.feature_norms},
        "fc.weight": (hidden, len(spec.aux_layers) * spec.target_hidden_size),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        f"{attention}.q_proj.weight": (q_width, 2 * hidden),
        f"{attention}.k_proj.weight": (kv_width, 2 * hidden),
        f"{attention}.v_proj.weight": (kv_width, 2 * hidden),
        f"{attention}.o_proj.weight": (hidden, q_width),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        f"{mlp}.gate_proj.weight": (inner, hidden),
        f"{mlp}.up_proj.weight": (inner, hidden),
        f"{mlp}.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (reduced, hidden),
        "d2t": (reduced,),
        "t2d": (vocab,),
    }


def _open(checkpoint: Checkpoint, spec: Eagle3Spec, device: torch.device | str) -> Weights:
    shapes = head_shapes(spec)
    is_meta = torch.device(device).type == "meta"
    if is_meta or checkpoint.random_weights:
        drawn = {name: shapes[name] for name in shapes if name not in _OPTIONAL}
        drawn["lm_head.weight"] = shapes["lm_head.weight"]
        return EmptyWeights(drawn) if is_meta else RandomWeights(drawn, device)
    stored = StoredWeights(
        {
            _plain_name(name): tensor
            for name, tensor in safetensors.read_folder(checkpoint.path, _DTYPES).items()
            if not name.endswith(".rotary_emb.inv_freq")
        }
    )
    absent = [name for name in _OPTIONAL if name not in stored.shapes]
    same_width = spec.layer.hidden_size == spec.target_hidden_size
    is_whole = spec.draft_vocab_size == spec.layer.vocab_size
    for name, may_be_absent in (
        ("embed_tokens.weight", same_width),
        ("lm_head.weight", same_width and is_whole),
        ("d2t", is_whole),
        ("t2d", True),
    ):
        if name in absent and not may_be_absent:
            absent.remove(name)
    expected = {name: shape for name, shape in shapes.items() if name not in absent}
    check_shapes(f"{checkpoint.path}: EAGLE-3 head", stored.shapes, expected)
    return stored


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def _targets(
    checkpoint: Checkpoint, spec: Eagle3Spec, stored: Weights, device: torch.device | str
) -> Tensor | None:
    ids = torch.arange(spec.draft_vocab_size)
    if "d2t" in stored.shapes:
        ids = ids + stored.read("d2t")
        if int(ids.min()) < 0 or int(ids.max()) >= spec.layer.vocab_size:
            raise ConfigError(
                f"{checkpoint.path}: d2t maps to tokens {int(ids.min())} to {int(ids.max())}; "
                f"allowed: 0 to {spec.layer.vocab_size - 1}"
            )
    if torch.equal(ids, torch.arange(spec.layer.vocab_size)):
        return None
    return ids.to(device, torch.int64)
