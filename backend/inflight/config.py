"""Engine settings: one strict schema, read from `engine.json` in the model's version folder.

Nothing in here is in config.pbtxt and nothing of Triton's is in here. A key that does not exist or
a value that cannot work is an error that names the file, the key and what is allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from inflight.errors import ConfigError, did_you_mean

Device = Literal["auto", "cpu", "cuda", "echo"]
Dtype = Literal["auto", "float32", "bfloat16"]
Drafter = Literal["ngram", "self", "draft_model", "eagle3"]

# What 0 and "auto" stand for, once the device is known.
_CPU_DEFAULTS: dict[str, int | str] = {
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_batch_tokens": 512,
}
_DEFAULTS: dict[Device, dict[str, int | str]] = {
    "auto": {},
    "cpu": _CPU_DEFAULTS,
    "echo": _CPU_DEFAULTS,
    # Enough tokens to keep the matrix units busy, and no more: those that decode wait for them.
    "cuda": {"dtype": "bfloat16", "max_num_seqs": 256, "max_batch_tokens": 8192},
}

# What the kernels are there for.
GPU_CAPABILITY = (8, 0)  # at least: Ampere
GPU_BLOCK_SIZES = (16, 32, 64)
GPU_HEAD_DIMS = (64, 96, 128, 256)


MAX_DRAFTS = 16

# Types of settings. Their bounds are checked by `_check_value`; in errors, a description stands for
# them.
Model = Annotated[
    str, Meta(description="the path of a .gguf file or a Hugging Face folder, or package:NAME")
]
Count = Annotated[int, Meta(ge=1)]
ByDevice = Annotated[int, Meta(ge=0, description="1 or more, or 0 for the default of the device")]

_TYPE_NAMES: dict[Any, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
}
# What people write for a choice, and no spelling of it.
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda"}
# Characters of a value that an error shows.
_MAX_SHOWN = 80


class SpeculationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tokens are guessed, to be checked several at a time (see `drafting`).

    Attributes:
        drafter: `ngram` looks for what followed the last tokens earlier on; `self` asks the
            model's own first layers; `draft_model` a smaller model of the same vocabulary;
            `eagle3` a head that was trained for the model (arXiv:2503.01840).
        model: of `draft_model` and `eagle3`: as EngineConfig.model; of eagle3 a folder.
        num_layers: of `self`.
        max_drafts: tokens of one sequence in a step.
        default: of requests that do not say: `auto` drafts as far as it pays, `off` not at all; or
            a number of tokens.
        max_match, min_match: of `ngram`: tokens that must agree.
    """

    drafter: Drafter = "ngram"
    model: Model | None = None
    num_layers: Count | None = None
    max_drafts: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] = 5
    default: Literal["auto", "off"] | Annotated[int, Meta(description="0 to max_drafts")] = "auto"
    max_match: Count = 4
    min_match: Count = 2

    def __post_init__(self) -> None:
        _check_fields(self, "speculation.")
        if isinstance(self.default, int) and not 0 <= self.default <= self.max_drafts:
            raise ConfigError(
                f"speculation.default: {self.default} is out of range; allowed: auto, off, or 0 to "
                f"max_drafts ({self.max_drafts})"
            )
        if not 1 <= self.min_match <= self.max_match <= 32:
            raise ConfigError(
                f"speculation.min_match: {self.min_match} and max_match: {self.max_match} do not "
                "go together; allowed: 1 <= min_match <= max_match <= 32"
            )
        wants_model = self.drafter in ("draft_model", "eagle3")
        if wants_model != (self.model is not None):
            raise ConfigError(
                f"speculation.model: the drafter {self.drafter} "
                f"{'needs one' if wants_model else 'has none'}"
            )
        if (self.drafter == "self") != (self.num_layers is not None):
            raise ConfigError(
                f"speculation.num_layers: the drafter {self.drafter} "
                f"{'needs it' if self.drafter == 'self' else 'has none'}"
            )


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one engine runs one model.

    Attributes:
        model: a GGUF file, a Hugging Face folder, or `package:NAME` for a checkpoint that an
            installed Python package carries. A relative path is relative to the file it stands in.
        device: `cpu`; `cuda`, one NVIDIA GPU; `auto`, the GPU if there is one that can run the
            model (see `runner.place`); `echo` answers each prompt with itself, at no cost, to test
            what is around an engine.
        dtype: of weights, activations and KV cache; `auto` is float32 on a CPU and bfloat16, the
            only one there, on a GPU.
        num_threads: CPU threads of the engine; None for all cores.
        block_size: tokens per KV block.
        kv_cache_bytes: memory of the KV pool; None for 1 GiB on a CPU, and on a GPU for what
            gpu_memory leaves. num_blocks overrides it.
        num_blocks: KV blocks in the pool; None to derive them from kv_cache_bytes.
        gpu_memory: share of a GPU's memory that is used, by whoever.
        cuda_graphs: record steps when starting, of decoding and of short prompts; without, each
            costs its kernels' launches.
        batch_invariant: compute a request's tokens to the same bits whatever else is in the batch;
            slower.
        random_weights: draw the weights instead of reading them: for benchmarks. The model's
            folder then needs a config.json only.
        max_model_len: prompt and output together, in tokens; None for the model's own limit.
        max_num_seqs: sequences in one step; 0 for 64 on a CPU and 256 on a GPU.
        max_batch_tokens: tokens in one step (the budget that prefill and decode share); 0 for 512
            on a CPU and 8192 on a GPU.
        max_prefill_chunk: tokens of one prompt in one step; None for the whole budget.
        max_waiting: requests that may queue; more are refused with `capacity`.
        prefix_cache: reuse the KV blocks of equal prefixes.
        default_max_tokens: of a request that does not say; cut to what the context leaves.
        speculation: draft tokens and check several in one step; None for one token a step.
        max_draft_tokens: drafts of all sequences in one step.
    """

    model: Model
    device: Device = "cpu"
    dtype: Dtype = "auto"
    num_threads: Count | None = None
    block_size: Count = 16
    kv_cache_bytes: Count | None = None
    num_blocks: Count | None = None
    gpu_memory: Annotated[float, Meta(ge=0.1, le=0.99)] = 0.95
    cuda_graphs: bool = True
    batch_invariant: bool = False
    random_weights: bool = False
    max_model_len: Count | None = None
    max_num_seqs: ByDevice = 0
    max_batch_tokens: ByDevice = 0
    max_prefill_chunk: Count | None = None
    max_waiting: Count = 1024
    prefix_cache: bool = True
    default_max_tokens: Count = 256
    speculation: SpeculationConfig | None = None
    max_draft_tokens: Count = 256

    def __post_init__(self) -> None:
        for name, value in _DEFAULTS[self.device].items():
            if getattr(self, name) in (0, "auto"):
                msgspec.structs.force_setattr(self, name, value)
        _check_fields(self)
        if self.device == "cuda" and self.dtype != "bfloat16":
            raise ConfigError(f"dtype: {self.dtype} is not there on a GPU; allowed: bfloat16")
        if self.device == "cuda" and self.block_size not in GPU_BLOCK_SIZES:
            raise ConfigError(
                f"block_size: {self.block_size} is not there on a GPU; allowed: "
                f"{', '.join(map(str, GPU_BLOCK_SIZES))}"
            )
        if self.max_num_seqs > self.max_batch_tokens > 0:
            raise ConfigError(
                f"max_num_seqs: {self.max_num_seqs} is more than max_batch_tokens "
                f"({self.max_batch_tokens}), but each running sequence takes at least one token"
            )


def load(path: Path) -> EngineConfig:
    """Read an `engine.json`.

    Raises:
        ConfigError: naming the file, the key and what is allowed.
    """
    try:
        # Both go as deep as the text does: a value is shown in the error about it.
        config = parse(msgspec.json.decode(path.read_bytes()), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        drafter = _beside(path, speculation.model, "speculation.model")
        speculation = msgspec.structs.replace(speculation, model=drafter)
    model = _beside(path, config.model, "model")
    return msgspec.structs.replace(config, model=model, speculation=speculation)


def _beside(path: Path, model: str, key: str) -> str:
    """A model that a file names, wherever that is read from."""
    if model.startswith("package:") or "://" in model:  # a URL is refused as it was written
        return model
    try:
        return str((path.parent / Path(model).expanduser()).resolve())
    except (ValueError, RuntimeError) as error:  # a null byte, an unknown ~user
        raise ConfigError(f"{path}: {key}: {model!r} is no path ({error})") from None


def parse(raw: Any, where: str) -> EngineConfig:
    """Check settings that came as a JSON object from `where`: a file or a flag."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: settings must be a JSON object, not {type(raw).__name__}")
    try:
        _check_object(raw, EngineConfig)
        return msgspec.convert(raw, EngineConfig)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_object(raw: dict[str, Any], kind: type[msgspec.Struct], prefix: str = "") -> None:
    """Hold a JSON object against the settings of `kind`, whose keys begin with `prefix` in errors.

    msgspec checks the same, but does not say what is allowed.

    Raises:
        ConfigError: naming the key, its value and what is allowed.
    """
    known = kind.__struct_fields__
    for key in raw:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"unknown key {prefix + key!r}{hint}")
    for field in msgspec.structs.fields(kind):
        if field.name in raw:
            _check_value(prefix + field.name, raw[field.name], field.type)
        elif field.required:
            raise ConfigError(f"{prefix}{field.name}: is missing; allowed: {_allowed(field.type)}")


