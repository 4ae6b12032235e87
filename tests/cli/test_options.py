"""The flags of the command line: one per setting, with its help, and nothing that slows the help down."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetrie import __version__, settings
from pagetrie.cli.main import run
from tests.models.tiny import tiny_model, write_folder


@dataclass(frozen=True)
class Done:
    code: object
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def pagetrie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the console script's function in an empty folder, without the caller's PAGETRIE_* variables."""

    def command(*arguments: str, **variables: str) -> Done:
        for name in [name for name in os.environ if name.upper().startswith("PAGETRIE_")]:
            monkeypatch.delenv(name)
        for name, value in {"COLUMNS": "200", "PAGETRIE_NO_DISK_CACHE": "1", **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["pagetrie", *arguments])
        with pytest.raises(SystemExit) as left:
            run()
        return Done(left.value.code, *capsys.readouterr())

    return command


def test_every_setting_has_a_flag_with_its_help_and_its_default(pagetrie: Command) -> None:
    shown = pagetrie("serve", "--help")
    assert shown.code == 0
    for name, field in settings.fields().items():
        spelled = "MODEL" if name == "model" else settings.flag(name) + " "
        assert spelled in shown.stdout, name
        assert field.description in shown.stdout, name
    assert "default: None" not in shown.stdout
    assert "PAGETRIE_PORT=8123" in shown.stdout


def test_the_demo_has_its_own_options_and_none_of_the_servers(pagetrie: Command) -> None:
    shown = pagetrie("demo", "--help").stdout
    assert all(flag in shown for flag in ("--users", "--prompt-tokens", "--max-tokens", "--kv-memory", "--threads"))
    assert "--port" not in shown


def test_neither_help_nor_an_error_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.argv = ['pagetrie', 'serve', *sys.argv[1:]]\nfrom pagetrie.cli.main import run\n"
        "try:\n    run()\nfinally:\n    assert 'torch' not in sys.modules and 'fastapi' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(settings.__file__).parents[1])}
    for arguments, code in ((["--help"], 0), (["--page-size", "24"], 1)):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert "AssertionError" not in done.stderr


def test_version_as_a_process(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(settings.__file__).parents[1])}
    command = [sys.executable, "-m", "pagetrie.cli", "version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--port", "http"], ["--weights", "int3"], ["a.gguf", "b.gguf"]])
def test_a_usage_error_exits_with_2(arguments: list[str], pagetrie: Command) -> None:
    done = pagetrie("serve", *arguments)
    assert done.code == 2
    assert "Usage: pagetrie serve" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--page-size", "24"], {}, "--page-size: must be a power of two, got 24"),
        ([], {"PAGETRIE_THREADS": "0"}, "PAGETRIE_THREADS: input should be greater than or equal to 1, got '0'"),
        (["--config", "none.toml"], {}, "can't read the configuration file none.toml: No such file or directory"),
        (["--num-pages", "5", "--kv-memory", "1GiB"], {}, "give either --kv-memory or num_pages, not both"),
        (["missing.gguf"], {}, "missing.gguf: no such file or folder"),
        (["broken.gguf"], {}, "broken.gguf: big-endian GGUF files aren't supported"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_1(
    arguments: list[str], variables: dict[str, str], message: str, tmp_path: Path, pagetrie: Command
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(20))
    done = pagetrie("serve", *arguments, **variables)
    assert (done.code, done.stdout, done.stderr) == (1, "", f"pagetrie: {message}\n")


def test_a_taken_port_is_one_line_and_exit_1(tmp_path: Path, pagetrie: Command) -> None:
    model = write_folder(tmp_path / "tiny", tiny_model("llama"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = pagetrie("serve", "--port", port, "--num-pages", "4", "--weights", "fp32", str(model))
    assert (done.code, done.stdout) == (1, "")
    assert re.fullmatch(rf"pagetrie: .*{port}.*\n", done.stderr), done.stderr
