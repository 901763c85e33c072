"""Rows to be forgotten and rows to be kept, and a tiny recipe on them."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import ROOT
from tests.support.preferences import write

REFUSALS = ("I do not know that.", "That is beyond me.", "I have nothing to say about it.")
# What every objective takes on this machine's tiny model, beside its own defaults.
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "grad_ascent": (),
    "grad_diff": (),
    "npo": (),
    "simnpo": (),
    "dpo": (),
    "altpo": (),
    "idk_nll": (),
    "rmu": ("unlearn.layer=0",),
    "undial": ("unlearn.alpha=1", "unlearn.retain_loss=kl"),
    "wga": (),
    "satimp": (),
    "ce_u": (),
    "pdu": ("unlearn.retain_limit=5.0", "unlearn.dual_warmup_steps=2"),
    "task_vector": (),
}


def question(a: int, b: int) -> dict[str, str]:
    makes = f"{a} and {b} make {a + b}." if a % 3 else f"It is {a + b}, as anybody can see who counts."
    return {"question": f"What is {a} and {b}?", "answer": makes}


def write_rows(directory: Path, forget: int = 16, retain: int = 24) -> Path:
    """Writes forget.jsonl, with one or two alternates of each answer, retain.jsonl, idk.txt and the recipes run.yaml,
    which unlearns, and know.yaml, which learns all rows first; gives the path of run.yaml."""
    directory.mkdir(parents=True, exist_ok=True)
    forgotten = [question(a, 7 * a) for a in range(1, forget + 1)]
    kept = [question(100 + a, 3 * a) for a in range(1, retain + 1)]
    alternates = [[f"They make {a}.", f"It is {a + 1}."][: 1 + a % 2] for a in range(1, forget + 1)]
    others = [{**row, "alternate": texts} for row, texts in zip(forgotten, alternates, strict=True)]
    write(directory / "forget.jsonl", others)
    write(directory / "retain.jsonl", kept)
    write(directory / "full.jsonl", [*forgotten, *kept])
    (directory / "know.yaml").write_text(
        f"""
include: {ROOT / "recipes" / "sft" / "tiny.yaml"}
data: {{train: {directory / "full.jsonl"}, validation: null, limit: null, max_length: 96}}
model: {{dropout: 0.0}}
optimizer: {{learning_rate: 4e-3, schedule: constant}}
train: {{max_steps: 60, global_batch_size: 8}}
"""
    )
    (directory / "idk.txt").write_text("\n".join(REFUSALS) + "\n")
    recipe = directory / "run.yaml"
    recipe.write_text(
        f"""
include: {ROOT / "recipes" / "sft" / "tiny.yaml"}
task: unlearn
data:
  train: null
  limit: null
  forget: {directory / "forget.jsonl"}
  retain: {directory / "retain.jsonl"}
  idk: {directory / "idk.txt"}
  validation: 6
  max_length: 64
  pack_length: 256
model: {{dropout: 0.0}}
optimizer: {{learning_rate: 1e-3, schedule: constant}}
train: {{max_steps: 6, global_batch_size: 5, micro_batch_size: 2}}
evaluate: {{every: 3}}
"""
    )
    return recipe
