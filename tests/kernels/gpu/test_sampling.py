"""Sampling against the float64 reference, and against the CPU's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight_kernels.ops import sampling
from inflight_kernels.ops.sampling import (
    MAX_TOP,
    NO_ALLOWED_TOKENS,
    NOT_FINITE,
    OK,
    DraftTails,
    LogitBias,
    PenaltyState,
    SamplingInputs,
    SamplingOutputs,
    TokenMasks,
    TopLogprobsOutputs,
    Workspace,
    count_output_tokens,
    greedy_row_params,
    mark_prompt_tokens,
    prompt_words,
    sample,
    top_logprobs,
)
from inflight_kernels.torch_ops import sampling as reference
from inflight_kernels.torch_ops.sampling import XTC, Filters

pytestmark = pytest.mark.gpu

RowParamsArray = np.ndarray[tuple[int], np.dtype[np.void]]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around the sizes of a vector, of the candidates and of a slice; models' own.
VOCABULARIES = [1, 7, 300, 2048, 2049, 8192, 8200, 32000, 49152, 50257, 128256, 262144]

KINDS: dict[str, dict[str, list[float]]] = {
    "greedy": {"temperature": [0.0]},
    "plain": {},
    "top_k": {"top_k": [1, 2, 40, 300, 1000]},
    "wide top_k": {"top_k": [1500, 5000]},
    "top_p": {"top_p": [0.01, 0.5, 0.9]},
    "wide top_p": {"top_p": [0.97, 0.9999]},
    "min_p": {"min_p": [1e-6, 0.01, 0.5, 0.999]},
    "top_k, top_p": {"top_k": [20, 200], "top_p": [0.5, 0.95]},
    "all": {"top_k": [50, 1500], "top_p": [0.8, 0.99], "min_p": [0.001, 0.1]},
    "top_p, min_p": {"top_p": [0.9, 0.999], "min_p": [1e-4, 0.05]},
}
# Filters that need another pass over the row.
RARE: dict[str, dict[str, list[float]]] = {
    "typical_p": {"typical_p": [0.05, 0.3, 0.8]},
    "wide typical_p": {"typical_p": [0.97, 0.9999]},
    "top_n_sigma": {"top_n_sigma": [0.3, 1.0, 2.0]},
    "wide top_n_sigma": {"top_n_sigma": [3.5, 5.0, 50.0]},
    "epsilon_cutoff": {"epsilon_cutoff": [0.001, 0.02, 0.9]},
    "wide epsilon_cutoff": {"epsilon_cutoff": [1e-6, 1e-5, 1e-4]},
    "min_p, epsilon_cutoff": {"min_p": [1e-4, 0.1], "epsilon_cutoff": [1e-4, 0.01]},
    # Of a small typical_p the first token is a matter of rounding in one row of 700, and
    # epsilon_cutoff may keep that one alone.
    "typical_p, epsilon_cutoff": {"typical_p": [0.97, 0.99], "epsilon_cutoff": [1e-5, 0.01, 0.9]},
    "epsilon_cutoff, xtc": {
        "epsilon_cutoff": [1e-5, 0.01],
        "xtc_probability": [1.0],
        "xtc_threshold": [1e-4, 0.05],
    },
    "xtc": {"xtc_probability": [0.5, 1.0], "xtc_threshold": [0.0, 0.001, 0.1]},
    "min_p, xtc": {"min_p": [0.02], "xtc_probability": [1.0], "xtc_threshold": [0.005, 0.1]},
    "top_p, xtc": {"top_p": [0.8], "xtc_probability": [1.0], "xtc_threshold": [0.01, 0.1]},
    "top_k, typical_p": {"top_k": [30, 3000], "typical_p": [0.5, 0.9]},
    "sigma, typical_p": {"top_n_sigma": [1.0, 3.0], "typical_p": [0.5, 0.9], "min_p": [0.0, 0.3]},
    "all and rare": {
        "top_n_sigma": [2.0, 4.0],
        "top_k": [200, 5000],
        "typical_p": [0.9, 0.99],
        "top_p": [0.9, 0.99],
        "min_p": [0.001, 0.1],
        "epsilon_cutoff": [0.0, 0.002],
        "xtc_probability": [0.0, 1.0],
        "xtc_threshold": [0.01],
    },
}
ALL = KINDS | RARE

LEAST_MASS = 2.0**-41
"""Relative to the most probable token; tokens below it have no mass in fixed point."""


@dataclass
class Chosen:
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    statuses: npt.NDArray[np.int32]


def random_row_params(rows: int, kind: str, rng: np.random.Generator) -> RowParamsArray:
    row_params = greedy_row_params(rows)
    row_params["temperature"] = rng.choice([0.3, 0.7, 1.0, 1.5, 5.0], rows)
    row_params["seed"] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    for name, values in ALL[kind].items():
        row_params[name] = rng.choice(values, rows)
    return row_params


def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype == sampling.ROW_PARAMS:
        array = array.view(np.uint8).reshape(len(array), array.itemsize)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def positions_of(rows: int) -> npt.NDArray[np.int64]:
    return np.arange(rows, dtype=np.int64) * 2**30 + 5


def inputs_of(row_params: RowParamsArray, **operands: torch.Tensor) -> SamplingInputs:
    """Of rows; `operands` as `shape` names them, any group of them."""
    found: dict[str, Any] = {}
    if "counts" in operands:
        tails = None
        if "tokens" in operands:
            names = ("tokens", "tail_starts", "tail_lengths")
            tails = DraftTails(*(operands[name] for name in names))
        found["penalties"] = PenaltyState(operands["counts"], operands["prompt"], tails)
    if "biases" in operands:
        names = ("bias_starts", "bias_ids", "biases")
        found["logit_bias"] = LogitBias(*(operands[name] for name in names))
    if "masks" in operands:
        found["masks"] = TokenMasks(operands["masks"], operands["mask_rows"])
    positions = on_device(positions_of(len(row_params)))
    return SamplingInputs(on_device(row_params), positions, **found)


def run(
    logits: torch.Tensor,
    row_params: RowParamsArray,
    workspace: Workspace | None = None,
    *,
    filters: bool = True,
    rare: bool = True,
    **operands: torch.Tensor,
) -> Chosen:
    n, vocab_size = logits.shape
    if workspace is None:
        workspace = Workspace(n, vocab_size, "cuda")
        workspace.scratch.fill_(0xA5)
        workspace.found.fill_(12345)
    token_ids = torch.full((n,), -1, device="cuda")
    logprobs = torch.full((n,), torch.nan, device="cuda")
    statuses = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    out = SamplingOutputs(token_ids, logprobs, statuses)
    inputs = inputs_of(row_params, **operands)
    sample(logits, inputs, workspace, out, filters=filters, rare=rare)
    assert not workspace.arrivals.any()
    return Chosen(token_ids.cpu().numpy(), logprobs.cpu().numpy(), statuses.cpu().numpy())


def interval(
    logits: torch.Tensor, row_params: np.void, token_id: int, xtc_u: float, slack: float
) -> tuple[float, float]:
    """The numbers in [0, 1) for which the definition draws a token; (1, 0) if it is cut.

    Args:
        logits: [V] float64.
        row_params: of the row.
        token_id: the token.
        xtc_u: XTC cuts where it is below xtc_probability.
        slack: relative to the filters; what lies on a filter's boundary may go either way.
    """
    vocab_size = len(logits)
    temperature = float(row_params["temperature"])
    values, order = logits.sort(descending=True, stable=True)
    values = values[values > -torch.inf]
    masses = ((values - values[0]) / temperature).exp()
    masses[masses < LEAST_MASS * (1 + slack)] = 0
    top_k, top_p = int(row_params["top_k"]), float(row_params["top_p"])
    typical_p, sigmas = float(row_params["typical_p"]), float(row_params["top_n_sigma"])
    epsilon, xtc = float(row_params["epsilon_cutoff"]), float(row_params["xtc_probability"])
    rare = typical_p < 1 or sigmas > 0 or epsilon > 0 or xtc > 0
    ranked = 0 < top_k < vocab_size or rare
    begin, end = 0, len(values)
    if sigmas > 0:
        least = values[0] - sigmas * (1 + slack) * values.std(correction=0)
        end = int((values >= least).sum())
    if 0 < top_k < vocab_size:
        end = min(end, top_k)
    if typical_p < 1:
        some = masses[:end]
        surprise = (values[0] - values[:end]) / temperature
        distance = (surprise - (some @ surprise) / some.sum()).abs()
        near, nearest = distance.sort(stable=True)
        reached = some[nearest].cumsum(0)
        wanted = min(typical_p * (1 + slack), 1 - 1e-15) * reached[-1]
        furthest = near[torch.searchsorted(reached, wanted)]
        kept = (distance <= furthest * (1 + 1e-7) + 1e-7).nonzero()
        begin, end = int(kept[0]), int(kept[-1]) + 1
    if top_p < 1.0:
        some = masses[begin:end]
        end = begin + int((some.cumsum(0) - some < top_p * (1 + slack) * some.sum()).sum())
        ranked |= end - begin <= 256
    least = float(row_params["min_p"]) * (1 - slack) * masses[begin]
    end = begin + max(int((masses[begin:end] >= least).sum()), 1)
    if epsilon > 0:
        least = epsilon * (1 - slack) * float(masses[begin:end].sum())
        end = begin + max(int((masses[begin:end] >= least).sum()), 1)
    if xtc_u < xtc:
        least = float(row_params["xtc_threshold"]) * float(masses[begin:end].sum())
        least = max(least, LEAST_MASS) * (1 + slack)
        begin += max(int((masses[begin:end] >= least).sum()) - 1, 0)
    ids = order[begin:end]
    if not ranked:
        ids = ids.sort().values
    places = (ids == token_id).nonzero().squeeze(1)
    if ranked and len(places):
        # Scores less than a rounding apart may stand in order of their ids.
        near = (logits[ids] - logits[token_id]).abs() < 4e-7 * temperature
        if len(logits[ids[near]].unique()) > 1:
            places = near.nonzero().squeeze(1)
    if not len(places):
        return 1.0, 0.0
    weights = ((logits[ids] - values[0]) / temperature).exp()
    weights[weights < LEAST_MASS * (1 + slack)] = 0
    sums = weights.cumsum(0) / weights.sum()
    first, last = int(places[0]), int(places[-1])
    return float(sums[first - 1]) if first else 0.0, float(sums[last])


def check_draws(logits: torch.Tensor, row_params: RowParamsArray, chosen: Chosen) -> None:
    """Each token is the one that its row's number falls on, up to rounding."""
    assert (chosen.statuses == OK).all()
    exact = logits.double().cuda()
    for row, position in enumerate(positions_of(len(exact))):
        token_id = int(chosen.token_ids[row])
        if row_params["temperature"][row] == 0:
            assert token_id == int((exact[row] == exact[row].amax()).nonzero()[0])
            continue
        seed = int(row_params["seed"][row])
        u, xtc_u = (reference.uniform(seed, int(position), what) for what in (0, XTC))
        bounds = (
            interval(exact[row], row_params[row], token_id, xtc_u, slack)
            for slack in (0, 1e-6, -1e-6)
        )
        assert any(low - 2e-5 <= u < high + 2e-5 for low, high in bounds), (row, row_params[row], u)


