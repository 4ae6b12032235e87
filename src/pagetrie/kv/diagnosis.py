"""What the index knows about the part of a prompt that it doesn't hold. Reading it changes nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pagetrie.kv.eviction_log import Eviction, EvictionLog
from pagetrie.kv.page_tree import Node, PageTree, root_of
from pagetrie.kv.tokens import TOKEN_BYTES, common_prefix, pack_tokens

WINDOW = 256
"""Tokens kept of the text from where two prompts part."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where a prompt leaves the index, and what stands there.

    Attributes:
        matched: leading tokens that are stored, in the prompt's namespace.
        stored: with what the stored text goes on there (u32 LE, up to ``WINDOW`` tokens, on the most recently used
            branch); empty if it ends there.
        evicted: tokens after the matched ones that were given up, as far as that is remembered.
        eviction: the latest loss of the first of them.
        elsewhere: of the other namespaces that were asked for, the one that holds most of the prompt, if it's more
            than is matched here.
        elsewhere_tokens: how much that is.
        below, below_tokens: the tier that holds the next pages, and how many tokens they have.
    """

    matched: int
    stored: bytes = b""
    evicted: int = 0
    eviction: Eviction | None = None
    elsewhere: str | None = None
    elsewhere_tokens: int = 0
    below: str = ""
    below_tokens: int = 0

    def after(self, tokens: int) -> Diagnosis:
        """The same of a prompt with so many tokens more in front, all of which are stored."""
        elsewhere = self.elsewhere_tokens + tokens if self.elsewhere else 0
        return replace(self, matched=self.matched + tokens, elsewhere_tokens=elsewhere)


class Below(Protocol):
    """Looks into the tiers below the pool."""

    def kept_below(self, namespace: bytes, page: int | None, tokens: bytes) -> tuple[str, int]:
        """How many ``tokens`` that follow ``page`` (None: the first ones) a tier near by holds, and which one."""
        ...


def diagnose(
    tree: PageTree,
    log: EvictionLog | None,
    tokens: Sequence[int],
    namespace: bytes,
    others: Mapping[str, bytes],
    tiers: Below | None = None,
) -> Diagnosis:
    """Look a prompt up as it stands now.

    Args:
        tree: the index.
        log: evictions; None if none are kept.
        tokens: the prompt.
        namespace: where it is looked up.
        others: further namespaces that its sender may know of, by any name.
        tiers: what stands below the pool.
    """
    packed = pack_tokens(tokens)
    node, matched, branch, offset = _follow(tree, namespace, packed)
    evicted, eviction = (0, None) if log is None else _evicted(tree, log, node, namespace, packed, matched)
    whole = matched - matched % tree.page_bytes
    below, below_tokens = "", 0
    if tiers is not None and len(packed) - whole > tree.page_bytes:
        last = branch.pages[offset // tree.page_bytes - 1] if branch is not None and offset >= tree.page_bytes else None
        if last is None and node is not None and node.pages:
            last = node.pages[-1]
        below, below_tokens = tiers.kept_below(namespace, last, packed[whole:-TOKEN_BYTES])
    elsewhere, most = None, matched // TOKEN_BYTES
    for name, other in others.items():
        stored = tree.stored_tokens(other, packed)
        if stored > most:
            elsewhere, most = name, stored
    return Diagnosis(
        matched=matched // TOKEN_BYTES,
        stored=_text_of(branch, offset) if matched < len(packed) else b"",
        evicted=evicted,
        eviction=eviction,
        elsewhere=elsewhere,
        elsewhere_tokens=most if elsewhere else 0,
        below=below,
        below_tokens=below_tokens,
    )


def _follow(tree: PageTree, namespace: bytes, tokens: bytes) -> tuple[Node | None, int, Node | None, int]:
    """Go down as far as the tokens match.

    Returns:
        The deepest node of whole pages that matches, the bytes matched in all, the node in which or above which the
        tokens part from the tree (None if nothing is stored further), and the offset in that node's label.
    """
    node, position, page_bytes = tree.find_root(namespace), 0, tree.page_bytes
    while node is not None and node.children:
        place = bisect_left(node.keys, tokens[position : position + page_bytes])
        child, shared = None, 0
        for index in (place, place - 1):
            if 0 <= index < len(node.keys):
                edge = node.children[index].tokens
                common = common_prefix(edge, tokens, position, len(tokens))
                common -= common % TOKEN_BYTES
                # Of two that match as far, the one that is part of the prompt as a whole.
                if common > shared or (common and common == shared == len(edge)):
                    child, shared = node.children[index], common
        if child is None:
            return node, position, max(node.children, key=_last_used), 0
        position += shared
        if shared < len(child.tokens) or len(child.tokens) % page_bytes:
            return node, position, child if shared < len(child.tokens) else None, shared
        node = child
    return node, position, None, 0


def _text_of(branch: Node | None, offset: int) -> bytes:
    """Tokens from ``offset`` in a node's label on, down the most recently used children."""
    text = bytearray()
    while branch is not None and len(text) < WINDOW * TOKEN_BYTES:
        text += branch.tokens[offset : offset + WINDOW * TOKEN_BYTES]
        branch, offset = max(branch.children, key=_last_used, default=None), 0
    return bytes(text[: WINDOW * TOKEN_BYTES])


def _last_used(node: Node) -> int:
    return node.last_used


def _evicted(
    tree: PageTree, log: EvictionLog, node: Node | None, namespace: bytes, tokens: bytes, matched: int
) -> tuple[int, Eviction | None]:
    """How many tokens past the matched ones were given up, and when."""
    page_bytes = tree.page_bytes
    namer, end = tree.namer(node, namespace), matched - matched % page_bytes
    namer.go_on(tokens[_end_of(node, page_bytes) : end])
    first: Eviction | None = None
    while end + page_bytes <= len(tokens):
        page = tokens[end : end + page_bytes]
        eviction = log.get(namer.name(page))
        if eviction is None:
            break
        first = first or eviction
        namer.go_on(page)
        end += page_bytes
    # A page that was filled only in part goes under the name of what it held.
    rest = tokens[end : end + page_bytes]
    for length in range(len(rest) - len(rest) // page_bytes * TOKEN_BYTES, 0, -TOKEN_BYTES):
        eviction = log.get(namer.name(rest[:length]))
        if eviction is not None:
            first, end = first or eviction, end + length
            break
    gone = (end - matched) // TOKEN_BYTES
    return (gone, first) if gone > 0 else (0, None)


def _end_of(node: Node | None, page_bytes: int) -> int:
    """Bytes of tokens up to the end of a node of whole pages."""
    pages = 0
    while node is not None and node.parent is not None:
        pages += len(node.pages)
        node = node.parent
    return pages * page_bytes


def lost_names(tree: PageTree, node: Node, count: int) -> Iterator[bytes]:
    """Names of the last ``count`` pages of a node."""
    namer = tree.namer(node.parent, bytes(root_of(node).tokens))
    page_bytes = tree.page_bytes
    start = (len(node.pages) - count) * page_bytes
    namer.go_on(bytes(node.tokens[:start]))
    for position in range(start, len(node.tokens), page_bytes):
        page = bytes(node.tokens[position : position + page_bytes])
        yield namer.name(page)
        if len(page) == page_bytes:
            namer.go_on(page)
