"""The choice of tokens against its definition in float64, and against the CPU's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from inflight_kernels import reference, sampling
from inflight_kernels.sampling import (
    FINE,
    NOT_FINITE,
    NOTHING_LEFT,
    Workspace,
    greedy_wishes,
    note_output,
    note_prompt,
    prompt_words,
    sample,
)

pytestmark = pytest.mark.gpu

Wishes = np.ndarray[tuple[int], np.dtype[np.void]]

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


@dataclass
class Chosen:
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    statuses: npt.NDArray[np.int32]


def wish(rows: int, kind: str, rng: np.random.Generator) -> Wishes:
    wishes = greedy_wishes(rows)
    wishes["temperature"] = rng.choice([0.3, 0.7, 1.0, 1.5, 5.0], rows)
    wishes["seed"] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    for name, values in KINDS[kind].items():
        wishes[name] = rng.choice(values, rows)
    return wishes


def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype == sampling.WISH:
        array = array.view(np.uint8).reshape(len(array), array.itemsize)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def positions_of(rows: int) -> npt.NDArray[np.int64]:
    return np.arange(rows, dtype=np.int64) * 2**30 + 5


def run(
    logits: torch.Tensor, wishes: Wishes, workspace: Workspace | None = None, **options: Any
) -> Chosen:
    n, vocab_size = logits.shape
    if workspace is None:
        workspace = Workspace(n, vocab_size, "cuda")
        workspace.scratch.fill_(0xA5)
        workspace.found.fill_(12345)
    token_ids = torch.full((n,), -1, device="cuda")
    logprobs = torch.full((n,), torch.nan, device="cuda")
    statuses = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    sample(
        logits,
        on_device(wishes),
        on_device(positions_of(n)),
        workspace,
        token_ids=token_ids,
        logprobs=logprobs,
        statuses=statuses,
        **options,
    )
    assert not workspace.arrivals.any()
    return Chosen(token_ids.cpu().numpy(), logprobs.cpu().numpy(), statuses.cpu().numpy())


def interval(
    logits: npt.NDArray[np.float64], wishes: np.void, token_id: int, slack: float
) -> tuple[float, float]:
    """The numbers in [0, 1) for which the definition draws a token; (1, 0) if it is cut.

    Args:
        logits: [V].
        wishes: of the row.
        token_id: the token.
        slack: relative to top_p and min_p; what lies on a filter's boundary may go either way.
    """
    vocab_size = len(logits)
    temperature = float(wishes["temperature"])
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(vocab_size), -logits))
    top_k, top_p = int(wishes["top_k"]), float(wishes["top_p"])
    ranked = 0 < top_k < vocab_size
    kept = top_k if ranked else vocab_size
    if top_p < 1.0:
        masses = weights[order[:kept]]
        before = np.cumsum(masses) - masses
        kept = int((before < top_p * (1 + slack) * masses.sum()).sum())
        ranked |= kept <= 256
    kept = int((weights[order[:kept]] >= float(wishes["min_p"]) * (1 - slack)).sum())
    ids = order[:kept] if ranked else np.sort(order[:kept])
    places = np.flatnonzero(ids == token_id)
    if ranked and len(places):
        # Scores less than a rounding apart may stand in order of their ids.
        near = np.abs(logits[ids] - logits[token_id]) < 4e-7 * temperature
        if len(np.unique(logits[ids[near]])) > 1:
            places = np.flatnonzero(near)
    if not len(places):
        return 1.0, 0.0
    sums = np.cumsum(weights[ids]) / weights[ids].sum()
    first, last = places[0], places[-1]
    return sums[first - 1] if first else 0.0, sums[last]


def check_draws(logits: torch.Tensor, wishes: Wishes, chosen: Chosen) -> None:
    """Each token is the one that its row's number falls on, up to rounding."""
    assert (chosen.statuses == FINE).all()
    exact = logits.double().cpu().numpy()
    for row, position in enumerate(positions_of(len(exact))):
        token_id = int(chosen.token_ids[row])
        if wishes["temperature"][row] == 0:
            assert token_id == exact[row].argmax()
            continue
        u = reference.uniform(int(wishes["seed"][row]), int(position))
        bounds = [interval(exact[row], wishes[row], token_id, slack) for slack in (0, 1e-6, -1e-6)]
        assert any(low - 2e-5 <= u < high + 2e-5 for low, high in bounds), (row, wishes[row], u)


