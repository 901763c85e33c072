"""The request of an evaluation. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

QUICK_ROWS, USUAL_ANSWERS = 50, 200


@dataclass(frozen=True)
class EvaluationRequest:
    """The request of an evaluation. ``metrics`` in display order; ``explicit``: they were named by the user;
    ``on_benchmark``: on an unlearning benchmark, named or the run's own, instead of rows.
    """

    model: str
    metrics: tuple[str, ...]
    explicit: bool = False
    against: str | None = None
    adapter: str | None = None
    checkpoint: str | None = None
    data: str | None = None
    format: str = "auto"
    limit: int | None = None
    quick: bool = False
    full: bool = False
    answer_pattern: str | None = None
    json_schema: str | None = None
    max_new_tokens: int = 256
    max_length: int | None = None
    dtype: str = "fp32"
    batch_size: int | None = None
    tasks: tuple[str, ...] = ()
    task_directory: str | None = None
    on_benchmark: bool = False
    benchmark: str | None = None
    reference_log: str | None = None
    reference_model: str | None = None
    tokenizer: str | None = None
    relearning_steps: int = 20
    relearning_rate: float = 1e-5

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options that were given or have a default, as plain values."""
        return {key: value for key, value in asdict(self).items() if value not in (None, (), False)}

    @property
    def on_rows(self) -> bool:
        """Return whether rows are measured, and not only tasks of lm-evaluation-harness."""
        return self.data is not None or not self.tasks
