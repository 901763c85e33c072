"""The request of a command line: a recipe, or a run to continue; read, resolved and checked without torch.

`trainwright train` and all processes that another launcher starts share it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from trainwright.engine.checkpoints.parent import ParentCheckpoint
from trainwright.engine.checkpoints.remote_store import RemoteStore, choose_default_name, name_in_stores
from trainwright.errors import MachineError, RequestError, Stopped, TrainwrightError
from trainwright.machine.machine import Machine
from trainwright.parallel.zero import deepspeed_config
from trainwright.recipe.checks import find_implied_strategy, list_usable_processes, set_processes
from trainwright.recipe.extensions import Registry, check_named, find_user_modules
from trainwright.recipe.loading import is_override, load_recipe
from trainwright.recipe.observer_spec import check_installed
from trainwright.recipe.optimizer_spec import check_optimizer
from trainwright.recipe.registries import KEYS
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.parallel import ProcessRange
from trainwright.recipe.strategy_spec import check_library
from trainwright.recipe.yaml_text import Tree, parse_value
from trainwright.run import run_directory
from trainwright.run.resolve import Resolved, resolve
from trainwright.run.resuming import load_resumed_recipe
from trainwright.run.shutdown.requests import Deadline
from trainwright.run.stored_runs import bring_up_to_date, build_store, discard_fetched, fetch_run, is_url, list_stores
from trainwright.utils.installation import FIRST
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import format_ranges, say

AUTO = "auto"  # of --resume
_DIRECTORY = f"{run_directory.DIRECTORY_KEY}="


class LauncherSettings(Protocol):
    """Settings of another launcher in a recipe's terms; see LAUNCHERS in ``recipe/registries.py``."""

    @property
    def nodes(self) -> int:
        """The number of machines."""

    @property
    def refusal(self) -> TrainwrightError | None:
        """Why a process that the launcher has started cannot train."""

    def over(
        self, recipe: Path | Tree, overrides: Sequence[str], *, resumed: bool = False
    ) -> tuple[list[str], tuple[str, ...]]:
        """Return overrides of a recipe, these settings first and then the user's own, and notes.

        A ``resumed`` run's recipe has every key, so there settings may replace what a new recipe may not contradict.
        """
        ...


@dataclass(frozen=True)
class TrainingRequest:
    """A request to train, as it is given to a command, a function, or a process that another launcher started.

    Attributes:
        resume: a run directory, "" for the recipe's newest run, or None for a new run.
        rendezvous_timeout: the seconds for which processes or nodes wait for one another; None: the default.
        force: start even if the plan says that the run does not fit.
        until, time_limit: when the run has to have stopped, see ``choose_deadline``.
    """

    recipe: Path | Tree | None
    overrides: Sequence[str] = ()
    resume: str | None = None
    num_processes: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    rendezvous_timeout: float | None = None
    accelerate_config: Path | None = None
    force: bool = False
    until: str | None = None
    time_limit: str | None = None

    def words(self) -> list[str]:
        """Return the request as words of a command line."""
        recipe = [] if self.recipe is None else [str(self.recipe)]
        return [*recipe, *self.overrides]

    def list_overrides(self) -> list[str]:
        """Return the overrides, including the number of processes."""
        count, overrides = self.num_processes, list(self.overrides)
        if count is None:
            return overrides
        override = next((a for a in overrides if a.startswith("parallel.num_processes=")), None)
        if override is not None and override.partition("=")[2].strip() != str(count):
            raise RequestError(f"--num-processes {count} contradicts {override}; pass only one of them")
        return [*overrides, f"parallel.num_processes={count}"]


