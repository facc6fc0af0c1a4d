"""Tensors become requests."""

import numpy as np
import pytest

from inflight.core.request import AUTO_DRAFTS, PriorityClass
from inflight.errors import CapacityError, ConfigError, EngineError, RequestError
from inflight.sampling.params import SamplingParams
from inflight.triton import contract, protocol
from inflight.triton.protocol import parse
from llm_tensors import LIMITS, flags, floats, generation, ints, refusal, strings


def test_a_prompt_alone_is_enough():
    asked = generation()
    assert asked.prompt_ids == [1, 2, 3]
    assert asked.params == SamplingParams()
    assert not asked.stream
    assert not asked.echo
    assert not asked.detokenized
    assert asked.cache_salt == ""


def test_every_sampling_tensor_arrives():
    asked = generation(
        max_tokens=ints(9),
        min_tokens=ints(2),
        temperature=floats(0.5),
        top_k=ints(4),
        top_p=floats(0.5),
        min_p=floats(0.25),
        repetition_penalty=floats(1.5),
        presence_penalty=floats(-1),
        frequency_penalty=floats(2),
        seed=np.array([2**64 - 1], np.uint64),
        stop_words=strings("a", "b"),
        bad_words=strings("c"),
        ignore_eos=flags(True),
        end_id=ints(99),
        typical_p=floats(0.5),
        top_n_sigma=floats(1.5),
        epsilon_cutoff=floats(0.125),
        xtc_threshold=floats(0.25),
        xtc_probability=floats(0.5),
        dry_multiplier=floats(0.75),
        dry_base=floats(1.5),
        dry_allowed_length=ints(3),
        dry_penalty_last_n=ints(64),
        dry_sequence_breakers=strings("\n", "é"),
        no_repeat_ngram_size=ints(4),
        logit_bias_ids=ints(7, 3),
        logit_bias_values=floats(-2.5, 1),
        allowed_token_ids=ints(3, 7, 9),
        num_logprobs=ints(5),
        num_prompt_logprobs=ints(2),
    )
    assert asked.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        seed=2**64 - 1,
        stop_words=("a", "b"),
        bad_words=("c",),
        ignore_eos=True,
        end_id=99,
        typical_p=0.5,
        top_n_sigma=1.5,
        epsilon_cutoff=0.125,
        xtc_threshold=0.25,
        xtc_probability=0.5,
        dry_multiplier=0.75,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        dry_sequence_breakers=("\n", "é"),
        no_repeat_ngram_size=4,
        logit_bias=((7, -2.5), (3, 1.0)),
        allowed_token_ids=(3, 7, 9),
        num_logprobs=5,
        num_prompt_logprobs=2,
    )


def test_every_field_of_the_params_has_a_tensor():
    from inflight.triton.contract import OPTIONS

    names = {tensor.name for tensor in OPTIONS}
    fields = set(SamplingParams.__struct_fields__) - {"logit_bias"}
    assert fields <= names
    assert {"logit_bias_ids", "logit_bias_values"} <= names


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"logit_bias_ids": ints(1)}, "logit_bias_ids: 1 ids and 0 values; allowed: as many"),
        ({"logit_bias_values": floats(1)}, "logit_bias_ids: 0 ids and 1 values"),
        (
            {"logit_bias_ids": ints(1, 2), "logit_bias_values": floats(1)},
            "logit_bias_ids: 2 ids and 1 values",
        ),
        (
            {"logit_bias_ids": ints(1, 100), "logit_bias_values": floats(1, 1)},
            "logit_bias: 100 is not in the vocabulary; allowed: 0 to 99",
        ),
        (
            {"logit_bias_ids": ints(1, 1), "logit_bias_values": floats(1, 1)},
            "logit_bias: a token id occurs twice",
        ),
        (
            {"logit_bias_ids": ints(1), "logit_bias_values": floats(101)},
            "logit_bias: 101.0 is out of range; allowed: [-100.0, 100.0]",
        ),
        (
            {"logit_bias_ids": ints(1, 2), "logit_bias_values": floats(1, np.nan)},
            "logit_bias_values: nan is not a finite number",
        ),
        ({"allowed_token_ids": ints()}, "allowed_token_ids: is empty"),
        ({"allowed_token_ids": ints(5, -1)}, "allowed_token_ids: -1 is not a token id"),
        ({"allowed_token_ids": ints(100)}, "allowed_token_ids: 100 is not in the vocabulary"),
        ({"end_id": ints(100)}, "end_id: 100 is not in the vocabulary; allowed: 0 to 99"),
        ({"num_logprobs": ints(21)}, "num_logprobs: 21 is out of range; allowed: [0, 20]"),
        ({"num_logprobs": ints(-1)}, "num_logprobs: -1 is out of range; allowed: [0, 20]"),
        (
            {"typical_p": floats(0.5), "temperature": floats(0)},
            "typical_p: may drop the most probable token",
        ),
        ({"no_repeat_ngram_size": ints(1)}, "no_repeat_ngram_size: 1 would ban every token"),
        (
            {
                "logit_bias_ids": ints(1),
                "logit_bias_values": floats(1),
                "sampling_parameters": strings('{"logit_bias": {"1": 2}}'),
            },
            "sampling_parameters: logit_bias is also set by the tensor logit_bias",
        ),
        (
            {"sampling_parameters": strings('{"logit_bias": {"100": 2}}')},
            "sampling_parameters: logit_bias: 100 is not in the vocabulary",
        ),
        (
            {"sampling_parameters": strings('{"allowed_token_ids": []}')},
            "sampling_parameters: allowed_token_ids: is empty",
        ),
    ],
)
def test_options_naming_token_ids_are_checked(inputs, message):
    assert refusal(**inputs).startswith(message)


