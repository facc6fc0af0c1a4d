"""Writes a Hugging Face folder with linear layers of 8 or 4 bits, in compressed-tensors' format.

Embeddings, the output layer, norms and biases stay as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from inflight.checkpoint import safetensors, shards
from inflight.errors import ConfigError
from inflight.models.quantization import compressed

_NOT_LINEAR = ("model.embed_tokens.weight", "lm_head.weight")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pth", "*.gguf")


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        num_quantized, num_tensors: of the weights: those that were quantised, and all.
        bytes_before, bytes_after: of the files with weights.
    """

    num_quantized: int
    num_tensors: int
    bytes_before: int
    bytes_after: int


def quantize_folder(
    source: Path,
    target: Path,
    names: Collection[str],
    kind: str,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Written:
    """Quantise the linear layers of a folder, one file of weights at a time.

    Args:
        source: a folder with weights of 16 or 32 bits.
        target: must not exist; it appears once everything is written.
        names: of the weights to quantise.
        kind: one of `compressed.KINDS`.
        progress: called with the fraction of the files that is written.

    Raises:
        ConfigError: target exists or cannot be written; the source is corrupt.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; choose another folder")
    partial = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        written = _write(source, partial, names, kind, progress)
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _write(
    source: Path,
    target: Path,
    names: Collection[str],
    kind: str,
    progress: Callable[[float], None],
) -> Written:
    files = shards.weight_files(source)
    weight_map: dict[str, str] = {}
    groups: dict[int, list[str]] = {}
    kept: list[str] = []
    num_tensors = before = after = num_bytes = 0
    for done, path in enumerate(files, 1):
        tensors: dict[str, Tensor] = {}
        for name, stored in safetensors.read_file(path).items():
            if len(stored.shape) == 3:
                raise ConfigError(
                    f"{path}: {name} stacks the matrices of experts, of which the format has no "
                    f"quantised form; use the setting quantization: {kind} instead, which "
                    "quantises them when the model is loaded"
                )
            tensor = stored.read()
            num_tensors += 1
            module = name.removesuffix(".weight")
            group = compressed.group_in(kind, tensor.shape[1]) if name in names else None
            if group is not None:
                tensors |= compressed.tensors(name, tensor, kind)
                groups.setdefault(group, []).append(module)
                continue
            tensors[name] = tensor
            if tensor.dim() == 2 and name not in _NOT_LINEAR:
                kept.append(module)
        save_file(tensors, target / path.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        before += path.stat().st_size
        after += (target / path.name).stat().st_size
        progress(done / len(files))
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / shards.INDEX_NAME).write_text(json.dumps(index, indent=2))
    if names and not groups:
        raise ConfigError(
            f"{source}: no linear layer has a multiple of 32 columns, which {kind} needs; use fp8 "
            "or int8"
        )
    _write_settings(source, target, compressed.config(kind, groups, kept))
    return Written(sum(map(len, groups.values())), num_tensors, before, after)


def _write_settings(source: Path, target: Path, quantization: dict[str, object]) -> None:
    """All files but those with weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
