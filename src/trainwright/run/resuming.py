"""Continue a run: compare the given recipe and overrides with the run's own recipe.

What determines the losses is fixed for a run. What only distributes, measures or saves it may change. A machine that
has nothing of the run continues it from its copies in stores.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainwright.engine.checkpoints import remote_store
from trainwright.engine.checkpoints.manifest import CheckpointError, list_checkpoints, step_of
from trainwright.engine.checkpoints.parent import is_same
from trainwright.engine.checkpoints.remote_store import EVENTS, RemoteStore, StoredRun
from trainwright.errors import FaultError, RequestError, TrainwrightError, convert_write_errors
from trainwright.machine.sharing import lock_file
from trainwright.recipe.loading import LoadedRecipe, check_tree, load_recipe, load_with_origins, read_merged
from trainwright.recipe.registries import STRATEGIES
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.strategy_spec import look_up_strategy
from trainwright.recipe.yaml_text import KeyPath, Origin, Tree, format_key_path
from trainwright.run import run_directory
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import expand_user_path, write_file
from trainwright.utils.text import quote_word, say

# Sections and keys that may change when a run is resumed.
_FREE = (
    ("parallel",),
    ("checkpoint",),
    ("evaluate",),
    ("faults",),
    ("logging",),
    ("launch",),
    ("train", "micro_batch_size"),
    ("train", "gradient_accumulation_steps"),
    ("train", "activation_checkpointing"),
    ("train", "activation_offload"),
    ("train", "compile"),
    ("train", "deterministic"),
    ("train", "replan"),
)
_MAY_GROW = (("train", "max_steps"), ("train", "epochs"), ("train", "max_tokens"))
_DIRECTORY = ("logging", "run_directory")
_FORK = ("train", "fork")  # a recipe may name it as when the run began, or not at all
_PROCESSES = ("parallel", "num_processes")
_STRATEGY = ("parallel", "strategy")
_ACCUMULATION = ("train", "gradient_accumulation_steps")
# Keys that depend on the strategy and the number of processes.
_LAYOUT = tuple(
    ("parallel", key) for key in ("replicate_size", "reshard_after_forward", "offload_parameters", "offload_optimizer")
)
_ABSENT = object()


class ResumedRecipe(NamedTuple):
    """The recipe a run continues with, the reason for each of its values, and the keys that the user did not write."""

    recipe: RecipeSchema
    reasons: tuple[str, ...]
    chosen: tuple[str, ...]


def load_resumed_recipe(run: Path, path: Path | Tree | None, overrides: Sequence[str]) -> ResumedRecipe:
    """Return the run's own recipe, changed by ``overrides`` and the recipe at ``path``, if given.

    A value that the recipe leaves to auto keeps the run's value; an override with auto chooses it again.

    Raises:
        RequestError: a difference would make it another run; lists every such key, both values, and how to continue.
    """
    recipe_file = run / run_directory.RECIPE
    before = load_recipe(recipe_file)
    chosen_keys = run_directory.read_chosen_keys(run)
    reset = dict(_iterate_open_values(before, read_merged(path, overrides), chosen_keys))
    reset_overrides = [f"{format_key_path(key)}={json.dumps(value)}" for key, value in reset.items()]
    changed_recipe = load_with_origins(recipe_file if path is None else path, [*reset_overrides, *overrides])
    changes = [
        change
        for change in _list_changes(before, changed_recipe)
        if change.path != _FORK or not is_same(change.new, change.old)
    ]
    _refuse(run, path, [change for change in changes if not change.allowed(run)])
    tree = read_merged(recipe_file, ())
    for change in changes:
        if change.path != _DIRECTORY:
            tree.values[change.path[0]][change.path[1]] = change.new
            tree.origins[change.path] = change.origin
    for section, key in reset.keys() & set(_LAYOUT):
        del tree.values[section][key]  # a default that is written counts as asked for
    recipe = check_tree(tree, Origin(str(recipe_file))).recipe
    shown_changes = [change for change in changes if change.path != _DIRECTORY and change.path not in reset]
    lines = [line for change in shown_changes if change.new != "auto" for line in change.lines()]
    still_true = [line for line in run_directory.read_reasons(run) if _is_valid_reason(line, recipe)]
    asked_for = {format_key_path(change.path) for change in shown_changes}
    still_chosen = tuple(key for key in chosen_keys if key not in asked_for)
    return ResumedRecipe(recipe, (*still_true, *(line for line in lines if line not in still_true)), still_chosen)


class _Change(NamedTuple):
    path: KeyPath
    old: object
    new: object
    origin: Origin

    def allowed(self, run: Path) -> bool:
        if self.path == _DIRECTORY:
            return expand_user_path(str(self.new)).resolve() == run.resolve()
        if self.path in _MAY_GROW:
            numbers = isinstance(self.old, int | float) and isinstance(self.new, int | float)
            return numbers and self.new > self.old  # type: ignore[operator]
        return any(self.path[: len(free)] == free for free in _FREE)

    def differences(self, run: Path) -> Iterator[str]:
        origin = f"({self.origin})"
        if self.path == _DIRECTORY:
            yield f"{format_key_path(self.path)}: {run} in the run, now {self.new} {origin}"
        elif self.path in _MAY_GROW:
            longer = "; a run can only become longer, by the key that its recipe sets"
            yield (
                f"{format_key_path(self.path)}: {_format_value(self.old)} in the run, now {_format_value(self.new)} "
                f"{origin}{longer}"
            )
        else:
            for path, old, new in _iterate_parts(self.path, self.old, self.new):
                yield f"{format_key_path(path)}: {_format_value(old)} in the run, now {_format_value(new)} {origin}"

    def lines(self) -> Iterator[str]:
        for path, old, new in _iterate_parts(self.path, self.old, self.new):
            yield (
                f"{format_key_path(path)} {_format_value(new)}: {_format_value(old)} until the run was resumed "
                f"({self.origin})"
            )


def _list_changes(before: RecipeSchema, changed: LoadedRecipe) -> list[_Change]:
    old, new = _flatten_keys(before), _flatten_keys(changed.recipe)
    changes = []
    for path in dict.fromkeys([*new, *old]):
        was, now = old.get(path, _ABSENT), new.get(path, _ABSENT)
        origins = [origin for key, origin in changed.origins.items() if key[: len(path)] == path]
        origin = min(origins, key=lambda origin: origin.line is not None, default=None)  # an override, if there is one
        typed = origin is not None and origin.line is None
        if was != now and (now != "auto" or typed):
            changes.append(_Change(path, was, now, origin or Origin("the default")))
    return changes


def _flatten_keys(recipe: RecipeSchema) -> dict[KeyPath, object]:
    sections: dict[KeyPath, object] = {}
    for section, values in recipe.model_dump().items():
        if isinstance(values, dict):
            sections.update({(section, key): value for key, value in values.items()})
        else:
            sections[section,] = values
    return sections


def _iterate_parts(path: KeyPath, old: object, new: object) -> Iterator[tuple[KeyPath, object, object]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        yield path, old, new
        return
    for key in dict.fromkeys([*new, *old]):
        was, now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was != now:
            yield from _iterate_parts((*path, key), was, now)


def _iterate_open_values(before: RecipeSchema, stated: Tree, chosen: Sequence[str]) -> Iterator[tuple[KeyPath, object]]:
    """Yield the values that depended on the run's strategy and number of processes, if these change and ``stated`` does
    not set them; each with the value that leaves it open.

    Args:
        chosen: the keys whose values nobody wrote when the run began.
    """
    parallel = before.parallel
    spread = _is_requested(stated, _PROCESSES, _flatten_keys(before)[_PROCESSES])
    strategy = _is_requested(stated, _STRATEGY, parallel.strategy)
    if spread:
        # Without sharding the choice depends only on the number of processes, so it is made again for another number.
        if not look_up_strategy(parallel.strategy).shards and _look_up_value(stated, _STRATEGY) == "auto":
            yield _STRATEGY, "auto"
        if _look_up_value(stated, _ACCUMULATION) == "auto":
            yield _ACCUMULATION, "auto"
    from_or_to_one = any(_is_one_process(name) for name in (parallel.strategy, _look_up_value(stated, _STRATEGY)))
    if strategy and not spread and from_or_to_one and format_key_path(_PROCESSES) in chosen:
        yield _PROCESSES, "auto"
    if not (spread or strategy):
        return
    for key in _LAYOUT:
        if format_key_path(key) in chosen and key not in stated.origins:
            yield key, type(parallel).model_fields[key[1]].default


def _is_one_process(strategy: object) -> bool:
    return strategy in STRATEGIES.names() and look_up_strategy(str(strategy)).is_one_process


def _is_requested(stated: Tree, key: KeyPath, before: object) -> bool:
    """Return whether a value other than ``before`` is set; auto counts as set in an override, but not in a recipe."""
    origin, value = stated.origins.get(key), _look_up_value(stated, key)
    left_open = origin is None or (value == "auto" and origin.line is not None)
    return not left_open and value != before


def _look_up_value(tree: Tree, path: KeyPath) -> object:
    section = tree.values.get(path[0])
    return section.get(path[1], "auto") if isinstance(section, dict) else "auto"


def _refuse(run: Path, path: Path | Tree | None, changes: list[_Change]) -> None:
    if not changes:
        return
    resume = f"trainwright train --resume {quote_word(run)}"
    if path is None:
        first = f"--resume {quote_word(run)}: these values cannot change when a run is resumed"
        fix = "remove the override"
    else:
        first = f"{path}: differs from {run}, the run to resume"
        fix = f"restore the value, or leave out the recipe ({resume})"
    lines = "".join(f"\n  {line}" for change in changes for line in change.differences(run))
    raise RequestError(f"{first}{lines}\n{fix}, or start a new run (without --resume)")


def _is_valid_reason(reason: str, recipe: RecipeSchema) -> bool:
    """Return whether a line of the run's plan still gives the reason for a value of its recipe."""
    key, _, rest = reason.partition(" ")
    section, _, name = key.rstrip(":").partition(".")
    values = getattr(recipe, section, None)
    if not hasattr(values, name):
        return True  # of a value set over the recipe
    return (
        not key.endswith(":")
        and re.match(rf"{re.escape(_format_value(getattr(values, name)))}(?!\w)", rest) is not None
    )


