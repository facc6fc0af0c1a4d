"""The search for shared prefixes of `plan_cascade`, reimplemented in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from inflight_kernels.ops.attention.dispatch import MAX_PREFIXES, PREFIX_KEYS, PREFIX_ROWS

_SEARCHES, _PIECE_COST = 8, 2
MOST_CHUNKS = 1024
"""Further chunks of a step share no prefix."""


@dataclass(frozen=True)
class SharedPrefix:
    """Attributes:
    leader: the first of the chunks that the search began with, which is one of the members.
    members: chunks that share it.
    tiles: of PREFIX_KEYS keys.
    """

    leader: int
    members: tuple[int, ...]
    tiles: int


@dataclass(frozen=True)
class CutPrefix:
    """Attributes:
    pieces: of a unit.
    piece_tiles: of all but the last piece of a unit.
    first_piece, end_piece: in the order of all pieces.
    """

    pieces: int
    piece_tiles: int
    first_piece: int
    end_piece: int


def find_prefixes(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    min_keys: int,
    min_saved: int,
) -> list[SharedPrefix]:
    """The prefixes of a step; the arguments are those of a plan."""
    min_tiles, min_saved_tiles = min_keys // PREFIX_KEYS, max(1, -(-min_saved // PREFIX_KEYS))
    last = min_keys // block_size - 1
    free = {
        i: tables[i][last]
        for i in range(min(len(q_lens), MOST_CHUNKS))
        if q_lens[i] == 1 and kv_lens[i] > min_keys
    }
    found: list[SharedPrefix] = []
    for _ in range(_SEARCHES):
        votes = Counter(map(_bucket, free.values()))
        if len(found) == MAX_PREFIXES or max(votes.values(), default=0) < 2:
            break
        leader = min(i for i in free if votes[_bucket(free[i])] == max(votes.values()))
        common = {
            i: _common_tiles(
                tables[i], tables[leader], min(kv_lens[i], kv_lens[leader]), block_size
            )
            for i in free
            if free[i] == free[leader]
        }
        saved, tiles = max(
            (
                ((sum(other >= tiles for other in common.values()) - 1) * tiles, tiles)
                for tiles in common.values()
                if tiles >= min_tiles
            ),
            default=(0, 0),
        )
        if saved < min_saved_tiles:
            free = {i: block for i, block in free.items() if i not in common}
            continue
        members = tuple(i for i in sorted(common) if common[i] >= tiles)
        found.append(SharedPrefix(leader, members, tiles))
        free = {i: block for i, block in free.items() if i not in members}
    return found


def cut_prefixes(
    prefixes: Sequence[SharedPrefix],
    group: int,
    num_kv_heads: int,
    max_pieces: int,
    num_blocks: int,
) -> list[CutPrefix]:
    """How the units of the prefixes are cut into pieces."""
    units = [num_units(prefix, group) * num_kv_heads for prefix in prefixes]
    longest = max(prefix.tiles for prefix in prefixes)
    step = -(-longest // MOST_CHUNKS)

    def count(size: int) -> int:
        return sum(
            of_it * -(-prefix.tiles // size) for of_it, prefix in zip(units, prefixes, strict=True)
        )

    sizes = {min((k + 1) * step, longest) for k in range(MOST_CHUNKS)}
    chosen = min(
        (size for size in sizes if count(size) <= max_pieces),
        key=lambda size: (-(-count(size) // num_blocks) * (size + _PIECE_COST), -size),
    )
    cuts: list[CutPrefix] = []
    begin = 0
    for of_it, prefix in zip(units, prefixes, strict=True):
        pieces = -(-prefix.tiles // chosen)
        end = begin + of_it * pieces
        cuts.append(CutPrefix(pieces, -(-prefix.tiles // pieces), begin, end))
        begin = end
    return cuts


def num_units(prefix: SharedPrefix, group: int) -> int:
    """Of a KV head."""
    return -(-len(prefix.members) // (PREFIX_ROWS // group))


def _bucket(block: int) -> int:
    return (block * 2654435761 & 0xFFFFFFFF) >> 22


def _common_tiles(table: Sequence[int], other: Sequence[int], kv_len: int, block_size: int) -> int:
    """That begin both; a key of each sequence is left."""
    limit = (kv_len - 1) // block_size
    same = next((k for k in range(limit) if table[k] != other[k]), limit)
    return same * block_size // PREFIX_KEYS
