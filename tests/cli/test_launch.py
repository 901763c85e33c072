"""`trainwright launch`: scripts of a user's own, in real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, all_gone, descendants, environment, started, trainwright, wait_for

SCRIPT = """
import argparse, atexit, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="finish")
mode = parser.parse_args().mode
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()}: sum {total.item()}, {__name__}, {os.environ['MASTER_PORT']}")
assert sys.path[0] == str(Path(__file__).resolve().parent)
import beside
atexit.register(lambda: print(f"at exit of rank {rank}"))
if mode == "raise" and rank == 1:
    raise ValueError("boom in rank 1")
if mode == "raise-first" and rank == 0:
    raise ValueError("boom in rank 0")
if mode == "exit" and rank == 1:
    sys.exit(7)
if mode == "die" and rank == 0:
    print("last words", flush=True)
    os.kill(os.getpid(), 9)
if mode == "sleep":
    Path(f"ready-{rank}").touch()
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        Path(f"interrupted-{rank}").touch()
        raise
if mode == "handle":
    import signal
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    Path(f"ready-{rank}").touch()
    while not stopped:
        time.sleep(0.05)
    Path(f"saved-{rank}").touch()
if mode != "finish" and mode != "handle":
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script and a module beside it, and no Accelerate file of the user's."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(SCRIPT)
    (tmp_path / "own" / "beside.py").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def launch(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return trainwright("launch", *arguments, cwd=cwd)


def two(cwd: Path, mode: str) -> subprocess.CompletedProcess[str]:
    return launch(cwd, "--num-processes", "2", "--logs", "logs", "own/train.py", "--mode", mode)


def test_script_runs_in_processes_with_a_log_each_and_rank_0_on_the_console(tmp_path: Path) -> None:
    result = launch(tmp_path, "--num-processes", "2", "own/train.py", "--mode=finish")
    assert result.returncode == 0, result.stderr
    assert "rank 0 of 2: sum 3.0, __main__" in result.stdout and "rank 1" not in result.stdout
    assert "at exit of rank 0" in result.stdout
    assert result.stderr.startswith("own/train.py: 2 processes on the CPU; logs: runs/train-")
    (logs,) = (tmp_path / "runs").glob("train-*/logs")
    for rank in range(2):
        log = (logs / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2: sum 3.0" in log and f"at exit of rank {rank}" in log


def test_module_with_the_file_of_accelerates_place(tmp_path: Path) -> None:
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3\nmixed_precision: bf16\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "tool.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], __name__, {k: v for k, v in os.environ.items()}]))\n"
    )
    result = launch(tmp_path, "-m", "package.tool", "--num-processes", "9", "--", "-x")
    assert result.returncode == 0, result.stderr
    arguments, name, variables = json.loads(result.stdout)
    assert arguments == ["--num-processes", "9", "--", "-x"] and name == "__main__"
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("3", "3")
    assert variables["ACCELERATE_USE_CPU"] == "true" and variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "default_config.yaml" in result.stderr


VARIABLES = "import json, os; print(json.dumps(dict(os.environ)))\n"


@pytest.mark.parametrize("file", ["", "distributed_type: MULTI_CPU\nmixed_precision: fp16\nnum_processes: 2\n"])
def test_options_of_accelerate_launch_are_followed_as_they_are_typed(tmp_path: Path, file: str) -> None:
    (tmp_path / "variables.py").write_text(VARIABLES)
    (tmp_path / "a.yaml").write_text(file)
    options = ["--num_processes=2", "--mixed_precision", "bf16", "--dynamo_backend=inductor", "--gpu_ids", "all"]
    options += ["--num_machines", "1", *(["--config_file", "a.yaml"] if file else [])]
    result = launch(tmp_path, *options, "variables.py")
    assert result.returncode == 0, result.stderr
    variables = json.loads(result.stdout.splitlines()[-1])
    assert (variables["WORLD_SIZE"], variables["ACCELERATE_MIXED_PRECISION"]) == ("2", "bf16")
    assert variables["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR" and variables["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(("mode", "rank"), [("raise", 1), ("raise-first", 0)])
def test_first_traceback_once_with_its_rank(tmp_path: Path, mode: str, rank: int) -> None:
    result = two(tmp_path, mode)
    assert result.returncode == 4
    assert (result.stdout + result.stderr).count("Traceback") == 1
    assert f"error: rank {rank} failed" in result.stderr and f"ValueError: boom in rank {rank}" in result.stderr
    assert "runpy" not in result.stderr and f"logs/rank-{rank}.log" in result.stderr


def test_scripts_own_exit_code(tmp_path: Path) -> None:
    result = two(tmp_path, "exit")
    assert result.returncode == 7
    assert "rank 1: own/train.py exited with code 7" in result.stderr
    # Of two processes the other may end first, and the console has what the first one writes.
    wrong = launch(tmp_path, "--num-processes", "1", "own/train.py", "--no-such-option")
    assert wrong.returncode == 2 and "unrecognized arguments: --no-such-option" in wrong.stdout
    assert "Traceback" not in wrong.stdout + wrong.stderr


def test_last_words_of_a_killed_script_arrive(tmp_path: Path) -> None:
    result = two(tmp_path, "die")
    assert result.returncode == 5
    assert "last words" in result.stdout and "error: rank 0 was killed" in result.stderr
    assert "last words" in (tmp_path / "logs" / "rank-0.log").read_text()


def running(tmp_path: Path, mode: str) -> list[str]:
    return ["-m", "trainwright", "launch", "--num-processes", "2", "--logs", "logs", "own/train.py", "--mode", mode]


def ready(tmp_path: Path) -> None:
    wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_stop_is_a_keyboard_interrupt_in_every_rank(tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    output = tmp_path / "output"
    with started(*running(tmp_path, "sleep"), cwd=tmp_path, output=output) as process:
        ready(tmp_path)
        workers = descendants(process.pid)
        if to_group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(PATIENCE) == 75
        assert all_gone(workers)
    assert all((tmp_path / f"interrupted-{rank}").exists() for rank in range(2))
    assert "Traceback" not in output.read_text() and "stopped: own/train.py was interrupted" in output.read_text()
    assert "KeyboardInterrupt" in (tmp_path / "logs" / "rank-0.log").read_text()


@pytest.mark.slow
def test_script_that_handles_sigterm_gets_it(tmp_path: Path) -> None:
    with started(*running(tmp_path, "handle"), cwd=tmp_path) as process:
        ready(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))


def test_no_process_outlives_the_launcher(tmp_path: Path) -> None:
    with started(*running(tmp_path, "sleep"), cwd=tmp_path) as process:
        ready(tmp_path)
        workers = descendants(process.pid)
        assert len(workers) >= 2
        process.kill()
        assert all_gone(workers)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("own/trian.py",), 2, "did you mean own/train.py"),
        (("-m", "no_such_module"), 2, "no module no_such_module"),
        (("--mixed_precision", "bf61", "own/train.py"), 2, "--mixed-precision: mixed_precision: expected NO or BF16"),
        (("--gpu_ids", "0,1", "--config_file", "gpus.yaml", "own/train.py"), 3, "MULTI_GPU requires"),
        (("--config-file", "no.yaml", "own/train.py"), 2, "no.yaml: no such file"),
        (("--config-file", "gpus.yaml", "own/train.py"), 3, "possible here"),
        (("--config-file", "fsdp.yaml", "own/train.py"), 3, "runs FSDP as plain DDP"),
        (("--config-file", "nodes.yaml", "own/train.py"), 2, "needs --rendezvous host:port"),
        (("--nodes", "2", "--node-rank", "0", "own/train.py"), 2, "needs --rendezvous host:port"),
        (
            ("--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--num-processes", "3", "own/train.py"),
            2,
            "equally",
        ),
        (("--rendezvous", "a:1", "own/train.py"), 2, "pass --nodes"),
        (("--hosts", "a,b", "--nodes", "2", "own/train.py"), 2, "remove --nodes"),
        (("--hosts", "a,b", "own/trian.py"), 2, "did you mean own/train.py"),
        (("--config-file", "wrong.yaml", "own/train.py"), 2, "did you mean num_processes"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "gpus.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n")
    (tmp_path / "nodes.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 2\n")
    (tmp_path / "wrong.yaml").write_text("distributed_type: NO\nnum_procesess: 2\n")
    result = launch(tmp_path, *arguments)
    assert result.returncode == code and said in result.stderr, result.stderr
    assert not (tmp_path / "runs").exists()


NODES = """
import os, sys, time
import torch
import torch.distributed as dist

names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("variables:", *(os.environ[name] for name in names), int(total.item()), *sys.argv[1:], flush=True)
if sys.argv[1:] == ["exit"] and dist.get_rank() == 3:
    sys.exit(7)
if sys.argv[1:] == ["sleep"]:
    open("ready-" + os.environ["RANK"], "w").close()
    time.sleep(600)
"""


def on_nodes(directory: Path, place: str, index: int, *words: str) -> tuple[str, ...]:
    options = ("--nodes", "2", "--node-rank", str(index), "--rendezvous", place, "--num-processes", "4")
    return ("-m", "trainwright", "launch", "--cpu", "--logs", str(directory / "logs"), *options, "nodes.py", *words)


@pytest.fixture
def place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(("a", "b"), 0), (("exit",), 7)])
def test_a_script_on_two_nodes(tmp_path: Path, place: str, words: tuple[str, ...], code: int) -> None:
    (tmp_path / "nodes.py").write_text(NODES)
    with ExitStack() as both:
        nodes = [both.enter_context(started(*on_nodes(tmp_path, place, i, *words), cwd=tmp_path)) for i in range(2)]
        assert [node.wait(PATIENCE) for node in nodes] == [code, code]
    for rank in range(4):
        said = f"variables: {rank} {rank % 2} 4 2 {rank // 2} 127.0.0.1 10 {' '.join(words)}"
        assert said in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(("a b", "$(touch pwned)"), 0), (("exit",), 7)])
