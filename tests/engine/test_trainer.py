"""The training loop in one process: gradients, clipping, loss scales, modes, and what a checkpoint keeps of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import ALONE, trainer_of
from trainwright.engine.checkpoints.checkpoint import Checkpoint
from trainwright.engine.evaluate import _compute_batch_statistics, evaluate
from trainwright.engine.events import Record
from trainwright.engine.out_of_memory import MemoryShortage
from trainwright.engine.policies.base import (
    RankReport,
    RewindRequested,
    StepGradients,
    StepPolicy,
    TrainingContext,
    WrongNumbers,
)
from trainwright.engine.progress import EVALUATION, LossStatistics, Noise, TrainingProgress
from trainwright.engine.task import ForwardOnly
from trainwright.engine.trainer import Trainer
from trainwright.errors import RequestError
from trainwright.faults.hangs.judge import choose_limit
from trainwright.machine.allocator import ResidentMemory
from trainwright.parallel.world import World
from trainwright.utils import heartbeat
from trainwright.utils.heartbeat import Heartbeat, read

FEW = ("data.validation=4", "data.limit=40", "train.max_steps=4", "checkpoint.every=null")
NO_DROPOUT = "model.dropout=0"

Make = Callable[..., tuple[Trainer, list[Record]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A trainer of `tiny` with some overrides in training mode, and the list that its events go to."""
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    directories = (tmp_path / f"run-{number}" for number in itertools.count())

    def made(*overrides: str) -> tuple[Trainer, list[Record]]:
        trainer, seen = trainer_of(ALONE, [*FEW, *overrides], next(directories))
        trainer.strategy.module.train()
        return trainer, seen

    return made


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_the_allocator_keeps_is_bounded_before_every_block_and_after_its_backward_pass(
    make: Make, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    calls: list[ResidentMemory] = []
    bound = ResidentMemory.bound
    monkeypatch.setattr(ResidentMemory, "bound", lambda self: calls.append(self) or bound(self))
    rows = "train.global_batch_size=4", "train.micro_batch_size=2", "data.pack_length=null"
    trainer, _ = make(*rows, f"train.activation_checkpointing={recompute}")
    trainer._step()
    assert len(calls) == 2 * 2 * 2 + 1  # of two micro-batches through two blocks, and after the passes


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What the parameters have as gradients now."""
    return {name: p.grad.clone() for name, p in trainer.strategy.module.named_parameters() if p.grad is not None}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.strategy.parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=1e-6, msg=name)


def test_long_work_reports_its_progress_where_no_collective_does(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = make("train.micro_batch_size=1", "data.validation=4", "train.global_batch_size=2")
    task, strategy = trainer.task, trainer.strategy
    assert task.validation is not None and len(task.validation) > 1
    monkeypatch.setattr(heartbeat, "_own", own := Heartbeat(tmp_path / "beat"))
    phases: list[str] = []
    own.changed = lambda use, step, micro_batch: phases.append(use.phase)
    batch = task.stream.global_batch(0)
    ForwardOnly(strategy)([batch, batch], lambda module, micro: None)
    assert phases == ["start"] * 2 * len(batch.micro_batches)
    phases.clear()
    evaluate(task, strategy, lambda shortage: False, lambda reason: None, trainer.events, 0)
    assert phases == ["start"] * len(task.validation)


def test_shares_of_ranks_add_up_to_the_batch_with_zero_weight_passes(make: Make) -> None:
    trainer, _ = make("train.micro_batch_size=1", "data.pack_length=null", "train.global_batch_size=4")
    batch = trainer.task.stream.global_batch(0)
    assert len(batch.micro_batches) == 4
    whole, norm, _ = trainer._passes.forward_backward(1, batch)
    expected = gradients(trainer)
    losses: list[float] = []
    trainer.strategy.discard_gradients()
    for rank in range(3):  # four micro-batches: two of the three ranks have one that counts nothing
        trainer.strategy.world = World(rank, 3, rank, 3, torch.device("cpu"))
        found, _, _ = trainer._passes.forward_backward(1, batch)
        losses += found.tolist()
    assert sum(losses) == pytest.approx(float(whole.sum()), rel=1e-5)
    assert_close(gradients(trainer), expected)
    assert float(norm) == pytest.approx(float(torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()))


def test_the_gradient_of_a_batch_is_that_of_the_mean_over_its_targets_however_it_is_divided(make: Make) -> None:
    found = []
    for rows in (4, 2, 1):
        trainer, _ = make(
            NO_DROPOUT, "data.pack_length=null", "train.global_batch_size=4", f"train.micro_batch_size={rows}"
        )
        batch = trainer.task.stream.global_batch(0)
        assert len(batch.micro_batches) == 4 // rows
        assert len({micro.weight for micro in batch.micro_batches}) == len(batch.micro_batches)
        trainer._passes.forward_backward(1, batch)
        found.append(gradients(trainer))
    for other in found[1:]:
        assert_close(other, found[0])
    trainer.task.stream._rows = 4
    (micro,) = trainer.task.stream.global_batch(0).micro_batches
    trainer.strategy.discard_gradients()
    (trainer.task.loss(trainer.strategy.module, micro, ALONE.device).total / micro.targets).backward()
    assert_close(gradients(trainer), found[0])


@pytest.mark.slow
def test_statistics_of_a_step_count_every_micro_batch_once(make: Make, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"Line {n} of some."}) + "\n" for n in range(60)))
    trainer, _ = make(
        "task=pretrain",
        f"data.train={text}",
        "data.limit=null",
        "data.pack_length=null",
        "data.max_length=16",
        "train.micro_batch_size=1",
        "train.global_batch_size=4",
        NO_DROPOUT,
    )
    batch = trainer.task.stream.global_batch(0)
    _, _, whole = trainer._passes.forward_backward(1, batch)
    sums = [0.0, 0.0]
    for rank in range(3):
        trainer.strategy.world = World(rank, 3, rank, 3, torch.device("cpu"))
        sums = [
            a + b for a, b in zip(sums, trainer._passes.forward_backward(1, batch).statistics.tolist(), strict=True)
        ]
    assert sums == pytest.approx(whole.tolist())


def test_shares_of_ranks_add_up_to_the_metrics_of_the_validation_split(make: Make) -> None:
    trainer, _ = make(NO_DROPOUT, "data.validation=7", "train.micro_batch_size=1", "data.pack_length=null")
    validation = trainer.task.validation
    assert validation is not None

    def sums() -> torch.Tensor:
        parts = [
            part
            for step in range(len(validation))
            for part in _compute_batch_statistics(trainer.task, trainer.strategy, step)
        ]
        return torch.stack(parts).sum(0)

    trainer.strategy.module.eval()
    whole, found = sums(), []
    for rank in range(3):  # seven rows: two of the three ranks keep the other company in a pass
        trainer.strategy.world = World(rank, 3, rank, 3, torch.device("cpu"))
        found.append(sums())
    torch.testing.assert_close(torch.stack(found).sum(0), whole)


def test_a_run_that_is_resumed_sees_the_same_rows_at_the_same_rates(make: Make) -> None:
    settings = ("optimizer.warmup_steps=2", "train.max_steps=7", "model.dropout=0.1")
    whole, expected = make(*settings)
    for _ in range(5):
        whole._step()
    first, _ = make(*settings)
    for _ in range(2):
        first._step()
    first._checkpointing.save(required=True)
    resumed, seen = make(*settings)
    resumed.resume(Checkpoint.open(first.checkpoints.path(2)))
    for _ in range(3):
        resumed._step()
    for name in ("step", "loss", "grad_norm", "learning_rate", "tokens", "target_tokens"):
        found = [event[name] for event in seen if event["event"] == "step"]
        assert found == [event[name] for event in expected if event["event"] == "step"][2:], name
    assert_close(weights(resumed), weights(whole), rtol=0)


def test_dropout_is_drawn_anew_for_every_step_and_micro_batch(make: Make) -> None:
    trainer, _ = make("model.dropout=0.5", "train.micro_batch_size=1", "data.pack_length=null")
    batch = trainer.task.stream.global_batch(0)
    first, second = batch.micro_batches[:2]

    def loss(step: int, index: int) -> float:
        only = replace(batch, micro_batches=(replace(first, index=index),))
        found, _, _ = trainer._passes.forward_backward(step, only)
        trainer.strategy.discard_gradients()
        return float(found[0])

    assert loss(1, first.index) == loss(1, first.index)
    assert len({loss(1, first.index), loss(2, first.index), loss(1, second.index)}) == 3


@pytest.mark.slow
def test_validation_has_no_dropout_and_training_goes_on_with_it(make: Make) -> None:
    found = []
    for dropout in ("model.dropout=0.5", NO_DROPOUT):
        trainer, seen = make(dropout)
        measured(trainer)
        assert all(part.training for part in trainer.strategy.module.modules())
        assert trainer.progress.best_loss is None, "what is measured before the first step is no best"
        found.append(last(seen, "evaluate")["metrics"]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_run_drops_out_from_its_first_step_though_nothing_is_measured_before(make: Make, tmp_path: Path) -> None:
    losses = []
    for dropout in ("model.dropout=0.5", NO_DROPOUT):
        trainer, seen = make(dropout, "data.validation=null", "train.max_steps=1", "evaluate.every=null")
        trainer.strategy.module.eval()  # as models are loaded
        assert trainer.run(tmp_path / "final")
        losses.append(last(seen, "step")["loss"])
    assert abs(losses[0] - losses[1]) > 1e-4


def measured(trainer: Trainer) -> bool:
    """Measure now; whether it is a new best."""
    trainer.progress.pending = EVALUATION
    return trainer._evaluate()


def last(seen: list[Record], kind: str) -> Record:
    return [event for event in seen if event["event"] == kind][-1]


def test_every_validation_row_is_measured(make: Make) -> None:
    # Seven rows in batches of four: the last batch is smaller.
    trainer, seen = make(NO_DROPOUT, "data.validation=7", "train.global_batch_size=4", "data.pack_length=null")
    validation = trainer.task.validation
    assert validation is not None
    assert len(validation) == 2
    measured(trainer)
    total = weight = 0.0
    trainer.strategy.module.eval()
    with torch.no_grad():
        for example in range(len(validation.dataset)):
            (micro,) = validation.divide([example]).micro_batches
            loss, _, targets = trainer.task.statistics(trainer.strategy.module, micro, ALONE.device).tolist()
            total, weight = total + loss, weight + targets
    assert last(seen, "evaluate")["metrics"]["loss"] == pytest.approx(total / weight, rel=1e-5)


def test_only_a_lower_loss_is_a_new_best(make: Make) -> None:
    trainer, _ = make(NO_DROPOUT)
    trainer.progress.step = 1
    assert measured(trainer) is True
    assert trainer.progress.best_step == 1
    trainer.progress.step, trainer.progress.best_loss = 2, 0.0
    assert measured(trainer) is False
    assert trainer.progress.best_step == 1
    trainer.progress.best_loss = 1e9
    assert measured(trainer) is True
    assert trainer.progress.best_step == 2


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_clipped_by_their_norm_whatever_the_loss_scale(make: Make, scale: float) -> None:
    limit = 0.05
    settings = (NO_DROPOUT, f"optimizer.max_grad_norm={limit}", "optimizer.warmup_steps=0", "optimizer.weight_decay=0")
    # The update of AdamW's first step is the same for gradients of any size, but for eps.
    trainer, seen = make(*settings, "optimizer.eps=1.0")
    before = weights(trainer)
    plain, _ = make(*settings)
    _, norm, _ = plain._passes.forward_backward(1, plain.task.stream.global_batch(0))
    grads = gradients(plain)
    trainer.progress.loss_scale = scale
    trainer._step()
    assert norm > limit
    assert last(seen, "step")["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    rate = trainer.schedule(1)
    for name, tensor in trainer.strategy.parameters():
        clipped = grads[name] * (limit / norm)
        expected = before[name] - rate * clipped / (clipped.abs() + 1.0)
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=2e-7, msg=name)


def test_gradients_below_the_limit_stay_as_they_are(make: Make) -> None:
    trainer, _ = make(NO_DROPOUT)
    assert trainer._clip_factor(0.5) == 1.0
    assert trainer._clip_factor(4.0) == 0.25
    assert make(NO_DROPOUT, "optimizer.max_grad_norm=null")[0]._clip_factor(4.0) == 1.0


class _SkipsTheFirst(StepPolicy):
    def skips(self, step: int, found: StepGradients) -> bool:
        return step == 1


def test_a_skipped_spike_leaves_no_gradient_behind(make: Make) -> None:
    trainer, plain = (make(NO_DROPOUT, "train.skip_loss_spikes=6")[0] for _ in range(2))
    trainer._policies.append(_SkipsTheFirst(trainer.training))
    before = weights(trainer)
    trainer._step()
    assert_close(weights(trainer), before)
    trainer._step()
    plain.progress.step = 1
    plain._step()
    assert_close(weights(trainer), weights(plain))


def test_the_batch_of_a_spike_can_be_left_out(make: Make) -> None:
    trainer, seen = make(NO_DROPOUT, "train.skip_loss_spikes=6", "faults.on_loss_spike=rewind")
    trainer.progress.losses = LossStatistics(seen=100, mean=1.0, variance=1e-4)
    before = weights(trainer)
    with pytest.raises(RewindRequested, match="at step 1, mean of previous steps 1") as requested:
        trainer._step()
    trainer._rewind(requested.value)
    fault = last(seen, "fault")
    assert fault["kind"] == "loss_spike"
    assert fault["action"] == "there is no checkpoint yet; the global batch of step 1 is left out"
    trainer._step()
    assert trainer.progress.step == 1 and not [event for event in seen if event["event"] == "step"]
    assert_close(weights(trainer), before)
    stopping = make(NO_DROPOUT, "train.skip_loss_spikes=6", "faults.on_loss_spike=stop")[0]
    stopping.progress.losses = LossStatistics(seen=100, mean=1.0, variance=1e-4)
    with pytest.raises(WrongNumbers, match="training stopped: loss"):
        stopping._step()


def test_a_rewind_has_a_phase_of_its_own_in_which_it_verifies_and_loads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = make()
    trainer._step()
    trainer._checkpointing.save(required=True)
    monkeypatch.setattr(heartbeat, "_own", own := Heartbeat(tmp_path / "beat"))
    heartbeat.begin_phase("optimizer", 2)
    phases: list[str] = []
    own.changed = lambda use, step, micro_batch: phases.append(use.phase)
    trainer._rewind(RewindRequested("non_finite", 0, "step 2 is not finite"))
    assert trainer.progress.step == 1 and set(phases) == {"rewinding"}
    beat = read(tmp_path / "beat")
    assert beat is not None and choose_limit(beat) == 7200.0


class _CountsLate(StepPolicy):
    def metrics(self, step: int, found: StepGradients) -> dict[str, float]:
        if step > 2:
            self.state["seen"] = self.state.get("seen", 0.0) + 1
        return {"seen": self.state.get("seen", 0.0)}


def test_a_rewind_takes_back_state_that_no_checkpoint_has_yet(make: Make) -> None:
    plain, seen = make()
    trainer = replace(plain, policies=[_CountsLate])
    state = trainer.task.state
    state["of the task"] = 1.0
    trainer._step()
    trainer._step()
    trainer._checkpointing.save(required=True)
    trainer._step()
    state |= {"of the task": 2.0, "late": 3.0}
    trainer._rewind(RewindRequested("non_finite", 0, "step 4 is not finite", leave_out=False))
    assert trainer.progress.step == 2 and state == {"of the task": 1.0}
    trainer._step()
    assert last(seen, "step")["metrics"] == {"seen": 1.0}


def test_a_policy_that_a_checkpoint_does_not_know_begins_as_it_was_made(make: Make) -> None:
    class Begins(StepPolicy):
        def __init__(self, training: TrainingContext) -> None:
            super().__init__(training)
            self.state = {"begun": 1.0}

    trainer = make()[0]
    trainer._step()
    trainer._checkpointing.save(required=True)
    trainer = replace(trainer, policies=[Begins])
    found = trainer.find_newest_checkpoint()
    assert found is not None
    trainer.resume(found)
    assert trainer._policies[-1].state == {"begun": 1.0}


def test_policies_of_one_name_are_refused_as_one_would_have_the_others_state(make: Make) -> None:
    trainer = make()[0]
    with pytest.raises(RequestError, match=r"step_policies: .*test_trainer:_CountsLate and .* have the same name"):
        replace(trainer, policies=[_CountsLate, _CountsLate])


def test_a_step_that_is_done_again_in_halves_has_no_gradient_of_the_first_try(make: Make) -> None:
    trainer, seen = make(NO_DROPOUT, "data.pack_length=null", "train.micro_batch_size=4", "train.global_batch_size=4")
    batch = trainer.task.stream.global_batch(0)
    trainer._passes.forward_backward(1, batch)
    expected = gradients(trainer)
    short = [RankReport(loss=0.0, stop=0.0, memory=0.0, out_of_memory=1.0, save=0.0)]
    shortage = MemoryShortage("memory ran out elsewhere")
    divided = trainer._halving.again(1, StepGradients(batch, 0.0, 0.0, short, [], shortage=shortage))
    assert divided is not None
    assert last(seen, "fault")["kind"] == "out_of_memory"
    assert divided.rows == 2
    trainer._passes.forward_backward(1, divided)
    assert_close(gradients(trainer), expected)


def test_memory_that_runs_out_in_a_recorded_pass_is_no_corruption(make: Make) -> None:
    overrides = (NO_DROPOUT, "data.pack_length=null", "faults.replay_every=2")
    undisturbed, expected = make(*overrides)
    trainer, seen = make(*overrides)
    pending = ["no memory"]

    def fail_once(block: torch.nn.Module, arguments: object) -> None:
        if pending and trainer.progress.step == 1:
            raise torch.OutOfMemoryError(pending.pop())

    trainer.task.blocks()[1].register_forward_pre_hook(fail_once)
    for _ in range(2):
        undisturbed._step()
        trainer._step()
        assert last(seen, "step")["loss"] == pytest.approx(last(expected, "step")["loss"], rel=1e-6)
    assert [event["kind"] for event in seen if event["event"] == "fault"] == ["out_of_memory"] and not pending
    assert trainer._replay._outputs == []


def test_a_run_that_goes_on_after_the_step_that_ends_it_takes_no_other(make: Make, tmp_path: Path) -> None:
    trainer, seen = make()
    trainer.stop_after = 2
    for _ in range(2):  # at last as after a restart
        assert not trainer.run(tmp_path / "final")
        assert [event["step"] for event in seen if event["event"] == "step"] == [1, 2]
        assert last(seen, "finish")["status"] == "stopped"


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_the_first_rows_of_a_step_are_collated_in_the_step_before_and_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, micro_batch_size: int
) -> None:
    trainer, _ = make(f"train.micro_batch_size={micro_batch_size}", "data.pack_length=null")
    dataset, steps = trainer.task.stream.dataset, len(trainer.task.stream)
    own, read_rows = type(dataset).sequence, []

    def recorded(dataset: Any, sequence: int) -> Any:
        read_rows.append((trainer.progress.step, sequence))
        return own(dataset, sequence)

    monkeypatch.setattr(type(dataset), "sequence", recorded)
    trainer.run_steps(steps)
    shares = [trainer.task.stream.global_batch(step).select_for_rank(0, 1) for step in range(steps)]
    expected = []
    for step, share in enumerate(shares):
        for number, micro in enumerate(share):
            read_in = step if number or not step else step - 1
            expected += [(read_in, sequence) for example in micro.examples for sequence in dataset.sequences(example)]
    assert read_rows == expected


def test_measuring_the_noise_of_gradients_changes_none(make: Make) -> None:
    measured, plain = make(NO_DROPOUT, "train.gradient_noise_scale=1")[0], make(NO_DROPOUT)[0]
    for _ in range(2):
        measured._step()
        plain._step()
    assert measured.progress.noise != Noise()
    assert_close(weights(measured), weights(plain))


def test_a_checkpoint_that_was_requested_while_the_noise_of_gradients_is_measured_is_written(
    make: Make, tmp_path: Path
) -> None:
    trainer, seen = make(NO_DROPOUT, "train.gradient_noise_scale=1", "checkpoint.every=1000")
    requests = iter([True])
    trainer.save_requested = lambda: next(requests, False)
    trainer.run(tmp_path / "final")
    assert [event["step"] for event in seen if event["event"] == "checkpoint"] == [1, 4]


def test_a_checkpoint_has_all_that_a_run_has_learnt_of_itself(make: Make) -> None:
    trainer, _ = make(NO_DROPOUT)
    trainer._step()
    trainer.training.progress = TrainingProgress(
        step=3,
        tokens=7,
        target_tokens=5,
        best_loss=2.5,
        best_step=2,
        loss_scale=8.0,
        steps_at_scale=4,
        losses=LossStatistics(60, 2.0, 0.1, 1),
        noise=Noise(1.5, 2.5),
    )
    saved = json.loads(json.dumps(asdict(trainer.progress)))
    assert TrainingProgress.of(saved) == trainer.progress
    trainer.task.state["alpha"] = 0.25
    trainer._checkpointing.save(required=True)
    other, _ = make(NO_DROPOUT)
    other.resume(Checkpoint.open(trainer.checkpoints.path(3)))
    assert other.progress == trainer.progress
    assert other.task.state == {"alpha": 0.25}
