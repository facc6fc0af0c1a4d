"""Each job of the sanitizer's run selects tests that exist, by files and by `-k`."""

from __future__ import annotations

import re

import pytest

from kernels.sanitize import JOBS, TESTS, Job


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.tool}, {job.name}")
def test_a_job_selects_tests_that_exist(job: Job) -> None:
    sources = "".join((TESTS / f"test_{file}.py").read_text() for file in job.files)
    names = re.findall(r"^def (test_\w+)", sources, re.MULTILINE)
    assert names
    for selector in filter(None, re.split(r"\bor\b|\bnot\b", job.only)):
        # What stands in brackets are values of parameters.
        fragment = selector.strip().partition("[")[0]
        assert any(fragment in name for name in names), fragment
