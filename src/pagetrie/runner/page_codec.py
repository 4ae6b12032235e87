"""The native codecs for pages of a given storage."""

from __future__ import annotations

import torch  # before the extension, so that both use one OpenMP runtime

from pagetrie.errors import ConfigError
from pagetrie.kv.tiers.codec import CodecName, PageCodec
from pagetrie.runner.storage import PageStorage


def make_page_codec(name: CodecName, storage: PageStorage) -> PageCodec | None:
    """The codec of that name for a storage's pages, whether fp16 or fp32; None for ``none``.

    Raises:
        ConfigError: the native extension isn't built.
    """
    if name == "none":
        return None
    try:
        from pagetrie import _native
    except ImportError as error:  # sources on the path that were never built
        raise ConfigError(f"the codec {name} needs the native extension, which isn't built: {error}") from error
    _, n_layers, _, n_kv_heads, head = storage.data.shape
    dtype = "fp16" if storage.data.dtype == torch.float16 else "fp32"
    return _native.PageCodec(name, dtype, n_layers, n_kv_heads, head // storage.page_size, storage.page_size)
