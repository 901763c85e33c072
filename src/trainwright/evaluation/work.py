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
from trainwright.evaluation.measure import Measurement, Origins, compare, measure
from trainwright.evaluation.metrics.extraction import AnswerMatch
from trainwright.evaluation.metrics.registry import LIKELIHOODS, Judge, judges
from trainwright.evaluation.report import Report
from trainwright.evaluation.request import QUICK_ROWS, USUAL_ANSWERS, EvaluationRequest
from trainwright.evaluation.rows import EncodedRows, EvaluationRows, drawn, encode, joined, read
from trainwright.inference.batching import Stage
from trainwright.inference.finding import FoundModel, find_model
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


def prepare(request: EvaluationRequest, machine: Machine, processes: int, work: Path) -> None:
    """Find models and rows, and write what every rank needs to ``work``. Called once, before the ranks are started.

    Raises:
        RequestError: a model, the rows or a setting is invalid; rows are named by file and line.
        MachineError: a model does not fit this machine.
    """
    found = find_model(request.model, request.adapter, request.checkpoint)
    sides = {_MODEL: found}
    if request.against is not None:
        sides[_AGAINST] = find_model(request.against)
    for side, each in sides.items():
        check_fits(each, DTYPES[request.dtype], machine, processes)
        (work / side).mkdir()
        each.save(work / side / "found.json")
    if not request.on_rows:
        return
    rows, key = _rows(request, found)
    longest, long_documents = _lengths(request, found)
    judged = judges(request.metrics, request.answer_pattern, request.json_schema)
    if judged and not rows.conversations:
        if request.explicit or request.answer_pattern is not None or request.json_schema is not None:
            raise RequestError(f"--metrics: {', '.join(judged)} need questions, and the rows of {rows.name} are texts")
        judged = {}
    places = _places_to_answer(request, rows) if judged else []
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
        _check_prompt_lengths(encoded, rows, max_positions(each.section), key)
        encoded.save(work / side)
    names = [name for name in request.metrics if name in judged or name in LIKELIHOODS]
    if not names:
        raise RequestError("--metrics: no metric to compute")
    origins = Origins(_names(rows), rows.numbers, rows.parts)
    about = {"origins": asdict(origins), "names": names, "answered": len(places)}
    (work / "about.json").write_text(json.dumps(about), encoding="utf-8")


def work_on(request: EvaluationRequest, work: Path, world: World, stage: Stage) -> None:
    """Measure this rank's part; rank 0 writes the results to ``work``. Every rank must call."""
    for side in (_MODEL, _AGAINST):
        if (work / side).is_dir():
            loaded = load(FoundModel.open(work / side / "found.json"), DTYPES[request.dtype], world.device)
            if request.on_rows:
                _measure(request, work, side, loaded, world, stage)
            if request.tasks:
                _harness(request, work / side, loaded, world, stage)
            del loaded
            if world.device.type == "cuda":
                torch.cuda.empty_cache()


def report_of(request: EvaluationRequest, work: Path) -> Report:
    """Return the report of the results in ``work``."""
    settings = request.settings
    harness: dict[str, Any] = {}
    for side in (_MODEL, _AGAINST):
        if (file := work / side / "harness.json").is_file():
            suffix = f" ({side})" if request.against is not None else ""
            found = json.loads(file.read_text(encoding="utf-8"))
            harness |= {f"{task}{suffix}": metrics for task, metrics in found.items()}
    if not request.on_rows:
        del settings["metrics"]
        return Report(settings, harness=harness)
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    origins = Origins(**about["origins"])
    sources = " + ".join(origins.sources)
    settings |= {"data": sources, "rows": len(origins.numbers), "answered": about["answered"]}
    measured = Measurement.open(work / _MODEL / "measured.json")
    against = None if request.against is None else Measurement.open(work / _AGAINST / "measured.json")
    several = len(origins.sources) > 1
    parts = {
        name: _compared(measured.of_source(part), None if against is None else against.of_source(part))
        for part, name in enumerate(origins.sources)
        if several and part in origins.parts
    }
    return replace(_compared(measured, against), settings=settings, harness=harness, parts=parts)


def _compared(measured: Measurement, against: Measurement | None) -> Report:
    return Report({}, measured, against, None if against is None else compare(measured, against))


