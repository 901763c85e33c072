"""Adapters: small weights beside a model's frozen ones, as PEFT makes them.

PEFT's layers are put into the model itself, which stays what it was to everything around it: blocks, head and
attention are found where they were.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.errors import RequestError, TrainingError
from trainwright.models.adapters.base_model import BaseModel, base_model
from trainwright.models.adapters.config import linear_names, matched, peft_config, saved_config
from trainwright.models.adapters.files import START_FROM, WEIGHTS, SavedAdapter, start_from
from trainwright.models.files.weight_files import write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainwright.recipe.sections.model import ModelSection

# Names that PEFT has for the adapters in a model.
_TRAINED, _BENEATH, _READ_BACK = "default", "beneath", "read_back"
_PREFIX = "base_model.model."  # of every name in a file
# By how much logits may differ that are computed from the same weights, as a part of the largest: in low precision by
# one rounding of it. Matrices that lie side by side in a file are rounded together.
_SAME = {torch.float32: 1e-4}
_SAME_ROUNDED, _SAME_TOGETHER = 5e-3, 3e-2


def check_adapter(section: ModelSection, seed: int) -> None:
    """Refuse, before any weights are loaded, what ``model.adapter`` cannot mean for this model.

    Raises:
        RequestError: an adapter of another base, settings that are not its own, a target that matches nothing.
    """
    from trainwright.models.files.save import skeleton
    from trainwright.models.load import load_config

    if section.adapter.type != "none":
        peft_config(section.adapter, skeleton(load_config(section)), base_model(section, seed))


def attach_adapter(model: PreTrainedModel, section: ModelSection, seed: int) -> Adapter | None:
    """Put the adapter of ``section`` into ``model``, as it was loaded, and freeze all else; None where there is none.

    New matrices are drawn from ``seed``, without a trace on the global random state. What it trains is fp32, whatever
    the model is in: its files hold more than bf16 does.

    Raises:
        RequestError: as ``check_adapter``, and an existing adapter that does not fit.
    """
    adapter = section.adapter
    if adapter.type == "none":
        return None
    base, saved = base_model(section, seed), start_from(adapter)
    config, linear = peft_config(adapter, model, base), linear_names(model)
    beneath = saved if adapter.stack else None
    with torch.random.fork_rng(devices=[]):  # the model is on the CPU: no other generator is drawn from
        torch.default_generator.manual_seed(seed)
        if beneath is not None:
            _inject(model, saved_config(beneath), _BENEATH)
            _fill(model, _BENEATH, beneath, base)
        _inject(model, config, _TRAINED)
    for parameter in _by_key(model, _TRAINED).values():
        parameter.data = parameter.data.float()  # PEFT makes it in the dtype of what it stands beside
    if saved is not None and beneath is None:
        _fill(model, _TRAINED, saved, base)
    _activate(model, (_BENEATH, _TRAINED))
    trained = set(_by_key(model, _TRAINED).values())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)
    return Adapter(model, config, linear, base, beneath)


class Adapter:
    """The adapter in a model: how it is saved, and read back.

    Attributes:
        identity: fingerprint of everything frozen that it stands on.
    """

    def __init__(
        self, model: PreTrainedModel, config: Any, linear: list[str], base: BaseModel, beneath: SavedAdapter | None
    ) -> None:
        self.identity = base.fingerprint if beneath is None else f"{base.fingerprint}+{beneath.fingerprint()}"
        self._base = base
        self._config = config
        self._linear = linear
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._names = {key: names[parameter] for key, parameter in _by_key(model, _TRAINED).items()}
        self._scales = {name: dict(layer.scaling) for name, layer in lora_layers(model)}
        self._beneath = beneath.weights() if beneath is not None else {}

    def save(
        self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Write what ``PeftModel.from_pretrained(base, directory)`` loads, and read it back; whole or not at all.

        What is stacked on another adapter is saved together with it, as one.

        Args:
            tensors: the trained ones, by their names in the model.

        Raises:
            TrainingError: the adapter is not complete, adds nothing, or is not read as it was written.
        """
        from safetensors.torch import load_file

        from trainwright.models.files.save import replacing

        trained = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors}
        if lost := sorted(set(self._names.values()) - trained.keys()):
            raise TrainingError(f"the adapter cannot be saved: without {', '.join(lost[:5])}")
        weights = {key: trained[name].contiguous() for key, name in self._names.items()}
        if adds_nothing(weights):
            raise TrainingError("the adapter adds nothing to the model: all of its lora_B are zero")
        config = self._config
        if self._beneath:
            config, weights = self._together(weights)
        with replacing(directory) as temporary:
            config = copy.deepcopy(config)
            config.inference_mode = True
            config.save_pretrained(temporary)
            # A tied matrix is one tensor with two names, which the format does not have.
            write_weights({key: tensor.clone() for key, tensor in weights.items()}, temporary / WEIGHTS)
            self._base.write(temporary)
            tokenizer.save_pretrained(temporary)
            found = load_file(temporary / WEIGHTS)
            if found.keys() != weights.keys() or not all(torch.equal(found[key], weights[key]) for key in weights):
                raise TrainingError(f"the adapter in {directory} is not read as it was written")

    def _together(self, weights: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return the adapter beneath and the one on top as one: its matrices are theirs side by side, and its scale
        is 1.
        """
        together = {key: tensor for key, tensor in weights.items() if ".lora_" not in key}
        ranks: dict[str, int] = {}
        for layer, scales in self._scales.items():
            a, b = (f"{_PREFIX}{layer}.lora_{matrix}.weight" for matrix in "AB")
            parts = [
                (held, scales[name]) for name, held in ((_BENEATH, self._beneath), (_TRAINED, weights)) if a in held
            ]
            together[a] = torch.cat([held[a] for held, _ in parts])
            together[b] = torch.cat([held[b] * scale for held, scale in parts], dim=1)
            ranks[layer] = len(together[a])
        config = copy.deepcopy(self._config)
        usual = Counter(ranks.values()).most_common(1)[0][0]
        config.r = config.lora_alpha = usual
        config.rank_pattern = {layer: rank for layer, rank in ranks.items() if rank != usual}
        config.alpha_pattern = dict(config.rank_pattern)
        config.use_rslora = False
        config.target_modules = sorted(ranks)
        return config, together

    @torch.no_grad()
    def read_back(self, model: PreTrainedModel, directory: Path, input_ids: torch.Tensor, *, whole: bool) -> None:
        """Put what was saved into ``model`` in place of what was trained; the logits must be the same.

        Args:
            model: this adapter's own, in evaluation mode.
            input_ids: [B, L].
            whole: all its parameters are at hand, not only those of what is running. Neither DoRA's magnitudes nor
                modules that are replaced can be put into it otherwise, and their logits are not compared.

        Raises:
            TrainingError: they are not.
        """
        from safetensors.torch import load_file

        replaced = {key: parameter for key, parameter in _by_key(model, _TRAINED).items() if ".lora_" not in key}
        if not whole and (self._config.use_dora or replaced):
            return
        with _computed_in(model) as dtypes:
            expected = model(input_ids=input_ids, use_cache=False).logits.float()
        dtype = next(iter(dtypes))
        with _only_trained_afterwards(model):
            _inject(model, self._config_for_reading(directory), _READ_BACK)
            parameters, saved = _by_key(model, _READ_BACK) | replaced, load_file(directory / WEIGHTS)
            if parameters.keys() != saved.keys():
                different = ", ".join(sorted(parameters.keys() ^ saved.keys())[:5])
                raise TrainingError(f"the adapter in {directory} is not what its settings say: {different}")
            for key, parameter in parameters.items():
                parameter.data = saved[key].to(parameter.device, dtype)
            _activate(model, (_READ_BACK,))
            model.eval()  # dropout that has just been made would drop
            found = model(input_ids=input_ids, use_cache=False).logits.float()
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= _SAME.get(dtype, _SAME_TOGETHER if self._beneath else _SAME_ROUNDED):
            raise TrainingError(
                f"the adapter in {directory} with its base is not the trained model: logits differ by {difference:.2g} "
                "of the largest"
            )

    def _config_for_reading(self, directory: Path) -> Any:
        """Return the settings that were saved, for a model that has an adapter already: modules it replaced are not
        again.
        """
        from peft import LoraConfig

        config = LoraConfig.from_pretrained(str(directory))
        config.target_modules = matched(config, self._linear)
        config.modules_to_save, config.ensure_weight_tying = None, False
        return config


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Switch off all adapters of the model, for passes without gradients."""
    from peft.utils import ModulesToSaveWrapper

    # By PEFT's own mark and not by its methods: these also freeze what is trained, and a strategy that gathers
    # parameters takes over whether they are.
    parts = [part for _, part in lora_layers(model)]
    parts += [part for part in model.modules() if isinstance(part, ModulesToSaveWrapper)]
    for part in parts:
        part._disable_adapters = True
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


def adds_nothing(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an adapter of these tensors, or parts of them, leaves a model as it is."""
    return not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


def _inject(model: PreTrainedModel, config: Any, name: str) -> None:
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)  # several are meant
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)  # and it is set right
        inject_adapter_in_model(copy.deepcopy(config), model, name)  # PEFT writes into it what it makes of it


def _activate(model: nn.Module, names: tuple[str, ...]) -> None:
    """Have the matrices of these adapters work, in this order, where they are; no others do. Modules that are replaced
    are those that are trained."""
    from peft.utils import ModulesToSaveWrapper

    for _, layer in lora_layers(model):
        layer.set_adapter([name for name in names if name in layer.lora_A])
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.set_adapter(_TRAINED)


@contextmanager
def _computed_in(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Set what the trained adapter computes in during the passes: strategies gather fp32 parameters in another
    dtype.
    """
    dtypes: set[torch.dtype] = set()

    def look(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        dtypes.add(output.dtype)

    layers = [layer.lora_A[_TRAINED] for _, layer in lora_layers(model) if _TRAINED in layer.lora_A]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        yield dtypes
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _only_trained_afterwards(model: PreTrainedModel) -> Iterator[None]:
    """Take the adapter that is read back out of ``model`` again, and have all else as it was."""
    before = {parameter: (parameter.data, parameter.requires_grad) for parameter in model.parameters()}
    try:
        yield
    finally:
        _activate(model, (_BENEATH, _TRAINED))
        for _, layer in lora_layers(model):
            if _READ_BACK in layer.lora_A:
                layer.delete_adapter(_READ_BACK)
        model.peft_config.pop(_READ_BACK, None)
        for parameter, (data, required) in before.items():
            parameter.data = data
            parameter.requires_grad_(required)


def _fill(model: PreTrainedModel, name: str, saved: SavedAdapter, base: BaseModel) -> None:
    """Give the adapter ``name`` in ``model`` the weights of one that was saved."""
    parameters, weights = _by_key(model, name), saved.weights()
    wrong = sorted(parameters.keys() ^ weights.keys())
    wrong += sorted(key for key in parameters.keys() & weights.keys() if parameters[key].shape != weights[key].shape)
    if wrong:
        shown = ", ".join(key.removeprefix(_PREFIX) for key in wrong[:3])
        of = saved.config.get("base_model_name_or_path")
        raise RequestError(
            f"{START_FROM}: {saved.directory}, an adapter of {of}, does not fit model.name {base.name} ({shown}); set "
            "model.name to the model it was trained on"
        )
    for key, parameter in parameters.items():
        parameter.data.copy_(weights[key])


def _by_key(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter in ``model`` by their names in PEFT's files; a tied one has two."""
    parts = re.compile(rf"(.*)\.(lora_A|lora_B|lora_magnitude_vector|modules_to_save)\.{adapter}\.(.*)")
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (match := parts.fullmatch(name)) is not None:
            module, part, rest = match.groups()
            ending = {"modules_to_save": rest, "lora_magnitude_vector": part}.get(part, f"{part}.{rest}")
            found[f"{_PREFIX}{module}.{ending}"] = parameter
    return found


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every adapted layer of ``model`` by its name."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
