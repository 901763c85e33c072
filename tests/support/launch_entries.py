"""Launches workers that do what a test names, without an engine: launch_entries.py KIND PROCESSES LOGS."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from pathlib import Path

from trainwright.errors import EXIT_STOPPED, RequestError, TrainingError, TrainwrightError
from trainwright.run.process import find_console, preload_libraries, run_in_child
from trainwright.run.shutdown.stop import Stopping, set_fresh, stop_requested


def entry(kind: str, logs: Path) -> int:
    """The body of one worker."""
    imported = "transformers" in sys.modules
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"library noise of rank {rank}, {torch.get_num_threads()} threads, imported before: {imported}")
    os.system(f"echo native noise of rank {rank}")
    if (stream := find_console()) is not None:
        print(f"on the console: rank {rank} port {os.environ['MASTER_PORT']}", file=stream, flush=True)
    dist.barrier()
    _write(logs / f"ready-{rank}", str(os.getpid()))
    if kind == "finish":
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print(f"sum {total.item()}")
    if kind == "collect":
        gc.collect()
    if kind == "raise" and rank == 1:
        raise ValueError("boom in rank 1")
    if kind == "raise-known" and rank == 1:
        raise TrainingError("the loss is not finite at step 3")
    if kind == "raise-everywhere":
        raise RequestError("data.train: refused by every rank")
    if kind == "raise-sleeping" and rank == 1:
        raise ValueError("boom while the others sleep")
    if kind == "die" and rank == 1:
        os.kill(os.getpid(), 9)
    if kind == "exit" and rank == 1:
        os._exit(9)
    if kind == "exit-stopped" and rank == 1:
        os._exit(EXIT_STOPPED)
    if kind in ("raise", "raise-known", "die", "exit", "exit-stopped"):
        dist.all_reduce(torch.ones(1))
    if kind == "fresh":
        set_fresh(True)
        (logs / f"fresh-{rank}").touch()
    if kind in ("sleep", "raise-sleeping", "fresh"):
        time.sleep(600)
    if kind == "hog" and rank == 1:
        hoard: list[bytes] = []
        while True:
            hoard.append(os.urandom(2**24))
    if kind == "hog":
        dist.all_reduce(torch.ones(1))
    if kind == "train":
        return train(rank, logs)
    dist.destroy_process_group()
    return 0


def _write(file: Path, text: str) -> None:
    """At once: a test looks for the file and reads it."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def train(rank: int, logs: Path) -> int:
    """Steps until a stop that all ranks agree on, then a "checkpoint"."""
    import torch
    import torch.distributed as dist

    while True:
        time.sleep(0.05)
        stop = torch.tensor([float(stop_requested())])
        dist.all_reduce(stop)
        if stop.item():
            time.sleep(float(os.environ.get("CHECKPOINT_SECONDS", "0.2")))
            (logs / f"checkpoint-{rank}").touch()
            dist.destroy_process_group()
            return EXIT_STOPPED


def prepare(kind: str) -> None:
    """The body of a preparation child."""
    from trainwright.data.rows.formats import TurnsError

    print("noise of preparation")
    if kind == "refuse":
        raise RequestError("data.train: the file has no rows")
    if kind == "refuse-turns":
        raise TurnsError("the chat template refuses the conversation", 0)
    if kind == "break":
        raise KeyError("unexpected")
    if kind == "die":
        os.kill(os.getpid(), 9)
    if kind == "sleep":
        Path("preparing").touch()
        time.sleep(600)


def main(kind: str, count: str, directory: str) -> int:
    processes, logs = int(count), Path(directory)
    logs.mkdir(parents=True, exist_ok=True)
    with Stopping() as stopping:
        if kind == "finish":  # the others save the seconds that importing transformers takes
            preload_libraries()
        if kind.startswith("prepare-"):
            run_in_child(functools.partial(prepare, kind.removeprefix("prepare-")), logs / "prepare.log", stopping)
            return 0
        from trainwright.run.supervisor import launch

        before = len(os.listdir("/proc/self/task"))
        if kind == "collect":  # what the first launch leaves behind is there when the second one forks
            gc.disable()
            launch(functools.partial(entry, "finish", logs), processes=processes, logs=logs, stopping=stopping)
        try:
            code = launch(functools.partial(entry, kind, logs), processes=processes, logs=logs, stopping=stopping)
        except TrainwrightError as error:
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
        print(f"launched from {before} threads")
        return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
