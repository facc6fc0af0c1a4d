"""Llama checkpoints of a few kilobytes with random weights, heads that draft for them, and
sequences to run them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from inflight.checkpoint.locate import Checkpoint
from inflight.config import Dtype, EngineConfig, KVDtype
from inflight.core.batch import Batch, Chunk, StepOutput
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.execution.factory import build
from inflight.execution.runner import Runner
from inflight.kv.cache import KVCache
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams

SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_weights(settings: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face llama checkpoint, large enough that logits differ clearly."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    q_width = settings["num_attention_heads"] * settings["head_dim"]
    kv_width = settings["num_key_value_heads"] * settings["head_dim"]
    vocab = settings["vocab_size"]
    attention = {"q": (q_width, hidden), "k": (kv_width, hidden), "v": (kv_width, hidden)}
    attention["o"] = (hidden, q_width)
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(settings["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for group, members, bias in (
            ("self_attn", attention, settings["attention_bias"]),
            ("mlp", mlp, settings["mlp_bias"]),
        ):
            for name, shape in members.items():
                shapes[f"{prefix}.{group}.{name}_proj.weight"] = shape
                if bias:
                    shapes[f"{prefix}.{group}.{name}_proj.bias"] = shape[:1]
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=random)
        weights[name] = 1 + 0.1 * values if "norm" in name else 0.2 * values
    return weights


def write_llama(
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Checkpoint:
    """Write a checkpoint: config.json with SETTINGS and changes, and its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = SETTINGS | changes
    (folder / "config.json").write_text(json.dumps(settings))
    if weights is None:
        weights = random_weights(settings)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return Checkpoint(folder, "huggingface")
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(weights)[shard::shards]
        save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Checkpoint(folder, "huggingface")


_DTYPE_NAMES: dict[torch.dtype, Dtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def make_cache(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    kv_dtype: KVDtype | None = None,
) -> KVCache:
    """A KV cache of a model; kv_dtype overrides dtype."""
    return KVCache(spec.kv_layout(kv_dtype or _DTYPE_NAMES[dtype]), num_blocks, block_size, device)


def random_head(
    settings: dict[str, Any], draft_vocab_size: int, num_taps: int = 3, seed: int = 0
) -> dict[str, torch.Tensor]:
    """All tensors of an EAGLE-3 head by the names of its authors, but for embed_tokens."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    q_width = settings["num_attention_heads"] * settings["head_dim"]
    kv_width = settings["num_key_value_heads"] * settings["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (q_width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q_width),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    head = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=random)
        head[name] = 1 + 0.1 * values if "norm" in name else 0.2 * values
    vocab = settings["vocab_size"]
    targets = torch.randperm(vocab, generator=random)[:draft_vocab_size].sort().values
    head["d2t"] = targets - torch.arange(draft_vocab_size)
    head["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, targets, True)
    return head


def with_norms(head: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """A head with norms of the hidden states that it fuses.

    Args:
        head: with none.
        kind: of the norms, as config.json has it: `norm_before_fc` or `fc_norm`.
    """
    hidden, width = head["fc.weight"].shape
    random = torch.Generator().manual_seed(1)
    if kind == "norm_before_fc":
        return head | {"input_norm.weight": 1 + 0.1 * torch.randn(width, generator=random)}
    return head | {
        f"fc_norm.{index}.weight": 1 + 0.1 * torch.randn(hidden, generator=random)
        for index in range(width // hidden)
    }


def write_eagle3(
    folder: Path,
    head: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Checkpoint:
    """Write a head in the form of its authors: config.json with SETTINGS and changes."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = SETTINGS | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head["lm_head.weight"]) if "lm_head.weight" in head else None,
    }
    (folder / "config.json").write_text(json.dumps(settings | changes))
    stored = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in head.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder, "huggingface")


def write_speculators(
    folder: Path,
    head: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    shape: dict[str, Any] | None = None,
    **changes: Any,
) -> Checkpoint:
    """Write a head in the form of vLLM's speculators: config.json with SETTINGS and this shape for
    its layer, and changes beside it."""
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in head.items()}
    checkpoint = write_eagle3(folder, renamed, dtype)
    inner = SETTINGS | (shape or {}) | {"num_hidden_layers": 1, "architectures": None}
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head["lm_head.weight"]),
        "norm_before_residual": True,
        "transformer_layer_config": inner,
    }
    (folder / "config.json").write_text(json.dumps(outer | changes))
    return checkpoint


def make_runner(checkpoint: Checkpoint, **settings: Any) -> Runner:
    """A runner with few and small blocks, so that they matter."""
    defaults: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "num_threads": 1}
    config = EngineConfig(model=str(checkpoint.path), **(defaults | settings))
    return build(config, checkpoint, lambda what, fraction: None)[0]


def make_sequence(
    prompt: list[int], blocks: list[int], params: SamplingParams | None = None, **fields: Any
) -> Sequence:
    """A sequence that owns these blocks."""
    sequence = Sequence(Request(0, prompt, params or SamplingParams()), 1 << 20, **fields)
    own(sequence, blocks)
    return sequence


def own(sequence: Sequence, blocks: list[int]) -> None:
    """Make these the blocks of a sequence."""
    sequence.tables, sequence.first_blocks = [blocks], [0]
    sequence.capacity = 16 * len(blocks)  # of the largest blocks in tests


def next_chunk(sequence: Sequence, most: int = 1 << 20) -> Chunk:
    """The sequence's tokens that are not computed yet, or the first few of them."""
    return chunk(sequence, sequence.num_computed, min(most, sequence.num_uncomputed))


def chunk(sequence: Sequence, start: int, length: int) -> Chunk:
    """A chunk that samples if it reaches the sequence's end."""
    return Chunk(sequence, start, length, start + length == sequence.num_tokens)


def run(
    runner: Runner, chunks: list[Chunk], copies: list[tuple[int, int]] | None = None
) -> StepOutput:
    """What one batch chooses."""
    return runner.launch(Batch(chunks, copies or [])).result()


def step(runner: Runner, chunks: list[Chunk]) -> list[list[int]]:
    """Run one batch and append what it chose; the tokens of each chunk."""
    output = run(runner, chunks)
    assert not output.errors
    for one, token_ids in zip(chunks, output.token_ids, strict=True):
        one.sequence.num_computed = one.end
        one.sequence.token_ids.extend(token_ids)
    return output.token_ids


def generate(runner: Runner, sequences: list[Sequence], num_tokens: int) -> list[list[int]]:
    """Prefill all in one step, then decode them together; the output tokens of each."""
    for _ in range(num_tokens):
        step(runner, [next_chunk(sequence) for sequence in sequences])
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
