"""Cross products of parameters, of which `make test` runs a part and `make test-long` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def thinned(*factors: Iterable[Any], one_in: int) -> list[Any]:
    """All combinations, for `parametrize`; one in so many is not `long`, and each value is in one.

    Those whose places in the factors add up to a multiple of `one_in`. With three factors and the
    size of the smallest, any two values of different factors meet.

    Args:
        factors: values with ids, in `pytest.param`, or strings and numbers, which are their own.

    Raises:
        ValueError: some value would only be in combinations that are `long`.
    """
    listed = [list(factor) for factor in factors]
    found, seen = [], set()
    for places in itertools.product(*(range(len(factor)) for factor in listed)):
        chosen = [_param(factor[place]) for factor, place in zip(listed, places, strict=True)]
        marks = [mark for one in chosen for mark in one.marks]
        if sum(places) % one_in:
            marks.append(pytest.mark.long)
        else:
            seen |= set(enumerate(places))
        values = [value for one in chosen for value in one.values]
        found.append(pytest.param(*values, id="-".join(one.id for one in chosen), marks=marks))
    if len(seen) < sum(map(len, listed)):
        raise ValueError(f"one_in: {one_in} leaves out values; choose a smaller number")
    return found


def _param(value: Any) -> Any:
    return pytest.param(value, id=str(value)) if isinstance(value, str | int) else value
