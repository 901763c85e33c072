"""Loading: fresh models from a seed, weights from safetensors, and requests that are refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from trainwright.errors import RequestError
from trainwright.models.load import load_config, load_model, load_tokenizer
from trainwright.models.tokenization import build_bytes_tokenizer, load_tokenizer_from
from trainwright.models.weights import build_empty_model
from trainwright.recipe.sections.model import ModelSection

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def fresh(config: dict[str, Any], **fields: Any) -> ModelSection:
    return ModelSection(config=config, tokenizer=fields.pop("tokenizer", "bytes"), **fields)


def saved(directory: Path, config: Any = None) -> Path:
    """A model directory as plain transformers writes it."""
    config = config or load_config(fresh(LLAMA))
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    build_bytes_tokenizer().save_pretrained(directory)
    return directory


def test_fresh_model_is_a_function_of_the_seed_alone() -> None:
    section = fresh(LLAMA)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_model(section, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = load_model(section, seed=5).state_dict(), load_model(section, seed=6).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    rounded = load_model(section, torch.bfloat16, seed=5).state_dict()
    assert all(torch.equal(first[k].bfloat16(), rounded[k]) for k in first)


def test_rotary_frequencies_are_fp32_in_every_dtype(tmp_path: Path) -> None:
    saved(tmp_path)
    for section in (fresh(LLAMA), ModelSection(name=str(tmp_path))):
        model = load_model(section, torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {model.dtype} == {torch.bfloat16}
        assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_fresh_model_has_the_tokenizers_vocabulary_and_ids() -> None:
    config = load_config(fresh(LLAMA))
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (259, 256, 258)
    assert config.bos_token_id is None
    given = load_config(fresh({**LLAMA, "vocab_size": 320, "pad_token_id": 3}))
    assert (given.vocab_size, given.pad_token_id, given.eos_token_id) == (320, 3, 258)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "vocab_size": 200}, r"model\.config\.vocab_size: 200 is less than .*259"),
        ({**LLAMA, "hiden_size": 8}, r"model\.config\.hiden_size: .*did you mean hidden_size"),
        ({**LLAMA, "model_type": "lama"}, r"model\.config is of an architecture .* not have \(lama, perhaps llama\)"),
        (
            {**LLAMA, "model_type": "vit"},
            r"model\.config is not a language model \(vit\); Trainwright trains decoder-only",
        ),
        ({**LLAMA, "model_type": "t5"}, r"model\.config is an encoder-decoder model \(t5\); Trainwright trains"),
        ({"hidden_size": 8}, r"model_type: missing"),
        ({**LLAMA, "hidden_size": "wide"}, r"model\.config: llama: .*hidden_size"),
        ({**LLAMA, "hidden_size": 30}, r"model\.config: llama: .*multiple of the number of attention heads"),
    ],
)
def test_wrong_fresh_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_config(fresh(config))


@pytest.mark.parametrize(
    ("config", "names"),
    [(LLAMA, ["attention_dropout"]), (GPT2, ["resid_pdrop", "embd_pdrop", "attn_pdrop"])],
)
def test_dropout_sets_every_probability(config: dict[str, Any], names: list[str]) -> None:
    loaded = load_model(fresh(config, dropout=0.25))
    assert [getattr(loaded.config, name) for name in names] == [0.25] * len(names)


def test_dropout_changes_what_the_model_computes() -> None:
    model = load_model(fresh(GPT2, dropout=0.5)).train()
    ids = torch.arange(12).unsqueeze(0)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model = load_model(fresh(GPT2, dropout=0.0)).train()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_values_that_only_the_model_code_refuses_are_a_wrong_request(tmp_path: Path) -> None:
    section = fresh({**LLAMA, "hidden_act": "os.system"})
    for make in (load_model, lambda section: build_empty_model(load_config(section))):
        with pytest.raises(
            RequestError, match=r"cannot create a llama from this configuration \(KeyError: 'os\.system'\)"
        ):
            make(section)
    config = saved(tmp_path) / "config.json"
    config.write_text(config.read_text().replace('"silu"', '"os.system"'))
    with pytest.raises(RequestError, match=r"model\.name: .* cannot be loaded: KeyError: 'os\.system'"):
        load_model(ModelSection(name=str(tmp_path)))


def test_dropout_of_an_architecture_without_is_refused() -> None:
    mamba = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1}
    with pytest.raises(RequestError, match=r"model\.dropout: mamba has no dropout"):
        load_config(fresh(mamba, dropout=0.1))


def test_directory_gives_its_weights_in_memory_of_their_own(tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(saved(tmp_path)).state_dict()
    state = torch.get_rng_state()
    model = load_model(ModelSection(name=str(tmp_path)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(source[k], v) for k, v in model.state_dict().items())
    assert all(p.data_ptr() % 64 == 0 and p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    half = load_model(ModelSection(name=str(tmp_path)), torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    saved(tmp_path, load_config(fresh({**LLAMA, "tie_word_embeddings": True})))
    model = load_model(ModelSection(name=str(tmp_path)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    weights = AutoModelForCausalLM.from_pretrained(saved(tmp_path)).state_dict()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"only as pickles \(pytorch_model\.bin\)"):
        load_model(ModelSection(name=str(tmp_path)))


def test_weights_of_another_shape_or_depth_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    load_config(fresh({**LLAMA, "num_hidden_layers": 3})).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"lacks 9 tensors of LlamaForCausalLM \(model\.layers\.2"):
        load_model(ModelSection(name=str(tmp_path)))
    load_config(fresh({**LLAMA, "hidden_size": 64})).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="cannot be loaded"):
        load_model(ModelSection(name=str(tmp_path)))


def test_other_tokenizer_must_fit_the_embeddings(tmp_path: Path) -> None:
    small = LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"}, vocab_size=100)
    saved(tmp_path, small)
    with pytest.raises(RequestError, match=r"model\.tokenizer: it has 259 tokens, but the model has only 100"):
        load_config(ModelSection(name=str(tmp_path), tokenizer="bytes"))
    saved(tmp_path, GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=300))
    model = load_model(ModelSection(name=str(tmp_path), tokenizer="bytes"))
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (258, 258)


def test_code_of_the_models_own_is_never_run(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    text = (tmp_path / "config.json").read_text().replace('"llama"', '"my_own"')
    text = text.replace("{", '{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"},', 1)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RequestError, match="never run"):
        load_model(ModelSection(name=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_chat_template_is_text_or_a_file_and_is_checked(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert load_tokenizer(fresh(LLAMA, chat_template=text)).chat_template == text
    (tmp_path / "t.jinja").write_text(text)
    assert load_tokenizer(fresh(LLAMA, chat_template=str(tmp_path / "t.jinja"))).chat_template == text
    with pytest.raises(
        RequestError, match=r"chat_template: it is not a Jinja template, not one of alpaca, .*no\.jinja: no such file"
    ):
        load_tokenizer(fresh(LLAMA, chat_template=str(tmp_path / "no.jinja")))
    with pytest.raises(RequestError, match=r"model\.chat_template, line 2"):
        load_tokenizer(fresh(LLAMA, chat_template="a\n{% for m in messages %}{{ m }"))
    (tmp_path / "latin.jinja").write_bytes(b"{# one\n two #}\n{{ 'caf\xe9' }}")
    with pytest.raises(RequestError, match=r"^model\.chat_template: .*latin\.jinja:3: is not UTF-8 text"):
        load_tokenizer(fresh(LLAMA, chat_template=str(tmp_path / "latin.jinja")))


def test_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(load_config(fresh(LLAMA))).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"model\.name: .* has no tokenizer .*set model\.tokenizer"):
        load_tokenizer(ModelSection(name=str(tmp_path)))


def test_template_arguments_are_defaults_of_the_saved_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking is defined and not thinking %}no{% endif %}"
    )
    section = ModelSection(
        config={"model_type": "llama"},
        tokenizer="bytes",
        chat_template=template,
        template_arguments={"thinking": False},
    )
    load_tokenizer(section).save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    question = [{"role": "user", "content": "Hi "}]
    assert saved.apply_chat_template(question, tokenize=False) == "Hi no"
    assert saved.apply_chat_template(question, tokenize=False, thinking=True) == "Hi "
    wrong = section.model_copy(update={"template_arguments": {"thinkin": True}})
    with pytest.raises(
        RequestError, match=r"model.template_arguments.thinkin: the chat template does not read it; it reads thinking"
    ):
        load_tokenizer(wrong)


@pytest.mark.skipif(find_spec("sentencepiece") is not None, reason="sentencepiece is installed, so the file is read")
def test_a_sentencepiece_model_alone_names_the_package(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(RequestError, match=r"only tokenizer.model, which is read with the package sentencepiece"):
        load_tokenizer_from(tmp_path, "model.name")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def test_overrides_are_those_of_transformers_and_are_saved(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", load_config(fresh({**LLAMA, "rope_theta": 5e4})))
    section = ModelSection(name=str(directory), overrides={"rope_scaling": YARN, "max_position_embeddings": 8192})
    config = load_config(section)
    assert config.max_position_embeddings == 8192 and config.rope_parameters == {**YARN, "rope_theta": 5e4}
    model, theirs = load_model(section, 0).eval(), LlamaConfig.from_pretrained(directory)
    theirs.rope_parameters, theirs.max_position_embeddings = {**YARN, "rope_theta": 5e4}, 8192
    tokens = torch.arange(200)[None]
    expected = AutoModelForCausalLM.from_pretrained(directory, config=theirs).eval()(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    assert not torch.equal(load_model(ModelSection(name=str(directory)), 0).eval()(tokens).logits, expected)
    model.save_pretrained(tmp_path / "trained")
    again = load_config(ModelSection(name=str(tmp_path / "trained"), overrides={"rope_theta": 1e4}))
    assert again.rope_parameters == {**YARN, "rope_theta": 1e4} and again.max_position_embeddings == 8192


def test_overrides_of_no_key_or_of_shapes_are_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model")
    with pytest.raises(
        RequestError, match=r"model\.overrides\.rope_scalling: not a key of llama; did you mean rope_sc"
    ):
        load_config(ModelSection(name=str(directory), overrides={"rope_scalling": YARN}))
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "num_local_experts", "model_type", "n_embd"):
        with pytest.raises(ValueError, match=f"{key} decides the shapes of the weights"):
            ModelSection(name="a/b", overrides={key: 1})
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}}
    with pytest.raises(RequestError, match="rope_parameters by kind of layer"):
        ModelSection(name="a/b", overrides={"rope_theta": 1e5}).override_configuration(nested)
