"""Engine settings: one strict schema, read from `engine.json` in the model's version folder.

Nothing in here is in config.pbtxt and nothing of Triton's is in here. A key that does not exist or
a value of the wrong type is an error that names the file, the key and the nearest key that exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

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
    model: str | None = None
    num_layers: int | None = None
    max_drafts: int = 5
    default: Literal["auto", "off"] | int = "auto"
    max_match: int = 4
    min_match: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.max_drafts <= MAX_DRAFTS:
            raise ConfigError(
                f"speculation.max_drafts: {self.max_drafts} is out of range; "
                f"allowed: 1 to {MAX_DRAFTS}"
            )
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
        if self.num_layers is not None and self.num_layers < 1:
            raise ConfigError(
                f"speculation.num_layers: {self.num_layers} is out of range; allowed: 1 or more"
            )


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one engine runs one model.

    Attributes:
        model: a GGUF file, a Hugging Face folder, or `package:NAME` for a checkpoint that an
            installed Python package carries. A relative path is relative to the file it stands in.
        device: `cpu`; `cuda`, one NVIDIA GPU; `auto`, the GPU if there is one that can run the
            model (see `runner.place`); `echo` answers each prompt with itself, at no cost,
            to test what is around an engine.
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

    model: str
    device: Device = "cpu"
    dtype: Dtype = "auto"
    num_threads: int | None = None
    block_size: int = 16
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    gpu_memory: float = 0.95
    cuda_graphs: bool = True
    batch_invariant: bool = False
    random_weights: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 0
    max_batch_tokens: int = 0
    max_prefill_chunk: int | None = None
    max_waiting: int = 1024
    prefix_cache: bool = True
    default_max_tokens: int = 256
    speculation: SpeculationConfig | None = None
    max_draft_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in _DEFAULTS[self.device].items():
            if getattr(self, name) in (0, "auto"):
                msgspec.structs.force_setattr(self, name, value)
        positive = (
            "num_threads block_size kv_cache_bytes num_blocks max_model_len max_num_seqs "
            "max_batch_tokens max_prefill_chunk max_waiting default_max_tokens "
            "max_draft_tokens"
        )
        by_device = ("max_num_seqs", "max_batch_tokens") if self.device == "auto" else ()
        for name in positive.split():
            value = getattr(self, name)
            if value is not None and value < 1 and not (value == 0 and name in by_device):
                raise ConfigError(f"{name}: {value} is out of range; allowed: 1 or more")
        if not 0.1 <= self.gpu_memory <= 0.99:
            raise ConfigError(
                f"gpu_memory: {self.gpu_memory} is out of range; allowed: 0.1 to 0.99"
            )
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
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    config = parse(raw, str(path))
    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        drafter = _beside(path, speculation.model, "speculation.model")
        speculation = msgspec.structs.replace(speculation, model=drafter)
    model = _beside(path, config.model, "model")
    return msgspec.structs.replace(config, model=model, speculation=speculation)


def _beside(path: Path, model: str, key: str) -> str:
    """A model that a file names, wherever that is read from."""
    if model.startswith("package:"):
        return model
    try:
        return str((path.parent / Path(model).expanduser()).resolve())
    except (ValueError, RuntimeError) as error:  # a null byte, an unknown ~user
        raise ConfigError(f"{path}: {key}: {model!r} is no path ({error})") from None


def parse(raw: Any, where: str) -> EngineConfig:
    """Check settings that came as a JSON object from `where`: a file or a flag."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: settings must be a JSON object, not {type(raw).__name__}")
    known = EngineConfig.__struct_fields__
    for key in raw:
        if key not in known:
            hint = did_you_mean(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}{hint}")
    for key, choices in (("device", get_args(Device)), ("dtype", get_args(Dtype))):
        if key in raw and raw[key] not in choices:
            hint = did_you_mean(str(raw[key]), choices)
            raise ConfigError(
                f"{where}: {key}: {raw[key]!r} is unknown; allowed: {', '.join(choices)}{hint}"
            )
    try:
        return msgspec.convert(raw, EngineConfig)
    except msgspec.ValidationError as error:
        # msgspec words it as "Expected `int`, got `str` - at `$.block_size`".
        raise ConfigError(f"{where}: {error}".replace("`$.", "`")) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
