"""Configurations of other tools as recipes: what is taken, computed, left out, and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.conversion import files
from trainwright.compatibility.conversion.convert import Conversion, Options, convert, load_table, recognize
from trainwright.compatibility.conversion.reading import read
from trainwright.errors import RequestError
from trainwright.recipe.loading import load_recipe
from trainwright.recipe.yaml_text import to_yaml

ALPACA = "{instruction}\n\n### Input:\n{input}"


def converted(path: Path, *values: str, **options: Any) -> Conversion:
    """Return the conversion of a file."""
    (tree,) = read(path, values)
    tool = recognize(tree)
    assert tool is not None
    return convert(tree, tool, Options(**options))


def of(tmp_path: Path, text: str, *values: str, name: str = "axolotl.yaml", **options: Any) -> Conversion:
    (tmp_path / name).write_text(text)
    return converted(tmp_path / name, *values, **options)


def recipe(conversion: Conversion, tmp_path: Path) -> dict[str, Any]:
    """Return the recipe's values, which the product itself accepts from a file."""
    assert [line.text for line in conversion.failures] == []
    tree = conversion.recipe()
    (tmp_path / "recipe.yaml").write_text(to_yaml(tree.values))
    load_recipe(tmp_path / "recipe.yaml")
    return tree.values


def statuses(conversion: Conversion) -> dict[str, str]:
    return {line.setting.key: line.status for line in conversion.lines if not line.setting.is_default}


def failures(conversion: Conversion) -> list[str]:
    return [f"{line.setting.origin}: {line.setting.key}: {line.text}" for line in conversion.failures]


def test_axolotl(tmp_path: Path) -> None:
    conversion = of(tmp_path, files.AXOLOTL)
    assert recipe(conversion, tmp_path) == {
        "task": "sft",
        "model": {
            "name": "owner/small",
            "chat_template": "alpaca",
            "adapter": {"type": "qlora", "rank": 8, "alpha": 16, "targets": "all-linear"},
        },
        "data": {
            "validation": 0.1,
            "max_length": 256,
            "long_documents": "drop",
            "train": [
                {"source": "rows.jsonl", "prompt": ALPACA, "prompt_without_input": "{instruction}"},
                {"source": "owner/chats[:10%]", "prompt": ALPACA, "prompt_without_input": "{instruction}"},
            ],
            "mixing": "concatenate",
        },
        "optimizer": {
            "name": "adamw_8bit",
            "schedule": "cosine",
            "final_learning_rate_ratio": 0.1,
            "learning_rate": 2e-4,
            "warmup_steps": 0.1,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        },
        "train": {
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "epochs": 2,
            "mixed_precision": "bf16",
            "activation_checkpointing": "full",
            "seed": 42,
        },
        "logging": {"observers": {"wandb": True}},
    }
    assert conversion.kind == "harmlessly"
    of_keys = statuses(conversion)
    assert of_keys["learning_rate"] == "taken" and of_keys["gradient_accumulation_steps"] == "computed"
    assert of_keys["flash_attention"] == of_keys["special_tokens"] == "dropped"
    written = {line.split(":")[0].strip() for line in files.AXOLOTL.splitlines() if not line.startswith(" ")}
    keys = {key.partition("[")[0].partition(".")[0] for key in of_keys}
    assert {word for word in written if not word.startswith("-")} <= keys  # nothing is left out in silence


def test_llama_factory_with_its_list_of_data_sets(tmp_path: Path) -> None:
    conversion = converted(files.write_llama_factory(tmp_path))
    values = recipe(conversion, tmp_path)
    assert values["model"]["adapter"] == {"type": "lora", "rank": 4, "targets": ["q_proj", "v_proj"], "alpha": 8}
    assert values["data"]["train"] == [
        {
            "source": str(tmp_path / "data" / "mine.json"),
            "prompt": "{instruction}\n{input}",
            "prompt_without_input": "{instruction}",
            "limit": 50,
            "columns": {"answer": "output"},
        },
        {"source": "owner/chats", "limit": 50, "columns": {"conversations": "talk", "system": "setting"}},
    ]
    assert values["train"]["activation_checkpointing"] == "full"  # by default
    assert values["parallel"] == {"strategy": "zero2", "offload_optimizer": True}  # by the name of a file not here
    assert values["evaluate"] == {"every": 20} and values["data"]["validation"] == 0.2


def test_llama_factory_trains_on_the_line_break_after_an_answer(tmp_path: Path) -> None:
    """As its templates of ChatML, Gemma and Phi write it; others have nothing after the end of an answer."""
    path = files.write_llama_factory(tmp_path)
    plain = [line for line in path.read_text().splitlines() if not line.startswith("template:")]

    def targets(*lines: str) -> str:
        path.write_text("\n".join([*plain, *lines]) + "\n")
        return str(recipe(converted(path), tmp_path)["data"]["targets"])

    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert re.findall(targets("template: qwen3")[1:-1], text) == ["Ho<|im_end|>\n"]
    assert targets("template: llama3") == "answers"
    assert targets("template: qwen3", "train_on_prompt: true") == "all"


