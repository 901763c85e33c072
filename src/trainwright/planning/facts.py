"""Build the workload that a plan is made for from a recipe: the model's sizes and the lengths of its examples."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainwright.data.tokens.lengths import (
    Lengths,
    check_length,
    check_repetition,
    describe_rows,
    estimate,
    find_longest,
    load_lengths,
    mix_lengths,
    recall_source_lengths,
)
from trainwright.errors import RequestError
from trainwright.machine.cache import find_cache_root
from trainwright.models.gpt.variants import MODEL_TYPE
from trainwright.models.supported import check_packable, check_trainable, explain_unpackable
from trainwright.planning.trace.catalog import KnownModel, find_model, list_families, look_up_model, suggest_models
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Workload
from trainwright.recipe.files import read_json
from trainwright.recipe.modalities import select_text_config
from trainwright.recipe.sections.model import OWN, ModelSection, check_sizes
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_plural

if TYPE_CHECKING:
    from trainwright.data.rows.formats import Example
    from trainwright.recipe.schema import DataSection, RecipeSchema
    from trainwright.recipe.sections.data import StageSection
    from trainwright.recipe.task_spec import Needs, TaskModel


_BYTES_VOCABULARY = 259
_SAMPLED_ROWS = 200
# Keys that determine a model's size, each with its names.
_SIZES = (
    ("hidden_size", "n_embd", "d_model"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    ("vocab_size",),
)


class Facts(NamedTuple):
    """A workload and the assumptions behind it.

    ``assumptions``: messages about values that are not known yet. ``estimated``: the lengths of the examples are an
    estimate, because the data has not been prepared.
    """

    workload: Workload
    assumptions: tuple[str, ...]
    estimated: bool = False


def build_facts(recipe: RecipeSchema) -> Facts:
    """Return the workload of ``recipe``.

    Raises:
        RequestError: the model's configuration cannot be found (the message names similar known models), or examples
            are longer than the model's positions.
    """
    needs = recipe.spec.needs(recipe)
    if needs.own_model is not None:
        return _build_own_facts(recipe, needs.own_model)
    check_model(recipe.model, recipe.data.pack_length)
    assumptions: list[str] = []
    data, train = recipe.data, recipe.train
    stages = _estimate_stages(recipe, needs, assumptions) if data.stages is not None else []
    lengths = mix_lengths(stages) if stages else _estimate_lengths(recipe, needs, assumptions)
    parts = [part for part, examples in stages if examples] or [lengths]  # whose largest batches are planned
    size = _estimate_examples_per_step(recipe, lengths)
    if lengths.examples is not None and (remark := check_repetition(size, lengths.examples)) is not None:
        assumptions.append(remark)
    rows, _ = lengths.rows(size, data.pack_length)
    fullest = max(part.rows(size, data.pack_length)[1] for part in parts)
    steps = _count_steps(recipe, lengths)
    if train.batch_unit == "examples":
        most_tokens = max(part.estimate_max_batch_tokens(size, steps) for part in parts)
    else:
        most_tokens = float(train.global_batch_size)
    if train.batch_unit == "packs":
        rows = float(train.global_batch_size)
        most_tokens *= fullest
    configuration = read_configuration(recipe.model)
    workload = _build_workload(
        recipe,
        TracedModel.of(configuration, recipe),
        row_tokens=fullest,
        global_batch_rows=rows,
        packed=data.pack_length is not None,
        document_tokens=lengths.mean,
        longest_document=max(part.longest for part in parts),
        target_fraction=lengths.target_fraction,
        max_target_fraction=max(part.max_target_fraction for part in parts),
        windows=recipe.spec.corpus,
        steps=steps,
        evaluates=data.validation is not None,
        answers=bool(recipe.evaluate.prompts or recipe.evaluate.metrics),
        saved_width=_look_up_saved_width(recipe.model, configuration),
        batch_tokens=size * lengths.mean,
        fresh=recipe.model.config is not None,
        most_batch_tokens=most_tokens,
        lengths=lengths.spread() if data.pack_length is not None else (),
        batch_documents=() if data.pack_length is not None else find_longest(parts, size),
        max_length=data.max_length,
        # A model that is initialized at random has no trained weights to adapt.
        takes_adapters=recipe.model.config is None
        and configuration.get("model_type") not in (MODEL_TYPE, OWN)
        and recipe.model.trained_patterns is None,
    )
    _check_positions(workload, data)
    return Facts(workload, tuple(assumptions), estimated=not lengths.exact)


def _build_workload(recipe: RecipeSchema, model: TracedModel, **sizes: Any) -> Workload:
    """Return the workload of a recipe. ``sizes``: what its rows and its model decide."""
    train, optimizer = recipe.train, recipe.optimizer
    return Workload(
        model=model,
        optimizer=optimizer.name,
        momentum=optimizer.momentum > 0,
        averages=optimizer.ema_decay is not None,
        master_weights=optimizer.master_weights,
        weight_decay=optimizer.weight_decay > 0,
        copies_state=recipe.checkpoint.background is True,
        deterministic=train.deterministic,
        tf32=train.tf32,
        attention=recipe.model.attention,
        kernels=recipe.model.kernels,
        **sizes,
    )


def _look_up_saved_width(model: ModelSection, configuration: Mapping[str, Any]) -> int:
    """Return the bytes of an element of the saved model."""
    from trainwright.models.resolve_model import choose_saved_precision

    return 4 if choose_saved_precision(model, configuration) == "fp32" else 2


def _build_own_facts(recipe: RecipeSchema, model: TaskModel) -> Facts:
    train = recipe.train
    return Facts(
        _build_workload(
            recipe,
            TracedModel.of(model.config),
            row_tokens=model.tokens,
            global_batch_rows=train.global_batch_size,
            packed=False,
            target_fraction=model.target_fraction,
            steps=train.max_steps,
            batch_tokens=train.global_batch_size * model.tokens,
            texts=False,
            takes_adapters=False,
        ),
        (model.assumption,),
    )


def read_configuration(model: ModelSection) -> Mapping[str, Any]:
    """Return the configuration of the model that a recipe names; weights are not read.

    Raises:
        RequestError: the configuration is incomplete, or the model cannot be found.
    """
    if model.config is not None:
        check_model(model)
        configuration = _add_class(_fill_vocabulary(model), model)
        _check_sizes_given(configuration, "model.config")
        return configuration
    assert model.name is not None, "a recipe has a name or a config"
    if (catalog_model := _look_up_known(model.name)) is not None:
        check_model(model)
        return _add_rows(select_text_config(catalog_model.config), model)
    file = _find_config(model.name) or _locate_model(model) / "config.json"
    if model.is_own:
        return _add_class(dict(read_json(file)), model)
    return _add_rows(read_configuration_file(file, f"model.name: {file.parent}"), model)


def _add_rows(configuration: Mapping[str, Any], model: ModelSection) -> Mapping[str, Any]:
    """Return the configuration with the recipe's overrides, and a row of the embeddings for each token that it adds."""
    configuration = model.override_configuration(configuration)
    if not model.added_tokens.names:
        return configuration
    from trainwright.models.added_tokens import count_needed_rows
    from trainwright.models.resolve_model import complete_tokenizer, is_here

    text = configuration.get("text_config")
    inner = text if isinstance(text, dict) and "vocab_size" in text else configuration
    size = int(inner["vocab_size"])
    name = model.tokenizer if model.tokenizer is not None and "/" in model.tokenizer else str(model.name)
    if is_here(name) or model.tokenizer == "bytes":
        rows = count_needed_rows(size, complete_tokenizer(model), model.added_tokens)
    else:  # whether the model has rows to spare is not known
        rows = size + len(model.added_tokens.names)
    if inner is text:
        return {**configuration, "text_config": {**inner, "vocab_size": rows}}
    return {**configuration, "vocab_size": rows}


