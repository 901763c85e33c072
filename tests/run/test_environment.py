"""Who a process is, from the variables of each launcher."""

from __future__ import annotations

import pytest

from trainwright.errors import MachineError, RequestError
from trainwright.run.group.environment import (
    LaunchEnvironment,
    compute_slurm_port,
    expand_nodes,
    read_environment,
    refuse_worker,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "16",  # of the allocation; the step is smaller
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_JOB_NODELIST": "node[01-04]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "992673793",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def numbers(found: LaunchEnvironment) -> tuple[int, ...]:
    return found.rank, found.size, found.local_rank, found.local_size, found.node, found.nodes


def test_nothing_set_is_a_world_of_one() -> None:
    assert read_environment({}) == LaunchEnvironment("python")
    assert numbers(read_environment({})) == (0, 1, 0, 1, 0, 1)


def test_torchrun() -> None:
    found = read_environment(TORCHRUN)
    assert numbers(found) == (5, 8, 1, 4, 1, 2)
    assert (found.launcher, found.address, found.port, found.agent_store) == ("torchrun", "head", 29400, True)
    assert read_environment({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate launch"


def test_ranks_set_by_hand_on_one_machine() -> None:
    found = read_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    assert numbers(found) == (1, 2, 1, 2, 0, 1)
    assert not found.agent_store and found.port is None and found.job is None


KUBEFLOW = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "2",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}


def test_pods_of_kubeflow_are_machines_of_one_process_each() -> None:
    first = read_environment({**KUBEFLOW, "RANK": "0", "PET_NODE_RANK": "0"})
    assert numbers(first) == (0, 2, 0, 1, 0, 2)
    assert numbers(read_environment({**KUBEFLOW, "RANK": "1", "PET_NODE_RANK": "1"})) == (1, 2, 0, 1, 1, 2)
    assert (first.address, first.port) == ("job-master-0", 23456)


def test_several_processes_a_pod_are_torchruns_to_start() -> None:
    with pytest.raises(MachineError, match=r"PET_NPROC_PER_NODE is 4.*LOCAL_RANK is not set; start torchrun -m"):
        read_environment({**KUBEFLOW, "RANK": "0", "PET_NPROC_PER_NODE": "4"})


def test_local_ranks_without_a_count_leave_the_machines_to_be_seen() -> None:
    """The same for all: rank 0 cannot tell a machine of its own from one that it shares."""
    away = {"WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    found = [
        read_environment({**away, "RANK": str(rank), "LOCAL_RANK": str(local)})
        for rank, local in enumerate((0, 1, 0, 1))
    ]
    assert [(one.local_rank, one.node, one.nodes) for one in found] == [(0, 0, 4), (1, 0, 4), (0, 0, 4), (1, 0, 4)]
    here = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert [numbers(read_environment({**here, "RANK": rank})) for rank in "01"] == [
        (0, 2, 0, 2, 0, 1),
        (1, 2, 1, 2, 0, 1),
    ]


def test_restarts_that_torchruns_agents_count_differently_do_not_part_the_ranks() -> None:
    again = read_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.job == read_environment(TORCHRUN).job


def test_one_process_a_machine_without_local_ranks() -> None:
    found = read_environment({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert numbers(found) == (3, 4, 0, 1, 3, 4)


def test_srun_takes_the_step_and_not_the_allocation() -> None:
    found = read_environment(SLURM)
    assert numbers(found) == (5, 7, 1, 3, 1, 2)
    assert (found.launcher, found.address, found.port) == ("srun", "node01", compute_slurm_port("4242", "1"))
    assert read_environment({**SLURM, "MASTER_PORT": "12345"}).port == 12345
    assert read_environment({**SLURM, "MASTER_ADDR": "other"}).address == "other"


def test_srun_on_one_node_leaves_the_port_to_be_found() -> None:
    one = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    found = read_environment({**one, "SLURM_LOCALID": "5"})
    assert numbers(found) == (5, 7, 5, 7, 0, 1)
    assert (found.address, found.port, found.job) == (None, None, "slurm-4242-1-0")


def test_slurm_ports_differ_between_steps_and_are_no_ephemeral_ones() -> None:
    ports = [compute_slurm_port(str(job), str(step)) for job in range(900, 940) for step in range(3)]
    assert all(1024 < port < 32768 for port in ports)
    assert compute_slurm_port("900", "0") != compute_slurm_port("900", "1") != compute_slurm_port("901", "0")


def test_allocation_without_srun_is_refused() -> None:
    bare = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    with pytest.raises(MachineError, match=r"8 tasks.*srun"):
        read_environment(bare)
    assert read_environment({**bare, "SLURM_NTASKS": "1"}).size == 1


def test_an_allocation_of_several_nodes_without_srun_is_refused() -> None:
    with pytest.raises(MachineError, match=r"2 tasks.*srun"):
        read_environment({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4 and RANK is not set, so this would be a run of one process"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}, "WORLD_SIZE is 4 and RANK is not set"),
        ({"RANK": "1", "MASTER_ADDR": "head"}, "RANK is 1 and WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and RANK is not set"),
    ],
)
def test_half_of_what_several_processes_need_is_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(MachineError, match=says):
        read_environment(variables)
    with pytest.raises(MachineError, match=says):
        refuse_worker("train", variables=variables)
    # A launcher that says all of it itself is not disturbed.
    assert read_environment({**variables, **SLURM}).launcher == "srun"


def test_open_mpi() -> None:
    found = read_environment(OPEN_MPI)
    assert numbers(found) == (3, 4, 1, 2, 1, 2)
    assert (found.launcher, found.job) == ("mpirun", "mpirun-992673793")


def test_open_mpi_wins_over_the_step_its_daemons_run_in() -> None:
    assert read_environment({**SLURM, **OPEN_MPI}).launcher == "mpirun"


def test_mpich_and_intel() -> None:
    found = read_environment(HYDRA, parent=77)
    assert numbers(found) == (1, 2, 1, 2, 0, 1)
    assert found.job == "mpiexec-parent-77"
    assert numbers(read_environment({"PMI_RANK": "1", "PMI_SIZE": "2"})) == (1, 2, 1, 2, 0, 1)


def test_mpiexec_inside_a_step_is_not_srun() -> None:
    assert read_environment({**SLURM, **HYDRA}).launcher == "mpiexec"
    same = {"PMI_RANK": SLURM["SLURM_PROCID"], "PMI_SIZE": SLURM["SLURM_STEP_NUM_TASKS"]}
    assert read_environment({**SLURM, **same}).launcher == "srun"  # srun --mpi=pmi2 sets both


def test_torch_variables_win_over_all_others() -> None:
    assert read_environment({**SLURM, **OPEN_MPI, **HYDRA, **TORCHRUN}).launcher == "torchrun"


# A job's batch script, and a shell in one task of its own, whatever the allocation is for.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "1"}
SHELL = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (TORCHRUN, r"torchrun started this one as rank 5 of 8; use `torchrun … -m trainwright\.worker RECIPE`"),
        (SLURM, r"srun started .* rank 5 of 7; use `srun … python -m trainwright\.worker RECIPE`.* unset SLURM_PROCID"),
        (OPEN_MPI, r"use `mpirun … python -m trainwright\.worker RECIPE`.* unset OMPI_COMM_WORLD_RANK"),
        (HYDRA, r"use `mpiexec … python -m trainwright\.worker RECIPE`"),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            r"set RANK and WORLD_SIZE started .* use `python -m trainwright\.worker RECIPE`",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, r"use `accelerate launch … -m trainwright\.worker RECIPE`"),
        ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch started this one as rank 5 of 8"),
        ({"ACCELERATE_USE_FSDP": "true"}, "accelerate launch started .* unset ACCELERATE_USE_FSDP$"),
        ({"ACCELERATE_USE_DEEPSPEED": "1"}, "unset ACCELERATE_USE_DEEPSPEED$"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "unset ACCELERATE_DEEPSPEED_ZERO_STAGE$"),
    ],
)
def test_one_of_several_processes_does_not_start_others(variables: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        refuse_worker("train", variables=variables)
    with pytest.raises(RequestError, match="; run trainwright verify without it"):
        refuse_worker("verify", variables=variables)


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, 1),
        (BATCH, 1),
        (SHELL, 1),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1),
        ({"ACCELERATE_USE_FSDP": "false"}, 1),
        ({"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, 1),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        # One on each of the nodes that the command is told of.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}, 2),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 4),
    ],
)
def test_a_process_alone_may_start_others(variables: dict[str, str], nodes: int) -> None:
    refuse_worker("train", nodes, variables)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"RANK": "8"}, "rank 8 of 8"), ({"LOCAL_RANK": "4"}, "local rank 4 of 4"), ({"RANK": "five"}, "RANK.*five")],
)
def test_variables_that_cannot_be_are_refused(changes: dict[str, str], named: str) -> None:
    with pytest.raises(MachineError, match=named):
        read_environment({**TORCHRUN, **changes})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a,b", ["a", "b"]),
        ("a[1-2],b7,c[08-10]", ["a1", "a2", "b7", "c08", "c09", "c10"]),
        ("rack[1-2]-n[3,5].example", ["rack1-n3.example", "rack1-n5.example", "rack2-n3.example", "rack2-n5.example"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


def test_broken_node_list_is_named() -> None:
    with pytest.raises(ValueError, match="brackets"):
        expand_nodes("node[1-")
    with pytest.raises(MachineError, match="MASTER_ADDR"):
        read_environment({**SLURM, "SLURM_STEP_NODELIST": "node[1-"})
