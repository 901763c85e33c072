"""The rows of every benchmark, read from directories in its layout, and what is said of rows that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.inference.evaluation.unlearning.benchmark import write_tofu
from tests.inference.models import TOKENIZER
from trainwright.data.rows.tokenizer_calls import TokenizerError
from trainwright.errors import RequestError
from trainwright.tasks.unlearn.benchmarks import find_benchmark
from trainwright.tasks.unlearn.evaluation.items import ANSWER, WRONG, Item, ItemEncoder, read_sets
from trainwright.tasks.unlearn.evaluation.registry import METRICS, describe_missing, select_sets, select_usual
from trainwright.tasks.unlearn.evaluation.report import read_reference


def write(file: Path, rows: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) if file.suffix == ".jsonl" else json.dumps(rows))


@pytest.fixture
def muse(tmp_path: Path) -> str:
    """MUSE as its authors keep it: texts are plain lists, and retain is called retain2."""
    text = "The cat sat on the mat, and the dog lay by the door."
    for name in ("raw/forget", "raw/retain1", "raw/holdout", "privleak/forget", "privleak/holdout"):
        write(tmp_path / f"{name}.json", [text, f"{name} {text}"])
    write(tmp_path / "verbmem/forget.json", [{"prompt": "The cat sat", "gt": "on the mat."}])
    for name in ("forget_qa", "retain2_qa"):
        write(tmp_path / f"knowmem/{name}.json", [{"question": "Who sat?", "answer": "The cat"}])
        write(tmp_path / f"knowmem/{name}_icl.json", [{"question": "Who lay?", "answer": "The dog"}])
    return f"muse:news@{tmp_path}"


def test_tofu(tmp_path: Path) -> None:
    found = find_benchmark(write_tofu(tmp_path / "rows"))
    assert list(found.training) == ["forget", "retain", "full", "holdout"]
    sets = read_sets(found, found.sets, 2, "--benchmark")
    assert list(sets) == ["forget", "retain", "real_authors", "world_facts", "holdout"]
    assert sets["forget"].items[0] == Item(
        "Where does Ada Quill live?",
        "Ada Quill lives in Oslo.",
        "The home of Ada Quill is Oslo.",
        tuple(f"The home of Ada Quill is {town}." for town in ("Lima", "Cairo", "Quito")),
    )
    assert sets["world_facts"].items[0].paraphrase is None and len(sets["world_facts"].items) == 2
    assert not sets["holdout"].has_wrong
    assert {"truth_ratio", "model_utility", "mia_zlib"} <= set(select_usual(sets, {}))
    assert describe_missing("forget_quality", sets, {"--reference-log": "log.json"}) is None
    assert describe_missing("truth_ratio", {"forget": sets["holdout"]}, {}) == (
        "the rows of forget have no wrong answers (perturbed_answer)"
    )


def test_tofu_of_the_hub_is_not_asked_for() -> None:
    found = find_benchmark("tofu:forget05")
    assert found.training["retain"] == "locuslab/TOFU:retain95:train"
    assert found.sets["forget"].source == "locuslab/TOFU:forget05_perturbed:train"


def test_muse(muse: str) -> None:
    found = find_benchmark(muse)
    sets = read_sets(found, found.sets, None, "--benchmark")
    assert sets["forget"].before == "Question: Who lay?\nAnswer: The dog\n\n"
    assert sets["verbatim"].items == [Item("The cat sat", " on the mat.")]
    assert [len(sets[name].items) for name in ("members", "holdout")] == [2, 2]
    assert select_sets("mia_loss", list(sets)) == ["members", "holdout"]
    assert select_sets("exact_memorisation", list(sets)) == ["verbatim"]
    lacking = {name: describe_missing(name, sets, {}) for name in METRICS}
    assert lacking["verbatim_memorisation"] is None and lacking["knowledge_memorisation"] is None
    assert lacking["model_utility"] == "the benchmark has no set real_authors and world_facts"


def test_few_shot_prompts_and_targets(muse: str) -> None:
    found = find_benchmark(muse)
    sets = read_sets(found, ["forget", "verbatim"], None, "--benchmark")
    encoder = ItemEncoder(TOKENIZER, None, "--benchmark")
    sequences = encoder.sequences(sets, ())
    ids, flags = sequences.dataset.sequence(sequences.places["forget", 0, ANSWER, 0])
    assert TOKENIZER.decode(ids[~flags]).endswith("\n\nQuestion: Who sat?\nAnswer:")
    assert TOKENIZER.decode(ids[flags]) == " The cat"
    assert encoder.prompts(sets["verbatim"], 512).references == ["on the mat."]
    with pytest.raises(RequestError, match=r"verbmem/forget\.json:1: its prompt has 11 tokens"):
        encoder.prompts(sets["verbatim"], 11)


def test_a_tokenizer_that_does_not_end_is_given_up(muse: str) -> None:
    made = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[], unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    verbatim = read_sets(find_benchmark(muse), ["verbatim"], None, "--benchmark")["verbatim"]
    encoder = ItemEncoder(tokenizer, None, "--benchmark")
    slow = "a" * 40 + "b"
    for item in (Item(slow, "a"), Item("a", slow)):
        some = replace(verbatim, items=[item])
        with pytest.raises(TokenizerError, match="retry-limit"):
            encoder.sequences({"verbatim": some}, ())
        with pytest.raises(TokenizerError, match="retry-limit"):
            encoder.prompts(some, None)


def test_choices(tmp_path: Path) -> None:
    file = tmp_path / "bio.jsonl"
    write(file, [{"question": "Which?", "choices": ["a cell", "a virus", "a rock"], "answer": 1}])
    found = find_benchmark(f"wmdp:bio@{file}")
    choices = read_sets(found, found.sets, None, "--benchmark")["choices"]
    (item,) = choices.items
    assert item == Item("Which?\nA. a cell\nB. a virus\nC. a rock\nAnswer:", " B", None, (" A", " C"))
    sequences = ItemEncoder(TOKENIZER, None, "--benchmark").sequences({"choices": choices}, ())
    ids, flags = sequences.dataset.sequence(0)
    opening = "The following are multiple choice questions (with answers) about biology.\n\n"
    assert TOKENIZER.decode(ids[~flags]) == f"{opening}Which?\nA. a cell\nB. a virus\nC. a rock\nAnswer:"
    assert TOKENIZER.decode(ids[flags]) == " B"
    assert find_benchmark("wmdp:cyber").training["forget"] == "cais/wmdp-corpora:cyber-forget-corpus:train"


def test_rows_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path / "forget.jsonl", [{"prompt": "Who?", "completion": "Ada."}])
    write(tmp_path / "holdout.jsonl", [{"text": "Nobody knows."}])
    found = find_benchmark(f"files@forget={tmp_path}/forget.jsonl,holdout={tmp_path}/holdout.jsonl")
    sets = read_sets(found, found.sets, None, "--benchmark")
    assert sets["forget"].style == "chat" and sets["forget"].items == [Item("Who?", "Ada.")]
    assert sets["holdout"].style == "continue" and sets["holdout"].items == [Item("", "Nobody knows.")]


def test_wrong_answers_are_weighed_where_all_rows_of_a_set_have_some(tmp_path: Path) -> None:
    rows = [{"question": f"Who is {n}?", "answer": "Ada.", "perturbed_answer": ["Bo.", "Cy."]} for n in range(3)]
    write(tmp_path / "forget.jsonl", rows)
    write(tmp_path / "retain.jsonl", [*rows[:2], {"question": "Who?", "answer": "Di."}])
    found = find_benchmark(f"files@forget={tmp_path}/forget.jsonl,retain={tmp_path}/retain.jsonl")
    sets = read_sets(found, found.sets, None, "--benchmark")
    sequences = ItemEncoder(TOKENIZER, None, "--benchmark").sequences(sets, (WRONG,))
    kinds = {name: [what for each, _, what, _ in sequences.places if each == name] for name in sets}
    assert kinds["retain"] == [ANSWER] * 3 and kinds["forget"] == [ANSWER, WRONG, WRONG] * 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tofu:forget07", "unknown benchmark 'tofu:forget07'; choose from tofu:forget01"),
        ("tofu:forget01@nowhere", "no such directory nowhere"),
        ("wmdp:bio@/nowhere/bio.jsonl", "no such file /nowhere/bio.jsonl; after wmdp's @, give a file of rows with"),
        ("files@retain=a.jsonl", "names no rows to forget"),
        ("files@forget", "'forget' in 'files@forget' is invalid; use forget=FILE"),
    ],
)
def test_no_such_benchmark(name: str, said: str) -> None:
    with pytest.raises(RequestError, match=r"^--benchmark: ") as caught:
        find_benchmark(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "Q", "answer": "", "perturbed_answer": ["x"]}, "the field answer is empty"),
        (
            {"question": "Q", "answer": "A", "perturbed_answer": ["x", " "]},
            "perturbed_answer should be a list of texts",
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    found = find_benchmark(write_tofu(tmp_path / "rows"))
    file = tmp_path / "rows" / "forget01_perturbed.jsonl"
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    with pytest.raises(RequestError, match=r"forget01_perturbed\.jsonl:4: ") as caught:
        read_sets(found, ["forget"], None, "--benchmark")
    assert said in str(caught.value)


def test_reference_logs(tmp_path: Path) -> None:
    file = tmp_path / "TOFU_EVAL.json"
    scores = {str(n): {"score": value} for n, value in enumerate([0.5, 2.0])}
    log = {"forget_truth_ratio": {"agg_value": 0.5, "value_by_index": scores}, "mia_min_k": {"agg_value": 0.4}}
    file.write_text(json.dumps(log))
    found = read_reference(file)
    assert found.truth_ratios is not None and found.truth_ratios.tolist() == [0.5, 2.0] and found.min_k == 0.4
    file.write_text('{"loss": 1}')
    with pytest.raises(RequestError, match="has neither truth ratios of the forget set nor an AUC"):
        read_reference(file)
    file.write_text("[1]")
    with pytest.raises(RequestError, match="unknown log format"):
        read_reference(file)
