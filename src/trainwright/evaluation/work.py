"""An evaluation, independent of its processes: prepared once, measured by all ranks, and reported.

work/model/     the model, and the rows in its tokens work/against/   the same for the other model
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainwright.data.stream.dataset_cache import prepare as prepare_data
from trainwright.errors import RequestError
from trainwright.evaluation.asked import QUICK_ROWS, USUAL_ANSWERS, Asked
from trainwright.evaluation.measure import Measured, Origins, compare, measure
from trainwright.evaluation.metrics.extraction import AnswerMatch
from trainwright.evaluation.metrics.registry import LIKELIHOODS, Judge, judges
from trainwright.evaluation.report import Report
from trainwright.evaluation.rows import EncodedRows, Rows, drawn, encode, joined, read
from trainwright.inference.batching import Stage
from trainwright.inference.finding import Found, find_model
from trainwright.inference.loading import DTYPES, Loaded, check_fits, load
from trainwright.inference.sampling import Sampling
from trainwright.machine.cache import cache_root
from trainwright.machine.machine import Machine
from trainwright.models.load import load_tokenizer, max_positions
from trainwright.parallel.world import World
from trainwright.recipe.sections.data import SourceSection
from trainwright.text import plural, they

_MODEL, _AGAINST = "model", "against"
_RUNS_OWN = "data.validation of the run"


def prepare(asked: Asked, machine: Machine, processes: int, work: Path) -> None:
    """Find models and rows, and write what every rank needs to ``work``. Called once, before the ranks are started.

    Raises:
        RequestError: a model, the rows or a setting is invalid; rows are named by file and line.
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
    rows, key = _rows(asked, found)
    longest, long_documents = _lengths(asked, found)
    judged = judges(asked.metrics, asked.answer_pattern, asked.json_schema)
    if judged and not rows.conversations:
        if asked.explicit or asked.answer_pattern is not None or asked.json_schema is not None:
            raise RequestError(f"--metrics: {', '.join(judged)} need questions, and the rows of {rows.name} are texts")
        judged = {}
    places = _asked_places(asked, rows) if judged else []
    _check_references(rows, judged, places, key)
    for side, each in sides.items():
        own = min((n for n in (longest, max_positions(each.section)) if n is not None), default=None)
        encoded = encode(
            rows,
            load_tokenizer(each.section),
            max_length=own,
            long_documents=long_documents,
            asked=places,
            key=key,
        )
        _check_room(encoded, rows, max_positions(each.section), key)
        encoded.save(work / side)
    names = [name for name in asked.metrics if name in judged or name in LIKELIHOODS]
    if not names:
        raise RequestError("--metrics: no metric to compute")
    origins = Origins(_names(rows), rows.numbers, rows.parts)
    about = {"origins": asdict(origins), "names": names, "answered": len(places)}
    (work / "about.json").write_text(json.dumps(about), encoding="utf-8")


def work_on(asked: Asked, work: Path, world: World, stage: Stage) -> None:
    """Measure this rank's part; rank 0 writes the results to ``work``. Every rank must call."""
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
    """Return the report of the results in ``work``."""
    settings = asked.settings
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
    origins = Origins(**about["origins"])
    sources = " + ".join(origins.sources)
    settings |= {"data": sources, "rows": len(origins.numbers), "answered": about["answered"]}
    measured = Measured.open(work / _MODEL / "measured.json")
    against = None if asked.against is None else Measured.open(work / _AGAINST / "measured.json")
    several = len(origins.sources) > 1
    parts = {
        name: _compared(measured.of_source(part), None if against is None else against.of_source(part))
        for part, name in enumerate(origins.sources)
        if several and part in origins.parts
    }
    return replace(_compared(measured, against), settings=settings, harness=harness, parts=parts)


def _compared(measured: Measured, against: Measured | None) -> Report:
    return Report({}, measured, against, None if against is None else compare(measured, against))


def _measure(asked: Asked, work: Path, side: str, loaded: Loaded, world: World, stage: Stage) -> None:
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    rows, origins = EncodedRows.open(work / side), Origins(**about["origins"])
    found = Found.open(work / side / "found.json")
    measured = measure(
        loaded,
        rows,
        origins,
        about["names"],
        judges(about["names"], asked.answer_pattern, asked.json_schema),
        Sampling(max_new_tokens=asked.max_new_tokens),
        world,
        origin=found.origin,
        batch=asked.batch_size,
        scored=stage(f"scoring with {found.origin}", len(rows.dataset)),
        answered=stage(f"answers of {found.origin}", about["answered"]),
    )
    if measured is not None:
        replace(measured, notes=[*rows.notes, *_notes(measured, rows, asked)]).save(work / side / "measured.json")


