"""Measure everything that the chosen metrics need, by all ranks together.

Two attacks try to recover forgotten knowledge: a little training on some of it, and quantization. Both change the given
model, and measure the mean probability of the answers of the forget set.

The files of an evaluation on a benchmark, which its processes share:

work/found.json, other.json   the model, and the one that --reference-model names
work/tokens/, …               what is to be measured
work/found/                   the findings of the ranks
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainwright import __version__
from trainwright.data.stream.batch import Batch, collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.inference.answering import AnswerSettings, Stage, answer_all, map_over_ranks
from trainwright.inference.evaluation.metrics import EvaluationRequest
from trainwright.inference.finding import UnloadedModel, find_model
from trainwright.inference.generation import Answer, Sampling, stop_of
from trainwright.inference.loading import DTYPES, Loaded, check_fits, load
from trainwright.inference.scoring import TokenScores, score, score_standardized
from trainwright.machine.machine import Machine
from trainwright.machine.vendors import look_up_processor
from trainwright.models.causal_lm import CausalLM
from trainwright.models.load import load_tokenizer, read_max_positions
from trainwright.models.quantization import Quantization, quantize
from trainwright.parallel.world import World
from trainwright.tasks.unlearn.benchmarks import KEY, Benchmark, find_benchmark
from trainwright.tasks.unlearn.evaluation import statistics
from trainwright.tasks.unlearn.evaluation.items import (
    NEW_TOKENS,
    PARAPHRASE,
    STOP_TEXTS,
    WRONG,
    Item,
    ItemEncoder,
    ItemPrompts,
    ItemSequences,
    ItemSet,
    read_sets,
)
from trainwright.tasks.unlearn.evaluation.registry import METRICS, OPTIONS, describe_missing, select_sets, select_usual
from trainwright.tasks.unlearn.evaluation.report import (
    BenchmarkReport,
    Findings,
    Floats,
    group_by_set,
    mean_loss,
    read_reference,
)
from trainwright.utils.installation import require
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_clause, format_plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class MeasurementJob:
    """What to measure, in a model's tokens; written once, read by every rank.

    Attributes:
        prompts: of every set that is answered.
        attacked: additional findings for items (``Findings.attacked``), and ``sets``, for which sets.
    """

    sets: dict[str, ItemSet]
    sequences: ItemSequences
    prompts: dict[str, ItemPrompts] = field(default_factory=dict)
    attacked: tuple[str, ...] = ()
    attacked_sets: tuple[str, ...] = ()

    def save(self, directory: Path) -> None:
        """Write the object to a file or directory."""
        self.sequences.save(directory)
        about = {
            "sets": {name: asdict(entry) for name, entry in self.sets.items()},
            "prompts": {name: asdict(entry) for name, entry in self.prompts.items()},
            "attacked": self.attacked,
            "attacked_sets": self.attacked_sets,
        }
        (directory / "work.json").write_text(json.dumps(about), encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> MeasurementJob:
        """Read what ``save`` wrote."""
        about = json.loads((directory / "work.json").read_text(encoding="utf-8"))
        prompts = {name: ItemPrompts(**entry) for name, entry in about["prompts"].items()}
        sets = {name: _set(entry) for name, entry in about["sets"].items()}
        attack_arguments = tuple(about["attacked"]), tuple(about["attacked_sets"])
        return cls(sets, ItemSequences.open(directory), prompts, *attack_arguments)


def _set(values: Mapping[str, Any]) -> ItemSet:
    items = [Item(**{**item, "wrong": tuple(item["wrong"])}) for item in values["items"]]
    return ItemSet(**{**values, "items": items})


def score_sequences(loaded: Loaded, work: MeasurementJob, world: World, stage: Stage) -> list[TokenScores]:
    """Return the log-likelihoods of every sequence. Every rank must call."""
    dataset = work.sequences.dataset
    return score(loaded.lm, dataset, world, done=stage("scoring", len(dataset)))


def answer_sets(
    loaded: Loaded, work: MeasurementJob, longest: int, world: World, stage: Stage, rows: int | None = None
) -> dict[str, list[Answer]]:
    """Return the model's answers to every prompt, by set. Every rank must call.

    Args:
        longest: new tokens of an answer in a chat.
        rows: prompts per batch.
    """
    answers = {}
    for name, prompts in work.prompts.items():
        style = work.sets[name].style
        stop = stop_of(loaded.lm.model, loaded.tokenizer, chat=style == "chat").add_texts(STOP_TEXTS.get(style, ()))
        settings = AnswerSettings(Sampling(max_new_tokens=NEW_TOKENS.get(style, longest)), stop, rows)
        progress = stage(f"answers of {name}", len(prompts.tokens))
        with loaded.lm.open_for_generation() as model:
            answers[name] = answer_all(model, loaded.tokenizer, prompts.tokens, settings, world, progress)
    return answers


def measure_attack_items(
    loaded: Loaded, work: MeasurementJob, other: list[TokenScores] | None, world: World, stage: Stage
) -> dict[str, dict[str, Sequence[Floats]]]:
    """Return what membership inference needs in addition to likelihoods, by kind and set. Every rank must call.

    Args:
        other: another model's scores of all sequences, if needed.
    """
    sequences = work.sequences
    items: dict[str, dict[str, Sequence[Floats]]] = {}
    text = sequences.text_targets
    numbers_by_set = {name: sequences.select_set(name) for name in work.attacked_sets}
    numbers = [number for mine in numbers_by_set.values() for number in mine]
    if "standardized" in work.attacked:
        part = sequences.dataset.part(numbers)
        scores = score_standardized(loaded.lm, part, world, done=stage("Min-K++", len(part)))
        standardized_scores = dict(zip(numbers, scores, strict=True))
        items["standardized"] = {
            name: [standardized_scores[number][: text[number]].astype(np.float64) for number in mine]
            for name, mine in numbers_by_set.items()
        }
    if "gradient_norm" in work.attacked:
        norms = dict(zip(numbers, measure_gradient_norms(loaded.lm, sequences, numbers, world, stage), strict=True))
        items["gradient_norm"] = {name: [np.array([norms[n]]) for n in mine] for name, mine in numbers_by_set.items()}
    if other is not None:
        items["other_losses"] = {
            name: [other[number].losses[: text[number]].astype(np.float64) for number in mine]
            for name, mine in numbers_by_set.items()
        }
    return items


def measure_gradient_norms(
    lm: CausalLM, sequences: ItemSequences, numbers: Sequence[int], world: World, stage: Stage
) -> list[float]:
    """Return the L2 norm of each sequence's gradient by all weights (arXiv 2402.17012). Every rank must call."""
    dataset = sequences.dataset.part(numbers)
    weights = [parameter for parameter in lm.parameters() if parameter.is_floating_point()]

    def work(indices: Sequence[int]) -> list[float]:
        return [_measure_gradient_norm(lm, dataset, index, weights, world.device) for index in indices]

    for weight in weights:
        weight.requires_grad_(True)
    try:
        costs = [float(dataset.length(index)) for index in range(len(dataset))]
        progress = stage("gradients", len(dataset))
        return map_over_ranks(world, [[index] for index in range(len(dataset))], costs, work, progress)
    finally:
        for weight in weights:
            weight.requires_grad_(False)
            weight.grad = None


