"""Tokens that a recipe adds: their rows begin as those of transformers, are trained, saved, merged and planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.support.runs import ON_ROWS, TINY, Runs, difference, events
from tests.support.training import Case, train
from trainwright.compatibility.gguf.export import export_gguf
from trainwright.compatibility.gguf.reading import write_converted
from trainwright.errors import RequestError
from trainwright.inference.finding import find_model
from trainwright.machine.detect import detect
from trainwright.models.added_tokens import sample_new_rows
from trainwright.models.load import check_adapter, load_config, load_model, load_tokenizer
from trainwright.models.resolve_model import resolve
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.planning.facts import build_facts
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.model import ModelSection
from trainwright.run.resolve import resolve as resolve_recipe

ADDED = {"ordinary": ["function", "object"], "special": ["<|turn|>"]}
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_base(directory: Path, *, tied: bool = False, rows: int = 259) -> Path:
    """A model with an embedding for each byte, and rows to spare if there are more."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=rows, max_position_embeddings=512, tie_word_embeddings=tied, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    build_bytes_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def settings(base: Path) -> tuple[str, ...]:
    return (
        ON_ROWS,
        "model.config=null",
        "model.tokenizer=null",
        "model.dropout=null",
        f"model.name={base}",
        f"model.added_tokens={json.dumps(ADDED)}",
        f"model.chat_template={json.dumps(TEMPLATE)}",
        "data.validation=8",
        "train.max_steps=4",
        "train.mixed_precision=no",
        "evaluate.prompts=[]",
    )


ADAPTER = "model.adapter={type: lora, rank: 4, modules_to_save: [embed_tokens, lm_head]}"


def test_new_rows_have_the_mean_and_a_billionth_of_the_covariance() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        old = torch.randn(500, 8) @ torch.randn(8, 8) + 3
        rows = sample_new_rows(old, 40_000)
        mean, centered = old.double().mean(0), old.double() - old.double().mean(0)
        covariance = 1e-9 * centered.T @ centered / 500
        apart = rows.double() - mean  # rounded to fp32, which is 2e-7 here: much less than the deviations of 1e-4
        assert torch.allclose(apart.T @ apart / len(rows), covariance, atol=0.03 * float(covariance.diag().max()))
        few = torch.randn(8, 8)  # of which the covariance is singular
        assert torch.equal(sample_new_rows(few, 2), few.double().mean(0).float().repeat(2, 1))


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_that_of_resize_token_embeddings(tmp_path: Path, *, tied: bool) -> None:
    directory = write_base(tmp_path / "base", tied=tied)
    section = ModelSection.model_validate({"name": str(directory), "added_tokens": ADDED})
    ours, tokenizer = load_model(section), load_tokenizer(section)
    theirs = AutoModelForCausalLM.from_pretrained(directory)
    theirs.resize_token_embeddings(262)
    assert len(tokenizer) == load_config(section).vocab_size == ours.config.vocab_size == 262
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5), name  # the drawn part is of 1e-6
        if len(one) == 262:
            assert torch.equal(one[:259], other[:259])
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied
    assert tokenizer("a function<|turn|>").input_ids == [*b"a ", 259, 261]
    assert tokenizer.decode([259, 261], skip_special_tokens=True) == "function"
    again = load_model(section)
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), again.parameters(), strict=True))


def test_rows_to_spare_are_used_first(tmp_path: Path) -> None:
    directory = write_base(tmp_path / "base", rows=320)
    section = ModelSection.model_validate({"name": str(directory), "added_tokens": ADDED})
    assert resolve(section).directory == directory and load_config(section).vocab_size == 320
    assert load_tokenizer(section)("<|turn|>").input_ids == [261]
    other = write_base(tmp_path / "small", rows=100)  # its tokenizer has other tokens without a row, too
    wrong = ModelSection.model_validate({"name": str(other), "added_tokens": ADDED})
    assert resolve(wrong).directory == other and load_config(wrong).vocab_size == 100


