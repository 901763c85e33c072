"""The same recipe, its processes started by launchers that are not ours: the same run, or the same refusal."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, environment, python, wait_for
from tests.support.runs import ON_ROWS, TINY, Finished, Runs, Started, column, difference, events
from tests.support.slow import slow_but
from tests.support.workers import by_hand, open_mpi, srun, start_workers
from trainwright.errors import EXIT_FAULT, EXIT_REQUEST, EXIT_STOPPED, EXIT_TRAINING

STEPS = "train.max_steps=6"
LONG = "train.max_steps=5000"
TOLERANCE = 1e-6
UNDER_TORCHRUN = [
    *(sys.executable, "-m", "trainwright", "under"),
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
]
_jobs = (f"{os.getpid()}{number:03}" for number in itertools.count())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def reference(runs: Runs) -> Path:
    return runs.trained("parallel.num_processes=2", STEPS)


def ended(workers: list[Started]) -> list[Finished]:
    return [worker.wait() for worker in workers]


def same_run(run: Path, other: Path) -> None:
    assert events(run, "start")[0]["world_size"] == 2
    assert events(run, "start")[0]["strategy"] == "ddp"
    assert difference(column(run, "loss"), column(other, "loss")) < TOLERANCE
    assert difference(column(run, "grad_norm"), column(other, "grad_norm")) < TOLERANCE


@pytest.mark.parametrize("launcher", slow_but(srun, among=(srun, open_mpi)))
def test_the_same_run_from_the_variables_of(runs: Runs, launcher: Callable[[int, str], list[dict[str, str]]]) -> None:
    expected = reference(runs)  # first, so that rank 0 has the traces for its plan and the others do not wait for it
    workers = start_workers(runs, launcher(2, next(_jobs)), STEPS)
    first, second = ended(workers)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    run = workers[0].run
    assert run is not None
    same_run(run, expected)
    assert "finished at step 6" in first.stdout and first.stderr == ""
    assert (second.stdout, second.stderr) == ("", "")
    assert (run / "logs" / "rank-0.log").is_file() and (run / "logs" / "rank-1.log").is_file()
    assert (
        f"the number that {launcher.__name__.replace('open_mpi', 'mpirun')} started" in (run / "plan.json").read_text()
    )
    assert not list(Path(tempfile.gettempdir()).glob(f"trainwright-*.{workers[0].pid}"))


@pytest.mark.slow
def test_ranks_in_other_working_directories_resume_from_a_relative_path(runs: Runs, tmp_path: Path) -> None:
    def trained(job: str, *arguments: str) -> list[Finished]:
        workers = []
        for rank, variables in enumerate(srun(2, job)):
            (place := tmp_path / str(rank)).mkdir(exist_ok=True)
            words = (ON_ROWS, "checkpoint.every=2", *arguments)
            workers += start_workers(runs, [variables], *words, run=Path("run"), cwd=place)
        return ended(workers)

    for finished in trained(next(_jobs), "train.max_steps=4"):
        assert finished.code == 0, finished.stderr
    for finished in trained(next(_jobs), "train.max_steps=6", "--resume", "run"):
        assert finished.code == 0, finished.stderr
    run = tmp_path / "0" / "run"
    assert [event["resumed_from"] for event in events(run, "start")] == [None, 4]
    assert not (tmp_path / "1" / "run").exists()


@pytest.mark.slow
def test_a_worker_alone_is_a_run_of_one(runs: Runs) -> None:
    (worker,) = start_workers(runs, [{}], "train.max_steps=2")
    finished = worker.wait()
    assert finished.code == 0, finished.stderr
    assert worker.run is not None
    start = events(worker.run, "start")[0]
    assert (start["world_size"], start["strategy"]) == (1, "single")


def test_a_stop_before_the_first_checkpoint_says_that_nothing_was_kept(runs: Runs) -> None:
    (worker,) = start_workers(runs, [{}], STEPS)
    assert worker.run is not None
    wait_for((worker.run / "logs" / "rank-0.log").exists)
    (worker.run / "stop").touch()
    finished = worker.wait()
    assert finished.code == 75, finished.stderr
    assert (
        f"stopped before the first checkpoint; nothing was kept; continue with --resume {worker.run}" in finished.stderr
    )


@pytest.mark.parametrize(
    ("override", "code", "named"),
    [
        ("parallel.num_processes=3", 3, ("parallel.num_processes", "asks for 3 processes", "srun started 2")),
        ("parallel.strategy=single", 2, ("parallel.strategy", "single", "srun started 2")),
        ("train.max_stepz=3", 2, ("train.max_stepz", "max_steps")),
        ("data.train=nowhere.jsonl", 2, ("data.train", "nowhere.jsonl")),
    ],
)
def test_refusals_are_told_once_and_end_all_ranks_alike(
    runs: Runs, tmp_path: Path, override: str, code: int, named: tuple[str, ...]
) -> None:
    workers = start_workers(runs, srun(2, next(_jobs)), override, cwd=tmp_path)
    first, second = ended(workers)
    assert (first.code, second.code) == (code, code), first.stderr + second.stderr
    assert first.stderr.startswith("error: ") and all(name in first.stderr for name in named)
    assert "Traceback" not in first.stderr and second.stderr == ""
    assert workers[0].run is not None and not workers[0].run.exists() and not list(tmp_path.iterdir())


def test_what_only_preparation_can_refuse_leaves_nothing_behind(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"color": "red", "size": 3}\n' * 8)
    workers = start_workers(runs, srun(2, next(_jobs)), "data.train=rows.jsonl", cwd=tmp_path)
    first, second = ended(workers)
    assert (first.code, second.code) == (2, 2), first.stderr + second.stderr
    assert "color" in first.stderr and second.stderr == ""
    assert workers[0].run is not None and not workers[0].run.exists()


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named(runs: Runs) -> None:
    (worker,) = start_workers(runs, srun(3, next(_jobs))[:1], "--rendezvous-timeout", "2")
    finished = worker.wait()
    assert finished.code == 3
    assert "ranks 1, 2" in finished.stderr and "2 s" in finished.stderr


@pytest.mark.slow
def test_a_run_whose_directory_is_gone_is_told_of_once(runs: Runs) -> None:
    workers = start_workers(runs, srun(2, next(_jobs)), LONG)
    run = workers[0].run
    assert run is not None
    workers[0].wait_for_step(3)
    run.rename(run.with_name(f"{run.name}-moved"))
    first, second = ended(workers)
    assert (first.code, second.code) == (4, 4), first.stderr + second.stderr
    assert (first.stderr + second.stderr).count("is gone: the run's directory was deleted or moved") == 1
    assert not run.exists()


@pytest.mark.slow
def test_a_taken_port_ends_every_rank_soon(runs: Runs, listener: socket.socket) -> None:
    """The listener accepts and says nothing, which torch's own store would wait for without end."""
    port = listener.getsockname()[1]
    first, second = ended(start_workers(runs, by_hand(2, port)))
    assert (first.code, second.code) == (3, 3)
    told = first.stderr + second.stderr
    assert told.count("error: ") == 1 and f"port {port}" in told and "MASTER_PORT" in told, told


