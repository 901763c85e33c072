"""Checks of a recipe across keys: values that are valid alone but contradict each other.

A recipe with a range of processes is valid if it is with any number of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from trainwright.errors import RequestError
from trainwright.recipe.adapter_spec import OPTIONAL
from trainwright.recipe.registries import ADAPTERS, OPTIMIZERS, SCHEDULES, STRATEGIES, TASKS
from trainwright.recipe.sections.data import RowSettings
from trainwright.recipe.sections.fields import Contradiction
from trainwright.recipe.sections.model import check_config_sizes
from trainwright.recipe.sections.parallel import ParallelSection, ProcessRange
from trainwright.recipe.strategy_spec import load_strategies

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema


_ROUNDING = 1e-9


def list_contradictions(recipe: RecipeSchema) -> list[Contradiction]:
    """Return all contradictions between the keys of ``recipe``; empty if it is valid."""
    checks = (
        _check_task,
        _check_model,
        _check_adapter,
        _check_data,
        _check_rows,
        _check_length,
        _check_schedule,
        _check_batch,
        check_processes,
        check_strategy,
        _check_checkpoints,
        _check_evaluation,
        recipe.spec.check,
    )
    return [problem for check in checks for problem in check(recipe)]


def _build_contradiction_of_both(one: str, other: str) -> Contradiction:
    return Contradiction((one, other), f"{one} and {other} are both set; keep one and set the other to null")


def _check_task(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Yield sections and keys of other tasks, which would have no effect."""
    own_spec, specs = recipe.spec, {name: TASKS.get(name) for name in TASKS.names()}
    other_specs = {name: spec for name, spec in specs.items() if spec != own_spec}
    for name, other_spec in other_specs.items():
        if other_spec.section is not None and getattr(recipe, name) is not None:
            why = f"has no effect with task {recipe.task}; remove it, or set task to {name}"
            yield Contradiction((name, "task"), f"{why}; {name}: null removes an inherited one")
    if "train" not in own_spec.data_keys:
        return
    for name, other_spec in other_specs.items():
        for key in other_spec.data_keys:
            if key not in own_spec.data_keys and getattr(recipe.data, key) is not None:
                why = f"has no effect with task {recipe.task}, which trains on data.train"
                yield Contradiction((f"data.{key}", "task"), f"{why}; remove it, or set task to {name}")
    if recipe.data.train is None:
        yield Contradiction(("data.train",), "no training data; set it to the rows to train on")


def _check_model(recipe: RecipeSchema) -> Iterator[Contradiction]:
    model = recipe.model
    if model.name is None and model.config is None:
        yield Contradiction(("model.name",), "no model; set model.name, or model.config for a randomly initialized one")
    if model.name is not None and model.config is not None:
        yield _build_contradiction_of_both("model.name", "model.config")
    if model.config is not None:
        if model.is_own:
            if "model_type" in model.config:
                why = "the model is that of model.implementation; remove it"
                yield Contradiction(("model.config.model_type", "model.implementation"), why)
        elif not isinstance(model.config.get("model_type"), str):
            why = "needs a model_type, the name of a transformers architecture such as llama"
            yield Contradiction(("model.config",), why)
        for key, reason in check_config_sizes(model.config):
            yield Contradiction((f"model.config.{key}",), reason)
        if model.tokenizer is None:
            yield Contradiction(
                ("model.tokenizer", "model.config"),
                "a randomly initialized model has no tokenizer; set model.tokenizer, for instance to bytes",
            )
    if model.is_own and model.name is not None and model.added_tokens.names:
        why = "the embeddings of a module of your own cannot be resized; add the tokens when it is made"
        yield Contradiction(("model.added_tokens", "model.implementation"), why)
    if model.is_own and model.attention != "auto":
        why = "the module of model.implementation computes its attention itself; remove it"
        yield Contradiction(("model.attention", "model.implementation"), why)
    if model.is_own and model.kernels != "auto":
        why = "the module of model.implementation computes its operations itself; remove it"
        yield Contradiction(("model.kernels", "model.implementation"), why)
    if model.overrides and model.name is None:
        why = "changes the configuration of model.name; write the values in model.config"
        yield Contradiction(("model.overrides",), why)
    if model.gguf_file is not None and model.name is None:
        yield Contradiction(
            ("model.gguf_file",), "is a file in the directory or repository model.name; set model.name too"
        )
    if model.gguf_file is not None and model.name is not None and model.name.lower().endswith(".gguf"):
        yield Contradiction(
            ("model.gguf_file", "model.name"),
            f"has no effect, as model.name {model.name} is a GGUF file itself; remove it, or set model.name to the "
            "directory",
        )
    if model.implementation == "gpt" and model.name is None:
        why = "only applies to model.name; with model.config, set model.config.model_type to gpt instead"
        yield Contradiction(("model.implementation", "model.name"), why)
    ours = model.implementation != "transformers" or (model.config or {}).get("model_type") == "gpt"
    if model.adapter.type != "none" and ours:
        why = "adapters need a model of transformers; set model.implementation to transformers, and model.name"
        yield Contradiction(("model.adapter.type", "model.implementation"), why)


