"""The sampling kernels on the CPU, by their torch definitions: see `host_kernels`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight_kernels.ops import sampling
from inflight_kernels.ops.sampling import SamplingInputs, SamplingOutputs, TopLogprobsOutputs
from inflight_kernels.torch_ops import sampling as torch_sampling


def sample(
    logits: Tensor,
    inputs: SamplingInputs,
    workspace: sampling.Workspace,
    out: SamplingOutputs,
    **others: Any,
) -> None:
    """Greedy rows, and drawn ones with the filters of `torch_sampling.draw`; penalties, biases
    and masks. Nothing else."""
    log_sums[id(workspace)] = torch.logsumexp(logits, -1)
    raw, logits = logits, logits.clone()
    found = inputs.row_params.contiguous().numpy().view(sampling.ROW_PARAMS)[:, 0]
    _adjust(logits, inputs, found)
    out.statuses.fill_(sampling.OK)
    out.token_ids.copy_(torch_sampling.greedy(logits))
    drawn = np.flatnonzero(found["temperature"] > 0.0)
    if len(drawn):
        params, rows = found[drawn], torch.from_numpy(drawn)
        keys = zip(params["seed"].tolist(), inputs.positions[rows].tolist(), strict=True)
        out.token_ids[rows] = torch_sampling.draw(
            logits[rows],
            params["temperature"].astype(np.float64),
            params["top_k"].astype(np.int64),
            params["top_p"].astype(np.float64),
            params["min_p"].astype(np.float64),
            np.array([torch_sampling.uniform(seed, position) for seed, position in keys]),
        ).to(out.token_ids.dtype)
    found_logprobs = torch_sampling.log_probs(raw).gather(1, out.token_ids[:, None])
    out.logprobs.copy_(found_logprobs[:, 0])
    broken = ~torch_sampling.finite_rows(raw)
    out.statuses[broken], out.token_ids[broken] = sampling.NOT_FINITE, 0
    out.logprobs[broken] = 0.0


def _adjust(logits: Tensor, inputs: SamplingInputs, found: np.ndarray[Any, Any]) -> None:
    """Penalties, biases and masks, in place."""
    penalties, bias, masks = inputs.penalties, inputs.logit_bias, inputs.masks
    if penalties is not None and penalties.tails is not None:
        counts, tokens = penalties.counts, penalties.tails.tokens
        starts, lengths = penalties.tails.starts.tolist(), penalties.tails.lengths.tolist()
        tails = zip(starts, lengths, strict=True)
        for row, (params, (start, length)) in enumerate(zip(found, tails, strict=True)):
            slot = int(params["slot"])
            if slot >= 0:
                drafts = torch.bincount(tokens[start : start + length], minlength=counts.shape[1])
                prompt = _bits(penalties.prompt[slot])
                _penalize(logits[row], params, counts[slot] + drafts, prompt)
    if bias is not None:
        for row, (begin, end) in enumerate(itertools.pairwise(bias.starts.tolist())):
            added = zip(bias.token_ids[begin:end], bias.biases[begin:end], strict=True)
            for token_id, value in added:
                logits[row, token_id] += value
    if masks is not None:
        for row, place in enumerate(masks.rows.tolist()):
            if place >= 0:
                logits[row, ~_bits(masks.masks[place])[: logits.shape[1]]] = float("-inf")


def _bits(words: Tensor) -> Tensor:
    """Of int32 words, the lowest first."""
    return torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), bitorder="little") != 0)


def _penalize(row: Tensor, params: np.void, counts: Tensor, in_prompt: Tensor) -> None:
    output = counts > 0
    seen = output | in_prompt[: len(output)]
    torch_sampling.apply_penalties(
        row,
        seen.nonzero()[:, 0].numpy(),
        output.nonzero()[:, 0].numpy(),
        counts[output].numpy(),
        torch_sampling.Penalties(
            *(float(params[field.name]) for field in dataclasses.fields(torch_sampling.Penalties))
        ),
    )


def count_output_tokens(
    slots: Tensor, token_ids: Tensor, counts: Tensor, *, pdl: bool = False
) -> None:
    for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
        if slot >= 0:
            counts[slot, token_id] += 1


def mark_prompt_tokens(
    slots: Tensor, token_ids: Tensor, prompt: Tensor, vocab_size: int, *, pdl: bool = False
) -> None:
    words = prompt.numpy().view(np.uint32)
    for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
        if slot >= 0:
            words[slot, token_id // 32] |= np.uint32(1 << token_id % 32)


# What `sample` leaves in a workspace: of each row, the logarithm of the sum of exp(logits).
log_sums: dict[int, Tensor] = {}


def top_logprobs(
    logits: Tensor,
    wanted: Tensor,
    workspace: sampling.Workspace,
    sampled: SamplingOutputs,
    out: TopLogprobsOutputs,
    *,
    given: Tensor | None = None,
    pdl: bool = False,
) -> None:
    found = logits - log_sums[id(workspace)][: len(logits), None]
    for row, number in enumerate(wanted.tolist()):
        if number < 0:
            continue
        out.ids[row], out.logprobs[row], out.own_logprobs[row] = -1, float("-inf"), 0.0
        out.ranks[row] = 0
        if int(sampled.statuses[row]) != sampling.OK:
            continue
        token = int(sampled.token_ids[row])
        if given is not None and int(given[row]) >= 0:
            token = int(given[row])
        most_probable = torch_sampling.top(found[row], number)
        out.ids[row, : len(most_probable)] = most_probable.int()
        out.logprobs[row, : len(most_probable)] = found[row, most_probable]
        out.own_logprobs[row] = found[row, token]
        out.ranks[row] = torch_sampling.rank(found[row], token)
