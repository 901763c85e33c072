"""Likelihoods of given texts: those of the plain model, however they are batched and on how many processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inference.models import TOKENIZER, model_of
from tests.support.runs import ROWS, Runs
from trainwright.data.rows.chat_encoding import ChatEncoder
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.inference.evaluation.measure import ValidationQuestions
from trainwright.inference.generation import Stop
from trainwright.inference.scoring import score
from trainwright.models.causal_lm import CausalLM
from trainwright.parallel.world import World, join, leave
from trainwright.recipe.schema import EvaluateSection
from trainwright.utils.heartbeat import Use

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def rows_as_tokens() -> TokenDataset:
    """Questions and answers of 40 to 200 tokens, of which the answers are targets."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[:24]]
    turns = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]
    return TokenDataset.from_examples(ChatEncoder(TOKENIZER).encode(turns), "rows")


def test_answers_and_their_metrics_are_progress_one_by_one(marks: list[Use]) -> None:
    section = EvaluateSection(metrics=["exact_match", "f1"], generation_limit=3, max_new_tokens=5)
    questions = ValidationQuestions(section, rows_as_tokens(), 10_000, TOKENIZER)
    found = questions.metrics(model_of("llama", positions=512), Stop(frozenset()), ALONE, together=False)
    assert set(found.metrics) == {"exact_match", "f1"}
    assert len(marks) == 5 + 1 + 2 * 3, "tokens of all, their batch, and each answer by each metric"


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("tokens", [1, 600, 100_000])
def test_scores_are_those_of_the_whole_logits_row_by_row(kind: str, tokens: int) -> None:
    model, dataset = model_of(kind, positions=512), rows_as_tokens()
    found = score(CausalLM(model, packed=False), dataset, ALONE, tokens=tokens)
    assert len(found) == len(dataset)
    for index, scores in enumerate(found):
        ids, targets = (torch.tensor(np.asarray(part)) for part in dataset.sequence(index))
        with torch.no_grad():
            logits = model(ids[None].long()).logits[0, :-1].double().log_softmax(-1)
        wanted = targets[1:]
        expected = -logits.gather(1, ids[1:, None].long())[:, 0][wanted]
        assert np.allclose(scores.losses, expected, atol=2e-5)
        assert scores.correct.tolist() == (logits.argmax(-1) == ids[1:])[wanted].tolist()


def test_packed_is_as_padded() -> None:
    dataset = rows_as_tokens()
    padded = score(CausalLM(model_of("llama", positions=512), packed=False), dataset, ALONE)
    packed = score(CausalLM(model_of("llama", positions=512), packed=True), dataset, ALONE)
    assert all(np.allclose(a.losses, b.losses, atol=1e-5) for a, b in zip(padded, packed, strict=True))


def test_a_model_in_training_is_scored_without_dropout_and_goes_on_in_training() -> None:
    dataset = rows_as_tokens()
    lm = CausalLM(model_of("llama", positions=512), packed=False)
    expected = score(lm, dataset, ALONE)
    lm.config.attention_dropout = 0.5
    for part in lm.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = 0.5
    found = score(lm.train(), dataset, ALONE)
    assert all(np.array_equal(a.losses, b.losses) for a, b in zip(found, expected, strict=True))
    assert lm.training


def test_several_processes_give_what_one_gives(runs: Runs, tmp_path: Path) -> None:
    for processes in (1, 3):
        runs.function("tests.inference.test_scoring:in_process", str(tmp_path / str(processes)), processes=processes)
    one, three = (json.loads((tmp_path / f"{processes}").read_text()) for processes in (1, 3))
    assert len(one) == len(three) == 24
    for (mine, right), (others, others_right) in zip(one, three, strict=True):
        assert right == others_right
        assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(mine, others, strict=True))


def in_process(file: str) -> None:
    """What each process does: score all rows together, and see that all ranks have the same."""
    world = join("cpu")
    found = score(CausalLM(model_of("llama", positions=512), packed=False), rows_as_tokens(), world, tokens=700)
    plain = [(scores.losses.tolist(), scores.correct.tolist()) for scores in found]
    assert all(other == plain for other in world.gather(plain))
    if world.is_main:
        Path(file).write_text(json.dumps(plain))
    leave()