def own_logprobs(logits: torch.Tensor, chosen: Chosen) -> npt.NDArray[np.float64]:
    """Of the tokens that were chosen, by the logits as they came."""
    token_ids = torch.from_numpy(chosen.token_ids).cuda().unsqueeze(1)
    return reference.log_probs(logits.double()).gather(1, token_ids).squeeze(1).cpu().numpy()


# ---------------------------------------------------------------- the right token


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("kind", ALL)
def test_a_row_samples_the_token_at_its_random_number(
    dtype: torch.dtype, vocab_size: int, kind: str
) -> None:
    """bfloat16 logits are equal by the hundred: ids decide between them."""
    rng = np.random.default_rng(vocab_size)
    for spread in (0.5, 3.0, 12.0):
        logits = (torch.randn(12, vocab_size, device="cuda") * spread).to(dtype)
        row_params = random_row_params(12, kind, rng)
        chosen = run(logits, row_params)
        check_draws(logits, row_params, chosen)
        expected = own_logprobs(logits, chosen)
        assert np.abs(chosen.logprobs - expected).max() < 2e-5 * (1 + np.abs(expected).max())


def test_kinds_of_rows_share_a_launch_and_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(2)
    row_params = np.concatenate([random_row_params(20, kind, rng) for kind in ALL])
    rng.shuffle(row_params)
    logits = torch.randn(len(row_params), 32000, device="cuda") * 3
    together = run(logits, row_params)
    check_draws(logits, row_params, together)
    for row in range(0, len(row_params), 17):
        options = logits.clone()
        options[torch.arange(len(row_params), device="cuda") != row] = torch.nan
        alone = run(options, row_params)
        assert alone.token_ids[row] == together.token_ids[row]
        assert alone.logprobs[row] == together.logprobs[row]


