"""Interface of a model family, and the settings that all families share.

A family defines which checkpoints belong to it, how their settings become a `ModelSpec`, and the
names of its tensors. Each family is a module of `families` with a constant FAMILY.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inflight.checkpoint.checked_fields import CheckedFields
from inflight.models.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
)

Format = Literal["gguf", "huggingface"]

Slot = tuple[str, str]
"""A layer tensor's names without suffix: in a Hugging Face folder, and in a GGUF file."""

TENSORS: Mapping[str, Slot] = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "out": ("self_attn.o_proj", "attn_output"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}
"""The tensors of a layer with Llama's names, which most families use. Slots of the same name are
parts of one fused tensor, in this order."""

SANDWICH: Mapping[str, Slot] = {
    **TENSORS,
    "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}
"""The same with norms of the outputs, as Gemma 2 names them."""

EXPERTS: Mapping[str, Slot] = {
    **TENSORS,
    "router": ("mlp.gate", "ffn_gate_inp"),
    "expert_gate": ("mlp.experts.{}.gate_proj", "ffn_gate_exps"),
    "expert_up": ("mlp.experts.{}.up_proj", "ffn_up_exps"),
    "expert_down": ("mlp.experts.{}.down_proj", "ffn_down_exps"),
}
"""The same with experts, as Qwen 3 names them: {} is an expert's number. A folder's tensor that
stacks matrices is named as if they were apart, with the number at its end."""

MAX_EXPERTS = 4096
"""Of a layer: several times those of published models, and few enough to name each in a refusal."""

WHOLE_TENSORS = frozenset({"select_bias", "sinks"})
"""Slots of a single tensor, whose names include the suffix if there is one."""

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
"""Activations by config.json's `hidden_act`."""

_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """A checkpoint's settings, with those that all families share already parsed.

    Attributes:
        fields: as the checkpoint names them.
        format: of the checkpoint.
        rope: the rotary embedding; that of full attention, if there are two.
        sliding_rope: the rotary embedding of layers with a sliding window.
        vocab_size: of embedding and head.
        tie_word_embeddings: whether the head is the embedding.
        eos_token_ids, bos_token_id: see ModelSpec.
        tensors: tensor names of a GGUF file, whose settings do not mention biases.
        slots: the family's names of a layer's tensors.
        has_nextn: whether the family's checkpoints have layers that predict further tokens.
    """

    fields: CheckedFields
    format: Format
    rope: RopeSpec
    sliding_rope: RopeSpec
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tensors: Collection[str] = ()
    slots: Mapping[str, Slot] = field(default_factory=lambda: TENSORS)
    has_nextn: bool = False

    def key(self, name: str) -> str:
        """The checkpoint's key for config.json's `name`."""
        return _GGUF_KEYS.get(name, name) if self.format == "gguf" else name

    def count(self, name: str, default: int | None = None) -> int:
        return self.fields.count(self.key(name), default)

    def number(self, name: str, default: float | None = None) -> float:
        return self.fields.number(self.key(name), default)

    @property
    def num_layers(self) -> int:
        stored = self.count("num_hidden_layers")
        # block_count includes them, num_hidden_layers does not.
        return stored - self.num_nextn_layers if self.format == "gguf" else stored

    @property
    def num_nextn_layers(self) -> int:
        """See ModelSpec; 0 in families that have none."""
        return self.count_or_zero("num_nextn_predict_layers") if self.has_nextn else 0

    def count_or_zero(self, name: str) -> int:
        """As `count`; 0 if it is 0 or absent."""
        return self.count(name) if self.fields.get(self.key(name)) else 0

    @property
    def max_position_embeddings(self) -> int:
        default = 2048 if self.format == "huggingface" else None
        return self.count("max_position_embeddings", default)

    def has_bias(self, flag: str, slot: str) -> bool:
        """Whether projections have a bias: a flag in config.json, the tensors in a GGUF file.

        Args:
            flag: the key of config.json.
            slot: one of these projections, see TENSORS.
        """
        if self.format == "gguf":
            return f"blk.0.{self.slots[slot][1]}.bias" in self.tensors
        return self.fields.flag(flag)

    def has_tensor(self, flag: str, slot: str) -> bool:
        """Whether layers have a norm: a flag in config.json, the tensors in a GGUF file."""
        if self.format == "gguf":
            return f"blk.0.{self.slots[slot][1]}.weight" in self.tensors
        return self.fields.flag(flag)

    def attention(self, **variants: Any) -> AttentionSpec:
        """The attention that the settings describe, with the family's own variants."""
        num_heads = self.count("num_attention_heads")
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=self.count("num_key_value_heads", num_heads),
            head_dim=self.count("head_dim", self.count("hidden_size") // num_heads),
            rope=self.rope,
            **variants,
        )

    def sliding(self, attention: AttentionSpec, window: int) -> AttentionSpec:
        """The same attention in a layer with a sliding window, which may have its own RoPE."""
        return replace(attention, window=window, rope=self.sliding_rope)

    def mlp(
        self,
        activation: Activation = "silu",
        aliases: Collection[str] = (),
        width: str = "intermediate_size",
        **variants: Any,
    ) -> MlpSpec:
        """The feed-forward part of all layers, or one of their experts.

        Args:
            activation: the family's; config.json names it as well.
            aliases: further names of it in the family's files.
            width: config.json's key of the width.
            variants: the family's own.

        Raises:
            ConfigError: config.json names another one.
        """
        # Gemma has both keys, of which the first takes precedence.
        keys = [key for key in ("hidden_activation", "hidden_act") if self.fields.get(key)]
        named = self.fields.get(keys[0]) if keys else None
        allowed = [name for name in _ACTIVATIONS if _ACTIVATIONS[name] == activation]
        if named is not None and named not in (*allowed, *aliases):
            raise self.fields.error(f"{keys[0]}: {named!r}; allowed: {' or '.join(allowed)}")
        return MlpSpec(self.count(width), activation=activation, **variants)

    def moe(self, expert: MlpSpec, renormalize: bool, **variants: Any) -> MoeSpec:
        """The mixture of experts that the settings describe, with the family's own variants.

        Raises:
            ConfigError: more than MAX_EXPERTS, more per token than there are, or groups that do not
                divide them.
        """
        # Files written since transformers 5 have the second name for most families.
        names = ("num_experts", "n_routed_experts")
        named = [name for name in names if self.key(name) in self.fields]
        num_experts = self.count(named[0] if named else "num_local_experts")
        if num_experts > MAX_EXPERTS:
            raise self.fields.error(f"{num_experts} experts; allowed: up to {MAX_EXPERTS}")
        top_k = self.count("num_experts_per_tok")
        if top_k > num_experts:
            raise self.fields.error(
                f"{self.key('num_experts_per_tok')}: {top_k}; allowed: up to the number of "
                f"experts, {num_experts}"
            )
        moe = MoeSpec(expert, num_experts, top_k, renormalize, **variants)
        if num_experts % moe.num_groups or top_k > num_experts // moe.num_groups * moe.top_groups:
            raise self.fields.error(
                f"{moe.top_groups} of {moe.num_groups} groups of {num_experts} experts; allowed: "
                f"groups of equal size, so many that {top_k} experts can be chosen"
            )
        return moe

    def renormalizes(self, in_gguf: bool) -> bool:
        """Whether weights of a token's experts sum to 1: norm_topk_prob.

        Args:
            in_gguf: the family's value, which its GGUF files do not state.
        """
        return self.fields.flag(
            self.key("norm_topk_prob"), in_gguf if self.format == "gguf" else False
        )

    def window(self, default: int | None = None) -> int:
        """The sliding window; 0 for none, or for one as long as the context.

        Args:
            default: if config.json does not have the key; null means no window.
        """
        key = self.key("sliding_window")
        window = self.fields.get(key)
        if window is None and self.format == "huggingface" and key not in self.fields:
            window = default
        if not window:
            return 0
        window = self.fields.count(key, window)
        return window if window < self.max_position_embeddings else 0

    def cap(self, name: str, default: float) -> float:
        """A cap of scores or logits; 0 for none, which config.json states as null."""
        key = self.key(name)
        is_off = key in self.fields and self.fields.get(key) is None
        return 0.0 if is_off else self.number(name, default)

    def layer_types(self, is_sliding: Callable[[int], bool]) -> list[bool]:
        """Whether each layer has the sliding window: as listed in the checkpoint, else by the
        family's rule."""
        if self.format == "gguf":
            pattern = self.fields.get("attention.sliding_window_pattern")
            if isinstance(pattern, list) and len(pattern) == self.num_layers:
                return [bool(is_windowed) for is_windowed in pattern]
            if isinstance(pattern, int) and pattern > 0:  # every so many layers there is a full one
                return [(index + 1) % pattern != 0 for index in range(self.num_layers)]
            return [is_sliding(index) for index in range(self.num_layers)]
        listed = self.listed("layer_types", "full_attention", "sliding_attention")
        if listed is None:
            return [is_sliding(index) for index in range(self.num_layers)]
        return listed

    def listed(self, key: str, no: str, yes: str) -> list[bool] | None:
        """What config.json lists of each layer, one of two words; None if it does not.

        Raises:
            ConfigError: not so many words, or others.
        """
        listed, known = self.fields.get(key), {no: False, yes: True}
        if listed is None:
            return None
        whole = isinstance(listed, list) and len(listed) == self.num_layers
        if not whole or not all(isinstance(kind, str) and kind in known for kind in listed):
            raise self.fields.error(
                f"{key}: {listed!r}; allowed: {' or '.join(known)} for each of "
                f"{self.num_layers} layers"
            )
        return [known[kind] for kind in listed]

    def model(self, family: Family, layers: tuple[LayerSpec, ...]) -> ModelSpec:
        """The model of these layers, with what the family says of it as a whole."""
        eps = self.number(family.norm_eps, 1e-6 if self.format == "huggingface" else None)
        return ModelSpec(
            **family.model(self),
            num_nextn_layers=self.num_nextn_layers,
            family=family.name,
            vocab_size=self.vocab_size,
            hidden_size=self.count("hidden_size"),
            layers=layers,
            norm_eps=eps,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=self.tie_word_embeddings,
            eos_token_ids=self.eos_token_ids,
            bos_token_id=self.bos_token_id,
        )


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how its checkpoints are read.

    Attributes:
        name: of the family.
        layers: creates the layers from a checkpoint's settings.
        model: further arguments of `ModelSpec`.
        norm_eps: config.json's key of the norms' epsilon.
        defaults: values of keys that config.json may leave out, where they differ from Llama's.
        model_types: `model_type` in config.json.
        gguf_architectures: `general.architecture` in GGUF files.
        tensors: names of a layer's tensors.
        transposed_experts: formats that stack the matrices of experts transposed, with the rows of
            gate and up in turn, as gpt-oss.
        rope_pairs: formats in which RoPE rotates adjacent columns of q and k; `rotary` and the
            kernels rotate halves. No file states this.
        has_nextn: whether its checkpoints have layers that predict further tokens, which are not
            loaded.
        zero_centered_norms: formats that store the weights of norms minus one.
        ignored_keys: settings that change nothing in this family and that it does not read; others
            are refused (see `refusals.config_keys`).
    """

    name: str
    layers: Callable[[Settings], list[LayerSpec]]
    model_types: tuple[str, ...] = ()
    gguf_architectures: tuple[str, ...] = ()
    model: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    norm_eps: str = "rms_norm_eps"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Slot] = field(default_factory=lambda: TENSORS)
    transposed_experts: tuple[Format, ...] = ()
    rope_pairs: tuple[Format, ...] = ()
    zero_centered_norms: tuple[Format, ...] = ()
    has_nextn: bool = False
    ignored_keys: frozenset[str] = frozenset()