def _measure_gradient_norm(
    lm: CausalLM, dataset: Any, index: int, weights: Sequence[torch.nn.Parameter], device: torch.device
) -> float:
    count = dataset.target_count(index)
    batch = collate_examples(dataset, [index], packed=lm.packed).to(device)
    with torch.enable_grad():
        loss = lm(batch) / count
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    return float(torch.stack(squares).sum().sqrt())


_TRUTH_RATIOS = {"forget": statistics.compute_forget_truth_ratio, "retain": statistics.compute_utility_truth_ratio}


def select_few_sequences(
    benchmark: Benchmark, tokenizer: PreTrainedTokenizerBase, *, rows: int, positions: int | None, key: str
) -> ItemSequences | None:
    """Return the first ``rows`` of the forget and of the retain set, to measure truth ratios of repeatedly.

    Args:
        positions: of the model; longer rows are truncated.
        key: the recipe's key that names the benchmark, for messages.

    Returns:
        None if the rows have no wrong answers.

    Raises:
        RequestError: a row is invalid, with its file and line.
    """
    sets = read_sets(benchmark, _TRUTH_RATIOS, rows, key)
    few_sets = {name: items for name, items in sets.items() if items.has_wrong}
    return ItemEncoder(tokenizer, positions, key).sequences(few_sets, (PARAPHRASE, WRONG)) if few_sets else None


