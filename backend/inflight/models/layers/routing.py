"""How a mixture of experts chooses, as the operations of experts take it."""

from __future__ import annotations

from inflight.models.spec import MoeSpec
from inflight_kernels.torch_ops.moe import Routing


def routing_of(moe: MoeSpec) -> Routing:
    """As a spec describes it."""
    return Routing(
        top_k=moe.top_k,
        renormalize=moe.renormalize,
        score=moe.score,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        scale=moe.routing_scale,
        best_of_group=moe.best_of_group,
    )
