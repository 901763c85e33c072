"""Small runs whose memory is predicted and measured: what they are, as recipes and as plans see them."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from trainwright.machine.describe import build_cluster
from trainwright.machine.machine import Machine
from trainwright.planning.facts import read_configuration
from trainwright.planning.memory.peak import Memory, estimate_memory
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.workload import Choice, Workload
from trainwright.recipe.sections.model import ModelSection

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "mistral",
    "gpt2",
    "smollm3",
    "olmo2",
    "gpt_neox",
    "granite",
    "phi",
)
STRATEGIES = ("single", "ddp", "fsdp", "zero2", "zero3", "zero1")
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ATTENTION = {
    "gpt2": ["c_attn"],
    "gpt_neox": ["query_key_value"],
    "phi3": ["qkv_proj"],
    "phi": ["q_proj", "v_proj"],
}


@dataclass(frozen=True)
class Case:
    """``documents``: their lengths in tokens, over and over. ``pack``: tokens of a pack, None for padded rows.
    ``adapter``: as a recipe has it."""

    config: dict[str, Any]
    adapter: dict[str, Any]
    strategy: str
    processes: int
    precision: str
    documents: tuple[int, ...]
    pack: int | None
    micro_batch: int
    accumulation: int
    recompute: str | int

    master_weights: ClassVar[bool] = True

    @property
    def id(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        kind, hidden = self.config["model_type"], self.config.get("hidden_size") or self.config["n_embd"]
        shape = f"{kind} {hidden}x{self.config.get('num_hidden_layers') or self.config['n_layer']}"
        rows = f"pack {self.pack}" if self.pack else f"rows to {max(self.documents)}"
        batch = f"{self.micro_batch}x{self.accumulation}"
        parts = [shape, f"{self.strategy} on {self.processes}", self.precision, rows, batch, str(self.recompute)]
        return ", ".join(parts if self.kind == "full" else [*parts, f"{self.kind} {self.adapter['rank']}"])

    @property
    def kind(self) -> str:
        """What is trained: full, lora, dora or qlora."""
        return "qlora" if "quantization" in self.adapter else str(self.adapter.get("type", "full"))

    @property
    def model(self) -> dict[str, Any]:
        """The section of a recipe."""
        return {"config": self.config, "tokenizer": "bytes", **({"adapter": self.adapter} if self.adapter else {})}

    def recipe(self, rows: Path) -> dict[str, Any]:
        """Three steps of it; ``rows``: where files of examples are kept."""
        per_row = self.pack * len(self.documents) // sum(self.documents) if self.pack else 1
        return {
            "task": "sft",
            "model": self.model,
            "data": {
                "train": str(text_rows(self.documents, rows)),
                "validation": None,
                "format": "text",
                "max_length": max(self.documents),
                "pack_length": self.pack,
            },
            "train": {
                "max_steps": 3,
                "global_batch_size": int(self.micro_batch * self.accumulation * self.processes * per_row),
                "micro_batch_size": self.micro_batch,
                "mixed_precision": self.precision,
                "activation_checkpointing": self.recompute,
                "compile": False,
            },
            "parallel": {"strategy": self.strategy, "num_processes": self.processes},
            "optimizer": {"master_weights": self.master_weights},
        }


class Bf16Case(Case):
    """One whose weights are kept in bf16 alone."""

    master_weights = False

    @classmethod
    def of(cls, case: Case) -> Case:
        return cls(**vars(case) | {"adapter": {}, "precision": "bf16"})


def draw(seed: int, count: int, machine: Machine, families: Sequence[str] = FAMILIES) -> list[Case]:
    """Cases with the strategies and families in turn and all else at random; on GPUs larger ones."""
    chance, strategies = random.Random(seed), [s for s in STRATEGIES if s[:4] != "zero" or find_spec("deepspeed")]
    processes = min(2, len(machine.gpus)) if machine.gpus else 2
    cases = []
    for i in range(count):
        strategy, family = strategies[i % len(strategies)], families[i % len(families)]
        on = 1 if strategy == "single" else processes
        cases.append(_case(chance, family, strategy, on, 8 if machine.gpus else 1))
    return cases


def _case(chance: random.Random, family: str, strategy: str, processes: int, larger: int) -> Case:
    documents = chance.choice([(64,), (200,), (100, 60, 30, 90), (500, 20, 40, 20), (310, 150)])
    packed = chance.random() < 0.6
    if larger > 1:
        documents = tuple(2 * length for length in documents)
    return Case(
        config=_config(chance, family, larger),
        adapter=_adapter(chance, family),
        strategy=strategy,
        processes=processes,
        precision=chance.choice(["no", "bf16"]),
        documents=documents,
        pack=chance.choice([512, 1024]) * (4 if larger > 1 else 1) if packed else None,
        micro_batch=chance.choice([1, 2, 4]),
        accumulation=chance.choice([1, 1, 2]),
        recompute=chance.choice(["none", "none", "full", "selective", 2]),
    )


def _adapter(chance: random.Random, family: str) -> dict[str, Any]:
    kind = chance.choice(["full"] * 6 + ["lora"] * 2 + ["dora", "qlora"])
    section: dict[str, Any] = {"type": "lora", "rank": chance.choice([4, 16, 64]), "dropout": chance.choice([0, 0.1])}
    if chance.random() < 0.3:
        section["targets"] = _ATTENTION.get(family, ["q_proj", "v_proj"])
    if kind == "full":
        return {}
    if kind == "qlora":
        section["quantization"] = "nf4"
    return section | ({"type": "dora"} if kind == "dora" else {})


def _config(chance: random.Random, family: str, larger: int) -> dict[str, Any]:
    hidden, layers = chance.choice([128, 256, 384]) * larger, chance.choice([2, 4, 6])
    vocabulary = chance.choice([512, 4000, 20000])
    heads = hidden // 32 // (2 if larger > 1 else 1)
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 4096}
        return {**_GPT2, **sizes, "vocab_size": vocabulary}
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": chance.choice([2, 3]) * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **({} if family == "gpt_neox" else {"num_key_value_heads": chance.choice([2, heads])}),
        "max_position_embeddings": 4096,
        "vocab_size": vocabulary,
        "tie_word_embeddings": chance.random() < 0.5,
        **({"head_dim": hidden // heads} if family in ("qwen3", "gemma2", "gemma3_text") else {}),
        **({"pad_token_id": 0} if family in ("phi3", "phi") else {}),
    }


def predict(case: Case, found: dict[str, Any], machine: Machine) -> Memory:
    """For the shape of the fullest micro-batch that was run. ``found``: of ``plan_runs.run``."""
    batches = [batch for rank in found["ranks"] for batch in rank["batches"]]
    lengths, of_step = max((batch["lengths"] for batch in batches), key=sum), max(_steps(found), key=sum)
    tokens, rows = sum(lengths), max(batch["rows"] for batch in batches)
    steps = [batch["step"] for batch in found["ranks"][0]["batches"]]
    passes = max(steps.count(step) for step in steps)  # packs that are not full make more than were asked for
    section = ModelSection.model_validate(case.model)
    workload = Workload(
        model=TracedModel.of(read_configuration(section)).add_adapter(section.adapter),
        row_tokens=-(-tokens // rows) if case.pack else max(lengths),
        global_batch_rows=rows * passes * case.processes,
        packed=case.pack is not None,
        document_tokens=statistics.mean(of_step if case.pack else case.documents),
        batch_tokens=sum(of_step) if case.pack else None,
        lengths=tuple(sorted(of_step)) if case.pack else (),
        longest_document=max(lengths),
        fresh=True,
        most_batch_tokens=max(sum(lengths) for lengths in _steps(found)) if case.pack else None,
        batch_documents=() if case.pack else _longest_first(found),
        evaluates=False,
        master_weights=case.master_weights,
    )
    choice = Choice(
        strategy=case.strategy,  # type: ignore[arg-type]
        num_processes=case.processes,
        micro_batch_size=rows,
        gradient_accumulation_steps=passes,
        mixed_precision=case.precision,  # type: ignore[arg-type]
        activation_checkpointing=case.recompute,  # type: ignore[arg-type]
        reshard_after_forward=found["parallel"]["reshard_after_forward"],
        threads=None if machine.gpus else 1,
    )
    return estimate_memory(workload, choice, build_cluster(machine))


def _longest_first(found: dict[str, Any]) -> tuple[int, ...]:
    """As data.tokens.lengths has it, of the global batches that were run."""
    return tuple(max(lengths) for lengths in zip(*(sorted(step, reverse=True) for step in _steps(found)), strict=False))


def _steps(found: dict[str, Any]) -> list[list[int]]:
    """Lengths of the documents of each global batch; passes that only keep other ranks company have no targets."""
    steps: dict[int, list[int]] = {}
    for batch in (batch for rank in found["ranks"] for batch in rank["batches"] if batch["targets"]):
        steps.setdefault(batch["step"], []).extend(batch["lengths"])
    return list(steps.values())


def text_rows(documents: tuple[int, ...], directory: Path) -> Path:
    """Texts of these many bytes, over and over; each is closed by a token of its own."""
    file = directory / f"rows-{'-'.join(map(str, documents))}.jsonl"
    if not file.exists():
        letters = random.Random(0)
        texts = ["".join(letters.choices("abcdefgh ijklmno", k=documents[i % len(documents)] - 1)) for i in range(96)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file
