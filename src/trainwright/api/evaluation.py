"""Evaluation of a model, with confidence intervals, or comparison of two models on the same rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from trainwright.api.measuring import MeasureRequest, measure
from trainwright.api.separate_process import as_options, run_in_process


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation; ``str()`` gives the table that ``trainwright eval`` prints.

    Attributes:
        directory: contains ``metrics.json`` and ``samples.jsonl``.
    """

    directory: Path
    table: tuple[str, ...]

    @cached_property
    def details(self) -> dict[str, Any]:
        """Return the content of ``metrics.json``: every metric with its 95 % interval, the settings, notes."""
        details: dict[str, Any] = json.loads((self.directory / "metrics.json").read_text(encoding="utf-8"))
        return details

    @property
    def metrics(self) -> dict[str, float]:
        """Return the value of every metric by name; for agents and benchmarks see `details`."""
        metrics = self.details.get("metrics", {})
        return {name: each["value"] for name, each in metrics.items() if isinstance(each, dict) and "value" in each}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return prompt, reference, answer and scores of every row; empty if nothing was answered."""
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
    tokenizer: str | PathLike[str] | None = None,
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
    greedy_after: int | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> Evaluation:
    """Measure a model: likelihoods and its answers, each with its 95 % interval; what ``trainwright eval`` does.

    Args:
        model: a `Run`, one of its checkpoints, an adapter, a model directory or a Hub id.
        data: rows as for training. Default: the run's own validation rows.
        format: the layout of the rows, as ``data.format`` of a recipe.
        against: another model, compared on the same rows.
        benchmark: an unlearning benchmark instead of rows, such as ``tofu:forget10``.
        reference_log: results of a model that was not trained on the forget set: its ``log.json``.
        reference_model: for ``mia_reference``: a model that was not trained on the forget set.
        tokenizer: with ``benchmark``: of models that have none of their own, such as MUSE's.
        relearning_steps: for ``relearning``: steps of training again. Default: 20.
        relearning_rate: for ``relearning``: the learning rate. Default: 1e-5.
        adapter: an adapter to apply to the model.
        checkpoint: of a run: ``"final"``, ``"best"``, ``"newest"`` or a step. Default: the first that exists.
        metrics: what to measure. Default: the usual.
        answer_pattern: the short answer in a text: ``"gsm8k"``, ``"number"`` or a regular expression.
        json_schema: a file with the JSON Schema that answers should follow.
        limit: use this number of first rows, and answer all of them.
        quick: use a sample of 50 rows.
        full: answer all rows instead of a sample of 200.
        max_new_tokens: the maximum length of an answer, in tokens. Default: 256.
        max_length: truncate rows to this number of tokens. Default: as in the run, or the model's positions.
        lm_eval: tasks of lm-evaluation-harness.
        lm_eval_include: a directory with definitions of additional tasks.
        dtype: ``fp32``, ``bf16`` or ``fp16``. auto: bf16 on GPUs that support it.
        batch_size: the number of rows answered at once.
        num_processes: default: one per GPU, or one.
        episodes: of an agent: episodes in one context. Default: as in its recipe.
        copies: of an agent: how many try each task. Default: as in its recipe.
        temperature: of an agent: the sampling temperature of its actions. Default: as in its recipe.
        greedy_after: of an agent: episodes before it takes the most likely actions. Default: as in its recipe.
        out: a new directory for the results. Default: ``evaluations/<model>-<date>-<time>``.
        progress: show how many rows are done.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Raises:
        RequestError: the model, the rows or the arguments are invalid; messages name the command's options.
        MachineError: the model does not fit this machine.
        Stopped: it was stopped by a signal; nothing was written.

    Examples:
        >>> import trainwright as tw
        >>> found = tw.evaluate("runs/tiny", metrics=["loss", "token_accuracy"], out="evaluations/tiny")
        >>> sorted(found.metrics)
        ['loss', 'token_accuracy']
    """
    request = MeasureRequest(**as_options(locals()))
    directory, table = run_in_process(measure, request, progress=progress, trust_code=trust_code)
    return Evaluation(directory, tuple(table))
