"""A CPU needs no package of the extra `cuda`; `make demo` installs none where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

_GENERATE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cuda", "pynvml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory
from inflight.checkpoint.locate import locate
from inflight.ipc import engine_main
from inflight.sampling.params import SamplingParams

checkpoint = locate(sys.argv[1])
drafting = SpeculativeConfig(method=sys.argv[2]) if len(sys.argv) > 2 else None
config = EngineConfig(
    model=sys.argv[1], device="cpu", num_blocks=64, speculative_config=drafting
)
runner, spec = factory.build(config, checkpoint, lambda what, fraction: None)
engine = Engine(config, runner, spec.max_model_len(config), spec.eos_token_ids)
params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
outputs = generate(engine, [Request(0, [5, 17, 99, 3, 5, 17, 99], params)])
print(len(outputs[0]))
"""


@pytest.mark.parametrize("method", ["", "ngram"])
def test_a_cpu_generates_without_the_packages_of_a_gpu(tmp_path: Path, method: str) -> None:
    tiny.write_llama(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(tmp_path / "model"), *filter(None, [method])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "8"
