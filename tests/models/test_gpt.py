"""The GPT: causal, the same as the architectures of transformers that it is, and what else is asked of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from trainwright.errors import RequestError
from trainwright.inference.loading import probe
from trainwright.models.causal_lm import CausalLM, check_model, find_blocks
from trainwright.models.files import build_skeleton, save_model
from trainwright.models.gpt.config import GPTConfig
from trainwright.models.gpt.conversion import from_transformers
from trainwright.models.gpt.model import GPT, TransformerBlock, eager_attention_forward
from trainwright.models.gpt.variants import VARIANTS
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.truncate_config import cut_config
from trainwright.models.weights import load_empty
from trainwright.planning.trace.request import TracedModel
from trainwright.planning.trace.traced import read_model_facts
from trainwright.recipe.sections.model import ModelSection

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"variant": "gpt2"},
    "gpt2 without biases": {"variant": "gpt2", "bias": False},
    "gpt2 untied": {"variant": "gpt2", "tie_word_embeddings": False},
    "gpt2 with the exact gelu": {"variant": "gpt2", "mlp": "gelu"},
    "llama": {"variant": "modern", "qk_norm": False, "num_key_value_heads": 2},
    "qwen3": {"variant": "modern", "num_key_value_heads": 2, "rope_theta": 500.0},
    "qwen3 untied, a head each": {"variant": "modern", "num_key_value_heads": 4, "tie_word_embeddings": False},
}


@pytest.fixture(params=KINDS)
def section(request: pytest.FixtureRequest) -> ModelSection:
    config = {"model_type": "gpt", **SMALL, **KINDS[request.param]}
    if "gpt2" in request.param:
        config["num_key_value_heads"] = None
    return ModelSection(config=config, tokenizer="bytes")


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_later_token_changes_no_earlier_logit(section: ModelSection) -> None:
    model = load_model(section)
    one = tokens()
    for place in (1, 10, 19):
        other = one.clone()
        other[:, place] = (other[:, place] + 1) % 256
        before, after = model(one).logits, model(other).logits
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.equal(before[:, place:], after[:, place:])


@torch.no_grad()
def test_packed_documents_see_themselves_alone_and_the_loss_is_the_models_own(section: ModelSection) -> None:
    for packed in (True, False):
        check_model(CausalLM(load_model(section), packed=packed), probe(259))


@pytest.mark.slow
@torch.no_grad()
def test_a_saved_one_is_transformers_own_and_says_and_writes_the_same(section: ModelSection, tmp_path: Path) -> None:
    model, tokenizer = load_model(section, seed=1), load_tokenizer(section)
    save_model(tmp_path / "saved", model.config, model.state_dict(), tokenizer, model.generation_config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not isinstance(theirs, GPT)
    inputs = tokens()
    difference = (model(inputs).logits - theirs(inputs).logits).abs().max()
    assert difference < 1e-5
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(inputs)
    mask[0, :5] = 0
    written = model.generate(inputs, attention_mask=mask, **asked)
    assert torch.equal(written, theirs.generate(inputs, attention_mask=mask, **asked))
    # The cache of keys and values changes nothing but the speed.
    assert torch.equal(written, model.generate(inputs, attention_mask=mask, use_cache=False, **asked))
    assert (from_transformers(theirs)(inputs).logits - model(inputs).logits).abs().max() < 1e-5


@torch.no_grad()
def test_weights_of_a_gpt2_checkpoint_and_back_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=64, vocab_size=300)).eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms too
    theirs.save_pretrained(tmp_path / "theirs")
    load_tokenizer(ModelSection(name="x", tokenizer="bytes")).save_pretrained(tmp_path / "theirs")
    section = ModelSection(name=str(tmp_path / "theirs"), implementation="gpt")
    model = load_model(section)
    assert isinstance(model, GPT)
    inputs = tokens(3, 40)
    assert (model(inputs).logits - theirs(inputs).logits).abs().max() < 1e-5
    save_model(tmp_path / "ours", model.config, model.state_dict(), load_tokenizer(section))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(again, GPT2LMHeadModel)
    assert (again(inputs).logits - theirs(inputs).logits).abs().max() < 1e-5
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    other = AutoConfig.for_model("gpt_neox", hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"(?s)gpt_neox.*set it to transformers"):
        load_config(ModelSection(name=str(tmp_path), tokenizer="bytes", implementation="gpt"))


def test_an_empty_one_has_the_parameters_of_the_whole(section: ModelSection) -> None:
    found = load_empty(section, 0)
    assert found is not None
    empty, _ = found
    shapes = {name: p.shape for name, p in load_model(section).named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes
    assert all(p.is_meta for p in empty.parameters())


def test_its_blocks_are_found_and_cut(section: ModelSection) -> None:
    config = load_config(section)
    cut = AutoModelForCausalLM.from_config(cut_config(config, 2))
    assert [type(block) for block in find_blocks(cut)] == [TransformerBlock] * 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_plans_know_its_size(variant: str) -> None:
    facts = read_model_facts(TracedModel.of({"model_type": "gpt", "variant": variant, "vocab_size": 50257}))
    model = build_skeleton(GPTConfig(variant=variant))
    assert facts.total == sum(p.numel() for p in model.parameters())


def test_gpt2_has_124_million_parameters() -> None:
    assert sum(p.numel() for p in build_skeleton(GPTConfig()).parameters()) == 124_439_808


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"variant": "gpt5"}, "gpt2-medium"),
        ({"norm": "rms"}, "no architecture of transformers has learned, rms, gelu_tanh"),
        ({"qk_norm": True}, "position_embedding rotary"),
        ({"variant": "modern", "num_key_value_heads": 5}, "12 is not divisible by num_key_value_heads 5"),
        ({"hidden_size": 100}, "not a multiple"),
        ({"layers": 3}, "model.config.layers: not a key of gpt"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load_config(ModelSection(config={"model_type": "gpt", **config}, tokenizer="bytes"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_dropout_is_of_training_alone(attention: str) -> None:
    config = {"model_type": "gpt", **SMALL, "variant": "gpt2", "dropout": 0.5}
    model = load_model(ModelSection(config=config, tokenizer="bytes"))
    model.set_attn_implementation(attention)
    plain = load_model(ModelSection(config={**config, "dropout": 0.0}, tokenizer="bytes"))
    plain.set_attn_implementation(attention)
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, plain(tokens()).logits)
        assert not torch.equal(model.train()(tokens()).logits, plain(tokens()).logits)


def test_fresh_weights_onto_the_stream_are_smaller_the_deeper_the_model() -> None:
    config = {"model_type": "gpt", **SMALL, "hidden_size": 128, "num_hidden_layers": 8, "variant": "gpt2"}
    block = find_blocks(load_model(ModelSection(config=config, tokenizer="bytes")))[0]
    for inward, onto in ((block.attention.qkv, block.attention.output), (block.mlp.up, block.mlp.down)):  # type: ignore[union-attr]
        assert inward.weight.std().item() == pytest.approx(0.02, rel=0.03)  # type: ignore[union-attr, operator]
        assert onto.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)  # type: ignore[union-attr, operator]


@torch.no_grad()
def test_tokens_behind_a_cache_are_where_they_would_be_without_it(section: ModelSection) -> None:
    model = load_model(section)
    model.set_attn_implementation("eager")
    whole = model(tokens()).logits
    first = model(tokens()[:, :12], use_cache=True)
    later = model(tokens()[:, 12:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(later, whole[:, 12:], rtol=1e-4, atol=1e-5)


def test_attention_in_words_lets_the_last_queries_see_all_keys_before_them() -> None:
    query, key, value = (torch.randn(2, heads, length, 8) for heads, length in ((4, 3), (2, 7), (2, 7)))
    found, _ = eager_attention_forward(torch.nn.Identity(), query, key, value, None, scaling=0.3)
    allowed = torch.ones(3, 7, dtype=torch.bool).tril(4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
