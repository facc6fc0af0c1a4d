"""lm-eval: a task that compares log-probabilities, and one that reads generated text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "Berlin", "Madrid"]},
    {"question": "The capital of Italy is", "choices": ["Rome", "Oslo", "Vienna"]},
    {"question": "Two plus two equals", "choices": ["four", "green", "Monday"]},
    {"question": "The sky on a clear day is", "choices": ["blue", "wooden", "seven"]},
]
TASKS = {
    "most_probable": """
task: most_probable
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "generated": """
task: generated
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "Repeat: {{choices[0]}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return tmp_path


def run(tasks: Path, task: str, model: str, arguments: str, *further: str) -> dict[str, Any]:
    """The task's results, and its samples by `samples`."""
    output = tasks / "output"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments),
            *("--tasks", task, "--include_path", str(tasks), "--output_path", str(output)),
            *("--log_samples", *further),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = output.rglob("results_*.json")
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    found: dict[str, Any] = json.loads(path.read_text())["results"][task]
    return found | {"samples": [json.loads(line) for line in samples.read_text().splitlines()]}


@pytest.mark.client("lm-eval, local-completions", "/v1/completions", package="lm-eval")
def test_the_most_probable_answer_is_found(url: str, model: str, tasks: Path) -> None:
    """With the server's tokenizer, over /tokenizer_info and /tokenize."""
    arguments = f"model={model},base_url={url}/v1/completions,num_concurrent=2"
    found = run(tasks, "most_probable", "local-completions", arguments, "--batch_size", "2")
    assert found["acc,none"] == 1.0
    for sample in found["samples"]:
        assert all(float(one[0][0]) < 0 for one in sample["resps"])


@pytest.mark.client("lm-eval, local-chat-completions", "/v1/chat/completions", package="lm-eval")
def test_text_is_generated(url: str, model: str, tasks: Path) -> None:
    arguments = f"model={model},base_url={url}/v1/chat/completions,num_concurrent=2"
    found = run(tasks, "generated", "local-chat-completions", arguments, "--apply_chat_template")
    assert len(found["samples"]) == len(QUESTIONS)
    assert all(sample["resps"][0][0].strip() for sample in found["samples"])