def _check_fields(settings: msgspec.Struct, prefix: str = "") -> None:
    """The same for settings that were put together in Python."""
    for field in msgspec.structs.fields(settings):
        _check_value(prefix + field.name, getattr(settings, field.name), field.type)


def _check_value(key: str, value: Any, annotation: Any) -> None:
    choices: list[str] = []
    for kind, meta in _alternatives(annotation):
        if get_origin(kind) is Literal:
            choices += get_args(kind)
            if value in choices:
                return
        elif issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            return _check_object(value, kind, f"{key}.")
        elif _is_of(value, kind):
            if _is_within(value, meta):
                return
            raise ConfigError(f"{key}: {_shown(value)} is out of range; allowed: {_bounds(meta)}")
    what = "is unknown" if choices else "is of the wrong type"
    name = str(value).lower()
    hint = did_you_mean(_OTHER_NAMES.get(name, name), choices)
    raise ConfigError(f"{key}: {_shown(value)} {what}; allowed: {_allowed(annotation)}{hint}")


def _alternatives(annotation: Any) -> list[tuple[Any, Meta]]:
    """The types that an annotation is the union of, each with its bounds."""
    if get_origin(annotation) in (Union, UnionType):
        return [found for part in get_args(annotation) for found in _alternatives(part)]
    if get_origin(annotation) is Annotated:
        kind, meta = get_args(annotation)
        return [(kind, meta)]
    return [(annotation, Meta())]


def _is_of(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # an int, too, to Python
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _is_within(value: Any, meta: Meta) -> bool:
    return (meta.ge is None or value >= meta.ge) and (meta.le is None or value <= meta.le)


def _allowed(annotation: Any) -> str:
    return "; or ".join(_described(kind, meta) for kind, meta in _alternatives(annotation))


def _described(kind: Any, meta: Meta) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if issubclass(kind, msgspec.Struct):
        first = msgspec.structs.fields(kind)[0]
        return f"an object such as {json.dumps({first.name: first.default})}"
    bounds = _bounds(meta)
    return f"{_TYPE_NAMES[kind]}, {bounds}" if bounds else _TYPE_NAMES[kind]


def _bounds(meta: Meta) -> str:
    if meta.description or meta.ge is None:
        return meta.description or ""
    return f"{meta.ge} or more" if meta.le is None else f"{meta.ge} to {meta.le}"


def _shown(value: Any) -> str:
    """A value as in a file, but a string as elsewhere in errors; of a long one the beginning."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
