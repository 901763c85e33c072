"""Token shards: a corpus as token ids, memory-mapped from disk.

    shards.json    the numbers of tokens and documents, the tokenizer, and the files
    00000.tokens   the concatenated tokens of documents, in the smallest integer type that fits the vocabulary
    00000.index    16 bytes per document: its end in the shard (int64) and a digest of its tokens

Each document is in one shard. The tokenizer is identified by its fingerprint; shards only work with the tokenizer that
made them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from trainwright.errors import RequestError
from trainwright.recipe.files import parse_json
from trainwright.utils.paths import expand_user_path, retry_stale

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ABOUT = "shards.json"
VERSION = 1
INDEX = np.dtype([("end", "<i8"), ("digest", "<u8")])


class _Shard(BaseModel, strict=True):
    name: Annotated[str, Field(pattern=r"^[0-9]{5,}$")]
    tokens: Annotated[int, Field(ge=0)]
    documents: Annotated[int, Field(ge=1)]


class _Tokenizer(BaseModel, strict=True):
    name: str
    fingerprint: str
    vocabulary: int


class _About(BaseModel, strict=True):
    """What ``shards.json`` has. Other types than these of tokens would be read as other than numbers, even pointers."""

    source: str
    fingerprint: str
    documents: int
    tokens: int
    characters: int
    dtype: Literal["uint8", "uint16", "uint32"]
    shards: Annotated[list[_Shard], Field(min_length=1)]
    tokenizer: _Tokenizer


@dataclass(frozen=True)
class Shards:
    """A corpus of shards. ``ends``: the end of each document, counted over all shards [documents].

    ``digests``: of the documents' tokens, uint64 [documents]; equal documents have equal digests.
    """

    directory: Path
    about: dict[str, Any]
    files: tuple[npt.NDArray[Any], ...]
    begins: npt.NDArray[np.int64]  # start of each file in the corpus, then the total
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
        """Return tokens ``begin`` to ``end`` of the corpus, across shard boundaries."""
        shard = int(self.begins.searchsorted(begin, side="right")) - 1
        parts = []
        while begin < end:
            until = min(end, int(self.begins[shard + 1]))
            offset = int(self.begins[shard])
            parts.append(self.files[shard][begin - offset : until - offset].astype(np.int32))
            begin, shard = until, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def will_need(self, begin: int, end: int) -> None:
        """Ask the operating system to read these tokens ahead."""
        import mmap

        shard = int(self.begins.searchsorted(begin, side="right")) - 1
        memory_map = self.files[shard].base
        if isinstance(memory_map, mmap.mmap):
            width, offset = self.files[shard].itemsize, int(self.begins[shard])
            first = (begin - offset) * width // mmap.PAGESIZE * mmap.PAGESIZE
            length = min(end - offset, len(self.files[shard])) * width - first
            memory_map.madvise(mmap.MADV_WILLNEED, first, length)

    @classmethod
    def open(cls, directory: Path, key: str = "data.train") -> Shards:
        """Memory-map a corpus; raise RequestError naming any shard that is incomplete or inconsistent."""
        about = read_about(directory, key)
        files, begins, indices = [], [0], []
        kind = np.dtype(about["dtype"])
        for shard in about["shards"]:
            tokens, index = directory / f"{shard['name']}.tokens", directory / f"{shard['name']}.index"
            _check_size(tokens, shard["tokens"] * kind.itemsize, key)
            _check_size(index, shard["documents"] * INDEX.itemsize, key)
            files.append(np.memmap(tokens, dtype=kind, mode="r"))
            entries = np.fromfile(index, dtype=INDEX)
            if entries["end"][0] < 0 or (np.diff(entries["end"]) < 0).any() or entries["end"][-1] != shard["tokens"]:
                raise RequestError(
                    f"{key}: {index}: the ends of its documents do not rise to the {shard['tokens']:,} tokens of the "
                    "shard; tokenize the text again"
                )
            entries["end"] += begins[-1]
            indices.append(entries)
            begins.append(begins[-1] + shard["tokens"])
        joined_index = np.concatenate(indices)
        ends, digests = joined_index["end"].astype(np.int64), joined_index["digest"].astype(np.uint64)
        return cls(directory, about, tuple(files), np.asarray(begins, dtype=np.int64), ends, digests)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, key: str = "data.train") -> None:
        """Raise RequestError unless the shards were made with this tokenizer."""
        entry = self.about["tokenizer"]
        if entry["fingerprint"] != fingerprint_tokenizer(tokenizer):
            raise RequestError(
                f"{key}: {self.directory} was made with another tokenizer ({entry['name']}, {entry['vocabulary']:,} "
                f"tokens) than the model's ({describe_tokenizer(tokenizer)}, {len(tokenizer):,} tokens); tokenize the "
                f"text again, or set model.tokenizer to {entry['name']}"
            )


def is_shards(source: str) -> bool:
    """Return whether a source is a directory of shards, finished or not."""
    return any(expand_user_path(source).joinpath(name).is_file() for name in (ABOUT, "progress.json"))


def read_about(directory: Path, key: str) -> dict[str, Any]:
    """Return the content of ``shards.json``; raise RequestError if it is missing, invalid or unfinished."""
    file = directory / ABOUT
    if not file.is_file() and (directory / "progress.json").is_file():
        raise RequestError(f"{key}: {directory} is not finished; run the same `trainwright data tokenize` again")
    try:
        about: dict[str, Any] = parse_json(retry_stale(lambda: file.read_text(encoding="utf-8")), f"{key}: {file}")
        if about["version"] != VERSION:
            raise RequestError(
                f"{key}: {file} is of version {about['version']}, not {VERSION}; tokenize the text again"
            )
        _About.model_validate(about)
    except RequestError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(
            f"{key}: {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}; tokenize the text again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{key}: {file} cannot be read: {error}; tokenize the text again") from error
    return about


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything that determines tokenization: vocabulary, merges, rules, special tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(f"the tokenizer {describe_tokenizer(tokenizer)} is not a fast tokenizer (tokenizer.json)")
    backend.no_truncation()
    backend.no_padding()
    ends = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(f"{backend.to_str()}{ends}".encode()).hexdigest()[:32]


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a tokenizer for messages."""
    return str(tokenizer.name_or_path).rstrip("/") or "built in"


def _check_size(file: Path, expected: int, key: str) -> None:
    size = file.stat().st_size if file.is_file() else None
    if size != expected:
        problem = "is missing" if size is None else f"is cut short: {size:,} bytes of {expected:,}"
        if size is not None and size > expected:
            problem = f"is longer than it was: {size:,} bytes, not {expected:,}"
        raise RequestError(f"{key}: {file} {problem}; tokenize the text again")
