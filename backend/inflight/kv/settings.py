"""How sequences use the KV blocks of a runner."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.kv.layout import KVTables
from inflight.kv.tiers.host_cache import HostTier


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """The KV blocks of a runner, and how they are used.

    Attributes:
        num_blocks: in the pool.
        block_size: tokens per kernel block.
        enable_prefix_caching: reuse blocks of equal prefixes.
        tables: the block tables of each sequence; None for one that keeps all tokens.
        host_tier: tiers of the prefix cache below the pool; None for none.
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    tables: KVTables | None = None
    host_tier: HostTier | None = None
