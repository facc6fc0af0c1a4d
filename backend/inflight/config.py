"""Engine settings: one strict schema, read from `engine.json` in the model's version folder.

Settings that vLLM has under the same meaning carry vLLM's names; former names are accepted with a
warning. Nothing here overlaps with config.pbtxt. An unknown key or an unsupported value is an error
that names the file, the key and what is allowed.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from inflight.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda", "echo"]
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["auto", "none", "fp8", "int8", "int8_hadamard", "int4"]
KVDtype = Dtype | Literal["fp8", "int8"]
"""Of keys and values."""

# Values of 0 and "auto", by device.
_CPU_DEFAULTS: dict[str, int | str] = {
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
}
_DEFAULTS: dict[Device, dict[str, int | str]] = {
    "auto": {},
    "cpu": _CPU_DEFAULTS,
    "echo": _CPU_DEFAULTS,
    # Enough tokens to saturate the tensor cores; more would only raise the decode latency (ITL).
    "cuda": {"dtype": "bfloat16", "max_num_seqs": 256, "max_num_batched_tokens": 8192},
}

# Supported by the kernels.
GPU_BLOCK_SIZES = (16, 32, 64)
GPU_HEAD_DIMS = (64, 96, 128, 256)


MAX_DRAFTS = 16
MAX_MODEL_NAME = 256

# Types of settings. `_check_value` checks their bounds; errors show the description instead.
Model = Annotated[
    str, Meta(description="the path of a .gguf file or a Hugging Face folder, or package:NAME")
]
ModelName = Annotated[str, Meta(description=f"up to {MAX_MODEL_NAME} characters, all printable")]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.01, le=0.99)]
Milliseconds = Annotated[float, Meta(ge=1, le=60_000)]
ByDevice = Annotated[int, Meta(ge=0, description="1 or more, or 0 for the default of the device")]

_TYPE_NAMES: dict[Any, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
}
# Common synonyms, for suggestions in errors.
_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda"}
# An error shows at most this many characters of a value.
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Setting:
    """Annotation of a setting's field. Name, allowed values and default are the field's own. The
    reference page is written from them (`make generate`).

    Attributes:
        meaning: sentences for the reference page.
        default: meaning of the default, unless its value shows it.
        former: a former name, which is accepted with a warning.
        former_meaning: how the value's meaning has changed, for the warning.
    """

    meaning: str
    default: str = ""
    former: str | None = None
    former_meaning: str = ""


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding (see `execution.drafters`)."""

    method: Annotated[
        str,
        Setting(
            "`ngram`, prompt lookup; `suffix`, the same with the longest match; `self`, the "
            "model's own first layers; `draft_model`, a smaller model with the same "
            "vocabulary; `eagle3`, a head trained for the model (arXiv:2503.01840).",
            former="drafter",
        ),
    ] = "ngram"
    model: Annotated[
        Model | None,
        Setting("For `draft_model` and `eagle3`: as the engine's `model`; for `eagle3` a folder."),
    ] = None
    num_layers: Annotated[
        Count | None, Setting("For `self`: how many of the model's first layers draft.")
    ] = None
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=1, le=MAX_DRAFTS),
        Setting("Draft tokens per sequence and step, at most.", former="max_drafts"),
    ] = 5
    default: Annotated[
        Literal["auto", "off"] | Annotated[int, Meta(description="0 to num_speculative_tokens")],
        Setting(
            "For requests that do not set `speculation`: `auto` adapts the number of drafts to the "
            "acceptance rate and the batch, `off` drafts nothing; or a fixed number."
        ),
    ] = "auto"
    prompt_lookup_max: Annotated[
        Count, Setting("For `ngram`: the longest n-gram to match.", former="max_match")
    ] = 4
    prompt_lookup_min: Annotated[
        Count,
        Setting("For `ngram` and `suffix`: the shortest n-gram to match.", former="min_match"),
    ] = 2
    suffix_decoding_max_cached_tokens: Annotated[
        int,
        Meta(ge=0, le=10_000_000),
        Setting(
            "For `suffix`: draft from earlier outputs, too, of requests with the same "
            "`cache_salt`; so many tokens of them are kept, at half a kilobyte of host memory "
            "each, those of the most recently used salts. 0 keeps none. With a GPU they serve "
            "requests with structured output, DRY, `no_repeat_ngram_size` or bad words of several "
            "tokens."
        ),
    ] = 0

    def __post_init__(self) -> None:
        _check_fields(self, "speculative_config.")
        if isinstance(self.default, int) and not 0 <= self.default <= self.num_speculative_tokens:
            raise ConfigError(
                f"speculative_config.default: {self.default} is out of range; allowed: auto, off, "
                f"or 0 to num_speculative_tokens ({self.num_speculative_tokens})"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= 32:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min: {self.prompt_lookup_min} with "
                f"prompt_lookup_max: {self.prompt_lookup_max} is not supported; allowed: "
                "1 <= prompt_lookup_min <= prompt_lookup_max <= 32"
            )


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one engine runs one model. A new setting is a field here and its use in the engine."""

    model: Annotated[
        Model,
        Setting(
            "A GGUF file, a Hugging Face folder, or `package:NAME` for a checkpoint that an "
            "installed Python package carries. A relative path is relative to the file that names "
            "it. Nothing is downloaded."
        ),
    ]
    served_model_name: Annotated[
        ModelName | None,
        Setting(
            "The name under which clients see the model, in `description` of the model "
            "`tokenizer`.",
            default="that of the checkpoint's folder or file",
        ),
    ] = None
    device: Annotated[
        Device,
        Setting(
            "`cpu`; `cuda`, one NVIDIA GPU; `auto`, the GPU if there is one that can run the "
            "model, else the CPU (what `inflight serve` and `inflight repo init` write); `echo` "
            "returns each prompt and computes nothing, to test everything around an engine."
        ),
    ] = "cpu"
    dtype: Annotated[
        Dtype,
        Setting(
            "Of weights and activations, and by default of the KV cache. GPUs support bfloat16 "
            "only."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Setting(
            "Of keys and values. `fp8` (e4m3) and `int8` store a byte for each, and a float16 "
            "scale for each head of a token, which is computed from its values: half of "
            "bfloat16's memory and a little more, thus about twice as many sequences. `int8` is "
            "the more accurate one in all models measured. The KV cache of a drafter has the same "
            "type.",
            default="that of `dtype`",
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Setting(
            "Of linear layers, the output layer excepted. `fp8` and `int8` quantise weights of 16 "
            "or 32 bits when they are loaded, with a scale for each output channel, and "
            "activations per token, which on GPUs other than Hopper's keep 16 bits; "
            "`int8_hadamard` is `int8` that first Hadamard transforms weights and activations in "
            "blocks of 64 columns (QuaRot), the most accurate of the three and slower for few "
            "sequences, experts and layers whose activations keep 16 bits excepted; `int4` "
            "rounds weights to 4 bits, with a scale and a minimum for each group of up to 128 "
            "columns, which changes outputs (lossy), and leaves activations as they are; "
            "`none` dequantises; `auto` is as the checkpoint stores them."
        ),
    ] = "auto"
    num_threads: Annotated[
        Count | None, Setting("CPU threads of the engine.", default="all cores")
    ] = None
    block_size: Annotated[Count, Setting("Tokens per KV block.")] = 16
    kv_cache_memory_bytes: Annotated[
        Count | None,
        Setting(
            "Memory of the KV pool. `num_blocks` overrides it.",
            default="1 GiB; on a GPU what `gpu_memory_utilization` leaves",
            former="kv_cache_bytes",
        ),
    ] = None
    kv_host_memory_bytes: Annotated[
        Count | None,
        Setting(
            "Host memory for KV blocks, as a second tier of the prefix cache: full blocks are "
            "copied there in the background, and a request whose prefix the pool has lost loads it "
            "instead of computing it. With a GPU it is page-locked.",
            default="none",
        ),
    ] = None
    kv_disk_dir: Annotated[
        str | None,
        Setting(
            "Folder for KV blocks on disk, as a third tier of the prefix cache, which outlives the "
            "engine: blocks in host memory are written there in the background, and read when a "
            "request needs them. It holds what users wrote: only the engine's user can read it. "
            "Each engine needs a folder of its own, and `kv_host_memory_bytes`.",
            default="none",
        ),
    ] = None
    kv_disk_bytes: Annotated[
        Count | None, Setting("Maximum bytes in `kv_disk_dir`.", default="none")
    ] = None
    num_blocks: Annotated[
        Count | None,
        Setting("KV blocks in the pool.", default="from `kv_cache_memory_bytes`"),
    ] = None
    gpu_memory_utilization: Annotated[
        Share | None,
        Setting(
            "The engine's budget as a fraction of the GPU's memory: weights, KV pool, and 1 GiB "
            "for the CUDA context, kernels and graphs. It counts for this engine alone; the "
            "budgets of all engines on a GPU must fit into it together. Without effect if "
            "`num_blocks` or `kv_cache_memory_bytes` is set.",
            default="0.92, but no more KV than `max_num_seqs` sequences of `max_model_len` take",
            former="gpu_memory",
            former_meaning="it was a fraction in use by all processes together and is now the "
            "budget of this engine alone",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool,
        Setting(
            "Capture CUDA graphs of decode steps, and of steps with prompts of up to 2,048 tokens, "
            "at the start; without them every step pays its kernel launches."
        ),
    ] = True
    batch_invariant: Annotated[
        bool,
        Setting("A request's tokens are bitwise the same whatever else is in the batch; slower."),
    ] = False
    random_weights: Annotated[
        bool,
        Setting(
            "Initialise the weights randomly instead of reading them, for benchmarks; the model's "
            "folder then needs only a config.json."
        ),
    ] = False
    max_model_len: Annotated[
        Count | None,
        Setting("Prompt and output together, in tokens.", default="the model's own limit"),
    ] = None
    max_num_seqs: Annotated[ByDevice, Setting("Sequences in one step.")] = 0
    max_num_batched_tokens: Annotated[
        ByDevice,
        Setting(
            "Tokens in one step (the budget shared by prefill and decode).",
            former="max_batch_tokens",
        ),
    ] = 0
    max_prefill_chunk: Annotated[
        Count | None,
        Setting("Tokens of one prompt in one step.", default="the whole budget"),
    ] = None
    itl_target_ms: Annotated[
        Milliseconds | None,
        Setting(
            "Target inter-token latency, in milliseconds: steps that decode compute as much of "
            "prompts as fits into it, by the times of earlier steps, and at least 32 tokens. A "
            "long prompt then takes longer, and does not stall other requests.",
            default="no target: steps take as many tokens as `max_num_batched_tokens` allows",
        ),
    ] = None
    ttft_target_ms: Annotated[
        Milliseconds | None,
        Setting(
            "Target time to first token (TTFT), in milliseconds, with `itl_target_ms`: as long as "
            "prompts will be computed in time, they add at most half to the time of steps that "
            "decode, and what `itl_target_ms` allows if they would be late.",
            default="prompts always get what `itl_target_ms` allows",
        ),
    ] = None
    max_waiting: Annotated[
        Count, Setting("Maximum queued requests; more are rejected with `capacity`.")
    ] = 1024
    max_waiting_tokens: Annotated[
        Count | None,
        Setting(
            "Maximum prompt tokens of queued requests; more are rejected with `capacity`. A prompt "
            "that is longer by itself is accepted while nothing is queued.",
            default="no limit",
        ),
    ] = None
    queue_timeout_s: Annotated[
        Annotated[float, Meta(ge=0.001, le=86400)] | None,
        Setting(
            "Seconds that a request may be queued before its first step; then it is rejected with "
            "`capacity`.",
            default="no limit",
        ),
    ] = None
    interactive_weight: Annotated[
        Count,
        Setting(
            "Share of the priority class `interactive` in the tokens that are computed, relative "
            "to `batch_weight`, while requests of both are queued."
        ),
    ] = 4
    batch_weight: Annotated[Count, Setting("The same for the class `batch`.")] = 1
    kv_growth_reserve: Annotated[
        float,
        Meta(ge=0, le=0.5),
        Setting(
            "The part of the KV pool that admissions keep free, at most, for the growth of running "
            "requests; how much of it, the lengths of earlier outputs decide. Preemptions become "
            "rare. 0 keeps one block for each running sequence."
        ),
    ] = 0.08
    enable_prefix_caching: Annotated[
        bool, Setting("Reuse the KV blocks of common prefixes.", former="prefix_cache")
    ] = True
    default_max_tokens: Annotated[
        Count, Setting("For requests that do not set `max_tokens`; clipped to the context.")
    ] = 256
    speculative_config: Annotated[
        SpeculativeConfig | None,
        Setting(
            "Speculative decoding: an object of the settings below.",
            default="one token per sequence and step",
            former="speculation",
        ),
    ] = None
    max_draft_tokens: Annotated[Count, Setting("Draft tokens of all sequences in one step.")] = 256
    load_timeout_s: Annotated[
        float,
        Meta(ge=1, le=86400),
        Setting(
            "Seconds that loading may take without progress. `inflight serve` ends an engine that "
            "exceeds them, and starts it again if the server was ready before. Raise it for slow "
            "disks."
        ),
    ] = 120.0
    log_stats_interval_s: Annotated[
        float,
        Meta(ge=0, le=86400),
        Setting(
            "Seconds between two lines of statistics in the engine's log, while it has work: "
            "requests by state, KV blocks in use, tokens per second. 0 logs none."
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        for name, value in _DEFAULTS[self.device].items():
            if getattr(self, name) in (0, "auto"):
                msgspec.structs.force_setattr(self, name, value)
        _check_fields(self)
        served = self.served_model_name
        if served is not None and not (0 < len(served) <= MAX_MODEL_NAME and served.isprintable()):
            raise ConfigError(
                f"served_model_name: {_shown(served)} is not a name; allowed: 1 to "
                f"{MAX_MODEL_NAME} characters, all printable"
            )
        if self.device == "cuda" and self.dtype != "bfloat16":
            raise ConfigError(f"dtype: {self.dtype} is not supported on GPUs; allowed: bfloat16")
        if self.device == "cuda" and self.block_size not in GPU_BLOCK_SIZES:
            raise ConfigError(
                f"block_size: {self.block_size} is not supported on GPUs; allowed: "
                f"{', '.join(map(str, GPU_BLOCK_SIZES))}"
            )
        if self.max_num_seqs > self.max_num_batched_tokens > 0:
            raise ConfigError(
                f"max_num_seqs: {self.max_num_seqs} is more than max_num_batched_tokens "
                f"({self.max_num_batched_tokens}), but each running sequence needs at least one "
                "token per step; lower max_num_seqs"
            )
        if self.ttft_target_ms is not None and self.itl_target_ms is None:
            raise ConfigError(
                "ttft_target_ms: requires itl_target_ms, the time that steps with prompts may take "
                "at most"
            )

    @property
    def kv_dtype(self) -> KVDtype:
        """Of keys and values; `auto` if that of `dtype` is not resolved."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


