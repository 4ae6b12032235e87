"""Planted bugs: each changes one thing in the real code, as a person might by mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pagetrie.engine import planning
from pagetrie.engine.beam_search import BeamSearch, common_prefix
from pagetrie.engine.beams import BeamGroup
from pagetrie.engine.contexts import Context, Contexts
from pagetrie.engine.engine import Engine
from pagetrie.engine.output import ChoiceDelta
from pagetrie.engine.runner import SampleSpec
from pagetrie.engine.scheduler import Schedule, Scheduler
from pagetrie.engine.sequence import Sequence as Choice
from pagetrie.engine.text_stream import TextStream
from pagetrie.engine.victims import value
from pagetrie.engine.waiting import WaitingQueue
from pagetrie.kv.eviction.policy import RankPolicy
from pagetrie.kv.holds import Hold, HoldBook
from pagetrie.kv.interface import PendingPage
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.lease import Lease
from pagetrie.kv.manager import CacheManager
from pagetrie.kv.page_tree import Node, PageTree
from pagetrie.kv.pool import PagePool
from pagetrie.kv.radix import RadixIndex
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.kv.tiers.load import Load
from pagetrie.kv.tiers.stack import TierStack
from pagetrie.kv.transfers import Transfers

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

MUTATIONS: dict[str, Plant] = {}


def mutation(plant: Plant) -> Plant:
    MUTATIONS[plant.__name__] = plant
    return plant


# -- pages and leases ------------------------------------------------------------------------------------------------


@mutation
def skip_a_release(patch: Patch) -> None:
    """Closing gives back all private pages but the last."""
    release = PagePool.release

    def broken(self: PagePool, pages: Sequence[int]) -> None:
        release(self, pages[:-1] if len(pages) > 1 else pages)

    patch.setattr(PagePool, "release", broken)


@mutation
def share_without_reference(patch: Patch) -> None:
    """A fork takes its parent's pages without counting itself as a holder."""
    patch.setattr(PagePool, "share", lambda self, pages: None)


@mutation
def write_without_copying(patch: Patch) -> None:
    """A lease that shares its last page writes it all the same."""
    extend = Lease.extend

    def broken(self: Lease, count: int) -> int:
        references = self._manager.pool.references
        tail = self.computed // self._manager.page_size
        shared = tail < len(self.pages) and references[self.pages[tail]] > 1
        if shared:
            references[self.pages[tail]] -= 1
        missing = extend(self, count)
        if shared:
            references[self.pages[tail]] += 1
        return missing

    patch.setattr(Lease, "extend", broken)


@mutation
def commit_twice(patch: Patch) -> None:
    """A prompt's chunk is counted twice where that many tokens are known."""
    commit = Lease.commit

    def broken(self: Lease, count: int) -> None:
        commit(self, count)
        if count > 1 and self.computed + count < min(len(self), len(self.pages) * self._manager.page_size):
            commit(self, count)

    patch.setattr(Lease, "commit", broken)


@mutation
def publish_an_unfinished_page(patch: Patch) -> None:
    """The page that a chunk ends in is published, though its last tokens are still to be computed."""
    publish = Lease._publish_pages

    def broken(self: Lease, full: int) -> None:
        size = self._manager.page_size
        more = full < len(self.pages) and (full + 1) * size <= len(self) and self.computed % size
        publish(self, full + bool(more))

    patch.setattr(Lease, "_publish_pages", broken)


@mutation
def publish_a_doubtful_tail(patch: Patch) -> None:
    """After a failed step the last page is published like any other."""
    close = Lease.close
    patch.setattr(Lease, "close", lambda self, publish_tail=True: close(self))


@mutation
def forget_copies(patch: Patch) -> None:
    """The last of a step's copies isn't handed to the runner."""
    take = CacheManager.take_copies
    patch.setattr(CacheManager, "take_copies", lambda self: take(self)[:-1])


@mutation
def turn_copies_round(patch: Patch) -> None:
    """Copies are handed out last first."""
    take = CacheManager.take_copies
    patch.setattr(CacheManager, "take_copies", lambda self: take(self)[::-1])


@mutation
def start_a_token_late_after_a_hit(patch: Patch) -> None:
    """A partial hit claims one token more than matched."""
    partial = PageTree._match_partial

    def broken(self: PageTree, match: Any, query: bytes) -> None:
        partial(self, match, query)
        if 0 < match.partial_tokens < len(query) // 4:
            match.partial_tokens += 1

    patch.setattr(PageTree, "_match_partial", broken)


# -- the index -------------------------------------------------------------------------------------------------------


