"""Drafting on a GPU, with the kernels' definitions in the kernels' place: where drafts go, which
tokens a drafter sees, and what it leaves behind. tests/backend/gpu/test_drafters.py says the same
of the kernels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

import host_kernels
import tiny
from eagle3_by_the_book import Head
from inflight.checkpoint import Checkpoint
from inflight.config import EngineConfig, SpeculationConfig
from inflight.cuda_runner import CudaRunner
from inflight.engine import Engine, generate
from inflight.model.config import read_config
from inflight.request import Request
from inflight.sampling import SamplingParams
from watched import Watched, generate_twice

SHAPE = {
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 96,
}
SETTINGS = tiny.SETTINGS | SHAPE
DRAFT_VOCAB_SIZE = 60
NUM_DRAFTS = 5
WAYS = [
    pytest.param({"max_num_seqs": 1}, id="alone"),
    pytest.param({}, id="together"),
    pytest.param({"cuda_graphs": False}, id="launches"),
    pytest.param({"max_prefill_chunk": 16, "max_batch_tokens": 40}, id="chunks"),
    pytest.param({"num_blocks": 9}, id="preemption"),
    pytest.param({"prefix_cache": True}, id="prefixes"),
]
DRAFTERS = [
    pytest.param({"drafter": "ngram", "min_match": 1}, id="ngram"),
    pytest.param({"drafter": "self", "num_layers": 3}, id="self"),
    pytest.param({"drafter": "draft_model", "model": "smaller"}, id="draft_model"),
    pytest.param({"drafter": "eagle3", "model": "head"}, id="eagle3"),
]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.install(monkeypatch)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one that is nearly the same, and a head."""
    folder = tmp_path_factory.mktemp("models")
    weights = tiny.random_weights(SETTINGS)
    for name in weights:
        if "layers" in name and "norm" not in name:
            weights[name] *= 0.5  # so that the first layers say what the last ones do, mostly
    tiny.write_llama(folder / "target", weights, **SHAPE)
    noise = torch.Generator().manual_seed(1)
    nearly = {
        name: value + 0.02 * torch.randn(value.shape, generator=noise)
        for name, value in weights.items()
    }
    tiny.write_llama(folder / "smaller", nearly, **SHAPE)
    head = tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE)
    tiny.write_eagle3(folder / "head", head, **(SHAPE | {"num_hidden_layers": 1}))
    return folder


def make_engine(folder: Path, drafter: dict[str, Any] | None = None, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_batch_tokens": 64,
        "num_blocks": 60,
        "prefix_cache": False,
    }
    if drafter is not None:
        drafter = {"default": NUM_DRAFTS} | drafter
        if "model" in drafter:
            drafter["model"] = str(folder / drafter["model"])
        defaults["speculation"] = SpeculationConfig(**drafter)
    checkpoint = Checkpoint(folder / "target", "huggingface")
    config = EngineConfig(model=str(checkpoint.path), device="cuda", **(defaults | settings))
    model = read_config(checkpoint)
    runner = CudaRunner(config, checkpoint, model, lambda what, fraction: None)
    return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)


def requests() -> list[Request]:
    """Prompts, of which some begin alike and one reaches the end of the context; every other one
    is drawn."""
    generator = random.Random(3)
    common = [generator.randrange(3, 160) for _ in range(32)]
    found = []
    for i in range(12):
        prompt = [generator.randrange(3, 160) for _ in range(generator.randint(1, 40))]
        if i % 3 == 0:
            prompt = common + prompt[:i]
        if i == 7:
            prompt = (common * 3)[:76]
        wish: dict[str, Any] = {"temperature": 0.0}
        if i % 2:
            wish = {"temperature": 0.9, "top_p": 0.95, "seed": i}
        given = SamplingParams(max_tokens=20, ignore_eos=True, **wish)
        found.append(Request(1 + i, prompt, given))
    return found


EXPECTED: dict[Path, dict[int, list[int]]] = {}


@pytest.fixture
def expected(folder: Path) -> dict[int, list[int]]:
    """What is said without drafts."""
    if folder not in EXPECTED:
        EXPECTED[folder] = generate(make_engine(folder), requests())
    return EXPECTED[folder]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", DRAFTERS)
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
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
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
    beyond = 0
    for request_id, done, drafts in watched.proposed:
        rest = expected[request_id % 100][done : done + NUM_DRAFTS]
        assert drafts[: len(rest)] == rest, (request_id, done)
        beyond += len(rest)
    assert beyond > 100
    assert engine.stats().num_accepted_tokens > 50


