"""The JSON of sampling_parameters is equivalent to tensors, or rejected with the key's name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import RequestError
from inflight.triton.dialects import guides, option_values, sampling_parameters


def test_vllm_names_become_ours():
    text = json.dumps(
        {
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.9,
            "top_k": 40,
            "stop": "END",
            "stop_token_ids": [7, 2],
            "bad_words": ["no"],
            "ignore_eos": True,
            "seed": 2**64 - 1,
        }
    )
    assert sampling_parameters.parse(text) == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 40,
        "stop_words": ["END"],
        "stop_token_ids": [7, 2],
        "bad_words": ["no"],
        "ignore_eos": True,
        "seed": 2**64 - 1,
    }


@pytest.mark.parametrize(
    ("seed", "expected"), [(-1, {}), ("-1", {}), (-2, {"seed": 2**64 - 2}), (0, {"seed": 0})]
)
def test_seeds_may_be_negative(seed: int | str, expected: dict[str, int]) -> None:
    """vLLM's -1 is no seed; Triton's OpenAI frontend passes OpenAI's signed seeds on."""
    assert sampling_parameters.parse(json.dumps({"seed": seed})) == expected


def test_rarer_names_are_vllms_or_llama_cpps() -> None:
    text = json.dumps(
        {
            "logit_bias": {"50": -100, "7": "2.5"},
            "allowed_token_ids": [1, "2"],
            "typical_p": 0.9,
            "top_n_sigma": 1,
            "epsilon_cutoff": 0.01,
            "xtc_threshold": 0.1,
            "xtc_probability": 0.5,
            "dry_multiplier": 0.8,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "dry_sequence_breakers": ["\n", ":"],
            "no_repeat_ngram_size": 3,
            "logprobs": 5,
            "prompt_logprobs": 0,
            "echo": True,
        }
    )
    assert sampling_parameters.parse(text) == {
        "logit_bias": [(50, -100.0), (7, 2.5)],
        "allowed_token_ids": [1, 2],
        "typical_p": 0.9,
        "top_n_sigma": 1.0,
        "epsilon_cutoff": 0.01,
        "xtc_threshold": 0.1,
        "xtc_probability": 0.5,
        "dry_multiplier": 0.8,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n", ":"],
        "no_repeat_ngram_size": 3,
        "num_logprobs": 5,
        "num_prompt_logprobs": 0,
        "echo": True,
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"logprobs": true}', 0),
        ('{"logprobs": true, "top_logprobs": 4}', 4),
        ('{"logprobs": 3, "top_logprobs": 0}', 3),
        ('{"logprobs": 0}', 0),
        ('{"logprobs": "7"}', 7),
    ],
)
def test_logprobs_are_openais_flag_or_a_number(text: str, number: int) -> None:
    assert sampling_parameters.parse(text) == {"num_logprobs": number}


def test_numbers_may_come_as_strings():
    """GenAI-Perf writes them so."""
    text = '{"max_tokens": "16", "min_tokens": "16", "temperature": "0.5"}'
    assert sampling_parameters.parse(text) == {
        "max_tokens": 16,
        "min_tokens": 16,
        "temperature": 0.5,
    }


def test_null_means_the_default():
    assert sampling_parameters.parse('{"temperature": null, "seed": null, "stop": null}') == {}


def test_options_without_effect_are_accepted():
    """Triton's OpenAI frontend sends every field that has a default."""
    text = '{"logprobs": false, "top_logprobs": 0, "best_of": 1, "logit_bias": null, "n": 1}'
    assert sampling_parameters.parse(text) == {"n": 1, "best_of": 1}
    text = '{"logprobs": null, "prompt_logprobs": null, "allowed_token_ids": null, "echo": null}'
    assert sampling_parameters.parse(text) == {}


