"""``python -m pagetrie.cli``: the same as ``pagetrie``."""

from pagetrie.cli.main import run

run()
