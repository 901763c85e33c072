"""The recipe's schema: every key, its type, its default and its description.

The descriptions are the reference for users: ``trainwright recipe schema`` passes them to editors, and messages about
missing keys quote them. Checks across keys are in ``checks.py``. The section of a task is in the task's spec.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    StringConstraints,
    create_model,
    model_serializer,
    model_validator,
)

from trainwright.errors import RequestError
from trainwright.recipe.checks import list_contradictions_in_range
from trainwright.recipe.observer_spec import check_settings, complete_schema, convert_names
from trainwright.recipe.registries import METRICS, OPTIMIZERS, SCHEDULES, TASKS
from trainwright.recipe.sections.data import DataSection
from trainwright.recipe.sections.fields import (
    Auto,
    BelowOne,
    Contradiction,
    Contradictions,
    Count,
    Interval,
    NotNegative,
    Pattern,
    Positive,
    Proportion,
    Registered,
    Restarts,
    Section,
    Steps,
    Text,
    Time,
)
from trainwright.recipe.sections.model import ModelSection
from trainwright.recipe.sections.parallel import LaunchSection, ParallelSection
from trainwright.recipe.sections.train import TrainSection
from trainwright.recipe.task_spec import TaskSpec


class FaultsSection(Section):
    """What to do when something goes wrong while training."""

    restarts: Restarts = Field(
        "3 per hour",
        description="How often the run is restarted from its newest checkpoint if a process is killed, crashes, hangs "
        "(on_hang: restart) or loses its connection, or a node is lost and num_processes is a range: a number per hour "
        "or per day, or off. Errors of the recipe, the data or the numbers are not retried, and an error that repeats "
        "at the same step ends the run.",
    )
    on_hang: Literal["warn", "restart", "stop"] = Field(
        "warn",
        description="What to do if a process hangs: one that makes no progress for longer than its current phase has "
        "ever taken, and some seconds. The rank, the phase and the stack of every rank are printed. warn: wait on. "
        "restart: go on from the newest checkpoint, as often as faults.restarts allows. stop: end the run "
        "with exit code 5. Of several nodes, also for one that does not answer for 30 s.",
    )
    on_non_finite: Literal["stop", "skip", "rewind"] = Field(
        "stop",
        description="What to do if the loss or the gradient norm of a step is NaN or infinite. stop: end the run "
        "with exit code 4, with the weights of the step before. skip: skip the update of the step. rewind: go back to "
        "the newest checkpoint and leave the step's global batch out. Ten in a row end the run.",
    )
    mean_time_between: Time | None = Field(
        None,
        description="Mean time between failures that end the run, such as 6 h, for checkpoint.every: auto. The "
        "interval is the one that loses the least time to checkpoints and to steps that are repeated (Daly, 2006).",
    )
    replay_every: Count | None = Field(
        200,
        description="Number of steps between checks for silent corruption of memory and processors: a micro-batch of "
        "each rank is computed on another rank too, and copies of the weights are compared, to the bit. null: weights "
        "are only compared before evaluations, checkpoints and the end.",
    )
    on_corruption: Literal["rewind", "stop"] = Field(
        "rewind",
        description="What to do if replay_every finds something: go back to the newest checkpoint from before the last "
        "check that found nothing, or end the run with exit code 5. If it is found at the same step again, the run "
        "ends.",
    )
    on_loss_spike: Literal["stop", "skip", "rewind"] = Field(
        "skip",
        description="What to do if the loss of a step is a spike; train.skip_loss_spikes sets what counts as one. "
        "The values are those of on_non_finite. With skip, the loss counts as no spike any longer after ten in a row, "
        "and training goes on.",
    )


def _add_summaries(schema: dict[str, Any]) -> None:
    schema["description"] = ". ".join([*(OPTIMIZERS.get(name).summary for name in OPTIMIZERS.names()), ""]).strip()


class ParameterGroup(Section):
    """Parameters with settings of their own."""

    pattern: Pattern = Field(
        description="Regular expression that a name of the model's parameters matches fully, such as .*embed_tokens.*"
    )
    learning_rate: Positive | None = Field(
        None, description="Their peak, which follows the schedule. null: as without the group."
    )
    weight_decay: NotNegative | None = Field(
        None, description="Of all of them, vectors too. null: as without the group."
    )


class OptimizerSection(Section):
    """Settings of the optimizer."""

    name: Annotated[str, Registered(OPTIMIZERS)] = Field("adamw", json_schema_extra=_add_summaries)
    momentum: BelowOne = Field(
        0.95, description="Momentum coefficient of optimizers that read it: muon, sgd (0: none)."
    )
    nesterov: bool = Field(False, description="sgd: Nesterov momentum.")
    learning_rate: Positive = Field(2e-5, description="Peak learning rate of the schedule.")
    betas: tuple[BelowOne, BelowOne] = Field(
        (0.9, 0.999), description="Decay rates of the running averages of the gradient and of its square."
    )
    eps: Positive = Field(1e-8, description="Added to the denominator of the update for numerical stability.")
    weight_decay: NotNegative = Field(
        0.0,
        description="Weight decay, of matrices only unless groups say otherwise. It is decoupled, except for sgd, "
        "where it is added to the gradient, as in torch.",
    )
    groups: list[ParameterGroup] = Field(
        [], description="Learning rates and weight decays by the names of parameters; of several that match, the last."
    )
    layer_decay: Proportion | None = Field(
        None,
        description="Layer-wise decay: block i of n has learning_rate times layer_decay to the power n - i, "
        "counted from 0, the embeddings n + 1, and what follows the blocks learning_rate itself. null: one rate.",
    )
    loraplus_ratio: Positive | None = Field(
        None, description="LoRA+: the learning rate of the matrices B in units of learning_rate (arXiv 2402.12354)."
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Also average the weights: after every step the average moves by 1 - ema_decay of the way to them. "
        "The average is evaluated, answers prompts and is exported; it is saved with checkpoints. null: no average.",
    )
    master_weights: bool = Field(
        True,
        description="Keep fp32 master weights. false: trained weights are kept in bf16 alone, and updates, computed in "
        "fp32, are rounded stochastically (arXiv 2010.06192) by a hash of train.seed, step and element. It saves "
        "4 bytes a parameter with single and ddp, 2 with fsdp, where gradients of one micro-batch stay in bf16, too.",
    )
    options: dict[str, Any] = Field({}, description="Keys of an optimizer of your own, which gets them as they are.")
    schedule: Annotated[str, Registered(SCHEDULES)] = Field(
        "cosine",
        description="Learning rate schedule after the warm-up. With step k from 0 to n - 1 and w warm-up steps, step w "
        "has learning_rate, and the rate falls with the progress p = (k - w) / (n - w): by 1 - p (linear) or "
        "(1 + cos(pi p)) / 2 (cosine), as in transformers, to final_learning_rate_ratio after the last step. "
        "warmup_stable_decay falls linearly in its last decay_steps, polynomial by (1 - p) to the power of power, "
        "cosine_restarts as cosine, in cycles equal parts that each begin at the peak, and inverse_sqrt by "
        "sqrt((w + 1) / (k + 1)). reduce_on_plateau multiplies the rate by plateau_factor when the validation loss has "
        "not fallen by 1e-4 of itself in more than plateau_patience evaluations, as torch's ReduceLROnPlateau.",
    )
    power: Positive = Field(2.0, description="Exponent of the schedule polynomial.")
    cycles: Count = Field(2, description="Number of cycles of the schedule cosine_restarts.")
    plateau_factor: BelowOne = Field(0.1, description="Factor of the schedule reduce_on_plateau.")
    plateau_patience: Count = Field(10, description="Evaluations that the schedule reduce_on_plateau waits.")
    warmup_steps: Steps = Field(
        0,
        description="Linear warm-up steps w: a whole number, or a fraction (below 1) of all steps. Step k, "
        "counted from 0, has (k + 1) / (w + 1) of learning_rate.",
    )
    decay_steps: Steps = Field(
        0.1,
        description="Length of the decay at the end of warmup_stable_decay: a whole number of steps, or a "
        "fraction (below 1) of all steps.",
    )
    final_learning_rate_ratio: Proportion = Field(
        0.0, description="Learning rate that the schedule falls to, as a fraction of learning_rate."
    )
    max_grad_norm: Positive | None = Field(1.0, description="Clip gradients to this global norm. null: no clipping.")


class CheckpointSection(Section):
    """When to save checkpoints, and how many to keep."""

    every: Interval = Field(
        "auto",
        description="Interval between checkpoints: a number of steps, or a time such as 10 min. auto: a time long "
        "enough that saving takes a small part of it. null: only at the end.",
    )
    keep_last: Count = Field(2, description="Number of newest checkpoints to keep.")
    copies: list[Text] = Field(
        [],
        description="Directories, or URLs of fsspec such as s3://bucket/runs, to which every checkpoint is copied "
        "while training goes on, with what a run needs to go on elsewhere, and the trained model at the end. A resumed "
        "run takes a copy if its newest checkpoint is missing, damaged or older.",
    )
    keep_best: bool | Auto = Field(
        "auto",
        description="Also keep the checkpoint with the lowest validation loss. auto: if there are validation rows, "
        "except for unlearning, whose loss does not show what is retained.",
    )
    background: bool | Auto = Field(
        "auto",
        description="Write checkpoints in a thread while training goes on; it needs host memory for one "
        "more copy of a process's part of the state, which the plan counts with true. The last one, and one at a stop, "
        "are always waited for. auto: if that part has at least 64 MiB, the host's memory is free at the first "
        "checkpoint, no adapter is trained, and training does not need all cores of a CPU, unless writing mostly waits "
        "for the disk.",
    )
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="What to do if three checkpoints in a row cannot be written, so that a failure would lose what was "
        "trained since the last one. stop: write the weights as they are, beside the checkpoints or else to a "
        "directory of copies, and end the run with exit code 3 (5 if the disk fails). continue: train to the end, "
        "with a fault event for each.",
    )


class EarlyStoppingSection(Section):
    """When a run ends before its last step."""

    patience: Count = Field(3, description="Evaluations in a row without an improvement that end the run.")
    min_delta: NotNegative = Field(0.0, description="What counts as an improvement: more than this.")
    metric: Text = Field("loss", description="Metric of evaluations, such as loss, perplexity or one of metrics.")
    greater_is_better: bool | None = Field(
        None, description="null: of all metrics except perplexity and those whose name ends with loss or nll."
    )

    @property
    def sign(self) -> float:
        """Return the factor that makes a better value a lower one."""
        name = self.metric.rpartition("/")[2]  # without the validation set
        lower = name == "perplexity" or name.endswith(("loss", "nll"))
        return 1.0 if (lower if self.greater_is_better is None else not self.greater_is_better) else -1.0


class EvaluateSection(Section):
    """When to evaluate on the validation rows, and which prompts to answer."""

    every: Count | None = Field(None, description="Evaluate every N steps. null: only before and after training.")
    early_stopping: EarlyStoppingSection | None = Field(
        None,
        description="End the run when evaluations no longer improve: final/ has the weights of then, and "
        "checkpoint.keep_best the best ones. null: train all steps.",
    )
    main_set: Text | None = Field(
        None,
        description="Of several sets in data.validation, the one whose metrics are those without a name: "
        "checkpoint.keep_best, early_stopping, the schedule reduce_on_plateau, tables and comparisons look at them. "
        "null: all sets together.",
    )
    prompts: list[Text] = Field(
        [], description="Prompts that the model answers at every evaluation; the answers are shown."
    )
    metrics: list[Annotated[str, Registered(METRICS, imports=False)]] = Field(
        [],
        description="Metrics of generated answers to validation rows, computed at every evaluation; for all of them "
        "1 is best. answer: the short answer found by answer_pattern is right. rouge_l: F1. rouge_l_recall: recall.",
    )
    answer_pattern: Text | None = Field(
        None,
        description="For the metric answer: gsm8k (the text after ####), number (the last number), or a regular "
        "expression whose first group is the short answer.",
    )
    json_schema: Text | None = Field(
        None, description="For the metric json_schema: a file with the JSON Schema of valid answers."
    )
    generation_limit: Count = Field(
        64, description="Number of validation rows to answer for metrics, sampled from all."
    )
    max_new_tokens: Count = Field(
        64, description="Maximum length of an answer to a prompt or validation row, in tokens."
    )


class LoggingSection(Section):
    """Where and how to record the run."""

    run_directory: Text = Field("auto", description="Run directory; must not exist. auto: a new directory under runs/.")
    observers: Annotated[dict[str, Any], BeforeValidator(convert_names), AfterValidator(check_settings)] = Field(
        {},
        validate_default=True,
        json_schema_extra=complete_schema,
        description="Observers, which receive the run's events, each with true, false or its options; a list of names "
        "turns these on, in place of others that an included file names. tensorboard (by default): curves. report: "
        "report.html, while the run trains and at its end; auto (the default): if trainwright[report] is installed and "
        "the run takes more than a minute. prometheus: serve the newest figures at the option address, a port of "
        "127.0.0.1 or HOST:PORT. wandb, mlflow, trackio, opentelemetry, observers of installed packages by name, or "
        "module:Name.",
    )


S = TypeVar("S", bound=Section)


class RecipeSchema(Section):
    """A training recipe."""

    task: Annotated[str, Registered(TASKS)]
    model: ModelSection = Field(description="The model and its tokenizer.")
    data: DataSection = Field(description="The training and validation data.")
    optimizer: OptimizerSection = Field(
        default_factory=OptimizerSection, description="The optimizer and its learning rate schedule."
    )
    train: TrainSection = Field(
        default_factory=TrainSection, description="Length of the training, batch sizes and precision."
    )
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="Distribution of the run over processes."
    )
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection, description="When to save checkpoints.")
    evaluate: EvaluateSection = Field(
        default_factory=EvaluateSection, description="When and how to evaluate the model."
    )
    faults: FaultsSection = Field(
        default_factory=FaultsSection, description="What to do when something goes wrong while training."
    )
    logging: LoggingSection = Field(default_factory=LoggingSection, description="Where to record the run.")
    push: PushSection | None = Field(None, description="Upload of the finished model to the Hugging Face Hub.")
    launch: LaunchSection | None = Field(None, description="The job in which `trainwright submit` runs the recipe.")

    @model_validator(mode="wrap")
    @classmethod
    def _with_the_sections_of_tasks(cls, values: Any, handler: ModelWrapValidatorHandler[RecipeSchema]) -> RecipeSchema:
        if cls is not RecipeSchema:
            return handler(values)
        try:
            model = choose_recipe_model(values)
        except RequestError as error:
            raise Contradictions([Contradiction(("task",), str(error))]) from None
        return model.model_validate(values)

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if (spec := _find_spec(values.get("task"))) is not None:
            values = spec.fill_values(values)  # adds keys; those in the recipe keep their values
        return _set_tokenizer_corpus(values)

    @model_serializer(mode="wrap")
    def _without_other_tasks(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        unsaid = set() if self.has_texts else {"model", "data"}
        return {key: value for key, value in values.items() if value is not None and key not in unsaid}

    def __reduce__(self) -> Any:
        # Its class is made for the tasks of this process, and has no name to be found by.
        return RecipeSchema.model_validate, (self.model_dump(),)

    @property
    def spec(self) -> TaskSpec:
        """Return the spec of the task."""
        return TASKS.get(self.task)

    def own(self, kind: type[S]) -> S:
        """Return the task's own section, which must be a ``kind``."""
        section = getattr(self, self.spec.name)
        assert isinstance(section, kind), f"task {self.task} has a section of another kind"
        return section

    @property
    def batch_rows(self) -> int:
        """Return how many rows a global batch has, examples or packs; if it counts tokens, of the longest rows."""
        size, data = self.train.global_batch_size, self.data
        if self.train.batch_unit != "tokens":
            return size
        return max(1, size // (data.pack_length or data.max_length * self.spec.needs(self).sequences_per_example))

    @property
    def has_texts(self) -> bool:
        """Return whether the model reads texts, so that the sections model and data apply."""
        return self.spec.reads_texts

    @property
    def validates(self) -> bool:
        """Return whether there are validation rows."""
        return not self.has_texts or self.data.validation is not None

    @model_validator(mode="after")
    def _no_contradiction(self) -> RecipeSchema:
        if contradictions := list_contradictions_in_range(self):
            raise Contradictions(contradictions)
        return self


def choose_recipe_model(values: Any) -> type[RecipeSchema]:
    """Return the recipe model with the sections that ``values`` may have.

    Raises:
        RequestError: a task of another package is not usable.
    """
    task = values.get("task") if isinstance(values, dict) else None
    if not isinstance(task, str) or ":" not in task or TASKS.get(task) in map(TASKS.get, TASKS.names()):
        return build_recipe_model()
    return build_recipe_model(task)


@cache
def build_recipe_model(task: str | None = None) -> type[RecipeSchema]:
    """Return the recipe model with the section of every registered task, and of ``task`` if that is a
    ``module:Name``.

    Raises:
        RequestError: a task of another package is not usable.
    """
    specs = {name: TASKS.get(name) for name in (*TASKS.names(), *([] if task is None else [task]))}
    summaries = " ".join(f"{name}: {spec.summary}." for name, spec in specs.items())
    task_field = Field(description=f"The kind of training. {summaries}")
    fields: dict[str, Any] = {
        "task": (RecipeSchema.__annotations__["task"], task_field),
        "data": (_build_data_section(specs.values()), RecipeSchema.model_fields["data"]),
    }
    for name, spec in specs.items():
        if spec.name in fields or spec.name in RecipeSchema.model_fields:
            raise RequestError(f"{_describe_task(name)} has the name {spec.name} of another recipe section; rename it")
        if name not in (spec.name, task):
            raise RequestError(
                f"{_describe_task(name)} has the spec name {spec.name}; use the same name in both places"
            )
        if spec.section is not None:
            fields[spec.name] = (spec.section | None, Field(None, description=spec.section_description))
    return create_model("Recipe", __base__=RecipeSchema, __module__=__name__, __doc__=RecipeSchema.__doc__, **fields)


def _build_data_section(specs: Iterable[TaskSpec]) -> type[DataSection]:
    """Return the section ``data`` with the keys of all tasks."""
    kinds = dict.fromkeys(spec.data for spec in specs)
    bases = tuple(
        kind for kind in kinds if not any(subclass is not kind and issubclass(subclass, kind) for subclass in kinds)
    )
    return bases[0] if len(bases) == 1 else create_model("DataSection", __base__=bases, __doc__=DataSection.__doc__)


def _describe_task(name: str) -> str:
    package = TASKS.package(name)
    return f"task {name}" if package is None else f"package {package}: task {name}"


def _find_spec(task: Any) -> TaskSpec | None:
    """Return the spec of a task; None if it does not exist, which the validation of the key reports."""
    try:
        return TASKS.get(task) if isinstance(task, str) else None
    except RequestError:
        return None


def _set_tokenizer_corpus(values: dict[str, Any]) -> dict[str, Any]:
    """Set the training texts of a tokenizer that is trained from texts, unless it names its own."""
    data, model = values.get("data"), values.get("model")
    if isinstance(data, dict) and isinstance(source := data.get("train"), str) and isinstance(model, dict):
        name = model.get("tokenizer")
        kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
        if name == "characters" or (kind == "bpe" and rest.isdigit()):
            return {**values, "model": {**model, "tokenizer": f"{name}:{source}"}}
    return values


class PushSection(Section):
    """Upload of the finished model to the Hugging Face Hub. The token comes from HF_TOKEN or `hf auth login`."""

    repository: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")] = Field(
        description="Repository, owner/name; it is created if it does not exist."
    )
    private: bool = Field(True, description="Create the repository as private.")
    checkpoints: bool = Field(
        False,
        description="Also upload every checkpoint, to checkpoints/ in the repository, while the run goes on; if "
        "uploads take longer than the time between checkpoints, only the newest.",
    )
