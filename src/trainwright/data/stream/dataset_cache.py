"""Tokenize once, before a process group exists, into a fingerprinted directory that every worker memory-maps.

    <cache>/datasets/<fingerprint>/{train/, validation/, held_back.npy, about.json}
    <cache>/datasets/keys/<key>.json

The fingerprint covers everything that the tokens depend on, including the content of the rows; the key covers their
paths, sizes and times instead. A second run finds its directory by the key, without opening the source or importing
``datasets``. Datasets of the Hub are identified by name: the first downloaded version stays in use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.activity import doing
from trainwright.data.rows.kinds import EXAMPLES, RowReader
from trainwright.data.sources.key import content_of, settings_of, source_key
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.data.tokens.lengths import check_length
from trainwright.errors import MachineError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.sections.data import DataSection


@dataclass(frozen=True)
class PreparedData:
    """Prepared datasets; ``summary`` is lines of text for the user."""

    train: TokenDataset
    validation: TokenDataset | None
    summary: list[str] = field(default_factory=list)
    directory: Path = Path()  # holds train/ and, if there is validation data, validation/

    def held_out(self) -> npt.NDArray[np.int64]:
        """Return the source and the row number in it, both from 0, of every validation row [rows, 2]."""
        from trainwright.data.stream.dataset_building import HELD_OUT

        found: npt.NDArray[np.int64] = np.load(self.directory / HELD_OUT)
        return found


def prepare(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    kind: RowReader = EXAMPLES,
    *,
    seed: int,
    cache: Path,
    model_max_length: int | None = None,
) -> PreparedData:
    """Read, tokenize, split and save the data of a recipe, or memory-map the result of an earlier run.

    Equal rows, tokenizer, ``data`` and ``seed`` give equal datasets. One process builds; others that need the same data
    wait for it. ``tokenizer`` gets a chat template if it has none and the rows are conversations.

    Args:
        kind: the kind of rows that the task needs.
        cache: the cache directory.
        model_max_length: the maximum number of positions of the model, if limited.

    Raises:
        RequestError: the source, a row or a setting is wrong.
        MachineError: the cache cannot be written.
    """
    check_length(data, model_max_length)
    from trainwright.data.rows.chat_encoding import install_template

    root = cache / "datasets"
    identity = _tokenizer_identity(tokenizer)
    key = root / "keys" / f"{_digest([kind.name, source_key(data, seed, identity)])}.json"
    with writable(root):
        key.parent.mkdir(parents=True, exist_ok=True)
        found = _find(root, key)
        if found is None:
            from filelock import FileLock

            # The system releases the lock when its owner dies.
            with FileLock(key.with_suffix(".lock")):
                found = _find(root, key) or _build(root, key, data, tokenizer, kind, seed, identity)
    prepared, format_ = found
    if format_ != "text":
        install_template(tokenizer)
    return prepared


def _find(root: Path, key: Path) -> tuple[PreparedData, str] | None:
    try:
        fingerprint = json.loads(key.read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError):  # not prepared yet
        return None
    return _open(root / fingerprint, "reused")


def _open(directory: Path, how: str) -> tuple[PreparedData, str] | None:
    """Return the datasets in ``directory`` and the layout of their rows, or None if it is missing or incomplete."""
    try:
        about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
        train = TokenDataset.open(directory / "train")
        validation = TokenDataset.open(directory / "validation") if about["validation"] else None
        summary = [*about["summary"], f"tokens kept in {directory} ({how})"]
        return PreparedData(train, validation, summary, directory), about["format"]
    except (OSError, ValueError, KeyError):
        return None


def _build(
    root: Path,
    key: Path,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    kind: RowReader,
    seed: int,
    identity: str,
) -> tuple[PreparedData, str]:
    separate = data.validation_source
    sources = [*data.sources, *([separate] if separate else [])]
    keys = [*data.source_keys, "data.validation"]
    content = [content_of(source, key) for source, key in zip(sources, keys, strict=False)]
    # The names appear in the saved summary, which must not name other files.
    names = [source.source for source in sources]
    settings = {**settings_of(data, seed), "content": content, "names": names, "tokenizer": identity, "kind": kind.name}
    fingerprint = _digest(settings)[:32]
    directory = root / fingerprint
    opened = _open(directory, "reused")
    if opened is None:
        _make(directory, data, tokenizer, kind, seed)
        opened = _open(directory, "made now")
        assert opened is not None
    _write_atomically(key, json.dumps({"fingerprint": fingerprint}))
    return opened


def _make(directory: Path, data: DataSection, tokenizer: PreTrainedTokenizerBase, kind: RowReader, seed: int) -> None:
    """Build the datasets in a temporary directory and rename it, so that ``directory`` is never incomplete."""
    from trainwright.data.stream.dataset_building import tokenize_and_split

    doing("reading and tokenizing the rows")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        about = tokenize_and_split(scratch, data, tokenizer, kind, seed)
        (scratch / "about.json").write_text(json.dumps(about), encoding="utf-8")
        scratch.chmod(0o755)  # mkdtemp creates private directories, and a cache may be shared
        if directory.exists():  # it is incomplete, or it would have been used
            shutil.rmtree(directory)
        scratch.rename(directory)
    except OSError:
        # Another process may have created the same directory under another key; then use that.
        if _open(directory, "reused") is None:
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


@contextmanager
def writable(root: Path) -> Iterator[None]:
    """Raise MachineError with a remedy if ``root`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"the tokens cannot be stored in {root}: {error.strerror or error}; free space there or set "
            "TRAINWRIGHT_CACHE to another directory"
        ) from error


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the vocabulary, merges, rules, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(f"the tokenizer {tokenizer.name_or_path} is not a fast tokenizer (tokenizer.json)")
    backend.no_truncation()  # remove the settings of earlier calls
    backend.no_padding()
    rest = {"template": tokenizer.chat_template, "special": tokenizer.special_tokens_map}
    return hashlib.sha256(backend.to_str().encode() + _digest(rest).encode()).hexdigest()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
