"""Every error of gRPC and Triton is mapped."""

from __future__ import annotations

import grpc
import pytest

from inflight_client import ClientError, InvalidRequest, ServerError, Unavailable
from inflight_client.errors import BY_CODE, from_message


def test_every_grpc_status_has_an_error_of_ours() -> None:
    assert set(BY_CODE) == set(grpc.StatusCode)
    assert all(issubclass(kind, ClientError) for kind in BY_CODE.values())


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Request for unknown model: 'llm' has no available versions", Unavailable),
        ("Server is stopping, scheduler for model has stopped accepting requests", Unavailable),
        ("Request for unknown model: 'nope' is not found", InvalidRequest),
        ("[request id: 1] expected 1 inputs but got 2 inputs for model 'llm'", InvalidRequest),
        ("unexpected inference input 'maxtokens' for model 'generate'", InvalidRequest),
        ("something else", ServerError),
    ],
)
def test_triton_messages_without_a_code_are_classified_by_text(
    message: str, kind: type[ClientError]
) -> None:
    assert type(from_message(message)) is kind
