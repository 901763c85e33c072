"""What membership inference and attacks look at, against plain computations on the same small model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.inference.evaluation.unlearning.benchmark import write_tofu
from tests.inference.models import TOKENIZER, model_of
from trainwright.inference.loading import Loaded
from trainwright.inference.scoring import score_standardized
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.world import World
from trainwright.tasks.unlearn.benchmarks import find_benchmark
from trainwright.tasks.unlearn.evaluation.items import ItemEncoder, ItemSequences, read_sets
from trainwright.tasks.unlearn.evaluation.measure import (
    Relearning,
    measure_gradient_norms,
    measure_probability,
    measure_quantized_probability,
    measure_relearning,
    measure_truth_ratios,
    select_few_sequences,
)

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def loaded_model() -> Loaded:
    lm = CausalLM(model_of("llama", positions=512), packed=False)
    for parameter in lm.parameters():
        parameter.requires_grad_(False)
    return Loaded(lm.eval(), TOKENIZER, True)


@pytest.fixture
def sequences(tmp_path: Path) -> ItemSequences:
    found = find_benchmark(write_tofu(tmp_path / "rows"))
    sets = read_sets(found, ["forget", "holdout"], None, "--benchmark")
    return ItemEncoder(TOKENIZER, None, "--benchmark").sequences(sets, ())


def whole(sequences: ItemSequences, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a sequence [1, L] and which of its predictions [L - 1] are wanted."""
    ids, flags = (torch.tensor(np.asarray(part)) for part in sequences.dataset.sequence(index))
    return ids[None].long(), flags[1:]


def test_standardized_log_likelihoods(sequences: ItemSequences) -> None:
    found = score_standardized(loaded_model().lm, sequences.dataset, ALONE)
    model = model_of("llama", positions=512).double()
    for index, scores in enumerate(found):
        ids, wanted = whole(sequences, index)
        with torch.no_grad():
            logs = model(ids).logits[0, :-1].log_softmax(-1)
        mean = (logs.exp() * logs).sum(-1)
        deviation = ((logs.exp() * logs**2).sum(-1) - mean**2).sqrt()
        right = logs.gather(1, ids[0, 1:, None])[:, 0]
        assert np.allclose(scores, ((right - mean) / deviation)[wanted], atol=1e-4)


def test_gradient_norms(sequences: ItemSequences) -> None:
    loaded = loaded_model()
    numbers = [2, 0]
    found = measure_gradient_norms(loaded.lm, sequences, numbers, ALONE, lambda label, total: lambda rows: None)
    model = model_of("llama", positions=512).double()
    for number, norm in zip(numbers, found, strict=True):
        ids, wanted = whole(sequences, number)
        model.zero_grad()
        cross_entropy(model(ids).logits[0, :-1][wanted], ids[0, 1:][wanted]).backward()
        squares = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
        assert norm == pytest.approx(squares**0.5, rel=1e-4)
    assert not any(p.requires_grad or p.grad is not None for p in loaded.lm.parameters())


def test_relearning_is_plain_training_on_the_first_quarter(sequences: ItemSequences) -> None:
    dataset = sequences.dataset.part(range(6))
    found = measure_relearning(loaded_model(), dataset, Relearning(2, 1e-3), ALONE)
    assert list(found) == ["0", "1", "2"]  # as often as there are steps
    model = loaded_model()
    assert found["0"] == pytest.approx(measure_probability(model, sequences.dataset.part(range(1, 6)), ALONE))
    plain = model.lm.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    ids, wanted = whole(sequences, 0)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(plain(ids).logits[0, :-1][wanted], ids[0, 1:][wanted]).backward()
        optimizer.step()
    assert found["2"] == pytest.approx(measure_probability(model, sequences.dataset.part(range(1, 6)), ALONE), rel=1e-4)


def test_fewer_bits_move_the_probability_the_more_the_fewer(sequences: ItemSequences) -> None:
    dataset = sequences.dataset
    before = measure_probability(loaded_model(), dataset, ALONE)
    int8, nf4 = (measure_quantized_probability(loaded_model(), dataset, kind, ALONE) for kind in ("int8", "nf4"))
    assert 0 < abs(int8 - before) < abs(nf4 - before)


def test_a_watch_measures_what_an_evaluation_does(tmp_path: Path) -> None:
    name = write_tofu(tmp_path / "rows")
    watched = select_few_sequences(find_benchmark(name), TOKENIZER, rows=2, positions=512, key="data.benchmark")
    assert watched is not None
    found = measure_truth_ratios(watched, loaded_model().lm, ALONE)
    assert set(found) == {"forget_truth_ratio", "retain_truth_ratio"}
    lines = (tmp_path / "rows" / "forget01_perturbed.jsonl").read_text().splitlines()[:2]
    (tmp_path / "rows" / "forget01_perturbed.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert len(json.loads(lines[0])["perturbed_answer"]) == 3
    again = select_few_sequences(find_benchmark(name), TOKENIZER, rows=99, positions=512, key="data.benchmark")
    assert again is not None
    metrics = measure_truth_ratios(again, loaded_model().lm, ALONE)
    assert metrics["forget_truth_ratio"] == pytest.approx(found["forget_truth_ratio"])
