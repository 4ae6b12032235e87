"""Public prefixes as the engine keeps them: by their whole pages, and no longer than they are declared."""

from __future__ import annotations

from tests.engine.toy import World


def test_prefixes_that_differ_past_their_whole_pages_are_one() -> None:
    world = World(page_size=4)
    public = world.engine.public
    one, same = public.declare([1, 2, 3, 4, 5]), public.declare([1, 2, 3, 4, 6, 7])
    assert one is same and len(list(public)) == 1
    other = public.declare([1, 2, 3, 4, 5, 6, 7, 8])
    assert other is not one
    public.withdraw(one.id)
    assert [prefix.id for prefix in public] == [other.id]


def test_what_is_withdrawn_while_it_is_computed_is_not_pinned() -> None:
    world = World(page_size=4)
    public = world.engine.public
    prefix = public.declare(list(range(1, 9)))
    public.withdraw(prefix.id)
    public.secure(prefix)
    assert prefix.hold is None and world.cache.stats().pinned_pages == 0
