"""Reasons of failed loads are found in tritonserver's log."""

from __future__ import annotations

from inflight.deploy.tritonserver.failures import load_failures


def test_load_failures_omit_consequential_errors() -> None:
    log = (
        "failed to load 'a' version 1: Invalid argument: ConfigError: no model\\n\\nAt: x\n"
        "failed to load 'a' version 1: Invalid argument: ConfigError: no model\\n\\nAt: x\n"
        "Invalid argument: ensemble 'e' depends on 'a' which has no loaded version.\n"
        "failed to load 'b'\n"
    )
    assert load_failures(log) == ["model a: no model"]
