"""Public configurations of other tools, trained by the tool itself and by the recipe that `recipe from` makes of them.

    python bench/beside_tools.py DIRECTORY --python axolotl=FILE llamafactory=FILE
    python bench/beside_tools.py DIRECTORY --only trl/

DIRECTORY has clones of the tools' repositories. Each tool runs in an environment of its own: TRL's is made on demand,
those of Axolotl and LLaMA-Factory are given by their interpreters.

The model of a file becomes a tiny one of its family with random weights and the first 4,096 tokens of SmolLM2's
vocabulary, its data eight rows with the same columns, its batch all of them, so that both sides see the same rows at
each step whatever their order.
Dropout and warm-up are zero, and weights fp32: `docs/coming-from.md` says what differs in these. An adapter begins with
Trainwright's values. The rest of the file is as published. Shown are whether the tokens and targets of all rows are
equal, and the largest difference between the losses of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from support.inputs import find_model
from support.peers import REQUIREMENTS, peer_python
from support.results import results_directory
from support.runs import write_results

if TYPE_CHECKING:
    from trainwright.recipe.schema import RecipeSchema

STEPS, ROWS, THREADS = 20, 8, 1
TOKENS = 4096
RESULTS = results_directory() / "beside_tools.json"
VOCABULARY = "HuggingFaceTB/SmolLM2-135M-Instruct"
RUNNER = Path(__file__).parent / "peers" / "tool_run.py"


@dataclass(frozen=True)
class Family:
    """What a tiny model of a family has of the published one: its class, special tokens and template; and how its
    tokenizer splits texts, where that decides whether a prompt has the same tokens with an answer after it.
    """

    model_type: str
    end: str
    template: str | None
    begin: str | None = None
    more: tuple[str, ...] = ()
    split: str | None = None


QWEN25 = Family("qwen2", "<|im_end|>", "qwen")
QWEN25_BASE = Family("qwen2", "<|endoftext|>", "qwen")
QWEN3 = Family("qwen3", "<|im_end|>", "chatml")
LLAMA3 = Family("llama", "<|end_of_text|>", None, "<|begin_of_text|>")
LLAMA3_INSTRUCT = Family(
    "llama",
    "<|eot_id|>",
    "llama3",
    "<|begin_of_text|>",
    ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
MISTRAL = Family("mistral", "</s>", None, "<s>")
MISTRAL_INSTRUCT = Family("mistral", "</s>", "mistral", "<s>")


@dataclass(frozen=True)
class Case:
    """A file of a tool's repository, or the command in the first lines of a script of it, with changes of its keys."""

    tool: str
    file: str
    family: Family
    rows: str
    changes: dict[str, Any] = field(default_factory=dict)


