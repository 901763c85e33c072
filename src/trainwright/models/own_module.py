"""A module of the user's own, ``model.implementation: module:Class``, as a causal language model of transformers.

The class is called with ``vocab_size`` and the values of ``model.config``. ``forward(input_ids [B, L])`` returns logits
[B, L, V] or, if the module has a ``get_output_embeddings`` that returns its linear head, the hidden states [B, L, H]
that the head takes; then the loss never holds the logits of more than a chunk. Position i must see no later position.
What else a batch has (``attention_mask``, ``position_ids``, ``cu_seq_lens_q``, …) is passed if ``forward`` has an
argument of that name. The blocks that are compiled, recomputed and sharded are those of its longest ``nn.ModuleList``.
"""

from __future__ import annotations

import inspect
import shutil
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from trainwright.errors import RequestError
from trainwright.recipe.extensions import is_file, load_named
from trainwright.recipe.sections.model import OWN
from trainwright.utils.paths import expand_user_path

# torch lists the functions that follow `torch.device("meta")` at its first use. transformers replaces torch.linspace
# while it loads a model, so without this the list may lack it, and a module that calls it would mix devices.
with torch.device("meta"):
    torch.empty(0)


@strict
class OwnConfig(PreTrainedConfig):
    """The class of a module and the values that it is called with. ``implementation``: None if it is read from a
    file, which is data: only a recipe names code.
    """

    model_type = OWN

    implementation: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 0
    max_position_embeddings: int | None = None
    num_hidden_layers: int = 1  # which argument is the number of layers is not known, so a model is never cut
    use_cache: bool = False
    tie_word_embeddings: bool = True  # what is tied is seen in the module
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.max_position_embeddings = self.arguments.get("max_position_embeddings")
        super().__post_init__(**kwargs)


class OwnModel(PreTrainedModel, GenerationMixin):
    """Runs ``self.module``; its weights are as its constructor initializes them."""

    config_class = OwnConfig
    base_model_prefix = ""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        module = import_class(config.implementation)(**{**config.arguments, "vocab_size": config.vocab_size})
        if not any(isinstance(part, nn.ModuleList) and len(part) for part in module.modules()):
            raise RequestError(
                f"model.implementation: {config.implementation} has no nn.ModuleList with its blocks, which are "
                "recomputed, compiled and sharded one by one; put them into one"
            )
        self.module: nn.Module = module
        self._takes = inspect.signature(module.forward).parameters.keys()
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, name)
        every = self.named_parameters(remove_duplicate=False)
        self._tied_weights_keys = {name: names[tensor] for name, tensor in every if names[tensor] != name}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the module's constructor initializes its weights."""

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the module computes its attention itself."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the first embedding with a row for every token; a module without weights if there is none."""
        rows = self.config.vocab_size
        parts = (part for part in self.module.modules() if isinstance(part, nn.Embedding))
        return next((part for part in parts if part.num_embeddings >= rows), nn.Identity())

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the head of a module that returns hidden states; None if it returns logits."""
        return getattr(self.module, "get_output_embeddings", lambda: None)()

    def outputs(self, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return what the module gives for ``input_ids`` [B, L]: hidden states or logits."""
        return self.module(input_ids, **{key: arguments[key] for key in arguments if key in self._takes})

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, L, vocabulary], or of the last ``logits_to_keep`` positions. Without a cache.

        Padding before a row is moved behind it, so that the module sees every text from position 0.
        """
        length = input_ids.shape[1]
        start = None if attention_mask is None else attention_mask.long().argmax(1, keepdim=True)
        columns = torch.arange(length, device=input_ids.device)
        if start is not None and attention_mask is not None:
            shifted_columns = (columns + start) % length
            input_ids, attention_mask = input_ids.gather(1, shifted_columns), attention_mask.gather(1, shifted_columns)
        output = self.outputs(input_ids, attention_mask=attention_mask)
        if start is not None:
            back = ((columns - start) % length)[..., None].expand(-1, -1, output.shape[-1])
            output = output.gather(1, back)
        output, head = output[:, -logits_to_keep:], self.get_output_embeddings()
        return CausalLMOutputWithPast(logits=output if head is None else head(output))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, directory: Any, *, config: OwnConfig, dtype: Any = None, output_loading_info: bool = False, **_: Any
    ) -> Any:
        """Return the module as it is constructed, with the weights in ``directory``.

        transformers would construct it on the meta device, and lose buffers that are not saved.
        """
        if is_file(config.implementation or ""):  # beside the weights, unless the recipe names it by its whole path
            config.implementation = str(expand_user_path(directory) / str(config.implementation))
        if dtype == "auto":
            dtype = config.dtype
        model = cls(config).to(dtype)
        stored_parts = [load_file(file) for file in sorted(expand_user_path(directory).glob("*.safetensors"))]
        tensors = {name: tensor for part in stored_parts for name, tensor in part.items()}
        state = model.state_dict()
        if wrong := [name for name in state if name in tensors and tensors[name].shape != state[name].shape]:
            raise RuntimeError(f"the sizes of {', '.join(wrong[:3])} are others than those of {config.implementation}")
        incompatible_keys = model.load_state_dict(tensors, strict=False)
        missing = set(incompatible_keys.missing_keys) - model.all_tied_weights_keys.keys()
        report = {"missing_keys": missing, "unexpected_keys": set(incompatible_keys.unexpected_keys)}
        return (model, report) if output_loading_info else model


def import_class(implementation: str | None) -> Any:
    """Return the class that a recipe names.

    Raises:
        RequestError: it is not a torch module, cannot be imported, or no recipe names it.
    """
    if implementation is None:
        raise RequestError(
            "model.implementation: the model is of code of somebody's own; read it, then set this key to its class, "
            "module:Class or file.py:Class"
        )
    description = f"model.implementation {implementation}"
    loaded_class = load_named(implementation, description)
    if not (isinstance(loaded_class, type) and issubclass(loaded_class, nn.Module)):
        raise RequestError(f"{description}: is not a class of torch modules (nn.Module)")
    return loaded_class


def keep_source(config: OwnConfig, directory: Path) -> None:
    """Copy the file of a class ``file.py:Class`` into the directory of its saved model, and name it there."""
    implementation = config.implementation or ""
    if is_file(implementation):
        source, _, name = implementation.rpartition(":")
        shutil.copyfile(expand_user_path(source), directory / Path(source).name)
        config.implementation = f"{Path(source).name}:{name}"


def register() -> None:
    """Register the model with the Auto classes of transformers. Can be called more than once."""
    AutoConfig.register(OWN, OwnConfig, exist_ok=True)
    AutoModelForCausalLM.register(OwnConfig, OwnModel, exist_ok=True)
