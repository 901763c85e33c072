"""What a terminal of some width shows, of the kinds that there are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.support.commands import PATIENCE, environment
from tests.support.runs import ON_ROWS, TINY
from tests.support.slow import slow_but
from tests.support.terminal import lines, record
from trainwright.doctor.verify import Comparison
from trainwright.run.observers.console import ConsoleObserver
from trainwright.utils.text import say

RUN = "/data/experiments/language-models/runs/tiny-20261122-110556"
ABOUT = {"world_size": 2, "strategy": "ddp", "mixed_precision": "no", "device": "cpu", "parameters": 90_600}
BATCH = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "global_batch_size": 8, "max_steps": 10}
START = {"event": "start", "task": "sft", "trainable_parameters": 90_600, "run_directory": RUN, **ABOUT, **BATCH}
_SLOWER = "fsdp would take 1.62 times as long per step, mostly because of communication"
REASONS = [f"parallel.strategy ddp: the fastest that fits; {_SLOWER}"]
FIGURES = r"step \d+/9000 .*left .* tokens/s  cpu [\d-]+%  [\d.-]+ GiB"
_SILENT = 0.1  # the largest share of a command's time in which nothing says what it does
DATA = [f"train: tokens kept in {RUN}/cache/datasets/9d2224ceb33754e979a4f52cab518f13 (reused)"]


class Terminal:
    """A pseudo-terminal that is so many columns wide, and what was written to it."""

    def __init__(self, columns: int) -> None:
        self._master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self._written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(self._master, 65536):
                self._written += part

    def close(self) -> str:
        """What was written, up to the end."""
        return self.close_bytes().decode()

    def close_bytes(self) -> bytes:
        """What was written, in the encoding in which it was."""
        os.close(self.slave)
        self._reader.join(60)
        os.close(self._master)
        return self._written


@contextlib.contextmanager
def stream(terminal: Terminal) -> Iterator[TextIO]:
    with os.fdopen(os.dup(terminal.slave), "w") as opened:
        yield opened


def whole(shown: list[str], columns: int) -> None:
    """Nothing is longer than the terminal is wide but what is never broken: a word, such as a path, or a command."""
    for line in shown:
        if len(line) > columns:
            assert re.fullmatch(r"\s*(\S+|(trainwright|tensorboard) .*|\w+\.from_pretrained\(.*\))", line), line


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_run_breaks_no_word_and_no_command(columns: int) -> None:
    terminal = Terminal(columns)
    with stream(terminal) as opened:
        console = ConsoleObserver(opened)
        console({**START, "reasons": REASONS, "data": DATA, "predicted": {"step_time": 0.01, "calibrated": 0.0}})
        for number in range(1, 11):
            console({"event": "step", "step": number, "loss": 2.5, "step_time": 0.1, "tokens_per_second": 9_857.0})
        console(
            {"event": "evaluate", "step": 10, "metrics": {"loss": 5.5, "perplexity": 255.1, "token_accuracy": 0.02}}
        )
        console({"event": "generate", "step": 10, "prompt": "Where?", "text": f"It is in {RUN}/final. " * 3})
        console({"event": "checkpoint", "step": 10, "path": f"{RUN}/checkpoints/step-00000010", "seconds": 0.1})
        measured = {"step_time": 1.0, "waited": 0.8}
        finish: dict[str, Any] = {"event": "finish", "status": "finished", "step": 10, "seconds": 75.0}
        console({**finish, "path": f"{RUN}/final", "measured": measured})
        say(f"stopped after a checkpoint; continue with: trainwright train --resume {RUN}", file=opened)
    written = terminal.close()
    shown = lines(written)
    whole(shown, columns)
    assert any(line.endswith(f"trainwright train --resume {RUN}") for line in shown)
    assert any(line.endswith(f"trainwright generate {RUN}") for line in shown)
    assert any(line.endswith(f'AutoModelForCausalLM.from_pretrained("{RUN}/final")') for line in shown)
    assert sum(f"{RUN}/checkpoints/step-00000010" in line for line in shown) == 1


@pytest.mark.slow
@pytest.mark.parametrize("columns", slow_but(40, among=(40, 80)))
def test_commands_break_no_word(tmp_path: Path, columns: int) -> None:
    for arguments in (
        ["plan", str(TINY)],
        ["train", f"{RUN}/no.yaml"],
        ["setup", "--show", "--config-file", f"{RUN}/no"],
    ):
        terminal = Terminal(columns)
        process = subprocess.Popen(
            [sys.executable, "-m", "trainwright", *arguments],
            cwd=tmp_path,
            env=environment(TERM="xterm", TRAINWRIGHT_CACHE=str(tmp_path / "cache")),
            stdin=subprocess.DEVNULL,
            stdout=terminal.slave,
            stderr=terminal.slave,
        )
        assert process.wait(PATIENCE) in (0, 2)
        shown = lines(terminal.close())
        assert "".join(shown) and not any("Traceback" in line for line in shown)
        whole(shown, columns)


def test_no_colors_and_no_drawing_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal(80)
    with stream(terminal) as opened:
        console = ConsoleObserver(opened)
        console(START)
        console({"event": "step", "step": 1, "loss": 2.5, "tokens_per_second": 9_857.0})
        console.close()
    written = terminal.close()
    assert "\x1b" not in written and "step 1/10" in written
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal(80)
    with stream(terminal) as opened:
        console = ConsoleObserver(opened)
        console(START)
        console({"event": "step", "step": 1, "loss": 2.5, "tokens_per_second": 9_857.0})
        console.close()
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d)(?:;\d+)*m", terminal.close())


@pytest.mark.parametrize("encoding", ["cp437", "cp1252", "ascii"])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_what_an_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch, encoding: str, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    terminal = Terminal(60)
    with os.fdopen(os.dup(terminal.slave), "w", encoding=encoding) as opened:
        console = ConsoleObserver(opened)
        console({**START, "reasons": ["parallel.strategy: ddp is 1.62 × as fast → chosen"]})
        console({"event": "step", "step": 1, "loss": 2.5, "tokens_per_second": 9_857.0})
        console({"event": "generate", "step": 1, "prompt": "größer…", "text": "日本"})
        console._progress.show_operation("evaluating", ", 40%", 62.0, True)
        console.close()
    written = terminal.close_bytes().decode(encoding)
    assert "1.62" in written and "evaluating" in written and "1:02, 40%" in written
    assert "\\u65e5" in written and "->" in written
    assert "evaluating … 1:02" in written if encoding == "cp1252" else "evaluating ... 1:02" in written


def test_tables_become_lists_where_they_do_not_fit(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a-run-with-a-name-of-some-length"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("task: sft\n")
    wide = record("jobs", str(run), cwd=tmp_path, columns=200, PATH="")
    assert wide.code == 0 and any(re.match(r"RUN +\S+ +ST", line) for line in wide.lines), wide.shown
    narrow = record("jobs", str(run), cwd=tmp_path, columns=40, PATH="")
    assert narrow.code == 0 and any(line.endswith(run.name) for line in narrow.lines)
    narrow.check_unbroken()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_run_is_one_line_at_any_width(tmp_path: Path, columns: int) -> None:
    run = tmp_path / "runs" / "a-run-with-a-name-of-quite-some-length-and-more"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("task: sft\n")
    shown = record("runs", "runs", cwd=tmp_path, columns=columns, PATH="")
    head, line = [line for line in shown.lines if line.strip()]
    assert head.split()[:2] == ["RUN", "STATUS"] and ("MODEL" in head) == (columns == 200)
    assert (run.name in line or columns == 40) and line.split()[0].endswith(run.name[-15:]), shown.shown
    shown.check_unbroken()


@pytest.mark.parametrize("columns", [40, 120])
def test_the_table_of_verify_has_whole_numbers_at_any_width(columns: int) -> None:
    exact = {"step": 1, "tokens": 8, "target_tokens": 4, "learning_rate": 1e-3}
    one = {**exact, "loss": 5.558542, "grad_norm": 1.25}
    terminal = Terminal(columns)
    with stream(terminal) as opened:
        Comparison(("single", "ddp x 2"), ((one, {**one, "grad_norm": 1.250001}),), 1e-5).show(opened)
    shown = lines(terminal.close())
    assert sum(line.count("5.558542") for line in shown) == 2 and any("1.250001" in line for line in shown)
    whole(shown, columns)
    assert "…" not in "".join(shown) and ("  gradient norm ddp x 2" in "\n".join(shown)) == (columns == 40)


@pytest.mark.slow
def test_the_start_of_a_command_is_announced(tmp_path: Path) -> None:
    found = record("plan", str(TINY), ON_ROWS, cwd=tmp_path, announcing=True, TRAINWRIGHT_CACHE=str(tmp_path / "cache"))
    assert found.code == 0, found.shown
    assert "starting … 0:0" in found.written and "planning … 0:0" in found.written
    found.check_unbroken()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
def test_every_phase_of_a_run_is_announced(tmp_path: Path, columns: int) -> None:
    """With an empty cache: nothing is silent for more than a tenth of the time, however fast the machine is."""
    run = ["train", str(TINY), ON_ROWS, "train.max_steps=4", "logging.run_directory=run", "parallel.num_processes=2"]
    found = record(*run, cwd=tmp_path, columns=columns, announcing=True, TRAINWRIGHT_CACHE=str(tmp_path / "cache"))
    assert found.code == 0, found.shown
    for phase in ("starting", "planning", "importing torch", "reading and tokenizing", "initializing the model"):
        assert f"{phase}" in found.written, phase
    assert "trainwright generate run" in found.shown
    found.check_unbroken()
    found.check_announced(most=_SILENT)


@pytest.mark.slow
def test_what_the_ranks_do_is_beside_the_bar_of_a_run(tmp_path: Path) -> None:
    def stop(process: subprocess.Popen[bytes], written: str) -> None:
        if re.search(FIGURES, written[-1000:]):
            (tmp_path / "run" / "stop").touch()

    settings = ["train.max_steps=9000", "train.compile=false", "logging.run_directory=run", "parallel.num_processes=2"]
    cache = {"TRAINWRIGHT_CACHE": str(tmp_path / "cache")}
    found = record("train", str(TINY), ON_ROWS, *settings, cwd=tmp_path, columns=90, while_running=stop, **cache)
    assert found.code == 75 and re.search(FIGURES, found.written), found.shown


@pytest.mark.slow
def test_after_a_resume_the_summary_is_about_the_whole_run(tmp_path: Path) -> None:
    cache = {"TRAINWRIGHT_CACHE": str(tmp_path / "cache")}
    run = ["train", str(TINY), ON_ROWS, "train.max_steps=6", "evaluate.every=2", "logging.run_directory=run"]
    first = record(*run, "--until", "step 2", cwd=tmp_path, columns=40, **cache)
    assert first.code == 75, first.shown
    assert any(line.endswith("trainwright train --resume run") for line in first.lines)
    again = record("train", "--resume", "run", cwd=tmp_path, columns=80, **cache)
    assert again.code == 0, again.shown
    before = re.search(r"step 0: validation  loss (\S+)", first.shown)
    assert before and re.search(rf"  loss +{re.escape(before[1])} -> ", again.shown), again.shown
    assert re.search(r"finished at step 6 after \S+, \S+ of it since it was resumed at step 2", again.shown)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of an adapter, `run`, and the cache of all."""
    directory = tmp_path_factory.mktemp("adapted")
    settings = ["train.max_steps=2", "model.adapter={type: lora, rank: 2}", "logging.run_directory=run"]
    found = record("train", str(TINY), ON_ROWS, *settings, cwd=directory, TRAINWRIGHT_CACHE=str(directory / "cache"))
    assert found.code == 0, found.shown
    return directory


