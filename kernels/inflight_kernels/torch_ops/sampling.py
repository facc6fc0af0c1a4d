"""Sampling in torch: the reference implementation, and the one for `device: cpu`.

Shapes: n rows of logits, V vocabulary. Logits are float32 and not modified unless documented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

OK, NOT_FINITE, NO_ALLOWED_TOKENS = 0, 1, 2
"""Statuses: a token was sampled; the logits have NaN or infinity; all tokens are banned."""

# ---------------------------------------------------------------- logit adjustments


def finite_rows(logits: Tensor) -> Tensor:
    """[n] bool: rows of logits [n, V] without NaN and infinity."""
    # A sum detects either at a fraction of the cost of testing each; as a sum may overflow by
    # itself, a hit is verified.
    finite = torch.isfinite(logits.sum(-1))
    if not bool(finite.all()):
        finite = torch.isfinite(logits).all(-1)
    return finite


def log_probs(logits: Tensor) -> Tensor:
    """log softmax over the vocabulary: [n, V] -> [n, V]."""
    return torch.log_softmax(logits, -1)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties for tokens that occurred before; the defaults change nothing.

    Attributes:
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt
            or the output (arXiv:1909.05858).
        presence_penalty: subtracted once from each token of the output.
        frequency_penalty: subtracted for each occurrence in the output.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def apply_penalties(
    row: Tensor, seen_ids: Ints, output_ids: Ints, output_counts: Ints, penalties: Penalties
) -> None:
    """Apply penalties to tokens that occurred before, in place.

    Args:
        row: [V] logits.
        seen_ids: distinct tokens of prompt and output.
        output_ids, output_counts: distinct tokens of the output and their number of occurrences.
    """
    repetition = penalties.repetition_penalty
    presence, frequency = penalties.presence_penalty, penalties.frequency_penalty
    if repetition != 1.0 and len(seen_ids):
        ids = torch.from_numpy(seen_ids)
        logits = row[ids]
        row[ids] = torch.where(logits > 0, logits / repetition, logits * repetition)
    if (presence or frequency) and len(output_ids):
        penalty = presence + frequency * torch.from_numpy(output_counts)
        row[torch.from_numpy(output_ids)] -= penalty.to(row.dtype)


def add_biases(row: Tensor, token_ids: Sequence[int], biases: Sequence[float]) -> None:
    """Add to the logits of distinct tokens in row [V], in place; -inf bans."""
    row[torch.tensor(token_ids)] += torch.tensor(biases, dtype=row.dtype)


def allow_only(row: Tensor, token_ids: Tensor) -> None:
    """Ban all tokens of row [V] but those of token_ids [m] int64, in place."""
    kept = row[token_ids]
    row.fill_(float("-inf"))
    row[token_ids] = kept


# ---------------------------------------------------------------- sampling

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words of a counter and a key (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low = c0 * _PHILOX_MULTIPLIERS[0]
        high = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _WORD, (low >> 32) ^ c3 ^ k1, low & _WORD
        k0 = (k0 + _PHILOX_WEYL[0]) & _WORD
        k1 = (k1 + _PHILOX_WEYL[1]) & _WORD
    return c0, c1, c2, c3


DRAW, XTC = 0, 1
"""Purpose of a random number: numbers for different purposes are independent."""


def uniform(seed: int, position: int, purpose: int = DRAW) -> float:
    """The random number in [0, 1) of a seed (64 bit) at a token position.

    It depends on nothing else, so a sequence samples the same in any batch and after a restart.
    52 bits: u * total is then always below total, whatever the rounding.
    """
    words = philox((position & _WORD, position >> 32, purpose, 0), (seed & _WORD, seed >> 32))
    return float(((words[0] << 32 | words[1]) >> 12) * 2.0**-52)


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of each row: [n, V] -> [n]."""
    return logits.argmax(-1)


def top(values: Tensor, n: int) -> Tensor:
    """Ids of the n largest of values [V] in order; equal ones are ordered by id."""
    n = min(n, len(values))
    if n == 0:
        return torch.empty(0, dtype=torch.int64)
    ids = torch.nonzero(values >= values.topk(n).values[-1]).squeeze(1)
    order = values[ids].sort(descending=True, stable=True).indices[:n]
    return ids[order]


def rank(values: Tensor, token_id: int) -> int:
    """The rank, from 1, of a token in that order."""
    value = values[token_id]
    return int((values > value).sum()) + int((values[:token_id] == value).sum()) + 1


# Most nuclei and nearly all top_k are within this many most probable tokens; finding those costs a
# fraction of a sort.
_PREFIX = 256


