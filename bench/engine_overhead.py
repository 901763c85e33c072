"""What the engine costs over hand-written torch loops: same model, data, precision, optimizer and processes.

    python bench/engine_overhead.py                      one process, bf16, against a bare loop
    python bench/engine_overhead.py --strategy ddp       two processes, fp32, against torch's DistributedDataParallel
    python bench/engine_overhead.py --strategy fsdp      two processes, fp32, against torch's fully_shard

The engine trains as `trainwright train` has it train, checks, collectives and all. It is compared with a loop of a page
with batches made beforehand and no way to resume. Both run in the same processes, step by step. Whichever of the two
comes second in a step is faster (by 3% here), so a pair is two steps, with each of them first in one. Pairs in which
other programs took more than a few hundredths of the cores are left out, and more are taken until there are enough.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from support.bare_loops import BareLoop, bare_loop
from support.inputs import find_model, write_rows
from support.machine import describe, use_cores
from support.peers import cache_directory
from support.processes import busy_seconds
from support.results import results_directory
from support.runs import Spread, write_results
from support.trainwright_side import RECIPE

from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.events import EventLog
from trainwright.engine.optimizer import Schedule, build_optimizer_factory
from trainwright.engine.policies.base import StepGradients, TrainingContext
from trainwright.engine.task import import_task_module
from trainwright.engine.trainer import Trainer, _StepResult
from trainwright.parallel.strategy import StrategyConfig, build_strategy
from trainwright.parallel.world import join, leave
from trainwright.recipe.loading import load_recipe
from trainwright.run.process import count_allowed_threads, keep_freed_memory, prepare_environment
from trainwright.run.shutdown.stop import Stopping
from trainwright.run.supervisor import launch

RESULTS = results_directory()
CORES = 2
EXAMPLES_PER_STEP = 10
WARM_UP = 3
QUIET = 0.04  # of the time of all cores, taken by other programs
# Strategy: processes, precision, and what the engine may cost.
SETTINGS = {"single": (1, "bf16", 0.02), "ddp": (2, "no", 0.03), "fsdp": (2, "no", 0.03)}
T = TypeVar("T")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    arguments = parse_arguments()
    machine = describe(use_cores(CORES))
    processes, precision, promise = SETTINGS[arguments.strategy]
    precision = arguments.precision or precision
    with tempfile.TemporaryDirectory(prefix="engine-overhead-") as temporary:
        work = Path(temporary)
        write_recipe(arguments, work, processes, precision)
        prepare_environment(CORES, processes)
        with Stopping() as stopping:
            entry = functools.partial(measure, work, arguments.pairs)
            code = launch(entry, processes=processes, logs=work / "logs", stopping=stopping)
        if code:
            raise SystemExit(code)
        times = json.loads((work / "times.json").read_text())
    cost = report(times, promise)
    results = {"machine": machine, "strategy": arguments.strategy, "cost": cost.median, **times}
    write_results(arguments.output or RESULTS / f"engine_overhead_{arguments.strategy}.json", results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=SETTINGS, default="single")
    parser.add_argument("--pairs", type=int, default=30, help="quiet pairs, of two steps each, to be counted (30)")
    parser.add_argument(
        "--steps", type=int, default=160, help=f"steps of each at most, {WARM_UP} of them warm-up (160)"
    )
    parser.add_argument("--precision", choices=DTYPES, help="of one process: bf16 by default, or fp32 (no)")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="an id or a directory")
    parser.add_argument("--output", type=Path, help="file of results (results/engine_overhead_STRATEGY.json)")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps: the first {WARM_UP} are not counted; ask for more")
    return arguments


def write_recipe(arguments: argparse.Namespace, work: Path, processes: int, precision: str) -> None:
    """The recipe of the comparison with TRL, for this strategy."""
    text = RECIPE.format(
        model=find_model(arguments.model),
        rows=write_rows(work / "rows.jsonl"),
        steps=arguments.steps,
        examples=EXAMPLES_PER_STEP,
        compile="false",
        precision=precision,
        run_directory=work / "run",
    )
    (work / "recipe.yaml").write_text(text)
    overrides = (
        f"parallel.strategy={arguments.strategy}",
        f"parallel.num_processes={processes}",
        f"train.mixed_precision={precision}",
        "train.micro_batch_size=1",
    )
    (work / "overrides.json").write_text(json.dumps(overrides))


class Paired(Trainer):
    """An engine that has the bare loop do each step after its own, and keeps the seconds of both."""

    def follow(self, bare: BareLoop, pairs: int) -> None:
        self.bare = bare
        self.pairs = pairs
        self.loss = 0.0
        self.times: dict[str, list[float]] = {"engine": [], "bare": [], "differences": [], "others": []}

    def _step(self) -> _StepResult:
        self.world.barrier()
        busy, own = busy_seconds(), time.process_time()
        begun = time.perf_counter()
        number = self.progress.step + 1
        if number % 2:
            said, loss = self._timed("engine", super()._step), self._timed("bare", lambda: self.bare.step(number))
        else:
            loss, said = self._timed("bare", lambda: self.bare.step(number)), self._timed("engine", super()._step)
        self.times["differences"].append(abs(self.loss - loss) / loss)
        took = [time.process_time() - own, busy_seconds() - busy, time.perf_counter() - begun]
        ranks = self.world.gather_floats(took)
        others = ranks[0][1] - sum(rank[0] for rank in ranks)
        self.times["others"].append(max(0.0, others) / (ranks[0][2] * CORES))
        return said._replace(stop=len(quiet_pairs(self.times)) >= self.pairs)

    def _timed(self, side: str, step: Callable[[], T]) -> T:
        begun = time.perf_counter()
        result = step()
        self.world.barrier()
        self.times[side].append(time.perf_counter() - begun)
        return result

    def _metrics(self, step: int, found: StepGradients) -> dict[str, float]:
        self.loss = found.loss
        return super()._metrics(step, found)


def measure(work: Path, pairs: int) -> int:
    """One process of the measurement."""
    torch.set_num_threads(count_allowed_threads())
    keep_freed_memory()
    overrides = json.loads((work / "overrides.json").read_text())
    recipe = load_recipe(work / "recipe.yaml", overrides)
    whole = load_recipe(work / "recipe.yaml", [*overrides, "parallel.strategy=ddp", "parallel.num_processes=2"])
    import_task_module(recipe).prepare_once(recipe, cache_directory())
    # The bare loop begins with the whole model; the engine may have its ranks read their own parts.
    task, twin = (import_task_module(each).build(each, cache_directory()) for each in (recipe, whole))
    world = join("cpu")
    if task.weights is not None:
        task.weights.load(world.rank)
    try:
        bare = bare_loop(recipe, twin, world)
        dtype = DTYPES[recipe.train.mixed_precision]
        factory = build_optimizer_factory(recipe.optimizer)
        strategy = build_strategy(
            StrategyConfig(recipe.parallel, world, task.module, factory, dtype, task.blocks(), task.weights)
        )
        events = EventLog(work / "run" / "events.jsonl" if world.is_main else None)
        steps = len(task.stream)
        trainer = Paired(
            TrainingContext(recipe, "", task, strategy, events),
            schedule=Schedule(recipe.optimizer, steps),
            checkpoints=Checkpoints(work / "checkpoints", keep_last=1, keep_best=False),
            stop_requested=lambda: False,
        )
        trainer.follow(bare, pairs)
        trainer.run_steps(steps)
        if world.is_main:
            (work / "times.json").write_text(json.dumps(trainer.times))
    finally:
        leave()
    return 0


def quiet_pairs(times: dict[str, list[float]]) -> list[int]:
    """The first steps of the pairs after the warm-up in which other programs hardly ran."""
    others = times["others"]
    return [step for step in range(WARM_UP, len(others) - 1, 2) if max(others[step : step + 2]) <= QUIET]


def report(times: dict[str, list[float]], promise: float) -> Spread:
    """Print and return the engine's cost as a part of the bare loop's time.

    Raises:
        SystemExit: the two did not do the same.
    """
    worst = max(times["differences"])
    if worst > 1e-2:
        raise SystemExit(f"the losses of the engine and the bare loop differ by up to {worst:.2%}")
    quiet = quiet_pairs(times)
    if not quiet:
        raise SystemExit("other programs were busy in every pair; run it again when they are not")
    engine, bare = ([sum(times[name][step : step + 2]) / 2 for step in quiet] for name in ("engine", "bare"))
    cost = Spread.of([a / b - 1 for a, b in zip(engine, bare, strict=True)])
    middle = [sorted(values)[len(values) // 2] * 1000 for values in (engine, bare)]
    print(f"Losses agree to {worst:.1e}. Median step: {middle[0]:.0f} ms in the engine, {middle[1]:.0f} ms bare.")
    verdict = "kept" if cost.median <= promise else "MISSED"
    print(
        f"{verdict}: the engine costs {cost.median:+.1%} (median of {len(engine)} quiet pairs of "
        f"{(len(times['bare']) - WARM_UP) // 2}, {cost.low:+.1%} to {cost.high:+.1%}); at most {promise:.0%} wanted"
    )
    return cost


if __name__ == "__main__":
    main()
