"""What other programs load of a run: the model that was trained, with the stop and the precision that belong to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support.commands import machine_file
from tests.support.runs import ON_ROWS, TINY, Runs, events
from tests.support.training import ALONE, trainer_of
from trainwright.engine.checkpoints.export import check_export, export
from trainwright.errors import TrainingError
from trainwright.models.files import check_saved, compute_logits, save_model
from trainwright.models.tokenization import build_bytes_tokenizer, end_texts_at_turns

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 259,
    "pad_token_id": 256, "tie_word_embeddings": True,
}  # fmt: skip
SHORT = (ON_ROWS, "train.max_steps=2", "parallel.num_processes=1", "model.dropout=null", "data.pack_length=null")
IDS = torch.arange(3, 40)[None]


def make_base(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A base model as labs publish them: texts end at <|endoftext|>, and there is no chat template."""
    tokenizer = build_bytes_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = None
    torch.manual_seed(0)
    sizes = SIZES if kind != "gpt_neox" else {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    config = AutoConfig.for_model(kind, **sizes, **fields)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def give_head(directory: Path, head: str, embedding: str) -> None:
    """Store another head in the file of a model whose configuration ties it to the embedding."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights[head] = weights[embedding] + 0.05 * torch.randn(weights[embedding].shape).to(weights[embedding].dtype)
    save_file(weights, file, {"format": "pt"})


def trained(runs: Runs, base: Path, *overrides: str) -> Path:
    return runs.trained(*SHORT, f"model.name={base}", "model.config=null", "model.tokenizer=null", *overrides)


def logits(directory: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits


HEADS = {
    "llama": ("lm_head.weight", "model.embed_tokens.weight"),
    "gpt_neox": ("embed_out.weight", "gpt_neox.embed_in.weight"),
    "qwen3": ("lm_head.weight", "model.embed_tokens.weight"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", ()),
        pytest.param("gpt_neox", (), marks=pytest.mark.slow),
        pytest.param("qwen3", ("model.implementation=gpt",), marks=pytest.mark.slow),
        pytest.param("llama", ("parallel.strategy=fsdp", "parallel.num_processes=2"), marks=pytest.mark.slow),
        pytest.param("llama", ("parallel.strategy=zero3", "parallel.num_processes=2"), marks=pytest.mark.slow),
    ],
)
def test_a_head_that_the_configuration_ties_is_saved(
    runs: Runs, tmp_path: Path, kind: str, overrides: tuple[str, ...]
) -> None:
    fields: dict[str, Any] = {"head_dim": 8} if kind == "qwen3" else {}
    base = make_base(tmp_path / "base", kind, **fields)
    give_head(base, *HEADS[kind])
    # Steps this small leave the weights as they are.
    run = trained(runs, base, "optimizer.learning_rate=1e-12", "checkpoint.every=1", *overrides)
    final = run / "final"
    assert torch.allclose(logits(final), logits(base), atol=1e-5)
    assert not AutoConfig.from_pretrained(final).tie_word_embeddings
    exported = runs.command("export", str(run), "--checkpoint", "newest", "--out", str(tmp_path / "out")).wait()
    assert exported.code == 0, exported.stderr
    assert torch.allclose(logits(tmp_path / "out"), logits(base), atol=1e-5)


@pytest.mark.slow
def test_the_stop_that_chats_teach_is_where_other_programs_look(runs: Runs, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    GenerationConfig(eos_token_id=[259, 7], pad_token_id=256, temperature=0.5, do_sample=True).save_pretrained(base)
    run = trained(runs, base, "checkpoint.every=1")
    exported = runs.command("export", str(run), "--checkpoint", "newest", "--out", str(tmp_path / "out")).wait()
    assert exported.code == 0, exported.stderr
    for directory in (run / "final", tmp_path / "out"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
        generation = GenerationConfig.from_pretrained(directory)
        assert generation.eos_token_id == [258, 259, 7] and generation.temperature == 0.5
        assert AutoModelForCausalLM.from_pretrained(directory).generation_config.eos_token_id == [258, 259, 7]
        assert AutoConfig.from_pretrained(directory).eos_token_id == 258


@pytest.mark.slow
def test_the_stop_is_saved_with_an_adapter_and_merged(runs: Runs, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    GenerationConfig(eos_token_id=[259, 7]).save_pretrained(base)
    run = trained(runs, base, "model.adapter=lora", "optimizer.learning_rate=1e-2")
    done = runs.command("merge", str(run), "--out", str(tmp_path / "merged")).wait()
    assert done.code == 0, done.stderr
    for directory in (run / "final", tmp_path / "merged"):
        assert AutoTokenizer.from_pretrained(directory).eos_token == "<|im_end|>"
        assert GenerationConfig.from_pretrained(directory).eos_token_id == [258, 259, 7]


@pytest.mark.parametrize("opening", ["", "\n", " \n\n", "  {% if true %}{% endif %}\n A"])
def test_a_template_that_writes_the_end_of_a_text_renders_as_before(opening: str) -> None:
    tokenizer = build_bytes_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = opening + (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    final, _, _ = end_texts_at_turns(tokenizer, AutoConfig.for_model("llama", **SIZES), None)
    assert final.eos_token == "<|im_end|>"
    before, after = (each.apply_chat_template(messages, tokenize=False) for each in (tokenizer, final))
    assert after == before and str(after).endswith("<|im_end|><|endoftext|>")


@pytest.mark.slow
def test_continued_texts_keep_their_end(runs: Runs, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"Some text, number {i}."}) + "\n" for i in range(40)))
    final = trained(runs, base, f"data.train={texts}") / "final"
    assert AutoTokenizer.from_pretrained(final).eos_token == "<|endoftext|>"
    assert AutoConfig.from_pretrained(final).eos_token_id == 259


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "wanted", "expected"), [("bfloat16", "auto", "bfloat16"), ("bfloat16", "fp32", "float32")]
)
def test_the_model_is_saved_in_the_precision_of_its_base_or_the_recipe(
    runs: Runs, tmp_path: Path, stored: str, wanted: str, expected: str
) -> None:
    base = make_base(tmp_path / "base", dtype=getattr(torch, stored))
    run = trained(runs, base, f"model.save_dtype={wanted}", "checkpoint.every=2")
    weights = load_file(run / "final" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {f"torch.{expected}"}
    assert AutoConfig.from_pretrained(run / "final").dtype == getattr(torch, expected)
    state = load_file(next((run / "checkpoints").glob("*/*.safetensors")))
    assert {tensor.dtype for name, tensor in state.items() if name.startswith("model.")} == {torch.float32}


def test_a_saved_model_that_is_not_the_trained_one_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_base(tmp_path / "base")).eval()
    checksums = save_model(tmp_path / "saved", model.config, model.state_dict(), build_bytes_tokenizer())
    expected = compute_logits(model, IDS)
    check_saved(tmp_path / "saved", checksums, IDS, expected)
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    other = settings | {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(other))
    with pytest.raises(TrainingError, match="does not compute what was trained"):
        check_saved(tmp_path / "saved", checksums, IDS, expected)
    give_head(tmp_path / "saved", *HEADS["llama"])
    with pytest.raises(TrainingError, match=r"lm_head.weight loads with other values"):
        check_saved(tmp_path / "saved", checksums, IDS, expected)


def test_a_model_whose_logits_are_all_zero_passes_the_check(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_base(tmp_path / "base")).eval()
    with torch.no_grad():
        model.model.norm.weight.zero_()
    checksums = save_model(tmp_path / "saved", model.config, model.state_dict(), build_bytes_tokenizer())
    expected = compute_logits(model, IDS)
    assert not expected.any()
    check_saved(tmp_path / "saved", checksums, IDS, expected)


def test_a_mixture_whose_rounded_routing_differs_for_a_token_passes_the_check(tmp_path: Path) -> None:
    sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(10.0 if "experts" in name else 1.0)
    checksums = save_model(
        tmp_path / "saved", model.config, model.state_dict(), build_bytes_tokenizer(), dtype=torch.bfloat16
    )
    expected = compute_logits(model, IDS)
    loaded = compute_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).eval(), IDS)
    assert float((loaded - expected).abs().max()) > 0.2 * float(expected.abs().max()), "a token has another expert"
    assert check_saved(tmp_path / "saved", checksums, IDS, expected) is None
    # All positions of a model that is another one differ.
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 10.0}))
    with pytest.raises(TrainingError, match="does not compute what was trained"):
        check_saved(tmp_path / "saved", checksums, IDS, expected)


def test_an_export_that_fails_its_check_is_kept_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    training = trainer_of(ALONE, [], tmp_path / "run")[0].training
    final = tmp_path / "final"
    export(training.task, training.strategy, final, 1, 1)
    settings = json.loads((final / "config.json").read_text())
    (final / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 10.0}))
    with pytest.raises(TrainingError, match=r"not compute what was trained.* exported files are in .*final-failed"):
        check_export(training.task, training.strategy, final, [])
    assert not final.exists() and (tmp_path / "final-failed-check" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_model_that_is_larger_than_the_free_memory_is_said_not_to_be_compared(runs: Runs, tmp_path: Path) -> None:
    machine = machine_file(tmp_path, memory_bytes=100_000, memory_free_bytes=100_000)
    run = runs.new_directory("run")
    ended = runs.command(
        *("train", str(TINY), *SHORT, f"logging.run_directory={run}", "--force"),
        TRAINWRIGHT_MACHINE=machine,
    ).wait()
    assert ended.code == 0, ended.stderr
    (message,) = [event["message"] for event in events(run, "notice") if "compared" in event["message"]]
    assert f"{run / 'final'} was not compared with the trained model: it has" in message
    assert "was not compared with the trained model" in ended.stdout


def test_tied_weights_that_differ_and_values_beyond_fp16_are_not_saved(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_base(tmp_path / "base"))
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(TrainingError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        save_model(tmp_path / "saved", model.config, state, build_bytes_tokenizer())
    state = dict(model.state_dict()) | {"model.norm.weight": torch.full((32,), 1e5)}
    with pytest.raises(TrainingError, match=r"fp16: model.norm.weight has values of up to 1e\+05"):
        save_model(tmp_path / "saved", model.config, state, build_bytes_tokenizer(), dtype=torch.float16)
    assert not (tmp_path / "saved").exists()
