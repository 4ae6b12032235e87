"""Chain keys: unpredictable without the secret, the same in every process with it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagetrie.kv
from pagetrie.kv import CacheManager
from pagetrie.kv.keys import KEY_BYTES, ChainKeys
from pagetrie.kv.tokens import pack_tokens

SECRET, OTHER_SECRET = bytes(range(32)), bytes(range(1, 33))

CHAIN = """
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tokens import pack_tokens
keys = ChainKeys(bytes(range(32)))
key = keys.root(b"space")
for start in range(0, 64, 16):
    key = keys.page(key, pack_tokens(range(start, start + 16)))
    print(key.hex())
"""

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)


def chain(secret: bytes, namespace: bytes, pages: list[list[int]]) -> list[bytes]:
    keys = ChainKeys(secret)
    chain = [keys.root(namespace)]
    for page in pages:
        chain.append(keys.page(chain[-1], pack_tokens(page)))
    return chain


def test_two_secrets_have_no_common_key() -> None:
    pages = [[number] * 4 for number in range(200)]
    assert not set(chain(SECRET, b"space", pages)) & set(chain(OTHER_SECRET, b"space", pages))


def test_keys_are_stable_across_processes() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", CHAIN],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(pagetrie.kv.__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    here = chain(SECRET, b"space", [list(range(start, start + 16)) for start in range(0, 64, 16)])
    assert runs[0] == runs[1] == [key.hex() for key in here[1:]]


def test_keys_written_by_an_earlier_version_stay_valid() -> None:
    """Golden values: stored pages are found by them, so they change only together with a version."""
    root, page = chain(SECRET, b"space", [list(range(16))])
    assert len(root) == len(page) == KEY_BYTES
    assert root.hex() == "46df9f7f23bc290c959f863881961d2b4e61919671fbb9ad371f9b421bf1ce1c"
    assert page.hex() == "6b3c601e1b23b8bf35d7f7c40b65c0d159cd494ec4bfd6634437fdff970a3027"


@given(
    st.lists(tokens, max_size=3),
    st.lists(tokens, max_size=3),
    st.sampled_from([b"", b"a"]),
    st.sampled_from([b"", b"a"]),
)
def test_a_key_names_everything_before_it(a: list[list[int]], b: list[list[int]], left: bytes, right: bytes) -> None:
    same = (left, a) == (right, b)
    assert (chain(SECRET, left, a)[-1] == chain(SECRET, right, b)[-1]) == same


def test_a_namespace_that_looks_like_a_page_has_another_key() -> None:
    keys = ChainKeys(SECRET)
    parent = keys.root(b"space")
    assert keys.root(parent + pack_tokens([1])) != keys.page(parent, pack_tokens([1]))


def test_tokens_are_compared_at_their_full_width() -> None:
    """A5: 65 and 321 are equal in one byte; neighbours changed by (+31, -1) are equal to a rolling polynomial."""
    keys = ChainKeys(SECRET)
    pages = ([65, 9], [321, 9], [96, 8], [65 + 2**16, 9])
    assert len({keys.page(keys.root(b""), pack_tokens(page)) for page in pages}) == 4


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="must have 32 bytes, got 5"):
        CacheManager(num_pages=1, page_size=1, index="hash", secret=b"short")


def test_pythons_own_hash_is_in_no_key() -> None:
    for path in Path(pagetrie.kv.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "hash" not in names, f"{path.name} calls the builtin hash()"