# ---------------------------------------------------------------- the right token


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_draws_what_its_number_falls_on(
    dtype: torch.dtype, vocab_size: int, kind: str
) -> None:
    """bfloat16 logits are equal by the hundred: ids decide between them."""
    rng = np.random.default_rng(vocab_size)
    for spread in (0.5, 3.0, 12.0):
        logits = (torch.randn(12, vocab_size, device="cuda") * spread).to(dtype)
        wishes = wish(12, kind, rng)
        chosen = run(logits, wishes)
        check_draws(logits, wishes, chosen)
        expected = reference.log_probs(logits.double()).cpu().numpy()
        expected = expected[np.arange(12), chosen.token_ids]
        assert np.abs(chosen.logprobs - expected).max() < 2e-5 * (1 + np.abs(expected).max())


def test_kinds_of_rows_share_a_launch_and_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(2)
    wishes = np.concatenate([wish(20, kind, rng) for kind in KINDS])
    rng.shuffle(wishes)
    logits = torch.randn(len(wishes), 32000, device="cuda") * 3
    together = run(logits, wishes)
    check_draws(logits, wishes, together)
    for row in range(0, len(wishes), 17):
        options = logits.clone()
        options[torch.arange(len(wishes), device="cuda") != row] = torch.nan
        alone = run(options, wishes)
        assert alone.token_ids[row] == together.token_ids[row]
        assert alone.logprobs[row] == together.logprobs[row]


def test_the_token_is_the_cpus() -> None:
    rng = np.random.default_rng(3)
    wishes = np.concatenate([wish(60, kind, rng) for kind in KINDS if kind != "greedy"])
    n = len(wishes)
    logits = torch.randn(n, 20000, device="cuda") * 3
    chosen = run(logits, wishes).token_ids
    uniforms = [
        reference.uniform(int(seed), int(position))
        for seed, position in zip(wishes["seed"], positions_of(n), strict=True)
    ]
    expected = reference.draw(
        logits.cpu(),
        wishes["temperature"].astype(np.float64),
        wishes["top_k"].astype(np.int64),
        wishes["top_p"].astype(np.float64),
        wishes["min_p"].astype(np.float64),
        np.array(uniforms),
    )
    assert (chosen == expected.numpy()).mean() > 0.995


def test_draws_have_the_softmaxs_frequencies() -> None:
    n, vocab_size = 20000, 16
    logits = torch.linspace(-2, 1, vocab_size, device="cuda").repeat(n, 1)
    wishes = greedy_wishes(n)
    wishes["temperature"] = 1.0
    wishes["seed"] = np.arange(n)
    counts = np.bincount(run(logits, wishes).token_ids, minlength=vocab_size)
    expected = torch.softmax(logits[0].double(), -1).cpu().numpy() * n
    assert ((counts - expected) ** 2 / expected).sum() < 50  # 15 degrees of freedom: p < 2e-5


