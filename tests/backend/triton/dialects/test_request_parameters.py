"""Request parameters are options under our names and vLLM's; Triton's own are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import RequestError
from inflight.triton.dialects import request_parameters
from inflight.triton.dialects.request_parameters import HARMLESS, NAMES, decode, read
from inflight.triton.request_options import OPTIONS


def test_numbers_flags_and_texts_are_read_under_both_names() -> None:
    assert read({"max_tokens": 5, "stop": "END", "ignore_eos": True, "top_p": 1}) == {
        "max_tokens": 5,
        "stop_words": ["END"],
        "ignore_eos": True,
        "top_p": 1.0,
    }
    assert read({"max_tokens": "5", "stop_words": "END", "ignore_eos": "True"}) == {
        "max_tokens": 5,
        "stop_words": ["END"],
        "ignore_eos": True,
    }


def test_lists_and_objects_are_json() -> None:
    found = {"stop_token_ids": "[7]", "logit_bias": '{"5": -1}', "allowed_token_ids": "[1, 2]"}
    assert read(found) == {
        "stop_token_ids": [7],
        "logit_bias": [(5, -1.0)],
        "allowed_token_ids": [1, 2],
    }
    found = {"structured_outputs": '{"regex": "a+"}'}
    assert read(found) == {
        "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "a+",
    }


@pytest.mark.parametrize(
    "name",
    [
        *("id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"),
        *("triton_enable_empty_final_response", "binary_data_output", *sorted(HARMLESS)),
    ],
)
def test_parameters_of_triton_and_of_proxies_are_no_options(name: str) -> None:
    assert read({name: "anything"}) == {}


def test_each_option_of_a_single_tensor_may_be_a_parameter() -> None:
    names = {name for field in OPTIONS if not field.option.tensors for name, _ in field.tensors}
    assert names <= NAMES


def test_what_vllm_has_no_tensors_for_may_be_parameters() -> None:
    """As clients of vLLM's backend send them, whose tensors are fixed."""
    given = {"deadline_ms": "300", "priority_class": "batch", "priority": 7}
    assert read(given) == {"deadline_ms": 300, "priority_class": "batch"}
    given = {"cache_priority": 100, "cache_ttl_s": "2.5"}
    assert read(given) == {"cache_priority": 100, "cache_ttl_s": 2.5}


def test_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match=r"^temprature: .*; did you mean 'temperature'\?$"):
        read({"temprature": 1})


def test_a_value_of_the_wrong_type_is_refused_with_its_name() -> None:
    with pytest.raises(RequestError, match=r"^parameters: top_k is true; allowed: an integer$"):
        read({"top_k": True})
    with pytest.raises(RequestError, match=r"^parameters: cache_salt is 5; allowed: a string$"):
        read({"cache_salt": 5})


SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.sampled_from(sorted(NAMES)) | st.text(), SCALARS, max_size=4))
def test_any_parameters_are_read_or_refused(parameters: dict[str, Any]) -> None:
    try:
        read(parameters)
    except RequestError as error:
        assert error.param in (request_parameters.WHERE, *parameters)


def test_triton_s_json_is_decoded() -> None:
    assert decode("") == {}
    assert decode(json.dumps({"a": 1, "b": "x"})) == {"a": 1, "b": "x"}
