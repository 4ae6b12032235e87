"""Carrying pages from one folder to another, whose secret is another."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagetrie.errors import ConfigError
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.archive import export, look_into, unpack
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tokens import pack_tokens
from tests.kv.tiers.pages import Clock, content


def refs_of(tier: DiskTier, name: bytes, count: int, first: int = 0) -> list[PageRef]:
    keys = ChainKeys(tier.folder.secret)
    namespace = parent = keys.root(name)
    tier.name_namespace(namespace, name)
    refs = []
    for number in range(count):
        tokens = pack_tokens(range(first * (number > 1) + 4 * number, first * (number > 1) + 4 * number + 4))
        key = keys.page(parent, tokens)
        refs.append(PageRef(key, parent, namespace, tokens))
        parent = key
    return refs


def filled(folder: Path) -> tuple[DiskTier, list[list[PageRef]]]:
    """Two prefixes that share two pages, and one in another namespace."""
    tier = DiskTier(CacheFolder(folder), 10**6, Clock())
    chains = [refs_of(tier, b"a", 5), refs_of(tier, b"a", 4, first=100), refs_of(tier, b"b", 3)]
    for chain in chains:
        # Tokens as contents, which both sides can tell.
        assert tier.put([(ref, content(PageRef(ref.tokens * 2, b"", b"", b""))) for ref in chain]) == len(chain)
    return tier, chains


def reads(tier: DiskTier, refs: list[PageRef]) -> int:
    count = 0
    for ref, data in zip(refs, tier.get(refs), strict=False):
        assert (data == content(PageRef(ref.tokens * 2, b"", b"", b""))).all()
        count += 1
    return count


def test_an_archive_is_found_under_another_secret(tmp_path: Path) -> None:
    tier, _ = filled(tmp_path / "here")
    archive = io.BytesIO()
    assert export(tier.folder, archive) == 5 + 2 + 3
    there = DiskTier(CacheFolder(tmp_path / "there"), 10**6, Clock())
    assert there.folder.secret != tier.folder.secret
    for _ in range(2):
        archive.seek(0)
        assert unpack(there, archive) == (10, 0)
    assert there.stats.stored_pages == 10
    assert [
        reads(there, refs_of(there, name, 5, first=first)) for name, first in ((b"a", 0), (b"a", 100), (b"b", 0))
    ] == [5, 4, 3]
    there.close()
    again = DiskTier(CacheFolder(tmp_path / "there"), 10**6, Clock())
    second = io.BytesIO()
    assert export(again.folder, second) == 10, "it can be exported from there as well"
    again.close()
    tier.close()


def test_one_prefix_alone(tmp_path: Path) -> None:
    tier, chains = filled(tmp_path / "here")
    archive = io.BytesIO()
    assert export(tier.folder, archive, chains[1][3].key[:6]) == 4
    archive.seek(0)
    there = DiskTier(CacheFolder(tmp_path / "there"), 10**6, Clock())
    assert unpack(there, archive) == (4, 0)
    assert reads(there, refs_of(there, b"a", 4, first=100)) == 4
    with pytest.raises(ConfigError, match="0 stored pages"):
        export(tier.folder, io.BytesIO(), b"\0" * 32)
    there.close()
    tier.close()


def test_looking_into_a_folder_that_is_in_use(tmp_path: Path) -> None:
    tier, chains = filled(tmp_path)
    contents = look_into(CacheFolder(tmp_path, look_only=True))
    prefixes = contents.prefixes()
    assert [prefix.tokens for prefix in prefixes] == [20, 16, 12]
    assert prefixes[0].key == chains[0][4].key and all(prefix.complete for prefix in prefixes)
    assert list(contents.broken()) == []
    (segment,) = tmp_path.glob("segment-*")
    raw = bytearray(segment.read_bytes())
    raw[-1] ^= 1
    with segment.open("r+b") as file:
        file.write(raw)
    assert list(look_into(CacheFolder(tmp_path, look_only=True)).broken()) == [chains[2][2].key]
    tier.close()


@given(place=st.integers(0), cut=st.booleans())
def test_a_damaged_archive_plants_nothing(tmp_path_factory: pytest.TempPathFactory, place: int, cut: bool) -> None:
    """I2: any bit flipped, or cut anywhere: an error or fewer pages, never a wrong one and never a huge allocation."""
    folder = tmp_path_factory.mktemp("archive")
    tier, _ = filled(folder / "here")
    archive = io.BytesIO()
    export(tier.folder, archive)
    tier.close()
    raw = bytearray(archive.getvalue())
    if cut:
        del raw[place % len(raw) :]
    else:
        raw[place // 8 % len(raw)] ^= 1 << place % 8
    there = DiskTier(CacheFolder(folder / "there"), 10**6, Clock())
    with contextlib.suppress(ConfigError):
        unpack(there, io.BytesIO(raw))
    for name, first in ((b"a", 0), (b"a", 100), (b"b", 0)):
        reads(there, refs_of(there, name, 5, first=first))
    there.close()
