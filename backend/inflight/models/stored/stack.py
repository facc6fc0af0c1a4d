"""Tensors that stack the matrices, or vectors, of a layer's experts."""

from __future__ import annotations

from inflight.models.family import MAX_EXPERTS


def is_stack(shape: tuple[int, ...], num_dims: int) -> bool:
    """Whether a tensor is read as one tensor for each expert.

    A tensor that is empty, or has more experts than a model may have, is not: it is refused under
    its own name.

    Args:
        shape: of the tensor.
        num_dims: of a stack.
    """
    return len(shape) == num_dims and 0 not in shape and shape[0] <= MAX_EXPERTS
