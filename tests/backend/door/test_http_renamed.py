"""Responses about a version over HTTP, under the model's name."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from inflight.door.http.renamed import Renamed

# Of outputs that look like what is renamed.
TEXTS = st.one_of(
    st.text(),
    st.sampled_from(['"model_name":"generate@2"', "generate@2", "'generate@2'", "\n\ndata: "]),
)


def event(text: str, name: str) -> bytes:
    """As Triton writes it, without spaces."""
    body = {"finish_reason": "", "model_name": name, "model_version": "2", "text_output": text}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


@given(texts=st.lists(TEXTS, max_size=6), data=st.data())
def test_events_are_renamed_however_they_arrive(texts: list[str], data: st.DataObject) -> None:
    sent = b"".join(event(text, "generate@2") for text in texts)
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=8).map(sorted))
    renamed = Renamed("generate@2", [1, 2])
    places = zip([0, *cuts], [*cuts, len(sent)], strict=True)
    parts = [renamed.events(sent[start:end]) for start, end in places if start < end]
    assert b"".join(parts) == b"".join(event(text, "generate") for text in texts)
    assert renamed.rest() == b""


def test_an_event_that_is_cut_off_is_kept() -> None:
    renamed = Renamed("generate@2", [2])
    sent = event("a", "generate@2") + b'data: {"fin'
    assert renamed.events(sent) == event("a", "generate")
    assert renamed.rest() == b'data: {"fin'
    assert renamed.rest() == b""


def test_an_error_among_events_has_the_name_that_clients_use() -> None:
    renamed = Renamed("generate@2", [2])
    error = b"data: {\"error\":\"in ensemble 'generate@2', 'llm@2' failed\"}\n\n"
    sent = event("'generate@2'", "generate@2") + error
    expected = b"data: {\"error\":\"in ensemble 'generate', 'llm' failed\"}\n\n"
    assert renamed.events(sent) == event("'generate@2'", "generate") + expected


def test_only_the_json_text_of_a_binary_response_is_renamed() -> None:
    head = b'{"model_name":"tokenizer@2","model_version":"2","outputs":[]}'
    binary = b'\x00"model_name":"tokenizer@2"'
    found = Renamed("tokenizer@2", [2]).inference(head + binary)
    assert found == head.replace(b"@2", b"") + binary


def test_descriptions_name_the_model_and_its_versions() -> None:
    renamed = Renamed("generate@2", [1, 2])
    metadata = {"name": "generate@2", "versions": ["2"], "platform": "ensemble"}
    assert json.loads(renamed.description(json.dumps(metadata).encode())) == {
        **metadata,
        "name": "generate",
        "versions": ["1", "2"],
    }
    stats = {"model_stats": [{"name": "generate@2", "version": "2"}, {"name": "other"}]}
    assert json.loads(Renamed("").description(json.dumps(stats).encode())) == {
        "model_stats": [{"name": "generate", "version": "2"}, {"name": "other"}]
    }
    other = {"name": "other", "versions": ["7"]}
    assert json.loads(Renamed("").description(json.dumps(other).encode())) == other
    assert renamed.description(b"") == b""