# Relative to the most probable token. Less probable ones have no mass in the kernels' integers, and
# none here: otherwise XTC, which keeps the least probable token, would differ.
_LEAST_MASS = 2.0**-41


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of the tokens that a row samples from; the defaults remove nothing.

    Each filter applies to the tokens that those before it kept, in this order: top_n_sigma, top_k,
    typical_p, top_p, min_p, epsilon_cutoff, XTC.

    Attributes:
        top_n_sigma: > 0: keep logits at most so many standard deviations, of all logits that are
            not -inf, below the largest (arXiv:2411.07641). 0 keeps all.
        top_k: keep the k most probable tokens; 0 or less keeps all.
        typical_p: in (0, 1]; keep the tokens whose surprisal is closest to its mean, as few as have
            this probability together, and all that are as close as the last of these
            (arXiv:2202.00666).
        top_p: in (0, 1]; keep the fewest most probable tokens with this cumulative probability.
        min_p: in [0, 1); keep tokens with at least this probability, relative to the top token
            (arXiv:2407.01082).
        epsilon_cutoff: in [0, 1); keep tokens with at least this probability among those that are
            left, and always the most probable of these (Hewitt et al., arXiv:2210.15191).
        xtc_threshold, xtc_probability: with this probability, of the tokens with at least the
            threshold's probability keep only the least probable, and keep all below (p-e-w,
            "Exclude Top Choices", text-generation-webui 6335).
    """

    top_n_sigma: float = 0.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    epsilon_cutoff: float = 0.0
    xtc_threshold: float = 0.1
    xtc_probability: float = 0.0


def draw_filtered(
    logits: Tensor, temperature: float, filters: Filters, u: float, xtc_u: float
) -> int:
    """Sample from a row of logits [V] with any filters; the CDF is in descending probability.

    The tokens left after each filter are a range of those sorted by probability.

    Args:
        logits: [V]; at least one is finite, the others may be -inf.
        temperature: > 0.
        filters: which tokens to keep.
        u: in [0, 1), for the draw.
        xtc_u: in [0, 1): XTC applies if it is below xtc_probability.
    """
    order = logits.sort(descending=True, stable=True)
    ids = order.indices.numpy()
    values = order.values.double().numpy()
    values = values[values > -np.inf]
    first, end = 0, len(values)
    if filters.top_n_sigma > 0.0:
        end = int((values >= values[0] - filters.top_n_sigma * values.std()).sum())
    if 0 < filters.top_k < len(logits):
        end = min(end, filters.top_k)
    surprise = (values[0] - values) / temperature
    masses = np.exp(-surprise)
    masses[masses < _LEAST_MASS] = 0.0
    if filters.typical_p < 1.0:
        mean = float(masses[:end] @ surprise[:end] / masses[:end].sum())
        distance = np.abs(surprise[:end] - mean)
        nearest = np.argsort(distance, kind="stable")
        reached = masses[nearest].cumsum()
        last = int(np.searchsorted(reached, filters.typical_p * reached[-1]))
        kept = np.flatnonzero(distance <= distance[nearest[min(last, end - 1)]])
        first, end = int(kept[0]), int(kept[-1]) + 1
    if filters.top_p < 1.0:
        kept = masses[first:end]
        end = first + int((kept.cumsum() - kept < filters.top_p * kept.sum()).sum())
    if filters.min_p > 0.0:
        end = first + int((masses[first:end] >= filters.min_p * masses[first]).sum())
    if filters.epsilon_cutoff > 0.0:
        kept = masses[first:end]
        end = first + max(int((kept >= filters.epsilon_cutoff * kept.sum()).sum()), 1)
    if xtc_u < filters.xtc_probability:
        kept = masses[first:end]
        least = max(filters.xtc_threshold * kept.sum(), _LEAST_MASS)
        first += max(int((kept >= least).sum()) - 1, 0)
    cdf = masses[first:end].cumsum()
    return int(ids[first + np.searchsorted(cdf, u * cdf[-1], side="right")])


def draw(
    logits: Tensor,
    temperature: Floats,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
    uniforms: Floats,
) -> Tensor:
    """Sample one token per row: temperature, top_k, top_p, min_p, then inversion of the CDF.

    Rows are independent. The CDF is in descending probability if top_k or top_p apply, otherwise in
    order of token ids.

    Args:
        logits: [n, V]; -inf is never sampled; each row has at least one finite logit.
        temperature: [n], > 0.
        top_k: [n]; keep the k most probable tokens; 0 or less keeps all.
        top_p: [n], in (0, 1]; keep the fewest most probable tokens with this cumulative
            probability, among those that top_k kept.
        min_p: [n], in [0, 1); keep tokens with at least this probability, relative to the top token
            (arXiv:2407.01082).
        uniforms: [n], in [0, 1).

    Returns:
        [n] int64.
    """
    n, vocab_size = logits.shape
    divisor = torch.from_numpy(temperature).to(logits.dtype).unsqueeze(1)
    scores = (logits - logits.amax(-1, keepdim=True)) / divisor  # the maximum is 0
    weights = scores.exp()
    keep_k = np.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    cuts = (keep_k < vocab_size) | (top_p < 1.0)
    chosen = torch.empty(n, dtype=torch.int64)
    whole = np.flatnonzero(~cuts)
    if len(whole):
        rows = torch.from_numpy(whole)
        kept = weights.index_select(0, rows)
        if min_p[whole].any():
            kept = kept * (kept >= torch.from_numpy(min_p[whole]).unsqueeze(1))
        chosen[rows] = _invert_cdf(kept, uniforms[whole])
    cut = np.flatnonzero(cuts)
    if len(cut):
        rows = torch.from_numpy(cut)
        filters = keep_k[cut], top_p[cut], min_p[cut]
        chosen[rows] = _draw_cut(weights.index_select(0, rows), *filters, uniforms[cut])
    return chosen


def _draw_cut(
    weights: Tensor, keep_k: Ints, top_p: Floats, min_p: Floats, uniforms: Floats
) -> Tensor:
    """Sample from rows [n, V] with top_k or top_p -> [n]: from their prefixes if these suffice."""
    n, vocab_size = weights.shape
    chosen = torch.empty(n, dtype=torch.int64)
    top, ids = weights.topk(min(_PREFIX, vocab_size), -1)
    ranks = torch.arange(top.shape[1])
    masses = top.double()
    total = torch.where(
        torch.from_numpy(keep_k) < vocab_size,
        (masses * (ranks < torch.from_numpy(keep_k).unsqueeze(1))).sum(-1),
        weights.sum(-1, dtype=torch.float64),
    )
    # A prefix covers top_k if it is long enough, and top_p if its mass is large enough.
    wanted = torch.from_numpy(top_p) * total
    covered = np.where(
        keep_k < vocab_size, keep_k <= top.shape[1], (masses.sum(-1) >= wanted).numpy()
    )
    inside = np.flatnonzero(covered)
    if len(inside):
        part = torch.from_numpy(inside)
        kept = _keep(top[part], total[part], keep_k[inside], top_p[inside], min_p[inside])
        picks = _invert_cdf(kept, uniforms[inside])
        chosen[part] = ids[part].gather(1, picks.unsqueeze(1)).squeeze(1)
    for i in np.flatnonzero(~covered):
        row = slice(i, i + 1)
        chosen[row] = _draw_wide(weights[i], keep_k[row], top_p[row], min_p[row], uniforms[row])
    return chosen


def _keep(top: Tensor, total: Tensor, keep_k: Ints, top_p: Floats, min_p: Floats) -> Tensor:
    """Apply filters to sorted weights [n, m], of mass total [n] after top_k; removed ones are 0."""
    masses = top.double()
    before = masses.cumsum(-1) - masses
    kept = torch.arange(top.shape[1]) < torch.from_numpy(keep_k).unsqueeze(1)
    bounded = torch.from_numpy(top_p).unsqueeze(1)
    kept &= (before < bounded * total.unsqueeze(1)) | (bounded >= 1.0)
    kept &= masses >= torch.from_numpy(min_p).unsqueeze(1)
    return masses * kept


def _draw_wide(
    weights: Tensor, keep_k: Ints, top_p: Floats, min_p: Floats, uniforms: Floats
) -> Tensor:
    """Sample from a row [V] whose filters keep more tokens than the prefix."""
    k = int(keep_k[0])
    if k < len(weights):
        top, ids = weights.topk(k)
        total = top.sum(dtype=torch.float64).unsqueeze(0)
        kept = _keep(top.unsqueeze(0), total, keep_k, top_p, min_p)
        return ids[_invert_cdf(kept, uniforms)]
    kept = weights * (_nucleus(weights, float(top_p[0])) & (weights >= float(min_p[0])))
    return _invert_cdf(kept.unsqueeze(0), uniforms)


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """[V] bool: the fewest largest of weights [V] with top_p of the mass; ties by id.

    The bits of non-negative floats sort like integers, so their upper half serves as a histogram
    bin. All bins above the one in which the mass is reached are kept, and only that one is sorted.
    """
    values = weights.numpy()
    bins = values.view(np.int32) >> 16
    masses = np.bincount(bins, weights=values)[::-1]
    reached = masses.cumsum()
    wanted = top_p * reached[-1]
    rank = int(np.searchsorted(reached, wanted))
    boundary = len(masses) - 1 - rank
    inside = bins > boundary
    members = np.flatnonzero(bins == boundary)
    members = members[np.argsort(-values[members], kind="stable")]
    sizes = values[members].astype(np.float64)
    before = reached[rank] - masses[rank] + sizes.cumsum() - sizes
    inside[members[before < wanted]] = True
    return torch.from_numpy(inside)


def _invert_cdf(weights: Tensor, uniforms: Floats) -> Tensor:
    """First index of each row [n, m] at which the running sum exceeds uniform * total."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(uniforms).unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True).squeeze(1)
