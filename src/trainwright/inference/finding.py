"""Find the model that a MODEL argument means: a run, one of its checkpoints, an adapter, a model directory, a GGUF file
or a Hub id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainwright.engine.checkpoints.checkpoint import Checkpoint, CheckpointError, Checkpoints
from trainwright.engine.checkpoints.manifest import is_checkpoint
from trainwright.errors import RequestError
from trainwright.models.supported import read_class_name
from trainwright.models.tokenization import TOKENIZER_FILES
from trainwright.recipe.files import read_json
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.model import AddedTokensSection, ModelSection
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import quote_word

_RECIPE, _FINAL = "recipe.yaml", "final"
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class UnloadedModel:
    """A model before any of its weights are read.

    Attributes:
        origin: a description of where its weights come from.
        section: the model as in a recipe, including its adapter.
        seed: for fresh weights of the section.
        checkpoint: a verified checkpoint whose tensors replace those of the section; None: no replacement.
        recipe: of the run it was trained in, if any.
        run: the directory of that run.
    """

    origin: str
    section: ModelSection
    seed: int = 0
    checkpoint: Path | None = None
    recipe: RecipeSchema | None = None
    run: Path | None = None

    def save(self, file: Path) -> None:
        """Write what other processes need to load the model."""
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        values = {"origin": self.origin, "section": self.section.model_dump(), "seed": self.seed}
        file.write_text(json.dumps({**values, "checkpoint": checkpoint}), encoding="utf-8")

    @classmethod
    def open(cls, file: Path) -> UnloadedModel:
        """Return what was saved, without the run."""
        values = json.loads(file.read_text(encoding="utf-8"))
        section = ModelSection.model_validate(values["section"])
        checkpoint = None if values["checkpoint"] is None else Path(values["checkpoint"])
        return cls(values["origin"], section, values["seed"], checkpoint)


def find_model(
    model: str, adapter: str | None = None, checkpoint: str | None = None, *, of_texts: bool = True
) -> UnloadedModel:
    """Find ``model``, with the ``adapter`` (a directory) on it.

    Args:
        checkpoint: of a run: final, best, newest, or a step. None: final, if it does not exist best, else newest.
        of_texts: whether it must be a model that reads texts.

    Raises:
        RequestError: it does not exist or is not usable; names what exists.
    """
    path = expand_user_path(model)
    if is_checkpoint(path):
        _refuse_choice(checkpoint, f"{path} is a checkpoint")
        unloaded_model = _build_from_checkpoint(_verify_checkpoint(path))
    elif (path / _RECIPE).is_file():
        unloaded_model = _find_in_run(path, checkpoint)
    else:
        _refuse_choice(checkpoint, f"{model} is not a run")
        unloaded_model = (
            _build_from_adapter(path) if (path / _ADAPTER).is_file() else UnloadedModel(model, _build_section(model))
        )
    if of_texts and unloaded_model.recipe is not None and not unloaded_model.recipe.has_texts:
        raise RequestError(
            f"{model}: is of a run of {unloaded_model.recipe.task}, which acts in an environment and reads no texts; "
            f"see how it acts with: trainwright eval {quote_word(model)}"
        )
    return unloaded_model if adapter is None else _add_adapter(unloaded_model, adapter)


def _build_section(model: str) -> ModelSection:
    """Return a model as it is, with the class that its configuration names if it is a module of somebody's own.

    Commands that find a model import that only with ``--trust-code``.
    """
    implementation = read_class_name(expand_user_path(model))
    return (
        ModelSection(name=model) if implementation is None else ModelSection(name=model, implementation=implementation)
    )


def _refuse_choice(checkpoint: str | None, why: str) -> None:
    if checkpoint is not None:
        raise RequestError(f"--checkpoint {checkpoint}: {why}; --checkpoint is for run directories")


def _find_in_run(run: Path, checkpoint: str | None) -> UnloadedModel:
    checkpoints = Checkpoints(run / "checkpoints", keep_last=1, keep_best=False)
    steps = checkpoints.steps()
    has_final = (run / _FINAL).is_dir()
    if checkpoint == "final" or (checkpoint is None and has_final):
        if not has_final:
            raise RequestError(f"--checkpoint final: {run} is not finished; {_describe_steps(steps)}")
        return _build_from_final(run)
    if checkpoint is not None and checkpoint.isdigit():
        if int(checkpoint) not in steps:
            raise RequestError(f"--checkpoint {checkpoint}: {run} has no such step; {_describe_steps(steps)}")
        return _build_from_checkpoint(_verify_checkpoint(checkpoints.path(int(checkpoint))))
    if checkpoint not in (None, "best", "newest"):
        raise RequestError(
            f"--checkpoint {checkpoint}: choose from final, best, newest or a step; {_describe_steps(steps)}"
        )
    newest, errors = checkpoints.find_latest()
    if newest is None:
        why = f": {'; '.join(map(str, errors))}" if errors else ""
        raise RequestError(f"{run} has no {_FINAL}/ and no checkpoint that can be read{why}")
    progress = newest.state.get("progress")
    best = progress.get("best_step") if isinstance(progress, dict) else None
    if checkpoint == "best" and best is None:
        raise RequestError(f"--checkpoint best: {run} has no validation results; {_describe_steps(steps)}")
    if checkpoint != "newest" and best in steps:
        return _build_from_checkpoint(_verify_checkpoint(checkpoints.path(best)))
    if checkpoint == "best":
        raise RequestError(f"--checkpoint best: that of step {best} was not kept; {_describe_steps(steps)}")
    return _build_from_checkpoint(newest.path)


def _build_from_final(run: Path) -> UnloadedModel:
    recipe = load_recipe(run / _RECIPE)
    directory = run / _FINAL
    adapted = (directory / _ADAPTER).is_file()
    section = _set_adapter(recipe.model, directory) if adapted else _build_section(str(directory))
    return UnloadedModel(str(directory), section, recipe.train.seed, recipe=recipe, run=run)


def _build_from_checkpoint(path: Path) -> UnloadedModel:
    recipe = load_recipe(path / _RECIPE)
    run = path.parent.parent if (path.parent.parent / _RECIPE).is_file() else None
    return UnloadedModel(str(path), recipe.model, recipe.train.seed, checkpoint=path, recipe=recipe, run=run)


def _verify_checkpoint(path: Path) -> Path:
    try:
        return Checkpoint.open(path).path
    except CheckpointError as error:
        raise RequestError(str(error)) from error


def _describe_steps(steps: list[int]) -> str:
    return f"there are checkpoints of step {', '.join(map(str, steps))}" if steps else "there is no checkpoint"


def _build_from_adapter(path: Path) -> UnloadedModel:
    run = path.resolve().parent
    if path.resolve().name == _FINAL and (run / _RECIPE).is_file():
        return _build_from_final(run)
    base = _read_base_section(path)
    return replace(_add_adapter(UnloadedModel(str(base.name), base), str(path)), origin=f"{path} on {base.name}")


def _read_base_section(path: Path) -> ModelSection:
    """Return the model that an adapter was trained on, from the adapter's own settings."""
    from trainwright.models.adapters.files import BaseModel

    base = BaseModel.read(path)
    name = base.name if base is not None else _read_object(path / _ADAPTER).get("base_model_name_or_path")
    hint = "pass the base model, and the adapter with --adapter"
    if not isinstance(name, str) or not name:
        raise RequestError(f"{path}/{_ADAPTER} does not name its base model; {hint}")
    if base is not None and base.is_fresh and not expand_user_path(name).exists():
        raise RequestError(
            f"{path} is an adapter of a randomly initialized model ({name}); pass the run, which can recreate the model"
        )
    if Path(name).is_absolute() and not Path(name).exists():
        details = "" if base is None else f" ({base.details})"
        raise RequestError(f"{path} is an adapter of {name}{details}, which was not found; {hint}")
    if base is None:
        return ModelSection(name=name)
    added_tokens = AddedTokensSection.model_validate(base.added_tokens or {})
    return ModelSection(name=name, gguf_file=base.gguf_file, overrides=base.overrides, added_tokens=added_tokens)


