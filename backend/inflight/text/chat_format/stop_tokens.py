"""Tokens that end an output, found by their text.

A checkpoint's files name ends, but often not all of them: a GGUF file of Gemma 3 may name `<eos>`
alone, and a folder of Phi-3 without a generation_config.json only `<|endoftext|>`, though both end
their turns with another token.

Sources: the chat templates and generation_config.json of the published models; for GGUF, the list
in llama.cpp (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_TURN_ENDS = (
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|eot|>",  # Llama 4
    "<|eom|>",
    "<|im_end|>",  # ChatML: Qwen, SmolLM, OLMo 3, Phi-4
    "<end_of_turn>",  # Gemma
    "<|end|>",  # Phi-3, Phi-4-mini
    "<|END_OF_TURN_TOKEN|>",  # Command R
    "[|endofturn|]",  # EXAONE
    "<|return|>",  # gpt-oss
    "<|call|>",
)
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# GLM ends a turn with the beginning of the next one.
_NEXT_TURNS = ("<|user|>", "<|observation|>")


def in_templates(special: Mapping[str, int], templates: Iterable[str]) -> tuple[int, ...]:
    """Ids of the ends that chat templates write.

    Args:
        special: text -> id of the vocabulary's special tokens.
        templates: Jinja sources.
    """
    sources = tuple(templates)
    return tuple(
        special[text] for text in _ends(special) if any(text in source for source in sources)
    )


def in_vocabulary(special: Mapping[str, int], unknown: int | None) -> tuple[int, ...]:
    """Ids of all ends that a vocabulary has, for files that do not list their ends.

    Args:
        special: text -> id of the special tokens.
        unknown: id of the unknown token, which ends nothing even if it is called `<|endoftext|>`.
    """
    return tuple(special[text] for text in _ends(special) if special[text] != unknown)


def _ends(special: Mapping[str, int]) -> list[str]:
    ends = [text for text in (*_TURN_ENDS, *_TEXT_ENDS) if text in special]
    if "<|return|>" in special and "<|end|>" in special:
        ends.remove("<|end|>")  # ends a message of gpt-oss, and others follow
    if "<|observation|>" in special:
        ends += [text for text in _NEXT_TURNS if text in special]
    return ends