def _check_adapter(recipe: RecipeSchema) -> Iterator[Contradiction]:
    adapter = recipe.model.adapter
    if adapter.type == "none":
        for key in adapter.changed():
            why = "has no effect without an adapter"
            if key == "quantization":
                why = "quantized weights are frozen, so nothing would be trained without an adapter"
            keys = f"model.adapter.{key}", "model.adapter.type"
            yield Contradiction(keys, f"{why}; set model.adapter.type, for instance to lora")
        return
    for key in adapter.changed():
        if key in OPTIONAL and key not in adapter.spec.reads:
            readers = ", ".join(name for name in ADAPTERS.names() if key in ADAPTERS.get(name).reads)
            keys = f"model.adapter.{key}", "model.adapter.type"
            yield Contradiction(keys, f"has no effect with {adapter.type}, only with {readers}; remove it")
    for key in ("trainable", "frozen"):
        if getattr(recipe.model, key):
            why = "an adapter trains its own matrices; choose the modules with model.adapter.targets"
            yield Contradiction((f"model.{key}", "model.adapter.type"), why)
    if recipe.model.save_dtype != "auto":
        yield Contradiction(
            ("model.save_dtype", "model.adapter.type"),
            "has no effect with an adapter, which is saved in fp32; remove it, and choose the precision of the merged "
            "model with `trainwright merge --dtype`",
        )
    if adapter.quantization != "nf4" and not adapter.double_quantization:
        yield Contradiction(
            ("model.adapter.double_quantization", "model.adapter.quantization"),
            f"has no effect with quantization {adapter.quantization}, only with nf4",
        )
    if adapter.quantize_experts and adapter.quantization == "none":
        keys = "model.adapter.quantize_experts", "model.adapter.quantization"
        yield Contradiction(keys, "has no effect without a quantization; set it to nf4 or int8")
    if adapter.layers is not None and adapter.start_from is not None and not adapter.stack:
        why = "the adapter to continue has its modules already; remove it"
        yield Contradiction(("model.adapter.layers", "model.adapter.start_from"), why)
    for key, wrong, why in (
        ("type", adapter.type == "dora", "dora scales the rows of one matrix; set it to lora"),
        (
            "dropout",
            adapter.dropout > 0,
            "each expert's products are added to its weights, not to an output; set it to 0",
        ),
        ("initialization", adapter.decomposes, "the weights of experts are not decomposed"),
        ("stack", adapter.stack, "adapters of experts cannot be saved as one"),
        ("start_from", adapter.start_from is not None, "the adapter to continue has its parameters already; remove it"),
    ):
        if adapter.target_parameters and wrong:
            yield Contradiction(("model.adapter.target_parameters", f"model.adapter.{key}"), why)
    if adapter.targets == [] and not adapter.target_parameters:
        why = "leaves nothing to adapt; name modules, or weights of experts in target_parameters"
        yield Contradiction(("model.adapter.targets", "model.adapter.target_parameters"), why)
    if adapter.initialization != "default" and adapter.start_from is not None and not adapter.stack:
        why = "the adapter to continue has its matrices already; remove it"
        yield Contradiction(("model.adapter.initialization", "model.adapter.start_from"), why)
    if adapter.decomposes:
        for key, wrong, why in (
            ("type", adapter.type == "dora", "dora scales the weights that would be decomposed; set it to lora"),
            ("quantization", adapter.quantization != "none", "quantized weights are not decomposed; set it to none"),
            ("stack", adapter.stack, "what is below an adapter with this initialization is its first product"),
        ):
            if wrong:
                keys = "model.adapter.initialization", f"model.adapter.{key}"
                yield Contradiction(keys, f"{adapter.initialization} has no effect here: {why}")
    if adapter.stack and adapter.start_from is None:
        yield Contradiction(
            ("model.adapter.stack", "model.adapter.start_from"),
            "no adapter to stack on; set model.adapter.start_from to its directory",
        )
    if adapter.stack and adapter.type == "dora":
        yield Contradiction(
            ("model.adapter.stack", "model.adapter.type"),
            "dora cannot be stacked on another adapter, because it depends on the full change of a weight; use lora, "
            "or set stack to false",
        )