def measure_truth_ratios(
    sequences: ItemSequences, lm: CausalLM, world: World, *, together: bool = False
) -> dict[str, float]:
    """Return ``forget_truth_ratio`` and ``retain_truth_ratio``, the same on every rank. Every rank must call.

    Args:
        together: whether every rank scores everything, because each pass of the model involves all ranks.
    """
    scores = group_by_set(sequences, score(lm, sequences.dataset, world, together=together))
    return {f"{name}_truth_ratio": _TRUTH_RATIOS[name](of_set.truth_ratios) for name, of_set in scores.items()}


KINDS: tuple[Quantization, ...] = ("int8", "nf4")
_SHOWN = 0.25  # fraction of the forget set that relearning trains on
_LOOKS = 4  # number of measurements on the rest
_TOKENS = {"cpu": 2048, "gpu": 16384}  # per pass
_OF_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


@dataclass(frozen=True)
class Relearning:
    """Settings of relearning: ``steps`` of AdamW on all the rows that it trains on."""

    steps: int = 20
    learning_rate: float = 1e-5


def measure_quantized_probability(loaded: Loaded, forget: TokenDataset, kind: Quantization, world: World) -> float:
    """Return the probability after quantizing every linear layer (Zhang et al., arXiv 2410.16454). Every rank must
    call.

    Raises:
        RequestError: the model is already quantized.
    """
    model = loaded.lm.model
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        raise RequestError("--metrics quantisation: the model is already quantized")
    quantize(model, kind, double=False, keep=_OF_ADAPTERS)
    loaded.lm.to(world.device)
    return measure_probability(loaded, forget, world)


def measure_relearning(loaded: Loaded, forget: TokenDataset, how: Relearning, world: World) -> dict[str, float]:
    """Return the probability of the rest of the forget set, by the number of steps, while training on its first quarter
    again (Hu et al., arXiv 2406.13356).

    Every rank must call; each takes every step, so all have the same model.

    Raises:
        RequestError: the forget set has no rows to leave out.
    """
    if len(forget) < 2:
        raise RequestError(
            "--metrics relearning: the forget set has only one row, but some must be held out to measure"
        )
    train_count = max(1, int(len(forget) * _SHOWN))
    rest = forget.part(range(train_count, len(forget)))
    batches = _build_batches(forget.part(range(train_count)), world)
    weights = [parameter for parameter in loaded.lm.parameters() if parameter.is_floating_point()]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=how.learning_rate, weight_decay=0.0)
    looks = {round(how.steps * look / _LOOKS) for look in range(_LOOKS + 1)}
    probabilities = {}
    for step in range(how.steps + 1):
        if step in looks:
            probabilities[str(step)] = measure_probability(loaded, rest, world)
        if step < how.steps:
            _step(loaded, batches, optimizer)
    return probabilities


