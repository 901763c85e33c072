"""The registries of what recipes can name: built-in objects, one per line, and entry points of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.recipe.extensions import Registry

if TYPE_CHECKING:
    from trainwright.models.attention.kernels import AttentionKernel
    from trainwright.recipe.adapter_spec import AdapterSpec
    from trainwright.recipe.observer_spec import ObserverSpec
    from trainwright.recipe.optimizer_spec import OptimizerSpec, ScheduleSpec
    from trainwright.recipe.strategy_spec import StrategySpec
    from trainwright.recipe.task_spec import TaskSpec
    from trainwright.run.supervisor import Watcher
    from trainwright.tasks.dpo.spec import PreferenceLoss


def _locate_constants(module: str, names: str) -> dict[str, str]:
    """Return where the objects of these names are: constants of a module, in capitals."""
    return {name: f"trainwright.{module}:{name.upper()}" for name in names.split()}


# Each is in a module that imports no torch.
TASKS: Registry[TaskSpec] = Registry(
    "trainwright.tasks",
    {
        "sft": "trainwright.tasks.sft.spec:SPEC",
        "dpo": "trainwright.tasks.dpo.spec:SPEC",
        "pretrain": "trainwright.tasks.pretrain.spec:SPEC",
        "unlearn": "trainwright.tasks.unlearn.spec:SPEC",
        "algorithm_distillation": "trainwright.tasks.algorithm_distillation.spec:SPEC",
    },
    kind="task",
    required=("name", "summary", "module", "section", "check", "fill", "rows", "needs"),
)

# Each is a function from the reference and the answer to a score, at best 1; or, with an attribute ``setting`` that
# names a key of the recipe's section evaluate, a class that makes one from that key's value. At a place it is marked.
METRICS: Registry[Any] = Registry(
    "trainwright.metrics",
    {
        "exact_match": "trainwright.inference.evaluation.metrics:exact_match",
        "f1": "trainwright.inference.evaluation.metrics:word_f1",
        "rouge_l": "trainwright.inference.evaluation.metrics:rouge_l_f1",
        "rouge_l_recall": "trainwright.inference.evaluation.metrics:rouge_l_recall",
        "answer": "trainwright.inference.evaluation.metrics:AnswerMatch",
        "json_schema": "trainwright.inference.evaluation.metrics:JsonSchema",
    },
    kind="metric",
    required=("__call__",),
    marked=True,
)

# Each is a data.sources.registry.Source.
SOURCES: Registry[Any] = Registry(
    "trainwright.sources",
    {
        "pydoc": "trainwright.data.sources.registry:PYDOC",
        "pydoc-pairs": "trainwright.data.sources.registry:PYDOC_PAIRS",
        "stdlib": "trainwright.data.sources.registry:STDLIB",
    },
    kind="source",
    required=("rows", "key", "example"),
)

# Each is a data.rows.formats.RowReader, or a function that makes one for a recipe.
ROW_KINDS: Registry[Any] = Registry(
    "trainwright.row_kinds",
    {
        "examples": "trainwright.data.rows.formats:EXAMPLES",  # a text or a conversation
        "any": "trainwright.data.rows.marked:ANY_EXAMPLES",  # also segments or tokens with marked targets
        "pairs": "trainwright.data.rows.pairs:PAIRS",  # a chosen and a rejected answer
        "answers": "trainwright.data.rows.pairs:ANSWERS",  # pairs, or one answer with a label
        "refused": "trainwright.tasks.unlearn.stream:refused",  # conversations, also with a refusal as the answer
        "alternates": "trainwright.tasks.unlearn.stream:ALTERNATES",  # also with each of the texts of a field
    },
    kind="kind of rows",
)

# Each is a tasks.unlearn.objective.Objective in a module that imports no torch.
OBJECTIVES: Registry[Any] = Registry(
    "trainwright.objectives",
    _locate_constants(
        "tasks.unlearn.section",
        "grad_ascent grad_diff npo simnpo dpo altpo idk_nll rmu undial wga satimp ce_u pdu task_vector",
    ),
    kind="objective",
    required=("line", "paper", "loss", "of", "defaults", "reference", "idk", "learns", "ascends", "subtracts"),
)

# Each is a tasks.dpo.spec.PreferenceLoss in a module that imports no torch.
PREFERENCE_LOSSES: Registry[PreferenceLoss] = Registry(
    "trainwright.preference_losses",
    _locate_constants("tasks.dpo.spec", "dpo ipo kto hinge robust apo_zero apo_down sppo simpo cpo orpo"),
    kind="preference loss",
    required=("function", "reads", "has_reference", "averages", "sft_weight", "rates_answers"),
)

# Each is a recipe.adapter_spec.AdapterSpec.
ADAPTERS: Registry[AdapterSpec] = Registry(
    "trainwright.adapters",
    _locate_constants("recipe.adapter_spec", "lora dora oft"),
    kind="adapter",
    required=("summary", "settings", "reads", "unchanged", "of_ends", "peft_type"),
)

# Each is a recipe.optimizer_spec.OptimizerSpec.
OPTIMIZERS: Registry[OptimizerSpec] = Registry(
    "trainwright.optimizers",
    _locate_constants(
        "recipe.optimizer_spec",
        "adamw muon soap sgd rmsprop adagrad ademamix lion adafactor schedule_free_adamw adamw_8bit lion_8bit",
    ),
    kind="optimizer",
    required=("summary", "implementation", "reads", "state", "whole_matrices"),
)

# Each is a recipe.optimizer_spec.ScheduleSpec.
SCHEDULES: Registry[ScheduleSpec] = Registry(
    "trainwright.schedules",
    _locate_constants(
        "recipe.optimizer_spec",
        "constant linear cosine warmup_stable_decay polynomial cosine_restarts inverse_sqrt reduce_on_plateau",
    ),
    kind="schedule",
    required=("factor", "reads", "in_decay_steps", "falls"),
)

# Simpler ones first: of equally fast ones the first is chosen.
STRATEGIES: Registry[StrategySpec] = Registry(
    "trainwright.strategies",
    {
        "single": "trainwright.parallel.replicated.spec:SINGLE",
        "ddp": "trainwright.parallel.replicated.spec:DDP",
        "fsdp": "trainwright.parallel.fsdp.spec:FSDP",
        "zero1": "trainwright.parallel.zero.spec:ZERO1",
        "zero2": "trainwright.parallel.zero.spec:ZERO2",
        "zero3": "trainwright.parallel.zero.spec:ZERO3",
    },
    kind="strategy",
    required=("summary", "implementation", "memory", "shards", "collectives", "reads", "offloads", "layouts", "limits"),
)

# Each is a subclass of tasks.algorithm_distillation.environments.base.Environment.
ENVIRONMENTS: Registry[Any] = Registry(
    "trainwright.environments",
    {
        "darkroom": "trainwright.tasks.algorithm_distillation.environments.grid:Darkroom",
        "darkroom-hard": "trainwright.tasks.algorithm_distillation.environments.grid:DarkroomHard",
        "darkroom-permuted": "trainwright.tasks.algorithm_distillation.environments.grid:DarkroomPermuted",
        "key-to-door": "trainwright.tasks.algorithm_distillation.environments.grid:KeyToDoor",
        "bandit": "trainwright.tasks.algorithm_distillation.environments.base:Bandit",
        "gymnasium": "trainwright.tasks.algorithm_distillation.environments.user:UserEnvironment",
    },
    kind="environment",
    required=("tasks", "describe", "optimal_return", "vector"),
)

# Each is a subclass of engine.policies.base.StepPolicy; the built-in ones (engine/policies/) are always on.
STEP_POLICIES: Registry[Any] = Registry(
    "trainwright.step_policies", {}, kind="step policy", required=("before", "again", "metrics", "skips", "after")
)

# Each is a recipe.observer_spec.ObserverSpec, or a function that is called with a run directory and with its options,
# and returns a function that gets every event of the run.
OBSERVERS: Registry[Any] = Registry(
    "trainwright.observers",
    {
        "tensorboard": "trainwright.run.observers.hooks:TENSORBOARD",
        "report": "trainwright.observe.specs:REPORT",
        "prometheus": "trainwright.observe.specs:PROMETHEUS",
        "wandb": "trainwright.observe.specs:WANDB",
        "mlflow": "trainwright.observe.specs:MLFLOW",
        "trackio": "trainwright.observe.specs:TRACKIO",
        "opentelemetry": "trainwright.observe.specs:OPENTELEMETRY",
    },
    kind="observer",
    marked=True,
)

# Each is a recipe.observer_spec.ObserverSpec of an observer that no key turns on or off; in this order.
ALWAYS_ON: Registry[ObserverSpec] = Registry(
    "trainwright.always_on",
    {
        "hub": "trainwright.run.observers.hooks:HUB",
        "console": "trainwright.run.observers.hooks:CONSOLE",
        "plan": "trainwright.planning.plan_watch:PLAN_WATCH",
        "ledger": "trainwright.observe.specs:LEDGER",
        "stalls": "trainwright.observe.specs:STALLS",
    },
    kind="observer that is always on",
    required=("create", "beside", "samples", "after_workers"),
)

# Each is called with a recipe, the machine and the number of such machines, and returns a run.resolve.Planned. The last
# one chooses; without any, values follow from rules.
PLANNERS: Registry[Callable[..., Any]] = Registry(
    "trainwright.planners",
    {"trainwright": "trainwright.planning.planner:plan_recipe"},
    kind="planner",
    required=("__call__",),
)

# Each is called with a section `model` and data.pack_length, raises RequestError if the model cannot be trained so, and
# returns whether it knew the model's configuration.
MODEL_CHECKS: Registry[Callable[..., bool]] = Registry(
    "trainwright.model_checks",
    {"configuration": "trainwright.planning.facts:check_model"},
    kind="model check",
    required=("__call__",),
)

# What `train --simulate MACHINE` calls, as tw.simulate.
SIMULATIONS: Registry[Callable[..., Any]] = Registry(
    "trainwright.simulations",
    {"simulate": "trainwright.planning.requests:simulate"},
    kind="simulation",
    required=("__call__",),
)

# Other launchers, each with functions that return its settings in a recipe's terms, a run.request.LauncherSettings:
# `of_file(file, overrides, nodes, node_rank, rendezvous)` and, for a process that it has started, `of_environment()`.
# `default_file()` is the file that it would use here, or None.
LAUNCHERS: Registry[Any] = Registry(
    "trainwright.launchers",
    {"accelerate": "trainwright.compatibility.accelerate.launcher:Accelerate"},
    kind="launcher",
    required=("of_file", "of_environment", "default_file"),
)

# Formats of weights other than safetensors. `convert(file, key, notify)` returns a directory with safetensors files and
# their precision, `facts(file)` its sha256 and precision, `export(directory, file, precision)` writes one.
WEIGHT_FORMATS: Registry[Any] = Registry(
    "trainwright.weight_formats",
    {"gguf": "trainwright.compatibility.gguf.format:Gguf"},
    kind="weight format",
    required=("convert", "facts", "export"),
)

# Each is called with the seconds that a stop of the run takes, and returns a warning if what runs this job gives it
# less time, or None.
STOP_WARNINGS: Registry[Callable[[float], str | None]] = Registry(
    "trainwright.stop_warnings",
    {
        "cluster": "trainwright.clusters.job:check_stop_time",
        "slurm": "trainwright.clusters.slurm.scheduler:check_job_grace",
    },
    kind="stop warning",
    required=("__call__",),
)

# Each is a run.supervisor.Watcher.
WATCHERS: Registry[Watcher] = Registry(
    "trainwright.watchers",
    {"hangs": "trainwright.faults.hangs.watcher:HANGS"},
    kind="watcher",
    required=("install", "watch", "watch_beside"),
)

# Each is called with the name of the launcher as it begins a run in this process, and returns a warning or None.
START_HOOKS: Registry[Callable[[str], str | None]] = Registry(
    "trainwright.start_hooks",
    {"slurm": "trainwright.clusters.slurm.job_step:begin"},
    kind="start hook",
    required=("__call__",),
)

# Each is called with a run directory and the seconds to wait at most. It stops the jobs in its queue that train the
# run, or the runs of an array there, and returns what has become of them; None if there are none.
STOP_HOOKS: Registry[Callable[[Path, float], str | None]] = Registry(
    "trainwright.stop_hooks",
    {"slurm": "trainwright.clusters.slurm.job_step:stop_jobs"},
    kind="stop hook",
    required=("__call__",),
)

# Each is a function, or a typer.Typer with commands of its own; a function's attribute `command_options` has arguments
# for typer's `command`. "machine calibrate" is a command of the group "machine".
COMMANDS: Registry[Any] = Registry(
    "trainwright.commands",
    {
        "train": "trainwright.cli.train:train",
        "under": "trainwright.cli.train:under",
        "submit": "trainwright.clusters.commands:submit",
        "jobs": "trainwright.clusters.commands:jobs",
        "stop": "trainwright.cli.train:stop",
        "checkpoint": "trainwright.cli.train:checkpoint",
        "runs": "trainwright.observe.commands:runs",
        "watch": "trainwright.observe.commands:watch",
        "gpus": "trainwright.observe.commands:gpus",
        "report": "trainwright.observe.commands:report",
        "compare": "trainwright.observe.commands:compare",
        "ablate": "trainwright.observe.commands:ablate",
        "collect": "trainwright.cli.data:collect",
        "plan": "trainwright.planning.commands:plan",
        "verify": "trainwright.doctor.commands:verify",
        "doctor": "trainwright.doctor.commands:doctor",
        "drill": "trainwright.faults.commands:drill",
        "eval": "trainwright.cli.models:evaluate",
        "unlearn-study": "trainwright.cli.models:unlearn_study",
        "generate": "trainwright.cli.models:generate",
        "merge": "trainwright.cli.models:merge",
        "export": "trainwright.cli.models:export",
        "push": "trainwright.cli.models:push",
        "tensorboard": "trainwright.observe.commands:tensorboard",
        "setup": "trainwright.compatibility.commands:setup",
        "launch": "trainwright.compatibility.commands:launch",
        "data": "trainwright.cli.data:app",
        "recipe": "trainwright.cli.recipe:app",
        "recipe from": "trainwright.compatibility.conversion.commands:convert",
        "machine": "trainwright.cli.machine:app",
        "machine calibrate": "trainwright.doctor.commands:calibrate",
    },
    kind="command",
)

# Each is called with an run.request.TrainingRequest, or what `launch` starts, and with hosts and the path of a file
# with hosts, and returns the exit code of what it has started on them.
HOST_LAUNCHERS: Registry[Callable[..., int]] = Registry(
    "trainwright.host_launchers",
    {
        "ssh": "trainwright.clusters.operations:train_on_hosts",
        "ssh script": "trainwright.clusters.operations:launch_on_hosts",
    },
    kind="host launcher",
)

# Each is a models.attention.kernels.AttentionKernel in a module that imports no torch. The fastest first.
ATTENTION_KERNELS: Registry[AttentionKernel] = Registry(
    "trainwright.attention_kernels",
    _locate_constants(
        "models.attention.kernels",
        "flash_attn_4 flash_attn_3 varlen flash_attn sdpa_each flex cpu_flash scores sdpa eager",
    ),
    kind="attention kernel",
    required=("title", "packed", "memory", "vendors", "implementation", "before", "features", "widths"),
)

# The keys of a recipe that name a registered object.
KEYS: dict[str, Registry[Any]] = {
    "task": TASKS,
    "parallel.strategy": STRATEGIES,
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": SCHEDULES,
    "data.train": SOURCES,
    "dpo.loss": PREFERENCE_LOSSES,
    "model.adapter.type": ADAPTERS,
    "unlearn.objective": OBJECTIVES,
    "evaluate.metrics": METRICS,
    "algorithm_distillation.environment": ENVIRONMENTS,
    "model.attention": ATTENTION_KERNELS,
    "train.step_policies": STEP_POLICIES,
    "logging.observers": OBSERVERS,
}
