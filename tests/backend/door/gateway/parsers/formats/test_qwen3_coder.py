from __future__ import annotations

import pytest

from model_outputs import Output, parse

CALL = """<tool_call>
<function=get_weather>
<parameter=city>
{}
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


def test_types_follow_from_the_schema() -> None:
    assert parse("qwen3_coder", CALL.format(5)) == Output(
        "", (("get_weather", '{"city": "5", "days": 3}'),)
    )


def test_a_value_keeps_its_white_space_but_one_line_break_at_each_end() -> None:
    assert parse("qwen3_coder", CALL.format("\n a\n <b> \n")).calls[0][1] == (
        '{"city": "\\n a\\n <b> \\n", "days": 3}'
    )


@pytest.mark.parametrize(
    "text",
    [
        CALL.removeprefix("<tool_call>\n"),
        CALL.replace("\n</tool_call>", ""),
        CALL.replace(">\n", ">").replace("\n<", "<"),
        CALL.replace("3\n</parameter>", "3"),
    ],
)
def test_tags_that_models_leave_out(text: str) -> None:
    assert parse("qwen3_coder", f"Hi.\n{text.format('Paris')}") == Output(
        "Hi.", (("get_weather", '{"city": "Paris", "days": 3}'),)
    )


def test_parameters_without_a_schema_are_strings() -> None:
    call = CALL.format("a").replace("get_weather", "later")
    assert parse("qwen3_coder", f"{call}\n{call} bye") == Output(
        "bye", (("later", '{"city": "a", "days": "3"}'),) * 2
    )


def test_a_function_without_parameters() -> None:
    text = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    assert parse("qwen3_coder", text) == Output("", (("now", "{}"),))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>now</tool_call>",
        "<function=now>",
        "<function=>\n</function>",
        "<function=a b>\n</function>",
        "<function=now>\n5\n</function>",
        "<function=now>\n<parameter=>5</parameter>\n</function>",
    ],
)
def test_a_call_that_is_malformed_before_its_parameters_is_text(text: str) -> None:
    assert parse("qwen3_coder", f"Hi. {text}") == Output(f"Hi. {text}")


def test_text_between_parameters_reaches_the_client() -> None:
    text = CALL.format("a").replace("<parameter=days>", "<parameter>")
    arguments = '{"city": "a"<parameter>\n3\n</parameter>\n</function>\n'
    assert parse("qwen3_coder", text) == Output("", (("get_weather", arguments),))
    text = text.replace("<parameter>", "<parameter=days")
    arguments = arguments.replace("<parameter>", "<parameter=days")
    assert parse("qwen3_coder", text) == Output("", (("get_weather", arguments),))
