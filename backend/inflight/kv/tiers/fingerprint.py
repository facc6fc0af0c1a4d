"""What keys and values depend on, so that those of another model are never taken for this one's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from inflight import __version__
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig

_SETTINGS = (
    "device",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "block_size",
    "batch_invariant",
    "random_weights",
    "max_model_len",  # scales RoPE in some models
    "speculative_config",
)


def kv_fingerprint(config: EngineConfig, checkpoint: Checkpoint, block_bytes: int) -> str:
    """A digest, in hexadecimal, of what the content of a KV block depends on besides its tokens.

    Files count by name, size and time of change: a copy of a model is another one.

    Args:
        config: the engine's settings, after `factory.resolve_device`.
        checkpoint: the model's files.
        block_bytes: of a block, the drafter's part included.
    """
    speculation = config.speculative_config
    paths = [checkpoint.path]
    if speculation is not None and speculation.model is not None:
        paths.append(Path(speculation.model))
    facts = {
        "version": __version__,
        "files": [_facts(file) for path in paths for file in _files(path)],
        "block_bytes": block_bytes,
        "spread_keys": config.kv_dtype == "int8",  # not in blocks of earlier commits
        "settings": {name: getattr(config, name) for name in _SETTINGS},
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".json"))


def _facts(file: Path) -> tuple[str, int, int]:
    found = file.stat()
    return file.name, found.st_size, found.st_mtime_ns
