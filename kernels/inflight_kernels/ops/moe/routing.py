"""Routing: the experts of each token, and the plan of the experts' products.

Shapes: T tokens, E experts, k experts per token.

Nothing is read back to the host, and nothing depends on the order in which blocks run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import check, kernel
from inflight_kernels.torch_ops.moe import Routing

MAX_TOP_K = 31
MAX_EXPERTS = 512
MAX_GROUPS = 32

# As in route.cu.
_SIGMOID, _RENORMALIZE, _BEST_ALONE = 1, 2, 4
_MAX_BLOCK_TOKENS = 64
_MAX_THREADS = 1024

MIN_TILE = 8
"""Rows of an expert that are multiplied at once, at least."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """How experts are chosen from the router's logits.

    Attributes:
        routing: see there.
        num_experts: E, from which tokens' experts are chosen.
        parts: logits are the sums of so many products, each with E columns or, with a shared gate,
            E + 1.
        bias: [E] float32, added to logits.
        select_bias: [E] float32, added to scores when experts are chosen.
        shared_gate: whether the last column is the gate of the shared expert.
        num_shared: experts behind the others as which a shared expert is kept: all tokens have
            them, with the shared expert's weight.
    """

    routing: Routing
    num_experts: int
    parts: int = 1
    bias: Tensor | None = None
    select_bias: Tensor | None = None
    shared_gate: bool = False
    num_shared: int = 0

    @property
    def all_experts(self) -> int:
        """Those that are chosen from, and the shared ones."""
        return self.num_experts + self.num_shared

    @property
    def all_top_k(self) -> int:
        """Experts per token, the shared ones included."""
        return self.routing.top_k + self.num_shared

    @property
    def columns(self) -> int:
        """Of the logits."""
        return self.parts * (self.num_experts + self.shared_gate)

    def arguments(self, stride: int) -> tuple[object, ...]:
        """Of kernels that choose experts, for logits with so many values from row to row."""
        routing = self.routing
        return (
            stride,
            self.parts,
            self.num_experts + self.shared_gate,
            0 if self.bias is None else self.bias,
            0 if self.select_bias is None else self.select_bias,
            int(self.shared_gate),
            self.num_shared,
            self.num_experts,
            routing.top_k,
            _flags(routing),
            routing.num_groups,
            routing.top_groups,
            routing.scale,
        )

    def obstacle(self) -> str | None:
        """Why the kernels do not support it; None if they do."""
        routing = self.routing
        if self.all_experts > MAX_EXPERTS:
            return f"{self.all_experts} experts (allowed: up to {MAX_EXPERTS})"
        if self.all_top_k > MAX_TOP_K:
            return f"{self.all_top_k} experts per token (allowed: up to {MAX_TOP_K})"
        if routing.num_groups > MAX_GROUPS:
            return f"{routing.num_groups} groups of experts (allowed: up to {MAX_GROUPS})"
        return None


class Routed:
    """Where the experts of a step's tokens and the plan of their products are kept.

    Args:
        max_tokens: maximum T.
        num_experts: E.
        top_k: k.
        device: the GPU.

    Attributes:
        experts: [max_tokens * k] int32, of each token in turn, the highest score first.
        weights: [max_tokens, k + 1] float32, of each token's experts and of the shared one.
        positions: [max_tokens * k] int32, their rows in products; complete after `gather`.
    """

    def __init__(
        self, max_tokens: int, num_experts: int, top_k: int, device: torch.device | str
    ) -> None:
        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        pairs = max_tokens * top_k
        sizes = (max_tokens, *(most for most, _ in _BLOCK_TOKENS))
        blocks = max(-(-count // block_tokens(count)) for count in sizes)
        self.max_tokens, self.num_experts, self.top_k = max_tokens, num_experts, top_k
        self.experts, self.positions = ints(pairs), ints(pairs)
        self.weights = torch.zeros(max_tokens, top_k + 1, device=device)
        self.starts = ints(blocks * num_experts)
        self.tiles = ints(4 * (min(num_experts, pairs) + pairs // MIN_TILE))
        self.num_tiles, self.arrived = ints(1), ints(1)


_MAX_TOGETHER = 64
"""Tokens that one cluster of blocks routes, which tell each other what they chose."""

_CLUSTER_BLOCKS, _CLUSTER_WARPS = 8, 8

_BLOCK_TOKENS = ((_MAX_TOGETHER, _MAX_TOGETHER), (128, 8), (512, 16), (2048, 32))
"""Up to how many tokens a block of `route` has how many, as measured on an H100: few are routed
sooner, but many blocks take longer to plan. Those of one cluster count as one block."""


def block_tokens(num_tokens: int) -> int:
    """Tokens of a block: ranks among them become positions in `gather`, if there are more."""
    return next((size for most, size in _BLOCK_TOKENS if num_tokens <= most), _MAX_BLOCK_TOKENS)


def route(logits: Tensor, router: Router, routed: Routed, *, tile: int, pdl: bool = False) -> None:
    """Choose each token's experts, as `torch_ops.moe.route` does, and plan the products.

    Args:
        logits: [T, router.columns] float32, rows may be strided.
        router: how.
        routed: for at least T tokens; overwritten.
        tile: rows of an expert that are multiplied at once; see `tile_of`.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand, or a router that is not supported.
    """
    num_tokens, routing, num_experts = len(logits), router.routing, router.num_experts
    _check_operands(logits, router, routed)
    if not num_tokens:
        return
    padded = -(-router.all_experts // 32) * 32
    if num_tokens <= _MAX_TOGETHER:
        _route_few(logits, router, routed, tile, padded, pdl)
        return
    per_block = block_tokens(num_tokens)
    threads = max(padded, min(32 * min(num_tokens, per_block), _MAX_THREADS))
    words = 4 * padded + threads + per_block * router.all_top_k
    if routing.top_groups < routing.num_groups:
        words += threads // 32 * padded
    kernel("route", f"route<{_per_lane(num_experts)}>")(
        -(-num_tokens // per_block),
        threads,
        logits,
        *router.arguments(logits.stride(0)),
        num_tokens,
        routed.experts,
        routed.weights,
        routed.positions,
        routed.starts,
        routed.tiles,
        routed.num_tiles,
        tile,
        per_block,
        routed.arrived,
        shared=4 * words,
        pdl=pdl,
    )


def _route_few(
    logits: Tensor, router: Router, routed: Routed, tile: int, padded: int, pdl: bool
) -> None:
    """By one cluster; padded: experts, rounded up to whole warps."""
    routing = router.routing
    has_groups = routing.top_groups < routing.num_groups
    kernel("route_few_hopper", f"route_few<{_per_lane(router.num_experts)}>")(
        _CLUSTER_BLOCKS,
        max(padded, 32 * _CLUSTER_WARPS),
        logits,
        *router.arguments(logits.stride(0)),
        len(logits),
        routed.experts,
        routed.weights,
        routed.positions,
        routed.tiles,
        routed.num_tiles,
        tile,
        shared=4 * _CLUSTER_WARPS * padded if has_groups else 0,
        pdl=pdl,
    )


def _check_operands(logits: Tensor, router: Router, routed: Routed) -> None:
    num_tokens, columns = logits.shape
    num_experts = router.num_experts
    obstacle = router.obstacle()
    if obstacle is not None:
        raise ValueError(f"{obstacle} is not supported")
    if columns != router.columns or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; expected {router.columns} columns of "
            "float32, contiguous"
        )
    all_experts, top_k = router.all_experts, router.all_top_k
    if num_tokens > routed.max_tokens or (all_experts, top_k) != (
        routed.num_experts,
        routed.top_k,
    ):
        raise ValueError(
            f"{num_tokens} tokens with {top_k} of {all_experts} experts; the memory is for "
            f"{routed.max_tokens} with {routed.top_k} of {routed.num_experts}"
        )
    for name, bias in (("bias", router.bias), ("select_bias", router.select_bias)):
        if bias is not None:
            check(name, bias, (num_experts,), torch.float32, vectors=False)


def _flags(routing: Routing) -> int:
    flags = _SIGMOID if routing.score == "sigmoid" else 0
    flags |= _RENORMALIZE if routing.renormalize else 0
    return flags | (_BEST_ALONE if routing.best_of_group == 1 else 0)


_PER_LANE = (1, 2, 4, 8, 16)


def _per_lane(num_experts: int) -> int:
    return next(count for count in _PER_LANE if num_experts <= 32 * count)


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [
        ("route", tuple(f"route<{count}>" for count in _PER_LANE), ()),
        ("route_few_hopper", tuple(f"route_few<{count}>" for count in _PER_LANE), ()),
    ]