def _check_data(recipe: RecipeSchema) -> Iterator[Contradiction]:
    data = recipe.data
    if data.pack_length is not None and data.pack_length < data.max_length:
        yield Contradiction(
            ("data.pack_length", "data.max_length"),
            f"{data.pack_length} is less than data.max_length {data.max_length}, so not every example would "
            "fit; raise it or lower data.max_length",
        )
    if isinstance(data.train, list):
        yield from _check_mixture(recipe)
    elif data.mixing != "weights":
        yield Contradiction(("data.mixing", "data.train"), "is for several sources; list them in data.train")
    yield from _check_stages(recipe)
    yield from _check_streaming(recipe)
    if isinstance(data.held_out, int) and data.limit is not None and data.held_out >= data.limit:
        yield Contradiction(
            ("data.validation", "data.limit"),
            f"holds out {data.held_out} of the {data.limit} rows that data.limit allows, so none are left to train "
            "on; lower it",
        )


def _check_streaming(recipe: RecipeSchema) -> Iterator[Contradiction]:
    data, train, key = recipe.data, recipe.train, "data.streaming"
    if data.streaming is None:
        return
    if not recipe.spec.streams:
        able = ", ".join(name for name in TASKS.names() if TASKS.get(name).streams)
        yield Contradiction((key, "task"), f"task {recipe.task} needs all rows before it begins; remove it ({able})")
    if train.max_steps is None:
        why = "the number of rows is not known before they are read; set train.max_steps"
        yield Contradiction((key, "train.epochs" if train.epochs is not None else "train.max_tokens"), why)
    if data.held_out is not None:
        why = "rows cannot be held out of a source that is read while training; set it to another source, or to null"
        yield Contradiction(("data.validation", key), why)
    if data.deduplicate:
        yield Contradiction(("data.deduplicate", key), "needs all rows before training begins; set it to false")
    if data.stages is not None:
        yield Contradiction(("data.stages", key), "sources that are read while training are not mixed; remove one")
    elif len(data.sources) > 1 and data.mixing != "concatenate":
        why = "sources are read one after another while training; set it to concatenate"
        yield Contradiction(("data.mixing", key), why)
    if train.batch_unit != "examples":
        why = "a step is found without the rows before it, so it is counted in examples; set it to examples"
        yield Contradiction(("train.batch_unit", key), why)
    # The shards of five steps that follow each other (see data/stream/stream.py), and one that is written.
    examples = (ceil(5 * train.global_batch_size / data.streaming.buffer_size) + 2) * data.streaming.buffer_size
    size = examples * (5 * (data.max_length + 1) + 8) + 10**6
    if size > data.streaming.disk_gb * 1e9:
        why = f"the shards of five steps may take {size / 1e9:.2g} GB; raise it, or lower data.streaming.buffer_size"
        yield Contradiction(("data.streaming.disk_gb", "data.streaming.buffer_size"), why)


def _check_stages(recipe: RecipeSchema) -> Iterator[Contradiction]:
    data, train = recipe.data, recipe.train
    if data.stages is None:
        for source, key in zip(data.sources, data.source_keys, strict=True):
            if source.name is not None:
                yield Contradiction((f"{key}.name", "data.stages"), "has no effect without data.stages; remove it")
        return
    if "train" not in recipe.spec.data_keys or not recipe.has_texts:
        yield Contradiction(("data.stages", "task"), f"task {recipe.task} has no sources in data.train; remove it")
        return
    if train.epochs is not None:
        why = "a run in stages has no epochs; set train.max_steps or train.max_tokens"
        yield Contradiction(("data.stages", "train.epochs"), why)
    names = data.source_names
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield Contradiction(("data.stages", "data.train"), f"two sources are called {twice}; give each another name")
    before = {"steps": 0, "tokens": 0}
    for number, stage in enumerate(data.stages):
        key, end = f"data.stages[{number}]", stage.end
        if (end is None) != (number == len(data.stages) - 1):
            why = "is missing: only the last stage lasts to the end of the run"
            if end is not None:
                why = "the last stage lasts to the end of the run; remove it, or add a stage"
            yield Contradiction((f"{key}.until",), why)
        elif end is not None:
            if end.number <= before[end.unit]:
                yield Contradiction((f"{key}.until",), "is not later than the end of a stage before it; raise it")
            before[end.unit] = end.number
        if stage.max_length is not None and not recipe.spec.corpus:
            why = f"divides windows of a corpus; the rows of task {recipe.task} stay whole: remove it"
            yield Contradiction((f"{key}.max_length", "task"), why)
        elif stage.max_length is not None and stage.max_length > data.max_length:
            why = f"is more than data.max_length {data.max_length}; lower it"
            yield Contradiction((f"{key}.max_length", "data.max_length"), why)
        for name in stage.weights or ():
            if name not in names:
                why = f"{name} is no source of data.train, whose sources are {', '.join(names)}; set its name there"
                yield Contradiction((f"{key}.weights",), why)
    if all(stage.weights is not None for stage in data.stages):
        used_names = {name for stage in data.stages for name, weight in (stage.weights or {}).items() if weight}
        for source, name, key in zip(data.sources, names, data.source_keys, strict=True):
            if name not in used_names:
                yield Contradiction((key, "data.stages"), "is used in no stage; give it a weight in one, or remove it")
            if source.weight != 1:
                why = "has no effect beside data.stages, each of which has weights of its own; remove it"
                yield Contradiction((f"{key}.weight", "data.stages"), why)
        if data.mixing != "weights":
            why = "has no effect beside data.stages, each of which has weights of its own; remove it"
            yield Contradiction(("data.mixing", "data.stages"), why)