def _step(loaded: Loaded, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> None:
    targets = sum(len(batch.targets) for batch in batches)
    with torch.enable_grad():
        for batch in batches:
            (loaded.lm(batch) / targets).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _build_batches(dataset: TokenDataset, world: World) -> list[Batch]:
    """Return all examples in batches, as large as the tokens of a pass allow."""
    parts: list[list[int]] = [[]]
    for index in range(len(dataset)):
        longest = max(map(dataset.length, [*parts[-1], index]))
        if parts[-1] and longest * (len(parts[-1]) + 1) > _TOKENS[look_up_processor(world.device.type)]:
            parts.append([])
        parts[-1].append(index)
    return [collate_examples(dataset, part, packed=False).to(world.device) for part in parts]


def measure_probability(loaded: Loaded, dataset: TokenDataset, world: World) -> float:
    """Return the mean probability per token of the targets of every document. Every rank must call."""
    return float(np.mean([np.exp(-mean_loss(token_scores)) for token_scores in score(loaded.lm, dataset, world)]))


_MODEL, _OTHER = "found.json", "other.json"


def prepare(request: EvaluationRequest, machine: Machine, processes: int, work: Path) -> None:
    """Find the model and the benchmark, and write what every rank needs to ``work``. Called once.

    Raises:
        RequestError: one of them, a row or a metric is invalid.
        MachineError: the model does not fit this machine, or a library that a metric needs is not installed.
    """
    model = _set_tokenizer(find_model(request.model, request.adapter, request.checkpoint), request)
    check_fits(model, DTYPES[request.dtype], machine, processes)
    model.save(work / _MODEL)
    benchmark = choose_benchmark(request, model)
    if request.reference_log is not None:
        read_reference(expand_user_path(request.reference_log))
    sets = read_sets(benchmark, benchmark.sets, request.limit, KEY)
    names = choose_metrics(request, sets)
    tokenizer = load_tokenizer(model.section)
    if request.reference_model is not None:
        reference_model = _set_tokenizer(find_model(request.reference_model), request)
        if load_tokenizer(reference_model.section).get_vocab() != tokenizer.get_vocab():
            raise RequestError(f"--reference-model: {reference_model.origin} has another tokenizer than {model.origin}")
        reference_model.save(work / _OTHER)
    positions = read_max_positions(model.section)
    limits = [limit for limit in (request.max_length, positions) if limit is not None]
    encoder = ItemEncoder(tokenizer, min(limits, default=None), KEY)
    job = _build_job(names, sets, encoder, positions)
    job.save(work)
    about = {"benchmark": benchmark.name, "metrics": names, "cut": encoder.cut, "notes": encoder.notes}
    (work / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _set_tokenizer(model: UnloadedModel, request: EvaluationRequest) -> UnloadedModel:
    if request.tokenizer is None or model.recipe is not None:  # a run has its own
        return model
    return replace(model, section=model.section.model_copy(update={"tokenizer": request.tokenizer}))


def choose_benchmark(request: EvaluationRequest, model: UnloadedModel) -> Benchmark:
    """Return the benchmark that is named, or else the one that the run was trained on."""
    if request.benchmark is not None:
        return find_benchmark(request.benchmark)
    data = None if model.recipe is None else model.recipe.data
    if (name := getattr(data, "benchmark", None)) is not None:
        return find_benchmark(name)
    sources = {name: getattr(data, name, None) for name in ("forget", "retain", "holdout")}
    if sources["forget"] is None:
        raise RequestError(f"{KEY}: {model.origin} is not an unlearning run with its own rows; pass a benchmark")
    return find_benchmark("files@" + ",".join(f"{name}={source}" for name, source in sources.items() if source))


def choose_metrics(request: EvaluationRequest, sets: dict[str, ItemSet]) -> list[str]:
    """Return the metrics that are asked for, or those that lack nothing. Raises RequestError if one lacks its data."""
    options = {"--reference-log": request.reference_log, "--reference-model": request.reference_model}
    names = list(request.metrics) if request.explicit else select_usual(sets, options)
    for name in names:
        if (why := describe_missing(name, sets, options)) is not None:
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


def _build_job(
    names: list[str], sets: dict[str, ItemSet], encoder: ItemEncoder, positions: int | None
) -> MeasurementJob:
    sets_by_metric = {name: select_sets(name, list(sets)) for name in names}
    scored_sets = [part for part in sets if any(part in sets_by_metric[name] for name in names)]
    needs_wrong = any(METRICS[name].wrong for name in names) or not set(scored_sets).isdisjoint(OPTIONS)
    kinds = (PARAPHRASE, WRONG) if needs_wrong else ()
    sequences = encoder.sequences({name: sets[name] for name in scored_sets}, kinds)
    text_sets = [part for part in sets if any(METRICS[name].answers and part in sets_by_metric[name] for name in names)]
    text_sets = [part for part in text_sets if all(item.prompt for item in sets[part].items)]
    prompts = {name: encoder.prompts(sets[name], positions) for name in text_sets}
    attacks = [name for name in names if METRICS[name].attacked is not None]
    attack_kinds = tuple(dict.fromkeys(str(METRICS[name].attacked) for name in attacks))
    return MeasurementJob(sets, sequences, prompts, attack_kinds, tuple(sets_by_metric[attacks[0]]) if attacks else ())


def work_on(request: EvaluationRequest, work: Path, world: World, stage: Stage) -> None:
    """Measure this rank's part; rank 0 writes the result to ``work``. Every rank must call."""
    job, about = MeasurementJob.open(work), json.loads((work / "about.json").read_text(encoding="utf-8"))
    model, dtype = UnloadedModel.open(work / _MODEL), DTYPES[request.dtype]
    other_scores = None
    if (work / _OTHER).is_file():
        other_scores = score_sequences(load(UnloadedModel.open(work / _OTHER), dtype, world.device), job, world, stage)
    loaded_model = load(model, dtype, world.device)
    scores = score_sequences(loaded_model, job, world, stage)
    answers = answer_sets(loaded_model, job, request.max_new_tokens, world, stage, request.batch_size)
    attack_data = measure_attack_items(loaded_model, job, other_scores, world, stage)
    findings = Findings(
        job.sets,
        group_by_set(job.sequences, scores),
        {name: [answer.text.strip() for answer in entry] for name, entry in answers.items()},
        {name: entry.references for name, entry in job.prompts.items()},
        attack_data,
        None if request.reference_log is None else read_reference(expand_user_path(request.reference_log)),
    )
    after = {
        name: _measure_attack(name, request, model, loaded_model, job, world)
        for name in about["metrics"]
        if METRICS[name].attack
    }
    if world.is_main:
        values = {name: after[name] if name in after else METRICS[name].compute(findings) for name in about["metrics"]}
        unfinished_count = sum(not answer.complete for entry in answers.values() for answer in entry)
        top = {"trainwright": __version__, "model": model.origin, "benchmark": about["benchmark"]}
        report = BenchmarkReport.of(
            findings, values, top, request.settings, _list_notes(about, findings, unfinished_count, request)
        )
        report.save(work / "report.json")


def report_of(request: EvaluationRequest, work: Path) -> BenchmarkReport:
    """Return the report of the results in ``work``."""
    return BenchmarkReport.open(work / "report.json")


def _measure_attack(
    name: str, request: EvaluationRequest, model: UnloadedModel, loaded: Loaded, job: MeasurementJob, world: World
) -> dict[str, float]:
    """Return the metrics of an attack; each attack gets its own copy of the model."""
    forget = job.sequences.dataset.part(job.sequences.select_set("forget"))
    if name == "relearning":
        how = Relearning(request.relearning_steps, request.relearning_rate)
        return measure_relearning(load(model, torch.float32, world.device), forget, how, world)
    return {
        kind: measure_quantized_probability(load(model, DTYPES[request.dtype], world.device), forget, kind, world)
        for kind in KINDS
    }


def _list_notes(about: dict[str, Any], findings: Findings, unfinished: int, request: EvaluationRequest) -> list[str]:
    notes = list(about["notes"])
    needs_wrong = any(METRICS[name].wrong for name in about["metrics"])
    for name in findings.scores if needs_wrong else ():
        bare = sum(not item.wrong for item in findings.sets[name].items)
        if 0 < bare < len(findings.sets[name].items):
            notes.append(
                f"of {name} not all rows have wrong answers (perturbed_answer), {bare:,} lack them, so none are used"
            )
    if about["cut"]:
        notes.append(f"{format_plural(about['cut'], 'text')} truncated to the maximum length")
    if unfinished:
        cut = format_clause(unfinished, "answer", "were cut")
        notes.append(f"{cut} at the limit, in a chat of {format_plural(request.max_new_tokens, 'token')}")
    reference = None if findings.reference is None else findings.reference.truth_ratios
    if reference is not None and "forget_quality" in about["metrics"]:
        rows = len(findings.scores["forget"].answers)
        if len(reference) != rows:
            notes.append(
                f"the reference's log has {len(reference):,} rows of the forget set, but this evaluation has {rows:,}"
            )
    return notes