def test_zero_biases_are_a_noop():
    none = {"logit_bias_ids": ints(), "logit_bias_values": floats()}
    assert generation(**none).params == SamplingParams()


def test_the_json_dialects_biases_arrive():
    text = '{"logit_bias": {"7": -100, "3": 1}, "allowed_token_ids": [3, 7], "logprobs": true}'
    assert generation(sampling_parameters=strings(text)).params == SamplingParams(
        logit_bias=((7, -100.0), (3, 1.0)), allowed_token_ids=(3, 7), num_logprobs=0
    )


def test_return_log_probs_asks_for_the_tokens_own():
    assert generation(return_log_probs=flags(True)).params.num_logprobs == 0
    assert generation(return_log_probs=flags(False)).params.num_logprobs is None
    both = generation(return_log_probs=flags(True), num_logprobs=ints(3))
    assert both.params.num_logprobs == 3
    both = generation(return_log_probs=flags(True), sampling_parameters=strings('{"logprobs": 4}'))
    assert both.params.num_logprobs == 4


def test_the_rest_of_the_tensors_arrives():
    asked = generation(
        stream=flags(True),
        exclude_input_in_output=flags(False),
        cache_salt=strings("tenant 7"),
        return_num_input_tokens=flags(True),
        return_num_output_tokens=flags(False),
        n=ints(1),
        num_logprobs=ints(0),
    )
    assert asked.stream
    assert asked.echo
    assert asked.cache_salt == "tenant 7"


def test_an_echoed_prompt_has_logprobs_like_the_output():
    """As in OpenAI's API, with its flag alone."""
    assert generation(echo=flags(True)).params.num_prompt_logprobs is None
    both = generation(echo=flags(True), num_logprobs=ints(3))
    assert both.echo
    assert both.params.num_prompt_logprobs == both.params.num_logprobs == 3
    dialect = generation(sampling_parameters=strings('{"echo": true, "logprobs": 1}'))
    assert (dialect.echo, dialect.params.num_prompt_logprobs) == (True, 1)
    own = generation(echo=flags(True), num_logprobs=ints(3), num_prompt_logprobs=ints(0))
    assert own.params.num_prompt_logprobs == 0
    excluded = generation(exclude_input_in_output=flags(False), num_logprobs=ints(3))
    assert excluded.echo
    assert excluded.params.num_prompt_logprobs is None
    silent = generation(echo=flags(False), num_logprobs=ints(3))
    assert not silent.echo
    assert silent.params.num_prompt_logprobs is None
    assert generation(echo=flags(True), exclude_input_in_output=flags(False)).echo


