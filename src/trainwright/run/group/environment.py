"""A process's rank and world size, read from the variables that each launcher sets, and the rendezvous of a node.

torchrun and `accelerate launch` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (docs.pytorch.org,
"torchrun"); srun sets SLURM_* (slurm.schedmd.com/srun.html, "output environment variables"); Open MPI's mpirun
OMPI_COMM_WORLD_*; MPICH's and Intel's PMI_* and MPI_LOCAL*.

`trainwright train` starts its processes itself, on this machine and those that --nodes names. Variables and files that
mean another run are reported, or refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import MachineError, RequestError
from trainwright.run.group.addresses import format_address, is_loopback
from trainwright.utils.text import quote_word

RENDEZVOUS_SECONDS = 600.0  # for which processes and nodes wait for one another, unless the user says how long
# Below the ephemeral port range (on Linux from 32768).
_FIRST_PORT, _PORTS = 15000, 16000

_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_ACCELERATE = "ACCELERATE_MIXED_PRECISION"  # always set by accelerate launch
_TRUE = ("true", "1", "yes", "y", "t", "on")  # as Accelerate reads them
SUPERVISING_LAUNCHERS = ("torchrun", "accelerate launch")
_UNKNOWN = "the launcher that set RANK and WORLD_SIZE"
# By launcher: the command that starts workers with it, and the variables that identify it.
_WORKERS = {
    "torchrun": ("torchrun … -m", "RANK and WORLD_SIZE"),
    "accelerate launch": ("accelerate launch … -m", ""),
    "srun": ("srun … python -m", "SLURM_PROCID"),
    "mpirun": ("mpirun … python -m", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("mpiexec … python -m", "PMI_RANK"),
    _UNKNOWN: ("python -m", "RANK and WORLD_SIZE"),
}


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launcher's variables say about this process.

    Attributes:
        launcher: a name for messages.
        address, port: the rendezvous; None if the launcher does not set one.
        agent_store: whether the launcher itself listens there; otherwise rank 0 must.
        job: a text that is the same in all processes of this start and differs from any other on the machine; None if
            nothing distinguishes starts.
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    address: str | None = None
    port: int | None = None
    agent_store: bool = False
    job: str | None = None

    @property
    def job_everywhere(self) -> str | None:
        """Return `job` if it is the same on all machines, otherwise None."""
        return None if self.job is None or "parent-" in self.job else self.job

    def build_torch_variables(self) -> dict[str, str]:
        """Return the variables that torch and DeepSpeed read, for any launcher."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


def read_environment(variables: Mapping[str, str] | None = None, parent: int | None = None) -> LaunchEnvironment:
    """Read the environment of this process.

    Args:
        variables: os.environ by default.
        parent: the parent's process id; os.getppid() by default.

    Raises:
        MachineError: variables that contradict each other or are not numbers, or a Slurm allocation of several tasks
            without srun.
    """
    env = Variables(variables)
    environment = _read_launch(env, os.getppid() if parent is None else parent)
    if environment is None:
        _refuse_bare_allocation(env)
        return LaunchEnvironment("python")
    _check(environment)
    return environment


def rank_from_variables(variables: Mapping[str, str]) -> int:
    """Return the rank that a launcher sets, even if its other variables are invalid; 0 if it sets none."""
    texts = (variables.get(name, "").strip() for name in _RANKS)
    return next((int(text) for text in texts if text.isascii() and text.isdigit()), 0)


def refuse_worker(command: str, nodes: int = 1, variables: Mapping[str, str] | None = None) -> None:
    """Raise if a launcher has started several processes of a command that starts its workers itself.

    The batch script of a job does not count, whatever its allocation, nor does the only process of a launcher. One
    process on each of the command's own ``nodes`` is correct.

    Raises:
        RequestError: naming the launcher, the command to launch with it, and the variables that show it.
    """
    env = Variables(variables)
    if (launcher := find_launcher(env, nodes)) is None:
        return
    environment = _read_launch(env, os.getppid())
    start, signs = _WORKERS[launcher]
    if launcher == "accelerate launch":
        signs = " and ".join(list_accelerate_variables(env))
    as_rank = f" as rank {environment.rank} of {environment.size}" if environment is not None else ""
    instead = f"use `{start} trainwright.worker RECIPE` with it, or run" if command == "train" else "run"
    raise RequestError(
        f"trainwright {command} starts its processes itself, but {launcher} started this one{as_rank}; {instead} "
        f"trainwright {command} without it. If no launcher was meant, unset {signs}"
    )


