"""The KV cache: page pool, prefix index and leases. Imports neither torch nor anything above it."""

from pagetrie.kv.contiguous import ContiguousCacheManager
from pagetrie.kv.diagnosis import Diagnosis
from pagetrie.kv.eviction.policy import RequestKind
from pagetrie.kv.eviction_log import Eviction, EvictionLog
from pagetrie.kv.holds import Hold
from pagetrie.kv.interface import (
    CacheHold,
    CacheLease,
    CacheStats,
    KVCache,
    PageTransfers,
    PendingPage,
    ResetReport,
    TransferReport,
)
from pagetrie.kv.lease import Lease
from pagetrie.kv.manager import CacheManager
from pagetrie.kv.namespace import encode_namespace, owner_id
from pagetrie.kv.shares import Allowance

__all__ = [
    "Allowance",
    "CacheHold",
    "CacheLease",
    "CacheManager",
    "CacheStats",
    "ContiguousCacheManager",
    "Diagnosis",
    "Eviction",
    "EvictionLog",
    "Hold",
    "KVCache",
    "Lease",
    "PageTransfers",
    "PendingPage",
    "RequestKind",
    "ResetReport",
    "TransferReport",
    "encode_namespace",
    "owner_id",
]
