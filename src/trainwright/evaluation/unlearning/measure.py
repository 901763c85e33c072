"""Measure everything that the chosen metrics need, by all ranks together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.data.stream.batch import collate_examples
from trainwright.evaluation.unlearning.encoding import NEW_TOKENS, STOP_TEXTS, ItemPrompts, ItemSequences
from trainwright.evaluation.unlearning.findings import Floats
from trainwright.evaluation.unlearning.items import Item, ItemSet
from trainwright.inference.answering import answer_all
from trainwright.inference.batching import Stage, over_ranks
from trainwright.inference.generation import Answer
from trainwright.inference.loading import Loaded
from trainwright.inference.sampling import Sampling
from trainwright.inference.scoring import TokenScores, score, score_standardized
from trainwright.inference.stopping import stop_of
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.world import World


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
    found = {}
    for name, prompts in work.prompts.items():
        style = work.sets[name].style
        stop = stop_of(loaded.lm.model, loaded.tokenizer, chat=style == "chat").with_texts(STOP_TEXTS.get(style, ()))
        sampling = Sampling(max_new_tokens=NEW_TOKENS.get(style, longest))
        done = stage(f"answers of {name}", len(prompts.tokens))
        with loaded.lm.for_generation() as model:
            found[name] = answer_all(
                model, loaded.tokenizer, prompts.tokens, sampling, stop, world, rows=rows, done=done
            )
    return found


def attack_items(
    loaded: Loaded, work: MeasurementJob, other: list[TokenScores] | None, world: World, stage: Stage
) -> dict[str, dict[str, Sequence[Floats]]]:
    """Return what membership inference needs in addition to likelihoods, by kind and set. Every rank must call.

    Args:
        other: another model's scores of all sequences, if needed.
    """
    sequences = work.sequences
    found: dict[str, dict[str, Sequence[Floats]]] = {}
    text = sequences.text_targets
    places = {name: sequences.of_set(name) for name in work.attacked_sets}
    if "standardized" in work.attacked:
        numbers = [number for each in places.values() for number in each]
        part = sequences.dataset.part(numbers)
        each = dict(
            zip(numbers, score_standardized(loaded.lm, part, world, done=stage("Min-K++", len(part))), strict=True)
        )
        found["standardized"] = {
            name: [each[number][: text[number]].astype(np.float64) for number in mine] for name, mine in places.items()
        }
    if "gradient_norm" in work.attacked:
        numbers = [number for each in places.values() for number in each]
        norms = dict(zip(numbers, gradient_norms(loaded.lm, sequences, numbers, world, stage), strict=True))
        found["gradient_norm"] = {name: [np.array([norms[n]]) for n in mine] for name, mine in places.items()}
    if other is not None:
        found["other_losses"] = {
            name: [other[number].losses[: text[number]].astype(np.float64) for number in mine]
            for name, mine in places.items()
        }
    return found


def gradient_norms(
    lm: CausalLM, sequences: ItemSequences, numbers: Sequence[int], world: World, stage: Stage
) -> list[float]:
    """Return the L2 norm of the gradient of each sequence's mean loss by all weights (arXiv 2402.17012). Every rank
    must call.
    """
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
