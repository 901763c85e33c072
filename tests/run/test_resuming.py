"""What may change when a run is resumed, and what is refused because it would be another run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.compatibility.accelerate.translation import Translation, read_translation
from trainwright.errors import RequestError
from trainwright.machine.machine import Machine
from trainwright.recipe.loading import load_recipe, split_words
from trainwright.recipe.schema import RecipeSchema
from trainwright.run import run_directory
from trainwright.run.request import RunRequest, build_request, is_bare_resume, resolve_request
from trainwright.run.resolve import resolve
from trainwright.run.resuming import load_resumed_recipe

RECIPE = """task: sft
model: {config: {model_type: llama, hidden_size: 64}, tokenizer: bytes}
data: {train: rows.jsonl}
optimizer: {learning_rate: 1e-3}
train: {max_steps: 30, global_batch_size: 8}
evaluate: {every: 10}
"""
RESOLVED = (
    "train.micro_batch_size=2",
    "train.mixed_precision=no",
    "train.activation_checkpointing=none",
    "train.compile=false",
    "parallel.num_processes=2",
    "parallel.strategy=ddp",
)
REASONS = [
    "parallel.num_processes 2: no GPU",
    "parallel.strategy ddp: several processes",
    "parallel.num_processes: 2 processes share 1 core",
    "train.micro_batch_size 2: examples of up to 1024 tokens",
    "accelerate.yaml: mixed_precision: nothing to do",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    return tmp_path


def a_run(*overrides: str, name: str = "tiny-20260101-120000") -> Path:
    run = Path("runs") / name
    run.mkdir(parents=True)
    recipe = load_recipe(Path("tiny.yaml"), [*RESOLVED, *overrides])
    run_directory.record(run, run_directory.format_recipe(recipe), "tiny", REASONS)
    return run


def read_request(words: list[str], resume: str, translation: Translation | None = None) -> RunRequest:
    recipe, overrides = split_words(words)
    return build_request(recipe, overrides, resume, translation)


@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "a link to a device", "a named pipe"])
@pytest.mark.parametrize("name", ["events.jsonl", "logs/rank-0.log", "ledger/rank-1.jsonl", "logs/restarts.json"])
def test_a_run_whose_files_lead_elsewhere_is_not_resumed(here: Path, name: str, kind: str) -> None:
    """A run of somebody else, whose events would be added to a file of this user, or which would wait without end."""
    run = a_run()
    file, own = run / name, here / ".profile"
    file.parent.mkdir(exist_ok=True)
    own.write_text("export EDITOR=vi")
    if kind == "a named pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"a link": own, "a link to nothing": here / "none"}.get(kind, Path("/dev/zero")))
    for words, resume in ([], str(run)), (["tiny.yaml"], ""), ([str(run / "recipe.yaml")], ""):
        with pytest.raises(RequestError, match=f"--resume: .*{name} is {kind[:6]}.*, not a file"):
            read_request(words, resume)


def test_a_run_with_checkpoints_on_another_disk_is_resumed(here: Path) -> None:
    run = a_run()
    (here / "disk").mkdir()
    (run / "checkpoints").symlink_to(here / "disk")
    assert read_request([], str(run)).run == run


@pytest.mark.parametrize("name", ["checkpoints", "logs", "ledger", "tensorboard", "final"])
def test_a_run_whose_folders_lead_elsewhere_is_not_resumed(here: Path, name: str) -> None:
    """Those of another run: its checkpoints would be removed as old ones of this run."""
    run, other = a_run(), a_run(name="other")
    (other / name).mkdir()
    (run / name).symlink_to((other / name).absolute())
    with pytest.raises(RequestError, match=f"--resume: .*{name} is a link"):
        read_request([], str(run))


def refused(run: Path, path: Path | None, *overrides: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        load_resumed_recipe(run, path, overrides)
    return str(caught.value).splitlines()


def goes_on(run: Path, path: Path | None, *overrides: str) -> RecipeSchema:
    return load_resumed_recipe(run, path, overrides).recipe


def test_the_same_recipe_goes_on_as_the_run_was_resolved() -> None:
    run = a_run()
    before = load_recipe(run / "recipe.yaml")
    assert goes_on(run, Path("tiny.yaml")) == before
    assert goes_on(run, None) == before
    assert goes_on(run, run / "recipe.yaml") == before


def test_every_difference_that_makes_another_run_is_named_with_both_values_and_its_place() -> None:
    run = a_run()
    text = RECIPE.replace("1e-3", "2e-3").replace("hidden_size: 64", "hidden_size: 96, attention_bias: true")
    Path("tiny.yaml").write_text(text)
    assert refused(run, Path("tiny.yaml"), "data.max_length=64", "train.mixed_precision=bf16") == [
        f"tiny.yaml: differs from {run}, the run to resume",
        "  model.config.hidden_size: 64 in the run, now 96 (tiny.yaml:2)",
        "  model.config.attention_bias: nothing in the run, now true (tiny.yaml:2)",
        "  data.max_length: 1024 in the run, now 64 (override 'data.max_length=64')",
        "  optimizer.learning_rate: 0.001 in the run, now 0.002 (tiny.yaml:4)",
        "  train.mixed_precision: no in the run, now bf16 (override 'train.mixed_precision=bf16')",
        f"restore the value, or leave out the recipe (trainwright train --resume {run}), or start a new run "
        "(without --resume)",
    ]


def test_an_override_that_the_run_began_with_and_that_is_left_out_now_is_a_difference() -> None:
    run = a_run("optimizer.weight_decay=0.1")
    lines = refused(run, Path("tiny.yaml"))
    assert lines[1] == "  optimizer.weight_decay: 0.1 in the run, now 0.0 (the default)"
    assert goes_on(run, None).optimizer.weight_decay == 0.1


def test_an_override_alone_is_refused_too() -> None:
    run = a_run()
    assert refused(run, None, "train.seed=1") == [
        f"--resume {run}: these values cannot change when a run is resumed",
        "  train.seed: 0 in the run, now 1 (override 'train.seed=1')",
        "remove the override, or start a new run (without --resume)",
    ]


@pytest.mark.parametrize(
    ("override", "key", "value", "line"),
    [
        ("checkpoint.every=5", "checkpoint.every", 5, "checkpoint.every 5: auto until"),
        ("checkpoint.keep_last=9", "checkpoint.keep_last", 9, "checkpoint.keep_last 9: 2 until"),
        ("evaluate.every=null", "evaluate.every", None, "evaluate.every null: 10 until"),
        (
            "logging.observers.tensorboard=false",
            "logging.observers.tensorboard",
            False,
            "tensorboard false: true until",
        ),
        ("parallel.strategy=fsdp", "parallel.strategy", "fsdp", "parallel.strategy fsdp: ddp until"),
        ("train.micro_batch_size=4", "train.micro_batch_size", 4, "train.micro_batch_size 4: 2 until"),
        ("train.activation_checkpointing=full", "train.activation_checkpointing", "full", "none until"),
        ("train.compile=true", "train.compile", True, "train.compile true: false until"),
        ("train.max_steps=31", "train.max_steps", 31, "train.max_steps 31: 30 until"),
    ],
)
def test_what_only_spreads_measures_or_keeps_the_run_changes_and_is_told(
    override: str, key: str, value: object, line: str
) -> None:
    run = a_run()
    recipe, reasons, _ = load_resumed_recipe(run, None, [override])
    section, *names = key.split(".")
    set_value: object = getattr(recipe, section)
    for name in names:
        set_value = set_value[name] if isinstance(set_value, dict) else getattr(set_value, name)
    assert set_value == value
    told = [reason for reason in reasons if reason.endswith(f" until the run was resumed (override {override!r})")]
    assert len(told) == 1 and line in told[0]

    written = override.partition("=")[2]
    for name in reversed(names):
        written = f"{{{name}: {written}}}"
    Path("tiny.yaml").write_text(f"include: base.yaml\n{section}: {written}\n")
    Path("base.yaml").write_text(RECIPE)
    assert goes_on(run, Path("tiny.yaml")) == recipe


@pytest.mark.parametrize("override", ["train.max_steps=29", "train={max_steps: null, epochs: 3}"])
def test_a_run_becomes_longer_and_nothing_else(override: str) -> None:
    lines = refused(a_run(), None, override)
    assert lines[1].startswith("  train.max_steps: 30 in the run, now ")
    assert lines[1].endswith("; a run can only become longer, by the key that its recipe sets")


def test_auto_in_the_recipe_is_what_the_run_has_and_an_override_with_auto_is_chosen_anew() -> None:
    run = a_run()
    Path("tiny.yaml").write_text(RECIPE + "parallel: {num_processes: auto}\n")
    assert goes_on(run, Path("tiny.yaml")).parallel.num_processes == 2
    parallel = goes_on(run, Path("tiny.yaml"), "parallel.num_processes=auto").parallel
    assert (parallel.num_processes, parallel.strategy) == ("auto", "auto")


def test_another_number_of_processes_decides_anew_what_it_had_decided() -> None:
    run = a_run("train.gradient_accumulation_steps=2")
    recipe, reasons, _ = load_resumed_recipe(run, None, ["parallel.num_processes=1"])
    assert (recipe.parallel.strategy, recipe.train.gradient_accumulation_steps) == ("auto", "auto")
    assert recipe.train.micro_batch_size == 2
    assert reasons == (
        "train.micro_batch_size 2: examples of up to 1024 tokens",
        "accelerate.yaml: mixed_precision: nothing to do",
        "parallel.num_processes 1: 2 until the run was resumed (override 'parallel.num_processes=1')",
    )
    kept = goes_on(run, None, "parallel.num_processes=4", "parallel.strategy=ddp").parallel
    assert (kept.num_processes, kept.strategy) == (4, "ddp")
    sharded = a_run("parallel.strategy=fsdp", name="sharded")
    assert goes_on(sharded, None, "parallel.num_processes=4").parallel.strategy == "fsdp"


MACHINE = Machine("here", "Some CPU", 2, 2**34, (), memory_free_bytes=2**34)
STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")


SHAPE = ("intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=4", "max_position_embeddings=2048")


def planned(strategy: str, *overrides: str) -> Path:
    """A run as the plan has made it, of a recipe that says its strategy and nothing else of how it is spread."""
    run = Path("runs") / f"of-{strategy}"
    run.mkdir(parents=True)
    Path("rows.jsonl").write_text('{"question": "Why?", "answer": "Because."}\n' * 16)
    fixed = ("train.mixed_precision=no", *(f"model.config.{value}" for value in SHAPE))
    asked = load_recipe(Path("tiny.yaml"), [*fixed, f"parallel.strategy={strategy}", *overrides])
    resolved = resolve(asked, MACHINE)
    text = run_directory.format_recipe(resolved.recipe)
    run_directory.record(run, text, "tiny", resolved.reasons, {}, resolved.chosen)
    return run


@pytest.mark.parametrize("after", STRATEGIES)
@pytest.mark.parametrize("before", STRATEGIES)
def test_every_strategy_goes_on_as_every_other(before: str, after: str) -> None:
    processes = f"parallel.num_processes={1 if before == 'single' else 2}"
    run = planned(before, processes)
    recipe = load_recipe(run / "recipe.yaml")
    if before == "fsdp":
        assert not recipe.parallel.reshard_after_forward, "the plan has chosen what another strategy does not read"
    count = f"parallel.num_processes={1 if after == 'single' else 2}"
    request = read_request([f"parallel.strategy={after}", count], str(run))
    resolved = resolve_request(request, MACHINE)
    assert resolved.recipe.parallel.strategy == after
    # And back again, by the recipe that this leaves behind.
    text = run_directory.format_recipe(resolved.recipe)
    run_directory.record(run, text, "tiny", resolved.reasons, {}, resolved.chosen)
    back = resolve_request(read_request([f"parallel.strategy={before}", processes], str(run)), MACHINE)
    assert back.recipe.parallel == recipe.parallel and back.recipe.train == recipe.train


def test_a_number_of_processes_that_was_chosen_follows_the_strategy_and_one_that_was_written_stays() -> None:
    chosen = planned("ddp", "parallel.num_processes=auto")
    assert "parallel.num_processes" in run_directory.read_chosen_keys(chosen)
    resolved = resolve_request(read_request(["parallel.strategy=single"], str(chosen)), MACHINE)
    assert resolved.recipe.parallel.num_processes == 1
    written = planned("zero1", "parallel.num_processes=2")
    with pytest.raises(RequestError, match=r"single runs one process, but parallel\.num_processes is 2"):
        read_request(["parallel.strategy=single"], str(written))


def test_a_key_of_another_strategy_that_the_user_wrote_is_refused_by_its_place() -> None:
    run = planned("fsdp", "parallel.num_processes=2", "parallel.reshard_after_forward=false")
    assert "parallel.reshard_after_forward" not in run_directory.read_chosen_keys(run)
    with pytest.raises(RequestError, match=r"reshard_after_forward: has no effect with parallel\.strategy ddp"):
        read_request(["parallel.strategy=ddp"], str(run))
    both = ["parallel.strategy=ddp", "parallel.reshard_after_forward=true"]
    assert read_request(both, str(run)).recipe.parallel.strategy == "ddp"


def test_the_reasons_of_the_run_are_kept_while_they_hold() -> None:
    run = a_run()
    assert load_resumed_recipe(run, None, []).reasons == (*REASONS[:2], *REASONS[3:])
    prompts = f"evaluate.prompts=[{'why ' * 30}]"
    for override in (prompts, "checkpoint.every=5", "checkpoint.every=6"):
        recipe, reasons, _ = load_resumed_recipe(run, None, [override])
        run_directory.record(run, run_directory.format_recipe(recipe), "tiny", reasons)
    kept = load_resumed_recipe(run, None, []).reasons
    assert [line.partition(" until")[0] for line in kept[4:]] == [
        f'evaluate.prompts ["{"why " * 14}...: []'.replace(" ...", "..."),
        "checkpoint.every 6: 5",
    ]


def test_an_accelerate_file_is_held_against_the_run_too_and_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    Path("accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: 'no'\nnum_processes: 3\n"
        "rdzv_backend: static\nuse_cpu: true\n"
    )
    run = a_run()
    translation = read_translation(Path("accelerate.yaml"))
    request = read_request([], str(run), translation)
    assert request.recipe.parallel.num_processes == 3
    assert [line for line in request.reasons if line.startswith("parallel.num_processes ")] == [
        "parallel.num_processes 3: 2 until the run was resumed (accelerate.yaml:4: num_processes: 3)"
    ]
    run_directory.record(run, run_directory.format_recipe(request.recipe), request.stem, request.reasons)
    again = read_request([], str(run), translation)
    assert again.reasons == request.reasons
    Path("accelerate.yaml").write_text(Path("accelerate.yaml").read_text().replace("'no'", "bf16"))
    with pytest.raises(RequestError, match=r"train\.mixed_precision: no in the run, now bf16"):
        read_request([], str(run), read_translation(Path("accelerate.yaml")))


def test_a_run_stays_in_its_directory() -> None:
    run = a_run()
    assert goes_on(run, None, f"logging.run_directory={run.resolve()}").logging.run_directory == "auto"
    lines = refused(run, None, "logging.run_directory=elsewhere")
    assert lines[1] == (
        f"  logging.run_directory: {run} in the run, now elsewhere (override 'logging.run_directory=elsewhere')"
    )


def test_a_change_that_contradicts_the_run_is_refused_with_its_place() -> None:
    run = a_run()
    with pytest.raises(
        RequestError, match=r"^override 'train\.micro_batch_size=9': train\.micro_batch_size: 9 is more"
    ):
        load_resumed_recipe(run, None, ["train.micro_batch_size=9"])


def test_the_newest_run_of_the_recipe_is_the_one_that_is_resumed() -> None:
    a_run()
    newest = a_run("train.seed=5", name="tiny-20260102-120000")
    request = read_request(["tiny.yaml", "train.seed=5"], "")
    assert (request.run, request.stem, request.recipe.train.seed) == (newest, "tiny", 5)
    with pytest.raises(RequestError, match=rf"trainwright train --resume {newest}"):
        read_request(["tiny.yaml"], "")


def test_a_runs_own_recipe_is_a_new_run_of_the_same_name_or_with_resume_that_run() -> None:
    run = a_run()
    a_run(name="tiny-20260301-120000")
    own = str(run / "recipe.yaml")
    new = read_request([own], None)
    assert (new.run, new.stem, new.recipe.logging.run_directory) == (None, "tiny", "auto")
    assert read_request([own], "").run == run
    Path("copy.yaml").write_text(Path(own).read_text())
    assert read_request(["copy.yaml"], None).stem == "copy"


def test_the_path_of_a_recipe_may_have_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sweep/asked/learning_rate=1e-3,seed=0.yaml", "data.train=rows/a=b.jsonl", "train.seed=1"]
    assert split_words(words) == (Path(words[0]), words[1:])
    assert split_words(["train.seed=1"]) == (None, ["train.seed=1"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1.yaml").touch()
    assert split_words(["seed=1.yaml", "train.seed=1"]) == (Path("seed=1.yaml"), ["train.seed=1"])
    with pytest.raises(RequestError, match="expected one recipe, not 2"):
        split_words(["a.yaml", "b/c=1.yaml"])
    (tmp_path / "seed=2").mkdir()
    assert not is_bare_resume("seed=2") and not is_bare_resume("runs/seed=2") and is_bare_resume("train.seed=2")


def test_the_recipe_of_a_run_whose_model_was_damaged_is_named() -> None:
    """The keys of ``model.config`` are known only once the model is planned."""
    run = planned("single", "parallel.num_processes=1")
    text = (run / "recipe.yaml").read_text()
    assert "num_attention_heads" in text
    (run / "recipe.yaml").write_text(text.replace("num_attention_heads", "nul_attention_heads"))
    with pytest.raises(RequestError, match=r"model\.config: num_attention_heads is missing") as raised:
        resolve_request(read_request([], str(run)), MACHINE)
    assert str(run / "recipe.yaml") in str(raised.value)
