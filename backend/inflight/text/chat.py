"""Chat requests to ids: messages, tools and variables through the model's chat template.

Special tokens separate the turns of a conversation. Only the template may produce them: a message
that contains "<|im_end|>" contains ten characters. The same holds for every other string of a
request: names, descriptions, the keys and values of schemas and arguments, reasoning, variables.
How this is enforced for any template:

1. Wherever a string contains the text of a marker (special token), its first character is replaced
   by a secret placeholder, so that the rendered text has no marker from a request. The rest of the
   string passes through the template, its filters and conditions, unchanged.
2. The rendered text is split at its markers, and the placeholders are replaced back.
3. A template could still build a marker from harmless parts (join them, change their case). So the
   markers found must be the same, in number and order, as when rendering with a harmless word for
   each string; otherwise the request is rejected.
4. `Tokenizer.encode_pieces` encodes the pieces: a marker is an id and never text, and text that
   looks like a marker never becomes its id.

A conversation without markers in its strings yields the same ids as `apply_chat_template` of
`transformers`: step 1 changes nothing then, and the pieces are tokenized as one text.
"""

from __future__ import annotations

import datetime
from weakref import WeakKeyDictionary

import msgspec

from inflight.errors import RequestError
from inflight.text.chat_format import harmony
from inflight.text.markers import END_TAG, HarmlessWords, MarkerEscaper, with_strings
from inflight.text.template import Conversation, Rendering, render_each
from inflight.text.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    conversation: Conversation,
    continue_final_message: bool = False,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Token ids of a conversation, rendered by the model's chat template.

    Args:
        tokenizer: of a model with a chat template.
        conversation: as the functions of `text.messages` return its parts.
        continue_final_message: end with the text of the last message, so that the output continues
            it, instead of with the end of its turn.
        now: the date for templates that use it; None for the current time.

    Raises:
        RequestError: the model has no chat template, or its template rejects the messages or
            exceeds its limits; the last message cannot be continued.
        ConfigError: the template is not valid.
        EngineError: there is no sandbox.
    """
    template = tokenizer.chat_template
    if conversation.tools is not None and tokenizer.tool_chat_template is not None:
        template = tokenizer.tool_chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template; send a prompt as text_input instead", "messages"
        )
    if continue_final_message:
        _check_continuation(conversation)
    if harmony.is_written_by(template):
        conversation = harmony.fitted(conversation, keep_last=continue_final_message)
    elif "tool_calls" not in template:
        conversation = _with_contents(conversation)
    escaper = _escaper_of(tokenizer)
    words = HarmlessWords(escaper.harmless_words(template))
    variants = [
        with_strings(conversation, escaper.escape),
        with_strings(conversation, words.replace),
    ]
    if continue_final_message:
        tagged = [_tagged(variant) for variant in variants]
    rendering = Rendering(
        template,
        tagged if continue_final_message else variants,
        tokenizer.bos_token or "",
        tokenizer.eos_token or "",
        now,
    )
    texts = render_each(rendering)
    if continue_final_message:
        texts = [_cut(text, variant) for text, variant in zip(texts, variants, strict=True)]
    pieces, harmless = [escaper.split_markers(text) for text in texts]
    if _markers(pieces) != _markers(harmless):
        raise RequestError(
            "with this text the model's chat template would produce additional special tokens",
            "messages",
        )
    return tokenizer.encode_pieces(pieces)


_escapers: WeakKeyDictionary[Tokenizer, MarkerEscaper] = WeakKeyDictionary()


def _escaper_of(tokenizer: Tokenizer) -> MarkerEscaper:
    found = _escapers.get(tokenizer)
    if found is None:
        found = _escapers[tokenizer] = MarkerEscaper(tokenizer.markers)
    return found


def _markers(pieces: list[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


def _with_contents(conversation: Conversation) -> Conversation:
    """With an empty content where there are only tool calls: a template that does not know them
    reads the content of each message, and fails without one. As in vLLM."""
    messages = [
        one if "content" in one else {**one, "content": ""} for one in conversation.messages
    ]
    return msgspec.structs.replace(conversation, messages=messages)


def _check_continuation(conversation: Conversation) -> None:
    if conversation.add_generation_prompt:
        raise RequestError(
            "cannot be combined with continue_final_message: the output starts a turn or continues "
            "one; send one of them",
            "add_generation_prompt",
        )
    if "content" not in conversation.messages[-1]:
        raise RequestError(
            "the last message has no content to continue; allowed: with content",
            "continue_final_message",
        )


def _tagged(conversation: Conversation) -> Conversation:
    *others, last = conversation.messages
    return Conversation(
        [*others, {**last, "content": last["content"] + END_TAG}],
        conversation.tools,
        conversation.variables,
        conversation.add_generation_prompt,
    )


def _cut(text: str, conversation: Conversation) -> str:
    """A rendered text up to the end of the last message's content, as transformers cuts it."""
    tag = END_TAG.strip()
    if conversation.messages[-1]["content"].strip() not in text or tag not in text:
        raise RequestError(
            "the model's chat template changes the text of the last message, so it cannot be "
            "continued; send another text, or omit it",
            "continue_final_message",
        )
    position = text.rindex(tag)
    keeps_spaces = text.startswith(END_TAG, position)
    return text[:position] if keeps_spaces else text[:position].rstrip()