def test_llama_factory_that_trains_some_blocks(tmp_path: Path) -> None:
    path = files.write_llama_factory(tmp_path)
    path.write_text(files.LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: freeze"))
    (failure,) = failures(converted(path))
    assert "freeze_trainable_layers: trains the last 2 blocks: pass --layers N" in failure
    values = recipe(converted(path, layers=24), tmp_path)
    assert values["model"]["adapter"] == {"type": "none"}
    assert values["model"]["trainable"] == [".*\\.(22|23)\\..*"]
    first = (
        "freeze_trainable_layers=-2",
        "freeze_trainable_modules=mlp,self_attn",
        "freeze_extra_modules=embed_tokens",
    )
    values = recipe(converted(path, *first), tmp_path)
    assert values["model"]["trainable"] == [".*\\.(0|1)\\.(mlp|self_attn).*", ".*embed_tokens.*"]


def test_llama_factory_with_several_validation_sets(tmp_path: Path) -> None:
    path = files.write_llama_factory(tmp_path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("val_size")]
    more = ["eval_dataset: mine, chats", "eval_on_each_dataset: true", "metric_for_best_model: eval_chats_loss"]
    path.write_text("\n".join([*lines, *more]) + "\n")
    values = recipe(converted(path), tmp_path)
    assert values["data"]["validation"]["mine"]["source"] == str(tmp_path / "data" / "mine.json")
    assert values["data"]["validation"]["chats"]["source"] == "owner/chats"
    assert values["evaluate"]["main_set"] == "chats"
    path.write_text("\n".join([*lines, *more[:2], "metric_for_best_model: rouge", "greater_is_better: true"]) + "\n")
    assert [line.text for line in converted(path).lines if line.setting.key == "metric_for_best_model"] == [
        "the checkpoint with the lowest validation loss is kept, not the best by rouge"
    ]
    stopping = converted(path, "early_stopping_steps=3")
    assert [line.setting.key for line in stopping.failures] == ["metric_for_best_model"]


def test_tokens_that_are_added(tmp_path: Path) -> None:
    path = files.write_llama_factory(tmp_path)
    text = path.read_text()
    path.write_text(f"{text}\nadd_tokens: a, b\nadd_special_tokens: <x>\nresize_vocab: true\n")
    model = recipe(converted(path), tmp_path)["model"]
    assert model["added_tokens"] == {"ordinary": ["a", "b"], "special": ["<x>"]}
    assert model["adapter"]["modules_to_save"] == ["embed_tokens", "lm_head"]
    path.write_text(f"{text}\nresize_vocab: true\n")
    assert [line.setting.key for line in converted(path).failures] == ["resize_vocab"]
    path = tmp_path / "axolotl.yaml"
    added = '  additional_special_tokens: ["<x>"]'
    lines = [*files.AXOLOTL.replace("special_tokens:", f"special_tokens:\n{added}").splitlines(), "tokens: [a, b]"]
    path.write_text("\n".join(lines) + "\n")
    assert recipe(converted(path), tmp_path)["model"]["added_tokens"] == {"ordinary": ["a", "b"], "special": ["<x>"]}
    path.write_text(f"{files.AXOLOTL}tokens:\n  eos_token: </s>\n")  # an older spelling of special_tokens
    assert "added_tokens" not in recipe(converted(path), tmp_path)["model"]


def test_the_loss_of_routers(tmp_path: Path) -> None:
    axolotl = of(tmp_path, files.AXOLOTL + "model_config:\n  output_router_logits: true\n")
    assert recipe(axolotl, tmp_path)["sft"] == {"router_loss": "model"} and axolotl.kind == "harmlessly"
    path = files.write_llama_factory(tmp_path)
    path.write_text(f"{path.read_text()}\nmoe_aux_loss_coef: 0.01\n")
    assert recipe(converted(path), tmp_path)["sft"]["router_loss"] == 0.01


def test_weights_by_entropy(tmp_path: Path) -> None:
    path = files.write_llama_factory(tmp_path)
    path.write_text(f"{path.read_text()}\nuse_eaft_loss: true\neaft_alpha: 0.5\n")
    assert recipe(converted(path), tmp_path)["sft"] == {"loss": "eaft", "eaft_power": 0.5}
    path = tmp_path / "axolotl.yaml"
    path.write_text(f"{files.AXOLOTL}\nuse_eaft: true\neaft_k: 10\n")
    assert recipe(converted(path), tmp_path)["sft"] == {"loss": "eaft", "eaft_divisor": 1.0, "eaft_top": 10}


@pytest.mark.parametrize(
    ("kind", "prompt", "columns"),
    [
        ("alpaca:chat", "further context. Write a response that appropriately completes the request.\nUSER: ", {}),
        ("alpaca_chat.load_qa", "appropriately and concisely completes the request.\n\n\nUSER: {question}\nASSIS", {}),
        ("alpaca_w_system.load_open_orca", "### System:\n{system_prompt}\n### Human:\n", {"input": "system_prompt"}),
    ],
)
def test_rows_of_axolotl_that_are_texts(tmp_path: Path, kind: str, prompt: str, columns: dict[str, str]) -> None:
    text = files.AXOLOTL.replace("type: alpaca\n  - path", f"type: {kind}\n  - path")
    text = text[: text.index("  - path: owner/chats")] + text[text.index("val_set_size") :]
    values = recipe(of(tmp_path, text), tmp_path)
    assert values["model"]["chat_template"] == "plain" and prompt in values["data"]["prompt"]
    assert columns.items() <= values["data"].get("columns", {}).items()


def test_segments_of_axolotl(tmp_path: Path) -> None:
    text = files.AXOLOTL.replace("type: alpaca\n  - path", "type: input_output\n  - path")
    text = text[: text.index("  - path: owner/chats")] + text[text.index("val_set_size") :]
    values = recipe(of(tmp_path, text), tmp_path)
    assert values["data"]["format"] == "segments"
    assert "chat_template" not in values["model"] and "prompt" not in values["data"]


@pytest.mark.parametrize("place", [0, 1000])
def test_a_template_that_no_rows_use_is_left_out(tmp_path: Path, place: int) -> None:
    lines = files.AXOLOTL.splitlines()
    text = "\n".join([*lines[:place], "chat_template: chatml", *lines[place:]]) + "\n"
    conversion = of(tmp_path, text)
    assert recipe(conversion, tmp_path)["model"]["chat_template"] == "alpaca"
    assert statuses(conversion)["chat_template"] == "dropped"


def test_alpaca_of_turns_begins_without_the_text_of_alpaca(tmp_path: Path) -> None:
    from jinja2 import Template

    text = files.AXOLOTL.replace("type: alpaca", "type: chat_template") + "chat_template: alpaca\n"
    template = Template(recipe(of(tmp_path, text), tmp_path)["model"]["chat_template"])
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    expected = "<s>### Instruction:\nq\n\n### Response:\na</s>"
    assert template.render(messages=turns, bos_token="<s>", eos_token="</s>") == expected


def test_a_value_that_a_function_cannot_read_is_no_traceback(tmp_path: Path) -> None:
    script = "tune run lora_finetune_single_device --config tune.yaml max_steps_per_epoch=$STEPS\n"
    (tmp_path / "tune.yaml").write_text(files.TORCHTUNE)
    (failure,) = of(tmp_path, script, name="run.sh").failures
    assert failure.status == "needs" and "pass max_steps_per_epoch=VALUE" in failure.text
    (failure,) = failures(of(tmp_path, files.TORCHTUNE + "max_steps_per_epoch: many\n", name="tune.yaml"))
    assert "max_steps_per_epoch: has a value that torchtune does not take: many" in failure


def test_a_constant_rate_has_no_warmup(tmp_path: Path) -> None:
    """transformers' constant ignores it: many files have both."""
    text = files.AXOLOTL.replace("lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1", "lr_scheduler: constant")
    conversion = of(tmp_path, text)
    optimizer = recipe(conversion, tmp_path)["optimizer"]
    assert (optimizer["schedule"], optimizer["warmup_steps"]) == ("constant", 0)
    assert statuses(conversion)["warmup_ratio"] == "dropped"
    values = load_table("open-unlearning").rules["trainer.args.lr_scheduler_type"].values
    assert values["constant"]["over"] == ["trainer.args.warmup_ratio", "trainer.args.warmup_steps"]


def test_the_margin_of_simpo_is_a_part_of_beta(tmp_path: Path) -> None:
    text = files.TRL + "beta: 10\ngamma_beta_ratio: 0.3\nsystem_prompt: ''\nload_best_model_at_end: true\n"
    values = recipe(of(tmp_path, text, name="some.yaml"), tmp_path)
    assert values["dpo"] == {"beta": 10, "loss": "simpo", "margin": 3.0}


def test_older_conversations_of_axolotl(tmp_path: Path) -> None:
    """Without a template they are written as Vicuna's."""
    for lines, template in (
        ("type: sharegpt", "vicuna"),
        ("type: sharegpt.load_role\n    conversation: chatml", "chatml"),
        ("type: sharegpt\nchat_template: llama3", "llama3"),
    ):
        text = files.AXOLOTL.replace("type: alpaca\nval", f"{lines}\nval")
        text = text.replace("  - path: rows.jsonl\n    ds_type: json\n    type: alpaca\n", "")
        assert recipe(of(tmp_path, text), tmp_path)["model"]["chat_template"] == template


def test_files_and_splits_of_a_data_set(tmp_path: Path) -> None:
    text = files.AXOLOTL.replace("split: train[:10%]", "data_files: [a.jsonl, data/b.jsonl]")
    sources = recipe(of(tmp_path, text), tmp_path)["data"]["train"]
    assert [source["source"] for source in sources][1:] == ["owner/chats:a.jsonl", "owner/chats:data/b.jsonl"]
    text = files.AXOLOTL.replace("split: train[:10%]", "split: train+test")
    sources = recipe(of(tmp_path, text), tmp_path)["data"]["train"]
    assert [source["source"] for source in sources][1:] == ["owner/chats", "owner/chats:test"]
    mixed = "dataset_mixer:\n  owner/chats: 0.001\ndataset_splits: [train]\n"
    text = files.TRL.replace("dataset_name: owner/chats\n", mixed)
    assert recipe(of(tmp_path, text, name="sft.yaml"), tmp_path)["data"]["train"] == "owner/chats[:0.1%]"


def test_axolotl_with_several_test_sets(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    text = "\n".join(line for line in files.AXOLOTL.splitlines() if not line.startswith("val_set_size"))
    path.write_text(f"{text}\ntest_datasets:\n  - path: owner/one\n  - path: owner/two\n    split: test[:5]\n")
    assert recipe(converted(path), tmp_path)["data"]["validation"] == {
        "one": "owner/one",
        "two_test": "owner/two:test[:5]",
    }


def test_llama_factory_with_earlier_turns_in_a_column_is_refused(tmp_path: Path) -> None:
    path = files.write_llama_factory(tmp_path)
    file = tmp_path / "data" / "dataset_info.json"
    infos = json.loads(file.read_text())
    infos["mine"]["columns"] = {**infos["mine"].get("columns", {}), "history": "before"}
    file.write_text(json.dumps(infos))
    assert [line.text for line in converted(path).failures] == [
        "has earlier turns in the column before; write the rows that reach the trainer to a file, and pass --train FILE"
    ]


def test_axolotls_keys_of_rows_and_of_experts_are_taken(tmp_path: Path) -> None:
    text = """base_model: owner/model
adapter: qlora
load_in_4bit: true
quantize_moe_experts: true
lora_r: 8
lora_alpha: 16
lora_target_parameters: [mlp.experts.gate_up_proj]
dataset_exact_deduplication: true
datasets:
  - {path: owner/one, type: chat_template, drop_system_message: true}
  - {path: owner/two, type: chat_template}
micro_batch_size: 1
gradient_accumulation_steps: 1
"""
    values = recipe(of(tmp_path, text), tmp_path)
    adapter, data = values["model"]["adapter"], values["data"]
    assert adapter["quantize_experts"] is True and adapter["target_parameters"] == ["mlp.experts.gate_up_proj"]
    assert data["deduplicate"] is True
    assert [source.get("drop_system_message") for source in data["train"]] == [True, None]
    off = recipe(of(tmp_path, text.replace("true", "false").replace("load_in_4bit: false", "")), tmp_path)
    assert "quantize_experts" not in off["model"]["adapter"] and not off["data"].get("deduplicate")


def test_rows_of_trl_have_its_order_in_each_source_and_not_in_pairs(tmp_path: Path) -> None:
    both = "dataset_mixer: {owner/one: 1.0, owner/two: 1.0}\ndataset_splits: [train]\n"
    mixed = recipe(of(tmp_path, files.TRL.replace("dataset_name: owner/chats\n", both), name="trl.yaml"), tmp_path)
    assert [source["format"][3] for source in mixed["data"]["train"]] == ["text", "text"]
    assert "format" not in mixed["data"]
    pairs = recipe(of(tmp_path, files.TRL + "beta: 0.1\n", name="dpo.yaml"), tmp_path)
    assert "format" not in pairs["data"]


def test_trl_trains_on_all_tokens_and_evaluates_nothing_unless_it_is_told(tmp_path: Path) -> None:
    values = recipe(of(tmp_path, files.TRL, name="trl.yaml"), tmp_path)
    formats = ["messages", "conversations", "prompt_completion", "text", "instruction", "question_answer"]
    rest = {"max_length": 512, "targets": "all", "validation": None}
    assert values["data"] == {"train": "owner/chats", "format": formats, **rest}
    assert values["optimizer"]["final_learning_rate_ratio"] == 0.1
    assert values["train"]["epochs"] == 1 and "max_steps" not in values["train"]
    assert values["train"]["mixed_precision"] == "bf16" and values["train"]["activation_checkpointing"] == "full"
    told = recipe(
        of(tmp_path, files.TRL + "assistant_only_loss: true\neval_strategy: epoch\n", name="trl.yaml"), tmp_path
    )
    assert told["data"]["targets"] == "answers" and told["data"]["validation"] == "owner/chats:test"


def test_torchtune(tmp_path: Path) -> None:
    values = recipe(of(tmp_path, files.TORCHTUNE, name="tune.yaml"), tmp_path)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert values["model"]["adapter"] == {"type": "lora", "rank": 8, "alpha": 16, "targets": targets}
    assert values["optimizer"]["weight_decay"] == 0.01  # of torch's AdamW
    assert values["optimizer"]["max_grad_norm"] is None and values["data"]["validation"] is None
    assert values["data"]["targets"] == "all" and values["data"]["train"] == "tatsu-lab/alpaca"
    assert values["data"]["prompt"].endswith("### Input:\n{input}\n\n### Response:\n")


def test_unsloth_is_read_and_not_run(tmp_path: Path) -> None:
    values = recipe(of(tmp_path, files.UNSLOTH, name="unsloth.py"), tmp_path)
    assert not (tmp_path / "ran").exists() and not Path("ran").exists()
    adapter = values["model"]["adapter"]
    assert (adapter["quantization"], adapter["rank"], adapter["alpha"]) == ("nf4", 16, 32)
    assert values["data"]["max_length"] == 512 and values["data"]["targets"] == "all"
    assert values["train"]["max_steps"] == 60 and "epochs" not in values["train"]
    answers = files.UNSLOTH + "trainer = train_on_responses_only(trainer, instruction_part='a', response_part='b')\n"
    assert recipe(of(tmp_path, answers, name="unsloth.py"), tmp_path)["data"]["targets"] == "answers"
    made = files.UNSLOTH.replace("tokenizer.apply_chat_template(row, tokenize=False)", "row[0]")
    (failure,) = failures(of(tmp_path, made, name="unsloth.py"))
    assert "unsloth.py:29: map.argument_0: changes the rows by a function of the script" in failure


def test_what_unsloth_does_without_an_argument(tmp_path: Path) -> None:
    """Its own defaults, not those of TRL that it changes: 4 bits, alpha 16, decay, a warm-up, 8-bit states."""
    script = """
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("owner/small")
model = FastLanguageModel.get_peft_model(model)
trainer = SFTTrainer(model, train_dataset=load_dataset("owner/chats", split="train"), args=SFTConfig("out", ARGUMENTS))
"""
    values = recipe(of(tmp_path, script.replace("ARGUMENTS", "max_steps=60"), name="script.py"), tmp_path)
    adapter = values["model"]["adapter"]
    assert (adapter["rank"], adapter["alpha"], adapter["quantization"]) == (16, 16, "nf4")
    assert adapter["targets"] == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    optimizer = values["optimizer"]
    assert (optimizer["name"], optimizer["learning_rate"], optimizer["weight_decay"]) == ("adamw_8bit", 5e-5, 0.001)
    assert optimizer["warmup_steps"] == 0.1 and values["train"]["global_batch_size"] == 4 * 2
    assert values["train"]["mixed_precision"] == "auto" and values["data"]["max_length"] == 2048
    values = recipe(of(tmp_path, script.replace("ARGUMENTS", "warmup_ratio=0.03"), name="script.py"), tmp_path)
    assert values["optimizer"]["warmup_steps"] == 0.03
    plain = script.replace("SFTConfig(", "TrainingArguments(").replace("ARGUMENTS", "max_steps=60")
    values = recipe(of(tmp_path, plain, name="script.py"), tmp_path)
    assert values["optimizer"]["learning_rate"] == 5e-5 and values["optimizer"].get("warmup_steps", 0) == 0
    assert values["train"]["global_batch_size"] == 8 and values["train"]["mixed_precision"] == "auto"


def test_what_peft_does_without_an_argument(tmp_path: Path) -> None:
    script = """
config = LoraConfig(task_type="CAUSAL_LM")
model = AutoModelForCausalLM.from_pretrained("owner/small")
trainer = SFTTrainer(model, train_dataset=load_dataset("owner/chats", split="train"), peft_config=config)
"""
    values = recipe(of(tmp_path, script, name="script.py"), tmp_path)
    adapter = {"type": "lora", "rank": 8, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
    assert values["model"]["adapter"] == adapter
    assert values["optimizer"]["learning_rate"] == 2e-5 and values["train"]["mixed_precision"] == "bf16"


@pytest.mark.parametrize(
    ("of_model", "of_trainer", "used"),
    [("2048", "max_seq_length=512", 512), ("512", "max_seq_length=2048", 512), ("512", "max_length=256", 512)],
)
def test_of_several_lengths_the_one_that_unsloth_uses_counts(
    tmp_path: Path, of_model: str, of_trainer: str, used: int
) -> None:
    script = files.UNSLOTH.replace("max_seq_length = 512", f"max_seq_length = {of_model}")
    script = script.replace("SFTConfig(", f"SFTConfig(packing=True, {of_trainer}, ")
    values = recipe(of(tmp_path, script, name="unsloth.py"), tmp_path)
    assert values["data"]["max_length"] == values["data"]["pack_length"] == used
    assert values["train"]["batch_unit"] == "packs"


def test_arguments_that_a_script_unpacks_are_not_lost(tmp_path: Path) -> None:
    unpacked = files.UNSLOTH.replace("seed=3407,\n        report_to", "**OPTIONS,\n        report_to")
    values = recipe(of(tmp_path, "OPTIONS = {'seed': 5, 'neftune_noise_alpha': 5}\n" + unpacked, name="a.py"), tmp_path)
    assert values["train"]["seed"] == 5 and values["train"]["neftune_noise_alpha"] == 5
    (failure,) = failures(of(tmp_path, "OPTIONS = dict(read())\n" + unpacked, name="b.py"))
    assert "computed_arguments: has further arguments that the script computes" in failure


def test_open_unlearning_is_composed(tmp_path: Path) -> None:
    path = files.write_hydra(tmp_path)
    values = recipe(converted(path), tmp_path)
    assert values["task"] == "unlearn" and values["unlearn"] == {
        "objective": "npo",
        "beta": 0.2,
        "alpha": 1.0,
        "gamma": 1.0,
    }
    assert values["model"] == {"name": "owner/small"} and values["data"]["system"] == "Be kind."
    assert values["data"]["forget"] == "owner/tofu:forget05:train"
    assert values["data"]["retain"] == "owner/other:retain90:train"
    assert values["optimizer"]["warmup_steps"] == 0.1  # 1 of 10 epochs
    changed = recipe(
        converted(path, "forget_split=forget01", "model=large", "trainer.args.num_train_epochs=5"), tmp_path
    )
    assert changed["data"]["forget"] == "owner/tofu:forget01:train" and changed["model"] == {"name": "owner/large"}
    assert changed["optimizer"]["warmup_steps"] == 0.2 and changed["train"]["epochs"] == 5


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        ("no_such_key: 3", "no_such_key: is no key that the table of Axolotl has"),
        ("fix_untrained_tokens: [1]", "fix_untrained_tokens: changes embeddings of tokens that were never trained"),
        ("lr_scheduler: rex", "lr_scheduler: is the schedule REX"),
        ("optimizer: came_pytorch", "optimizer: came_pytorch is not supported; "),
        ("sequence_len: soon", "data.max_length: expected a whole number"),
        ("learning_rate: [1, 2]", "optimizer.learning_rate: expected a number"),
    ],
)
def test_what_is_not_possible_is_named_with_its_line(tmp_path: Path, line: str, failure: str) -> None:
    key = line.partition(":")[0]
    kept = [text for text in files.AXOLOTL.splitlines() if not text.startswith(f"{key}:")]
    conversion = of(tmp_path, "\n".join([*kept, line, ""]))
    (text,) = failures(conversion)
    assert text.startswith(f"{tmp_path / 'axolotl.yaml'}:{len(kept) + 1}: ") and failure in text
    assert conversion.kind == "not"


@pytest.mark.parametrize(
    "line", ["context_parallel_size: 1", "tokens: []", "early_stopping_patience: null", "rl: null"]
)
def test_a_key_that_asks_for_nothing_has_no_effect(tmp_path: Path, line: str) -> None:
    conversion = of(tmp_path, files.AXOLOTL + line + "\n")
    assert failures(conversion) == [] and statuses(conversion)[line.partition(":")[0]] == "dropped"


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        ("early_stopping_patience: 2\neval_steps: 10", "evaluate.early_stopping", {"patience": 2}),
        ("loss_watchdog_threshold: 5.0", "train.max_loss", 5.0),
        ("neftune_noise_alpha: 5", "train.neftune_noise_alpha", 5),
        ("loraplus_lr_ratio: 16", "optimizer.loraplus_ratio", 16),
        ("embedding_lr: 1e-5", "optimizer.groups", [
            {"pattern": ".*embed_tokens.*", "learning_rate": 1e-5},
            {"pattern": ".*lm_head.*", "learning_rate": 1e-5},
        ]),
    ],
)  # fmt: skip
def test_knobs_of_axolotl(tmp_path: Path, lines: str, key: str, value: object) -> None:
    values: Any = recipe(of(tmp_path, f"{files.AXOLOTL}{lines}\n"), tmp_path)
    section, name = key.split(".")
    assert values[section][name] == value


