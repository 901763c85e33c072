"""Create PEFT's settings for a model from a recipe's adapter section or a saved adapter."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.errors import RequestError
from trainwright.models.adapters.files import START_FROM, BaseModel, SavedAdapter, list_fully_trained, start_from
from trainwright.models.causal_lm import find_blocks
from trainwright.models.experts import look_up_formats
from trainwright.models.text_part import convert_to_causal_name
from trainwright.recipe.extensions import load
from trainwright.recipe.registries import ADAPTERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainwright.recipe.sections.model import AdapterSection, ModelSection

RANK, ALPHA, BLOCK_SIZE = 16, 32.0, 32  # defaults if neither the recipe nor an existing adapter sets them


def build_peft_config(adapter: AdapterSection, model: PreTrainedModel, base: BaseModel) -> Any:
    """Return PEFT's settings for training ``model``, which needs no weights.

    Raises:
        RequestError: names match nothing in the model or cannot be adapted, or an existing adapter belongs to another
            model than ``base`` or has other settings than the recipe.
    """
    # PEFT imports bitsandbytes, which logs that it found no kernels on the Hub; none are requested.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    parent = start_from(adapter)
    if adapter.quantize_experts:
        _check_quantized_experts(adapter, model)
    if parent is not None:
        parent.check_base(base)
        _check_embeddings(parent, model)
        _check_patterns(parent, [name for name, _ in model.named_modules()])
    if parent is None or adapter.stack:
        if parent is not None:
            _refuse_beneath(parent)
        return _build_new_config(adapter, model, base)
    parent.check_settings(adapter)
    config = load_saved_config(parent)
    config.base_model_name_or_path, config.revision = base.repository
    if "dropout" in adapter.spec.reads:
        config.lora_dropout = adapter.dropout
    if adapter.targets is not None:
        targets = set(_list_targets(adapter, model))
        matches = set(find_matched_modules(config, list_adaptable_names(model)))
        if targets != matches:
            kinds = ", ".join(sorted(_list_kinds(list(matches))))
            raise RequestError(
                f"model.adapter.targets: {adapter.targets}, but {parent.directory} has {kinds}, which cannot change; "
                "remove the key, or set model.adapter.stack to true to train a new adapter on top of it"
            )
    if not find_matched_modules(config, list_adaptable_names(model)) and not getattr(config, "target_parameters", None):
        raise RequestError(
            f"{START_FROM}: {parent.directory} has modules ({config.target_modules}) that are not in {base.name}; "
            f"available are {', '.join(_list_kinds(list_linear_names(model)))}"
        )
    return config


def _check_embeddings(saved: SavedAdapter, model: PreTrainedModel) -> None:
    """Raise RequestError for an adapter whose file has an embedding or a head that does not fit the model."""
    shapes, saved_modules = saved.read_shapes(), list(saved.config.get("modules_to_save") or [])
    for part, kind in ((model.get_input_embeddings(), "embedding"), (model.get_output_embeddings(), "output head")):
        name = next((name for name, module in model.named_modules() if module is part), None)
        shape = shapes.get(f"base_model.model.{name}.weight")
        if name is None or shape is None:
            continue
        ours = len(model.get_parameter(f"{name}.weight"))
        merge = "merge it into that model with PEFT (merge_and_unload), and train the result"
        if shape[0] != ours:
            raise RequestError(
                f"{START_FROM}: {saved.directory} has an {kind} of its own for {shape[0]:,} tokens, and model.name has "
                f"{ours:,}: the vocabulary was resized when it was trained, which is not supported for adapters. "
                f"Resize the model's embeddings likewise (resize_token_embeddings), {merge}"
            )
        if not has_ending(name, saved_modules) and not saved.config.get("ensure_weight_tying"):
            raise RequestError(
                f"{START_FROM}: {saved.directory} has an {kind} of its own ({name}), which its modules_to_save do not "
                f"name, so it would replace the base's; {merge}"
            )


# Matches names against regular expressions as PEFT does, in a process that can be killed on a timeout.
_COMPARISON = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    whole, ending = re.compile(pattern), re.compile(rf"(.*\\.)?({pattern})$")
    for name in names:
        whole.fullmatch(name), ending.match(name)
"""
_COMPARISON_SECONDS = 20


