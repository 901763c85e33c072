"""Models of the user's own: trained, sharded, resumed, saved and used like those of transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.own_module import Logits
from tests.support.commands import trainwright
from tests.support.runs import ON_ROWS, ROWS, TINY, Runs, column, difference
from tests.support.slow import slow_but
from tests.support.training import Case, train
from trainwright.data.stream.batch import collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.machine.describe import parse_machine
from trainwright.models.causal_lm import CausalLM
from trainwright.models.load import load_model
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.planning.facts import build_facts
from trainwright.planning.memory.peak import estimate_memory
from trainwright.planning.workload import Choice
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.sections.model import ModelSection

SOURCE = Path(__file__).parent / "own_module.py"
BASE = ("model.config={hidden: 32, layers: 2}", "model.dropout=null", "train.max_steps=4", "data.pack_length=null")


def of(name: str) -> str:
    return f"model.implementation={SOURCE}:{name}"


def case(name: str, *overrides: str) -> Case:
    return Case((*BASE, of(name), *overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("Logits", ("ddp", "fsdp")),
        pytest.param("Logits", ("zero2", "zero3"), marks=pytest.mark.slow),
        pytest.param("Hidden", ("ddp", "fsdp", "zero2", "zero3"), marks=pytest.mark.slow),
    ],
)
def test_every_strategy_trains_it_as_one_process(runs: Runs, name: str, strategies: tuple[str, ...]) -> None:
    one = train(runs, {"": case(name)}, 1)[""]
    spread = train(runs, {kind: case(name, f"parallel.strategy={kind}") for kind in strategies}, 2)
    for trained in spread.values():
        assert difference(trained.column("loss"), one.column("loss")) < 1e-5
    other = train(runs, {"": case("Hidden" if name == "Logits" else "Logits")}, 1)[""]
    assert difference(other.column("loss"), one.column("loss")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("task", slow_but("pretrain", "dpo", among=("pretrain", "dpo", "unlearn")))
def test_every_language_task_trains_it(runs: Runs, task: str, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "What is it?", "chosen": "A tuple.", "rejected": "No idea."}
    pairs.write_text("".join(f"{json.dumps({**row, 'prompt': f'What is {n}?'})}\n" for n in range(16)))
    rows = ROWS.read_text().splitlines(keepends=True)
    forget, retain = tmp_path / "forget.jsonl", tmp_path / "retain.jsonl"
    forget.write_text("".join(rows[:20]))
    retain.write_text("".join(row for row in rows[20:60] if row not in rows[:20]))
    more = {
        "pretrain": ("data.format=documents", f"data.train={SOURCE.parents[2] / 'docs'}", "data.max_length=64"),
        "dpo": (f"data.train={pairs}", "data.validation=2"),
        "unlearn": (f"data.forget={forget}", f"data.retain={retain}", "data.train=null", "data.validation=null"),
    }
    run = runs.trained(*BASE, of("Logits"), f"task={task}", "data.limit=null", "parallel.num_processes=1", *more[task])
    assert len(column(run, "loss")) == 4 and (run / "final" / "own_module.py").is_file()


def test_a_plan_counts_the_logits_of_all_positions_and_every_parameter() -> None:
    config = "model.config={hidden: 32, layers: 3, vocab_size: 20000}"
    plans, peaks = {}, {}
    for name in ("Logits", "Hidden"):
        fixed = ("parallel.num_processes=1", "train.micro_batch_size=8", "data.max_length=512", ON_ROWS)
        facts = build_facts(load_recipe(TINY, [*BASE, of(name), config, *fixed]))
        plans[name] = facts.workload.facts
        model = Logits(20000, layers=3)
        assert plans[name].total == sum(parameter.numel() for parameter in model.parameters())
        assert plans[name].layers == 3
        choice = Choice("single", 1, 8, 1, "no")
        peaks[name] = estimate_memory(facts.workload, choice, parse_machine("1xH100")).phases["forward"]
    assert peaks["Logits"] > peaks["Hidden"]  # with all logits at once


@pytest.mark.slow
def test_a_plan_after_loading_another_model_creates_its_tensors_on_one_device(tmp_path: Path) -> None:
    program = """if True:
        import sys, torch, trainwright.models.own_module
        from transformers import AutoModelForCausalLM
        from trainwright.models.configuration import build_fresh_config
        from trainwright.models.tokenization import build_bytes_tokenizer
        settings = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1}
        config = build_fresh_config(settings, build_bytes_tokenizer())
        AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
        AutoModelForCausalLM.from_pretrained(sys.argv[1])
        with torch.device("meta"):
            print(torch.linspace(0, 1, 3).device)
    """
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert output.split()[-1] == "meta"  # the first lines may be notices of libraries


@pytest.mark.slow
def test_recomputing_its_blocks_changes_no_loss(runs: Runs) -> None:
    cases = {how: case("Logits", f"train.activation_checkpointing={how}") for how in ("none", "full", "selective")}
    losses = [trained.column("loss") for trained in train(runs, cases, 1).values()]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow
def test_packs_train_as_padded_rows_where_it_keeps_them_apart(runs: Runs) -> None:
    cases = {"rows": case("Packs"), "packs": case("Packs", "data.pack_length=256")}
    rows, packs = train(runs, cases, 1).values()
    assert difference(rows.column("loss"), packs.column("loss")) < 1e-5


def test_a_run_is_planned_resumed_saved_and_used_from_elsewhere(runs: Runs, tmp_path: Path) -> None:
    shutil.copy(SOURCE, tmp_path / "mine.py")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "task: sft\nmodel: {implementation: mine.py:Logits, config: {hidden: 32}, tokenizer: bytes}\n"
        f"data: {{train: {ON_ROWS.partition('=')[2]}, validation: 4, max_length: 64}}\n"
        "train: {max_steps: 4, global_batch_size: 4}\ncheckpoint: {every: 2, keep_last: 9}\n"
        "parallel: {num_processes: 1}\n"
    )
    run = runs.trained(recipe=recipe)
    early = runs.copied(run)
    shutil.rmtree(early / "final")
    shutil.rmtree(early / "checkpoints" / "step-00000004")
    resumed = runs.resumed(early)
    assert column(resumed, "loss")[-2:] == column(run, "loss")[-2:]
    tensors = [load_file(place / "final" / "model.safetensors") for place in (run, resumed)]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    assert json.loads((run / "final" / "config.json").read_text())["implementation"] == "mine.py:Logits"

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    exported = trainwright("export", str(run), "--out", "out", "--trust-code", cwd=elsewhere)
    assert exported.returncode == 0, exported.stderr
    (tmp_path / "mine.py").unlink()  # the saved model has its own copy
    asked = ("--prompt", "What is it?", "--max-new-tokens", "8")
    refused = trainwright("generate", "out", *asked, cwd=elsewhere)
    assert refused.returncode == 2 and "--trust-code" in refused.stderr
    answers = [trainwright("generate", place, *asked, "--trust-code", cwd=elsewhere) for place in (str(run), "out")]
    assert [answer.returncode for answer in answers] == [0, 0], answers[0].stderr + answers[1].stderr
    assert answers[0].stdout == answers[1].stdout


def test_a_batch_is_generated_as_each_row_alone() -> None:
    tokenizer = build_bytes_tokenizer()
    section = ModelSection(implementation=f"{SOURCE}:Logits", config={"hidden": 16}, tokenizer="bytes")
    model = load_model(section, tokenizer=tokenizer)
    ids = torch.tensor([[256, 256, 5, 6], [7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    together = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(together[0, 2:], model(input_ids=ids[:1, 2:]).logits[0], atol=1e-6)
    assert torch.allclose(together[1], model(input_ids=ids[1:]).logits[0], atol=1e-6)


def test_the_loss_of_logits_is_the_cross_entropy_with_its_gradient() -> None:
    section = ModelSection(implementation=f"{SOURCE}:Logits", config={"hidden": 16}, tokenizer="bytes")
    model = load_model(section)
    sequences = [([1, 2, 3, 4], [True] * 4), ([5, 6, 7, 8], [True] * 4)]
    batch = collate_examples(TokenDataset.from_examples(sequences, "rows"), (0, 1), packed=False)
    CausalLM(model, packed=False)(batch).backward()
    plain = Logits(len(build_bytes_tokenizer()), hidden=16)
    plain.load_state_dict({name.removeprefix("module."): value for name, value in model.state_dict().items()})
    ids = torch.tensor([sequence for sequence, _ in sequences])
    loss = torch.nn.functional.cross_entropy(plain(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    for (name, parameter), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None, name
        assert torch.allclose(parameter.grad, expected.grad, atol=1e-5), name


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((of("Logits"), "data.pack_length=256"), "its forward has no argument cu_seq_lens_q"),
        ((of("Logits"), "model.adapter=lora"), "model.adapter.type: adapters need a model of transformers"),
        ((of("Missing"),), "cannot be imported: module"),
        ((of("NoBlocks"), "model.config={}"), "has no nn.ModuleList with its blocks"),
        ((of("Logits"), "model.config={size: 3}"), "unexpected keyword argument 'size'"),
        ((of("SOURCE"),), "cannot be imported"),
        (("model.implementation=json:JSONEncoder",), "is of Python's standard library"),
        (("model.implementation=gtp",), "expected transformers, gpt, module:Class or file.py:Class"),
        (("model.implementation=absent.py:Model",), "there is no file"),
    ],
)
def test_what_cannot_be_trained_is_refused(runs: Runs, overrides: tuple[str, ...], said: str) -> None:
    ended = runs.train(*BASE, *overrides).wait()
    assert ended.code == 2 and said in ended.stderr, ended.stderr


@pytest.mark.slow
def test_a_saved_module_is_not_imported_unless_a_recipe_names_it(runs: Runs, tmp_path: Path) -> None:
    final = runs.trained(*BASE, of("Logits"), ON_ROWS) / "final"
    named = ("model.config=null", f"model.name={final}", "model.tokenizer=null", "model.dropout=null")
    evil = tmp_path / "evil"
    shutil.copytree(final, evil)
    (tmp_path / "evil_code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Model: pass\n")
    fields = json.loads((evil / "config.json").read_text())
    for place in (f"{tmp_path}/evil_code.py:Model", f"{final}/own_module.py:Logits"):
        (evil / "config.json").write_text(json.dumps({**fields, "implementation": place}))
        for more in ("data.pack_length=null", "data.pack_length=256"):
            ended = runs.train(*BASE, *named, f"model.name={evil}", ON_ROWS, more).wait()
            assert ended.code == 2 and "set this key to its class" in ended.stderr, ended.stderr
    for command in ("plan", "recipe check"):
        ended = runs.command(*command.split(), str(TINY), *BASE, *named, f"model.name={evil}").wait()
        assert ended.code == 2, ended.stdout
    assert not (tmp_path / "executed").exists()
    further = runs.trained(*BASE, *named, of("Logits"), ON_ROWS)
    assert column(further, "loss")[0] < column(runs.trained(*BASE, of("Logits"), ON_ROWS), "loss")[0]
