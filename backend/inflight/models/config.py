"""What a checkpoint says about its model, checked: shapes, rotary embedding, ids that end a text.

Read from a GGUF file's metadata or a Hugging Face folder's config.json. What this engine would
compute wrongly is refused here, by name, before a byte of weights is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from inflight.checkpoint.gguf import GgufArray, GgufFile
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models import ARCHITECTURES
from inflight.models.layers.rope import RopeConfig

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

DEFAULT_KV_BYTES = 1 << 30
"""Of a pool on a CPU."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model. Counts are of the whole model, sizes are in elements.

    Attributes:
        architecture: a key of `models.ARCHITECTURES`.
        rms_norm_eps: added to the mean of squares in each norm.
        max_position_embeddings: the context that the checkpoint states.
        attention_bias, mlp_bias: whether those projections have one.
        eos_token_ids: each of them ends a text.
        bos_token_id: begins a text; None when the model has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def max_context(self) -> int:
        """Tokens that the rotary embedding can tell apart: the trained context, stretched."""
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            stretched = int(self.rope.original_max_position * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    def max_model_len(self, config: EngineConfig) -> int:
        """The longest sequence that an engine with these settings runs.

        Raises:
            ConfigError: the setting asks for more than the model can do.
        """
        if config.max_model_len is None:
            return self.max_position_embeddings
        if config.max_model_len > self.max_context:
            raise ConfigError(
                f"max_model_len: {config.max_model_len} is more than the model's context; "
                f"allowed: up to {self.max_context}"
            )
        return config.max_model_len

    def kv_block_bytes(self, config: EngineConfig) -> int:
        """Memory of one KV block: keys and values of block_size tokens in all layers."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * config.block_size * _ITEM_BYTES[config.dtype]

    def num_blocks(
        self, config: EngineConfig, free_bytes: int = DEFAULT_KV_BYTES, drafter_block_bytes: int = 0
    ) -> int:
        """KV blocks in the pool of an engine with these settings.

        Args:
            config: the engine's settings.
            free_bytes: memory for the pool where the settings do not say.
            drafter_block_bytes: of the block that a drafter keeps for each of these, in the same
                memory.

        Raises:
            ConfigError: there is no memory for one block.
        """
        if config.num_blocks is not None:
            return config.num_blocks
        block_bytes = self.kv_block_bytes(config) + drafter_block_bytes
        pool_bytes = (
            free_bytes if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
        )
        if pool_bytes < block_bytes:
            key = "gpu_memory" if config.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
            raise ConfigError(
                f"{key}: {max(0, pool_bytes)} bytes for the KV cache are too few; one block of "
                f"this model takes {block_bytes} bytes"
            )
        return pool_bytes // block_bytes


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read and check the settings of a checkpoint's model; its weights stay where they are.

    Raises:
        ConfigError: unreadable, inconsistent, or of a kind that this engine does not run.
    """
    if checkpoint.format == "gguf":
        return from_gguf(GgufFile(checkpoint.path))
    return from_huggingface(checkpoint.path)


# ---------------------------------------------------------------- Hugging Face


def from_huggingface(folder: Path) -> ModelConfig:
    """Read config.json, and generation_config.json for further end-of-sequence ids.

    Raises:
        ConfigError: see `read_config`.
    """
    path = folder / "config.json"
    raw = _Fields(_read_json(path), str(path))
    architecture = raw.text("model_type")
    _check_architecture(architecture, str(path), tuple(ARCHITECTURES))
    names = raw.get("architectures") or []
    if names and not any(str(name).endswith("ForCausalLM") for name in names):
        raise raw.error(f"architectures: {names} do not generate text; allowed: ...ForCausalLM")
    eos = raw.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.is_file():
        more = _read_json(generation).get("eos_token_id")
        eos = [*_as_list(eos), *_as_list(more)]
    return _llama_of_huggingface(raw, architecture, _token_ids(eos, raw))


def _llama_of_huggingface(
    raw: _Fields, architecture: str, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    """The shape of a model whose layers are Llama's."""
    if raw.get("quantization_config"):
        raise raw.error(
            "quantization_config: quantised Hugging Face checkpoints are not supported; "
            "use the unquantised one, or a GGUF file"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise raw.error(f"hidden_act: {raw.get('hidden_act')!r}; allowed: silu")
    max_position_embeddings = raw.count("max_position_embeddings", 2048)
    window = raw.get("sliding_window", 4096 if architecture == "mistral" else None)
    if window is not None and window < max_position_embeddings:
        raise raw.error(
            f"sliding_window: attention within {window} tokens is not supported; allowed: null"
        )
    num_heads = raw.count("num_attention_heads")
    hidden_size = raw.count("hidden_size")
    return _checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=raw.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=raw.count("intermediate_size"),
            num_layers=raw.count("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=raw.count("num_key_value_heads", num_heads),
            head_dim=raw.count("head_dim", hidden_size // num_heads),
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            rope=_rope_of_huggingface(raw, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=raw.flag("tie_word_embeddings"),
            attention_bias=raw.flag("attention_bias"),
            mlp_bias=raw.flag("mlp_bias"),
            eos_token_ids=eos_token_ids,
            bos_token_id=next(iter(_token_ids(raw.get("bos_token_id"), raw)), None),
        ),
        raw.where,
    )


def _rope_of_huggingface(raw: _Fields, max_position_embeddings: int) -> RopeConfig:
    # Since transformers 5 everything is in rope_parameters; before, the base stood beside it.
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise raw.error(f"rope_scaling: {nested!r} is not an object")
    rope = _Fields(nested, f"{raw.where}: rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.number("rope_theta", raw.number("rope_theta", 10000.0))
    for fields in (raw, rope):
        if fields.get("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor: only 1.0 is supported")
    if kind == "default":
        return RopeConfig(theta)
    original = rope.count("original_max_position_embeddings", max_position_embeddings)
    # Models that keep it beside the other settings mean that one.
    original = raw.count("original_max_position_embeddings", original)
    if kind == "linear":
        return RopeConfig(theta, "linear", rope.number("factor"))
    if kind == "dynamic":
        return RopeConfig(theta, "dynamic", rope.number("factor"), max_position_embeddings)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return RopeConfig(
            theta,
            "llama3",
            rope.number("factor"),
            original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        attention_factor = rope.get("attention_factor")
        return RopeConfig(
            theta,
            "yarn",
            rope.number("factor", max_position_embeddings / original),
            original,
            attention_factor=None if attention_factor is None else rope.number("attention_factor"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number("mscale", 0.0, low=0.0),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0, low=0.0),
            truncate=rope.flag("truncate", True),
        )
    raise rope.error(f"the type {kind!r}; allowed: default, linear, dynamic, yarn, llama3")


# ---------------------------------------------------------------- EAGLE-3


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head (see `models.eagle3`).

    Attributes:
        layer: the head's own, as a model of one layer: num_layers is 1, vocab_size the target's.
        draft_vocab_size: tokens that it can draft.
        target_hidden_size: of the model that it was trained for.
        aux_layers: the hidden states that it sees: those before these layers of the target, or
            after the last one where that is their number.
        norm_before_residual: whether what its norm makes of them goes around the layer, instead of
            they themselves.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False


def read_eagle3_config(checkpoint: Checkpoint, target: ModelConfig) -> Eagle3Config:
    """Read and check the settings of an EAGLE-3 head, in either of its public forms.

    The form of its authors, and of SGLang (python/sglang/srt/models/llama_eagle3.py), is a llama's
    config.json with draft_vocab_size, where the layers to look at may stand in `eagle_config`: by
    the number of the layer whose output it is, one less than ours. The form of vLLM's speculators
    (vllm/transformers_utils/configs/speculators/algos.py) has the llama's settings in
    `transformer_layer_config`; its layers are counted as ours.

    Raises:
        ConfigError: unreadable, of another kind, or for another model than the target.
    """
    if checkpoint.format != "huggingface":
        raise ConfigError(
            f"{checkpoint.path}: a drafter eagle3 is read from a folder with a config.json"
        )
    path = checkpoint.path / "config.json"
    outer = _Fields(_read_json(path), str(path))
    nested = outer.get("transformer_layer_config")
    raw = _Fields(nested, f"{path}: transformer_layer_config") if nested else outer
    names = outer.get("architectures") or []
    kind = outer.get("speculators_model_type", "eagle3")
    if kind != "eagle3" or (names and not any("eagle3" in str(name).lower() for name in names)):
        raise outer.error(
            f"{names or kind} is not an EAGLE-3 head; allowed: LlamaForCausalLMEagle3"
        )
    _check_architecture(raw.get("model_type", "llama"), raw.where, ("llama",))
    layer = replace(_llama_of_huggingface(raw, "llama", ()), num_layers=1)
    for field in ("attention_bias", "mlp_bias"):
        if getattr(layer, field):
            raise raw.error(f"{field}: true is not supported; allowed: false")
    if layer.vocab_size != target.vocab_size:
        raise raw.error(
            f"vocab_size: {layer.vocab_size}; the model's own is {target.vocab_size}, and the head "
            "must have been trained for that one"
        )
    target_hidden_size = outer.count("target_hidden_size", layer.hidden_size)
    if target_hidden_size != target.hidden_size:
        raise outer.error(
            f"the head is for a hidden_size of {target_hidden_size}; the model has "
            f"{target.hidden_size}"
        )
    draft_vocab_size = outer.count("draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise outer.error(
            f"draft_vocab_size: {draft_vocab_size}; allowed: up to vocab_size ({layer.vocab_size})"
        )
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        aux_layers=_aux_layers(outer, target.num_layers),
        norm_before_residual=outer.flag("norm_before_residual", nested is not None),
    )


def _aux_layers(raw: _Fields, num_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    aux_layers = raw.get(key)
    if aux_layers is None:
        inner = raw.get("eagle_config") or {}
        if not inner.get("use_aux_hidden_state", True):
            raise raw.error("eagle_config: use_aux_hidden_state: false is not supported")
        ids = inner.get(key)
        # The default of the head's authors, who say so in code alone.
        aux_layers = [2, num_layers // 2, num_layers - 3] if ids is None else [i + 1 for i in ids]
    whole = isinstance(aux_layers, list) and all(isinstance(tap, int) for tap in aux_layers)
    if not whole or not aux_layers or not all(0 <= tap <= num_layers for tap in aux_layers):
        raise raw.error(
            f"{key}: the hidden states before the layers {aux_layers} are not there; "
            f"the model has {num_layers} layers"
        )
    return tuple(aux_layers)


# ---------------------------------------------------------------- GGUF


def from_gguf(file: GgufFile) -> ModelConfig:
    """Read a GGUF file's metadata.

    Raises:
        ConfigError: see `read_config`.
    """
    where = str(file.path)
    architecture = file.metadata.get("general.architecture")
    # llama.cpp's converter files Mistral under this name too.
    _check_architecture(architecture, where, ("llama",))
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    raw = _Fields(own, f"{where}: {architecture}")
    if raw.get("expert_count"):
        raise raw.error("expert_count: mixtures of experts are not supported")
    max_position_embeddings = raw.count("context_length")
    window = raw.get("attention.sliding_window")
    if window and window < max_position_embeddings:
        raise raw.error(f"attention.sliding_window: {window} tokens; windows are not supported")
    num_heads = raw.count("attention.head_count")
    hidden_size = raw.count("embedding_length")
    head_dim = raw.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.count(key, head_dim) != head_dim:
            raise raw.error(f"{key}: {raw.get(key)}; only that of the keys is supported")
    vocabulary = file.metadata.get("tokenizer.ggml.tokens")
    counted = vocabulary.count if isinstance(vocabulary, GgufArray) else None
    tokenizer = _Fields(file.metadata, where)
    eos = [tokenizer.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return _checked(
        ModelConfig(
            architecture=str(architecture),
            vocab_size=raw.count("vocab_size", counted),
            hidden_size=hidden_size,
            intermediate_size=raw.count("feed_forward_length"),
            num_layers=raw.count("block_count"),
            num_heads=num_heads,
            num_kv_heads=raw.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=raw.number("attention.layer_norm_rms_epsilon"),
            rope=_rope_of_gguf(raw, file, max_position_embeddings),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            eos_token_ids=_token_ids([i for i in eos if i is not None], tokenizer),
            bos_token_id=next(
                iter(_token_ids(tokenizer.get("tokenizer.ggml.bos_token_id"), tokenizer)), None
            ),
        ),
        where,
    )


def _rope_of_gguf(raw: _Fields, file: GgufFile, max_position_embeddings: int) -> RopeConfig:
    theta = raw.number("rope.freq_base", 10000.0)
    kind = raw.get("rope.scaling.type", "none")
    divisors = _rope_divisors(file)
    # The key before there were types.
    factor = raw.number("rope.scaling.factor", raw.number("rope.scale_linear", 1.0))
    original = raw.count("rope.scaling.original_context_length", max_position_embeddings)
    if kind in ("none", "linear"):
        if factor == 1.0:
            return RopeConfig(theta, divisors=divisors)
        return RopeConfig(theta, "linear", factor, divisors=divisors)
    if kind == "yarn":
        # llama.cpp derives the attention factor itself and multiplies this onto it.
        extra = raw.number("rope.scaling.attn_factor", 1.0)
        derived = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original,
            attention_factor=derived * extra,
            beta_fast=raw.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=raw.number("rope.scaling.yarn_beta_slow", 1.0),
            divisors=divisors,
        )
    raise raw.error(f"rope.scaling.type: {kind!r}; allowed: none, linear, yarn")


def _rope_divisors(file: GgufFile) -> tuple[float, ...] | None:
    """Llama 3's scaling, which GGUF states as one divisor per frequency."""
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ConfigError(f"{file.path}: {name}: this kind of scaling is not supported")
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type.name != "F32":
        raise ConfigError(
            f"{file.path}: rope_freqs.weight has the type {tensor.type.name}; allowed: F32"
        )
    values = np.frombuffer(tensor.data.tobytes(), "<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"{file.path}: rope_freqs.weight has values that are not above 0")
    return tuple(float(value) for value in values)


# ---------------------------------------------------------------- checks


def _check_architecture(architecture: Any, where: str, allowed: tuple[str, ...]) -> None:
    if architecture not in allowed:
        raise ConfigError(
            f"{where}: the architecture {architecture!r} is not supported; allowed: "
            f"{', '.join(allowed)}"
        )


def _checked(model: ModelConfig, where: str) -> ModelConfig:
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"{where}: {model.num_heads} attention heads cannot share {model.num_kv_heads} "
            "key-value heads evenly"
        )
    if model.head_dim % 2:
        raise ConfigError(f"{where}: head_dim {model.head_dim} is odd: its columns rotate in pairs")
    divisors = model.rope.divisors
    if divisors is not None and len(divisors) != model.head_dim // 2:
        raise ConfigError(
            f"{where}: rope_freqs.weight has {len(divisors)} values for {model.head_dim // 2} "
            "frequencies"
        )
    # A checkpoint's own id that lies outside the vocabulary can never be chosen: harmless.
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return raw


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _token_ids(value: Any, raw: _Fields) -> tuple[int, ...]:
    ids = _as_list(value)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise raw.error(f"{token_id!r} is not a token id")
    return tuple(dict.fromkeys(ids))


class _Fields:
    """Settings of one place, read with a check of type and range. null counts as absent."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.where = where
        self._raw = raw

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what}")

    def get(self, key: str, default: Any = None) -> Any:
        # A sliding_window of null is the exception: it says that there is none.
        if key == "sliding_window" and key in self._raw:
            return self._raw[key]
        value = self._raw.get(key)
        return default if value is None else value

    def text(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            raise self.error(f"{key}: is missing")
        if not isinstance(value, str):
            raise self.error(f"{key}: {value!r} is not a name")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            shown = "differs by layer" if isinstance(value, GgufArray) else repr(value)
            raise self.error(f"{key}: {shown}; allowed: one whole number, 1 or more")
        return value

    def number(self, key: str, default: float | None = None, low: float = 1e-30) -> float:
        value = self.get(key, default)
        allowed = isinstance(value, int | float) and not isinstance(value, bool)
        if not allowed or not math.isfinite(value) or value < low:
            raise self.error(f"{key}: {value!r}; allowed: a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key}: {value!r}; allowed: true, false")
        return value
