"""The torch runner: page storage, attention over pages, sampling, and the step that ties them to a model."""

import pagetrie.models  # noqa: F401 - first of all: it settles how torch's threads wait
from pagetrie.runner.model_runner import ModelRunner
from pagetrie.runner.storage import KvDtype, PageStorage, available_memory, bytes_per_page

__all__ = ["KvDtype", "ModelRunner", "PageStorage", "available_memory", "bytes_per_page"]