def test_echo_and_its_other_name_may_not_contradict():
    for value in (True, False):
        assert refusal(echo=flags(value), exclude_input_in_output=flags(value)) == (
            f"echo: {str(value).lower()} contradicts exclude_input_in_output "
            f"({str(value).lower()}); send one of them"
        )
    message = refusal(
        sampling_parameters=strings('{"echo": true}'), exclude_input_in_output=flags(True)
    )
    assert message.startswith("sampling_parameters: echo: true contradicts")


def test_a_request_without_output_must_request_the_prompt():
    nothing = {"max_tokens": ints(0)}
    for options in (
        {"echo": flags(True)},
        {"exclude_input_in_output": flags(False)},
        {"num_prompt_logprobs": ints(0)},
        {"echo": flags(True), "num_logprobs": ints(1)},
    ):
        assert generation(**nothing, **options).params.max_tokens == 0
    assert refusal(**nothing) == (
        "max_tokens: 0 is out of range; allowed: -1, [1, 2147483647], and 0 with echo or "
        "num_prompt_logprobs"
    )
    assert refusal(sampling_parameters=strings('{"max_tokens": 0, "echo": false}')).startswith(
        "sampling_parameters: max_tokens: 0 is out of range; allowed: -1, [1, "
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": ints(2)}, "n: cannot be combined with max_tokens 0, which generates nothing"),
        ({"best_of": ints(2)}, "best_of: cannot be combined with max_tokens 0"),
        ({"min_tokens": ints(1)}, "min_tokens: 1 is more than max_tokens (0)"),
        (
            {
                "guided_decoding_guide_type": strings("regex"),
                "guided_decoding_guide": strings("a+"),
            },
            "guided_decoding_guide: cannot be combined with max_tokens 0",
        ),
    ],
)
def test_options_about_the_output_are_refused_without_output(options, message):
    found = refusal(max_tokens=ints(0), num_prompt_logprobs=ints(1), **options)
    assert found.startswith(message)


def test_a_prompt_may_fill_the_context_where_nothing_follows():
    whole = {"input_ids": ints(*[1] * 16)}
    assert len(generation(max_tokens=ints(0), echo=flags(True), **whole).prompt_ids) == 16
    assert "your prompt has 16; allowed: 15 and one to generate" in refusal(**whole)
    longer = {"input_ids": ints(*[1] * 17)}
    assert refusal(max_tokens=ints(0), echo=flags(True), **longer).endswith("allowed: 16")


def test_only_a_streamed_and_detokenized_request_is_acknowledged():
    """An answer in one piece gives no sign of life before its end."""
    detokenized = {"prompt_tensor": strings("text_input")}

    def acknowledged(**inputs):
        (request,) = generation(**inputs).requests([5])
        return request.acknowledged

    assert acknowledged(stream=flags(True), **detokenized)
    assert not acknowledged(**detokenized)
    assert not acknowledged(stream=flags(True))


def test_min_length_is_min_tokens():
    assert generation(min_length=ints(3)).params.min_tokens == 3
    assert "min_length: is another name of min_tokens" in refusal(
        min_length=ints(3), min_tokens=ints(3)
    )
    assert refusal(min_length=ints(-3)).startswith("min_length: -3 is out of range")


def test_a_lone_empty_stop_word_means_none():
    """LiteLLM sends it with every request."""
    asked = generation(stop_words=strings(""), bad_words=strings(""))
    assert asked.params.stop_words == ()
    assert asked.params.bad_words == ()
    assert refusal(stop_words=strings("", "x")).startswith("stop_words: a string of 0 bytes")


def test_the_json_dialect_is_merged():
    asked = generation(
        sampling_parameters=strings('{"max_tokens": "7", "stop": "x"}'), temperature=floats(0.5)
    )
    assert asked.params == SamplingParams(max_tokens=7, stop_words=("x",), temperature=0.5)


def test_the_json_dialect_may_not_repeat_a_tensor():
    message = refusal(sampling_parameters=strings('{"min_tokens": 7}'), min_length=ints(7))
    assert message == (
        "sampling_parameters: min_tokens is also set by the tensor min_length; send one of them"
    )


