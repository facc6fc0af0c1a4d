"""What the matrices of a GGUF file take in memory where they keep their bits, from its header.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from inflight.checkpoint.gguf import GgufFile, GgufTensor
from inflight.models.quantization.gguf.kinds import KINDS
from inflight.models.quantization.grouped_memory import grouped_bits

_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.weight")
# Matrices that are read as float32 whatever their type: routers, and what makes keys and values of
# latents.
_WIDE = frozenset({"ffn_gate_inp", "ffn_gate_inp_shexp", "attn_kv_b", "attn_k_b", "attn_v_b"})
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Weights in codes with scales of groups.

    Attributes:
        types: the names of their types, that of most weights first.
        num_values: how many.
        num_bytes: that they take.
    """

    types: tuple[str, ...] = ()
    num_values: int = 0
    num_bytes: int = 0

    @property
    def bits(self) -> float:
        """Per weight, with its share of scales."""
        return 8 * self.num_bytes / self.num_values


def kept_layers(path: Path, num_layers: int | None = None) -> KeptValues:
    """The linear layers of a file, the output layer excepted.

    Parts of a matrix that differ in form are counted although they are dequantised.

    Args:
        path: of the file.
        num_layers: without those after so many; None for all.

    Raises:
        ConfigError: the file is damaged.
    """
    found = []
    for name, tensor in GgufFile(path).tensors.items():
        match = _LAYER.fullmatch(name)
        if not match or match[2] in _WIDE or len(tensor.shape) == 1:
            continue
        if num_layers is None or int(match[1]) < num_layers:
            found.append(tensor)
    return _sum(found)


def kept_embeddings(path: Path, *, tied: bool) -> KeptValues:
    """The embedding of a file, and its output layer unless it is the embedding."""
    tensors = GgufFile(path).tensors
    names = [_EMBEDDING] if tied else [_EMBEDDING, _HEAD]
    return _sum(tensors[name] for name in names if name in tensors)


def _sum(tensors: Iterable[GgufTensor]) -> KeptValues:
    values: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.type.name in KINDS:
            values[tensor.type.name] += math.prod(tensor.shape)
    num_bits = 0.0
    for name, count in values.items():
        kind = KINDS[name]
        num_bits += count * grouped_bits(kind.bits, kind.group, kind.has_minimums)
    types = tuple(name for name, _ in values.most_common())
    return KeptValues(types, values.total(), round(num_bits / 8))
