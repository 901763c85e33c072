"""``trainwright unlearn-study``: what it refuses at once, and a very small study from beginning to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from tests.inference.evaluation.unlearning.benchmark import write_tofu
from tests.support.commands import ROOT
from tests.support.runs import Runs
from tests.support.unlearning import write_rows as write_rows_of_ones_own
from trainwright.cli.models import show
from trainwright.errors import RequestError
from trainwright.tasks.unlearn.evaluation.study_file import Results, draw, list_requests, load_study, write_rows

STUDY = """\
benchmark: {benchmark}
known: [world_facts]
subset: {{forget: 2}}
tokenizer_vocabulary: 300
directory: study
model:
  config: {{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 2, max_position_embeddings: 128}}
parallel: {{strategy: ddp, num_processes: 2}}
finetune:
  data: {{max_length: 64}}
  optimizer: {{learning_rate: 1e-2}}
  train: {{max_steps: 6, global_batch_size: 4, mixed_precision: "no", compile: false}}
  logging: {{observers: {{tensorboard: false}}}}
unlearn:
  data: {{max_length: 64}}
  train: {{max_steps: 2, global_batch_size: 2, mixed_precision: "no", compile: false}}
  logging: {{observers: {{tensorboard: false}}}}
objectives:
  npo: {{}}
  steep: {{unlearn: {{objective: grad_ascent}}, optimizer: {{learning_rate: 1e-3}}}}
evaluate: {{metrics: [answer_probability, truth_ratio, forget_quality, model_utility], max_new_tokens: 4}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.format(benchmark=write_tofu(tmp_path / "rows")))
    return file


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_recipes_are_put_together(study: Path) -> None:
    read = load_study(study, ["unlearn.train.max_steps=5", "objectives.npo={unlearn: {beta: 0.2}}"])
    kept = read.build_finetuning_recipe("retain.jsonl", "full.jsonl")
    assert "task: sft" in kept and "train: retain.jsonl" in kept and "tokenizer: bpe:300:full.jsonl" in kept
    npo = read.build_unlearning_recipe("npo", Path("runs/full/final"), {"forget": "f.jsonl", "retain": "r.jsonl"})
    for part in ("name: runs/full/final", "forget: f.jsonl", "beta: 0.2", "max_steps: 5", "num_processes: 2"):
        assert part in npo
    with_adapter = load_study(study, ["unlearn.model={adapter: lora}"])
    assert "type: lora" in with_adapter.build_unlearning_recipe(
        "npo", Path("full"), {"forget": "f.jsonl", "retain": "r.jsonl"}
    )
    assert "type: lora" not in with_adapter.build_finetuning_recipe("retain.jsonl", "full.jsonl")
    steep = read.build_unlearning_recipe("steep", Path("runs/full/final"), {"forget": "f.jsonl"})
    assert "objective: grad_ascent" in steep and "learning_rate: 0.001" in steep


def test_the_full_model_is_no_adapter(study: Path) -> None:
    read = load_study(study, ["model.adapter=lora"])
    with pytest.raises(RequestError, match=r"'model\.adapter=lora': model\.adapter: unlearning starts from the full"):
        read.build_finetuning_recipe("retain.jsonl", "full.jsonl")


def test_of_several_places_the_first_that_is_there_is_taken(study: Path, tmp_path: Path) -> None:
    here = f"tofu:forget01@{tmp_path / 'rows'}"
    assert (
        load_study(study, [f"benchmark=[tofu:forget01@{tmp_path / 'no'}, '{here}', tofu:forget10]"]).benchmark.name
        == here
    )
    nowhere = load_study(study, [f"benchmark=[tofu:forget01@{tmp_path / 'no'}, tofu:forget01]"])
    assert nowhere.benchmark.sets["forget"].source == "locuslab/TOFU:forget01_perturbed:train"
    with pytest.raises(RequestError, match=r"benchmark: no such directory .*no; after the @, give the directory"):
        load_study(study, [f"benchmark=tofu:forget01@{tmp_path / 'no'}"]).benchmark  # noqa: B018


