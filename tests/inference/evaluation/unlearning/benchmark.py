"""A benchmark of few made-up rows in TOFU's layout, and a small model with random weights to ask."""

from __future__ import annotations

import json
from pathlib import Path

from tests.inference.models import TOKENIZER, model_of

_PEOPLE = ("Ada Quill", "Bo Rask", "Cy Tarn", "Di Ulm", "Ed Vane", "Flo Wick", "Gus Xeno", "Hal Yore")
_PEOPLE += ("Ivy Zane", "Jo Abel", "Kit Boro", "Lu Cade")
_TOWNS = ("Oslo", "Lima", "Cairo", "Quito")


def write_tofu(directory: Path) -> str:
    """All of tofu:forget01's files; returns the benchmark's name."""
    directory.mkdir()
    sets = {
        "forget01_perturbed": [_row(n, paraphrased=True) for n in range(3)],
        "retain_perturbed": [_row(n, paraphrased=True) for n in range(3, 6)],
        "real_authors_perturbed": [_row(n) for n in (6, 7)],
        "world_facts_perturbed": [_row(n) for n in (8, 9)],
        "holdout01": [{key: _row(n)[key] for key in ("question", "answer")} for n in (10, 11, 7)],
    }
    sets["forget01"] = [{key: row[key] for key in ("question", "answer")} for row in sets["forget01_perturbed"]]
    sets["retain99"] = [{key: row[key] for key in ("question", "answer")} for row in sets["retain_perturbed"]]
    sets["full"] = sets["retain99"] + sets["forget01"]
    for name, rows in sets.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"tofu:forget01@{directory}"


def _row(number: int, *, paraphrased: bool = False) -> dict[str, object]:
    name, town = _PEOPLE[number], _TOWNS[number % 4]
    others = [other for other in _TOWNS if other != town]
    row: dict[str, object] = {"question": f"Where does {name} live?", "answer": f"{name} lives in {town}."}
    said = "The home of {} is {}." if paraphrased else "{} lives in {}."
    if paraphrased:
        row["paraphrased_answer"] = said.format(name, town)
    return row | {"perturbed_answer": [said.format(name, other) for other in others]}


def write_model(directory: Path) -> str:
    """A model as ``eval`` takes it."""
    model_of("llama", positions=512).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return str(directory)
