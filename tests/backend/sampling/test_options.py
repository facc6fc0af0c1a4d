"""The table of options determines the checks."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from inflight.errors import RequestError
from inflight.sampling.options import Option, check_options, option_fields


class Table(msgspec.Struct, frozen=True):
    share: Annotated[float, Option("A share.", low=0.0, high=1.0, open_high=True)] = 0.0
    count: Annotated[
        int | None, Option("A count.", low=1, high=4, allowed="1 to 4", aliases=("number",))
    ] = None
    words: Annotated[tuple[str, ...] | None, Option("Words.", max_items=2, vllm=("w",))] = None
    ids: Annotated[tuple[int, ...], Option("Ids.", max_items=2, token_ids=True)] = ()
    biases: Annotated[
        tuple[tuple[int, float], ...],
        Option(
            "Biases.",
            low=-1.0,
            high=1.0,
            max_items=2,
            token_ids=True,
            tensors=(("bias_ids", "INT32"), ("bias_values", "FP32")),
        ),
    ] = ()
    flag: Annotated[bool, Option("A flag.", vllm=())] = False
    seed: Annotated[int | None, Option("A seed.", datatype="UINT64")] = None


FIELDS = option_fields(Table)


def test_types_follow_from_the_fields() -> None:
    assert {field.name: field.tensors for field in FIELDS} == {
        "share": (("share", "FP32"),),
        "count": (("count", "INT32"), ("number", "INT32")),
        "words": (("words", "STRING"),),
        "ids": (("ids", "INT32"),),
        "biases": (("bias_ids", "INT32"), ("bias_values", "FP32")),
        "flag": (("flag", "BOOL"),),
        "seed": (("seed", "UINT64"),),
    }
    assert [field.name for field in FIELDS if field.is_list] == ["words", "ids", "biases"]
    assert [field.vllm_keys for field in FIELDS[:3]] == [("share",), ("count",), ("w",)]
    assert FIELDS[5].vllm_keys == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.0}, "share: 1.0 is out of range; allowed: [0.0, 1.0)"),
        ({"share": float("nan")}, "share: nan is out of range; allowed: [0.0, 1.0)"),
        ({"count": 5}, "count: 5 is out of range; allowed: 1 to 4"),
        ({"words": ("a", "b", "c")}, "words: 3 strings; allowed: 2"),
        ({"words": ("",)}, "words: a string of 0 bytes; allowed: 1 to 256 bytes each"),
        ({"ids": (1, 2, 3)}, "ids: 3 tokens; allowed: 2"),
        ({"ids": (-1,)}, "ids: -1 is not a token id; allowed: 0 or more"),
        ({"biases": ((1, 2.0),)}, "biases: 2.0 is out of range; allowed: [-1.0, 1.0]"),
        ({"biases": ((-1, 0.5),)}, "biases: -1 is not a token id; allowed: 0 or more"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_options(Table(**values), FIELDS)
    assert str(caught.value) == message


def test_values_within_bounds_and_defaults_pass() -> None:
    check_options(Table(), FIELDS)
    check_options(
        Table(share=0.5, count=4, words=("é" * 128,), ids=(0, 7), biases=((1, -1.0),), flag=True),
        FIELDS,
    )


def test_a_field_without_an_entry_is_a_mistake() -> None:
    class Bare(msgspec.Struct):
        value: int = 0

    with pytest.raises(TypeError, match="value: is not annotated with an Option"):
        option_fields(Bare)