def test_a_beam_search_has_best_of_beams_or_n():
    search = '{"use_beam_search": true, "n": 3, "temperature": 0, "length_penalty": 0.5'
    found = {"n": 3, "beam_width": 3, "temperature": 0.0, "length_penalty": 0.5}
    assert sampling_parameters.parse(search + "}") == found
    assert sampling_parameters.parse(search + ', "best_of": 5, "early_stopping": true}') == (
        found | {"beam_width": 5, "early_stopping": True}
    )
    assert sampling_parameters.parse('{"beam_width": "4"}') == {"beam_width": 4}
    assert sampling_parameters.parse('{"use_beam_search": false, "n": 3}') == {"n": 3}
    assert sampling_parameters.parse('{"use_beam_search": null, "early_stopping": null}') == {}


def test_stop_may_be_a_list():
    assert sampling_parameters.parse('{"stop": ["a", "b"]}') == {"stop_words": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object, not []"),
        ("null", "must be a JSON object, not null"),
        ('{"temperature": NaN}', "NaN is not a number in JSON"),
        ('{"temperature": Infinity}', "Infinity is not a number in JSON"),
        ('{"max_tokens": 1, "max_tokens": 2}', "a key occurs twice"),
        ('{"max_token": 1}', "'max_token' is not a key; did you mean 'max_tokens'?"),
        ('{"max_tokens": 1.5}', "max_tokens is 1.5; allowed: an integer"),
        ('{"max_tokens": true}', "max_tokens is true; allowed: an integer"),
        ('{"max_tokens": "many"}', 'max_tokens is "many"; allowed: an integer'),
        ('{"temperature": "hot"}', 'temperature is "hot"; allowed: a number'),
        ('{"temperature": [1]}', "temperature is [1]; allowed: a number"),
        ('{"ignore_eos": "yes"}', 'ignore_eos is "yes"; allowed: true, false'),
        ('{"stop": [1]}', "stop is [1]; allowed: a string or a list of them"),
        ('{"stop": "\\ud800"}', "lone surrogate"),
        ('{"stop_token_ids": 1}', "stop_token_ids is 1; allowed: a list of token ids"),
        ('{"stop_token_ids": ["a"]}', 'stop_token_ids is "a"; allowed: an integer'),
        ('{"logprobs": 1.5}', "logprobs is 1.5; allowed: an integer"),
        ('{"top_logprobs": 5}', "top_logprobs needs logprobs: true"),
        ('{"logprobs": false, "top_logprobs": 5}', "top_logprobs needs logprobs: true"),
        ('{"prompt_logprobs": true}', "prompt_logprobs is true; allowed: an integer"),
        ('{"echo": 1}', "echo is 1; allowed: true, false"),
        ('{"use_beam_search": true}', "use_beam_search needs best_of or n above 1"),
        ('{"use_beam_search": true, "n": 2, "beam_width": 3}', "use_beam_search has 2 beams"),
        ('{"early_stopping": "never"}', 'early_stopping is "never"; allowed: true, false'),
        ('{"best_of": 1.5}', "best_of is 1.5; allowed: an integer"),
        ('{"include_stop_str_in_output": true}', "allowed: false, null"),
        ('{"logit_bias": [1, 2]}', "logit_bias is [1, 2]; allowed: an object of token ids"),
        ('{"logit_bias": {"abc": 2}}', 'logit_bias is "abc"; allowed: an integer'),
        ('{"logit_bias": {"1": [2]}}', "logit_bias is [2]; allowed: a number"),
        ('{"allowed_token_ids": 5}', "allowed_token_ids is 5; allowed: a list of token ids"),
        ('{"allowed_token_ids": [1.5]}', "allowed_token_ids is 1.5; allowed: an integer"),
        ('{"max_tokens": ' + "9" * 5000 + "}", "a number that is too long"),
        ("[" * 30_000, "nested too deeply"),
        (" " * (sampling_parameters.MAX_BYTES + 1), "characters are too many"),
    ],
)
def test_disallowed_options_are_rejected(text, message):
    with pytest.raises(RequestError) as caught:
        sampling_parameters.parse(text)
    assert str(caught.value).startswith("sampling_parameters: ")
    assert message in str(caught.value)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_of_any_key_is_read_or_refused(value):
    for key in [*option_values.KEYS, *option_values.IGNORED, *guides.KEYS]:
        try:
            sampling_parameters.parse(json.dumps({key: value}))
        except RequestError as error:
            assert str(error).startswith("sampling_parameters: ")
