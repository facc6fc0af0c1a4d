"""With latent attention, texts do not depend on how the engine got to compute them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config

import family
import latents
from inflight.checkpoint.locate import Checkpoint
from inflight.config import SpeculativeConfig
from inflight.engine.engine import generate
from mixed_requests import asked, make_engine

each_dtype = pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    settings = {"pad_token_id": 0, **family.SHAPE, **latents.SHAPE, **latents.EXPERTS}
    model = family.make(DeepseekV2Config(**settings))
    folder: Path = tmp_path_factory.mktemp("deepseek")
    return family.write_folder(model, folder)


# Of 8 bits, `make test` has drafts and beams.
@pytest.mark.parametrize(
    "kv_dtype", ["auto", *(pytest.param(one, marks=pytest.mark.long) for one in ("fp8", "int8"))]
)
def test_texts_are_those_of_requests_that_run_alone(checkpoint: Checkpoint, kv_dtype: str) -> None:
    expected = generate(make_engine(checkpoint, kv_dtype, max_num_seqs=1), asked())
    ways: list[dict[str, Any]] = [
        {},
        {"max_prefill_chunk": 5},
        {"num_blocks": 30},
        {"enable_prefix_caching": True, "max_num_seqs": 2},
    ]
    for changes in ways:
        engine = make_engine(checkpoint, kv_dtype, **changes)
        assert generate(engine, asked()) == expected, changes
        stats = engine.stats()
        assert (stats.num_preemptions > 0) == ("num_blocks" in changes)
        assert (stats.num_cached_tokens > 0) == ("enable_prefix_caching" in changes)


@pytest.mark.parametrize(
    "kv_dtype",
    [
        pytest.param("auto", marks=pytest.mark.long),
        "fp8",
        pytest.param("int8", marks=pytest.mark.long),
    ],
)
def test_beams_copy_blocks(checkpoint: Checkpoint, kv_dtype: str) -> None:
    def run(**changes: Any) -> dict[int, list[int]]:
        wanted = asked(num_texts=2, beam_width=2)
        return generate(make_engine(checkpoint, kv_dtype, **changes), wanted)

    expected = run(max_num_seqs=2)
    assert len(set(map(tuple, expected.values()))) > len(asked())
    assert run(enable_prefix_caching=True) == expected
    assert run(num_blocks=60) == expected


@each_dtype
def test_a_draft_model_has_latent_attention_as_well(checkpoint: Checkpoint, kv_dtype: str) -> None:
    """The model itself, all of whose drafts are right."""
    expected = generate(make_engine(checkpoint, kv_dtype), asked())
    drafting = SpeculativeConfig(method="draft_model", default=3, model=str(checkpoint.path))
    engine = make_engine(checkpoint, kv_dtype, speculative_config=drafting)
    assert generate(engine, asked()) == expected
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0.9 * stats.num_drafted_tokens > 0


def test_bfloat16_is_near_float32(checkpoint: Checkpoint) -> None:
    found = {
        dtype: generate(make_engine(checkpoint, "auto", dtype=dtype), asked(max_tokens=2))
        for dtype in ("float32", "bfloat16")
    }
    same = [found["float32"][key] == found["bfloat16"][key] for key in found["float32"]]
    assert sum(same) >= len(same) - 2
