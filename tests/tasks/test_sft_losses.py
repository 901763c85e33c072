"""Losses of fine-tuning beside the plain one, against plain transformers and by their formulas."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.support.runs import Runs, column, difference
from tests.support.training import ALONE, built
from trainwright.tasks.sft.task import SupervisedFineTuning, dft


def test_dft_weighs_every_target_by_its_probability_and_the_weight_has_no_gradient() -> None:
    losses = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    total = dft(losses, None)  # type: ignore[arg-type]
    total.backward()
    expected = (-losses.detach()).exp()
    assert float(total) == pytest.approx(float((expected * losses.detach()).sum()), rel=1e-15)
    assert losses.grad is not None and losses.grad.tolist() == pytest.approx(expected.tolist(), rel=1e-15)


@pytest.mark.parametrize("packed", [True, False])
def test_the_gradient_of_a_batch_is_that_of_plain_transformers(tmp_path: Path, packed: bool) -> None:
    layout = [] if packed else ["data.pack_length=null"]
    settings = ["task=sft", "sft.loss=dft", "model.dropout=0", f"logging.run_directory={tmp_path}", *layout]
    _, task, _ = built(ALONE, settings)
    assert isinstance(task, SupervisedFineTuning)
    (micro, *_) = task.stream.global_batch(0).micro_batches
    plain = copy.deepcopy(task._lm.model)
    plain.set_attn_implementation("sdpa")
    task.loss(task.module, micro, ALONE.device).total.backward()
    dataset, total = task.stream.dataset, torch.zeros(())
    for example in micro.examples:
        ids, targets = (torch.tensor(part) for part in dataset.sequence(dataset.sequences(example)[0]))
        logits = plain(ids[None].long()).logits[0, :-1]
        logs = logits.log_softmax(-1).gather(1, ids[1:, None].long())[targets[1:]]
        total = total - (logs.detach().exp() * logs).sum()
    total.backward()
    for (name, own), (_, other) in zip(task._lm.model.named_parameters(), plain.named_parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert torch.allclose(own.grad, other.grad, rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("how", [("parallel.num_processes=2",), ("parallel.num_processes=2", "parallel.strategy=fsdp")])
def test_losses_of_dft_do_not_depend_on_the_processes(runs: Runs, how: tuple[str, ...]) -> None:
    settings = ("sft.loss=dft", "train.max_steps=6", "checkpoint.every=null", "model.dropout=0")
    one = runs.trained("parallel.num_processes=1", *settings)
    assert difference(column(runs.trained(*how, *settings), "loss"), column(one, "loss")) < 1e-5
