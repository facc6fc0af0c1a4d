"""Stop conditions, and the release of output tokens.

Each new token is processed once. A request without stop words costs a few dictionary lookups per
token and no decoding. With stop words every token is decoded; a token whose text may begin a stop
word is held back until later tokens decide.

A stop word is matched in the output's text, across token boundaries. Among several, the one that
completes first applies, and of those completing at the same character the one that began first, so
the result does not depend on how many tokens arrive at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from inflight.core.batch import Committed
from inflight.core.request import Candidate, FinishReason, TokenEvent
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer


class OutputStage:
    """Turns the tokens that a step appended into events.

    Args:
        detokenizer: None for a model without tokenizer: then events have no window, and no
            sequence may have stop words (`engine.admission` rejects such requests).

    Attributes:
        num_tokens: output tokens collected so far, without those cut off.
    """

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._whole = _WholePieces(detokenizer) if detokenizer else None
        self._outputs: dict[int, _Output] = {}
        self.num_tokens = 0

    def collect(self, committed: Iterable[Committed]) -> list[TokenEvent]:
        """Convert the results of a step to events.

        Sets `finish_reason` of a sequence that ends, and drops it. If it ends before the last of
        several new tokens, the rest is removed from `token_ids`. An output ends with the first of:

        - an EOS token, unless ignore_eos, or a stop token: STOP. It is released with the others;
          its text, if any, is trimmed.
        - a stop word: STOP. Its tokens are released, its text and the text after it are trimmed. A
          stop word that is the name of a special token matches that token.
        - max_tokens: LENGTH. If it is 0, the token sampled after the prompt is cut off.
        - the end of the request's grammar: STOP.

        The first two apply only after the first `min_tokens` tokens.

        Returns:
            At most one event per sequence: none while all its new tokens are held back. Those of
            prompts in progress come last; they have no output.
        """
        events, prompts = [], []
        for each in committed:
            sequence = each.sequence
            output = self._outputs.get(sequence.request_id)
            if output is None:
                output = _Output(sequence, self._detokenizer, self._whole)
                self._outputs[sequence.request_id] = output
            if each.prompt_candidates:
                output.prompt_candidates += each.prompt_candidates
            if not each.token_ids:
                prompts.append(output.prompt_event(sequence))
                continue
            event = output.advance(each)
            if event is not None:
                events.append(event)
            self.num_tokens += len(each.token_ids)
            if sequence.finish_reason is not None:
                self.num_tokens -= output.num_cut
                del self._outputs[sequence.request_id]
        return events + prompts

    def stop_conditions_of(self, sequence: Sequence) -> StopConditions:
        """The stop conditions of a sequence, for beams, which are collected when finished."""
        return StopConditions(sequence, self._detokenizer)

    def forget(self, group: SequenceGroup) -> None:
        """Drop the state of a request that ended elsewhere; idempotent."""
        self._outputs.pop(group.request_id, None)


class _End(NamedTuple):
    """How an output ends.

    Attributes:
        reason: why.
        stop_at: start of its stop word in the held-back text; None if there is none.
        is_by_id: whether an EOS token ends it.
    """

    reason: FinishReason
    stop_at: int | None = None
    is_by_id: bool = False


class _Output:
    """One sequence's output: tokens [0, released) are released, [released, seen) held back."""

    __slots__ = (
        "candidates",
        "detokenizer",
        "ends",
        "min_tokens",
        "num_cut",
        "prompt_candidates",
        "released",
        "seen",
        "text",
        "whole",
        "window",
    )

    def __init__(
        self, sequence: Sequence, detokenizer: Detokenizer | None, whole: _WholePieces | None
    ) -> None:
        params = sequence.request.params
        self.detokenizer = detokenizer
        self.whole = whole
        self.min_tokens = params.min_tokens
        self.released = 0
        self.seen = 0
        self.num_cut = 0  # number of last tokens that are past the end
        # Prompt logprobs not reported by an event yet. The first token has none.
        self.prompt_candidates: list[list[Candidate]] = []
        if params.num_prompt_logprobs is not None:
            self.prompt_candidates.append([])
        self.window: list[int] = []
        # Of the tokens from `released` on; None if not requested.
        self.candidates: list[list[Candidate]] | None = None
        if params.num_logprobs is not None:
            self.candidates = []
        self.text: _HeldText | None = None
        self.ends = _stop_ids(sequence, detokenizer)
        if detokenizer is not None:
            prompt = sequence.request.prompt_ids
            self.window = detokenizer.window_for(prompt, len(prompt))
            if params.stop_words:
                self.text = _HeldText(detokenizer, self.window, params.stop_words)

    def prompt_event(self, sequence: Sequence) -> TokenEvent:
        return TokenEvent(
            sequence.request_id,
            window=self.window,
            num_cached_tokens=sequence.num_cached_tokens,
            prompt_candidates=self._pop_prompt_candidates(),
        )

    def advance(self, committed: Committed) -> TokenEvent | None:
        sequence, new = committed.sequence, committed.token_ids
        if self.candidates is not None:
            self.candidates += committed.candidates
        if self.text is None:
            seen = self.seen + len(new)
            is_last = seen >= sequence.max_tokens or sequence.is_complete
            if not is_last and self.ends.isdisjoint(new):
                self.seen = seen
                return self._event(sequence, new, seen)
        end = self._find_end(sequence, new)
        first = sequence.num_prompt_tokens
        if end is None:
            num_held = 0 if self.text is None else self.text.release()
            new = sequence.token_ids[first + self.released : first + self.seen - num_held]
            return self._event(sequence, new, self.seen - num_held) if new else None
        self.num_cut = sequence.num_output_tokens - self.seen
        if self.num_cut:  # past the end: accepted drafts, or a token sampled with max_tokens 0
            del sequence.token_ids[-self.num_cut :]
            sequence.cumulative_logprob -= sum(committed.logprobs[-self.num_cut :])
        rest = sequence.token_ids[first + self.released :]
        sequence.finish_reason = end.reason
        trim = 0
        if self.detokenizer is not None:
            stop_at = end.stop_at
            if end.is_by_id:
                trim = self._eos_text_length(self.detokenizer, rest)
            if stop_at is None and self.text is not None:
                # An incomplete character at the end becomes U+FFFD, which may end a stop word.
                stop_at = self.text.finish(self.seen > self.min_tokens)
                if stop_at is not None:
                    sequence.finish_reason = FinishReason.STOP
            if stop_at is not None:
                trim = len(self.detokenizer.delta(self.window, rest, final=True)) - stop_at
        event = self._event(sequence, rest, self.seen, trim)
        word = self._stop_word(sequence, end, rest)
        return msgspec.structs.replace(event, stop_word=word) if word else event

    def _stop_word(self, sequence: Sequence, end: _End, rest: list[int]) -> str:
        """The stop word that ended the output; empty if none did."""
        if self.text is not None and self.text.stop_word:
            return self.text.stop_word
        if not end.is_by_id or self.detokenizer is None:
            return ""
        names = self.detokenizer.special_ids
        words = sequence.request.params.stop_words
        return next((word for word in words if names.get(word) == rest[-1]), "")

    def _find_end(self, sequence: Sequence, new: list[int]) -> _End | None:
        """Process new tokens up to the one that ends the output; None if it continues."""
        if not sequence.max_tokens:
            return _End(FinishReason.LENGTH)
        for token_id in new:
            may_stop = self.seen >= self.min_tokens
            self.seen += 1
            if may_stop and token_id in self.ends:
                return _End(FinishReason.STOP, is_by_id=True)
            if self.text is not None:
                stop_at = self.text.append(token_id, may_stop)
                if stop_at is not None:
                    return _End(FinishReason.STOP, stop_at)
            if self.seen >= sequence.max_tokens:
                return _End(FinishReason.LENGTH)
        return _End(FinishReason.STOP) if sequence.is_complete else None

    def _eos_text_length(self, detokenizer: Detokenizer, ids: list[int]) -> int:
        """Characters at the end of the text that the last id, an end token, contributes."""
        if not detokenizer.join(ids[-1:]):
            return 0
        whole = detokenizer.delta(self.window, ids, final=True)
        before = detokenizer.delta(self.window, ids[:-1], final=True)
        if not whole.startswith(before):  # its bytes completed a character
            before = detokenizer.delta(self.window, ids[:-1])
        return len(whole) - len(before)

    def _event(
        self, sequence: Sequence, new: list[int], position: int, trim: int = 0
    ) -> TokenEvent:
        """Release new tokens, up to a position."""
        window = self.window
        reason = sequence.finish_reason
        self.released = position
        if self.whole is not None and reason is None:
            self.window = self.whole.window_after(window, new)
        candidates: list[list[Candidate]] = []
        if self.candidates is not None:
            candidates = [self._with_texts(one) for one in self.candidates[: len(new)]]
            self.candidates = self.candidates[len(new) :]
        return TokenEvent(
            sequence.request_id,
            new,
            window,
            position,
            trim,
            reason,
            sequence.cumulative_logprob,
            sequence.num_cached_tokens,
            candidates,
            self._pop_prompt_candidates() if self.prompt_candidates else [],
            *(_drafts(sequence) if reason is not None else ()),
        )

    def _pop_prompt_candidates(self) -> list[list[Candidate]]:
        """Prompt logprobs not reported by an event yet."""
        found = [self._with_texts(one) for one in self.prompt_candidates]
        self.prompt_candidates = []
        return found

    def _with_texts(self, candidates: list[Candidate]) -> list[Candidate]:
        detokenizer = self.detokenizer
        if detokenizer is None:
            return candidates
        return [
            msgspec.structs.replace(one, text=detokenizer.name(one.token_id)) for one in candidates
        ]