def test_an_error_in_the_json_dialect_names_it():
    message = refusal(sampling_parameters=strings('{"top_p": 7}'))
    assert message.startswith("sampling_parameters: top_p: 7.0 is out of range; allowed: (0.0")
    assert refusal(sampling_parameters=strings('{"n": 65}')).startswith(
        "sampling_parameters: n: 65 is out of range; allowed: 1 to 64"
    )
    assert refusal(sampling_parameters=strings('{"stop_token_ids": [100]}')).startswith(
        "sampling_parameters: stop_token_ids: 100 is not in the vocabulary"
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"n": ints(65)}, "n: 65 is out of range; allowed: 1 to 64"),
        ({"n": ints(0)}, "n: 0 is out of range; allowed: 1 to 64"),
        ({"n": ints(3), "best_of": ints(2)}, "best_of: 2 is less than n (3)"),
        ({"best_of": ints(2), "stream": flags(True)}, "best_of: cannot be combined with stream"),
        ({"n": ints(5), "beam_width": ints(4)}, "n: 5 is more than beam_width (4)"),
        ({"beam_width": ints(17)}, "beam_width: 17 is out of range; allowed: [1, 16]"),
        (
            {"beam_width": ints(4), "stream": flags(True)},
            "stream: cannot be combined with beam_width 4: which outputs are best is known only",
        ),
        (
            {"beam_width": ints(4), "n": ints(2), "best_of": ints(3)},
            "best_of: cannot be combined with beam_width 4: beam_width is the number of beams",
        ),
        (
            {"beam_width": ints(4), "speculation": strings("auto")},
            "speculation: cannot be combined with beam_width 4: a draft is verified",
        ),
        (
            {
                "beam_width": ints(4),
                "guided_decoding_guide_type": strings("regex"),
                "guided_decoding_guide": strings("a+"),
            },
            "guided_decoding_guide_type: cannot be combined with beam_width 4: a grammar",
        ),
        (
            {"beam_width": ints(4), "temperature": floats(0.5)},
            "temperature: requests random sampling",
        ),
        (
            {"sampling_parameters": strings('{"use_beam_search": true, "n": 2, "top_k": 5}')},
            "sampling_parameters: top_k: requests random sampling, which cannot be combined",
        ),
        ({"speculation": strings("fast")}, "speculation: 'fast' is unknown; allowed: auto, off"),
        ({"speculation": strings("17")}, "speculation: '17' is unknown; allowed: auto, off, or 0"),
        ({"guided_decoding_guide": strings("x")}, "guided_decoding_guide_type: is missing"),
        ({"guided_decoding_guide_type": strings("regex")}, "guided_decoding_guide: is missing"),
        ({"guided_decoding_guide_type": strings("pdf")}, "guided_decoding_guide_type: 'pdf'"),
        (
            {
                "guided_decoding_guide_type": strings("json"),
                "ignore_eos": flags(True),
            },
            "ignore_eos: cannot be combined with a grammar, which determines the end",
        ),
        (
            {"priority_class": strings("high")},
            "priority_class: 'high' is unknown; allowed: interactive, batch",
        ),
        ({"deadline_ms": ints(0)}, "deadline_ms: 0 is out of range; allowed: 1 to 86400000"),
        ({"deadline_ms": ints(-5)}, "deadline_ms: -5 is out of range"),
        ({"cache_priority": ints(-1)}, "cache_priority: -1 is out of range; allowed: 0 to 100"),
        ({"cache_priority": ints(101)}, "cache_priority: 101 is out of range; allowed: 0 to 100"),
        (
            {"cache_ttl_s": floats(0)},
            "cache_ttl_s: 0.0 is out of range; allowed: more than 0, up to 2592000",
        ),
        ({"cache_ttl_s": floats(float("nan"))}, "cache_ttl_s: nan is not a finite number"),
        ({"cache_ttl_s": floats(3e6)}, "cache_ttl_s: 3000000.0 is out of range"),
    ],
)
def test_unsupported_features_are_rejected(inputs, message):
    assert refusal(**inputs).startswith(message)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (ints(), "input_ids: the prompt has no tokens"),
        (ints(1, -1), "input_ids: -1 is not in the vocabulary; allowed: 0 to 99"),
        (ints(1, 100), "input_ids: 100 is not in the vocabulary; allowed: 0 to 99"),
        (
            ints(*[1] * 16),
            "input_ids: This model's maximum context length is 16 tokens. However, your prompt "
            "has 16; allowed: 15 and one to generate",
        ),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(ids, message):
    assert refusal(input_ids=ids).startswith(message)


