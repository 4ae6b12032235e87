"""Where options come from, which source wins, and how bad ones are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagetrie.errors import ConfigError
from pagetrie.settings import Settings, format_size, load_settings, parse_size


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No PAGETRIE_* variable and an empty working directory; returns the directory."""
    for name in list(os.environ):
        if name.upper().startswith("PAGETRIE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("64kib", 64 << 10),
        ("1.5GB", 1_500_000_000),
        ("3MB", 3_000_000),
        ("7kB", 7_000),
        ("100b", 100),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes_are_read(text: object, size: int) -> None:
    assert parse_size(text) == size
    assert load_settings({"kv_memory": text}).kv_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 bananas", "2G", "1e9", "0", "0GiB", 1.5])
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory: "):
        load_settings({"kv_memory": text})


def test_sizes_are_written_for_people() -> None:
    assert [format_size(n) for n in (700, 1536, 1 << 30, 5 << 40)] == ["700 B", "1.5 KiB", "1 GiB", "5 TiB"]


def test_flag_beats_variable_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch, bare_environment: Path) -> None:
    assert load_settings({}).port == 8000
    (bare_environment / "pagetrie.toml").write_text('port = 1111\nhost = "0.0.0.0"\nmax_num_seqs = 3\n')
    assert load_settings({}).port == 1111
    monkeypatch.setenv("PAGETRIE_PORT", "2222")
    monkeypatch.setenv("PAGETRIE_HOST", "::1")
    assert load_settings({}).port == 2222
    settings = load_settings({"port": 3333, "host": None})
    assert (settings.port, settings.host, settings.max_num_seqs, settings.page_size) == (3333, "::1", 3, 16)


def test_a_named_file_replaces_the_one_in_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, bare_environment: Path
) -> None:
    (bare_environment / "pagetrie.toml").write_text("port = 1111\nmax_queue = 5\n")
    named = bare_environment / "named.toml"
    named.write_text("port = 4444\n")
    assert (load_settings({}, named).port, load_settings({}, named).max_queue) == (4444, 1024)
    monkeypatch.setenv("PAGETRIE_CONFIG", str(named))
    assert load_settings({}).port == 4444
    monkeypatch.delenv("PAGETRIE_CONFIG")
    assert load_settings({}, default_file=False).port == 8000


def test_made_directly_it_reads_neither_environment_nor_file(
    monkeypatch: pytest.MonkeyPatch, bare_environment: Path
) -> None:
    (bare_environment / "pagetrie.toml").write_text("port = 1111\n")
    monkeypatch.setenv("PAGETRIE_PORT", "2222")
    assert Settings().port == 8000


def test_the_stronger_source_decides_the_size_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, bare_environment: Path
) -> None:
    (bare_environment / "pagetrie.toml").write_text("num_pages = 10\n")
    monkeypatch.setenv("PAGETRIE_KV_MEMORY", "1MiB")
    settings = load_settings({})
    assert (settings.kv_memory, settings.num_pages) == (1 << 20, None)
    settings = load_settings({"num_pages": 7})
    assert (settings.kv_memory, settings.num_pages) == (None, 7)


def test_two_sizes_of_the_pool_from_one_source_are_refused(bare_environment: Path) -> None:
    with pytest.raises(ConfigError, match="either --kv-memory or num_pages, not both"):
        load_settings({"num_pages": 7, "kv_memory": "1GiB"})
    (bare_environment / "pagetrie.toml").write_text('num_pages = 10\nkv_memory = "1GiB"\n')
    with pytest.raises(ConfigError, match=r"either kv_memory in pagetrie\.toml or num_pages, not both"):
        load_settings({})


def test_an_unknown_key_is_refused_with_a_near_one(bare_environment: Path) -> None:
    (bare_environment / "pagetrie.toml").write_text("num_page = 10\n")
    with pytest.raises(ConfigError) as caught:
        load_settings({})
    assert str(caught.value) == "unknown option 'num_page' in pagetrie.toml; did you mean 'num_pages'?"
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'$"):
        load_settings({"zzz": 1}, default_file=False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", 70000, ["65535", "70000"]),
        ("port", "http", ["integer", "'http'"]),
        ("page_size", 24, ["power of two", "24"]),
        ("page_size", 512, ["256", "512"]),
        ("num_pages", 0, ["greater than 0", "0"]),
        ("weights", "int3", ["'fp16'", "'fp32'", "'int3'"]),
        ("prefix_index", "btree", ["'radix'", "'btree'"]),
        ("max_model_len", 1, ["2", "1"]),
        ("shutdown_timeout", -1, ["-1"]),
        ("served_model_name", "", ["at least 1"]),
    ],
)
def test_a_bad_value_is_one_line_with_source_limit_and_value(
    name: str, value: object, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({name: value})
    message = str(caught.value)
    assert message.startswith("--" + name.replace("_", "-") + ": ")
    assert "\n" not in message
    assert all(word in message for word in words), message
    if value != "":
        monkeypatch.setenv(f"PAGETRIE_{name.upper()}", str(value))
        with pytest.raises(ConfigError, match=f"^PAGETRIE_{name.upper()}: "):
            load_settings({})


def test_a_bad_value_in_a_file_names_the_file(bare_environment: Path) -> None:
    (bare_environment / "odd.toml").write_text("port = 'x'\nthreads = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_settings({}, Path("odd.toml"))
    assert "port in odd.toml: " in str(caught.value)
    assert "threads in odd.toml: " in str(caught.value)


def test_a_file_that_is_missing_or_not_toml_is_refused(bare_environment: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the configuration file none\.toml: No such file"):
        load_settings({}, Path("none.toml"))
    (bare_environment / "bad.toml").write_text("port = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML"):
        load_settings({}, Path("bad.toml"))
    (bare_environment / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml is not valid TOML"):
        load_settings({}, Path("bytes.toml"))
