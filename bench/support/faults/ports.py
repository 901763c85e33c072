"""Jobs that are started by hand with torch's variables: a port that is taken, or that two jobs share."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import replace

from trainwright.faults.drills import invariants
from trainwright.faults.drills.invariants import InvariantBroken, require
from trainwright.faults.drills.kinds import register_fault
from trainwright.faults.drills.trial_environment import FAILED, FINISHED, MACHINE, REQUEST, Scene
from trainwright.faults.drills.watched_commands import Command, CommandResult

_WORLDS = (("ddp", 2), ("fsdp", 2), ("ddp", 3))
# A rank that waits for something that cannot come does not wait for minutes.
_BOUND_SECONDS = 120.0
_REFUSED = (REQUEST, MACHINE, FAILED)


@register_fault(
    "MASTER_PORT is taken", spreads=_WORLDS, variants=("by a listener that is silent", "by one that hangs up"), share=2
)
def port_taken(scene: Scene) -> None:
    """Every rank ends in words that name the port, in bounded time."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        port = listener.getsockname()[1]
        ranks = _start(scene, port)
        deadline = time.monotonic() + _BOUND_SECONDS
        listener.settimeout(0.05)
        while not all(rank.ended for rank in ranks) and time.monotonic() < deadline:
            if scene.variant == "by a listener that is silent":
                time.sleep(0.05)
                continue
            try:
                listener.accept()[0].close()
            except TimeoutError:
                continue
        ended = _ends(ranks)
    _all_refused(scene, ended, str(port))


@register_fault("two jobs with one MASTER_PORT", spreads=_WORLDS, variants=("together", "one after the other"), share=2)
def one_port(scene: Scene) -> None:
    """No rank of one joins the other: one job finishes as if it were alone, the other is refused or finishes too."""
    port = _free_port()
    other = scene.run.with_name("run-of-another")
    scene.more_runs.append(other)
    seconds = 0.0 if scene.variant == "together" else scene.draw.uniform(0.5, 3.0)
    first = _start(scene, port)
    time.sleep(seconds)
    second = _start(scene, port, "data.validation=13", run=str(other))
    both = _ends([*first, *second])
    ends = [both[: len(first)], both[len(first) :]]
    finished = [all(rank.code == FINISHED for rank in job) for job in ends]
    codes = [[rank.code for rank in job] for job in ends]
    failed = next((rank for job in ends for rank in job if rank.code != FINISHED), None)
    require(any(finished), f"neither job finished, exit codes are {codes}: {failed}")
    for job, done, run in zip(ends, finished, (scene.run, other), strict=True):
        if not done:
            _all_refused(scene, job, str(port))
            continue
        began = [event["run_directory"] for event in invariants.read_lines(run) if event["event"] == "start"]
        require(began == [str(run)], f"{run} has the events of {began}")
    if finished[0]:
        scene.check_undisturbed()


@register_fault(
    "a rank that never comes",
    spreads=_WORLDS,
    variants=("absent", "killed at once", "of another recipe"),
    share=1.5,
)
def absent_rank(scene: Scene) -> None:
    """The others wait for as long as they were told, and then name it."""
    port = _free_port()
    strange = ("train.seed=5",) if scene.variant == "of another recipe" else ()
    last = scene.case.spread[1] - 1
    ranks = [_rank(scene, port, n, "--rendezvous-timeout=12") for n in range(last)]
    if scene.variant != "absent":
        ranks.append(_rank(scene, port, last, "--rendezvous-timeout=12", *strange))
    if scene.variant == "killed at once":
        time.sleep(scene.draw.uniform(0.2, 2.5))
        ranks.pop().kill()
    ended = _ends(ranks)
    named = "train.seed" if strange else rf"rank {last}\b"
    codes = [rank.code for rank in ended]
    require(all(code in _REFUSED for code in codes), f"exit codes {codes}: {ended[0]}")
    for rank in ended:
        require("Traceback (most recent call last)" not in rank.text, f"a traceback: {rank}")
    text = "\n".join(rank.text for rank in ended)
    scene.expect(replace(ended[0], code=codes[0], text=text), _REFUSED, named)


def _start(scene: Scene, port: int, *overrides: str, run: str | None = None) -> list[Command]:
    return [_rank(scene, port, n, *overrides, run=run) for n in range(scene.case.spread[1])]


def _rank(scene: Scene, port: int, rank: int, *more: str, run: str | None = None) -> Command:
    """One process of a job, as `torchrun` would start it without its agent."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(scene.case.spread[1]),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    asked = [f"logging.run_directory={run}" if run and a.startswith("logging.run") else a for a in scene.asked()]
    return scene.command(sys.executable, "-m", "trainwright.worker", *asked, *more, variables=variables)


def _all_refused(scene: Scene, ended: list[CommandResult], port: str) -> None:
    for rank in ended:
        require(rank.code in _REFUSED, f"wanted a refusal, got {rank}")
        require("Traceback (most recent call last)" not in rank.text, f"a traceback: {rank}")
    if not any(port in rank.text for rank in ended):
        raise InvariantBroken(f"nobody names port {port}: {ended[0]}")


def _ends(ranks: list[Command]) -> list[CommandResult]:
    """How all of them ended, in bounded time."""
    deadline = time.monotonic() + _BOUND_SECONDS
    return [rank.wait(max(1.0, deadline - time.monotonic())) for rank in ranks]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
