"""Random histories for the harness."""

from __future__ import annotations

import random
from collections import Counter

from tests.kv.oracle import GARBAGE, Harness, Held

ALPHABET = (65, 321, 96)
"""65 and 321 are equal modulo 256; 96 is 65 + 31."""
NAMESPACES = (b"a", b"b")


class RandomDriver:
    """Random operations, weighted towards what is hard: shared prefixes, page edges, a short pool."""

    def __init__(self, harness: Harness, seed: int, max_leases: int = 6) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        self.max_leases = max_leases
        self.seen: list[list[int]] = [[ALPHABET[0]]]
        self.longest = min(harness.manager.num_pages, 6) * harness.size

    def prompt(self) -> list[int]:
        rng, size = self.rng, self.harness.size
        base = rng.choice(self.seen)
        if rng.random() < 0.15:
            base = []
        elif rng.random() < 0.2 and self.harness.leases:  # what a running lease may be computing
            return rng.choice(self.harness.leases).tokens[: self.longest]
        if rng.random() < 0.5:
            cut = rng.randrange(len(base) + 1)
        else:
            cut = rng.randrange(len(base) // size + 2) * size + rng.choice((-1, 0, 0, 1))
        tokens = base[: max(0, cut)] + rng.choices(ALPHABET, k=rng.choice((0, 1, 2, size, rng.randrange(2 * size + 2))))
        tokens = tokens[: self.longest] or [rng.choice(ALPHABET)]
        self.seen = [*self.seen[-7:], tokens]
        return tokens

    def operate(self) -> None:
        """One operation, or a step made of several."""
        rng, harness = self.rng, self.harness
        room = len(harness.leases) < self.max_leases
        if rng.random() < 0.12:
            self.operate_on_holds()
            return
        if not harness.leases or (room and rng.random() < 0.3):
            harness.open(self.prompt(), rng.choice(NAMESPACES), lookup=rng.random() < 0.95, publish=rng.random() < 0.95)
            return
        held, choice = rng.choice(harness.leases), rng.random()
        if choice < 0.08:
            harness.extend(held, rng.randrange(1, 2 * harness.size + 2))
        elif choice < 0.14 and room:
            harness.fork(held)
        elif choice < 0.30:
            if rng.random() < 0.6:
                self.seen = [*self.seen[-7:], held.tokens[: held.computed + 1]]
            harness.close(held, publish_tail=rng.random() < 0.85)
        elif choice < 0.305:
            harness.reset()
        else:
            self.step()

    def operate_on_holds(self) -> None:
        rng, harness = self.rng, self.harness
        choice = rng.random()
        if not harness.holds or (len(harness.holds) < 4 and choice < 0.5):
            harness.hold(self.prompt(), rng.choice(NAMESPACES))
        elif choice < 0.65 and len(harness.holds) < 4:
            harness.fork_hold(rng.choice(harness.holds))
        elif choice < 0.75:
            harness.touch_hold(rng.choice(harness.holds))
        elif choice < 0.85:
            harness.give_up_hold()
        else:
            harness.release(rng.choice(harness.holds))

    def step(self) -> None:
        """Plan as a scheduler does (append, extend, now and then preempt), compute, commit."""
        rng, harness = self.rng, self.harness
        chosen = rng.sample(harness.leases, rng.randrange(1, len(harness.leases) + 1))
        shares: list[tuple[Held, int]] = []
        for held in chosen:
            if held not in harness.leases:
                continue
            if held.computed >= len(held.tokens):
                harness.append(held, rng.choices(ALPHABET, k=rng.choice((1, 1, 1, 2, 5))))
            count = min(rng.choice((1, 1, harness.size, 3 * harness.size)), len(held.tokens) - held.computed)
            if harness.extend(held, count):
                shares.append((held, count))
            elif rng.random() < 0.5:
                victim = rng.choice(harness.leases)
                shares = [share for share in shares if share[0] is not victim]
                harness.close(victim)
            harness.check()
        harness.compute(shares)
        if rng.random() < 0.03:  # the step fails halfway: what it wrote is in doubt
            for held, count in shares:
                harness.write(held, held.computed + rng.randrange(count), GARBAGE)
                harness.close(held, publish_tail=False)
        else:
            for held, count in shares:
                part = rng.randrange(count + 1) if rng.random() < 0.2 else 0
                for amount in (part, count - part):
                    if amount:
                        harness.commit(held, amount)
                        harness.check()
        harness.poison_free_pages()

    def run(self, operations: int) -> Counter[str]:
        """At least this many operations, with a check after each; how many of each kind were made."""
        while len(self.harness.trace) < operations:
            try:
                self.operate()
                self.harness.check()
            except AssertionError as error:
                error.add_note(f"after {len(self.harness.trace)} operations")
                raise
        return Counter(name for name, _ in self.harness.trace)

    def finish(self) -> None:
        """Close everything: nothing is left but cached pages, and a reset frees these."""
        for held in list(self.harness.leases):
            self.harness.close(held)
            self.harness.check()
        while self.harness.holds:
            self.harness.release(self.harness.holds[0])
            self.harness.check()
        assert self.harness.manager.stats().active_pages == 0
        self.harness.reset()
        self.harness.check()
        assert self.harness.manager.stats().free_pages == self.harness.manager.num_pages