def _format_value(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# What a fetch writes before recipe.yaml, which makes the directory a run.
_FETCHED = (EVENTS, run_directory.PLAN)
_WITHOUT_CHECKPOINT = "without_checkpoint"  # in plan.json of a fetched run, until training begins and replaces the plan
_FETCHING = ".fetching"  # its lock is held during a fetch, which may take minutes


def is_url(text: str) -> bool:
    """Return whether ``--resume`` names a run in a remote store, such as ``s3://bucket/runs/name``."""
    return "://" in text


def build_store(url: str) -> RemoteStore:
    """Return the store of the run that a URL names. Raises RequestError."""
    base_url, _, name = url.rstrip("/").rpartition("/")
    if not name or base_url.endswith((":/", ":")):
        raise RequestError(f"--resume: {url} names no run; it has the form s3://bucket/runs/NAME")
    return RemoteStore(base_url, name, "--resume")


def list_stores(copies: Sequence[str], run: Path) -> list[RemoteStore]:
    """Return the stores with copies of a run, by the recipe's ``checkpoint.copies``. Raises RequestError."""
    return [RemoteStore(url, remote_store.name_in_stores(run)) for url in copies]


def fetch_run(stores: Sequence[RemoteStore], run: Path, name: str | None = None) -> bool:
    """Make ``run`` the run whose copies are in ``stores``, by its newest complete copy; its checkpoint comes later.

    Nothing is written if the run is there already. Otherwise its recipe is written last, so a directory without one is
    none.

    Args:
        name: of the run in its stores, if its directory may have another one.

    Returns:
        Whether the run was written; False without any copy.

    Raises:
        RequestError: no copy can be used, the keys are refused, or another run is in the directory.
        MachineError: the directory cannot be written.
        FaultError: a store cannot be read now, and no other has a copy.
    """
    written = False

    def take(_: str, store: RemoteStore, stored: StoredRun) -> None:
        nonlocal written
        if (run / run_directory.RECIPE).is_file():
            _check_same(run, store, stored)
            return
        with convert_write_errors(run):
            run.mkdir(parents=True, exist_ok=True)
            with lock_file(run / _FETCHING, f"waiting for another process that fetches {run}"):
                written = _fetch_alone(run, store, stored, name)

    _take_newest(stores, run, take, required=True)
    return written


def discard_fetched(run: Path) -> None:
    """Remove a run directory that was fetched and in which nothing has been trained."""
    if (run / "checkpoints").exists():
        return
    for name in (run_directory.RECIPE, *_FETCHED):
        (run / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is in it
        run.rmdir()


def bring_up_to_date(run: Path, stores: Sequence[RemoteStore]) -> None:
    """Take the newest copy with its events, if the run has gone on elsewhere. The run has to be locked.

    Raises:
        RequestError: no copy can be used, and the run, which was fetched, may not begin again.
        MachineError: the run's directory cannot be written.
        FaultError: the newest copy cannot be read now, or no store can, and the run has no checkpoint of its own.
    """
    from trainwright.engine.checkpoints.uploader import Abandoned, forget_abandoned, restore
    from trainwright.engine.events import Notice, append_event

    checkpoints, required = run / "checkpoints", bool(run_directory.read_plan(run).get(_WITHOUT_CHECKPOINT))

    def take(name: str, store: RemoteStore, stored: StoredRun) -> None:
        begin_activity(f"reading the copy of {name} in {store.where}")
        _check_same(run, store, stored)
        with store.in_words(FaultError):
            if not stored.begins(run / EVENTS):  # before the checkpoint: if this is killed, it is done again
                forget_abandoned(checkpoints)
                _replace_events(run, store, stored)
            elif Abandoned(checkpoints, store).has(step_of(name), stored):
                raise CheckpointError("the run went back to before it")
            restore(store, name, checkpoints)
        append_event(run / EVENTS, Notice(message=f"{checkpoints / name} is restored from a copy"))

    newest = max(list_checkpoints(checkpoints), default=0)
    if not _take_newest(stores, run, take, required=required, after=newest) and required:
        raise RequestError(f"--resume: no copy of {run} can be used: there is none")


def _take_newest(
    stores: Sequence[RemoteStore],
    run: Path,
    take: Callable[[str, RemoteStore, StoredRun], None],
    *,
    required: bool,
    after: int = -1,
) -> bool:
    """Pass the newest complete copy that has what a run needs to ``take``, and the next one if it is damaged.

    If the newest one cannot be read now, no older one is used instead: training would repeat what is done.

    Args:
        required: whether an error of the stores is raised; otherwise the run goes on from its own checkpoints.
        after: the step of the newest of these.

    Returns:
        Whether one was taken, or the run's own checkpoints are as new.

    Raises:
        RequestError, FaultError: a store cannot be read, or no copy can be used.
        Exception: whatever ``take`` raises other than a CheckpointError, for a damaged copy, or a FaultError.
    """
    copies, unreadable = _list_copies(stores)
    errors: list[str] = []
    unread: tuple[int, str] | None = None  # the newest copy that cannot be read now, and why
    is_new = False
    for step, name, store in copies:
        if unread is not None and step < unread[0]:
            break
        if step <= after:
            is_new = True
            break
        try:
            with store.in_words(FaultError):
                stored_run = StoredRun.of(store, name) if store.is_complete(name) else None
            if stored_run is not None:
                take(name, store, stored_run)
                _warn(f"{why}; a copy in another place is used" for why in unreadable)
                return True
        except CheckpointError as error:
            errors.append(f"the copy of {name} in {store.where} cannot be used: {error}")
            _warn(errors[-1:])
        except FaultError as error:
            unread = unread or (step, f"the copy of {name} cannot be read now: {error}; run the same command again")
    if unread is not None:
        raise FaultError(unread[1])
    for why in unreadable:
        if required or isinstance(why, RequestError):
            raise why
        _warn([f"{why}; the run goes on from its own checkpoints"])
    if required and errors and not is_new:
        raise RequestError(f"--resume: no copy of {run} can be used: {'; '.join(errors)}")
    return is_new


def _list_copies(stores: Sequence[RemoteStore]) -> tuple[list[tuple[int, str, RemoteStore]], list[TrainwrightError]]:
    """Return step, name and store of every copy, the newest first, and why stores cannot be read."""
    steps: list[tuple[int, str, RemoteStore]] = []
    unreadable: list[TrainwrightError] = []
    for store in stores:
        try:
            with store.in_words(FaultError):
                steps += [(step, name, store) for step, name in store.steps().items()]
        except (RequestError, FaultError) as error:
            unreadable.append(error)
    return sorted(steps, key=lambda each: -each[0]), unreadable


def _warn(messages: Iterable[str]) -> None:
    for message in messages:
        say(f"warning: {message}", file=sys.stderr)


def _fetch_alone(run: Path, store: RemoteStore, stored: StoredRun, name: str | None) -> bool:
    """Fetch the run, unless another process has done so meanwhile; return whether it was written."""
    if (run / run_directory.RECIPE).is_file():
        _check_same(run, store, stored)
        return False
    for remnant in _FETCHED:  # by a fetch that was killed
        (run / remnant).unlink(missing_ok=True)
    run_directory.check_not_started(run)
    with run_directory.lock_run(run):
        _write(run, store, stored, name)
    (run / _FETCHING).unlink(missing_ok=True)  # a process that waits for it finds the recipe
    return True


def _check_same(run: Path, store: RemoteStore, stored: StoredRun) -> None:
    try:
        same = remote_store.read_identity(run) == stored.run
    except OSError:  # nothing was trained in it
        same = False
    if not same:
        raise RequestError(
            f"{run} is another run than the one in {store.where}; choose another logging.run_directory, or move it away"
        )


def _write(run: Path, store: RemoteStore, stored: StoredRun, name: str | None) -> None:
    with store.in_words(FaultError):
        _replace_events(run, store, stored)
    plan = json.loads(stored.plan)
    plan.pop(remote_store.STORED_AS, None)
    plan[_WITHOUT_CHECKPOINT] = True
    if name is not None and name != remote_store.choose_default_name(run):
        plan[remote_store.STORED_AS] = name
    write_file(run / run_directory.PLAN, json.dumps(plan, indent=2) + "\n")
    write_file(run / run_directory.RECIPE, stored.recipe)


def _replace_events(run: Path, store: RemoteStore, stored: StoredRun) -> None:
    scratch = run / f".{EVENTS}"
    try:
        stored.write_events(store, scratch)
        with convert_write_errors(run):
            scratch.replace(run / EVENTS)
    finally:
        scratch.unlink(missing_ok=True)
