"""Responses about models, tokens and the server."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct):
    """Attributes:
    created: in seconds of Unix time.
    max_model_len: of a prompt and its output, in tokens.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class ModelState(msgspec.Struct):
    id: str
    state: str


class ModelStates(msgspec.Struct):
    """The models of the server after a change."""

    models: list[ModelState]


class Tokens(msgspec.Struct):
    """Attributes:
    token_strs: the text of each token, with return_token_strs.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    tokenizer_class: str
    model: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    additional_special_tokens: list[str]
    chat_template: str | None


class Version(msgspec.Struct):
    version: str
