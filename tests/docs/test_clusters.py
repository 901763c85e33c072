"""The clusters and commands of the guides to Kubernetes and spot instances: each page with its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.docs.doc_commands import commands_of
from tests.support.commands import ROOT, trainwright


@pytest.mark.slow
@pytest.mark.parametrize(("page", "files"), [("kubernetes", 3), ("spot", 5)])
def test_a_pages_jobs_are_written_by_its_commands(page: str, files: int, tmp_path: Path) -> None:
    guide = ROOT / "docs" / f"{page}.md"
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    clusters = tmp_path / "config" / "trainwright" / "clusters.yaml"
    clusters.parent.mkdir(parents=True)
    described = "".join(re.findall(r"^```yaml\n(.*?)^```", guide.read_text(), re.M | re.S))
    clusters.write_text(described.replace("/shared", str(tmp_path)))
    assert yaml.safe_load(described)
    written = [each for each in commands_of(guide) if each.words[1] == "submit" and "--print" in each.words]
    assert len(written) == files
    for command in written:
        done = trainwright(*command.words[1:], cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path / "config"))
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert "recipes/sft/tiny.yaml" in done.stdout
        if "ray" in command.words:
            compile(done.stdout, "job.py", "exec")
        elif "slurm" not in command.words:
            assert all(isinstance(each, dict) for each in yaml.safe_load_all(done.stdout))
