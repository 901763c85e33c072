"""Slurm's own commands, and what they answer.

The variables of the environment that change what a job's file asks for: to sbatch, they come before its options, and
to the job's srun those of the job that has submitted it.

See "INPUT ENVIRONMENT VARIABLES" of sbatch(1) and srun(1).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import RequestError
from trainwright.run.run_directory import SUBMITTED
from trainwright.utils.text import say

COMMENT = "trainwright:"  # of a job; the run directory follows, as squeue shows it
_SECONDS = 60
_SUBMIT_SECONDS = 180  # sbatch itself tries for two minutes
_FIELDS = "%A|%F|%K|%T|%r|%S|%N|%k"
# What Slurm's commands say while its controller restarts or is overloaded.
_AWAY = re.compile(r"unable to contact|timed out|zero bytes", re.IGNORECASE)
# What they say of a job that Slurm has put back into the queue itself.
_PENDING = re.compile(r"job is pending", re.IGNORECASE)
# What they say of a job that has ended meanwhile.
_OVER = re.compile(r"invalid job id|already (finished|complet)", re.IGNORECASE)


class SchedulerUnreachable(RequestError):
    """The scheduler does not answer now; it may later."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of this user that trains a run.

    Attributes:
        name: the job's number, and with an array its index or indices: ``12``, ``12_3``, ``12_[4-9]``.
        run: the run directory; of an array whose elements wait, the directory of their runs.
        state: such as ``PENDING``, ``RUNNING`` or ``COMPLETING``.
        reason: why it waits.
        array: of an array, the directory of the runs of its elements.
    """

    name: str
    run: Path
    state: str
    reason: str
    nodes: str
    array: Path | None = None

    @property
    def waits(self) -> bool:
        """Whether it has not been started, or not again."""
        return self.state == "PENDING"


@dataclass(frozen=True)
class Grace:
    """What Slurm gives a job between the first signal and the one that kills it.

    Attributes:
        seconds: after scancel, a requeue and the time limit.
        preempted: after a preemption.
    """

    seconds: float
    preempted: float

    def warning(self, needed: float) -> str | None:
        """Return a warning if a run that needs ``needed`` seconds to stop is not given them; otherwise None."""
        if needed <= self.seconds:
            return None
        also = "" if needed > self.preempted else f" ({self.preempted:g} s when it preempts it, which is enough)"
        return (
            f"a stop takes about {needed:.0f} s (step, checkpoint, end), and Slurm kills a job {self.seconds:g} "
            f"s after its first signal{also}: what was done since the last checkpoint is done again after a requeue; "
            "set checkpoint.every or faults.mean_time_between so that this is little, or have the administrator raise "
            "KillWait"
        )


def submit(file: Path, after: str | None = None) -> str:
    """Submit a job's file; return the number of the job, which starts when job ``after`` has ended in any way.

    No variable of the environment counts that overrides the file, nor one of the job of this process. Raises
    RequestError with sbatch's words, SchedulerUnreachable if Slurm has not answered: it may have taken the job.
    """
    left_out = select_overriding(file.read_text(encoding="utf-8"), os.environ)
    if left_out:
        overrides = ", ".join(f"{name}={os.environ[name]}" for name in left_out)
        say(f"note: sbatch is run without {overrides}, which would override what {file} asks for", file=sys.stderr)
    variables = {name: value for name, value in remove_job_variables(os.environ).items() if name not in left_out}
    dependency = [] if after is None else [f"--dependency=afterany:{after}"]
    result = _run("sbatch", "--parsable", *dependency, str(file), variables=variables, seconds=_SUBMIT_SECONDS)
    _check_reachable(result)
    if result.returncode:
        raise RequestError(
            "sbatch refuses the job, and nothing was submitted: "
            f"{_join_error_lines(result.stderr)}{_describe_partitions()}"
        )
    return result.stdout.strip().partition(";")[0]


def list_queued_jobs(*, each: bool = False) -> list[QueuedJob]:
    """Return the jobs of this user that train a run. Raises RequestError if there is no answer.

    Args:
        each: have the elements of an array that wait one by one, and not together.
    """
    result = _run("squeue", "--me", "--noheader", *(["--array"] if each else []), f"--format={_FIELDS}")
    if result.returncode:
        raise RequestError(f"squeue does not answer: {_join_error_lines(result.stderr)}")
    lines = (line.split("|", 7) for line in result.stdout.splitlines())
    return [_parse_queued_job(fields) for fields in lines if len(fields) == 8 and fields[7].startswith(COMMENT)]


def read_job(job: str) -> dict[str, str]:
    """Return what scontrol shows of a job, by its keys; empty if it does not know the job.

    Raises SchedulerUnreachable.
    """
    result = _run("scontrol", "show", "job", "--oneliner", job)
    _check_reachable(result)
    return dict(re.findall(r"(\w+)=(\S*)", result.stdout)) if result.returncode == 0 else {}


def requeue_job(job: str) -> None:
    """Put a job back into the queue, if Slurm has not.

    Raises RequestError with Slurm's words, SchedulerUnreachable if there is no answer.
    """
    result = _run("scontrol", "requeue", job)
    _check_reachable(result)
    if result.returncode and not _PENDING.search(result.stderr):
        raise RequestError(f"scontrol refuses: {_join_error_lines(result.stderr)}")


def list_run_jobs(run: Path) -> list[QueuedJob]:
    """Return the jobs in the queue that train a run, or the runs of an array in this directory.

    Slurm is asked only if something was submitted for the run.
    """
    if not any((directory / SUBMITTED).is_dir() for directory in (run, run.parent)):
        return []
    at = run.absolute()
    return [job for job in list_queued_jobs(each=True) if at in (job.run, job.array) and job.state != "COMPLETING"]


def cancel_jobs(jobs: Sequence[QueuedJob]) -> None:
    """Cancel jobs: those that wait do not begin, the others get a signal. Raises RequestError with Slurm's words."""
    _change(jobs, "scancel", *_join_elements(jobs))