def test_parameters_that_are_trained_alone(tmp_path: Path) -> None:
    text = files.AXOLOTL.replace("adapter: qlora\n", "")
    more = "unfrozen_parameters:\n  - ^lm_head.weight$\n  - model.layers.4[4-7]+.mlp\n"
    values = recipe(of(tmp_path, text + more), tmp_path)
    assert values["model"]["trainable"] == ["^lm_head.weight", "model.layers.4[4-7]+.mlp.*"]


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("FastLanguageModel.for_inference(model)", {"no training"}),
        ("loss.backward()", set()),
        ("rows = rows.cast_column('audio', Audio(16000))\nSFTTrainer(model)", {"speech and others"}),
        ("rows.map(lambda row: row['audio']['array'])\nSFTTrainer(model)", {"speech and others"}),
        ("SFTTrainer(model)\nAudio('answer.wav')", set()),
    ],
)
def test_scripts_that_train_nothing_or_on_sound_are_aside(tmp_path: Path, line: str, kinds: set[str]) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"model, _ = FastLanguageModel.from_pretrained(model_name='a/b', max_seq_length=64)\n{line}\n")
    (tree,) = read(file)
    tool = recognize(tree)
    assert tool is not None
    assert {each.aside for each in convert(tree, tool, Options()).lines if each.aside} == kinds