def test_a_script_on_two_hosts(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """What stands for ssh runs the commands here; tests/clusters/hosts/test_ssh.py has a real one."""
    (tmp_path / "nodes.py").write_text(NODES)
    (tmp_path / "ssh").write_text('#!/bin/sh\nfor last in "$@"; do :; done\nexec sh -c "$last"\n')
    (tmp_path / "ssh").chmod(0o755)
    hosts = ("launch", "--cpu", "--hosts", "127.0.0.1:2,127.0.0.2:2", "--logs", "logs", "nodes.py")
    done = trainwright(*hosts, *words, cwd=tmp_path, TRAINWRIGHT_SSH=str(tmp_path / "ssh"))
    assert done.returncode == code, done.stderr
    for rank in range(4):
        said = f"variables: {rank} {rank % 2} 4 2 {rank // 2} 127.0.0.1 10 {' '.join(words)}"
        assert said in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert "variables: 0 0" in done.stdout and (tmp_path / "logs" / "host-127.0.0.2.log").is_file()
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "runs").exists()


def test_a_script_is_interrupted_on_all_nodes(tmp_path: Path, place: str) -> None:
    (tmp_path / "nodes.py").write_text(NODES)
    with ExitStack() as both:
        nodes = [both.enter_context(started(*on_nodes(tmp_path, place, i, "sleep"), cwd=tmp_path)) for i in range(2)]
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(4)))
        nodes[1].send_signal(signal.SIGTERM)
        assert [node.wait(PATIENCE) for node in nodes] == [75, 75]