# Keys of transformers' TrainingArguments, which LLaMA-Factory and TRL read.
TRAINING = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": ROWS // 2,
    "max_steps": STEPS,
    "warmup_steps": 0,
    "bf16": False,
    "save_strategy": "no",
}
# Axolotl averages the losses of micro-batches, however many targets they have.
AT_ONCE = {"micro_batch_size": ROWS, "gradient_accumulation_steps": 1}
PACKED_ONCE = {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
SHORT = {"sequence_len": 1024}  # Axolotl pads packs, and a step of 8,192 tokens takes minutes on a CPU
CASES = [
    Case("trl", "trl/examples/cli_configs/example_config.yaml", QWEN25_BASE, "texts"),
    Case("trl", "trl/trl/scripts/sft.py", QWEN25_BASE, "messages", {"packing": False}),
    Case("trl", "trl/trl/scripts/dpo.py", QWEN25, "pairs"),
    Case("axolotl", "axolotl/examples/llama-3/lora-1b.yml", LLAMA3, "alpaca", PACKED_ONCE),
    Case("axolotl", "axolotl/examples/llama-3/instruct-lora-8b.yml", LLAMA3_INSTRUCT, "messages", AT_ONCE),
    Case("axolotl", "axolotl/examples/mistral/config.yml", MISTRAL, "alpaca", PACKED_ONCE | SHORT),
    Case("axolotl", "axolotl/examples/qwen2/dpo.yaml", QWEN25_BASE, "answers"),
    Case("llamafactory", "LLaMA-Factory/examples/train_lora/qwen3_lora_sft.yaml", QWEN3, "alpaca"),
    Case("llamafactory", "LLaMA-Factory/examples/train_lora/qwen3_lora_dpo.yaml", QWEN3, "sharegpt_pairs"),
    Case("llamafactory", "LLaMA-Factory/examples/train_full/qwen3_full_sft.yaml", QWEN3, "alpaca"),
    Case("llamafactory", "LLaMA-Factory/examples/extras/dft/qwen2_full_sft.yaml", QWEN25, "alpaca"),
    Case("llamafactory", "LLaMA-Factory/examples/extras/loraplus/llama3_lora_sft.yaml", LLAMA3_INSTRUCT, "alpaca"),
]


def main() -> None:
    arguments = parse_arguments()
    results, failures = [], []
    with tempfile.TemporaryDirectory(prefix="beside-tools-") as temporary:
        work = arguments.work or Path(temporary)
        for number, case in enumerate(CASES):
            if not any(text in f"{case.tool} {case.file}" for text in arguments.only):
                continue
            try:
                results.append(compare(case, arguments.directory / case.file, work / str(number), arguments.python))
                print(line(results[-1]), flush=True)
            except subprocess.CalledProcessError as error:
                failures.append(f"{case.file}: {shlex.join(error.cmd)} ended with exit code {error.returncode}")
                print(failures[-1], flush=True)
    write_results(arguments.output, {"steps": STEPS, "rows": ROWS, "cases": results, "failures": failures})
    if failures:
        raise SystemExit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a directory with clones of the tools' repositories")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only files with one of these in their names"
    )
    parser.add_argument("--python", nargs="*", default=[], metavar="TOOL=FILE", help="an interpreter that has the tool")
    parser.add_argument("--work", type=Path, help="keep files of the runs in this directory")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def compare(case: Case, file: Path, work: Path, pythons: list[str]) -> dict[str, Any]:
    """Train both sides, and return what differs."""
    work.mkdir(parents=True)
    model = write_model(case.family, work / "model")
    changed = CHANGE[case.tool](file, model, case, work)
    losses, sequences, adapter = run_ours(changed, work)
    theirs = run_theirs(case.tool, changed, adapter, work, dict(each.split("=", 1) for each in pythons))
    differences = [abs(ours - other) for ours, other in zip(losses, theirs["losses"], strict=True)]
    return {
        "tool": case.tool,
        "file": case.file,
        "targets_equal": sequences == counted(theirs["sequences"]),
        "targets": sum(len(targets) * count for (_, targets), count in sequences.items()),
        "losses": losses,
        "their_losses": theirs["losses"],
        "largest_difference": max(differences),
        "first_difference": max(differences[:3]),
    }


def line(result: dict[str, Any]) -> str:
    equal = "equal" if result["targets_equal"] else "NOT EQUAL"
    return (
        f"{result['tool']:13} {result['file'].split('/', 2)[2]:45} {result['targets']:5} targets {equal}, "
        f"losses within {result['first_difference']:.1e} in 3 steps, {result['largest_difference']:.1e} in {STEPS}"
    )


