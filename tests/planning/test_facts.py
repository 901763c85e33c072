from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import RequestError
from trainwright.planning.facts import Facts, assume_full_rows, build_facts, read_named_configuration
from trainwright.recipe.schema import RecipeSchema

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


def recipe(tmp_path: Path, **sections: Any) -> RecipeSchema:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": "a" * 74}) for _ in range(10)))
    values: dict[str, Any] = {
        "task": "sft",
        "model": {"config": CONFIG, "tokenizer": "bytes"},
        "data": {"train": str(rows), "max_length": 128, "validation": None},
        "train": {"max_steps": 5, "global_batch_size": 12},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return RecipeSchema.model_validate(values)


def test_a_fresh_model_has_the_tokenizers_vocabulary(tmp_path: Path) -> None:
    workload, assumptions, _ = build_facts(recipe(tmp_path))
    assert workload.facts.vocabulary == 259
    assert (workload.row_tokens, workload.global_batch_rows, workload.packed) == (80, 12.0, False)
    assert workload.steps == 5
    assert "examples of 80 tokens" in assumptions[0]


def test_packs_of_a_model_that_mixes_documents_are_refused(tmp_path: Path) -> None:
    falcon = {key: value for key, value in CONFIG.items() if key != "intermediate_size"} | {"model_type": "falcon"}
    asked = recipe(tmp_path, model={"config": falcon})
    assert not build_facts(asked).workload.packed
    with pytest.raises(RequestError, match=r"data\.pack_length: a model of the architecture falcon does not keep"):
        build_facts(recipe(tmp_path, model={"config": falcon}, data={"pack_length": 256}))


def test_packs_hold_several_examples(tmp_path: Path) -> None:
    workload, _, _ = build_facts(recipe(tmp_path, data={"pack_length": 256}))
    assert (workload.row_tokens, workload.global_batch_rows) == (240, 4.0)
    assert (workload.mean_length, workload.longest) == (80, 80)


@pytest.mark.parametrize("mixed", [False, True])
def test_documents_are_looked_at_before_they_are_prepared(tmp_path: Path, mixed: bool) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.md").write_text("# One\n" + "word " * 10)
    source = str(tmp_path / "texts")
    train = [{"source": source, "format": "documents"}] if mixed else source
    data = {"train": train, **({} if mixed else {"format": "documents"})}
    workload, assumptions, _ = build_facts(recipe(tmp_path, data=data))
    assert workload.row_tokens < 80 and "from the characters of the first 1;" in assumptions[0]


def test_epochs_are_steps_once_the_examples_are_counted(tmp_path: Path) -> None:
    asked = recipe(tmp_path, train={"max_steps": None, "epochs": 2.0})
    assert build_facts(asked).workload.steps is None
    from trainwright.data.tokens.dataset import TokenDataset
    from trainwright.data.tokens.lengths import save_lengths

    examples = TokenDataset.from_examples([([1] * 8, [True] * 8)] * 10, "x")
    save_lengths(asked.model, asked.data, 0, examples, tmp_path / "cache")
    workload, assumptions, _ = build_facts(asked)
    few = "train.global_batch_size 12 exceeds the 10 examples to train on: each step uses every example about 1.2 times"
    assert (workload.steps, workload.row_tokens, assumptions) == (2, 8, (few,))
    for size, told in ((10, []), (10**9, ["each step uses every example about 100,000,000 times"])):
        train = asked.train.model_copy(update={"global_batch_size": size})
        remarks = build_facts(asked.model_copy(update={"train": train})).assumptions
        assert [remark.rpartition(": ")[2] for remark in remarks] == told


@pytest.mark.parametrize(("loss", "each"), [("dpo", 2), ("kto", 1)])
def test_rows_that_are_not_there_yet_count_as_the_longest_pair(tmp_path: Path, loss: str, each: int) -> None:
    facts = build_facts(recipe(tmp_path, task="dpo", dpo={"loss": loss}, data={"train": "somebody/not-downloaded"}))
    assert facts.workload.row_tokens == 128 * each


@pytest.mark.parametrize(
    ("written", "adapter"),
    [
        ("none", {}),
        ("lora", {"type": "lora", "quantization": "none"}),
        ({"type": "dora", "rank": 4, "targets": ["q_proj"]}, {"type": "dora", "rank": 4, "targets": ["q_proj"]}),
        ({"type": "qlora", "dropout": 0.1}, {"type": "lora", "dropout": 0.1, "quantization": "nf4"}),
    ],
)
def test_adapters(tmp_path: Path, written: Any, adapter: dict[str, Any]) -> None:
    model = build_facts(recipe(tmp_path, model={"adapter": written})).workload.model
    assert adapter.items() <= dict(model.adapter_section).items() and bool(adapter) == bool(model.adapter)


def test_known_models_need_no_file() -> None:
    asked = {"task": "sft", "model": {"name": "meta-llama/Llama-3.1-8B"}, "data": {"train": "pydoc"}}
    workload = assume_full_rows(RecipeSchema.model_validate(asked)).workload
    assert workload.facts.total == 8_030_261_248
    assert workload.row_tokens == workload.longest == 1024


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "vocab_size": 100}))
    assert read_named_configuration(str(file)) == read_named_configuration(str(tmp_path))


def test_a_fresh_configuration_that_transformers_refuses_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "gpt_neo", "hidden_size": 64, "num_layers": 2, "num_heads": 2}
    with pytest.raises(RequestError, match=r"model: gpt_neo: .*attention_layers"):
        build_facts(recipe(tmp_path, model={"config": config}))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            '{"model_type": "llama", "hidden_size": 64}',
            "num_hidden_layers, num_attention_heads, vocab_size are missing",
        ),
        ("[]", "JSON object"),
        ("{", "JSON"),
        ("[" * 100_000, "nested more than"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(RequestError, match=complaint):
        read_named_configuration(str(file))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"meta-llama/Llama-3\.1-8B"):
        read_named_configuration("meta-llama/Lama-3.1-8B")


def full(tmp_path: Path, **more: Any) -> Facts:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 100, **more.pop("config", {})}))
    data = {"train": "pydoc", "validation": None, "max_length": 256, "pack_length": 1024, **more.pop("data", {})}
    asked = {"task": "sft", "model": {"name": str(tmp_path)}, "data": data, "train": {"max_steps": 5}, **more}
    return assume_full_rows(RecipeSchema.model_validate(asked))


def test_full_rows_hold_documents_as_long_as_asked(tmp_path: Path) -> None:
    facts = full(tmp_path, train={"max_tokens": 64 * 1024 * 10, "global_batch_size": 64})
    assert (facts.workload.row_tokens, facts.workload.longest, facts.workload.mean_length) == (1024, 256, 256)
    assert facts.workload.steps == 10
    assert facts.assumptions == ("every row is full, sequences of 256 tokens each",)


def test_examples_that_a_model_has_no_positions_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"data\.max_length: 256 exceeds the model's 128 positions"):
        full(tmp_path, config={"max_position_embeddings": 128})
    short = {**CONFIG, "max_position_embeddings": 64}
    with pytest.raises(RequestError, match="128 exceeds the model's 64 positions"):
        build_facts(recipe(tmp_path, model={"config": short}))


def test_adapters_go_on_models_that_have_learnt_something(tmp_path: Path) -> None:
    assert not build_facts(recipe(tmp_path)).workload.takes_adapters
    assert full(tmp_path).workload.takes_adapters
