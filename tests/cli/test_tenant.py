"""``pagetrie tenant``: keys are made, shown once, listed, replaced and taken back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from starlette.datastructures import Headers
from typer.testing import CliRunner, Result

from pagetrie.cli.main import app
from pagetrie.cli.serve import is_loopback
from pagetrie.errors import ConfigError
from pagetrie.kv import encode_namespace
from pagetrie.kv.keys import ChainKeys
from pagetrie.kv.tiers.disk import DiskTier
from pagetrie.kv.tiers.folder import CacheFolder
from pagetrie.kv.tiers.interface import PageRef
from pagetrie.server import keys_file
from pagetrie.server.auth import Caller, KeyedAccess, tenant_salt


class Tool:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.pages = path.parent / "pages"

    def __call__(self, *arguments: str) -> Result:
        environment = {"PAGETRIE_DISK_CACHE": str(self.pages), "PAGETRIE_NO_DISK_CACHE": ""}
        return CliRunner().invoke(app, ["tenant", *arguments, "--api-keys", str(self.path)], env=environment)

    def key(self, *arguments: str) -> str:
        result = self(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    def who(self, key: str) -> Caller | None:
        return KeyedAccess(self.path, 100).identify(Headers({"authorization": f"Bearer {key}"}))


@pytest.fixture
def tool(tmp_path: Path) -> Tool:
    return Tool(tmp_path / "keys.json")


def test_add_makes_keys_that_work(tool: Tool) -> None:
    first = tool.key("add", "acme", "--weight", "2", "--max-body-size", "1MiB")
    second = tool.key("add", "acme", "--admin", "--max-requests", "5")
    one, two = tool.who(first), tool.who(second)
    assert one is not None and two is not None
    assert one.tenant == two.tenant and (one.tenant.name, one.tenant.weight) == ("acme", 2.0)
    assert one.limits == two.limits and (one.limits.max_body_bytes, one.limits.max_requests) == (2**20, 5)
    assert (one.admin, two.admin) == (False, True)


def test_list_shows_ids_and_limits_but_no_secret(tool: Tool) -> None:
    key = tool.key("add", "acme", "--tokens-per-minute", "500")
    file = keys_file.load(tool.path)
    shown = tool("list").stdout
    assert "acme weight=1 tokens_per_minute=500" in shown and file.keys[0].id in shown
    assert not any(secret in shown for secret in (key, file.secret, file.tenants["acme"].secret, file.keys[0].sha256))


def test_rotate_replaces_keys_and_keeps_the_pages(tool: Tool) -> None:
    old = tool.key("add", "acme", "--admin")
    before = tool.who(old)
    new = tool.key("rotate", "acme")
    after = tool.who(new)
    assert tool.who(old) is None
    assert before is not None and after is not None
    assert before.tenant.salt == after.tenant.salt and after.admin


def test_rm_takes_back_one_key_or_the_tenant_with_its_secret(tool: Tool) -> None:
    first, second, other = tool.key("add", "acme"), tool.key("add", "acme"), tool.key("add", "other")
    secret = keys_file.load(tool.path).tenants["acme"].secret
    assert tool("rm", "acme", "--key", keys_file.load(tool.path).keys[0].id).exit_code == 0
    assert tool.who(first) is None and tool.who(second) is not None
    assert tool("rm", "acme").exit_code == 0
    assert tool.who(second) is None and tool.who(other) is not None
    assert secret not in tool.path.read_text()


def test_rm_deletes_the_tenants_pages_from_a_disk_cache_that_no_server_uses(tool: Tool) -> None:
    for name in ("acme", "other"):
        tool.key("add", name)
    records = keys_file.load(tool.path).tenants
    spaces = {name: encode_namespace({"tenant": tenant_salt(record.secret)}) for name, record in records.items()}
    tier = DiskTier(CacheFolder(tool.pages), 10**6)
    keys = ChainKeys(tier.folder.secret)
    root = {name: keys.root(space) for name, space in spaces.items()}
    refs = {
        name: PageRef(keys.page(root[name], b"1234"), root[name], root[name], b"1234") for name in ("acme", "other")
    }
    tier.put([(ref, np.full(500, 7, np.uint8)) for ref in refs.values()])
    assert "drops its pages within seconds" in tool("rm", "other").stdout  # the tier stands for a server
    tier.close()
    assert "deleted 1 pages" in tool("rm", "acme").stdout
    tier = DiskTier(CacheFolder(tool.pages), 10**6)
    assert not tier.holds(refs["acme"].key) and tier.holds(refs["other"].key)
    tier.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "../../etc/passwd"), "a tenant's name has"),
        (("add", ""), "a tenant's name has"),
        (("add", "Acme"), "a tenant's name has"),
        (("add", "a" * 64), "a tenant's name has"),
        (("add", "acme\n"), "a tenant's name has"),
        (("add", "acme", "--weight", "0"), "--weight: .* greater than 0"),
        (("add", "acme", "--max-body-size", "lots"), "--max-body-size: .*not a size"),
        (("add", "acme", "--cache-floor", "2"), "--cache-floor: .* less than or equal to 1"),
        (("add", "acme", "--cache-floor", "0.5", "--cache-cap", "0.4"), "0.5.* is more than cache_cap .0.4"),
        (("add", "acme", "--cache-floor", "0.5"), r"guaranteed 1\.1 of the cache together"),
        (("rotate", "nobody"), "no tenant 'nobody'"),
        (("rm", "nobody"), "no tenant 'nobody'"),
        (("rm", "known", "--key", "x"), "no key with the id 'x'"),
    ],
)
def test_mistakes_are_told_and_change_nothing(tool: Tool, arguments: tuple[str, ...], message: str) -> None:
    tool.key("add", "known", "--cache-floor", "0.6")
    before = tool.path.read_bytes()
    result = tool(*arguments)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception
    assert tool.path.read_bytes() == before


def test_which_addresses_are_this_machines_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.com", "", "localhost.example.com")))
