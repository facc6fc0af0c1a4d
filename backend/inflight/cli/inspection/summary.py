"""What is understood of a checkpoint: its model, its tokenizer, and where it can run."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from inflight.checkpoint import safetensors
from inflight.checkpoint.gguf import GgufFile
from inflight.checkpoint.locate import Checkpoint
from inflight.cli.inspection.memory_plan import MemoryPlan, host_weight_bytes, plan_memory
from inflight.config import EngineConfig, KVDtype
from inflight.execution import factory
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.loader import linear_shapes, weight_shapes
from inflight.models.quantization.choice import (
    UNQUANTISED,
    kept_in_layers,
    linear_format,
    rounds_weights,
)
from inflight.models.quantization.grouped_memory import KeptValues
from inflight.models.quantization.recognition import format_of
from inflight.models.registry import read_spec
from inflight.models.spec import LatentSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec
from inflight.models.stored.weights import open_weights
from inflight.text.tokenizer import Tokenizer

_BITS = {"float32": 32, "bfloat16": 16}
_KV_DTYPES: tuple[KVDtype, ...] = ("float32", "bfloat16", "fp8", "int8")


class NamedToken(msgspec.Struct, frozen=True):
    """A token id and its text; None if the tokenizer does not have it."""

    id: int
    text: str | None


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """Attention that some layers have in common.

    Attributes:
        num_layers: how many.
        num_heads, num_kv_heads, head_dim: of queries, of keys and values, and their width; with
            latent attention as the KV cache has them.
        latent: sizes of latent attention (see `LatentSpec`); None for any other.
        window: tokens that a query attends to; 0 for all.
        rope: the parameters of RoPE that differ from their defaults, and theta.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: dict[str, int] | None
    window: int
    rope: dict[str, Any]