def test_what_other_training_needs_is_aside(tmp_path: Path) -> None:
    conversion = of(tmp_path, files.AXOLOTL + "rl: grpo\ntrl: {num_generations: 4}\n")
    assert conversion.kind == "aside" and {line.aside for line in conversion.failures} == {"online RL"}


def test_a_batch_of_packed_examples_counts_packs(tmp_path: Path) -> None:
    values = recipe(of(tmp_path, files.AXOLOTL + "sample_packing: true\n", processes=2), tmp_path)
    assert (values["train"]["global_batch_size"], values["train"]["batch_unit"]) == (2 * 4 * 2, "packs")
    assert values["data"]["pack_length"] == values["data"]["max_length"] == 256


def test_processes_that_share_examples_are_not_counted_in_the_batch(tmp_path: Path) -> None:
    divided = files.AXOLOTL + "context_parallel_size: 2\ntensor_parallel_size: 2\nexpert_parallel_size: 4\n"
    one, eight = of(tmp_path, divided), of(tmp_path, divided, processes=8)
    sizes = [recipe(each, tmp_path)["train"]["global_batch_size"] for each in (of(tmp_path, files.AXOLOTL), one, eight)]
    assert sizes == [8, 8, 16]
    assert one.kind == "harmlessly"
    (failure,) = failures(of(tmp_path, divided, processes=6))
    assert "2 x 2 processes share examples, which does not divide 6" in failure


def test_modules_by_a_pattern(tmp_path: Path) -> None:
    text = files.AXOLOTL.replace(
        "lora_target_linear: true", "lora_target_modules: 'model.layers.[0-9]+.mlp.(up|down)_proj'"
    )
    adapter = recipe(of(tmp_path, text + "peft_layers_to_transform: [0, 1]\n"), tmp_path)["model"]["adapter"]
    assert adapter["targets"] == "model.layers.[0-9]+.mlp.(up|down)_proj" and adapter["layers"] == [0, 1]
    images = text.replace("model.layers", "model.language_model.layers")
    assert of(tmp_path, images).kind == "aside"


def test_intervals_of_epochs_need_the_rows(tmp_path: Path) -> None:
    text = files.AXOLOTL + "saves_per_epoch: 2\nevals_per_epoch: 4\n"
    assert "checkpoint" not in recipe(of(tmp_path, text), tmp_path)
    values = recipe(of(tmp_path, text, rows=800), tmp_path)
    assert values["checkpoint"] == {"every": 50} and values["evaluate"] == {"every": 25}


def test_of_two_keys_the_one_that_the_tool_reads_counts(tmp_path: Path) -> None:
    conversion = of(tmp_path, files.AXOLOTL + "warmup_steps: 20\nmax_steps: 100\n")
    values = recipe(conversion, tmp_path)
    assert values["optimizer"]["warmup_steps"] == 20 and values["train"]["max_steps"] == 100
    assert "epochs" not in values["train"]
    texts = {line.setting.key: line.text for line in conversion.lines if line.status == "dropped"}
    assert texts["warmup_ratio"] == "has no effect beside warmup_steps"
    assert texts["num_epochs"] == "has no effect beside max_steps"


def test_rows_are_tokenized_while_training_where_the_whole_recipe_can_have_it(tmp_path: Path) -> None:
    streaming = files.TRL + "dataset_streaming: true\n"
    conversion = of(tmp_path, streaming.replace("max_steps: -1", "max_steps: 60"), name="trl.yaml")
    assert recipe(conversion, tmp_path)["data"]["streaming"] is True
    conversion = of(tmp_path, streaming, name="trl.yaml")  # an epoch, whose rows are counted before
    assert "streaming" not in recipe(conversion, tmp_path)["data"]
    lines = [line for line in conversion.lines if line.setting.key == "dataset_streaming"]
    assert [(line.status, line.text) for line in lines] == [
        ("dropped", "rows are read into a file, and tokenized before training")
    ]