def _stop_ids(sequence: Sequence, detokenizer: Detokenizer | None) -> frozenset[int]:
    """Tokens that finish an output after its first min_tokens."""
    params = sequence.request.params
    ends = frozenset(params.stop_token_ids) if params.ignore_eos else sequence.eos_token_ids
    if detokenizer is not None:
        named = {detokenizer.special_ids.get(word) for word in params.stop_words}
        ends |= {id_ for id_ in named if id_ is not None}
    return ends


class StopConditions:
    """Stop conditions of an output that may branch; the same as in `collect`.

    Attributes:
        num_ids: tokens of the vocabulary that end it by themselves.
    """

    __slots__ = ("_ids", "_max_tokens", "_min_tokens", "_seen", "_text", "num_ids")

    def __init__(self, sequence: Sequence, detokenizer: Detokenizer | None) -> None:
        params = sequence.request.params
        self._ids = _stop_ids(sequence, detokenizer)
        self._min_tokens = params.min_tokens
        self._max_tokens = sequence.max_tokens
        self._seen = 0
        self._text: _HeldText | None = None
        if detokenizer is not None and params.stop_words:
            prompt = sequence.request.prompt_ids
            window = detokenizer.window_for(prompt, len(prompt))
            self._text = _HeldText(detokenizer, window, params.stop_words)
        self.num_ids = len(self._ids)

    def after(self, token_id: int) -> StopConditions | None:
        """The conditions after one more token; None if the output ends with it."""
        may_stop = self._seen >= self._min_tokens
        if (may_stop and token_id in self._ids) or self._seen + 1 >= self._max_tokens:
            return None
        other = copy.copy(self)
        other._seen += 1
        if self._text is not None:
            other._text = self._text.fork()
            if other._text.append(token_id, may_stop) is not None:
                return None
            other._text.release()
        return other