@mutation
def evict_a_pinned_page(patch: Patch) -> None:
    """A leaf that a lease takes hold of stays among those that may go."""
    remove = RankPolicy.remove

    def broken(self: RankPolicy, node: Node) -> None:
        if not node.pins:
            remove(self, node)

    patch.setattr(RankPolicy, "remove", broken)


@mutation
def evict_the_front_of_a_leaf(patch: Patch) -> None:
    """Eviction takes a long leaf's first pages and leaves the rest under the same tokens."""
    take = PagePool.take_from_index
    evict = PageTree.evict

    def broken(self: PageTree, wanted: int, *whose: Any, **only: Any) -> int:
        def turned(pool: PagePool, pages: Any) -> None:
            given = list(pages)
            leaf = next((node for node in self.nodes() if given and given[0] == (node.pages or [-1])[-1]), None)
            if leaf is not None and len(given) < len(leaf.pages):
                leaf.pages[:] = leaf.pages[::-1]
                given = [*leaf.pages[: -len(given) - 1 : -1]]
            take(pool, given)

        patch.setattr(PagePool, "take_from_index", turned)
        return evict(self, wanted, *whose, **only)

    patch.setattr(PageTree, "evict", broken)


@mutation
def ignore_the_namespace(patch: Patch) -> None:
    """All tenants share."""
    patch.setattr(Engine, "namespace", lambda self, salt="", tenant=None: b"")


@mutation
def hit_the_whole_prompt(patch: Patch) -> None:
    """A prompt that is wholly cached leaves nothing to compute."""
    match = RadixIndex.match
    patch.setattr(RadixIndex, "match", lambda self, space, tokens, limit: match(self, space, tokens, limit + 1))


@mutation
def keep_what_was_reset(patch: Patch) -> None:
    """A reset frees what is cached but goes on handing out what is held."""

    def reset(self: PageTree) -> tuple[int, int]:
        return self.evict(self.cached_pages, self.pool.common), self.active_pages

    patch.setattr(PageTree, "reset", reset)


# -- the scheduler ---------------------------------------------------------------------------------------------------


@mutation
def admit_without_pages(patch: Patch) -> None:
    """Pages that are missing are taken for granted."""
    extend = Lease.extend

    def broken(self: Lease, count: int) -> int:
        extend(self, count)
        return 0

    patch.setattr(Lease, "extend", broken)


@mutation
def drop_a_victim(patch: Patch) -> None:
    """A preempted sequence never comes back."""
    preempt = Scheduler._preempt

    def broken(self: Scheduler, victim: Choice, plan: Schedule) -> None:
        preempt(self, victim, plan)
        self.waiting.remove(victim)

    patch.setattr(Scheduler, "_preempt", broken)


@mutation
def deliver_twice_after_preemption(patch: Patch) -> None:
    """A victim goes back by a token, which is then handed out again."""
    preempt = Scheduler._preempt

    def broken(self: Scheduler, victim: Choice, plan: Schedule) -> None:
        preempt(self, victim, plan)
        if victim.output_ids:
            victim.output_ids.pop()
            victim.ids.pop()

    patch.setattr(Scheduler, "_preempt", broken)


@mutation
def leak_a_seat_on_cancel(patch: Patch) -> None:
    """A cancelled sequence keeps its place among the running ones."""
    end = Engine._end

    def broken(self: Engine, state: Any, reason: Any, error: Any = None) -> Any:
        running = self._scheduler.running
        left = [sequence for sequence in running if sequence.state is state]
        output = end(self, state, reason, error)
        running.extend(left if reason == "abort" else [])
        return output

    patch.setattr(Engine, "_end", broken)


@mutation
def exceed_the_seats(patch: Patch) -> None:
    """A request with n choices is counted as one."""
    patch.setattr(Choice, "seats", property(lambda self: 1))


# -- the engine ------------------------------------------------------------------------------------------------------


@mutation
def lose_a_stop_hold_back(patch: Patch) -> None:
    """Text that may become a stop string is shown at once."""
    patch.setattr("pagetrie.engine.text_stream._overlap", lambda text, stop: 0)


@mutation
def hold_back_for_good(patch: Patch) -> None:
    """What was held back at the end isn't handed out."""
    patch.setattr(TextStream, "finish", lambda self: "")


@mutation
def lose_a_token(patch: Patch) -> None:
    """Of two tokens that reach one delta, and of those held back, only the text arrives."""
    delta = Engine._delta

    def broken(self: Engine, sequence: Choice, outputs: Any) -> ChoiceDelta:
        found = delta(self, sequence, outputs)
        if len(sequence.output_ids) % 7 == 6:
            found.token_ids = []
        return found

    patch.setattr(Engine, "_delta", broken)