def forbid_requeue(jobs: Sequence[QueuedJob]) -> None:
    """Have jobs that run not requeued when they end. Raises RequestError with Slurm's words."""
    _change(jobs, "scontrol", "update", f"JobId={','.join(job.name for job in jobs)}", "Requeue=0")


def read_grace(partition: str | None) -> Grace | None:
    """Return the grace of jobs in a partition, the first of several; None if Slurm does not say."""
    try:
        config = _run("scontrol", "show", "config").stdout
        first_partition = [] if partition is None else [partition.partition(",")[0]]
        partitions = _run("scontrol", "show", "partition", "--oneliner", *first_partition).stdout.splitlines()
    except RequestError:
        return None
    match = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
    if match is None:
        return None
    default_lines = (line for line in partitions if partition is not None or re.search(r"\bDefault=YES\b", line))
    grace_match = re.search(r"\bGraceTime=(\d+)", next(default_lines, ""))
    wait = float(match[1])
    return Grace(wait, wait + (0.0 if grace_match is None else float(grace_match[1])))


def check_job_grace(needed: float) -> str | None:
    """Return a warning if the job of this process is killed before a run that needs ``needed`` seconds has stopped."""
    if "SLURM_JOB_ID" not in os.environ or (grace_period := read_grace(os.environ.get("SLURM_JOB_PARTITION"))) is None:
        return None
    return grace_period.warning(needed)


def count_cpus_per_node(partition: str | None, gpus: int | None) -> int | None:
    """Return the CPUs of a partition's smallest node, or the share of them that belongs to ``gpus`` of its GPUs; None
    if Slurm does not say. Nodes with fewer GPUs do not count, if any has enough.
    """
    nodes = _read_nodes(partition) or _read_sinfo_nodes(partition)
    if gpus is None:
        return min((cpus for cpus, _ in nodes), default=None)
    most_gpus = max((node_gpus for _, node_gpus in nodes), default=0)
    candidates = [(cpus, node_gpus) for cpus, node_gpus in nodes if node_gpus >= max(1, min(gpus, most_gpus))]
    return min((max(1, int(cpus * min(1.0, gpus / node_gpus))) for cpus, node_gpus in candidates), default=None)


def _read_nodes(partition: str | None) -> list[tuple[int, int]]:
    """Return CPUs and GPUs of each node of a partition, without the CPUs that no job of it can have: those that are
    reserved for the system (CoreSpecCount, CpuSpecList) and those above MaxCPUsPerNode.
    """
    partitions = {entry.get("PartitionName", ""): entry for entry in _read_records("partition")}
    default = [name for name, entry in partitions.items() if entry.get("Default") == "YES"]
    nodes = []
    for node in _read_records("node"):
        cpus = node.get("CPUEfctv", node.get("CPUTot", ""))  # the first: since Slurm 22.05
        for name in {*(default if partition is None else partition.split(","))} & {
            *node.get("Partitions", "").split(",")
        }:
            limit = partitions.get(name, {}).get("MaxCPUsPerNode", "")
            if cpus.isdigit():
                nodes.append(
                    (min(int(entry) for entry in (cpus, limit) if entry.isdigit()), _count_gpus(node.get("Gres", "")))
                )
    return nodes


def _read_sinfo_nodes(partition: str | None) -> list[tuple[int, int]]:
    """Return CPUs and GPUs of each kind of node of a partition."""
    only = [] if partition is None else [f"--partition={partition}"]
    nodes = []
    for line in _run("sinfo", "--noheader", "--format=%P|%c|%G", *only).stdout.splitlines():
        name, cpus, devices = (*line.split("|"), "", "")[:3]
        if (partition is not None or name.endswith("*")) and cpus.rstrip("+").isdigit():
            nodes.append((int(cpus.rstrip("+")), _count_gpus(devices)))
    return nodes


