"""The page of benchmarks says what the files of results say, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT

RESULTS = ROOT / "bench" / "results"


def _copy(tmp_path: Path) -> Path:
    """A copy of what the page is made from and of the page."""
    for part in ("bench/results", "bench/support", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "bench" / "report.py", tmp_path / "bench" / "report.py")
    return tmp_path


def _report(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_committed_page_is_the_generated_one() -> None:
    checked = _report(ROOT, "--check")
    assert checked.returncode == 0, checked.stderr


def test_another_figure_in_the_results_is_noticed_and_written(tmp_path: Path) -> None:
    root = _copy(tmp_path)
    file = root / "bench" / "results" / "unlearn_vs_plain.json"
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results | {"times_as_fast": 9.87}))

    checked = _report(root, "--check")
    assert checked.returncode == 1
    assert "docs/benchmarks.md" in checked.stderr
    assert _report(root).returncode == 0
    assert "9.87 times" in (root / "docs" / "benchmarks.md").read_text()
    assert _report(root, "--check").returncode == 0


def test_every_file_of_results_is_on_the_page() -> None:
    sources = [ROOT / "bench" / "report.py", *(ROOT / "bench" / "support").glob("*_tables.py")]
    source = "".join(file.read_text() for file in sources)
    names = {f"engine_overhead_{strategy}" for strategy in ("single", "ddp", "fsdp")}
    names |= {
        f"plan_{what}_cpu_{seed}" for what, seeds in (("accuracy", (0, 1, 66)), ("memory", (2, 3))) for seed in seeds
    }
    names |= {f"plan_accuracy_gpu_{seed}" for seed in range(3)}
    names |= {f"in_context_cache_{kind}" for kind in ("full", "region")}
    names |= {f"in_context_learning_{name}" for name in re.findall(r'^    "([a-z-]+)": "', source, re.M)}
    names |= set(re.findall(r'\bread\("(\w+)"\)', source)) | {"adapters", "adapters_full_packs", "faults"}
    assert {file.stem for file in RESULTS.iterdir()} <= names


def test_every_section_of_the_recorded_figures_is_shown() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    figures = json.loads((RESULTS / "recorded.json").read_text())["figures"]
    assert [each["what"] for each in figures if f"| {each['what']} | {each['target']} | " not in page] == []
    assert [each["command"] for each in figures if f"`{each['command']}`" not in page] == []
