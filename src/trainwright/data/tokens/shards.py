"""Token shards: a corpus as the numbers of its tokens, mapped from disk.

    shards.json    how many tokens and documents there are, of which tokenizer, in which files
    00000.tokens   the tokens of documents one after another, in the smallest integer type that holds the vocabulary
    00000.index    of each document 16 bytes: where it ends in the shard (int64) and a digest of its tokens

A document is in one shard. The tokenizer is known by its fingerprint; tokens of one mean nothing to another.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ABOUT = "shards.json"
VERSION = 1
INDEX = np.dtype([("end", "<i8"), ("digest", "<u8")])


@dataclass(frozen=True)
class Shards:
    """A corpus of shards. ``ends``: of all documents, in the order of the corpus, counted over all shards [documents].

    ``digests``: of the documents' tokens, uint64 [documents]; equal for equal ones.
    """

    directory: Path
    about: dict[str, Any]
    files: tuple[npt.NDArray[Any], ...]
    begins: npt.NDArray[np.int64]  # of each file in the tokens of the corpus, and their number at the end
    ends: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]

    @property
    def fingerprint(self) -> str:
        """Return a hash of the content."""
        return str(self.about["fingerprint"])

    @property
    def token_count(self) -> int:
        """Return the number of tokens."""
        return int(self.begins[-1])

    def read(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens ``begin`` to ``end`` of the corpus, over the borders of shards."""
        shard = int(self.begins.searchsorted(begin, side="right")) - 1
        parts = []
        while begin < end:
            until = min(end, int(self.begins[shard + 1]))
            offset = int(self.begins[shard])
            parts.append(self.files[shard][begin - offset : until - offset].astype(np.int32))
            begin, shard = until, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def will_need(self, begin: int, end: int) -> None:
        """Have the system read these tokens while something else is done."""
        import mmap

        shard = int(self.begins.searchsorted(begin, side="right")) - 1
        mapped = self.files[shard].base
        if isinstance(mapped, mmap.mmap):
            width, offset = self.files[shard].itemsize, int(self.begins[shard])
            first = (begin - offset) * width // mmap.PAGESIZE * mmap.PAGESIZE
            length = min(end - offset, len(self.files[shard])) * width - first
            mapped.madvise(mmap.MADV_WILLNEED, first, length)

    @classmethod
    def open(cls, directory: Path, key: str = "data.train") -> Shards:
        """Map a corpus. Raises RequestError for shards that are not whole, naming which."""
        about = read_about(directory, key)
        files, begins, indices = [], [0], []
        for shard in about["shards"]:
            kind = np.dtype(about["dtype"])
            tokens, index = directory / f"{shard['name']}.tokens", directory / f"{shard['name']}.index"
            _check_size(tokens, shard["tokens"] * kind.itemsize, key)
            _check_size(index, shard["documents"] * INDEX.itemsize, key)
            files.append(np.memmap(tokens, dtype=kind, mode="r"))
            found = np.fromfile(index, dtype=INDEX)
            found["end"] += begins[-1]
            indices.append(found)
            begins.append(begins[-1] + shard["tokens"])
        joined = np.concatenate(indices)
        ends, digests = joined["end"].astype(np.int64), joined["digest"].astype(np.uint64)
        return cls(directory, about, tuple(files), np.asarray(begins, dtype=np.int64), ends, digests)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, key: str = "data.train") -> None:
        """Raise RequestError unless the shards are of this tokenizer."""
        made = self.about["tokenizer"]
        if made["fingerprint"] != tokenizer_fingerprint(tokenizer):
            raise RequestError(
                f"{key}: {self.directory} was made with another tokenizer ({made['name']}, {made['vocabulary']:,} "
                f"tokens) than the model's ({tokenizer_name(tokenizer)}, {len(tokenizer):,} tokens); tokenize the text "
                "anew, or set model.tokenizer to that one"
            )


def is_shards(source: str) -> bool:
    """Whether a source is a directory of shards, finished or not."""
    return any(Path(source).expanduser().joinpath(name).is_file() for name in (ABOUT, "progress.json"))


def read_about(directory: Path, key: str) -> dict[str, Any]:
    """Return what shards say of themselves. Raises RequestError where they do not, or were not finished."""
    file = directory / ABOUT
    if not file.is_file() and (directory / "progress.json").is_file():
        raise RequestError(f"{key}: {directory} is not finished; run the same `trainwright data tokenize` again")
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if about["version"] != VERSION:
            raise RequestError(f"{key}: {file} is of version {about['version']}, not {VERSION}; tokenize the text anew")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{key}: {file} cannot be read: {error}; tokenize the text anew") from None
    return about


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all that decides which tokens a text becomes: vocabulary, merges, rules, special tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(f"the tokenizer {tokenizer_name(tokenizer)} is not a fast one (tokenizer.json)")
    backend.no_truncation()
    backend.no_padding()
    ends = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(f"{backend.to_str()}{ends}".encode()).hexdigest()[:32]


def tokenizer_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a tokenizer is called in messages."""
    return str(tokenizer.name_or_path).rstrip("/") or "built in"


def _check_size(file: Path, wanted: int, key: str) -> None:
    size = file.stat().st_size if file.is_file() else None
    if size != wanted:
        found = "is not there" if size is None else f"is cut short: {size:,} bytes of {wanted:,}"
        if size is not None and size > wanted:
            found = f"is longer than it was: {size:,} bytes, not {wanted:,}"
        raise RequestError(f"{key}: {file} {found}; tokenize the text anew")
