"""Chat templates in the styles of published families, shortened, with the tokens that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import tokenizers
import transformers
from tokenizers import AddedToken

from chat_templates import HERMES
from inflight.text.tokenizer import Tokenizer
from vocabularies import byte_level

# Gemma 2 has no system role and says so.
GEMMA2 = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}{% set role = 'model' %}
    {%- else %}{% set role = message['role'] %}{% endif %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# Gemma 3 puts a system message before the first user's text; contents may be lists of parts.
GEMMA3 = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

# Phi-3: without a generation prompt, the conversation ends with the end of text.
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PHI4 = (
    "{% for message in messages %}{% if (message['role'] == 'system') %}"
    "{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% elif (message['role'] == 'user') %}"
    "{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}"
    "{% elif (message['role'] == 'assistant') %}"
    "{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)

# GLM-4: a turn ends where the next one begins.
GLM4 = r"""[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
    {%- set function = tool.function if tool.get("function") else tool %}

## {{ function.name }}

{{ function | tojson(indent=4, ensure_ascii=False) }}
{%- endfor %}
{%- endif -%}
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role != 'system' %}
    {%- set role = message['role'] %}
    {%- set meta = message.get("metadata", "") %}
    {%- if role == 'user' %}
<|user|>
{{ message['content'] }}
    {%- elif role == 'assistant' and not meta %}
<|assistant|>
{{ message['content'] }}
    {%- elif role == 'tool' %}
<|observation|>
{{ message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

# Command R: `elif false == true` is in the published template.
COMMAND_R = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% elif false == true %}"
    "{% set loop_messages = messages %}{% set system_message = 'You are Command-R.' %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% if system_message != false %}{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + "
    "system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + "
    "content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)

# SmolLM3: a variable, or words in the system message, switch reasoning.
SMOLLM3 = r"""
{# ----- defaults ----- #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- if enable_thinking -%}{%- set reasoning_mode = "/think" -%}
{%- else -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
{{- "<|im_start|>system\n" -}}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}
    {%- elif "/think" in system_message -%}{%- set reasoning_mode = "/think" -%}{%- endif -%}
    {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- if "/system_override" in system_message -%}
    {{- custom.replace("/system_override", "").rstrip() -}}{{- "<|im_end|>\n" -}}
{%- else -%}
    {{- "## Metadata\n\nReasoning Mode: " + reasoning_mode + "\n\n## Custom Instructions\n\n" -}}
    {%- if custom -%}{{- custom + "\n\n" -}}
    {%- elif reasoning_mode == "/think" -%}{{- "Think step by step.\n\n" -}}{%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\n" + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\n<think>\n\n</think>\n" + content + "<|im_end|>\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\n" }}
    {%- else -%}{{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" }}{%- endif -%}
{%- endif -%}
"""

# Granite: `thinking` adds to the system message, `controls` to the assistant's role.
GRANITE = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "You are Granite." %}
    {%- if tools and documents %}
        {%- set system_message = system_message + " Use the tools and documents." %}
    {%- elif thinking %}
        {%- set system_message = system_message + "
Write your thoughts between <think></think> and your response between <response></response>." %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\n' }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'assistant_tool_call' or message['tool_calls'] is defined %}
        {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}
        {{- message['tool_calls'] | tojson + '<|end_of_text|>\n' }}
    {%- else %}
        {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}
        {{- message['content'] + '<|end_of_text|>\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

# OLMo 2 writes roles as plain text.
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)

# Of gpt-oss, without the types of parameters and the tools of its own. Reasoning is only written
# before a call that no answer follows.
GPT_OSS = r"""
{{- '<|start|>system<|message|>Reasoning: ' }}
{{- (reasoning_effort if reasoning_effort is defined else 'medium') + '<|end|>' }}
{%- set developer = messages[0].content if messages[0].role == 'system' else '' %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' + developer }}
    {%- for tool in tools or [] %}
        {{- '\n// ' + tool.function.description + '\ntype ' + tool.function.name }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set messages = messages[1:] if messages[0].role == 'system' else messages %}
{%- set last = namespace(name=none, answered=false) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>analysis<|message|>' in message.content %}
            {{- raise_exception('You have passed a message containing <|channel|> tags') }}
        {%- endif %}
        {%- if 'tool_calls' in message %}
            {%- set last.answered = false %}
            {%- for later in messages[loop.index:] %}
                {%- if later.role == 'assistant' and 'tool_calls' not in later %}
                    {%- set last.answered = true %}
                {%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}
                {{- raise_exception('Cannot pass both content and thinking') }}
            {%- elif message.content and not last.answered %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content }}
                {{- '<|end|>' }}
            {%- elif message.thinking and not last.answered %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}
                {{- '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name }}
            {{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
            {{- '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}
            {{- raise_exception('there was no previous assistant message with a tool call!') }}
        {%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""


@dataclass(frozen=True)
class Family:
    """A template in the style of a family.

    Attributes:
        special: texts of the special tokens; plain: of added tokens that are not special.
        ends: texts of all tokens that end an output.
        switch: the template's variable for reasoning.
    """

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    ends: tuple[str, ...]
    plain: tuple[str, ...] = ()
    switch: str | None = None


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_PHI3 = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_GLM4 = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
_COHERE = ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>")
_GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
_THINK = ("<think>", "</think>")

FAMILIES = {
    "gemma2": Family(GEMMA2, _GEMMA, "<bos>", "<eos>", ("<eos>", "<end_of_turn>")),
    "gemma3": Family(GEMMA3, _GEMMA, "<bos>", "<eos>", ("<eos>", "<end_of_turn>")),
    "phi3": Family(PHI3, _PHI3, None, "<|endoftext|>", ("<|endoftext|>", "<|end|>")),
    "phi4": Family(
        PHI4,
        (*_CHATML, "<|im_sep|>"),
        "<|endoftext|>",
        "<|endoftext|>",
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "glm4": Family(
        GLM4,
        (*_GLM4, "<|observation|>"),
        None,
        "<|endoftext|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "command-r": Family(
        COMMAND_R,
        (*_COHERE, "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        ("<|END_OF_TURN_TOKEN|>",),
    ),
    "smollm3": Family(
        SMOLLM3, _CHATML, None, "<|im_end|>", ("<|im_end|>",), _THINK, "enable_thinking"
    ),
    "granite": Family(
        GRANITE, _GRANITE, None, "<|end_of_text|>", ("<|end_of_text|>",), _THINK, "thinking"
    ),
    "olmo2": Family(
        OLMO2, ("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", ("<|endoftext|>",)
    ),
    "gpt-oss": Family(
        GPT_OSS,
        (*_HARMONY, "<|return|>", "<|endoftext|>"),
        None,
        "<|return|>",
        ("<|return|>", "<|call|>"),
    ),
    "qwen3": Family(
        HERMES,
        _CHATML,
        None,
        "<|endoftext|>",
        ("<|endoftext|>", "<|im_end|>"),
        _THINK,
        "enable_thinking",
    ),
}


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """With a family's template and tokens; only its eos_token is named."""
    family = FAMILIES[name]
    return Tokenizer(
        _backend(name), bos_token=family.bos, eos_token=family.eos, chat_template=family.template
    )


@cache
def reference_of(name: str) -> transformers.PreTrainedTokenizerFast:
    family = FAMILIES[name]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_backend(name),
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=family.template,
    )


def _backend(name: str) -> tokenizers.Tokenizer:
    family = FAMILIES[name]
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in family.special])
    backend.add_tokens([AddedToken(t, normalized=False) for t in family.plain])
    return backend
