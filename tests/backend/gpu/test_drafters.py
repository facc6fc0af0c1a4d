"""Models that draft on a GPU, with its kernels.

With batch_invariant, so that a token has the same bits alone and among drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from device_drafting import (
    NUM_LAYERS,
    DraftingClaims,
    GptOssRig,
    HeadClaims,
    NormedOutputRig,
    Rig,
)
from inflight.checkpoint.locate import Checkpoint
from inflight.execution.cuda_runner import CudaRunner
from inflight.kv.budget import GPU_OVERHEAD_BYTES
from inflight.models.registry import read_spec
from returning_chats import NUM_CHATS, NUM_TURNS, chat

pytestmark = pytest.mark.gpu


def make_rig(folder: Path, kind: type[Rig]) -> Rig:
    return kind(
        folder=folder,
        shape={
            "vocab_size": 1024,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 512,
        },
        draft_vocab_size=384,
        dtype=torch.bfloat16,
        scale=0.3,
        settings={
            "max_num_seqs": 24,
            "max_num_batched_tokens": 256,
            "num_blocks": 512,
            "enable_prefix_caching": False,
            "batch_invariant": True,
        },
        ways={
            "alone": {"max_num_seqs": 1},
            "together": {},
            "launches": {"cuda_graphs": False},
            "chunks": {"max_prefill_chunk": 16, "max_num_batched_tokens": 64},
            "preemption": {"num_blocks": 48},
            "prefixes": {"enable_prefix_caching": True},
        },
        num_requests=24,
        prompt_len=60,
        common_len=64,
        last_prompt_len=0,
        max_tokens=40,
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


def test_model_and_drafter_share_the_card(rig: Rig) -> None:
    """What the model, the drafter and their pools take is the budget, less its overhead."""
    total = torch.cuda.mem_get_info()[1]
    share = 4 * GPU_OVERHEAD_BYTES / total
    for drafter in (
        {"method": "self", "num_layers": 2},
        {"method": "draft_model"},
        {"method": "eagle3"},
    ):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        engine = rig.make_engine(
            drafter, num_blocks=None, gpu_memory_utilization=share, max_num_seqs=8
        )
        used = torch.cuda.memory_reserved() - before
        assert 2.9 * GPU_OVERHEAD_BYTES < used < 4 * GPU_OVERHEAD_BYTES
        costs = engine.runner.step_costs
        assert costs is not None and 0.0 < costs.draft_seconds < 0.1
        del engine
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "self", "num_layers": 2},
        {"method": "draft_model"},
        {"method": "eagle3"},
        {"method": "ngram"},
    ],
    ids=lambda drafter: drafter["method"],
)
def test_blocks_of_drafts_come_back_from_host_memory(
    rig: Rig, drafter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Models as small as these compute tokens sooner than they load them.
    monkeypatch.setattr(CudaRunner, "_measure_loads", lambda self, config: None)
    caching = {"enable_prefix_caching": True}
    plain = rig.make_engine(num_blocks=600, **caching)
    expected = chat(plain, poisons=False, prompt_tokens=100)
    engine = rig.make_engine(drafter, num_blocks=120, kv_host_memory_bytes=256 << 20, **caching)
    assert chat(engine, poisons=True, prompt_tokens=100) == expected
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_loaded >= NUM_CHATS * (NUM_TURNS - 1)


def test_the_head_s_dimension_needs_a_kernel(rig: Rig, tmp_path: Path) -> None:
    from inflight.errors import ConfigError

    odd = rig.all_settings | {"head_dim": 32}
    head = tiny.write_eagle3(
        tmp_path / "head",
        tiny.random_head(odd, rig.draft_vocab_size),
        dtype=torch.bfloat16,
        **(rig.shape | {"head_dim": 32}),
    )
    target = read_spec(Checkpoint(rig.folder / "target", "huggingface"))
    assert target.layers[0].attention.head_dim == 64
    with pytest.raises(ConfigError, match=r"head_dim 32 \(allowed: .*\) is not supported on GPUs"):
        rig.make_engine({"method": "eagle3", "model": str(head.path)})