@pytest.mark.slow
def test_pods_with_nothing_but_ranks_are_the_same_run(runs: Runs, tmp_path: Path, free_port: int) -> None:
    """As Kubeflow starts them: no LOCAL_RANK, and an address that is not known to be this machine's own.

    They share nothing but the run's directory.
    """
    address = str(int.from_bytes(socket.inet_aton("127.0.0.1")))  # a name for it that no one takes for loopback
    everywhere = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port),
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "auto",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
    }
    run, workers = runs.new_directory("run"), []
    for rank in range(2):
        (here := tmp_path / str(rank)).mkdir()
        workers += start_workers(runs, [{**everywhere, "RANK": str(rank)}], STEPS, run=run, cwd=here)
    first, second = ended(workers)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    same_run(run, reference(runs))


def test_an_environment_that_no_rank_can_read_is_told_once(runs: Runs) -> None:
    workers = start_workers(runs, [{**each, "MASTER_PORT": "none"} for each in by_hand(2, 1)])
    first, second = ended(workers)
    assert (first.code, second.code) == (3, 3)
    assert first.stderr.startswith("error: the environment variable MASTER_PORT is not a number")
    assert second.stderr == ""


@pytest.mark.slow
def test_a_rank_of_another_job_at_the_same_port_is_refused_and_harms_nobody(runs: Runs, free_port: int) -> None:
    healthy = start_workers(runs, by_hand(2, free_port), "train.max_steps=400")
    healthy[0].wait_for_step(2)
    # The same command once more, and another job's: neither becomes a member.
    again, other = (
        start_workers(runs, by_hand(2, free_port)[1:], *arguments, run=healthy[0].run)[0]
        for arguments in (("train.max_steps=400",), ("train.max_steps=7",))
    )
    for stranger, said in ((again, "rank 1 of the run at"), (other, "is of another run (of another recipe)")):
        finished = stranger.wait()
        assert finished.code == 3
        assert said in finished.stderr and f"two jobs use port {free_port}" in finished.stderr, finished.stderr
    first, second = ended(healthy)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr


