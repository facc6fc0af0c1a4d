"""Models that draft on a GPU: no trace in any output, and right each time where they are the model.

With batch_invariant, so that a token has the same bits alone and among drafts.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from eagle3_by_the_book import Head
from inflight import runner as runners
from inflight.checkpoint import Checkpoint
from inflight.config import EngineConfig, SpeculationConfig
from inflight.engine import Engine, generate
from inflight.model.config import read_config
from inflight.request import Request
from inflight.sampling import SamplingParams
from watched import Watched, generate_twice

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
SETTINGS = tiny.SETTINGS | SHAPE
DRAFT_VOCAB_SIZE = 384
NUM_DRAFTS = 5
WAYS = [
    pytest.param({"max_num_seqs": 1}, id="alone"),
    pytest.param({}, id="together"),
    pytest.param({"cuda_graphs": False}, id="launches"),
    pytest.param({"max_prefill_chunk": 16, "max_batch_tokens": 64}, id="chunks"),
    pytest.param({"num_blocks": 48}, id="preemption"),
    pytest.param({"prefix_cache": True}, id="prefixes"),
]
MODELS = {"draft_model": "smaller", "eagle3": "head"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one that is nearly the same, and a head."""
    folder = tmp_path_factory.mktemp("models")
    weights = tiny.random_weights(SETTINGS)
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] *= 0.3
        elif "layers" in name and "norm" not in name:
            weights[name] *= 0.3  # so that the first layers say what the last ones do, mostly
    tiny.write_llama(folder / "target", weights, dtype=torch.bfloat16, **SHAPE)
    noise = torch.Generator().manual_seed(1)
    nearly = {
        name: value + 0.02 * torch.randn(value.shape, generator=noise)
        for name, value in weights.items()
    }
    tiny.write_llama(folder / "smaller", nearly, dtype=torch.bfloat16, **SHAPE)
    head = tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE)
    for name in head:
        if "norm" not in name and name not in ("d2t", "t2d"):
            head[name] *= 0.5
    tiny.write_eagle3(
        folder / "head", head, dtype=torch.bfloat16, **(SHAPE | {"num_hidden_layers": 1})
    )
    return folder


def make_engine(folder: Path, drafter: dict[str, Any] | None = None, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_num_seqs": 24,
        "max_batch_tokens": 256,
        "num_blocks": 512,
        "prefix_cache": False,
        "batch_invariant": True,
    }
    if drafter is not None:
        drafter = {"default": NUM_DRAFTS} | drafter
        if drafter["drafter"] in MODELS:
            drafter.setdefault("model", MODELS[drafter["drafter"]])
            drafter["model"] = str(folder / drafter["model"])
        defaults["speculation"] = SpeculationConfig(**drafter)
    config = EngineConfig(model=str(folder / "target"), device="cuda", **(defaults | settings))
    checkpoint = Checkpoint(folder / "target", "huggingface")
    runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
    return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)


