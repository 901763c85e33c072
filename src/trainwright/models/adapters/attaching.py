"""Attach PEFT adapters: small trainable weights next to a model's frozen ones.

PEFT's layers are inserted into the model itself, so that its blocks, head and attention are still found by the same
names.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainwright.errors import RequestError, TrainingError
from trainwright.models.adapters.config import (
    build_peft_config,
    convert_to_causal_model,
    find_matched_modules,
    list_adaptable_names,
    load_saved_config,
)
from trainwright.models.adapters.files import (
    PREFIX,
    START_FROM,
    WEIGHTS,
    BaseModel,
    SavedAdapter,
    identify_base_model,
    start_from,
)
from trainwright.models.experts import expose_weight_shapes
from trainwright.models.files import compute_logit_difference, has_experts, replace_directory
from trainwright.models.safetensors_files import write_weights
from trainwright.models.text_part import convert_to_whole_name, find_whole, map_part_names

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from trainwright.recipe.sections.model import AdapterSection, ModelSection

# PEFT's names for the adapters in a model.
_TRAINED, _BENEATH, _READ_BACK = "default", "beneath", "read_back"
# Largest difference of logits computed from the same weights, relative to the largest logit: in low precision one
# rounding error. Concatenated matrices of a file are rounded together, which needs a larger tolerance.
_SAME = {torch.float32: 1e-4}
_SAME_ROUNDED, _SAME_TOGETHER = 5e-3, 3e-2


def attach_adapter(model: PreTrainedModel, section: ModelSection, seed: int) -> Adapter | None:
    """Attach the adapter of ``section`` to a loaded ``model`` and freeze all other weights; return None without
    adapter.

    New matrices are initialized from ``seed`` without changing the global random state. Trained weights are fp32
    regardless of the model's dtype, because adapter files hold more precision than bf16.

    Raises:
        RequestError: as in ``check_adapter``, or if an existing adapter does not fit.
    """
    adapter = section.adapter
    if adapter.type == "none":
        return None
    base, parent = identify_base_model(section, seed), start_from(adapter)
    config, names = build_peft_config(adapter, model, base), list_adaptable_names(model)
    beneath = parent if adapter.stack else None
    with torch.random.fork_rng(devices=[]):  # the model is on the CPU, so no other generator is used
        torch.default_generator.manual_seed(seed)
        if beneath is not None:
            _inject(model, load_saved_config(beneath), _BENEATH)
            _fill(model, _BENEATH, beneath, base)
        if adapter.decomposes:
            _inject(model, config, _BENEATH)
        _inject(model, config, _TRAINED)
        for parameter in _index_by_key(model, _TRAINED).values():
            parameter.data = parameter.data.float()  # PEFT creates it in the dtype of the base layer
        if adapter.decomposes:
            _decompose_weights(model, adapter.initialization)
    if parent is not None and beneath is None:
        _fill(model, _TRAINED, parent, base)
    _train_adapter(model)
    identity, below = base.fingerprint, {} if beneath is None else beneath.weights()
    if beneath is not None:
        identity += f"+{beneath.fingerprint()}"
    elif adapter.decomposes:
        identity += f"+{adapter.initialization} {config.r}"
        below = {key: parameter.detach().clone() for key, parameter in _index_by_key(model, _BENEATH).items()}
    return Adapter(model, config, names, base, Beneath(identity, below), adapter.spec.unchanged)


@torch.no_grad()
def _decompose_weights(model: nn.Module, initialization: str) -> None:
    """Set new matrices to a part of each weight, and those beneath to its negative, so that their sum is zero.

    As PEFT's ``pissa_niter_16`` and ``olora``, which subtract the part from the weight: then the weight could not be
    read from the model's files.
    """
    for _, layer in iterate_adapted_layers(model):
        weight, scale = layer.get_base_layer().weight.detach().float(), layer.scaling[_TRAINED]
        weight = weight.t() if layer.fan_in_fan_out else weight
        rank = layer.r[_TRAINED]
        if initialization == "pissa":
            left, values, right = torch.svd_lowrank(weight, rank, niter=16)
            root = (values / scale).sqrt()
            a, b = root[:, None] * right.t(), left * root
        else:
            q, r = torch.linalg.qr(weight)
            a, b = r[:rank], q[:, :rank]
        for name, sign in ((_TRAINED, 1.0), (_BENEATH, -1.0)):
            layer.lora_A[name].weight.data.copy_(a)
            layer.lora_B[name].weight.data.copy_(sign * b)


def attach_without_weights(model: PreTrainedModel, adapter: AdapterSection) -> None:
    """Attach an adapter as ``attach_adapter`` does to a model on the meta device; no weights are read."""
    parent, configs = start_from(adapter), {}
    if parent is not None:
        configs[_BENEATH if adapter.stack else _TRAINED] = load_saved_config(parent)
    if parent is None or adapter.stack:
        new = adapter.model_copy(update={"start_from": None, "stack": False})
        config = build_peft_config(new, model, BaseModel("", ""))  # of the model without the adapter beneath
        configs |= dict.fromkeys((_BENEATH, _TRAINED) if adapter.decomposes else (_TRAINED,), config)
    with torch.device("meta"):
        for name, config in configs.items():
            _inject(model, config, name)
    for parameter in _index_by_key(model, _TRAINED).values():
        parameter.data = parameter.data.float()
    _train_adapter(model)


def _train_adapter(model: nn.Module) -> None:
    """Activate the trained adapter, with one beneath it, and freeze all other weights."""
    _activate_adapters(model, (_BENEATH, _TRAINED))
    trained_parameters = set(_index_by_key(model, _TRAINED).values())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained_parameters)


class Beneath(NamedTuple):
    """What an adapter is on: the ``identity`` of frozen weights, and the matrices of one beneath, by PEFT's names."""

    identity: str
    weights: Mapping[str, torch.Tensor]