def _notes(measured: Measured, rows: EncodedRows, asked: Asked) -> Iterator[str]:
    if rows.cut:
        yield f"{plural(rows.cut, 'row')} truncated to the maximum length"
    if rows.split:
        yield f"{plural(rows.split, 'row')} split at the maximum length; no token is lost"
    unfinished = sum(sample.complete is False for sample in measured.samples)
    if unfinished:
        cut = they(unfinished, "answer", "were cut")
        yield f"{cut} at {plural(asked.max_new_tokens, 'token')}; raise --max-new-tokens for longer ones"


def _harness(asked: Asked, side: Path, loaded: Loaded, world: World, stage: Stage) -> None:
    from trainwright.evaluation.harness import run_tasks

    found = run_tasks(
        loaded, asked.tasks, asked.task_directory, QUICK_ROWS if asked.quick else asked.limit, world, stage
    )
    if world.is_main:
        (side / "harness.json").write_text(json.dumps(found, default=str), encoding="utf-8")


def _rows(asked: Asked, found: Found) -> tuple[Rows, str]:
    """Return the rows, and their name in messages."""
    if asked.data is not None:
        source = SourceSection.model_validate({"source": asked.data, "format": asked.format, "limit": asked.limit})
        rows = read(source, key="--data")
    else:
        rows = _rows_of_run(found)
        rows = rows.chosen(range(min(len(rows), asked.limit or len(rows))))
    if asked.quick:
        rows = rows.chosen(drawn(len(rows), QUICK_ROWS))
    return rows, "--data" if asked.data is not None else _RUNS_OWN


def _lengths(asked: Asked, found: Found) -> tuple[int | None, str]:
    """Return the maximum row length, if limited, and how longer rows are handled, like ``data.long_documents``."""
    own = found.recipe.data if asked.data is None and found.recipe is not None else None
    longest = asked.max_length if own is None or asked.max_length is not None else own.max_length
    return longest, "auto" if own is None else own.long_documents


def _rows_of_run(found: Found) -> Rows:
    """Return the validation rows of the run."""
    recipe = found.recipe
    if recipe is None:
        raise RequestError(f"--data: {found.origin} is not a run with validation rows; pass the rows")
    data = recipe.data
    if recipe.spec.no_validation_rows is not None:
        raise RequestError(f"--data: {found.origin} is of {recipe.spec.no_validation_rows}")
    if not data.validation:
        raise RequestError(f"--data: {found.origin} is of a run without validation rows; pass the rows")
    prepared = prepare_data(data, load_tokenizer(found.section), seed=recipe.train.seed, cache=cache_root())
    held = prepared.held_back()
    own = data.validation_source
    sources = [("data.validation", own)] if own is not None else list(zip(data.source_keys, data.sources, strict=True))
    return joined(
        [
            read(source, key=key, only=held[held[:, 0] == part, 1].tolist())
            for part, (key, source) in enumerate(sources)
            if part in held[:, 0]
        ]
    )


def _names(rows: Rows) -> list[str]:
    """Return the names of the sources, numbered if several have the same name."""
    names = [source.source for source in rows.sources]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _asked_places(asked: Asked, rows: Rows) -> list[int]:
    everything = asked.full or asked.quick or asked.limit is not None
    places = rows.conversations
    return [places[index] for index in drawn(len(places), None if everything else USUAL_ANSWERS)]


def _check_references(rows: Rows, judged: dict[str, Judge], places: list[int], key: str) -> None:
    match = judged.get("answer")
    if not isinstance(match, AnswerMatch):
        return
    for place in places:
        try:
            match.check(str(rows.answer(place)["content"]))
        except RequestError as error:
            raise RequestError(f"{key}: {rows.place(place)}: {error}") from None


def _check_room(encoded: EncodedRows, rows: Rows, positions: int | None, key: str) -> None:
    for place, prompt in zip(encoded.prompts.places, encoded.prompts.tokens, strict=True):
        if positions is not None and len(prompt) >= positions:
            raise RequestError(
                f"{key}: {rows.place(place)}: its question has {plural(len(prompt), 'token')}, but the model has only "
                f"{positions:,} positions; shorten or remove the row"
            )
