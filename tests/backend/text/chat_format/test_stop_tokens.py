"""Ends of turns are found by their text, where a vocabulary has them."""

import pytest

from inflight.text.chat_format.stop_tokens import in_templates, in_vocabulary

IDS = {"<eos>": 1, "<end_of_turn>": 106, "<|im_end|>": 7, "<|endoftext|>": 0}


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("<eos>", "<end_of_turn>"), {"<end_of_turn>"}),
        (("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"), {"<|endoftext|>", "<|end|>"}),
        (("<|endoftext|>", "<|im_end|>", "<|im_sep|>"), {"<|endoftext|>", "<|im_end|>"}),
        (("<|eot_id|>", "<|eom_id|>", "<|end_header_id|>"), {"<|eot_id|>", "<|eom_id|>"}),
        (("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"), {"<|END_OF_TURN_TOKEN|>"}),
        (("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), {"<|end_of_text|>"}),
        # GLM-4 ends a turn with the next one's beginning, as no other family with <|user|>.
        (("<|user|>", "<|observation|>", "<|assistant|>"), {"<|user|>", "<|observation|>"}),
        # gpt-oss ends a message with <|end|>, and goes on.
        (
            ("<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|call|>"),
            {"<|endoftext|>", "<|return|>", "<|call|>"},
        ),
        (("</s>", "[INST]", "[/INST]"), set()),
    ],
)
def test_each_family_s_ends_are_known(texts: tuple[str, ...], ends: set[str]) -> None:
    special = {text: id_ for id_, text in enumerate(texts)}
    assert {texts[id_] for id_ in in_vocabulary(special, None)} == ends
    assert {texts[id_] for id_ in in_templates(special, ["".join(texts)])} == ends


def test_only_ends_that_a_template_writes_count() -> None:
    assert in_templates(IDS, ["{{ '<|im_start|>' + content + '<|im_end|>' }}"]) == (7,)
    assert in_templates(IDS, ["{{ content }}", "{{ '<end_of_turn>' }}"]) == (106,)
    assert in_templates(IDS, []) == ()
    assert in_templates({}, ["<|im_end|>"]) == ()


def test_the_unknown_token_ends_nothing() -> None:
    assert in_vocabulary(IDS, unknown=0) == (7, 106)
    assert in_vocabulary(IDS, unknown=None) == (7, 106, 0)
