"""Find the files of a data source on this machine.

A source is one of:

- a file, also compressed (.gz, .bz2, .xz, .zst)
- a directory of row files or documents, or a dataset downloaded or cloned from the Hub
- a directory written by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` of ``datasets``

One split of a directory is read: ``directory:split`` or ``directory:config:split``, by default ``train``.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainwright.data.sources import row_files as document_files
from trainwright.data.sources.row_files import COMPRESSED, READERS, TABLES, explain_unreadable, parse_suffix
from trainwright.errors import RequestError
from trainwright.recipe.yaml_text import quote_flow_text
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_plural

SUFFIXES = (*READERS, *TABLES)
_TRAIN, _VALIDATION, _TEST = "train", "validation", "test"
_SPLITS = {
    **dict.fromkeys(("train", "training"), _TRAIN),
    **dict.fromkeys(("valid", "validation", "val", "dev"), _VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), _TEST),
}
_SPLIT_NAME = re.compile(rf"(?:^|[-_. ])({'|'.join(_SPLITS)})(?=[-_. ]|$)", re.IGNORECASE)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.\w+")
# Metadata files next to the row files.
_ABOUT = {"statistics.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_ABOUT |= {"license.txt", "readme.txt", "requirements.txt"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack")
_OF_MODELS = {"config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json"}
_NAMED = 5  # left-out files named per reason, and files of a pattern
_HUB_URL = re.compile(r"(?:hf://|https?://(?:huggingface\.co|hf\.co)/)datasets/([^/@?#]+/[^/@?#]+)")
_README_BYTES = 2**20


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source, in reading order.

    Attributes:
        documents: whether each file is one row.
        complete: whether the files are listed in the metadata of the dataset, so that none may be missing.
        notes: messages for the user about the choice of files.
    """

    files: list[Path]
    documents: bool = False
    complete: bool = False
    notes: list[str] = field(default_factory=list)

    def usable(self) -> Iterator[Path]:
        """Return the files to read; among several, unreadable ones are skipped."""
        several = len(self.files) > 1 and not self.complete
        return (file for file in self.files if not several or explain_unreadable(file) is None)

    def left_out(self) -> list[str]:
        """Return one line per file that is left out, with the reason; reads all files."""
        if len(self.files) == 1 or self.complete:
            return []
        alike: dict[str, list[Path]] = {}
        for file in self.files:
            if (why := explain_unreadable(file)) is not None:
                alike.setdefault(why, []).append(file)
        lines = []
        for why, files in alike.items():
            lines += [f"{file} {why} and is skipped" for file in files[:_NAMED]]
            if more := len(files) - _NAMED:
                lines[-1] += f", and so are {more:,} more" if more > 0 else ""
        return lines


def find(source: str, key: str, documents: bool = False) -> SourceFiles | None:
    """Return the files of a source, or None if it is not on this machine.

    Raises:
        RequestError: the files hold neither rows nor documents, or the split does not exist.
    """
    path, selectors = _split_source(source)
    if path.is_dir():
        source_files = (
            SourceFiles(_list_documents(path, key, "document"), True)
            if documents and not selectors
            else _find_directory_files(path, selectors, key)
        )
    elif path.exists():
        source_files = SourceFiles([path], documents or parse_suffix(path) in document_files.ALONE)
    else:
        return None
    for file in source_files.files:
        _check(file, key, documents, alone=len(source_files.files) == 1 or source_files.complete)
    return source_files


