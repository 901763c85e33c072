"""What is wrong in a recipe is said with its file, line and key, and all of it at once."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe

_TASK = "task: sft\ndata: {train: pydoc}\n"
SMALLEST = "task: sft\nmodel: {name: some/model}\ndata: {train: pydoc}\n"

Refusal = Callable[..., list[str]]
Write = Callable[..., Path]


def test_a_mistyped_key_names_its_nearest_neighbour(refusal: Refusal) -> None:
    assert refusal("train:\n  seed: 1\n  glbal_batch_size: 8\n") == [
        "run.yaml:6: train.glbal_batch_size: unknown key; did you mean global_batch_size?"
    ]


def test_a_mistyped_section_names_its_nearest_neighbour(refusal: Refusal) -> None:
    assert refusal("optimiser: {weight_decay: 0.1}\n") == [
        "run.yaml:4: optimiser: unknown key; did you mean optimizer?"
    ]


@pytest.mark.parametrize("text", ["learning_rate: 1e-3\n", "train:\n  learning_rate: 1e-3\n"])
def test_a_key_in_the_wrong_section_names_the_right_one(refusal: Refusal, text: str) -> None:
    [line] = refusal(text)
    assert line.endswith("learning_rate: unknown key; did you mean optimizer.learning_rate?")


def test_a_key_like_no_other_lists_those_there_are(refusal: Refusal) -> None:
    assert refusal("checkpoint: {qqq: 1}\n") == [
        "run.yaml:4: checkpoint.qqq: unknown key; choose from every, keep_last, copies, keep_best, background, "
        "on_failure"
    ]


def test_keys_that_are_no_text_are_unknown(refusal: Refusal) -> None:
    [line] = refusal("train: {5: 1}\n")
    assert line.startswith("run.yaml:4: train[5]: ")


def test_a_mistyped_override_is_quoted(refusal: Refusal) -> None:
    assert refusal("", "train.max_step=5") == [
        "override 'train.max_step=5': train.max_step: unknown key; did you mean max_steps?"
    ]


def test_all_problems_come_at_once_in_the_order_of_the_file(refusal: Refusal) -> None:
    lines = refusal(
        """
        optimizer:
          learning_rte: 1
          eps: tiny
        train:
          global_batch_size: 4
          micro_batch_size: 8
          seed: 1
          seed: 2
        evaluate: {every: 0}
        """,
        "logging.observers.tensorboard=perhaps",
    )
    assert [line.split(": ")[1] for line in lines] == [
        "logging.observers.tensorboard",
        "optimizer.learning_rte",
        "optimizer.eps",
        "train.micro_batch_size",
        "train.seed",
        "evaluate.every",
    ]


def test_a_mistyped_key_does_not_hide_a_contradiction_elsewhere(refusal: Refusal) -> None:
    lines = refusal("optimizer: {epss: 1}\ntrain: {global_batch_size: 4, micro_batch_size: 8}\n")
    assert [line.split(": ")[1] for line in lines] == ["optimizer.epss", "train.micro_batch_size"]


def test_a_mistyped_key_is_not_reported_as_missing_too(refusal: Refusal) -> None:
    text = "task: sft\nmodel: {nmae: x}\ndata: {trian: pydoc}\n"
    assert refusal(start=text) == [
        "run.yaml:2: model.nmae: unknown key; did you mean name?",
        "run.yaml:3: data.trian: unknown key; did you mean train?",
    ]


@pytest.mark.parametrize(
    ("override", "built_in"),
    [("evaluate.metrics=[mine]", "'rouge_l'"), ("logging.observers=[mine]", "'wandb'"), ("task=mine", "'unlearn'")],
)
def test_an_unknown_name_says_what_is_built_in_and_how_to_name_ones_own(
    override: str, built_in: str, refusal: Refusal
) -> None:
    (line,) = refusal("", override)
    assert built_in in line and line.endswith('(your own: file.py:Name or module:Name), not "mine"')


def test_missing_keys_say_what_they_are_for(refusal: Refusal) -> None:
    lines = refusal(start="task: sft\ndata: {}\n")
    assert lines[0].startswith("run.yaml: model: is missing. The model")
    assert lines[1].startswith("run.yaml:2: data.train: is missing. The rows to train on")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("task=stf", """not "stf"; did you mean sft?"""),
        ("train.max_steps=many", 'train.max_steps: expected a whole number, not "many"'),
        ("train.max_steps=1.5", "train.max_steps: expected a whole number, not 1.5"),
        ("train.max_steps=true", "train.max_steps: expected a whole number, not true"),
        ("train.max_steps=0", "train.max_steps: expected a number of at least 1, not 0"),
        (
            "train.global_batch_size=99999999999999999999",
            "expected a number of at most 1000000000000000, not 9999999999",
        ),
        ("data.pack_length=2147483648", "data.pack_length: expected a number of at most 2147483647, not 2147483648"),
        ("data.max_length=1", "data.max_length: expected a number of at least 2, not 1"),
        ("train.epochs=0", "train.epochs: expected a number above 0, not 0"),
        ("train.epochs=.inf", "train.epochs: expected a finite number, not Infinity"),
        ("train.micro_batch_size=lots", """expected a whole number or 'auto', not "lots\""""),
        (
            "train.micro_batch_size=atuo",
            """expected a whole number or 'auto', not "atuo"; did you mean auto?""",
        ),
        ("train.micro_batch_size=0", "expected a number of at least 1 or 'auto', not 0"),
        ("train.compile=maybe", """expected true or false or 'auto', not "maybe\""""),
        ("train.mixed_precision=fp8", "expected 'auto', 'no', 'bf16' or 'fp16', not \"fp8\""),
        ("train.seed=-1", "train.seed: expected a number of at least 0, not -1"),
        ("optimizer.learning_rate=fast", 'optimizer.learning_rate: expected a number, not "fast"'),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: expected a number above 0, not 0"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: expected a"),
        ("optimizer.betas=[0.9]", "optimizer.betas[1]: is missing."),
        ("optimizer.betas=[0.9, 0.99, 1]", "optimizer.betas: expected a list of 2, not a list of 3"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas[1]: expected a number below 1, not 1"),
        ("optimizer.warmup_steps=1.0", "expected a whole number of steps or a fraction below 1, not 1.0"),
        ("optimizer.warmup_steps=-1", "expected a whole number of steps or a fraction below 1, not -1"),
        ("optimizer.warmup_steps=some", "expected a whole number of steps or a fraction below 1"),
        ("optimizer.schedule=cosin", "did you mean cosine?"),
        ("data.validation=0", "data.validation: expected a fraction between 0 and 1, a whole number of rows"),
        (
            "data.validation=1.0",
            "data.validation: expected a fraction between 0 and 1, a whole number of rows",
        ),
        (
            "data.validation=true",
            "data.validation: expected a fraction between 0 and 1, a whole number of rows",
        ),
        ("data.train=5", "data.train: expected text, not 5; put it in quotes"),
        ("data.train=''", 'data.train: expected text that is not empty, not ""'),
        ("data.train=[a]", 'data.train[0]: expected a mapping, not "a"; write {source: a}'),
        (
            "data.train=['q.jsonl[:9]']",
            'data.train[0]: expected a mapping, not "q.jsonl[:9]"; write {source: "q.jsonl[:9]"}',
        ),
        ("data.train=[{source: a, wieght: 2}]", "data.train[0].wieght: unknown key; did you mean weight?"),
        ("data.train=[{weight: 2}]", "data.train[0].source: is missing. A file"),
        ("data.train=[{source: a, weight: 0}]", "data.train[0].weight: expected a number above 0, not 0"),
        ("data.train=[]", "data.train: expected a list of at least 1, not a list of 0"),
        ("data.format=mesages", "did you mean messages?"),
        ("data.max_length=1", "data.max_length: expected a number of at least 2, not 1"),
        ("model.dropout=1", "model.dropout: expected a number below 1, not 1"),
        ("model.config=llama", 'model.config: expected a mapping, not "llama"'),
        ("evaluate.prompts=hello", 'evaluate.prompts: expected a list, not "hello"'),
        ("evaluate.prompts=[hello, 5]", "evaluate.prompts[1]: expected text, not 5"),
        ("logging.observers.tensorboard=maybe", 'logging.observers.tensorboard: expected true or false, not "maybe"'),
        ("train=5", "train: expected a mapping, not 5"),
        ("train.seed.more=5", "train.seed: expected a whole number, not a mapping"),
    ],
)
def test_a_wrong_value_says_what_is_expected(refusal: Refusal, override: str, says: str) -> None:
    [line] = refusal("", override)
    assert line.startswith(f"override {override!r}: ")
    assert says in line


