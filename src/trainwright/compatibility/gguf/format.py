"""GGUF as a format of weights (``recipe/registries.py``): facts of a file are read without torch."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from trainwright.machine.cache import find_cache_root, hash_file, look_up_digest

# How values of the metadata are stored, by their type (ggml/docs/gguf.md of llama.cpp); two types have other sizes.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


class Gguf:
    """The functions that the core calls."""

    @staticmethod
    def convert(file: Path, key: str, notify: Callable[[str], None]) -> tuple[Path, str]:
        """Convert a file, as ``convert_gguf``."""
        from trainwright.compatibility.gguf.reading import convert_gguf

        return convert_gguf(file, key, notify)

    @staticmethod
    def facts(file: Path) -> GgufFacts:
        """Return the hash and the precision of ``file``; raise RequestError if it is damaged before these."""
        digest = look_up_digest(file, find_cache_root() / "models", "sha256", lambda: hash_file(file, "sha256"))
        return GgufFacts(digest, _read_precision(file))

    @staticmethod
    def export(directory: Path, out: Path, *arguments: Any) -> int:
        """Write a file, as ``export_gguf``."""
        from trainwright.compatibility.gguf.export import export_gguf

        return export_gguf(directory, out, *arguments)


@dataclasses.dataclass(frozen=True)
class GgufFacts:
    """The SHA-256 of a file's content, and the precision of its weights, such as Q4_K_M."""

    sha256: str
    precision: str


def _read_precision(file: Path) -> str:
    """Return llama.cpp's name of the file type or, without it, the type of most of its bytes."""
    from gguf import GGMLQuantizationType, LlamaFileType

    kind = _read_file_type(file)
    if kind in set(LlamaFileType):
        return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    from trainwright.compatibility.gguf.reading import sum_sizes_by_type

    sizes = sum_sizes_by_type(file)
    return GGMLQuantizationType(max(sizes, key=lambda number: sizes[number])).name


def _read_file_type(file: Path) -> int | None:
    """Return the number of ``general.file_type`` in the metadata; None without it, or if the file is damaged."""
    with file.open("rb") as stream:
        try:
            magic, _, _, count = struct.unpack("<4sIQQ", stream.read(24))
            for _ in range(count if magic == b"GGUF" else 0):
                key = stream.read(_read_number(stream, "Q"))
                kind = _read_number(stream, "I")
                if key == b"general.file_type":
                    return _read_number(stream, _NUMBERS[kind])
                _skip(stream, kind)
        except (struct.error, KeyError, OverflowError, MemoryError):
            pass
    return None


def _read_number(stream: IO[bytes], kind: str) -> int:
    return int(struct.unpack(f"<{kind}", stream.read(struct.calcsize(f"<{kind}")))[0])


def _skip(stream: IO[bytes], kind: int, count: int = 1) -> None:
    """Go behind ``count`` values of a type."""
    if kind == _ARRAY:
        kind, count = _read_number(stream, "I"), _read_number(stream, "Q")
    if kind == _STRING:
        for _ in range(count):
            stream.seek(_read_number(stream, "Q"), 1)
    else:
        stream.seek(count * struct.calcsize(_NUMBERS[kind]), 1)
