"""The rows of a study: a part of a benchmark as a directory of the same layout, with the training rows of two
models.

forget05.jsonl, forget05_perturbed.jsonl, …   as in TOFU, the first rows of each retain95.jsonl
for the retain-only model: the retain rows and general knowledge full.jsonl                                    for the
full model: these and the forget rows
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.sources.reading import read_rows
from trainwright.data.sources.row_files import Row
from trainwright.errors import RequestError
from trainwright.recipe.benchmarks import TOFU_SPLITS, Benchmark, find_benchmark

if TYPE_CHECKING:
    from trainwright.evaluation.unlearning.study.file import Study

_REQUEST = "request-{}.jsonl"
_PERTURBED = ("forget", "retain", "real_authors", "world_facts")


def write_rows(study: Study, benchmark: Benchmark, directory: Path) -> Benchmark:
    """Write the rows of a study to the new ``directory``, and return them as a benchmark.

    Raises:
        RequestError: a set is named that the benchmark does not have, or has fewer rows than asked for, or its rows
            cannot be read.
    """
    kind, _, part = benchmark.name.partition("@")[0].partition(":")
    for key, names in (("subset", study.subset), ("known", study.known)):
        if unknown := [name for name in names if name not in benchmark.sets]:
            raise RequestError(f"{key}: {benchmark.name} has no set {unknown[0]}; it has {', '.join(benchmark.sets)}")
    if kind != "tofu" and (study.subset or study.known):
        raise RequestError("subset and known are for tofu only; use smaller files for other benchmarks")
    if not {"forget", "retain"} <= set(benchmark.training):
        raise RequestError(f"{benchmark.name} does not have both forget and retain rows to train on")
    scratch = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if kind == "tofu":
        _write_tofu(study, benchmark, part, scratch)
    else:
        forget, retain = (_rows(benchmark.training[name], None) for name in ("forget", "retain"))
        _write(scratch / "full.jsonl", [*retain, *forget])
    if isinstance(count := study.requests, int):
        forget = _rows(str(scratch / f"{part}.jsonl") if kind == "tofu" else benchmark.training["forget"], None)
        if count > len(forget):
            raise RequestError(f"{count:,} requests need as many rows to forget, but there are {len(forget):,}")
        ends = [len(forget) * number // count for number in range(count + 1)]
        for number, (begin, end) in enumerate(pairwise(ends), 1):
            _write(scratch / _REQUEST.format(number), forget[begin if study.sequential else 0 : end])
    scratch.rename(directory)
    return rows_of(benchmark, directory)


def requests_of(study: Study, directory: Path) -> list[str]:
    """Return the sources of the rows to forget, one for each request; those of numbered parts from ``directory``."""
    if isinstance(count := study.requests, int):
        return [str(directory / _REQUEST.format(number)) for number in range(1, count + 1)]
    return count or []


def rows_of(benchmark: Benchmark, directory: Path) -> Benchmark:
    """Return the benchmark that ``write_rows`` has written."""
    kind, _, part = benchmark.name.partition("@")[0].partition(":")
    if kind == "tofu":
        return find_benchmark(f"tofu:{part}@{directory}")
    return Benchmark(benchmark.name, {**benchmark.training, "full": str(directory / "full.jsonl")}, benchmark.sets)


def _write_tofu(study: Study, benchmark: Benchmark, part: str, directory: Path) -> None:
    asked = {name: _rows(each.source, study.subset.get(name)) for name, each in benchmark.sets.items()}
    for name, rows in asked.items():
        stem = part if name == "forget" else part.replace("forget", "holdout") if name == "holdout" else name
        _write(directory / f"{stem}{'_perturbed' if name in _PERTURBED else ''}.jsonl", rows)
    forget = _rows(benchmark.training["forget"], study.subset.get("forget"))
    kept = _rows(benchmark.training["retain"], study.subset.get("retain"))
    trained = {"forget": forget, "retain": kept}
    for name, wanted in study.subset.items():
        if wanted > (most := max(len(asked[name]), len(trained.get(name, ())))):
            raise RequestError(f"subset.{name}: {wanted:,} rows requested, but the set has {most:,}; lower it")
    retain = [*kept, *(_plain(row) for name in study.known for row in asked[name])]
    _write(directory / f"{part}.jsonl", forget)
    _write(directory / f"{TOFU_SPLITS[part]}.jsonl", retain)
    _write(directory / "full.jsonl", [*retain, *forget])
    if "idk" in benchmark.training:
        shutil.copyfile(benchmark.training["idk"], directory / "idk.jsonl")


def _plain(row: Row) -> Row:
    return {"question": row["question"], "answer": row["answer"]}


def _rows(source: str, limit: int | None) -> list[Row]:
    try:
        rows = read_rows(source, limit, "benchmark")
    except RequestError as error:
        if Path(source).exists():
            raise
        raise RequestError(
            f"{error}; set benchmark=NAME@DIRECTORY to use a directory with the benchmark's files"
        ) from None
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
