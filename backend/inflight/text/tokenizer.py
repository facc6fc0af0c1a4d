"""Tokenizer of a checkpoint, with its special tokens and chat template.

A Hugging Face folder is read directly. A GGUF file has its tokenizer in the metadata, slow to read
and to build, so it is converted to such a folder once, in the user's cache, for all further
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError, RequestError
from inflight.text import gguf_tokenizer
from inflight.text.chat_format import named_templates, stop_tokens
from inflight.text.encoder import Encoder
from inflight.text.encoding_sandbox import EncodingSandbox
from inflight.text.linear_pipeline import is_linear

MAX_CHARACTERS_HERE = 1 << 15
"""A longer text is encoded in a sandbox: the library holds the interpreter's lock meanwhile, and
needs some 600 bytes per character in the worst case."""

MAX_VOCAB_SIZE = 1 << 20
MAX_FILE_BYTES = 128 << 20
"""Of each file of a tokenizer; the largest of a published model have a quarter of it."""

# Part of the cache key: increment it when the output of `gguf_tokenizer.write_folder` changes.
_CACHE_VERSION = 3
_EXPORTED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    named_templates.FILE,
    named_templates.LEGACY_FILE,
    "config.json",
    "generation_config.json",
)


class Tokenizer:
    """A `tokenizers` tokenizer with its checkpoint's special tokens. Thread-safe.

    Attributes:
        vocab_size: the highest id plus one. The model's may be larger (padded).
        bos_token, eos_token: texts for the chat template; None if the model has none.
        bos_id: id of bos_token.
        eos_ids: the ids that end an output: those that the checkpoint's files name, and the ends of
            turns in its chat templates.
        special_ids: id -> text of the special tokens, which are skipped in an output.
        markers: text -> id of the tokens that delimit turns in a chat template, which no message
            may contain: special tokens, EOS tokens, and those that start with `<|`.
        chat_template: the Jinja source, if there is one.
        tool_chat_template: the one for chats with tools, if there is another one.
        decoder: the backend's decoder, as in tokenizer.json.

    Raises:
        ConfigError: its ids are too large.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        tool_chat_template: str | None = None,
    ) -> None:
        # The engine checks lengths: truncation or padding here would hide them.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.bos_id = None if bos_token is None else backend.token_to_id(bos_token)
        eos_id = None if eos_token is None else backend.token_to_id(eos_token)
        added = backend.get_added_tokens_decoder()
        templates = [one for one in (chat_template, tool_chat_template) if one is not None]
        ends = stop_tokens.in_templates({t.content: id_ for id_, t in added.items()}, templates)
        own = () if eos_id is None else (eos_id,)
        self.eos_ids = tuple(dict.fromkeys((*eos_ids, *own, *ends)))
        self.special_ids = {id_: token.content for id_, token in added.items() if token.special}
        self.markers = {
            token.content: id_
            for id_, token in added.items()
            if token.special or id_ in self.eos_ids or token.content.startswith("<|")
        }
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.decoder: dict[str, Any] | None = (
            None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        )
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(
                f"tokenizer: the id {self.vocab_size - 1} is too large; "
                f"allowed: ids below {MAX_VOCAB_SIZE}"
            )
        self._encoder = Encoder(backend, self.markers)
        self._sandbox = EncodingSandbox(backend, self.markers)
        self._is_linear = is_linear(backend)

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint.

        Raises:
            ConfigError: it has none, or one that is not supported.
        """
        if checkpoint.format == "huggingface":
            return cls._from_folder(checkpoint.path)
        found = cls._from_cache(checkpoint.path)
        return found or cls._from_gguf(checkpoint.path, gguf_tokenizer.read(checkpoint.path))

    @classmethod
    def load_if_present(cls, checkpoint: Checkpoint) -> Tokenizer | None:
        """The tokenizer of a checkpoint, or None if it has none.

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
        except ConfigError:  # missing or corrupt: it is written again
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
        _check_size(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and its panics are none
            raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        named = {**_read_json(folder / "special_tokens_map.json"), **config}
        templates = named_templates.of_folder(folder, config)
        return cls(
            backend,
            bos_token=_token_text(named.get("bos_token")),
            eos_token=_token_text(named.get("eos_token")),
            eos_ids=_eos_ids(folder),
            chat_template=named_templates.of_chats(templates),
            tool_chat_template=templates.get(named_templates.TOOL_USE),
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, param: str = "text_input"
    ) -> list[int]:
        """Token ids of a text. The text of a special token in it becomes that token.

        Args:
            text: any text; "" yields only the tokens that the tokenizer adds, if any.
            add_special_tokens: add the model's special tokens around a prompt, such as BOS.
            param: the request field of the text, for the error.

        Raises:
            RequestError: the text contains a lone surrogate, the tokenizer fails on it, or it
                exceeds the limits.
        """
        check_unicode(text, param)
        if self._runs_here(len(text)):
            return self._encoder.encode(text, add_special_tokens, param)
        return self._sandbox.encode(text, add_special_tokens, param)

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, param: str = "text_input"
    ) -> list[list[int]]:
        """`encode` of several texts."""
        return [self.encode(text, add_special_tokens, param) for text in texts]

    def encode_pieces(self, pieces: Sequence[str | int], param: str = "messages") -> list[int]:
        """Token ids of a text in which markers are distinct from text that looks like one.

        The ids are those of the whole text, merges across pieces included, except that a string
        never yields a marker and an int always does.

        Args:
            pieces: strings, and ids of markers.

        Raises:
            RequestError: a string contains a lone surrogate, the tokenizer's merges turn it into a
                marker, or it exceeds the limits.
        """
        for piece in pieces:
            if isinstance(piece, str):
                check_unicode(piece, param)
        if self._runs_here(sum(len(piece) for piece in pieces if isinstance(piece, str))):
            return self._encoder.encode_pieces(pieces, param)
        return self._sandbox.encode_pieces(pieces, param)

    def warm(self) -> None:
        """Start the sandbox now, if each text needs it; otherwise the first long one starts it.

        Raises:
            EngineError: it does not start.
        """
        if not self._is_linear:
            self._sandbox.warm()

    def _runs_here(self, num_characters: int) -> bool:
        return self._is_linear and num_characters <= MAX_CHARACTERS_HERE

    def vocabulary(self) -> dict[str, int]:
        """Token, in the tokenizer's alphabet -> id; a new dict."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary


def export(checkpoint: Checkpoint, directory: Path) -> None:
    """Write the tokenizer and the configuration of a checkpoint as a Hugging Face folder.

    For tools that count tokens themselves (`transformers.AutoTokenizer`).

    Args:
        directory: created if missing; files of the same names are replaced.

    Raises:
        ConfigError: the checkpoint has no supported tokenizer, or the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if checkpoint.format == "gguf":
            gguf_tokenizer.write_folder(
                checkpoint.path, gguf_tokenizer.read(checkpoint.path), directory
            )
            return
        Tokenizer.load(checkpoint)  # raises if it cannot be loaded
        named = (checkpoint.path / named_templates.FOLDER).glob("*.jinja")
        more = [f"{named_templates.FOLDER}/{path.name}" for path in named]
        for name in (*_EXPORTED, *more):
            source = checkpoint.path / name
            if source.is_file() and source.resolve() != (directory / name).resolve():
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source, directory / name)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror})") from None


