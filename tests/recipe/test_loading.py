"""A recipe is what its file, the files it includes and the overrides say, and dumps to the same recipe."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from trainwright.errors import RequestError
from trainwright.recipe.loading import dump_recipe, load_recipe, load_with_origins
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.unlearn.evaluation.study_file import load_study

STUDY = Path(__file__).parents[2] / "recipes" / "unlearn" / "tofu-tiny.yaml"
STUDIES = {STUDY, *STUDY.parent.glob("*-grid.yaml")}
READY = sorted({*(Path(__file__).parents[2] / "recipes").rglob("*.yaml")} - STUDIES)
SMALLEST = "task: sft\nmodel: {name: some/model}\ndata: {train: pydoc}\n"
AWKWARD = ["no", "null", "1e5", "2e-4", "12", "1:30", "2026-11-21", " spaced ", "a: b", "# c", "é ✓", "!tag"]
AWKWARD += ["'", '"', "&a", "*a", "-", "two\nlines", "line\n", "\nline", "  two\n lines ", "tab\there"]
AWKWARD += ["\n", "a\n\n", "a\n  b\n\n\n", " \n\n"]
AWKWARD += ["x " * 200, "\u2028", "\x07"]

Write = Callable[..., Path]


def test_the_smallest_recipe_gets_the_defaults(write: Write) -> None:
    recipe = load_recipe(write(SMALLEST))
    assert recipe.task == "sft"
    assert recipe.model.adapter.type == "none"
    assert recipe.data.validation == 0.05
    assert recipe.optimizer.betas == (0.9, 0.999)
    assert recipe.train.epochs == 1.0 and recipe.train.max_steps is None
    assert recipe.train.micro_batch_size == "auto"
    assert recipe.parallel.strategy == "auto"
    assert recipe.logging.run_directory == "auto"


def test_steps_take_the_place_of_the_one_epoch(write: Write) -> None:
    recipe = load_recipe(write(SMALLEST + "train: {max_steps: 10}\n"))
    assert (recipe.train.max_steps, recipe.train.epochs) == (10, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("2E-4", 2e-4),
        ("2.0e-4", 2e-4),
        (".5e-3", 5e-4),
        ("1.e-3", 1e-3),
        ("1e+0", 1.0),
        ("0.001", 1e-3),
        ("1", 1.0),
        ("'2e-4'", 2e-4),
    ],
)
def test_numbers_are_read_as_written(write: Write, text: str, value: float) -> None:
    path = write(SMALLEST + f"optimizer: {{learning_rate: {text}}}\n")
    assert load_recipe(path).optimizer.learning_rate == value
    assert load_recipe(write(SMALLEST), [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == value


def test_numbers_inside_a_model_config_are_numbers_too(write: Write) -> None:
    path = write("""
        task: sft
        model: {config: {model_type: llama, rms_norm_eps: 1e-5, vocab_size: 1_000}, tokenizer: bytes}
        data: {train: pydoc}
        """)
    recipe = load_recipe(path, ["model.config.rope_theta=1e4", "model.config.hidden_size=0064"])
    assert recipe.model.config == {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "vocab_size": 1000,
        "rope_theta": 1e4,
        "hidden_size": 64,
    }


def test_no_is_the_word_and_yes_or_no_are_still_truth_values_where_those_are_wanted(write: Write) -> None:
    recipe = load_recipe(
        write(SMALLEST + "train: {mixed_precision: no, compile: no}\nlogging: {observers: {tensorboard: yes}}\n")
    )
    assert recipe.train.mixed_precision == "no"
    assert recipe.train.compile is False
    assert recipe.logging.observers["tensorboard"] is True


def test_text_that_looks_like_a_date_or_a_time_stays_text(write: Write) -> None:
    recipe = load_recipe(write(SMALLEST), ["logging.run_directory=2026-11-21", "data.validation=12:30"])
    assert (recipe.logging.run_directory, recipe.data.validation) == ("2026-11-21", "12:30")


def test_overrides_win_in_their_order_and_are_yaml(write: Write) -> None:
    path = write(SMALLEST + "train: {max_steps: 10, seed: 1}\n")
    overrides = ["train.max_steps=20", "train.max_steps=30", "evaluate.prompts=[a b, 'c=d']", "train.seed=2"]
    recipe = load_recipe(path, overrides)
    assert recipe.train.max_steps == 30
    assert recipe.evaluate.prompts == ["a b", "c=d"]
    assert recipe.train.seed == 2


def test_an_override_with_a_mapping_merges_and_null_takes_away(write: Write) -> None:
    path = write(SMALLEST + "train: {max_steps: 10, seed: 1}\n")
    recipe = load_recipe(path, ["train={max_steps: null, epochs: 2}", "data.validation=null"])
    assert (recipe.train.max_steps, recipe.train.epochs, recipe.train.seed) == (None, 2.0, 1)
    assert recipe.data.validation is None


def test_an_override_replaces_the_whole_value_of_its_key_and_one_inside_of_it_that_alone(write: Write) -> None:
    write("model: {config: {model_type: llama, hidden_size: 8, vocab_size: 9}, tokenizer: bytes}\n", "base.yaml")
    path = write("include: base.yaml\ntask: sft\nmodel: {config: {vocab_size: 7}}\ndata: {train: pydoc}\n")
    assert load_recipe(path).model.config == {"model_type": "llama", "hidden_size": 8, "vocab_size": 7}
    for override in ("model.config={model_type: gpt2, n_embd: 4}", "model={config: {model_type: gpt2, n_embd: 4}}"):
        model = load_recipe(path, [override]).model
        assert (model.config, model.tokenizer) == ({"model_type": "gpt2", "n_embd": 4}, "bytes")
        more = load_recipe(path, [override, "model.config.n_embd=5", "model.config.n_layer=2"]).model
        assert more.config == {"model_type": "gpt2", "n_embd": 5, "n_layer": 2}
    loaded = load_with_origins(path, ["model.config={model_type: gpt2}"])
    assert ("model", "config", "hidden_size") not in loaded.origins


def test_a_section_with_all_keys_commented_out_has_its_defaults(write: Write) -> None:
    recipe = load_recipe(write(SMALLEST + "optimizer:\n  # learning_rate: 1\ntrain:\n"))
    assert recipe.optimizer.learning_rate == 2e-5
    assert recipe.train.epochs == 1.0


def test_includes_merge_deep_and_the_later_file_wins(write: Write) -> None:
    write("train: {max_steps: 1, seed: 1, global_batch_size: 4}\ndata: {train: a.jsonl}\n", "shared/one.yaml")
    write("include: deeper/three.yaml\ntrain: {seed: 2}\n", "shared/two.yaml")
    write("optimizer: {learning_rate: 3e-3}\ntrain: {seed: 3, max_steps: 3}\n", "shared/deeper/three.yaml")
    path = write(
        """
        include: [../shared/one.yaml, ../shared/two.yaml]
        task: sft
        model: {name: some/model}
        train:
          global_batch_size: 8
        optimizer:
        """,
        "mine/run.yaml",
    )
    recipe = load_recipe(path)
    assert recipe.data.train == "a.jsonl"
    assert (recipe.train.max_steps, recipe.train.seed, recipe.train.global_batch_size) == (3, 2, 8)
    assert recipe.optimizer.learning_rate == 3e-3


def test_one_file_may_be_included_along_two_ways(write: Write) -> None:
    write(SMALLEST, "base.yaml")
    write("include: base.yaml\n", "left.yaml")
    write("include: base.yaml\n", "right.yaml")
    assert load_recipe(write("include: [left.yaml, right.yaml]\n")).data.train == "pydoc"


def test_a_value_that_is_the_default_may_be_written_where_it_has_no_effect(write: Write) -> None:
    path = write(SMALLEST + "evaluate: {max_new_tokens: 64, prompts: []}\ncheckpoint: {keep_best: false}\n")
    recipe = load_recipe(path, ["data.validation=null"])
    assert (recipe.evaluate.max_new_tokens, recipe.checkpoint.keep_best) == (64, False)
    assert load_recipe(write(SMALLEST), ["data.validation=null"]).checkpoint.keep_best == "auto"


def test_yaml_aliases_stand_for_their_values(write: Write) -> None:
    path = write(SMALLEST + "checkpoint: {every: &steps 5}\nevaluate: {every: *steps}\n")
    recipe = load_recipe(path)
    assert (recipe.checkpoint.every, recipe.evaluate.every) == (5, 5)


def test_the_accumulation_that_follows_from_the_other_sizes_may_be_written_out(write: Write) -> None:
    path = write(SMALLEST + "train: {global_batch_size: 8, micro_batch_size: 2}\n")
    for processes, steps in [(1, 4), (2, 2), (3, 2), (4, 1), (64, 1)]:
        recipe = load_recipe(
            path, [f"parallel.num_processes={processes}", f"train.gradient_accumulation_steps={steps}"]
        )
        assert recipe.train.gradient_accumulation_steps == steps


def test_packs_may_be_divided_into_a_fixed_number_of_micro_batches(write: Write) -> None:
    path = write(SMALLEST + "train: {global_batch_size: 8}\n")
    recipe = load_recipe(path, ["data.pack_length=2048", "train.gradient_accumulation_steps=3"])
    assert (recipe.train.gradient_accumulation_steps, recipe.train.micro_batch_size) == (3, "auto")


def test_a_study_is_no_recipe() -> None:
    assert load_study(STUDY, ["benchmark=tofu:forget05"]).build_unlearning_recipe(
        "npo", Path("full"), {"forget": "f", "retain": "r"}
    )
    with pytest.raises(RequestError, match="is an unlearning study, not a recipe; run trainwright unlearn-study"):
        load_recipe(STUDY)


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_ready_recipes_load(path: Path) -> None:
    task = {"cpt": "sft"}.get(path.parent.name, path.parent.name)  # continued pretraining is tuning on text
    assert load_recipe(path).task == task


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
def test_a_recipe_reaches_a_spawned_process_as_it_is(path: Path) -> None:
    loaded = load_recipe(path)
    assert pickle.loads(pickle.dumps(loaded)) == loaded


@pytest.mark.parametrize("path", READY, ids=lambda path: path.name)
@pytest.mark.parametrize("annotated", [False, True])
def test_a_dumped_recipe_is_the_same_recipe(write: Write, path: Path, annotated: bool) -> None:
    loaded = load_with_origins(path, ["train.seed=5"])
    text = dump_recipe(loaded.recipe, loaded.origins if annotated else None)
    assert load_recipe(write(text)) == loaded.recipe
    assert RecipeSchema.model_validate(yaml.safe_load(text)) == loaded.recipe  # any YAML reader reads the same


@pytest.mark.slow
@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
@pytest.mark.parametrize("annotated", [False, True])
def test_text_of_any_kind_survives_a_dump(write: Write, text: str, annotated: bool) -> None:
    recipe = RecipeSchema.model_validate(
        {
            "task": "sft",
            "model": {
                "config": {"model_type": "llama", "note": text, "id2label": {0: text}, "eps": 1e-05},
                "tokenizer": "bytes",
                "chat_template": text,
            },
            "data": {"train": "pydoc"},
            "evaluate": {"prompts": [text, text]},
        }
    )
    path = write("")
    path.write_text(dump_recipe(recipe, {} if annotated else None), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_floats_survive_a_dump_to_the_last_bit(write: Write) -> None:
    for value in (1e-300, 5e-324, 1.0000000000000002, math.pi * 1e22, 0.1 + 0.2):
        recipe = load_recipe(write(SMALLEST), [f"optimizer.learning_rate={value!r}"])
        assert load_recipe(write(dump_recipe(recipe))).optimizer.learning_rate == value


def test_an_annotated_dump_says_where_each_value_was_written(write: Write) -> None:
    write("train:\n  seed: 1\n  max_steps: 5\n", "base.yaml")
    loaded = load_with_origins(write("include: base.yaml\n" + SMALLEST + "train: {seed: 2}\n"), ["train.max_steps=7"])
    lines = [line.strip() for line in dump_recipe(loaded.recipe, loaded.origins).splitlines()]
    assert "seed: 2  # run.yaml:5" in lines
    assert "max_steps: 7  # override 'train.max_steps=7'" in lines
    assert "epochs: null  # default" in lines
    assert "task: sft  # run.yaml:2" in lines


def test_a_recipe_does_not_change(write: Write) -> None:
    recipe = load_recipe(write(SMALLEST))
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.seed = 3  # type: ignore[misc]


def test_reading_a_recipe_imports_no_torch(write: Write) -> None:
    path = write(SMALLEST)
    code = (
        "import sys; from pathlib import Path; from trainwright.recipe.loading import load_recipe; "
        f"load_recipe(Path({str(path)!r})); print(*{{'torch', 'transformers', 'numpy'}} & {{*sys.modules}})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_prompts_can_be_turned_off_where_a_recipe_sets_their_length() -> None:
    recipe = load_recipe(
        STUDY.parents[1] / "sft" / "tiny.yaml",
        ["evaluate.prompts=[Hi]", "evaluate.max_new_tokens=4", "evaluate.prompts=[]"],
    )
    assert recipe.evaluate.prompts == [] and recipe.evaluate.max_new_tokens == 4


def test_the_british_spellings_of_the_last_version_are_read_with_a_notice(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    old = "{type: lora, quantisation: nf4, double_quantisation: false, rank_stabilised: true}"
    recipe = load_recipe(write(f"task: sft\nmodel: {{name: some/model, adapter: {old}}}\ndata: {{train: pydoc}}\n"))
    adapter = recipe.model.adapter
    assert (adapter.quantization, adapter.double_quantization, adapter.rank_stabilized) == ("nf4", False, True)
    said = " ".join(capsys.readouterr().err.split())
    assert "model.adapter.rank_stabilised is now model.adapter.rank_stabilized" in said
    assert load_recipe(write(SMALLEST), ["model.adapter=qlora"]).model.adapter.quantization == "nf4"
