"""A simulation from the request to its report, in a process of its own. Imports no torch before the shim."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.data.sources.registry import find_registered_source, split_slice
from trainwright.errors import MachineError, RequestError, TrainingError, TrainwrightError
from trainwright.machine.accelerators import read_installed_build
from trainwright.machine.cache import find_cache_root
from trainwright.machine.describe import VARIABLE, Cluster, build_machine, resolve_machine
from trainwright.machine.machine import Machine
from trainwright.planning.facts import build_facts, find_largest_stage, read_named_configuration
from trainwright.planning.simulation.report import Simulation
from trainwright.recipe.registries import LAUNCHERS
from trainwright.recipe.schema import EvaluateSection, RecipeSchema
from trainwright.recipe.yaml_text import Tree
from trainwright.utils.activity import begin_activity
from trainwright.utils.paths import expand_user_path

if TYPE_CHECKING:
    from trainwright.planning.plan import RunPlan
    from trainwright.planning.simulation.recorders import Logs


# A schedule of any length: those of recipes are longer than the steps that are simulated.
_CONSTANT = {"schedule": "constant", "warmup_steps": 0, "decay_steps": 0.1, "final_learning_rate_ratio": 0.0}


@dataclass(frozen=True)
class SimulationRequest:
    """A request to simulate. ``steps``: optimizer steps to take; ``force``: even if the plan says it does not fit;
    ``accelerate_config``: a file whose settings are those of the recipe.
    """

    recipe: Path | Tree
    overrides: Sequence[str]
    on: str
    steps: int = 2
    force: bool = False
    accelerate_config: Path | None = None


def simulate(request: SimulationRequest) -> Simulation:
    """Simulate a run; changes this process, which must not have imported torch.

    Raises:
        RequestError: the recipe or the machine is wrong.
        MachineError: the recipe does not fit the machine, or this machine cannot simulate.
    """
    cluster = read_simulated_machine(request.on)
    os.environ["OMP_NUM_THREADS"] = "1"  # nothing is computed
    os.environ["HF_HUB_OFFLINE"] = "1"  # and nothing downloaded
    load_simulated_device()
    with tempfile.TemporaryDirectory(prefix="trainwright-simulation-") as scratch:
        directory = Path(scratch)
        os.environ[VARIABLE] = str(directory / "machine.json")
        write_machine(cluster, directory / "machine.json")
        if request.accelerate_config is not None:
            request, cluster = _apply_file(request, request.accelerate_config, cluster)
            write_machine(cluster, directory / "machine.json")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(cluster.devices_per_node)))
        return _Simulating(request, cluster, directory).run()


def _apply_file(request: SimulationRequest, file: Path, cluster: Cluster) -> tuple[SimulationRequest, Cluster]:
    """Return the request with the settings of an Accelerate file, and the GPUs that the file leaves."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the cluster has only those GPUs already
    translation = LAUNCHERS.get("accelerate").of_file(file, request.overrides, rendezvous="simulated:29500")
    if translation.nodes != cluster.nodes:
        raise RequestError(
            f"{file}: num_machines is {translation.nodes}, but --simulate: {request.on} has {cluster.nodes}; change one"
        )
    overrides, _ = translation.over(request.recipe, request.overrides)
    return replace(request, overrides=overrides), select_visible(cluster)


