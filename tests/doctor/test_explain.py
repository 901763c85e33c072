"""``trainwright doctor --explain``: the cause in logs of public issues, and what is told from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright as tw
from tests.support.commands import PATIENCE, environment, trainwright
from tests.support.runs import Runs
from trainwright.cli.recipe import recipe_json_schema
from trainwright.doctor.diagnosis import Diagnosis, explain
from trainwright.run.shutdown.known_errors import Role, format_advice, load_known_errors

# Each begins with two lines: the issue that has it, and the name of the error, as its thread found it; `unknown` for an
# error that is not in the table, `none` where nothing failed.
LOGS = sorted((Path(__file__).parent / "logs").glob("*.txt"))
_HEADER = re.compile(r"# source: (https://github\.com/\S+/(?:issues|pull)/\d+)\n# expected: ([\w-]+)\n")

OUT_OF_MEMORY = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "train.py", line 7, in <module>\n'
    "[rank3]:     loss.backward()\n"
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.10 GiB of which 1.12 GiB is free.\n"
)


def timeout(rank: int, number: int = 808, kind: str = "ALLREDUCE") -> str:
    return (
        f"[rank{rank}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn=16, NumelOut=16, Timeout(ms)=600000) ran "
        "for 600020 milliseconds before timing out.\n"
    )


def named(diagnosis: Diagnosis) -> str:
    if diagnosis.cause is not None:
        return diagnosis.cause.error.name
    return "unknown" if diagnosis.is_unknown_first else "none"


@pytest.mark.slow
@pytest.mark.parametrize("file", LOGS, ids=lambda file: file.stem)
def test_logs_of_public_issues_are_explained_as_their_threads_did(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    header = _HEADER.match(text)
    assert header is not None, "no source"
    assert named(explain(text[header.end() :])) == header[2]


def test_logs_are_of_many_issues_and_errors() -> None:
    headers = [match for file in LOGS if (match := _HEADER.match(file.read_text(encoding="utf-8")))]
    assert len({match[1] for match in headers}) > 200
    assert len({match[2] for match in headers}) > 55


def test_the_cause_is_told_from_what_follows_from_it() -> None:
    log = timeout(0) + timeout(1) + OUT_OF_MEMORY + timeout(2) + "ChildFailedError:\n"
    diagnosis = explain(log)
    assert diagnosis.cause is not None
    assert (named(diagnosis), diagnosis.cause.ranks, diagnosis.cause.line.number) == ("gpu-out-of-memory", [3], 6)
    followed = {finding.error.name: finding.ranks for finding in diagnosis.followed}
    assert followed == {"nccl-timeout": [0, 1, 2], "launcher-report": []}
    assert diagnosis.details == ["2.00 GiB requested, 1.12 GiB free, 79.10 GiB total on the GPU"]


def test_the_rank_that_others_waited_for_is_named() -> None:
    assert explain(timeout(0) + timeout(1) + timeout(3)).details == [
        "waited: ranks 0, 1, 3 in collective 808 (ALLREDUCE, 16 -> 16 elements)",
        "no timeout was reported by rank 2: check there first",
    ]


def test_the_rank_that_was_behind_is_named() -> None:
    details = explain(timeout(0, 900) + timeout(1, 700) + timeout(2, 900)).details
    assert "rank 1 had called 700 collectives, others up to 900: check what it did instead" in details


def test_different_operations_of_one_number_are_named() -> None:
    where = explain(timeout(0) + timeout(1, kind="ALLGATHER")).details[0]
    assert where.endswith("; ranks ran different operations as the same collective")
    assert "rank 0 in collective 808 (ALLREDUCE" in where and "rank 1 in collective 808 (ALLGATHER" in where


def test_memory_in_pieces_that_are_too_small_is_named() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. {} is reserved by PyTorch but unallocated."
    assert "expandable_segments" in " ".join(explain(said.format("9.35 GiB")).details)
    assert "expandable_segments" not in " ".join(explain(said.format("20.00 MiB")).details)


@pytest.mark.parametrize("code", [-9, -15])
def test_processes_that_torchrun_ended_are_not_the_cause(code: int) -> None:
    report = (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED\nFailures:\n[1]:\n"
        f"  rank      : 1 (local_rank: 1)\n  exitcode  : {code} (pid: 11)\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 10)\n"
    )
    assert named(explain(report.format(1))) == "launcher-report"
    killed = explain(report.format(-9))
    assert (named(killed), killed.details) == ("killed", ["failed first: rank 0, exit code -9"])


def test_an_exception_that_is_not_known_is_not_guessed() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in load\n'
        '    raise ImportError("flash_attn is not installed") from None\n'
        '  File "train.py", line 4, in <module>\n    rows["CUDA out of memory"]\nKeyError: \'frame_7\'\n'
    )
    diagnosis = explain(trace + timeout(1))
    assert diagnosis.unknown is not None and diagnosis.is_unknown_first and diagnosis.cause is None
    assert (diagnosis.unknown.text, diagnosis.unknown.number) == ("KeyError: 'frame_7'", 6)
    assert [finding.error.name for finding in diagnosis.followed] == ["nccl-timeout"]


def test_an_exception_at_the_end_does_not_hide_the_error_before_it() -> None:
    assert (
        named(explain(timeout(1) + "Traceback (most recent call last):\nRuntimeError: shutting down\n"))
        == "nccl-timeout"
    )


def test_an_exception_that_led_to_another_is_its_cause() -> None:
    log = (
        "Traceback (most recent call last):\n"
        "ImportError: /x/flash_attn.so: undefined symbol: _ZN3c104cuda9SetDeviceEi\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\nLoadingError: cannot load the model\n"
    )
    diagnosis = explain(log)
    assert named(diagnosis) == "torch-abi" and diagnosis.unknown is None


HEALTHY = """\
W0801 13:23:17.366000 32974 torch/distributed/run.py:792] Setting OMP_NUM_THREADS environment variable to be 1
[W NNPACK.cpp:64] Could not initialize NNPACK! Reason: Unsupported hardware.
node1:12:34 [0] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file: No such file or directory
huggingface/tokenizers: The current process just got forked, after parallelism has already been used.
/x/torch/utils/checkpoint.py:31: UserWarning: None of the inputs have requires_grad=True. Gradients will be None
[2023-04-28 06:51:29,903] [INFO] [loss_scaler.py:188:update_scale] Attempted loss scale: 65536, reducing to 32768
WARNING: flash_attn is not installed, falling back to sdpa after ImportError: No module named 'flash_attn'
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7fc7fa34f7f0>
Traceback (most recent call last):
  File "dataloader.py", line 1475, in __del__
