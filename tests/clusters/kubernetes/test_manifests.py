"""Manifests of Kubernetes: what the pods run, what starts them again, what is refused; by published schemas."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import trainwright as tw
from tests.support.packages import environment_with
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


def manifests(*overrides: str, **options: Any) -> list[dict[str, Any]]:
    made = tw.submit("r.yaml", ON_ROWS, *overrides, to="pods", dry_run=True, **options)
    assert made.job is None and not Path("runs").exists()
    return list(yaml.safe_load_all(made.script))


def manifest(*overrides: str, **options: Any) -> dict[str, Any]:
    (found,) = manifests(*overrides, **options)
    return found


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong by the schema of the project that has this kind; see make_schemas.py."""
    schemas = json.loads((Path(__file__).parent / "crds.json").read_text())
    schema = {**schemas[f"{found['apiVersion']}/{found['kind']}"], "$defs": schemas["$defs"]}
    return [f"{each.json_path}: {each.message}" for each in Draft202012Validator(schema).iter_errors(found)]


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
    assert container["args"][:4] == [f"{here}/runs/Big_run", "--node-rank", "$(JOB_COMPLETION_INDEX)", "--"]
    assert container["args"][-9:-1] == [
        *("--resume", "auto", "--nodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)"),
        *("--rendezvous", "big-run-node-0-0.big-run:29400"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "pytorchjob"])
def test_a_pod_waits_long_for_those_that_have_no_node_yet(kind: str) -> None:
    """Unless the run may begin without them."""

    option = "--rendezvous-timeout="

    def seconds(*overrides: str, nodes: int) -> list[list[int]]:
        pods = [each["args"] for each in _containers(manifests(*overrides, manifest=kind, nodes=nodes))]
        return [[int(arg.removeprefix(option)) for arg in args if arg.startswith(option)] for args in pods]

    found = seconds(nodes=2)
    assert found and all(each and each[0] >= 24 * 3600 for each in found)
    assert not any(seconds("parallel.num_processes={min: 1, max: 2}", nodes=2)) and not any(seconds(nodes=1))


def _containers(found: Any) -> Iterator[dict[str, Any]]:
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _containers(each)
    if isinstance(found, dict) and "containers" in found:
        yield from found["containers"]


def test_pods_have_the_gpus_of_the_machine_that_is_planned_for(here: Path) -> None:
    describe(here, here, ", machine: 8xH100")
    (container,) = job_of(manifest(nodes=2))["template"]["spec"]["containers"]
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
    with pytest.raises(RequestError, match="--partition: is for slurm, and kubernetes has no such"):
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


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "pytorchjob"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_manifests_are_valid_by_the_projects_schemas(kind: str, nodes: int, here: Path) -> None:
    more = ", node_labels: {cloud.google.com/gke-spot: 'true'}, grace: 5 min"
    describe(here, here, more)
    for found in manifests(manifest=kind, nodes=nodes, gpus_per_node=8, cpus_per_node=4, time="1 h", name="x.y_z"):
        assert problems(found) == []
        found["spec"]["unknown"] = 1
        found["metadata"] = None
        assert len(problems(found)) == 2


def test_a_trainjob_comes_with_the_runtime_that_it_names() -> None:
    runtime, job = manifests(manifest="trainjob", nodes=2, time="1 h")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == job["metadata"]["name"]
    assert (job["spec"]["runtimeRef"]["kind"], job["spec"]["trainer"]["numNodes"]) == (runtime["kind"], 2)
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    (rule,) = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert container["name"] == rule["onExitCodes"]["containerName"] == "node"


def test_a_pytorchjob_retries_by_codes_from_128_on() -> None:
    replicas = manifest(manifest="pytorchjob", nodes=3, name="p")["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 2}
    for each in replicas.values():
        (container,) = each["template"]["spec"]["containers"]
        assert (each["restartPolicy"], container["name"]) == ("ExitCode", "pytorch")
        assert container["command"][:3] == ["python", "-P", "-m"]
        assert container["args"][1:5] == ["--node-rank", "$(RANK)", "--add", "128"]
        assert container["args"][-4:-1] == ["$(RANK)", "--rendezvous", "p-master-0:29400"]


def test_the_run_knows_the_grace_of_its_pod_and_spot_nodes_are_chosen(here: Path) -> None:
    describe(here, here, ", grace: 5 min, node_labels: {spot: 'true'}")
    pod = job_of(manifest())["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    assert {"name": "TRAINWRIGHT_GRACE_SECONDS", "value": "300"} in pod["containers"][0]["env"]
    assert pod["nodeSelector"] == {"spot": "true"} and pod["tolerations"] == [{"key": "spot", "operator": "Exists"}]


def test_an_unknown_kind_of_manifest_is_refused() -> None:
    with pytest.raises(RequestError, match=r"--manifest: expected .*'jobset', 'trainjob' or 'pytorchjob'"):
        manifest(manifest="job")


@pytest.mark.slow  # needs packages that are no dependency
def test_the_manifests_are_valid_by_the_projects_own_packages(here: Path) -> None:
    """Kubeflow's models drop what they do not know, so what they read is compared."""
    python = environment_with(here / "venv", "kubeflow_trainer_api", "kubernetes-validate")
    runtime, job = manifests(manifest="trainjob", nodes=2, gpus_per_node=8)
    jobset = manifest(nodes=2, gpus_per_node=8)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    core = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
    pod = manifest(manifest="pytorchjob")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    core_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
    (here / "all.json").write_text(json.dumps([jobset, runtime, job, core, core_pod]))
    (here / "check.py").write_text(
        "import json\n"
        "import kubernetes_validate\n"
        "from kubeflow_trainer_api import models\n"
        "jobset, runtime, job, *core = json.load(open('all.json'))\n"
        "for kind, found in (('JobsetV1alpha2JobSet', jobset), ('TrainerV1alpha1TrainingRuntime', runtime),\n"
        "                    ('TrainerV1alpha1TrainJob', job)):\n"
        "    assert getattr(models, kind).from_dict(found).to_dict() == found, kind\n"
        "for each in core:\n"
        "    kubernetes_validate.validate(each, '1.37', strict=True)\n"
    )
    done = subprocess.run([python, "check.py"], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
