"""The guide to spot instances: an instance alone, with copies of its run in a bucket."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.docs.doc_commands import Command, commands_of
from tests.support.commands import ROOT
from tests.support.object_store import ObjectStore, object_store
from tests.support.runs import ON_ROWS, Runs, Started, column, events

PAGE = ROOT / "docs" / "spot.md"
SETTINGS = (ON_ROWS, "data.validation=null", "logging.observers.tensorboard=false", "train.max_steps=40")
SEED = 4


def command() -> Command:
    (found,) = (each for each in commands_of(PAGE) if each.words[1] == "train")
    return found


def test_the_service_runs_the_pages_command_and_is_not_repeated_in_vain() -> None:
    service = re.search(r"^```ini\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert service is not None
    settings = dict(line.split("=", 1) for line in service[1].splitlines() if "=" in line)
    assert settings["ExecStart"].split()[1:] == list(command().words[1:])
    assert settings["ExecStart"].split()[0].endswith("/trainwright")
    assert settings["RestartPreventExitStatus"].split() == ["2", "3", "4"]


def _program(directory: Path, name: str, lines: str) -> None:
    (directory / name).write_text(f"#!/bin/bash\n{lines}\n")
    (directory / name).chmod(0o755)


def test_the_script_stops_the_service_once_its_instance_is_to_be_reclaimed(tmp_path: Path) -> None:
    script = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```", PAGE.read_text(), re.M | re.S)
    assert script is not None
    # The metadata service: it refuses what has no token, and announces the end at the third question.
    curl = """
        if [[ $* == *"-X PUT"*/latest/api/token ]]; then echo secret; exit; fi
        [[ $* == *"X-aws-ec2-metadata-token: secret"*/latest/meta-data/spot/instance-action ]] || exit 22
        echo asked >>asked
        (($(wc -l <asked) > 2)) || exit 22"""
    for name, lines in (("curl", curl), ("sleep", ""), ("systemctl", 'echo "$@" >called')):
        _program(tmp_path, name, lines)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script[1]], cwd=tmp_path, env={"PATH": path}, check=True, timeout=60)
    assert (tmp_path / "called").read_text() == "stop training\n"
    assert (tmp_path / "asked").read_text() == "asked\n" * 3


class Instance:
    """A machine of its own, on which the page's command is started; nothing of it is left once it is reclaimed."""

    def __init__(self, directory: Path, store: ObjectStore) -> None:
        self._directory, self._store = directory, store
        shutil.copytree(ROOT / "recipes", directory / "recipes")
        self.run = directory / "runs" / "tiny"

    def start(self, runs: Runs) -> Started:
        variables = {"HOME": str(self._directory), "TRAINWRIGHT_CACHE": str(self._directory / "cache")}
        more = (*SETTINGS, "parallel.num_processes=1", "checkpoint.every=2")
        started = runs.command(*command().words[1:], *more, cwd=self._directory, **self._store.variables, **variables)
        started.run = self.run
        return started

    def reclaim(self) -> None:
        shutil.rmtree(self._directory)


@pytest.mark.slow
def test_a_run_survives_instances_that_are_reclaimed(runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    undisturbed = runs.trained(*SETTINGS, "parallel.num_processes=1")
    draw = random.Random(SEED)
    with object_store() as store:
        store.files().mkdir("my-runs")
        # Reclaimed with a warning and enough time, with one and too little, and without any.
        for number, warned, enough in ((1, True, True), (2, True, False), (3, False, False)):
            instance = Instance(tmp_path / f"instance-{number}", store)
            started = instance.start(runs)
            started.wait_for_step(10 * number - draw.randint(1, 4))
            if warned:
                started.kill(signal.SIGTERM)
            if enough:
                ended = started.wait()
                assert ended.code == 75, ended.stdout + ended.stderr
            else:
                started.kill()
            instance.reclaim()
        last = Instance(tmp_path / "instance-4", store)
        ended = last.start(runs).wait()
        assert ended.code == 0, ended.stdout + ended.stderr
        assert column(last.run, "loss") == column(undisturbed, "loss")
        resumed = [event["resumed_from"] for event in events(last.run, "start")]
        assert len(resumed) >= 3 and resumed[-1] > resumed[1] > 0
        copied = {path.rpartition("/")[2] for path in store.files().find("my-runs/tiny/final")}
        assert copied == {path.name for path in (last.run / "final").iterdir()} | {"manifest.json"}