class Adapter:
    """The adapter in a model, which can be saved and read back.

    Attributes:
        identity: fingerprint of the frozen weights that it is trained on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: Any,
        modules: list[str],
        base: BaseModel,
        beneath: Beneath,
        unchanged: Mapping[str, float],
    ) -> None:
        self.identity = beneath.identity
        self._base = base
        self._config = config
        self._modules = modules
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._names = {key: names[parameter] for key, parameter in _index_by_key(model, _TRAINED).items()}
        self._scales = {name: dict(getattr(layer, "scaling", {})) for name, layer in iterate_adapted_layers(model)}
        self._unchanged = unchanged
        self._beneath = beneath.weights
        self._whole = find_whole(model.config)
        if self._whole is not None:
            map_part_names(self._whole)

    def save(
        self,
        directory: Path,
        tensors: Iterable[tuple[str, torch.Tensor]],
        tokenizer: PreTrainedTokenizerBase,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        """Write the files that ``PeftModel.from_pretrained(base, directory)`` loads, atomically, and read them back.

        An adapter that is stacked on another one is saved together with it, as one adapter.

        Args:
            tensors: the trained tensors, by their names in the model.

        Raises:
            TrainingError: the adapter is incomplete or zero, or does not read back as it was written.
        """
        from safetensors.torch import load_file

        trained_tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors}
        if lost := sorted(set(self._names.values()) - trained_tensors.keys()):
            raise TrainingError(f"the adapter cannot be saved: without {', '.join(lost[:5])}")
        weights = {key: trained_tensors[name].contiguous() for key, name in self._names.items()}
        if adds_nothing(weights, self._unchanged):
            parts = " and ".join(part.strip(".") for part in self._unchanged)
            raise TrainingError(f"the adapter adds nothing to the model: all of its {parts} are as they began")
        config = self._config
        if self._beneath:
            config, weights = self._merge_with_lower(weights)
        if self._whole is not None:
            config, weights = self._convert_to_whole(self._whole, config, weights)
        with replace_directory(directory) as temporary:
            config = copy.deepcopy(config)
            config.inference_mode = True
            config.save_pretrained(temporary)
            # A tied matrix is one tensor with two names, which safetensors does not support.
            write_weights({key: tensor.clone() for key, tensor in weights.items()}, temporary / WEIGHTS)
            self._base.write(temporary)
            tokenizer.save_pretrained(temporary)
            if generation_config is not None:
                generation_config.save_pretrained(temporary)
            content = load_file(temporary / WEIGHTS)
            if content.keys() != weights.keys() or not all(torch.equal(content[key], weights[key]) for key in weights):
                raise TrainingError(f"the adapter in {directory} reads back differently from what was written")

    def _merge_with_lower(self, weights: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Merge the lower adapter and the one on top: matrices are concatenated along the rank, and the scale is 1."""
        together = {key: tensor for key, tensor in weights.items() if ".lora_" not in key}
        ranks: dict[str, int] = {}
        for layer, scales in self._scales.items():
            a, b = (f"{PREFIX}{layer}.lora_{matrix}.weight" for matrix in "AB")
            parts = [
                (matrices, scales[name])
                for name, matrices in ((_BENEATH, self._beneath), (_TRAINED, weights))
                if a in matrices
            ]
            together[a] = torch.cat([matrices[a] for matrices, _ in parts])
            together[b] = torch.cat([matrices[b] * scale for matrices, scale in parts], dim=1)
            ranks[layer] = len(together[a])
        config = copy.deepcopy(self._config)
        usual = Counter(ranks.values()).most_common(1)[0][0]
        config.r = config.lora_alpha = usual
        config.rank_pattern = {layer: rank for layer, rank in ranks.items() if rank != usual}
        config.alpha_pattern = dict(config.rank_pattern)
        config.use_rslora = False
        config.target_modules = sorted(ranks)
        return config, together

    def _convert_to_whole(
        self, whole: Path, config: Any, weights: Mapping[str, torch.Tensor]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return settings and weights for the model of several modalities in ``whole``."""
        config = copy.deepcopy(config)
        config.target_modules = sorted(
            convert_to_whole_name(name, whole) for name in find_matched_modules(config, self._modules)
        )
        config.layers_to_transform = config.layers_pattern = config.exclude_modules = None
        for key in ("rank_pattern", "alpha_pattern"):
            if values := getattr(config, key, None):
                setattr(config, key, {convert_to_whole_name(name, whole): value for name, value in values.items()})
        return config, {
            PREFIX + convert_to_whole_name(key.removeprefix(PREFIX), whole): part for key, part in weights.items()
        }

    @torch.no_grad()
    def read_back(
        self, model: PreTrainedModel, directory: Path, input_ids: torch.Tensor, *, all_parameters: bool
    ) -> None:
        """Load the saved adapter into ``model`` instead of the trained one, and check that the logits are the same.

        Args:
            model: the model of this adapter, in evaluation mode.
            input_ids: [B, L].
            all_parameters: all parameters are present, not only those of the running module. Otherwise adapters with
                DoRA magnitudes or replaced modules cannot be loaded, and their logits are not compared.

        Raises:
            TrainingError: the logits differ.
        """
        replacements = {
            key: parameter
            for key, parameter in _index_by_key(model, _TRAINED).items()
            if ".modules_to_save." in self._names[key]
        }
        if not all_parameters and (getattr(self._config, "use_dora", False) or replacements):
            return
        with _record_dtypes(model) as dtypes:
            expected_logits = model(input_ids=input_ids, use_cache=False).logits.float()
        dtype = next(iter(dtypes))
        with _remove_read_back(model):
            _inject(model, self._build_config_for_reading(directory), _READ_BACK)
            parameters = _index_by_key(model, _READ_BACK) | replacements
            weights = SavedAdapter.open(str(directory)).weights()
            if parameters.keys() != weights.keys():
                different = ", ".join(sorted(parameters.keys() ^ weights.keys())[:5])
                raise TrainingError(f"the adapter in {directory} does not match its settings: {different}")
            for key, parameter in parameters.items():
                parameter.data = weights[key].to(parameter.device, dtype)
            _activate_adapters(model, (_READ_BACK,))
            model.eval()  # new dropout modules are in training mode
            logits = model(input_ids=input_ids, use_cache=False).logits.float()
        difference = compute_logit_difference(logits, expected_logits, mixture=has_experts(model))
        if not difference <= _SAME.get(dtype, _SAME_TOGETHER if self._beneath else _SAME_ROUNDED):
            raise TrainingError(
                f"the adapter in {directory} with its base is not the trained model: logits differ by {difference:.2g} "
                "of the largest"
            )

    def _build_config_for_reading(self, directory: Path) -> Any:
        """Return saved settings for a model that already has an adapter: replaced modules are not replaced again."""
        from peft import PeftConfig

        config = convert_to_causal_model(PeftConfig.from_pretrained(str(directory)))
        config.target_modules = find_matched_modules(config, self._modules)
        config.modules_to_save = None
        if hasattr(config, "ensure_weight_tying"):
            config.ensure_weight_tying = False
        return config


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable all adapters of the model, for forward-only passes."""
    from peft.utils import ModulesToSaveWrapper

    # Sets PEFT's flag directly: its methods also freeze trained parameters, and a strategy that gathers parameters
    # would adopt that.
    parts = [part for _, part in iterate_adapted_layers(model)]
    parts += [part for part in model.modules() if isinstance(part, ModulesToSaveWrapper)]
    for part in parts:
        part._disable_adapters = True
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


def adds_nothing(tensors: Mapping[str, torch.Tensor], unchanged: Mapping[str, float]) -> bool:
    """Return whether an adapter with these tensors, or parts of them, leaves the model unchanged.

    ``unchanged``: by a part of their names, the value of tensors of which this depends.
    """
    values = [(tensor, value) for name, tensor in tensors.items() for part, value in unchanged.items() if part in name]
    return all(bool((tensor == value).all()) for tensor, value in values)


def _inject(model: PreTrainedModel, config: Any, name: str) -> None:
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # several adapters are intended
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)  # PEFT corrects it
        with expose_weight_shapes(model):
            inject_adapter_in_model(copy.deepcopy(config), model, name)  # PEFT modifies the config


