"""One run of another tool, started by bench/beside_tools.py inside the tool's own environment.

Usage: python tool_run.py JOB.json, where the job names the tool, its configuration, an adapter to begin with, and the
file for the result: the loss of each step, and the sequences of the first one with the positions of their targets.

The only changes to the tool are a wrapper around a micro-batch of transformers' trainer, which observes, and the
adapter's first values, as each generator draws others.
"""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

IGNORED = -100


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    record = Record(job["adapter"])
    observe(record)
    try:
        RUN[job["tool"]](Path(job["file"]))
    finally:
        Path(job["result"]).write_text(json.dumps({"losses": record.losses, "sequences": record.sequences}))


class Record:
    """What the steps of a run have shown so far."""

    def __init__(self, adapter: str | None) -> None:
        self.adapter = adapter
        self.losses: list[float] = []
        self.sequences: list[tuple[list[int], list[int]]] = []

    def before(self, model: Any, step: int, inputs: dict[str, Any]) -> None:
        if not self.losses and self.adapter:
            self.set_adapter(model)
        if step == 0:
            self.sequences.extend(sequences_of(inputs))

    def after(self, step: int, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, which is its share of the step's."""
        if step == len(self.losses):
            self.losses.append(0.0)
        self.losses[step] += float(loss)

    def set_adapter(self, model: Any) -> None:
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        result = set_peft_model_state_dict(model, load_file(self.adapter))
        assert not result.unexpected_keys, result.unexpected_keys
        self.adapter = None


def observe(record: Record) -> None:
    training_step = transformers.Trainer.training_step

    def observed(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        step = self.state.global_step
        record.before(self.accelerator.unwrap_model(model), step, inputs)
        loss = training_step(self, model, inputs, *args, **kwargs)
        record.after(step, loss)
        return loss

    transformers.Trainer.training_step = observed


def sequences_of(inputs: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return tokens and target positions of each sequence of a micro-batch: padded, packed, or pairs."""
    if "chosen_input_ids" in inputs:
        return [*joined(inputs, "chosen"), *joined(inputs, "rejected")]
    ids = inputs["input_ids"]
    labels = inputs["labels"] if "labels" in inputs else ids.where(inputs["completion_mask"].bool(), IGNORED)
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    positions = inputs.get("position_ids")
    found = []
    for row in range(len(ids)):
        used = mask[row] != 0
        tokens, targets = ids[row][used], labels[row][used] != IGNORED
        begins = [0] if positions is None else (positions[row][used] == 0).nonzero().flatten().tolist()
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            found.append((tokens[begin:end].tolist(), targets[begin:end].nonzero().flatten().tolist()))
    return found


def joined(inputs: dict[str, Any], answer: str) -> list[tuple[list[int], list[int]]]:
    """Return prompts with their answers, which older trainers of pairs pad apart."""
    found = []
    for row in range(len(inputs[f"{answer}_input_ids"])):
        prompt, tokens = (
            inputs[f"{part}_input_ids"][row][inputs[f"{part}_attention_mask"][row].bool()].tolist()
            for part in ("prompt", answer)
        )
        found.append((prompt + tokens, list(range(len(prompt), len(prompt) + len(tokens)))))
    return found


def trl(file: Path) -> None:
    """Run the script of a command, ``python trl/scripts/NAME.py ARGUMENTS``, or fine-tune with a YAML file."""
    script, arguments = "sft", ["--config", str(file)]
    if file.suffix == ".sh":
        _, path, *arguments = shlex.split(file.read_text())
        script = Path(path).stem
    sys.argv = [script, *arguments]
    runpy.run_module(f"trl.scripts.{script}", run_name="__main__")


def llamafactory(file: Path) -> None:
    from llamafactory.train.tuner import run_exp

    sys.argv = ["llamafactory-cli", str(file)]
    run_exp()


def axolotl(file: Path) -> None:
    from axolotl.cli.train import do_cli

    do_cli(str(file))


RUN = {"trl": trl, "llamafactory": llamafactory, "axolotl": axolotl}

if __name__ == "__main__":
    main()
