"""An evaluation, independent of its processes: prepared once, measured by all ranks, and reported.

    work/model/     the model, and the rows in its tokens
    work/against/   the same for the other model

For tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), rank 0 runs the harness and
sends its requests to all ranks, which share the work.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from trainwright.data.rows.tokenizer_calls import call_tokenizer
from trainwright.data.stream.dataset_cache import list_validation_parts
from trainwright.data.stream.dataset_cache import prepare as prepare_data
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError, TrainwrightError
from trainwright.inference.answering import AnswerSettings, Stage, answer_all
from trainwright.inference.evaluation.measure import Measurement, MeasurementSettings, Origins, compare, measure
from trainwright.inference.evaluation.metrics import (
    LIKELIHOODS,
    QUICK_ROWS,
    USUAL_ANSWERS,
    AnswerMatch,
    EvaluationRequest,
    Judge,
    build_judges,
)
from trainwright.inference.evaluation.report import Report
from trainwright.inference.evaluation.rows import EncodedRows, EvaluationRows, draw_indices, encode, join_rows, read
from trainwright.inference.finding import UnloadedModel, find_model
from trainwright.inference.generation import Sampling, stop_of
from trainwright.inference.loading import DTYPES, Loaded, check_fits, load
from trainwright.inference.scoring import score
from trainwright.machine.cache import find_cache_root
from trainwright.machine.machine import Machine
from trainwright.models.load import load_tokenizer, read_max_positions
from trainwright.parallel.world import World
from trainwright.recipe.sections.data import SourceSection
from trainwright.utils.text import format_clause, format_plural

_MODEL, _AGAINST = "model", "against"
_RUNS_OWN = "data.validation of the run"


def prepare(request: EvaluationRequest, machine: Machine, processes: int, work: Path) -> None:
    """Find models and rows, and write what every rank needs to ``work``. Called once, before the ranks are started.

    Raises:
        RequestError: a model, the rows or a setting is invalid; rows are named by file and line.
        MachineError: a model does not fit this machine.
    """
    model = find_model(request.model, request.adapter, request.checkpoint)
    sides = {_MODEL: model}
    if request.against is not None:
        sides[_AGAINST] = find_model(request.against)
    for side, unloaded_model in sides.items():
        check_fits(unloaded_model, DTYPES[request.dtype], machine, processes)
        (work / side).mkdir()
        unloaded_model.save(work / side / "found.json")
    if not request.on_rows:
        return
    rows, key = _read_rows(request, model)
    longest, long_documents = _choose_lengths(request, model)
    answer_judges = build_judges(request.metrics, request.answer_pattern, request.json_schema)
    if answer_judges and not rows.conversations:
        if request.explicit or request.answer_pattern is not None or request.json_schema is not None:
            raise RequestError(
                f"--metrics: {', '.join(answer_judges)} need questions, and the rows of {rows.name} are texts"
            )
        answer_judges = {}
    is_unlimited = request.full or request.quick or request.limit is not None
    conversations = rows.conversations if answer_judges else []
    questions = [
        conversations[index] for index in draw_indices(len(conversations), None if is_unlimited else USUAL_ANSWERS)
    ]
    _check_references(rows, answer_judges, questions, key)
    for side, unloaded_model in sides.items():
        limit = min((n for n in (longest, read_max_positions(unloaded_model.section)) if n is not None), default=None)
        encoded_rows = encode(
            rows,
            load_tokenizer(unloaded_model.section),
            max_length=limit,
            long_documents=long_documents,
            questions=questions,
            key=key,
        )
        _check_prompt_lengths(encoded_rows, rows, read_max_positions(unloaded_model.section), key)
        encoded_rows.save(work / side)
    names = [name for name in request.metrics if name in answer_judges or name in LIKELIHOODS]
    if not names:
        raise RequestError("--metrics: no metric to compute")
    origins = Origins(_number_names(rows), rows.numbers, rows.parts)
    about = {"origins": asdict(origins), "names": names, "answered": len(questions)}
    (work / "about.json").write_text(json.dumps(about), encoding="utf-8")


def work_on(request: EvaluationRequest, work: Path, world: World, stage: Stage) -> None:
    """Measure this rank's part; rank 0 writes the results to ``work``. Every rank must call."""
    for side in (_MODEL, _AGAINST):
        if (work / side).is_dir():
            loaded_model = load(UnloadedModel.open(work / side / "found.json"), DTYPES[request.dtype], world.device)
            if request.on_rows:
                _measure(request, work, side, loaded_model, world, stage)
            if request.tasks:
                limit = QUICK_ROWS if request.quick else request.limit
                results = run_tasks(loaded_model, request.tasks, request.task_directory, limit, world, stage)
                if world.is_main:
                    (work / side / "harness.json").write_text(json.dumps(results, default=str), encoding="utf-8")
            del loaded_model
            if world.device.type != "cpu":
                torch.accelerator.empty_cache()


