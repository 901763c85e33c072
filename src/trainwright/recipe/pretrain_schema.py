"""The section of pretraining, and what of a recipe goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from trainwright.recipe.fields import NotNegative, Section

if TYPE_CHECKING:
    from trainwright.recipe.schema import Recipe

Problem = tuple[tuple[str, ...], str]  # the keys that do not go together, and why


class PretrainSection(Section):
    """How a corpus is cut into examples, and what is added to the loss."""

    windows: Literal["documents", "contiguous"] = Field(
        "documents",
        description="An example is at most data.max_length tokens. documents: of one document, and shorter ones share "
        "a row of data.pack_length without seeing each other. contiguous: of all documents one after another, each "
        "followed by the end-of-text token, as GPT-2 was trained; data.validation is then the end of the corpus.",
    )
    z_loss: NotNegative = Field(
        0.0,
        description="Adds so much of the square of the logarithm of the softmax's denominator to the loss of every "
        "target, so that logits do not drift (arXiv 2204.02311, section 5). The validation loss is without it.",
    )


def filled_in(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe's values with what pretraining and tokenizers take from other keys."""
    data, model = values.get("data"), values.get("model")
    if not isinstance(data, dict):
        return values
    length = data.get("max_length", 1024)
    if values.get("task") == "pretrain" and "pack_length" not in data and isinstance(length, int):
        values = {**values, "data": {**data, "pack_length": length}}
    if (
        isinstance(model, dict)
        and isinstance(name := model.get("tokenizer"), str)
        and isinstance(data.get("train"), str)
    ):
        kind, _, rest = name.partition(":")
        if name == "characters" or (kind == "bpe" and rest.isdigit()):
            values = {**values, "model": {**model, "tokenizer": f"{name}:{data['train']}"}}
    return values


def problems(recipe: Recipe) -> Iterator[Problem]:
    """What contradicts pretraining, and the GPT, or would have no effect."""
    model, train = recipe.model, recipe.train
    if recipe.pretrain is not None and recipe.task != "pretrain":
        yield ("pretrain", "task"), f"has no effect with task {recipe.task}; remove it, or set task to pretrain"
    if model.implementation == "gpt" and model.name is None:
        why = "is of the model that model.name gives; of a fresh one model.config.model_type gpt says the same"
        yield ("model.implementation", "model.name"), why
    ours = model.implementation == "gpt" or (model.config or {}).get("model_type") == "gpt"
    if model.adapter.type != "none" and ours:
        why = (
            "adapters are put on architectures of transformers, to be used with them; set model.implementation to "
            "transformers and give model.name"
        )
        yield ("model.adapter.type", "model.implementation"), why
    if recipe.optimizer.name == "muon" and recipe.parallel.strategy.startswith("zero"):
        why = "Muon works on whole matrices, and DeepSpeed cuts them up flat; set parallel.strategy to ddp or fsdp"
        yield ("optimizer.name", "parallel.strategy"), why
    lengths = [key for key in ("max_steps", "epochs", "max_tokens") if getattr(train, key) is not None]
    if "max_tokens" in lengths and len(lengths) > 1:
        why = f"train.{lengths[0]} and train.max_tokens are both given; keep one and set the other to null"
        yield ("train.max_tokens", f"train.{lengths[0]}"), why
    if (train.initial_batch_size is None) != (not train.batch_warmup_steps):
        missing = "batch_warmup_steps" if train.initial_batch_size is not None else "initial_batch_size"
        yield (f"train.{missing}",), "train.initial_batch_size and train.batch_warmup_steps go together; give both"
    if train.initial_batch_size is not None and train.initial_batch_size >= train.global_batch_size:
        why = f"is no less than train.global_batch_size {train.global_batch_size}; batches grow up to that"
        yield ("train.initial_batch_size", "train.global_batch_size"), why
    if recipe.task == "pretrain":
        yield from _of_the_task(recipe)


def _of_the_task(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if data.long_documents == "cut":
        yield ("data.long_documents", "task"), "pretraining loses nothing of a document; set it to auto or to split"
    if recipe.model.chat_template is not None:
        yield ("model.chat_template", "task"), "texts have no turns to put a template around; remove it"
    if recipe.evaluate.metrics:
        yield ("evaluate.metrics", "task"), "texts ask nothing that could be answered; remove it"
