"""Commands, scripts and compositions as one mapping, without running anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.compatibility.conversion.reading import read
from trainwright.compatibility.conversion.script_values import Code
from trainwright.errors import RequestError


def values(tmp_path: Path, text: str, name: str = "run.sh") -> dict[str, object]:
    (tmp_path / name).write_text(text)
    return read(tmp_path / name)[0].values


def test_a_command_with_variables_lists_flags_and_comments(tmp_path: Path) -> None:
    text = """#!/bin/bash
# python sft.py --learning_rate 9
export MODEL=owner/small   # which one
RATE='2e-4'
torchrun --nproc_per_node 4 --nnodes=2 \\
    sft.py \\
    --model_name_or_path $MODEL --learning_rate ${RATE} \\
    --lora_target_modules q_proj v_proj \\
    --output_dir "runs/${NAME:-new} one" \\
    --bf16 --no_remove_unused_columns --seed=7 > log.txt
"""
    assert values(tmp_path, text) == {
        "model_name_or_path": "owner/small",
        "learning_rate": 2e-4,
        "lora_target_modules": ["q_proj", "v_proj"],
        "output_dir": "runs/new one",
        "bf16": True,
        "remove_unused_columns": False,
        "seed": 7,
        "launcher": {"program": "sft", "nproc_per_node": 4, "nnodes": 2},
    }


def test_a_configuration_that_a_script_writes_is_read(tmp_path: Path) -> None:
    text = """MODEL=owner/small
CONFIG="$RUNS/sft.yaml"
cat > "$CONFIG" <<EOF
model_name_or_path: ${MODEL}
per_device_train_batch_size: $(nproc)
dataset: $NAME  # of the environment
EOF
tee quoted.yaml <<'END'
output_dir: $MODEL
END
llamafactory-cli train $CONFIG
llamafactory-cli train quoted.yaml
"""
    (tmp_path / "run.sh").write_text(text)
    first, second = read(tmp_path / "run.sh")
    assert first.values == {
        "model_name_or_path": "owner/small",
        "per_device_train_batch_size": "${nproc}",
        "dataset": "${NAME}",
        "launcher": {"program": "train"},
    }
    assert first.origins["dataset",].line == 6
    assert second.values["output_dir"] == "$MODEL"
    escaped = (
        "MODEL=a\ncat > a.yaml <<EOF\noutput_dir: '\\$MODEL \\`x\\` \\\\ $MODEL'\nEOF\nllamafactory-cli train a.yaml\n"
    )
    assert values(tmp_path, escaped)["output_dir"] == "$MODEL `x` \\ a"


def test_a_backslash_before_a_line_break_joins_lines_of_a_configuration(tmp_path: Path) -> None:
    """As a shell does, if the word of the here-document is not quoted; then the end may be no line of its own."""
    command = "llamafactory-cli train a.yaml\n"
    body = "output_dir: 'a\\\n\tb' #\\\nEOF\nseed: 7 # \\\\\nEOF\n"
    joined = values(tmp_path, f"cat > a.yaml <<EOF\n{body}{command}")
    assert joined == {"output_dir": "a\tb", "seed": 7, "launcher": {"program": "train"}}
    tabs = values(tmp_path, f"cat > a.yaml <<-EOF\n\t{body}{command}")
    assert tabs == joined
    with pytest.raises(RequestError, match="tab"):  # that of a value stays, as tabs go before values are put in
        values(tmp_path, f"NAME='\tseed: 7'\ncat > a.yaml <<-EOF\n\toutput_dir: a\n$NAME\n\tEOF\n{command}")
    quoted = "cat > a.yaml <<'EOF'\noutput_dir: a\\\nEOF\n"
    assert values(tmp_path, quoted + command)["output_dir"] == "a\\"


def test_what_a_script_adds_to_a_file_or_runs_elsewhere_is_no_configuration(tmp_path: Path) -> None:
    text = "ssh host <<EOF\npython sft.py --learning_rate 1e-4 --bf16\nEOF\n"
    assert values(tmp_path, text) == {"learning_rate": 1e-4, "bf16": True, "launcher": {"program": "sft"}}
    written, command = "cat <<\\EOF >./a.yaml; echo done\nseed: 7\n EOF\nEOF\n", "llamafactory-cli train a.yaml\n"
    (tmp_path / "a.yaml").write_text("seed: 8")
    for change in (
        "cat >> a.yaml <<EOF\nseed: 9\nEOF\n",
        "echo seed: 9 >> a.yaml\n",
        "sed -i s/7/9/ a.yaml\n",
        "cat > a.yaml <<EOF\nseed: 9\nEOF\n",
        "echo seed: 9 | tee -a a.yaml\n",
    ):
        with pytest.raises(RequestError, match=r"run\.sh:\d+: a\.yaml is written in parts, or changed"):
            values(tmp_path, written.replace(" EOF\n", "") + change + command)
    two = written.replace(" EOF\n", "") + command + "cat > a.yaml <<-EOF\n\tseed: 9\n\tEOF\n" + command
    (tmp_path / "run.sh").write_text(two)
    assert [tree.values["seed"] for tree in read(tmp_path / "run.sh")] == [7, 9]
    accelerate = (
        "cat > acc.yaml <<EOF\nnum_processes: 8\nEOF\naccelerate launch --config_file acc.yaml sft.py --seed 7 --bf16\n"
    )
    for command in (accelerate, accelerate.replace("--seed 7", "--config-name=unlearn.yaml")):
        with pytest.raises(RequestError, match=r"run\.sh:4: acc\.yaml is written by the script"):
            values(tmp_path, command)


def test_code_blocks_of_a_model_card_are_read(tmp_path: Path) -> None:
    text = """---