@pytest.mark.parametrize("vocab_size", [3000, 128256])
def test_of_equal_logits_the_first_is_the_likeliest(vocab_size: int) -> None:
    logits = torch.zeros(4, vocab_size, device="cuda")
    logits[:, 1000:1300] = 1.0
    wishes = greedy_wishes(4)
    wishes["temperature"] = [0.0, 1.0, 1.0, 0.01]
    wishes["top_k"] = [0, 7, 290, 0]
    chosen = run(logits, wishes).token_ids
    assert chosen[0] == 1000
    assert 1000 <= chosen[1] < 1007
    assert 1000 <= chosen[2] < 1290
    check_draws(logits, wishes, run(logits, wishes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_row_and_a_sharp_one(kind: str) -> None:
    """All of the vocabulary in one score, and all of the mass in one token."""
    wishes = wish(8, kind, np.random.default_rng(5))
    for logits in (
        torch.zeros(8, 50000),
        torch.zeros(8, 50000).index_fill_(1, torch.tensor(77), 60),
    ):
        check_draws(logits.cuda(), wishes, run(logits.cuda(), wishes))


# ---------------------------------------------------------------- penalties and bans


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [300, 8200, 50257, 128256])
def test_penalties_and_bans_come_before_everything(dtype: torch.dtype, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    wishes = np.concatenate([wish(6, kind, rng) for kind in KINDS])
    n, slots = len(wishes), 5
    wishes["repetition"] = rng.choice([1.0, 0.8, 1.3], n)
    wishes["presence"] = rng.choice([0.0, -1.0, 0.5], n)
    wishes["frequency"] = rng.choice([0.0, -0.1, 0.25], n)
    wishes["slot"] = rng.integers(-1, slots, n)
    logits = (torch.randn(n, vocab_size, device="cuda") * 3).to(dtype)

    prompt = torch.zeros(slots, prompt_words(vocab_size), dtype=torch.int32, device="cuda")
    counts = torch.zeros(slots, vocab_size, dtype=torch.int16, device="cuda")
    told = rng.integers(0, slots, 4000).astype(np.int32), rng.integers(0, vocab_size, 4000)
    said = rng.integers(0, slots, 2000).astype(np.int32), rng.integers(0, vocab_size, 2000)
    note_prompt(on_device(told[0]), on_device(told[1]), prompt, vocab_size)
    note_output(on_device(said[0]), on_device(said[1]), counts)
    likeliest = logits.float().argmax(-1).cpu().numpy()
    bans = [[*rng.integers(0, vocab_size, i % 4).tolist(), likeliest[i]][: i % 5] for i in range(n)]
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in bans])]).astype(np.int32)

    chosen = run(
        logits,
        wishes,
        counts=counts,
        prompt=prompt,
        ban_starts=on_device(starts),
        bans=on_device(np.array([*itertools.chain(*bans)], np.int32)),
    )
    shaped = logits.float().cpu().clone()
    for row in range(n):
        slot = wishes["slot"][row]
        if slot >= 0:
            output_ids, output_counts = np.unique(said[1][said[0] == slot], return_counts=True)
            reference.apply_penalties(
                shaped[row],
                np.union1d(output_ids, told[1][told[0] == slot]),
                output_ids,
                output_counts,
                float(wishes["repetition"][row]),
                float(wishes["presence"][row]),
                float(wishes["frequency"][row]),
            )
        if bans[row]:
            reference.ban_tokens(shaped[row], bans[row])
    check_draws(shaped, wishes, chosen)
    expected = reference.log_probs(logits.double()).cpu().numpy()
    expected = expected[np.arange(n), chosen.token_ids]
    assert np.abs(chosen.logprobs - expected).max() < 1e-3, "of the logits as they came"


def test_counts_are_exact_where_many_tokens_come_at_once_and_end_at_the_largest() -> None:
    for vocab_size in (10, 11):
        counts = torch.zeros(3, vocab_size, dtype=torch.int16, device="cuda")
        counts[1, 4] = 32760
        slots = torch.tensor([0, 1, 1, 2, -1], dtype=torch.int32, device="cuda").repeat(500)
        ids = torch.tensor([3, 4, 5, vocab_size - 1, 2], device="cuda").repeat(500)
        note_output(slots, ids, counts)
        expected = torch.zeros(3, vocab_size, dtype=torch.int16)
        expected[0, 3] = expected[1, 5] = expected[2, vocab_size - 1] = 500
        expected[1, 4] = 32767
        assert torch.equal(counts.cpu(), expected)


