"""How right plans are for architectures that nobody has looked at: memory and time of small runs of every family.

    python bench/plan_architectures.py                     as many families as the product trains, an hour on two cores
    python bench/plan_architectures.py --steps             allocations of one step alone, in one process: seconds each
    python bench/plan_architectures.py --seed 7            other sizes, drawn anew
    python bench/plan_architectures.py --adapters          ten families with LoRA, DoRA, QLoRA and modules_to_save
    python bench/plan_architectures.py --only qwen3        cases with this in their name
    python bench/plan_architectures.py --seconds 600       as many as begin in that time; the next call goes on
    python bench/plan_architectures.py --predict           no runs: what was measured before against today's plan

tests/support/small_models.py makes a small configuration of each causal language model of transformers. A case runs
twice, in padded rows or packs, fp32 or bf16: once with every allocation of torch counted, and once as `trainwright
train` runs it, for the resident memory of its process and the seconds of its steps. Both are compared with
`trainwright plan`, without corrections by earlier runs. Seconds are compared after one factor for all cases, and by
how many pairs of cases they put in the right order.

With ``--steps`` there are no runs: a step forward and backward of the modules that a run makes is compared with its
trace, without weights, optimizer and process, and so without what makes errors smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from support import plan_runs
from support.machine import describe, use_cores
from support.plan_cases import text_rows
from support.results import results_directory
from support.runs import print_table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import trainwright as tw  # noqa: E402
from tests.planning.trace import real_step  # noqa: E402
from tests.support.small_models import ModelSizes, causal_families, small_config  # noqa: E402

RESULTS = results_directory()
STEPS, WARM_UP = 8, 3
MOST_PARAMETERS = 50e6
ADAPTED = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "falcon", "olmo2", "granite", "qwen3_moe")
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"type": "lora", "rank": 16},
    "lora attention": {"type": "lora", "rank": 16, "targets": "attention"},
    "lora and head": {"type": "lora", "rank": 8, "modules_to_save": "head"},
    "dora": {"type": "dora", "rank": 8},
    "qlora": {"type": "lora", "rank": 16, "quantization": "nf4"},
}
# What attention and head are called.
_ATTENTION = {
    "gpt2": ["c_attn"],
    "gpt_neox": ["query_key_value"],
    "falcon": ["query_key_value"],
    "phi3": ["qkv_proj"],
}
_HEAD = {"gpt_neox": ["embed_out"]}


@dataclass(frozen=True)
class Case:
    """``adapter``: as a recipe has it, empty for full training. ``pack``: tokens of a pack, None for padded rows."""

    name: str
    config: dict[str, Any]
    adapter: dict[str, Any]
    precision: str
    recompute: str
    pack: int | None

    def recipe(self, rows: Path) -> dict[str, Any]:
        return {
            "task": "sft",
            "model": {
                "config": self.config,
                "tokenizer": "bytes",
                **({"adapter": self.adapter} if self.adapter else {}),
            },
            "data": {
                "train": str(rows),
                "validation": None,
                "format": "text",
                "max_length": 256,
                "pack_length": self.pack,
            },
            "train": {
                "max_steps": STEPS,
                "global_batch_size": 4,
                "micro_batch_size": 1 if self.pack else 2,
                "mixed_precision": self.precision,
                "activation_checkpointing": self.recompute,
                "compile": False,
            },
            "parallel": {"strategy": "single", "num_processes": 1},
            "checkpoint": {"every": None, "keep_best": False},
        }


def cases(seed: int, adapters: bool) -> Iterator[Case]:
    """Yield the cases that a seed draws."""
    chance = random.Random(seed)
    for family in ADAPTED if adapters else causal_families():
        try:
            config = small_config(family, ModelSizes.drawn(family, seed))
        except Exception as error:  # code of any model
            print(f"   no configuration   {family}: {str(error).strip().splitlines()[0][:90]}", flush=True)
            continue
        for name, adapter in ADAPTERS.items() if adapters else [("full", {})]:
            adapter = _named(family, adapter)
            precision, recompute = chance.choice(["no", "bf16"]), chance.choice(["none", "none", "selective", "full"])
            pack = chance.choice([None, 512])
            shape = f"pack {pack}" if pack else "rows"
            yield Case(
                f"{family}, {name}, {precision}, {recompute}, {shape}", config, adapter, precision, recompute, pack
            )


def _named(family: str, adapter: Mapping[str, Any]) -> dict[str, Any]:
    named = dict(adapter)
    if named.get("targets") == "attention":
        named["targets"] = _ATTENTION.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    if named.get("modules_to_save") == "head":
        named["modules_to_save"] = _HEAD.get(family, ["lm_head"])
    return named


def measure(case: Case, work: Path) -> dict[str, Any]:
    """Return bytes of live tensors and of the process, and seconds of a step."""
    recipe, directory = case.recipe(text_rows((256, 160), work)), work / case.name.replace(", ", "-").replace(" ", "_")
    counted = plan_runs.run(recipe, directory / "counted", work / "cache")
    file = directory / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    run = tw.train(file, f"logging.run_directory={directory / 'timed'}", "logging.observers={}")
    steps = run.columns("step")
    return {
        "name": case.name,
        "phases": counted["ranks"][0]["phases"],
        "resident": max(steps["memory_bytes"]),
        "step_seconds": statistics.median(steps["step_time"][WARM_UP:]),
    }


def planned(case: Case, work: Path) -> dict[str, Any]:
    """Return the same figures as the plan predicts them; the data has been prepared."""
    file = work / "planned.yaml"
    file.write_text(json.dumps(case.recipe(text_rows((256, 160), work))))
    begun = time.monotonic()
    plan = tw.plan(file)
    memory = plan.details.chosen.memory
    return {
        "planned_phases": dict(memory.phases),
        "planned_resident": memory.total,
        "planned_seconds": plan.predicted["step_time"],
        "planning_seconds": time.monotonic() - begun,
        "assumptions": list(plan.details.assumptions),
    }


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """Add the errors of memory, as parts of what was measured; loading and the export are left out."""
    measured = max(size for phase, size in result["phases"].items() if phase not in ("load", "export", "other"))
    predicted = max(size for phase, size in result["planned_phases"].items() if phase != "load")
    resident = result["planned_resident"] / result["resident"] - 1
    return {**result, "allocated_error": predicted / measured - 1, "resident_error": resident}


def step_of(case: Case, measured: int | None) -> dict[str, Any]:
    """Return the bytes of one step of the case's modules, if they are not measured yet, and those of its trace."""
    from trainwright.models.supported import check_packable, check_trainable
    from trainwright.planning.trace.request import Device, TracedModel, TraceRequest, choose_row_kind
    from trainwright.planning.trace.traced import size_model
    from trainwright.recipe.sections.model import AdapterSection

    check_trainable(case.config, "a run", ())
    check_packable(case.config, case.pack)
    lengths = (256, 160, 96) if case.pack else (256, 160)
    batch = real_step.batch_of(lengths, case.pack is not None, int(case.config.get("vocab_size", 512)))
    shape, model = real_step.shape_of(batch), TracedModel.of(case.config)
    if case.adapter:
        model = model.add_adapter(AdapterSection(**case.adapter))
    dtype: Any = "fp32" if case.precision == "no" else "bf16"
    request = TraceRequest(model, Device("cpu", fused=True), dtype, choose_row_kind(shape), case.recompute)
    try:
        measured = measured or real_step.peak_of(real_step.real_model(request), batch)
    except Exception as error:  # code of any model
        raise ValueError(f"the step itself fails: {type(error).__name__}: {str(error)[:80]}") from error
    traced = size_model(request, shape)
    planned = real_step.planned(traced)["step"]
    error = planned / measured - 1
    return {"name": case.name, "step": measured, "planned": planned, "error": error, "untraced": traced.facts.failed}