def test_two_processes_with_one_local_rank_are_refused(runs: Runs, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    variables = [{**each, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} for each in by_hand(2, port)]
    first, second = ended(start_workers(runs, variables))
    assert (first.code, second.code) == (3, 3)
    assert "LOCAL_RANK" in first.stderr and second.stderr == ""


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_is_named_once(runs: Runs) -> None:
    workers = start_workers(runs, srun(3, next(_jobs)), LONG)
    workers[0].wait_for_step(3)
    workers[1].kill()
    first, third = workers[0].wait(), workers[2].wait()
    assert (first.code, third.code) == (5, 5)
    told = first.stderr + third.stderr
    assert told.count("error: ") == 1 and "rank 1 is gone" in told, told


def test_a_killed_rank_0_ends_the_others_too(runs: Runs) -> None:
    workers = start_workers(runs, srun(2, next(_jobs)), LONG)
    workers[0].wait_for_step(3)
    workers[0].kill()
    second = workers[1].wait()
    assert second.code == 5 and "rank 0 is gone" in second.stderr, second.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_while_others_are_awaited_ends_all(runs: Runs, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    present = start_workers(runs, by_hand(3, port)[:2], LONG)
    time.sleep(2)
    assert not present[0].ended and not present[1].ended
    present[1].kill()
    first = present[0].wait()
    assert first.code == 5 and first.stderr.startswith("error: rank 1 is gone"), first.stderr
    assert present[0].run is not None and not present[0].run.exists()


@pytest.mark.slow
def test_steps_on_several_nodes_meet_at_a_port_made_of_the_job(runs: Runs) -> None:
    nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    variables = [
        {**each, **nodes, "SLURM_NODEID": each["SLURM_PROCID"], "MASTER_ADDR": "127.0.0.1"}
        for each in srun(2, next(_jobs))
    ]
    workers = start_workers(runs, variables, STEPS)
    first, second = ended(workers)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert workers[0].run is not None
    same_run(workers[0].run, reference(runs))


def test_a_stop_signal_to_any_rank_stops_all_after_a_checkpoint(runs: Runs) -> None:
    workers = start_workers(runs, open_mpi(2, next(_jobs)), LONG)
    workers[0].wait_for_step(3)
    workers[1].kill(signal.SIGTERM)
    first, second = ended(workers)
    assert (first.code, second.code) == (75, 75), first.stderr + second.stderr
    assert "--resume" in first.stderr and second.stderr == ""
    run = workers[0].run
    assert run is not None and list((run / "checkpoints").glob("step-*/manifest.json"))
    reached = events(run, "step")[-1]["step"]
    resumed = start_workers(runs, srun(2, next(_jobs)), LONG, "--resume", run=run)
    resumed[0].wait_for_step(reached + 2)
    resumed[0].kill(signal.SIGTERM)
    first, second = ended(resumed)
    assert (first.code, second.code) == (75, 75), first.stderr + second.stderr
    assert events(run, "start")[-1]["resumed_from"] == reached


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("variables", [srun(2, "5")[1], open_mpi(2, "5")[0], by_hand(2, 1)[1]])
def test_a_command_that_starts_processes_is_refused_in_one_of_several(
    runs: Runs, tmp_path: Path, command: str, variables: dict[str, str]
) -> None:
    finished = runs.command(command, str(TINY), cwd=tmp_path, **variables).wait()
    assert finished.code == 2
    assert finished.stderr.startswith(f"error: trainwright {command} starts its processes itself")
    assert ("trainwright.worker RECIPE" in finished.stderr) == (command == "train")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_batch_script_trains_whatever_its_allocation_is_for(runs: Runs, tmp_path: Path) -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    settings = ("parallel.num_processes=2", "train.max_steps=2", "logging.run_directory=run")
    finished = runs.command("train", str(TINY), *settings, cwd=tmp_path, **batch).wait()
    assert finished.code == 0, finished.stderr
    assert events(tmp_path / "run", "start")[0]["world_size"] == 2


def run_it(
    tmp_path: Path, runs: Runs, *command: str, overrides: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], Path]:
    run = tmp_path / "run"
    arguments = ["-m", "trainwright.worker", str(TINY), STEPS, f"logging.run_directory={run}", *overrides]
    variables = environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache"))
    result = subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    return result, run


@pytest.mark.slow
def test_the_same_run_under_torchrun(tmp_path: Path, runs: Runs) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    result, run = run_it(tmp_path, runs, *torchrun)
    assert result.returncode == 0, result.stderr
    same_run(run, reference(runs))
    assert result.stdout.count("finished at step 6") == 1


@pytest.mark.slow
def test_the_same_run_under_torchrun_on_two_nodes(tmp_path: Path, runs: Runs, listener: socket.socket) -> None:
    """Two agents on this machine, each with one worker whose local rank is 0."""
    port = listener.getsockname()[1]
    listener.close()
    meeting = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    agent = [sys.executable, "-m", "torch.distributed.run", *meeting]
    run = tmp_path / "run"
    arguments = ["-m", "trainwright.worker", str(TINY), STEPS, f"logging.run_directory={run}"]
    variables = environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache"))
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(
                subprocess.Popen(
                    [*agent, f"--node-rank={node}", *arguments],
                    cwd=tmp_path,
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for node in range(2)
        ]
        told = [each.communicate(timeout=PATIENCE) for each in agents]
    assert [each.returncode for each in agents] == [0, 0], told
    same_run(run, reference(runs))
    assert "".join(out for out, _ in told).count("finished at step 6") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_the_same_run_under_mpirun(tmp_path: Path, runs: Runs) -> None:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    result, run = run_it(tmp_path, runs, "mpirun", *as_root, "--oversubscribe", "-np", "2", sys.executable)
    assert result.returncode == 0, result.stderr
    same_run(run, reference(runs))
    assert result.stdout.count("finished at step 6") == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_same_run_under_accelerate_launch(tmp_path: Path, runs: Runs) -> None:
    # A file for several processes on a CPU; of those, Accelerate starts more than one for FSDP alone.
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\nnum_machines: 1\nmixed_precision: 'no'\n"
        "fsdp_config: {fsdp_version: 2}\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml"]
    result, run = run_it(tmp_path, runs, *launch)
    assert result.returncode == 0, result.stderr
    assert events(run, "start")[0]["strategy"] == "fsdp"
    assert difference(column(run, "loss"), column(reference(runs), "loss")) < TOLERANCE


@pytest.mark.slow
def test_a_killed_rank_under_torchrun_ends_all(tmp_path: Path, runs: Runs) -> None:
    import psutil

    run = tmp_path / "run"
    with subprocess.Popen(
        [*UNDER_TORCHRUN, "-m", "trainwright.worker", str(TINY), LONG, f"logging.run_directory={run}"],
        cwd=tmp_path,
        env=environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache")),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        wait_for(lambda: (run / "events.jsonl").exists() and '"event": "step"' in (run / "events.jsonl").read_text())
        workers = psutil.Process(process.pid).children(recursive=True)
        killed = next(worker for worker in workers if worker.environ().get("RANK") == "1")
        killed.kill()
        told = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == EXIT_FAULT
    assert told.count("error: ") <= 1 and "ValueError" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "number", "to_all", "code"),
    [
        (2, signal.SIGUSR1, True, EXIT_STOPPED),  # as Slurm's --signal=USR1@N, also to the command around torchrun
        (0, signal.SIGUSR1, True, -signal.SIGUSR1),
        (0, signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["under", "torchrun alone", "torchrun killed"],
)
def test_workers_whose_torchrun_dies_write_a_checkpoint(
    tmp_path: Path, runs: Runs, before: int, number: signal.Signals, to_all: bool, code: int
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher = UNDER_TORCHRUN if before else torchrun
    run = tmp_path / "run"
    with subprocess.Popen(
        [*launcher, "-m", "trainwright.worker", str(TINY), LONG, f"logging.run_directory={run}"],
        cwd=tmp_path,
        env=environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache")),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        wait_for(lambda: (run / "events.jsonl").exists() and '"event": "step"' in (run / "events.jsonl").read_text())
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(timeout=PATIENCE) == code
        wait_for(lambda: '"event": "finish"' in (run / "events.jsonl").read_text())
    assert events(run, "finish")[0]["status"] == "stopped" and list((run / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_under_torchrun_has_the_exit_code_of_a_stop(tmp_path: Path, runs: Runs, number: signal.Signals) -> None:
    run = tmp_path / "run"
    with subprocess.Popen(
        [*UNDER_TORCHRUN, "-m", "trainwright.worker", str(TINY), LONG, f"logging.run_directory={run}"],
        cwd=tmp_path,
        env=environment(TRAINWRIGHT_CACHE=str(runs.directory / "cache")),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:
        wait_for(lambda: (run / "events.jsonl").exists() and '"event": "step"' in (run / "events.jsonl").read_text())
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) == EXIT_STOPPED
    assert list((run / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "override", "code"),
    [
        ("torchrun", "optimizer.learning_rat=1", EXIT_REQUEST),
        ("torchrun", "optimizer.learning_rate=1e30", EXIT_TRAINING),
        ("accelerate", "optimizer.learning_rate=1e30", EXIT_TRAINING),
    ],
)
def test_under_launchers_with_codes_of_their_own_the_code_is_the_runs(
    tmp_path: Path, runs: Runs, launcher: str, override: str, code: int
) -> None:
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    command = UNDER_TORCHRUN if launcher == "torchrun" else [*UNDER_TORCHRUN[:4], *accelerate]
    result, _ = run_it(tmp_path, runs, *command, overrides=(override, "optimizer.warmup_steps=0"))
    assert result.returncode == code, result.stderr


def test_a_launcher_without_a_run_ends_with_its_own_code(tmp_path: Path) -> None:
    from trainwright.errors import RequestError
    from trainwright.run.program import run_launcher
    from trainwright.run.shutdown.exit_code import record_exit_code

    assert [run_launcher([sys.executable, "-c", f"raise SystemExit({code})"]) for code in (0, 9)] == [0, 9]
    assert run_launcher(["bash", "-c", 'echo 0 75 >>"$TRAINWRIGHT_EXIT_CODES"; exit 1']) == EXIT_STOPPED
    shared = ["bash", "-c", "exit ${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-7}", "--nnodes"]
    assert [run_launcher([*shared, nodes]) for nodes in ("1:2", "2")] == [1, 7]
    begun = 'echo 0 begun >>"$TRAINWRIGHT_EXIT_CODES"; '
    assert run_launcher(["bash", "-c", f"{begun} exit 1"]) == EXIT_FAULT  # killed before it could say more
    assert run_launcher(["bash", "-c", begun + 'echo 0 4 >>"$TRAINWRIGHT_EXIT_CODES"; exit 1']) == EXIT_TRAINING
    assert run_launcher(["bash", "-c", 'printf "0 4\\n0 75\\n" >>"$TRAINWRIGHT_EXIT_CODES"; exit 1']) == EXIT_TRAINING
    with pytest.raises(RequestError, match="COMMAND: nowhere: program not found"):
        run_launcher(["nowhere"])
    assert record_exit_code(EXIT_FAULT) == EXIT_FAULT


def test_under_keeps_a_launcher_from_dying_of_the_signals_that_schedulers_send() -> None:
    from trainwright.run.program import run_launcher

    assert run_launcher(["bash", "-c", "kill -USR1 $$; kill -USR2 $$; exit 3"]) == 3


def test_a_launcher_that_dies_of_slurms_signal_is_named_at_the_start(tmp_path: Path) -> None:
    parent = """if True:
        import os, signal
        from trainwright.clusters.slurm.job_step import check_launcher_signals
        for _ in range(2):
            if os.fork() == 0:
                print(check_launcher_signals("torchrun"), flush=True)
                os._exit(0)
            os.wait()
            signal.signal(signal.SIGUSR1, print)
            signal.signal(signal.SIGUSR2, print)
    """
    done = python("-c", parent, cwd=tmp_path, SLURM_JOB_ID="7")
    dies, handles = done.stdout.splitlines()
    assert "dies of SIGUSR1 and SIGUSR2" in dies and "trainwright under" in dies, done.stderr
    assert "SIGUSR" not in handles


def test_under_has_torchrun_wait_for_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.run.program import run_launcher

    minutes = ["bash", "-c", "exit $((TORCH_ELASTIC_SHUTDOWN_TIMEOUT / 60))"]
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert run_launcher(minutes) == 60
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    assert run_launcher(minutes) == 2