def requests() -> list[Request]:
    """24 prompts, of which some begin alike; every other one is drawn."""
    generator = random.Random(3)
    common = [generator.randrange(3, 1024) for _ in range(64)]
    found = []
    for i in range(24):
        prompt = [generator.randrange(3, 1024) for _ in range(generator.randint(1, 60))]
        if i % 3 == 0:
            prompt = common + prompt[: i // 3]
        wish: dict[str, Any] = {"temperature": 0.0}
        if i % 2:
            wish = {"temperature": 0.9, "top_p": 0.95, "seed": i}
        given = SamplingParams(max_tokens=40, ignore_eos=True, **wish)
        found.append(Request(1 + i, prompt, given))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    """What is said without drafts."""
    return generate(make_engine(folder), requests())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param({"drafter": "self", "num_layers": 3}, id="self"),
        pytest.param({"drafter": "draft_model"}, id="draft_model"),
        pytest.param({"drafter": "eagle3"}, id="eagle3"),
    ],
)
def test_drafts_leave_no_trace(
    folder: Path,
    expected: dict[int, list[int]],
    drafter: dict[str, Any],
    way: dict[str, Any],
) -> None:
    engine = make_engine(folder, drafter, **way)
    if drafter["drafter"] == "eagle3":  # a head with random weights is never right by itself
        Watched(engine, expected)
    assert generate(engine, requests()) == expected
    stats = engine.stats()
    assert 100 < stats.num_accepted_tokens < stats.num_drafted_tokens
    if "num_blocks" in way:
        assert stats.num_preemptions > 0
    if way.get("prefix_cache"):
        assert stats.num_cached_tokens > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param({"drafter": "self", "num_layers": 5}, id="self"),
        pytest.param({"drafter": "draft_model", "model": "target"}, id="draft_model"),
    ],
)
def test_a_drafter_that_is_the_model_is_right_each_time(
    folder: Path,
    expected: dict[int, list[int]],
    drafter: dict[str, Any],
    way: dict[str, Any],
) -> None:
    """Also where its sequences have no blocks yet for what it drafts, and after wrong drafts."""
    engine = make_engine(folder, drafter, **way)
    watched = Watched(engine)
    generate_twice(engine, requests(), expected)
    ends = {one.request_id: len(expected[one.request_id]) for one in requests()}
    right = total = 0
    for request_id, done, drafts in watched.proposed:
        rest = expected[request_id % 100][done : done + len(drafts)]
        right += sum(a == b for a, b in zip(drafts, rest, strict=False))
        total += min(len(drafts), ends[request_id % 100] - done)
    assert total > 500
    assert right == total
    assert engine.stats().num_accepted_tokens > 100


@pytest.mark.parametrize("way", WAYS)
def test_a_head_drafts_what_is_published(
    folder: Path, expected: dict[int, list[int]], way: dict[str, Any]
) -> None:
    """Near-ties aside, as plain torch does, that sees whole texts and keeps nothing."""
    engine = make_engine(folder, {"drafter": "eagle3"}, **way)
    watched = Watched(engine, expected)
    assert generate(engine, requests()) == expected

    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    weights = {
        name: value if name in ("d2t", "t2d") else value.to(torch.bfloat16).float()
        for name, value in head_weights(folder).items()
    }
    head = Head(weights, SETTINGS, target.get_input_embeddings().weight.detach())
    prompts = {one.request_id: one.prompt_ids for one in requests()}
    right = total = 0
    for request_id, done, drafts in random.Random(4).sample(watched.proposed, 40):
        token_ids = prompts[request_id] + expected[request_id][:done]
        with torch.inference_mode():
            states = target(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[tap][0] for tap in (2, 2, 2)], -1)
        right += head.drafts(features, token_ids, 2) == drafts[:2]
        total += 1
    assert right >= 0.75 * total


def head_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "head" / "model.safetensors")


def test_model_and_drafter_share_the_card(folder: Path) -> None:
    """Whatever is left of it when the pools are there, is little."""
    for drafter in (
        {"drafter": "self", "num_layers": 2},
        {"drafter": "draft_model"},
        {"drafter": "eagle3"},
    ):
        engine = make_engine(folder, drafter, num_blocks=None, gpu_memory=0.9, max_num_seqs=8)
        free, total = torch.cuda.mem_get_info()
        assert 0.89 <= 1 - free / total < 0.92
        costs = engine.runner.step_costs
        assert costs is not None and 0.0 < costs.draft_seconds < 0.1
        del engine
        torch.cuda.empty_cache()


def test_the_head_s_dimension_needs_a_kernel(folder: Path, tmp_path: Path) -> None:
    from inflight.errors import ConfigError

    odd = SETTINGS | {"head_dim": 32}
    head = tiny.write_eagle3(
        tmp_path / "head",
        tiny.random_head(odd, DRAFT_VOCAB_SIZE),
        dtype=torch.bfloat16,
        **(SHAPE | {"head_dim": 32}),
    )
    assert read_config(Checkpoint(folder / "target", "huggingface")).head_dim == 64
    with pytest.raises(ConfigError, match="head_dim 32 has no kernel"):
        make_engine(folder, {"drafter": "eagle3", "model": str(head.path)})
