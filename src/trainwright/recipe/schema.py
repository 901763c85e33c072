"""The recipe's schema: every key, its type, its default and its description.

The descriptions are the reference for users: ``trainwright recipe schema`` passes them to editors, and messages about
missing keys quote them. Checks across keys are in ``checks.py``. The section of a task is in the task's spec.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from trainwright.errors import RequestError
from trainwright.recipe.checks import contradictions
from trainwright.recipe.contradiction import Contradiction, Contradictions
from trainwright.recipe.registered import Registered
from trainwright.recipe.sections.data import DataSection
from trainwright.recipe.sections.fields import (
    Auto,
    BelowOne,
    Count,
    Interval,
    NotNegative,
    Positive,
    Proportion,
    Section,
    Steps,
    Text,
    whole,
)
from trainwright.recipe.sections.model import ModelSection
from trainwright.recipe.strategy_spec import StrategySpec, all_specs, spec_of
from trainwright.recipe.task_spec import TaskSpec
from trainwright.registries import METRICS, OBSERVERS, STRATEGIES, TASKS


class OptimizerSection(Section):
    """Settings of the optimizer."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="adamw (Loshchilov and Hutter, arXiv 1711.05101). muon: the matrices of the blocks are moved by "
        "orthogonalised momentum (Jordan et al., 2024; scaled as arXiv 2502.16982), all else by AdamW, at one rate.",
    )
    momentum: BelowOne = Field(0.95, description="muon: how much of the running mean of the gradient is kept a step.")
    learning_rate: Positive = Field(2e-5, description="The highest learning rate of the schedule.")
    betas: tuple[BelowOne, BelowOne] = Field(
        (0.9, 0.999),
        description="How much of the running means of the gradient and of its square is kept a step.",
    )
    eps: Positive = Field(1e-8, description="Added to the denominator of the update.")
    weight_decay: NotNegative = Field(0.0, description="Decoupled weight decay, on matrices only.")
    schedule: Literal["constant", "linear", "cosine", "warmup_stable_decay"] = Field(
        "cosine", description="The course of the learning rate after the warm-up."
    )
    warmup_steps: Steps = Field(
        0, description="Steps of linear warm-up: a whole number, or a fraction (below 1) of all steps."
    )
    decay_steps: Steps = Field(
        0.1,
        description="Length of the decay at the end of warmup_stable_decay: a whole number of steps, or a "
        "fraction (below 1) of all steps.",
    )
    final_learning_rate_ratio: Proportion = Field(0.0, description="The last learning rate as a part of learning_rate.")
    max_grad_norm: Positive | None = Field(
        1.0, description="Gradients with a larger global norm are scaled down to it. null: never."
    )


_LENGTHS = ("max_steps", "epochs", "max_tokens")