class LinearLayers(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's linear layers run, the output layer excepted.

    Attributes:
        format: fp8, int8 or both, or the types that are kept in groups, such as int4 or those of a
            GGUF file; none for the dtype of activations.
        weight_only: whether activations keep 16 or 32 bits where weights have fewer; otherwise
            both are of the same type.
        is_rounded: whether weights are rounded to 4 bits when they are loaded.
        bits: of a value of their weights; with its share of scales where these are of groups.
        weight_bytes: of all weights of the model, by device that runs them so. For a value of 8
            bits with scales of rows, a GPU has 1 byte, a CPU 4.
    """

    format: str
    weight_only: bool
    is_rounded: bool
    bits: float
    weight_bytes: dict[str, int]


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Mixtures of experts of one kind.

    Attributes:
        num_layers: that have one.
        num_experts, top_k: experts of a layer, and those that a token uses.
        width, shared_width: of each expert, and of the one that all tokens use; 0 without one.
    """

    num_layers: int
    num_experts: int
    top_k: int
    width: int
    shared_width: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint.

    Attributes:
        name, path, format: of the checkpoint; the format is gguf or huggingface.
        file_bytes: of its weights' files.
        stored_types: number of tensors by type, such as BF16 or Q4_K; empty for random weights.
        quantization: the format of a folder's quantised weights; None if they are not.
        linear_layers: how they run.
        family: that reads it.
        num_parameters: of the model; tied ones count once.
        num_layers, hidden_size, vocab_size: of the model.
        mlp_widths: the distinct ones of its dense layers.
        experts: the distinct mixtures of experts of its layers.
        attention: the distinct ones of its layers.
        tied: whether the output layer is the embedding.
        trained_context: the context length that the checkpoint states.
        max_context: with RoPE's scaling, in tokens.
        kv_bytes_per_token: by dtype of the KV cache.
        tokenizer: its kind; None if there is none.
        chat_template: where it is; None if there is none.
        bos: begins a sequence; None if the model has none.
        stop_tokens: each of them ends an output.
        obstacles: by device, why the model cannot run there; None if it can.
        memory: of an engine on this machine.
    """

    name: str
    path: str
    format: str
    file_bytes: int
    stored_types: dict[str, int]
    quantization: str | None
    linear_layers: LinearLayers
    family: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    mlp_widths: list[int]
    experts: list[Experts]
    attention: list[Attention]
    tied: bool
    trained_context: int
    max_context: int
    kv_bytes_per_token: dict[str, int]
    tokenizer: str | None
    chat_template: str | None
    bos: NamedToken | None
    stop_tokens: list[NamedToken]
    obstacles: dict[str, str | None]
    memory: MemoryPlan


def summarize(config: EngineConfig, checkpoint: Checkpoint) -> Summary:
    """Read all of a checkpoint but its weights.

    Args:
        config: settings of the engine that would run it.
        checkpoint: the model's files.

    Raises:
        ConfigError: it cannot be loaded with these settings, with the reason.
    """
    checkpoint = dataclasses.replace(checkpoint, random_weights=config.random_weights)
    spec = read_spec(checkpoint)
    shapes = weight_shapes(spec)
    reads_weights = config.device != "echo" and not config.random_weights
    if reads_weights:
        open_weights(checkpoint, spec, shapes)  # raises if tensors are missing
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    tokenizer = Tokenizer.load_if_present(checkpoint)
    ends = {*spec.eos_token_ids, *(tokenizer.eos_ids if tokenizer is not None else ())}
    texts = _texts(tokenizer, {*ends, spec.bos_token_id})
    memory = plan_memory(config, checkpoint, spec, num_parameters)
    mlps = [layer.mlp for layer in spec.layers]
    return Summary(
        name=checkpoint.name,
        path=str(checkpoint.path),
        format=checkpoint.format,
        file_bytes=_file_bytes(checkpoint) if reads_weights else 0,
        stored_types=_stored_types(checkpoint) if reads_weights else {},
        quantization=_quantization(checkpoint),
        linear_layers=_linear_layers(config, checkpoint, spec, num_parameters, memory),
        family=spec.family,
        num_parameters=num_parameters,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        mlp_widths=list(dict.fromkeys(mlp.width for mlp in mlps if isinstance(mlp, MlpSpec))),
        experts=_experts(spec),
        attention=_attention(spec),
        tied=spec.tie_word_embeddings,
        trained_context=spec.max_position_embeddings,
        max_context=spec.max_context,
        kv_bytes_per_token={dtype: spec.kv_layout(dtype).block_bytes(1) for dtype in _KV_DTYPES},
        tokenizer=None if tokenizer is None else _tokenizer_kind(checkpoint, tokenizer),
        chat_template=_template_place(checkpoint, tokenizer),
        bos=_named(spec.bos_token_id, texts),
        stop_tokens=[NamedToken(id_, texts.get(id_)) for id_ in sorted(ends)],
        obstacles={"cpu": None, "gpu": gpu_obstacle(spec, spec.max_model_len(config))},
        memory=memory,
    )


def _experts(spec: ModelSpec) -> list[Experts]:
    counts = Counter(layer.mlp for layer in spec.layers)
    return [
        Experts(
            num_layers=count,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            width=moe.expert.width,
            shared_width=0 if moe.shared is None else moe.shared.width,
        )
        for moe, count in counts.items()
        if isinstance(moe, MoeSpec)
    ]


def _attention(spec: ModelSpec) -> list[Attention]:
    return [
        Attention(
            num_layers=count,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            latent=_sizes_of(attention.latent),
            window=attention.window,
            rope=_settings_of(attention.rope),
        )
        for attention, count in Counter(layer.attention for layer in spec.layers).items()
    ]


def _sizes_of(latent: LatentSpec | None) -> dict[str, int] | None:
    if latent is None:
        return None
    names = ("q_rank", "rank", "nope_dim", "rope_dim", "v_dim")
    return {name: getattr(latent, name) for name in names}


def _settings_of(rope: RopeSpec) -> dict[str, Any]:
    """Those that differ from their defaults; none for layers without RoPE."""
    if rope.type == "none":
        return {}
    found = {
        field.name: getattr(rope, field.name)
        for field in dataclasses.fields(rope)
        if field.name in ("type", "theta") or getattr(rope, field.name) != field.default
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _files(checkpoint: Checkpoint) -> list[Path]:
    if checkpoint.format == "gguf":
        return [checkpoint.path]
    return sorted(checkpoint.path.glob("*.safetensors"))


def _file_bytes(checkpoint: Checkpoint) -> int:
    return sum(path.stat().st_size for path in _files(checkpoint))


def _quantization(checkpoint: Checkpoint) -> str | None:
    if checkpoint.format == "gguf":
        return None
    found = format_of(checkpoint.path)
    return None if found is None else found.name


def _linear_layers(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    num_parameters: int,
    memory: MemoryPlan,
) -> LinearLayers:
    found, weight_only = linear_format(checkpoint, config.quantization), False
    is_rounded = rounds_weights(checkpoint, config.quantization)
    if config.device == "echo":  # computes nothing, and the folder may have no weights
        return LinearLayers(
            format=found, weight_only=False, is_rounded=is_rounded, bits=0, weight_bytes={}
        )
    bits: float = 8 if found != UNQUANTISED else _BITS[memory.dtype]
    kept = kept_in_layers(checkpoint, spec, linear_shapes(spec), config.quantization)
    if memory.on_gpu:
        on_gpu = factory.gpu_linear_format(config, checkpoint)
        if not on_gpu.keeps_groups:
            found, kept = on_gpu.name, KeptValues()
        weight_only = on_gpu.weight_only
        bits = 8 if found != UNQUANTISED else _BITS[memory.dtype]
    if kept.num_values:
        weight_only, bits = True, round(kept.bits, 3)
    on_cpu = msgspec.structs.replace(config, dtype="float32" if memory.on_gpu else memory.dtype)
    weight_bytes = {
        "cpu": host_weight_bytes(on_cpu, checkpoint, spec, num_parameters),
        "gpu": factory.gpu_weight_bytes(config, checkpoint, spec),
    }
    return LinearLayers(
        format=found,
        weight_only=weight_only,
        is_rounded=is_rounded,
        bits=bits,
        weight_bytes=weight_bytes,
    )


def _stored_types(checkpoint: Checkpoint) -> dict[str, int]:
    if checkpoint.format == "gguf":
        types = [tensor.type.name for tensor in GgufFile(checkpoint.path).tensors.values()]
    else:
        # Which types are allowed was checked when the weights were opened.
        stored = safetensors.read_folder(
            checkpoint.path, safetensors.WEIGHTS + safetensors.QUANTIZED
        )
        types = [tensor.dtype for tensor in stored.values()]
    return dict(Counter(types).most_common())


class _Model(msgspec.Struct):
    type: str | None = None


class _TokenizerFile(msgspec.Struct):
    """The part of a tokenizer.json that says what it is."""

    model: _Model


def _tokenizer_kind(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    decoder = str((tokenizer.decoder or {}).get("type") or "no decoder")
    if checkpoint.format == "gguf":
        metadata = GgufFile(checkpoint.path).metadata
        keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
        return ", ".join(str(metadata[key]) for key in keys if key in metadata)
    try:
        text = (checkpoint.path / "tokenizer.json").read_bytes()
        kind = msgspec.json.decode(text, type=_TokenizerFile).model.type
    except (OSError, msgspec.DecodeError):  # the tokenizer was read before
        kind = None
    return f"{kind or 'unknown'}, {decoder}"


def _template_place(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> str | None:
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    key = "tokenizer.chat_template"
    if checkpoint.format == "gguf":
        return key if key in GgufFile(checkpoint.path).metadata else "built in"
    is_file = (checkpoint.path / "chat_template.jinja").is_file()
    return "chat_template.jinja" if is_file else "tokenizer_config.json"


def _texts(tokenizer: Tokenizer | None, ids: set[int | None]) -> dict[int, str]:
    if tokenizer is None:
        return {}
    return {id_: text for text, id_ in tokenizer.vocabulary().items() if id_ in ids}


def _named(token_id: int | None, texts: dict[int, str]) -> NamedToken | None:
    return None if token_id is None else NamedToken(token_id, texts.get(token_id))
