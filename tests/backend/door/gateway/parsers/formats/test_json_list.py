from __future__ import annotations

import pytest

from model_outputs import Output, parse

CALL = '{"name": "now", "arguments": {"a": 1}}'
NOW = ("now", '{"a": 1}')


@pytest.mark.parametrize("text", [f"[{CALL},{CALL}]", f"\n[ {CALL} ,\n{CALL} ]\n"])
def test_an_array_of_calls(text: str) -> None:
    assert parse("json", text) == Output("", (NOW, NOW))


def test_one_call() -> None:
    assert parse("json", CALL) == Output("", (NOW,))


@pytest.mark.parametrize("text", ["[]", "[1, 2]", "{}", f"a {CALL}", CALL.replace("now", "x")])
def test_other_json_is_text(text: str) -> None:
    assert parse("json", text) == Output(text)