# ---------------------------------------------------------------- rows without a token


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 8191, 8192, 31999])
def test_a_row_that_is_not_finite_says_so_and_its_neighbours_go_on(
    broken: float, where: int
) -> None:
    logits = torch.randn(6, 32000, device="cuda")
    wishes = greedy_wishes(6)
    wishes["temperature"] = [0, 0, 1, 1, 1, 1]
    wishes["top_k"] = [0, 0, 0, 0, 5, 5]
    expected = run(logits, wishes)
    logits[::2, where] = broken
    chosen = run(logits, wishes)
    assert chosen.statuses.tolist() == [NOT_FINITE, FINE] * 3
    assert (chosen.token_ids[1::2] == expected.token_ids[1::2]).all()
    assert (chosen.token_ids[::2] == 0).all()


def test_a_row_of_bans_alone_says_so() -> None:
    vocab_size = 9000
    logits = torch.randn(2, vocab_size, device="cuda")
    wishes = greedy_wishes(2)
    wishes["temperature"] = [1.0, 0.0]
    starts = torch.tensor([0, vocab_size, 2 * vocab_size - 1], dtype=torch.int32, device="cuda")
    bans = torch.arange(2 * vocab_size - 1, dtype=torch.int32, device="cuda") % vocab_size
    chosen = run(logits, wishes, ban_starts=starts, bans=bans)
    assert chosen.statuses.tolist() == [NOTHING_LEFT, FINE]
    assert chosen.token_ids[1] == vocab_size - 1


# ---------------------------------------------------------------- how it is called


def test_rows_may_lie_apart_and_start_anywhere() -> None:
    wide = torch.randn(12, 9001 + 100, device="cuda")
    wishes = wish(12, "all", np.random.default_rng(6))
    for first in range(3):
        logits = wide[:, first : first + 9001]
        check_draws(logits, wishes, run(logits, wishes))


def test_it_replays_from_a_graph_with_other_wishes() -> None:
    rng = np.random.default_rng(7)
    n, vocab_size = 32, 32000
    logits = torch.randn(n, vocab_size, device="cuda") * 3
    state, positions = on_device(greedy_wishes(n)), on_device(positions_of(n))
    workspace = Workspace(n, vocab_size, "cuda")
    token_ids = torch.zeros(n, dtype=torch.int64, device="cuda")
    logprobs = torch.zeros(n, device="cuda")
    statuses = torch.zeros(n, dtype=torch.int32, device="cuda")

    def step() -> None:
        sample(
            logits,
            state,
            positions,
            workspace,
            token_ids=token_ids,
            logprobs=logprobs,
            statuses=statuses,
            pdl=True,
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for kind in KINDS:
        wishes = wish(n, kind, rng)
        state.copy_(on_device(wishes))
        logits.normal_().mul_(3)
        graph.replay()
        replayed = token_ids.cpu().numpy()
        assert (replayed == run(logits, wishes, workspace).token_ids).all()
        check_draws(logits, wishes, run(logits, wishes, workspace))


def test_without_filters_one_launch_is_enough() -> None:
    logits = torch.randn(8, 32000, device="cuda")
    wishes = wish(8, "plain", np.random.default_rng(8))
    wishes["temperature"][::2] = 0
    both, one = run(logits, wishes), run(logits, wishes, filters=False)
    assert (both.token_ids == one.token_ids).all()


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    logits = torch.randn(2, 100, device="cuda")
    with pytest.raises(ValueError, match="workspace is for up to 1 rows"):
        run(logits, greedy_wishes(2), Workspace(1, 100, "cuda"))
    with pytest.raises(ValueError, match="wishes"):
        run(logits, greedy_wishes(3))
    with pytest.raises(ValueError, match="come together"):
        run(logits, greedy_wishes(2), bans=torch.zeros(1, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match="logits is "):
        run(logits.double(), greedy_wishes(2))


def test_no_rows_are_no_launch() -> None:
    run(torch.empty(0, 100, device="cuda"), greedy_wishes(0), Workspace(4, 100, "cuda"))
