"""PPO's learning curves in the dark room: Trainwright's batched PPO and Stable-Baselines3's, same hyperparameters.

    python bench/collect_vs_sb3.py                       three goals, three seeds of ours; about 6 minutes
    python bench/collect_vs_sb3.py --goals 0,0 --seeds 1

Both run on one core, one after the other: Stable-Baselines3 goal by goal, in an environment of its own made from
peers/sb3.txt, and ours with all goals and seeds as one batch. Shown is the mean return over 100 streams by episode, and
for the last ten episodes the mean of both. Two seeds of the same code differ too, so ours are several, and the range is
what the other is judged by. The cost of the usual collection, 81 goals on two cores, is extrapolated for both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from support.machine import describe, use_cores
from support.peers import peer_python
from support.results import results_directory
from support.runs import print_table, write_results

RESULTS = results_directory() / "collect_vs_sb3.json"
SCRIPT = Path(__file__).parent / "peers" / "sb3_ppo.py"
STREAMS, STEPS, HORIZON = 100, 1000, 20
SETTINGS = {"n_steps": 80, "batch_size": 40, "n_epochs": 20, "learning_rate": 3e-4}
LAST = 10
ALL_GOALS, CORES = 81, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goals", nargs="+", default=["0,0", "2,2", "4,4"], help="as x,y (0,0 2,2 4,4)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of ours (3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a stream ({STEPS})")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"file of results ({RESULTS})")
    arguments = parser.parse_args()
    goals = [[int(part) for part in goal.split(",")] for goal in arguments.goals]
    machine = describe(use_cores(1))
    peer = peer_python("sb3")
    ours = trainwright(goals, arguments.seeds, arguments.steps)
    theirs = stable_baselines(peer, goals, arguments.steps)
    for place, goal in enumerate(goals):
        show(goal, ours["returns"][place], theirs[place]["returns"])
    ours_each = ours["seconds"] / (len(goals) * arguments.seeds)
    theirs_each = sum(one["seconds"] for one in theirs) / len(goals)
    print_table(
        ["one core", "seconds a goal", f"{ALL_GOALS} goals on {CORES} cores"],
        [
            [name, f"{each:.1f}", f"{each * ALL_GOALS / CORES / 60:.1f} min"]
            for name, each in (("Trainwright", ours_each), ("Stable-Baselines3", theirs_each))
        ],
    )
    print(f"load average before: {machine['load_average_before']:.1f}")
    found = {"machine": machine, "steps": arguments.steps, "streams": STREAMS, "goals": goals}
    write_results(arguments.output, {**found, "trainwright": ours, "stable_baselines3": theirs})


def trainwright(goals: list[list[int]], seeds: int, steps: int) -> dict[str, Any]:
    import torch

    from trainwright.tasks.algorithm_distillation.environments import make
    from trainwright.tasks.algorithm_distillation.histories import compute_episode_returns
    from trainwright.tasks.algorithm_distillation.learners import build_learners

    torch.set_num_threads(1)
    environment = make("darkroom")
    begin = time.perf_counter()
    tasks = torch.tensor(goals).repeat_interleave(seeds, dim=0)
    learner = build_learners(environment, tasks, torch.arange(len(tasks)), {"name": "ppo", "streams": STREAMS})
    recording = learner.learn(steps)
    seconds = time.perf_counter() - begin
    print(f"Trainwright, {len(goals)} goals x {seeds} seeds: {seconds:.0f} s", flush=True)
    each = [recording.goal(index) for index in range(len(tasks))]
    returns = [compute_episode_returns(one.dones, one.rewards).mean(axis=0).tolist() for one in each]
    return {"seconds": seconds, "returns": [returns[n * seeds : (n + 1) * seeds] for n in range(len(goals))]}


def stable_baselines(python: Path, goals: list[list[int]], steps: int) -> Any:
    with tempfile.TemporaryDirectory(prefix="collect-vs-sb3-") as temporary:
        job, result = Path(temporary) / "job.json", Path(temporary) / "result.json"
        asked = {"goals": goals, "steps": steps, "streams": STREAMS, "seed": 0, "settings": SETTINGS}
        job.write_text(json.dumps({**asked, "result": str(result)}))
        subprocess.run([python, SCRIPT, job], check=True)
        return json.loads(result.read_text())


def show(goal: list[int], ours: list[list[float]], theirs: list[float]) -> None:
    best = min(HORIZON, HORIZON + 1 - sum(abs(part - 4) for part in goal))
    shown = [episode for episode in range(len(theirs)) if episode % 7 == 0 or episode == len(theirs) - 1]
    rows = [[f"episode {n + 1}", _range([one[n] for one in ours]), f"{theirs[n]:.2f}"] for n in shown]
    last = [sum(one[-LAST:]) / LAST for one in ours]
    rows.append([f"last {LAST}", _range(last), f"{sum(theirs[-LAST:]) / LAST:.2f}"])
    print_table([f"goal {tuple(goal)}, at best {best}", "Trainwright", "Stable-Baselines3"], rows)
    print()


def _range(values: list[float]) -> str:
    middle = f"{sum(values) / len(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
