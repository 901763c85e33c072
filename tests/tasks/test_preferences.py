"""The losses of preference tuning of a batch, against log-probabilities of plain transformers, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.support.preferences import pairs, write
from tests.support.training import ALONE, built
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.engine.forward_only import ForwardOnly
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


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_the_loss_of_a_batch_is_that_of_its_answers_one_by_one(begun: Begun, loss: str, packed: bool) -> None:
    layout = () if packed else ("data.pack_length=null", "train.micro_batch_size=3")
    task, strategy, reference = begun(f"dpo.loss={loss}", *layout)
    batch = task.stream.global_batch(0)
    assert max(len(micro.examples) for micro in batch.micro_batches) > 1, "answers of several prompts stand together"
    task.before_passes(ForwardOnly(strategy), batch, validation=False)
    found = sum(float(task.loss(task.module, micro, ALONE.device).total.detach()) for micro in batch.micro_batches)
    dataset = task.stream.dataset
    examples = [example for micro in batch.micro_batches for example in micro.examples]
    expected = 0.0
    for example in examples:
        ratios = [log_ratio(task, reference, dataset, sequence) for sequence in dataset.sequences(example)]
        (chosen, of_chosen), (rejected, of_rejected) = ratios
        if loss == "dpo":
            expected -= float(logsigmoid(torch.tensor(BETA * (chosen - rejected))))
        elif loss == "ipo":
            expected += (chosen / of_chosen - rejected / of_rejected - 1 / (2 * BETA)) ** 2
        else:
            gains = BETA * (chosen - task._divergence), -BETA * (rejected - task._divergence)
            expected += sum(1 - 1 / (1 + float(np.exp(-gain))) for gain in gains)
    assert found == pytest.approx(expected, rel=1e-4)


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