def test_a_wrong_item_of_a_list_has_its_own_line(refusal: Refusal) -> None:
    assert refusal("evaluate:\n  prompts:\n    - fine\n    - 5\n") == [
        "run.yaml:7: evaluate.prompts[1]: expected text, not 5; put it in quotes"
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "names"),
    [
        (["train.global_batch_size=4", "train.micro_batch_size=8"], "train.micro_batch_size", ["8", "4"]),
        (
            ["train.global_batch_size=8", "train.micro_batch_size=2", "train.gradient_accumulation_steps=3"],
            "train.gradient_accumulation_steps",
            ["train.micro_batch_size 2", "gradient_accumulation_steps 3", "num_processes auto", "size 8"],
        ),
        (
            ["train.global_batch_size=8", "train.gradient_accumulation_steps=9"],
            "train.gradient_accumulation_steps",
            ["train.micro_batch_size auto", "train.gradient_accumulation_steps 9"],
        ),
        (
            ["train.global_batch_size=8", "train.micro_batch_size=4", "train.gradient_accumulation_steps=3"],
            "train.gradient_accumulation_steps",
            ["parallel.num_processes auto"],
        ),
        (
            ["data.pack_length=2048", "train.gradient_accumulation_steps=8", "train.micro_batch_size=2"],
            "train.gradient_accumulation_steps",
            ["train.micro_batch_size", "auto"],
        ),
        (
            ["data.pack_length=2048", "train.gradient_accumulation_steps=17"],
            "train.gradient_accumulation_steps",
            ["train.global_batch_size 16"],
        ),
        (
            ["parallel.strategy=single", "parallel.num_processes=2"],
            "parallel.strategy",
            ["num_processes is 2"],
        ),
        (["data.max_length=512", "data.pack_length=256"], "data.pack_length", ["data.max_length 512"]),
        (["data.limit=10", "data.validation=10"], "data.validation", ["data.limit"]),
        (["train.max_steps=5", "train.epochs=1"], "train.max_steps", ["train.epochs", "null"]),
        (["model.name=null"], "model.name", ["model.config"]),
        (
            ["model.config={model_type: llama}", "model.tokenizer=bytes"],
            "model.name",
            ["model.config", "null"],
        ),
        (["model.name=null", "model.config={model_type: llama}"], "model.tokenizer", ["bytes"]),
        (["model.name=null", "model.config={}", "model.tokenizer=bytes"], "model.config", ["model_type"]),
        (
            ["model={name: null, config: {model_type: llama}, tokenizer: bytes, gguf_file: a.gguf}"],
            "model.gguf_file",
            ["model.name"],
        ),
        (["model.name=some/Model.GGUF", "model.gguf_file=a.gguf"], "model.gguf_file", ["some/Model.GGUF is a GGUF"]),
        (["evaluate.max_new_tokens=9"], "evaluate.max_new_tokens", ["evaluate.prompts"]),
        (["checkpoint.keep_best=true", "data.validation=null"], "checkpoint.keep_best", ["data.validation", "auto"]),
        (
            ["checkpoint.every=5", "faults.mean_time_between=6 h"],
            "faults.mean_time_between",
            ["checkpoint.every", "auto"],
        ),
        (["optimizer.decay_steps=5"], "optimizer.decay_steps", ["cosine", "warmup_stable_decay"]),
        (["optimizer.power=3"], "optimizer.power", ["cosine", "polynomial"]),
        (["optimizer.schedule=linear", "optimizer.cycles=3"], "optimizer.cycles", ["linear", "cosine_restarts"]),
        (["optimizer.schedule=inverse_sqrt"], "optimizer.schedule", ["optimizer.warmup_steps", "0.05"]),
        (
            ["optimizer.schedule=constant", "optimizer.final_learning_rate_ratio=0.1"],
            "optimizer.final_learning_rate_ratio",
            ["constant"],
        ),
        (["train.max_steps=5", "optimizer.warmup_steps=6"], "optimizer.warmup_steps", ["5 steps"]),
        (
            [
                "optimizer.schedule=warmup_stable_decay",
                "optimizer.warmup_steps=0.6",
                "optimizer.decay_steps=0.5",
            ],
            "optimizer.warmup_steps",
            ["decay"],
        ),
        (
            ["evaluate.every=5", "data.validation=null"],
            "evaluate.every",
            ["data.validation", "evaluate.prompts"],
        ),
    ],
)
def test_values_that_contradict_each_other(refusal: Refusal, overrides: list[str], key: str, names: list[str]) -> None:
    [line] = refusal("", *overrides)
    assert line.startswith("override ") or line.startswith("run.yaml:")
    assert f": {key}: " in line
    assert all(name in line for name in names)