def report_steps(results: list[dict[str, Any]]) -> None:
    """Print the median and the worst error of traced steps, and the families that have a bound only."""
    sizes = sorted(abs(result["error"]) for result in results if not result["untraced"])
    rank = -(-95 * len(sizes) // 100) - 1
    print(f"{len(sizes)} steps: median {statistics.median(sizes):.3%}, 95 % {sizes[rank]:.2%}, worst {sizes[-1]:.1%}")
    for result in results:
        if result["untraced"]:
            print(f"   a bound   {result['name']}: {result['untraced']}")


def report(results: list[dict[str, Any]]) -> None:
    """Print medians and the worst, and how well the order of the times is predicted."""
    factor = statistics.median(result["step_seconds"] / result["planned_seconds"] for result in results)
    seconds = [factor * result["planned_seconds"] / result["step_seconds"] - 1 for result in results]
    rows = [["", "cases", "median", "95 %", "worst"]]
    for title, errors in (
        ("allocated", [result["allocated_error"] for result in results]),
        ("resident", [result["resident_error"] for result in results]),
        ("seconds, after one factor", seconds),
    ):
        sizes = sorted(map(abs, errors))
        worst = results[max(range(len(errors)), key=lambda i: abs(errors[i]))]["name"]
        rank = -(-95 * len(sizes) // 100) - 1
        figures = [f"{statistics.median(sizes):.2%}", f"{sizes[rank]:.1%}", f"{sizes[-1]:.1%} {worst}"]
        rows.append([title, str(len(sizes)), *figures])
    print_table(rows[0], rows[1:])
    pairs = list(combinations(results, 2))
    in_order = sum(
        (a["step_seconds"] < b["step_seconds"]) == (a["planned_seconds"] < b["planned_seconds"]) for a, b in pairs
    )
    if pairs:
        print(f"pairs of step times in the right order: {in_order / len(pairs):.1%}; factor {factor:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="which sizes are drawn (0)")
    parser.add_argument("--adapters", action="store_true", help="adapters of ten families instead of full training")
    parser.add_argument("--steps", action="store_true", help="no runs: one step of each, in this process")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases with this in their name")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th case only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--predict", action="store_true", help="run nothing; plan what the file of results has")
    parser.add_argument("--output", type=Path, help="file of results")
    arguments = parser.parse_args()
    kind = "adapters" if arguments.adapters else "full"
    kind += "_steps" * arguments.steps
    output = arguments.output or RESULTS / f"plan_architectures_{kind}_{arguments.seed}.json"
    before = json.loads(output.read_text()) if output.exists() else {"cases": []}
    known = {result["name"]: result for result in before["cases"]}
    begun, machine, results = time.monotonic(), describe(use_cores(2)), []
    with tempfile.TemporaryDirectory(prefix="plan-architectures-") as temporary:
        work = Path(temporary)
        os.environ["TRAINWRIGHT_CACHE"] = str(work / "cache")
        for case in list(cases(arguments.seed, arguments.adapters))[:: arguments.every]:
            if not all(word in case.name for word in arguments.only):
                continue
            result = known.get(case.name)
            try:
                again = arguments.steps and (result is not None) == arguments.predict
                if again and time.monotonic() - begun < arguments.seconds:
                    _refuse_large(case)
                    result = known[case.name] = step_of(case, result and result["step"])
                    print(f"{result['error']:+9.3%}  {case.name}", flush=True)
                    _write(output, machine, arguments.seed, known)
                if arguments.steps:
                    results += [] if result is None else [result]
                    continue
                if result is None and not arguments.predict and time.monotonic() - begun < arguments.seconds:
                    _refuse_large(case)
                    result = measure(case, work)
                if result is None:
                    continue
                known[case.name] = judged({**result, **planned(case, work)})
            except (SystemExit, tw.TrainwrightError, ValueError) as error:
                print(f"   did not run   {case.name}: {str(error).strip().splitlines()[0][:120]}", flush=True)
                continue
            results.append(known[case.name])
            memory, resident = (results[-1][key] for key in ("allocated_error", "resident_error"))
            print(
                f"{memory:+8.2%} {resident:+7.1%} {results[-1]['planned_seconds']:7.3f} s planned, "
                f"{results[-1]['step_seconds']:7.3f} s  {case.name}",
                flush=True,
            )
            _write(output, machine, arguments.seed, known)
    if results:
        (report_steps if arguments.steps else report)(results)
    print(f"All numbers: {output}")


def _write(output: Path, machine: Any, seed: int, known: Mapping[str, Any]) -> None:
    found = {"machine": machine, "seed": seed, "cases": list(known.values())}
    output.write_text(json.dumps(found, indent=1) + "\n")


def _refuse_large(case: Case) -> None:
    """Raise ValueError for a configuration that leaves a family's default sizes large, or that cannot be made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(case.config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    except Exception as error:  # code of any model
        raise ValueError(f"{type(error).__name__}: {error}") from error
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main()
