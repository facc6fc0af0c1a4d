from __future__ import annotations

import pytest

import model_outputs
from model_outputs import Output, parse

CALLS = [("now", {"a": 1}), ("later", {})]
PARSED = (("now", '{"a": 1}'), ("later", "{}"))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize("write", [model_outputs.deepseek_v3, model_outputs.deepseek_v31])
def test_either_parser_reads_both_versions(name: str, write: model_outputs.Write) -> None:
    text = write(CALLS)
    assert parse(name, text) == Output("", PARSED)
    assert parse(name, f"Hi.\n{text} bye") == Output("Hi.bye", PARSED)
    # An end of the output in place of the last markers is no matter.
    assert parse(name, text[: text.rindex("}") + 1]) == Output("", PARSED)


def test_a_function_may_be_named_function() -> None:
    text = model_outputs.deepseek_v31([("function", {})])
    assert parse("deepseek_v31", text) == Output("", (("function", "{}"),))


@pytest.mark.parametrize("position", [20, 45, 60])
def test_a_call_that_is_malformed_before_its_arguments_is_text(position: int) -> None:
    text = model_outputs.deepseek_v3([("now", {})])
    text = f"{text[:position]}?? {text[position:]}".replace("{}", "5")
    assert parse("deepseek_v3", text) == Output(text)