def test_the_longest_prompt_fits():
    assert len(generation(input_ids=ints(*[1] * 15)).prompt_ids) == 15


def test_a_missing_prompt_is_refused():
    with pytest.raises(RequestError, match="input_ids: is missing"):
        parse({"max_tokens": ints(1)}, {}, LIMITS)


def test_an_error_in_a_text_prompt_names_the_text():
    message = refusal(input_ids=ints(*[1] * 20), prompt_tensor=strings("messages"))
    assert message.startswith("messages: This model's maximum context length is 16 tokens.")
    assert (
        refusal(prompt_tensor=strings("x"))
        == "prompt_tensor: allowed: text_input, prompt_token_ids, messages"
    )


def read_back(error):
    return protocol.read_error(contract.PROMPT_ERROR, protocol.write_error(error))


@pytest.mark.parametrize(
    "error",
    [
        RequestError("is empty; allowed: at least one character", "text_input"),
        RequestError('not valid JSON ("\\n\x00\x1f"); allowed: «an array»', "messages"),
        EngineError("the prompt could not be tokenized"),
        ConfigError("chat template: line 1: unexpected end"),
        CapacityError("later"),
    ],
)
def test_the_error_of_a_step_arrives_as_it_was(error):
    found = read_back(error)
    assert type(found) is type(error)
    assert str(found) == str(error)


@pytest.mark.parametrize("character", ["x", "\x00", "\ue000", "🎉", '"'])
def test_the_error_of_a_step_has_a_limit_and_fits_it(character):
    error = RequestError(character * 100_000)
    found = read_back(error)
    assert str(found) == character * protocol.MAX_ERROR_CHARACTERS


def test_the_error_of_a_step_is_unicode():
    found = read_back(RequestError("a \ud800 b"))
    assert str(found) == "a ? b"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 10_000,
        '{"kind": "invalid"}',
        '{"kind": "invalid", "message": 5}',
        '{"kind": "internal", "message": "x"}',
        '{"kind": "__class__", "message": "x"}',
        '{"kind": ["invalid"], "message": "x"}',
        '{"kind": "invalid", "message": "x", "param": "y"}',
        '{"kind": "invalid", "message": "' + "x" * 2049 + '"}',
        '{"kind": "invalid", "message": "x"}' + " " * 20_000,
    ],
)
def test_the_error_of_a_step_that_a_client_sends_is_rejected(text):
    for tensor, message in (
        (contract.PROMPT_ERROR, "prompt_error: is set only by the tokenizers; omit it"),
        (contract.DETOKENIZE_ERROR, "detokenize_error: is set only by the model llm; omit it"),
    ):
        with pytest.raises(RequestError) as caught:
            protocol.read_error(tensor, strings(text))
        assert str(caught.value) == message


def test_the_error_of_a_step_that_is_not_text_is_rejected():
    for array in (np.array([b"\xff"], object), strings("{}", "{}"), ints(5)):
        with pytest.raises(RequestError, match=r"prompt_error: (is not valid UTF-8|has )"):
            protocol.read_error(contract.PROMPT_ERROR, array)


def test_unknown_parameters_are_refused_with_the_nearest_name():
    """Over HTTP they are the keys that no tensor has."""
    assert refusal({"temprature": 1}) == (
        "temprature: is neither an input nor a parameter; did you mean 'temperature'?"
    )
    assert refusal({"xyzzy": 1}) == "xyzzy: is neither an input nor a parameter"


def test_a_parameter_is_an_option_unless_a_tensor_is() -> None:
    def temperature(parameters, **tensors):
        return generation(parameters, **tensors).params.temperature

    own, vllm = {"temperature": 0.25}, {"sampling_parameters": '{"temperature": 0.5}'}
    tensor = np.array([0.75], np.float32)
    assert temperature(own) == 0.25
    assert temperature(own | vllm) == 0.5
    assert temperature(own, sampling_parameters=strings(vllm["sampling_parameters"])) == 0.5
    assert temperature(own, temperature=tensor) == 0.75
    assert generation({"return_log_probs": True}).params.num_logprobs == 0
    assert generation({"seed": "7", "stream": True}).params.seed == 7


def test_a_parameter_out_of_bounds_is_refused_by_its_name() -> None:
    assert refusal({"top_p": 7}).startswith("parameters: top_p: 7.0 is out of range")
    assert refusal({"top_p": "much"}) == 'parameters: top_p is "much"; allowed: a number'


