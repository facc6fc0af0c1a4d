"""docs/reference/families.md, from the tests: python tests/support/families_page.py --write

A family has a mark in a column if its test class has the tests of that column. Where it runs on a
GPU follows from its spec and from NOT_RUN_ON_A_GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
from pathlib import Path

import family
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.registry import all_families, read_spec
from inflight.models.spec import LatentSpec, ModelSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/families.md"
TESTS = ROOT / "tests/backend/models/families"
BEGIN, END = "<!-- begin generated: families -->\n", "<!-- end generated: families -->"

NOT_RUN_ON_A_GPU: tuple[str, ...] = ("glm4_moe_lite",)
"""Families whose tests in tests/backend/gpu/test_families.py have not passed on a GPU yet."""

LATENT = LatentSpec(q_rank=0, rank=512, nope_dim=128, rope_dim=64, v_dim=128)
"""Of widths that GPUs support."""

COLUMNS = {
    "Folder": "test_logits_equal_those_of_transformers",
    "GGUF": "test_logits_of_a_gguf_file_equal_those_of_transformers",
    "Speculation, prefix cache, prompt logprobs": (
        "test_greedy_texts_and_prompt_logprobs_equal_those_of_transformers"
    ),
    "EAGLE-3": "test_an_eagle3_head_leaves_no_trace_in_greedy_texts",
    "Structured output": "test_a_constrained_text_matches_its_constraint",
}
"""The test of each column, on a CPU."""


def table() -> str:
    heads = ["Family", "`model_type`", "GGUF architecture", *COLUMNS, "GPU, `batch_invariant`"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    classes = {name: _suites(name) for name in all_families()}
    for name, one in all_families().items():
        marks = [
            "yes" if all(hasattr(suite, test) for suite in classes[name]) else "no"
            for test in COLUMNS.values()
        ]
        names = [", ".join(one.model_types), ", ".join(one.gguf_architectures)]
        lines.append(f"| {' | '.join([name, *names, *marks, _on_gpu(name, classes[name])])} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n{table()}\n{text[end:]}"


def _suites(name: str) -> list[type[family.Suite]]:
    """The test classes of a family. All of its tests are in one file of its name."""
    path = TESTS / f"test_{name}.py"
    spec = importlib.util.spec_from_file_location(f"families_page_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [value for value in vars(module).values() if isinstance(value, type)]
    suites = [one for one in found if issubclass(one, family.Suite)]
    assert suites, path
    return suites


def _on_gpu(name: str, suites: list[type[family.Suite]]) -> str:
    if name in NOT_RUN_ON_A_GPU:
        return "not tested"
    specs = [_spec(suite, changes) for suite in suites for changes in suite.variants.values()]
    obstacles = [found for found in map(gpu_obstacle, specs) if found is not None]
    if not obstacles:
        return "yes, on Hopper" if gpu_obstacle(specs[0], is_hopper=False) else "yes"
    what = min(obstacles).removesuffix(" is not supported on GPUs")
    return f"{'no' if len(obstacles) == len(specs) else 'yes, except'}: {what}"


def _spec(suite: type[family.Suite], changes: dict[str, object]) -> ModelSpec:
    """With heads of a width that GPUs support, and without the tests' short trained contexts."""
    with tempfile.TemporaryDirectory() as folder:
        spec = read_spec(family.write_folder(suite().make(changes), Path(folder)))
    layers = tuple(
        dataclasses.replace(
            layer,
            attention=dataclasses.replace(
                layer.attention,
                head_dim=128,
                query_scaling=None,
                latent=layer.attention.latent and LATENT,
            ),
        )
        for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=layers)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(table(), end="")