def _read_object(file: Path) -> dict[str, Any]:
    values = read_json(file)
    return values if isinstance(values, dict) else {}


def _add_adapter(base: UnloadedModel, adapter: str) -> UnloadedModel:
    directory = expand_user_path(adapter)
    if not (directory / _ADAPTER).is_file() and (directory / _FINAL / _ADAPTER).is_file():
        directory = directory / _FINAL
    if not (directory / _ADAPTER).is_file():
        raise RequestError(f"--adapter: {directory} has no {_ADAPTER}; pass the directory of an adapter")
    if base.checkpoint is not None or base.section.adapter.type != "none":
        raise RequestError(f"--adapter: {base.origin} already has an adapter; pass its base model")
    return replace(base, origin=f"{base.origin} with {directory}", section=_set_adapter(base.section, directory))


def _set_adapter(section: ModelSection, directory: Path) -> ModelSection:
    """Return the section with the adapter in ``directory``, and with the tokenizer saved with it, if any.

    Fresh weights depend on the tokenizer's vocabulary, so with them the tokenizer is not replaced.
    """
    from trainwright.models.adapters.files import SavedAdapter

    saved_adapter = SavedAdapter.open(str(directory))
    keep = {key: getattr(section.adapter, key) for key in ("quantization", "double_quantization", "quantize_experts")}
    values = section.model_dump() | {"adapter": {**keep, "type": saved_adapter.type, "start_from": str(directory)}}
    if section.config is None and any((directory / file).exists() for file in TOKENIZER_FILES):
        values |= {"tokenizer": str(directory), "chat_template": None}
    return ModelSection.model_validate(values)
