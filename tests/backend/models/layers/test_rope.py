"""The frequencies are those that transformers computes from the same settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inflight.models.layers.rope import inverse_frequencies, rope_order
from inflight.models.spec import RopeSpec
from inflight_kernels.torch_ops.transformer import rotary_tables


def expected(
    parameters: dict[str, Any], head_dim: int, max_position: int, seq_len: int | None = None
) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters=parameters,
    )
    function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, factor = function(config, torch.device("cpu"), seq_len)
    return frequencies.numpy(), factor


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (
            RopeSpec(5e5, "linear", 8.0),
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        ),
        (
            RopeSpec(5e5, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (RopeSpec(1e6, "yarn", 4.0, 4096), YARN | {"factor": 4.0}),
        (
            RopeSpec(1e6, "yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
            YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        ),
        (
            RopeSpec(1e6, "yarn", 4.0, 4096, attention_factor=1.25),
            YARN | {"factor": 4.0, "attention_factor": 1.25},
        ),
        (
            RopeSpec(1e6, "yarn", 16.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=False),
            YARN | {"factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        ),
        (RopeSpec(1e6, "yarn", 0.5, 4096), YARN | {"factor": 0.5}),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_scaling_equals_that_of_transformers(
    rope: RopeSpec, parameters: dict[str, Any], head_dim: int
) -> None:
    frequencies, factor = inverse_frequencies(rope, head_dim, 32768)
    theirs, their_factor = expected(parameters, head_dim, 32768)
    np.testing.assert_allclose(frequencies, theirs, rtol=2e-6)
    assert factor == pytest.approx(their_factor)


@pytest.mark.parametrize("length", [100, 2048, 2049, 5000, 8192])
def test_dynamic_scaling_follows_the_length(length: int) -> None:
    rope = RopeSpec(10000.0, "dynamic", 4.0, 2048)
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    frequencies, factor = inverse_frequencies(rope, 64, length)
    theirs, _ = expected(parameters, 64, 2048, length)
    np.testing.assert_allclose(frequencies, theirs, rtol=2e-6)
    assert factor == 1.0
    plain, _ = inverse_frequencies(RopeSpec(10000.0), 64, length)
    assert np.array_equal(frequencies, plain) == (length <= 2048)


def test_divisors_of_a_checkpoint_divide() -> None:
    divisors = tuple(float(i + 1) for i in range(16))
    frequencies, _ = inverse_frequencies(RopeSpec(divisors=divisors), 32, 64)
    plain, _ = inverse_frequencies(RopeSpec(), 32, 64)
    np.testing.assert_allclose(frequencies * np.array(divisors), plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("rotary_dim", "adjacent", "order"),
    [
        (0, False, None),
        (0, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (4, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (4, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_columns_are_ordered_so_that_each_is_rotated_with_the_one_half_a_head_further(
    rotary_dim: int, adjacent: bool, order: list[int] | None
) -> None:
    assert rope_order(RopeSpec(rotary_dim=rotary_dim), 8, adjacent) == order


def test_columns_beyond_the_rotated_ones_are_neither_rotated_nor_scaled() -> None:
    rope = RopeSpec(1e4, "yarn", 4.0, 64, attention_factor=1.25, rotary_dim=16)
    frequencies, factor = inverse_frequencies(rope, 32, 64)
    cos, sin = rotary_tables(frequencies, 5, factor)
    untouched = [*range(8, 16), *range(24, 32)]
    assert (cos[:, untouched] == 1).all() and (sin[:, untouched] == 0).all()
    assert (cos[0, :8] == 1.25).all()


def test_no_rope_rotates_nothing() -> None:
    frequencies, factor = inverse_frequencies(RopeSpec(type="none"), 16, 64)
    assert not frequencies.any() and factor == 1.0


@pytest.mark.parametrize(("max_len", "divisor"), [(64, 2.0), (65, 8.0)])
def test_longrope_depends_on_the_maximum_length(max_len: int, divisor: float) -> None:
    rope = RopeSpec(
        1e4,
        "longrope",
        4.0,
        64,
        divisors=(2.0,) * 8,
        long_divisors=(8.0,) * 8,
    )
    plain, _ = inverse_frequencies(RopeSpec(1e4), 16, max_len)
    frequencies, factor = inverse_frequencies(rope, 16, max_len)
    np.testing.assert_array_equal(frequencies, plain / np.float32(divisor))
    assert factor == pytest.approx((1 + np.log(4.0) / np.log(64)) ** 0.5)
