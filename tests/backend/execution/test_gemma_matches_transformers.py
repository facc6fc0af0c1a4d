"""Greedy text of Gemma 3 270M, in GGUF's 4, 5, 6 and 8 bit types, is that of `transformers`.

Both dequantise the file to float32. `transformers` computes the logits after the prompt and each
output token: if each output token is the most probable one, greedy decoding there generates the
same. Where it is not, the two logits must be a tie within the rounding of float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import gemma
import long_results
from gguf_transformers import quick_reader
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams
from inflight.text.chat import encode_chat
from inflight.text.template import Conversation
from inflight.text.tokenizer import Tokenizer
from prompts import PROMPTS
from texts import SENTENCES

OUTPUT_LEN = 64
WINDOW = 512
# Of float32 logits with a deviation of 4 to 6: see the file of results.
TIE = 1e-3
QUESTION = {"role": "user", "content": "What is the capital of France?"}
# The last one is longer than the window of the sliding layers.
LONG = " ".join([*(sentence for group in SENTENCES.values() for sentence in group), *PROMPTS])
TEXTS = [*PROMPTS[:14], LONG]

pytestmark = [pytest.mark.gemma, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return gemma.checkpoint()


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    """The model of `transformers`, from the same file."""
    with quick_reader():
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
        ).eval()


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Engine:
    config = EngineConfig(
        model=str(checkpoint.path), max_prefill_chunk=256, max_num_seqs=16, quantization="none"
    )
    runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
    return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)


def agreement(reference: Any, prompt: list[int], output: list[int]) -> dict[str, Any]:
    """How many output tokens are the most probable ones, and by how much the others miss it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(output)
    top_two = logits.topk(2).values
    behind = top_two[:, 0] - logits.gather(1, chosen[:, None])[:, 0]
    return {
        "prompt_tokens": len(prompt),
        "output_tokens": len(output),
        "equal": int((logits.argmax(-1) == chosen).sum()),
        "largest_miss": round(float(behind.max()), 6),
        "smallest_margin": round(float((top_two[:, 0] - top_two[:, 1]).min()), 6),
        "deviation_of_logits": round(float(logits.std()), 3),
    }


def test_sixteen_prompts_side_by_side(
    checkpoint: Checkpoint, reference: Any, engine: Engine
) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    chat = encode_chat(tokenizer, Conversation([QUESTION]))
    prompts = [chat, *(tokenizer.encode(text) for text in TEXTS)]
    assert len(prompts) == 16 and len(prompts[-1]) > WINDOW
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    outputs = generate(engine, [Request(i, one, params) for i, one in enumerate(prompts)])
    rows = [agreement(reference, one, outputs[i]) for i, one in enumerate(prompts)]
    assert all(row["output_tokens"] == OUTPUT_LEN for row in rows)
    assert all(row["largest_miss"] < TIE for row in rows), rows
    peer = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
    benchmark = "greedy tokens of Gemma 3 270M"
    long_results.write("gemma-3-270m", benchmark, rows, model=checkpoint.path.name, peer=peer)
