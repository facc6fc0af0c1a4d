"""Model specification: shapes and variants of its layers, as data. A model family is a function
that creates it from a checkpoint's settings; the decoders execute it and know no family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from inflight.config import EngineConfig, KVDtype
from inflight.errors import ConfigError
from inflight.kv.layout import KVGroup, KVLayout

RopeType = Literal["none", "default", "linear", "dynamic", "yarn", "llama3", "longrope"]
NormKind = Literal["rms", "layer"]
QkNormKind = Literal["head", "heads", "full"]
Activation = Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Parameters of the rotary embedding (arXiv:2104.09864).

    Attributes:
        theta: base of the geometric series of wavelengths.
        type: scaling method for long contexts; "none" rotates nothing.
        rotary_dim: leading columns of a head that are rotated; 0 for all.
        factor: scaling factor of the context length.
        original_max_position: the trained context length (dynamic, yarn, llama3, longrope).
        low_freq_factor, high_freq_factor: llama3: frequencies with wavelengths above original / low
            are divided by the factor, those below original / high are kept, others interpolated.
        attention_factor: yarn, longrope: multiplies cos and sin; None derives it from the factor.
        beta_fast, beta_slow: yarn: rotations over the trained context between which to interpolate.
        mscale, mscale_all_dim: yarn: modify the derived attention factor if both are set.
        truncate: yarn: round the bounds of the interpolation to integer columns.
        divisors: one per frequency, if the checkpoint has them (GGUF's rope_freqs).
        long_divisors: longrope: those of engines whose sequences may exceed the trained context.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    divisors: tuple[float, ...] | None = None
    long_divisors: tuple[float, ...] | None = None
    rotary_dim: int = 0

    def max_context(self, trained: int) -> int:
        """The context length with this scaling, for a trained context length."""
        if self.type in ("linear", "dynamic"):
            return int(trained * self.factor)
        if self.type == "yarn":
            return max(trained, int(self.original_max_position * self.factor))
        return trained


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Scaling of queries by position, q *= 1 + beta * ln(1 + floor(position / length)).

    Attributes:
        beta: see above.
        length: the trained context length, within which nothing is scaled.
    """

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (MLA, arXiv:2405.04434): keys and values of all heads are products of one
    vector per token, its latent, which is cached instead of them.

    `torch_ops.latent` defines it.

    Attributes:
        q_rank: of queries, which are products of such a vector as well; 0 if they are not.
        rank: columns of the latent.
        nope_dim: columns of a head's query and key that RoPE does not rotate.
        rope_dim: those behind them that it rotates; of keys, all heads share them.
        v_dim: columns of a head's value.
        norm_eps: added to the mean square in the norms of both vectors.
    """

    q_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float = 1e-6

    @property
    def qk_dim(self) -> int:
        """Columns of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Columns of the cached key: the latent, and what all heads share."""
        return self.rank + self.rope_dim

    def up_elements(self, num_heads: int) -> int:
        """Of the matrices that make keys and values of latents, which are never quantised."""
        return num_heads * (self.nope_dim + self.v_dim) * self.rank


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention of one layer (arXiv:2305.13245), or latent attention.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, G and D. With latent attention those of queries and
            keys as the cache has them: one KV head of latent.key_dim columns.
        rope: of queries and keys.
        window: tokens that a query attends to, its own included; 0 for all previous ones.
        qkv_bias, out_bias: whether those projections have a bias.
        qk_norm: norm of q and k: of each head with weights [D] ("head") or [H, D] and [G, D]
            ("heads"), or of all heads at once with weights [H * D] and [G * D] ("full").
        norm_after_rope: whether qk_norm follows RoPE instead of preceding it.
        softmax_scale: of the scores; None for D ** -0.5.
        score_cap: scores become score_cap * tanh(score / score_cap); 0 for no cap.
        query_scaling: of queries, after RoPE.
        sinks: whether each head has a score that takes part in the softmax, without a value.
        latent: of latent attention; None for any other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNormKind | None = None
    norm_after_rope: bool = False
    softmax_scale: float | None = None
    score_cap: float = 0.0
    query_scaling: QueryScaling | None = None
    sinks: bool = False
    latent: LatentSpec | None = None

    @property
    def q_width(self) -> int:
        """Columns of the queries that attend to the cache."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the keys in the cache."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Rows of the fused weight that the layer's input is multiplied by."""
        latent = self.latent
        if latent is None:
            return self.q_width + 2 * self.kv_width
        return (latent.q_rank or self.num_heads * latent.qk_dim) + latent.key_dim

    @property
    def out_width(self) -> int:
        """Columns of the output projection."""
        return self.q_width if self.latent is None else self.num_heads * self.latent.v_dim

    @property
    def rope_dim(self) -> int:
        """Columns of a head for which RoPE has angles, though it may leave some of them."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def kv_group(self) -> KVGroup:
        """What is kept of a token; without layers."""
        if self.latent is None:
            return KVGroup((), self.num_kv_heads, self.head_dim, self.head_dim, self.window)
        return KVGroup((), 1, self.latent.key_dim, 0, self.window, self.latent.rank)

    def matrix_elements(self, hidden_size: int) -> int:
        total = hidden_size * (self.qkv_width + self.out_width)
        if self.latent is None:
            return total
        return total + self._q_up_elements + self.latent.up_elements(self.num_heads)

    def largest_matrix_elements(self, hidden_size: int) -> int:
        """Of q, k and v together, which are fused, or of another matrix if that is larger."""
        widest = max(self.qkv_width, self.out_width)
        return max(hidden_size * widest, self._q_up_elements)

    @property
    def _q_up_elements(self) -> int:
        """Of the matrix that makes queries of vectors of q_rank."""
        latent = self.latent
        return 0 if latent is None else latent.q_rank * self.num_heads * latent.qk_dim

    @property
    def scale(self) -> float:
        """Of attention scores, before the softmax."""
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    def qk_norm_shape(self, num_heads: int) -> tuple[int, ...]:
        """Of the weight of qk_norm for so many heads."""
        shapes: dict[QkNormKind, tuple[int, ...]] = {
            "head": (self.head_dim,),
            "heads": (num_heads, self.head_dim),
            "full": (num_heads * self.head_dim,),
        }
        assert self.qk_norm is not None
        return shapes[self.qk_norm]


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward part of one layer: down(act(gate(x)) * up(x)), as SwiGLU (arXiv:2002.05202), or
    without a gate down(act(up(x))).

    Attributes:
        width: of gate and up.
        bias: whether all of them have one.
        activation: act: silu or gelu_tanh with a gate, gelu_tanh or relu2 without; or both act and
            gate of gpt-oss.
        gated: whether there is a gate.
    """

    width: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True

    def matrix_elements(self, hidden_size: int) -> int:
        return (2 + self.gated) * self.width * hidden_size

    def largest_matrix_elements(self, hidden_size: int) -> int:
        """Of gate and up together, which are fused."""
        return (1 + self.gated) * self.width * hidden_size


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts in place of one layer's feed-forward part (arXiv:1701.06538): the sum of
    the outputs of the top_k experts that the router scores highest, each times its score.

    `torch_ops.moe` defines routing.

    Attributes:
        expert: each expert.
        num_experts: E.
        top_k: experts per token.
        renormalize: whether the scores of a token's experts are divided by their sum; those of a
            softmax are then a softmax over these experts alone.
        score: of an expert, from the router's logit.
        router_bias: whether the router has one.
        select_bias: whether experts are chosen by score plus a bias.
        num_groups, top_groups: into which experts are divided, and those that a token's are in.
        best_of_group: scores of a group that are added to rank it: its best one, or best two.
        routing_scale: multiplies scores in the sum.
        shared: an expert of all tokens, whose output is added; None if there is none.
        shared_gate: whether the output of the shared expert is multiplied by a sigmoid gate.
    """

    expert: MlpSpec
    num_experts: int
    top_k: int
    renormalize: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    select_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: Literal[1, 2] = 2
    routing_scale: float = 1.0
    shared: MlpSpec | None = None
    shared_gate: bool = False

    def matrix_elements(self, hidden_size: int) -> int:
        """Of all experts and the router."""
        shared = 0 if self.shared is None else self.shared.matrix_elements(hidden_size)
        gates = self.num_experts + self.shared_gate
        experts = self.num_experts * self.expert.matrix_elements(hidden_size)
        return experts + shared + gates * hidden_size

    def largest_matrix_elements(self, hidden_size: int) -> int:
        """Of gate and up of the widest expert."""
        widths = [self.expert] if self.shared is None else [self.expert, self.shared]
        return max(mlp.largest_matrix_elements(hidden_size) for mlp in widths)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    By default x += attention(norm(x)); x += mlp(norm(x)).

    Attributes:
        pre_norms: whether attention and mlp have a norm of their input.
        post_norms: whether they have a norm of their output, before it is added to x.
        parallel: x += attention(norm(x)) + mlp(norm(x)), with one norm for both.
        residual_scale: multiplies what is added to x.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    residual_scale: float = 1.0

    @property
    def dense_mlp(self) -> MlpSpec:
        """The feed-forward part of a layer that is known not to be a mixture of experts."""
        assert isinstance(self.mlp, MlpSpec)
        return self.mlp


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Sizes are in elements.

    Attributes:
        family: name of its family (see `registry`).
        norm_eps: added to the mean square, or the variance, in each norm.
        max_position_embeddings: the context length that the checkpoint states.
        eos_token_ids: each of them ends a sequence.
        bos_token_id: begins a sequence; None if the model has none.
        norm: kind of all norms, RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450).
        norm_bias: whether the norms of the residual stream have a bias.
        embedding_scale: multiplies embeddings, rounded to the dtype of the activations.
        logit_scale: multiplies logits.
        num_nextn_layers: layers stored behind the others that predict further tokens. They are not
            loaded.
        logit_cap: logits become logit_cap * tanh(logit / logit_cap), after the scale; 0 for no cap.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm: NormKind = "rms"
    norm_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    num_nextn_layers: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The distinct attention specs of the layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers))

    @property
    def matrix_elements(self) -> int:
        """Number of elements of all weight matrices, with the embedding and the output layer."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.layer_elements + embeddings

    @property
    def largest_matrix_elements(self) -> int:
        """Of the largest weight of a linear layer, with those that it is fused with."""
        hidden = self.hidden_size
        return max(
            part.largest_matrix_elements(hidden)
            for layer in self.layers
            for part in (layer.attention, layer.mlp)
        )

    @property
    def matrix_elements_per_layer(self) -> int:
        """Mean number of elements of a layer's weight matrices."""
        return self.layer_elements // self.num_layers

    @property
    def layer_elements(self) -> int:
        """Number of elements of all layers' weight matrices."""
        return sum(
            part.matrix_elements(self.hidden_size)
            for layer in self.layers
            for part in (layer.attention, layer.mlp)
        )

    @property
    def up_elements(self) -> int:
        """Of the layers' weight matrices that are never quantised: those of latents."""
        return sum(
            layer.attention.latent.up_elements(layer.attention.num_heads)
            for layer in self.layers
            if layer.attention.latent is not None
        )

    @property
    def quantizable_elements(self) -> int:
        """Of the layers' other weight matrices."""
        return self.layer_elements - self.up_elements

    @property
    def max_context(self) -> int:
        """The context length with RoPE scaling applied."""
        trained = self.max_position_embeddings
        return min(attention.rope.max_context(trained) for attention in self.attentions)

    def max_model_len(self, config: EngineConfig) -> int:
        """The maximum sequence length of an engine with these settings.

        Raises:
            ConfigError: the setting exceeds the model's context.
        """
        if config.max_model_len is None:
            return self.max_position_embeddings
        if config.max_model_len > self.max_context:
            raise ConfigError(
                f"max_model_len: {config.max_model_len} is more than the model's context; "
                f"allowed: up to {self.max_context}"
            )
        return config.max_model_len

    def kv_layout(self, dtype: KVDtype, *, frees_windows: bool = False) -> KVLayout:
        """Its KV cache layout in this dtype (see `KVLayout`)."""
        members: dict[KVGroup, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.attention.kv_group, []).append(index)
        groups = (replace(group, layers=tuple(layers)) for group, layers in members.items())
        return KVLayout(tuple(groups), dtype, frees_windows)