def test_the_token_is_the_cpus() -> None:
    rng = np.random.default_rng(3)
    row_params = np.concatenate(
        [random_row_params(60, kind, rng) for kind in KINDS if kind != "greedy"]
    )
    n = len(row_params)
    logits = torch.randn(n, 20000, device="cuda") * 3
    chosen = run(logits, row_params).token_ids
    uniforms = [
        reference.uniform(int(seed), int(position))
        for seed, position in zip(row_params["seed"], positions_of(n), strict=True)
    ]
    expected = reference.draw(
        logits.cpu(),
        row_params["temperature"].astype(np.float64),
        row_params["top_k"].astype(np.int64),
        row_params["top_p"].astype(np.float64),
        row_params["min_p"].astype(np.float64),
        np.array(uniforms),
    )
    assert (chosen == expected.numpy()).mean() > 0.995


def test_the_token_is_the_cpus_with_rare_filters() -> None:
    rng = np.random.default_rng(4)
    row_params = np.concatenate([random_row_params(20, kind, rng) for kind in RARE])
    logits = torch.randn(len(row_params), 5000, device="cuda") * 3
    chosen = run(logits, row_params).token_ids
    differ = 0
    for row, position in enumerate(positions_of(len(row_params)).tolist()):
        fields = {name: row_params[name][row].item() for name in Filters.__dataclass_fields__}
        numbers = (
            reference.uniform(int(row_params["seed"][row]), position, what) for what in (0, XTC)
        )
        temperature = float(row_params["temperature"][row])
        expected = reference.draw_filtered(
            logits[row].cpu(), temperature, Filters(**fields), *numbers
        )
        differ += int(chosen[row]) != expected
    assert differ <= 2


