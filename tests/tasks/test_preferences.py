"""The losses of preference tuning of a batch, against log-probabilities of plain transformers, in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.preferences import pairs, write
from tests.support.training import ALONE, built
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.task import ForwardOnly
from trainwright.tasks.dpo.task import Mismatched, PreferenceTuning

BETA = 0.3

Begun = Callable[..., tuple[PreferenceTuning, Any, Any]]


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """A task whose reference is known and whose model has moved away from it; its strategy and the reference."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    data = write(tmp_path / "pairs.jsonl", pairs()[:24])

    def made(*overrides: str) -> tuple[PreferenceTuning, Any, Any]:
        settings = ["task=dpo", f"data.train={data}", "data.limit=null", "data.validation=4", f"dpo.beta={BETA}"]
        settings += [
            "model.dropout=0",
            "train.global_batch_size=6",
            "train.max_steps=4",
            f"logging.run_directory={tmp_path}",
        ]
        _, task, strategy = built(ALONE, [*settings, *overrides])
        assert isinstance(task, PreferenceTuning)
        task.begin(ForwardOnly(strategy), strategy.parameters(), lambda message: None)
        reference = copy.deepcopy(task._lm.model)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in task.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return task, strategy, reference

    return made


@torch.no_grad()
def log_probability(model: Any, dataset: TokenDataset, sequence: int) -> tuple[float, int]:
    """Of the targets of a sequence, and how many there are."""
    ids, targets = (torch.tensor(np.asarray(part)) for part in dataset.sequence(sequence))
    logits = model(ids[None].long()).logits[0, :-1].double().log_softmax(-1)
    wanted = targets[1:]
    return float(logits.gather(1, ids[1:, None].long())[wanted].sum()), int(wanted.sum())


def log_ratio(task: PreferenceTuning, reference: Any, dataset: TokenDataset, sequence: int) -> tuple[float, int]:
    model = copy.deepcopy(task._lm.model)
    for each in (model, reference):
        each.set_attn_implementation("sdpa")
    own, count = log_probability(model.eval(), dataset, sequence)
    return own - log_probability(reference, dataset, sequence)[0], count