def describe_missing_source(source: str, part: str = "") -> str:
    """Return the message for a missing file, with similar names; ``part``: the slice of it that is asked for."""
    if match := _HUB_URL.match(source):
        return f"{source} is a URL; for a dataset of the Hub write {match[1]}{part}"
    if "://" in source:
        return f"{source} is a URL, and rows are read from files or the Hub; download it first, or mount its store"
    path = expand_user_path(source)
    if files := sorted(glob.glob(str(path))):
        listing = ", ".join(f"{{source: {quote_flow_text(file + part)}}}" for file in files[:_NAMED])
        how = f"give their directory, or a list of them such as '[{listing}]'"
        return f"{path} is a pattern, which is not expanded ({format_plural(len(files), 'file')}); {how}"
    if not path.parent.is_dir():
        return f"{path}: no such directory {path.parent}"
    near = difflib.get_close_matches(path.name, sorted(os.listdir(path.parent)), n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else f"; nothing in {path.parent} has a name like it"
    return f"no file {path}{meant}"


def _split_source(source: str) -> tuple[Path, list[str]]:
    """Split a source into its path and the parts after it: a split, or a configuration and a split."""
    path = expand_user_path(source)
    if path.exists():
        return path, []
    for parts in (1, 2):
        head, *rest = source.rsplit(":", parts)
        if len(rest) == parts and expand_user_path(head).is_dir():
            return expand_user_path(head), rest
    return path, []


def _check(file: Path, key: str, documents: bool, alone: bool) -> None:
    suffix = parse_suffix(file)
    if documents and suffix not in document_files.SUFFIXES:
        raise RequestError(f"{key}: {file}: unsupported file type; documents are text, Markdown, code and .docx files")
    if suffix not in SUFFIXES and suffix not in document_files.ALONE:
        raise RequestError(
            f"{key}: {file}: unsupported file type; supported are {', '.join(SUFFIXES)}, also with "
            f"{', '.join(COMPRESSED)}, and code and .docx files as documents"
        )
    if suffix in (*TABLES, ".docx") and file.suffix.lower() in COMPRESSED:
        raise RequestError(f"{key}: {file}: compressed {suffix} files are not supported; decompress it")
    if not alone:
        return
    if not file.stat().st_size:
        raise RequestError(f"{key}: {file} is empty")
    if not os.access(file, os.R_OK):
        raise RequestError(f"{key}: {file} cannot be read: permission denied")


def _find_directory_files(path: Path, selectors: list[str], key: str) -> SourceFiles:
    if (path / "dataset_dict.json").is_file():
        return _find_saved_split(path, selectors, key)
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return SourceFiles(_list_saved_files(path, selectors, key), complete=True)
    if configs := _read_configs(path):
        return _choose_config_files(path, configs, selectors, key)
    _refuse_model(path, key)
    files = list_row_files(path) or [file for inside in _list_subdirectories(path) for file in list_row_files(inside)]
    if all(parse_suffix(file) == ".txt" and not _find_split(path, file) for file in files):  # texts without splits
        if selectors:
            raise RequestError(f"{key}: {path} has no data files, so it has no split {selectors[-1]}")
        return SourceFiles(_list_documents(path, key), True)
    kinds = sorted({parse_suffix(file) for file in files})
    if len(kinds) > 1:
        raise RequestError(f"{key}: {path} has files of several types ({', '.join(kinds)}); choose one file")
    split_files = _choose_split_files(path, files, selectors, key)
    return replace(split_files, notes=[*split_files.notes, *_note_unread_documents(path, files)])


def _note_unread_documents(path: Path, rows: list[Path]) -> list[str]:
    """Return a note about documents in a directory of row files, which are not read."""
    documents = [file for file in path.iterdir() if file.suffix.lower() in document_files.SUFFIXES]
    files = sorted(file.name for file in documents if file not in rows and file.is_file() and not _is_about(file))
    if not files:
        return []
    names = f"{', '.join(files[:_NAMED])}{f' and {len(files) - _NAMED:,} more' if len(files) > _NAMED else ''}"
    return [f"{path}: only the {parse_suffix(rows[0])} files are read, not {names}; to read another, give its path"]


def list_row_files(path: Path) -> list[Path]:
    """Return the row files in a directory, without its README."""
    kinds = {suffix for suffix in SUFFIXES if suffix != ".md"}
    files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if parse_suffix(file) in kinds and file.name.lower() not in _ABOUT)


def _is_about(file: Path) -> bool:
    return file.name.lower() in _ABOUT or file.stem.lower() in ("readme", "license", "licence", "citation")


def _list_subdirectories(path: Path) -> list[Path]:
    """Return the subdirectories of a dataset repository that hold its rows."""
    names = {"data", *_SPLITS}
    if any(file.suffix.lower() in document_files.SUFFIXES and not _is_about(file) for file in path.iterdir()):
        return []  # documents, with more of them in subdirectories
    directories = sorted(child for child in path.iterdir() if child.is_dir() and child.name.lower() in names)
    rows = [
        child
        for child in directories
        if any(parse_suffix(file) not in (".txt", ".md") for file in list_row_files(child))
    ]
    return rows if len(rows) == len(directories) else []