def load(path: Path) -> EngineConfig:
    """Read an `engine.json`.

    Raises:
        ConfigError: naming the file, the key and what is allowed.
    """
    try:
        # Decoding and the error that shows a value both recurse as deep as the JSON text.
        config = parse(msgspec.json.decode(path.read_bytes()), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    speculative_config = config.speculative_config
    if speculative_config is not None and speculative_config.model is not None:
        drafter = _beside(path, speculative_config.model, "speculative_config.model")
        speculative_config = msgspec.structs.replace(speculative_config, model=drafter)
    model = _beside(path, config.model, "model")
    disk = config.kv_disk_dir
    return msgspec.structs.replace(
        config,
        model=model,
        speculative_config=speculative_config,
        kv_disk_dir=None if disk is None else _beside(path, disk, "kv_disk_dir"),
    )


def _beside(path: Path, model: str, key: str) -> str:
    """The path of a model or folder, resolved against the folder of the file that names it."""
    if model.startswith("package:") or "://" in model:  # `locate` rejects a URL as given
        return model
    try:
        return str((path.parent / Path(model).expanduser()).resolve())
    except (ValueError, RuntimeError) as error:  # a null byte, an unknown ~user
        raise ConfigError(f"{path}: {key}: {model!r} is not a path ({error})") from None


def parse(raw: Any, where: str) -> EngineConfig:
    """Check settings that came as a JSON object from `where`: a file or a flag.

    Raises:
        ConfigError: an unknown key, an unsupported value, or a setting under two names.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: settings must be a JSON object, not {type(raw).__name__}")
    raw = _with_current_names(raw, _FORMER_NAMES, where)
    speculative = raw.get("speculative_config")
    if isinstance(speculative, dict):
        prefix = "speculative_config."
        raw["speculative_config"] = _with_current_names(
            speculative, _FORMER_SPECULATIVE_NAMES, where, prefix
        )
    try:
        _check_object(raw, EngineConfig)
        return msgspec.convert(raw, EngineConfig)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def setting(field: msgspec.structs.FieldInfo) -> Setting:
    """The annotation of a setting's field."""
    (found,) = (part for part in field.type.__metadata__ if isinstance(part, Setting))
    return found


def device_defaults(name: str) -> dict[str, int | str]:
    """The resolved default of a setting by device, if it depends on the device."""
    found = {"CPUs": _DEFAULTS["cpu"].get(name), "GPUs": _DEFAULTS["cuda"].get(name)}
    return {device: value for device, value in found.items() if value is not None}


def _former_names(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {
        former: field.name
        for field in msgspec.structs.fields(kind)
        if (former := setting(field).former) is not None
    }


def _changed_meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    found = [(field.name, setting(field).former_meaning) for field in msgspec.structs.fields(kind)]
    return {name: f"; {meaning}" for name, meaning in found if meaning}


_FORMER_NAMES = _former_names(EngineConfig)
_FORMER_SPECULATIVE_NAMES = _former_names(SpeculativeConfig)
_CHANGED_MEANINGS = _changed_meanings(EngineConfig)


def _with_current_names(
    raw: dict[str, Any], former_names: dict[str, str], where: str, prefix: str = ""
) -> dict[str, Any]:
    """Settings under their current names; warns of each that came under a former one."""
    found = dict(raw)
    for former, name in former_names.items():
        if former not in found:
            continue
        if name in found:
            raise ConfigError(
                f"{where}: {prefix}{former}: is a former name of {name}, which is set as well; "
                "remove the former one"
            )
        changed = _CHANGED_MEANINGS.get(prefix + name, "")
        logger.warning(
            "%s: %s%s is deprecated; use %s%s%s", where, prefix, former, prefix, name, changed
        )
        found[name] = found.pop(former)
    return found


def _check_object(raw: dict[str, Any], kind: type[msgspec.Struct], prefix: str = "") -> None:
    """Check a JSON object against the settings of `kind`; `prefix` leads its keys in errors.

    msgspec checks the same, but its errors do not say what is allowed.

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
            raise ConfigError(
                f"{prefix}{field.name}: is missing; allowed: {allowed_values(field.type)}"
            )


def _check_fields(settings: msgspec.Struct, prefix: str = "") -> None:
    """The same for settings constructed in Python."""
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
    raise ConfigError(f"{key}: {_shown(value)} {what}; allowed: {allowed_values(annotation)}{hint}")


def _alternatives(annotation: Any) -> list[tuple[Any, Meta]]:
    """The members of an annotation's union, each with its bounds."""
    if get_origin(annotation) in (Union, UnionType):
        return [found for part in get_args(annotation) for found in _alternatives(part)]
    if get_origin(annotation) is Annotated:
        kind, *parts = get_args(annotation)
        for part in parts:
            if isinstance(part, Meta):
                return [(kind, part)]
        return _alternatives(kind)
    return [(annotation, Meta())]


def _is_of(value: Any, kind: type) -> bool:
    if isinstance(value, bool):  # bool is a subclass of int
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _is_within(value: Any, meta: Meta) -> bool:
    return (meta.ge is None or value >= meta.ge) and (meta.le is None or value <= meta.le)


def allowed_values(annotation: Any) -> str:
    """Text of the values allowed for a setting of this type."""
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
    """A value as JSON, but a string as its repr; truncated if long."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