def _add_class(fields: dict[str, Any], model: ModelSection) -> dict[str, Any]:
    """Return the configuration of a module of the user's own with its class and a hash of the file that has it, so that
    a trace of it is not taken for one of other code; other configurations unchanged.

    Raises:
        RequestError: the class cannot be imported, or is not to be.
    """
    if not model.is_own:
        return fields
    from trainwright.models.own_module import import_class

    file = Path(inspect.getfile(import_class(model.implementation)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {**fields, "implementation": model.implementation, "source_sha256": digest}


def _check_sizes_given(config: Mapping[str, Any], origin: str) -> None:
    """Raise RequestError if a configuration lacks keys that determine the model's size."""
    kind = config.get("model_type")
    if kind is None:
        raise RequestError(f"{origin}: model_type is missing, the name of a transformers architecture")
    if kind in (OWN, MODEL_TYPE) or "text_config" in config:
        return
    if missing := [names[0] for names in _SIZES if not any(config.get(name) is not None for name in names)]:
        raise RequestError(f"{origin}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")


def check_model(model: ModelSection, pack_length: int | None = None) -> bool:
    """Raise an error if the model is not a decoder-only language model or cannot be trained on packs of
    ``pack_length``.

    Only configurations that are available without network access are checked; return whether this one is.

    Raises:
        RequestError: states the type of the model, or why packing would mix sequences.
    """
    if (config_and_origin := _find_local(model)) is None:
        return False
    check_trainable(config_and_origin[0], config_and_origin[1], list_families())
    _refuse_unnamed(config_and_origin[0])
    check_packable(config_and_origin[0], pack_length)
    return True


def can_pack(model: str, length: int) -> bool:
    """Return whether a model, given by name, directory or config.json, can be trained on packs of ``length`` tokens."""
    path = expand_user_path(model)
    content = _read_config(path) if path.suffix == ".json" else (_find_named(model) or ({}, ""))[0]
    return not isinstance(content, dict) or explain_unpackable(content, length) is None


def list_expert_notes(model: ModelSection) -> list[str]:
    """Return a message about experts that the recipe's adapter leaves out, if there are some."""
    if (
        model.adapter.type == "none"
        or (config_and_origin := _find_local(model)) is None
        or not any("expert" in key for key in config_and_origin[0])
    ):
        return []
    from trainwright.models.adapters.config import describe_experts_left_out
    from trainwright.models.configuration import NOT_MADE, build_config, drop_ignored
    from trainwright.models.files import build_skeleton

    configuration = drop_ignored(select_text_config(config_and_origin[0]))
    try:
        config = build_config(configuration.pop("model_type"), configuration)
        note = describe_experts_left_out(model.adapter, build_skeleton(config))
    except (RequestError, *NOT_MADE):  # which the check of the model reports
        return []
    return [] if note is None else [note]


def _find_local(model: ModelSection) -> tuple[Mapping[str, Any], str] | None:
    """Return a model's configuration, if available locally, and the prefix of error messages about it."""
    if model.config is not None:
        return (model.fresh or {}) if model.is_own else model.config, "model.config"
    config_and_origin = None if model.name is None else _find_named(model.name)
    if config_and_origin is not None and model.overrides:
        return model.override_configuration(config_and_origin[0]), config_and_origin[1]
    if config_and_origin is not None and model.is_own:
        return {**config_and_origin[0], "implementation": model.implementation}, config_and_origin[1]
    return config_and_origin


def _find_named(name: str) -> tuple[Mapping[str, Any], str] | None:
    if (catalog_model := _look_up_known(name)) is not None:
        return catalog_model.config, f"model.name: {name}"
    file = _find_config(name)
    content = _read_config(file) if file is not None else None
    return (content, f"model.name: {file.parent}") if file is not None and isinstance(content, dict) else None


def _refuse_unnamed(content: Mapping[str, Any]) -> None:
    """Raise RequestError for a saved module of somebody's own whose class the recipe does not name."""
    if content.get("model_type") == OWN and content.get("implementation") is None:
        from trainwright.models.own_module import import_class

        import_class(None)


def _read_config(file: Path) -> Any:
    """Return what a config.json holds, without the class of a module: a file is data, only a recipe names code."""
    content = read_json(file)
    return {key: content[key] for key in content if key != "implementation"} if isinstance(content, dict) else content


def _look_up_known(name: str) -> KnownModel | None:
    return None if expand_user_path(name).exists() else look_up_model(name)


def _find_config(name: str) -> Path | None:
    """Return the path of config.json in the directory that a recipe names, or in the Hugging Face cache."""
    path = expand_user_path(name)
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    return _find_cached_config(name)


def read_named_configuration(name: str) -> Mapping[str, Any]:
    """Return the configuration of a known model, a directory with a config.json, or such a file.

    Raises:
        RequestError: the model is unknown; the message names similar ones.
    """
    path = expand_user_path(name)
    if path.suffix == ".json":
        return read_configuration_file(path)
    if path.is_dir():
        return read_configuration_file(path / "config.json")
    catalog_model = look_up_model(name)
    if catalog_model is None and (file := _find_cached_config(name)) is not None:
        return read_configuration_file(file)
    model = catalog_model or find_model(name)
    check_trainable(model.config, name, list_families())
    return select_text_config(model.config)


def assume_full_rows(recipe: RecipeSchema) -> Facts:
    """Return the workload of a recipe whose data is not read: full rows with sequences of the maximum length."""
    data, train = recipe.data, recipe.train
    assert recipe.model.name is not None
    check_model(recipe.model, data.pack_length)
    row, sequence = data.pack_length or data.max_length, data.max_length
    sequences = "one sequence" if sequence == row else f"sequences of {sequence} tokens"
    assumptions = [f"every row is full, {sequences} each"]
    workload = _build_workload(
        recipe,
        TracedModel.of(recipe.model.override_configuration(read_named_configuration(recipe.model.name)), recipe),
        row_tokens=row,
        global_batch_rows=train.global_batch_size,
        packed=data.pack_length is not None,
        document_tokens=sequence,
        longest_document=sequence,
        max_length=sequence,
    )
    _check_positions(workload, data)
    steps = train.max_steps
    if train.max_tokens is not None:
        steps = max(1, round(train.max_tokens / workload.tokens))
    return Facts(replace(workload, steps=steps), tuple(assumptions))


def read_configuration_file(file: Path, where: str | None = None) -> Mapping[str, Any]:
    """Return what a config.json describes.

    Raises:
        RequestError: names the file, or ``where``, and the invalid value.
    """
    content = _read_config(file)
    if not isinstance(content, dict):
        raise RequestError(f"{file}: not a model's configuration, which is a JSON object")
    check_sizes(content, str(file))
    check_trainable(content, where or str(file), list_families())
    _refuse_unnamed(content)
    _check_sizes_given(content, str(file))
    return select_text_config(content)


def _check_positions(workload: Workload, data: DataSection) -> None:
    """Raise a RequestError if examples are longer than the model's positions."""
    facts = workload.facts
    if facts.family in (*list_families(), MODEL_TYPE):  # for others it is not known whether positions are limited
        check_length(data, facts.positions or None)


def _fill_vocabulary(model: ModelSection) -> dict[str, Any]:
    """Return a recipe's model configuration with ``vocab_size`` filled in from its tokenizer."""
    config = dict(model.fresh or {})
    if "vocab_size" not in config:
        kind, _, rest = (model.tokenizer or "").partition(":")
        if model.tokenizer == "bytes":
            config["vocab_size"] = _BYTES_VOCABULARY + len(model.added_tokens.names)
        elif kind == "bpe" and rest.partition(":")[0].isdigit():  # usually reaches the requested size
            config["vocab_size"] = int(rest.partition(":")[0]) + len(model.added_tokens.names)
        else:
            from trainwright.models.load import load_tokenizer

            config["vocab_size"] = len(load_tokenizer(model))
    return config


def _find_cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(file) if isinstance(file, str) else None


def _locate_model(model: ModelSection) -> Path:
    """Return the model's local directory, downloading its configuration if needed.

    Raises:
        RequestError: the model cannot be found; the message names similar known models.
    """
    from trainwright.models.resolve_model import locate

    assert model.name is not None
    try:
        return locate(model.name, "model.name", model.gguf_file, weights=False).directory
    except RequestError as error:
        near = suggest_models(model.name)
        raise RequestError(f"{error}{f'. Did you mean {near}?' if near else ''}") from error


def _estimate_lengths(recipe: RecipeSchema, needs: Needs, assumptions: list[str]) -> Lengths:
    data = recipe.data
    if needs.full:
        return Lengths((data.max_length,), None, 1.0)
    stored_lengths = load_lengths(recipe.model, data, recipe.train.seed, find_cache_root(), describe_rows(recipe))
    if stored_lengths is not None:
        if data.streaming is not None:
            many = format_plural(len(stored_lengths.quantiles), "example")
            assumptions.append(f"examples as long as the first {many}: the others are tokenized while training")
        return stored_lengths
    per_example = needs.sequences_per_example
    parts = [] if recipe.spec.corpus else _read_first_examples(recipe)
    if data.train is None and parts:
        other_sequences = [sequence for part in parts[1:] for example in part for sequence in example]
        examples = _complete_examples(parts[0], per_example, other_sequences)
    else:
        examples = _complete_examples([example for part in parts for example in part], per_example)
    return _estimate_from_examples(recipe, needs, examples, assumptions)


def _estimate_from_examples(
    recipe: RecipeSchema, needs: Needs, examples: list[list[Example]], assumptions: list[str], source: str = ""
) -> Lengths:
    max_length, per_example = recipe.data.max_length, needs.sequences_per_example
    guess = estimate(examples, max_length, recipe.model.tokenizer == "bytes")
    of_source = f" of {source}" if source else ""
    if guess is None:
        longest = per_example * max_length
        length_text = "data.max_length" if per_example == 1 else f"{per_example} times data.max_length"
        assumptions.append(
            f"every example{of_source} has {length_text}, {longest} tokens: the data is not available yet"
        )
        return Lengths((longest,), None, 1.0, exact=False)
    assumptions.append(
        f"examples{of_source} of {guess.mean:.0f} tokens on average, estimated from the characters of the first "
        f"{len(examples)}; counted exactly once the data has been prepared"
    )
    return guess


def _estimate_stages(recipe: RecipeSchema, needs: Needs, assumptions: list[str]) -> list[tuple[Lengths, float]]:
    """Return the lengths of every stage, and the number of its examples, by the mean lengths of the sources."""
    data = recipe.data
    sources = recall_source_lengths(recipe.model, data, recipe.train.seed, find_cache_root(), describe_rows(recipe))
    if needs.full:
        sources = [Lengths((data.max_length,), None, 1.0)] * len(data.sources)
    if sources is None:
        per_example = needs.sequences_per_example
        parts = [[]] * len(data.sources) if recipe.spec.corpus else _read_first_examples(recipe)
        sources = [
            _estimate_from_examples(recipe, needs, _complete_examples(part, per_example), assumptions, name)
            for part, name in zip(parts, data.source_names, strict=True)
        ]
    weights = data.list_stage_weights([part.examples or 1 for part in sources])
    mixtures = [mix_lengths(list(zip(sources, source_weights, strict=True))) for source_weights in weights]
    return compute_stage_lengths(recipe, mixtures)


def find_largest_stage(recipe: RecipeSchema) -> StageSection:
    """Return the stage that needs most memory, as one that lasts as long as the run."""
    lengths = [part for part, _ in _estimate_stages(recipe, recipe.spec.needs(recipe), [])]
    sizes = [
        (part.longest, part.estimate_max_batch_tokens(_estimate_examples_per_step(recipe, part))) for part in lengths
    ]
    stage: StageSection = (recipe.data.stages or [])[sizes.index(max(sizes))]
    return stage.model_copy(update={"until": None})


def compute_stage_lengths(recipe: RecipeSchema, lengths: Sequence[Lengths]) -> list[tuple[Lengths, float]]:
    """Return the lengths of each stage with the number of its examples; 0 behind the end of the run."""
    end, stages, progress = recipe.train.end, [], {"steps": 0.0, "tokens": 0.0}
    for stage, distribution in zip(recipe.data.stages or (), lengths, strict=True):
        size = _estimate_examples_per_step(recipe, distribution)
        per_step = {"steps": 1.0, "tokens": size * distribution.mean}
        ends = [until for until in (stage.end, end) if until is not None]
        steps = max(0.0, min((until.number - progress[until.unit]) / per_step[until.unit] for until in ends))
        progress = {unit: count + steps * per_step[unit] for unit, count in progress.items()}
        stages.append((distribution, steps * size))
    return stages


def _read_first_examples(recipe: RecipeSchema) -> list[list[list[Example]]]:
    """Return the sequences of sample examples of every source, in proportion to their weights."""
    from trainwright.data.rows.formats import NoTarget, look_up_reader
    from trainwright.data.sources.reading import check_source
    from trainwright.data.sources.registry import find_registered_source, load_registered_rows

    data, total_weight = recipe.data, sum(source.weight for source in recipe.data.sources)
    parts: list[list[list[Example]]] = []
    for source, key in zip(data.sources, data.source_keys, strict=True):
        if find_registered_source(source.source) is None:
            rows = check_source(source.source, key, source.format == "documents")
        else:
            rows = load_registered_rows(source.source)
        rows = rows[: max(1, round(_SAMPLED_ROWS * source.weight / total_weight))]
        kind = look_up_reader(recipe, key)
        parts.append([])
        if not rows:
            continue
        layout = kind.layout(list(dict.fromkeys(field for row in rows for field in row)), rows, source.rows)
        for row in rows:
            with suppress(NoTarget):  # left out and counted when the data is prepared
                examples = kind.split(kind.sequences(row, layout))
                parts[-1] += [[sequence for _, sequence in example] for example in examples]
    return parts


def _complete_examples(examples: list[list[Example]], each: int, others: Sequence[Example] = ()) -> list[list[Example]]:
    """Return the examples with sequences of ``others``, or of the examples, as far as they have less than ``each``.

    Args:
        each: the number of sequences of an example, of which some may be of other rows.
    """
    others = others or [example[0] for example in examples]
    return [
        [*example, *(others[(index + more) % len(others)] for more in range(1, each - len(example) + 1))]
        for index, example in enumerate(examples)
    ]


def _estimate_examples_per_step(recipe: RecipeSchema, lengths: Lengths) -> int:
    """Return the number of examples of a step; a mean if a batch is counted in packs or tokens."""
    size, pack = recipe.train.global_batch_size, recipe.data.pack_length
    if recipe.train.batch_unit == "tokens":
        return lengths.estimate_token_examples(size)
    return (
        lengths.estimate_pack_examples(size, pack) if recipe.train.batch_unit == "packs" and pack is not None else size
    )


def _count_steps(recipe: RecipeSchema, lengths: Lengths) -> int | None:
    train = recipe.train
    if train.max_steps is not None:
        return train.max_steps
    if train.max_tokens is not None:
        return max(1, round(train.max_tokens / (_estimate_examples_per_step(recipe, lengths) * lengths.mean)))
    if lengths.examples is None or train.epochs is None:
        return None
    return max(1, -(-round(train.epochs * lengths.examples) // _estimate_examples_per_step(recipe, lengths)))