def _check_mixture(recipe: RecipeSchema) -> Iterator[Contradiction]:
    data = recipe.data
    if data.limit is not None:
        yield _build_mixture_contradiction("limit")
    if data.mixing == "concatenate" and any(source.weight != 1 for source in data.sources):
        why = "every example is used once, so the sources have no weights; remove them, or set it to weights"
        yield Contradiction(("data.mixing", "data.train"), why)
    sets = data.validation.values() if isinstance(data.validation, dict) else [data.validation]
    for key, default in RowSettings._field_defaults.items():
        if getattr(data, key) != default and not any(isinstance(rows, str) for rows in sets):
            yield _build_mixture_contradiction(key)


def _build_mixture_contradiction(key: str) -> Contradiction:
    why = f"applies to a single source; set {key} for each source of data.train"
    return Contradiction((f"data.{key}", "data.train"), why)


# Row layouts with answers to compare.
_PREFERENCES = ("preference", "labelled")


def _check_rows(recipe: RecipeSchema) -> Iterator[Contradiction]:
    data, is_preference = recipe.data, recipe.spec.rows(recipe, "data.train") in ("pairs", "answers")
    formats = {"data.format": data.format}
    if isinstance(data.train, list):
        formats |= {f"{key}.format": source.format for key, source in zip(data.source_keys, data.sources, strict=True)}
    for key, layout in ((key, layout) for key, setting in formats.items() for layout in _to_list(setting)):
        if layout != "auto" and (layout in _PREFERENCES) != is_preference:
            layouts = " or ".join(_PREFERENCES) if is_preference else "a layout of single examples"
            yield Contradiction(
                (key, "task"), f"task {recipe.task} does not train on {layout} rows; set it to {layouts}"
            )


def _to_list(formats: str | Sequence[str]) -> Sequence[str]:
    return [formats] if isinstance(formats, str) else formats


def _check_length(recipe: RecipeSchema) -> Iterator[Contradiction]:
    train = recipe.train
    if train.max_steps is not None and train.epochs is not None:
        yield _build_contradiction_of_both("train.max_steps", "train.epochs")
    lengths = [key for key in ("max_steps", "epochs", "max_tokens") if getattr(train, key) is not None]
    if "max_tokens" in lengths and len(lengths) > 1:
        both = _build_contradiction_of_both(f"train.{lengths[0]}", "train.max_tokens")
        yield both._replace(keys=both.keys[::-1])
    if (train.initial_batch_size is None) != (not train.batch_warmup_steps):
        missing = "batch_warmup_steps" if train.initial_batch_size is not None else "initial_batch_size"
        why = "train.initial_batch_size and train.batch_warmup_steps must be set together"
        yield Contradiction((f"train.{missing}",), why)
    if train.initial_batch_size is not None and train.initial_batch_size >= train.global_batch_size:
        why = f"is not less than train.global_batch_size {train.global_batch_size}, to which batches grow; lower it"
        yield Contradiction(("train.initial_batch_size", "train.global_batch_size"), why)
    if train.batch_unit == "tokens":
        yield from _check_batch_of_tokens(recipe)
    if train.batch_unit == "packs" and recipe.data.pack_length is None:
        yield Contradiction(("train.batch_unit", "data.pack_length"), "there are no packs; set data.pack_length")
    if train.batch_unit != "examples" and train.initial_batch_size is not None:
        why = "growing batches are counted in examples; remove it"
        yield Contradiction(("train.batch_unit", "train.initial_batch_size"), why)
    if train.max_loss is None and "max_loss_steps" in train.changed():
        yield Contradiction(("train.max_loss_steps", "train.max_loss"), "has no effect without train.max_loss; set it")
    if train.neftune_noise_alpha is not None and not recipe.has_texts:
        why = f"task {recipe.task} has no embeddings of tokens; remove it"
        yield Contradiction(("train.neftune_noise_alpha", "task"), why)
    if train.float8 != "no":
        yield from _check_float8(recipe)
    if train.profile is not None and train.max_steps is not None and train.profile.steps[1] > train.max_steps:
        why = f"ends at step {train.profile.steps[1]}, and train.max_steps is {train.max_steps}; lower it"
        yield Contradiction(("train.profile.steps", "train.max_steps"), why)


