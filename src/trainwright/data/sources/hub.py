"""Load datasets of the Hugging Face Hub, from its cache if the Hub cannot be reached."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainwright.data.sources.local_files import SUFFIXES
from trainwright.data.sources.row_files import COMPRESSED
from trainwright.errors import RequestError

if TYPE_CHECKING:
    from datasets import Dataset

# Corpora by short names: their names on the Hub, with configuration and split.
_OF_THE_HUB = {
    "openwebtext": "Skylion007/openwebtext",
    "wikitext": "Salesforce/wikitext:wikitext-103-raw-v1:train",
    "simple-wikipedia": "wikimedia/wikipedia:20231101.simple:train",
    "tinystories": "roneneldan/TinyStories",
    "orca-math": "microsoft/orca-math-word-problems-200k",
}
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+\[\]%-]+){0,2}")


def resolve_alias(source: str) -> str:
    """Return the Hub name of a corpus; other sources and existing paths are returned unchanged."""
    return source if source not in _OF_THE_HUB or Path(source).exists() else _OF_THE_HUB[source]


def is_hub_id(source: str) -> bool:
    """Return whether a source that is not a local path may be a dataset of the Hub, or a file of one."""
    name, file = _split_file(source)
    if not _ID.fullmatch(name) or (file is None and Path(source).suffix.lower() in SUFFIXES):
        return False
    owner, slash, _ = source.partition("/")
    return owner not in (".", "..") and not (slash and Path(owner).is_dir())


def _split_file(source: str) -> tuple[str, str | None]:
    """Return a dataset and the path of one of its files, ``owner/name:path``; None if there is no file after it."""
    name, _, file = source.partition(":")
    is_file = "/" in name and Path(file).suffix.lower() in (*SUFFIXES, *COMPRESSED)
    return (name, file) if is_file else (source, None)


def load_hub_rows(source: str, key: str, *, stream: bool = False) -> Dataset:
    """Return the rows of a Hub dataset; raise RequestError if it cannot be loaded.

    Args:
        stream: download rows as they are read, if the Hub can be reached; the rows can then only be iterated.
    """
    import datasets

    name, file = _split_file(resolve_alias(source))
    name, *parts = name.split(":")
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) == 2 else None
    reachable = _is_hub_reachable(datasets.config.HF_ENDPOINT)
    try:
        with _set_offline(not reachable):
            rows = datasets.load_dataset(name, config, split=split, data_files=file, streaming=stream and reachable)
    except Exception as error:  # the Hub, its server or the dataset's files may raise anything
        if not reachable:
            fix = "the Hub cannot be reached and there is no cached copy; use a local file instead"
            raise RequestError(f"{key}: {name}: no such file or directory, and {fix}") from None
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RequestError(f"{key}: {source}: the dataset cannot be loaded from the Hub: {reason[0]}") from None
    return rows


def _is_hub_reachable(endpoint: str) -> bool:
    """Return whether the Hub can be reached: without a network the client retries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True  # the proxy resolves and connects
    url = urlsplit(endpoint)
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        with socket.create_connection((url.hostname, port), timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _set_offline(active: bool) -> Iterator[None]:
    """Restrict ``datasets`` to its cache."""
    import datasets
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (datasets.config, constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = active or module.HF_HUB_OFFLINE
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