base_model: owner/other
---
```yaml
base_model: owner/small
datasets: [{path: owner/rows, type: alpaca}]
```
~~~bash
trl sft --model_name_or_path owner/small --seed 7
~~~
```python
SFTConfig(learning_rate=1e-4)
```
````yaml
base_model: owner/open
"""
    (tmp_path / "README.md").write_text(text)
    axolotl, command, script, unclosed = read(tmp_path / "README.md")
    assert unclosed.values["base_model"] == "owner/open"
    assert axolotl.values["base_model"] == "owner/small" and axolotl.origins["base_model",].line == 5
    assert command.values["seed"] == 7 and command.origins["seed",].line == 9
    assert script.values["learning_rate"] == 1e-4
    for text, message in (("text", "has no code block"), ("```yaml\na: [\n```\n", r"README\.md:\d")):
        (tmp_path / "README.md").write_text(text)
        with pytest.raises(RequestError, match=message):
            read(tmp_path / "README.md")


def test_options_in_arrays_and_texts_of_several_lines(tmp_path: Path) -> None:
    text = """
MODEL=owner/small
ARGS=(
    --model_name_or_path "$MODEL"  # which one
    --learning_rate 1e-4
)
ARGS+=(--seed 7)
MORE="--bf16 True \\
  --max_length 512"
python sft.py "${ARGS[@]}" $MORE --output_dir out
"""
    found = values(tmp_path, text)
    expected = {"model_name_or_path": "owner/small", "learning_rate": 1e-4, "seed": 7, "bf16": True, "max_length": 512}
    assert found == {**expected, "output_dir": "out", "launcher": {"program": "sft"}}


def test_a_value_that_only_the_shell_has_is_no_value(tmp_path: Path) -> None:
    found = values(tmp_path, "python train_sft.py --model_name_or_path $(ls) --seed $UNSET --x 1\n")
    assert isinstance(found["model_name_or_path"], Code) and isinstance(found["seed"], Code)


def test_each_command_of_a_script_is_one(tmp_path: Path) -> None:
    (tmp_path / "two.sh").write_text("trl sft --seed 1 --x 2\necho done\ntrl dpo --seed 2 --x 2\n")
    trees = read(tmp_path / "two.sh")
    assert [tree.values["seed"] for tree in trees] == [1, 2]
    assert [tree.origins[("seed",)].line for tree in trees] == [1, 3]


def test_a_script_is_parsed_and_not_run(tmp_path: Path) -> None:
    text = "import os\nrank = 8\nos.mkdir('made')\n"
    text += "model = FastModel.from_pretrained('owner/small', dtype=torch.bfloat16)\n"
    text += "args = SFTConfig(learning_rate=1e-4, r=rank * 2, seed=len(x), betas=[1, -2])\n"
    found = values(tmp_path, text, "script.py")
    assert found["FastModel"] == {"argument_0": "owner/small", "dtype": Code("torch.bfloat16")}
    assert (found["learning_rate"], found["r"], found["betas"]) == (1e-4, 16, [1, -2])
    assert isinstance(found["seed"], Code) and not (tmp_path / "made").exists() and not Path("made").exists()


def test_values_that_a_script_sets_once_are_known(tmp_path: Path) -> None:
    text = """