def _choose_split_files(path: Path, files: list[Path], selectors: list[str], key: str) -> SourceFiles:
    """Group files by the split in their names and choose one; files without split names are one dataset."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_find_split(path, file), []).append(file)
    unnamed_files = splits.pop("", [])
    if unnamed_files and set(splits) - {_TRAIN}:
        names = ", ".join(file.name for file in files)
        raise RequestError(
            f"{key}: {path} has splits and other files ({names}); give the path of the file to use, such as {files[-1]}"
        )
    if unnamed_files and not selectors:
        return SourceFiles(files)
    if selectors[:-1]:
        raise RequestError(
            f"{key}: {path} has no configurations; give only a split, such as {path}:{next(iter(splits))}"
        )
    split = _choose_split(path, splits, selectors, key)
    _check_shards(splits[split], key)
    return SourceFiles(splits[split], notes=_split_notes(path, split, list(splits)))


def _find_split(path: Path, file: Path) -> str:
    if match := _SPLIT_NAME.search(file.name.removesuffix(file.suffix)):
        return _SPLITS[match[1].lower()]
    return _SPLITS.get(file.parent.name.lower(), "") if file.parent != path else ""


def _choose_split(path: Path, splits: dict[str, Any], selectors: list[str], key: str) -> str:
    """Return the requested split, or the default split for the recipe key."""
    names = f"{', '.join(splits)}; choose one, such as {path}:{next(reversed(splits))}"
    if selectors:
        split = selectors[-1] if selectors[-1] in splits else _SPLITS.get(selectors[-1].lower(), selectors[-1])
        if split not in splits:
            raise RequestError(f"{key}: {path} has no split {selectors[-1]}; it has {names}")
        return split
    usual = _VALIDATION if key.startswith("data.validation") else _TRAIN
    if len(splits) == 1:
        return next(iter(splits))
    if usual not in splits or key.startswith("--"):
        raise RequestError(f"{key}: {path} has the splits {names}")
    return usual


def _split_notes(path: Path, chosen: str, splits: list[str]) -> list[str]:
    other_splits = [f"{path}:{split}" for split in splits if split != chosen]
    return [f"the split {chosen} of {path} is read; others are {', '.join(other_splits)}"] if other_splits else []


def _check_shards(files: list[Path], key: str) -> None:
    """Raise RequestError if a shard of the dataset is missing."""
    shards: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            shards.setdefault((f"{file.parent}/{match[1]}", int(match[3])), set()).add(int(match[2]))
    for (name, total), numbers in shards.items():
        if gone := [number for number in range(min(total, 10**5)) if number not in numbers]:
            raise RequestError(
                f"{key}: {len(gone)} of {total} files {name}-…-of-{total:05d} are missing, the first of them number "
                f"{gone[0]:05d}; download them, or give the paths of the files to use"
            )


def _find_saved_split(path: Path, selectors: list[str], key: str) -> SourceFiles:
    file = path / "dataset_dict.json"
    splits = [name for name in _read_json(file, key).get("splits", ()) if _is_name(name) and (path / name).is_dir()]
    if not splits:
        raise RequestError(f"{key}: {file} lists no split that exists")
    if selectors[:-1]:
        raise RequestError(f"{key}: {path} has no configurations; give only a split, such as {path}:{splits[0]}")
    split = _choose_split(path, dict.fromkeys(splits), selectors, key)
    return SourceFiles(_list_saved_files(path / split, [], key), complete=True, notes=_split_notes(path, split, splits))


def _list_saved_files(path: Path, selectors: list[str], key: str) -> list[Path]:
    """Return the Arrow files that Dataset.save_to_disk wrote; no code is run and nothing is unpickled."""
    if selectors:
        raise RequestError(f"{key}: {path} is a dataset without splits; remove :{':'.join(selectors)}")
    file = path / "state.json"
    entries = _read_json(file, key).get("_data_files")
    names = [item.get("filename") if isinstance(item, dict) else None for item in entries or ()]
    if not names:
        raise RequestError(f"{key}: {file} lists no files, so the dataset cannot be read")
    if outside := [name for name in names if not _is_name(name)]:
        raise RequestError(f"{key}: {file} lists {str(outside[0])[:200]!r}, which is not a file name in this directory")
    files = [path / str(name) for name in names]
    if gone := [item.name for item in files if not item.is_file()]:
        raise RequestError(f"{key}: {path} is incomplete; missing: {', '.join(gone[:3])}")
    if odd := [item.name for item in files if parse_suffix(item) != ".arrow"]:
        raise RequestError(f"{key}: {file} lists {odd[0]}, which is not an .arrow file")
    return files


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and name not in (".", "..") and not {"/", "\\", "\0"} & {*name}


def _read_json(file: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{key}: {file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"{key}: {file} should contain a JSON object")
    return content


def _read_configs(path: Path) -> list[dict[str, Any]]:
    """Return the ``configs`` of a dataset repository's README (huggingface.co/docs/hub/datasets-data-files)."""
    from trainwright.recipe.yaml_text import parse_mapping  # PyYAML's own loader expands nested aliases without limit

    file = path / "README.md"
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        text = stream.read(_README_BYTES).decode(errors="replace")
    if not text.startswith("---"):
        return []
    header, marker, _ = text[3:].partition("\n---")
    try:
        about = parse_mapping(header if marker else "", str(file)).values
    except RequestError:
        return []
    configs = about.get("configs")
    if not isinstance(configs, list):
        return []
    return [config for config in configs if isinstance(config, dict) and config.get("data_files")]


