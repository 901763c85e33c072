"""From a recipe and a command's options to a job: the run that it trains, and what it asks its cluster for.

It asks for what the command's options say, then the recipe's section `launch`, then the cluster's defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from trainwright.errors import RequestError
from trainwright.machine.describe import Written, is_file_name, repeat_node, resolve_machine
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.fields import Text
from trainwright.recipe.sections.parallel import JobSection
from trainwright.run import run_directory
from trainwright.utils.paths import expand_user_path

ELEMENT = "{element}"
_DIRECTORY = "logging.run_directory="
_NAME = re.compile(r"[\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class Job:
    """A job that trains one run; with an array, one run for each element.

    Attributes:
        run: the directory of the run, or of the runs of an array; absolute.
        recipe: absolute.
    """

    run: Path
    recipe: Path
    overrides: tuple[str, ...]
    settings: ClusterSettings

    def runs(self) -> Iterator[Path]:
        """Yield the directory of each run: one, or those of an array's elements."""
        if self.settings.array is None:
            yield self.run
            return
        for part in self.settings.array.partition("%")[0].split(","):
            first, last, step = (*re.split("[-:]", part), "", "")[:3]
            for index in range(int(first), int(last or first) + 1, int(step or 1)):
                yield self.run / str(index)

    @property
    def name(self) -> str:
        """The job's name, as the scheduler shows it."""
        return re.sub(r"[^\w.+-]", "-", self.run.name, flags=re.ASCII)


def build_job(
    recipe: Path, overrides: Sequence[str], options: Mapping[str, Any], to: str | None, name: str | None
) -> Job:
    """Return the job that trains a recipe.

    Args:
        overrides: with an array, they may contain ``{element}``.
        options: of the command, by the keys of the section ``launch``; None is not given.
        to: a scheduler, or a cluster of clusters.yaml.
        name: of the run in runs/; None: the directory that the recipe names, or runs/ and the recipe's name.

    Raises:
        RequestError: the recipe, the options or the name are invalid.
    """
    if name is not None:
        check_name(name)
    plain = load_recipe(recipe, [override for override in overrides if ELEMENT not in override])
    settings = resolve_settings(plain, options, to)
    if settings.array is None and len(overrides) != sum(ELEMENT not in override for override in overrides):
        raise RequestError(f"{ELEMENT} in an override is the index in an array; pass --array, such as --array 0-9")
    directory_key = plain.logging.run_directory
    _check_directory(
        directory_key, load_recipe(recipe, _fill_first_element(overrides, settings.array)).logging.run_directory, name
    )
    run = run_directory.choose_own_directory(directory_key, name or run_directory.choose_stem(recipe)).absolute()
    remaining = tuple(override for override in overrides if not override.startswith(_DIRECTORY))
    job = Job(run, recipe.absolute(), remaining, settings)
    if settings.array is None:
        run_directory.check_not_started(run)
    return job


def select_first_overrides(job: Job) -> list[str]:
    """Return the overrides of the run; of an array, of the run of its first element."""
    return _fill_first_element(job.overrides, job.settings.array)


def check_name(name: str) -> None:
    """Raise RequestError for a name that is not plain."""
    if not _NAME.fullmatch(name) or name.startswith(("-", ".")):
        raise RequestError(
            f"--name: {name!r} is not a plain name of a run and its job; use letters, digits, '.', '_', '+' and '-'"
        )


def _check_directory(directory_key: str, of_first: str, name: str | None) -> None:
    """Raise RequestError for a directory that is not that of the run, or of an array's runs.

    Args:
        directory_key: ``logging.run_directory``, without the overrides that contain ``{element}``.
        of_first: the same of the first element.
    """
    if ELEMENT in directory_key or of_first != directory_key:
        raise RequestError(
            f"logging.run_directory: {ELEMENT} is not replaced in it; write the directory of all runs, in which that "
            "of each element is named by its index"
        )
    if name is not None and directory_key != "auto":
        raise RequestError(
            f"--name: is the name of a run in {run_directory.RUNS}, but logging.run_directory is {directory_key}, "
            "whose last part is the name of its run and job; remove --name, or set logging.run_directory=auto"
        )


def _fill_first_element(overrides: Sequence[str], array: str | None) -> list[str]:
    if array is None:
        return list(overrides)
    first = re.split(r"[-,%:]", array, maxsplit=1)[0]
    return [override.replace(ELEMENT, first) for override in overrides]