@dataclass(frozen=True)
class RunRequest:
    """A request. `run` is the run to continue, None for a new one; `stem` names a new one.

    `chosen`: the keys of the recipe whose values were chosen automatically when the run began, and not set since.
    `started`: the number of processes that another launcher has started, if the recipe has a range. `deadline`: when
    the run has to have stopped. `in_place`: a new run takes its directory even if it exists already, as long as no run
    has begun there. `url`: where a run that another machine began is stored. `fetched`: whether its directory was
    written for this request. `force`: start even if the plan says that the run does not fit.
    """

    recipe: RecipeSchema
    stem: str
    run: Path | None
    reasons: tuple[str, ...] = field(default=())
    chosen: tuple[str, ...] = field(default=())
    started: int | None = None
    deadline: Deadline | None = None
    in_place: bool = False
    url: str | None = None
    fetched: bool = False
    force: bool = False

    @contextmanager
    def open_directory(self, resolved: Resolved, stopped: Callable[[], bool] = lambda: False) -> Iterator[Path]:
        """Lock the run's directory, created if the run is new; take what it has done on other machines since.

        Args:
            stopped: whether a stop is requested.

        Raises:
            RequestError: the directory cannot be used, or another process trains there.
            FaultError: a machine that may be lost has locked it.
            Stopped: as requested; or ``in_place``, and another process has begun the run meanwhile.
        """
        key = resolved.recipe.logging.run_directory
        run = self.run or run_directory.create(key, self.stem, in_place=self.in_place)
        with run_directory.lock_run(run, stopped):
            if self.in_place and (run / run_directory.RECIPE).is_file():
                raise Stopped(f"{run} was begun by another process meanwhile; run the same command again to resume it")
            if self.run is not None:
                copies = resolved.recipe.checkpoint.copies
                if stores := [*([build_store(self.url)] if self.url else []), *list_stores(copies, run)]:
                    bring_up_to_date(run, stores)
            yield run

    def discard_fetched(self) -> None:
        """Remove what was fetched for a request that trains nothing."""
        if self.fetched and self.run is not None:
            discard_fetched(self.run)

    def undo_on_error(self, run: Path) -> AbstractContextManager[None]:
        """Undo what is written into the run's directory on an exception in the context."""
        return run_directory.undo_on_error(run, created=self.run is None, keep=self.in_place)

    def discard_unstarted(self, run: Path) -> None:
        """Remove the directory of a new run in which nothing was trained."""
        if self.run is None:
            run_directory.discard_unstarted(run, keep=self.in_place)

    def record(self, run: Path, resolved: Resolved) -> str:
        """Write the resolved recipe and its plan into the run's directory; return the recipe's text."""
        processes, recipe = self.recipe.parallel.num_processes, resolved.recipe
        text = run_directory.format_recipe(
            set_processes(recipe, processes) if isinstance(processes, ProcessRange) else recipe
        )
        run_directory.record(run, text, self.stem, resolved.reasons, resolved.plan.document, resolved.chosen)
        if self.run is None:
            extension_names = [name for names in _list_extensions(recipe).values() for name in names]
            run_directory.keep_modules(run, find_user_modules(extension_names))
        return text


def build_request(
    recipe: Path | Tree | None, overrides: list[str], resume: str | None, settings: LauncherSettings | None = None
) -> RunRequest:
    """Return the request for ``recipe``; the settings of another launcher override it, and ``overrides`` override both.

    `resume` is None for a new run, else the run directory or its URL in a remote store, "" for the recipe's newest
    run, or "auto" for the run in the recipe's own directory if it has begun there or has copies, otherwise a new one.
    Raises RequestError, or FaultError if a store cannot be read now.
    """
    if recipe is None and not resume:
        raise RequestError("no recipe; pass one, for instance: " + FIRST.format("train"))
    if resume == AUTO:
        return _resume_or_begin(recipe, overrides, settings)
    reasons: tuple[str, ...] = ()
    if resume is None:
        assert recipe is not None
        if settings is not None:
            overrides, reasons = settings.over(recipe, overrides)
        return _fork_request(RunRequest(load_recipe(recipe, overrides), _choose_stem(recipe), None, reasons))
    if is_url(resume):
        return _fetch_request(resume, recipe, overrides, settings)
    run = _find_run(resume, recipe, overrides)
    run_directory.check_files(run)
    recipe_file = run / run_directory.RECIPE
    if settings is not None:
        overrides, reasons = settings.over(recipe or recipe_file, overrides, resumed=recipe is None)
    resumption = load_resumed_recipe(run, recipe, overrides)
    all_reasons = tuple(dict.fromkeys((*resumption.reasons, *reasons)))
    return RunRequest(resumption.recipe, run_directory.choose_stem(recipe_file), run, all_reasons, resumption.chosen)


