"""The torch runner: page storage, attention over pages, sampling, and the step that ties them to a model."""

from pagetrie.runner.model_runner import ModelRunner
from pagetrie.runner.storage import KvDtype, PageStorage, available_memory, bytes_per_page

__all__ = ["KvDtype", "ModelRunner", "PageStorage", "available_memory", "bytes_per_page"]