def report_of(request: EvaluationRequest, work: Path) -> Report:
    """Return the report of the results in ``work``."""
    settings = request.settings
    harness: dict[str, Any] = {}
    for side in (_MODEL, _AGAINST):
        if (file := work / side / "harness.json").is_file():
            suffix = f" ({side})" if request.against is not None else ""
            tasks = json.loads(file.read_text(encoding="utf-8"))
            harness |= {f"{task}{suffix}": metrics for task, metrics in tasks.items()}
    if not request.on_rows:
        del settings["metrics"]
        return Report(settings, harness=harness)
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    origins = Origins(**about["origins"])
    sources = " + ".join(origins.sources)
    settings |= {"data": sources, "rows": len(origins.numbers), "answered": about["answered"]}
    measurement = Measurement.open(work / _MODEL / "measured.json")
    against = None if request.against is None else Measurement.open(work / _AGAINST / "measured.json")
    several = len(origins.sources) > 1
    parts = {
        name: _build_report(measurement.select_source(part), None if against is None else against.select_source(part))
        for part, name in enumerate(origins.sources)
        if several and part in origins.parts
    }
    return replace(_build_report(measurement, against), settings=settings, harness=harness, parts=parts)


def _build_report(measured: Measurement, against: Measurement | None) -> Report:
    return Report({}, measured, against, None if against is None else compare(measured, against))


def _measure(request: EvaluationRequest, work: Path, side: str, loaded: Loaded, world: World, stage: Stage) -> None:
    about = json.loads((work / "about.json").read_text(encoding="utf-8"))
    rows, origins = EncodedRows.open(work / side), Origins(**about["origins"])
    model = UnloadedModel.open(work / side / "found.json")
    settings = MeasurementSettings(
        model.origin,
        origins,
        about["names"],
        build_judges(about["names"], request.answer_pattern, request.json_schema),
        Sampling(max_new_tokens=request.max_new_tokens),
        request.batch_size,
    )
    result = measure(loaded, rows, settings, world, stage)
    if result is not None:
        replace(result, notes=[*rows.notes, *_iterate_notes(result, rows, request)]).save(work / side / "measured.json")


def _iterate_notes(measured: Measurement, rows: EncodedRows, request: EvaluationRequest) -> Iterator[str]:
    if rows.cut:
        yield f"{format_plural(rows.cut, 'row')} truncated to the maximum length"
    if rows.split:
        yield f"{format_plural(rows.split, 'row')} split at the maximum length; no token is lost"
    unfinished_count = sum(sample.complete is False for sample in measured.samples)
    if unfinished_count:
        cut = format_clause(unfinished_count, "answer", "were cut")
        yield f"{cut} at {format_plural(request.max_new_tokens, 'token')}; raise --max-new-tokens for longer ones"


def _read_rows(request: EvaluationRequest, model: UnloadedModel) -> tuple[EvaluationRows, str]:
    """Return the rows, and their name in messages."""
    if request.data is not None:
        source = SourceSection.model_validate(
            {"source": request.data, "format": request.format, "limit": request.limit}
        )
        rows = read(source, key="--data")
    else:
        rows = _read_rows_of_run(model)
        rows = rows.chosen(range(min(len(rows), request.limit or len(rows))))
    if request.quick:
        rows = rows.chosen(draw_indices(len(rows), QUICK_ROWS))
    return rows, "--data" if request.data is not None else _RUNS_OWN