def _fork_request(request: RunRequest) -> RunRequest:
    """Return a new run's request with the checkpoint that ``train.fork`` names, if it is set."""
    train = request.recipe.train
    if train.fork is None:
        return request
    parent = ParentCheckpoint.of(train.fork)
    reason = f"train.fork {parent}: the run starts from step {parent.step} of {parent.run}"
    recipe = request.recipe.model_copy(update={"train": train.model_copy(update={"fork": str(parent)})})
    return replace(request, recipe=recipe, reasons=(*request.reasons, reason))


def _fetch_request(
    url: str, recipe: Path | Tree | None, overrides: list[str], settings: LauncherSettings | None
) -> RunRequest:
    """Return the request for a run in a remote store, in `logging.run_directory` or runs/<its name> of this machine."""
    store = build_store(url)
    path = ("logging", "run_directory")
    values = [item.removeprefix(_DIRECTORY) for item in overrides if item.startswith(_DIRECTORY)]
    directories = [str(parse_value(value, "the command line", path)[0]) for value in values]
    name = url.rstrip("/").rpartition("/")[2]
    run = expand_user_path(directories[-1]) if directories and directories[-1] != AUTO else run_directory.RUNS / name
    fetched = fetch_run([store], run, name)
    if not (run / run_directory.RECIPE).is_file():
        raise RequestError(f"--resume: {url} has no complete copy of a run; correct it, or start a new run")
    rest = [override for override in overrides if not override.startswith(_DIRECTORY)]
    return _build_or_discard(fetched, run, recipe, rest, settings, url)


def _resume_or_begin(recipe: Path | Tree | None, overrides: list[str], settings: LauncherSettings | None) -> RunRequest:
    if recipe is None:
        raise RequestError("--resume auto: no recipe; pass one, or name the run: trainwright train --resume RUN")
    loaded_recipe = load_recipe(recipe, overrides)
    run = run_directory.choose_own_directory(loaded_recipe.logging.run_directory, _choose_stem(recipe))
    run_overrides = run_directory.set_directory(overrides, run)
    has_started, fetched = (run / run_directory.RECIPE).is_file(), False
    if not has_started and loaded_recipe.checkpoint.copies:
        has_started = fetched = fetch_run(list_stores(loaded_recipe.checkpoint.copies, run), run)
    if not has_started:
        return replace(build_request(recipe, run_overrides, None, settings), in_place=True)
    return _build_or_discard(fetched, run, recipe, run_overrides, settings)


def _build_or_discard(
    fetched: bool,
    run: Path,
    recipe: Path | Tree | None,
    overrides: list[str],
    settings: LauncherSettings | None,
    url: str | None = None,
) -> RunRequest:
    try:
        return replace(build_request(recipe, overrides, str(run), settings), fetched=fetched, url=url)
    except TrainwrightError:
        if fetched:
            discard_fetched(run)
        raise


def _find_run(resume: str, recipe: Path | Tree | None, overrides: list[str]) -> Path:
    """Return the run that --resume refers to: the one named, that of its own recipe, or the recipe's newest."""
    if recipe is None or resume:
        return run_directory.find(resume, "auto", "")
    loaded_recipe, file = load_recipe(recipe, overrides), _find_file(recipe)
    recorded_run = None if file is None else run_directory.find_run(file)
    return recorded_run or run_directory.find("", loaded_recipe.logging.run_directory, _choose_stem(recipe))


