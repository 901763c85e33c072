"""The command line as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import PATIENCE, environment, trainwright
from trainwright import __version__


def test_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainwright", "--version"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"trainwright {__version__}\n")


@pytest.mark.parametrize("arguments", [(), ("train",), ("recipe",)])
def test_help_lists_what_there_is(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = trainwright(*arguments, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "--resume" in result.stdout if arguments == ("train",) else "Commands:" in result.stdout


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, trainwright.cli.main\n"
        "heavy = ('torch', 'transformers', 'datasets', 'pandas', 'numpy', 'pydantic')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


WRONG_NAMES = [
    ("eval model --metrics blue", "unknown metric 'blue'"),
    ("eval model --data no.jsonl", "--data: no file no.jsonl"),
    ("eval model --against ./nowhere", "--against: "),
    ("eval ./nowhere", "MODEL: "),
    ("generate ./nowhere --prompt a", "MODEL: "),
    ("merge ./nowhere --out out", "MODEL: "),
    ("export ./nowhere --out out", "MODEL: "),
    ("data show rows.jsonl", "rows.jsonl: pass --model"),
    ("data show no.jsonl --model bytes", "no file no.jsonl"),
    ("data show tiny.yaml model.chat_template=no.jinja", "no.jinja: no such file"),
    ("train tiny.yaml data.train=no.jsonl", "data.train: no file no.jsonl"),
    ("train --resume nowhere", "--resume: nowhere is not a run"),
    ("plan tiny.yaml data.train=no.jsonl", "data.train: no file no.jsonl"),
    ("stop nowhere", "nowhere is not a run"),
]


def test_wrong_names_are_refused_without_importing_torch(tmp_path: Path) -> None:
    """All in one process, which starts once."""
    (written(tmp_path, GOOD_ROW) / "model").mkdir()
    code = (
        "import contextlib, io, json, sys\nfrom trainwright.cli.main import main\n"
        "for arguments in sys.argv[1:]:\n"
        "    sys.argv = ['trainwright', *arguments.split()]\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        try:\n            main()\n        except SystemExit as end:\n            code = end.code\n"
        "    print(json.dumps([code, said.getvalue(), 'torch' in sys.modules]))"
    )
    command = [sys.executable, "-c", code, *(arguments for arguments, _ in WRONG_NAMES)]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    ended = map(json.loads, result.stdout.splitlines())
    for (arguments, message), (code, said, has_torch) in zip(WRONG_NAMES, ended, strict=True):
        assert code == 2 and message in said and "Error" not in said, (arguments, said)
        assert not has_torch, arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "error: no recipe; pass one"),
        (("nowhere.yaml",), "error: nowhere.yaml"),
        (("one.yaml", "two.yaml"), "error: expected one recipe, not 2"),
        (("--resume", "nowhere"), "error: --resume: nowhere is not a run"),
        (("--resume=",), "error: no recipe; pass one"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_message(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = trainwright("train", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith(message), result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_unknown_option_ends_with_2(tmp_path: Path) -> None:
    assert trainwright("train", "--resumee", cwd=tmp_path).returncode == 2


def test_unforeseen_error_keeps_its_traceback_and_ends_with_4(tmp_path: Path) -> None:
    code = "from trainwright.cli.main import app, main\napp.command('divide')(lambda: 1 / 0)\nmain()"
    command = [sys.executable, "-c", code, "divide"]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 4
    assert result.stderr.startswith("Traceback") and "ZeroDivisionError" in result.stderr


TINY = {
    "task": "sft",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        "tokenizer": "bytes",
    },
    "data": {"train": "rows.jsonl", "max_length": 64, "validation": None},
    "train": {"max_steps": 4, "global_batch_size": 4, "mixed_precision": "no"},
}
GOOD_ROW = '{"question": "q?", "answer": "a"}\n'


def written(directory: Path, rows: str | None) -> Path:
    (directory / "tiny.yaml").write_text(json.dumps(TINY))
    if rows is not None:
        (directory / "rows.jsonl").write_text(rows)
    return directory


@pytest.mark.slow
def test_dry_run_shows_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    before = set(written(tmp_path, GOOD_ROW * 8).iterdir())
    result = trainwright("train", "tiny.yaml", "parallel.num_processes=1", "--dry-run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "num_processes: 1" in result.stdout and "strategy: single" in result.stdout
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "rows", "message"),
    [
        ((), None, "rows.jsonl"),
        ((), "", "rows.jsonl"),
        ((), GOOD_ROW + '{"question": \n', "2"),
        ((), '{"color": "red", "size": 3}\n' * 8, "color, size"),
        ((), GOOD_ROW + '{"question": 1, "answer": "a"}\n', "rows.jsonl:2: the field question should be text"),
        (("data.format=text",), GOOD_ROW, "data.format text"),
        (("model.chat_template={{ messages }}",), '{"text": "t"}\n', "model.chat_template"),
        (("model.chat_template=tiny.yml",), GOOD_ROW, "tiny.yml: no such file; did you mean tiny.yaml"),
        (('model.chat_template="{% for m in messages %}"',), GOOD_ROW, "model.chat_template, line 1: "),
        (("train.glbal_batch_size=3",), GOOD_ROW, "global_batch_size"),
        (("logging.run_directory=taken",), GOOD_ROW, "taken exists; choose another directory"),
    ],
)
def test_bad_request_ends_with_2_before_anything_is_written(
    tmp_path: Path, overrides: tuple[str, ...], rows: str | None, message: str
) -> None:
    (written(tmp_path, rows) / "taken").mkdir()
    before = set(tmp_path.iterdir())
    result = trainwright("train", "tiny.yaml", *overrides, "--dry-run", cwd=tmp_path)
    assert result.returncode == 2, result.stdout
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.stderr
    assert set(tmp_path.iterdir()) == before and list((tmp_path / "taken").iterdir()) == []


def test_request_that_only_preparation_can_refuse_leaves_nothing_behind(tmp_path: Path) -> None:
    written(tmp_path, GOOD_ROW * 8 + '{"question": "", "answer": "a"}\n')
    cache = str(tmp_path / "cache")
    result = trainwright("train", "tiny.yaml", cwd=tmp_path, TRAINWRIGHT_CACHE=cache)
    assert result.returncode == 2, result.stderr
    assert "rows.jsonl:9: the field question is empty" in result.stderr and "Traceback" not in result.stderr
    assert list((tmp_path / "runs").glob("*")) == []


@pytest.mark.slow
def test_worker_runs_under_torchrun(tmp_path: Path) -> None:
    written(tmp_path, "".join(json.dumps({"question": f"q{n}?", "answer": "a"}) + "\n" for n in range(20)))
    run = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "trainwright.worker", "tiny.yaml", "logging.run_directory=run"]
    variables = environment(TRAINWRIGHT_CACHE=str(tmp_path / "cache"))
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert "finished at step 4" in result.stdout
    assert (run / "final" / "config.json").is_file() and (run / "logs" / "rank-1.log").is_file()
