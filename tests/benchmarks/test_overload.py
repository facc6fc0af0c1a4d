"""Rates, refusals and recovery, as the benchmark of an overload computes them."""

from __future__ import annotations

from typing import Any

import pytest
from tritonclient.grpc import service_pb2

import overload
from relay import Exchange

REFUSED = "8 requests are waiting (max_waiting is 8); retry in 2 s"


def served(sent: float, ttft_s: float = 0.1, itl_s: float = 0.1) -> Exchange:
    """With five responses."""
    first = sent + ttft_s
    last = first + 4 * itl_s
    return Exchange(sent, first, last, ended=last, num_responses=5)


def refused(sent: float, seconds: float = 0.02, error: str = REFUSED) -> Exchange:
    return Exchange(sent, ended=sent + seconds, error=error)


def test_a_request_counts_with_the_share_of_its_output_within_the_window() -> None:
    one = served(1.0)  # from 1.1 to 1.5
    windows = [(0.0, 2.0), (1.3, 2.0), (0.0, 1.2), (1.6, 2.0), (0.0, 1.0)]
    shares = [one.share_within(*window) for window in windows]
    assert shares == pytest.approx([1.0, 0.5, 0.25, 0.0, 0.0])


def test_rates_are_those_after_the_first_fifth() -> None:
    exchanges = [one for second in range(11) for one in (served(second), refused(second))]
    found = overload.figures(exchanges, num_output=16)
    assert (found["seconds"], found["refused"]) == (8.0, 9)
    # The request that is sent at the end has its output after it.
    assert (found["served_per_s"], found["out_tok_s"]) == (1.0, 16.0)
    assert (found["ttft_p50_ms"], found["refusal_p99_ms"]) == (100.0, 20.0)
    assert found["errors"] == {}


def test_other_errors_and_requests_without_an_answer_are_no_refusals() -> None:
    exchanges = [served(0.0), refused(1.0, error="the engine stopped"), Exchange(2.0), served(3.0)]
    found = overload.figures(exchanges, num_output=16)
    assert found["errors"] == {"the engine stopped": 1, "no answer": 1}


def test_normal_is_a_probe_with_ttft_and_itl_as_before() -> None:
    before = [served(0.0), served(1.0)]
    probes = [served(9.0), served(10.5, ttft_s=0.2), served(11.5, itl_s=0.2), served(12.5)]
    assert overload.normal_after(10.0, [refused(10.2), *probes], before) == 3.0
    assert overload.normal_after(10.0, probes[:3], before) is None


def overloaded(**changes: Any) -> dict[str, Any]:
    found = {"served_per_s": 9.0, "refused": 5, "errors": {}, "probe_errors": {}, "not_ready": {}}
    return {**found, "normal_after_s": 9.0, **changes}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "must"),
        ({"served_per_s": 8.9}, "below"),
        ({"refused": 0}, "below"),
        ({"errors": {"the engine stopped": 1}}, "below"),
        ({"not_ready": {"llm is not ready": 1}}, "below"),
        ({"normal_after_s": 10.1}, "below"),
        ({"normal_after_s": None}, "below"),
    ],
)
def test_an_overload_is_judged_by_goodput_refusals_errors_and_recovery(
    changes: dict[str, Any], verdict: str
) -> None:
    found = overload.judge(overloaded(**changes), 10.0)
    assert found["verdict"] == verdict


def test_an_error_ends_a_request_and_an_empty_final_response_too() -> None:
    one, other = Exchange(0.0), Exchange(0.0)
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name="text_output")
    assert not one.receive(response)
    final = service_pb2.ModelStreamInferResponse()
    final.infer_response.parameters["triton_final_response"].bool_param = True
    assert one.receive(final)
    assert one.is_served and one.num_responses == 1
    assert not other.receive(service_pb2.ModelStreamInferResponse(error_message=REFUSED))
    assert other.ended is not None and not other.is_served