def test_of_a_key_that_is_written_twice_the_later_counts(tmp_path: Path) -> None:
    conversion = of(tmp_path, files.AXOLOTL + "lora_r: 4\n")
    assert recipe(conversion, tmp_path)["model"]["adapter"]["rank"] == 4
    (line,) = [line for line in conversion.lines if "given twice" in line.text]
    assert line.setting.key == "lora_r" and "the later one counts" in line.text and conversion.kind == "harmlessly"


def test_open_instruct_trains_on_answers_without_clipping(tmp_path: Path) -> None:
    text = "model_name_or_path: owner/small\nwith_tracking: true\nlearning_rate: 5e-6\nmax_seq_length: 64\n"
    text += "dataset_mixer:\n  owner/chats: 1.0\n  owner/more: 500\n"
    values = recipe(of(tmp_path, text, name="some.yaml"), tmp_path)
    assert values["data"]["targets"] == "answers" and values["optimizer"]["max_grad_norm"] is None
    assert values["data"]["train"] == [{"source": "owner/chats"}, {"source": "owner/more", "limit": 500}]
    assert values["train"]["epochs"] == 2 and values["optimizer"]["warmup_steps"] == 0.03


def test_states_of_8_bits_are_wider_where_they_are_not_sharded(tmp_path: Path) -> None:
    text = files.AXOLOTL.replace("adapter: qlora\n", "").replace("load_in_4bit: true\n", "")
    conversion = of(tmp_path, text + "deepspeed: deepspeed_configs/zero2.json\n")
    values = recipe(conversion, tmp_path)
    assert (values["optimizer"]["name"], values["parallel"]["strategy"]) == ("adamw", "zero2")
    assert any(line.differs and "zero2 does not shard states of 8 bits" in line.text for line in conversion.lines)


def test_keys_of_an_adapter_have_no_effect_without_one(tmp_path: Path) -> None:
    conversion = of(tmp_path, files.AXOLOTL.replace("adapter: qlora\n", ""))
    assert "rank" not in str(recipe(conversion, tmp_path)) and statuses(conversion)["lora_r"] == "dropped"


def test_a_contradiction_names_both(tmp_path: Path) -> None:
    other = "  - path: owner/more\n    type: chatml.intel\n"
    conversion = of(tmp_path, files.AXOLOTL.replace("val_set_size", f"{other}val_set_size"))
    (failure,) = failures(conversion)
    assert "datasets[2].type: means model.chat_template: chatml, and contradicts datasets[0].type on line 5" in failure


def test_accelerate_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\n"
    )
    script = "accelerate launch --config_file accelerate.yaml scripts/sft.py --config trl.yaml --learning_rate 1e-4\n"
    (tmp_path / "trl.yaml").write_text(files.TRL.replace("  min_lr: 5.0e-07", "  min_lr: 1.0e-05"))
    values = recipe(of(tmp_path, script, name="run.sh"), tmp_path)
    assert values["parallel"]["strategy"] == "zero3" and values["train"]["global_batch_size"] == 4 * 2 * 4
    assert values["optimizer"]["learning_rate"] == 1e-4 and values["optimizer"]["final_learning_rate_ratio"] == 0.1


def test_the_loss_is_that_of_the_command_or_of_the_folder(tmp_path: Path) -> None:
    text = files.TRL.replace("max_length: 512", "max_length: 512\nbeta: 0.05")
    (tmp_path / "orpo").mkdir()
    for name, loss in (("some.yaml", "dpo"), ("orpo/config.yaml", "orpo")):
        values = recipe(of(tmp_path, text, name=name), tmp_path)
        assert values["task"] == "dpo" and values["dpo"].get("loss", "dpo") == loss and values["dpo"]["beta"] == 0.05
        assert "targets" not in values["data"]


def test_a_revision_is_a_part_of_the_models_name(tmp_path: Path) -> None:
    values = recipe(of(tmp_path, "model_revision: it-SFT\n" + files.TRL, name="trl.yaml"), tmp_path)
    assert values["model"]["name"] == "owner/small@it-SFT"
    values = recipe(of(tmp_path, "model_revision: main\n" + files.TRL, name="trl.yaml"), tmp_path)
    assert values["model"]["name"] == "owner/small"


def test_a_system_text_is_that_of_each_source(tmp_path: Path) -> None:
    values = recipe(of(tmp_path, files.AXOLOTL + "default_system_message: Be brief.\n"), tmp_path)
    sources = values["data"]["train"]
    assert [source["system"] for source in sources] == ["Be brief."] * 2 and "system" not in values["data"]


def test_values_of_the_configuration_are_overrides(tmp_path: Path) -> None:
    scaling = "rope_scaling: {rope_type: linear, factor: 2.0}\noverrides_of_model_config: {rope_theta: 1.0e5}\n"
    values = recipe(of(tmp_path, files.AXOLOTL + scaling), tmp_path)
    assert values["model"]["overrides"] == {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_theta": 1.0e5,
    }
    (failure,) = failures(of(tmp_path, files.AXOLOTL + "rope_scaling: linear\n"))
    assert "rope_scaling: is no mapping of keys" in failure


def test_torchtune_without_a_maximum_length_has_the_models_positions(tmp_path: Path) -> None:
    def length(text: str) -> Any:
        return recipe(of(tmp_path, text, name="tune.yaml"), tmp_path)["data"]["max_length"]

    text = files.TORCHTUNE.replace("max_seq_len: 256", "max_seq_len: null")
    assert length(text) == 131_072
    assert length(text.replace("llama3_2.lora_llama3_2_1b", "qwen2_5.lora_qwen2_5_7b_base")) == 131_072
    assert length(text.replace("llama3_2.lora_llama3_2_1b", "qwen2_5.lora_qwen2_5_7b_instruct")) == 32_768
    assert length(text.replace("packed: false", "packed: false\n  max_seq_len: 512")) == 512  # before torchtune 0.2
    for changed in (text.replace("packed: false", "packed: true"), text.replace("torchtune.models.llama3_2", "mine")):
        assert any("does not limit the length" in line for line in failures(of(tmp_path, changed, name="tune.yaml")))


def test_torchtune_with_several_data_sets(tmp_path: Path) -> None:
    start, end = files.TORCHTUNE.index("dataset:"), files.TORCHTUNE.index("optimizer:")
    sets = """\
dataset:
  - _component_: torchtune.datasets.chat_dataset
    source: json
    data_files: chats.json
    data_dir: rows
    conversation_column: talk
    conversation_style: openai
    packed: true
  - _component_: torchtune.datasets.instruct_dataset
    source: owner/more
    column_map: {input: ask, output: gold}
    packed: true
"""
    text = files.TORCHTUNE[:start] + sets + files.TORCHTUNE[end:]
    values = recipe(of(tmp_path, text, name="tune.yaml"), tmp_path)
    assert values["data"]["train"] == [
        {"source": "rows/chats.json", "columns": {"messages": "talk"}},
        {"source": "owner/more", "prompt": "{ask}", "columns": {"answer": "gold"}},
    ]
    assert values["data"]["mixing"] == "concatenate" and values["data"]["targets"] == "answers"
    assert values["train"]["batch_unit"] == "packs" and values["data"]["pack_length"] == 256
    text = text.replace("conversation_style: openai", "conversation_style: openai\n    train_on_input: true")
    assert any("contradicts" in failure for failure in failures(of(tmp_path, text, name="tune.yaml")))


def test_the_reference_of_torchtune_is_the_model_itself(tmp_path: Path) -> None:
    text = files.TORCHTUNE.replace("torchtune.modules.loss.LinearCrossEntropyLoss", "torchtune.rlhf.loss.DPOLoss")
    text = text.replace(
        "torchtune.datasets.alpaca_dataset", "torchtune.datasets.preference_dataset\n  source: owner/pairs"
    )
    reference = "ref_checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: %s}\n"
    assert recipe(of(tmp_path, text + reference % "/models/small", name="tune.yaml"), tmp_path)["task"] == "dpo"
    (failure,) = failures(of(tmp_path, text + reference % "/models/other", name="tune.yaml"))
    assert "compares with another model" in failure


