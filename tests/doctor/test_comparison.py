from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.doctor.verify import Comparison

STEP = {"tokens": 100, "target_tokens": 40, "learning_rate": 1e-3, "loss": 5.0, "grad_norm": 2.0}


def written(directory: Path, steps: list[dict[str, Any]]) -> Path:
    """A run's directory with these steps."""
    directory.mkdir()
    lines = [
        {"event": "step", "time": 1.0, "step_time": 1.0, "step": n, **STEP, **fields}
        for n, fields in enumerate(steps, 1)
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def compared(tmp_path: Path, other: list[dict[str, Any]], tolerance: float = 1e-5) -> Comparison:
    runs = written(tmp_path / "one", [{} for _ in other]), written(tmp_path / "other", other)
    return Comparison.of_runs(("single", "fsdp x 2"), runs, tolerance)


def test_what_summing_in_another_order_changes_is_the_same_run(tmp_path: Path) -> None:
    result = compared(tmp_path, [{}, {"loss": 5.00002, "grad_norm": 2.00001}])
    assert result.first_difference() is None
    assert result.verdict() == (
        "the same run: over 2 steps losses differ by at most 4.0e-06 and gradient norms by 5.0e-06 "
        "(tolerance 1e-05, relative)"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss": 5.001}, "at step 2 the loss is 5 and 5.001, 2.0e-04 apart"),
        ({"grad_norm": 2.001}, "at step 2 the gradient norm is 2 and 2.001, 5.0e-04 apart"),
        ({"loss": "nan"}, "at step 2 the loss is 5 and nan, nan apart"),
        ({"tokens": 101}, "at step 2 the tokens are 100 and 101"),
        ({"learning_rate": 2e-3}, "at step 2 the learning rate are 0.001 and 0.002"),
    ],
)
def test_where_runs_part_the_first_step_and_the_number_are_named(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    result = compared(tmp_path, [{}, fields, fields])
    assert result.first_difference() == said
    assert result.verdict() == f"NOT the same run: {said} (tolerance 1e-05, relative)"


def test_a_loss_near_zero_has_the_rounding_of_its_parts(tmp_path: Path) -> None:
    runs = []
    for name, loss in (("one", 1e-4), ("other", 1.1e-4)):
        parts = {"loss": loss, "metrics": {"forget_loss": 4.0, "retain_loss": 4.0, "forget_nll": 900.0}}
        runs.append(written(tmp_path / name, [parts]))
    result = Comparison.of_runs(("single", "ddp x 2"), (runs[0], runs[1]), 1e-5)
    assert result.is_same and result.worst("loss") == pytest.approx(1e-5 / 4)
    assert not Comparison.of_runs(result.names, (runs[0], runs[1]), 2e-6).is_same


def test_half_precision_is_allowed_more(tmp_path: Path) -> None:
    assert compared(tmp_path, [{"loss": 5.05}], tolerance=2e-2).first_difference() is None


def test_the_table_has_both_sides(tmp_path: Path) -> None:
    shown = io.StringIO()
    compared(tmp_path, [{}, {"loss": 5.5}]).show(shown)
    lines = shown.getvalue().splitlines()
    assert any("single" in line and "fsdp x 2" in line for line in lines)
    assert [part.strip() for part in lines[-2].strip("│").split("│")] == [
        "2",
        "5.000000",
        "5.500000",
        "9.1e-02",
        "2.000000",
        "2.000000",
        "0",
    ]


def test_runs_of_different_length_cannot_be_compared(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", [{}]), written(tmp_path / "b", [{}, {}])
    with pytest.raises(ValueError, match=r"1 steps? and .* 2"):
        Comparison.of_runs(("a", "b"), (one, other), 1e-5)