@pytest.mark.parametrize("salt", ["x" * 257, "a\nb", "a\x00", "a\u200b"])
def test_a_salt_is_short_and_printable(salt):
    assert refusal(cache_salt=strings(salt)).startswith("cache_salt: allowed: up to 256 char")


def test_remaining_request_options_are_parsed():
    asked = generation(
        speculation=strings("auto"),
        guided_decoding_guide_type=strings("regex"),
        guided_decoding_guide=strings("a+"),
    )
    (request,) = asked.requests([1])
    assert request.speculation == AUTO_DRAFTS
    assert request.structured.guide == "a+"
    assert generation(speculation=strings("off")).speculation == 0
    assert generation(speculation=strings("3")).speculation == 3
    assert generation().speculation is None


SPECIAL = {"<s>": 1, "[TOOL_CALLS]": 5}


def kept(parameters=None, **inputs):
    limits = protocol.Limits(100, 16, SPECIAL)
    return parse({"input_ids": ints(1), **inputs}, parameters or {}, limits).kept


def test_special_tokens_to_keep_are_named_or_all():
    assert kept() == kept(skip_special_tokens=flags(True)) == frozenset()
    assert kept(skip_special_tokens=flags(False)) == {1, 5}
    assert kept(keep_special_tokens=strings("[TOOL_CALLS]")) == {5}
    assert kept({"skip_special_tokens": False}) == {1, 5}
    vllm = strings('{"skip_special_tokens": false}')
    assert kept(sampling_parameters=vllm) == {1, 5}
    assert kept(sampling_parameters=strings('{"skip_special_tokens": true}')) == frozenset()


def test_a_token_that_is_not_special_cannot_be_kept():
    with pytest.raises(RequestError, match=r"^keep_special_tokens: 'no' is not a special token of"):
        kept(keep_special_tokens=strings("<s>", "no"))
    message = refusal(keep_special_tokens=strings(*["<s>"] * 65))
    assert message.startswith("keep_special_tokens: ") and "64" in message


@pytest.mark.parametrize("outputs", [{}, {"n": ints(3)}, {"n": ints(2), "beam_width": ints(2)}])
def test_class_deadline_and_tenant_are_those_of_all_outputs(outputs):
    asked = generation(
        priority_class=strings("batch"), deadline_ms=ints(250), cache_salt=strings("x"), **outputs
    )
    ids = list(range(7, 7 + asked.best_of))
    found = asked.requests(ids)
    assert {(one.tenant, one.priority_class, one.deadline_ms) for one in found} == {
        ("x", PriorityClass.BATCH, 250)
    }
    assert {one.tenant for one in asked.of_tenant("acme").requests(ids)} == {"acme"}


@pytest.mark.parametrize("outputs", [{}, {"n": ints(3)}, {"n": ints(2), "beam_width": ints(2)}])
def test_all_outputs_are_kept_in_the_cache_as_the_request_says(outputs):
    asked = generation(cache_priority=ints(100), cache_ttl_s=floats(2.5), **outputs)
    found = asked.requests(list(range(7, 7 + asked.best_of)))
    assert {(one.cache_priority, one.cache_ttl_s) for one in found} == {(100, 2.5)}
    (default,) = generation().requests([7])
    assert (default.cache_priority, default.cache_ttl_s) == (35, None)


def test_a_request_is_interactive_and_has_no_deadline_unless_it_says_so():
    (request,) = generation().requests([7])
    assert (request.tenant, request.priority_class, request.deadline_ms) == (
        *("", PriorityClass.INTERACTIVE),
        None,
    )


def test_a_beam_search_is_one_request_with_n_outputs():
    asked = generation(
        n=ints(2),
        beam_width=ints(4),
        length_penalty=floats(0.5),
        early_stopping=flags(True),
        speculation=strings("off"),
        cache_salt=strings("x"),
    )
    assert (asked.n, asked.best_of) == (2, 2)
    (request,) = asked.requests([7, 8])
    assert request.output_ids == (7, 8)
    assert (request.request_id, request.cache_salt, request.acknowledged) == (7, "x", False)
    params = request.params
    assert (params.beam_width, params.length_penalty, params.early_stopping) == (4, 0.5, True)