def test_rows_of_a_study(study: Path, tmp_path: Path) -> None:
    read = load_study(study)
    found = write_rows(read.study, read.benchmark, tmp_path / "written")
    forget, retain, full = (rows(Path(found.training[name])) for name in ("forget", "retain", "full"))
    assert len(forget) == 2 and full == [*retain, *forget]
    facts = rows(tmp_path / "rows" / "world_facts_perturbed.jsonl")
    assert retain[-2:] == [{"question": row["question"], "answer": row["answer"]} for row in facts]
    assert len(rows(Path(found.sets["forget"].source))) == 2
    assert rows(Path(found.sets["retain"].source)) == rows(tmp_path / "rows" / "retain_perturbed.jsonl")


def test_a_subset_of_more_rows_than_there_are(study: Path, tmp_path: Path) -> None:
    read = load_study(study, ["subset={retain: 3, holdout: 5}"])
    with pytest.raises(RequestError, match=r"subset\.holdout: 5 rows requested, but the set has 3; lower it"):
        write_rows(read.study, read.benchmark, tmp_path / "written")
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("{forget: 2}", "{forget: none}", "study.yaml:3: subset.forget: "),
        ("learning_rate: 1e-3", "lerning_rate: 1e-3", "study.yaml:21: optimizer.lerning_rate: unknown key; did you"),
        ("grad_ascent", "grad_descent", "study.yaml:21: unlearn.objective: expected 'grad_ascent'"),
        ("npo: {}", "full: {}", "study.yaml:20: objectives.full: "),
    ],
)
def test_mistakes_are_named_with_their_place(study: Path, written: str, instead: str, said: str) -> None:
    study.write_text(study.read_text().replace(written, instead))
    with pytest.raises(RequestError) as caught:
        load_study(study).build_unlearning_recipe("steep", Path("full"), {"forget": "f.jsonl", "retain": "r.jsonl"})
    assert said in str(caught.value), str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("truthiness", "evaluate.metrics: unknown benchmark metric 'truthiness'; choose from answer_probability,"),
        ("choice_accuracy", "evaluate.metrics: choice_accuracy: the benchmark has no set choices"),
    ],
)
def test_a_metric_that_cannot_be_measured_is_refused_before_anything_is_trained(
    runs: Runs, study: Path, tmp_path: Path, metric: str, said: str
) -> None:
    ended = runs.command("unlearn-study", str(study), f"evaluate.metrics=[{metric}]", cwd=tmp_path).wait()
    assert ended.code == 2 and said in ended.stderr, ended.stderr
    assert not (tmp_path / "study" / "runs").exists()


def found(directory: Path, **metrics: dict[str, float]) -> Results:
    """Of a study in which every model has these metrics."""
    for name in ("full", "retain", "npo"):
        (directory / name).mkdir(parents=True)
        (directory / name / "metrics.json").write_text(json.dumps({"metrics": metrics}))
    return Results.read("muse:news", {}, directory, ["npo"])


def test_the_table_has_every_metric_that_was_measured(tmp_path: Path) -> None:
    on_both = {"forget": 0.25, "retain": 0.5, "holdout": 0.125}
    results = found(tmp_path, answer_probability=on_both, mia_loss={"forget": 0.75}, choice_accuracy={"choices": 0.5})
    first, *_ = results.to_markdown().splitlines()[2:]
    assert first == "| model | forget probability | retain probability | mia loss | choice accuracy, choices |"
    assert results.rows[2] == ["npo", "0.2500", "0.5000", "0.7500", "0.5000"]


def test_no_value_or_name_is_cut_however_many_models_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    models = {
        f"objective-{number}.{request}": {"mia_loss": {"forget": 1e-12}} for number in range(9) for request in (1, 2)
    }
    show(Results("tofu:forget05", {}, models))
    printed = capsys.readouterr().out
    assert all(name in printed for name in models) and printed.count("1.00e-12") == len(models)


@pytest.mark.parametrize(
    ("metrics", "plot"),
    [
        ({"forget_quality": {"forget": 0.0}, "model_utility": {"all": 0.5}}, "forget-quality.png"),
        ({"forget_quality": {"forget": math.nan}, "model_utility": {"all": 0.5}}, None),
        ({"knowledge_memorisation": {"forget": 0.1, "retain": 0.5}}, "forget-against-retain.png"),
        ({"answer_probability": {"forget": 0.1, "retain": 0.5}}, "forget-against-retain.png"),
        ({"answer_probability": {"forget": 0.1}}, None),
    ],
)
def test_the_plot_is_of_what_was_measured(
    tmp_path: Path, metrics: dict[str, dict[str, float]], plot: str | None
) -> None:
    assert draw([found(tmp_path, **metrics)], tmp_path) == plot
    assert [file.name for file in tmp_path.glob("*.png")] == ([] if plot is None else [plot])