def test_a_value_that_is_set_elsewhere_is_asked_for(tmp_path: Path) -> None:
    text = files.TORCHTUNE.replace("/models/small", "${MODELS}/small")
    conversion = of(tmp_path, text, name="tune.yaml")
    (failure,) = failures(conversion)
    assert "it is set elsewhere: ${MODELS}/small; pass checkpointer.checkpoint_dir=VALUE" in failure
    assert conversion.kind == "computed"
    conversion = of(tmp_path, text, "checkpointer.checkpoint_dir=owner/small", name="tune.yaml")
    assert recipe(conversion, tmp_path)["model"]["name"] == "owner/small"


def test_a_command_of_open_unlearning_is_composed_with_its_overrides(tmp_path: Path) -> None:
    files.write_hydra(tmp_path)
    (tmp_path / "scripts").mkdir()
    command = (
        "accelerate launch src/train.py --config-name=unlearn.yaml experiment=unlearn/mine.yaml trainer=NPO "
        "forget_split={} trainer.args.learning_rate=3e-5 +trainer.args.weight_decay=0.1 task_name=${{name}}\n"
    )
    text = command.format("forget01")
    values = recipe(of(tmp_path / "scripts", text, name="run.sh"), tmp_path)
    assert values["data"]["forget"] == "owner/tofu:forget01:train" and values["unlearn"]["objective"] == "npo"
    assert values["optimizer"]["learning_rate"] == 3e-5 and values["optimizer"]["weight_decay"] == 0.1
    text = command.format("${split}").replace("trainer=NPO", "trainer=$trainer")
    conversion = of(tmp_path / "scripts", text, name="run.sh")
    assert [line.status for line in conversion.failures] == ["needs", "needs"]
    assert "set elsewhere: ${shell.split}" in failures(conversion)[0]
    assert "the script chooses it: ${trainer}; pass trainer=NAME" in failures(conversion)[1]
    given = of(tmp_path / "scripts", text, "trainer=NPO", "forget_split=forget01", name="run.sh")
    assert recipe(given, tmp_path) == values


def test_scripts_that_train_on_what_follows_a_text(tmp_path: Path) -> None:
    def targets(collator: str, text: str = files.UNSLOTH) -> Any:
        return of(tmp_path, text.replace("trainer = SFT", f"{collator}\ntrainer = SFT"), name="unsloth.py")

    last = targets("c = DataCollatorForCompletionOnlyLM(response_template='### A:', tokenizer=tokenizer)")
    assert recipe(last, tmp_path)["data"]["targets"] == "last"
    every = targets("c = DataCollatorForCompletionOnlyLM(response_template='A', instruction_template='Q')")
    assert recipe(every, tmp_path)["data"]["targets"] == "answers"
    plain = targets("c = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False)")
    assert recipe(plain, tmp_path)["data"]["targets"] == "all"
    texts = files.UNSLOTH.replace("dataset = dataset.map(write, batched=True)", "")
    texts = texts.replace("train_dataset=dataset,", "train_dataset=dataset, dataset_text_field='text',")
    (failure, _) = failures(targets("c = DataCollatorForCompletionOnlyLM('### A:', tokenizer=tokenizer)", texts))
    assert "trains on a part of each text" in failure


def test_a_script_that_names_the_column_of_its_texts(tmp_path: Path) -> None:
    """It is trained on although rows such as those of Alpaca have columns of instructions, too."""
    named = files.UNSLOTH.replace("train_dataset=dataset,", "train_dataset=dataset, dataset_text_field='text',")
    texts = named.replace("dataset = dataset.map(write, batched=True)", "")
    assert recipe(of(tmp_path, texts, name="unsloth.py"), tmp_path)["data"]["format"] == "text"
    assert "format" not in recipe(of(tmp_path, named, name="unsloth.py"), tmp_path)["data"]  # a function writes it
    older = """
trainer = SFTTrainer("owner/small", args=TrainingArguments("out"), dataset_text_field="body", max_seq_length=64,
    train_dataset=load_dataset("owner/chats", split="train"))
trainer.train()
"""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}], "body": "a"}\n')
    for train in (None, rows):
        data = recipe(of(tmp_path, older, name="train.py", train=train), tmp_path)["data"]
        assert data["format"] == "text" and data["columns"] == {"text": "body"}
        unnamed = older.replace('dataset_text_field="body", ', "")
        data = recipe(of(tmp_path, unnamed, name="train.py", train=train), tmp_path)["data"]
        assert data.get("format") != "text"


FOLLOWING_A_TEXT = ("instruction", "question_answer")


@pytest.mark.parametrize(("trainer", "loss"), [("DPO", None), ("KTO", "kto"), ("ORPO", "orpo"), ("CPO", "cpo")])
def test_a_script_whose_trainer_has_the_model_and_no_arguments(tmp_path: Path, trainer: str, loss: str | None) -> None:
    """The first example of TRL's pages: what counts are the defaults of the trainer, not those of fine-tuning."""
    for model in ("model='owner/small', ", "'owner/small', "):
        text = f"t = {trainer}Trainer({model}train_dataset=load_dataset('owner/pairs', split='train'))\nt.train()\n"
        values = recipe(of(tmp_path, text, name="train.py"), tmp_path)
        assert (values["task"], values["model"]["name"]) == ("dpo", "owner/small")
        assert values.get("dpo", {}).get("loss") == loss and values["optimizer"]["learning_rate"] == 1e-6
        assert not {"format", "columns", "targets"} & values["data"].keys()