def write_model(family: Family, directory: Path) -> Path:
    """Write a model of two layers with random weights, and a tokenizer with the first tokens of SmolLM2's."""
    import torch
    from tokenizers import Regex, Tokenizer
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from trainwright.data.rows.chat_templates import read_template

    tokens = json.loads((find_model(VOCABULARY) / "tokenizer.json").read_text())
    kept = {token: index for token, index in tokens["model"]["vocab"].items() if index < TOKENS}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in tokens["model"]["merges"]]
    tokens["model"] |= {"vocab": kept, "merges": [pair for pair in pairs if {*pair, "".join(pair)} <= kept.keys()]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokens)))
    if family.split:
        parts = [Split(Regex(family.split), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
    special = [token for token in (family.begin, family.end, *family.more) if token]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = family.begin, family.end, "<|endoftext|>"
    tokenizer.chat_template = read_template(family.template) if family.template else None
    if family.begin:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{family.begin} $A",
            pair=f"{family.begin} $A {family.begin} $B",
            special_tokens=[(family.begin, tokenizer.bos_token_id)],
        )
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family.model_type,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        initializer_range=0.1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=8192,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def write_rows(kind: str, directory: Path, first: int = 0, count: int = ROWS) -> Path:
    """Write rows of a kind as JSON lines."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [ROW[kind](number) for number in range(first, first + count)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "train.jsonl"


def _question(number: int) -> str:
    return f"What is {number} times {number + 3}?" + " Say how you know." * (number % 3)


def _answer(number: int, mistake: int = 0) -> str:
    return f"It is {number * (number + 3) + mistake}." + " Multiply them." * (number % 4)


def _turn(role: str, content: str, keys: tuple[str, str] = ("role", "content")) -> dict[str, str]:
    return dict(zip(keys, (role, content), strict=True))


_SHAREGPT = ("from", "value")
ROW: dict[str, Callable[[int], dict[str, Any]]] = {
    "texts": lambda number: {"text": f"{_question(number)} {_answer(number)}", "label": number % 2},
    "alpaca": lambda number: {
        "instruction": _question(number),
        "input": "Use words." if number % 2 else "",
        "output": _answer(number),
    },
    "messages": lambda number: {
        "messages": [
            _turn("user", _question(number)),
            _turn("assistant", _answer(number)),
            _turn("user", _question(number + 1)),
            _turn("assistant", _answer(number + 1)),
        ]
    },
    "answers": lambda number: {
        "conversation": [_turn("user", _question(number))],
        "chosen": _turn("assistant", _answer(number)),
        "rejected": _turn("assistant", _answer(number, 7)),
    },
    "sharegpt_pairs": lambda number: {
        "conversations": [_turn("human", _question(number), _SHAREGPT)],
        "chosen": _turn("gpt", _answer(number), _SHAREGPT),
        "rejected": _turn("gpt", _answer(number, 7), _SHAREGPT),
    },
    "pairs": lambda number: {
        "chosen": [_turn("user", _question(number)), _turn("assistant", _answer(number))],
        "rejected": [_turn("user", _question(number)), _turn("assistant", _answer(number, 7))],
    },
}


def change_axolotl(file: Path, model: Path, case: Case, work: Path) -> Path:
    configuration = yaml.safe_load(file.read_text())
    sets = configuration["datasets"]
    for number, each in enumerate(sets):
        count = ROWS // len(sets)
        each |= {"path": str(write_rows(case.rows, work / f"rows-{number}", number * count, count)), "ds_type": "json"}
    for key in (
        *("evals_per_epoch", "saves_per_epoch", "warmup_ratio", "special_tokens", "num_epochs", "tokenizer_type"),
        *("loss_watchdog_threshold", "loss_watchdog_patience"),  # random weights have a larger loss
    ):
        configuration.pop(key, None)
    if configuration.get("adapter"):
        configuration |= {"adapter": "lora", "lora_dropout": 0.0}
        configuration |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # need a GPU
    configuration |= {
        "base_model": str(model),
        "load_in_4bit": False,
        "load_in_8bit": False,
        "val_set_size": 0,
        "dataset_prepared_path": str(work / "prepared"),
        "output_dir": str(work / "theirs"),
        "micro_batch_size": 2,
        "gradient_accumulation_steps": ROWS // 2,
        "max_steps": STEPS,
        "warmup_steps": 0,
        "optimizer": "adamw_torch",
        "bf16": False,
        "fp16": False,
        "attn_implementation": "sdpa",
        "save_strategy": "no",
    }
    return written(configuration | case.changes, work)


def change_llamafactory(file: Path, model: Path, case: Case, work: Path) -> Path:
    configuration = yaml.safe_load(file.read_text())
    names = configuration["dataset"].split(",")
    sets: dict[str, Any] = {}
    for number, name in enumerate(names):
        count = ROWS // len(names)
        write_rows(case.rows, work / "data" / name, number * count, count)
        sets[name] = {"file_name": f"{name}/train.jsonl"}
        if case.rows == "sharegpt_pairs":
            columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
            sets[name] |= {"ranking": True, "formatting": "sharegpt", "columns": columns}
    (work / "data" / "dataset_info.json").write_text(json.dumps(sets))
    for key in ("num_train_epochs", "warmup_ratio", "deepspeed", "ddp_timeout"):
        configuration.pop(key, None)
    configuration |= {
        "model_name_or_path": str(model),
        "dataset_dir": str(work / "data"),
        "output_dir": str(work / "theirs"),
        **TRAINING,
        "preprocessing_num_workers": 1,
        "dataloader_num_workers": 0,
        "plot_loss": False,
    }
    return written(configuration | case.changes, work)


def change_trl(file: Path, model: Path, case: Case, work: Path) -> Path:
    command = (
        re.search(r"^python \S+\.py(.*\\\n)+.*$", file.read_text(), re.MULTILINE) if file.suffix == ".py" else None
    )
    configuration = arguments_of(command[0]) if command else yaml.safe_load(file.read_text())
    for key in ("num_train_epochs", "eval_strategy", "eval_steps", "push_to_hub"):
        configuration.pop(key, None)
    rows = write_rows(case.rows, work / "rows")
    configuration |= {
        "model_name_or_path": str(model),
        "dataset_name": str(rows.parent),
        "output_dir": str(work / "theirs"),
        **TRAINING,
        "report_to": "none",
    }
    configuration |= case.changes
    if not command:
        return written(configuration, work)
    words = [
        word for key, value in configuration.items() for word in (f"--{key}", *([] if value is None else [str(value)]))
    ]
    (work / "changed.sh").write_text(shlex.join(["python", f"trl/scripts/{file.name}", *words]) + "\n")
    return work / "changed.sh"


def arguments_of(command: str) -> dict[str, Any]:
    """Return the options of a command with their values, None without one."""
    words = shlex.split(command.replace("\\\n", " "))[2:]
    names = [(number, word[2:]) for number, word in enumerate(words) if word.startswith("--")]
    ends = [number for number, _ in names[1:]] + [len(words)]
    return {name: " ".join(words[number + 1 : end]) or None for (number, name), end in zip(names, ends, strict=True)}


CHANGE = {"axolotl": change_axolotl, "llamafactory": change_llamafactory, "trl": change_trl}


def written(configuration: dict[str, Any], work: Path) -> Path:
    file = work / "changed.yaml"
    file.write_text(yaml.safe_dump(configuration, sort_keys=False))
    return file


def run_ours(changed: Path, work: Path) -> tuple[list[float], Counter[Any], Path | None]:
    """Convert and train; return the losses, the rows as tokens and targets, and the adapter's first values."""
    from trainwright.models.load import load_tokenizer
    from trainwright.recipe.loading import load_recipe
    from trainwright.tasks.language_model import prepare_data

    recipe = work / "recipe.yaml"
    trainwright("recipe", "from", str(changed), "--rows", str(ROWS), "-o", str(recipe), log=work / "conversion.log")
    ours = work / "ours"
    fixed = ("parallel.strategy=single", "parallel.num_processes=1", "parallel.device=cpu", "train.compile=false")
    trainwright("train", str(recipe), f"logging.run_directory={ours}", *fixed, log=work / "ours.log")
    events = [json.loads(text) for text in (ours / "events.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    resolved = load_recipe(ours / "recipe.yaml")
    adapter = None if resolved.model.adapter.type == "none" else write_adapter(resolved, work / "adapter.safetensors")
    data = prepare_data(resolved, load_tokenizer(resolved.model), work / "cache").train
    begins = data.offsets[:-1]
    rows = [
        (data.tokens[begin:end].tolist(), data.targets[begin:end].nonzero()[0].tolist())
        for begin, end in zip(begins, data.offsets[1:], strict=True)
    ]
    return losses, counted(rows), adapter


def write_adapter(recipe: RecipeSchema, file: Path) -> Path:
    """Write the values that the adapter of a recipe begins with, by PEFT's names."""
    from safetensors.torch import save_file

    from trainwright.models.adapters.attaching import attach_adapter
    from trainwright.models.load import load_model

    model = load_model(recipe.model, seed=recipe.train.seed)
    attach_adapter(model, recipe.model, recipe.train.seed)
    named = {name.replace(".default", ""): value for name, value in model.named_parameters() if ".lora_" in name}
    save_file({f"base_model.model.{name}": value.detach().contiguous() for name, value in named.items()}, file)
    return file


def run_theirs(tool: str, changed: Path, adapter: Path | None, work: Path, pythons: dict[str, str]) -> dict[str, Any]:
    job = {"tool": tool, "file": str(changed), "threads": THREADS, "result": str(work / "result.json")}
    (work / "job.json").write_text(json.dumps(job | {"adapter": str(adapter) if adapter else None}))
    if tool not in pythons and not (REQUIREMENTS / f"{tool}.txt").exists():
        raise SystemExit(f"pass --python {tool}=FILE, an interpreter that has it")
    python = pythons.get(tool) or str(peer_python(tool))
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "home"),
        "AXOLOTL_DO_NOT_TRACK": "1",
        "WANDB_MODE": "disabled",
    }
    run([python, str(RUNNER), str(work / "job.json")], work / "theirs.log", {**os.environ, **offline})
    result: dict[str, Any] = json.loads((work / "result.json").read_text())
    return result


def counted(rows: list[Any]) -> Counter[Any]:
    """Return the rows that have targets up to the last one, regardless of their order.

    A first token has nothing that predicts it, and those after the last target predict nothing.
    """
    kept = [(tokens, tuple(target for target in targets if target)) for tokens, targets in rows]
    return Counter((tuple(tokens[: targets[-1] + 1]), targets) for tokens, targets in kept if targets)


def trainwright(*arguments: str, log: Path) -> None:
    run([sys.executable, "-m", "trainwright", *arguments], log, dict(os.environ))


def run(command: list[str], log: Path, environment: dict[str, str]) -> None:
    with log.open("w") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=True)


if __name__ == "__main__":
    main()
