"""Measure everything that the chosen metrics need, by all ranks together.

Two attacks try to recover forgotten knowledge: a little training on some of it, and quantization. Both change the given
model, and measure the mean probability of the answers of the forget set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainwright.data.stream.batch import Batch, collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError
from trainwright.inference.answering import AnswerSettings, Stage, answer_all, over_ranks
from trainwright.inference.generation import Answer, Sampling, stop_of
from trainwright.inference.loading import Loaded
from trainwright.inference.scoring import TokenScores, score, score_standardized
from trainwright.machine.vendors import processor_of
from trainwright.models.causal_lm import CausalLM
from trainwright.models.quantization import Quantization, quantize
from trainwright.parallel.world import World
from trainwright.tasks.unlearn.benchmarks import Benchmark
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
from trainwright.tasks.unlearn.evaluation.report import Floats, by_set, mean_loss

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
            "sets": {name: asdict(each) for name, each in self.sets.items()},
            "prompts": {name: asdict(each) for name, each in self.prompts.items()},
            "attacked": self.attacked,
            "attacked_sets": self.attacked_sets,
        }
        (directory / "work.json").write_text(json.dumps(about), encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> MeasurementJob:
        """Read what ``save`` wrote."""
        about = json.loads((directory / "work.json").read_text(encoding="utf-8"))
        prompts = {name: ItemPrompts(**each) for name, each in about["prompts"].items()}
        sets = {name: _set(each) for name, each in about["sets"].items()}
        attacked = tuple(about["attacked"]), tuple(about["attacked_sets"])
        return cls(sets, ItemSequences.open(directory), prompts, *attacked)


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
        stop = stop_of(loaded.lm.model, loaded.tokenizer, chat=style == "chat").with_texts(STOP_TEXTS.get(style, ()))
        settings = AnswerSettings(Sampling(max_new_tokens=NEW_TOKENS.get(style, longest)), stop, rows)
        done = stage(f"answers of {name}", len(prompts.tokens))
        with loaded.lm.for_generation() as model:
            answers[name] = answer_all(model, loaded.tokenizer, prompts.tokens, settings, world, done)
    return answers


def attack_items(
    loaded: Loaded, work: MeasurementJob, other: list[TokenScores] | None, world: World, stage: Stage
) -> dict[str, dict[str, Sequence[Floats]]]:
    """Return what membership inference needs in addition to likelihoods, by kind and set. Every rank must call.

    Args:
        other: another model's scores of all sequences, if needed.
    """
    sequences = work.sequences
    items: dict[str, dict[str, Sequence[Floats]]] = {}
    text = sequences.text_targets
    places = {name: sequences.of_set(name) for name in work.attacked_sets}
    numbers = [number for mine in places.values() for number in mine]
    if "standardized" in work.attacked:
        part = sequences.dataset.part(numbers)
        scores = score_standardized(loaded.lm, part, world, done=stage("Min-K++", len(part)))
        standardized = dict(zip(numbers, scores, strict=True))
        items["standardized"] = {
            name: [standardized[number][: text[number]].astype(np.float64) for number in mine]
            for name, mine in places.items()
        }
    if "gradient_norm" in work.attacked:
        norms = dict(zip(numbers, gradient_norms(loaded.lm, sequences, numbers, world, stage), strict=True))
        items["gradient_norm"] = {name: [np.array([norms[n]]) for n in mine] for name, mine in places.items()}
    if other is not None:
        items["other_losses"] = {
            name: [other[number].losses[: text[number]].astype(np.float64) for number in mine]
            for name, mine in places.items()
        }
    return items


def gradient_norms(
    lm: CausalLM, sequences: ItemSequences, numbers: Sequence[int], world: World, stage: Stage
) -> list[float]:
    """Return the L2 norm of each sequence's gradient by all weights (arXiv 2402.17012). Every rank must call."""
    dataset = sequences.dataset.part(numbers)
    weights = [parameter for parameter in lm.parameters() if parameter.is_floating_point()]

    def work(indices: Sequence[int]) -> list[float]:
        return [_gradient_norm(lm, dataset, index, weights, world.device) for index in indices]

    for weight in weights:
        weight.requires_grad_(True)
    try:
        costs = [float(dataset.length(index)) for index in range(len(dataset))]
        done = stage("gradients", len(dataset))
        return over_ranks(world, [[index] for index in range(len(dataset))], costs, work, done)
    finally:
        for weight in weights:
            weight.requires_grad_(False)
            weight.grad = None


def _gradient_norm(
    lm: CausalLM, dataset: Any, index: int, weights: Sequence[torch.nn.Parameter], device: torch.device
) -> float:
    count = dataset.target_count(index)
    batch = collate_examples(dataset, [index], packed=lm.packed).to(device)
    with torch.enable_grad():
        loss = lm(batch) / count
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    squares = [gradient.double().square().sum() for gradient in gradients if gradient is not None]
    return float(torch.stack(squares).sum().sqrt())


_TRUTH_RATIOS = {"forget": statistics.forget_truth_ratio, "retain": statistics.utility_truth_ratio}


def few_sequences(
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
    compared = {name: items for name, items in sets.items() if items.has_wrong}
    return ItemEncoder(tokenizer, positions, key).sequences(compared, (PARAPHRASE, WRONG)) if compared else None


def truth_ratio_metrics(
    sequences: ItemSequences, lm: CausalLM, world: World, *, together: bool = False
) -> dict[str, float]:
    """Return ``forget_truth_ratio`` and ``retain_truth_ratio``, the same on every rank. Every rank must call.

    Args:
        together: whether every rank scores everything, because each pass of the model involves all ranks.
    """
    scores = by_set(sequences, score(lm, sequences.dataset, world, together=together))
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


def quantized_probability(loaded: Loaded, forget: TokenDataset, kind: Quantization, world: World) -> float:
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
    return probability(loaded, forget, world)


def relearn(loaded: Loaded, forget: TokenDataset, how: Relearning, world: World) -> dict[str, float]:
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
    shown = max(1, int(len(forget) * _SHOWN))
    rest = forget.part(range(shown, len(forget)))
    batches = _batches(forget.part(range(shown)), world)
    weights = [each for each in loaded.lm.parameters() if each.is_floating_point()]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=how.learning_rate, weight_decay=0.0)
    looks = {round(how.steps * look / _LOOKS) for look in range(_LOOKS + 1)}
    probabilities = {}
    for step in range(how.steps + 1):
        if step in looks:
            probabilities[str(step)] = probability(loaded, rest, world)
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


def _batches(dataset: TokenDataset, world: World) -> list[Batch]:
    """Return all examples in batches, as large as the tokens of a pass allow."""
    parts: list[list[int]] = [[]]
    for index in range(len(dataset)):
        longest = max(map(dataset.length, [*parts[-1], index]))
        if parts[-1] and longest * (len(parts[-1]) + 1) > _TOKENS[processor_of(world.device.type)]:
            parts.append([])
        parts[-1].append(index)
    return [collate_examples(dataset, part, packed=False).to(world.device) for part in parts]


def probability(loaded: Loaded, dataset: TokenDataset, world: World) -> float:
    """Return the mean probability per token of the targets of every document. Every rank must call."""
    return float(np.mean([np.exp(-mean_loss(each)) for each in score(loaded.lm, dataset, world)]))