def _choose_config_files(path: Path, configs: list[dict[str, Any]], selectors: list[str], key: str) -> SourceFiles:
    by_name = {str(item.get("config_name", "default")): item for item in configs}
    usual = [name for name, item in by_name.items() if item.get("default") is True or name == "default"]
    config = selectors[0] if len(selectors) == 2 else next(iter(usual), next(iter(by_name)))
    if config not in by_name or (len(selectors) < 2 and len(by_name) > 1 and not usual):
        names = ", ".join(by_name)
        raise RequestError(
            f"{key}: {path} has the configurations {names}; choose one with a split, such as {path}:{config}:train"
        )
    splits: dict[str, list[Any]] = {}
    data_files = by_name[config]["data_files"]
    for item in data_files if isinstance(data_files, list) else [data_files]:
        split, pattern = (item.get("split", _TRAIN), item.get("path")) if isinstance(item, dict) else (_TRAIN, item)
        splits.setdefault(str(split), []).extend(pattern if isinstance(pattern, list) else [pattern])
    chosen_split = _choose_split(path, splits, selectors[-1:], key)
    files = [file for pattern in splits[chosen_split] for file in _list_matching(path, pattern, key)]
    if not files:
        raise RequestError(
            f"{key}: {path} has no file {', '.join(map(str, splits[chosen_split]))}, of the split {chosen_split}"
        )
    _check_shards(files, key)
    return SourceFiles(list(dict.fromkeys(files)), notes=_split_notes(path, chosen_split, list(splits)))


def _list_matching(path: Path, pattern: Any, key: str) -> list[Path]:
    """Return the files in ``path`` that match a pattern; files outside ``path`` are refused."""
    parts = Path(pattern).parts if isinstance(pattern, str) else ()
    if not parts or ".." in parts or Path(pattern).is_absolute():
        raise RequestError(f"{key}: {path / 'README.md'} names files that are not in its directory: {pattern!r}")
    return sorted(file for file in path.glob(pattern) if file.is_file())


def _refuse_model(path: Path, key: str) -> None:
    names = {file.name.lower() for file in path.iterdir() if file.is_file()}
    weights = sorted(name for name in names if name.endswith(_WEIGHTS))
    if of_models := sorted(names & _OF_MODELS):
        raise RequestError(
            f"{key}: {path} is a model's or a tokenizer's directory ({', '.join((*of_models, *weights)[:4])}), not a "
            "dataset; models are set in model.name"
        )
    if weights and not list_row_files(path):
        raise RequestError(f"{key}: {path} contains model weights ({', '.join(weights[:3])}), not rows")


def _list_documents(path: Path, key: str, what: str = f"{', '.join(SUFFIXES)} file") -> list[Path]:
    if files := document_files.list_documents(path):
        return files
    suffixes = sorted({file.suffix.lower() for file in path.iterdir() if file.is_file() and file.suffix})
    only = f"; it has {', '.join(suffixes[:8])} files, which are not supported" if suffixes else ""
    raise RequestError(f"{key}: {path} has no {what}, and no text, Markdown, code or .docx file{only}")