def _choose_stem(recipe: Path | Tree) -> str:
    file = _find_file(recipe)
    return "recipe" if file is None else run_directory.choose_stem(file)


def _find_file(recipe: Path | Tree) -> Path | None:
    return recipe.file if isinstance(recipe, Tree) else recipe


def set_started_processes(request: RunRequest, processes: int, launcher: str) -> RunRequest:
    """Return the request for the number of processes that a launcher has started.

    Raises MachineError if the recipe sets another number, RequestError if its strategy does not support this number.
    """
    parallel = request.recipe.parallel
    reasons = request.reasons
    if processes > 1 and parallel.is_one_process:
        raise RequestError(
            f"parallel.strategy: {parallel.strategy} runs one process, but {launcher} started {processes}; start one, "
            "or set parallel.strategy to auto"
        )
    num_processes = parallel.num_processes
    if isinstance(num_processes, ProcessRange):
        usable = list_usable_processes(request.recipe, num_processes)
        if processes not in usable:
            raise MachineError(
                f"parallel.num_processes: the recipe allows {format_ranges(usable, ' to ')} processes, but {launcher} "
                "started "
                f"{processes}; start as many as it allows, or change its range ({num_processes})"
            )
        reasons += (f"parallel.num_processes {processes}: the number that {launcher} started, of {num_processes}",)
        return replace(request, started=processes, reasons=reasons)
    if num_processes == "auto":
        reasons += (f"parallel.num_processes {processes}: the number that {launcher} started",)
    elif num_processes != processes:
        raise MachineError(
            f"parallel.num_processes: the recipe asks for {num_processes} process"
            f"{'es' * (num_processes > 1)}, but {launcher} started {processes}; start "
            f"{num_processes}, or set it to {processes} or auto"
        )
    return replace(request, recipe=set_processes(request.recipe, processes), reasons=reasons)


def check_nodes(recipe: RecipeSchema, nodes: int) -> None:
    """Raise RequestError if the processes, which are those of all nodes, cannot be divided over ``nodes`` equally.

    Or if the strategy is for one process.
    """
    parallel = recipe.parallel
    if nodes == 1:
        return
    if parallel.is_one_process:
        raise RequestError(
            f"parallel.strategy: {parallel.strategy} runs one process, but --nodes is {nodes}; set it to auto, or "
            "remove --nodes"
        )
    processes = parallel.num_processes
    if isinstance(processes, ProcessRange):
        if processes.max % nodes:
            raise RequestError(
                f"parallel.num_processes: the largest number of {processes} processes cannot be divided over --nodes "
                f"{nodes} equally; set max to {max(1, processes.max // nodes) * nodes}"
            )
    elif processes != "auto" and processes % nodes:
        raise RequestError(
            f"parallel.num_processes: {processes} processes cannot be divided over --nodes {nodes} equally; set it to "
            f"{max(1, processes // nodes) * nodes} or auto"
        )


def resolve_request(request: RunRequest, machine: Machine, nodes: int = 1, check_gpus: bool = True) -> Resolved:
    """Resolve the values left to auto, for `nodes` machines like this one.

    `check_gpus` is False if the processes' GPUs are counted elsewhere: a launcher may show each process only its own.
    Raises RequestError; for a run that goes on it names the file of its recipe, which may be damaged.
    """
    from trainwright.models.resolve_model import check_available

    recipe = request.recipe if request.started is None else set_processes(request.recipe, request.started)
    try:
        if recipe.has_texts:
            check_available(recipe.model)  # a plan of a model that cannot be trained here would mislead
        resolution = resolve(recipe, machine, nodes, check_gpus)
    except RequestError as error:
        if request.run is None:
            raise
        raise RequestError(f"{error} (the recipe is {request.run / run_directory.RECIPE})") from error
    chosen_keys = tuple(dict.fromkeys((*request.chosen, *resolution.chosen)))
    reasons = tuple(dict.fromkeys((*request.reasons, *resolution.reasons)))
    return replace(resolution, reasons=reasons, chosen=chosen_keys)