def _activate_adapters(model: nn.Module, names: tuple[str, ...]) -> None:
    """Activate these adapters, in this order, and deactivate all others.

    Of modules that are replaced, the trained ones are active.
    """
    from peft.utils import ModulesToSaveWrapper

    for _, layer in iterate_adapted_layers(model):
        layer.set_adapter([name for name in names if _has(layer, name)])
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.set_adapter(_TRAINED)


@contextmanager
def _record_dtypes(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Provide the set of dtypes that the trained adapter computes in, filled during forward passes.

    Strategies may gather fp32 parameters in another dtype.
    """
    dtypes: set[torch.dtype] = set()

    def look(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        dtypes.add(output.dtype)

    trained_layers = [layer for _, layer in iterate_adapted_layers(model) if _has(layer, _TRAINED)]
    # Of embeddings the matrices are no modules, and those of experts are added to the weights.
    layers = [
        layer if look_up_parameter_name(layer) != "weight" else _find_first_module(layer) for layer in trained_layers
    ]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        yield dtypes
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _remove_read_back(model: PreTrainedModel) -> Iterator[None]:
    """Remove the adapter that is read back from ``model`` on exit, and restore everything else."""
    before = {parameter: (parameter.data, parameter.requires_grad) for parameter in model.parameters()}
    try:
        yield
    finally:
        _activate_adapters(model, (_BENEATH, _TRAINED))
        for _, layer in iterate_adapted_layers(model):
            if _has(layer, _READ_BACK):
                layer.delete_adapter(_READ_BACK)
        model.peft_config.pop(_READ_BACK, None)
        for parameter, (data, requires_grad) in before.items():
            parameter.data = data
            parameter.requires_grad_(requires_grad)


def _fill(model: PreTrainedModel, name: str, saved: SavedAdapter, base: BaseModel) -> None:
    """Copy the weights of a saved adapter to the adapter ``name`` in ``model``."""
    parameters, weights = _index_by_key(model, name), saved.weights()
    _check_shapes(parameters, {key: tuple(tensor.shape) for key, tensor in weights.items()}, saved, base)
    for key, parameter in parameters.items():
        parameter.data.copy_(weights[key])


def check_fits(model: PreTrainedModel, section: ModelSection, seed: int) -> None:
    """Raise RequestError if the adapter that ``section`` starts from does not fit ``model``, which needs no weights."""
    parent = start_from(section.adapter)
    if parent is not None:
        with torch.device("meta"):
            _inject(model, load_saved_config(parent), _READ_BACK)
        _check_shapes(
            _index_by_key(model, _READ_BACK), parent.read_shapes(), parent, identify_base_model(section, seed)
        )


def _check_shapes(
    parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]], saved: SavedAdapter, base: BaseModel
) -> None:
    """Raise RequestError unless a saved adapter has the names and shapes of ``parameters``."""
    wrong = sorted(parameters.keys() ^ shapes.keys())
    wrong += sorted(key for key in parameters.keys() & shapes.keys() if tuple(parameters[key].shape) != shapes[key])
    if wrong:
        names = ", ".join(key.removeprefix(PREFIX) for key in wrong[:3])
        of = saved.config.get("base_model_name_or_path")
        raise RequestError(
            f"{START_FROM}: {saved.directory}, an adapter of {of}, does not fit model.name {base.name} ({names}); set "
            "model.name to the model it was trained on"
        )


def _index_by_key(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter in ``model`` by their names in PEFT files; tied ones have two."""
    names = {part for _, layer in iterate_adapted_layers(model) for part in layer.adapter_layer_names}
    kinds = "|".join(sorted({*names, "lora_magnitude_vector", "modules_to_save"}))
    parts = re.compile(rf"(.*)\.({kinds})\.{adapter}(?:\.(.*))?")
    parameters = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (match := parts.fullmatch(name)) is not None:
            module, part, rest = match.groups()
            ending = rest if part == "modules_to_save" else part if rest is None else f"{part}.{rest}"
            ending = part if part == "lora_magnitude_vector" else ending
            parameters[f"{PREFIX}{module}.{ending}"] = parameter
    return parameters


def iterate_adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, layer)`` for every adapted layer of ``model``."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))


def look_up_parameter_name(layer: Any) -> str:
    """Return the name, in its base layer, of the parameter that an adapted layer changes."""
    return getattr(layer, "parameter_name", "weight")


def select_plain_names(model: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Yield those names of parameters that are not an adapter's."""
    prefixes = {
        part.partition("_")[0] for _, layer in iterate_adapted_layers(model) for part in layer.adapter_layer_names
    }
    of_adapters = tuple(f"{prefix}_" for prefix in prefixes)
    return (name for name in names if not any(part.startswith(of_adapters) for part in name.split(".")))


def _has(layer: Any, adapter: str) -> bool:
    """Return whether an adapted layer has an adapter of this name."""
    return any(adapter in getattr(layer, part, ()) for part in layer.adapter_layer_names)


def _find_first_module(layer: Any) -> nn.Module:
    """Return the module of the trained adapter that gets the input of an adapted layer, or the layer itself."""
    parts = (getattr(layer, part, ()) for part in layer.adapter_layer_names)
    modules = (part[_TRAINED] for part in parts if isinstance(part, nn.ModuleDict) and _TRAINED in part)
    return next(modules, layer)
