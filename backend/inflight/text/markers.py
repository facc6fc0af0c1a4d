"""Markers (special tokens) in the strings of a chat request, and in a rendered chat."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from inflight.text.template import Conversation

END_TAG = f"\ue000{secrets.token_hex(16)}:end\ue001 "
"""Appended to a message to find its end in the rendered text; the space shows whether the template
trims what follows the text, as in transformers."""

_SECRET = secrets.token_hex(16)
# A template may write JSON in ASCII.
_HIDDEN = re.compile(f"(?:\ue000|\\\\ue000){_SECRET}:([0-9a-f]+)(?:\ue001|\\\\ue001)")
_WORD = re.compile(r"\w{2,}")
_MAX_WORD = 64

Change = Callable[[str], str]
_Tree = dict[str, "_Tree"]
"""The rest of each text by its next character; the empty string is an end."""


class MarkerEscaper:
    """Escapes markers in strings, and finds those that a template produced.

    Args:
        markers: text -> id.
    """

    def __init__(self, markers: Mapping[str, int]) -> None:
        self._markers = markers
        texts = _any_of(markers)
        self._marker = re.compile(f"({texts})")
        self._first_character = re.compile(f"(?={texts})(.)", re.DOTALL)
        self._all = "\0".join(markers).lower()
        self._words: dict[str, frozenset[str]] = {}

    def escape(self, text: str) -> str:
        """The text with the first character of each marker replaced by a secret placeholder."""
        return self._first_character.sub(
            lambda match: f"\ue000{_SECRET}:{ord(match[1]):x}\ue001", text
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

    def harmless_words(self, template: str) -> frozenset[str]:
        """Words of a template, in lower case, that are part of no marker in any case."""
        words = self._words.get(template)
        if words is None:
            found = (word for word in _WORD.findall(template.lower()) if word not in self._all)
            words = self._words[template] = frozenset(found)
        return words


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of the texts, as the tokenizer finds it.

    It branches at each character: Gemma has 6,000 markers with the same beginning, and to try one
    after the other at each `<` would take a second for a page of HTML.
    """
    tree: _Tree = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree) if tree else "(?!)"  # which never matches


def _branches(tree: _Tree) -> str:
    # What follows is tried before the end, so that the longest text is found.
    tails: list[str] = []
    for character, node in tree.items():
        text = character
        while len(node) == 1 and "" not in node:
            ((character, node),) = node.items()
            text += character
        if character:
            tails.append(re.escape(text) + ("" if set(node) == {""} else _branches(node)))
    either = tails[0] if len(tails) == 1 else f"(?:{'|'.join(tails)})"
    return f"(?:{either})?" if "" in tree else either


class HarmlessWords:
    """Replaces each string by a word that is part of no marker.

    Templates test strings: whether they are blank or equal, whether a tool is in a list, the length
    of an id. So blank strings stay, equal ones stay equal and different ones different, short ones
    keep their length, and the template's own words stay.

    Args:
        kept: words in lower case that stay, in any case.
    """

    def __init__(self, kept: frozenset[str]) -> None:
        self._kept = kept
        self._words: dict[int, Iterator[str]] = {}
        self._given: dict[str, str] = {}

    def replace(self, text: str) -> str:
        if not text.strip() or (len(text) <= _MAX_WORD and text.lower() in self._kept):
            return text
        word = self._given.get(text)
        if word is None:
            word = self._given[text] = self._next(min(len(text), _MAX_WORD))
        return word

    def _next(self, length: int) -> str:
        """The next word of this length, or a longer one if there are no more."""
        for size in itertools.count(length):
            words = self._words.get(size)
            if words is None:
                words = self._words[size] = map("".join, itertools.product("xqzj", repeat=size))
            word = next(words, None)
            if word is not None:
                return word
        raise AssertionError  # never


_KEPT: None = None
_CALL: dict[str, Any] = {"type": _KEPT, "id": {}, "function": {"name": {}, "arguments": {}}}
_MESSAGE: dict[str, Any] = {
    "role": _KEPT,
    "content": {},
    "name": {},
    "reasoning": {},
    "reasoning_content": {},
    "thinking": {},
    "tool_call_id": {},
    "tool_calls": _CALL,
}
_TOOL: dict[str, Any] = {
    "type": _KEPT,
    "function": {"name": {}, "description": {}, "parameters": {}, "strict": {}},
}
"""The members that a request's form determines, and what they contain: _KEPT is one of ours."""


def with_strings(conversation: Conversation, change: Change) -> Conversation:
    """A conversation with every string of the request changed: values, and keys of objects."""
    tools = conversation.tools
    return Conversation(
        _changed(conversation.messages, change, _MESSAGE),
        None if tools is None else _changed(tools, change, _TOOL),
        {name: _changed(value, change, {}) for name, value in conversation.variables.items()},
        conversation.add_generation_prompt,
    )


def _changed(value: Any, change: Change, form: Mapping[str, Any] | None) -> Any:
    if form is _KEPT:
        return value
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change, form) for item in value]
    if isinstance(value, dict):
        return {
            key if key in form else change(key): _changed(item, change, form.get(key, {}))
            for key, item in value.items()
        }
    return value
