"""Commands on hosts that are lost, without a run: a program stands for ssh, and starts what it is given here."""

from __future__ import annotations

import errno
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import wait_for
from tests.support.runs import TINY, events
from trainwright.clusters import hosts
from trainwright.clusters.hosts import Host, HostsResult, run_on
from trainwright.clusters.operations import train_on_hosts
from trainwright.errors import RequestError, Stopped
from trainwright.run.request import TrainingRequest
from trainwright.run.shutdown import stop

HOSTS = [Host("one"), Host("two")]
# What ssh is given ends with the command, which tells its process as the last line of a file.
SSH = '#!/bin/sh\nfor last in "$@"; do :; done\nexec sh -c "$last"\n'
COUNT = "echo $PPID $$ >>{name}; while ! [ -e {until} ]; do sleep 0.05; done; exit {code}"


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("TRAINWRIGHT_SSH", shlex.quote(str(tmp_path / "ssh")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hosts, "_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "_ENDS_AFTER_FIRST", 0.5)


def command(name: str, until: str, code: int = 0) -> list[str]:
    return ["sh", "-c", COUNT.format(name=name, until=until, code=code)]


def started(name: str) -> list[list[int]]:
    """The processes of every start of a command: what stands for ssh, and the command."""
    file = Path(name)
    return [list(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


def kill(name: str, number: int) -> None:
    """Kill a start of a command, ssh first."""
    for pid in wait_for(lambda: len(started(name)) >= number and started(name)[number - 1]):
        os.kill(pid, signal.SIGKILL)


def beside(*steps: object) -> threading.Thread:
    def work() -> None:
        for step in steps:
            step()  # type: ignore[operator]

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_host_that_is_lost_is_started_again_while_the_first_goes_on(tmp_path: Path) -> None:
    thread = beside(
        lambda: kill("two", 1),
        lambda: kill("two", 2),
        lambda: wait_for(lambda: len(started("two")) == 3),
        lambda: Path("done").touch(),
    )
    ended = run_on(HOSTS, [command("one", "done"), command("two", "done")], tmp_path, may_lose=True)
    thread.join()
    assert ended == HostsResult(0, {})
    assert len(started("one")) == 1


def test_what_was_started_again_ends_with_the_first(tmp_path: Path) -> None:
    thread = beside(
        lambda: kill("two", 1), lambda: wait_for(lambda: len(started("two")) == 2), lambda: Path("done").touch()
    )
    ended = run_on(HOSTS, [command("one", "done", 75), command("two", "never")], tmp_path, may_lose=True)
    thread.join()
    assert ended.code == 75


def test_the_first_host_is_not_started_again(tmp_path: Path) -> None:
    thread = beside(lambda: kill("one", 1), lambda: Path("done").touch())
    ended = run_on(HOSTS, [command("one", "never"), command("two", "done", 5)], tmp_path, may_lose=True)
    thread.join()
    assert ended.code == 5 and list(ended.lost) == HOSTS[:1]
    assert "killed" in ended.lost[HOSTS[0]]


def test_no_host_is_started_again_if_none_may_be_lost(tmp_path: Path) -> None:
    thread = beside(lambda: kill("two", 1), lambda: Path("done").touch())
    ended = run_on(HOSTS, [command("one", "done", 5), command("two", "never")], tmp_path)
    thread.join()
    assert ended.code == 5 and list(ended.lost) == HOSTS[1:]
    assert len(started("two")) == 1


def test_the_logs_of_hosts_are_appended_to(tmp_path: Path) -> None:
    for word in ("before", "after"):
        assert run_on(HOSTS[:1], [["echo", word]], tmp_path).code == 0
    assert (tmp_path / "host-one.log").read_text() == "before\nafter\n"


def test_output_is_shown_where_it_cannot_be_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More of it than a pipe holds: the command would wait for ever."""
    (tmp_path / "host-one.log").symlink_to("/dev/full")
    many = ["sh", "-c", "i=0; while [ $i -lt 9000 ]; do echo a line of output; i=$((i + 1)); done; echo last"]
    assert run_on(HOSTS[:1], [many], tmp_path).code == 0
    shown = capsys.readouterr()
    assert shown.out == "a line of output\n" * 9000 + "last\n"
    assert shown.err == f"warning: one: {tmp_path}/host-one.log cannot be written: [Errno 28] No space left on device\n"


class _Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_output_is_logged_where_it_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", _Closed())
    assert run_on(HOSTS[:1], [["printf", "one\\ntwo\\n"]], tmp_path).code == 0
    assert (tmp_path / "host-one.log").read_text() == "one\ntwo\n"


def test_a_terminal_that_closes_does_not_stop_what_nohup_has_started(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        thread = beside(
            lambda: wait_for(lambda: started("one")),
            lambda: os.kill(os.getpid(), signal.SIGHUP),
            lambda: Path("done").touch(),
        )
        ended = run_on(HOSTS[:1], [command("one", "done")], tmp_path)
        thread.join()
        assert ended == HostsResult(0, {}) and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


STOPS = ["sh", "-c", "trap 'exit 75' TERM; echo $PPID $$ >>one; while :; do sleep 0.05; done"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_every_stop_signal_is_passed_on(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    thread = beside(
        lambda: wait_for(lambda: started("one") and signal.getsignal(number) != before),
        lambda: os.kill(os.getpid(), number),
    )
    ended = run_on(HOSTS[:1], [STOPS], tmp_path)
    thread.join()
    assert ended.code == 75 and not ended.lost


@pytest.mark.parametrize("code", [7, 128, 200, 255])
def test_a_command_ends_with_its_own_code(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """255 is what ssh ends with when its connection is lost, and what sys.exit(-1) is."""
    ended = run_on(HOSTS, [["sh", "-c", f"printf said >&2; exit {code}"]] * 2, tmp_path)
    assert ended == HostsResult(code, {})
    assert sorted(capsys.readouterr().err) == sorted("saidtwo: said")
    assert (tmp_path / "host-one.log").read_text() == "said"


def test_a_connection_or_a_command_that_is_killed_is_lost(tmp_path: Path) -> None:
    Path("ssh").write_text('#!/bin/sh\nfor last in "$@"; do :; done\nsh -c "$last"\nexit $?\n')
    assert run_on(HOSTS[:1], [["sh", "-c", "kill -9 $$"]], tmp_path) == HostsResult(
        5, {HOSTS[0]: "its command was killed (exit code 137)"}
    )
    dies = ["sh", "-c", "kill -9 $PPID"]  # what would tell its exit code
    assert run_on(HOSTS[:1], [dies], tmp_path).lost == {HOSTS[0]: "its command was killed (exit code 137)"}
    Path("ssh").write_text("#!/bin/sh\nexit 255\n")
    assert run_on(HOSTS[:1], [["true"]], tmp_path) == HostsResult(5, {HOSTS[0]: "its connection was lost"})


def test_a_host_that_is_lost_while_all_stop_is_no_fault(tmp_path: Path) -> None:
    waits = ["sh", "-c", "trap 'touch asked' TERM; echo $PPID $$ >>two; while :; do sleep 0.05; done"]
    thread = beside(*stop_and_kill_two())
    ended = run_on(HOSTS, [STOPS, waits], tmp_path)
    thread.join()
    assert (ended.code, ended.stopped, [*ended.lost]) == (75, True, HOSTS[1:])


def stop_and_kill_two() -> list[Callable[[], object]]:
    before = signal.getsignal(signal.SIGTERM)
    return [
        lambda: wait_for(
            lambda: started("one") and started("two") and signal.getsignal(signal.SIGTERM) not in (before, None)
        ),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: wait_for(lambda: Path("asked").exists()),
        lambda: kill("two", 1),
    ]


# In the place of the hosts' Python: what trains on them.
PYTHON = """#!/bin/sh
case "$*" in "-P -c"*) exec {python} "$@" ;; esac
case "$*" in *--node-rank=1*) trap 'touch asked' TERM; name=two ;; *) trap 'exit 75' TERM; name=one ;; esac
echo $PPID $$ >>$name
while :; do sleep 0.05; done
"""


def test_a_run_that_was_stopped_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # the command replaces them
    asked = TrainingRequest(TINY, (f"logging.run_directory={tmp_path / 'run'}", "parallel.num_processes=2"))
    thread = beside(*stop_and_kill_two())
    assert train_on_hosts(asked, "127.0.0.1,127.0.0.2", None) == 75
    thread.join()
    assert len(started("one")) == len(started("two")) == 1


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("localhost,node2", "node2 cannot reach the first host as localhost"),
        ("alias-only.invalid,two", r"two: does not know the name alias-only\.invalid of the first host"),
    ],
)
def test_a_first_host_that_the_others_cannot_find_is_refused(hosts: str, said: str, tmp_path: Path) -> None:
    """As a name is that only ssh knows."""
    asked = TrainingRequest(TINY, (f"logging.run_directory={tmp_path / 'run'}",))
    with pytest.raises(RequestError, match=said):
        train_on_hosts(asked, hosts, None)
    assert not (tmp_path / "run").exists()


def _replace_python(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    """Have the run in ``directory`` started with a script in place of Python; its output is restored at the end."""
    python = directory / "python"
    python.write_text(script.format(python=sys.executable, run=directory / "run"))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


def test_a_run_that_its_file_asks_to_stop_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = PYTHON.replace(
        "echo $PPID $$ >>$name", "echo $PPID $$ >>$name\ntouch {run}/stop.taken\nkill -9 $PPID; exit"
    )
    _replace_python(monkeypatch, tmp_path, python)
    asked = TrainingRequest(TINY, (f"logging.run_directory={tmp_path / 'run'}", "parallel.num_processes=2"))
    assert train_on_hosts(asked, "127.0.0.1,127.0.0.2", None) == 5
    assert len(started("one")) == len(started("two")) == 1


# Trains to step 9 on the first host; the connection of the second is lost then, once.
TRAINS = """#!/bin/sh
case "$*" in "-P -c"*) exec {python} "$@" ;; esac
case "$*" in *--node-rank=1*) name=two ;; *) name=one ;; esac
echo $PPID $$ >>$name
[ -e lost ] && exit 0
if [ $name = one ]; then
    echo '{{"event": "step", "step": 9, "loss": 1.0, "step_time": 1.0, "time": '$(date +%s.%N)'}}' >>{run}/events.jsonl
    touch trained
    while ! [ -e lost ]; do sleep 0.05; done
    exit 5
