"""An evaluation on a benchmark, independent of its processes.

work/found.json, other.json   the model, and the one that --reference-model names
work/tokens/, …               what is to be measured
work/found/                   the findings of the ranks
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainwright import __version__
from trainwright.errors import RequestError
from trainwright.inference.answering import Stage
from trainwright.inference.evaluation.metrics import EvaluationRequest
from trainwright.inference.finding import UnloadedModel, find_model
from trainwright.inference.loading import DTYPES, Loaded, check_fits, load
from trainwright.machine.machine import Machine
from trainwright.models.load import load_tokenizer, max_positions
from trainwright.parallel.world import World
from trainwright.tasks.unlearn.benchmarks import KEY, Benchmark, find_benchmark
from trainwright.tasks.unlearn.evaluation import measure
from trainwright.tasks.unlearn.evaluation.items import PARAPHRASE, WRONG, ItemEncoder, ItemSet, read_sets
from trainwright.tasks.unlearn.evaluation.measure import MeasurementJob, Relearning
from trainwright.tasks.unlearn.evaluation.registry import METRICS, OPTIONS, missing, sets_of, usual
from trainwright.tasks.unlearn.evaluation.report import BenchmarkReport, Findings, by_set, read_reference
from trainwright.utils.installation import require
from trainwright.utils.paths import user_path
from trainwright.utils.text import plural, they

_MODEL, _OTHER = "found.json", "other.json"


def prepare(request: EvaluationRequest, machine: Machine, processes: int, work: Path) -> None:
    """Find the model and the benchmark, and write what every rank needs to ``work``. Called once.

    Raises:
        RequestError: one of them, a row or a metric is invalid.
        MachineError: the model does not fit this machine, or a library that a metric needs is not installed.
    """
    model = _tokenized(find_model(request.model, request.adapter, request.checkpoint), request)
    check_fits(model, DTYPES[request.dtype], machine, processes)
    model.save(work / _MODEL)
    benchmark = benchmark_of(request, model)
    if request.reference_log is not None:
        read_reference(user_path(request.reference_log))
    sets = read_sets(benchmark, benchmark.sets, request.limit, KEY)
    names = chosen_metrics(request, sets)
    tokenizer = load_tokenizer(model.section)
    if request.reference_model is not None:
        other = _tokenized(find_model(request.reference_model), request)
        if load_tokenizer(other.section).get_vocab() != tokenizer.get_vocab():
            raise RequestError(f"--reference-model: {other.origin} has another tokenizer than {model.origin}")
        other.save(work / _OTHER)
    encoder = ItemEncoder(tokenizer, _longest(request, model), KEY)
    job = _job(names, sets, encoder, max_positions(model.section))
    job.save(work)
    about = {"benchmark": benchmark.name, "metrics": names, "cut": encoder.cut, "notes": encoder.notes}
    (work / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _tokenized(model: UnloadedModel, request: EvaluationRequest) -> UnloadedModel:
    if request.tokenizer is None or model.recipe is not None:  # a run has its own
        return model
    return replace(model, section=model.section.model_copy(update={"tokenizer": request.tokenizer}))


def benchmark_of(request: EvaluationRequest, model: UnloadedModel) -> Benchmark:
    """Return the benchmark that is named, or else the one that the run was trained on."""
    if request.benchmark is not None:
        return find_benchmark(request.benchmark)
    data = None if model.recipe is None else model.recipe.data
    if (name := getattr(data, "benchmark", None)) is not None:
        return find_benchmark(name)
    own = {name: getattr(data, name, None) for name in ("forget", "retain", "holdout")}
    if own["forget"] is None:
        raise RequestError(f"{KEY}: {model.origin} is not an unlearning run with its own rows; pass a benchmark")
    return find_benchmark("files@" + ",".join(f"{name}={source}" for name, source in own.items() if source))


def chosen_metrics(request: EvaluationRequest, sets: dict[str, ItemSet]) -> list[str]:
    """Return the metrics that are asked for, or those that lack nothing. Raises RequestError if one lacks its data."""
    options = {"--reference-log": request.reference_log, "--reference-model": request.reference_model}
    names = list(request.metrics) if request.explicit else usual(sets, options)
    for name in names:
        if (why := missing(name, sets, options)) is not None:
            raise RequestError(f"--metrics {name}: {why}")
    if not names:
        raise RequestError(f"{KEY}: no metric applies to its sets ({', '.join(sets)})")
    for option, value in options.items():
        if value is not None and not any(METRICS[name].option == option for name in names):
            raise RequestError(f"{option}: has no effect on the selected metrics")
    if any(METRICS[name].answers for name in names):
        require("rouge_score", "rouge_l")
    if "quantisation" in names:
        require("bitsandbytes", "--metrics quantisation")
    return names


def _job(names: list[str], sets: dict[str, ItemSet], encoder: ItemEncoder, positions: int | None) -> MeasurementJob:
    sets_by_metric = {name: sets_of(name, list(sets)) for name in names}
    scored = [each for each in sets if any(each in sets_by_metric[name] for name in names)]
    weighed = any(METRICS[name].wrong for name in names) or not set(scored).isdisjoint(OPTIONS)
    kinds = (PARAPHRASE, WRONG) if weighed else ()
    sequences = encoder.sequences({name: sets[name] for name in scored}, kinds)
    written = [each for each in sets if any(METRICS[name].answers and each in sets_by_metric[name] for name in names)]
    written = [each for each in written if all(item.prompt for item in sets[each].items)]
    prompts = {name: encoder.prompts(sets[name], positions) for name in written}
    attacks = [name for name in names if METRICS[name].attacked is not None]
    attacked = tuple(dict.fromkeys(str(METRICS[name].attacked) for name in attacks))
    return MeasurementJob(sets, sequences, prompts, attacked, tuple(sets_by_metric[attacks[0]]) if attacks else ())


def work_on(request: EvaluationRequest, work: Path, world: World, stage: Stage) -> None:
    """Measure this rank's part; rank 0 writes the result to ``work``. Every rank must call."""
    job, about = MeasurementJob.open(work), json.loads((work / "about.json").read_text(encoding="utf-8"))
    model, dtype = UnloadedModel.open(work / _MODEL), DTYPES[request.dtype]
    other = None
    if (work / _OTHER).is_file():
        other = measure.score_sequences(load(UnloadedModel.open(work / _OTHER), dtype, world.device), job, world, stage)
    loaded = load(model, dtype, world.device)
    scores = measure.score_sequences(loaded, job, world, stage)
    answers = measure.answer_sets(loaded, job, request.max_new_tokens, world, stage, request.batch_size)
    attacked = measure.attack_items(loaded, job, other, world, stage)
    findings = Findings(
        job.sets,
        by_set(job.sequences, scores),
        {name: [answer.text.strip() for answer in each] for name, each in answers.items()},
        {name: each.references for name, each in job.prompts.items()},
        attacked,
        None if request.reference_log is None else read_reference(user_path(request.reference_log)),
    )
    after = {
        name: _attack(name, request, model, loaded, job, world) for name in about["metrics"] if METRICS[name].attack
    }
    if world.is_main:
        values = {name: after[name] if name in after else METRICS[name].compute(findings) for name in about["metrics"]}
        unfinished = sum(not answer.complete for each in answers.values() for answer in each)
        top = {"trainwright": __version__, "model": model.origin, "benchmark": about["benchmark"]}
        report = BenchmarkReport.of(
            findings, values, top, request.settings, _notes(about, findings, unfinished, request)
        )
        report.save(work / "report.json")


