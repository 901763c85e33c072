"""Evaluation: how good a model is, with intervals; or two models on the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from trainwright.api.apart import apart
from trainwright.api.measuring import MeasureAsked, measure


@dataclass(frozen=True)
class Evaluation:
    """What was measured; ``str()`` of it is the table that ``trainwright eval`` prints.

    Attributes:
        directory: where ``metrics.json`` and ``samples.jsonl`` are.
    """

    directory: Path
    table: tuple[str, ...]

    @cached_property
    def details(self) -> dict[str, Any]:
        """All of ``metrics.json``: every metric with its 95 % interval, the settings, notes."""
        found: dict[str, Any] = json.loads((self.directory / "metrics.json").read_text(encoding="utf-8"))
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """The value of every metric by its name; of an agent and a benchmark see `details`."""
        found = self.details.get("metrics", {})
        return {name: each["value"] for name, each in found.items() if isinstance(each, dict) and "value" in each}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Row by row: prompt, reference, answer and scores; empty where nothing was answered."""
        file = self.directory / "samples.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [json.loads(line) for line in lines]

    def __str__(self) -> str:
        return "\n".join(self.table)


def evaluate(
    model: str | PathLike[str],
    *,
    data: str | PathLike[str] | None = None,
    format: str = "auto",
    against: str | PathLike[str] | None = None,
    benchmark: str | None = None,
    reference_log: str | PathLike[str] | None = None,
    reference_model: str | PathLike[str] | None = None,
    relearning_steps: int | None = None,
    relearning_rate: float | None = None,
    adapter: str | PathLike[str] | None = None,
    checkpoint: str | int | None = None,
    metrics: str | Sequence[str] | None = None,
    answer_pattern: str | None = None,
    json_schema: str | PathLike[str] | None = None,
    limit: int | None = None,
    quick: bool = False,
    full: bool = False,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    lm_eval: str | Sequence[str] | None = None,
    lm_eval_include: str | PathLike[str] | None = None,
    dtype: str = "auto",
    batch_size: int | None = None,
    num_processes: int | None = None,
    episodes: int | None = None,
    copies: int | None = None,
    temperature: float | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool = False,
) -> Evaluation:
    """Measure a model: likelihoods and what it answers, each with its 95 % interval; what ``trainwright eval`` does.

    Args:
        model: a `Run`, one of its checkpoints, an adapter, a model directory or a hub id.
        data: rows as for training. Default: the run's own validation rows.
        format: how a row is laid out, as ``data.format`` of a recipe.
        against: another model, to be compared on the same rows.
        benchmark: a benchmark of unlearning instead of rows, such as ``tofu:forget10``.
        reference_log: what was measured of a model that never saw the forget set: its ``log.json``.
        reference_model: for ``mia_reference``: a model that never saw the forget set.
        relearning_steps: for ``relearning``: steps of training again. Default: 20.
        relearning_rate: for ``relearning``: the learning rate. Default: 1e-5.
        adapter: an adapter to put on the model.
        checkpoint: of a run: ``"final"``, ``"best"``, ``"newest"`` or a step. Default: the first there is.
        metrics: what to measure. Default: the usual.
        answer_pattern: the short answer in a text: ``"gsm8k"``, ``"number"`` or a regular expression.
        json_schema: a file with the JSON Schema that answers should follow.
        limit: the first so many rows, all of them answered.
        quick: 50 rows, drawn from all.
        full: answer all rows, and not 200 drawn from them.
        max_new_tokens: the longest answer, in tokens. Default: 256.
        max_length: cut rows to so many tokens. Default: as the run, or the model's positions.
        lm_eval: tasks of lm-evaluation-harness.
        lm_eval_include: a directory where more tasks are defined.
        dtype: ``fp32``, ``bf16`` or ``fp16``. auto: bf16 on GPUs that have it.
        batch_size: rows that are answered at once.
        num_processes: default: one a GPU, or one.
        episodes: of an agent: episodes in one context. Default: as its recipe.
        copies: of an agent: how many try each task. Default: as its recipe.
        temperature: of an agent: the temperature that its actions are drawn at. Default: as its recipe.
        out: a new directory for the results. Default: ``evaluations/<model>-<date>-<time>``.
        progress: show how many rows are done.

    Raises:
        RequestError: the model, the rows or the arguments are wrong; messages name the command's options.
        MachineError: the machine cannot hold the model.
        Stopped: it was stopped by a signal; nothing was written.

    Examples:
        >>> import trainwright as tw
        >>> found = tw.evaluate("runs/tiny", metrics=["loss", "token_accuracy"], out="evaluations/tiny")
        >>> sorted(found.metrics)
        ['loss', 'token_accuracy']
    """
    options = MeasureAsked(
        model=fspath(model),
        data=_text(data),
        format=format,
        against=_text(against),
        benchmark=benchmark,
        reference_log=_text(reference_log),
        reference_model=_text(reference_model),
        relearning_steps=relearning_steps,
        relearning_rate=relearning_rate,
        adapter=_text(adapter),
        checkpoint=None if checkpoint is None else str(checkpoint),
        metrics=_joined(metrics),
        answer_pattern=answer_pattern,
        json_schema=_text(json_schema),
        limit=limit,
        quick=quick,
        full=full,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        lm_eval=_joined(lm_eval),
        lm_eval_include=_text(lm_eval_include),
        dtype=dtype,
        batch_size=batch_size,
        num_processes=num_processes,
        episodes=episodes,
        copies=copies,
        temperature=temperature,
        out=_text(out),
    )
    directory, table = apart(measure, options, progress=progress)
    return Evaluation(directory, tuple(table))


def _text(path: str | PathLike[str] | None) -> str | None:
    return None if path is None else fspath(path)


def _joined(names: str | Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)
