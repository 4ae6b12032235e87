"""Shared stores: a real Valkey, a folder and an S3 server through obstore, Mooncake, and one that fails when told."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.opening import TierOptions, open_tiers
from pagetrie.kv.tiers.store import FIRST_PAUSE, LONGEST_PAUSE, RETRY_SECONDS, Backend, StoreTier, open_backend
from tests.engine.toy import ToyMemory
from tests.kv.tiers.pages import PAGE_BYTES, SECRET, Clock, chain, content, read
from tests.kv.tiers.servers import S3, Mooncake, Valkey


def tier_on(backend: Backend, *, secret: bytes = SECRET, clock: Clock | None = None) -> StoreTier:
    return StoreTier(backend, secret=secret, bytes_per_page=PAGE_BYTES, title="test", clock=clock or Clock())


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture(
    params=[
        "valkey",
        "file",
        pytest.param("s3", marks=pytest.mark.slow),
        pytest.param("mooncake", marks=pytest.mark.slow),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/new/store"
    elif request.param == "valkey":
        server: Valkey = request.getfixturevalue("valkey")
        server.client.flushall()
        yield server.url
    else:
        other = S3(monkeypatch) if request.param == "s3" else Mooncake()
        yield other.url
        other.kill()


class BrokenBackend:
    """Keeps values in a dictionary; fails while ``error`` is set."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._call()
        return [name in self.values for name in names]

    def get(self, names: Sequence[str], limit: int) -> list[bytes | memoryview | None]:
        self._call()
        return [self.values.get(name) for name in names]

    def put(self, items: Sequence[tuple[str, bytes]]) -> None:
        self._call()
        self.values.update(items)

    def close(self) -> None:
        pass


def test_what_one_stores_another_finds(url: str) -> None:
    refs = chain(30)
    one, two = tier_on(open_backend(url)), tier_on(open_backend(url))
    assert two.contains([ref.key for ref in refs]) == 0 and read(two, refs) == []
    assert one.put([(ref, content(ref)) for ref in refs[:20]]) == 20
    assert one.holds(refs[0].key) and not two.holds(refs[0].key)
    assert two.contains([ref.key for ref in refs]) == 20 and two.holds(refs[19].key)
    assert read(two, refs) == refs[:20]
    assert two.stats.hit_pages == 20 and two.stats.failed_pages == 2
    assert two.put([(ref, content(ref)) for ref in refs]) == 30
    assert two.stats.stored_pages == 10, "what is there already isn't sent again"
    assert read(one, refs) == refs
    one.close()
    two.close()


def test_servers_with_other_secrets_share_nothing(url: str) -> None:
    """D10, H1: a page under another secret doesn't verify, even if its name is known."""
    refs = chain(3)
    one, two = tier_on(open_backend(url)), tier_on(open_backend(url), secret=bytes(32))
    one.put([(ref, content(ref)) for ref in refs])
    assert read(two, refs) == [] and read(one, refs) == refs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "mooncake"])
