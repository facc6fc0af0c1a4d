"""Sampling against the float64 reference, and against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight_kernels.ops.sampling import (
    MAX_TOP,
    NO_ALLOWED_TOKENS,
    NOT_FINITE,
    OK,
    SamplingOutputs,
    TopLogprobsOutputs,
    Workspace,
    greedy_row_params,
    prompt_words,
    sample,
    top_logprobs,
)
from inflight_kernels.torch_ops import sampling as reference
from inflight_kernels.torch_ops.sampling import XTC, Filters
from sampled_rows import (
    ALL,
    DTYPES,
    KINDS,
    RARE,
    VOCABULARIES,
    check_draws,
    inputs_of,
    on_device,
    own_logprobs,
    positions_of,
    random_row_params,
    run,
)

pytestmark = pytest.mark.gpu


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
