"""Errors, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

from typing import Literal

import msgspec


class ErrorDetail(msgspec.Struct):
    """An error.

    Attributes:
        message: the field, what is wrong and what is allowed.
        param: the field of the request at fault.
        code: a stable name, such as context_length_exceeded or model_not_found.
    """

    message: str
    type: Literal[
        "authentication_error",
        "invalid_request_error",
        "not_found_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str


class Error(msgspec.Struct):
    """An error in OpenAI's form."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    """An error.

    Attributes:
        message: the field, what is wrong and what is allowed.
    """

    type: Literal[
        "api_error",
        "authentication_error",
        "invalid_request_error",
        "not_found_error",
        "overloaded_error",
        "permission_error",
        "rate_limit_error",
        "request_too_large",
        "timeout_error",
    ]
    message: str


class AnthropicError(msgspec.Struct):
    """An error in Anthropic's form."""

    type: Literal["error"]
    error: AnthropicErrorDetail