AssertionError: can only test a child process
{'loss': 1.83, 'grad_norm': 0.73, 'learning_rate': 1.9e-05, 'epoch': 0.12}
step 40 of 40: loss 1.7342, gradient norm 0.61, 1,204 tokens/s
saved /runs/a/final
"""


def test_warnings_of_a_run_that_succeeded_are_not_taken_for_errors() -> None:
    diagnosis = explain(HEALTHY)
    assert named(diagnosis) == "none" and diagnosis.unknown is None and diagnosis.followed == []
    assert [sign.error.name for sign in diagnosis.signs] == ["tokenizers-fork-warning"]


def test_ranks_of_srun_labels_and_colors_are_read() -> None:
    log = (
        "0: step 1\n1: step 1\n\x1b[31m1: RuntimeError: element 0 of tensors does not require grad\x1b[0m\n0: step 2\n"
    )
    log = log.replace("grad\x1b", "grad and does not have a grad_fn\x1b")
    diagnosis = explain(log)
    assert diagnosis.cause is not None
    assert (named(diagnosis), diagnosis.cause.ranks) == ("no-gradient", [1])


def test_the_command_says_the_cause_first_with_its_place_and_fixes(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(OUT_OF_MEMORY + timeout(0))
    result = trainwright("doctor", "--explain", "run.log", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "cause: GPU memory ran out [gpu-out-of-memory] (rank 3, line 4)"
    assert lines[1].startswith("  torch.OutOfMemoryError: CUDA out of memory")
    assert "train.micro_batch_size" in result.stdout
    assert lines[-2] == "followed by:" and "[nccl-timeout] (rank 0, line 5)" in lines[-1]


def test_json_has_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(OUT_OF_MEMORY + timeout(0))
    values = json.loads(trainwright("doctor", "--explain", "run.log", "--json", cwd=tmp_path).stdout)
    cause = values["cause"]
    assert (cause["name"], cause["role"], cause["line"], cause["ranks"]) == ("gpu-out-of-memory", "cause", 4, [3])
    assert cause["fixes"] and cause["details"] and values["unknown"] is None
    assert [finding["name"] for finding in values["followed"]] == ["nccl-timeout"]


def test_an_unknown_error_ends_with_4_and_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("start\nTraceback (most recent call last):\nKeyError: 'frame_7'\n")
    result = trainwright("doctor", "--explain", "run.log", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (4, "not a known error (line 3):\n  KeyError: 'frame_7'\n")


def test_only_consequences_are_called_so(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("RuntimeError: Connection reset by peer\n")
    result = trainwright("doctor", "--explain", "run.log", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("only a consequence is in this log: the connection to another rank broke")


def test_a_log_on_standard_input_with_any_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwright", "doctor", "--explain", "-"]
    log = b"\xff\x00\x1b[2J" + HEALTHY.encode()
    result = subprocess.run(
        command, input=log, cwd=tmp_path, env=environment(), capture_output=True, timeout=PATIENCE, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(b"no known error found\n")


def logs_of_run(run: Path) -> None:
    """Two ranks, of which rank 3 ran out of memory, and what the launcher says."""
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "rank-0.log").write_text("step 1\n" + timeout(0))
    (run / "logs" / "rank-3.log").write_text("step 1\nstep 2\n" + OUT_OF_MEMORY.replace("[rank3]: ", ""))
    (run / "logs" / "launcher.log").write_text("failed (exitcode: 1) local_rank: 3 (pid: 7) of binary: python\n")
    (run / "logs" / "prepare.log").write_text("read 400 rows")


def test_all_logs_of_a_run_are_read_and_lines_keep_their_files(tmp_path: Path) -> None:
    logs_of_run(tmp_path / "runs" / "a")
    result = trainwright("doctor", "--explain", "runs/a", cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0] == "cause: GPU memory ran out [gpu-out-of-memory] (rank 3, line 6 of runs/a/logs/rank-3.log)"
    followed = lines[lines.index("followed by:") + 1 :]
    assert followed[0].endswith("[nccl-timeout] (rank 0, line 2 of runs/a/logs/rank-0.log)")
    assert followed[-1].endswith("line 1 of runs/a/logs/launcher.log)")
    values = json.loads(trainwright("doctor", "--explain", "runs/a", "--json", cwd=tmp_path).stdout)
    assert (values["cause"]["file"], values["cause"]["line"]) == ("runs/a/logs/rank-3.log", 6)


def test_a_run_that_failed_is_explained_from_its_directory(runs: Runs) -> None:
    started = runs.train("optimizer.learning_rate=1.0e+30", "optimizer.warmup_steps=0", "parallel.num_processes=2")
    assert started.wait().code == 4 and started.run is not None
    diagnosis = tw.explain(Path(started.run))
    found = diagnosis.cause.line.text if diagnosis.cause else diagnosis.unknown.text if diagnosis.unknown else ""
    assert "training stopped: loss" in found or "loss is" in found, diagnosis


@pytest.mark.parametrize("log", ["nowhere.log", "."])
def test_a_log_that_cannot_be_read_ends_with_2(tmp_path: Path, log: str) -> None:
    result = trainwright("doctor", "--explain", log, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: --explain: {log}: ")


def test_names_are_unique_and_every_error_says_why_and_what_to_do() -> None:
    names = [error.name for error in load_known_errors()]
    assert len(names) == len(set(names)) > 80
    assert [error.name for error in load_known_errors() if not (error.cause and error.fixes and all(error.fixes))] == []
    assert set(Role) == {error.role for error in load_known_errors()}


def test_fixes_name_only_keys_that_recipes_have() -> None:
    schema = recipe_json_schema()
    text = " ".join(" ".join((error.cause, *error.fixes, *error.recipe_fixes)) for error in load_known_errors())
    sections = "train|optimizer|parallel|checkpoint|evaluate|logging|data"
    keys = set(re.findall(rf"(?<![\w./])({sections})\.([a-z_]+)\b(?!\()", text))
    assert len(keys) > 10
    for section, key in keys:
        reference = schema["properties"][section]
        name = re.search(r"#/\$defs/(\w+)", json.dumps(reference))
        assert name is not None
        assert key in schema["$defs"][name[1]]["properties"], f"{section}.{key}"


def test_the_fixes_of_a_run_of_trainwright_name_its_own_keys() -> None:
    error = "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    trace = f'File "/opt/trainwright/parallel/world.py", line 10, in sum\n{error}'
    assert "parallel.timeout" in format_advice(trace) and "ddp_timeout" not in format_advice(trace)
    assert any("parallel.timeout" in fix for fix in explain(trace).fixes)
    assert any("ddp_timeout" in fix for fix in explain(error).fixes), "that of another program"
    taken = "RuntimeError: Address already in use (errno: 98)"
    assert "--rendezvous HOST:PORT" in format_advice(taken) and "accelerate launch" not in format_advice(taken)
