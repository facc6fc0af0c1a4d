"""Which mixtures of experts, of how many tokens, the kernels of `few` take; their shared memory.

Shapes: T tokens, at most MAX_TOKENS, E experts, k experts per token, d columns of the residual
stream, w of an expert's inner layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight_kernels.ops.linear.grouped_rows import RECORD_COLUMNS, RECORD_ROWS, GroupedKind
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
_LEAST_RECORD_BYTES = _STAGE_BYTES * 2 // 5
CHOICE_BYTES = 4 * (4 + _MAX_PAIRS + MAX_TOKENS * _MAX_TOP_K) + _MAX_PAIRS * MAX_TOKENS
_SCRATCH_BYTES = 4 * (MAX_TOKENS * _MAX_TOP_K + MAX_EXPERTS)
_PARTIAL_BYTES = 4 * 2304
PER_LANE = (4, MAX_EXPERTS // 32)

# Rows of a weight of values in a stage.
_GATE_UP_ROWS, _DOWN_ROWS = 16, 8
# The preferred ones first, as measured on an H200 (benchmarks/notes.md).
_GATE_UP_TEAMS, _DOWN_TEAMS = (8, 4, 2, 1), (1, 2, 4, 8)

# Of a multiprocessor; the driver reserves some for each block.
_SHARED_BYTES, _RESERVED_BYTES = 228 * 1024, 1024

# Stages of a block of gate and up, and of one of down, whose weights are read during the other one:
# so many times `_stages_at_least`; then those of a block that has a multiprocessor for itself.
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
        item_bytes: of a value of x, and of the weights unless they are `grouped`.
        grouped: kind of the weights if they are GroupedRows. Experts whose layers differ fit if
            they do with both kinds.
    """

    hidden: int
    width: int
    num_experts: int
    top_k: int
    num_groups: int
    item_bytes: int
    grouped: GroupedKind | None = None

    def fits(self, num_tokens: int) -> bool:
        """Whether the kernels take so many tokens."""
        return (
            1 <= num_tokens <= MAX_TOKENS
            and num_tokens * self.top_k <= _MAX_PAIRS
            and (num_tokens == 1 or self._weight_bytes(num_tokens) <= _MOST_BYTES)
            and self.hidden * self.item_bytes % VECTOR_BYTES == 0
            and self.width * self.item_bytes % VECTOR_BYTES == 0
            and self.hidden % self._down_rows == 0
            and self.width % 8 == 0
            and min(self.stages(num_tokens)) > 0
        )

    def _weight_bytes(self, num_tokens: int) -> int:
        """That are read at most."""
        pairs = min(num_tokens * self.top_k, self.num_experts + self.top_k)
        return pairs * (
            self._matrix_bytes(2 * self.width, self.hidden)
            + self._matrix_bytes(self.hidden, self.width)
        )

    def _matrix_bytes(self, n: int, k: int) -> int:
        """Of an expert's matrix."""
        if self.grouped is None:
            return n * k * self.item_bytes
        return n // RECORD_ROWS * -(-k // RECORD_COLUMNS) * self.grouped.record_bytes

    def stages(self, num_tokens: int) -> tuple[int, int]:
        """Of a block of gate and up, and of one of down; 0 if it does not fit."""
        of_first, of_last, _ = self._rings(num_tokens)
        return of_first, of_last

    def _rings(self, num_tokens: int) -> tuple[int, int, int]:
        """`stages`, and the minimum of shared memory of a block of gate and up."""
        unit, blocks = self._stages_at_least, self._blocks
        one = _WARPS * unit * self._stage_bytes
        first, last = self._gate_up_bytes(num_tokens), self._down_bytes(num_tokens)
        rest = _SHARED_BYTES - (blocks + 1) * _RESERVED_BYTES - last
        for least in (_least_bytes(blocks), 0) if self.overlaps else ():
            for of_first, of_last in _STAGES_TOGETHER:
                if blocks * max(first + of_first * one, least) + of_last * one <= rest:
                    return of_first * unit, of_last * unit, least

        def alone(other_bytes: int) -> int:
            fitting = (n for n in _STAGES_ALONE if other_bytes + n * one <= MAX_SHARED_BYTES)
            return next(fitting, 0) * unit

        return alone(first), alone(last), 0

    @property
    def overlaps(self) -> bool:
        """Whether down starts beside every block of gate and up, to read its weights early.

        Blocks of gate and up start while the router's kernel occupies some multiprocessors. Without
        a minimum of shared memory others take more than _blocks of them, and some none. Weights of
        16 bits saturate the memory anyway: what down reads early then delays gate and up, and more
        stages of each gain more.
        """
        return self.grouped is not None or self.item_bytes == 1

    def gate_up_shared(self, num_tokens: int) -> tuple[int, int]:
        """(stages, bytes of shared memory) of a block of gate and up."""
        stages, _, least = self._rings(num_tokens)
        needed = self._gate_up_bytes(num_tokens) + stages * _WARPS * self._stage_bytes
        return stages, max(needed, least)

    def down_shared(self, num_tokens: int) -> tuple[int, int]:
        """The same of down."""
        _, stages = self.stages(num_tokens)
        return stages, self._down_bytes(num_tokens) + stages * _WARPS * self._stage_bytes

    @property
    def _blocks(self) -> int:
        """Of one kernel on a multiprocessor. Codes take so long to become numbers that more warps
        are needed to keep up with memory."""
        return 1 if self.grouped is None else 2

    @property
    def gate_up_blocks(self) -> int:
        """To launch of gate and up."""
        return self._blocks * num_multiprocessors()

    @property
    def down_blocks(self) -> int:
        """To launch of down."""
        units = -(-self.hidden // self._down_rows)
        most = self._blocks * num_multiprocessors()
        return most if self.grouped is None else min(units, most)

    @property
    def gate_up_team(self) -> int:
        """Warps that share rows of gate and up."""
        jobs = -(-self.width // 8 * self.top_k // self.gate_up_blocks)
        return _team_size(jobs, self._stages_of(self.hidden, _GATE_UP_ROWS), _GATE_UP_TEAMS)

    @property
    def down_team(self) -> int:
        """The same of down."""
        stages = self._stages_of(self.width, _DOWN_ROWS)
        return _team_size(self._down_units * self.top_k, stages, _DOWN_TEAMS)

    def _stages_of(self, columns: int, rows: int) -> int:
        """Of a job, whose stages have so many rows unless they are records."""
        if self.grouped is not None:
            return -(-columns // RECORD_COLUMNS)
        return -(-columns * self.item_bytes // (_STAGE_BYTES // rows))

    @property
    def _stage_bytes(self) -> int:
        return _STAGE_BYTES if self.grouped is None else self.grouped.record_bytes

    @property
    def _stages_at_least(self) -> int:
        """Of a ring, half of the fewest. Records of both blocks of a multiprocessor have at least
        four fifths of the bytes of values: with as many, those of 6 bits would leave no room."""
        if self.grouped is None:
            return 1
        return -(-_LEAST_RECORD_BYTES // self._stage_bytes)

    @property
    def _down_rows(self) -> int:
        """Of a unit of down."""
        return _DOWN_ROWS if self.grouped is None else RECORD_ROWS

    @property
    def _down_units(self) -> int:
        """Of a block, at most."""
        return -(-self.hidden // self._down_rows // self.down_blocks)

    def _gate_up_bytes(self, num_tokens: int) -> int:
        """Besides the stages."""
        padded = -(-(self.num_experts + self.top_k) // 32) * 32  # with shared experts, at most
        ranks = 4 * _WARPS * padded if self.num_groups > 1 else 0
        x_bytes = num_tokens * self._pitch(self.hidden)
        return x_bytes + CHOICE_BYTES + max(_SCRATCH_BYTES + ranks, _PARTIAL_BYTES)

    def _down_bytes(self, num_tokens: int) -> int:
        """The same."""
        pairs = num_tokens * self.top_k
        sums = 4 * self._down_rows * self._down_units * (1 + self.down_team)
        x_bytes = pairs * (self._pitch(self.width) + 4 + sums)
        return -(-x_bytes // 16) * 16 + CHOICE_BYTES

    def _pitch(self, columns: int) -> int:
        """Bytes of a row of x in shared memory."""
        whole, offset = (512, 64) if self.grouped is None else (2 * RECORD_COLUMNS, 16)
        return -(-columns * self.item_bytes // whole) * whole + offset


def _least_bytes(blocks: int) -> int:
    """Shared memory with which no more than so many blocks fit on a multiprocessor."""
    return _SHARED_BYTES // (blocks + 1) - _RESERVED_BYTES + 1


def _team_size(jobs: int, stages: int, sizes: tuple[int, ...]) -> int:
    """The first size with which the busiest warp has the fewest stages, of a block's jobs for one
    token."""
    return min(sizes, key=lambda size: -(-jobs // (_WARPS // size)) * -(-stages // size))