def find_srun_node(nodes: int) -> tuple[int, str] | None:
    """Return the index of this node and the rendezvous, if srun has started one process on each of ``nodes`` nodes."""
    environment = _read_launch(Variables(), os.getppid())
    if environment is None or environment.launcher != "srun" or (environment.size, environment.nodes) != (nodes, nodes):
        return None
    return environment.node, format_address(str(environment.address), int(environment.port or 0))


def find_launcher(variables: Variables, nodes: int = 1) -> str | None:
    """Return the launcher that started this process as one of several, or None.

    One process on each of ``nodes`` machines does not count as several. Accelerate's settings count as its launcher,
    also for one process and where a user has set them.
    """
    environment = _read_launch(variables, os.getppid())
    by_accelerate = bool(list_accelerate_variables(variables))
    if not by_accelerate and (environment is None or environment.size in (1, nodes)):
        return None
    return "accelerate launch" if environment is None or by_accelerate else environment.launcher


def list_accelerate_variables(variables: Variables) -> list[str]:
    """Return the variables that show Accelerate's launcher or ask for one of its plugins."""
    return [_ACCELERATE] * variables.has(_ACCELERATE) + [*variables.list_accelerate_plugins().values()]


def _read_launch(variables: Variables, parent: int) -> LaunchEnvironment | None:
    """Return the launcher's environment of this process, or None without a launcher."""
    if variables.has("RANK", "WORLD_SIZE"):
        return _read_torch(variables)
    if not variables.has(*_OPEN_MPI) and not is_in_slurm_step(variables) and not variables.has("PMI_RANK", "PMI_SIZE"):
        _refuse_partial(variables)
    if variables.has(*_OPEN_MPI):
        return _open_mpi(variables, parent)
    if is_in_slurm_step(variables) and not _is_hydra_inside_slurm(variables):
        return _read_slurm(variables)
    if variables.has("PMI_RANK", "PMI_SIZE"):
        return _read_hydra(variables, parent)
    return None


def expand_nodes(text: str) -> list[str]:
    """Return the host names of a Slurm node list: `a[01-03,07],b` is a01, a02, a03, a07, b. Raises ValueError."""
    return [name for part in split_nodes(text) if part for name in expand_node(part)]


