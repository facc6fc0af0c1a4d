"""Penalties, biases and masks of rows that are sampled, against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from inflight_kernels.ops.sampling import (
    count_output_tokens,
    greedy_row_params,
    mark_prompt_tokens,
    prompt_words,
)
from inflight_kernels.torch_ops import sampling as reference
from sampled_rows import (
    ALL,
    DTYPES,
    RowParamsArray,
    check_draws,
    on_device,
    own_logprobs,
    random_row_params,
    run,
)

pytestmark = pytest.mark.gpu


@dataclass
class Shaped:
    """Rows whose logits are shaped: operands of `sample`, and what comes of it."""

    operands: dict[str, torch.Tensor]
    logits: torch.Tensor


def shape(logits: torch.Tensor, row_params: RowParamsArray, rng: np.random.Generator) -> Shaped:
    """Give rows penalties (into the row_params), drafted tokens, biases, bans and masks."""
    n, vocab_size = logits.shape
    slots = 5
    row_params["repetition_penalty"] = rng.choice([1.0, 0.8, 1.3], n)
    row_params["presence_penalty"] = rng.choice([0.0, -1.0, 0.5], n)
    row_params["frequency_penalty"] = rng.choice([0.0, -0.1, 0.25], n)
    row_params["slot"] = rng.integers(-1, slots, n)
    prompt = torch.zeros(slots, prompt_words(vocab_size), dtype=torch.int32, device="cuda")
    counts = torch.zeros(slots, vocab_size, dtype=torch.int16, device="cuda")
    prompt_tokens = rng.integers(0, slots, 4000).astype(np.int32), rng.integers(0, vocab_size, 4000)
    output_tokens = rng.integers(0, slots, 2000).astype(np.int32), rng.integers(0, vocab_size, 2000)
    mark_prompt_tokens(on_device(prompt_tokens[0]), on_device(prompt_tokens[1]), prompt, vocab_size)
    count_output_tokens(on_device(output_tokens[0]), on_device(output_tokens[1]), counts)

    most_probable = logits.float().argmax(-1).cpu().numpy()
    tokens = rng.integers(0, vocab_size, 300)
    tokens[:n] = most_probable  # drafts that matter
    tail_starts = rng.integers(0, 200, n).astype(np.int32)
    tail_lengths = rng.choice([0, 0, 1, 2, 7], n).astype(np.int32)
    tail_starts[::3] = np.arange(n, dtype=np.int32)[::3]
    biases: list[dict[int, float]] = []
    for row in range(n):
        ids = [int(most_probable[row]), *rng.integers(0, vocab_size, 5).tolist(), vocab_size + 3]
        values = rng.choice([-np.inf, -3.0, 2.5], len(ids))
        biases.append(dict(sorted(zip(ids, values.tolist(), strict=True))) if row % 3 else {})
    starts = np.cumsum([0, *map(len, biases)]).astype(np.int32)
    allowed = rng.random((2, vocab_size)) < 0.5
    allowed[:, most_probable[0]] = True
    packed = np.zeros((2, prompt_words(vocab_size) * 4), np.uint8)
    bits = np.packbits(allowed, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    mask_rows = rng.choice([-1, -1, 0, 1], n).astype(np.int32)

    shaped = logits.float().cpu().clone()
    for row in range(n):
        slot = row_params["slot"][row]
        if slot >= 0:
            tail = tokens[tail_starts[row] :][: tail_lengths[row]]
            output = np.concatenate([output_tokens[1][output_tokens[0] == slot], tail])
            output_ids, output_counts = np.unique(output, return_counts=True)
            reference.apply_penalties(
                shaped[row],
                np.union1d(output_ids, prompt_tokens[1][prompt_tokens[0] == slot]),
                output_ids,
                output_counts,
                reference.Penalties(
                    float(row_params["repetition_penalty"][row]),
                    float(row_params["presence_penalty"][row]),
                    float(row_params["frequency_penalty"][row]),
                ),
            )
        known = {id_: bias for id_, bias in biases[row].items() if id_ < vocab_size}
        if known:
            reference.add_biases(shaped[row], list(known), list(known.values()))
        if mask_rows[row] >= 0:
            reference.allow_only(
                shaped[row], torch.from_numpy(np.flatnonzero(allowed[mask_rows[row]]))
            )
    operands = {
        "counts": counts,
        "prompt": prompt,
        "tokens": on_device(tokens),
        "tail_starts": on_device(tail_starts),
        "tail_lengths": on_device(tail_lengths),
        "bias_starts": on_device(starts),
        "bias_ids": on_device(np.array([id_ for one in biases for id_ in one], np.int32)),
        "biases": on_device(
            np.array([bias for one in biases for bias in one.values()], np.float32)
        ),
        "masks": on_device(packed.view(np.int32)),
        "mask_rows": on_device(mask_rows),
    }
    return Shaped(operands, shaped)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [300, 8200, 50257, 128256])
def test_logit_adjustments_are_applied_first(dtype: torch.dtype, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    row_params = np.concatenate([random_row_params(6, kind, rng) for kind in ALL])
    n = len(row_params)
    logits = (torch.randn(n, vocab_size, device="cuda") * 3).to(dtype)
    shaped = shape(logits, row_params, rng)
    chosen = run(logits, row_params, **shaped.operands)
    check_draws(shaped.logits, row_params, chosen)
    expected = own_logprobs(logits, chosen)
    assert np.abs(chosen.logprobs - expected).max() < 1e-3, "of the logits as they came"


def test_each_way_of_shaping_works_without_the_others() -> None:
    rng = np.random.default_rng(11)
    row_params = random_row_params(12, "top_k", rng)
    logits = torch.randn(12, 20000, device="cuda") * 3
    full = shape(logits, row_params, rng).operands
    plain = row_params.copy()
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "slot"):
        plain[name] = greedy_row_params(12)[name]
    for names in (
        ("counts", "prompt"),
        ("counts", "prompt", "tokens", "tail_starts", "tail_lengths"),
        ("bias_starts", "bias_ids", "biases"),
        ("masks", "mask_rows"),
    ):
        some = {name: full[name] for name in names}
        own_params = row_params if "counts" in names else plain
        chosen = run(logits, own_params, **some)
        nothing = {
            "tail_lengths": torch.zeros(12, dtype=torch.int32, device="cuda"),
            "bias_starts": torch.zeros(13, dtype=torch.int32, device="cuda"),
            "mask_rows": torch.full((12,), -1, dtype=torch.int32, device="cuda"),
        }
        rest = {name: nothing.get(name, value) for name, value in full.items() if name not in names}
        assert (run(logits, own_params, **some, **rest).token_ids == chosen.token_ids).all()


def test_many_biases_find_their_tokens() -> None:
    """As many as a request may have and more, side by side in one slice and over all of them."""
    rng = np.random.default_rng(12)
    vocab_size = 128256
    logits = torch.randn(3, vocab_size, device="cuda")
    lists = [
        np.arange(1000, 3000),
        np.sort(rng.choice(vocab_size, 3000, replace=False)),
        np.arange(vocab_size - 10, vocab_size),
    ]
    values = [rng.standard_normal(len(ids)).astype(np.float32) * 9 for ids in lists]
    shaped = logits.cpu().clone()
    for row, (ids, some) in enumerate(zip(lists, values, strict=True)):
        reference.add_biases(shaped[row], ids.tolist(), some.tolist())
    row_params = random_row_params(3, "plain", rng)
    chosen = run(
        logits,
        row_params,
        bias_starts=on_device(np.cumsum([0, *map(len, lists)]).astype(np.int32)),
        bias_ids=on_device(np.concatenate(lists).astype(np.int32)),
        biases=on_device(np.concatenate(values)),
    )
    check_draws(shaped, row_params, chosen)


def test_concurrent_counts_are_exact_and_saturate() -> None:
    for vocab_size in (10, 11):
        counts = torch.zeros(3, vocab_size, dtype=torch.int16, device="cuda")
        counts[1, 4] = 32760
        slots = torch.tensor([0, 1, 1, 2, -1], dtype=torch.int32, device="cuda").repeat(500)
        ids = torch.tensor([3, 4, 5, vocab_size - 1, 2], device="cuda").repeat(500)
        count_output_tokens(slots, ids, counts)
        expected = torch.zeros(3, vocab_size, dtype=torch.int16)
        expected[0, 3] = expected[1, 5] = expected[2, vocab_size - 1] = 500
        expected[1, 4] = 32767
        assert torch.equal(counts.cpu(), expected)