class TrainSection(Section):
    """Length of the training, batch sizes and precision."""

    max_steps: Count | None = Field(
        None, description="Number of optimizer steps. Give either this, epochs or max_tokens."
    )
    max_tokens: Count | None = Field(
        None, description="Train on so many tokens: as many examples as have them in the mean."
    )
    epochs: Positive | None = Field(
        None, description="Number of passes over the training rows. 1 where no other length is given."
    )
    global_batch_size: Count = Field(
        16,
        description="Examples per optimizer step, over all processes and all accumulation, packed or not. "
        "The number of processes does not change it.",
    )
    initial_batch_size: Count | None = Field(
        None, description="Begin with batches of so many examples, growing to global_batch_size."
    )
    batch_warmup_steps: Annotated[int, Field(ge=0), BeforeValidator(whole)] = Field(
        0, description="In how many steps the batch grows, by equal amounts."
    )
    micro_batch_size: Count | Auto = Field(
        "auto", description="Rows a process runs at once: examples, or packs where data.pack_length is set."
    )
    gradient_accumulation_steps: Count | Auto = Field(
        "auto",
        description="Micro-batches each process runs per optimizer step; auto follows from the others.",
    )
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = Field(
        "auto",
        description="Numbers to compute in. no: fp32. fp16: with loss scaling. auto: what is faster, by "
        "what is measured of a CPU and by the hardware of a GPU.",
    )
    activation_checkpointing: Literal["auto", "none", "full", "selective"] | Annotated[int, Field(ge=2)] = Field(
        "auto",
        description="Recompute activations in the backward pass to save memory. full: of every block; a number n: of "
        "every n-th block; selective: all but the results of matrix products and attention; none: keep them.",
    )
    activation_offload: bool = Field(
        False, description="Keep activations for the backward pass in the host's memory instead of the GPU's."
    )
    compile: bool | Auto = Field("auto", description="Compile the model's blocks with torch.compile.")
    replan: Literal["offer", "auto"] = Field(
        "offer",
        description="Where the first steps prove the plan wrong and another strategy or number of processes is "
        "expected to be over 20 % faster. offer: say so. auto: go on so after the next checkpoint, as the same run.",
    )
    gradient_noise_scale: Count | None = Field(
        None,
        description="Every so many steps estimate from which batch size on larger ones pay less (arXiv 1812.06162, "
        "appendix A.1), in examples; costs half a step each time.",
    )
    skip_loss_spikes: Positive | None = Field(
        None,
        description="Leave out the update of a step whose loss is so many standard deviations above the mean of those "
        "before it. null: never.",
    )
    step_policies: list[Text] = Field(
        [],
        description="Step policies of installed packages by name, or module:Name: each may skip a step's update, have "
        "its gradients computed again, or add metrics.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(whole)] = Field(
        0, description="Seeds the split, the order of the examples, dropout and fresh weights."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_unless_told(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(values.get(key) is None for key in _LENGTHS):
            return {**values, "epochs": 1.0}
        return values


def _with_summaries(schema: dict[str, Any]) -> None:
    summaries = [f"{name}: {spec.summary}." for name, spec in all_specs().items()]
    schema["description"] = " ".join(["How the model is spread over the processes.", *summaries])


class ParallelSection(Section):
    """Distribution of the run over processes; affects only its speed."""

    strategy: Annotated[str, Registered(STRATEGIES, ("auto",))] = Field("auto", json_schema_extra=_with_summaries)
    num_processes: Annotated[Count, Field(le=1_000_000)] | Auto = Field(
        "auto", description="Worker processes. auto: one for every GPU; on CPUs as many as the machine runs well."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="What to train on. cuda: GPUs; where there is none that can be used the run stops. cpu: the CPU, "
        "whatever GPUs there are. auto: GPUs where there are any, else the CPU; where one cannot be used, it stops.",
    )
    replicate_size: Count = Field(
        1,
        description="fsdp: number of replicas of the sharded model (hybrid sharding); each is spread over "
        "num_processes / replicate_size processes.",
    )
    reshard_after_forward: bool = Field(
        True, description="fsdp: free a block's gathered weights after its forward pass and gather them again."
    )
    offload_parameters: bool = Field(
        False, description="fsdp, zero3: keep parameters, and with fsdp also optimizer state, in the host's memory."
    )
    offload_optimizer: bool = Field(
        False, description="zero1, zero2, zero3: keep optimizer state in the host's memory and update there."
    )
    wrap: list[Text] | Auto = Field(
        "auto", description="fsdp: class names of the modules that are sharded as a unit. auto: the model's blocks."
    )
    deepspeed_config: Text | None = Field(
        None, description="zero1, zero2, zero3: a DeepSpeed JSON file; its auto values come from this recipe."
    )

    @property
    def spec(self) -> StrategySpec | None:
        """Return the spec of the strategy; None if it is auto."""
        return None if self.strategy == "auto" else spec_of(self.strategy)

    @property
    def is_one_process(self) -> bool:
        """Return whether the strategy runs a single process."""
        return self.spec is not None and self.spec.is_one_process


class CheckpointSection(Section):
    """When to save checkpoints, and how many to keep."""

    every: Interval = Field(
        "auto",
        description="From one checkpoint to the next: a number of steps, or a time such as 10 min. auto: by time, and "
        "so seldom that saving takes a small part of it. null: only at the end.",
    )
    keep_last: Count = Field(2, description="How many of the newest checkpoints are kept.")
    keep_best: bool | Auto = Field(
        "auto",
        description="Also keep the checkpoint with the lowest validation loss. auto: where there is validation, "
        "but of unlearning, whose loss says nothing of what is kept.",
    )


class EvaluateSection(Section):
    """When to evaluate on the validation rows, and which prompts to answer."""

    every: Count | None = Field(
        None, description="Steps from one evaluation to the next. null: before and after training only."
    )
    prompts: list[Text] = Field([], description="Answered by the model at every evaluation, and shown.")
    metrics: list[Annotated[str, Registered(METRICS)]] = Field(
        [],
        description="Have the model answer validation rows at every evaluation, and judge the answers by these; all "
        "are best at 1. answer: the short answer that answer_pattern finds. rouge_l: F1; rouge_l_recall: its recall.",
    )
    answer_pattern: Text | None = Field(
        None,
        description="For the metric answer: gsm8k (what follows ####), number (the last one), or a regular expression "
        "whose first group is the short answer.",
    )
    json_schema: Text | None = Field(
        None, description="For the metric json_schema: a file with the JSON Schema that answers should follow."
    )
    generation_limit: Count = Field(
        64, description="How many validation rows are answered for metrics, drawn from all."
    )
    max_new_tokens: Count = Field(64, description="Longest answer to a prompt or a validation row, in tokens.")


class LoggingSection(Section):
    """Where and how to record the run."""

    run_directory: Text = Field(
        "auto", description="Directory of the run; must be new. auto: a name of its own under runs/."
    )
    tensorboard: bool = Field(True, description="Write the run's curves for TensorBoard.")
    observers: list[Annotated[str, Registered(OBSERVERS, imports=False)]] = Field(
        [], description="Observers of installed packages by name, or module:Name: each is shown the run's events."
    )


S = TypeVar("S", bound=Section)


class Recipe(Section):
    """A training recipe."""

    task: Annotated[str, Registered(TASKS)]
    model: ModelSection = Field(description="Which model is trained, and with which tokenizer.")
    data: DataSection = Field(description="What the model is trained on.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="How the weights are changed.")
    train: TrainSection = Field(
        default_factory=TrainSection, description="How long, in what portions and in which precision."
    )
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="Over how many processes the run is spread, and how."
    )
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="When the run's state is saved."
    )
    evaluate: EvaluateSection = Field(
        default_factory=EvaluateSection, description="When and how the model is measured."
    )
    logging: LoggingSection = Field(default_factory=LoggingSection, description="Where the run is written.")

    @model_validator(mode="wrap")
    @classmethod
    def _with_the_sections_of_tasks(cls, values: Any, handler: ModelWrapValidatorHandler[Recipe]) -> Recipe:
        if cls is not Recipe:
            return handler(values)
        try:
            model = model_of(values)
        except RequestError as error:
            raise Contradictions([Contradiction(("task",), str(error))]) from None
        return model.model_validate(values)

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if (spec := _spec_of(values.get("task"))) is not None:
            if spec.section is not None and values.get(spec.name) is None:
                values = {**values, spec.name: {}}
            values = spec.fill(values)
        return _with_a_corpus_for_the_tokenizer(values)

    @model_serializer(mode="wrap")
    def _without_other_tasks(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        unsaid = set() if self.has_texts else {"model", "data"}
        return {key: value for key, value in values.items() if value is not None and key not in unsaid}

    @property
    def spec(self) -> TaskSpec:
        """Return the spec of the task."""
        spec: TaskSpec = TASKS.get(self.task)
        return spec

    def own(self, kind: type[S]) -> S:
        """Return the task's own section, which must be a ``kind``."""
        section = getattr(self, self.spec.name)
        assert isinstance(section, kind), f"task {self.task} has a section of another kind"
        return section

    @property
    def has_texts(self) -> bool:
        """Return whether the model reads texts, so that the sections model and data apply."""
        return self.spec.reads_texts

    @property
    def validates(self) -> bool:
        """Return whether there are validation rows."""
        return not self.has_texts or self.data.validation is not None

    @model_validator(mode="after")
    def _no_contradiction(self) -> Recipe:
        if found := contradictions(self):
            raise Contradictions(found)
        return self


def model_of(values: Any) -> type[Recipe]:
    """Return the recipe model with the sections that ``values`` may have.

    Raises:
        RequestError: a task of another package is not usable.
    """
    task = values.get("task") if isinstance(values, dict) else None
    if not isinstance(task, str) or ":" not in task or _spec(task) in map(_spec, TASKS.names()):
        return recipe_model()
    return recipe_model(task)


@cache
def recipe_model(task: str | None = None) -> type[Recipe]:
    """Return the recipe model with the section of every registered task, and of ``task`` if that is a
    ``module:Name``.

    Raises:
        RequestError: a task of another package is not usable.
    """
    specs = {name: _spec(name) for name in (*TASKS.names(), *([] if task is None else [task]))}
    summaries = " ".join(f"{name}: {spec.summary}." for name, spec in specs.items())
    fields: dict[str, Any] = {
        "task": (Recipe.__annotations__["task"], Field(description=f"The kind of training. {summaries}"))
    }
    for name, spec in specs.items():
        if spec.name in fields or spec.name in Recipe.model_fields:
            raise RequestError(
                f"{_described(name)} is called {spec.name}, which is another section of a recipe; rename it"
            )
        if name not in (spec.name, task):
            raise RequestError(f"{_described(name)} calls itself {spec.name}; give it one name")
        if spec.section is not None:
            fields[spec.name] = (spec.section | None, Field(None, description=spec.section_description))
    return create_model("Recipe", __base__=Recipe, __module__=__name__, __doc__=Recipe.__doc__, **fields)


def _spec(name: str) -> TaskSpec:
    spec: TaskSpec = TASKS.get(name)
    return spec


def _described(name: str) -> str:
    package = TASKS.package(name)
    return f"task {name}" if package is None else f"package {package}: task {name}"


def _spec_of(task: Any) -> TaskSpec | None:
    """Return the spec of a task; None if it does not exist, which the validation of the key reports."""
    try:
        return _spec(task) if isinstance(task, str) else None
    except RequestError:
        return None


def _with_a_corpus_for_the_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Set the training texts of a tokenizer that is trained from texts, unless it names its own."""
    data, model = values.get("data"), values.get("model")
    if isinstance(data, dict) and isinstance(source := data.get("train"), str) and isinstance(model, dict):
        name = model.get("tokenizer")
        kind, _, rest = name.partition(":") if isinstance(name, str) else ("", "", "")
        if name == "characters" or (kind == "bpe" and rest.isdigit()):
            return {**values, "model": {**model, "tokenizer": f"{name}:{source}"}}
    return values
