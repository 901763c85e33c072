"""One case of the plan's accuracy run for real: the product's own workers, watched from inside.

Every case starts from a recipe and goes the way of ``trainwright train``: prepared once, then one worker a process.
The workers are launched here and not by `tw.train`, as their entry counts allocations.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainwright.run.run_worker as worker
from support.live_memory import LiveMemory, live_memory
from trainwright.engine import trainer as engine
from trainwright.engine.task import import_task_module
from trainwright.engine.trainer import Trainer
from trainwright.machine.detect import detect
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.run import run_directory
from trainwright.run.process import prepare_environment, run_in_child
from trainwright.run.resolve import resolve
from trainwright.run.shutdown.stop import Stopping
from trainwright.run.supervisor import launch


def run(recipe: dict[str, Any], directory: Path, cache: Path) -> dict[str, Any]:
    """Train the recipe in ``directory``; what each rank measured, what its micro-batches were, and the seconds it took.

    Raises:
        SystemExit: the run failed; says where its logs are.
    """
    directory.mkdir(parents=True)
    written = directory / "written.json"  # JSON is YAML
    written.write_text(
        json.dumps(recipe | {"logging": {"run_directory": str(directory), "observers": {"tensorboard": False}}})
    )
    resolved = resolve(load_recipe(written), detect()).recipe
    run_directory.record(directory, run_directory.format_recipe(resolved), "case", ())
    processes = resolved.parallel.num_processes
    assert isinstance(processes, int)
    prepare_environment(processes, processes)
    logs, begun = directory / "logs", time.monotonic()
    logs.mkdir()
    with Stopping() as stopping:
        run_in_child(functools.partial(_prepare, resolved, cache), logs / "prepare.log", stopping)
        code = launch(functools.partial(_work, directory, cache), processes=processes, logs=logs, stopping=stopping)
    if code:
        raise SystemExit(f"a case ended with exit code {code}; its logs are in {logs}")
    ranks = [json.loads((directory / f"live-{rank}.json").read_text()) for rank in range(processes)]
    parallel = resolved.parallel.model_dump(mode="json")
    return {"ranks": ranks, "parallel": parallel, "seconds": time.monotonic() - begun}


def _prepare(recipe: RecipeSchema, cache: Path) -> None:
    import_task_module(recipe).prepare_once(recipe, cache)


def _work(directory: Path, cache: Path) -> int:
    if torch.cuda.is_available():  # before anything is counted: each rank on its own
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with live_memory() as live:
        _Watched.live = live
        worker.Trainer = _Watched  # type: ignore[misc]
        _Watched.loading.enter_context(live.phase("load"))
        code = worker.run_worker(worker.Worker(directory, cache=cache))
    rank = int(os.environ.get("RANK", "0"))
    assert not dist.is_initialized()
    found = asdict(live) | {"batches": _Watched.batches, "rank": rank, "device": _device()}
    (directory / f"live-{rank}.json").write_text(json.dumps(found))
    return code


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class _Watched(Trainer):
    """The engine with its phases marked, and the shapes of its micro-batches noted."""

    live: LiveMemory
    loading = ExitStack()
    batches: list[dict[str, Any]]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.loading.close()
        super().__init__(*arguments, **named)
        type(self).batches = []
        task, strategy, saving = self.task, self.strategy, self._checkpointing
        task.loss = self._marked("forward", task.loss)  # type: ignore[method-assign]
        strategy.backward = self._marked("backward", strategy.backward)  # type: ignore[method-assign]
        strategy.gradient_norm = self._marked("norm", strategy.gradient_norm)  # type: ignore[method-assign]
        strategy.step = self._marked("optimizer", strategy.step)  # type: ignore[method-assign]
        saving.save = self._marked("checkpoint", saving.save)  # type: ignore[method-assign]
        engine.export = self._marked("export", engine.export)

    def run(self, final: Path) -> bool:
        with self.live.phase("training"):
            return super().run(final)

    def _step(self) -> bool:
        batch, dataset = self.task.stream.global_batch(self.progress.step), self.task.stream.dataset
        for micro in batch.select_for_rank(self.world.rank, self.world.size):
            lengths = [dataset.length(example) for example in micro.examples]
            self.batches.append(
                {"step": self.progress.step, "rows": len(micro.rows), "lengths": lengths, "targets": micro.weight}
            )
        self.live.settle()
        with self.live.phase("step"):
            return super()._step()

    def _evaluate(self) -> bool:
        with self.live.phase("evaluation"):
            return super()._evaluate()

    def _marked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*arguments: Any, **named: Any) -> Any:
            with self.live.phase(name):
                return function(*arguments, **named)

        return marked
