"""Events become tensors."""

import json

import msgspec
import numpy as np

from inflight.core.request import Candidate, FinishReason, RequestTiming, TokenEvent
from inflight.errors import EngineError
from inflight.text.detokenize import KEPT
from inflight.triton.protocol import OutputDelta, failure, merge, outputs
from llm_tensors import flags, generation, ints, strings


def test_a_merged_event_equals_that_of_a_single_step():
    first = TokenEvent(5, [1, 2], [9], 2, cumulative_logprob=-1.0, num_cached_tokens=3)
    second = TokenEvent(5, [3], [1, 2], 3, 0, None, -2.0, 3)
    last = TokenEvent(5, [4], [2, 3], 4, 6, FinishReason.STOP, -3.0, 3)
    merged = merge(merge(first, second), last)
    assert merged == TokenEvent(5, [1, 2, 3, 4], [9], 4, 6, FinishReason.STOP, -3.0, 3)


def test_a_merged_event_has_the_candidates_of_both():
    one, two = [[Candidate(1, -0.5, 1, "a")]], [[Candidate(2, -0.25, 1, "b")]]
    first, both = TokenEvent(5, [1], [], 1, candidates=one), one + two
    assert merge(first, TokenEvent(5, [2], [1], 2, candidates=two)).candidates == both


def test_a_merged_event_has_the_logprobs_of_the_whole_prompt():
    one, two = [[], [Candidate(1, -0.5, 1, "a")]], [[Candidate(2, -0.25, 1, "b")]]
    first, both = TokenEvent(5, [], [9], prompt_candidates=one), one + two
    last = TokenEvent(5, [2], [9], 1, prompt_candidates=two)
    merged = merge(first, last)
    assert merged.prompt_candidates == both
    assert (merged.token_ids, merged.window, merged.position) == ([2], [9], 1)


def test_the_prompts_logprobs_are_one_list_with_nothing_for_its_first_token():
    prompt = [[], [Candidate(2, -1.5, 4, "b"), Candidate(7, -0.5, 1, "g")]]
    events = [TokenEvent(5, [7], [], 1), TokenEvent(6, [8], [], 1)]
    parts = [OutputDelta(index, event, []) for index, event in enumerate(events)]
    (text,) = outputs(parts, 2, prompt)["prompt_logprobs"]
    assert json.loads(text) == [
        None,
        {
            "2": {"logprob": -1.5, "rank": 4, "decoded_token": "b"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "g"},
        },
    ]
    assert outputs(parts, 2)["prompt_logprobs"].tolist() == [b""]


def test_logprobs_are_json_in_vllms_form():
    candidates = [
        [Candidate(7, -1.5, 4, " é"), Candidate(3, -0.25, 1, '"'), Candidate(9, -0.5, 2, "\ufffd")],
        [Candidate(8, -0.125, 1, "<|end|>")],
    ]
    event = TokenEvent(5, [7, 8], [], 2, candidates=candidates)
    (text,) = outputs([OutputDelta(0, event, [1, 2, 3])], 3)["logprobs"]
    found = json.loads(text)
    assert found == [
        {
            "7": {"logprob": -1.5, "rank": 4, "decoded_token": " é"},
            "3": {"logprob": -0.25, "rank": 1, "decoded_token": '"'},
            "9": {"logprob": -0.5, "rank": 2, "decoded_token": "\ufffd"},
        },
        {"8": {"logprob": -0.125, "rank": 1, "decoded_token": "<|end|>"}},
    ]
    assert list(found[0]) == ["7", "3", "9"], "the token itself comes first"
    assert outputs([OutputDelta(0, TokenEvent(5, [7], [], 1), [])], 3)["logprobs"].tolist() == [b""]


def test_outputs_have_the_documented_tensors():
    from inflight.triton.contract import MODELS, NUMPY

    event = TokenEvent(5, [7, 8], [6], 12, 3, FinishReason.LENGTH, -2.5)
    arrays = outputs([OutputDelta(0, event, [])], num_input_tokens=4)
    documented = {tensor.name: tensor for tensor in MODELS["llm"].outputs}
    failed = failure(EngineError("x"))
    assert set(arrays) == set(documented) - {"detokenize_error"}
    assert set(failed) == {"detokenize_ids", "detokenize_state", "detokenize_error"}
    for name, array in (*arrays.items(), *failed.items()):
        assert array.dtype == NUMPY[documented[name].datatype]
        assert array.ndim == 1
        assert documented[name].dims in (-1, array.size)
    assert arrays["output_ids"].tolist() == [7, 8]
    assert arrays["detokenize_ids"].tolist() == [6, 7, 8]
    assert arrays["detokenize_state"].tolist() == [3, 1, 3, 1, 5, 12]
    assert arrays["finish_reason"].tolist() == [b"length"]
    assert arrays["num_input_tokens"].tolist() == [4]
    assert arrays["num_output_tokens"].tolist() == [2]
    assert arrays["cumulative_logprob"].tolist() == [-2.5]


def shown(kept, reason=None, echo=()):
    event = TokenEvent(5, [5, 7, 1], [5], 12, finish_reason=reason)
    arrays = outputs([OutputDelta(0, event, list(echo))], 4, kept=kept)
    assert arrays["output_ids"].tolist() == [*echo, 5, 7, 1]
    return arrays["detokenize_ids"].tolist()


def test_special_tokens_that_stay_in_the_text_are_marked_for_the_detokenizer():
    assert shown(frozenset()) == [5, 5, 7, 1]
    assert shown({5}) == [5, 5 + KEPT, 7, 1], "not in the window, which has no text"
    assert shown({1, 5}, FinishReason.LENGTH) == [5, 5 + KEPT, 7, 1 + KEPT]
    assert shown({1, 5}, echo=[1]) == [1, 5 + KEPT, 7, 1 + KEPT], "not in the prompt"