fi
while ! [ -e trained ]; do sleep 0.05; done
touch lost
kill -9 $PPID
"""


def test_a_run_that_is_started_again_says_after_which_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _replace_python(monkeypatch, tmp_path, TRAINS)
    asked = TrainingRequest(TINY, (f"logging.run_directory={run}", "parallel.num_processes=2"))
    assert train_on_hosts(asked, "127.0.0.1,127.0.0.2", None) == 0
    assert len(started("one")) == len(started("two")) == 2
    (restart,) = events(run, "restart")
    assert (restart["cause"], restart["after_step"]) == ("node", 9)


def test_a_stop_between_two_starts_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = PYTHON.replace("echo $PPID $$ >>$name", "echo $PPID $$ >>$name\ntouch lost\nkill -9 $PPID; exit")
    _replace_python(monkeypatch, tmp_path, python)
    (tmp_path / "ssh").write_text(SSH.replace("exec", "if [ -e lost ]; then touch unreachable; exit 255; fi\nexec"))
    monkeypatch.setattr(stop, "_handles_signals", False)
    asked = TrainingRequest(TINY, (f"logging.run_directory={tmp_path / 'run'}", "parallel.num_processes=2"))
    thread = beside(
        lambda: wait_for(Path("unreachable").exists),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    with stop.interrupt_on_stop(), pytest.raises(Stopped, match=f"continue with --resume {tmp_path / 'run'}"):
        train_on_hosts(asked, "127.0.0.1,127.0.0.2", None)
    thread.join()


@pytest.mark.slow
def test_an_output_that_was_closed_before_the_command_hangs_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    ended = run_on(
        HOSTS[:1], [["sh", "-c", "i=0; while [ $i -lt 4000 ]; do echo $i $(pwd); i=$((i+1)); done"]], tmp_path
    )
    assert ended == HostsResult(0, {})
    assert len((tmp_path / "host-one.log").read_text().splitlines()) == 4000
