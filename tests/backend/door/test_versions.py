"""Which of Triton's models answers a request."""

from __future__ import annotations

import pytest

from inflight.door.versions import resolve, without_versions
from inflight.errors import UnknownModel
from inflight.ipc.health import Health

HEALTH = Health(
    is_live=True,
    is_ready=True,
    models=["generate", "embed"],
    versions={"generate": [2, 10], "old": []},
)


@pytest.mark.parametrize(
    ("model", "version", "name"),
    [
        ("generate", "", "generate@10"),
        ("generate", "2", "generate@2"),
        ("generate", "002", "generate@2"),
        ("embed", "", "embed"),
        ("embed", "7", "embed"),
    ],
)
def test_the_highest_version_answers_unless_the_request_names_one(
    model: str, version: str, name: str
) -> None:
    assert resolve(HEALTH, model, version) == name


@pytest.mark.parametrize(
    ("model", "version", "words"),
    [
        ("generate", "1", "has no version 1; allowed: 2, 10, or none for the highest"),
        ("generate", "9" * 18, "has no version 9+; allowed: 2, 10"),
        ("old", "", "no version of model old is loaded"),
        ("old", "2", "no version of model old is loaded"),
    ],
)
def test_a_version_that_is_not_loaded_is_unknown(model: str, version: str, words: str) -> None:
    with pytest.raises(UnknownModel, match=words):
        resolve(HEALTH, model, version)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in ensemble 'generate@2', unknown model: 'a.b-c@10'", None),
        ("prompt 'x@y.org' or a@1 is not allowed", "prompt 'x@y.org' or a@1 is not allowed"),
    ],
)
def test_errors_have_the_names_that_clients_use(text: str, expected: str | None) -> None:
    assert without_versions(text) == (expected or "in ensemble 'generate', unknown model: 'a.b-c'")
