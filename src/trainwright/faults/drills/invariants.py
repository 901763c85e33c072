"""Properties of a run's files, checked without the package's own readers, and the verdicts of a trial."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from trainwright.doctor.verify import TOLERANCES, find_largest_loss
from trainwright.recipe.loading import load_recipe
from trainwright.utils.text import format_ranges

_EXACT = ("loss", "grad_norm", "learning_rate", "tokens", "target_tokens")
_ROUNDED = ("loss", "learning_rate", "tokens", "target_tokens")
# Of these, what summation in another order changes.
_SUMS = ("loss",)


def read_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's events that are whole, as they stand; a line that is not the last must be whole."""
    path = run / "events.jsonl"
    if not path.exists():
        return []
    events = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            events.append(json.loads(text))
        except ValueError:
            continue  # cut by a kill; the steps are counted below
    return [event for event in events if isinstance(event, dict) and "event" in event]


def read_history(run: Path) -> list[dict[str, Any]]:
    """Return the events that count: of a run that was resumed from step k, or went back to it, none before is beyond k.

    InvariantBroken when a start names a step that had not been reached.
    """
    events_so_far: list[dict[str, Any]] = []
    for event in read_lines(run):
        if event["event"] in ("start", "rewind"):
            resume_step = int(event.get("resumed_from") or 0)
            reached_step = max((past["step"] for past in events_so_far if past["event"] == "step"), default=0)
            require(
                resume_step <= reached_step,
                f"resumed from step {resume_step}, but only {reached_step} steps had been recorded",
            )
            events_so_far = [past for past in events_so_far if resume_step and past.get("step", 0) <= resume_step]
        events_so_far.append(event)
    return events_so_far


def read_events_of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind, also those that were repeated."""
    return [event for event in read_lines(run) if event["event"] == kind]


def count_starts(run: Path) -> int:
    """Return how many launches of the run have begun."""
    return len(read_events_of_kind(run, "start"))


def read_faults(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the `fault` events of these kinds."""
    return [event for event in read_events_of_kind(run, "fault") if event["kind"] in kinds]


def find_last_step(run: Path) -> int:
    """Return the last step that was recorded."""
    return max((event["step"] for event in read_events_of_kind(run, "step")), default=0)


def find_step_since(run: Path, starts: int) -> int:
    """Return the last step since the start of this number (from 0); 0 where there is none."""
    starts_so_far, last = 0, 0
    for event in read_lines(run):
        starts_so_far += event["event"] == "start"
        if event["event"] == "step" and starts_so_far > starts:
            last = event["step"]
    return last


def check_complete_and_same(run: Path, reference: Path, *, exact: bool) -> None:
    """Require that the run is finished and has every step of the reference once, with its values.

    Args:
        exact: bit for bit, the trained model included; else to rounding, relative to the largest loss.
    """
    ours, theirs = read_history(run), read_history(reference)
    rounding = 0.0
    if not exact:
        events_with_loss = _select_events(theirs, "step") + _select_events(theirs, "evaluate")
        rounding = look_up_rounding(reference) * find_largest_loss(events_with_loss)
    steps = [event["step"] for event in ours if event["event"] == "step"]
    expected_steps = [event["step"] for event in theirs if event["event"] == "step"]
    require(steps == expected_steps, f"steps are {format_ranges(steps)}, not {format_ranges(expected_steps)}")
    for kind in ("step", "evaluate"):
        for left, right in zip(_select_events(ours, kind), _select_events(theirs, kind), strict=False):
            _compare(kind, left, right, rounding)
    evaluations = [[event["step"] for event in _select_events(events, "evaluate")] for events in (ours, theirs)]
    require(evaluations[0] == evaluations[1], f"evaluations are of steps {evaluations[0]}")
    if exact:
        texts = [[event["text"] for event in _select_events(events, "generate")] for events in (ours, theirs)]
        require(texts[0] == texts[1], f"generated texts are {texts[0]}, not {texts[1]}")
    finish = _select_events(ours, "finish")
    require(bool(finish) and finish[-1]["status"] == "finished", "the last finish is not finished")
    check_final(run, reference, exact=exact)


