"""Text to ids, and what else of a checkpoint concerns text: special tokens and the chat template.

A Hugging Face folder is read as it is. A GGUF file carries its tokenizer as metadata, slow to read
and to assemble, so it is turned into such a folder once, in the user's cache, and read from there
by every process that follows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError, RequestError
from inflight.text import gguf_tokenizer

# Part of the cache's key: raise it when the files that `gguf.write_folder` writes change.
_CACHE_VERSION = 1
_EXPORTED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


class Tokenizer:
    """A `tokenizers` tokenizer with its checkpoint's special tokens. Safe to share by threads.

    Attributes:
        vocab_size: the highest id and one more. A model's own may be larger (padded).
        bos_token, eos_token: texts for the chat template; None where the model has none.
        bos_id: id of bos_token.
        eos_ids: the ids that end an output, the model's own (`generation_config.json` counts).
        special_ids: id -> text of the tokens that are not text: they are skipped in an output.
        markers: text -> id of the tokens that a chat template builds turns with, which no message
            may contain: the special ones, those that end an output, and those that read `<|...`.
        chat_template: the Jinja source, if there is one.
        decoder: the description of the backend's decoder, as in tokenizer.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        # Lengths are the engine's to check: a tokenizer that cuts or pads would hide them.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._lock = threading.Lock()
        self._marking: _MarkingBackend | None = None
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id = None if bos_token is None else backend.token_to_id(bos_token)
        eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        own = () if eos_id is None or eos_id in eos_ids else (eos_id,)
        self.eos_ids = (*eos_ids, *own)
        added = backend.get_added_tokens_decoder()
        self.special_ids = {id_: token.content for id_, token in added.items() if token.special}
        self.markers = {
            token.content: id_
            for id_, token in added.items()
            if token.special or id_ in self.eos_ids or token.content.startswith("<|")
        }
        self.chat_template = chat_template
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.decoder: dict[str, Any] | None = (
            None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint.

        Raises:
            ConfigError: it has none, or one that is not supported; names the file and what is.
        """
        if checkpoint.format == "huggingface":
            return cls._from_folder(checkpoint.path)
        found = cls._from_cache(checkpoint.path)
        return found or cls._from_gguf(checkpoint.path, gguf_tokenizer.read(checkpoint.path))

    @classmethod
    def load_if_present(cls, checkpoint: Checkpoint) -> Tokenizer | None:
        """The tokenizer of a checkpoint, or None for one that knows ids only.

        Raises:
            ConfigError: it has one that is not supported.
        """
        if checkpoint.format == "huggingface":
            present = (checkpoint.path / "tokenizer.json").is_file()
            return cls._from_folder(checkpoint.path) if present else None
        found = cls._from_cache(checkpoint.path)
        if found is not None:
            return found
        metadata = gguf_tokenizer.read(checkpoint.path)
        return (
            cls._from_gguf(checkpoint.path, metadata)
            if gguf_tokenizer.has_tokenizer(metadata)
            else None
        )

    @classmethod
    def _from_cache(cls, path: Path) -> Tokenizer | None:
        cached = _cache_folder(path)
        if cached is None:
            return None
        try:
            return cls._from_folder(cached)
        except ConfigError:  # not there, or broken: it is made anew
            return None

    @classmethod
    def _from_gguf(cls, path: Path, metadata: dict[str, Any]) -> Tokenizer:
        with tempfile.TemporaryDirectory(prefix="inflight-tokenizer-") as folder:
            gguf_tokenizer.write_folder(path, metadata, Path(folder))
            cached = _cache_folder(path)
            if cached is not None:
                _publish(Path(folder), cached)
            return cls._from_folder(Path(folder))

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"tokenizer: {folder} has no tokenizer.json; write one with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        named = {**_read_json(folder / "special_tokens_map.json"), **config}
        return cls(
            backend,
            bos_token=_token_text(named.get("bos_token")),
            eos_token=_token_text(named.get("eos_token")),
            eos_ids=_eos_ids(folder),
            chat_template=_chat_template(folder, config),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, param: str = "text_input"
    ) -> list[int]:
        """Token ids of a text. Special tokens written in it become special tokens.

        Args:
            text: any text; "" gives what the tokenizer adds by itself, perhaps nothing.
            add_special_tokens: put what the model wants around a prompt, such as a begin token.
            param: the field that the text came from, for the error.

        Raises:
            RequestError: the text holds a lone surrogate, so it is not Unicode.
        """
        check_unicode(text, param)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, param: str = "text_input"
    ) -> list[list[int]]:
        """`encode` of several texts, in parallel."""
        for text in texts:
            check_unicode(text, param)
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_pieces(self, pieces: Sequence[str | int], param: str = "messages") -> list[int]:
        """Token ids of a text whose markers are told apart from text that reads like one.

        The ids are those of the whole text, merges across pieces included; only that a string
        never yields a marker and an int always does.

        Args:
            pieces: strings, and ids of markers.

        Raises:
            RequestError: a string has a lone surrogate, or the tokenizer's own merges make a
                marker of it.
        """
        for piece in pieces:
            if isinstance(piece, str):
                check_unicode(piece, param)
        with self._lock:
            if self._marking is None:
                self._marking = _MarkingBackend(self._backend, self.markers)
        return self._marking.encode(pieces, param)

    def vocabulary(self) -> dict[str, int]:
        """Token, in the tokenizer's own alphabet -> id; a new dict."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary


class _MarkingBackend:
    """A twin of a backend in which each marker is spelled so that nobody can type it.

    The library finds markers by their text, and must: what stands around one decides how a text
    is split. So a marker that is meant goes in under a secret name that is the marker's in the
    twin, and the marker's own text, which the twin does not know, is text like any other.
    """

    def __init__(self, backend: tokenizers.Tokenizer, markers: dict[str, int]) -> None:
        secret = secrets.token_hex(16)
        self._spelling = {id_: f"\ue000{secret}:{id_:x}\ue001" for id_ in markers.values()}
        # Shares the model: a twin costs next to nothing.
        self._twin = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._twin.pre_tokenizer = backend.pre_tokenizer
        added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._twin.add_tokens(
            [
                tokenizers.AddedToken(
                    self._spelling.get(id_, token.content),
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for id_, token in added.items()
            ]
        )
        self._real_id = {
            self._twin.token_to_id(self._spelling.get(id_, token.content)): id_
            for id_, token in added.items()
        }
        unknown = getattr(backend.model, "unk_token", None)
        self._forbidden = {
            id_ for text, id_ in markers.items() if text != unknown and id_ not in self._real_id
        }

    def encode(self, pieces: Sequence[str | int], param: str) -> list[int]:
        text = "".join(
            self._spelling[piece] if isinstance(piece, int) else piece for piece in pieces
        )
        ids = self._twin.encode(text, add_special_tokens=False).ids
        if not self._forbidden.isdisjoint(ids):
            raise RequestError("the text contains one of the model's special tokens", param)
        return [self._real_id.get(id_, id_) for id_ in ids]


def export(checkpoint: Checkpoint, directory: Path) -> None:
    """Write what a Hugging Face folder holds beside its weights: the tokenizer and the settings.

    Tools that count tokens themselves take such a folder (`transformers.AutoTokenizer`).

    Args:
        directory: created if missing; files of the same names are replaced.

    Raises:
        ConfigError: the checkpoint has no tokenizer that is supported, or the directory cannot
            be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if checkpoint.format == "gguf":
            gguf_tokenizer.write_folder(
                checkpoint.path, gguf_tokenizer.read(checkpoint.path), directory
            )
            return
        Tokenizer.load(checkpoint)  # refuses what nobody could load
        for name in _EXPORTED:
            source = checkpoint.path / name
            if source.is_file() and source.resolve() != (directory / name).resolve():
                shutil.copyfile(source, directory / name)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from None


def check_unicode(text: str, param: str) -> None:
    """Refuse what no encoder can write.

    Raises:
        RequestError: a lone surrogate; says where.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate at character {error.start}; "
            "allowed: Unicode that UTF-8 can write",
            param,
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"tokenizer: {path} must hold a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _eos_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        ids = [id_ for id_ in ids if isinstance(id_, int) and id_ >= 0]
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several under names
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _cache_folder(path: Path) -> Path | None:
    """Where the tokenizer of this very file is, or will be, cached."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
        resolved = path.resolve()
        stat = resolved.stat()
    except (OSError, RuntimeError):  # no such file; no home
        return None
    key = f"{_CACHE_VERSION}\0{resolved}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return base / "inflight" / "tokenizers" / digest


def _publish(folder: Path, cached: Path) -> None:
    """Put a copy of `folder` into the cache, whole or not at all.

    Several processes may do so at once: each renames a copy of its own, and the first stays. A
    cache that cannot be written only costs time.
    """
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy = Path(tempfile.mkdtemp(prefix=".new-", dir=cached.parent))
        try:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            # Whoever read it before found it missing or broken: an older one is in the way.
            if cached.exists() and not _is_sound(cached):
                shutil.rmtree(cached, ignore_errors=True)
            os.rename(copy, cached)
        finally:
            shutil.rmtree(copy, ignore_errors=True)


def _is_sound(folder: Path) -> bool:
    try:
        Tokenizer._from_folder(folder)
    except ConfigError:
        return False
    return True
