"""What the engine costs over a bare hand-written loop on the same model, data, precision and optimizer.

    python bench/bare_loop.py              40 steps of SmolLM2-135M-Instruct, bf16
    python bench/bare_loop.py --compile    with compiled blocks on both sides

The engine trains as `trainwright train` has it train, events and all. Beside it stands a loop of a page with
batches made beforehand, no events, no checks and no way to resume. Both run in one process, step by step in
turn: after every step of the engine the loop does the same step on its own copy of the model. So each step
has its pair within seconds, and whatever else the machine does hits both. The engine's time is all that
passes outside the loop's steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from support.inputs import find_model, write_rows
from support.machine import describe, use_cores
from support.peers import cache_directory
from support.runs import Spread, write_results
from support.trainwright_side import RECIPE

from trainwright.data.batch import Batch, collate
from trainwright.engine.checkpoint import Checkpoints
from trainwright.engine.events import Event, EventLog
from trainwright.engine.optimizer import optimizer_factory
from trainwright.engine.schedule import Schedule
from trainwright.engine.trainer import Trainer
from trainwright.launch.process import keep_freed_memory
from trainwright.machine.detect import detect
from trainwright.models.compilation import compile_blocks
from trainwright.parallel.build import build_strategy
from trainwright.parallel.world import join
from trainwright.planning.resolve import resolve
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import Recipe
from trainwright.tasks.registry import build_task

RESULTS = Path(__file__).parent / "results" / "bare_loop.json"
CORES = 2
EXAMPLES_PER_STEP = 10
WARM_UP = 3
PROMISE = 0.02


def main() -> None:
    arguments = parse_arguments()
    machine = describe(use_cores(CORES))
    torch.set_num_threads(CORES)
    keep_freed_memory()  # as the engine's worker does; it acts on the whole process, so on both sides
    with tempfile.TemporaryDirectory(prefix="bare-loop-") as temporary:
        work = Path(temporary)
        recipe = make_recipe(arguments, work)
        bare = BareLoop(recipe, compiled=arguments.compile)
        pairs = Pairs(bare)
        run_engine(recipe, work / "run", pairs)
    cost = report(pairs)
    results = {"machine": machine, "compile": arguments.compile, "cost": asdict(cost)}
    write_results(arguments.output, results | {"engine": pairs.engine, "bare": pairs.bare})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help=f"steps of each, {WARM_UP} of them warm-up (40)")
    parser.add_argument("--compile", action="store_true", help="compile the blocks on both sides")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="an id or a directory")
    parser.add_argument("--rows", type=Path, help="JSONL with question and answer in place of pydoc rows")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"file of results ({RESULTS})")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps: the first {WARM_UP} are not counted; ask for more")
    return arguments


def make_recipe(arguments: argparse.Namespace, work: Path) -> Recipe:
    """The recipe of the comparison with TRL, resolved for this machine."""
    file = work / "recipe.yaml"
    file.write_text(
        RECIPE.format(
            model=find_model(arguments.model),
            rows=arguments.rows or write_rows(work / "rows.jsonl"),
            steps=arguments.steps,
            examples=EXAMPLES_PER_STEP,
            compile=str(arguments.compile).lower(),
            run_directory=work / "run",
        )
    )
    return resolve(load_recipe(file), detect()).recipe


class BareLoop:
    """Training without an engine: what one writes by hand for this model on one process."""

    def __init__(self, recipe: Recipe, *, compiled: bool) -> None:
        task: Any = build_task(recipe, cache_directory())
        self.batches = make_batches(task, recipe)
        self.module = task.module
        if compiled:
            compile_blocks(task.blocks())
        # bf16 weights to compute with, fp32 masters to update.
        self.masters = [torch.nn.Parameter(p.detach().clone()) for p in self.module.parameters()]
        self.module.to(torch.bfloat16)
        self.weights = list(self.module.parameters())
        matrices = [p for p in self.masters if p.dim() >= 2]
        vectors = [p for p in self.masters if p.dim() < 2]
        settings = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self.schedule = Schedule(settings, len(self.batches))
        self.losses: list[float] = []
        self.module.train()

    def step(self, number: int) -> None:
        """Optimizer step ``number``, counted from 1."""
        batches = self.batches[number - 1]
        targets = sum(len(batch.targets) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = self.module(batch) / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(number)
        self.optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)
                master.grad = None
        self.losses.append(total)


def make_batches(task: Any, recipe: Recipe) -> list[list[Batch]]:
    """All micro-batches of all steps as tensors."""
    assert recipe.train.max_steps is not None
    steps = [task.stream.global_batch(step) for step in range(recipe.train.max_steps)]
    return [
        [collate(task.stream.dataset, micro, packed=True, pad_token_id=0) for micro in step.micro_batches]
        for step in steps
    ]


class Pairs:
    """Observes the engine; after each of its steps the bare loop does the same one. Seconds by step."""

    def __init__(self, bare: BareLoop) -> None:
        self.engine: list[float] = []
        self.bare: list[float] = []
        self.differences: list[float] = []
        self._loop = bare
        self._engine_began = 0.0

    def __call__(self, event: Event) -> None:
        now = time.perf_counter()
        if event["event"] == "step":
            self.engine.append(now - self._engine_began)
            self._loop.step(event["step"])
            self.bare.append(time.perf_counter() - now)
            self.differences.append(abs(event["loss"] - self._loop.losses[-1]) / event["loss"])
        self._engine_began = time.perf_counter()


def run_engine(recipe: Recipe, run: Path, pairs: Pairs) -> None:
    """Train as a worker of `trainwright train` does, with ``pairs`` among the observers."""
    task = build_task(recipe, cache_directory())
    if recipe.train.compile is True:
        compile_blocks(task.blocks())
    strategy = build_strategy(
        recipe.parallel,
        join("cpu"),
        task.module,
        task.blocks(),
        optimizer_factory(recipe.optimizer),
        torch.bfloat16,
    )
    events = EventLog(run / "events.jsonl", [pairs])
    steps = len(task.stream)
    trainer = Trainer(
        recipe=recipe,
        recipe_text="",
        task=task,
        strategy=strategy,
        schedule=Schedule(recipe.optimizer, steps),
        checkpoints=Checkpoints(run / "checkpoints", keep_last=1, keep_best=False),
        events=events,
        max_steps=steps,
        stop_requested=lambda: False,
    )
    events.emit("start")
    trainer.run(run / "final")
    events.close()


def report(pairs: Pairs) -> Spread:
    """Print and return the engine's cost as a part of the bare loop's time.

    Raises:
        SystemExit: the two did not do the same.
    """
    worst = max(pairs.differences)
    if worst > 1e-2:
        raise SystemExit(f"the losses of the engine and the bare loop differ by up to {worst:.2%}")
    engine, bare = pairs.engine[WARM_UP:], pairs.bare[WARM_UP:]
    cost = Spread.of([a / b - 1 for a, b in zip(engine, bare, strict=True)])
    print(f"Losses agree to {worst:.1e}. Median step: {_ms(engine)} ms in the engine, {_ms(bare)} ms bare.")
    verdict = "kept" if cost.median <= PROMISE else "MISSED"
    print(
        f"{verdict}: the engine costs {cost.median:+.1%} (median of {len(engine)} pairs, "
        f"{cost.low:+.1%} to {cost.high:+.1%}); at most {PROMISE:.0%} wanted"
    )
    return cost


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f}"


if __name__ == "__main__":
    main()
