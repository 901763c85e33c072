"""An evaluation from beginning to end, without the processes it runs in: prepared once, measured by all ranks, told.

work/model/     what was found, and the rows in its tokens
work/against/   the same for the other model
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainwright.data.kinds import EXAMPLES, kind_of_rows
from trainwright.data.prepare import prepare as prepare_data
from trainwright.errors import RequestError
from trainwright.evaluation.asked import QUICK_ROWS, USUAL_ANSWERS, Asked
from trainwright.evaluation.comparison import compare
from trainwright.evaluation.measure import Measured, measure
from trainwright.evaluation.metrics.extraction import AnswerMatch
from trainwright.evaluation.metrics.registry import ANSWERS, Judge, judges
from trainwright.evaluation.report import Report
from trainwright.evaluation.rows import EncodedRows, Rows, drawn, encode, held_back, read
from trainwright.inference.batching import Done
from trainwright.inference.finding import Found, find_model
from trainwright.inference.loading import DTYPES, Loaded, check_fits, load
from trainwright.inference.sampling import Sampling
from trainwright.machine.cache import cache_root
from trainwright.machine.detect import Machine
from trainwright.models.load import load_config, load_tokenizer
from trainwright.parallel.world import World

_MODEL, _AGAINST = "model", "against"
_RUNS_OWN = "data.validation of the run"

# Told what is done now, and of how many rows; gives what to tell of the rows that are done.
Stage = Callable[[str, int], Done]


def prepare(asked: Asked, machine: Machine, processes: int, work: Path) -> None:
    """Find models and rows, and leave in ``work`` what every rank needs. Called once, before the ranks are started.

    Raises:
        RequestError: a model, the rows or a setting cannot be used; rows are named by file and line.
        MachineError: a model does not fit this machine.
    """
    found = find_model(asked.model, asked.adapter, asked.checkpoint)
    sides = {_MODEL: found}
    if asked.against is not None:
        sides[_AGAINST] = find_model(asked.against)
    for side, each in sides.items():
        check_fits(each, DTYPES[asked.dtype], machine, processes)
        (work / side).mkdir()
        each.save(work / side / "found.json")
    if not asked.on_rows:
        return
    rows, key, longest = _rows(asked, found)
    judged = judges(asked.metrics, asked.answer_pattern, asked.json_schema)
    if judged and rows.layout == "text":
        if asked.explicit:
            raise RequestError(
                f"--metrics: {', '.join(judged)} need questions, and the rows of {rows.source} are texts"
            )
        judged = {}
    places = _asked_places(asked, rows) if judged else []
    _check_references(rows, judged, places, key)
    for side, each in sides.items():
        own = min((n for n in (longest, _positions(each)) if n is not None), default=None)
        encoded = encode(rows, load_tokenizer(each.section), max_length=own, asked=places, key=key)
        _check_room(encoded, rows, _positions(each), key)
        encoded.save(work / side)
    names = [name for name in asked.metrics if name in judged or name not in ANSWERS]
    if not names:
        raise RequestError("--metrics: nothing is left to measure")
    about = {"source": rows.source, "numbers": rows.numbers, "names": names, "answered": len(places)}
    (work / "about.json").write_text(json.dumps(about), encoding="utf-8")


def work_on(asked: Asked, work: Path, world: World, stage: Stage) -> None:
    """This rank's part of all that is measured; rank 0 leaves the results in ``work``. Every rank must call."""
    for side in (_MODEL, _AGAINST):
        if (work / side).is_dir():
            loaded = load(Found.open(work / side / "found.json"), DTYPES[asked.dtype], world.device)
            if asked.on_rows:
                _measure(asked, work, side, loaded, world, stage)
            if asked.tasks:
                _harness(asked, work / side, loaded, world, stage)
            del loaded
            if world.device.type == "cuda":
                torch.cuda.empty_cache()


def report_of(asked: Asked, work: Path) -> Report:
    """What the ranks have left in ``work``."""
    settings: dict[str, Any] = {key: value for key, value in asdict(asked).items() if value not in (None, (), False)}
    harness: dict[str, Any] = {}
    for side in (_MODEL, _AGAINST):
        if (file := work / side / "harness.json").is_file():
            suffix = f" ({side})" if asked.against is not None else ""
            found = json.loads(file.read_text(encoding="utf-8"))
            harness |= {f"{task}{suffix}": metrics for task, metrics in found.items()}
    if not asked.on_rows:
        del settings["metrics"]
        return Report(settings, harness=harness)
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    settings |= {"data": about["source"], "rows": len(about["numbers"]), "answered": about["answered"]}
    measured = Measured.open(work / _MODEL / "measured.json")
    if asked.against is None:
        return Report(settings, measured, harness=harness)
    against = Measured.open(work / _AGAINST / "measured.json")
    return Report(settings, measured, against, compare(measured, against), harness)