def test_sample_frequencies_match_the_softmax() -> None:
    n, vocab_size = 20000, 16
    logits = torch.linspace(-2, 1, vocab_size, device="cuda").repeat(n, 1)
    row_params = greedy_row_params(n)
    row_params["temperature"] = 1.0
    row_params["seed"] = np.arange(n)
    counts = np.bincount(run(logits, row_params).token_ids, minlength=vocab_size)
    expected = torch.softmax(logits[0].double(), -1).cpu().numpy() * n
    assert ((counts - expected) ** 2 / expected).sum() < 50  # 15 degrees of freedom: p < 2e-5


@pytest.mark.parametrize("vocab_size", [3000, 128256])
def test_ties_in_logits_go_to_the_lowest_token_id(vocab_size: int) -> None:
    logits = torch.zeros(4, vocab_size, device="cuda")
    logits[:, 1000:1300] = 1.0
    row_params = greedy_row_params(4)
    row_params["temperature"] = [0.0, 1.0, 1.0, 0.01]
    row_params["top_k"] = [0, 7, 290, 0]
    chosen = run(logits, row_params).token_ids
    assert chosen[0] == 1000
    assert 1000 <= chosen[1] < 1007
    assert 1000 <= chosen[2] < 1290
    check_draws(logits, row_params, run(logits, row_params))


