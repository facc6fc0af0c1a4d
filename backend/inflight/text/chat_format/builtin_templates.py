"""Chat templates for GGUF files that have none, by architecture and special tokens.

Converters copy a template from the checkpoint, but base models, and some files of chat models, come
without one. If the vocabulary has the tokens with which models of the architecture separate turns,
a chat has that form. Each template writes what the published one writes for system, user and
assistant messages, without tools.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuiltinTemplate:
    """A template and the files that it suits.

    Attributes:
        name: of the model whose form it is.
        architectures: of GGUF.
        tokens: special tokens that the vocabulary must have.
        source: Jinja.
    """

    name: str
    architectures: frozenset[str]
    tokens: tuple[str, ...]
    source: str


# A system message precedes the text of the first user's turn: there is no such role.
_GEMMA = """\
{{ bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('the roles user and assistant must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else 'user' %}
    {{- '<start_of_turn>' + role + '\\n' + (ns.system if loop.first else '') }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""
_PHI4 = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant<|im_sep|>' }}
{%- endif %}
"""
_GLM4 = """\
{{ '[gMASK]<sop>' }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
_COMMAND_R = """\
{%- set roles = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} %}
{{- bos_token }}
{%- for message in messages %}
    {{- '<|START_OF_TURN_TOKEN|><|' + roles[message['role']] + '_TOKEN|>' }}
    {{- message['content'] | trim + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{%- endif %}
"""
_GRANITE = """\
{%- for message in messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}
    {{- message['content'] + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_of_role|>assistant<|end_of_role|>' }}
{%- endif %}
"""
_QWEN = ("qwen2", "qwen2moe", "qwen3", "qwen3moe")

TEMPLATES = (
    BuiltinTemplate(
        "Gemma",
        frozenset({"gemma", "gemma2", "gemma3"}),
        ("<start_of_turn>", "<end_of_turn>"),
        _GEMMA,
    ),
    BuiltinTemplate(
        "Llama 3",
        frozenset({"llama"}),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _LLAMA3,
    ),
    BuiltinTemplate(
        "ChatML",
        frozenset({*_QWEN, "llama", "olmo2", "smollm3"}),
        ("<|im_start|>", "<|im_end|>"),
        _CHATML,
    ),
    BuiltinTemplate(
        "Phi-4", frozenset({"phi3"}), ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), _PHI4
    ),
    # Phi-4-mini has the same tokens without </s>, and writes no line breaks around them.
    BuiltinTemplate(
        "Phi-3", frozenset({"phi3"}), ("</s>", "<|user|>", "<|assistant|>", "<|end|>"), _PHI3
    ),
    BuiltinTemplate(
        "GLM-4",
        frozenset({"chatglm", "glm4"}),
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        _GLM4,
    ),
    BuiltinTemplate(
        "Command R",
        frozenset({"command-r", "cohere2"}),
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        _COMMAND_R,
    ),
    BuiltinTemplate(
        "Granite",
        frozenset({"granite", "granitemoe"}),
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        _GRANITE,
    ),
)


def find(architecture: object, special: Container[str]) -> str | None:
    """The source of the template for a GGUF file; None if there is none.

    Args:
        architecture: general.architecture.
        special: texts of the vocabulary's special tokens.
    """
    for template in TEMPLATES:
        has_tokens = all(token in special for token in template.tokens)
        if architecture in template.architectures and has_tokens:
            return template.source
    return None


def name_of(source: str | None) -> str | None:
    """The name of a built-in template; None for a checkpoint's own."""
    return next((one.name for one in TEMPLATES if one.source == source), None)