def test_rows_to_be_forgotten_and_kept_are_refused_before_anything_is_trained(
    runs: Runs, study: Path, tmp_path: Path
) -> None:
    file = write_rows_of_ones_own(tmp_path).with_name("forget.jsonl")
    overrides = (f"benchmark='files@forget={file},retain={file}'", "known=[]", "subset=null", "evaluate.metrics=[]")
    ended = runs.command("unlearn-study", str(study), *overrides, cwd=tmp_path).wait()
    assert ended.code == 2 and "data.retain: 16 of its rows are also in data.forget" in ended.stderr, ended.stderr
    assert not (tmp_path / "study" / "runs").exists()


@pytest.mark.slow
def test_a_study_of_files_measures_what_they_allow(runs: Runs, study: Path, tmp_path: Path) -> None:
    rows = write_rows_of_ones_own(tmp_path).parent
    files = f"files@forget={rows / 'forget.jsonl'},retain={rows / 'retain.jsonl'}"
    overrides = (f"benchmark='{files}'", "known=[]", "subset=null", "evaluate.metrics=[]", "objectives={npo: {}}")
    ended = runs.command("unlearn-study", str(study), *overrides, cwd=tmp_path).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    made = tmp_path / "study"
    assert "forget-against-retain.png" in ended.stdout and (made / "forget-against-retain.png").is_file()
    assert "| forget knowledge |" in (made / "results.md").read_text()


@pytest.mark.parametrize("name", ["tofu", "muse"])
def test_grids_of_published_models_have_recipes_for_every_split(name: str) -> None:
    splits = load_study(ROOT / "recipes" / "unlearn" / f"{name}-grid.yaml").splits()
    assert len({each.study.directory for each in splits.values()}) == len(splits) >= 3
    for each in splits.values():
        assert each.study.full and each.study.retain
        training = each.benchmark.training
        text = each.build_unlearning_recipe(
            "npo", Path(each.study.full), {part: training[part] for part in ("forget", "retain")}
        )
        assert f"name: {each.study.full}" in text


def test_splits_are_studies_with_the_keys_that_differ(study: Path, tmp_path: Path) -> None:
    splits = "splits={one: {}, two: {full: some/model, subset: null, unlearn: {optimizer: {name: sgd}}}}"
    found = load_study(study, [splits]).splits()
    assert [(name, each.study.directory) for name, each in found.items()] == [
        ("one", "study/one"),
        ("two", "study/two"),
    ]
    assert found["one"].study.subset == {"forget": 2} and found["two"].study.subset == {}
    assert (found["one"].study.full, found["two"].study.full) == (None, "some/model")
    study.write_text(study.read_text() + "splits: {one: {fulll: a}}\n")
    with pytest.raises(RequestError, match=r"study\.yaml:\d+: fulll: unknown key"):
        load_study(study)


@pytest.mark.parametrize("kind", ["sequential", "growing"])
def test_requests_are_parts_of_the_rows_to_forget(study: Path, tmp_path: Path, kind: str) -> None:
    read = load_study(study, [f"{kind}=3", "subset=null"])
    written = write_rows(read.study, read.benchmark, tmp_path / "written")
    forget = rows(Path(written.training["forget"]))
    parts = [rows(Path(source)) for source in list_requests(read.study, tmp_path / "written")]
    assert len(forget) == 3
    assert parts == ([[row] for row in forget] if kind == "sequential" else [forget[:end] for end in (1, 2, 3)])