def split_nodes(text: str) -> list[str]:
    """Return the parts of a node list, split at the commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)]


def expand_node(part: str, most: int = 100_000) -> list[str]:
    """Return the host names of a part of a node list. Raises ValueError, also for ranges of more than ``most``."""
    match = re.search(r"\[([^\[\]]*)\]", part)
    if match is None:
        if "[" in part or "]" in part:
            raise ValueError(f"unbalanced brackets in {part!r}")
        return [part]
    names = []
    for span in match[1].split(","):
        first, _, last = (word.strip() for word in span.partition("-"))
        if not (first.isdigit() and (last or first).isdigit()) or not 0 <= int(last or first) - int(first) < most:
            raise ValueError(f"[{span}] is not a number or a range such as [1-3]")
        for number in range(int(first), int(last or first) + 1):
            middle = str(number).zfill(len(first))
            names += [part[: match.start()] + middle + rest for rest in expand_node(part[match.end() :], most)]
    return names


class Variables:
    """Environment variables, by default this process's, as numbers, with errors that name them."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = os.environ if values is None else values

    def has(self, *names: str) -> bool:
        """Return whether all of these variables are set."""
        return all(self._values.get(name, "").strip() for name in names)

    def text(self, *names: str) -> str | None:
        """Return the value of the first of these variables that is set."""
        return next((self._values[name].strip() for name in names if self.has(name)), None)

    def number(self, *names: str, default: int) -> int:
        """Return the number in the first of these variables that is set."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            return default
        try:
            return int(self._values[name])
        except ValueError:
            raise MachineError(f"the environment variable {name} is not a number: {self._values[name]!r}") from None

    def list_accelerate_plugins(self) -> dict[str, str]:
        """Return the plugins of Accelerate that are asked for, FSDP and DEEPSPEED, with the variable that does.

        A ZeRO stage or a DeepSpeed file without ACCELERATE_USE_DEEPSPEED asks for DeepSpeed.
        """
        switches = {name: f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED")}
        plugins = {name: switch for name, switch in switches.items() if (self.text(switch) or "").lower() in _TRUE}
        if switches["DEEPSPEED"] not in self._values:
            for variable in filter(self.has, ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_DEEPSPEED_ZERO_STAGE")):
                plugins["DEEPSPEED"] = variable
        return plugins


def _read_torch(variables: Variables) -> LaunchEnvironment:
    size = variables.number("WORLD_SIZE", default=1)
    elastic = variables.has("TORCHELASTIC_RUN_ID")
    rank = variables.number("RANK", default=0)
    # Some launchers (Kubernetes operators) start one process per machine and set no local rank.
    is_local = variables.text("MASTER_ADDR") is None or is_loopback(variables.text("MASTER_ADDR") or "")
    if not variables.has("LOCAL_RANK"):
        _refuse_several_a_pod(variables)
    local_rank = variables.number(*_LOCAL_RANKS, default=rank if is_local else 0)
    # Without a count the rendezvous address decides; processes per machine are counted once all have arrived.
    local_size = variables.number("LOCAL_WORLD_SIZE", default=size if is_local else local_rank + 1)
    counted = variables.has("LOCAL_WORLD_SIZE") or not variables.has("LOCAL_RANK")
    nodes = variables.number(
        "GROUP_WORLD_SIZE", default=max(1, -(-size // local_size)) if is_local or counted else size
    )
    name = _UNKNOWN
    if elastic:
        name = "accelerate launch" if variables.has(_ACCELERATE) else "torchrun"
    return LaunchEnvironment(
        launcher=name,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=variables.number("GROUP_RANK", default=rank // local_size if counted else 0),
        nodes=nodes,
        address=variables.text("MASTER_ADDR"),
        port=variables.number("MASTER_PORT", default=0) or None,
        agent_store=variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job=variables.text("TORCHELASTIC_RUN_ID") if elastic else None,
    )


def _refuse_partial(variables: Variables) -> None:
    """Raise if only one of RANK and WORLD_SIZE is set: this process of several would run alone."""
    for name, twin, least in (("WORLD_SIZE", "RANK", 2), ("RANK", "WORLD_SIZE", 1), ("LOCAL_RANK", "RANK", 1)):
        if read_number(variables, name) >= least:
            value = variables.text(name)
            raise MachineError(
                f"{name} is {value} and {twin} is not set, so this would be a run of one process; start the processes "
                f"with torchrun, srun or mpirun, set RANK and WORLD_SIZE for each, or unset {name}"
            )


def _refuse_several_a_pod(variables: Variables) -> None:
    """Raise if Kubeflow sets PET_NPROC_PER_NODE: several processes in a pod, which torchrun should start."""
    value = variables.text("PET_NPROC_PER_NODE") or ""
    if value.isdigit() and int(value) > 1:
        raise MachineError(
            f"PET_NPROC_PER_NODE is {value}, which torchrun reads, and this process was started without it: LOCAL_RANK "
            "is not set; start torchrun -m trainwright.worker RECIPE in every pod, or set PET_NPROC_PER_NODE to 1"
        )


def _open_mpi(variables: Variables, parent: int) -> LaunchEnvironment:
    size = variables.number("OMPI_COMM_WORLD_SIZE", default=1)
    local_size = variables.number("OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
    rank = variables.number("OMPI_COMM_WORLD_RANK", default=0)
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid") or f"parent-{parent}"
    return _build_mpi(variables, "mpirun", rank, size, "OMPI_COMM_WORLD_LOCAL_RANK", local_size, job)


def _read_hydra(variables: Variables, parent: int) -> LaunchEnvironment:
    """Read the variables of MPICH and Intel MPI."""
    size = variables.number("PMI_SIZE", default=1)
    local_size = variables.number("MPI_LOCALNRANKS", default=size)
    rank = variables.number("PMI_RANK", default=0)
    return _build_mpi(variables, "mpiexec", rank, size, "MPI_LOCALRANKID", local_size, f"parent-{parent}")


def _build_mpi(
    variables: Variables, launcher: str, rank: int, size: int, local: str, local_size: int, job: str
) -> LaunchEnvironment:
    return LaunchEnvironment(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=variables.number(local, default=rank if local_size == size else 0),
        local_size=local_size,
        node=rank // local_size,
        nodes=-(-size // local_size),
        address=variables.text("MASTER_ADDR"),
        port=variables.number("MASTER_PORT", default=0) or None,
        job=f"{launcher}-{job}",
    )


def read_number(variables: Variables, *names: str) -> int:
    """Return the value of the first of these that is set; 0 if none is."""
    return variables.number(*names, default=0)


def is_in_slurm_step(variables: Variables) -> bool:
    """Return whether srun started this process or an ancestor; false in the shell of a batch script."""
    return variables.has("SLURM_PROCID") and (variables.has("SLURM_STEP_ID") or variables.has("SLURM_STEPID"))


def _is_hydra_inside_slurm(variables: Variables) -> bool:
    """Return whether srun started mpiexec's daemons, which started this process: the step's ranks are theirs."""
    if not variables.has("PMI_RANK", "PMI_SIZE"):
        return False
    ours = variables.text("PMI_RANK"), variables.text("PMI_SIZE")
    return ours != (variables.text("SLURM_PROCID"), variables.text("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))


def _read_slurm(variables: Variables) -> LaunchEnvironment:
    rank = variables.number("SLURM_PROCID", default=0)
    # Use the step's own numbers: the allocation may be larger than the step.
    size = variables.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", default=1)
    nodes = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    node = variables.number("SLURM_NODEID", default=0)
    job = variables.text("SLURM_JOB_ID", "SLURM_JOBID") or "0"
    step = variables.text("SLURM_STEP_ID", "SLURM_STEPID") or "0"
    counts = _parse_tasks_per_node(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    address, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT", default=0) or None
    if nodes > 1:
        address = address or _find_first_node(variables)
        port = port or compute_slurm_port(job, step)
    return LaunchEnvironment(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=variables.number("SLURM_LOCALID", default=0),
        local_size=counts[node] if node < len(counts) else (size if nodes == 1 else -(-size // nodes)),
        node=node,
        nodes=nodes,
        address=address,
        port=port,
        job=f"slurm-{job}-{step}-{variables.text('SLURM_RESTART_COUNT') or 0}",
    )


def compute_slurm_port(job: str, step: str) -> int:
    """Return the port of a job step: the same on every node, and different for the job's next step."""
    numbers = [int(digits) for digits in re.findall(r"\d+", f"{job} {step}")]
    return _FIRST_PORT + sum(n * 7**i for i, n in enumerate(numbers)) % _PORTS


