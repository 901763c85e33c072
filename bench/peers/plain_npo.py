"""NPO as one writes it by hand in torch: padded rows, the reference in memory, its log-probabilities in every step.

python plain_npo.py JOB.json
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    model.train()
    forget, retain = (encoded(tokenizer, job[name], job["max_length"]) for name in ("forget", "retain"))
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=job["learning_rate"], fused=True)
    draw = random.Random(0)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    times, losses, order = [], [], list[int]()
    for _ in range(job["steps"]):
        if len(order) < job["pairs"]:
            order += draw.sample(range(len(forget)), len(forget))
        chosen, order = order[: job["pairs"]], order[job["pairs"] :]
        pairs = [(forget[index], draw.choice(retain)) for index in chosen]
        begun = time.perf_counter()
        losses.append(step(model, reference, optimizer, pairs, pad, job))
        times.append(time.perf_counter() - begun)
    Path(job["result"]).write_text(json.dumps({"times": times, "losses": losses}))


def step(model: Any, reference: Any, optimizer: Any, pairs: list[Any], pad: int, job: dict[str, Any]) -> float:
    size, beta, total = job["micro_batch"], job["beta"], 0.0
    parts = [pairs[begin : begin + size] for begin in range(0, len(pairs), size)]
    for part in parts:
        forgotten, kept = padded([f for f, _ in part], pad), padded([r for _, r in part], pad)
        low = torch.autocast("cpu", torch.bfloat16) if job["precision"] == "bf16" else nullcontext()
        with low:
            with torch.no_grad():
                before = sequence_losses(reference, forgotten)
            ratio = before - sequence_losses(model, forgotten)
            npo = (-2 / beta * torch.nn.functional.logsigmoid(-beta * ratio)).mean()
            loss = (npo + model(**kept).loss) / len(parts)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def sequence_losses(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Summed negative log-likelihood of the targets of each row [B]."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return each.view_as(labels).sum(1)


def encoded(tokenizer: Any, file: str, max_length: int) -> list[tuple[list[int], list[int]]]:
    """``(tokens, labels)`` of every row; the question has the label -100."""
    rows = []
    for line in Path(file).read_text().splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(turns, return_dict=False)[:max_length]
        if len(tokens) > len(asked):
            rows.append((tokens, [-100] * len(asked) + tokens[len(asked) :]))
    return rows


def padded(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    longest = max(len(tokens) for tokens, _ in rows)

    def filled(values: list[list[int]], filler: int) -> torch.Tensor:
        return torch.tensor([row + [filler] * (longest - len(row)) for row in values])

    return {
        "input_ids": filled([tokens for tokens, _ in rows], pad),
        "attention_mask": filled([[1] * len(tokens) for tokens, _ in rows], 0),
        "labels": filled([labels for _, labels in rows], -100),
    }


if __name__ == "__main__":
    main()
