"""What recipes and plans know of the extensions. Imports no torch; the task and the loss are in training.py."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from trainwright import extension
from trainwright.data.rows.formats import EXAMPLES, Example
from trainwright.data.rows.layouts import RowLayout
from trainwright.data.sources.registry import Source
from trainwright.errors import RequestError
from trainwright.models.attention.kernels import AttentionKernel
from trainwright.parallel.replicated.spec import DDP
from trainwright.recipe.optimizer_spec import OptimizerSpec, ScheduleSpec
from trainwright.recipe.sections.fields import NotNegative, Section
from trainwright.recipe.task_spec import TaskSpec
from trainwright.tasks.unlearn.section import Objective


class FocalSection(Section):
    """What the loss of a token counts."""

    gamma: NotNegative = Field(2.0, description="The power of 1 less the token's probability. 0: plain fine-tuning.")


FOCAL = TaskSpec(
    name="focal",
    summary="supervised fine-tuning by the focal loss (arXiv 1708.02002)",
    module="trainwright_example.training",
    section=FocalSection,
    section_description="The focal loss; only with `task: focal`.",
    rows=lambda recipe, key: "trainwright_example:RIGHT_SUMS",
    also_called=("focal_loss",),
)

AT_ONCE = replace(DDP, summary="as ddp, with all gradients in one bucket", bucket_bytes=None)

BOUNDED_ASCENT = Objective(
    "gradient ascent on forget tokens until their loss is beta",
    "an example",
    "trainwright_example.training:bounded_ascent",
    defaults={"beta": 5.0},
)

SGD = OptimizerSpec(
    summary="heavy_ball: gradient descent with momentum",
    implementation="trainwright_example.training:sgd",
    reads=("momentum", "options"),
    state=1,
)

SQUARE_ROOT = ScheduleSpec(lambda progress: math.sqrt(1.0 - progress))


@extension("metric")
def length_ratio(reference: str, answer: str) -> float:
    """Return the length of the shorter text over that of the longer one."""
    longer = max(len(reference), len(answer))
    return min(len(reference), len(answer)) / longer if longer else 1.0


def _sums() -> Iterator[dict[str, str]]:
    for number in range(100):
        first, second = number % 10, number // 10
        yield {"question": f"What is {first} + {second}?", "answer": str(first + second)}


SUMS = Source(
    rows=_sums, key=lambda: "sums of digits, version 1", example={"question": "What is 1 + 1?", "answer": "2"}
)


def _right(row: dict[str, Any], layout: RowLayout, remarks: Counter[str] | None) -> list[tuple[int, Example]]:
    if (sum_ := re.search(r"(\d) \+ (\d)", row["question"])) and int(sum_[1]) + int(sum_[2]) != int(row["answer"]):
        raise RequestError(f"{sum_[0]} is not {row['answer']}; correct the row")
    return EXAMPLES.convert(row, layout, remarks)


RIGHT_SUMS = replace(EXAMPLES, name="right sums", convert=_right)

BY_HAND = AttentionKernel(
    name="by_hand",
    title="attention by hand",
    packed=True,
    memory="scores",
    vendors=frozenset({"CPU"}),
    implementation="trainwright_example.training:attention_by_hand",
)


class Losses:
    """Write the loss of every step into a file of the run's directory."""

    def __init__(self, run: Path) -> None:
        self._file = run / "losses.txt"

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{event['loss']}\n")