def _parse_tasks_per_node(text: str | None) -> list[int]:
    """Parse Slurm's tasks per node: `2(x3),1` gives 2, 2, 2, 1."""
    counts: list[int] = []
    for part in (text or "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _find_first_node(variables: Variables) -> str:
    text = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        return expand_nodes(text or "")[0]
    except (ValueError, IndexError):
        raise MachineError(
            f"Slurm's list of nodes cannot be read ({text!r}); set MASTER_ADDR to the name of the first"
        ) from None


def _refuse_bare_allocation(variables: Variables) -> None:
    tasks = max(read_number(variables, "SLURM_NTASKS"), read_number(variables, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"))
    if tasks > 1 and variables.has("SLURM_JOB_ID") and not is_in_slurm_step(variables):
        raise MachineError(
            f"this Slurm allocation is for {tasks} tasks, and this process was started alone; start them with "
            "srun python -m trainwright.worker …"
        )


def _check(environment: LaunchEnvironment) -> None:
    if (
        not 0 <= environment.rank < environment.size
        or not 0 <= environment.local_rank < environment.local_size <= environment.size
    ):
        raise MachineError(
            f"{environment.launcher} gives rank {environment.rank} of {environment.size} and local rank "
            f"{environment.local_rank} of {environment.local_size}, which contradict each other; are variables left "
            "over from another launcher set here?"
        )


_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\[\]:]+)):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class NodeRendezvous:
    """Where several nodes meet, the index of this one, and how long they wait for each other."""

    nodes: int
    node_rank: int
    host: str
    port: int
    seconds: float

    @classmethod
    def of(
        cls, nodes: int, node_rank: int | None, rendezvous: str | None, seconds: float | None
    ) -> NodeRendezvous | None:
        """Return the rendezvous of a command's options, or of srun; None for one node. Raises RequestError."""
        if nodes > 1 and node_rank is None and rendezvous is None:
            node_rank, rendezvous = find_srun_node(nodes) or (None, None)
        if nodes == 1:
            options = {"--rendezvous": rendezvous, "--node-rank": node_rank, "--rendezvous-timeout": seconds}
            if excess := [name for name, value in options.items() if value is not None]:
                verb = "are" if len(excess) > 1 else "is"
                raise RequestError(f"{' and '.join(excess)} {verb} for several nodes; pass --nodes")
            return None
        if rendezvous is None:
            raise RequestError(
                f"--nodes {nodes} needs --rendezvous host:port, an address of node 0; the same on every node"
            )
        if node_rank is None:
            raise RequestError(f"--nodes {nodes} needs --node-rank: 0 to {nodes - 1}, another one on every node")
        if node_rank >= nodes:
            raise RequestError(f"--node-rank: nodes are counted from 0, so with {nodes} nodes the last is {nodes - 1}")
        host, port = parse_address(rendezvous)
        return cls(nodes, node_rank, host, port, seconds or RENDEZVOUS_SECONDS)