def check_request(request: RunRequest, creates: bool = True) -> None:
    """Check everything that can be checked without torch, before the machine is measured and anything is written.

    Extensions are imported last, as that can take seconds. `creates` is False if another node creates the run
    directory, and may have done so already. Raises RequestError, or MachineError for a missing library of the strategy.
    """
    from trainwright.data.check import check_data
    from trainwright.models.adapters.files import check_libraries

    recipe = request.recipe
    if creates and request.run is None and recipe.logging.run_directory != "auto":
        check_directory = run_directory.check_not_started if request.in_place else run_directory.check_new
        check_directory(expand_user_path(recipe.logging.run_directory))
    if creates and recipe.push is not None:
        from trainwright.models.resolve_model import read_hub_token

        read_hub_token("push.repository: ")
    strategy, _ = find_implied_strategy(recipe.parallel) or (recipe.parallel.strategy, "")
    if strategy != AUTO:  # the plan chooses only strategies whose library is installed
        check_library(strategy)
    check_optimizer(recipe.optimizer.name)
    deepspeed_config.check_keys(recipe)
    check_libraries(recipe.model.adapter)
    check_data(recipe)
    if creates:
        _check_copies(recipe, request.run, new=request.run is None)
    check_extensions(recipe, runs=True)
    if creates:
        check_installed(recipe.logging.observers)


def _check_copies(recipe: RecipeSchema, run: Path | None, new: bool) -> None:
    """Write and remove a file in the stores for copies, where a new run may not replace the copies of another.

    A store that cannot be reached keeps only a new run from starting; one that has begun goes on without it.
    """
    directory = recipe.logging.run_directory
    new_name = "" if directory == AUTO else choose_default_name(expand_user_path(directory))
    name = new_name if run is None else name_in_stores(run)
    for url in recipe.checkpoint.copies:
        store = RemoteStore(url, name)
        try:
            store.check()
            with store.in_words():
                has_copies = bool(new and name and store.steps())
        except MachineError as error:
            if new:
                raise
            say(f"warning: {error}; the run goes on without it", file=sys.stderr)
            continue
        if has_copies:
            raise RequestError(
                f"checkpoint.copies: {url} has copies of a run named {name}; choose another "
                "logging.run_directory, remove them, or go on with that run: --resume auto"
            )


def check_extensions(recipe: RecipeSchema, *, runs: bool) -> None:
    """Import extensions, so that a wrong name or class is rejected before anything is written; look for all of them
    before that, as an import can take seconds.

    If the recipe is not going to run, those at a place are only looked for, unless the command imports them.
    """
    if recipe.model.is_own:
        check_named(recipe.model.implementation, f"model.implementation {recipe.model.implementation}")
    for check in (Registry.look_for, Registry.get) if runs else (Registry.check,):
        for key, names in _list_extensions(recipe).items():
            for name in names:
                try:
                    check(KEYS[key], name)
                except RequestError as error:
                    raise RequestError(f"{key}: {error}") from error


def _list_extensions(recipe: RecipeSchema) -> dict[str, list[str]]:
    """Return the extensions that only training and evaluation need, by key."""
    return {
        "train.step_policies": recipe.train.step_policies,
        "logging.observers": [name for name, setting in recipe.logging.observers.items() if setting is not False],
        "evaluate.metrics": recipe.evaluate.metrics,
    }


def is_bare_resume(following: str | None) -> bool:
    """Return whether `--resume`, followed by this argument, has no value and so means the newest run."""
    return following is None or following.startswith("-") or is_override(following) or Path(following).is_file()