def softplus(x: float) -> float:
    return float(np.logaddexp(0, x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(mean: float) -> float:
    return mean - math.log1p(-math.exp(mean))


# Losses of a pair by their formulas, from sums and numbers of tokens: of log-ratios, or without a reference of
# log-probabilities.
FORMULAS: dict[tuple[str, ...], Callable[[float, int, float, int], float]] = {
    ("dpo",): lambda c, of_c, r, of_r: softplus(-BETA * (c - r)),
    ("dpo", "dpo.length_normalized=true"): lambda c, of_c, r, of_r: softplus(-BETA * (c / of_c - r / of_r)),
    ("ipo",): lambda c, of_c, r, of_r: (c / of_c - r / of_r - 1 / (2 * BETA)) ** 2,
    ("hinge",): lambda c, of_c, r, of_r: max(0.0, 1 - BETA * (c - r)),
    ("apo_zero",): lambda c, of_c, r, of_r: 1 - sigmoid(BETA * c) + sigmoid(BETA * r),
}
WITHOUT_REFERENCE: dict[tuple[str, ...], Callable[[float, int, float, int], float]] = {
    ("simpo", "dpo.margin=0.2"): lambda c, of_c, r, of_r: softplus(-BETA * (c / of_c - r / of_r) + 0.2),
    ("cpo",): lambda c, of_c, r, of_r: softplus(-BETA * (c - r)) - c / of_c,
    ("orpo",): lambda c, of_c, r, of_r: BETA * softplus(odds(r / of_r) - odds(c / of_c)) - c / of_c,
    ("orpo", "dpo.sft_weight=0.5"): lambda c, of_c, r, of_r: (
        BETA * softplus(odds(r / of_r) - odds(c / of_c)) - 0.5 * c / of_c
    ),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss", [*FORMULAS, *WITHOUT_REFERENCE, ("kto",)], ids=" ".join)
def test_the_loss_of_a_batch_is_that_of_its_answers_one_by_one(
    begun: Begun, loss: tuple[str, ...], packed: bool
) -> None:
    layout = () if packed else ("data.pack_length=null", "train.micro_batch_size=3")
    task, strategy, reference = begun(f"dpo.loss={loss[0]}", *loss[1:], *layout)
    batch = task.stream.global_batch(0)
    assert max(len(micro.examples) for micro in batch.micro_batches) > 1, "answers of several prompts stand together"
    task.before_passes(ForwardOnly(strategy), batch, validation=False)
    found = sum(float(task.loss(task.module, micro, ALONE.device).total.detach()) for micro in batch.micro_batches)
    dataset, model = task.stream.dataset, copy.deepcopy(task._lm.model).eval()
    model.set_attn_implementation("sdpa")
    examples = [example for micro in batch.micro_batches for example in micro.examples]
    expected = 0.0
    for example in examples:
        if loss in WITHOUT_REFERENCE:
            answers = [log_probability(model, dataset, sequence) for sequence in dataset.sequences(example)]
        else:
            answers = [log_ratio(task, reference, dataset, sequence) for sequence in dataset.sequences(example)]
        (chosen, of_chosen), (rejected, of_rejected) = answers
        if loss == ("kto",):
            gains = BETA * (chosen - task._divergence), -BETA * (rejected - task._divergence)
            expected += sum(1 - sigmoid(gain) for gain in gains)
        else:
            formula = {**FORMULAS, **WITHOUT_REFERENCE}[loss]
            expected += formula(chosen, of_chosen, rejected, of_rejected)
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_term_of_the_chosen_answers_is_added_to_any_loss_of_pairs(begun: Begun) -> None:
    losses, terms = [], []
    for weight in ("0", "0.7"):
        task, _, _ = begun("dpo.loss=dpo", f"dpo.sft_weight={weight}")
        (micro, *_) = task.stream.global_batch(0).micro_batches
        found = task.loss(task.module, micro, ALONE.device)
        losses.append(float(found.total.detach()))
        terms.append(task.metrics(found.statistics.tolist()).get("sft_loss"))
        model, dataset = copy.deepcopy(task._lm.model).eval(), task.stream.dataset
    model.set_attn_implementation("sdpa")
    means = [log_probability(model, dataset, dataset.sequences(example)[0]) for example in micro.examples]
    expected = -sum(total / count for total, count in means)
    assert terms[0] is None and terms[1] == pytest.approx(expected / len(micro.examples), rel=1e-4)
    assert losses[1] - losses[0] == pytest.approx(0.7 * expected, rel=1e-4)


def test_the_divergence_of_kto_is_of_answers_to_other_prompts_and_never_below_0(begun: Begun) -> None:
    task, strategy, reference = begun("dpo.loss=kto")
    batch = task.stream.global_batch(0)
    answers = task._mismatched[False]
    others = answers.stream.dataset
    ratios = [
        log_ratio(task, reference, others, sequence)[0]
        for micro in batch.micro_batches
        for example in micro.examples
        for sequence in others.sequences(example)
    ]
    for shift in (-100.0, 100.0):  # as if the reference had held the answers less likely, or more
        answers.reference.sums.setflags(write=True)
        answers.reference.sums[:] += shift
        task.before_passes(ForwardOnly(strategy), batch, validation=False)
        expected = max(0.0, sum(ratios) / len(ratios) - shift)
        assert task._divergence == pytest.approx(expected, rel=1e-5)
        answers.reference.sums[:] -= shift


def test_a_mismatched_document_has_its_prompt_and_the_answer_to_another() -> None:
    prompts, answers = ([1, 2, 3], [1, 5], [1, 2, 3]), ([10, 11], [12], [13, 14, 15])
    examples = [
        (prompt + answer, [False] * len(prompt) + [True] * len(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    mixed = Mismatched.of(TokenDataset.from_examples(examples, "three"), 8, "data.train")
    found = [mixed.sequence(sequence)[0].tolist() for sequence in range(3)]
    assert found == [[1, 2, 3, 12], [1, 5, 13, 14, 15], [1, 2, 3, 12]]


def test_models_with_other_weights_have_references_of_their_own_on_the_same_data(begun: Begun) -> None:
    found = []
    for seed in (0, 3):
        task, _, reference = begun(f"train.seed={seed}", "data.validation=null")
        reference.set_attn_implementation("sdpa")
        dataset, sums = task.stream.dataset, task._answers[False].reference.sums
        for sequence in (0, 7):
            assert sums[sequence] == pytest.approx(log_probability(reference.eval(), dataset, sequence)[0], rel=1e-5)
        found.append((dataset.fingerprint, sums[:8].tolist()))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