def report_of(request: EvaluationRequest, work: Path) -> BenchmarkReport:
    """Return the report of the results in ``work``."""
    return BenchmarkReport.open(work / "report.json")


def _attack(
    name: str, request: EvaluationRequest, model: UnloadedModel, loaded: Loaded, job: MeasurementJob, world: World
) -> dict[str, float]:
    """Return the metrics of an attack; each attack gets its own copy of the model."""
    forget = job.sequences.dataset.part(job.sequences.of_set("forget"))
    if name == "relearning":
        how = Relearning(request.relearning_steps, request.relearning_rate)
        return measure.relearn(load(model, torch.float32, world.device), forget, how, world)
    return {
        kind: measure.quantized_probability(load(model, DTYPES[request.dtype], world.device), forget, kind, world)
        for kind in measure.KINDS
    }


def _notes(about: dict[str, Any], findings: Findings, unfinished: int, request: EvaluationRequest) -> list[str]:
    notes = list(about["notes"])
    weighed = any(METRICS[name].wrong for name in about["metrics"])
    for name in findings.scores if weighed else ():
        bare = sum(not item.wrong for item in findings.sets[name].items)
        if 0 < bare < len(findings.sets[name].items):
            notes.append(
                f"of {name} not all rows have wrong answers (perturbed_answer), {bare:,} lack them, so none are used"
            )
    if about["cut"]:
        notes.append(f"{plural(about['cut'], 'text')} truncated to the maximum length")
    if unfinished:
        cut = they(unfinished, "answer", "were cut")
        notes.append(f"{cut} at the limit, in a chat of {plural(request.max_new_tokens, 'token')}")
    reference = None if findings.reference is None else findings.reference.truth_ratios
    if reference is not None and "forget_quality" in about["metrics"]:
        here = len(findings.scores["forget"].answers)
        if len(reference) != here:
            notes.append(
                f"the reference's log has {len(reference):,} rows of the forget set, but this evaluation has {here:,}"
            )
    return notes


def _longest(request: EvaluationRequest, model: UnloadedModel) -> int | None:
    return min((each for each in (request.max_length, max_positions(model.section)) if each is not None), default=None)