@pytest.mark.parametrize("kind", ALL)
def test_a_flat_row_and_a_sharp_one(kind: str) -> None:
    """All of the vocabulary in one score, and all of the mass in one token."""
    row_params = random_row_params(8, kind, np.random.default_rng(5))
    for logits in (
        torch.zeros(8, 50000),
        torch.zeros(8, 50000).index_fill_(1, torch.tensor(77), 60),
    ):
        check_draws(logits.cuda(), row_params, run(logits.cuda(), row_params))


# ---------------------------------------------------------------- penalties, biases, masks


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


# ---------------------------------------------------------------- rows without a token


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 8191, 8192, 31999])
def test_a_non_finite_row_is_reported_and_other_rows_continue(broken: float, where: int) -> None:
    logits = torch.randn(6, 32000, device="cuda")
    row_params = greedy_row_params(6)
    row_params["temperature"] = [0, 0, 1, 1, 1, 1]
    row_params["top_k"] = [0, 0, 0, 0, 5, 5]
    expected = run(logits, row_params)
    logits[::2, where] = broken
    chosen = run(logits, row_params)
    assert chosen.statuses.tolist() == [NOT_FINITE, OK] * 3
    assert (chosen.token_ids[1::2] == expected.token_ids[1::2]).all()
    assert (chosen.token_ids[::2] == 0).all()


def test_a_row_with_all_tokens_banned_is_reported() -> None:
    vocab_size = 9000
    logits = torch.randn(2, vocab_size, device="cuda")
    row_params = greedy_row_params(2)
    row_params["temperature"] = [1.0, 0.0]
    starts = torch.tensor([0, vocab_size, 2 * vocab_size - 1], dtype=torch.int32, device="cuda")
    bans = torch.arange(2 * vocab_size - 1, dtype=torch.int32, device="cuda") % vocab_size
    never = torch.full((len(bans),), -torch.inf, device="cuda")
    chosen = run(logits, row_params, bias_starts=starts, bias_ids=bans, biases=never)
    assert chosen.statuses.tolist() == [NO_ALLOWED_TOKENS, OK]
    assert chosen.token_ids[1] == vocab_size - 1


# ---------------------------------------------------------------- how it is called


def test_rows_may_be_strided_and_unaligned() -> None:
    wide = torch.randn(12, 9001 + 100, device="cuda")
    row_params = random_row_params(12, "all", np.random.default_rng(6))
    for first in range(3):
        logits = wide[:, first : first + 9001]
        check_draws(logits, row_params, run(logits, row_params))


def test_it_replays_from_a_graph_with_other_row_params() -> None:
    rng = np.random.default_rng(7)
    n, vocab_size = 32, 32000
    logits = torch.randn(n, vocab_size, device="cuda") * 3
    inputs = inputs_of(greedy_row_params(n))
    workspace = Workspace(n, vocab_size, "cuda")
    token_ids = torch.zeros(n, dtype=torch.int64, device="cuda")
    statuses = torch.zeros(n, dtype=torch.int32, device="cuda")
    out = SamplingOutputs(token_ids, torch.zeros(n, device="cuda"), statuses)

    def step() -> None:
        sample(logits, inputs, workspace, out, pdl=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for kind in ALL:
        row_params = random_row_params(n, kind, rng)
        inputs.row_params.copy_(on_device(row_params))
        logits.normal_().mul_(3)
        graph.replay()
        replayed = token_ids.cpu().numpy()
        assert (replayed == run(logits, row_params, workspace).token_ids).all()
        check_draws(logits, row_params, run(logits, row_params, workspace))


def test_without_filters_one_launch_is_enough() -> None:
    logits = torch.randn(8, 32000, device="cuda")
    row_params = random_row_params(8, "plain", np.random.default_rng(8))
    row_params["temperature"][::2] = 0
    both, one = run(logits, row_params), run(logits, row_params, filters=False)
    assert (both.token_ids == one.token_ids).all()


def test_without_rare_filters_their_pass_is_not_needed() -> None:
    logits = torch.randn(8, 32000, device="cuda")
    row_params = random_row_params(8, "all", np.random.default_rng(9))
    row_params["temperature"][::2] = 0
    row_params["typical_p"][::2] = 0.5  # of a greedy row nothing is asked
    both, two = run(logits, row_params), run(logits, row_params, rare=False)
    assert (both.token_ids == two.token_ids).all()


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    logits = torch.randn(2, 100, device="cuda")
    with pytest.raises(ValueError, match="workspace is for up to 1 rows"):
        run(logits, greedy_row_params(2), Workspace(1, 100, "cuda"))
    with pytest.raises(ValueError, match="row_params"):
        run(logits, greedy_row_params(3))
    ids = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="bias_starts"):
        run(
            logits,
            greedy_row_params(2),
            bias_starts=torch.zeros(2, dtype=torch.int32, device="cuda"),
            bias_ids=ids,
            biases=torch.zeros(1, device="cuda"),
        )
    with pytest.raises(ValueError, match="mask_rows"):
        masks = torch.zeros(1, prompt_words(100), dtype=torch.int32, device="cuda")
        run(logits, greedy_row_params(2), masks=masks, mask_rows=ids)
    with pytest.raises(ValueError, match="logits is "):
        run(logits.double(), greedy_row_params(2))


