"""Drafting on a GPU with the kernels' reference implementations: where drafts are stored, which
tokens a drafter reads, and the state that it leaves. tests/backend/gpu/test_drafters.py covers the
kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import host_kernels
from device_drafting import (
    NUM_DRAFTS,
    WAYS,
    DraftingClaims,
    GptOssRig,
    HeadClaims,
    NormedOutputRig,
    Rig,
    drafters,
    small_rig,
)
from inflight.core.batch import Batch, StepOutput
from inflight.core.request import Request
from inflight.engine.engine import generate
from inflight.kv import budget
from inflight_kernels.torch_ops.drafting import Copy, propose
from thinned import thinned


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.install(monkeypatch)
    torch.set_num_threads(1)


def make_rig(folder: Path, kind: type[Rig]) -> Rig:
    return small_rig(
        folder,
        max_len=96,
        kind=kind,
        settings={
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "num_blocks": 60,
            "enable_prefix_caching": False,
        },
        ways={
            "alone": {"max_num_seqs": 1},
            "together": {},
            "launches": {"cuda_graphs": False},
            "chunks": {"max_prefill_chunk": 16, "max_num_batched_tokens": 40},
            "preemption": {"num_blocks": 9},
            "prefixes": {"enable_prefix_caching": True},
        },
        num_requests=12,
        prompt_len=40,
        common_len=32,
        last_prompt_len=79,
        max_tokens=17,
    )


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return make_rig(tmp_path_factory.mktemp("models"), Rig)


class TestDrafts(DraftingClaims):
    pass


class TestHeadsOfGptOss(HeadClaims):
    @pytest.fixture(scope="class", params=[GptOssRig, NormedOutputRig])
    @classmethod
    def rig(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
        return make_rig(tmp_path_factory.mktemp("gpt-oss"), request.param)


def test_drafting_runs_at_most_the_passes_that_are_needed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a few more, where graphs are recorded for some numbers of them only."""
    engine = rig.make_engine({"method": "self", "num_layers": 1, "num_speculative_tokens": 12})
    drafter = engine.runner.drafter  # type: ignore[attr-defined]
    passes: list[int] = []
    launch = drafter._launch

    def counted(num_rows: int, num_drafts: int, pdl: bool = False) -> None:
        passes.append(num_drafts)
        launch(num_rows, num_drafts, pdl)

    monkeypatch.setattr(drafter, "_launch", counted)
    batch = drafter._target.batch
    with torch.inference_mode():
        drafter.capture([1, 2, 4], None)
        passes.clear()
        for num_chunks, num_drafts in ((1, 1), (2, 3), (4, 4), (3, 9), (5, 4), (1, 40)):
            drafter.draft(batch, num_chunks, num_drafts)
    assert passes == [1, 3, 5, 12, 4, 12]


