"""The command `trainwright recipe from`."""

from __future__ import annotations

from pathlib import Path

from tests.compatibility.conversion import files
from tests.support.commands import trainwright
from trainwright.recipe.loading import load_recipe


def test_a_recipe_is_written_with_a_table_of_every_key(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(files.AXOLOTL)
    done = trainwright("recipe", "from", "axolotl.yaml", "lora_r=4", "-o", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.model.adapter.rank == 4 and recipe.train.global_batch_size == 8
    for line in ("axolotl.yaml: Axolotl", "taken:", "computed:", "without effect on the training here:"):
        assert line in done.stdout
    assert "gradient_accumulation_steps  train.global_batch_size: 8 (2 x 4 x 1 process" in done.stdout
    assert "seed (default)" in done.stdout and "train.seed: 42" in done.stdout
    again = trainwright("recipe", "from", "axolotl.yaml", "-o", "recipe.yaml", cwd=tmp_path)
    assert again.returncode == 2 and "recipe.yaml: exists" in again.stderr
    printed = trainwright("recipe", "from", "axolotl.yaml", "lora_r=4", cwd=tmp_path)
    assert printed.stdout == (tmp_path / "recipe.yaml").read_text() and "taken:" in printed.stderr


def test_nothing_is_written_if_a_key_is_not_possible_unless_partly(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yaml").write_text(files.AXOLOTL + "fix_untrained_tokens: [1]\nmade_up: 1\n")
    done = trainwright("recipe", "from", "axolotl.yaml", "-o", "recipe.yaml", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "recipe.yaml").exists()
    assert "axolotl.yaml:32: fix_untrained_tokens: changes embeddings of tokens that were never trained" in done.stdout
    assert "axolotl.yaml:33: made_up: is no key that the table of Axolotl has" in done.stdout
    assert "2 keys cannot be converted" in done.stderr
    partly = trainwright("recipe", "from", "axolotl.yaml", "-o", "recipe.yaml", "--partly", cwd=tmp_path)
    assert partly.returncode == 0, partly.stderr
    text = (tmp_path / "recipe.yaml").read_text()
    assert (
        "# Not here: axolotl.yaml:32: fix_untrained_tokens: changes embeddings of tokens that were never trained"
        in text
    )
    load_recipe(tmp_path / "recipe.yaml")


def test_a_folder_is_checked(tmp_path: Path) -> None:
    files.write_all(tmp_path)
    (tmp_path / "blocked.yaml").write_text(files.AXOLOTL + "fix_untrained_tokens: [1]\n")
    (tmp_path / "rl.yaml").write_text(files.AXOLOTL + "rl: grpo\n")
    missing = files.LLAMA_FACTORY.replace("mine,chats", "gone")
    (tmp_path / "missing.yaml").write_text(missing)
    (tmp_path / "other.yaml").write_text("a: 1\n")
    done = trainwright("recipe", "from", "--check", ".", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line and line[0].isalpha()}
    assert rows["Axolotl"] == ["3", "0", "(0%)", "1", "(50%)", "0", "(0%)", "1", "(50%)", "1"]
    assert rows["LLaMA-Factory"] == ["2", "1", "(50%)", "0", "(0%)", "1", "(50%)", "0", "(0%)", "0"]
    assert rows["torchtune"][:1] == rows["Unsloth"][:1] == rows["TRL"][:1] == ["1"]
    assert "aside: online RL 1" in done.stdout and "2 files of no known tool" in done.stdout
    assert "fix_untrained_tokens: changes embeddings of tokens that were never trained" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("recipe")) == []


def test_a_command_of_several_is_chosen_by_its_line(tmp_path: Path) -> None:
    common = "--model_name_or_path owner/small --dataset_name owner/chats --max_length 64"
    (tmp_path / "two.sh").write_text(
        f"trl sft --learning_rate 1e-4 {common}\n\ntrl sft --learning_rate 2e-4 {common}\n"
    )
    done = trainwright("recipe", "from", "two.sh", cwd=tmp_path)
    assert done.returncode == 2 and "choose one: two.sh:1, two.sh:3" in done.stderr
    second = trainwright("recipe", "from", "two.sh:3", cwd=tmp_path)
    assert second.returncode == 0 and "learning_rate: 0.0002" in second.stdout


def test_a_block_of_a_model_card_is_chosen_by_its_line(tmp_path: Path) -> None:
    blocks = ["```yaml", "a: 1", "```", "```yaml", files.AXOLOTL, "```", "```yaml", files.AXOLOTL, "```"]
    first, second = 5, 7 + files.AXOLOTL.count("\n") + 1
    (tmp_path / "README.md").write_text("\n".join(blocks))
    done = trainwright("recipe", "from", "README.md", cwd=tmp_path)
    assert done.returncode == 2 and f"choose one: README.md:{first}, README.md:{second}" in done.stderr
    (tmp_path / "axolotl.yaml").write_text(files.AXOLOTL)
    chosen, alone = (
        trainwright("recipe", "from", name, cwd=tmp_path) for name in (f"README.md:{second}", "axolotl.yaml")
    )
    assert chosen.stdout.splitlines()[1:] == alone.stdout.splitlines()[1:] != []


def test_a_file_of_no_tool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("a: 1\n")
    done = trainwright("recipe", "from", "other.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "other.yaml: has the keys of no tool that is known" in done.stderr


def test_code_that_a_file_names_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('executed', 'w').close()\nRows = None\n")
    (tmp_path / "axolotl.yaml").write_text(files.AXOLOTL.replace("owner/chats", "evil:Rows"))
    for words in (["axolotl.yaml"], ["--check", "."]):
        trainwright("recipe", "from", *words, cwd=tmp_path)
        assert not (tmp_path / "executed").exists()