@pytest.mark.parametrize("way", WAYS)
def test_a_head_drafts_what_is_published(
    folder: Path, expected: dict[int, list[int]], way: dict[str, Any]
) -> None:
    """As `transformers` and plain torch do, that see whole texts and keep nothing."""
    engine = make_engine(folder, {"drafter": "eagle3", "model": "head"}, **way)
    watched = Watched(engine, expected)
    assert generate(engine, requests()) == expected
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    embedding = target.get_input_embeddings().weight.detach()
    head = Head(tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE), SETTINGS, embedding)
    prompts = {one.request_id: one.prompt_ids for one in requests()}
    sample = random.Random(4).sample(watched.proposed, 30)
    right = 0
    for request_id, done, drafts in sample:
        token_ids = prompts[request_id] + expected[request_id][:done]
        with torch.inference_mode():
            states = target(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[tap][0] for tap in (2, 2, 2)], -1)
        right += head.drafts(features, token_ids, NUM_DRAFTS) == drafts
    # Where a prefix was found, the entry of its last position may be of another next token.
    assert right >= len(sample) * (0.8 if way.get("prefix_cache") else 1)


def test_a_drafting_has_no_more_passes_than_anybody_wants(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a few more, where graphs are recorded for some numbers of them only."""
    engine = make_engine(folder, {"drafter": "self", "num_layers": 1, "max_drafts": 12})
    drafter = engine.runner.drafter  # type: ignore[attr-defined]
    passes: list[int] = []
    launch = drafter._launch

    def counted(num_rows: int, num_drafts: int, pdl: bool = False) -> None:
        passes.append(num_drafts)
        launch(num_rows, num_drafts, pdl)

    monkeypatch.setattr(drafter, "_launch", counted)
    batch = drafter._target.batch
    with torch.inference_mode():
        drafter.record([1, 2, 4], None)
        passes.clear()
        for num_chunks, num_drafts in ((1, 1), (2, 3), (4, 4), (3, 9), (5, 4), (1, 40)):
            drafter.draft(batch, num_chunks, num_drafts)
    assert passes == [1, 3, 5, 12, 4, 12]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_model_and_drafter_share_the_memory(
    folder: Path, drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In proportion to what their blocks take, and with room for the blocks that drafts lack."""
    total = 16 << 20
    monkeypatch.setattr(host_kernels._HostCuda, "mem_get_info", lambda *given: (total, total))
    engine = make_engine(folder, drafter, num_blocks=None, gpu_memory=0.5)
    runner = engine.runner
    shapes = [cache.shape for cache in runner._caches]  # type: ignore[attr-defined]
    own_layers = {"draft_model": 5, "eagle3": 1}.get(drafter["drafter"], 0)
    scratch = 0 if drafter["drafter"] == "ngram" else 6
    target = (5, 2, runner.num_blocks + (scratch if drafter["drafter"] == "self" else 0))
    expected = [target] + [(own_layers, 2, runner.num_blocks + scratch)] * bool(own_layers)
    assert [shape[:3] for shape in shapes] == expected
    used = sum(2 * shape.numel() for shape in shapes)
    block = 2 * 16 * 64 * 2  # bytes in a layer
    assert 0 <= total // 2 - used < (5 + own_layers) * block
    assert runner.step_costs is not None
    assert runner.step_costs.draft_seconds > 0.0


# ---------------------------------------------------------------- who needs the host


@pytest.mark.parametrize("way", WAYS)
def test_who_needs_the_host_has_drafts_that_it_knows(folder: Path, way: dict[str, Any]) -> None:
    """What may follow depends on the tokens before: on drafted ones, too."""
    wanted = [
        msgspec.structs.replace(
            one, params=msgspec.structs.replace(one.params, no_repeat_ngram_size=4)
        )
        if i % 3
        else one
        for i, one in enumerate(requests())
    ]
    expected = generate(make_engine(folder, **way), wanted)
    plain = generate(make_engine(folder, **way), requests())
    assert expected != plain, "something would have been repeated"
    engine = make_engine(folder, {"drafter": "ngram", "min_match": 1}, **way)
    assert generate(engine, wanted) == expected
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_drafted_tokens
