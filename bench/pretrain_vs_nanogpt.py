"""Pretraining of a small GPT on Tiny Shakespeare against nanoGPT's loop, re-stated in plain torch, on a CPU.

    python bench/pretrain_vs_nanogpt.py --text tinyshakespeare.txt
    python bench/pretrain_vs_nanogpt.py --text tinyshakespeare.txt --steps 100      # a trial
    python bench/pretrain_vs_nanogpt.py --text tinyshakespeare.txt --set parallel.num_processes=1

nanoGPT's CPU setting: characters, 4 layers, 4 heads, 128 wide, context 64, batch 12, 2,000 steps, no dropout. Both
train on the same two cores, step by step in turn, each on its own batches of the same text, and are measured on the
same end of it. The engine trains as `trainwright train recipes/pretrain/shakespeare.yaml` has it train, at nanoGPT's
learning rate: nothing compiled, on as many processes as the plan chooses. The loop is one process on all threads, as
nanoGPT's on a CPU is. Once the engine is in fp32 and once in bf16; beside it goes the loop in fp32, which is nanoGPT's
on a CPU, and by autocast in bf16. Held against each other are both in fp32, and each in its fastest precision.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from support.machine import describe, use_cores
from support.peers import cache_directory
from support.plain_gpt import PlainLoop
from support.results import results_directory
from support.runs import Spread, write_results

from trainwright.data.stream.windows import WindowDataset
from trainwright.engine.checkpoints.checkpoint import Checkpoints
from trainwright.engine.evaluate import evaluate
from trainwright.engine.events import EventLog
from trainwright.engine.optimizer import Schedule, build_optimizer_factory
from trainwright.engine.policies.base import TrainingContext
from trainwright.engine.task import import_task_module
from trainwright.engine.trainer import Trainer, _StepResult
from trainwright.machine.detect import detect
from trainwright.models.causal_lm import compile_blocks
from trainwright.parallel.strategy import StrategyConfig, build_strategy
from trainwright.parallel.world import join, leave
from trainwright.recipe.loading import dump_recipe, load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run.process import count_allowed_threads, keep_freed_memory, run_in_child
from trainwright.run.resolve import resolve
from trainwright.run.shutdown.stop import Stopping
from trainwright.run.supervisor import launch

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "pretrain" / "shakespeare.yaml"
RESULTS = results_directory() / "pretrain_vs_nanogpt.json"
CORES = 2
WARM_UP = 20
TOKENS = 12 * 64
FASTER, EQUAL = 1.2, 0.02  # what is promised: speed, and how far above the plain loop's the validation loss may be
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}
NAMES = {"no": "fp32", "bf16": "bf16"}


class Paired(Trainer):
    """An engine that has the plain loops do each step after its own, and keeps the seconds of all."""

    def follow(self, plain: dict[str, PlainLoop]) -> None:
        """``plain``: by precision; on the first rank only, while the others wait."""
        self.plain = plain
        self.times: dict[str, list[float]] = {"engine": [], **{name: [] for name in plain}}

    def _step(self) -> _StepResult:
        self.world.barrier()
        begun = time.perf_counter()
        said = super()._step()
        self.world.barrier()
        self.times["engine"].append(time.perf_counter() - begun)
        own = torch.get_num_threads()
        torch.set_num_threads(CORES)
        for name, loop in self.plain.items():
            begun = time.perf_counter()
            loop.step(self.progress.step)
            self.times[name].append(time.perf_counter() - begun)
        torch.set_num_threads(own)
        return said


def main() -> None:
    arguments = parse_arguments()
    machine = describe(use_cores(CORES))
    runs = {}
    with tempfile.TemporaryDirectory(prefix="pretrain-vs-nanogpt-") as temporary:
        for precision in ("no", "bf16"):
            runs[NAMES[precision]] = run(arguments, Path(temporary) / precision, precision)
    results = {"machine": machine, "steps": arguments.steps, "set": arguments.set, "runs": runs}
    results["ratios"] = report(runs)
    write_results(arguments.output or RESULTS, results)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Tiny Shakespeare")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe; repeatable")
    parser.add_argument("--output", type=Path, help=f"file of results ({RESULTS})")
    arguments = parser.parse_args()
    if arguments.steps <= 2 * WARM_UP:
        parser.error(f"--steps: the first {WARM_UP} are not counted; ask for more")
    return arguments


def run(arguments: argparse.Namespace, work: Path, precision: str) -> dict[str, Any]:
    """The engine in one precision beside the plain loops: what ``measure`` found.

    Raises:
        SystemExit: a process failed; says where its logs are.
    """
    work.mkdir()
    recipe = planned(arguments, work, precision)
    (work / "recipe.yaml").write_text(dump_recipe(recipe))
    processes = recipe.parallel.num_processes
    assert isinstance(processes, int)
    os.environ["OMP_NUM_THREADS"] = str(max(1, CORES // processes))
    with Stopping() as stopping:
        prepare = functools.partial(import_task_module(recipe).prepare_once, recipe, cache_directory())
        run_in_child(prepare, work / "prepare.log", stopping)
        code = launch(functools.partial(measure, work), processes=processes, logs=work / "logs", stopping=stopping)
    if code:
        logs = "\n".join(log.read_text() for log in sorted((work / "logs").iterdir()))
        raise SystemExit(f"the run in {NAMES[precision]} ended with exit code {code}:\n{logs}")
    found: dict[str, Any] = json.loads((work / "found.json").read_text())
    return found


def planned(arguments: argparse.Namespace, work: Path, precision: str) -> RecipeSchema:
    """The recipe with what the plan chooses for it."""
    overrides = (
        f"data.train={arguments.text}",
        f"train.max_steps={arguments.steps}",
        f"train.mixed_precision={precision}",
        "optimizer.learning_rate=1e-3",
        f"optimizer.warmup_steps={min(100, arguments.steps // 4)}",
        "evaluate.prompts=[]",
        "evaluate.max_new_tokens=64",
        f"logging.run_directory={work / 'run'}",
        *arguments.set,
    )
    return resolve(load_recipe(RECIPE, overrides), detect()).recipe


def measure(work: Path) -> int:
    """One process of the engine; the first runs the plain loops as well, and writes what was found."""
    recipe = load_recipe(work / "recipe.yaml")
    steps = recipe.train.max_steps
    assert steps is not None
    torch.set_num_threads(count_allowed_threads())
    keep_freed_memory()
    task = import_task_module(recipe).build(recipe, cache_directory())
    world = join("cpu")
    try:
        if recipe.train.compile is True:
            compile_blocks(task.blocks())
        dtype = DTYPES[recipe.train.mixed_precision]
        make = build_optimizer_factory(recipe.optimizer)
        strategy = build_strategy(
            StrategyConfig(recipe.parallel, world, task.module, make, dtype, task.blocks(), task.weights)
        )
        events = EventLog(work / "run" / "events.jsonl" if world.is_main else None)
        trainer = Paired(
            TrainingContext(recipe, "", task, strategy, events),
            schedule=Schedule(recipe.optimizer, steps),
            checkpoints=Checkpoints(work / "checkpoints", keep_last=1, keep_best=False),
            stop_requested=lambda: False,
        )
        names = ("fp32", "bf16") if world.is_main else ()
        sizes = (*texts(task), task.module.config.vocab_size, steps)
        plain = {name: PlainLoop(*sizes, bf16=name == "bf16") for name in names}
        trainer.follow(plain)
        trainer.run_steps(steps)
        loss = evaluate(task, strategy, lambda shortage: False, print, events, steps)["loss"]
        if world.is_main:
            losses = {"engine": loss, **{name: loop.validation_loss() for name, loop in plain.items()}}
            layout = {"processes": world.size, "strategy": recipe.parallel.strategy, "threads": count_allowed_threads()}
            found = {**layout, "times": trainer.times, "validation_loss": losses}
            (work / "found.json").write_text(json.dumps(found))
    finally:
        leave()
    return 0


def texts(task: object) -> tuple[object, object]:
    """The tokens that the engine trains and validates on, as the plain loop takes them."""
    found = []
    for stream in (task.stream, task.validation):
        assert isinstance(stream.dataset, WindowDataset)
        (part,) = stream.dataset.parts
        found.append(part.shards.read(int(part.begins[0]), int(part.ends[0])))
    return found[0], found[1]


def report(runs: dict[str, Any]) -> dict[str, Any]:
    """Print what was found beside what is promised; the ratios of speed."""
    middle = {
        engine: {side: statistics.median(times[WARM_UP:]) for side, times in found["times"].items()}
        for engine, found in runs.items()
    }
    for engine, found in runs.items():
        layout = f"{found['processes']} processes of {found['threads']} threads"
        rates = {side: f"{TOKENS / seconds:,.0f}" for side, seconds in middle[engine].items()}
        print(
            f"tokens/s, median: {rates['engine']} in the engine in {engine} ({layout}); "
            f"{rates['fp32']} in the plain loop in fp32, {rates['bf16']} in bf16"
        )
    # Each against the loop beside it: the machine may have been faster in one run than in the other.
    engine = max(middle, key=lambda name: middle[name]["fp32"] / middle[name]["engine"])
    plain = min(("fp32", "bf16"), key=lambda name: middle[engine][name])
    return {
        "fp32": _verdict("both in fp32", runs["fp32"], "fp32"),
        "fastest": _verdict(f"each in its fastest, {engine} and {plain}", runs[engine], plain),
    }


def _verdict(title: str, found: dict[str, Any], plain: str) -> dict[str, Any]:
    times, losses = found["times"], found["validation_loss"]
    faster = Spread.of([b / a for a, b in zip(times["engine"][WARM_UP:], times[plain][WARM_UP:], strict=True)])
    said = "kept" if faster.median >= FASTER else "MISSED"
    print(f"{said}: {title}: {faster.median:.2f} times as fast; {FASTER} wanted")
    said = "kept" if losses["engine"] <= losses[plain] + EQUAL else "MISSED"
    print(
        f"{said}: validation loss {losses['engine']:.4f} in the engine, {losses[plain]:.4f} plain; "
        f"at most {EQUAL} above wanted"
    )
    return {"speed": faster.median, "engine_loss": losses["engine"], "plain_loss": losses[plain]}


if __name__ == "__main__":
    main()