@mutation
def one_seed_for_all_choices(patch: Patch) -> None:
    """The choices of a request draw the same numbers."""
    spec = planning._sample_spec

    def broken(sequence: Choice, fork: int) -> SampleSpec:
        return spec(sequence, 0)

    patch.setattr(planning, "_sample_spec", broken)


@mutation
def forget_the_queue_cap(patch: Patch) -> None:
    """The queue takes whatever comes."""
    patch.setattr(Engine, "num_waiting", property(lambda self: 0))


# -- fairness --------------------------------------------------------------------------------------------------------


@mutation
def preempt_without_end(patch: Patch) -> None:
    """However often a sequence was preempted, it may be again."""
    patch.setattr("pagetrie.engine.scheduler.is_guaranteed", lambda sequence: False)
    patch.setattr("pagetrie.engine.victims.is_guaranteed", lambda sequence: False)


@mutation
def preempt_the_most_important(patch: Patch) -> None:
    """Low priorities are taken for unimportant."""

    def turned(sequence: Choice) -> tuple[bool, int, int, int, int]:
        guaranteed, priority, progress, order, index = value(sequence)
        return guaranteed, -priority, progress, order, index

    patch.setattr("pagetrie.engine.scheduler.value", turned)
    patch.setattr("pagetrie.engine.victims.value", turned)


@mutation
def pass_without_end(patch: Patch) -> None:
    """A request that doesn't fit is passed for as long as smaller ones come."""

    def may_be_passed(self: Scheduler, sequence: Choice) -> bool:
        sequence.bypasses = -1
        return True

    patch.setattr(Scheduler, "_may_be_passed", may_be_passed)


@mutation
def forget_the_time_of_passing(patch: Patch) -> None:
    """Passing ends by the number of those that passed only."""
    may_be_passed = Scheduler._may_be_passed

    def broken(self: Scheduler, sequence: Choice) -> bool:
        sequence.blocked_at = None
        return may_be_passed(self, sequence)

    patch.setattr(Scheduler, "_may_be_passed", broken)


@mutation
def never_age(patch: Patch) -> None:
    """However long a request waits, its level is its priority."""
    patch.setattr(Scheduler, "level", lambda self, priority: priority)


@mutation
def start_newcomers_before_victims(patch: Patch) -> None:
    """A victim waits until no newcomer fits."""
    following = WaitingQueue.next

    def broken(self: WaitingQueue, passed: Any = ()) -> Choice | None:
        return self._next_fresh(passed) or following(self, passed)

    patch.setattr(WaitingQueue, "next", broken)


@mutation
def leave_a_victim_in_the_step(patch: Patch) -> None:
    """A preempted sequence is still computed in the step that took its pages."""
    patch.setattr(Schedule, "drop", lambda self, sequence: None)


@mutation
def never_wake_who_waits_for_a_page(patch: Patch) -> None:
    """Who waits for a page that another computes waits on when it is done."""
    patch.setattr(WaitingQueue, "wake", lambda self, **options: None)


# -- deadlines and contexts ------------------------------------------------------------------------------------------


@mutation
def never_time_out(patch: Patch) -> None:
    """Deadlines are kept and not looked at."""
    patch.setattr(Engine, "_expire", lambda self, now, outputs: None)


@mutation
def time_out_early(patch: Patch) -> None:
    """A request's time ends a tenth of a second too soon."""
    expire = Engine._expire
    patch.setattr(Engine, "_expire", lambda self, now, outputs: expire(self, now + 0.1, outputs))


@mutation
def keep_the_hold_of_a_deleted_context(patch: Patch) -> None:
    """A context goes and its pages stay pinned."""

    def close(self: Contexts, context: Context) -> None:
        context.closed = True
        del self._owners[context.owner][context.id]
        self._count -= 1

    patch.setattr(Contexts, "_close", close)


@mutation
def append_what_was_cut_off(patch: Patch) -> None:
    """A context becomes prompt and answer though the client left half-way."""
    leave = Engine._leave_context
    patch.setattr(Engine, "_leave_context", lambda self, sequence, reason: leave(self, sequence, "stop"))


@mutation
def hold_without_a_pin(patch: Patch) -> None:
    """A held prefix is written down and not protected."""
    add = HoldBook.add

    def broken(self: HoldBook, nodes: list[Node], pages: list[int], tokens: int) -> Hold:
        hold = add(self, nodes, pages, tokens)
        for node in nodes:
            self._index.unpin(node)
        hold._nodes = []
        return hold

    patch.setattr(HoldBook, "add", broken)


# -- beams -----------------------------------------------------------------------------------------------------------


