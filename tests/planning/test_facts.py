from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import RequestError
from trainwright.planning.facts import architecture_named, facts_of, full_rows
from trainwright.planning.workload import ALL_LINEAR, Adapter
from trainwright.recipe.schema import Recipe

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))


def recipe(tmp_path: Path, **sections: dict[str, Any]) -> Recipe:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": "a" * 74}) for _ in range(10)))
    values: dict[str, Any] = {
        "task": "sft",
        "model": {"config": CONFIG, "tokenizer": "bytes"},
        "data": {"train": str(rows), "max_length": 128, "validation": None},
        "train": {"max_steps": 5, "global_batch_size": 12},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def test_a_fresh_model_has_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    workload, assumptions = facts_of(recipe(tmp_path))
    assert workload.architecture.vocabulary == 259
    assert (workload.row_tokens, workload.global_batch_rows, workload.packed) == (80, 12.0, False)
    assert workload.steps == 5
    assert "examples of 80 tokens" in assumptions[0]


def test_packs_hold_several_examples(tmp_path: Path) -> None:
    workload, _ = facts_of(recipe(tmp_path, data={"pack_length": 256}))
    assert (workload.row_tokens, workload.global_batch_rows) == (240, 4.0)
    assert (workload.document, workload.longest) == (80, 80)


@pytest.mark.parametrize("mixed", [False, True])
def test_documents_are_looked_at_before_they_are_prepared(tmp_path: Path, mixed: bool) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.md").write_text("# One\n" + "word " * 10)
    source = str(tmp_path / "texts")
    train = [{"source": source, "format": "documents"}] if mixed else source
    data = {"train": train, **({} if mixed else {"format": "documents"})}
    workload, assumptions = facts_of(recipe(tmp_path, data=data))
    assert workload.row_tokens < 80 and "by the characters of the first 1;" in assumptions[0]


def test_epochs_are_steps_once_the_examples_are_counted(tmp_path: Path) -> None:
    asked = recipe(tmp_path, train={"max_steps": None, "epochs": 2.0})
    assert facts_of(asked).workload.steps is None
    from trainwright.data.dataset import TokenDataset
    from trainwright.data.lengths import remember

    examples = TokenDataset.from_examples([([1] * 8, [True] * 8)] * 10, "x")
    remember(asked.model, asked.data, 0, examples, tmp_path / "cache")
    workload, assumptions = facts_of(asked)
    assert (workload.steps, workload.row_tokens, assumptions) == (2, 8, ())


@pytest.mark.parametrize(
    ("written", "adapter", "quantisation"),
    [
        ("none", None, "none"),
        ("lora", Adapter("lora", 16, ALL_LINEAR), "none"),
        ({"type": "dora", "rank": 4, "targets": ["q_proj", "v_proj"]}, Adapter("dora", 4, ("query", "value")), "none"),
        ({"type": "qlora", "dropout": 0.1}, Adapter("lora", 16, ALL_LINEAR, 0.1), "nf4"),
    ],
)
def test_adapters(tmp_path: Path, written: Any, adapter: Adapter | None, quantisation: str) -> None:
    workload = facts_of(recipe(tmp_path, model={"adapter": written})).workload
    assert (workload.adapter, workload.quantisation) == (adapter, quantisation)


def test_known_models_need_no_file() -> None:
    asked = {"task": "sft", "model": {"name": "meta-llama/Llama-3.1-8B"}, "data": {"train": "pydoc"}}
    workload = full_rows(Recipe.model_validate(asked)).workload
    assert workload.architecture.parameters().total == 8_030_261_248
    assert workload.row_tokens == workload.longest == 1024


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "vocab_size": 100}))
    assert architecture_named(str(file)) == architecture_named(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"model_type": "llama", "hidden_size": 64}', "num_hidden_layers, num_attention_heads, intermediate_size"),
        ("[]", "JSON object"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(RequestError, match=complaint):
        architecture_named(str(file))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"meta-llama/Llama-3\.1-8B"):
        architecture_named("meta-llama/Lama-3.1-8B")
