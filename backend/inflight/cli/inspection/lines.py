"""A summary as a table on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.cli.inspection.memory_plan import MemoryPlan, size
from inflight.cli.inspection.summary import Attention, Experts, LinearLayers, NamedToken, Summary
from inflight.models.quantization.choice import UNQUANTISED

_UNITS = ((1_000_000_000, "billion"), (1_000_000, "million"))


def write(summary: Summary, console: Console | None = None) -> None:
    """Print a summary."""
    console = console or Console(highlight=False)
    rows = [row for row in _rows(summary) if row[1]]
    if not console.is_terminal:
        for name, value in rows:
            console.print(Text(f"{name}: {value}"), soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


def _rows(one: Summary) -> list[tuple[str, str]]:
    widths = f", MLP width {'/'.join(map(str, one.mlp_widths))}" if one.mlp_widths else ""
    tied = "the embedding" if one.tied else "weights of its own"
    scaled = f", {one.max_context} with RoPE's scaling"
    return [
        ("model", one.name),
        ("path", one.path),
        ("format", _format(one)),
        ("quantisation", one.quantization or ""),
        ("family", one.family),
        ("parameters", _count(one.num_parameters)),
        ("layers", f"{one.num_layers}, hidden size {one.hidden_size}{widths}"),
        *(("experts", _experts(experts)) for experts in one.experts),
        ("linear layers", _linear_layers(one)),
        *(("attention", _attention(attention)) for attention in one.attention),
        ("vocabulary", f"{one.vocab_size} tokens; output layer: {tied}"),
        (
            "context",
            f"{one.trained_context} tokens"
            + (scaled if one.max_context != one.trained_context else ""),
        ),
        ("KV per token", _by_dtype(one.kv_bytes_per_token)),
        ("tokenizer", one.tokenizer or "none: served with token ids only"),
        ("chat template", one.chat_template or "none: chat is not available"),
        ("BOS token", _token(one.bos) if one.bos is not None else "none"),
        ("stop tokens", ", ".join(map(_token, one.stop_tokens)) or "none"),
        ("CPU", _obstacle(one.obstacles["cpu"])),
        ("GPU", _obstacle(one.obstacles["gpu"], "on Hopper" if one.experts else "")),
        *_memory_rows(one.memory, one.linear_layers),
    ]


def _experts(one: Experts) -> str:
    shared = f", and one of width {one.shared_width} for all tokens" if one.shared_width else ""
    return (
        f"{one.num_experts} of width {one.width}, {one.top_k} per token{shared}, in "
        f"{one.num_layers} layers"
    )


def _memory_rows(plan: MemoryPlan, linear: LinearLayers) -> list[tuple[str, str]]:
    is_kept = linear.weight_only and not plan.on_gpu
    types = f"{linear.format}, others {plan.dtype}" if is_kept else plan.dtype
    parts = f"weights {size(plan.weight_bytes)} ({types}), KV cache {size(plan.kv_bytes)}"
    if plan.kv_dtype != plan.dtype:
        parts += f" ({plan.kv_dtype})"
    if plan.overhead_bytes:
        parts += f", kernels and graphs {size(plan.overhead_bytes)}"
    there = ""
    if plan.machine_bytes is not None:
        what = "of the GPU's" if plan.on_gpu else "available"
        there = f", {what} {size(plan.machine_bytes)}"
    full = plan.num_full_sequences
    holds = f"{full} sequence{'s' if full != 1 else ''} of {plan.max_model_len} tokens"
    if not full:
        setting = "gpu_memory_utilization" if plan.on_gpu else "kv_cache_memory_bytes"
        holds = f"less than one sequence of {plan.max_model_len} tokens (raise {setting})"
    # Where windows are freed, several sequences may hold more tokens than one is admitted with.
    blocks = f"{plan.num_tokens} tokens in {plan.num_blocks} blocks"
    if plan.frees_windows:
        blocks = f"{plan.num_blocks} blocks, freed outside sliding windows"
    return [
        ("runs here on", plan.device),
        ("memory", f"{size(plan.total_bytes)}{there}: {parts}"),
        (
            "KV cache",
            f"{blocks}: {holds}; at most {plan.max_num_seqs} sequences in a step",
        ),
    ]


def _format(one: Summary) -> str:
    name = {"gguf": "GGUF file", "huggingface": "Hugging Face folder"}[one.format]
    if not one.stored_types:
        return f"{name}, random weights"
    types = ", ".join(f"{count} {kind}" for kind, count in one.stored_types.items())
    return f"{name}, {size(one.file_bytes)}; tensors: {types}"


def _linear_layers(one: Summary) -> str:
    """Empty for an engine that computes nothing."""
    linear = one.linear_layers
    if not linear.bits:
        return ""
    if linear.format != UNQUANTISED:
        name = " and ".join(kind.upper() for kind in linear.format.split(" and "))
        name = name.replace("_HADAMARD", ", Hadamard transformed")
        wide = 32 if one.memory.dtype == "float32" else 16
        kept = f"in {wide} bits" if linear.weight_only else "quantised per token"
        rounded = ", rounded when loaded (lossy)" if linear.is_rounded else ""
        how = f"{name}{rounded}, activations {kept}"
    else:
        is_stored_quantised = one.stored_types.keys() - {"F32", "F16", "BF16"}
        how = "dequantised" if is_stored_quantised else "not quantised"
    sizes = ", ".join(
        f"{size(value)} on a {device.upper()}" for device, value in linear.weight_bytes.items()
    )
    return f"{how}; {linear.bits:g} bits a value; weights of the model {sizes}"


def _attention(one: Attention) -> str:
    window = f"window {one.window}" if one.window else "no window"
    heads = f"{one.num_heads} heads, {_widths(one)}"
    return f"{one.num_layers} layers: {heads}, {window}, {_rope(one.rope)}"


def _widths(one: Attention) -> str:
    if one.latent is None:
        return f"{one.num_kv_heads} of keys and values, head_dim {one.head_dim}"
    sizes = one.latent
    ranks = f"rank {sizes['rank']}"
    if sizes["q_rank"]:
        ranks += f", of queries {sizes['q_rank']}"
    return (
        f"latent attention ({ranks}), queries and keys of {sizes['nope_dim']} + "
        f"{sizes['rope_dim']} columns, values of {sizes['v_dim']}"
    )


def _rope(rope: dict[str, Any]) -> str:
    if not rope:
        return "no RoPE"
    shown = {
        key: f"for {len(value)} frequencies" if isinstance(value, list) else value
        for key, value in rope.items()
        if key != "type"
    }
    others = "".join(f", {key} {value}" for key, value in shown.items())
    return f"RoPE {rope.get('type', 'default')}{others}"


def _count(number: int) -> str:
    unit, letter = next((one for one in _UNITS if number >= one[0]), (1, ""))
    return f"{number:,}" + (f" ({number / unit:.1f} {letter})" if letter else "")


def _by_dtype(bytes_by_dtype: Mapping[str, int]) -> str:
    return ", ".join(f"{value:,} bytes in {dtype}" for dtype, value in bytes_by_dtype.items())


def _token(token: NamedToken) -> str:
    return f"{token.id} {token.text!r}" if token.text is not None else str(token.id)


def _obstacle(obstacle: str | None, where: str = "") -> str:
    return f"supported {where}".rstrip() if obstacle is None else obstacle