LOADED = """
from trl import DPOTrainer
{}
{}
trainer = DPOTrainer({}, train_dataset=load_dataset("owner/pairs", split="train"))
trainer.train()
model = AutoModelForCausalLM.from_pretrained("out")
"""
OF_SCRIPTS = {
    "model": 'model = AutoModelForCausalLM.from_pretrained("a/model")',
    "same": 'ref = AutoModelForCausalLM.from_pretrained("a/model")',
    "other": 'ref = AutoModelForCausalLM.from_pretrained("b/other")',
    "unsloth": 'ref, tokenizer = FastLanguageModel.from_pretrained(model_name="b/other")',
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("given", ["model, ref", "model=model, ref_model=ref", "ref_model=ref, model=prepare(model)"])
def test_a_model_to_compare_with_is_not_trained_and_has_to_be_the_same(tmp_path: Path, order: int, given: str) -> None:
    for kind in ("same", "other", "unsloth"):
        lines = [OF_SCRIPTS["model"], OF_SCRIPTS[kind]][::order]
        conversion = of(tmp_path, LOADED.format(*lines, given), name="train.py")
        assert conversion.values["model.name"][0] == "a/model"
        others = [failure for failure in failures(conversion) if "measured against another model" not in failure]
        assert not others and len(failures(conversion)) == (kind != "same")


@pytest.mark.parametrize(
    ("given", "is_same"),
    [
        ("'a/model', ref_model='b/other'", False),
        ("'a/model', 'b/other'", False),
        ("'a/model', 'a/model'", True),
        ("model, None", True),
        ("model, ref_model=None", True),
        ("model, create_reference_model(model)", True),
        ("model, found", False),
        ("model, prepared", True),
    ],
)
def test_a_model_to_compare_with_by_its_name(tmp_path: Path, given: str, is_same: bool) -> None:
    text = LOADED.format(OF_SCRIPTS["model"], "prepared = f(model)", given)
    conversion = of(tmp_path, text, name="train.py")
    assert conversion.values["model.name"][0] == "a/model"
    assert [("measured against another model" in failure) for failure in failures(conversion)] == [True] * (not is_same)


def test_of_several_models_the_one_that_the_trainer_gets_is_trained(tmp_path: Path) -> None:
    judge = OF_SCRIPTS["other"].replace("ref", "judge")
    for lines in ((OF_SCRIPTS["model"], judge), (judge, OF_SCRIPTS["model"])):
        assert (
            recipe(of(tmp_path, LOADED.format(*lines, "model"), name="train.py"), tmp_path)["model"]["name"]
            == "a/model"
        )
    branches = (f"if os.path.exists('b'):\n    {OF_SCRIPTS['model']}", f"else:\n    {judge.replace('judge', 'model')}")
    (failure,) = failures(of(tmp_path, LOADED.format(*branches, "model"), name="train.py"))
    assert "the script computes it: 'a/model' or 'b/other'; pass AutoModelForCausalLM.argument_0=VALUE" in failure


@pytest.mark.parametrize(
    ("trainer", "arguments", "expected"),
    [
        (
            "CPO",
            "loss_type='simpo', cpo_alpha=0.0, simpo_gamma=1.5",
            {"loss": "simpo", "sft_weight": 0.0, "margin": 1.5},
        ),
        ("CPO", "loss_type='simpo'", {"loss": "simpo", "sft_weight": 1.0}),
        ("CPO", "loss_type='sigmoid', beta=0.2", {"loss": "cpo", "beta": 0.2}),
        ("DPO", "loss_type='sigmoid', beta=0.2", {"loss": "dpo", "beta": 0.2}),
        ("DPO", "loss_type='ipo'", {"loss": "ipo"}),
        ("KTO", "loss_type='kto'", {"loss": "kto"}),
        ("CPO", "loss_type='hinge'", None),
        ("KTO", "loss_type='sigmoid'", None),
        ("DPO", "loss_type='own'", None),
    ],
)
def test_the_loss_of_a_trainer_and_of_its_arguments(
    tmp_path: Path, trainer: str, arguments: str, expected: dict[str, object] | None
) -> None:
    """The loss that is written counts before the one that the trainer is named after, also in commands."""
    text = (
        f"t = {trainer}Trainer('owner/small', args={trainer}Config('out', {arguments}), "
        "train_dataset=load_dataset('owner/pairs', split='train'))\nt.train()\n"
    )
    options = " ".join(f"--{one}" for one in arguments.replace("'", "").replace("=", " ").split(", "))
    command = f"trl {trainer.lower()} --model_name_or_path owner/small --dataset_name owner/pairs --output_dir out"
    for given, name in ((text, "train.py"), (f"{command} {options}\n", "run.sh")):
        conversion = of(tmp_path, given, name=name)
        if expected is None:
            (failure,) = failures(conversion)
            assert "is not supported; sigmoid, hinge, ipo" in failure
        else:
            values = recipe(conversion, tmp_path)
            assert values["task"] == "dpo" and values.get("dpo", {}) == expected
        assert sum(line.text == "task: dpo" for line in conversion.lines) == 1


@pytest.mark.parametrize(
    "trainer", ["Trainer", "SFTTrainer", "UnslothTrainer", "DPOTrainer", "KTOTrainer", "CPOTrainer"]
)
def test_what_a_trainer_is_given_is_known_or_refused(tmp_path: Path, trainer: str) -> None:
    text = """
from trl import {0}
model = AutoModelForCausalLM.from_pretrained("owner/small")
collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
t = {0}(model, {1} train_dataset=load_dataset("owner/rows", split="train"))
t.train()
"""

    def texts(arguments: str) -> list[str]:
        return [line.text for line in of(tmp_path, text.format(trainer, arguments), name="train.py", **given).failures]

    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2]}\n')
    given = {"train": rows} if trainer == "Trainer" else {}
    plain = ("", "data_collator=collator,", "data_collator=None,", "tokenizer=tokenizer,", "callbacks=[own],")
    for arguments in (
        *plain,
        "args=arguments, compute_metrics=own,",
        "data_collator=transformers.default_data_collator,",
    ):
        assert texts(arguments) == [], arguments
    for arguments in ("compute_loss_func=own,", "optimizers=(own, None),", "optimizer_cls_and_kwargs=(Own, {}),"):
        assert texts(arguments) == ["trains by a loss, an optimizer or a schedule of the script"]
    assert texts("data_collator=OwnCollator(3),") == ["makes batches by the script: OwnCollator(3)"]
    assert texts("own_argument=3,") == ["is no key that the table of Unsloth has"]
    callbacks = of(tmp_path, text.format(trainer, "callbacks=[own],"), name="train.py", **given)
    assert any(line.differs and "callbacks of the script are not called" in line.text for line in callbacks.lines)


def test_a_script_of_trl_without_arguments_is_fine_tuned_on_turns_or_texts(tmp_path: Path) -> None:
    text = "t = SFTTrainer('owner/small', train_dataset=load_dataset('owner/chats', split='train'){})\nt.train()\n"
    values = recipe(of(tmp_path, text.format(", neftune_noise_alpha=5"), name="train.py"), tmp_path)
    assert values["model"]["name"] == "owner/small" and values["train"]["neftune_noise_alpha"] == 5
    assert values["data"]["format"] == ["messages", "conversations", "prompt_completion", "text", *FOLLOWING_A_TEXT]
    assert "columns" not in values["data"]
    for more in (", compute_loss_func=own_loss", ", optimizers=(own, None)"):
        (failure,) = failures(of(tmp_path, text.format(more), name="train.py"))
        assert "trains by a loss, an optimizer or a schedule of the script" in failure
    assert not failures(of(tmp_path, text.format(", optimizers=(None, None)"), name="train.py"))


def test_rows_that_a_script_evaluates_on(tmp_path: Path) -> None:
    text = files.UNSLOTH.replace('load_dataset("owner/chats", split="train")', 'load_dataset("owner/chats")')
    text = text.replace("train_dataset=dataset,", "train_dataset=dataset['train'], eval_dataset=held,")
    split = text.replace("trainer = SFT", "held = dataset['test']\ntrainer = SFT")
    assert recipe(of(tmp_path, split, name="unsloth.py"), tmp_path)["data"]["validation"] == "owner/chats:test"
    made = of(tmp_path, text.replace("trainer = SFT", "held = other(dataset)\ntrainer = SFT"), name="unsloth.py")
    assert recipe(made, tmp_path)["data"]["validation"] is None
    assert any(line.differs and "evaluates on other(dataset)" in line.text for line in made.lines)


def test_a_script_that_stops_early_or_skips_an_adapter(tmp_path: Path) -> None:
    stops = (
        "s = EarlyStoppingCallback(early_stopping_patience=4, early_stopping_threshold=0.01)\nheld = dataset['test']\n"
    )
    text = files.UNSLOTH.replace("trainer = SFT", f"{stops}trainer = SFT")
    text = text.replace("train_dataset=dataset,", "train_dataset=dataset, eval_dataset=held, callbacks=[s],")
    text = text.replace('split="train"', "").replace(
        "seed=3407,\n        report", "eval_steps=5, eval_strategy='steps', report"
    )
    values = recipe(of(tmp_path, text, name="unsloth.py"), tmp_path)
    assert values["evaluate"] == {"every": 5, "early_stopping": {"patience": 4, "min_delta": 0.01}}
    text = files.UNSLOTH.replace("model = FastLanguageModel.get_peft", "if flag:\n  model = FastLanguageModel.get_peft")
    skipped = of(tmp_path, "flag = False\n" + text, name="unsloth.py")
    assert any(line.differs and line.text == "flag is False by default: no get_peft_model" for line in skipped.lines)


def test_the_end_of_text_that_axolotl_sets_ends_rows_of_alpaca(tmp_path: Path) -> None:
    tokens = "special_tokens:\n  eos_token: <|im_end|>\noptim_args: eps=1e-7,beta2=0.95\neval_per_epoch: 4\n"
    conversion = of(tmp_path, files.AXOLOTL.replace("special_tokens:\n  pad_token: <pad>\n", tokens))
    values = recipe(conversion, tmp_path)
    assert "### Response:" in values["model"]["chat_template"] and "'<|im_end|>'" in values["model"]["chat_template"]
    assert "eos_token" not in values["model"]["chat_template"]
    assert values["model"]["added_tokens"] == {"special": ["<|im_end|>"]}
    assert values["optimizer"]["eps"] == 1e-7 and values["optimizer"]["betas"] == [0.9, 0.95]
    assert any(line.differs and "Axolotl, which has evals_per_epoch" in line.text for line in conversion.lines)
    (failure,) = failures(of(tmp_path, files.AXOLOTL + "optim_args: {amsgrad: true}\n"))
    assert "passes amsgrad: true to the optimizer" in failure


