"""Files without a template have chats if their family's form is known."""

import pytest

from family_chats import FAMILIES, tokenizer_of
from inflight.text.chat import encode_chat
from inflight.text.chat_format.builtin_templates import TEMPLATES, find, name_of
from inflight.text.template import Conversation, render
from inflight.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
PROMPTS = {
    "Gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "Llama 3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "ChatML": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "Phi-3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n",
    "Phi-4": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>U<|im_end|>"
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>V<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "GLM-4": "[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\nA<|user|>\nV<|assistant|>",
    "Command R": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>S<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>V<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "Granite": "<|start_of_role|>system<|end_of_role|>S<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>A<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>V<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
}
SOURCES = {one.name: one.source for one in TEMPLATES}


@pytest.mark.parametrize("name", SOURCES)
def test_each_writes_its_family_s_form(name: str) -> None:
    assert render(SOURCES[name], MESSAGES, "<s>", "</s>") == PROMPTS[name]
    ended = render(SOURCES[name], MESSAGES[:3], "<s>", "</s>", add_generation_prompt=False)
    assert PROMPTS[name].startswith(ended)


@pytest.mark.parametrize(
    ("name", "family"),
    [("Gemma", "gemma3"), ("Phi-3", "phi3"), ("Phi-4", "phi4"), ("Command R", "command-r")],
)
def test_prompts_are_those_of_the_published_template(name: str, family: str) -> None:
    known = tokenizer_of(family)
    built_in = Tokenizer(
        known._backend, bos_token=FAMILIES[family].bos, chat_template=SOURCES[name]
    )
    for count in (2, 4):
        conversation = Conversation(MESSAGES[:count])
        assert encode_chat(built_in, conversation) == encode_chat(known, conversation)


def test_architecture_and_tokens_decide() -> None:
    for one in TEMPLATES:
        for architecture in one.architectures:
            assert name_of(find(architecture, one.tokens)) == one.name
            assert find(architecture, one.tokens[1:]) is None
        assert find("mamba", one.tokens) is None
    assert find(None, ()) is None


def test_a_checkpoint_s_own_template_has_no_name() -> None:
    assert name_of("{{ messages }}") is None
    assert name_of(None) is None