# What decides how a run computes and where it finds its files, by name: a list of what to leave out would let through
# the secrets that nobody thought of. Libraries of kernels and communication have settings only.
_PASSED = re.compile(
    r"(TORCH|TORCHINDUCTOR|PYTORCH|NCCL|GLOO|OMP|MKL|TRITON|UCX|FI|DS)_\w+|"
    r"HF_(HOME|ENDPOINT|ASSETS_CACHE|MODULES_CACHE|DATASETS_(CACHE|OFFLINE)|XET_(CACHE|HIGH_PERFORMANCE)|"
    r"HUB_(CACHE|OFFLINE|DISABLE_XET|DOWNLOAD_TIMEOUT|ETAG_TIMEOUT))|"
    r"TRANSFORMERS_(CACHE|OFFLINE|VERBOSITY)|"
    r"TRAINWRIGHT_(CACHE|MACHINE|QUIET|GRACE_SECONDS|EXIT_CODES|FAULT|FAULT_TRIAL)|"
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_CACHE_HOME|TMPDIR"
)
_SECRET = re.compile(r"(^|_)(AUTH|CREDENTIALS?|KEY|PASS|PASSWD|PASSWORD|PAT|SECRET|TOKEN)(_|$)")
_LOGIN = re.compile(r"://[^/\s]*@")  # the user and the password in a URL


def capture_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values decide how a run computes and where it finds its files, without secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _PASSED.fullmatch(name) and not _SECRET.search(name) and not _LOGIN.search(value)
    }


GRACE = "TRAINWRIGHT_GRACE_SECONDS"


def check_stop_time(needed: float) -> str | None:
    """Return a warning if the variable GRACE gives this process less time than a stop needs; otherwise None.

    Args:
        needed: the seconds from a signal to the end of the run, with a step and a checkpoint.
    """
    grace = os.environ.get(GRACE, "")
    if not grace.isdigit() or needed <= int(grace):
        return None
    return (
        f"a stop takes about {needed:.0f} s (step, checkpoint, end), and the cluster kills the run {grace} s after its "
        "signal: what was done since the last checkpoint is done again; submit with a longer launch.grace, or set "
        "checkpoint.every so that this is little"
    )


SLURM, KUBERNETES, SKYPILOT, RAY = "slurm", "kubernetes", "skypilot", "ray"
SCHEDULERS = (SLURM, KUBERNETES, SKYPILOT, RAY)
_FILE = "clusters.yaml"
# The keys that not every scheduler has a use for.
_USED_BY = {
    "time": (SLURM, KUBERNETES),
    "partition": (SLURM,),
    "account": (SLURM,),
    "array": (SLURM,),
    "jobs": (SLURM,),
    "until_done": (SLURM,),
    "options": (SLURM,),
    "setup": (SLURM, SKYPILOT),
    "manifest": (KUBERNETES,),
    "grace": (KUBERNETES,),
    "node_labels": (KUBERNETES,),
    "image": (KUBERNETES, SKYPILOT),
    "claim": (KUBERNETES,),
    "bucket": (SKYPILOT,),
    "mount": (KUBERNETES, SKYPILOT),
    "spot": (SKYPILOT,),
}
_CARD = re.compile(r"(?:\d+\s*[x×*]\s*)?(.+)")


class ClusterSettings(JobSection):
    """The defaults of a cluster in clusters.yaml."""

    scheduler: Literal["slurm", "kubernetes", "skypilot", "ray"] = "slurm"
    machine: Text | None = Field(
        None,
        description="One node, as `trainwright plan --on` takes it, such as 8xH100. A job asks for all GPUs of it, or "
        "for gpus_per_node of them.",
    )
    options: list[Text] = Field([], description="Further options of sbatch, such as --exclusive or --mem=0.")
    setup: list[Text] = Field([], description="Lines of shell that the job runs first, such as module load cuda.")
    image: Text | None = Field(
        None, description="With Kubernetes and SkyPilot: the image, in which python has Trainwright."
    )
    claim: Text | None = Field(None, description="With Kubernetes: the claim of the volume that all pods share.")
    bucket: Text | None = Field(
        None, description="With SkyPilot on one node: the URL of the bucket for copies of the run, such as s3://name."
    )
    mount: Text | None = Field(
        None,
        description="Where all nodes have a file system that they share: with Kubernetes the volume, here and in the "
        "pods; with SkyPilot what `setup` mounts.",
    )
    node_labels: dict[Text, str] = Field(
        {}, description="With Kubernetes: labels of the nodes to use; taints with these keys are tolerated."
    )
    spot: bool | None = Field(None, description="With SkyPilot: use spot instances.")

    def described(self) -> Written | None:
        """Return the machine of a job; None if the node is not described."""
        if self.machine is None:
            return None
        nodes = self.nodes or 1
        match = None if is_file_name(self.machine) else _CARD.fullmatch(self.machine)
        if match is not None:
            node = f"{self.gpus_per_node}x{match[1]}"
            return resolve_machine(f"{nodes}x{node}" if nodes > 1 else node)
        machine, calibration, measurement = resolve_machine(self.machine)
        gpus = None if machine.device == "cpu" else self.gpus_per_node
        return repeat_node(machine, nodes, gpus or machine.devices_per_node), calibration, measurement


