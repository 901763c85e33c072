"""Adapters: what is put into a model, and that plain PEFT gives the trained model from what is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from trainwright.data.stream.batch import collate_examples
from trainwright.data.tokens.dataset import TokenDataset
from trainwright.errors import RequestError, TrainingError
from trainwright.models.adapters.attaching import Adapter, attach_adapter, attach_without_weights
from trainwright.models.causal_lm import CausalLM
from trainwright.models.load import check_adapter, load_config, load_model
from trainwright.models.quantization import QuantizedLinear, count_parameters
from trainwright.models.tokenization import build_bytes_tokenizer
from trainwright.recipe.sections.model import ModelSection

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "nemotron_h": {
        **{key: value for key, value in LLAMA.items() if key != "num_hidden_layers"},
        **{"model_type": "nemotron_h", "layers_block_type": ["attention", "moe"], "head_dim": 8},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "moe_shared_expert_intermediate_size": 48,
    },
    "llama4_text": {
        **LLAMA,
        **{"model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
    },
    "gpt_oss": {**LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.arange(20, 44).view(2, 12)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories as plain transformers writes them."""
    directory = tmp_path_factory.mktemp("bases")
    for index, (kind, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(index)
        fresh = load_config(ModelSection(config=config, tokenizer="bytes"))
        AutoModelForCausalLM.from_config(fresh).save_pretrained(directory / kind)
        build_bytes_tokenizer().save_pretrained(directory / kind)
    return {kind: directory / kind for kind in CONFIGS}


def section(base: Path, **adapter: Any) -> ModelSection:
    return ModelSection.model_validate({"name": str(base), "adapter": {"type": "lora", "rank": 4, **adapter}})


def attached(model: ModelSection, seed: int = 0) -> tuple[PreTrainedModel, Adapter]:
    base = load_model(model, seed=seed)
    adapter = attach_adapter(base, model, seed)
    assert adapter is not None
    return base, adapter


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def train(model: PreTrainedModel, steps: int = 3) -> None:
    """Some steps that change everything that is trained."""
    torch.manual_seed(4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(model: PreTrainedModel, adapter: Adapter, directory: Path) -> None:
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    adapter.save(directory, trained, build_bytes_tokenizer())


def made(model: ModelSection, directory: Path, steps: int = 3) -> torch.Tensor:
    """Train an adapter and save it in ``directory``; the trained model's logits."""
    trained, adapter = attached(model)
    train(trained, steps)
    expected = logits(trained)
    save(trained, adapter, directory)
    return expected


def by_peft(base: Path, directory: Path, **options: Any) -> torch.Tensor:
    plain = AutoModelForCausalLM.from_pretrained(base, **options)
    return logits(PeftModel.from_pretrained(plain, directory))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "rank-stabilized": ("llama", {"rank_stabilized": True, "alpha": 7.5}),
    "dora": ("llama", {"type": "dora"}),
    "some targets": ("llama", {"targets": ["layers.1.mlp.up_proj", "v_proj"]}),
    "a norm and a whole layer": ("llama", {"modules_to_save": ["input_layernorm", "layers.0.mlp"]}),
    "untied embeddings and head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "a tied head": ("tied", {"modules_to_save": ["lm_head"]}),
    "tied embeddings": ("tied", {"modules_to_save": ["embed_tokens"]}),
    "a regular expression": ("llama", {"targets": r".*layers\.\d+\.self_attn\.[qv]_proj"}),
    "some blocks": ("llama", {"layers": [1]}),
    "embeddings and head": ("llama", {"targets": ["embed_tokens", "lm_head", "q_proj"]}),
    "pissa": ("llama", {"initialization": "pissa"}),
    "olora, rank-stabilized": ("llama", {"initialization": "olora", "rank_stabilized": True}),
    "pissa of gpt2": ("gpt2", {"initialization": "pissa", "targets": ["c_attn", "c_proj"]}),
    "gaussian": ("llama", {"initialization": "gaussian"}),
    "oft": ("llama", {"type": "oft", "rank": None, "block_size": 8}),
    "oft and a head": ("llama", {"type": "oft", "rank": None, "block_size": 16, "modules_to_save": ["lm_head"]}),
    "experts": ("mixtral", {"target_parameters": EXPERTS, "rank_stabilized": True}),
    "transposed experts alone": ("gpt_oss", {"targets": [], "target_parameters": EXPERTS}),
    "experts of a block": ("mixtral", {"targets": ["q_proj"], "target_parameters": EXPERTS[1:], "layers": [1]}),
    "embeddings alone": ("llama", {"targets": ["embed_tokens"]}),
    "gpt2": ("gpt2", {}),
    "dora on gpt2": ("gpt2", {"type": "dora"}),
    "tied embeddings of gpt2": ("gpt2", {"modules_to_save": ["wte"], "targets": ["c_attn"]}),
}


@pytest.mark.parametrize(("initialization", "theirs"), [("pissa", "pissa_niter_16"), ("olora", "olora")])
def test_a_decomposed_weight_trains_as_in_peft(
    initialization: str, theirs: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Losses of the first steps; PEFT takes the part that is trained out of the weight."""
    plain = AutoModelForCausalLM.from_pretrained(bases["llama"])
    for layer in plain.modules():  # singular values that fall as those of trained weights do
        if isinstance(layer, torch.nn.Linear):
            left, values, right = torch.linalg.svd(layer.weight.data, full_matrices=False)
            layer.weight.data = left @ (2 * 0.5 ** torch.arange(len(values)))[:, None].mul(right)
    plain.save_pretrained(tmp_path / "base")
    build_bytes_tokenizer().save_pretrained(tmp_path / "base")
    trained, _ = attached(section(tmp_path / "base", initialization=initialization, targets=["q_proj", "up_proj"]))
    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "up_proj"], init_lora_weights=theirs)
    assert_same_losses(trained, get_peft_model(plain, config), learning_rate=0.05)


def assert_same_losses(*models: torch.nn.Module, learning_rate: float) -> None:
    """Train two models for four steps, and check that their losses are the same and fall."""
    losses: list[list[float]] = []
    for model in models:
        model.train()
        torch.manual_seed(4)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
        losses.append([])
        for _ in range(4):
            loss = model(input_ids=IDS, labels=IDS).loss
            losses[-1].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 1e-3


def test_the_loss_is_that_of_the_head_with_its_adapter(bases: dict[str, Path]) -> None:
    trained, _ = attached(section(bases["llama"], targets=["lm_head", "q_proj"]))
    train(trained)
    named = {name: parameter for name, parameter in trained.named_parameters() if parameter.requires_grad}
    expected = trained(input_ids=IDS, labels=IDS).loss * IDS[:, 1:].numel()
    gradients = torch.autograd.grad(expected, list(named.values()))
    dataset = TokenDataset.from_examples([(row, [False] + [True] * (len(row) - 1)) for row in IDS.tolist()], "x")
    batch = collate_examples(dataset, [0, 1], packed=False)
    loss = CausalLM(trained, packed=False)(batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert any("lm_head" in name for name in named)
    for name, mine, theirs in zip(named, torch.autograd.grad(loss, list(named.values())), gradients, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_peft_gives_the_trained_model_from_what_is_saved(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, fields = KINDS[kind]
    model = section(bases[base], **fields)
    plain = AutoModelForCausalLM.from_pretrained(bases[base])
    trained, adapter = attached(model)
    assert close(logits(trained), logits(plain)), "a new adapter changes nothing"
    train(trained)
    expected = logits(trained)
    assert not close(expected, logits(plain))
    save(trained, adapter, tmp_path / "final")
    assert close(by_peft(bases[base], tmp_path / "final"), expected)
    adapter.read_back(trained, tmp_path / "final", IDS, all_parameters=True)
    assert torch.equal(logits(trained), expected), "reading back leaves no trace"
    unchanged = dict(plain.named_parameters())
    frozen = {n: p for n, p in trained.named_parameters() if not p.requires_grad and ".beneath." not in n}
    for name, parameter in frozen.items():
        name = name.replace(".base_layer", "").replace(".original_module", "")
        assert parameter.grad is None and torch.equal(parameter, unchanged[name]), name
    assert json.loads((tmp_path / "final" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        bases[base]
    )


@pytest.mark.parametrize(("base", "name"), [("tied", "embed_tokens"), ("tied", "lm_head"), ("gpt2", "wte")])
def test_a_tied_head_is_trained_as_the_one_matrix_it_is(
    base: str, name: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    model, adapter = attached(section(bases[base], modules_to_save=[name]))
    train(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    save(model, adapter, tmp_path / "a")
    expected = logits(model)
    again, _ = attached(section(bases[base], rank=None, start_from=str(tmp_path / "a")))
    assert close(logits(again), expected)
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    one, other = (tensor for key, tensor in saved.items() if ".lora_" not in key)
    assert torch.equal(one, other)


@pytest.mark.parametrize("double", [True, False])
def test_an_nf4_base_is_the_one_that_transformers_makes(bases: dict[str, Path], tmp_path: Path, double: bool) -> None:
    model = section(bases["llama"], quantization="nf4", double_quantization=double)
    expected = made(model, tmp_path / "final")
    theirs = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    plain = AutoModelForCausalLM.from_pretrained(bases["llama"], dtype=torch.float32, quantization_config=theirs)
    ours = [module for module in load_model(model).modules() if isinstance(module, QuantizedLinear)]
    found = [module.weight for module in plain.modules() if isinstance(module, Linear4bit)]
    for layer, weight in zip(ours, found, strict=True):
        assert torch.equal(layer.dequantize(), dequantize_4bit(weight.data, weight.quant_state))
    with torch.no_grad():  # as in training: where the processor can, Linear4bit evaluates in bf16
        found_logits = PeftModel.from_pretrained(plain, tmp_path / "final").train()(input_ids=IDS).logits
    assert close(found_logits, expected)


@pytest.mark.parametrize("kind", ["nf4", "double nf4", "int8"])
@pytest.mark.parametrize("base", ["mixtral", "gpt_oss", "nemotron_h"])
def test_quantized_experts_train_as_dequantized_ones_do_in_peft(
    bases: dict[str, Path], base: str, kind: str, tmp_path: Path
) -> None:
    """Losses of the first steps; the weights are those of bitsandbytes, and PEFT adds matrices to them."""
    names = EXPERTS if base != "nemotron_h" else ["experts.up_proj", "experts.down_proj"]
    quantization = {"quantization": kind.split()[-1], "quantize_experts": True}
    quantization |= {"double_quantization": kind == "double nf4"} if "nf4" in kind else {}
    fields = {"targets": [], "target_parameters": names, "initialization": "gaussian", "rank_stabilized": True}
    trained, adapter = attached(section(bases[base], **quantization, **fields))
    plain = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32)
    replace_with_dequantized(plain, kind)
    config = LoraConfig(r=4, lora_alpha=32, target_modules=[], target_parameters=names, use_rslora=True)
    theirs = get_peft_model(plain, config)
    ours = {name: parameter for name, parameter in trained.named_parameters() if parameter.requires_grad}
    for name, parameter in theirs.base_model.model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(ours[name].data)
    assert len(ours) == 4 * (1 if base == "nemotron_h" else 2)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        trained(input_ids=IDS, labels=IDS)
    assert max(t.numel() for t in kept if t.dim() == 3 and t.shape[0] == 4) <= 4 * 8 * 96, "no weights of experts"
    assert_same_losses(trained, theirs, learning_rate=0.5)
    save(trained, adapter, tmp_path / "final")
    adapter.read_back(trained, tmp_path / "final", IDS, all_parameters=True)
    again = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32)
    replace_with_dequantized(again, kind)
    assert close(logits(PeftModel.from_pretrained(again, tmp_path / "final")), logits(trained))


def replace_with_dequantized(model: PreTrainedModel, kind: str) -> None:
    """Give linear layers and experts the values that bitsandbytes makes of their weights."""
    head = model.get_output_embeddings()
    layers = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    for weight in [*layers, *(p for p in model.parameters() if p.dim() == 3 and p.shape[0] == 4)]:
        if kind == "int8":
            rows = weight.data.reshape(-1, weight.shape[-1])
            bits, scales, _ = int8_vectorwise_quant(rows.half())
            weight.data = int8_vectorwise_dequant(bits, scales).view(weight.shape)
        else:
            how = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": kind == "double nf4"}
            weight.data = dequantize_4bit(*quantize_4bit(weight.data, **how))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("llama", "LlamaForCausalLM has no frozen weights of experts in one parameter; remove it"),
        ("llama4_text", "computes feed_forward.experts.gate_up_proj by code of its own"),
    ],
)
def test_experts_that_cannot_be_quantized_are_refused(bases: dict[str, Path], base: str, message: str) -> None:
    assert message in refused(section(bases[base], quantization="nf4", quantize_experts=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "nf4"},
        {"quantization": "int8"},
        {"quantization": "nf4", "modules_to_save": ["mlp"]},
        {"type": "dora", "quantization": "nf4"},
    ],
)
@pytest.mark.parametrize("base", ["llama", "gpt2"])
def test_an_adapter_on_a_quantized_base_is_read_back(
    base: str, fields: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    model = section(bases[base], **fields)
    trained, adapter = attached(model)
    whole = AutoModelForCausalLM.from_pretrained(bases[base])
    if "modules_to_save" not in fields:
        assert count_parameters(trained)[0] - count_parameters(trained)[1] == whole.num_parameters()
    assert (logits(trained) - logits(whole)).abs().max() < 0.2 * logits(whole).abs().max()
    train(trained)
    expected = logits(trained)
    save(trained, adapter, tmp_path / "final")
    adapter.read_back(trained, tmp_path / "final", IDS, all_parameters=True)
    assert torch.equal(logits(trained), expected)
    fields = {**fields, "rank": None, "modules_to_save": [], "start_from": str(tmp_path / "final")}
    again, _ = attached(section(bases[base], **fields))
    assert close(logits(again), expected)


def test_new_matrices_are_a_function_of_the_seed_alone(bases: dict[str, Path]) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, _ = attached(section(bases["llama"]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = attached(section(bases["llama"]))[0], attached(section(bases["llama"]), seed=1)[0]
    quantized = attached(section(bases["llama"], quantization="nf4"))[0]
    name = "model.layers.1.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(one.get_parameter(name), again.get_parameter(name))
    assert torch.equal(one.get_parameter(name), quantized.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))


def test_what_is_trained_is_counted(bases: dict[str, Path]) -> None:
    whole = AutoModelForCausalLM.from_pretrained(bases["llama"]).num_parameters()
    layer = 4 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 48) + (48 + 32))
    for quantization in ("none", "nf4", "int8"):
        model, _ = attached(section(bases["llama"], quantization=quantization))
        assert count_parameters(model) == (whole + 2 * layer, 2 * layer)


def test_an_existing_adapter_goes_on(bases: dict[str, Path], tmp_path: Path) -> None:
    first = made(section(bases["llama"], type="lora", rank_stabilized=True, alpha=3), tmp_path / "run" / "final")
    # The run's directory does as well, and what its adapter is need not be said again.
    model = ModelSection.model_validate(
        {"name": str(bases["llama"]), "adapter": {"type": "lora", "start_from": str(tmp_path / "run")}}
    )
    trained, adapter = attached(model)
    assert close(logits(trained), first)
    train(trained)
    assert not close(logits(trained), first)
    save(trained, adapter, tmp_path / "next")
    assert close(by_peft(bases["llama"], tmp_path / "next"), logits(trained))


def test_an_adapter_of_plain_peft_goes_on(bases: dict[str, Path], tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(bases["gpt2"])
    theirs: Any = get_peft_model(plain, LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True))
    train(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    trained, _ = attached(section(bases["gpt2"], type="dora", rank=None, start_from=str(tmp_path / "theirs")))
    assert close(logits(trained), logits(theirs))


def test_an_adapter_on_top_of_another_is_saved_as_one_with_it(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    beneath = made(section(base, rank=3, targets=["q_proj", "up_proj"]), tmp_path / "one")
    stacked = {"rank": 5, "rank_stabilized": True, "targets": ["q_proj", "down_proj"], "stack": True}
    model = section(base, **stacked, start_from=str(tmp_path / "one"))
    trained, adapter = attached(model)
    assert close(logits(trained), beneath)
    kept = {n: p.clone() for n, p in trained.named_parameters() if ".beneath." in n}
    train(trained)
    expected = logits(trained)
    assert not close(expected, beneath)
    assert all(torch.equal(trained.get_parameter(n), p) for n, p in kept.items())
    save(trained, adapter, tmp_path / "two")
    adapter.read_back(trained, tmp_path / "two", IDS, all_parameters=True)
    assert torch.equal(logits(trained), expected)
    assert close(by_peft(base, tmp_path / "two"), expected)
    # And that one can be gone on with, or stacked on, in turn.
    for stack in (False, True):
        more = {"rank": 2, "stack": True} if stack else {"rank": None}
        again, top = attached(section(base, **more, start_from=str(tmp_path / "two")))
        assert close(logits(again), expected)
        train(again)
        save(again, top, tmp_path / f"three-{stack}")
        assert close(by_peft(base, tmp_path / f"three-{stack}"), logits(again))


@pytest.mark.parametrize("stack", [False, True])
def test_a_planned_adapter_on_another_has_the_shapes_of_a_run(
    bases: dict[str, Path], tmp_path: Path, stack: bool
) -> None:
    base = bases["llama"]
    made(section(base, rank=3), tmp_path / "one")
    model = section(base, rank=5 if stack else None, stack=stack, start_from=str(tmp_path / "one"))
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(load_config(model))
    attach_without_weights(planned, model.adapter)
    shapes = [{n: (p.shape, p.requires_grad) for n, p in m.named_parameters()} for m in (planned, attached(model)[0])]
    assert shapes[0] == shapes[1]


def refused(model: ModelSection) -> str:
    """The message with which the model is refused, before anything of it is loaded and again then."""
    with pytest.raises(RequestError) as early:
        check_adapter(model, 0)
    with pytest.raises(RequestError) as late:
        attached(model)
    assert str(early.value) == str(late.value)
    return str(early.value)


def test_a_target_that_matches_nothing_is_refused_with_those_that_are_there(bases: dict[str, Path]) -> None:
    message = refused(section(bases["llama"], targets=["v_proj", "w_proj"]))
    assert message.startswith(
        "model.adapter.targets: w_proj matches no linear module of LlamaForCausalLM; choose from "
    )
    assert message.endswith("q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, embed_tokens, lm_head")
    assert "choose from c_attn, c_proj, c_fc" in refused(section(bases["gpt2"], targets=["q_proj"]))
    assert "matches none of the" in refused(section(bases["llama"], targets=".*nowhere.*"))


def test_ends_of_a_model_that_cannot_be_adapted_are_refused(bases: dict[str, Path]) -> None:
    assert "the weight of both embeddings and output head" in refused(section(bases["tied"], targets=["lm_head"]))
    assert "cannot have dora" in refused(section(bases["llama"], type="dora", targets=["embed_tokens"]))
    assert "computes without the dropout" in refused(section(bases["llama"], dropout=0.1, targets=["lm_head"]))


def test_modules_with_names_of_experts_are_not_taken_for_these() -> None:
    config = {
        **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }  # fmt: skip
    model = ModelSection.model_validate({"config": config, "tokenizer": "bytes", "adapter": {"type": "lora"}})
    trained, _ = attached(model)
    assert not [name for name, p in trained.named_parameters() if p.requires_grad and ".mlp." in name]
    assert "mlp.up_proj, mlp.down_proj, mlp.shared_experts.gate_proj" in str(check_adapter(model, 0))
    named = model.model_copy(
        update={"adapter": model.adapter.model_copy(update={"targets": ["shared_experts.up_proj"]})}
    )
    with pytest.raises(RequestError, match=r"PEFT takes the name of .*shared_experts.up_proj for"):
        attached(named)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"target_parameters": ["q_proj.weight"]},
            "it has mlp.experts.gate_up_proj, mlp.experts.down_proj. Linear modules are",
        ),
        ({"target_parameters": ["down_proj"], "layers": [7]}, "7 does not exist: the model has blocks 0 to 1"),
    ],
)
def test_weights_of_experts_that_are_not_there_are_refused(
    bases: dict[str, Path], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_adapter(section(bases["mixtral"], targets=[], **fields), 0)


def test_blocks_that_are_not_there_are_refused(bases: dict[str, Path]) -> None:
    assert "model.adapter.layers: 2 does not exist: the model has blocks 0 to 1" in refused(
        section(bases["llama"], layers="1-7")
    )
    message = refused(section(bases["llama"], layers=[0], targets=["lm_head"]))
    assert "no module of model.adapter.targets is in these blocks" in message


def test_a_module_to_save_that_is_not_there_is_refused(bases: dict[str, Path]) -> None:
    message = refused(section(bases["llama"], modules_to_save=["embeddings"]))
    assert "embeddings matches no module" in message and "embed_tokens" in message and "lm_head" in message
    assert "leaves no linear module" in refused(section(bases["llama"], modules_to_save=["self_attn", "mlp"]))
    assert "layers is a list of modules" in refused(section(bases["llama"], modules_to_save=["layers"]))


def test_an_adapter_of_another_base_is_refused_naming_both(bases: dict[str, Path], tmp_path: Path) -> None:
    made(section(bases["llama"]), tmp_path / "a")
    other = tmp_path / "other"
    shutil.copytree(bases["llama"], other)
    # The same weights somewhere else are the same base.
    attached(section(other, rank=None, start_from=str(tmp_path / "a")))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    message = refused(section(other, rank=None, start_from=str(tmp_path / "a")))
    assert f"is an adapter of {bases['llama']} (weights " in message and f"model.name is {other} (weights " in message

    # One that says no more than PEFT does is known by its base's name.
    (tmp_path / "a" / "base_model.json").unlink()
    message = refused(section(bases["tied"], rank=None, start_from=str(tmp_path / "a")))
    assert f"is an adapter of {bases['llama']}, but model.name is {bases['tied']}" in message


def test_an_adapter_that_does_not_fit_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    made(section(bases["llama"]), tmp_path / "a")
    model = section(bases["llama"], rank=None, start_from=str(tmp_path / "a"))
    file = tmp_path / "a" / "adapter_model.safetensors"
    weights = load_file(file)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file({**weights, name: weights[name][:, :16].contiguous()}, file, {"format": "pt"})
    with pytest.raises(RequestError, match=r"does not fit model.name .*layers.0.mlp.up_proj.lora_A.weight"):
        attached(model)
    save_file({key: value for key, value in weights.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(RequestError, match=r"layers.0.mlp.up_proj.lora_A.weight"):
        attached(model)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RequestError, match="is truncated"):
        attached(model)
    file.unlink()
    (tmp_path / "a" / "adapter_model.bin").touch()
    assert "pickle" in refused(model)
    assert "has no adapter_config.json" in refused(section(bases["llama"], start_from=str(tmp_path)))
    assert "no such directory" in refused(section(bases["llama"], start_from=str(tmp_path / "none")))


def test_going_on_with_other_settings_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    made(section(bases["llama"], targets=["q_proj"]), tmp_path / "a")
    start = str(tmp_path / "a")

    def message(**fields: Any) -> str:
        return refused(section(bases["llama"], **{"rank": None, "start_from": start, **fields}))

    assert "model.adapter.rank: 8, but" in message(rank=8) and "has 4" in message(rank=8)
    assert "model.adapter.alpha: 8.0" in message(alpha=8)
    assert "model.adapter.type: dora, but" in message(type="dora")
    assert "model.adapter.rank_stabilized" in message(rank_stabilized=True)
    assert "model.adapter.targets" in message(targets="all-linear")
    attached(section(bases["llama"], rank=4, alpha=32, targets=["self_attn.q_proj"], start_from=start))


def test_what_cannot_be_stacked_on_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    made(section(bases["llama"], type="dora"), tmp_path / "dora")
    made(section(bases["llama"], modules_to_save=["lm_head"]), tmp_path / "head")
    for name, problem in (("dora", "is a DoRA adapter"), ("head", "has modules saved in full")):
        assert problem in refused(section(bases["llama"], stack=True, start_from=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("key", "value"), [("peft_type", "LOHA"), ("bias", "all"), ("init_lora_weights", "pissa"), ("use_qalora", True)]
)
def test_adapters_that_are_something_else_are_refused(
    key: str, value: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    made(section(bases["llama"]), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    message = refused(section(bases["llama"], rank=None, start_from=str(tmp_path / "a")))
    assert f"{key} {json.dumps(value)}, which is not supported" in message


def test_an_adapter_that_is_empty_or_not_whole_is_not_saved(bases: dict[str, Path], tmp_path: Path) -> None:
    model, adapter = attached(section(bases["llama"]))
    with pytest.raises(TrainingError, match="adds nothing"):
        save(model, adapter, tmp_path / "a")
    train(model)
    tensors = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with pytest.raises(TrainingError, match="cannot be saved: without"):
        adapter.save(tmp_path / "a", tensors[:-1], build_bytes_tokenizer())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["weights", "scale", "targets"])
def test_what_is_not_the_trained_model_is_seen_when_it_is_read_back(
    change: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    model, adapter = attached(section(bases["llama"]))
    train(model)
    expected = logits(model)
    save(model, adapter, tmp_path)
    settings, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    if change == "weights":
        tensors = load_file(weights)
        tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"].mul_(1.5)
        save_file(tensors, weights, {"format": "pt"})
    else:
        changes = {"scale": {"lora_alpha": 16}, "targets": {"target_modules": ["q_proj"]}}[change]
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **changes}))
    with pytest.raises(TrainingError, match=r"is not|does not match its settings"):
        adapter.read_back(model, tmp_path, IDS, all_parameters=True)
    assert torch.equal(logits(model), expected)
