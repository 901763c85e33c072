"""One SFT run under TRL, started by bench/sft_vs_trl.py inside TRL's own virtual environment.

Usage: python trl_sft.py JOB.json, where the job names the model, the rows, the number of steps, the settings
(arguments of SFTConfig) and the file for the result. The result holds, for each optimizer step, the time at
its end, its tokens (padding not counted), its targets and its loss; the caller decides what counts as
steady.

The only changes to TRL are observers: a callback that reads the clock, a wrapper around the collator that
counts, and a subclass that keeps the loss.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    config = SFTConfig(output_dir=job["output_directory"], use_cpu=True, max_steps=job["steps"], **job["settings"])
    clock = StepClock()
    trainer = ObservedTrainer(
        model=job["model"], args=config, train_dataset=read_rows(Path(job["rows"])), callbacks=[clock]
    )
    collator = CountingCollator(trainer.data_collator)
    trainer.data_collator = collator
    trainer.train()
    steps = len(clock.step_ends)
    result = {
        "begin": clock.begin,
        "step_ends": clock.step_ends,
        "tokens": collator.tokens[:steps],
        "padded_tokens": collator.padded_tokens[:steps],
        "targets": collator.targets[:steps],
        "losses": [float(loss) for loss in trainer.losses],
        "peak_rss": peak_rss(),
        "settings": effective_settings(config, trainer),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": transformers.__version__, "trl": trl.__version__},
    }
    Path(job["result"]).write_text(json.dumps(result))


def read_rows(path: Path) -> Dataset:
    """Question and answer as a conversational prompt and completion, of which TRL trains on the latter."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            for row in rows
        ]
    )


class StepClock(TrainerCallback):
    """Wall-clock time at the beginning of the training and at the end of each optimizer step."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.step_ends: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = time.time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step_ends.append(time.time())


class CountingCollator:
    """Counts what each batch holds; one batch is one step, as there is no accumulation here."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens: list[int] = []
        self.padded_tokens: list[int] = []
        self.targets: list[int] = []

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collator(examples)
        self.tokens.append(sum(len(example["input_ids"]) for example in examples))
        self.padded_tokens.append(batch["input_ids"].numel())
        self.targets.append(int((batch["labels"] != -100).sum()))
        return batch


class ObservedTrainer(SFTTrainer):
    """Keeps each step's loss without TRL's logging."""

    losses: list[torch.Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.detach().clone())
        return loss


def peak_rss() -> int:
    """Bytes: the largest resident set of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def effective_settings(config: SFTConfig, trainer: SFTTrainer) -> dict[str, Any]:
    """What TRL made of the request: the settings that matter to speed and memory."""
    names = ["packing", "packing_strategy", "max_length", "bf16", "gradient_checkpointing", "torch_compile"]
    names += ["per_device_train_batch_size", "gradient_accumulation_steps", "loss_type", "pad_to_multiple_of"]
    settings = {name: getattr(config, name) for name in names}
    settings["optim"] = str(config.optim)
    settings["parameters"] = str(next(trainer.model.parameters()).dtype)
    settings["attention"] = trainer.model.config._attn_implementation
    return settings


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
