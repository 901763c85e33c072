"""Commands and options of other tools are answered with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from tests.support.commands import trainwright
from trainwright.cli.command import COMMANDS
from trainwright.cli.main import app


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("finetune", "finetune: trainwright has no such command; did you mean trainwright train RECIPE?"),
        ("fine_tune", "did you mean trainwright train RECIPE?"),
        ("run.yaml", "did you mean trainwright train run.yaml?"),
        ("trian", "did you mean trainwright train?"),
        ("train --learning-rate 1e-4 run.yaml", "has no such option; write optimizer.learning_rate=1e-4"),
        ("train --lr=1e-4 run.yaml", "write optimizer.learning_rate=1e-4"),
        ("train --optimizer.learning_rate=1e-4", "write optimizer.learning_rate=1e-4"),
        ("plan --batch-size 4 run.yaml", "write train.global_batch_size=4 (per GPU: train.micro_batch_size)"),
        ("recipe show run.yaml --epochs 3", "write train.epochs=3"),
        ("submit run.yaml --max_steps", "write train.max_steps=VALUE"),
        ("train --gradient-checkpointing run.yaml", "write train.activation_checkpointing=full"),
        ("train --lr_scheduler_type wsd run.yaml", "write optimizer.schedule=warmup_stable_decay"),
        ("train --report-to wandb run.yaml", "write 'logging.observers=[wandb]'"),
        ("train --bf16 false run.yaml", "write train.mixed_precision=VALUE"),
        ("train --config run.yaml", "the recipe is the first argument: "),
        ("train --num_processes 0 run.yaml", "'--num-processes': Input should be greater than or equal to 1"),
        ("train --num_machines 2 --machine_rank 1 run.yaml", "--nodes 2 needs --rendezvous host:port"),
        (
            "train --main_process_port 29501 run.yaml",
            "on one machine, where a free port is chosen; on several, pass --re",
        ),
        ("train --mixed_precision fp32 run.yaml", "write train.mixed_precision=no"),
        ("train --dynamo_backend inductor run.yaml", "write train.compile=true"),
        ("train --dynamo_backend no run.yaml", "write train.compile=VALUE"),
        ("train --gpu_ids 0,1 run.yaml", "CUDA_VISIBLE_DEVICES=0,1 before the command"),
        ("train --use_fsdp run.yaml", "write parallel.strategy=fsdp"),
        ("train --config_file a.yaml run.yaml", "an Accelerate file: --accelerate-config FILE"),
        ("launch --main_process_port 29501 script.py", "on one machine, where a free port is chosen"),
        ("launch --use_deepspeed script.py", "is set in an Accelerate file, --config-file FILE"),
        ("launch --gpu-idds 0 script.py", "(Possible options: --gpu-ids)"),
        ("train --num-workers 2 run.yaml", "leave it out: rows are tokenized once"),
        ("train --resumee", "(Possible options: --resume)"),
        ("nothing-like-it", "choose from train, under, submit"),
        ("recipe chek run.yaml", "did you mean trainwright recipe check?"),
        ("recipe translate axolotl.yaml", "did you mean trainwright recipe from FILE?"),
        ("recipe validate run.yaml", "did you mean trainwright recipe check RECIPE?"),
        ("recipe train run.yaml", "trainwright recipe has no such command; choose from "),
        ("data prepar rows.jsonl", "did you mean trainwright data prepare?"),
        ("data preprocess rows.jsonl", "did you mean trainwright data prepare?"),
        ("data finetune run.yaml", "did you mean trainwright train RECIPE?"),
        ("machine calibrat", "did you mean trainwright machine calibrate?"),
        ("--lr 3", "--lr: trainwright has no such option; write trainwright train RECIPE optimizer.learning_rate=3"),
        ("--lr=3 run.yaml", "write trainwright train RECIPE optimizer.learning_rate=3"),
        ("--config run.yaml", "the recipe is the first argument: trainwright train RECIPE"),
        ("--vers", "(Possible options: --version)"),
        ("watch --lr 3", "No such option: --lr"),
        ("train run.yaml ~train.max_steps", "~ is Hydra's"),
    ],
)
def test_words_of_other_tools_end_with_2_and_an_answer(tmp_path: Path, words: str, answer: str) -> None:
    (tmp_path / "run.yaml").write_text("task: sft\nmodel: {name: some/model}\ndata: {train: pydoc}\n")
    result = trainwright(*words.split(), cwd=tmp_path)
    assert result.returncode == 2
    assert answer in result.stderr
    assert "Traceback" not in result.stderr


def test_commands_of_other_tools_lead_to_commands_of_ours() -> None:
    group: Any = get_command(app)
    for ours, theirs in COMMANDS.items():
        first, *rest = ours.split()
        assert first.startswith("--") or first in group.commands, ours
        inside = getattr(group.commands.get(first), "commands", {})
        assert not inside or not rest or rest[0] in inside, ours
        assert not set(theirs.split()) & set(group.commands), theirs
