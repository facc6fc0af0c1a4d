"""Which layout a server has."""

from __future__ import annotations

from collections.abc import Iterable

from inflight_client.errors import InvalidRequest
from inflight_client.layouts.layout import Layout
from inflight_client.layouts.native import CHAT, Native
from inflight_client.layouts.tensorrtllm import TensorRtLlm
from inflight_client.layouts.vllm import Vllm

NATIVE = Native()
LAYOUTS: dict[str, Layout] = {one.name: one for one in (NATIVE, TensorRtLlm(), Vllm())}
"""By name, in the order in which a server is checked for them."""

MODELS = (CHAT, *(model for layout in LAYOUTS.values() for model in layout.models))


def named(name: str | None) -> Layout | None:
    """The layout of this name, or None for None.

    Raises:
        InvalidRequest: there is none.
    """
    if name is None:
        return None
    if name not in LAYOUTS:
        raise InvalidRequest(f"layout: is {name!r}; allowed: {', '.join(LAYOUTS)}, or None")
    return LAYOUTS[name]


def detected(models: Iterable[str]) -> tuple[Layout, str]:
    """The layout of a server with these models, and its model for prompts.

    Raises:
        InvalidRequest: it is none of ours.
    """
    found = set(models)
    for layout in LAYOUTS.values():
        for model in layout.models:
            if model in found:
                return layout, model
    if CHAT in found:
        return NATIVE, NATIVE.models[0]
    raise InvalidRequest(
        f"layout: the server has none of the models {', '.join(MODELS)}; it has "
        f"{', '.join(sorted(found)) or 'none'}; set layout and generate_model"
    )