def test_a_contradiction_has_the_line_of_its_key(refusal: Refusal) -> None:
    [line] = refusal("train:\n  global_batch_size: 4\n  micro_batch_size: 8\n")
    assert line.startswith("run.yaml:6: train.micro_batch_size: 8 is more than train.global_batch_size 4")


def test_duplicated_keys_name_both_lines(refusal: Refusal) -> None:
    assert refusal("train:\n  seed: 1\n  max_steps: 4\n  seed: 2\ntask: sft\n") == [
        "run.yaml:7: train.seed: given twice, first on line 5; keep one of the two",
        "run.yaml:8: task: given twice, first on line 1; keep one of the two",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file(refusal: Refusal, text: str) -> None:
    assert refusal(start=text) == ["run.yaml: is empty; a recipe has at least task, model and data"]


@pytest.mark.parametrize("text", ["# a list\n- task\n- sft\n", "# a word\nsft\n"])
def test_a_file_that_is_no_mapping(refusal: Refusal, text: str) -> None:
    [line] = refusal(start=text)
    assert line.startswith("run.yaml:2: a recipe is a mapping")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n\tseed: 1\n", "run.yaml:5: a tab where YAML wants spaces"),
        ("train:\n  prompts: [a, b\n", "run.yaml:5: the bracket that begins here, or one before it, is not closed"),
        ("train: {seed: *nowhere}\n", "run.yaml:4: train: {seed: *nowhere}: text that begins with a special"),
        ("evaluate:\n  prompts:\n  - @b\n", "run.yaml:6: - @b: text that begins with a special character needs quotes"),
        ("train: {seed: 1\nlogging: {}\n", "run.yaml:5: a comma is missing, or the bracket of line 4 is not closed"),
        ('train: {a: "no\nlogging: {}\n', "run.yaml:4: the quote that begins here is not closed"),
        (
            'train: {a: "\\q"}\n',
            "run.yaml:4: not valid YAML: while scanning a double-quoted scalar found unknown escape",
        ),
        ("train:\n  seed: 1\n\tmax_steps: 2\n", "run.yaml:6: a tab where YAML wants spaces"),
        (
            "train:\n    seed: 1\n  max_steps: 2\n",
            "run.yaml:6: max_steps: has less indentation (2 spaces) than seed on line 5 (4 spaces)",
        ),
        (
            "train:\n  seed: 1\n  # more\n    max_steps: 2\n",
            "run.yaml:7: max_steps: has more indentation (4 spaces) than seed on line 5 (2 spaces)",
        ),
        ("train:\n  seed:1\n  max_steps: 2\n", "run.yaml:5: seed:1: a space is missing after the colon; write seed: 1"),
        ("train:\n  max_steps: 2\n  seed:1\n", "run.yaml:6: seed:1: a space is missing after the colon; write seed: 1"),
        (
            "train:\n  seed:1\n",
            'run.yaml:4: train: expected a mapping, not "seed:1"; a space is missing after the colon',
        ),
        (
            "evaluate:\n  prompts:\n    -a\n",
            'run.yaml:5: evaluate.prompts: expected a list, not "-a"; a space is missing',
        ),
        ("evaluate:\n  prompts: - a\n", "run.yaml:5: a list does not begin behind its key; write prompts: [a]"),
        (
            "evaluate:\n  prompts:\n    - a\n   - b\n",
            "run.yaml:7: - b: has less indentation (3 spaces) than - a on line 6 (4 spaces)",
        ),
        ("evaluate:\n  prompts:\n- a\n", "run.yaml:6: - a: a list item, with 0 spaces before it, is under no key"),
        ("train: seed: 1\n", "run.yaml:4: train: has two keys on one line"),
        ("train: &a {seed: *a}\n", "run.yaml:4: recursive YAML alias"),
        ("train: !!python/object:os.system {}\n", "run.yaml:4: YAML tag"),
        ("train: !mine {}\n", "run.yaml:4: YAML tag '!mine' is not supported"),
        ("train: {seed: !!int many}\n", "run.yaml:4: not valid YAML"),
        ("? [a, b]\n: c\n", "run.yaml:4: a key must be a name"),
        ("---\ntask: sft\n", "run.yaml:4: not valid YAML"),
        ("train: {seed: \x07}\n", "run.yaml:4: character"),
        ("train:\n  seed: " + "[" * 30000 + "\n", "run.yaml:5: not valid YAML: nested more than 64 deep"),
        ("a:\n" + "".join(" " * n + "b:\n" for n in range(1, 300)), "run.yaml:67: not valid YAML: nested more"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(refusal: Refusal, text: str, says: str) -> None:
    [line] = refusal(text)
    assert line.startswith(says)


def test_a_file_that_is_not_utf8(write: Write) -> None:
    path = write("")
    path.write_bytes(b"task: sft\nmodel: {name: caf\xe9}\n")
    with pytest.raises(RequestError, match=r"run\.yaml:2: is not UTF-8 text"):
        load_recipe(path)


def test_a_byte_order_mark_is_no_problem(write: Write) -> None:
    path = write("")
    path.write_bytes(b"\xef\xbb\xbf" + SMALLEST.encode())
    assert load_recipe(path).task == "sft"


def test_a_missing_file_names_the_one_that_was_meant(write: Write) -> None:
    write(SMALLEST, "recipes/quickstart.yaml")
    with pytest.raises(RequestError, match=r"no such file; did you mean recipes/quickstart\.yaml\?"):
        load_recipe(Path("recipes/quickstrat.yaml"))
    with pytest.raises(RequestError, match=r"nowhere/a\.yaml: no such file$"):
        load_recipe(Path("nowhere/a.yaml"))
    with pytest.raises(RequestError, match=r"recipes: is a directory; pass a file$"):
        load_recipe(Path("recipes"))
    write(SMALLEST, "runs/one/recipe.yaml")
    with pytest.raises(RequestError, match=r"runs/one: is a directory; pass the recipe in it, runs/one/recipe\.yaml"):
        load_recipe(Path("runs/one"))


def test_problems_in_an_included_file_have_its_lines(refusal: Refusal, write: Write) -> None:
    write("# shared\ntrain:\n  sede: 1\n  max_steps: none\n", "shared/base.yaml")
    assert refusal("include: shared/base.yaml\n") == [
        "shared/base.yaml:3: train.sede: unknown key; did you mean seed?",
        'shared/base.yaml:4: train.max_steps: expected a whole number, not "none"',
    ]


def test_problems_of_one_value_from_elsewhere_are_one_message_with_one_fix(refusal: Refusal, write: Write) -> None:
    write("parallel: {strategy: fsdp, reshard_after_forward: false, offload_parameters: true}\n", "base.yaml")
    fix = ["parallel.reshard_after_forward=true", "parallel.offload_parameters=false"]
    lines = refusal("include: base.yaml\n", "parallel.strategy=ddp")
    assert lines == [
        "override 'parallel.strategy=ddp': parallel.strategy: \"ddp\" does not go with 2 values written elsewhere; "
        f"change it, or add {' '.join(fix)}",
        "  base.yaml:1: parallel.reshard_after_forward: has no effect with parallel.strategy ddp, only with fsdp",
        "  base.yaml:1: parallel.offload_parameters: has no effect with parallel.strategy ddp, only with fsdp, zero3",
    ]
    assert load_recipe(Path("run.yaml"), ["parallel.strategy=ddp", *fix]).parallel.strategy == "ddp"


def test_a_fix_leaves_no_next_problem(refusal: Refusal, write: Write) -> None:
    """Without the metrics their number of rows would be the next problem; without validation rows two are."""
    write("data: {validation: 0.1}\nevaluate: {metrics: [rouge_l], every: 5, generation_limit: 8}\n", "base.yaml")
    text = "task: sft\nmodel: {name: some/model}\ndata: {train: pydoc, validation: null}\ninclude: base.yaml\n"
    lines = refusal(start=text)
    assert lines[0].startswith("run.yaml:3: data.validation: null does not go with 2 values written elsewhere; change")
    fix = shlex.split(lines[0].partition("or add ")[2])
    assert load_recipe(Path("run.yaml"), fix).evaluate.metrics == []


def test_one_value_of_a_base_and_what_is_written_over_it(refusal: Refusal, write: Write) -> None:
    write("model: {adapter: {type: none}}\n", "base.yaml")
    lines = refusal(
        "include: base.yaml\nmodel: {name: some/model, adapter: {rank: 4, quantization: nf4}}\n", start=_TASK
    )
    assert len(lines) == 3
    assert lines[0].startswith('base.yaml:1: model.adapter.type: "none" does not go with 2 values written elsewhere;')
    assert not any("base.yaml" in line or "; set" in line for line in lines[1:])  # cause and fix are given once


def test_an_invalid_value_does_not_hide_a_contradiction(refusal: Refusal) -> None:
    text = "optimizer: {eps: tiny}\ntrain: {seed: x, global_batch_size: 4, micro_batch_size: 8}\n"
    keys = [line.split(": ")[1] for line in refusal(text)]
    assert keys == ["optimizer.eps", "train.seed", "train.micro_batch_size"]
    keys = [line.split(": ")[1] for line in refusal("train: {global_batch_size: 0, micro_batch_size: 8}\n")]
    assert keys == ["train.global_batch_size"]  # nothing is known of a batch that is to be written anew


@pytest.mark.parametrize("written", ["unlearn: null\n", "unlearn:\n"])
def test_the_inherited_section_of_another_task_is_removed_by_null(written: str, refusal: Refusal, write: Write) -> None:
    write("task: unlearn\nunlearn: {objective: npo}\n", "base.yaml")
    [line] = refusal("include: base.yaml\n")
    assert line == (
        "base.yaml:2: unlearn: has no effect with task sft; remove it, or set task to unlearn; unlearn: null removes "
        "an inherited one (task: run.yaml:1)"
    )
    assert load_recipe(Path("run.yaml"), ["unlearn=null"]).task == "sft"
    assert load_recipe(write(SMALLEST + "include: base.yaml\n" + written)).task == "sft"


def test_an_included_file_that_is_missing_or_broken(refusal: Refusal, write: Write) -> None:
    write("train: [\n", "broken.yaml")
    write("", "empty.yaml")
    assert refusal("include:\n  - brokn.yaml\n") == [
        "run.yaml:5: include: brokn.yaml: no such file; did you mean broken.yaml?"
    ]
    assert refusal("include: broken.yaml\n")[0].startswith("broken.yaml:1: the bracket that begins here")
    assert refusal("include: empty.yaml\n")[0].startswith("empty.yaml: is empty")
    assert refusal("include: 5\n") == ["run.yaml:4: include: expected a file name or a list of them"]
    assert refusal("include: [[a]]\n") == ["run.yaml:4: include: expected a file name or a list of them"]


def test_includes_that_go_round_in_a_circle(refusal: Refusal, write: Write) -> None:
    write("include: two.yaml\n", "one.yaml")
    write("include: run.yaml\n", "two.yaml")
    assert refusal("include: one.yaml\n") == [
        "two.yaml:1: include: circular include: run.yaml -> one.yaml -> two.yaml -> run.yaml"
    ]
    assert "circular include" in refusal("include: ./run.yaml\n")[0]


@pytest.mark.parametrize("override", ["train.max_steps", "=5", "train..seed=1", ".seed=1", " train.seed=1"])
def test_a_malformed_override(refusal: Refusal, override: str) -> None:
    assert refusal("", override) == [
        f"override {override!r}: expected section.key=value, for example train.max_steps=100"
    ]


def test_an_override_without_a_usable_value(refusal: Refusal) -> None:
    assert refusal("", "train.max_steps=") == [
        "override 'train.max_steps=': has no value; use train.max_steps=null for null"
    ]
    assert refusal("", "evaluate.prompts=[a")[0].startswith("override 'evaluate.prompts=[a': the bracket that begins")
    assert refusal("", "train={seed: 1, seed: 2}") == [
        "override 'train={seed: 1, seed: 2}': train.seed: given twice, first in the same value; keep one of the two"
    ]
    assert refusal("", "include=base.yaml") == ["override 'include=base.yaml': include is only allowed in recipe files"]
