"""The losses of some steps of preference tuning under TRL, started by bench/dpo_vs_trl.py in TRL's own environment.

Usage: python trl_dpo.py JOB.json, where the job names the model, the rows (texts: prompt with the generation prompt,
and the answers), the loss and the settings, and the file for the result: the loss of every step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    kto = job["loss"] == "kto"
    common = {
        "output_dir": job["output_directory"],
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "max_steps": job["steps"],
        "per_device_train_batch_size": len(rows),
        "max_length": job["max_length"],
        "beta": job["beta"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    if kto:
        config: Any = KTOConfig(**common, train_sampling_strategy="sequential")
        trainer: Any = ObservedKTO(model=job["model"], args=config, train_dataset=Dataset.from_list(rows))
    else:
        config = DPOConfig(**common, loss_type={"dpo": "sigmoid", "ipo": "ipo"}[job["loss"]])
        trainer = ObservedDPO(model=job["model"], args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    Path(job["result"]).write_text(json.dumps([float(loss) for loss in trainer.losses]))


class Observed:
    """Keeps each step's loss without TRL's logging."""

    losses: list[torch.Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.__dict__.setdefault("losses", []).append(loss.detach().clone())
        return loss


class ObservedDPO(Observed, DPOTrainer):
    pass


class ObservedKTO(Observed, KTOTrainer):
    pass


if __name__ == "__main__":
    main()