def _read_records(kind: str) -> list[dict[str, str]]:
    output = _run("scontrol", "show", kind, "--oneliner").stdout
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in output.splitlines()]


def _count_gpus(devices: str) -> int:
    """Return the number of GPUs of all kinds, such as 8 of ``gpu:a100:2(S:0),gpu:v100:6``."""
    return sum(map(int, re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", devices)))


def _parse_queued_job(fields: Sequence[str]) -> QueuedJob:
    number, array, index, state, reason, _, nodes, comment = fields
    run = Path(comment.removeprefix(COMMENT))
    if index in ("N/A", ""):
        return QueuedJob(number, run, state, reason, nodes)
    if index.isdigit():
        return QueuedJob(f"{array}_{index}", run / index, state, reason, nodes, run)
    return QueuedJob(f"{array}_[{index}]", run, state, reason, nodes, run)


def _change(jobs: Sequence[QueuedJob], *command: str) -> None:
    result = _run(*command) if jobs else None
    if result is None or result.returncode == 0:
        return
    wrong = [line for line in result.stderr.splitlines() if line.strip() and not _OVER.search(line)]
    if wrong:
        raise RequestError(f"{command[0]} refuses: {_join_error_lines(chr(10).join(wrong))}")


def _join_elements(jobs: Sequence[QueuedJob]) -> list[str]:
    """Return the names of jobs, one for all elements of an array: ``12_[4,7]``, which is one request."""
    arrays: dict[str, list[QueuedJob]] = {}
    for job in jobs:
        arrays.setdefault(job.name.partition("_")[0], []).append(job)
    several = {number: ",".join(job.name.partition("_")[2] for job in group) for number, group in arrays.items()}
    return [group[0].name if len(group) == 1 else f"{number}_[{several[number]}]" for number, group in arrays.items()]


def _check_reachable(result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode and _AWAY.search(result.stderr):
        raise SchedulerUnreachable(f"{result.args[0]} does not answer: {_join_error_lines(result.stderr)}")


def _describe_partitions() -> str:
    result = _run("sinfo", "--noheader", "--format=%R")
    names = sorted(set(result.stdout.split()))
    return f"; partitions here: {', '.join(names)}" if names else ""


def _join_error_lines(text: str) -> str:
    return "; ".join(re.sub(r"^\w+: (error: )?", "", line) for line in text.splitlines() if line.strip())


def _run(
    *command: str, variables: Mapping[str, str] | None = None, seconds: float = _SECONDS
) -> subprocess.CompletedProcess[str]:
    if variables is None:  # without SQUEUE_STATES, SCANCEL_INTERACTIVE and so on, which change what is asked and done
        prefixes = (f"{command[0].upper()}_", "SLURM_TIME_FORMAT")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=variables)
    except FileNotFoundError:
        raise RequestError(
            f"no scheduler found: there is no {command[0]} here; run this on a login node of the cluster, or only show "
            "the job's file with --print"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise SchedulerUnreachable(f"{command[0]} does not answer: {error}") from None


_OPTION = re.compile(r"^#SBATCH\s+(?:--([\w-]+)|-(\w))", re.MULTILINE)
_LONG = {"A": "account", "C": "constraint", "G": "gpus", "J": "job-name", "M": "clusters", "p": "partition", "q": "qos"}
_LONG |= {"a": "array", "e": "error", "o": "output", "t": "time"}
# Of options whose variable has another name, or which have the same effect as others.
_MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
_VARIABLES = {
    "cpus-per-task": ("CPUS_PER_GPU",),
    "gpus-per-node": ("GPUS", "GPUS_PER_SOCKET", "GPUS_PER_TASK"),
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "output": ("ERROR",),
    "requeue": ("NO_REQUEUE",),
    "time": ("TIMELIMIT",),
}
# Slurm's variables that no job sets.
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")


def select_overriding(script: str, variables: Iterable[str]) -> list[str]:
    """Return those of the variables that override what a job's file asks for."""
    script_options = {long or _LONG.get(short, "") for long, short in _OPTION.findall(script)}
    also = (name for option in script_options for name in _VARIABLES.get(option, ()))
    # A job is an array only if its file says so, and is submitted without waiting for its end.
    names = {*(option.upper().replace("-", "_") for option in script_options), *also, "ARRAY_INX", "WAIT"}
    return sorted({f"SBATCH_{name}" for name in names - {"REQUEUE"}} & set(variables))


def remove_job_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those of the job that this process belongs to: sbatch gives them to the new job, and
    replaces only those that it sets in every job.
    """
    if "SLURM_JOB_ID" not in variables:
        return dict(variables)
    return {name: value for name, value in variables.items() if not name.startswith("SLURM_") or name in _OF_CLUSTER}
