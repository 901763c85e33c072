"""Files that scripts load: settings in YAML and JSON, and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.conversion.test_convert import converted

LOAD = "def load(path):\n    with open(path) as f:\n        return yaml.safe_load(f)\n"
LINES = """
def load(path):
    out = []
    with open(path) as f:
        for line in f:
            line = line.strip()
            if line:
                out.append(json.loads(line))
    return out
"""
CHANGES = """
def load(path):
    with open(path) as f:
        return [clean(row) for row in json.load(f)]
"""
CHOOSES = LINES.replace("if line:", 'if "x" in line:')
OPEN = 'with open("rows.jsonl") as f:\n    '
SETTINGS = "model:\n  name: owner/model\ntraining: {learning_rate: 2.0e-4, num_train_epochs: 3, packing: null}\n"
TRAINING = """
from datasets import Dataset, load_dataset, load_from_disk
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained({model})
args = SFTConfig(learning_rate={rate}, num_train_epochs={epochs}, per_device_train_batch_size=2, max_length=512)
trainer = SFTTrainer(model=model, args=args, train_dataset=rows)
trainer.train()
"""
ROWS = 'rows = load_dataset("json", data_files="rows.jsonl", split="train")\n'
KEYS = {
    "model": 'cfg["model"]["name"]',
    "rate": 'cfg["training"]["learning_rate"]',
    "epochs": 'cfg["training"].get("x", 3)',
}
CONSTANTS = {"model": "'owner/model'", "rate": "1e-4", "epochs": "1"}


def recipe_of(folder: Path, script: str, *options: str) -> dict[str, Any]:
    """The recipe of a script in a folder with settings, or its failures under ``failures``."""
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / "train.yaml").write_text(SETTINGS)
    (folder / "src").mkdir(exist_ok=True)
    file = folder / "src" / "train.py"
    file.write_text(script)
    conversion = converted(file, *options)
    failures = {setting.setting.key: setting.text for setting in conversion.failures}
    return {"failures": failures} if failures else conversion.recipe().values


@pytest.mark.parametrize(
    "loads",
    [
        'with open("configs/train.yaml") as f:\n    cfg = yaml.safe_load(f)\n',
        'cfg = yaml.safe_load(open("configs/train.yaml")) or {}\n',
        'cfg = yaml.safe_load(Path("configs/train.yaml").read_text())\n',
        'cfg = OmegaConf.load("configs/train.yaml")\n',
        LOAD + 'cfg = load("configs/train.yaml")\n',
    ],
)
def test_settings_are_read_from_the_file_that_a_script_loads(tmp_path: Path, loads: str) -> None:
    values = recipe_of(tmp_path, loads + ROWS + TRAINING.format(**KEYS))
    assert values["model"]["name"] == "owner/model"
    assert values["optimizer"]["learning_rate"] == 2e-4 and values["train"]["epochs"] == 3


def test_the_options_of_a_script_name_its_settings(tmp_path: Path) -> None:
    script = (
        (
            "from .helpers import load\nparser = argparse.ArgumentParser()\n"
            'parser.add_argument("--config", required=True)\nparser.add_argument("--num-epochs", type=int, default=1)\n'
            "args = parser.parse_args()\ncfg = load(args.config)\n"
        )
        + ROWS
        + TRAINING.format(**KEYS | {"model": "cfg.model.name", "epochs": "args.num_epochs"})
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "helpers.py").write_text(LOAD)
    failures = recipe_of(tmp_path, script)["failures"]
    assert "loads its settings from it" in failures["args.config"] and "learning_rate" not in failures
    values = recipe_of(tmp_path, script, "config=configs/train.yaml", "num_epochs=7")
    assert values["optimizer"]["learning_rate"] == 2e-4 and values["train"]["epochs"] == 7


@pytest.mark.parametrize("passed", ["args", "args['training']"])
def test_a_file_of_settings_that_is_not_there_is_named_once(tmp_path: Path, passed: str) -> None:
    unpacked = "x = SFTConfig(**cfg['training'])\n" if "[" in passed else ""
    loads = 'cfg = yaml.safe_load(open("configs/other.yaml"))\n' + unpacked
    failures = recipe_of(tmp_path, loads + ROWS + TRAINING.format(**KEYS))["failures"]
    assert failures.keys() == {"configs/other.yaml"}
    assert "the script loads its settings from it, and it is not there" in failures["configs/other.yaml"]


def test_settings_that_the_script_changes_are_not_taken(tmp_path: Path) -> None:
    loads = 'cfg = yaml.safe_load(open("configs/train.yaml"))\ncfg["training"]["learning_rate"] = compute()\n'
    failures = recipe_of(tmp_path, loads + ROWS + TRAINING.format(**KEYS))["failures"]
    assert "the script computes it" in failures["learning_rate"]


@pytest.mark.parametrize(
    "loads",
    [
        OPEN + "data = json.load(f)\nprint(len(data), data[0])\nrows = Dataset.from_list(data)\n",
        OPEN + "data = [json.loads(line) for line in f if line.strip()]\nrows = Dataset.from_list(data)\n",
        LINES + 'rows = Dataset.from_list(load("rows.jsonl"))\n',
        'rows = load_from_disk("rows.jsonl")\n',
    ],
)
def test_rows_are_those_of_the_file_that_a_script_loads(tmp_path: Path, loads: str) -> None:
    assert recipe_of(tmp_path, loads + TRAINING.format(**CONSTANTS))["data"]["train"] == "rows.jsonl"


@pytest.mark.parametrize(
    "loads",
    [
        'data = json.load(open("rows.json"))\nrandom.shuffle(data)\n',
        'data = json.load(open("rows.json"))\nfor row in data:\n    row["text"] = "x"\n',
        'data = json.load(open("rows.json"))\ndata += more\n',
        'data = json.load(open("rows.json"))["rows"]\n',
        'data = [{"text": json.loads(line)["a"]} for line in open("rows.json")]\n',
        CHANGES + 'data = load("rows.json")\n',
        CHOOSES + 'data = load("rows.json")\n',
    ],
)
def test_rows_that_a_script_changes_are_refused(tmp_path: Path, loads: str) -> None:
    script = loads + "rows = Dataset.from_list(data)\n" + TRAINING.format(**CONSTANTS)
    failures = recipe_of(tmp_path, script)["failures"]
    assert "makes rows in the script" in failures["from_list.argument_0"]


def test_rows_to_evaluate_on_are_told_from_rows_to_train_on(tmp_path: Path) -> None:
    loads = 'rows = Dataset.from_json("train.jsonl")\nval_rows = Dataset.from_json("val.jsonl")\n'
    script = loads + TRAINING.format(**CONSTANTS).replace(
        "train_dataset=rows", "train_dataset=rows, eval_dataset=val_rows"
    )
    data = recipe_of(tmp_path, script)["data"]
    assert (data["train"], data["validation"]) == ("train.jsonl", "val.jsonl")
    second = 'rows = Dataset.from_json("train.jsonl")\nmore = Dataset.from_json("more.jsonl")\n'
    failures = recipe_of(tmp_path, second + TRAINING.format(**CONSTANTS))["failures"]
    assert "reads another data set" in failures["from_json_1.argument_0"]