SWEPT = ("train.max_steps=2", "parallel.num_processes=1", "--over", "train.seed=1", "--out", "swept")
LONG = {
    "merge": (("merge", "run", "--out", "merged"), "reading the model", "logits differ from those of"),
    "ablate": (("ablate", str(TINY), ON_ROWS, *SWEPT), "planning", "seed=1"),
    "drill": (
        ("drill", str(TINY), ON_ROWS, "--tries", "1", "--strategies", "single", "--processes", "1"),
        "training once without a fault",
        "held",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", LONG)
def test_commands_that_take_long_say_what_they_do(adapted: Path, tmp_path: Path, name: str, columns: int) -> None:
    command, phase, said = LONG[name]
    (tmp_path / "run").symlink_to(adapted / "run")
    cache = str(adapted / "cache")
    found = record(*command, cwd=tmp_path, columns=columns, announcing=True, TRAINWRIGHT_CACHE=cache)
    assert found.code == 0, found.shown
    assert f"{phase} … 0:0" in found.written and said in found.shown
    found.check_unbroken()
    found.check_announced(most=_SILENT)


@pytest.mark.slow
def test_submit_prints_a_file_that_no_terminal_breaks(adapted: Path, tmp_path: Path) -> None:
    command = ("submit", str(TINY), ON_ROWS, "--to", "slurm", "--time", "1h", "--print")
    found = record(*command, cwd=tmp_path, columns=40, TRAINWRIGHT_CACHE=str(adapted / "cache"))
    assert found.code == 0 and "#SBATCH --time=1:00:00" in found.lines
    script = tmp_path / "job.sh"
    script.write_text(found.shown)
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert any(line.startswith("srun ") and len(line) > 200 for line in found.lines)


@pytest.mark.slow
def test_watch_prints_its_address_whole_and_ends_quietly(adapted: Path) -> None:
    pytest.importorskip("starlette")

    def interrupt(process: subprocess.Popen[bytes], written: str) -> None:
        if re.search(r"http://\S+\s", written):
            process.send_signal(signal.SIGINT)

    found = record("watch", ".", cwd=adapted, columns=40, while_running=interrupt)
    assert found.code == -signal.SIGINT and found.lines[-2:] == ["trainwright watch: interrupted", ""], found.shown
    (address,) = (line for line in found.lines if "http://" in line)
    assert re.search(r"http://127\.0\.0\.1:\d+/\?token=\S{20,}$", address)


def test_a_comparison_of_plans_fits_80_columns(tmp_path: Path) -> None:
    """A row of figures for each candidate, and the verdict below it."""
    found = record("plan", str(TINY), "--on", "4xA100-80GB", "--compare", cwd=tmp_path, columns=80)
    assert found.code == 0, found.shown
    found.check_unbroken()
    head = next(index for index, line in enumerate(found.lines) if line.startswith("strategy"))
    table = found.lines[head:]
    assert table[0].split()[-4:] == ["needed", "step", "tokens/s", "MFU"]
    assert table[1].startswith("*ddp") and table[2].strip() == "chosen"
    assert all(len(line) <= 80 for line in table)