def _choose_lengths(request: EvaluationRequest, model: UnloadedModel) -> tuple[int | None, str]:
    """Return the maximum row length, if limited, and how longer rows are handled, like ``data.long_documents``."""
    defaults = model.recipe.data if request.data is None and model.recipe is not None else None
    longest = request.max_length if defaults is None or request.max_length is not None else defaults.max_length
    return longest, "auto" if defaults is None else defaults.long_documents


def _read_rows_of_run(model: UnloadedModel) -> EvaluationRows:
    recipe = model.recipe
    if recipe is None:
        raise RequestError(f"--data: {model.origin} is not a run with validation rows; pass the rows")
    data = recipe.data
    if recipe.spec.no_validation_rows is not None:
        raise RequestError(f"--data: {model.origin} is of {recipe.spec.no_validation_rows}")
    if not data.validation:
        raise RequestError(f"--data: {model.origin} is of a run without validation rows; pass the rows")
    if data.streaming is not None:
        return join_rows([read(source, key=key) for source, key in data.validation_sources])
    prepared_data = prepare_data(data, load_tokenizer(model.section), seed=recipe.train.seed, cache=find_cache_root())
    validation_rows = prepared_data.held_out()
    return join_rows(
        [
            read(source, key=key, only=validation_rows[validation_rows[:, 0] == part, 1].tolist())
            for part, (source, key) in enumerate(list_validation_parts(data))
            if part in validation_rows[:, 0]
        ]
    )


def _number_names(rows: EvaluationRows) -> list[str]:
    """Return the names of the sources, numbered if several have the same name."""
    names = [source.source for source in rows.sources]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def _check_references(rows: EvaluationRows, judged: dict[str, Judge], questions: list[int], key: str) -> None:
    match = judged.get("answer")
    if not isinstance(match, AnswerMatch):
        return
    for row in questions:
        try:
            match.check(str(rows.answer(row)["content"]))
        except RequestError as error:
            raise RequestError(f"{key}: {rows.location(row)}: {error}") from None


def _check_prompt_lengths(encoded: EncodedRows, rows: EvaluationRows, positions: int | None, key: str) -> None:
    for row, prompt in zip(encoded.prompts.rows, encoded.prompts.tokens, strict=True):
        if positions is not None and len(prompt) >= positions:
            raise RequestError(
                f"{key}: {rows.location(row)}: its question has {format_plural(len(prompt), 'token')}, but the model "
                f"has only {positions:,} positions; shorten or remove the row"
            )


_HARNESS_POSITIONS = 2048  # of a model that does not state its number of positions
_HARNESS_NEW_TOKENS = 256  # if a task does not set it


def run_tasks(
    loaded: Loaded, tasks: Sequence[str], directory: str | None, limit: int | None, world: World, stage: Stage
) -> dict[str, dict[str, Any]]:
    """Return the harness's metrics by task; empty on ranks other than 0. Every rank must call.

    Args:
        directory: with definitions of additional tasks.
        limit: rows of every task.

    Raises:
        RequestError: a task is unknown, or its data is not available.
    """
    shared = _Shared(loaded, world, stage)
    if not world.is_main:
        shared.serve()
        return {}
    try:
        return _run_harness(_build_language_model(shared), tasks, directory, limit)
    finally:
        shared.finish()