def _select_events(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind. An evaluation that a stop put off is done, and told, by each start from its step."""
    matching = [event for event in events if event["event"] == kind]
    if kind not in ("evaluate", "generate"):
        return matching
    return list({(event["step"], event.get("prompt")): event for event in matching}.values())


def look_up_rounding(run: Path) -> float:
    """Return the relative difference that another number of processes, or another strategy, may make to a run's losses.

    Its resolved recipe has the precision.
    """
    train = load_recipe(run / "recipe.yaml").train
    return TOLERANCES["bf16" if train.tf32 else train.mixed_precision]


def _compare(kind: str, one: dict[str, Any], other: dict[str, Any], rounding: float) -> None:
    """Require that two events have the same values; sums may differ by ``rounding``."""
    differences = _select_compared_values(kind, one, not rounding)
    for name, theirs in _select_compared_values(kind, other, not rounding).items():
        ours, tolerance = differences.get(name), rounding if name in _SUMS else 0.0
        same = ours == theirs or (bool(tolerance) and ours is not None and abs(ours - theirs) <= tolerance)
        to = f" (to {tolerance:.2g})" if tolerance else ""
        require(same, f"{kind} {one['step']}: {name} is {ours!r}, undisturbed {theirs!r}{to}")


def _select_compared_values(kind: str, event: dict[str, Any], exact: bool) -> dict[str, Any]:
    """Return the values of an event that are compared; to rounding, no metrics that count answers or tokens."""
    if kind == "evaluate":
        metrics: dict[str, Any] = event["metrics"]
        return metrics if exact else {name: value for name, value in metrics.items() if name == "loss"}
    return {name: event[name] for name in (_EXACT if exact else _ROUNDED) if name in event}


def check_final(run: Path, reference: Path, *, exact: bool) -> None:
    """Require that the trained model is complete and, if runs are bit-identical, equals the reference's."""
    final, reference_final = run / "final", reference / "final"
    names = sorted(path.name for path in final.iterdir()) if final.is_dir() else []
    require(names == sorted(path.name for path in reference_final.iterdir()), f"final/ has {names}")
    for path in final.glob("*.safetensors"):
        read_safetensors_header(path)
        if exact:
            is_same = path.read_bytes() == (reference_final / path.name).read_bytes()
            require(is_same, f"{path} is not the undisturbed run's")


def list_checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of the directories that have a checkpoint's name."""
    paths = (run / "checkpoints").glob("step-*")
    return sorted(int(path.name[5:]) for path in paths if re.fullmatch(r"step-[0-9]{8}", path.name) and path.is_dir())


def explain_broken_checkpoint(path: Path) -> str | None:
    """Return why a checkpoint is incomplete, by its manifest and tensor files; None if it is complete."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        seal = manifest.pop("sha256")
    except (OSError, ValueError, KeyError) as error:
        return f"{path.name}/manifest.json: {error!r}"
    if seal != hashlib.sha256(json.dumps(manifest).encode()).hexdigest():
        return f"{path.name}/manifest.json has changed since it was sealed"
    names = {file.name for file in path.iterdir()} - {"manifest.json"}
    if names != set(manifest["files"]):
        return f"{path.name} has {sorted(names)}, its manifest {sorted(manifest['files'])}"
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        if len(data) != entry["size"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
            return f"{path.name}/{name} is not as the manifest has it"
    return None


def check_checkpoints_complete(run: Path) -> list[int]:
    """Return the steps of the checkpoints. Raises InvariantBroken for an incomplete one."""
    steps = list_checkpoint_steps(run)
    for step in steps:
        why = explain_broken_checkpoint(run / "checkpoints" / f"step-{step:08d}")
        require(why is None, f"a checkpoint is not whole: {why}")
    return steps


def check_none_lost(run: Path) -> None:
    """Require that the newest checkpoint of the events exists and is complete."""
    saved_steps = [event["step"] for event in read_history(run) if event["event"] == "checkpoint"]
    complete = check_checkpoints_complete(run)
    if saved_steps:
        newest = saved_steps[-1]
        require(newest in complete, f"the checkpoint of step {newest} was written, and {complete} are there")


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """Return a safetensors file's header. Raises InvariantBroken if its size is not what it declares."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        require(8 + length <= size, f"{path} is cut")
        header: dict[str, Any] = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if 8 + length + max(ends, default=0) != size:
        raise InvariantBroken(f"{path} is {size} bytes, not what its header says")
    return header


class InvariantBroken(Exception):
    """A promise was not kept; the message says which."""


class Missed(Exception):
    """The fault was not injected, because the run had passed the moment. The trial is repeated."""


class Skipped(Exception):
    """This fault cannot be injected on this machine."""


class Undisturbed(Exception):
    """The run without a fault does not finish, so nothing can be compared with it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the undisturbed run ended with exit code {code}:\n{text.strip()}")
        self.code, self.text = code, text


def require(holds: object, otherwise: str) -> None:
    """Raise InvariantBroken with the message unless the condition holds."""
    if not holds:
        raise InvariantBroken(otherwise)
