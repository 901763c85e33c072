"""Manifests of JobSets: what the pods run, what starts them again, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import trainwright as tw
from tests.support.runs import ON_ROWS, TINY
from trainwright.errors import RequestError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    describe(tmp_path, tmp_path)
    (tmp_path / "r.yaml").write_text(f"include: {TINY}\n")
    return tmp_path


def describe(here: Path, mount: Path, more: str = "") -> None:
    file = here / "config" / "trainwright" / "clusters.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"pods: {{scheduler: kubernetes, image: own, claim: shared, mount: {mount}{more}}}\n")


def manifest(*overrides: str, **options: Any) -> dict[str, Any]:
    made = tw.submit("r.yaml", ON_ROWS, *overrides, to="pods", dry_run=True, **options)
    assert made.job is None and not Path("runs").exists()
    return dict(yaml.safe_load(made.script))


def job_of(found: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = found["spec"]["replicatedJobs"]
    return dict(replicated["template"]["spec"])


def test_each_node_is_a_pod_that_meets_the_others_at_the_first(here: Path) -> None:
    found = manifest(nodes=2, gpus_per_node=8, name="Big_run", time="1 h")
    job = job_of(found)
    assert found["metadata"]["name"] == "big-run"
    assert found["metadata"]["annotations"] == {"trainwright/run": f"{here}/runs/Big_run"}
    assert (job["parallelism"], job["completions"], job["activeDeadlineSeconds"]) == (2, 2, 3600)
    (container,) = job["template"]["spec"]["containers"]
    assert container["args"][-8:] == [
        *("--resume", "auto", "--nodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)"),
        *("--rendezvous", "big-run-node-0-0.big-run:29400"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_pods_start_again_unless_the_run_would_fail_again() -> None:
    found = manifest()
    (rule,) = job_of(found)["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 3, 4])
    policy = found["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0 and policy["rules"][0]["action"] == "FailJobSet"


def test_kubernetes_replaces_nothing_that_an_override_says() -> None:
    prompt = "evaluate.prompts=['$(A) $$(B)']"
    (container,) = job_of(manifest(prompt))["template"]["spec"]["containers"]
    assert "evaluate.prompts=['$$(A) $$$$(B)']" in container["args"]


def test_what_pods_cannot_have_is_refused(here: Path) -> None:
    with pytest.raises(RequestError, match="partition: is for Slurm"):
        manifest(partition="gpu")
    with pytest.raises(RequestError, match="not a plain name"):
        manifest(name="a b$(touch x)")
    with pytest.raises(RequestError, match="--print"):
        tw.submit("r.yaml", ON_ROWS, to="pods")
    with pytest.raises(RequestError, match="image: is missing"):
        tw.submit("r.yaml", ON_ROWS, to="kubernetes", dry_run=True)
    describe(here, here / "elsewhere")
    with pytest.raises(RequestError, match="shared volume"):
        manifest()


@pytest.mark.slow  # needs the models of Kubeflow, which are no dependency
def test_the_manifest_is_valid_by_the_models_of_kubeflow() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    found = manifest(nodes=2, gpus_per_node=8)
    assert models.JobsetV1alpha2JobSet.from_dict(found).to_dict() == found