def test_the_token_that_ends_an_output_is_not_in_its_text():
    assert shown({1, 5}, FinishReason.STOP) == [5, 5 + KEPT, 7, 1]


def test_an_echoed_prompt_leads_and_is_not_counted():
    arrays = outputs([OutputDelta(0, TokenEvent(5, [7], [3], 1), [1, 2, 3])], num_input_tokens=3)
    assert arrays["output_ids"].tolist() == [1, 2, 3, 7]
    assert arrays["detokenize_ids"].tolist() == [1, 2, 3, 7]
    assert arrays["detokenize_state"].tolist() == [4, 0, 0, 0, 5, 1]
    assert arrays["num_output_tokens"].tolist() == [1]
    assert arrays["finish_reason"].tolist() == [b""]


# ---------------------------------------------------------------- several outputs


def test_outputs_of_one_prompt_are_siblings_with_seeds_in_a_row():
    asked = generation(n=ints(3), seed=np.array([2**64 - 2], np.uint64), cache_salt=strings("x"))
    requests = asked.requests([7, 8, 9])
    assert [request.request_id for request in requests] == [7, 8, 9]
    assert [request.params.seed for request in requests] == [2**64 - 2, 2**64 - 1, 0]
    assert [request.sibling for request in requests] == [None, 7, 7]
    assert {request.cache_salt for request in requests} == {"x"}


def test_only_the_first_of_several_outputs_has_prompt_logprobs():
    asked = generation(n=ints(2), num_prompt_logprobs=ints(1), num_logprobs=ints(0))
    first, second = asked.requests([7, 8])
    assert first.params == asked.params
    assert second.params.num_prompt_logprobs is None
    assert second.params.num_logprobs == 0


def test_several_outputs_are_one_response_in_their_order():
    asked = generation(n=ints(2))
    ends = {"finish_reason": FinishReason.STOP}
    first = TokenEvent(5, [7, 8], [6], 12, 3, cumulative_logprob=-2.5, **ends)
    second = TokenEvent(6, [9], [], 1, cumulative_logprob=-0.5, num_drafted=4, num_steps=1, **ends)
    arrays = outputs(asked.answer([OutputDelta(1, second, []), OutputDelta(0, first, [])]), 3)
    assert arrays["index"].tolist() == [0, 1]
    assert arrays["output_ids"].tolist() == [7, 8, 9]
    assert arrays["num_output_tokens"].tolist() == [2, 1]
    assert arrays["detokenize_ids"].tolist() == [6, 7, 8, 9]
    assert arrays["detokenize_state"].tolist() == [3, 1, 3, 1, 5, 12, 1, 0, 0, 1, 6, 1]
    assert arrays["cumulative_logprob"].tolist() == [-2.5, -0.5]
    assert arrays["num_input_tokens"].tolist() == [3]
    plain, drafted = arrays["draft_stats"].tolist()
    assert plain == b""
    assert json.loads(drafted)["num_drafted"] == 4


def test_the_best_outputs_have_the_highest_mean_logprobs():
    asked = generation(n=ints(2), best_of=ints(3))
    events = {
        output: TokenEvent(output, [1] * length, [], length, cumulative_logprob=logprob)
        for output, (length, logprob) in enumerate([(4, -4.0), (10, -5.0), (1, -0.6)])
    }
    chosen = asked.answer([OutputDelta(output, event, []) for output, event in events.items()])
    assert [(part.output, part.event.request_id) for part in chosen] == [(0, 1), (1, 2)]


def test_the_outputs_of_a_beam_search_keep_the_order_of_the_engine():
    asked = generation(n=ints(2), beam_width=ints(4))
    parts = [
        OutputDelta(1, TokenEvent(8, [1], position=1, cumulative_logprob=-1.0), []),
        OutputDelta(0, TokenEvent(7, [1, 2], position=2, cumulative_logprob=-4.0), []),
    ]
    assert [part.output for part in asked.answer(parts)] == [0, 1]


def test_timing_is_reported_with_and_without_drafts():
    asked = generation(return_timing=flags(True))
    assert [one.return_timing for one in asked.requests([7])] == [True]
    assert [one.return_timing for one in generation().requests([7])] == [False]
    numbers = dict.fromkeys(RequestTiming.__struct_fields__, 0)
    timing = RequestTiming(**numbers | {"queue_s": 1.5, "energy_j": None})
    end = TokenEvent(7, [5], [], 1, finish_reason=FinishReason.STOP, timing=timing)
    drafted = msgspec.structs.replace(end, num_drafted=4, num_steps=1)
    for event, has_drafts in ((end, False), (drafted, True)):
        (text,) = outputs([OutputDelta(0, event, [])], 3)["draft_stats"].tolist()
        found = json.loads(text)
        assert found["timing"]["queue_s"] == 1.5 and found["timing"]["energy_j"] is None
        assert ("num_drafted" in found) == has_drafts


def test_the_stop_word_is_reported_with_the_timing():
    timing = RequestTiming(**dict.fromkeys(RequestTiming.__struct_fields__, 0))
    end = TokenEvent(7, [5], [], 1, finish_reason=FinishReason.STOP, stop_word="x", timing=timing)
    (text,) = outputs([OutputDelta(0, end, [])], 3)["draft_stats"].tolist()
    assert json.loads(text)["stop_word"] == "x"
    for one in ({"stop_word": ""}, {"timing": None, "num_drafted": 4, "num_steps": 1}):
        event = msgspec.structs.replace(end, **one)
        (text,) = outputs([OutputDelta(0, event, [])], 3)["draft_stats"].tolist()
        assert "stop_word" not in json.loads(text)
