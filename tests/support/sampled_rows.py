"""Rows of logits sampled on the GPU, and the float64 definition of what they may sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inflight_kernels.ops import sampling
from inflight_kernels.ops.sampling import (
    OK,
    DraftTails,
    LogitBias,
    PenaltyState,
    SamplingInputs,
    SamplingOutputs,
    TokenMasks,
    Workspace,
    greedy_row_params,
    sample,
)
from inflight_kernels.torch_ops import sampling as reference
from inflight_kernels.torch_ops.sampling import XTC

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
