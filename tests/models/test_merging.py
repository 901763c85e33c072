from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.slow import slow_but
from trainwright.errors import RequestError
from trainwright.models.adapters.attaching import attach_adapter, iterate_adapted_layers
from trainwright.models.files import save_model
from trainwright.models.load import load_model, load_tokenizer
from trainwright.models.merging import merge
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.model import ModelSection

LLAMA: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 258,
}  # fmt: skip
GPT2 = {"vocab_size": 259, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": 258}
IDS = torch.tensor([list(b"merged and apart")])


def base(directory: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    config = AutoConfig.for_model(family, **{**(GPT2 if family == "gpt2" else LLAMA), **more})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    save_model(directory, config, model.state_dict(), build_bytes_tokenizer(), model.generation_config, dtype)
    return directory


def trained(directory: Path, out: Path, scale: float = 0.1, **adapter: Any) -> tuple[ModelSection, torch.Tensor]:
    """An adapter with random numbers on the model in ``directory``, saved: what to merge, and its logits [1, L, V]."""
    section = ModelSection.model_validate({"name": str(directory), "adapter": {"type": "lora", "rank": 4, **adapter}})
    model = load_model(section, torch.float32)
    attached = attach_adapter(model, section, 0)
    assert attached is not None
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
        logits = model(input_ids=IDS).logits
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    attached.save(out, named, load_tokenizer(section))
    saved = {"type": section.adapter.type, "start_from": str(out), "quantization": section.adapter.quantization}
    return ModelSection.model_validate({"name": str(directory), "adapter": saved}), logits


def logits_of(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "adapter",
    slow_but(
        {}, {"targets": ["c_attn"]}, among=({}, {"type": "dora"}, {"rank_stabilized": True}, {"targets": ["c_attn"]})
    ),
)
def test_merged_logits_are_those_of_base_and_adapter(family: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    if (family == "llama") == ("targets" in adapter):
        adapter = {**adapter, "targets": ["q_proj", "down_proj"]} if family == "llama" else adapter
    section, expected = trained(base(tmp_path / "base", family), tmp_path / "adapter", **adapter)
    changed, difference, _ = merge(section, 0, tmp_path / "merged")
    assert difference < 1e-4 and changed > 0
    found = logits_of(tmp_path / "merged")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - logits_of(tmp_path / "base")).abs().max() > 0.01


def test_matrices_of_embeddings_and_head_are_merged(tmp_path: Path) -> None:
    directory = base(tmp_path / "base", tie_word_embeddings=False)
    section, expected = trained(directory, tmp_path / "adapter", targets=["lm_head", "embed_tokens", "q_proj"])
    merge(section, 0, tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modules", [[], ["embed_tokens"]])
def test_rotations_are_merged(modules: list[str], tmp_path: Path) -> None:
    directory = base(tmp_path / "base", tie_word_embeddings=False)
    fields = {"type": "oft", "rank": None, "block_size": 32, "modules_to_save": modules}
    section, expected = trained(directory, tmp_path / "adapter", scale=0.03, **fields)
    assert merge(section, 0, tmp_path / "merged")[0] == 14 + len(modules)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)
    assert (expected - logits_of(directory)).abs().max() > 0.01


def test_matrices_of_experts_are_merged(tmp_path: Path) -> None:
    directory = base(tmp_path / "base", "mixtral", num_local_experts=4)
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    section, expected = trained(directory, tmp_path / "adapter", targets=["q_proj"], target_parameters=experts)
    assert merge(section, 0, tmp_path / "merged")[0] == 2 + 4
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)


def test_modules_that_were_trained_whole_replace_the_bases(tmp_path: Path) -> None:
    directory = base(tmp_path / "base", tie_word_embeddings=False)
    section, expected = trained(directory, tmp_path / "adapter", modules_to_save=["lm_head", "embed_tokens"])
    merge(section, 0, tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids="+".join)
@pytest.mark.parametrize("tied_in_adapter", [True, False])
def test_a_head_or_embedding_that_was_trained_on_a_tied_base_is_kept(
    modules: list[str], tied_in_adapter: bool, tmp_path: Path
) -> None:
    """Trained apart the two are two matrices, and the merged model is untied; trained as one they stay one."""
    from peft import LoraConfig, get_peft_model

    directory = base(tmp_path / "base", tie_word_embeddings=True)
    config = LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=modules, ensure_weight_tying=tied_in_adapter,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        expected = theirs.eval()(input_ids=IDS).logits
    theirs.save_pretrained(tmp_path / "adapter")
    adapter = {"type": "lora", "start_from": str(tmp_path / "adapter")}
    section = ModelSection.model_validate({"name": str(directory), "adapter": adapter})
    merge(section, 0, tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_an_adapter_of_a_quantized_base_goes_into_the_whole_one(quantization: str, tmp_path: Path) -> None:
    section, expected = trained(base(tmp_path / "base"), tmp_path / "adapter", quantization=quantization)
    _, difference, _ = merge(section, 0, tmp_path / "merged")
    assert difference < 1e-4
    # The logits of training are those of the rounded base: alike, not equal.
    found = logits_of(tmp_path / "merged")
    assert (found - expected).abs().max() > 1e-5
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.8


def test_it_is_stored_as_the_base_is_or_as_asked(tmp_path: Path) -> None:
    section, expected = trained(base(tmp_path / "base", dtype=torch.bfloat16), tmp_path / "adapter")
    _, rounded, _ = merge(section, 0, tmp_path / "as-base")
    _, whole, _ = merge(section, 0, tmp_path / "whole", torch.float32)
    torch.testing.assert_close(logits_of(tmp_path / "whole"), expected, rtol=1e-4, atol=1e-4)
    assert whole < 1e-4 < rounded
    assert AutoConfig.from_pretrained(tmp_path / "as-base").dtype == torch.bfloat16
    assert AutoConfig.from_pretrained(tmp_path / "whole").dtype == torch.float32


def test_what_rounding_takes_away_is_refused(tmp_path: Path) -> None:
    section, _ = trained(base(tmp_path / "base"), tmp_path / "adapter", scale=1e-12)
    with pytest.raises(RequestError, match="rounded away; store them in fp32"):
        merge(section, 0, tmp_path / "merged", torch.bfloat16)
    assert not (tmp_path / "merged").exists()


def test_places_that_are_taken_and_models_without_adapter_are_refused(tmp_path: Path) -> None:
    section, _ = trained(base(tmp_path / "base"), tmp_path / "adapter")
    with pytest.raises(RequestError, match="is the base model, which is never overwritten"):
        merge(section, 0, tmp_path / "base")
    with pytest.raises(RequestError, match="exists"):
        merge(section, 0, tmp_path / "adapter")
    with pytest.raises(RequestError, match="no adapter to merge"):
        merge(ModelSection(name=str(tmp_path / "base")), 0, tmp_path / "merged")


def test_every_adapted_layer_is_merged(tmp_path: Path) -> None:
    section, _ = trained(base(tmp_path / "base"), tmp_path / "adapter")
    model = load_model(section, torch.float32)
    attach_adapter(model, section, 0)
    assert merge(section, 0, tmp_path / "merged")[0] == len(list(iterate_adapted_layers(model))) == 14
