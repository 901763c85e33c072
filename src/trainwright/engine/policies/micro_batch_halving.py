"""Smaller micro-batches after an out-of-memory error: the step is repeated, and the run continues.

The content of a global batch does not depend on how it is divided, so half the rows per micro-batch with twice the
accumulation give the same loss and gradient. Micro-batches stay halved, and the run's recipe is updated.
"""

from __future__ import annotations

from trainwright.data.stream.stream import GlobalBatch
from trainwright.engine.events import Fault
from trainwright.engine.out_of_memory import MemoryShortage, OutOfMemory, catch_shortage, release
from trainwright.engine.policies.base import StepGradients, StepPolicy, TrainingContext
from trainwright.parallel.strategy import Independent
from trainwright.parallel.world import World
from trainwright.recipe.schema import RecipeSchema


class Halving(StepPolicy):
    """Repeat a step that ran out of memory on any rank, with half the rows per micro-batch.

    Attributes:
        enabled: whether a step may be repeated; false to test whether it fits.
    """

    def __init__(self, training: TrainingContext) -> None:
        super().__init__(training)
        self.enabled = True
        self._task = training.task
        self._strategy = training.strategy

    def after_shortage(self, step: int, batch: GlobalBatch, shortage: MemoryShortage) -> None:
        """Leave passes of this rank that ran out of memory; ``again`` then repeats the step on every rank.

        Raises:
            OutOfMemory: the step cannot be repeated, as the other ranks wait for this one in their passes.
        """
        if not self.enabled or not isinstance(self._strategy, Independent):
            raise self.error(step, batch, shortage)
        if isinstance(second_shortage := catch_shortage(self._strategy.abandon_step), MemoryShortage):
            raise self.error(step, batch, second_shortage)

    def again(self, step: int, gradients: StepGradients) -> GlobalBatch | None:
        """Return the batch divided into micro-batches of half the rows, if memory ran out on any rank.

        Raises:
            OutOfMemory: the micro-batches already have one row each.
        """
        if not any(rank.out_of_memory for rank in gradients.reports):
            return None
        batch = gradients.batch
        self._strategy.discard_gradients()
        release()
        rank, shortage = self._first(gradients.shortage)
        if batch.rows == 1:
            self._report(step, rank, shortage, "stop")
            raise self.error(step, batch, shortage, rank)
        rows = halve_rows(batch.rows)
        for stream in (self._task.stream, self._task.validation):
            if stream is not None:
                stream.limit_rows(rows)
        halved_batch = self._task.stream.global_batch(step - 1)
        before, after = (len(whole_batch.select_for_rank(0, self._world.size)) for whole_batch in (batch, halved_batch))
        change = f"micro-batch {batch.rows} -> {rows}, accumulation {before} -> {after}"
        self._report(step, rank, shortage, f"{change}; step {step} is repeated")
        training = self.training
        training.recipe = set_rows(training.recipe, rows)
        training.recipe_text = training.keep_recipe(training.recipe, explain_halving(rows, batch.rows, step))
        return halved_batch

    def evaluation(self, step: int, own: MemoryShortage | None) -> bool:
        """Return whether to repeat the evaluation in halved batches, because memory ran out on some rank.

        Raises:
            OutOfMemory: the ranks cannot repeat it, or the batches already have one row each.
        """
        assert self._task.validation is not None
        if not isinstance(self._strategy, Independent):
            if own is not None:
                raise self.error(step, self._task.validation.global_batch(0), own)
            return False
        if not any(short for (short,) in self._world.gather_floats([float(own is not None)])):
            return False
        release()
        rank, shortage = self._first(own)
        rows = max(self._task.validation.global_batch(k).rows for k in range(len(self._task.validation)))
        if rows == 1:
            self._report(step, rank, shortage, "stop")
            raise self.error(step, self._task.validation.global_batch(0), shortage, rank)
        self._task.validation.limit_rows(halve_rows(rows))
        action = f"validation in micro-batches of {halve_rows(rows)} instead of {rows}; it is repeated"
        self._report(step, rank, shortage, action)
        return True

    def error(self, step: int, batch: GlobalBatch, shortage: MemoryShortage, rank: int | None = None) -> OutOfMemory:
        """Return the error that ends the run, with what to change. ``rank`` ran out of memory; None: this one."""
        recipe = self.training.recipe
        rows = count_rows(recipe, batch.rows)
        message = (
            f"memory ran out on rank {self._world.rank if rank is None else rank} at step {step} with micro-batches of "
            f"{rows} row{'s' * (rows > 1)}: {shortage.detail}; {describe_remedy(recipe, rows)}"
        )
        return OutOfMemory(message, detail=shortage.detail, step=step, rows=rows)

    @property
    def _world(self) -> World:
        return self._strategy.world

    def _report(self, step: int, rank: int, shortage: MemoryShortage, action: str) -> None:
        fault = Fault(kind="out_of_memory", rank=rank, detail=shortage.detail, action=action, step=step)
        self.training.events.emit(fault)

    def _first(self, own: MemoryShortage | None) -> tuple[int, MemoryShortage]:
        """Return the lowest rank that ran out of memory, and its error."""
        shortages: list[MemoryShortage | None] = self._world.gather(own, MemoryShortage)
        return next((rank, shortage) for rank, shortage in enumerate(shortages) if shortage is not None)


def count_rows(recipe: RecipeSchema, rows: int | None = None) -> int:
    """Return the rows of the largest micro-batches: ``rows`` in a step, or else the maximum by the recipe."""
    train, processes = recipe.train, recipe.parallel.processes
    max_rows = train.global_batch_size
    if train.micro_batch_size != "auto":
        max_rows = train.micro_batch_size
    elif train.gradient_accumulation_steps != "auto" and processes != "auto":
        max_rows = -(-max_rows // (train.gradient_accumulation_steps * processes))
    return max_rows if rows is None else min(rows, max_rows)


def halve_rows(rows: int) -> int:
    """Half of the rows of a micro-batch, rounded up."""
    return -(-rows // 2)


def set_rows(recipe: RecipeSchema, rows: int) -> RecipeSchema:
    """Return the recipe with micro-batches of ``rows`` rows and the gradient accumulation to match."""
    train = recipe.train.model_copy(update={"micro_batch_size": rows, "gradient_accumulation_steps": "auto"})
    return recipe.model_copy(update={"train": train})


def explain_halving(rows: int, before: int, step: int | None) -> str:
    """Return the reason for the plan why a run continues with micro-batches of ``rows`` rows."""
    at_step = "" if step is None else f" at step {step}"
    return f"train.micro_batch_size {rows}: {before} ran out of memory{at_step}"


def describe_remedy(recipe: RecipeSchema, rows: int) -> str:
    """Return how to fix micro-batches that are too large: what a resumed run can change, and what needs a new run."""
    if rows > 1:
        return f"resume with train.micro_batch_size={halve_rows(rows)}"
    keys = []
    if recipe.train.activation_checkpointing != "full":
        keys.append("train.activation_checkpointing=full")
    spec = recipe.parallel.spec
    if spec is not None and not spec.shards:
        keys.append("a strategy that shards (parallel.strategy=fsdp on several processes)")
    else:
        keys.append("more processes to shard over (parallel.num_processes)")
    of_data = "data.max_length" if recipe.data.pack_length is None else "data.pack_length and data.max_length"
    lengths = recipe.spec.length_keys or of_data
    return f"try {' or '.join(keys)} when resuming, or a smaller {lengths} in a new run"