def _measure(asked: Asked, work: Path, side: str, loaded: Loaded, world: World, stage: Stage) -> None:
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    rows = EncodedRows.open(work / side)
    found = Found.open(work / side / "found.json")
    measured = measure(
        loaded,
        rows,
        about["numbers"],
        about["names"],
        judges(about["names"], asked.answer_pattern, asked.json_schema),
        Sampling(max_new_tokens=asked.max_new_tokens),
        world,
        origin=found.origin,
        batch=asked.batch_size,
        scored=stage(f"scoring with {found.origin}", len(about["numbers"])),
        answered=stage(f"answers of {found.origin}", about["answered"]),
    )
    if measured is not None:
        replace(measured, notes=[*rows.notes, *_notes(measured, rows, asked)]).save(work / side / "measured.json")


def _notes(measured: Measured, rows: EncodedRows, asked: Asked) -> Iterator[str]:
    if rows.cut:
        yield f"{rows.cut:,} rows are longer than they may be and were cut"
    unfinished = sum(sample.complete is False for sample in measured.samples)
    if unfinished:
        yield f"{unfinished:,} answers were cut at {asked.max_new_tokens:,} tokens; --max-new-tokens allows more"


def _harness(asked: Asked, side: Path, loaded: Loaded, world: World, stage: Stage) -> None:
    from trainwright.evaluation.harness import run_tasks

    found = run_tasks(
        loaded, asked.tasks, asked.task_directory, QUICK_ROWS if asked.quick else asked.limit, world, stage
    )
    if world.is_main:
        (side / "harness.json").write_text(json.dumps(found, default=str), encoding="utf-8")


def _rows(asked: Asked, found: Found) -> tuple[Rows, str, int | None]:
    """The rows, what names them in messages, and how long they may be where that is limited."""
    if asked.data is not None:
        rows = read(asked.data, asked.format, asked.limit, key="--data")
        longest = asked.max_length
    else:
        rows, longest = _rows_of_run(found)
        rows = rows.chosen(range(min(len(rows), asked.limit or len(rows))))
        if asked.max_length is not None:
            longest = asked.max_length
    if asked.quick:
        rows = rows.chosen(drawn(len(rows), QUICK_ROWS))
    return rows, "--data" if asked.data is not None else _RUNS_OWN, longest


def _rows_of_run(found: Found) -> tuple[Rows, int]:
    """What the run held back to validate on, and how long it had its examples."""
    recipe = found.recipe
    if recipe is None:
        raise RequestError(f"--data: {found.origin} is not of a run, which would have validation rows; name the rows")
    data = recipe.data
    if recipe.pretrain is not None:
        raise RequestError(
            f"--data: {found.origin} is of a pretraining, whose validation loss is in its events; name other rows"
        )
    if recipe.task == "unlearn":
        raise RequestError(
            f"--data: {found.origin} is of a run that unlearns; name rows to measure on, or --metrics of a benchmark, "
            "such as extraction_strength, which are then of what it was to forget"
        )
    if kind_of_rows(recipe) != EXAMPLES:
        raise RequestError(f"--data: {found.origin} is of a run on answers to compare; name rows with one answer each")
    if data.validation is None:
        raise RequestError(f"--data: {found.origin} is of a run without validation rows; name the rows")
    tokenizer = load_tokenizer(found.section)
    validation = prepare_data(data, tokenizer, seed=recipe.train.seed, cache=cache_root()).validation
    assert validation is not None, "data.validation is set"
    if isinstance(data.validation, str):
        rows = read(data.validation, data.format, key="data.validation", lenient=True)
    elif isinstance(data.train, str):
        rows = read(data.train, data.format, data.limit, key="data.train", lenient=True)
    else:
        raise RequestError(f"--data: {found.origin} is of a run on a mixture of sources; name the rows to measure on")
    rows = held_back(rows, tokenizer, validation, data.max_length, _RUNS_OWN)
    if not len(rows):
        raise RequestError(f"--data: the validation rows of {found.origin} are not in its data any more; name the rows")
    return rows, data.max_length


def _asked_places(asked: Asked, rows: Rows) -> list[int]:
    everything = asked.full or asked.quick or asked.limit is not None
    return drawn(len(rows), None if everything else USUAL_ANSWERS)


def _check_references(rows: Rows, judged: dict[str, Judge], places: list[int], key: str) -> None:
    match = judged.get("answer")
    if not isinstance(match, AnswerMatch):
        return
    for place in places:
        try:
            match.check(rows.reference(place))
        except RequestError as error:
            raise RequestError(f"{key}: {rows.place(place)}: {error}") from None


def _check_room(encoded: EncodedRows, rows: Rows, positions: int | None, key: str) -> None:
    for place, prompt in zip(encoded.prompts.places, encoded.prompts.tokens, strict=True):
        if positions is not None and len(prompt) >= positions:
            raise RequestError(
                f"{key}: {rows.place(place)}: its question has {len(prompt):,} tokens, and the model only "
                f"{positions:,} positions; shorten or remove the row"
            )


def _positions(found: Found) -> int | None:
    config = load_config(found.section).get_text_config()
    return getattr(config, "max_position_embeddings", None)