@pytest.mark.slow
def test_training_is_the_same_on_any_number_of_processes_and_resumed(runs: Runs, base: Path, tmp_path: Path) -> None:
    one = (*settings(base), "parallel.strategy=single")
    cases = {part: Case(one, part, str(tmp_path / "full")) for part in (2, None)}
    cases |= {f"adapter {part}": Case((*one, ADAPTER), part, str(tmp_path / "lora")) for part in (2, None)}
    trained = train(runs, {**cases, "full": Case(one), "lora": Case((*one, ADAPTER))}, 1)
    for name, prefix in (("full", ""), ("lora", "adapter ")):
        parts = [trained[f"{prefix}{part}" if prefix else part] for part in (2, None)]
        assert [loss for part in parts for loss in part.column("loss")] == trained[name].column("loss"), name
    more = [(strategy, kind) for strategy in ("ddp", "fsdp") for kind in ("full", "lora")]
    words = {"full": (), "lora": (ADAPTER,)}
    cases = {pair: Case((*settings(base), *words[pair[1]], f"parallel.strategy={pair[0]}")) for pair in more}
    for (strategy, kind), two in train(runs, cases, 2).items():
        assert difference(two.column("loss"), trained[kind].column("loss")) < 1e-5, (strategy, kind)


@pytest.mark.slow
def test_the_trained_model_has_the_tokens_and_the_plan_counts_them(runs: Runs, base: Path, tmp_path: Path) -> None:
    run = runs.trained(*settings(base), "evaluate.prompts=['What is an object?']")
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert final.config.vocab_size == len(tokenizer) == 262
    assert tokenizer.eos_token == "<|turn|>"  # what ends a turn in the template
    start_of = load_model(load_recipe(TINY, list(settings(base))).model)
    moved = (final.lm_head.weight - start_of.lm_head.weight)[259:].norm(dim=1)
    assert (moved > 1e-3).all()  # by about the learning rate in every number
    assert (final.model.embed_tokens.weight - start_of.model.embed_tokens.weight)[261].norm() > 1e-3
    (start,) = events(run, "start")
    assert start["parameters"] == sum(parameter.numel() for parameter in final.parameters())
    recipe = resolve_recipe(load_recipe(TINY, list(settings(base))), detect()).recipe
    workload = build_facts(recipe).workload
    assert workload.facts.vocabulary == 262
    assert workload.facts.total == start["parameters"]
    export_gguf(run / "final", tmp_path / "model.gguf", "f32")
    write_converted(tmp_path / "model.gguf", tmp_path / "read", "test")
    read, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "read"), torch.arange(250, 262)[None]
    assert torch.allclose(read(ids).logits, final(ids).logits, atol=1e-5)
    text = "a function<|turn|>"
    assert AutoTokenizer.from_pretrained(tmp_path / "read")(text).input_ids == tokenizer(text).input_ids
    assert [event["prompt"] for event in events(run, "generate")] == ["What is an object?"] * 2


@pytest.mark.slow
def test_an_adapter_trains_the_rows_and_is_merged(runs: Runs, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run = runs.trained(*settings(base), ADAPTER)
    named = json.loads((run / "final" / "adapter_config.json").read_text())["base_model_name_or_path"]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(named), run / "final")
    out = tmp_path / "merged"
    ended = runs.command("merge", str(run / "final"), "--out", str(out)).wait()
    assert ended.code == 0, ended.stdout + ended.stderr
    merged, ids = AutoModelForCausalLM.from_pretrained(out), torch.arange(240, 262)[None]
    assert merged.config.vocab_size == len(AutoTokenizer.from_pretrained(out)) == 262
    assert torch.allclose(merged(ids).logits, theirs(ids).logits, atol=1e-4)
    alone = tmp_path / "alone"  # an adapter without its run names its base with the tokens
    alone.mkdir()
    for file in (run / "final").iterdir():
        (alone / file.name).write_bytes(file.read_bytes())
    section = find_model(str(alone)).section
    assert load_model(section).config.vocab_size == len(load_tokenizer(section)) == 262


@pytest.mark.parametrize(
    ("adapter", "accepted"),
    [
        ("{type: lora}", False),
        ("{type: lora, modules_to_save: [embed_tokens]}", False),
        ("{type: lora, modules_to_save: [embed_tokens, lm_head]}", True),
        ("{type: lora, targets: [q_proj, embed_tokens, lm_head]}", True),
    ],
)
def test_an_adapter_without_the_rows_is_refused(base: Path, adapter: str, *, accepted: bool) -> None:
    section = load_recipe(TINY, [*settings(base), f"model.adapter={adapter}"]).model
    if accepted:
        assert check_adapter(section, 0) is None
        return
    with pytest.raises(RequestError, match=r"model\.added_tokens: .* set model\.adapter\.modules_to_save to \[embed_t"):
        check_adapter(section, 0)


def test_a_list_has_ordinary_tokens() -> None:
    section = ModelSection.model_validate({"name": "x", "added_tokens": ["a", "b"]})
    assert (section.added_tokens.ordinary, section.added_tokens.special) == (["a", "b"], [])