def test_other_stores_that_die(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A miss and one line in the log; closing doesn't hang."""
    server, clock = S3(monkeypatch) if kind == "s3" else Mooncake(), Clock()
    tier, refs = tier_on(open_backend(server.url), clock=clock), chain(4)
    try:
        assert tier.put([(ref, content(ref)) for ref in refs]) == 4 and read(tier, refs) == refs
    finally:
        server.kill()
    for _ in range(2):
        assert read(tier, refs) == [] and tier.contains([refs[0].key]) == 0
        assert tier.put([(ref, content(ref)) for ref in chain(1, name=b"new")]) == 0
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and not tier.stats.healthy
    tier.close()


def test_planted_values_are_misses(valkey: Valkey) -> None:
    """H4 and D6: pickles, other pages' bytes, short, long and empty values: a miss, and nothing is run."""
    refs = chain(2)
    tier = tier_on(open_backend(valkey.url))
    tier.put([(ref, content(ref)) for ref in refs])
    names = ["pagetrie:page:1:" + ref.key.hex() for ref in refs]
    good = [valkey.client.get(name) for name in names]
    assert isinstance(good[0], bytes)

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit",)

    flipped = good[0][:-1] + bytes([good[0][-1] ^ 1])
    for value in (pickle.dumps(Bomb()), good[1], good[0][:-1], good[0] + b"x", good[0] * 500, b"", flipped):
        valkey.client.set(names[0], value)  # type: ignore[arg-type]
        assert read(tier, refs) == []
    valkey.client.set(names[0], good[0])
    assert read(tier, refs) == refs


def test_a_store_that_dies_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line per outage; afterwards all is as before."""
    server, clock = Valkey(tmp_path), Clock()
    tier, refs = tier_on(open_backend(server.url), clock=clock), chain(4)
    try:
        assert tier.put([(ref, content(ref)) for ref in refs]) == 4
        reading = tier.get(refs)
        next(reading)
        server.kill()
        for _ in range(5):
            assert read(tier, refs) == [] and tier.contains([refs[0].key]) == 0
            assert tier.put([(ref, content(ref)) for ref in refs]) == 0
            clock.now += 0.5
        assert len(caplog.records) == 1 and not tier.stats.healthy and "left alone" in tier.stats.problem
        server.start()
        clock.now += LONGEST_PAUSE
        assert tier.holds(refs[1].key)
        assert tier.contains([b"k" * 32]) == 0
        assert not tier.holds(refs[1].key), "it may have begun anew, so nothing is known to be there"
        assert tier.put([(ref, content(ref)) for ref in refs]) == 4 and read(tier, refs) == refs
        assert len(caplog.records) == 2 and tier.stats.healthy and not tier.stats.problem
    finally:
        server.kill()


def test_values_that_a_store_gave_up_are_stored_again(valkey: Valkey) -> None:
    """D6: what is found missing, by a question or a read, counts as there no longer."""
    refs = chain(6)
    tier = tier_on(open_backend(valkey.url))
    tier.put([(ref, content(ref)) for ref in refs])
    for number in (1, 3, 5):
        valkey.client.delete("pagetrie:page:1:" + refs[number].key.hex())
    assert tier.contains([ref.key for ref in refs[:4]]) == 1
    assert [tier.holds(ref.key) for ref in refs] == [True, False, True, False, True, True]
    assert read(tier, refs[4:]) == refs[4:5]
    assert [tier.holds(ref.key) for ref in refs] == [True, False, True, False, True, False]
    tier.close()


@pytest.mark.parametrize("why", ["full", "a replica"])
def test_a_store_that_takes_nothing_is_still_read(tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """D3: no room is no outage: one line, no more values sent for a while, and what is there is found."""
    server, clock = Valkey(tmp_path), Clock()
    tier, refs = tier_on(open_backend(server.url), clock=clock), chain(4)
    try:
        assert tier.put([(ref, content(ref)) for ref in refs[:2]]) == 2
        if why == "full":
            server.client.config_set("maxmemory", 1)
        else:
            server.client.replicaof("127.0.0.1", 1)  # of nobody who is there
        for _ in range(3):
            assert tier.put([(ref, content(ref)) for ref in refs[2:]]) == 0
        assert read(tier, refs[:2]) == refs[:2] and tier.contains([ref.key for ref in refs]) == 2
        assert not tier.stats.healthy and "takes no pages" in tier.stats.problem
        assert tier.stats.refused_pages == 6 and len(caplog.records) == 1
        server.client.config_set("maxmemory", 0)
        server.client.replicaof("no", "one")
        clock.now += RETRY_SECONDS
        assert tier.put([(ref, content(ref)) for ref in refs]) == 4 and read(tier, refs) == refs
        assert tier.stats.healthy
    finally:
        server.kill()


def test_a_failing_store_is_asked_less_and_less() -> None:
    backend, clock = BrokenBackend(), Clock()
    tier = tier_on(backend, clock=clock)
    backend.error = OSError("planted")
    asked = []
    for _ in range(400):
        tier.contains([b"k" * 32])
        asked.append(backend.calls)
        clock.now += 1.0
    assert asked[0] == 1 and asked[int(FIRST_PAUSE)] == 2
    assert asked[-1] <= 7 + 400 / LONGEST_PAUSE
    backend.error = None
    clock.now += LONGEST_PAUSE
    (ref,) = chain(1)
    assert tier.put([(ref, content(ref))]) == 1 and read(tier, [ref]) == [ref]


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_what_began_before_an_outage_tells_nothing_of_its_end(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    """A question is on its way while a read fails: however it ends, the store is left alone as if it weren't there."""
    clock, refs = Clock(), chain(2)

    class Concurrent(BrokenBackend):
        def exists(self, names: Sequence[str]) -> list[bool]:
            if not caplog.records:
                self.error = OSError("planted")
                assert read(tier, refs) == []
                self.error = OSError("planted, too") if ends == "badly" else None
            return super().exists(names)

    backend = Concurrent()
    tier = tier_on(backend, clock=clock)
    tier.contains([refs[0].key])
    backend.error = None
    calls = backend.calls
    clock.now += 0.99 * FIRST_PAUSE
    assert tier.contains([refs[0].key]) == 0 and backend.calls == calls and not tier.stats.healthy
    clock.now += 0.01 * FIRST_PAUSE
    assert tier.put([(ref, content(ref)) for ref in refs]) == 2 and tier.stats.healthy
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [("ftp://x", "no kind of store"), ("redis://h:notaport", "can't open the store redis://h:notaport")],
)
def test_stores_that_cannot_be(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tiers(TierOptions(store=url, secret=SECRET), ToyMemory(4, 4))


def test_a_store_needs_a_secret_and_hides_its_password() -> None:
    with pytest.raises(ConfigError, match="needs a secret"):
        open_tiers(TierOptions(store="redis://localhost"), ToyMemory(4, 4))
    with pytest.raises(ConfigError, match=r"^can't open the store redis://h:x: "):
        open_tiers(TierOptions(store="redis://user:hunter2@h:x", secret=SECRET), ToyMemory(4, 4))