def parse_address(text: str) -> tuple[str, int]:
    """Parse `--rendezvous host:port`. Raises RequestError."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 2**16:
        raise RequestError(
            f"--rendezvous: {text!r} is not host:port, such as node0.example.org:29500, or [fd00::1]:29500 with IPv6"
        )
    return match[1] or match[2], int(match[3])


def refuse_more_nodes(arguments: Sequence[str], nodes: int | None, variables: Mapping[str, str] | None = None) -> None:
    """Reject a plain command line in a Slurm allocation of several nodes, because the other nodes would be idle.

    Args:
        arguments: of the command line, to suggest one that uses all nodes.
        nodes: the value of --nodes, or None.

    Raises:
        RequestError: with the command that uses all of them, and the option that excludes them on purpose.
    """
    env = Variables(variables)
    count = read_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    if nodes is not None or count < 2 or is_in_slurm_step(env):
        return
    raise RequestError(
        f"this Slurm allocation has {count} nodes, but this command trains on one; start one process per device on "
        f"all nodes with `{format_srun_command(env, count, arguments)}`, or pass --nodes 1 to leave the others idle"
    )


def format_srun_command(env: Variables, nodes: int, arguments: Sequence[str]) -> str:
    """Return the command that starts workers on all nodes of the allocation."""
    tasks = read_number(env, "SLURM_NTASKS")
    share = read_number(env, "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE") or max(1, tasks // nodes)
    # srun sets the number of processes; one that was meant for this machine would contradict it.
    arguments = [word for word in arguments if not word.startswith("parallel.num_processes=")]
    return (
        f"srun --nodes={nodes} --ntasks-per-node={share} python -m trainwright.worker {shlex.join(arguments)}".rstrip()
    )


def list_ignored_settings(
    nodes: int | None, processes: int, accelerate_file: Path | None, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield a line for each setting that is not followed, if ignoring it is harmless.

    Args:
        accelerate_file: Accelerate's default file, if it exists and no other was named.
    """
    env = Variables(variables)
    if accelerate_file is not None:
        yield (
            f"{accelerate_file}, Accelerate's default file, is not used: --accelerate-config "
            f"{quote_word(accelerate_file)} "
            "takes processes, strategy and precision from it"
        )
    alone = read_number(env, "WORLD_SIZE") <= 1
    if nodes is None and alone and not env.has("RANK") and (address := env.text("MASTER_ADDR")) is not None:
        port = env.text("MASTER_PORT") or "29500"
        yield (
            f"MASTER_ADDR is {address}, which is not used: this command trains on this machine only; for several, "
            f"pass on each --nodes N --node-rank R --rendezvous {format_address(address, port)}"
        )
    tasks = read_number(env, "SLURM_NTASKS")
    if env.has("SLURM_JOB_ID") and not is_in_slurm_step(env) and tasks > 1 and tasks != processes:
        yield (
            f"this Slurm allocation is for {tasks} tasks, and {processes} process{'es' * (processes > 1)} "
            f"start{'s' * (processes == 1)} here: parallel.num_processes sets their number"
        )
