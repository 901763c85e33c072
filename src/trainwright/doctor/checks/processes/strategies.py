"""Check every strategy: two ranks take steps of a tiny model, which must have the losses of one process."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from trainwright.doctor.checks.check import CannotCheck, CheckContext, CheckEnded, CheckResult, Finding, Severity
from trainwright.doctor.checks.processes.starting import ready, two_devices
from trainwright.run.process import preload_worker, run_in_child
from trainwright.utils.text import span

if TYPE_CHECKING:
    from trainwright.doctor.verify import ComparedRun
    from trainwright.recipe.schema import Recipe

_STEPS = 2
_SECONDS = 120.0  # of one run; DeepSpeed compiles at its first
_RECIPE = """
task: sft
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
    num_key_value_heads: 2, max_position_embeddings: 512, tie_word_embeddings: true}
  tokenizer: bytes
data: {max_length: 128}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 0}
train: {max_steps: 2, global_batch_size: 4, micro_batch_size: 1, mixed_precision: "no", compile: false,
  activation_checkpointing: none}
logging: {observers: {tensorboard: false}}
"""


def check(context: CheckContext) -> CheckResult:
    """Compare the first steps of every strategy on two ranks with those on one process."""
    from trainwright.recipe.strategy_spec import all_specs

    ready(context)
    specs = all_specs()
    names = [n for n, spec in specs.items() if spec.least_processes <= 2 <= (spec.most_processes or 2)]
    missing = {n: spec.library for n in names if (spec := specs[n]).library is not None and spec.library.is_missing}
    alone = next(name for name, spec in specs.items() if spec.is_one_process)
    reference = _side(context, alone, 1)
    preload_worker(reference.recipe)
    work = functools.partial(_prepare, context, reference.recipe)
    run_in_child(work, context.work / "prepare.log", context.stopping)
    if (finding := _run(context, reference, f"one process ({alone})")) is not None:
        return CheckResult((), (finding,))
    facts, findings, late = [], [], []
    for name in (name for name in names if name not in missing):
        if time.monotonic() > context.end:
            late.append(name)
            continue
        try:
            fact, new_findings = _compared(context, reference, name)
        except CannotCheck:
            late.append(name)
            continue
        facts.append(fact)
        findings += new_findings
    facts += [f"not run: {name}: {library.title} is not installed" for name, library in missing.items() if library]
    facts += [f"not run, time limit reached: {', '.join(late)}"] if late else []
    return CheckResult(tuple(facts), tuple(findings))


def _side(context: CheckContext, strategy: str, processes: int) -> ComparedRun:
    """Return the run of the tiny recipe under a strategy."""
    from trainwright.doctor.verify import ComparedRun
    from trainwright.recipe.loading import load_recipe
    from trainwright.run.resolve import resolve

    file, rows = context.work / "recipe.yaml", context.work / "rows.jsonl"
    file.write_text(_RECIPE, encoding="utf-8")
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in _rows()), encoding="utf-8")
    device = two_devices(context)
    overrides = (
        f"data.train={rows}",
        f"parallel.strategy={strategy}",
        f"parallel.num_processes={processes}",
        f"parallel.device={device}",
    )
    # A machine given by name is not measured: the plan only fills in values.
    recipe = resolve(load_recipe(file, overrides), replace(context.machine, is_here=False)).recipe
    name = strategy + (f" x {processes}" if processes > 1 else "")
    return ComparedRun(name, recipe, context.work / f"run-{strategy}")


def _rows() -> Iterator[dict[str, str]]:
    for number in range(8):
        yield {"question": f"What is {number} times {number}?", "answer": f"{number * number}, which is {number}^2."}


def _prepare(context: CheckContext, recipe: Recipe) -> None:
    """Prepare data and weights in a child process."""
    from trainwright.recipe.loading import dump_recipe
    from trainwright.run import run_directory
    from trainwright.run.run_worker import prepare

    directory = context.work / "prepared"
    directory.mkdir()
    run_directory.record(directory, dump_recipe(recipe), directory.name, [])
    prepare(directory)


def _run(context: CheckContext, side: ComparedRun, what: str) -> Finding | None:
    """Run a side; return a finding if it fails."""
    from trainwright.doctor.checks.processes.watching import watched
    from trainwright.doctor.verify import run_side
    from trainwright.errors import Stopped, TrainwrightError

    try:
        with watched(what, _SECONDS, context.end):
            run_side(side, _STEPS, context.stopping, is_shown=False)
    except CheckEnded as broken:
        return broken.finding
    except Stopped:
        raise
    except TrainwrightError as error:
        return _failed(what, str(error))
    return None


def _compared(context: CheckContext, reference: ComparedRun, name: str) -> tuple[str, list[Finding]]:
    from trainwright.doctor.comparison import TOLERANCES, Comparison
    from trainwright.errors import Stopped, TrainwrightError

    started, what = time.monotonic(), f"two ranks of {name}"
    try:
        side = _side(context, name, 2)
    except Stopped:
        raise
    except TrainwrightError as error:
        return f"{name}: not possible", [_failed(what, str(error))]
    if (finding := _run(context, side, what)) is not None:
        return f"{name}: failed", [finding]
    compared = Comparison.of_runs((reference.name, side.name), (reference.run, side.run), TOLERANCES["no"])
    fact = f"{name}: {span(time.monotonic() - started)}, with {_STEPS} steps whose losses differ by at most "
    fact += f"{compared.worst('loss'):.0e} from those of one process"
    if compared.is_same:
        return fact, []
    return fact, [_differs(what, compared.verdict())]


def _failed(what: str, message: str) -> Finding:
    from trainwright.doctor.diagnosis.explain import explain

    cause = explain(message).cause
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith(("log:", "- "))]
    said = next((line for line in reversed(lines) if "Error" in line.partition(":")[0]), lines[0] if lines else message)
    return Finding(
        Severity.BROKEN,
        f"{what} cannot train: {said[:300]}",
        cause.error.cause if cause is not None else "runs with this strategy will fail in the same way",
        "; ".join(cause.error.fixes)
        if cause is not None
        else "the first line of the error says which part is missing; "
        "choose another parallel.strategy until it is fixed",
    )


def _differs(what: str, verdict: str) -> Finding:
    return Finding(
        Severity.BROKEN,
        f"{what} has other losses than one process: {verdict}",
        "gradients are exchanged or summed incorrectly on this machine",
        "see the checks kernels and links; choose another parallel.strategy, and report it with the output of --json",
    )