def test_no_rows_are_no_launch() -> None:
    run(torch.empty(0, 100, device="cuda"), greedy_row_params(0), Workspace(4, 100, "cuda"))


# ---------------------------------------------------------------- the most_probable tokens


@pytest.mark.parametrize("is_given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 8200, 128256, 262144])
def test_top_logprobs_are_in_order(dtype: torch.dtype, vocab_size: int, is_given: bool) -> None:
    """Of bfloat16's many equal logits the first ones come first. Rows' own tokens may be given."""
    rng = np.random.default_rng(vocab_size)
    wanted = np.array([20, -1, 0, 1, 5, 20, 20, 19], np.int32)
    n = len(wanted)
    logits = (torch.randn(n, vocab_size, device="cuda") * 3).to(dtype)
    logits[5] = 1.0
    logits[6, vocab_size // 2] = torch.nan
    row_params = random_row_params(n, "plain", rng)
    row_params["temperature"] = 30.0  # chosen from far below
    workspace = Workspace(n, vocab_size, "cuda")
    token_ids = torch.zeros(n, dtype=torch.int64, device="cuda")
    statuses = torch.zeros(n, dtype=torch.int32, device="cuda")
    sampled = SamplingOutputs(token_ids, torch.zeros(n, device="cuda"), statuses)
    sample(logits, inputs_of(row_params), workspace, sampled)
    ids = torch.full((n, MAX_TOP), -7, dtype=torch.int32, device="cuda")
    logprobs = torch.full((n, MAX_TOP), 7.0, device="cuda")
    own_logprobs = torch.full((n,), 7.0, device="cuda")
    ranks = torch.full((n,), -7, dtype=torch.int32, device="cuda")
    own_tokens, given = token_ids.clone(), None
    if is_given:
        given = torch.from_numpy(rng.integers(0, vocab_size, n)).int().cuda()
        given[[3, 7]] = -1
        own_tokens = torch.where(given < 0, token_ids, given.long())
    out = TopLogprobsOutputs(ids, logprobs, own_logprobs, ranks)
    top_logprobs(logits, on_device(wanted), workspace, sampled, out, given=given, pdl=True)
    assert not workspace.arrivals.any()
    for row, number in enumerate(wanted.tolist()):
        if number < 0:
            assert (ids[row] == -7).all() and ranks[row] == -7, "nothing is written"
            assert own_logprobs[row] == 7.0
            continue
        if row == 6:
            assert (ids[row] == -1).all() and ranks[row] == own_logprobs[row] == 0
            continue
        values = logits[row].double()
        number = min(number, vocab_size)
        order = values.sort(descending=True, stable=True).indices
        assert ids[row, :number].tolist() == order[:number].tolist()
        assert (ids[row, number:] == -1).all() and (logprobs[row, number:] == -torch.inf).all()
        expected = torch.log_softmax(values, -1)
        assert ((logprobs[row, :number].double() - expected[order[:number]]).abs() < 1e-4).all()
        assert abs(float(own_logprobs[row]) - float(expected[own_tokens[row]])) < 1e-4
        assert int(ranks[row]) == int((order == own_tokens[row]).nonzero()) + 1
