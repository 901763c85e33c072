"""The model and the rows that every contender is given."""

from __future__ import annotations

import json
import random
from pathlib import Path

ROWS = 600


def write_rows(path: Path) -> Path:
    """The 600 rows: a fixed choice from the built-in `pydoc` rows of this interpreter, as JSONL."""
    from trainwright.data.sources.pydoc_rows import build_pydoc_rows

    chosen = random.Random(0).sample(build_pydoc_rows(), ROWS)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return path


def find_model(name: str) -> Path:
    """A directory with the model as safetensors: ``name`` itself, or where Trainwright finds that id."""
    if Path(name).is_dir():
        return Path(name).resolve()
    from trainwright.models.resolve_model import resolve
    from trainwright.recipe.sections.model import ModelSection

    directory = resolve(ModelSection(name=name)).directory
    assert directory is not None
    return directory


def example_lengths(rows: Path, model: Path, max_length: int) -> list[int]:
    """Tokens of each row under the model's chat template, cut at ``max_length``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        lengths.append(min(max_length, len(tokenizer.apply_chat_template(messages, return_dict=False))))
    return lengths