def _drafts(sequence: Sequence) -> tuple[int | None, int, int]:
    """num_drafted, num_accepted and num_steps of the last event."""
    drafted = sequence.num_drafted or None
    return drafted, sequence.num_accepted, sequence.num_steps


class _WholePieces(dict[int, bool]):
    """Token id -> whether its bytes start a character; filled lazily.

    No character before such a token is incomplete, so the token alone is the whole window.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        super().__init__()
        self._detokenizer = detokenizer

    def __missing__(self, token_id: int) -> bool:
        piece = self._detokenizer.join((token_id,))
        return self.setdefault(token_id, bool(piece) and piece[0] & 0xC0 != 0x80)

    def window_after(self, window: list[int], new: list[int]) -> list[int]:
        """`Detokenizer.window_for` of the window and the new ids, mostly at lower cost."""
        if self[new[-1]]:
            return new[-1:]
        context = window + new
        return self._detokenizer.window_for(context, len(context))


class _HeldText:
    """The text of held-back tokens, and the match state of each stop word.

    Attributes:
        stop_word: the one that was found; empty until then.
    """

    def __init__(
        self, detokenizer: Detokenizer, window: list[int], stop_words: tuple[str, ...]
    ) -> None:
        self._detokenizer = detokenizer
        self._window = window
        self._matchers = [_Matcher(word) for word in dict.fromkeys(stop_words)]
        self.stop_word = ""
        self._text = ""
        self._ends: list[int] = []  # of each held token: where in _text its text ends

    def fork(self) -> _HeldText:
        """A copy that may diverge."""
        other = copy.copy(self)
        other._matchers = [copy.copy(matcher) for matcher in self._matchers]
        other._ends = self._ends.copy()
        return other

    def append(self, token_id: int, may_stop: bool) -> int | None:
        """Add a token. Returns the start, in the held text, of a stop word that it completes."""
        new = self._detokenizer.delta(self._window, (token_id,))
        context = [*self._window, token_id]
        self._window = self._detokenizer.window_for(context, len(context))
        found = self._scan(new, may_stop)
        self._ends.append(len(self._text))
        return found

    def finish(self, may_stop: bool) -> int | None:
        """As `append`, for the end of the text: an incomplete character becomes U+FFFD."""
        return self._scan(self._detokenizer.delta(self._window, (), final=True), may_stop)

    def release(self) -> int:
        """Release the tokens that cannot be part of a stop word. Returns how many stay held."""
        safe = len(self._text) - max(matcher.matched for matcher in self._matchers)
        num_safe = 0
        while num_safe < len(self._ends) and self._ends[num_safe] <= safe:
            num_safe += 1
        if num_safe:
            cut = self._ends[num_safe - 1]
            self._text = self._text[cut:]
            self._ends = [end - cut for end in self._ends[num_safe:]]
        return len(self._ends)

    def _scan(self, new: str, may_stop: bool) -> int | None:
        base = len(self._text)
        self._text += new
        best: tuple[int, int] | None = None
        for matcher in self._matchers:
            end = matcher.feed(new, may_stop)
            if end is not None:
                found = (base + end, base + end - len(matcher.word))
                if best is None or found < best:
                    best, self.stop_word = found, matcher.word
        return None if best is None else best[1]


class _Matcher:
    """Incremental search for a word in a text (Knuth, Morris and Pratt 1977).

    `matched` is the length of the longest prefix of the word that is a suffix of the text so far.
    """

    __slots__ = ("_fallback", "matched", "word")

    def __init__(self, word: str) -> None:
        self.word = word
        self.matched = 0
        # fallback[i]: the longest proper prefix of word[:i] that is also its suffix.
        self._fallback = [0] * (len(word) + 1)
        length = 0
        for i in range(1, len(word)):
            while length and word[i] != word[length]:
                length = self._fallback[length]
            length += word[i] == word[length]
            self._fallback[i + 1] = length

    def feed(self, text: str, may_match: bool) -> int | None:
        """Add text. Returns the end in it of the first occurrence, if any and if `may_match`."""
        word, matched = self.word, self.matched
        if not matched and word[0] not in text:
            return None
        for i, char in enumerate(text):
            while matched and char != word[matched]:
                matched = self._fallback[matched]
            matched += char == word[matched]
            if matched == len(word):
                if may_match:
                    return i + 1
                matched = self._fallback[matched]
        self.matched = matched
        return None


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words: at the start of a text, after a space, and inside text.

    Raises:
        RequestError: a word is not Unicode.
    """
    variants: dict[tuple[int, ...], None] = {}
    # After a line break no tokenizer inserts a space, whatever it does at the start of a text.
    line = tokenizer.encode("\n", add_special_tokens=False)
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer.encode(text, add_special_tokens=False, param="bad_words")
            variants[tuple(ids)] = None
        ids = tokenizer.encode(f"\n{word}", add_special_tokens=False, param="bad_words")
        if ids[: len(line)] == line:
            variants[tuple(ids[len(line) :])] = None
    return tuple(ids for ids in variants if ids)
