"""The tokenizer of a Hugging Face folder: tokenizer.json and the settings beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from pagetrie.errors import ModelLoadError
from pagetrie.text.tokenizer import Tokenizer


def tokenizer_from_folder(folder: Path, *, vocab_size: int, end_ids: frozenset[int]) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json, and chat_template.jinja if there is one.

    Args:
        folder: the model's folder.
        vocab_size: the model's number of embedding rows.
        end_ids: the ids that the model's configuration names as end of sequence.

    Raises:
        ModelLoadError: a file is missing, malformed or unsupported.
    """
    path = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{path}: can't be read as a tokenizer: {reason}") from error
    settings = _settings(folder / "tokenizer_config.json")
    bos_id = _special_id(backend, settings, "bos_token")
    add_bos = settings.get("add_bos_token")
    if isinstance(add_bos, bool):
        _set_bos(backend, add_bos, bos_id)
    try:
        return Tokenizer(
            backend,
            vocab_size=vocab_size,
            bos_id=bos_id,
            eos_id=_special_id(backend, settings, "eos_token"),
            end_ids=frozenset(index for index in end_ids if 0 <= index < vocab_size),
            chat_template=_chat_template(folder, settings),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: isn't valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object")
    return settings


def _special_id(backend: Backend, settings: dict[str, Any], key: str) -> int | None:
    """The id of a token named in tokenizer_config.json, as text or as an object with its text."""
    token = settings.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _set_bos(backend: Backend, wanted: bool, bos_id: int | None) -> None:
    """Make the tokenizer add, or not add, a BOS: add_bos_token overrides tokenizer.json, as in transformers."""
    if bos_id is None:
        return
    adds = backend.encode("a").ids[:1] == [bos_id]
    if adds == wanted:
        return
    if not wanted:
        backend.post_processor = None
        return
    token = backend.id_to_token(bos_id)
    backend.post_processor = TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B:1"], special_tokens=[(token, bos_id)]
    )


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A template file goes before the settings, which hold one template, or a list of named ones ("default" counts)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: can't be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None))
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of them")
    return template