@mutation
def keep_the_pages_of_dropped_beams(patch: Patch) -> None:
    """The lease of a beam that isn't continued stays open."""
    take = BeamGroup.take

    def broken(self: BeamGroup, lease: Any, results: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Lease, "close", lambda self, publish_tail=True: None)
            return take(self, lease, results)

    patch.setattr(BeamGroup, "take", broken)


@mutation
def continue_the_wrong_beams(patch: Patch) -> None:
    """Leases are handed to the next beams in the order of the old ones, not by who continues whom."""
    advance = BeamSearch.advance

    def broken(self: BeamSearch, likeliest: Any) -> list[int]:
        return sorted(advance(self, likeliest))

    patch.setattr(BeamSearch, "advance", broken)


@mutation
def fold_beams_too_far(patch: Patch) -> None:
    """A preempted group is taken to have a token more in common than it has."""

    def broken(sequences: Any) -> int:
        return common_prefix(list(sequences)) + 1

    patch.setattr("pagetrie.engine.beams.common_prefix", broken)


# -- tiers below the pool --------------------------------------------------------------------------------------------


@mutation
def skip_the_checksum(patch: Patch) -> None:
    """What a tier reads is taken for what was asked for if its length is right."""

    def broken(head: Any, ref: PageRef, data: Any, seal: Any) -> bool:
        return head is not None and head.page_bytes == memoryview(data).nbytes

    patch.setattr("pagetrie.kv.tiers.disk.matches", broken)
    patch.setattr("pagetrie.kv.tiers.store.matches", broken)


@mutation
def forget_the_page_before(patch: Patch) -> None:
    """A page is named by its own tokens only."""
    patch.setattr(ChainKeys, "page", lambda self, parent, tokens: ChainKeys.root(self, tokens))


@mutation
def free_a_page_that_is_filled(patch: Patch) -> None:
    """A load that is given up frees its pages though one of them is being written."""

    def cancel(self: Load) -> bool:
        self._cancelled = True
        return True

    patch.setattr(Load, "cancel", cancel)


@mutation
def fill_pages_after_the_deadline(patch: Patch) -> None:
    """A load that is given up goes on."""
    patch.setattr(Load, "cancel", lambda self: not self.lock.locked())


@mutation
def publish_what_has_not_arrived(patch: Patch) -> None:
    """A page counts as filled while it still is."""
    publish = Transfers._publish

    def broken(self: Transfers, flight: Any, arrived: int, now: float) -> None:
        publish(self, flight, min(arrived + 1, len(flight.load.refs)), now)

    patch.setattr(Transfers, "_publish", broken)


@mutation
def take_a_failed_load_for_whole(patch: Patch) -> None:
    """A tier that ends early is believed to have brought all."""
    run = Load._run_tier

    def broken(self: Load, *arguments: Any) -> bool:
        run(self, *arguments)
        self.ready = len(self.refs)
        return True

    patch.setattr(Load, "_run_tier", broken)


@mutation
def keep_the_pages_of_a_failed_load(patch: Patch) -> None:
    """What a load didn't fill is never freed."""
    end = Transfers._end

    def broken(self: Transfers, flight: Any, now: float) -> None:
        kept = flight.load.pages[flight.published :]
        self._manager.pool.share(kept)
        end(self, flight, now)

    patch.setattr(Transfers, "_end", broken)


@mutation
def queue_the_page_itself(patch: Patch) -> None:
    """A page waits for a writer uncopied, and is evicted and filled anew meanwhile."""

    def write(self: TierStack, ref: PageRef, page: int) -> int:
        for queue in self._queues:
            if queue.lacks(ref.key):
                queue.worker.submit(lambda tier=queue.tier: tier.put(((ref, self.memory.read_page(page)),)))
        return 0

    patch.setattr(TierStack, "write", write)


@mutation
def wait_for_a_tier_without_end(patch: Patch) -> None:
    """A load has no deadline."""
    patch.setattr(Transfers, "_goes_on", lambda self, flight, arrived, now: True)


@mutation
def find_what_was_reset_in_a_tier(patch: Patch) -> None:
    """After a reset pages go by their old names, and tiers keep what they had."""

    def reset(self: Transfers) -> None:
        self._roots.clear()
        self.settle()

    patch.setattr(Transfers, "reset", reset)


@mutation
def forget_who_waits_for_a_load(patch: Patch) -> None:
    """A load that fails wakes nobody."""
    leave = Transfers._leave

    def broken(self: Transfers, flight: Any, now: float) -> None:
        pending = flight.pending
        flight.pending = PendingPage()
        leave(self, flight, now)
        flight.pending = pending

    patch.setattr(Transfers, "_leave", broken)
