from __future__ import annotations

from typing import Any

import jinja2
import pytest

from family_chats import GRANITE as GRANITE33
from family_chats import SMOLLM3
from inflight.door.gateway.parsers import (
    FORMATS,
    Formats,
    detect,
    markers,
    opens_reasoning,
    reasoning_switches,
    unread_variables,
)
from model_outputs import WRITERS

# The parts of published templates that show a format.
HERMES = """{{- "For each function call, return a json object as XML:
<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}"""
QWEN3_CODER = """{{- 'ONLY reply in the following format:\\n\\n<tool_call>\\n<function=f>\\n
<parameter=p>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>' }}"""
LLAMA31 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary}. ' }}"""
LLAMA4 = """{{- "Use exact format: [func_name1(param1=value1), func_name2(...)]" }}"""
MISTRAL = """{{- "[TOOL_CALLS] [" }}"""
DEEPSEEK_V3 = """{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name +
'\\n' + '```json' + '\\n' + arguments + '\\n' + '```' + '<｜tool▁call▁end｜>'}}"""  # noqa: RUF001
DEEPSEEK_V31 = """{{'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments}}"""  # noqa: RUF001
GLM = "{{ '<tool_call>' + name }}<arg_key>{{ key }}</arg_key></tool_call>"
HUNYUAN = "{{ '<tool_calls><tool_call>' + name }}</tool_call></tool_calls>"
SEED = "{{ '<seed:tool_call><function=f><parameter=p>1</parameter></function>' }}"
HARMONY = "{{- '<|start|>assistant<|channel|>analysis<think></think>' }}"

QWEN25 = """{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
QWEN3 = """{%- if '</think>' in content %}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
QWEN3_THINKING = """{%- if '</think>' in content %}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}"""
QWEN35 = """{%- if '</think>' in content %}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""
R1 = """{% if '</think>' in content %}{% endif %}{% if add_generation_prompt and not ns.is_tool %}
{{'<|Assistant|><think>\\n'}}{% endif %}"""
V31 = """{%- if not add_generation_prompt is defined %}{%- endif %}
{%- if not thinking is defined %}{% set thinking = false %}{%- endif %}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}
  {{'<|Assistant|>'}}
  {%- if not thinking %}
    {{'</think>'}}
  {%- else %}
    {{'<think>'}}
  {%- endif %}
{% endif %}"""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        (QWEN3_CODER, "qwen3_coder"),
        (LLAMA31, "llama3_json"),
        (LLAMA4, "pythonic"),
        (LLAMA4 + "<|python_tag|>", "pythonic"),
        (MISTRAL, "mistral"),
        (DEEPSEEK_V3, "deepseek_v3"),
        (DEEPSEEK_V31, "deepseek_v31"),
        (GLM, None),
        (HUNYUAN, None),
        (SEED, None),
        (QWEN25, None),
        ("", None),
    ],
)
def test_the_format_of_calls_follows_from_the_template(template: str, name: str | None) -> None:
    assert detect(template) == Formats(name, None)


@pytest.mark.parametrize("template", [QWEN3, QWEN3_THINKING, QWEN35, R1, V31])
def test_templates_with_tags_are_of_models_that_reason(template: str) -> None:
    assert detect(HERMES + template) == Formats("hermes", "think")


def test_harmony_is_the_format_of_calls_and_of_reasoning() -> None:
    assert detect(HARMONY) == detect(HARMONY + HERMES) == Formats("harmony", "harmony")
    assert not opens_reasoning(HARMONY)


def test_markers_are_those_that_models_write() -> None:
    assert markers(Formats(None, None)) == ()
    assert markers(Formats("mistral", "think")) == (
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        *("<think>", "</think>"),
    )
    assert markers(Formats(None, "harmony")) == markers(Formats("harmony", "harmony"))
    assert len({*markers(Formats("harmony", "harmony"))}) == len(FORMATS["harmony"].markers)
    for name in ("harmony", "hermes", "deepseek_v3", "deepseek_v31", "mistral", "qwen3_coder"):
        written = WRITERS[name]([("now", {}), ("now", {})])
        assert any(marker in written for marker in markers(Formats(name, None)))
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize(
    ("template", "switches"),
    [(QWEN3, ["enable_thinking"]), (SMOLLM3, ["enable_thinking"]), (GRANITE33, ["thinking"])],
)
def test_the_switch_of_reasoning_is_a_variable_of_the_template(
    template: str, switches: list[str]
) -> None:
    assert reasoning_switches(template) == switches
    names = ["thinking", "enable_thinking", "no.name(", "add_generation_prompt"]
    assert unread_variables(template, names) == [name for name in names[:3] if name not in switches]


@pytest.mark.parametrize("template", [QWEN25, QWEN3, QWEN3_THINKING, QWEN35, R1, V31])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"thinking": False},
        {"thinking": True},
    ],
)
def test_the_prompt_opens_reasoning_where_rendering_shows_it(
    template: str, variables: dict[str, Any]
) -> None:
    namespace = {"is_tool": False, "is_last_user": True}
    prompt = jinja2.Template(template).render(
        add_generation_prompt=True, content="", ns=namespace, **variables
    )
    is_open = prompt.rfind("<think>") > prompt.rfind("</think>")
    assert opens_reasoning(template, variables) == is_open


def test_the_prompts_of_smollm3_and_granite_do_not_open_reasoning() -> None:
    for template, switch in ((SMOLLM3, "enable_thinking"), (GRANITE33, "thinking")):
        for is_on in (True, False):
            assert not opens_reasoning(template, {switch: is_on})


def test_a_template_without_a_generation_prompt_opens_nothing() -> None:
    assert not opens_reasoning("{{ '<think>' }}")
    assert not opens_reasoning("")
