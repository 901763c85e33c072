"""What a job asks for: the command's options, then the recipe's section `launch`, then the cluster's defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from trainwright.errors import RequestError
from trainwright.machine.describe import nodes_like
from trainwright.machine.machine_file import Written, machine_of, names_file
from trainwright.recipe.schema import RecipeSchema
from trainwright.recipe.sections.fields import Text
from trainwright.recipe.sections.launch import JobSection
from trainwright.utils.paths import user_path

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
# Of these, other schedulers have no need.
_STARTS_AGAIN = ("jobs", "until_done")
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
        match = None if names_file(self.machine) else _CARD.fullmatch(self.machine)
        if match is not None:
            node = f"{self.gpus_per_node}x{match[1]}"
            return machine_of(f"{nodes}x{node}" if nodes > 1 else node)
        described, calibration, measurement = machine_of(self.machine)
        gpus = None if described.device == "cpu" else self.gpus_per_node
        return nodes_like(described, nodes, gpus or described.devices_per_node), calibration, measurement


def clusters_file() -> Path:
    """Return the file with the user's clusters."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return user_path(base) / "trainwright" / _FILE


def settings_of(recipe: RecipeSchema, options: Mapping[str, Any], to: str | None) -> ClusterSettings:
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
    defaults = _cluster(name).model_dump(exclude_none=True)
    try:
        settings = ClusterSettings.model_validate({**defaults, **launch, **options_set})
    except ValidationError as error:  # the recipe and the file are valid
        raise RequestError("\n".join(_problems(error, _option))) from None
    for key in _unused(settings):
        why = f"{settings.scheduler} has no such setting"
        if key in _STARTS_AGAIN:
            why = f"a job of {settings.scheduler} starts its run again by itself"
        location = _option(key) if key in options_set else f"launch.{key}"
        raise RequestError(f"{location}: is for {_names(key)}, and {why}; remove it")
    if (settings.jobs or 1) > 1 and (settings.until_done or settings.array):
        other = (
            "--until-done, with which one job is requeued" if settings.until_done else "--array, whose runs are many"
        )
        raise RequestError(f"--jobs: several jobs of one run are not for {other}; leave one of the two out")
    if settings.machine is None:
        return settings
    gpus = _gpus_of(settings.machine)
    return settings.model_copy(update={"gpus_per_node": settings.gpus_per_node or gpus})


def _gpus_of(machine: str) -> int | None:
    """Return the number of GPUs of a node; None if it has none."""
    try:
        node, _, _ = machine_of(machine)
    except RequestError as error:
        raise RequestError(f"machine: {error}") from None
    if node.nodes > 1:
        raise RequestError(
            f"machine: {machine} has {node.nodes} nodes; describe one of them, such as 8xH100, and set nodes to their "
            "number"
        )
    return None if node.device == "cpu" else node.devices_per_node


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _unused(settings: ClusterSettings) -> list[str]:
    return [key for key, users in _USED_BY.items() if getattr(settings, key) and settings.scheduler not in users]


def _names(key: str) -> str:
    return " and ".join(_USED_BY[key])


def _cluster(name: str) -> ClusterSettings:
    file = clusters_file()
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
        raise RequestError("\n".join(_problems(error, lambda key: f"{file}: {name}.{key}"))) from None
    for key in _unused(cluster):
        users = " or ".join(f"`scheduler: {each}`" for each in _USED_BY[key])
        raise RequestError(f"{file}: {name}.{key} is for {users}; remove it, or set the scheduler")
    return cluster


def _problems(error: ValidationError, location: Any) -> list[str]:
    details = error.errors(include_url=False)
    return [f"{location('.'.join(map(str, each['loc'])))}: expected {_expected(each)}" for each in details]


def _expected(detail: Any) -> str:
    if detail["type"] == "extra_forbidden":
        return f"one of {', '.join(ClusterSettings.model_fields)}"
    return f"{detail['msg']}, not {detail['input']!r}"