def _check_patterns(saved: SavedAdapter, names: list[str]) -> None:
    """Raise RequestError if a setting is an invalid regular expression or takes too long to match."""
    texts = [saved.config.get(key) for key in ("target_modules", "exclude_modules", "layers_pattern")]
    patterns = [text for text in texts if isinstance(text, str)]
    patterns += [key for name in ("rank_pattern", "alpha_pattern") for key in saved.config.get(name) or {}]
    if not any(set(pattern) & set("*+{?(") for pattern in patterns):
        return
    command = [sys.executable, "-I", "-c", _COMPARISON]
    try:
        subprocess.run(
            command, input=json.dumps([patterns, names]), text=True, capture_output=True, check=True,
            timeout=_COMPARISON_SECONDS,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        slow = isinstance(error, subprocess.TimeoutExpired)
        why = f"take more than {_COMPARISON_SECONDS} s to compare" if slow else "cannot be compared"
        raise RequestError(
            f"{START_FROM}: {saved.directory}: the patterns of its modules {why} with the model's names; list the "
            "modules by name"
        ) from None


def load_saved_config(saved: SavedAdapter) -> Any:
    """Return PEFT's settings of a saved adapter, to train it or to train another on top of it."""
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(str(saved.directory))
    config.inference_mode = False
    if saved.config["peft_type"] == "LORA":
        config.init_lora_weights = True  # the initial values are overwritten
    return convert_to_causal_model(config)


def convert_to_causal_model(config: Any) -> Any:
    """Change PEFT's settings of an adapter of a model of several modalities to those for its language model."""
    targets = config.target_modules
    if isinstance(targets, str):  # a regular expression
        config.target_modules = convert_to_causal_name(targets.replace("model\\.", "model."))
    elif targets is not None:
        config.target_modules = {convert_to_causal_name(name) for name in targets}
    for key in ("rank_pattern", "alpha_pattern"):
        if values := getattr(config, key, None):
            setattr(config, key, {convert_to_causal_name(name): value for name, value in values.items()})
    return config


def _build_new_config(adapter: AdapterSection, model: PreTrainedModel, base: BaseModel) -> Any:
    modules, tied = _list_modules_to_save(adapter, model)
    targets, parameters = _list_targets(adapter, model), _list_target_parameters(adapter, model)
    if not targets and not parameters:
        raise RequestError(
            "model.adapter.modules_to_save: leaves no linear module for the adapter; set model.adapter.type to none to "
            "train all weights"
        )
    common = {
        "target_modules": _shorten_names(targets, model),
        "modules_to_save": modules or None,
        "fan_in_fan_out": bool(targets) and not isinstance(model.get_submodule(targets[0]), nn.Linear | nn.Embedding),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.repository[0],
        "revision": base.repository[1],
    }
    of_kind = load(adapter.spec.settings, "the settings of an adapter")
    return of_kind(adapter, model, ensure_weight_tying=tied, target_parameters=parameters or None, **common)


def build_lora_config(adapter: AdapterSection, model: PreTrainedModel, **common: Any) -> Any:
    """Return the settings of LoRA and DoRA."""
    from peft import LoraConfig

    alpha = ALPHA if adapter.alpha is None else adapter.alpha
    return LoraConfig(
        r=adapter.rank or RANK,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rank_stabilized,
        use_dora=adapter.type == "dora",
        init_lora_weights="gaussian" if adapter.initialization == "gaussian" else True,
        **common,
    )


def build_oft_config(
    adapter: AdapterSection,
    model: PreTrainedModel,
    *,
    ensure_weight_tying: bool,
    target_parameters: None,  # which the recipe's check refuses
    **common: Any,
) -> Any:
    """Return the settings of OFT.

    Raises:
        RequestError: the block size does not divide the inputs of a module, where PEFT would take another one; modules
            are Conv1D, which it does not support; or tied embeddings are trained in full, which its files do not say.
    """
    from peft import OFTConfig

    size = adapter.block_size or BLOCK_SIZE
    for name in _list_targets(adapter, model):
        inputs = getattr(model.get_submodule(name), "in_features", None)
        if inputs is None:
            raise RequestError(f"model.adapter.type: {adapter.type} adapts no modules such as {name}; use lora")
        if inputs % size:
            raise RequestError(f"model.adapter.block_size: {size} does not divide the {inputs} inputs of {name}")
    if ensure_weight_tying:
        why = f"{adapter.type} cannot save embeddings that are tied to the head; use lora"
        raise RequestError(f"model.adapter.modules_to_save: {why}")
    return OFTConfig(oft_block_size=size, **common)


def list_linear_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that can be adapted: all linear ones except the head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def list_adaptable_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear modules, the embeddings and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    return [*list_linear_names(model), *names]


def list_expert_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the fused weights of experts, which no module computes."""
    return [
        name
        for name, parameter in model.named_parameters()
        if (module := model.get_submodule(name.rpartition(".")[0]))
        and (parameter.dim() >= 3 or name.rpartition(".")[2] in look_up_formats(module))
        and not isinstance(module, nn.Conv1d | nn.Conv2d)
    ]


def _check_quantized_experts(adapter: AdapterSection, model: PreTrainedModel) -> None:
    """Raise RequestError if ``quantize_experts`` has no effect, or if code of the model's own reads the weights."""
    names = [
        name for name in list_expert_parameters(model) if not has_ending(name, list_fully_trained(adapter), inside=True)
    ]
    kind = type(model).__name__
    if not names:
        raise RequestError(
            f"model.adapter.quantize_experts: {kind} has no frozen weights of experts in one parameter; remove it"
        )
    unknown = [name for name in names if not hasattr(model.get_submodule(name.rpartition(".")[0]), "has_gate")]
    if unknown:
        raise RequestError(
            f"model.adapter.quantize_experts: {kind} computes {_drop_numbers(unknown)[0]} by code of its own, which "
            "reads whole weights; remove it"
        )


def describe_experts_left_out(adapter: AdapterSection, model: PreTrainedModel) -> str | None:
    """Return a message about experts that ``all-linear`` does not adapt, or None if there are none."""
    if adapter.type == "none" or adapter.start_from is not None or isinstance(adapter.targets, list):
        return None
    suffixes = {*adapter.modules_to_save, *adapter.target_parameters}
    names = _drop_numbers(
        [name for name in list_expert_parameters(model) if not has_ending(name, [*suffixes], inside=True)]
    )
    taken_names = _drop_numbers(_find_taken_names(model, list_linear_names(model)))
    if not names and not taken_names:
        return None
    texts = []
    keep = adapter.quantization == "none" or adapter.quantize_experts
    hint = "" if keep else "; to quantize them, too, set model.adapter.quantize_experts to true"
    if names:
        texts.append(
            f"the experts ({', '.join(names)}): each is a parameter with the weights of all experts, not a linear "
            f"module; to adapt them, set model.adapter.target_parameters to [{', '.join(names)}], or to train them in "
            f"full, model.adapter.modules_to_save to [{names[0].split('.')[-2]}]{hint}"
        )
    if taken_names:
        texts.append(f"{', '.join(taken_names)}, whose names are those of experts for PEFT")
    return f"model.adapter.targets: all-linear does not adapt {'; nor '.join(texts)}"


def _drop_numbers(names: list[str]) -> list[str]:
    """Return the unique last parts of the names, without numbers of blocks."""
    endings = (".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in names)
    return list(dict.fromkeys(endings))


def _find_taken_names(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Return the names that PEFT takes for those that experts had in earlier versions of transformers.

    It adapts the fused weights of all experts in their place, here and when it loads an adapter.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken_kinds = []
    for kind in _list_kinds(names):
        config = LoraConfig(target_modules=[kind])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it is fused with another one
            taken_kinds.append(kind)
        else:
            taken_kinds += [] if kind in (config.target_modules or ()) else [kind]
    return [name for name in names if has_ending(name, taken_kinds)]


def check_added_tokens(section: ModelSection, model: PreTrainedModel) -> None:
    """Raise RequestError if a new adapter would not train the rows of ``model.added_tokens``."""
    adapter = section.adapter
    if not section.added_tokens.names or adapter.start_from is not None:
        return
    ends = [part for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    trained_names = [
        *(name for name in names if has_ending(name, adapter.modules_to_save)),
        *_list_targets(adapter, model),
    ]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    missing = [name for name in names if name not in trained_names]
    if missing and not (tied and len(missing) < len(names)):
        kinds = ", ".join(_list_kinds(names[:1] if tied else names))
        raise RequestError(
            f"model.added_tokens: the adapter does not train the rows of new tokens in {', '.join(missing)}; set "
            f"model.adapter.modules_to_save to [{kinds}]"
        )


def _list_targets(adapter: AdapterSection, model: PreTrainedModel) -> list[str]:
    names = _choose_modules(adapter, model)
    return _select_in_layers(adapter, model, names, "module of model.adapter.targets")


def _list_target_parameters(adapter: AdapterSection, model: PreTrainedModel) -> list[str]:
    """Return the names of the weights of experts to adapt: their ends, or full names if blocks are chosen."""
    every = list_expert_parameters(model)
    for target in adapter.target_parameters:
        if not any(has_ending(name, [target]) for name in every):
            names = ", ".join(_drop_numbers(every)) or "none"
            raise RequestError(
                f"model.adapter.target_parameters: {target} is no weight of experts of {type(model).__name__}; it has "
                f"{names}. Linear modules are model.adapter.targets"
            )
    if adapter.layers is None:
        return list(adapter.target_parameters)
    target_names = [name for name in every if has_ending(name, adapter.target_parameters)]
    return _select_in_layers(adapter, model, target_names, "weight of model.adapter.target_parameters")


def _select_in_layers(adapter: AdapterSection, model: PreTrainedModel, names: list[str], what: str) -> list[str]:
    """Return those of the names that are in the blocks of the recipe. ``what``: what they are, for a message."""
    if adapter.layers is None:
        return names
    blocks = {id(block): number for number, block in enumerate(find_blocks(model))}
    number = {name: blocks[id(module)] for name, module in model.named_modules() if id(module) in blocks}
    if missing := sorted(set(adapter.layers) - set(number.values())):
        raise RequestError(
            f"model.adapter.layers: {missing[0]} does not exist: the model has blocks 0 to {len(number) - 1}"
        )
    within = tuple(f"{name}." for name, index in number.items() if index in adapter.layers)
    inside = [name for name in names if name.startswith(within)]
    if names and not inside:
        raise RequestError(f"model.adapter.layers: no {what} is in these blocks")
    return inside


def _choose_modules(adapter: AdapterSection, model: PreTrainedModel) -> list[str]:
    linear = [name for name in list_linear_names(model) if not has_ending(name, adapter.modules_to_save, inside=True)]
    taken_names = _find_taken_names(model, linear)
    if adapter.targets is None or adapter.targets == "all-linear":
        return [name for name in linear if name not in taken_names]
    every = [name for name in list_adaptable_names(model) if not has_ending(name, adapter.modules_to_save, inside=True)]
    if isinstance(adapter.targets, str):
        names = [name for name in every if re.fullmatch(adapter.targets, name)]
        if not names:
            raise RequestError(
                f"model.adapter.targets: {adapter.targets} matches none of the {len(every)} names of modules, such as "
                f"{every[0]}"
            )
    else:
        for target in adapter.targets:
            if not any(has_ending(name, [target]) for name in every):
                experts = any(has_ending(name, [target], inside=True) for name in list_expert_parameters(model))
                why = " (in the experts it is a parameter; see model.adapter.target_parameters)" if experts else ""
                raise RequestError(
                    f"model.adapter.targets: {target} matches no linear module of {type(model).__name__}{why}; choose "
                    f"from {', '.join(_list_kinds(every))}"
                )
        names = [name for name in every if has_ending(name, adapter.targets)]
    if targets := [name for name in names if name in taken_names]:
        raise RequestError(
            f"model.adapter.targets: PEFT takes the name of {targets[0]} for that of an expert's, and would adapt the "
            "experts in its place; leave it out, or adapt the experts with model.adapter.target_parameters"
        )
    if ends := [name for name in names if name not in linear]:
        _check_ends(adapter, model, ends)
    return names


def _check_ends(adapter: AdapterSection, model: PreTrainedModel, ends: Sequence[str]) -> None:
    """Raise RequestError if the embeddings or the head, ``ends``, cannot be adapted."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    name, fix = ends[0], "to train it in full, add it to model.adapter.modules_to_save"
    modules = [model.get_submodule(end) for end in ends]
    if embeddings.weight is head.weight:
        raise RequestError(
            f"model.adapter.targets: {name} has the weight of both embeddings and output head, which a merged model "
            f"could not have; {fix}"
        )
    if not adapter.spec.of_ends or adapter.stack or adapter.decomposes:
        why = "an adapter on top of another" if adapter.spec.of_ends else adapter.type
        why = f"the initialization {adapter.initialization}" if adapter.decomposes else why
        raise RequestError(f"model.adapter.targets: {name} cannot have {why}; {fix}")
    if adapter.dropout and any(module is head for module in modules):
        raise RequestError(
            f"model.adapter.targets: {name} is the output head, which the loss computes without the dropout of "
            "model.adapter.dropout; set that to 0, or remove the head"
        )


def _list_modules_to_save(adapter: AdapterSection, model: PreTrainedModel) -> tuple[list[str], bool]:
    """Return names of modules that are trained in full, and whether they include tied embeddings and head."""
    by_name = {name: module for name, module in model.named_modules() if name and list(module.parameters())}
    lists = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    for suffix in adapter.modules_to_save:
        matches = [name for name in by_name if has_ending(name, [suffix])]
        if not matches or any(isinstance(by_name[name], lists) for name in matches):
            kinds = _list_kinds([name for name, module in by_name.items() if list(module.parameters(recurse=False))])
            problem = "is a list of modules" if matches else f"matches no module of {type(model).__name__}"
            raise RequestError(f"model.adapter.modules_to_save: {suffix} {problem}; choose from {', '.join(kinds)}")
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    both = [name for name, module in by_name.items() if module is embeddings or module is head]
    tied = embeddings.weight is head.weight and any(has_ending(name, adapter.modules_to_save) for name in both)
    if not tied:
        return list(adapter.modules_to_save), False
    rest = [suffix for suffix in adapter.modules_to_save if not any(has_ending(name, [suffix]) for name in both)]
    return [*rest, next(name for name in both if by_name[name] is head)], True


def find_matched_modules(config: Any, names: list[str]) -> list[str]:
    """Return the names of the modules that PEFT's settings adapt."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return [name for name in names if check_target_module_exists(config, name)]


def has_ending(name: str, endings: Sequence[str], *, inside: bool = False) -> bool:
    """Return whether a module name equals or ends with one of ``endings``, or (``inside``) is within such a module."""
    names = [name]
    if inside:
        parts = name.split(".")
        names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(part == ending or part.endswith(f".{ending}") for part in names for ending in endings)


def _list_kinds(names: list[str]) -> list[str]:
    """Return the unique last parts of the names."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _shorten_names(names: list[str], model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names if they match no other modules, otherwise the full names."""
    kinds = _list_kinds(names)
    meant = {name for name, _ in model.named_modules() if has_ending(name, kinds)}
    return sorted(kinds if meant == set(names) else names)


def _refuse_beneath(saved: SavedAdapter) -> None:
    """Raise RequestError if the lower adapter cannot be merged: only low-rank products can be added."""
    if "stack" not in ADAPTERS.get(saved.type).reads:
        raise RequestError(f"model.adapter.stack: {saved.directory} is an adapter of type {saved.type}; merge it first")
    kinds = {"modules_to_save": "has modules saved in full", "target_parameters": "adapts weights of experts"}
    problem = next((text for key, text in kinds.items() if saved.config.get(key)), None)
    problem = "is a DoRA adapter" if saved.type == "dora" else problem
    if problem is not None:
        raise RequestError(
            f"model.adapter.stack: {saved.directory} {problem}, so an adapter on top of it could not be saved as one "
            "adapter; remove stack to continue training it"
        )
