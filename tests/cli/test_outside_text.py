"""Text that somebody else wrote is printed by every command and controls no terminal."""

from __future__ import annotations

import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.models import TOKENIZER, model_of
from tests.support.runs import ON_ROWS, TINY, Runs
from trainwright.run.group.failure_report import FailureReport
from trainwright.run.observers.console import ConsoleObserver

CLIPBOARD, CLEAR, TITLE, BIDI = "\x1b]52;c;ZXZpbA==\x07", "\x1b[2J", "\x1b]0;mine\x07\r", "\u202e"
HOSTILE = f"a{CLIPBOARD}{CLEAR}{TITLE}{BIDI}[red]b[/red]"
SHOWN = r"a\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b]0;mine\x07\x0d\u202e[red]b[/red]"
IN_YAML = r"a\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b]0;mine\x07\r\u202e[red]b[/red]"  # between double quotes


def harmless(printed: str) -> bool:
    """Whether nothing in it is obeyed by a terminal."""
    return not [c for c in printed if (c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cs")) or c == BIDI]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_events_of_a_run_are_shown_harmless(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal() if terminal else io.StringIO()
    console = ConsoleObserver(stream)
    console._width = 1000
    about = {"world_size": 1, "strategy": "single", "mixed_precision": "no", "device": "cpu", "parameters": 1}
    about |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "global_batch_size": 1}
    named = {"run_directory": HOSTILE, "weights": HOSTILE, "data": [HOSTILE], "reasons": [HOSTILE]}
    events: list[dict[str, Any]] = [
        {"event": "start", "task": "sft", "trainable_parameters": 1, "max_steps": 1, **about, **named},
        {"event": "generate", "step": 0, "prompt": HOSTILE, "text": HOSTILE},
        {"event": "checkpoint", "step": 0, "path": HOSTILE, "seconds": 1.0},
        {"event": "fault", "kind": HOSTILE, "rank": 0, "detail": HOSTILE, "action": HOSTILE},
        {"event": "notice", "message": HOSTILE},
        {"event": "step", "step": 1, "loss": 1.0, "write_error": HOSTILE},
        {"event": "finish", "status": "finished", "step": 1, "seconds": 1.0, "path": HOSTILE},
    ]
    for event in events:
        console(event)
    printed = stream.getvalue()
    assert printed.count(SHOWN.replace("\n", "")) >= 10
    assert CLIPBOARD not in printed and CLEAR not in printed and TITLE not in printed and BIDI not in printed
    assert terminal or harmless(printed)


def test_a_failing_rank_is_told_harmless() -> None:
    terminal = io.StringIO()
    FailureReport(0, terminal, None).fail(RuntimeError(HOSTILE))
    assert SHOWN in terminal.getvalue() and harmless(terminal.getvalue())


def test_names_rows_and_values_are_printed_harmless(runs: Runs, tmp_path: Path) -> None:
    row = {"question": HOSTILE, "answer": HOSTILE}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / f"{CLIPBOARD}.jsonl").write_text(json.dumps({"nothing": HOSTILE}) + "\n")
    (tmp_path / "key.yaml").write_text(f'task: sft\n"{IN_YAML}": 1\n')
    (tmp_path / "value.yaml").write_text(f'task: sft\nmodel: {{name: "{IN_YAML}"}}\ndata: {{train: "{IN_YAML}"}}\n')
    file = (tmp_path / f"{CLIPBOARD}.jsonl").name
    commands = {
        ("data", "show", "rows.jsonl", "--model", "bytes"): SHOWN,
        ("data", "check", file): r"\x1b]52",
        ("data", "prepare", file, "--out", "out"): r"\x1b]52",
        ("recipe", "check", "key.yaml"): SHOWN,
        ("train", "value.yaml"): SHOWN,
        ("plan", "value.yaml"): SHOWN,
        ("generate", CLIPBOARD, "--prompt", "a"): r"\x1b]52",
        ("eval", CLIPBOARD, "--data", file): r"\x1b]52",
        ("train", f"--resume={CLIPBOARD}"): r"\x1b]52",
    }
    begun = [(runs.command(*command, cwd=tmp_path), command, shown) for command, shown in commands.items()]
    for started, command, shown in begun:
        ended = started.wait()
        printed = ended.stdout + ended.stderr
        assert shown in printed and harmless(printed), (command, printed)
        assert "Traceback" not in printed, (command, printed)


def test_a_run_named_and_asked_with_escapes_trains_and_prints_none(runs: Runs, tmp_path: Path) -> None:
    asked = (
        f'logging.run_directory="{IN_YAML}"',
        f'evaluate.prompts=["{IN_YAML}"]',
        "logging.observers.tensorboard=false",
    )
    ended = runs.command("train", str(TINY), ON_ROWS, "train.max_steps=2", "evaluate.every=2", *asked, cwd=tmp_path)
    finished = ended.wait()
    printed = finished.stdout + finished.stderr
    assert finished.code == 0, printed
    assert SHOWN in printed and harmless(printed)
    assert (tmp_path / HOSTILE / "final").is_dir()
    assert HOSTILE in {event.get("prompt") for event in map(json.loads, _lines(tmp_path / HOSTILE / "events.jsonl"))}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_generated_escapes_are_shown_and_kept_in_files(runs: Runs, tmp_path: Path) -> None:
    model = model_of("llama")
    with torch.no_grad():  # it writes ESC and nothing else
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.lm_head.weight[0x1B, 0] = 1.0
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Why?"}) + "\n")
    asked = ("generate", "model", "--max-new-tokens", "3")
    printed, kept = (
        runs.command(*asked, *more, cwd=tmp_path)
        for more in (["--prompt", "Why?", "--plain"], ["--file", "rows.jsonl", "--out", "answers.jsonl", "--plain"])
    )
    assert printed.wait().stdout == "\\x1b\\x1b\\x1b\n"
    assert kept.wait().code == 0
    assert json.loads((tmp_path / "answers.jsonl").read_text())["generated"] == "\x1b\x1b\x1b"
