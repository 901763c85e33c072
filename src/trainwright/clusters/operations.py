"""Train on several machines: on hosts over ssh, without a scheduler, or in a cluster's jobs; and the state of jobs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_FAULT, EXIT_REQUEST, Interrupted, RequestError, Stopped
from trainwright.machine.usage import compute_process_age
from trainwright.run.shutdown.requests import stop_was_requested
from trainwright.run.shutdown.stop import STARTS_AGAIN
from trainwright.utils import text
from trainwright.utils.text import quote_word, say

if TYPE_CHECKING:
    from trainwright.clusters.hosts import Host
    from trainwright.clusters.job import Job
    from trainwright.clusters.slurm.scheduler import QueuedJob
    from trainwright.compatibility.script_run import NodeOptions
    from trainwright.engine.event_reader import EventRecord
    from trainwright.planning.requests import Plan
    from trainwright.run.request import TrainingRequest


# For the hosts that answer, when a run is started again without some of them.
_RENDEZVOUS_SECONDS = 60


def train_on_hosts(training: TrainingRequest, hosts: str | None, hostfile: Path | None) -> int:
    """Train on the hosts together; return the exit code. Everything is shown as each host writes it.

    Args:
        hosts: as ``node[1-3],node7``.
        hostfile: a file with hosts, instead of ``hosts``.

    Raises:
        RequestError: the request is wrong or a host unknown; nothing is started.
        MachineError: a host cannot take part; nothing is started.
        FaultError: a host was lost, and the run cannot go on with those that are left.
        Stopped: a stop was requested after a host was lost, before the run was started again.
    """
    from trainwright.clusters.hosts import ask, format_exports, run_on, sum_processes
    from trainwright.recipe.sections.parallel import ProcessRange
    from trainwright.run import run_directory
    from trainwright.run.process import ignore_closed_output
    from trainwright.run.request import build_request

    host_list = _read_hosts(hosts, hostfile, training.nodes, training.node_rank, training.rendezvous)
    # A wrong recipe is told once, and here.
    request = build_request(training.recipe, list(training.overrides), training.resume)
    processes, slots = request.recipe.parallel.num_processes, sum_processes(host_list)
    may_lose = isinstance(processes, ProcessRange) and training.num_processes is None
    if isinstance(processes, ProcessRange) and may_lose and slots not in (None, processes.max):
        raise RequestError(
            f"parallel.num_processes: {processes} processes, but the hosts have {slots} slots; set max to {slots}, or "
            "remove the slots"
        )
    count = None if may_lose else training.num_processes or slots
    answers = ask(host_list, format_exports())
    run = request.run
    if run is None:
        run = run_directory.create(request.recipe.logging.run_directory, request.stem, in_place=request.in_place)
    logs = run / "logs"
    logs.mkdir(exist_ok=True)
    say(f"{run}: on {', '.join(host.name for host in host_list)}; logs: {logs}/host-*.log", file=sys.stderr)
    common = _build_command(training, run, has_started=request.run is not None)
    common += [f"--num-processes={count}"] if count else []
    ignore_closed_output()
    restarts, port, started_at = None, answers[0].port, time.time()
    while True:
        commands = [[*common, *_build_node_options(host_list, i, port)] for i in range(len(host_list))]
        result = run_on(host_list, commands, logs, may_lose=may_lose)
        stopped = result.stopped or stop_was_requested(run, within=compute_process_age())
        if result.code != EXIT_FAULT or stopped or not result.lost or (may_lose and host_list[0] not in result.lost):
            break
        from trainwright.clusters.hosts import HostRestarts  # imports torch

        restarts = restarts or HostRestarts(run, request.recipe.faults.restarts, may_lose, started_at)
        try:
            host_list, port = restarts.decide(host_list, result.lost)
        except Interrupted:
            raise Stopped(f"stopped while no host trained; continue with --resume {quote_word(run)}") from None
        if stop_was_requested(run, within=compute_process_age()):  # meanwhile
            break
        if may_lose and training.rendezvous_timeout is None:
            common = [*common, f"--rendezvous-timeout={_RENDEZVOUS_SECONDS}"]
    if result.code == EXIT_REQUEST and request.run is None:
        run_directory.discard_unstarted(run, keep=request.in_place)
    return result.code


def launch_on_hosts(
    own: tuple[str, bool, tuple[str, ...]],
    options: list[str],
    num_processes: int | None,
    logs: Path | None,
    node_options: NodeOptions,
    hosts: str | None,
    hostfile: Path | None,
) -> int:
    """Run a user's own script on the hosts together; return the exit code.

    Args:
        own: the script, whether it is a module, and its arguments.
        options: further options of ``trainwright launch``, the same on each host.
        num_processes: on all hosts. Default: the slots of the host file, otherwise one per GPU.
        logs: directory for one log per process. Default: a new one under ``runs/``.
        node_options: what the hosts set by themselves, and the time that they wait for each other.

    Raises:
        RequestError: the request is wrong or a host unknown; nothing is started.
        MachineError: a host cannot take part; nothing is started.
    """
    from trainwright.clusters.hosts import ask, format_exports, run_on, sum_processes
    from trainwright.compatibility.script_run import check_script, make_logs
    from trainwright.run.process import ignore_closed_output

    script, module, arguments = own
    host_list = _read_hosts(hosts, hostfile, node_options.nodes, node_options.node_rank, node_options.rendezvous)
    check_script(script, module)
    port = ask(host_list, format_exports())[0].port
    directory = make_logs(script, module, logs)
    words = [sys.executable, "-P", "-m", "trainwright", "launch", *options, f"--logs={directory}"]
    count = num_processes or sum_processes(host_list)
    words += [f"--num-processes={count}"] if count else []
    words += [f"--rendezvous-timeout={node_options.seconds}"] if node_options.seconds and len(host_list) > 1 else []
    ignore_closed_output()
    rest = [*(["--module"] if module else []), "--", script, *arguments]
    commands = [[*words, *_build_node_options(host_list, i, port), *rest] for i in range(len(host_list))]
    return run_on(host_list, commands, directory).code


def _read_hosts(
    hosts: str | None, hostfile: Path | None, nodes: int | None, node_rank: int | None, rendezvous: str | None
) -> list[Host]:
    """Return the hosts of ``--hosts`` or ``--hostfile``. Raises RequestError, also for options that these set."""
    from trainwright.clusters.hosts import parse_hosts, read_hostfile
    from trainwright.run.group.addresses import is_loopback

    options = {"--nodes": nodes, "--node-rank": node_rank, "--rendezvous": rendezvous}
    if excess := [name for name, value in options.items() if value is not None]:
        raise RequestError(f"--hosts and --hostfile set {', '.join(options)} on each host; remove {', '.join(excess)}")
    if hosts is not None and hostfile is not None:
        raise RequestError("--hosts and --hostfile: pass only one of them")
    host_list = parse_hosts(hosts) if hosts is not None else read_hostfile(Path(hostfile or ""))
    first, remotes = host_list[0], [host for host in host_list if not is_loopback(host.address)]
    if is_loopback(first.address) and remotes:
        raise RequestError(
            f"hosts: {remotes[0].name} cannot reach the first host as {first.address}, which is each machine itself; "
            "write its name or address in the network"
        )
    return host_list


def _build_command(training: TrainingRequest, run: Path, *, has_started: bool) -> list[str]:
    """Return the command of every host, without what differs: it begins or resumes the run in its directory."""
    from trainwright.run.run_directory import format_directory_override

    key = "logging.run_directory="
    words = ["env", f"{STARTS_AGAIN}=1", sys.executable, "-P", "-m", "trainwright", "train"]
    words += [str(training.recipe)] if training.recipe is not None else []
    words += [override for override in training.overrides if not override.startswith(key)]
    words += [f"--resume={run}"] if has_started else ["--resume=auto", format_directory_override(run)]
    options = {
        "--rendezvous-timeout": training.rendezvous_timeout,
        "--accelerate-config": training.accelerate_config,
        "--until": training.until,
        "--time-limit": training.time_limit,
    }
    words += [f"{name}={value}" for name, value in options.items() if value is not None]
    return [*words, *(["--force"] if training.force else [])]


def _build_node_options(hosts: list[Host], index: int, port: int) -> list[str]:
    if len(hosts) == 1:
        return []
    from trainwright.run.group.addresses import format_address

    return [f"--nodes={len(hosts)}", f"--node-rank={index}", f"--rendezvous={format_address(hosts[0].address, port)}"]


_FAR = 1e10  # seconds, three centuries
_LAST_STEPS = 50  # whose median gives the expected end


@dataclass(frozen=True)
class RunState:
    """A run and its job.

    Attributes:
        run: the run directory; of an array whose elements wait, that of their runs.
        job: the scheduler's number of the job in the queue that trains the run, otherwise of the last one that did;
            None if there was none.
        state: ``pending``, ``running`` and so on as the scheduler says, with its reason to wait; without a job
            that of ``trainwright runs``.
        step: the last step; None before the first.
        steps: the last step of the finished run.
        goodput: seconds of the steps that count, of all seconds since the run began.
        end: when the run is expected to finish, in seconds since the epoch; None unless it trains.
    """

    run: Path
    job: str | None
    state: str
    step: int | None = None
    steps: int | None = None
    goodput: float | None = None
    end: float | None = None

    def columns(self) -> list[str]:
        """Return the columns of ``trainwright jobs``."""
        at = "" if self.step is None else f"{self.step}/{self.steps}"
        goodput = "" if self.goodput is None else f"{self.goodput:.0%}"
        end = "" if self.end is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(self.end))
        return [str(self.run), self.job or "", self.state, at, goodput, end]


def jobs(*runs: str | Path) -> list[RunState]:
    """Return runs and the jobs of Slurm that train them; what ``trainwright jobs`` shows.

    Args:
        runs: directories of runs. Default: those in ``runs/`` and those of this user's jobs.

    Raises:
        RequestError: a directory is not a run's. If Slurm does not answer, runs are shown without their jobs.

    Examples:
        >>> import trainwright as tw
        >>> [(each.run.name, each.state, each.step, each.steps) for each in tw.jobs("runs/tiny")]
        [('tiny', 'finished', 4, 4)]
    """
    from trainwright.api.run import Run

    # Of several jobs of a run the first in order counts: what runs, then what waits, as submitted.
    last_first = sorted(_list_queued_jobs(), key=lambda job: (job.waits, int(job.name.partition("_")[0])), reverse=True)
    queued_jobs = {job.run: job for job in last_first}
    all_directories = [Run(run).directory for run in runs] if runs else [*_list_runs(), *queued_jobs]
    directories = {directory.absolute(): directory for directory in reversed(all_directories)}
    return [_build_state(path, queued_jobs.get(directory)) for directory, path in sorted(directories.items())]


def format_jobs(states: Sequence[RunState], width: int | None = None) -> Iterator[str]:
    """Yield the lines of ``trainwright jobs``, see `text.format_table`."""
    head = ["RUN", "JOB", "STATE", "STEP", "GOODPUT", "EXPECTED END"]
    yield from text.format_table([head, *(state.columns() for state in states)], width)


def _list_queued_jobs() -> list[QueuedJob]:
    """Return the jobs in Slurm's queue; none, with a note, if it does not answer."""
    from trainwright.clusters.slurm.scheduler import list_queued_jobs

    try:
        return [] if which("squeue") is None else list_queued_jobs()
    except RequestError as error:
        say(f"note: runs are shown without their jobs: {error}", file=sys.stderr)
        return []


