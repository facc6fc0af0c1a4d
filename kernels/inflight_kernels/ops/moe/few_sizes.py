"""Which mixtures of experts, of how many tokens, the kernels of `few` take; their shared memory.

Shapes: T tokens, at most MAX_TOKENS, E experts, k experts per token, d columns of the residual
stream, w of an expert's inner layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES, MAX_SUMMED_ROWS
from inflight_kernels.ops.moe.routing import MAX_EXPERTS
from inflight_kernels.runtime.launch import VECTOR_BYTES, num_multiprocessors

MAX_TOKENS = MAX_SUMMED_ROWS

# As in few.cuh, few_experts_hopper.cu and few_scores_hopper.cu.
_MAX_PAIRS = 64
_MAX_TOP_K = 32
_WARPS = 8
THREADS = 32 * _WARPS
_STAGE_BYTES = 4096
CHOICE_BYTES = 4 * (1 + _MAX_PAIRS + MAX_TOKENS * _MAX_TOP_K) + _MAX_PAIRS * MAX_TOKENS
_SCRATCH_BYTES = 4 * (MAX_TOKENS * _MAX_TOP_K + MAX_EXPERTS)
_PARTIAL_BYTES = 4 * 2304
PER_LANE = (4, MAX_EXPERTS // 32)

# Bytes of a row in a stage.
_GATE_UP_WIDTH, _DOWN_WIDTH = _STAGE_BYTES // 16, _STAGE_BYTES // 8
# The preferred ones first, as measured on an H200 (benchmarks/notes.md).
_GATE_UP_TEAMS, _DOWN_TEAMS = (8, 4, 2, 1), (1, 2, 4, 8)

# Of a multiprocessor; the driver reserves some for each block.
_SHARED_BYTES, _RESERVED_BYTES = 228 * 1024, 1024

# Stages of a block of gate and up, and of one of down, whose weights are read during the other one.
_STAGES_TOGETHER = ((2, 4), (2, 3), (2, 2))
_STAGES_ALONE = (4, 3, 2)

# Of the weights of several tokens' experts: above it, the kernels for any number of tokens are
# faster. Measured on an H100 (benchmarks/notes.md).
_MOST_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a mixture.

    Attributes:
        hidden: d.
        width: w.
        num_experts, top_k: E and k, which includes experts that are shared.
        num_groups: of experts, from some of which a token's experts are chosen; 1 for none.
        item_bytes: of a weight.
    """

    hidden: int
    width: int
    num_experts: int
    top_k: int
    num_groups: int
    item_bytes: int

    def fits(self, num_tokens: int) -> bool:
        """Whether the kernels take so many tokens."""
        return (
            1 <= num_tokens <= MAX_TOKENS
            and num_tokens * self.top_k <= _MAX_PAIRS
            and (num_tokens == 1 or self._weight_bytes(num_tokens) <= _MOST_BYTES)
            and self.hidden * self.item_bytes % VECTOR_BYTES == 0
            and self.width * self.item_bytes % VECTOR_BYTES == 0
            and self.hidden % 8 == 0
            and self.width % 8 == 0
            and min(self.stages(num_tokens)) > 0
        )

    def _weight_bytes(self, num_tokens: int) -> int:
        """That are read at most."""
        pairs = min(num_tokens * self.top_k, self.num_experts + self.top_k)
        return pairs * 3 * self.width * self.hidden * self.item_bytes

    def stages(self, num_tokens: int) -> tuple[int, int]:
        """Of a block of gate and up, and of one of down; 0 if it does not fit."""
        one = _WARPS * _STAGE_BYTES
        first, last = self._gate_up_bytes(num_tokens), self._down_bytes(num_tokens)
        both = _SHARED_BYTES - 2 * _RESERVED_BYTES - first - last
        for together in _STAGES_TOGETHER:
            if sum(together) * one <= both:
                return together

        def alone(other_bytes: int) -> int:
            fitting = (n for n in _STAGES_ALONE if other_bytes + n * one <= MAX_SHARED_BYTES)
            return next(fitting, 0)

        return alone(first), alone(last)

    def gate_up_shared(self, num_tokens: int) -> tuple[int, int]:
        """(stages, bytes of shared memory) of a block of gate and up."""
        stages, _ = self.stages(num_tokens)
        return stages, self._gate_up_bytes(num_tokens) + stages * _WARPS * _STAGE_BYTES

    def down_shared(self, num_tokens: int) -> tuple[int, int]:
        """The same of down."""
        _, stages = self.stages(num_tokens)
        return stages, self._down_bytes(num_tokens) + stages * _WARPS * _STAGE_BYTES

    @property
    def gate_up_team(self) -> int:
        """Warps that share rows of gate and up."""
        jobs = -(-self.width // 8 * self.top_k // num_multiprocessors())
        return _team_size(jobs, -(-self.hidden * self.item_bytes // _GATE_UP_WIDTH), _GATE_UP_TEAMS)

    @property
    def down_team(self) -> int:
        """The same of down."""
        stages = -(-self.width * self.item_bytes // _DOWN_WIDTH)
        return _team_size(self._down_units * self.top_k, stages, _DOWN_TEAMS)

    @property
    def _down_units(self) -> int:
        """Eight rows of a block, at most."""
        return -(-self.hidden // 8 // num_multiprocessors())

    def _gate_up_bytes(self, num_tokens: int) -> int:
        """Besides the stages."""
        padded = -(-(self.num_experts + self.top_k) // 32) * 32  # with shared experts, at most
        ranks = 4 * _WARPS * padded if self.num_groups > 1 else 0
        x_bytes = num_tokens * _pitch(self.hidden * self.item_bytes)
        return x_bytes + CHOICE_BYTES + max(_SCRATCH_BYTES + ranks, _PARTIAL_BYTES)

    def _down_bytes(self, num_tokens: int) -> int:
        """The same."""
        pairs = num_tokens * self.top_k
        sums = 32 * self._down_units * (1 + self.down_team)
        x_bytes = pairs * (_pitch(self.width * self.item_bytes) + 4 + sums)
        return -(-x_bytes // 16) * 16 + CHOICE_BYTES


def _team_size(jobs: int, stages: int, sizes: tuple[int, ...]) -> int:
    """The first size with which the busiest warp has the fewest stages, of a block's jobs for one
    token."""
    return min(sizes, key=lambda size: -(-jobs // (_WARPS // size)) * -(-stages // size))


def _pitch(row_bytes: int) -> int:
    return -(-row_bytes // 512) * 512 + 64