def test_data_sets_of_the_hub_and_of_llama_factory_itself(tmp_path: Path) -> None:
    text = files.LLAMA_FACTORY.replace("dataset: mine,chats", "dataset: identity")
    own = of(tmp_path, text, name="factory.yaml")
    values = recipe(own, tmp_path)
    assert values["data"]["train"] == "data/identity.json" and values["data"]["columns"] == {"answer": "output"}
    assert any(line.differs and "LLaMA-Factory's own dataset_info.json" in line.text for line in own.lines)
    online = text.replace("identity", "owner/rows\ndataset_dir: ONLINE")
    assert recipe(of(tmp_path, online, name="factory.yaml"), tmp_path)["data"]["train"] == "owner/rows"
    offload = "{zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}"
    inside = text.replace("ds_z2_offload_config.json", offload)
    parallel = recipe(of(tmp_path, inside, name="factory.yaml"), tmp_path)["parallel"]
    assert parallel == {"strategy": "zero2", "offload_optimizer": True}


def test_a_script_of_its_own_on_the_trainer(tmp_path: Path) -> None:
    text = "torchrun --nproc_per_node 2 finetune.py --model_name owner/small --data_path rows.json --learning_rate 1e-5"
    text += " --per_device_train_batch_size 2 --model_max_length 512 --save_strategy epoch\n"
    conversion = of(tmp_path, text, name="run.sh")
    values = recipe(conversion, tmp_path)
    assert values["data"]["train"] == "rows.json" and values["data"]["targets"] == "answers"
    assert values["train"]["activation_checkpointing"] == "none" and values["train"]["global_batch_size"] == 4
    differing = [line.setting.key for line in conversion.lines if line.differs]
    assert differing == ["data_path", "launcher.program", "save_strategy"]
    (failure,) = failures(of(tmp_path, text.replace(" --model_max_length 512", ""), name="run.sh"))
    assert "does not limit the length of examples: pass max_length=N" in failure
    (failure,) = failures(of(tmp_path, files.TRL + "dataset_train_split: {part: one}\n", name="trl.yaml"))
    assert '{"part": "one"} names no part of owner/chats' in failure


def test_evaluations_without_a_number_of_steps_are_as_often_as_figures(tmp_path: Path) -> None:
    text = files.TRL + "eval_strategy: steps\nlogging_steps: 30\n"
    assert recipe(of(tmp_path, text, name="trl.yaml"), tmp_path)["evaluate"]["every"] == 30
    text = files.TRL + "eval_strategy: epoch\n"
    assert recipe(of(tmp_path, text, name="trl.yaml", rows=80), tmp_path)["evaluate"]["every"] == 10


def test_keys_that_axolotl_does_not_have_are_ignored_as_by_it_if_they_are_anothers(tmp_path: Path) -> None:
    given = of(tmp_path, files.AXOLOTL + "lr_scheduler_type: linear\nuse_qlora: true\nlearning_rates: 1\n")
    lines = {line.setting.key: (line.status, line.text) for line in given.lines}
    assert lines["lr_scheduler_type"] == ("dropped", "is no key of Axolotl, which ignores it")
    assert lines["use_qlora"][0] == "dropped"
    assert lines["learning_rates"][0] == "unknown"
    other = of(tmp_path, files.LLAMA_FACTORY + "lr_scheduler: linear\n", name="factory.yaml")
    assert statuses(other)["lr_scheduler"] == "unknown"  # it refuses keys that it does not have


SCRIPT = """
rows = load_dataset("json", data_files="raw.jsonl", split="train").map(lambda row: clean(row, re.compile("x")))
rows = rows.train_test_split(0.1)
SFTTrainer(
    model="owner/small", train_dataset=rows["train"], eval_dataset=rows["test"],
    args=SFTConfig(learning_rate=1e-4, max_length=64, per_device_train_batch_size=2, eval_strategy="no"),
)
"""


def test_rows_that_a_script_makes_can_be_passed_as_a_file(tmp_path: Path) -> None:
    alone = of(tmp_path, SCRIPT, name="train.py")
    assert alone.kind == "computed" and all("pass --train FILE" in line.text for line in alone.failures)
    tokens, texts, turns = (tmp_path / f"{name}.jsonl" for name in ("tokens", "texts", "turns"))
    tokens.write_text('{"input_ids": [1, 2], "labels": [-100, 2]}\n')
    texts.write_text('{"instruction": "a", "output": "b", "text": "a b"}\n')
    turns.write_text('{"messages": [{"role": "user", "content": "a"}], "text": "a"}\n')
    given = of(tmp_path, SCRIPT, name="train.py", train=tokens, validation=tokens)
    made = recipe(given, tmp_path)["data"]
    assert (made["train"], made["format"], made["max_length"]) == (str(tokens), "tokens", 64)
    assert made["targets"] == "answers"  # the labels count
    assert made["validation"] == str(tokens)
    with pytest.raises(RequestError, match=r"--validation .*texts\.jsonl: has rows of another kind"):
        of(tmp_path, SCRIPT, name="train.py", train=tokens, validation=texts)
    data = recipe(of(tmp_path, SCRIPT, name="train.py", train=texts), tmp_path)["data"]
    assert data["format"] == "text"  # which TRL trains on, and not on columns of instructions
    data = recipe(of(tmp_path, SCRIPT, name="train.py", train=turns), tmp_path)["data"]
    assert "format" not in data and "columns" not in data
    unsloth = "from unsloth import FastModel\nFastModel.from_pretrained('owner/small', full_finetuning=True)\n" + SCRIPT
    data = recipe(of(tmp_path, unsloth, name="train.py", train=turns), tmp_path)["data"]
    assert data["format"] == "text"  # which counts before turns there
    turns.write_text('{"prompt": "a", "completion": "b"}\n')
    data = recipe(of(tmp_path, SCRIPT, name="train.py", train=turns), tmp_path)["data"]
    assert data["targets"] == "answers"  # as TRL does by default with completions
    turns.write_text("\n")
    for file, why in ((turns, "has no rows"), (tmp_path, "is no file of rows")):
        with pytest.raises(RequestError, match=f"--train {file}: {why}"):
            of(tmp_path, SCRIPT, name="train.py", train=file)


def test_rows_of_tokens_are_trained_on_as_the_trainer_of_transformers_does(tmp_path: Path) -> None:
    script = (
        SCRIPT.replace("SFTConfig", "TrainingArguments").replace("SFTTrainer", "Trainer").replace("max_length=64,", "")
    )
    script = f"model = AutoModelForCausalLM.from_pretrained('owner/small')\n{script}"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 2, 3, 4, 5]}\n')
    made = recipe(of(tmp_path, script, name="train.py", train=rows), tmp_path)["data"]
    assert (made["max_length"], made["format"], made["targets"]) == (5, "tokens", "all")  # it cuts no rows
    rows.write_text('{"input_ids": [1, 2], "labels": [-100, 2]}\n')
    collator = script.replace("args=", "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False), args=")
    (failure,) = of(tmp_path, collator, name="train.py", train=rows).failures
    assert failure.status == "needs" and "has labels, which DataCollatorForLanguageModeling replaces" in failure.text


def test_rows_are_passed_in_place_of_those_that_a_tool_builds(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    text = (
        re.sub(r"type: .*", "type: my.prompts", files.AXOLOTL)
        + "test_datasets: [{path: owner/test, type: my.prompts}]\n"
    )
    assert [line.status for line in of(tmp_path, text).failures][:1] == ["needs"]
    given = of(tmp_path, text, train=rows)
    made = recipe(given, tmp_path)
    assert made["data"]["train"] == str(rows) and made["data"]["validation"] == 0.1
    dropped = {line.setting.key: line for line in given.lines if line.status == "dropped"}
    assert dropped["test_datasets[0].path"].differs and "--validation FILE" in dropped["test_datasets[0].path"].text
    tune = of(tmp_path, files.TORCHTUNE, name="tune.yaml", train=rows)
    assert recipe(tune, tmp_path)["data"]["targets"] == "all"  # as its Alpaca rows are trained on
    own = files.TORCHTUNE.replace("torchtune.datasets.alpaca_dataset", "my.rows")
    assert [line.status for line in of(tmp_path, own, name="tune.yaml").failures] == ["needs"]
    assert recipe(of(tmp_path, own, name="tune.yaml", train=rows), tmp_path)["data"]["train"] == str(rows)
    with pytest.raises(RequestError, match=r"none\.jsonl"):
        of(tmp_path, text, train=tmp_path / "none.jsonl")
