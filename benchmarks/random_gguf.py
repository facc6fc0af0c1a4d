"""A GGUF file with random blocks in the types of a Q4_K_M file, to time one without a download.

    python benchmarks/random_gguf.py FILE [--model FOLDER]

The shape is that of the config.json in --model, of the Llama family: Llama 3.1 8B by default, 4.9
GB. As llama.cpp chooses types for Q4_K_M, half of the layers' values and downs have Q6_K, and so
has the head; all else has Q4_K. Scales are small, so that activations stay finite.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

import requantized

MODEL = Path(__file__).parent / "models/llama-3.1-8b"

# Random bytes, of which each matrix takes some from a place of its own.
_POOL_BYTES = 1 << 26

# Scale of a block, and of Q4_K the one of its minimums, which centres values.
_SCALES = {Type.Q4_K: 0.0005, Type.Q6_K: 0.00001}
_MINIMUMS = 0.0037


@dataclass(frozen=True, slots=True)
class Blocks:
    """Random blocks of quantised matrices."""

    pool: npt.NDArray[np.uint8]
    generator: np.random.Generator

    @classmethod
    def of_seed(cls, seed: int, pool_bytes: int = _POOL_BYTES) -> Blocks:
        generator = np.random.default_rng(seed)
        return cls(generator.integers(0, 256, pool_bytes, dtype=np.uint8), generator)

    def matrix(self, rows: int, columns: int, kind: Type) -> npt.NDArray[np.uint8]:
        """[rows, bytes of a row]; columns are a multiple of the block's size."""
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = rows * columns // block_size
        start = int(self.generator.integers(0, len(self.pool) // 64))
        raw = np.resize(self.pool[start:], count * block_bytes).reshape(count, block_bytes)
        scale = np.frombuffer(np.float16(_SCALES[kind]).tobytes(), np.uint8)
        if kind == Type.Q4_K:
            raw[:, 0:2] = scale
            raw[:, 2:4] = np.frombuffer(np.float16(_MINIMUMS).tobytes(), np.uint8)
        else:
            raw[:, -2:] = scale
        return raw.reshape(rows, -1)


def has_more_bits(layer: int, num_layers: int) -> bool:
    """Whether a layer's values and down have Q6_K in a Q4_K_M file."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def write(target: Path, config: dict[str, Any], blocks: Blocks) -> None:
    """Write a file of this shape.

    Args:
        config: as in config.json.
    """
    writer = gguf.GGUFWriter(target, "llama")
    hidden, inner, vocabulary = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_layers, kv = config["num_hidden_layers"], hidden // heads * kv_heads
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(vocabulary)

    def add(name: str, rows: int, columns: int, kind: Type) -> None:
        writer.add_tensor(name, blocks.matrix(rows, columns, kind), raw_dtype=kind)

    def add_norm(name: str) -> None:
        writer.add_tensor(name, np.ones(hidden, np.float32))

    add("token_embd.weight", vocabulary, hidden, Type.Q4_K)
    add("output.weight", vocabulary, hidden, Type.Q6_K)
    add_norm("output_norm.weight")
    for layer in range(num_layers):
        name = f"blk.{layer}.{{}}.weight".format
        more = Type.Q6_K if has_more_bits(layer, num_layers) else Type.Q4_K
        add(name("attn_q"), hidden, hidden, Type.Q4_K)
        add(name("attn_k"), kv, hidden, Type.Q4_K)
        add(name("attn_v"), kv, hidden, more)
        add(name("attn_output"), hidden, hidden, Type.Q4_K)
        add(name("ffn_gate"), inner, hidden, Type.Q4_K)
        add(name("ffn_up"), inner, hidden, Type.Q4_K)
        add(name("ffn_down"), hidden, inner, more)
        add_norm(name("attn_norm"))
        add_norm(name("ffn_norm"))
    requantized.save(writer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    write(options.file, config, Blocks.of_seed(0))


if __name__ == "__main__":
    main()