def test_requests_of_sources_are_used_as_they_are(study: Path, tmp_path: Path) -> None:
    read = load_study(study, ["growing=[a.jsonl, some/set:scal:forget_2]"])
    assert list_requests(read.study, tmp_path) == ["a.jsonl", "some/set:scal:forget_2"]
    with pytest.raises(RequestError, match=r"study\.yaml: sequential and growing: set one of the two"):
        load_study(study, ["growing=2", "sequential=2"])
    with pytest.raises(RequestError, match=r"'growing=0': growing: expected a number of at least 2 or a list, not 0$"):
        load_study(study, ["growing=0"])
    with pytest.raises(RequestError, match="sequential: each request starts from the full weights"):
        adapted = load_study(study, ["sequential=2", "unlearn.model={adapter: lora}"])
        adapted.build_unlearning_recipe("npo", Path("full"), {"forget": "f.jsonl", "retain": "r.jsonl"})


def test_models_that_are_named_are_not_trained(study: Path) -> None:
    read = load_study(
        study, ["full=some/full", "retain=some/retain", "model={config: null, tokenizer: some/tokenizer}"]
    )
    recipe = read.build_unlearning_recipe("npo", Path("some/full"), {"forget": "f.jsonl", "retain": "r.jsonl"})
    assert "name: some/full" in recipe and "tokenizer: some/tokenizer" in recipe


@pytest.mark.slow
def test_one_request_after_another_starts_from_the_result_before(runs: Runs, study: Path, tmp_path: Path) -> None:
    study.write_text("".join(line for line in study.read_text().splitlines(True) if "steep" not in line))
    splits = "splits={after: {sequential: 2}, larger: {growing: 2}}"
    ended = runs.command("unlearn-study", str(study), splits, cwd=tmp_path).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    made = tmp_path / "study"
    found = json.loads((made / "results.json").read_text())["models"]
    names = ("full", "retain", "npo.1", "npo.2")
    assert list(found) == [f"{split} {name}" for split in ("after", "larger") for name in names]
    assert all("forget_quality" in found[f"{split} npo.2"] for split in ("after", "larger"))
    assert (made / "forget-quality.png").read_bytes().startswith(b"\x89PNG")

    def start(split: str, name: str) -> str:
        return yaml.safe_load((made / split / "asked" / f"{name}.yaml").read_text())["model"]["name"]

    assert start("after", "npo.2") == str(made / "after" / "runs" / "npo.1" / "final")
    assert start("larger", "npo.2") == str(made / "larger" / "runs" / "full" / "final")
    own = (f"full={made / 'after' / 'runs' / 'full'}/final", f"retain={made / 'after' / 'runs' / 'retain'}/final")
    given = (*own, "model={config: null}", "tokenizer_vocabulary=null", "directory=given")
    again = runs.command("unlearn-study", str(study), *given, cwd=tmp_path).wait()
    assert again.code == 0, again.stdout + again.stderr
    assert [run.name for run in (tmp_path / "given" / "runs").iterdir()] == ["npo"]
    same = json.loads((tmp_path / "given" / "results.json").read_text())["models"]["retain"]
    assert same == found["after retain"]


@pytest.mark.slow
def test_a_study_from_beginning_to_end(runs: Runs, study: Path, tmp_path: Path) -> None:
    ended = runs.command("unlearn-study", str(study), cwd=tmp_path).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    made = tmp_path / "study"
    found = json.loads((made / "results.json").read_text())["models"]
    assert list(found) == ["full", "retain", "npo", "steep"]
    assert "forget_quality" not in found["retain"] and 0 <= found["npo"]["forget_quality"]["forget"] <= 1
    table = (made / "results.md").read_text()
    assert "| full |" in table and "| forget quality |" in table
    assert (made / "forget-quality.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "runs" / "npo" / "final" / "config.json").is_file()
    before = {file: file.stat().st_mtime_ns for file in (made / "runs").rglob("*") if file.is_file()}
    (made / "evaluations" / "npo").rename(tmp_path / "away")
    again = runs.command("unlearn-study", str(study), cwd=tmp_path).wait()
    assert again.code == 0 and "trains" not in again.stdout and "measures npo" in again.stdout
    assert before == {file: file.stat().st_mtime_ns for file in (made / "runs").rglob("*") if file.is_file()}
    assert json.loads((made / "results.json").read_text())["models"] == found
    other = runs.command("unlearn-study", str(study), "unlearn.train.max_steps=3", cwd=tmp_path).wait()
    assert other.code == 2 and "npo.yaml was made with the settings in" in other.stderr