BASE = {"rate": 1e-4, "name": "owner/small"}
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--no-4bit", action="store_true")
parser.add_argument("--required")

@dataclass
class Settings:
    rank: int = field(default=8)
    length: int = 512

def train(data="rows.jsonl", seed=None, *, steps=2 * 30):
    half = settings.length // 2
    bf16 = torch.cuda.is_bf16_supported()
    twice = 1
    twice = 2
    for looped in range(3):
        pass
    SFTConfig(learning_rate=BASE["rate"], num_train_epochs=args.epochs, r=settings.rank, max_length=half,
        max_steps=steps, seed=seed, bf16=bf16, fp16=not bf16, load=not args.no_4bit, out=f"runs/{BASE['name']}",
        a=args.required, b=twice, c=looped, d=BASE.get("none", 5), e=os.environ.get("HOME_OF", "x") + "/y")
"""
    found = values(tmp_path, text, "script.py")
    known = {"learning_rate": 1e-4, "num_train_epochs": 3, "r": 8, "max_length": 256, "max_steps": 60, "seed": None}
    known |= {"load": True, "out": "runs/owner/small", "d": 5, "e": "x/y"}
    assert known.items() <= found.items()
    assert found["bf16"] == Code("torch.cuda.is_bf16_supported()") and isinstance(found["fp16"], Code)
    assert all(isinstance(found[name], Code) for name in "abc")


@pytest.mark.parametrize(
    "text",
    [
        "def train(rate=1e-4):\n    SFTConfig(learning_rate=rate)\ntrain(2e-4)\n",
        "def train(rate=1e-4):\n    SFTConfig(learning_rate=rate)\ntrain(**read())\n",
        "class Options:\n    rate: float = 1e-4\no = Options(rate=2e-4)\nSFTConfig(learning_rate=o.rate)\n",
        "O = {'rate': 1e-4}\nO.update(read())\nSFTConfig(learning_rate=O['rate'])\n",
        "O = {'rate': 1e-4}\nO['rate'] = 2e-4\nSFTConfig(learning_rate=O['rate'])\n",
        "parser.add_argument('--rate', default=1e-4)\nargs.rate = 2e-4\nSFTConfig(learning_rate=args.rate)\n",
    ],
)
def test_a_value_that_a_script_changes_is_not_its_default(tmp_path: Path, text: str) -> None:
    assert isinstance(values(tmp_path, text, "script.py")["learning_rate"], Code)


def test_llama_factory_starts_a_process_for_each_device(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("stage: sft\n")
    for text in (
        "CUDA_VISIBLE_DEVICES=0,1,2 llamafactory-cli train a.yaml\n",
        "export CUDA_VISIBLE_DEVICES=4,5,6\nsrun -N 1 llamafactory-cli train a.yaml\n",
    ):
        assert values(tmp_path, text)["launcher"] == {"program": "train", "num_processes": 3}


def test_cells_of_a_notebook(tmp_path: Path) -> None:
    notebook = '{"cells": [{"cell_type": "markdown", "source": ["SFTConfig(seed=1)"]}, {"cell_type": "code", "source": '
    notebook += '["!pip install x\\n", "args = SFTConfig(\\n", "    seed=2,\\n", ")"]}]}'
    assert values(tmp_path, notebook, "notebook.ipynb") == {"seed": 2, "trainer_arguments": "trl"}


def test_a_command_of_a_notebook_may_have_several_lines(tmp_path: Path) -> None:
    lines = ["!pip install a \\\\\\n", "    b\\n", "args = SFTConfig(seed=2)"]
    notebook = '{"cells": [{"cell_type": "code", "source": ["' + '", "'.join(lines) + '"]}]}'
    assert values(tmp_path, notebook, "notebook.ipynb")["seed"] == 2


def test_a_block_of_a_notebook_may_have_commands_alone(tmp_path: Path) -> None:
    cells = [["%%bash\n", "echo $(ls) 0123\n"], ["%%capture\n", "if COLAB:\n", "    !pip install a\n", "else:\n"]]
    cells[1] += ["    %pip install b\n", "args = SFTConfig(seed=2)\n"]
    notebook = json.dumps({"cells": [{"cell_type": "code", "source": source} for source in cells]})
    assert values(tmp_path, notebook, "notebook.ipynb")["seed"] == 2


def test_a_file_that_is_an_options_value_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("seed: 1\n")
    found = values(tmp_path, "python run_dpo.py --data other.yaml --learning_rate 1e-4 --beta 0.1\n")
    assert "seed" not in found and found["launcher"] == {"program": "dpo"}


def test_interpolations_of_a_file(tmp_path: Path) -> None:
    text = "name: a\nout: /tmp/${name}/x\nsize: ${deep.size}\ndeep: {size: 3}\nhome: ${oc.env:HOME}\nloop: ${loop}\n"
    found = values(tmp_path, text, "file.yaml")
    assert (found["out"], found["size"], found["home"], found["loop"]) == ("/tmp/a/x", 3, "${oc.env:HOME}", "${loop}")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "echo hello\n", "a.sh: has no command that starts a training"),
        ("a.sh", "trl sft --config gone.yaml\n", "a.sh:1: gone.yaml, which the command reads, is not here"),
        ("a.py", "def (\n", "a.py: is not Python"),
        ("a.yaml", "x: !!python/object/apply:os.system [ls]\n", "a.yaml:1: YAML tag"),
        ("a.ipynb", "{", "a.ipynb:1:2: not JSON"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError) as error:
        read(tmp_path / name)
    assert message in str(error.value)


@pytest.mark.parametrize("value", ["+".join(["1"] * 5000), f"{'-' * 3000}1", f"{'-' * 200}1"])
def test_a_script_that_is_nested_deeply_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(RequestError, match=r"train\.py: its expressions are nested too deeply to be read"):
        values(tmp_path, f"from trl import SFTConfig\nSFTConfig(learning_rate={value})", "train.py")


@pytest.mark.parametrize("first", ["'xx'", "2", "[1]"])
def test_values_that_double_take_neither_time_nor_memory(tmp_path: Path, first: str) -> None:
    doubled = [f"a{i + 1} = a{i} {'*' if first == '2' else '+'} a{i}" for i in range(80)]
    script = "\n".join([f"a0 = {first}", *doubled, "SFTConfig(learning_rate=a80)"])
    assert values(tmp_path, script, "train.py")["learning_rate"] == "a80"
    shell = "\n".join(["A=xx", *["A=$A$A"] * 80, "python sft.py --learning_rate $A"])
    assert len(str(values(tmp_path, shell)["learning_rate"])) <= 20_000


def test_a_quote_that_ends_nowhere_hides_no_command(tmp_path: Path) -> None:
    text = 'A="not ended\nB=(1 2\npython train.py --learning_rate 1e-4\n' + 'C="neither\n' * 20_000
    assert values(tmp_path, text)["learning_rate"] == 1e-4


def test_values_of_variables_are_not_repeated_without_end(tmp_path: Path) -> None:
    text = f"A={'x' * 9_000}\npython train.py --learning_rate 1e-4 --seed " + "$A" * 50_000
    with pytest.raises(RequestError, match="no command that starts a training"):
        values(tmp_path, text)


def test_options_of_torchrun_in_a_command_of_torchtune(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("batch_size: 2\n")
    text = "tune run --nproc_per_node 4 --nnodes=2 lora_finetune_distributed --config mine.yaml batch_size=3\n"
    launcher = {"program": "lora_finetune_distributed", "nproc_per_node": 4, "nnodes": 2}
    assert values(tmp_path, text) == {"batch_size": 3, "launcher": launcher}


def test_a_program_that_a_variable_starts(tmp_path: Path) -> None:
    assert values(tmp_path, "$PYTHON src/train.py --learning_rate 1e-4\n")["learning_rate"] == 1e-4


def test_branches_that_are_not_run(tmp_path: Path) -> None:
    text = """
LORA = False
rows = load_dataset("owner/rows", split="train")
if LORA:
    config = LoraConfig(r=8)
else:
    print("all weights")
if path.endswith(".json"):
    more = load_dataset("json", data_files=path)
else:
    more = load_dataset(path, split="train")
args = SFTConfig(learning_rate=1e-4 if LORA else 1e-5)
"""
    found = values(tmp_path, text, "train.py")
    assert found["learning_rate"] == 1e-5 and "LoraConfig" not in found
    assert found["skipped_calls"] == {"line_5": "LORA is False by default: no LoraConfig"}
    assert found["load_dataset_1"] == {"argument_0": "json", "data_files": Code("path")}
    assert "load_dataset_2" not in found