def check_unicode(text: str, param: str) -> None:
    """Check that a text can be encoded in UTF-8.

    Raises:
        RequestError: a lone surrogate, with its position.
    """
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"lone surrogate at character {error.start}; allowed: text that is valid in UTF-8",
            param,
        ) from None


def _check_size(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        return  # loading it raises the error
    if size > MAX_FILE_BYTES:
        raise ConfigError(
            f"tokenizer: {path} has {size} bytes, which is too much; allowed: {MAX_FILE_BYTES}"
        )


def _read_json(path: Path) -> dict[str, Any]:
    _check_size(path)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"tokenizer: {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"tokenizer: {path} is not a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is given as its text, or as an object that contains it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids in generation_config.json and config.json."""
    config = _read_json(folder / "config.json")
    nested = config.get("text_config")  # of a model that reads images as well
    sources = (_read_json(folder / "generation_config.json"), config, nested)
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        ids = value if isinstance(value, list) else [value]
        found += [id_ for id_ in ids if type(id_) is int and id_ >= 0]
    return tuple(dict.fromkeys(found))


def _cache_folder(path: Path) -> Path | None:
    """The cache folder for this version of a file's tokenizer."""
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
    """Copy `folder` into the cache atomically.

    With several processes at once, each renames its own copy, and the first one stays. A cache that
    cannot be written only costs time.
    """
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy = Path(tempfile.mkdtemp(prefix=".new-", dir=cached.parent))
        try:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            # This process found it missing or corrupt: remove an invalid one.
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
