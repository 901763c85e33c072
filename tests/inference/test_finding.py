"""What MODEL may be, and that what is loaded is what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.runs import ON_ROWS, Runs, events
from trainwright.errors import MachineError, RequestError
from trainwright.inference.finding import UnloadedModel, find_model
from trainwright.inference.loading import check_fits, load
from trainwright.machine.machine import Machine

CPU = torch.device("cpu")
SETTINGS = (
    ON_ROWS,
    "data.limit=80",
    "train.max_steps=9",
    "checkpoint.every=3",
    "checkpoint.keep_last=3",
    "evaluate.every=3",
    # Under these the loss falls at first and then rises.
    "optimizer.learning_rate=0.1",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=9",
    "parallel.num_processes=1",
)


@pytest.fixture
def run(runs: Runs) -> Path:
    return runs.trained(*SETTINGS)


def weights(found: UnloadedModel) -> dict[str, torch.Tensor]:
    return dict(load(found, torch.float32, CPU).lm.named_parameters())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_run_is_its_final_model_and_its_last_checkpoint_is_the_same(run: Path) -> None:
    final = weights(find_model(str(run)))
    assert find_model(str(run)).origin == str(run / "final")
    for last in (find_model(str(run), checkpoint="newest"), find_model(str(run / "checkpoints" / "step-00000009"))):
        assert last.recipe is not None and same(weights(last), final)
    assert not same(weights(find_model(str(run), checkpoint="3")), final)
    assert same(weights(find_model(str(run / "final"))), final)


def test_the_best_checkpoint_is_that_of_the_lowest_loss(run: Path) -> None:
    losses = {event["step"]: event["metrics"]["loss"] for event in events(run, "evaluate") if event["step"]}
    best = min(losses, key=lambda step: losses[step])
    assert best < 9, "the last step should not be the best"
    assert find_model(str(run), checkpoint="best").origin.endswith(f"step-{best:08d}")


def test_an_unfinished_run_is_its_best_checkpoint(run: Path, runs: Runs) -> None:
    copy = runs.copied(run)
    shutil.rmtree(copy / "final")
    assert find_model(str(copy)).origin == find_model(str(copy), checkpoint="best").origin
    with pytest.raises(RequestError, match=r"--checkpoint final: .* is not finished"):
        find_model(str(copy), checkpoint="final")


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        ("7", "has no such step; there are checkpoints of step 3, 6, 9"),
        ("last", "choose from final, best, newest or a step"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(run: Path, checkpoint: str, reason: str) -> None:
    with pytest.raises(RequestError, match=rf"--checkpoint {checkpoint}: .*{reason}"):
        find_model(str(run), checkpoint=checkpoint)


def test_a_damaged_checkpoint_is_refused_by_name(run: Path, runs: Runs) -> None:
    copy = runs.copied(run)
    file = next((copy / "checkpoints" / "step-00000003").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RequestError, match=f"{file.name} is damaged"):
        find_model(str(copy), checkpoint="3")


def test_only_a_run_has_checkpoints_to_choose_from(run: Path) -> None:
    with pytest.raises(RequestError, match=r"--checkpoint best: .* is not a run"):
        find_model(str(run / "final"), checkpoint="best")


def test_what_is_found_goes_through_a_file(run: Path, tmp_path: Path) -> None:
    found = find_model(str(run), checkpoint="6")
    found.save(tmp_path / "found.json")
    assert same(weights(UnloadedModel.open(tmp_path / "found.json")), weights(found))


def test_a_model_that_is_not_there_is_told_as_the_argument(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^MODEL: .*nowhere does not exist"):
        load(find_model(str(tmp_path / "nowhere")), torch.float32, CPU)


def test_the_precision_is_the_one_asked_for(run: Path) -> None:
    for found in (find_model(str(run)), find_model(str(run), checkpoint="newest")):
        loaded = load(found, torch.bfloat16, CPU)
        assert {p.dtype for p in loaded.lm.parameters()} == {torch.bfloat16}


def test_a_model_too_large_for_the_machine_is_refused(run: Path) -> None:
    small = Machine("small", "cpu", 2, 300_000, ())
    found = find_model(str(run))
    with pytest.raises(MachineError, match=r"of weights, and .* every process holds a full copy; use --dtype bf16"):
        check_fits(found, torch.float32, small, 1)
    roomy = Machine("roomy", "cpu", 2, 3_000_000, ())
    check_fits(found, torch.float32, roomy, 1)
    with pytest.raises(MachineError, match="use fewer processes"):
        check_fits(found, torch.float32, roomy, 20)


@pytest.fixture
def adapted(runs: Runs) -> Path:
    pytest.importorskip("peft")
    return runs.trained(
        ON_ROWS, "train.max_steps=4", "model.adapter=lora", "optimizer.learning_rate=1e-2", "parallel.num_processes=1"
    )


@pytest.mark.slow
def test_an_adapter_is_found_on_its_base_with_its_run_and_without(adapted: Path, tmp_path: Path) -> None:
    probe = torch.arange(40)[None]

    def logits(found: UnloadedModel) -> torch.Tensor:
        with torch.no_grad():
            return load(found, torch.float32, CPU).lm.model(probe).logits

    expected = logits(find_model(str(adapted)))
    assert find_model(str(adapted)).section.adapter.type == "lora"
    assert torch.equal(logits(find_model(str(adapted / "final"))), expected)
    assert torch.allclose(logits(find_model(str(adapted), checkpoint="newest")), expected, atol=1e-6)
    alone = shutil.copytree(adapted / "final", tmp_path / "adapter")
    with pytest.raises(RequestError, match=r"MODEL|model"):  # its base is a fresh model, which has no place
        logits(find_model(str(alone)))


def test_an_adapter_goes_on_a_plain_model_only(adapted: Path, run: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--adapter: .* already has an adapter"):
        find_model(str(adapted), adapter=str(adapted))
    with pytest.raises(RequestError, match=r"--adapter: .* has no adapter_config.json"):
        find_model(str(run), adapter=str(tmp_path))
    found = find_model(str(run), adapter=str(adapted))
    with pytest.raises(RequestError, match="is an adapter of"):  # other weights than it was trained on
        load(found, torch.float32, CPU)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(RequestError, match="does not name its base model"):
        find_model(str(tmp_path))