class _Simulating:
    """The parts of a simulation, in order."""

    def __init__(self, request: SimulationRequest, cluster: Cluster, directory: Path) -> None:
        self._asked = request
        self._cluster = cluster
        self._directory = directory
        self._notes: list[str] = []

    def run(self) -> Simulation:
        from trainwright.planning.simulation import device
        from trainwright.run import run_directory

        card, devices_per_node = self._cluster.card, self._cluster.devices_per_node
        rank = device.Rank(device.SimulatedGpu(card.name, card.memory_bytes, card.capability, devices_per_node))
        begin_activity("importing torch")
        logs = device.install(rank)
        requested_recipe = self._recipe()
        begin_activity("planning")
        recipe = self._resolve_recipe(self._make_plan(requested_recipe), requested_recipe)
        begin_activity("preparing the model and the data")
        with device.simulate_device(rank, logs):
            failure = _try_part(lambda: device.prepare(recipe, find_cache_root()))
        if failure is not None:
            raise TrainingError(f"the simulated preparation failed: {failure}")
        plan = self._make_plan(requested_recipe)  # with the lengths of the rows, which are known now
        recipe = self._resolve_recipe(plan, requested_recipe)
        if not self._asked.force:
            plan.refuse_shortage()
        rank.world = int(recipe.parallel.processes)
        rank.local = min(rank.world, devices_per_node)
        run = self._directory / "run"
        run.mkdir()
        run_directory.record(run, run_directory.format_recipe(recipe), "simulated", (), plan.as_json())
        begin_activity(f"simulating {recipe.parallel.strategy} on {rank.world}")
        with device.simulate_device(rank, logs):
            error = _try_part(lambda: device.train(run, find_cache_root(), rank, logs))
        return _report(self._cluster, recipe, plan, logs, error, tuple(self._notes))

    def _recipe(self) -> RecipeSchema:
        """Return the recipe, with what is not here replaced."""
        from trainwright.recipe.loading import load_recipe

        recipe = load_recipe(self._asked.recipe, list(self._asked.overrides))
        if recipe.train.compile is True:
            self._notes.append("train.compile: compiled code is not simulated; the blocks run as they are written")
        recipe = replace_weights(fill_rows(recipe, self._directory, self._notes), self._notes)
        recipe = fill_tokenizer(recipe, self._notes)
        if recipe.evaluate.prompts or recipe.evaluate.metrics:
            self._notes.append("evaluate: texts and answers are not generated")
        # All of the section: the length of answers, for instance, contradicts a recipe that asks for none.
        recipe = recipe.model_copy(update={"evaluate": EvaluateSection()})
        return _update_sections(recipe, train={"compile": False})

    def _make_plan(self, recipe: RecipeSchema) -> RunPlan:
        from trainwright.planning.planner import plan_on
        from trainwright.run.resolve import apply_implied_values

        recipe, _ = apply_implied_values(recipe, self._cluster)
        return plan_on(self._cluster, recipe, build_facts(recipe))

    def _resolve_recipe(self, plan: RunPlan, requested: RecipeSchema) -> RecipeSchema:
        """Return the resolved recipe of a few steps, with an evaluation before and after them."""
        from trainwright.planning.planner import collect_chosen_values
        from trainwright.run.resolve import apply_implied_values, fill_auto_values

        possible_recipe, _ = apply_implied_values(requested, self._cluster)
        recipe = fill_auto_values(possible_recipe, collect_chosen_values(plan), self._cluster.device)
        train = {"max_steps": self._asked.steps, "epochs": None, "max_tokens": None}
        train |= {"initial_batch_size": None, "batch_warmup_steps": 0}
        logging = {"observers": dict[str, Any]()}
        data = {} if recipe.data.stages is None else {"stages": [find_largest_stage(recipe)]}
        return _update_sections(recipe, train=train, optimizer=_CONSTANT, logging=logging, data=data)