def _list_runs() -> list[Path]:
    from trainwright.run.run_directory import RECIPE, RUNS

    return sorted(file.parent for pattern in (f"*/{RECIPE}", f"*/*/{RECIPE}") for file in RUNS.glob(pattern))


def _build_state(directory: Path, job: QueuedJob | None) -> RunState:
    from trainwright.observe.reports.figures import RunFigures

    number = None if job is None else job.name
    try:
        run = RunFigures.read(directory)
    except RequestError:  # it has not begun
        assert job is not None, "the others are runs"
        return RunState(directory, number, _describe_job_state(job))
    state = run.status if job is None else _describe_job_state(job)
    if not run.start:
        return RunState(directory, number, state)
    number = number or run.start.get("job")
    last = run.start.get("max_steps", 0)
    runs_now = run.trains or (job is not None and job.state == "RUNNING")
    end = _estimate_end(last, run.steps) if runs_now and run.steps else None
    return RunState(directory, number, state, run.step if run.steps else None, last, run.goodput, end)


def _describe_job_state(job: QueuedJob) -> str:
    words = job.state.lower()
    return f"{words} ({job.reason})" if job.state == "PENDING" else words


def _estimate_end(last: int, steps: Sequence[EventRecord]) -> float | None:
    remaining = max(0, last - int(steps[-1]["step"]))
    seconds = remaining * statistics.median(event["step_time"] for event in steps[-_LAST_STEPS:])
    return float(steps[-1]["time"] + seconds) if seconds < _FAR else None