@drafters
def test_model_and_drafter_share_the_memory(
    rig: Rig, drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In proportion to what their blocks take, and with room for the blocks that drafts lack."""
    total = 16 << 20
    monkeypatch.setattr(host_kernels.HostCuda, "mem_get_info", lambda *given: (total, total))
    monkeypatch.setattr(budget, "GPU_OVERHEAD_BYTES", 0)
    engine = rig.make_engine(drafter, num_blocks=None, gpu_memory_utilization=0.5)
    runner = engine.runner
    caches = runner._steps.caches  # type: ignore[attr-defined]
    own_layers = {"draft_model": 5, "eagle3": 1}.get(drafter["method"], 0)
    scratch = 0 if drafter["method"] in ("ngram", "suffix") else 6
    target = (5, 2, runner.num_blocks + (scratch if drafter["method"] == "self" else 0))
    expected = [target] + [(own_layers, 2, runner.num_blocks + scratch)] * bool(own_layers)
    assert [cache.shape[:3] for cache in caches] == expected
    used = sum(cache.nbytes for cache in caches)
    block = 2 * 16 * 64 * caches[0].itemsize  # bytes in a layer
    assert 0 <= total // 2 - used < (5 + own_layers) * block
    costs = runner.step_costs
    assert costs is not None and costs.plain is not None
    assert min(*costs.verifying.seconds, *costs.plain.seconds) > 0.0


@pytest.mark.parametrize(
    ("method", "max_match", "per_match", "way"),
    thinned(
        [pytest.param("ngram", 4, 0, id="ngram"), pytest.param("suffix", 32, 2, id="suffix")],
        WAYS,
        one_in=2,
    ),
)
def test_a_runner_reports_how_many_drafts_the_text_had(
    rig: Rig, method: str, max_match: int, per_match: int, way: str
) -> None:
    engine = rig.make_engine({"method": method, "prompt_lookup_min": 1}, **rig.ways[way])
    assert engine.speculation is not None
    observe = engine.speculation.observe
    counts: list[int] = []
    # By request: how often it was preempted, the source of its drafts, and their number.
    texts: dict[int, tuple[int, Copy | None, int]] = {}

    def observed(batch: Batch, output: StepOutput) -> None:
        observe(batch, output)
        for index, chunk in enumerate(batch.chunks):
            if chunk.is_stale or not output.token_ids[index]:
                continue
            sequence = chunk.sequence
            generation, copy, expected = texts.get(sequence.request_id, (-1, None, 0))
            if generation != chunk.generation:  # its slot is new
                copy = None
            elif chunk.num_drafts and index in output.num_proposed:
                assert output.num_proposed[index] == expected
                counts.append(expected)
            tokens = np.array(sequence.token_ids)
            found, copy = propose(tokens, max_match, 1, NUM_DRAFTS, per_match=per_match, copy=copy)
            texts[sequence.request_id] = (
                chunk.generation,
                copy if method == "ngram" else None,
                len(found),
            )

    engine.speculation.observe = observed  # type: ignore[method-assign]
    assert generate(engine, rig.requests()) == rig.expected
    assert {0, NUM_DRAFTS} <= set(counts)
    if method == "suffix":
        assert set(counts) - {0, NUM_DRAFTS}


# ---------------------------------------------------------------- sequences that need the host


def unrepeated(rig: Rig) -> list[Request]:
    """Requests that need the host: what may follow depends on the tokens before."""
    return [
        msgspec.structs.replace(
            one, params=msgspec.structs.replace(one.params, no_repeat_ngram_size=4)
        )
        if i % 3
        else one
        for i, one in enumerate(rig.requests())
    ]


@pytest.fixture(scope="module")
def expected_unrepeated(rig: Rig) -> dict[int, list[int]]:
    """Outputs of `unrepeated` requests by an engine without drafts."""
    with pytest.MonkeyPatch.context() as patched:
        host_kernels.install(patched)
        expected = generate(rig.make_engine(), unrepeated(rig))
    assert expected != rig.expected, "something would have been repeated"
    return expected


@pytest.mark.parametrize(
    ("drafter", "way"),
    thinned(
        [
            pytest.param({"method": "ngram"}, id="ngram"),
            pytest.param({"method": "suffix"}, id="suffix"),
            pytest.param(
                {"method": "suffix", "suffix_decoding_max_cached_tokens": 2000}, id="outputs"
            ),
        ],
        WAYS,
        one_in=3,
    ),
)
def test_a_sequence_needing_committed_tokens_uses_host_drafts(
    rig: Rig, expected_unrepeated: dict[int, list[int]], drafter: dict[str, Any], way: str
) -> None:
    """What may follow depends on the tokens before: on drafted ones, too."""
    wanted, expected = unrepeated(rig), expected_unrepeated
    engine = rig.make_engine({"prompt_lookup_min": 1} | drafter, **rig.ways[way])
    assert generate(engine, wanted) == expected
    again = [msgspec.structs.replace(one, request_id=100 + one.request_id) for one in wanted]
    assert generate(engine, again) == {100 + one: ids for one, ids in expected.items()}
    accepted = engine.metrics().value("spec_decode_num_accepted_tokens_from_outputs")
    assert accepted > 20 if "suffix_decoding_max_cached_tokens" in drafter else accepted == 0
    assert 0 < engine.stats().num_accepted_tokens < engine.stats().num_drafted_tokens
