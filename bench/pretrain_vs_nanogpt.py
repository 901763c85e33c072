"""Pretraining of a small GPT on Tiny Shakespeare against nanoGPT's loop, re-stated in plain torch, on a CPU.

    python bench/pretrain_vs_nanogpt.py --text tinyshakespeare.txt
    python bench/pretrain_vs_nanogpt.py --text tinyshakespeare.txt --steps 100      # a trial

nanoGPT's CPU setting: characters, 4 layers, 4 heads, 128 wide, context 64, batch 12, 2,000 steps, no dropout. Both
train in one process, step by step in turn, each on its own batches of the same text, and are measured on the same end
of it. The engine trains as `trainwright train recipes/pretrain/shakespeare.yaml` has it train, at nanoGPT's learning
rate: nothing compiled, and in the precision that the plan chooses, which is bf16 where the processor multiplies in it.
nanoGPT's on a CPU is fp32 (`--set train.mixed_precision=no` compares that).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from support.machine import describe, use_cores
from support.peers import cache_directory
from support.plain_gpt import PlainLoop
from support.runs import Spread, write_results

from trainwright.data.windows import WindowDataset
from trainwright.engine.checkpoint import Checkpoints
from trainwright.engine.evaluate import evaluate
from trainwright.engine.events import EventLog
from trainwright.engine.optimizer import optimizer_factory
from trainwright.engine.schedule import Schedule
from trainwright.engine.trainer import Trainer
from trainwright.launch.process import keep_freed_memory
from trainwright.machine.detect import detect
from trainwright.models.compilation import compile_blocks
from trainwright.parallel.build import build_strategy
from trainwright.parallel.world import join, leave
from trainwright.planning.resolve import resolve
from trainwright.recipe.loading import load_recipe
from trainwright.tasks.registry import build_task, prepare_task

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "pretrain" / "shakespeare.yaml"
RESULTS = Path(__file__).parent / "results" / "pretrain_vs_nanogpt.json"
CORES = 2
WARM_UP = 20
TOKENS = 12 * 64
FASTER, EQUAL = 1.2, 0.02  # what is promised: speed, and how far above the plain loop's the validation loss may be
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}


class Paired(Trainer):
    """An engine that has the plain loop do each step after its own, and keeps the seconds of both."""

    def follow(self, plain: PlainLoop) -> None:
        self.plain = plain
        self.times: dict[str, list[float]] = {"engine": [], "plain": []}

    def _step(self) -> bool:
        begun = time.perf_counter()
        stop = super()._step()
        between = time.perf_counter()
        self.plain.step(self.progress.step)
        self.times["engine"].append(between - begun)
        self.times["plain"].append(time.perf_counter() - between)
        return stop


def main() -> None:
    arguments = parse_arguments()
    machine = describe(use_cores(CORES))
    torch.set_num_threads(CORES)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="pretrain-vs-nanogpt-") as temporary:
        results = measure(arguments, Path(temporary))
    report(results)
    write_results(arguments.output or RESULTS, {"machine": machine, **results})


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


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, object]:
    overrides = (
        f"data.train={arguments.text}",
        f"train.max_steps={arguments.steps}",
        "optimizer.learning_rate=1e-3",
        f"optimizer.warmup_steps={min(100, arguments.steps // 4)}",
        "evaluate.prompts=[]",
        "evaluate.max_new_tokens=64",
        "parallel.strategy=single",
        f"logging.run_directory={work / 'run'}",
        *arguments.set,
    )
    recipe = resolve(load_recipe(RECIPE, overrides), detect()).recipe
    prepare_task(recipe, cache_directory())
    task = build_task(recipe, cache_directory())
    world = join("cpu")
    try:
        if recipe.train.compile is True:
            compile_blocks(task.blocks())
        dtype = DTYPES[recipe.train.mixed_precision]
        make = optimizer_factory(recipe.optimizer)
        strategy = build_strategy(recipe.parallel, world, task.module, task.blocks(), make, dtype)
        trainer = Paired(
            recipe=recipe,
            recipe_text="",
            task=task,
            strategy=strategy,
            schedule=Schedule(recipe.optimizer, arguments.steps),
            checkpoints=Checkpoints(work / "checkpoints", keep_last=1, keep_best=False),
            events=EventLog(work / "run" / "events.jsonl"),
            max_steps=arguments.steps,
            stop_requested=lambda: False,
        )
        plain = PlainLoop(*texts(task), task.module.config.vocab_size, arguments.steps)
        trainer.follow(plain)
        trainer.rehearse(arguments.steps)
        metrics = evaluate(task, strategy, lambda shortage: False, print)
    finally:
        leave()
    return {
        "steps": arguments.steps,
        "set": arguments.set,
        "mixed_precision": recipe.train.mixed_precision,
        "times": trainer.times,
        "validation_loss": {"engine": metrics["loss"], "plain": plain.validation_loss()},
    }


def texts(task: object) -> tuple[object, object]:
    """The tokens that the engine trains and validates on, as the plain loop takes them."""
    found = []
    for stream in (task.stream, task.validation):
        assert isinstance(stream.dataset, WindowDataset)
        (part,) = stream.dataset.parts
        found.append(part.shards.read(int(part.begins[0]), int(part.ends[0])))
    return found[0], found[1]


def report(results: dict) -> None:
    """Print what was found beside what is promised."""
    engine, plain = (results["times"][name][WARM_UP:] for name in ("engine", "plain"))
    faster = Spread.of([b / a for a, b in zip(engine, plain, strict=True)])
    speeds = [TOKENS / sorted(values)[len(values) // 2] for values in (engine, plain)]
    losses = results["validation_loss"]
    precision = "fp32" if results["mixed_precision"] == "no" else results["mixed_precision"]
    print(f"tokens/s, median: {speeds[0]:,.0f} in the engine ({precision}), {speeds[1]:,.0f} in the plain loop (fp32)")
    print(f"{'kept' if faster.median >= FASTER else 'MISSED'}: {faster.median:.2f} times as fast; {FASTER} wanted")
    apart = abs(losses["engine"] - losses["plain"])
    kept = losses["engine"] <= losses["plain"] + EQUAL
    print(
        f"{'kept' if kept else 'MISSED'}: validation loss {losses['engine']:.4f} in the engine, {losses['plain']:.4f} "
        f"plain ({apart:.4f} apart); at most {EQUAL} above wanted"
    )


if __name__ == "__main__":
    main()
