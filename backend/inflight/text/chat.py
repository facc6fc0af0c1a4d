"""Chat requests to ids: a JSON array of messages through the model's chat template.

Special tokens separate the turns of a conversation. Only the template may produce them: a message
that contains "<|im_end|>" contains ten characters. How this is enforced for any template:

1. Wherever a message contains the text of a marker (special token), its first character is
   replaced by a secret placeholder, so that the rendered text has no marker from a message. The
   rest of a message passes through the template, its filters and conditions, unchanged.
2. The rendered text is split at its markers, and the placeholders are replaced back.
3. A template could still build a marker from harmless parts (join them, change their case). So the
   markers found must be the same, in number and order, as when rendering with a harmless word for
   each message; otherwise the request is rejected.
4. `Tokenizer.encode_pieces` encodes the pieces: a marker is an id and never text, and text that
   looks like a marker never becomes its id.

A conversation without markers in its messages yields the same ids as `apply_chat_template` of
`transformers`: step 1 changes nothing then, and the pieces are tokenized as one text.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from typing import Any
from weakref import WeakKeyDictionary

from inflight.errors import RequestError, did_you_mean
from inflight.text.template import Rendering, render, render_each
from inflight.text.tokenizer import Tokenizer, check_unicode

__all__ = ["encode_chat", "parse_messages", "render"]

MAX_MESSAGES = 512
MAX_JSON_CHARACTERS = 4 << 20
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_ALLOWED = f"an array of 1 to {MAX_MESSAGES} objects with role and content"


def parse_messages(text: str) -> list[dict[str, str]]:
    """Parse and validate messages in JSON.

    Args:
        text: an array of {"role", "content"}. role: system, developer (same as system), user,
            assistant or tool. content: a string, or an array of {"type": "text", "text"}, whose
            texts are joined by line breaks.

    Returns:
        A {"role", "content"} of strings for each.

    Raises:
        RequestError: with the invalid message and what is allowed.
    """
    if len(text) > MAX_JSON_CHARACTERS:
        raise _error(f"{len(text)} characters; allowed: at most {MAX_JSON_CHARACTERS}")
    try:
        parsed = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise _error(f"nested too deeply; allowed: {_ALLOWED}") from None
    except ValueError as error:
        # The error quotes at most one key or a position.
        raise _error(f"not valid JSON ({error}); allowed: {_ALLOWED}") from None
    if not isinstance(parsed, list):
        raise _error(f"{_kind(parsed)}; allowed: {_ALLOWED}")
    if not 1 <= len(parsed) <= MAX_MESSAGES:
        raise _error(f"{len(parsed)} messages; allowed: {_ALLOWED}")
    return [_message(message, index) for index, message in enumerate(parsed)]


def encode_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> list[int]:
    """Token ids of the messages, rendered by the model's chat template.

    Args:
        tokenizer: of a model with a chat template.
        messages: as `parse_messages` returns them.
        add_generation_prompt: append the start of the assistant's turn.
        now: the date for templates that use it; None for the current time.

    Raises:
        RequestError: the model has no chat template, or its template rejects the messages or
            exceeds its limits.
        ConfigError: the template is not valid.
        EngineError: there is no sandbox.
    """
    template = tokenizer.chat_template
    if template is None:
        raise _error("this model has no chat template; send a prompt as text_input instead")
    for index, message in enumerate(messages):
        check_unicode(message["content"], f"messages[{index}].content")

    escaper = _escaper_of(tokenizer)
    contents = [message["content"] for message in messages]
    # Blank stays blank: templates test whether there is any content.
    harmless_contents = ["x" if content.strip() else content for content in contents]
    rendering = Rendering(
        template,
        [
            _with_contents(messages, [escaper.escape(content) for content in contents]),
            _with_contents(messages, harmless_contents),
        ],
        tokenizer.bos_token or "",
        tokenizer.eos_token or "",
        add_generation_prompt,
        now,
    )
    pieces, harmless = [escaper.split_markers(text) for text in render_each(rendering)]
    if _markers(pieces) != _markers(harmless):
        raise _error(
            "with this text the model's chat template would produce additional special tokens"
        )
    return tokenizer.encode_pieces(pieces)


def _with_contents(messages: list[dict[str, str]], contents: list[str]) -> list[dict[str, str]]:
    return [
        {**message, "content": content} for message, content in zip(messages, contents, strict=True)
    ]


class _MarkerEscaper:
    """Escapes markers in messages, and finds those that the template produced."""

    def __init__(self, markers: dict[str, int]) -> None:
        self._markers = markers
        # Longest first, as in the tokenizer; (?!) never matches.
        texts = "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)"
        self._marker = re.compile(f"({texts})")
        self._first_character = re.compile(f"(?={texts})(.)", re.DOTALL)

    def escape(self, content: str) -> str:
        return self._first_character.sub(
            lambda match: f"\ue000{_SECRET}:{ord(match[1]):x}\ue001", content
        )

    def split_markers(self, text: str) -> list[str | int]:
        """Pieces of a rendered text: unescaped strings, and ids of markers."""
        pieces: list[str | int] = []
        for i, part in enumerate(self._marker.split(text)):
            if i % 2:
                pieces.append(self._markers[part])
            elif part:
                pieces.append(_HIDDEN.sub(lambda match: chr(int(match[1], 16)), part))
        return pieces


_SECRET = secrets.token_hex(16)
_HIDDEN = re.compile(f"\ue000{_SECRET}:([0-9a-f]+)\ue001")
_escapers: WeakKeyDictionary[Tokenizer, _MarkerEscaper] = WeakKeyDictionary()


def _escaper_of(tokenizer: Tokenizer) -> _MarkerEscaper:
    found = _escapers.get(tokenizer)
    if found is None:
        found = _escapers[tokenizer] = _MarkerEscaper(tokenizer.markers)
    return found


def _markers(pieces: list[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


def _message(message: Any, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(f"{_kind(message)}; allowed: an object with role and content", where)
    for key in message:
        if key not in ("role", "content"):
            hint = did_you_mean(key, ("role", "content"))
            raise RequestError(f"unknown key {key[:64]!r}{hint}; allowed: role, content", where)
    for key in ("role", "content"):
        if key not in message:
            raise RequestError(f"{key} is missing; allowed: an object with role and content", where)
    role = message["role"]
    if not isinstance(role, str) or role not in _ROLES:
        what = repr(role[:64]) if isinstance(role, str) else _kind(role)
        raise RequestError(f"{what}; allowed: {', '.join(_ROLES)}", f"{where}.role")
    return {"role": _ROLES[role], "content": _content(message["content"], f"{where}.content")}


def _content(content: Any, where: str) -> str:
    allowed = 'allowed: a string, or an array of {"type": "text", "text": string}'
    if isinstance(content, str):
        check_unicode(content, where)
        return content
    if not isinstance(content, list):
        raise RequestError(f"{_kind(content)}; {allowed}", where)
    if not content:
        raise RequestError(f"an empty array; {allowed}", where)
    texts = []
    for number, part in enumerate(content):
        if (
            not isinstance(part, dict)
            or set(part) != {"type", "text"}
            or part["type"] != "text"
            or not isinstance(part["text"], str)
        ):
            raise RequestError(f"not a text part; {allowed}", f"{where}[{number}]")
        check_unicode(part["text"], f"{where}[{number}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice[:64]!r} in an object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


def _error(message: str) -> RequestError:
    return RequestError(message, "messages")
