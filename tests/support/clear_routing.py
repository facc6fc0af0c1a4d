"""Routers of tiny models of transformers whose choices no rounding changes.

A value that is rounded the other way may choose another expert, which changes a token and all after
it. Here the routers are made for some texts: for each token of these, its logits are drawn until
the choice is clear, and the router's weight is what gives these logits for its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inflight.models.layers.routing import routing_of
from inflight.models.spec import ModelSpec, MoeSpec
from inflight_kernels.torch_ops.moe import route

MARGIN = 0.5
"""Logits, which have a standard deviation of 1, may all change by half of it."""

_TRIES = 32  # changes of logits that must not change a choice


@torch.inference_mode()
def make_clear(model: Any, spec: ModelSpec, texts: list[list[int]], seed: int = 0) -> None:
    """Replace the weights of the routers by ones whose choices for these texts are clear, and that
    bfloat16 can represent.

    Args:
        model: in float64; one layer after the other gets its router in a single pass.
        spec: of the model.
        texts: token ids, together fewer than the model's hidden size.
        seed: of the logits.
    """
    random = torch.Generator().manual_seed(seed)
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    # No token sees the padding after it.
    is_valid = torch.cat([torch.arange(longest) < len(text) for text in texts])
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    handles = []
    for router, moe in zip(routers(model), mixtures, strict=True):

        def fit(module: Any, inputs: tuple[Tensor, ...], moe: MoeSpec = moe) -> None:
            _fit(module, inputs[0].flatten(0, -2)[is_valid], moe, random)

        handles.append(router.register_forward_pre_hook(fit))
    model(padded)
    for handle in handles:
        handle.remove()


def routers(model: Any) -> list[Any]:
    """The modules with the weights of routers, in the order of layers."""
    return [
        module
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router")) and hasattr(module, "weight")
    ]


def _fit(router: Any, x: Tensor, moe: MoeSpec, random: torch.Generator) -> None:
    bias = getattr(router, "bias", None)
    own = 0.0 if bias is None else bias
    select_bias = getattr(router, "e_score_correction_bias", None)

    def unclear(logits: Tensor) -> Tensor:
        """[T], which choices change with some change of the logits."""
        changes = torch.rand(_TRIES, *logits.shape, generator=random, dtype=logits.dtype) - 0.5
        changed = _choices(logits + MARGIN * changes, moe, select_bias)
        return (changed != _choices(logits, moe, select_bias)).any(-1).any(0)

    logits = torch.randn(len(x), moe.num_experts, generator=random, dtype=x.dtype)
    while (again := unclear(logits)).any():
        drawn = torch.randn(logits[again].shape, generator=random, dtype=x.dtype)
        logits[again] = drawn
    weight = torch.linalg.lstsq(x, logits - own).solution.T
    router.weight.copy_(weight.bfloat16())
    found = x @ router.weight.T + own
    assert (found - logits).abs().max() < MARGIN / 8, "too many tokens for the hidden size"


def _choices(logits: Tensor, moe: MoeSpec, select_bias: Tensor | None) -> Tensor:
    """[..., T, k], the experts of each token in the order of their numbers."""
    experts, _ = route(logits.flatten(0, -2), routing_of(moe), select_bias)
    return experts.sort(-1).values.view(*logits.shape[:-1], -1)