def _measure(request: EvaluationRequest, work: Path, side: str, loaded: Loaded, world: World, stage: Stage) -> None:
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    rows, origins = EncodedRows.open(work / side), Origins(**about["origins"])
    found = FoundModel.open(work / side / "found.json")
    measured = measure(
        loaded,
        rows,
        origins,
        about["names"],
        judges(about["names"], request.answer_pattern, request.json_schema),
        Sampling(max_new_tokens=request.max_new_tokens),
        world,
        origin=found.origin,
        batch=request.batch_size,
        scored=stage(f"scoring with {found.origin}", len(rows.dataset)),
        answered=stage(f"answers of {found.origin}", about["answered"]),
    )
    if measured is not None:
        replace(measured, notes=[*rows.notes, *_notes(measured, rows, request)]).save(work / side / "measured.json")


def _notes(measured: Measurement, rows: EncodedRows, request: EvaluationRequest) -> Iterator[str]:
    if rows.cut:
        yield f"{plural(rows.cut, 'row')} truncated to the maximum length"
    if rows.split:
        yield f"{plural(rows.split, 'row')} split at the maximum length; no token is lost"
    unfinished = sum(sample.complete is False for sample in measured.samples)
    if unfinished:
        cut = they(unfinished, "answer", "were cut")
        yield f"{cut} at {plural(request.max_new_tokens, 'token')}; raise --max-new-tokens for longer ones"


def _harness(request: EvaluationRequest, side: Path, loaded: Loaded, world: World, stage: Stage) -> None:
    from trainwright.evaluation.harness import run_tasks

    found = run_tasks(
        loaded, request.tasks, request.task_directory, QUICK_ROWS if request.quick else request.limit, world, stage
    )
    if world.is_main:
        (side / "harness.json").write_text(json.dumps(found, default=str), encoding="utf-8")


def _rows(request: EvaluationRequest, found: FoundModel) -> tuple[EvaluationRows, str]:
    """Return the rows, and their name in messages."""
    if request.data is not None:
        source = SourceSection.model_validate(
            {"source": request.data, "format": request.format, "limit": request.limit}
        )
        rows = read(source, key="--data")
    else:
        rows = _rows_of_run(found)
        rows = rows.chosen(range(min(len(rows), request.limit or len(rows))))
    if request.quick:
        rows = rows.chosen(drawn(len(rows), QUICK_ROWS))
    return rows, "--data" if request.data is not None else _RUNS_OWN


def _lengths(request: EvaluationRequest, found: FoundModel) -> tuple[int | None, str]:
    """Return the maximum row length, if limited, and how longer rows are handled, like ``data.long_documents``."""
    own = found.recipe.data if request.data is None and found.recipe is not None else None
    longest = request.max_length if own is None or request.max_length is not None else own.max_length
    return longest, "auto" if own is None else own.long_documents


def _rows_of_run(found: FoundModel) -> EvaluationRows:
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
    held = prepared.held_out()
    own = data.validation_source
    sources = [("data.validation", own)] if own is not None else list(zip(data.source_keys, data.sources, strict=True))
    return joined(
        [
            read(source, key=key, only=held[held[:, 0] == part, 1].tolist())
            for part, (key, source) in enumerate(sources)
            if part in held[:, 0]
        ]
    )


def _names(rows: EvaluationRows) -> list[str]:
    """Return the names of the sources, numbered if several have the same name."""
    names = [source.source for source in rows.sources]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _places_to_answer(request: EvaluationRequest, rows: EvaluationRows) -> list[int]:
    everything = request.full or request.quick or request.limit is not None
    places = rows.conversations
    return [places[index] for index in drawn(len(places), None if everything else USUAL_ANSWERS)]


def _check_references(rows: EvaluationRows, judged: dict[str, Judge], places: list[int], key: str) -> None:
    match = judged.get("answer")
    if not isinstance(match, AnswerMatch):
        return
    for place in places:
        try:
            match.check(str(rows.answer(place)["content"]))
        except RequestError as error:
            raise RequestError(f"{key}: {rows.place(place)}: {error}") from None


def _check_prompt_lengths(encoded: EncodedRows, rows: EvaluationRows, positions: int | None, key: str) -> None:
    for place, prompt in zip(encoded.prompts.places, encoded.prompts.tokens, strict=True):
        if positions is not None and len(prompt) >= positions:
            raise RequestError(
                f"{key}: {rows.place(place)}: its question has {plural(len(prompt), 'token')}, but the model has only "
                f"{positions:,} positions; shorten or remove the row"
            )