def resolve_settings(recipe: RecipeSchema, options: Mapping[str, Any], to: str | None) -> ClusterSettings:
    """Return the job's settings.

    Args:
        options: of the command, by the keys of the section ``launch``; None is not given.
        to: a scheduler, or a cluster of clusters.yaml.

    Raises:
        RequestError: naming the option, or the key and its file.
    """
    launch = {} if recipe.launch is None else recipe.launch.model_dump(exclude_none=True)
    name = launch.pop("to", None) if to is None else to
    launch.pop("to", None)
    if name is None:
        raise RequestError("--to: where to submit to is missing; pass --to slurm, or set launch.to in the recipe")
    options_set = {key: value for key, value in options.items() if value is not None}
    defaults = _read_cluster(name).model_dump(exclude_none=True)
    try:
        settings = ClusterSettings.model_validate({**defaults, **launch, **options_set})
    except ValidationError as error:  # the recipe and the file are valid
        raise RequestError("\n".join(_describe_problems(error, _format_option))) from None
    for key in _list_unused(settings):
        why = f"{settings.scheduler} has no such setting"
        if key in ("jobs", "until_done"):
            why = f"a job of {settings.scheduler} starts its run again by itself"
        location = _format_option(key) if key in options_set else f"launch.{key}"
        raise RequestError(f"{location}: is for {' and '.join(_USED_BY[key])}, and {why}; remove it")
    if (settings.jobs or 1) > 1 and (settings.until_done or settings.array):
        conflict = (
            "--until-done, with which one job is requeued" if settings.until_done else "--array, whose runs are many"
        )
        raise RequestError(f"--jobs: several jobs of one run are not for {conflict}; leave one of the two out")
    if settings.machine is None:
        return settings
    gpus = _count_gpus(settings.machine)
    return settings.model_copy(update={"gpus_per_node": settings.gpus_per_node or gpus})


def _count_gpus(machine: str) -> int | None:
    """Return the number of GPUs of a node; None if it has none."""
    try:
        node, _, _ = resolve_machine(machine)
    except RequestError as error:
        raise RequestError(f"machine: {error}") from None
    if node.nodes > 1:
        raise RequestError(
            f"machine: {machine} has {node.nodes} nodes; describe one of them, such as 8xH100, and set nodes to their "
            "number"
        )
    return None if node.device == "cpu" else node.devices_per_node


def _format_option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _list_unused(settings: ClusterSettings) -> list[str]:
    return [key for key, users in _USED_BY.items() if getattr(settings, key) and settings.scheduler not in users]


def _read_cluster(name: str) -> ClusterSettings:
    file = expand_user_path(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "trainwright" / _FILE
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"{file}: cannot be read: {error}") from None
    if not isinstance(content, dict | None):
        raise RequestError(f"{file}: is not a mapping of names to clusters")
    clusters = content or {}
    if name not in clusters:
        if name in SCHEDULERS:
            return ClusterSettings.model_validate({"scheduler": name})
        choices = ", ".join([*SCHEDULERS, *map(str, clusters)])
        raise RequestError(f"--to {name}: no such cluster in {file}; there are: {choices}")
    try:
        cluster = ClusterSettings.model_validate(clusters[name] or {})
    except ValidationError as error:
        raise RequestError("\n".join(_describe_problems(error, lambda key: f"{file}: {name}.{key}"))) from None
    for key in _list_unused(cluster):
        users = " or ".join(f"`scheduler: {scheduler}`" for scheduler in _USED_BY[key])
        raise RequestError(f"{file}: {name}.{key} is for {users}; remove it, or set the scheduler")
    return cluster


def _describe_problems(error: ValidationError, location: Any) -> list[str]:
    details = error.errors(include_url=False)
    return [f"{location('.'.join(map(str, item['loc'])))}: expected {_describe_expected(item)}" for item in details]


def _describe_expected(detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        return f"one of {', '.join(ClusterSettings.model_fields)}"
    return f"{detail['msg']}, not {detail['input']!r}"
