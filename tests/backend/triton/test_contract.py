"""A tensor is read as documented, or rejected by name."""

import numpy as np
import pytest

from inflight.errors import RequestError
from inflight.triton import contract
from inflight.triton.contract import Tensor, read, read_request


def strings(*values):
    return np.array(values, object)


def test_a_scalar_is_a_python_value():
    assert read(Tensor("x", "INT32", ""), np.array([7], np.int32)) == 7
    assert read(Tensor("x", "BOOL", ""), np.array([True])) is True
    assert read(Tensor("x", "FP32", ""), np.array([0.5], np.float32)) == 0.5
    assert read(Tensor("x", "UINT64", ""), np.array([2**64 - 1], np.uint64)) == 2**64 - 1
    assert read(Tensor("x", "STRING", ""), strings("grün".encode())) == "grün"


def test_a_list_may_have_any_length():
    words = Tensor("words", "STRING", "", dims=-1)
    assert read(words, strings()) == []
    assert read(words, strings(b"a", b"b")) == ["a", "b"]


def test_values_do_not_change_with_the_array():
    """Triton's arrays are views of shared memory that it takes back."""
    array = np.array([1, 2, 3], np.int32)
    ids = read(contract.INPUT_IDS, array)
    array[:] = 9
    assert ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("tensor", "array", "message"),
    [
        (Tensor("x", "INT32", ""), np.array([1], np.int64), "x: has dtype int64; allowed: INT32"),
        (Tensor("x", "INT32", ""), np.array([1, 2], np.int32), "x: has shape [2]; allowed: [1]"),
        (Tensor("x", "INT32", ""), np.array([[1]], np.int32), "x: has shape [1, 1]; allowed: [1]"),
        (Tensor("x", "INT32", ""), np.array(1, np.int32), "x: has shape []; allowed: [1]"),
        (Tensor("x", "INT32", ""), np.array([], np.int32), "x: has shape [0]; allowed: [1]"),
        (Tensor("x", "INT32", "", dims=-1), np.array([[1]], np.int32), "allowed: [N]"),
        (Tensor("x", "FP32", ""), np.array([np.nan], np.float32), "x: nan is not a finite number"),
        (Tensor("x", "FP32", ""), np.array([-np.inf], np.float32), "x: -inf is not a finite"),
        (Tensor("x", "STRING", ""), strings(b"ok\xff"), "x: is not valid UTF-8 (at byte 2)"),
        (Tensor("x", "STRING", ""), strings("str"), "x: has an element that is not bytes"),
        (Tensor("x", "STRING", "", dims=-1), strings(b"ok", b"\xc3"), "x: is not valid UTF-8"),
    ],
)
def test_disallowed_values_are_rejected_by_name(tensor, array, message):
    with pytest.raises(RequestError) as caught:
        read(tensor, array)
    assert message in str(caught.value)


def test_an_unknown_tensor_is_refused_with_the_nearest_name():
    with pytest.raises(RequestError, match="temprature: is not an input; did you mean 'temper"):
        read_request({"temprature": np.array([1.0], np.float32)})


def test_every_option_has_a_meaning_and_one_name():
    names = [tensor.name for tensor in contract.OPTIONS]
    assert len(set(names)) == len(names)
    assert all(tensor.meaning.endswith(".") for tensor in contract.OPTIONS)