_WRITERS = {
    "slurm": "trainwright.clusters.slurm.submission",
    "kubernetes": "trainwright.clusters.kubernetes",
    "skypilot": "trainwright.clusters.skypilot",
    "ray": "trainwright.clusters.ray",
}
# What takes a file that is printed.
_USE = {
    "kubernetes": "kubectl create -f - reads it",
    "skypilot": "sky jobs launch FILE takes it",
    "ray": "python FILE submits it",
}


@dataclass(frozen=True)
class Submission:
    """A job, and the run that it trains.

    Attributes:
        job: the scheduler's number; None if nothing was submitted.
        later: the numbers of the jobs that go on with the run after that one, in order.
        run: the directory of the run; with an array, of the runs of its elements.
        script: the text of the job's file.
        plan: for the described machine; None if the cluster's nodes are not described.
        seconds: the time limit, if it is known.
        warning: what the job is not given by the scheduler, as far as it is known.
    """

    job: str | None
    run: Path
    script: str
    plan: Plan | None
    seconds: int | None
    warning: str | None = None
    later: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yield what ``trainwright submit`` prints."""
        if self.plan is None:
            yield "not planned: the cluster's nodes are not described (machine in clusters.yaml, such as 8xH100)"
        else:
            from trainwright.planning.output import summarize_plan

            yield summarize_plan(self.plan.details)
            step = self.plan.predicted.get("step_time")
            if self.seconds is not None and step:
                yield f"about {int(self.seconds / step):,} steps fit into the {self.seconds / 3600:.3g} h of a job"
        if self.warning is not None:
            yield f"warning: {self.warning}"
        if self.later:
            yield f"then {', '.join(self.later)}, each after the one before"
        yield f"job {self.job}"
        yield f"run {self.run}"


def submit(
    recipe: str | PathLike[str],
    *overrides: str,
    to: str | None = None,
    name: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    cpus_per_node: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    array: str | None = None,
    jobs: int | None = None,
    until_done: bool | None = None,
    manifest: str | None = None,
    force: bool = False,
    dry_run: bool = False,
) -> Submission:
    """Submit a recipe as a job of Slurm, or return the file of one for Kubernetes,
    SkyPilot or Ray; what ``trainwright submit`` does.

    The job starts the run, or resumes it if it has begun: submit the same again to continue a run whose job has ended.
    What is not given is taken from the recipe's section ``launch``, then from the cluster in
    ``~/.config/trainwright/clusters.yaml``, then left to the scheduler.

    Args:
        recipe: the path of a recipe file, which the nodes see too.
        overrides: ``section.key=value``; with an array, ``{element}`` is replaced by the element's index.
        to: ``slurm``; ``kubernetes``, ``skypilot`` or ``ray``, only with ``dry_run``; or a cluster of clusters.yaml.
        name: of the run, in ``runs/``, and of its job. Default: that of the recipe or of ``logging.run_directory``,
            with which there can be no other name.
        nodes: number of nodes.
        gpus_per_node: GPUs of each node. Default: those of the cluster's ``machine``, or none.
        cpus_per_node: CPUs of each node. Default: the share that belongs to its GPUs, or all.
        time: the time limit, such as ``4h`` or ``"4:00:00"``.
        partition: where the job runs.
        account: who is charged.
        array: the indices of an array of jobs, such as ``0-9``.
        jobs: how many jobs train the run, one after another; those that are not needed are canceled.
        until_done: requeue the job until the run has finished.
        manifest: of Kubernetes: ``jobset``, ``trainjob`` or ``pytorchjob``.
        force: submit even if the plan says that the run does not fit.
        dry_run: submit and write nothing; the submission's ``script`` is the file.

    Raises:
        RequestError: the recipe or the arguments are invalid, the scheduler refuses them, or there is none.
        MachineError: the run does not fit into the described machine.

    Examples:
        >>> import trainwright as tw
        >>> made = tw.submit("tiny.yaml", to="slurm", name="first", nodes=2, time="4h", dry_run=True)
        >>> "#SBATCH --time=4:00:00" in made.script.splitlines()
        True
    """
    from trainwright.clusters.job import SLURM, build_job, select_first_overrides
    from trainwright.clusters.slurm import submission
    from trainwright.recipe.sections.parallel import parse_job_seconds

    options = {
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "cpus_per_node": cpus_per_node,
        "time": time,
        "partition": partition,
        "account": account,
        "array": array,
        "jobs": jobs,
        "until_done": until_done,
        "manifest": manifest,
    }
    job = build_job(Path(recipe), overrides, options, to, name)
    if job.settings.scheduler != SLURM and not dry_run:
        scheduler = job.settings.scheduler
        raise RequestError(f"--to: jobs of {scheduler} are only printed; pass --print, and {_USE[scheduler]}")
    on_slurm = job.settings.scheduler == SLURM
    cpus = job.settings.cpus_per_node
    if on_slurm:
        job = submission.complete_job(job)
    script = _format_job(job)
    plan = None
    if (machine := job.settings.described()) is not None:
        from trainwright.planning.requests import plan as plan_for

        plan = plan_for(recipe, *select_first_overrides(job), on=machine)
        if not force:
            plan.details.refuse_shortage()
    warning = submission.stop_warning(job, plan.details) if on_slurm and plan is not None else None
    numbers: list[str] = []
    if not dry_run:
        numbers = submission.submit(job, chosen=cpus != job.settings.cpus_per_node)
        script = _format_job(job)  # now that there is a directory for its log
    limit = job.settings.time
    seconds = None if limit is None else parse_job_seconds(limit)
    return Submission(next(iter(numbers), None), job.run, script, plan, seconds, warning, tuple(numbers[1:]))


def _format_job(job: Job) -> str:
    text: str = import_module(_WRITERS[job.settings.scheduler]).format_job(job)
    return text
