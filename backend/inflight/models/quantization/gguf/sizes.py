"""What the matrices of a GGUF file take in memory where they keep their bits, from its header.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from inflight.checkpoint.gguf import GgufFile, GgufTensor
from inflight.models.quantization.gguf.kinds import KINDS, BlockKind
from inflight.models.quantization.grouped_memory import (
    BitsOf,
    Form,
    KeptValues,
    host_bits,
    kept_sum,
    rounded_bits,
)

_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.weight")
# Matrices that are read as float32 whatever their type: routers, and what makes keys and values of
# latents.
_WIDE = frozenset({"ffn_gate_inp", "ffn_gate_inp_shexp", "attn_kv_b", "attn_k_b", "attn_v_b"})
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def kept_layers(
    path: Path,
    num_layers: int | None = None,
    *,
    rounds_others: bool = False,
    bits_of: BitsOf = host_bits,
) -> KeptValues:
    """The linear layers of a file, the output layer excepted.

    Parts of a matrix that differ in form are counted although they are dequantised.

    Args:
        path: of the file.
        num_layers: without those after so many; None for all.
        rounds_others: whether all that have more than 4 bits are rounded to those.
        bits_of: bits per weight.

    Raises:
        ConfigError: the file is damaged.
    """
    return _sum(_layers(path, num_layers), rounds_others, bits_of)


def has_wider_layers(path: Path) -> bool:
    """Whether a linear layer has more than 4 bits, the output layer excepted.

    Raises:
        ConfigError: the file is damaged.
    """
    return not all(map(_has_4_bits, _layers(path)))


def kept_embeddings(path: Path, *, tied: bool) -> KeptValues:
    """The embedding of a file, and its output layer unless it is the embedding."""
    tensors = GgufFile(path).tensors
    names = [_EMBEDDING] if tied else [_EMBEDDING, _HEAD]
    return _sum(tensors[name] for name in names if name in tensors)


def form_of(kind: BlockKind, width: int) -> Form:
    """Of a matrix with so many columns."""
    return Form(
        kind.bits,
        kind.group,
        kind.has_minimums,
        width,
        is_symmetric=kind.levels is not None or kind.zero == 1 << max(kind.bits, 4) - 1,
        has_units=kind.units is not None,
    )


def _layers(path: Path, num_layers: int | None = None) -> list[GgufTensor]:
    """Matrices of linear layers; see `kept_layers`."""
    found = []
    for name, tensor in GgufFile(path).tensors.items():
        match = _LAYER.fullmatch(name)
        if not match or match[2] in _WIDE or match[2].endswith("_norm") or len(tensor.shape) == 1:
            continue
        if num_layers is None or int(match[1]) < num_layers:
            found.append(tensor)
    return found


def _has_4_bits(tensor: GgufTensor) -> bool:
    kind = KINDS.get(tensor.type.name)
    return kind is not None and kind.bits == 4


def _sum(
    tensors: Iterable[GgufTensor], rounds_others: bool = False, bits_of: BitsOf = host_bits
) -> KeptValues:
    values: Counter[str] = Counter()
    sizes: list[tuple[int, float | None]] = []
    for tensor in tensors:
        kind, count = KINDS.get(tensor.type.name), math.prod(tensor.shape)
        if rounds_others and not _has_4_bits(tensor):
            sizes.append((count, rounded_bits(tensor.shape[-1], bits_of)))
        elif kind is not None:
            values[tensor.type.name] += count
            sizes.append((count, bits_of(form_of(kind, tensor.shape[-1]))))
    types = ("int4",) if rounds_others else (name for name, _ in values.most_common())
    return kept_sum(types, sizes)