class _Shared:
    """Operations of all ranks together, directed by rank 0."""

    def __init__(self, loaded: Loaded, world: World, stage: Stage) -> None:
        self.loaded = loaded
        self._world = world
        self._stage = stage

    def serve(self) -> None:
        """Execute rank 0's operations on the other ranks until it is finished."""
        while (call := self._world.broadcast(None)) is not None:
            name, arguments = call
            if name == "pairs":
                self._score_pairs(*arguments)
            else:
                self._answers(*arguments)

    def finish(self) -> None:
        self._world.broadcast(None)

    def likelihoods(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return for every continuation after its context, in tokens, its log-likelihood and whether it is greedy."""
        self._world.broadcast(("pairs", (pairs,)))
        return self._score_pairs(pairs)

    def answers(self, prompts: list[list[int]], sampling: dict[str, Any], until: list[str]) -> list[str]:
        self._world.broadcast(("answers", (prompts, sampling, until)))
        return self._answers(prompts, sampling, until)

    def _score_pairs(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        examples = [
            (context + continuation, [False] * len(context) + [True] * len(continuation))
            for context, continuation in pairs
        ]
        dataset = TokenDataset.from_examples(examples, "harness")
        rows = score(self.loaded.lm, dataset, self._world, done=self._stage("scoring", len(pairs)))
        return [(-float(row.losses.sum(dtype="float64")), bool(row.correct.all())) for row in rows]

    def _answers(self, prompts: list[list[int]], sampling: dict[str, Any], until: list[str]) -> list[str]:
        tokenizer, lm = self.loaded.tokenizer, self.loaded.lm
        stop = stop_of(lm.model, tokenizer, chat=False).add_texts(until)
        settings, progress = AnswerSettings(Sampling(**sampling), stop), self._stage("answers", len(prompts))
        with lm.open_for_generation() as model:
            answers = answer_all(model, tokenizer, prompts, settings, self._world, progress)
        return [answer.text for answer in answers]


def _build_language_model(shared: _Shared) -> Any:
    """Return the model with the harness's interface."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = shared.loaded.tokenizer
    config = shared.loaded.lm.config.get_text_config()
    # The token that is predicted last is fed here, too, so a text has one position less than the model.
    longest = (getattr(config, "max_position_embeddings", None) or _HARNESS_POSITIONS) - 1

    class LanguageModel(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            if add_special_tokens is None and string.startswith(str(tokenizer.decode(self.prefix_token_id))):
                add_special_tokens = False
            options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return list(call_tokenizer(tokenizer, [string], **options)["input_ids"][0])

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation[-longest:]) for _, context, continuation in requests]
            return shared.likelihoods([(context[-max(1, longest - len(after)) :], after) for context, after in pairs])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows = [
                [
                    make_disjoint_window(window)
                    for window in get_rolling_token_windows(
                        self.tok_encode(request.args[0]), self.prefix_token_id, longest - 1, context_len=1
                    )
                ]
                for request in requests
            ]
            likelihoods = iter(shared.likelihoods(list(itertools.chain.from_iterable(windows))))
            return [sum(next(likelihoods)[0] for _ in of_text) for of_text in windows]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts: dict[int, str] = {}
            alike: dict[str, list[int]] = defaultdict(list)
            for index, request in enumerate(requests):
                alike[repr(request.args[1])].append(index)
            for indices in alike.values():
                settings = normalize_gen_kwargs(dict(requests[indices[0]].args[1]), _HARNESS_NEW_TOKENS)
                sampling = _parse_sampling(settings)
                prompt_limit = longest + 1 - sampling.max_new_tokens
                if prompt_limit < 1:
                    raise RequestError(
                        f"--lm-eval: answers of {sampling.max_new_tokens} tokens are longer than the model"
                    )
                prompts = [self.tok_encode(requests[index].args[0])[-prompt_limit:] for index in indices]
                answers = shared.answers(prompts, asdict(sampling), list(settings["until"]))
                texts.update(zip(indices, answers, strict=True))
            return [texts[index] for index in range(len(requests))]

    return LanguageModel()


def _parse_sampling(settings: dict[str, Any]) -> Sampling:
    """Return the sampling settings of a task. Raises RequestError for unsupported ones."""
    supported_keys = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}
    if unknown := [key for key, value in settings.items() if key not in supported_keys and value is not None]:
        raise RequestError(f"--lm-eval: the task sets {', '.join(unknown)} for its answers, which is not supported")
    return Sampling(
        max_new_tokens=int(settings["max_gen_toks"]),
        temperature=float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0,
        top_p=float(settings.get("top_p") or 1.0),
        top_k=settings.get("top_k") or None,
    )


def _run_harness(
    model: Any, tasks: Sequence[str], directory: str | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=directory)
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise RequestError(f"--lm-eval: lm-evaluation-harness has no task {task}{hint}")
    try:
        results = simple_evaluate(model, tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False)
    except TrainwrightError:
        raise
    except (OSError, ConnectionError, ValueError) as error:  # of the datasets library and of the Hub's client
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RequestError(f"--lm-eval {','.join(tasks)}: the tasks' data cannot be loaded: {reason}") from error
    return {task: dict(metrics) for task, metrics in results["results"].items()}