@pytest.mark.slow
def test_a_script_ends_on_all_nodes_when_one_is_lost(tmp_path: Path, place: str) -> None:
    (tmp_path / "nodes.py").write_text(NODES)
    with ExitStack() as both:
        nodes = [both.enter_context(started(*on_nodes(tmp_path, place, i, "sleep"), cwd=tmp_path)) for i in range(2)]
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(4)))
        nodes[1].kill()
        assert nodes[0].wait(PATIENCE) == 5


ACCELERATED = """
import sys, torch
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer = torch.nn.Linear(4, 1), None
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
loss = model(torch.full((2, 4), accelerator.process_index + 1.0)).pow(2).mean()
accelerator.backward(loss)
optimizer.step()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
same = bool((weights[0] == weights[-1]).all())
print(accelerator.num_processes, accelerator.distributed_type, accelerator.mixed_precision, same)
accelerator.end_training()
"""


def test_accelerate_script_does_what_its_file_says(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "accelerated.py").write_text(ACCELERATED)
    (tmp_path / "two.yaml").write_text(
        "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n"
    )
    result = launch(tmp_path, "--config-file", "two.yaml", "accelerated.py")
    assert result.returncode == 0, result.stderr
    # Whatever libraries that Accelerate finds have to say comes before it.
    assert result.stdout.splitlines()[-1] == "2 DistributedType.MULTI_CPU bf16 True"


def test_launch_imports_torch_only_when_it_starts(tmp_path: Path) -> None:
    code = "import sys, trainwright.compatibility.commands; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