def _check_float8(recipe: RecipeSchema) -> Iterator[Contradiction]:
    if recipe.train.mixed_precision != "bf16":
        why = "rounds what is computed in bf16; set train.mixed_precision to bf16"
        yield Contradiction(("train.float8", "train.mixed_precision"), why)
    if recipe.model.adapter.type != "none":
        why = "is of layers that are trained, and those under an adapter are frozen; remove one of the two"
        yield Contradiction(("train.float8", "model.adapter.type"), why)
    if recipe.model.is_own or not recipe.has_texts:
        why = "is of models of transformers; remove it"
        yield Contradiction(("train.float8", "model.implementation" if recipe.model.is_own else "task"), why)


def _check_master_weights(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Check that weights can be kept in bf16 alone, where they are."""
    optimizer, key = recipe.optimizer, "optimizer.master_weights"
    if optimizer.master_weights:
        return
    if recipe.train.mixed_precision not in ("auto", "bf16"):
        why = "false keeps weights in bf16, in which they then compute; set train.mixed_precision to bf16 or auto"
        yield Contradiction((key, "train.mixed_precision"), why)
    spec = OPTIMIZERS.get(optimizer.name)
    if spec.averages or spec.whole_matrices or spec.preconditions:
        action = "averages the weights in fp32" if spec.averages else "updates whole matrices"
        yield Contradiction((key, "optimizer.name"), f"{optimizer.name} {action}; set it to true, or use adamw")
    if optimizer.ema_decay is not None:
        yield Contradiction((key, "optimizer.ema_decay"), "the average is of fp32 weights; remove one of the two")
    if recipe.parallel.offload_parameters:
        why = "false keeps weights and their updates on the device; set it to true, or offload nothing"
        yield Contradiction((key, "parallel.offload_parameters"), why)


def _check_schedule(recipe: RecipeSchema) -> Iterator[Contradiction]:
    optimizer = recipe.optimizer
    read = OPTIMIZERS.get(optimizer.name).reads
    for key in ("momentum", "nesterov", "betas", "eps", "options"):
        if key in optimizer.changed() and key not in read:
            why = f"has no effect with optimizer {optimizer.name}; remove it or choose another optimizer"
            yield Contradiction((f"optimizer.{key}", "optimizer.name"), why)
    if optimizer.nesterov and not optimizer.momentum:
        yield Contradiction(
            ("optimizer.nesterov", "optimizer.momentum"), "needs a momentum; set it to 0.9, or remove it"
        )
    if optimizer.ema_decay is not None and OPTIMIZERS.get(optimizer.name).averages:
        why = f"{optimizer.name} averages the weights itself; remove it"
        yield Contradiction(("optimizer.ema_decay", "optimizer.name"), why)
    yield from _check_master_weights(recipe)
    schedule = SCHEDULES.get(optimizer.schedule)
    decays = schedule.in_decay_steps
    if not decays and "decay_steps" in optimizer.changed():
        yield Contradiction(
            ("optimizer.decay_steps", "optimizer.schedule"),
            f"has no effect with schedule {optimizer.schedule}, only with warmup_stable_decay",
        )
    for key in ("power", "cycles"):
        if key in optimizer.changed() and key not in schedule.reads:
            names = ", ".join(name for name in SCHEDULES.names() if key in SCHEDULES.get(name).reads)
            why = f"has no effect with schedule {optimizer.schedule}, only with {names}"
            yield Contradiction((f"optimizer.{key}", "optimizer.schedule"), why)
    for key in ("plateau_factor", "plateau_patience"):
        if key in optimizer.changed() and not schedule.on_plateau:
            why = f"has no effect with schedule {optimizer.schedule}, only with reduce_on_plateau"
            yield Contradiction((f"optimizer.{key}", "optimizer.schedule"), why)
    if "warmup" in schedule.reads and not optimizer.warmup_steps:
        why = f"{optimizer.schedule} falls by the length of the warm-up; set optimizer.warmup_steps, such as 0.05"
        yield Contradiction(("optimizer.schedule", "optimizer.warmup_steps"), why)
    if not schedule.falls and optimizer.final_learning_rate_ratio:
        yield Contradiction(
            ("optimizer.final_learning_rate_ratio", "optimizer.schedule"),
            f"has no effect with schedule {optimizer.schedule}; remove it or choose another schedule",
        )
    parts = [optimizer.warmup_steps, optimizer.decay_steps if decays else 0]
    total = recipe.train.max_steps
    planned_steps = sum(part * (total or 0) if isinstance(part, float) else part for part in parts)
    if total is not None and planned_steps > total + _ROUNDING:
        yield Contradiction(
            ("optimizer.warmup_steps", "optimizer.decay_steps", "train.max_steps"),
            f"the warm-up{' and the decay' if decays else ''} would be longer than the {total} steps of "
            "train.max_steps",
        )
    elif all(isinstance(part, float) for part in parts) and sum(parts) > 1 + _ROUNDING:
        yield Contradiction(
            ("optimizer.warmup_steps", "optimizer.decay_steps"), "warm-up and decay together are longer than the run"
        )


def _check_batch_of_tokens(recipe: RecipeSchema) -> Iterator[Contradiction]:
    train, data = recipe.train, recipe.data
    if not recipe.has_texts:
        yield Contradiction(("train.batch_unit", "task"), f"{recipe.task} has no tokens of texts; set it to examples")
        return
    longest = data.max_length * recipe.spec.needs(recipe).sequences_per_example
    if train.global_batch_size < longest:
        why = f"{train.global_batch_size} tokens are fewer than an example may have ({longest}); raise it"
        yield Contradiction(("train.global_batch_size", "train.batch_unit", "data.max_length"), why)
    if train.gradient_accumulation_steps != "auto":
        why = "the number of rows of a batch of tokens varies between steps; set it to auto"
        yield Contradiction(("train.gradient_accumulation_steps", "train.batch_unit"), why)


def _check_batch(recipe: RecipeSchema) -> Iterator[Contradiction]:
    train = recipe.train
    processes = 1 if recipe.parallel.is_one_process else recipe.parallel.processes
    size, micro, steps = train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps
    if micro != "auto" and micro > size:
        yield Contradiction(
            ("train.micro_batch_size", "train.global_batch_size"),
            f"{micro} is more than train.global_batch_size {size}; lower it, raise train.global_batch_size, or set it "
            "to auto",
        )
        return
    if steps == "auto":
        return
    possible = _iterate_accumulations(size, micro, processes)
    if recipe.data.pack_length is not None and train.batch_unit == "examples":
        if micro != "auto":
            yield Contradiction(
                ("train.gradient_accumulation_steps", "train.micro_batch_size", "data.pack_length"),
                "the number of packs per batch varies between steps, so it and train.micro_batch_size cannot both be "
                "fixed; set one of them to auto",
            )
            return
        fits = steps <= max(possible)  # there are at most as many packs as examples
    else:
        fits = steps in possible
    if not fits:
        yield Contradiction(
            (
                "train.gradient_accumulation_steps",
                "train.global_batch_size",
                "train.micro_batch_size",
                "parallel.num_processes",
            ),
            f"train.micro_batch_size {micro} x train.gradient_accumulation_steps {steps} x parallel.num_processes "
            f"{processes} is not equal to train.global_batch_size {size}; change one of them or set it to auto",
        )


def _iterate_accumulations(size: int, micro: int | str, processes: int | str) -> Iterable[int]:
    """Return the micro-batches of the busiest process, for each choice of the auto values. Remainders are allowed."""

    def steps(micro: int, processes: int) -> int:
        return ceil(ceil(size / micro) / processes)

    if isinstance(micro, int) and isinstance(processes, int):
        return [steps(micro, processes)]
    if isinstance(micro, int):
        return {steps(micro, count) for count in range(1, size + 1)}
    if isinstance(processes, int):
        return {steps(rows, processes) for rows in range(1, size + 1)}
    return range(1, size + 1)


def _check_checkpoints(recipe: RecipeSchema) -> Iterator[Contradiction]:
    if recipe.faults.mean_time_between is not None and recipe.checkpoint.every != "auto":
        keys = "faults.mean_time_between", "checkpoint.every"
        yield Contradiction(keys, "only applies to checkpoint.every: auto; remove it, or set checkpoint.every to auto")


def _check_evaluation(recipe: RecipeSchema) -> Iterator[Contradiction]:
    evaluate = recipe.evaluate
    turned_off = evaluate.model_fields_set & {
        "prompts",
        "metrics",
    }  # by an override; the length was for what it replaces
    if not evaluate.prompts and not evaluate.metrics and "max_new_tokens" in evaluate.changed() and not turned_off:
        yield Contradiction(
            ("evaluate.max_new_tokens", "evaluate.prompts"),
            "has no effect without evaluate.prompts or evaluate.metrics; remove it, or set one of them",
        )
    yield from _check_metrics(recipe)
    if evaluate.main_set is not None and evaluate.main_set not in recipe.data.validation_sets:
        sets = ", ".join(filter(None, recipe.data.validation_sets))
        why = f"is none of the sets of data.validation: {sets}" if sets else "data.validation has no named sets"
        yield Contradiction(("evaluate.main_set", "data.validation"), why)
    for key, is_set in (
        ("evaluate.early_stopping", evaluate.early_stopping is not None),
        ("optimizer.schedule", SCHEDULES.get(recipe.optimizer.schedule).on_plateau),
    ):
        if is_set and not (recipe.validates and evaluate.every is not None):
            why = "needs evaluations while training; set data.validation and evaluate.every"
            yield Contradiction((key, "evaluate.every"), why)
    if recipe.checkpoint.keep_best is True and not recipe.validates:
        yield Contradiction(
            ("checkpoint.keep_best", "data.validation"),
            "needs validation rows to find the best checkpoint; set data.validation, or set it to auto",
        )
    if evaluate.every is not None and not recipe.validates and not evaluate.prompts:
        yield Contradiction(
            ("evaluate.every", "data.validation", "evaluate.prompts"),
            "nothing to evaluate; set data.validation or evaluate.prompts, or set it to null",
        )


def _check_metrics(recipe: RecipeSchema) -> Iterator[Contradiction]:
    evaluate = recipe.evaluate
    for name, key in (("answer", "answer_pattern"), ("json_schema", "json_schema")):
        is_set = getattr(evaluate, key) is not None
        if is_set and name not in evaluate.metrics:
            yield Contradiction((f"evaluate.{key}", "evaluate.metrics"), f"has no effect without the metric {name}")
        if not is_set and name in evaluate.metrics:
            yield Contradiction(
                ("evaluate.metrics", f"evaluate.{key}"), f"is required for the metric {name}; set evaluate.{key}"
            )
    if not evaluate.metrics and "generation_limit" in evaluate.changed():
        yield Contradiction(
            ("evaluate.generation_limit", "evaluate.metrics"),
            "has no effect without evaluate.metrics; set them or remove it",
        )
    if evaluate.metrics and recipe.data.validation is None:
        yield Contradiction(
            ("evaluate.metrics", "data.validation"), "no validation rows to answer; set data.validation"
        )
    if evaluate.metrics and {*_to_list(recipe.data.format)} <= {"text", "segments", "tokens"}:
        yield Contradiction(("evaluate.metrics", "data.format"), "texts contain no prompts to answer; remove it")


def check_processes(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Check that the strategy runs on the number of processes."""
    parallel, spec = recipe.parallel, recipe.parallel.spec
    count = parallel.processes
    if spec is None or count == "auto":
        return
    max_processes = spec.most_processes
    if count < spec.least_processes:
        requirement = f"{parallel.strategy} needs at least {spec.least_processes} processes"
    elif max_processes is not None and count > max_processes:
        requirement = (
            f"{parallel.strategy} runs {'one process' if max_processes == 1 else f'at most {max_processes} processes'}"
        )
    else:
        return
    yield Contradiction(
        ("parallel.strategy", "parallel.num_processes"),
        f"{requirement}, but parallel.num_processes is {count}; set one of the two to auto",
    )


def find_implied_strategy(parallel: ParallelSection) -> tuple[str, str] | None:
    """Return the only strategy that reads all keys that are set, and one of these keys, if the strategy is auto."""
    if parallel.strategy != "auto" or not (meant := _list_strategy_keys(parallel)):
        return None
    readers = {key: _list_readers(key) for key in meant}
    common = [name for name in readers[meant[0]] if all(name in names for names in readers.values())]
    if len(common) > 1:  # extensions that happen to be installed must not change a recipe
        common = [name for name in common if STRATEGIES.package(name) is None]
    return (common[0], f"parallel.{min(meant, key=lambda key: len(readers[key]))}") if len(common) == 1 else None


def _list_strategy_keys(parallel: ParallelSection) -> list[str]:
    """Return the keys that not every strategy reads and whose value is not the default."""
    return [key for key in parallel.changed() if key not in ("strategy", "num_processes", "device", "timeout")]


def _list_readers(key: str) -> list[str]:
    return [name for name, spec in load_strategies().items() if key in spec.keys]


def check_strategy(recipe: RecipeSchema) -> Iterator[Contradiction]:
    """Check that the strategy reads the keys of ``parallel`` that are set, and permits the rest of the recipe."""
    parallel, spec = recipe.parallel, recipe.parallel.spec
    for key in _list_strategy_keys(parallel):
        if spec is None and find_implied_strategy(parallel) is None:
            yield Contradiction(
                (f"parallel.{key}", "parallel.strategy"),
                f"has an effect only with {', '.join(_list_readers(key))}; set parallel.strategy to one of them",
            )
        elif spec is not None and key not in spec.keys:
            yield Contradiction(
                (f"parallel.{key}", "parallel.strategy"),
                f"has no effect with parallel.strategy {parallel.strategy}, only with {', '.join(_list_readers(key))}",
            )
    if spec is None:
        return
    for limit in spec.limits:
        value = attrgetter(limit.key)(recipe)
        if not limit.takes(value):
            yield Contradiction((limit.key, "parallel.strategy"), limit.why.format(value=value))
    if "replicate_size" in spec.keys:
        yield from _check_replicas(parallel)


def _check_replicas(parallel: ParallelSection) -> Iterator[Contradiction]:
    processes = parallel.processes
    if processes == "auto":
        return
    if processes % parallel.replicate_size:
        yield Contradiction(
            ("parallel.replicate_size", "parallel.num_processes"),
            f"{processes} processes cannot be divided into {parallel.replicate_size} equal replicas",
        )
    elif processes == parallel.replicate_size > 1:
        yield Contradiction(
            ("parallel.replicate_size", "parallel.num_processes"),
            f"{processes} replicas on {processes} processes do not shard anything; lower it, or use parallel.strategy "
            "ddp",
        )


R = TypeVar("R", bound="RecipeSchema")
_KEY = "parallel.num_processes"


def set_processes(recipe: R, processes: int | ProcessRange) -> R:
    """Return the recipe with this number of processes, without validating it."""
    parallel = recipe.parallel.model_copy(update={"num_processes": processes})
    return recipe.model_copy(update={"parallel": parallel})


def list_contradictions_in_range(recipe: RecipeSchema) -> list[Contradiction]:
    """Return all contradictions between the keys of ``recipe``, which is valid if it is with any of its numbers."""
    conflicts, processes = list_contradictions(recipe), recipe.parallel.num_processes
    if not isinstance(processes, ProcessRange):
        return conflicts
    if any(_KEY in item.keys for item in conflicts):  # of the largest number
        fewer = range(processes.max - 1, processes.min - 1, -1)
        conflicts = [] if any(not list_contradictions(set_processes(recipe, number)) for number in fewer) else conflicts
    if recipe.train.replan == "auto":
        why = f"auto chooses the number of processes, which {_KEY} leaves to the devices; set it to offer"
        conflicts.append(Contradiction(("train.replan", _KEY), why))
    return conflicts


def list_usable_processes(recipe: RecipeSchema, process_range: ProcessRange) -> tuple[int, ...]:
    """Return the numbers of processes in a range that the rest of the recipe allows, in order.

    A process without examples is of use only to strategies that shard something.

    Raises:
        RequestError: there is no choice.
    """
    spec, rows = recipe.parallel.spec, recipe.batch_rows
    highest = process_range.max if spec is None or spec.shards else max(process_range.min, min(process_range.max, rows))
    contradictions = {n: list_contradictions(set_processes(recipe, n)) for n in range(process_range.min, highest + 1)}
    usable = tuple(number for number, problems in contradictions.items() if not problems)
    if len(usable) < min(2, len(contradictions)):
        number, problems = next((number, problems) for number, problems in contradictions.items() if problems)
        only = f"only {usable[0]} is possible" if usable else "none is possible"
        why = f"with {number}: {problems[0].keys[0]}: {problems[0].message}"
        raise RequestError(f"parallel.num_processes: of {process_range} processes {only}; {why}")
    return usable