def _update_sections(recipe: RecipeSchema, **sections: dict[str, Any]) -> RecipeSchema:
    changed_sections = {name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
    return recipe.model_copy(update=changed_sections)


def _try_part(work: Callable[[], None]) -> str | None:
    """Do a part of the run; return the error that ended it, with its place."""
    from trainwright.planning.simulation.recorders import find_error_location

    try:
        work()
    except TrainwrightError as error:
        if isinstance(error, RequestError):
            raise
        return str(error)
    except Exception as error:  # whatever a GPU would have made of it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}; at {find_error_location(error)}"
    return None


def _report(
    cluster: Cluster, recipe: RecipeSchema, plan: RunPlan, logs: Logs, error: str | None, notes: tuple[str, ...]
) -> Simulation:
    return Simulation(
        machine=cluster.name,
        card_bytes=cluster.card.memory_bytes,
        task=recipe.task,
        strategy=recipe.parallel.strategy,
        world=int(recipe.parallel.processes),
        mixed_precision=recipe.train.mixed_precision,
        micro_batches=plan.chosen.choice.gradient_accumulation_steps,
        steps=logs.phases.finished,
        memory=dict(logs.memory.peaks),
        planned_memory={name: int(size) for name, size in plan.chosen.memory.phases.items()},
        collectives=logs.collectives.count_step(logs.phases.finished),
        waits=logs.waits.count_step(logs.phases.finished),
        error=error,
        notes=notes,
    )


_MADE_UP_ROWS = 64
_TOKEN_CHARACTERS = 8  # of a token, at most, in English text; longer rows are cut to data.max_length


def fill_rows(recipe: RecipeSchema, directory: Path, notes: list[str]) -> RecipeSchema:
    """Return the recipe with rows that are here: its own, or full rows of made-up text written to ``directory``."""
    data = recipe.data
    if not recipe.has_texts or all(_is_here(source.source) for source in data.sources):
        return recipe
    keys = [key for key in recipe.spec.data_keys if key != "benchmark" and getattr(data, key) is not None]
    updates: dict[str, Any] = {"validation": None if data.validation is None else 8, "limit": None, "format": "auto"}
    updates["stages"] = updates["streaming"] = None
    for key in keys:
        file = directory / f"{key}.jsonl"
        if key == "idk":
            file.write_text("I do not know.\n", encoding="utf-8")
        else:
            kind = recipe.spec.rows(recipe, f"data.{key}")
            rows = (_build_row(kind, f"{key} {number}", data.max_length) for number in range(_MADE_UP_ROWS))
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        updates[key] = str(file)
    notes.append(f"data: {data.name} is not here; {_MADE_UP_ROWS} full rows of {data.max_length} tokens instead")
    recipe_values = {key: value for key, value in data.model_dump(exclude_unset=True).items() if key != "benchmark"}
    section = type(data).model_validate({"train": data.train, **recipe_values, **updates})
    return recipe.model_copy(update={"data": section})


def _is_here(source: str) -> bool:
    source, _ = split_slice(source)
    name = source.partition(":")[0]
    if find_registered_source(source) is not None:
        return True
    return expand_user_path(source).exists() or expand_user_path(name).exists()


def _build_row(kind: str, name: str, tokens: int) -> dict[str, Any]:
    text = (f"{name}: " + "made up text for the simulation of a run ") * (_TOKEN_CHARACTERS * tokens // 40 + 1)
    if kind in ("refused", "alternates"):
        return {"prompt": "What is it?", "completion": text, "alternate": text[::-1]}
    if kind in ("pairs", "answers"):
        return {"prompt": "What is it?", "chosen": text, "rejected": text[::-1]}
    return {"text": text}


def replace_weights(recipe: RecipeSchema, notes: list[str]) -> RecipeSchema:
    """Return the recipe with the model's configuration in place of its weights, which are neither read nor downloaded.

    Raises:
        RequestError: the configuration is neither in the catalog nor on this machine.
    """
    model = recipe.model
    if model.name is None:
        return recipe
    config = _select_known_keys(model.override_configuration(read_named_configuration(model.name)))
    update: dict[str, Any] = {"name": None, "config": config, "tokenizer": model.tokenizer or model.name}
    update |= {"gguf_file": None, "overrides": {}}
    notes.append(f"model: the configuration of {model.name} without its weights")
    return recipe.model_copy(update={"model": model.model_copy(update=update)})


def fill_tokenizer(recipe: RecipeSchema, notes: list[str]) -> RecipeSchema:
    """Return the recipe with a tokenizer that is here: its own, or the built-in one of bytes."""
    from trainwright.models.load import load_tokenizer

    if not recipe.has_texts:
        return recipe
    try:
        load_tokenizer(recipe.model)
    except RequestError:
        name = recipe.model.tokenizer
        notes.append(f"model.tokenizer: {name} is not here; bytes instead, with the vocabulary of the model")
        return recipe.model_copy(update={"model": recipe.model.model_copy(update={"tokenizer": "bytes"})})
    return recipe


def _select_known_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's keys that a fresh model of its type has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from trainwright.models.configuration import drop_ignored, list_keys

    model_keys = list_keys(CONFIG_MAPPING[config["model_type"]]) | {"model_type"}
    return {key: value for key, value in drop_ignored(config).items() if key in model_keys}


MOST_RANKS = 16_384


def read_simulated_machine(text: str) -> Cluster:
    """Return the machine that ``--simulate`` describes, with the GPUs of each node that CUDA_VISIBLE_DEVICES leaves.

    Empty, the variable hides the GPUs of this machine, and none of the simulated ones.

    Raises:
        RequestError: the text is malformed, the card is unknown or cannot be trained on, or there are too many; or
            CUDA_VISIBLE_DEVICES names one that is not there.
    """
    try:
        cluster = resolve_machine(text)[0]
    except RequestError as error:
        raise RequestError(f"--simulate: {error}") from None
    if cluster.card.vendor != "NVIDIA":
        raise RequestError(
            f"--simulate: {text}: NVIDIA GPUs are simulated, such as 8xH100; training on {cluster.card.name} "
            f"{'needs no simulation' if cluster.device == 'cpu' else 'is not supported'}"
        )
    if cluster.devices > MOST_RANKS:
        fewer = f"{max(1, MOST_RANKS // cluster.devices_per_node)}x{cluster.devices_per_node}x{cluster.card.name}"
        raise RequestError(
            f"--simulate: {text}: at most {MOST_RANKS:,} GPUs are simulated, not {cluster.devices:,}; such as {fewer}"
        )
    return select_visible(cluster)


def select_visible(cluster: Cluster) -> Cluster:
    """Return the cluster with those GPUs of each node that CUDA_VISIBLE_DEVICES names. Raises RequestError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if visible in ("", "-1"):
        return cluster
    names = [name.strip() for name in visible.split(",")]
    count = cluster.devices_per_node
    if absent := [name for name in names if not name.isdigit() or int(name) >= count]:
        raise RequestError(
            f"--simulate: CUDA_VISIBLE_DEVICES names {', '.join(absent)}, but {cluster.name} has the GPUs 0 to "
            f"{count - 1} on each node; unset it, or name some of these"
        )
    return replace(cluster, devices_per_node=len(set(names)))


def write_machine(cluster: Cluster, file: Path) -> None:
    """Write a node of the cluster as ``trainwright machine --json`` would, for ``$TRAINWRIGHT_MACHINE``."""
    from pydantic import TypeAdapter

    node = TypeAdapter(Machine).dump_python(build_machine(cluster), mode="json")
    file.write_text(json.dumps({"machine": node}), encoding="utf-8")


SHIM = Path(__file__).with_name("no_cuda.cpp")
_COMPILERS = ("g++", "clang++", "c++")
_loaded: dict[Path, ctypes.CDLL] = {}


def load_simulated_device() -> None:
    """Make a build of torch for CPUs believe in a CUDA device; a build for CUDA does as much itself.

    Raises:
        MachineError: there is no C++ compiler, or it cannot compile against the installed torch.
    """
    if not (_locate_torch() / "lib" / "libtorch_cuda.so").exists():
        load_shim(SHIM)


def load_shim(source: Path) -> ctypes.CDLL:
    """Return the library of a source file, compiled and loaded; before torch is imported. Raises MachineError."""
    if source not in _loaded:
        assert "torch" not in sys.modules, "torch asks for its hooks once, when it is imported"
        _loaded[source] = ctypes.CDLL(str(_compile_shim(_locate_torch(), source)), mode=ctypes.RTLD_GLOBAL)
    return _loaded[source]


def _locate_torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is a dependency of this package"
    return Path(spec.origin).parent


def _compile_shim(root: Path, source: Path) -> Path:
    """Return the compiled shim for the torch in ``root``, from the cache if it was compiled before."""
    identity = f"{read_installed_build()} {root} {sys.platform}".encode() + source.read_bytes()
    shared_object = find_cache_root() / "simulation" / f"{source.stem}-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if shared_object.exists():
        return shared_object
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *_COMPILERS))), None)
    if compiler is None:
        raise MachineError(
            f"--simulate: compiles {source.stat().st_size // 1024 + 1} KiB of C++ once, and there is no compiler "
            f"({', '.join(_COMPILERS)}); install one (apt install g++), or set CXX to its path"
        )
    begin_activity("compiling the simulated device")
    try:
        shared_object.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"--simulate: {shared_object.parent} cannot be written: {error.strerror}; set TRAINWRIGHT_CACHE"
        ) from None
    scratch = shared_object.with_suffix(f".{secrets.token_hex(4)}")
    library = root / "lib"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source), f"-L{library}"]
    command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}", "-o", str(scratch)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode:
        first = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
        raise MachineError(
            f"--simulate: {compiler} could not compile {source.name} for {read_installed_build().version}: {first}"
        )
    scratch.replace(shared_object)
    return shared_object
