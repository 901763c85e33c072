"""What unlearning refuses before anything is launched, with the key, the reason and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.preferences import write
from tests.support.unlearning import question, write_rows
from trainwright.data.check import check_data
from trainwright.engine.task import import_task_module
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.schema import RecipeSchema
from trainwright.tasks.unlearn.stream import read_refusals


def refused(recipe: Path, *overrides: str, prepared: bool = False) -> str:
    with pytest.raises(RequestError) as caught:
        # What is prepared is a resolved recipe.
        found = load_recipe(recipe, (*overrides, *(["parallel.strategy=single"] if prepared else [])))
        check_data(found)
        if prepared:
            import_task_module(found).prepare_once(found, recipe.parent / "cache")
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_rows(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data.forget=null",), "data.forget: no rows to forget; set it"),
        (("data.retain=null",), "data.retain: npo also trains on retain rows"),
        (("data.train=pydoc",), "data.train: has no effect with task unlearn"),
        (("data.validation=other.jsonl",), "data.validation: unlearning is measured on forget and retain rows"),
        (("unlearn.objective=dpo", "data.idk=null"), "data.idk: dpo trains on refusals; set it to a file"),
        (("unlearn.objective=idk_nll", "data.idk=null"), "data.idk: idk_nll trains on refusals"),
        (("unlearn.objective=gradient_ascent",), "did you mean grad_ascent?"),
        (("unlearn.delta=1",), "unlearn.delta: has no effect with unlearn.objective npo, only with simnpo"),
        (("unlearn.objective=pdu",), "unlearn.retain_limit: pdu keeps the retain loss below a limit"),
        (("unlearn.retain_loss=activations",), "unlearn.retain_loss: npo does not steer activations"),
        (("unlearn.objective=grad_ascent", "unlearn.retain_loss=kl"), "unlearn.retain_loss: has no effect if"),
        (("unlearn.objective=task_vector", "unlearn.alpha=1"), "unlearn.alpha: what is learned from retain rows"),
        (("unlearn.objective=wga", "unlearn.reference=some/model"), "unlearn.reference: wga uses no reference model"),
        (("unlearn.reference=base",), "unlearn.reference: without an adapter to start from"),
        (("model.trainable=['(']",), "model.trainable[0]: expected a regular expression: missing )"),
        (("model.trainable=['.*']", "model.adapter=lora"), "model.trainable: an adapter trains its own matrices"),
        (("evaluate.metrics=[rouge_l]",), "evaluate.metrics: unlearning has no validation rows"),
        (("task=sft", "unlearn=null"), "data.forget: has no effect with task sft"),
        (("data.forget=nowhere.jsonl",), "data.forget: no file nowhere.jsonl"),
        (("data.idk=nowhere.txt", "unlearn.objective=dpo"), "data.idk: nowhere.txt: no such file"),
        (
            ("data.benchmark=tofu:forget02",),
            "'data.benchmark=tofu:forget02': data.benchmark: unknown benchmark 'tofu:forget02'",
        ),
        (("data.benchmark=muse:news@no",), "'data.benchmark=muse:news@no': data.benchmark: no such directory no"),
    ],
)
def test_recipes_that_cannot_be_meant(recipe: Path, overrides: tuple[str, ...], says: str) -> None:
    assert says in refused(recipe, *overrides)


def test_rows_that_are_to_be_forgotten_and_kept_are_counted(recipe: Path) -> None:
    rows = [question(100 + a, 3 * a) for a in range(1, 9)]
    kept = recipe.with_name("kept.jsonl")
    spaced = {key: text.replace(" ", "  ") for key, text in question(5, 35).items()}
    write(kept, [*rows, spaced, question(6, 42)])
    text = refused(recipe, f"data.retain={kept}", prepared=True)
    assert "data.retain: 2 of its rows are also in data.forget" in text
    assert f"the first of them {kept}:9 ({recipe.with_name('forget.jsonl')}:5 of data.forget)" in text


def test_a_layer_that_is_not_there_says_how_many_there_are(recipe: Path) -> None:
    text = refused(recipe, "unlearn.objective=rmu", prepared=True)
    assert "unlearn.layer: 7 does not exist: the model has 2 blocks, 0 to 1" in text


def test_a_pattern_that_matches_nothing_shows_a_name(recipe: Path) -> None:
    text = refused(recipe, "model.trainable=['layers.*down']", prepared=True)
    assert "model.trainable: layers.*down matches none of the" in text
    assert "model.layers." in text


def test_what_only_later_blocks_have_cannot_be_trained_by_an_earlier_one(recipe: Path) -> None:
    asked = ("unlearn.objective=rmu", "unlearn.layer=0", r"model.trainable=['model\.layers\.1\..*']")
    assert "it only matches parameters after unlearn.layer 0" in refused(recipe, *asked, prepared=True)


def test_a_reference_with_another_tokenizer(recipe: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    other = tmp_path / "other"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=5, **sizes)).save_pretrained(other)
    words = Tokenizer(WordLevel({word: place for place, word in enumerate("abcde")}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(other)
    text = refused(recipe, f"unlearn.reference={other}", prepared=True)
    assert f"unlearn.reference: {other} has a different tokenizer" in text


def test_a_reference_that_is_not_there(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    (run / "recipe.yaml").touch()
    text = refused(recipe, f"unlearn.reference={run}", prepared=True)
    assert text == f"unlearn.reference: {run} has no config.json: it is a run directory; its model is in final/"


def test_texts_cannot_be_refused(recipe: Path) -> None:
    texts = write(recipe.with_name("texts.jsonl"), [{"text": f"This is text number {n}."} for n in range(9)])
    text = refused(recipe, "unlearn.objective=idk_nll", f"data.forget={texts}")
    assert f"data.forget: {texts}:1: is plain text, but refusals answer questions" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "the rows have no field alternate, which holds other answers to each question; trainwright data alter"),
        ({"alternate": [1]}, ":1: the field alternate should be a text or a list of texts, not a list"),
    ],
)
def test_rows_without_alternates_are_refused(recipe: Path, more: dict[str, object], said: str) -> None:
    rows = write(recipe.with_name("others.jsonl"), [{"question": "Why?", "answer": "So.", **more}] * 9)
    text = refused(recipe, "unlearn.objective=altpo", f"data.forget={rows}", prepared=True)
    assert text.startswith(f"data.forget: {rows}") and said in text


def test_refusals_are_lines_or_objects(tmp_path: Path) -> None:
    file = tmp_path / "idk.jsonl"
    file.write_text('I cannot say.\n\n{"idk": "No idea."}\n"Ask others."\n')
    assert read_refusals(str(file)) == ("I cannot say.", "No idea.", "Ask others.")
    file.write_text(json.dumps({"a": "one", "b": "two"}) + "\n")
    with pytest.raises(RequestError, match=r"idk\.jsonl:1: a refusal must be one text, not 2"):
        read_refusals(str(file))


def test_a_recipe_that_was_read_and_written_says_the_same(recipe: Path) -> None:
    found = load_recipe(recipe)
    again = RecipeSchema.model_validate(found.model_dump())
    assert again == found
    assert "train" not in found.model_dump()["data"]
