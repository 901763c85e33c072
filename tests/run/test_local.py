"""Launches of real worker processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, ROOT, all_gone, descendants, environment, wait_for
from tests.support.control_groups import real_group
from tests.support.forked import Finished, Started, fork_server
from tests.support.slow import slow_but


def start(kind: str, logs: Path, processes: int = 2, **variables: str) -> Started:
    """Launch workers that do what `kind` names; see launch_entries.py."""
    arguments = [kind, str(processes), str(logs)]
    request = {"function": "tests.support.launch_entries:main", "arguments": arguments}
    return fork_server().start({**request, "environment": variables}, logs.with_name(f"{logs.name}-command"))


def run(kind: str, logs: Path, processes: int = 2, **variables: str) -> Finished:
    with running(kind, logs, processes, **variables) as launcher:
        return launcher.wait()


@contextmanager
def running(kind: str, logs: Path, processes: int = 2, **variables: str) -> Iterator[Started]:
    """As `start`; what is left of it is killed in the end."""
    launcher = start(kind, logs, processes, **variables)
    try:
        yield launcher
    finally:
        if not launcher.ended:
            launcher.kill()


def ready(logs: Path, processes: int = 2) -> None:
    wait_for(lambda: all((logs / f"ready-{rank}").exists() for rank in range(processes)))


def test_workers_finish_and_each_rank_has_its_log(tmp_path: Path) -> None:
    result = run("finish", tmp_path / "logs", processes=3)
    assert result.code == 0, result.stderr
    for rank in range(3):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"library noise of rank {rank}, 1 threads" in log
        assert f"native noise of rank {rank}" in log
        assert "sum 6.0" in log
    shown = result.stdout.splitlines()
    assert [line for line in shown if "noise" in line] == []
    assert len([line for line in shown if "on the console: rank 0" in line]) == 1
    assert result.stderr == ""


def test_workers_have_what_their_parent_imported_which_has_no_threads(tmp_path: Path) -> None:
    result = run("finish", tmp_path / "logs")
    assert "launched from 1 threads" in result.stdout, result.stdout + result.stderr
    assert "imported before: True" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_workers_of_a_second_launch_collect_nothing_of_the_first(tmp_path: Path) -> None:
    assert run("collect", tmp_path / "logs").code == 0


def test_first_traceback_is_shown_once_with_its_rank(tmp_path: Path) -> None:
    result = run("raise", tmp_path / "logs")
    assert result.code == 4
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.startswith("error: rank 1 failed\n")
    assert "ValueError: boom in rank 1" in result.stderr
    assert str(tmp_path / "logs" / "rank-1.log") in result.stderr
    assert "Connection" not in result.stderr


def test_worker_that_sleeps_is_taken_down_when_another_fails(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("raise-sleeping", logs) as launcher:
        ready(logs)
        ended = launcher.wait()
    assert ended.code == 4
    assert ended.stderr.startswith("error: rank 1 failed") and "boom while the others sleep" in ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(pids(logs)[0], 0)


def test_known_error_is_a_message_without_traceback(tmp_path: Path) -> None:
    result = run("raise-known", tmp_path / "logs")
    assert result.code == 4
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: the loss is not finite at step 3\n")
    assert "rank 1" in result.stderr


def test_refused_request_keeps_its_exit_code_and_only_its_message(tmp_path: Path) -> None:
    result = run("raise-everywhere", tmp_path / "logs")
    assert result.code == 2
    assert result.stderr == "error: data.train: refused by every rank\n"


@pytest.mark.parametrize("round", range(2))
def test_killed_worker_is_explained_and_not_its_peers(tmp_path: Path, round: int) -> None:
    result = run("die", tmp_path / "logs")
    assert result.code == 5
    assert result.stderr.startswith("error: rank 1 was killed"), result.stderr
    assert "memory" in result.stderr
    assert "Traceback" not in result.stderr


def test_silent_exit_is_explained(tmp_path: Path) -> None:
    result = run("exit", tmp_path / "logs")
    assert result.code == 4
    assert result.stderr.startswith("error: rank 1 exited with code 9"), result.stderr


def test_a_worker_that_ends_itself_as_if_it_were_stopped_has_failed(tmp_path: Path) -> None:
    result = run("exit-stopped", tmp_path / "logs")
    assert result.code == 4
    assert result.stderr.startswith("error: rank 1 ended itself with exit code 75"), result.stderr


def test_two_launches_at_once_use_different_ports(tmp_path: Path) -> None:
    logs = [tmp_path / f"logs-{i}" for i in range(2)]
    with (
        running("train", logs[0]) as one,
        running("train", logs[1]) as two,
    ):
        for directory in logs:
            ready(directory)
        for process in (one, two):
            os.kill(process.pid, signal.SIGTERM)
        ended = [process.wait() for process in (one, two)]
    assert [each.code for each in ended] == [75, 75]
    ports = {re.search(r"port (\d+)", each.stdout)[1] for each in ended}  # type: ignore[index]
    assert len(ports) == 2


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_nothing_listens_outside_loopback(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("train", logs) as process:
        ready(logs)
        import psutil

        family = [psutil.Process(process.pid), *descendants(process.pid)]
        addresses = {c.laddr.ip for p in family for c in p.net_connections() if c.status == "LISTEN"}
        assert addresses == {"127.0.0.1"}


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("number", slow_but(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, among=STOPPING))
def test_stop_signal_lets_workers_write_a_checkpoint(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    logs = tmp_path / "logs"
    with running("train", logs, CHECKPOINT_SECONDS="1") as process:
        ready(logs)
        if to_group:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
        assert process.wait().code == 75
    assert all((logs / f"checkpoint-{rank}").exists() for rank in range(2))


def test_second_interrupt_kills(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("train", logs, CHECKPOINT_SECONDS="600") as process:
        ready(logs)
        workers = descendants(process.pid)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)  # the same request, sent on by a wrapper
        time.sleep(1.5)
        assert not process.ended
        os.kill(process.pid, signal.SIGINT)
        assert process.wait().code == 75
        assert all_gone(workers)
    assert not (logs / "checkpoint-0").exists()


@pytest.mark.parametrize("kind", ["sleep", "train"])
def test_workers_die_with_a_killed_parent(tmp_path: Path, kind: str) -> None:
    logs = tmp_path / "logs"
    with running(kind, logs) as process:
        ready(logs)
        workers = descendants(process.pid)
        assert len(workers) >= 2
        os.kill(process.pid, signal.SIGKILL)
        assert all_gone(workers)


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="the kernel has no such score")
def test_workers_are_killed_for_memory_before_their_launcher(tmp_path: Path) -> None:
    with running("sleep", tmp_path / "logs") as launcher:
        ready(tmp_path / "logs")
        workers = [oom_score(worker.pid) for worker in descendants(launcher.pid)]
        assert workers and min(workers) >= max(500, oom_score(launcher.pid))
        assert oom_score(launcher.pid) == oom_score(os.getpid())


@pytest.mark.slow
def test_a_control_group_that_is_too_small_ends_in_words(tmp_path: Path) -> None:
    with real_group(1200 * 2**20) as group:
        into = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execv(sys.argv[2], sys.argv[2:])"
        entries = str(Path(__file__).parents[1] / "support" / "launch_entries.py")
        hog = [sys.executable, entries, "hog", "2", str(tmp_path / "logs")]
        command = [sys.executable, "-c", into, str(group / "cgroup.procs"), *hog]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=PATIENCE
        )
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("error: rank 1 was killed by the kernel because the machine ran out of memory")


def pids(logs: Path) -> dict[int, int]:
    return {rank: int((logs / f"ready-{rank}").read_text()) for rank in range(2)}


def test_a_worker_that_is_ended_from_outside_is_named_and_not_its_peers(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("train", logs) as process:
        ready(logs)
        os.kill(pids(logs)[1], signal.SIGTERM)
        ended = process.wait()
    assert ended.code == 5
    assert ended.stderr.startswith("error: rank 1 was ended by an external SIGTERM"), ended.stderr
    assert "Traceback" not in ended.stderr and "gloo" not in ended.stderr


def test_other_signals_to_a_worker_do_nothing(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("train", logs) as process:
        ready(logs)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            os.kill(pids(logs)[1], number)
        time.sleep(0.5)
        assert not process.ended
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait().code == 75


def test_a_worker_that_has_used_its_time_up_stops_the_run(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("train", logs) as process:
        ready(logs)
        os.kill(pids(logs)[1], signal.SIGXCPU)
        assert process.wait().code == 75
    assert (logs / "checkpoint-0").exists()


@pytest.mark.slow
def test_a_worker_that_stands_still_is_woken_for_the_checkpoint(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("train", logs) as process:
        ready(logs)
        os.kill(pids(logs)[1], signal.SIGSTOP)
        os.kill(process.pid, signal.SIGTERM)
        ended = process.wait()
    assert ended.code == 75
    assert f"rank 1 (process {pids(logs)[1]}) is stopped" in ended.stderr
    assert (logs / "checkpoint-1").exists()


@pytest.mark.slow
def test_workers_with_nothing_to_save_end_in_bounded_time(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with running("fresh", logs) as process:
        wait_for(lambda: all((logs / f"fresh-{rank}").exists() for rank in range(2)))
        workers = descendants(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait().code == 75
        assert all_gone(workers)


@contextmanager
def in_a_shell(logs: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launch that is a line of a script, with these variables of a batch system and no others."""
    jobs = ("SLURM", "PBS", "LSB", "JOB_ID", "FLUX", "COBALT")
    given = {name: value for name, value in environment(**variables).items() if not name.startswith(jobs)}
    launch = shlex.join([sys.executable, "-m", "tests.support.launch_entries", "train", "2", str(logs)])
    script = f"{launch}; echo done"
    with subprocess.Popen(["bash", "-c", script], env={**given, **variables}, cwd=ROOT) as shell:
        try:
            yield shell
        finally:
            for file in logs.glob("ready-*"):
                with suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
            shell.kill()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells of a parent's death")
def test_a_job_script_whose_shell_dies_stops_its_run_after_a_checkpoint(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with in_a_shell(logs, PBS_JOBID="7") as shell:
        ready(logs)
        family = descendants(shell.pid)
        shell.terminate()
        assert shell.wait(PATIENCE) == -signal.SIGTERM
        assert all_gone(family)
    assert all((logs / f"checkpoint-{rank}").exists() for rank in range(2))


@pytest.mark.slow
def test_outside_of_a_job_a_run_outlives_its_shell(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with in_a_shell(logs) as shell:
        ready(logs)
        family = descendants(shell.pid)
        shell.kill()
        shell.wait(PATIENCE)
        time.sleep(1)
        assert all(process.is_running() for process in family)
        assert not (logs / "checkpoint-0").exists()
