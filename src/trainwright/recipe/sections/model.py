"""The sections of the model and of its adapter, and the sizes that no model has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from trainwright.errors import RequestError
from trainwright.recipe.adapter_spec import AdapterSpec
from trainwright.recipe.extensions import is_file
from trainwright.recipe.modalities import select_text_config
from trainwright.recipe.registries import ADAPTERS, ATTENTION_KERNELS
from trainwright.recipe.sections.fields import BelowOne, Count, Pattern, Positive, Registered, Section, Text
from trainwright.utils.paths import expand_user_path

_ATTENTIONS = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex")
OWN = "own_module"  # model_type of a torch module of the user's own
_CLASS = r"(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*"
# Short forms of an adapter, and what they stand for.
SHORT_FORMS: dict[str, dict[str, Any]] = {
    "none": {"type": "none"},
    "lora": {"type": "lora"},
    "rslora": {"type": "lora", "rank_stabilized": True},
    "dora": {"type": "dora"},
    "oft": {"type": "oft"},
    "qlora": {"type": "lora", "quantization": "nf4"},
}
# Adapters of PEFT that would break a guarantee, by key and value.
_REFUSED = {
    "type": {
        "ia3": "ia3 also scales the biases of its modules, which merge and export do not; use lora or oft",
        "vera": "vera shares random matrices between modules that are no parameters, so strategies and checkpoints "
        "would miss them; use lora",
        "adalora": "adalora changes its ranks during training by a schedule of its own, so a resumed run would differ; "
        "use lora",
    },
    "initialization": {
        "loftq": "loftq needs the weights before their quantization, and weights are quantized as they are read; use "
        "default, or pissa without quantization"
    },
}


def _parse_layers(value: object) -> object:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", value)):
        first, last = int(match[1]), int(match[2])
        if first <= last < _COUNTS[0][1]:
            return list(range(first, last + 1))
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("layers", "numbers of blocks such as [0, 1, 2], or a range such as 8-15")
    return value


class AdapterSection(Section):
    """An adapter: small weights trained in place of the model's own. Short form: lora, rslora, dora, oft or qlora."""

    type: Annotated[str, Registered(ADAPTERS, ("none", "rslora", "qlora"))] = Field(
        "none",
        description="none: full fine-tuning. lora: low-rank matrices added to frozen weights (arXiv 2106.09685). "
        "dora: also the magnitudes of the weights (arXiv 2402.09353). oft: rotations of the inputs of linear modules, "
        "in blocks (arXiv 2306.07280). rslora: lora with rank_stabilized; qlora: lora with quantization nf4; resolved "
        "recipes have lora for both.",
    )
    block_size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="oft: inputs that are rotated together; a divisor of the inputs of every module. Default: 32."
    )
    rank: Count | None = Field(None, description="Rank of the matrices. Default: 16, or the rank of start_from.")
    alpha: Positive | None = Field(
        None, description="The adapter's output is scaled by alpha / rank. Default: 32, or the alpha of start_from."
    )
    rank_stabilized: bool = Field(
        False, description="Scale by alpha / sqrt(rank) instead, which trains better at high ranks (arXiv 2312.03732)."
    )
    dropout: BelowOne = Field(0.0, description="Dropout probability for the input of the matrices.")
    targets: Literal["all-linear"] | Pattern | list[Text] | None = Field(
        None,
        description="Modules to adapt, by the ends of their names, such as [q_proj, v_proj], or by a regular "
        "expression that their names match fully, such as .*self_attn.[qv]_proj. Linear modules, and by name the "
        "embeddings and the output head, if they are not tied. all-linear: all linear ones except the head. Default: "
        "all-linear, or the targets of start_from.",
    )
    target_parameters: list[Text] = Field(
        [],
        description="Weights of experts to adapt, by the ends of their names, such as [experts.gate_up_proj, "
        "experts.down_proj]: models that keep the matrices of all experts in one parameter have no linear modules for "
        "them. Each expert gets matrices of its own. targets may be [] beside them.",
    )
    layers: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_parse_layers)] | None = Field(
        None, description="Numbers of the blocks to adapt, such as [0, 1, 2], or a range, 8-15. Default: all."
    )
    initialization: Literal["default", "gaussian", "pissa", "olora"] = Field(
        "default",
        description="Of new matrices. default: A uniform (Kaiming) and B zero. gaussian: A normal. pissa: the largest "
        "singular values of each weight (arXiv 2404.02948), from 16 iterations of a randomized decomposition. "
        "olora: the first columns of its QR decomposition (arXiv 2406.01775). With the last two, the first product is "
        "subtracted, so that training starts from the model, and the saved adapter has twice the rank.",
    )
    modules_to_save: list[Text] = Field(
        [],
        description="Modules to train in full and save with the adapter, by the ends of their names, such as "
        "[embed_tokens, lm_head].",
    )
    quantization: Literal["none", "nf4", "int8"] = Field(
        "none",
        description="Quantize the frozen weights of linear modules, except the output head, to 4 bits (nf4, arXiv "
        "2305.14314) or 8 bits (int8, one scale per row). Computation uses the precision of the run.",
    )
    quantize_experts: bool = Field(
        False,
        description="Also quantize the weights of experts that a model keeps in one parameter for all experts of a "
        "block, which are no linear modules.",
    )
    double_quantization: bool = Field(True, description="nf4: also quantize the scales, to 8 bits.")
    start_from: Text | None = Field(
        None, description="Directory of an existing adapter of the same model to continue training."
    )
    stack: bool = Field(
        False, description="Freeze the adapter of start_from and train a new one on top; they are saved as one adapter."
    )

    @property
    def spec(self) -> AdapterSpec:
        """What its type reads and needs."""
        return ADAPTERS.get(self.type)

    @property
    def decomposes(self) -> bool:
        """Whether new matrices are parts of the weights that they adapt."""
        return self.initialization in ("pissa", "olora")

    @model_validator(mode="before")
    @classmethod
    def _in_one_word(cls, values: Any) -> Any:
        if values is None or isinstance(values, str):
            values = {"type": values or "none"}
        if not isinstance(values, dict) or "type" not in values:
            return values
        for key, reasons in _REFUSED.items():
            if isinstance(values.get(key), str) and values[key] in reasons:
                raise PydanticCustomError("adapter", "another one: {why}", {"why": reasons[values[key]]})
        word = values["type"]
        meant = SHORT_FORMS.get(word) if isinstance(word, str) else None
        if meant is None:
            return values
        if word == "qlora" and values.get("quantization") == "none":
            raise PydanticCustomError("adapter", "a quantization with type qlora")
        if word == "rslora" and values.get("rank_stabilized") is False:
            raise PydanticCustomError("adapter", "rank_stabilized: true with type rslora")
        return {**meant, **values, "type": meant["type"]}


def _allow_one_word(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"enum": list(SHORT_FORMS)}, {"$ref": schema.pop("$ref")}]


def _check_implementation(value: object) -> object:
    if value not in ("transformers", "gpt") and not (isinstance(value, str) and re.fullmatch(_CLASS, value)):
        raise PydanticCustomError("implementation", "transformers, gpt, module:Class or file.py:Class")
    # As a whole path, so that a run can be used from any directory.
    return f"{expand_user_path(value).absolute()}" if isinstance(value, str) and is_file(value) else value


_IMPLEMENTATIONS = {"anyOf": [{"enum": ["transformers", "gpt"]}, {"type": "string", "pattern": f"^{_CLASS}$"}]}


# Keys of transformers 4 that configurations still accept and convert to rope_parameters.
OLDER_ROPE_KEYS = ("rope_scaling", "rope_theta", "partial_rotary_factor")
# Keys that decide the shapes of the weights, or their names.
_OF_SHAPES = re.compile(
    r"(^|_)(layers?|experts?|heads?|blocks?|embd|inner|rank)$|(size|dim|d_model|d_ff|model_type|layer_types)$|"
    r"^(architectures|quantization_config|tie_word_embeddings|text_config|vision_config)$"
)


def _check_overrides(value: Any) -> Any:
    """Check that weights of the configuration still fit it."""
    for key in value if isinstance(value, dict) else ():
        if _OF_SHAPES.search(str(key)):
            raise PydanticCustomError(
                "overrides", "{key} decides the shapes of the weights, which come from name", {"key": str(key)}
            )
    return value


class AddedTokensSection(Section):
    """Tokens to add to the tokenizer; a list has ordinary ones."""

    ordinary: list[Text] = Field([], description="Tokens that are texts of their own, such as words of a domain.")
    special: list[Text] = Field(
        [], description="Tokens that mark something, such as turns of a chat template; decoded texts are without them."
    )

    @model_validator(mode="before")
    @classmethod
    def _ordinary(cls, values: Any) -> Any:
        return {"ordinary": values} if isinstance(values, list) else values

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.ordinary, *self.special]


def _allow_list(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"type": "array", "items": {"type": "string"}}, {"$ref": schema.pop("$ref")}]


class ModelSection(Section):
    """The model to train, and its tokenizer."""

    name: Text | None = Field(
        None,
        description="Hugging Face id or local directory of the initial weights; owner/name@revision for a branch, tag "
        "or commit of the id.",
    )
    config: dict[str, Any] | None = Field(
        None,
        description="A transformers configuration, including model_type, for a randomly initialized model. Set "
        "either this or name.",
    )
    overrides: Annotated[dict[str, Any], BeforeValidator(_check_overrides)] = Field(
        default_factory=dict,
        description="Values to change in the configuration of the model given by name, such as rope_scaling: "
        "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768} or max_position_embeddings: 131072. "
        "They are saved with the trained model.",
    )
    gguf_file: Text | None = Field(None, description="GGUF file to read in the repository or directory given by name.")
    implementation: Annotated[str, BeforeValidator(_check_implementation), WithJsonSchema(_IMPLEMENTATIONS)] = Field(
        "transformers",
        description="Implementation of the model given by name. gpt: Trainwright's own decoder, for gpt2, llama and "
        "qwen3; it is saved in the original architecture. With config, use model_type gpt instead. module:Class or "
        "file.py:Class: a torch module of your own, which is called with vocab_size and the values of config, or "
        "saved in name by an earlier run.",
    )
    attention: Annotated[str, Registered(ATTENTION_KERNELS, _ATTENTIONS)] = Field(
        "auto",
        description="Kernel of the attention in training. auto: the fastest that computes this model on the device. "
        "What was chosen, and why, is shown by plan and when the run starts. eager: plain operations; sdpa: "
        "torch's scaled_dot_product_attention; flash_attention_2: the package flash-attn or torch's own; "
        "flash_attention_3, flash_attention_4: packages of that name, for Hopper and for Blackwell; flex: torch's "
        "flex_attention. The last four compute packs. Other names are of one kernel.",
    )
    kernels: Literal["auto", "eager", "triton"] = Field(
        "auto",
        description="Kernels of the other operations in training. triton: on an NVIDIA GPU the loss with its gradient "
        "is one kernel, and so are root-mean-square norms, rotary positions and gated activations whose formula is "
        "the kernel's. eager: plain operations. auto: on a CPU without train.compile, rotary positions and, in bf16 "
        "and fp16, root-mean-square norms take some tokens at a time, with the results of eager to the bit; on a GPU "
        "eager, as the kernels are not measured on GPUs yet.",
    )
    tokenizer: Text | None = Field(
        None,
        description="Hugging Face id or directory of a tokenizer, or bytes for the built-in byte-level one. "
        "characters: one token per character of data.train. bpe:4096: byte-level BPE with 4096 tokens, trained on "
        "data.train. characters:FILE and bpe:4096:SOURCE use other text. Default: the model's tokenizer.",
    )
    added_tokens: AddedTokensSection = Field(
        default_factory=AddedTokensSection,
        description="Tokens to add to the tokenizer, as a list or as {ordinary, special}. Tokens beyond the embeddings "
        "of the model in name get new rows there and in the head, which begin at the mean of the others (as "
        "resize_token_embeddings of transformers) and are trained; the chat template can end turns with one.",
        json_schema_extra=_allow_list,
    )
    chat_template: Text | None = Field(
        None,
        description="A Jinja chat template, the path of a file with one, or the name of a common one: alpaca, chatml, "
        "gemma, llama2, llama3, mistral, phi3, phi4, plain (the turns alone), qwen, tulu, vicuna, zephyr. Default: the "
        "tokenizer's.",
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Values of variables that the chat template reads, such as enable_thinking: false. They are saved "
        "as defaults in the template of the trained model.",
    )
    dropout: BelowOne | None = Field(
        None, description="Dropout probability everywhere in the model. Default: the values of its configuration."
    )
    save_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Precision of the trained model in final/. auto: that of the base model's files, but fp32 for "
        "quantized GGUF files; for randomly initialized models the dtype in config, or fp32. Checkpoints are exact. "
        "Adapters are saved in fp32.",
    )
    trainable: list[Pattern] | None = Field(
        None,
        description="Regular expressions of parameter names to train, such as "
        "model\\.layers\\.(5|6|7)\\.mlp\\.down_proj\\.weight; all others are frozen. null: train all.",
    )
    frozen: list[Pattern] = Field(
        [],
        description="Regular expressions of parameter names to freeze, such as .*embed_tokens.*; trainable ones too.",
    )
    adapter: AdapterSection = Field(
        default_factory=AdapterSection,
        description="Adapter to train instead of the model's own weights: none, lora, rslora, dora, oft or qlora, or "
        "a section with its settings.",
        json_schema_extra=_allow_one_word,
    )

    @property
    def is_own(self) -> bool:
        """Whether the model is a torch module of the user's own."""
        return ":" in self.implementation

    @property
    def trained_patterns(self) -> tuple[str, ...] | None:
        """Patterns that the names of all trained parameters match, and no others; None: all are trained."""
        if self.trainable is None and not self.frozen:
            return None
        without = "".join(rf"(?!(?:{pattern})\Z)" for pattern in self.frozen)
        return tuple(f"{without}(?:{pattern})" if without else pattern for pattern in self.trainable or [".*"])

    def override_configuration(self, configuration: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration, as its file has it, with the values of ``overrides``.

        Raises:
            RequestError: the file has rotary positions by kind of layer, and a single one is set.
        """
        if select_text_config(configuration) is not configuration:
            return {**configuration, "text_config": self.override_configuration(configuration["text_config"])}
        fields = {**configuration, **self.overrides}
        rope = configuration.get("rope_parameters")
        older = {key: self.overrides[key] for key in OLDER_ROPE_KEYS if key in self.overrides}
        if not older or not isinstance(rope, Mapping):
            return fields
        if any(isinstance(value, Mapping) for value in rope.values()):
            keys = ", ".join(older)
            raise RequestError(f"model.overrides: the model has rope_parameters by kind of layer; set them, not {keys}")
        bases = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        scaling = older.pop("rope_scaling", {key: value for key, value in rope.items() if key not in bases})
        fields = {key: value for key, value in fields.items() if key not in OLDER_ROPE_KEYS}
        return {**fields, "rope_parameters": {**bases, **(scaling or {"rope_type": "default"}), **older}}

    @property
    def fresh(self) -> dict[str, Any] | None:
        """The configuration of a randomly initialized model, with its ``model_type``; None for one with a name."""
        if self.config is None:
            return None
        if not self.is_own:
            return dict(select_text_config(self.config))
        size = {"vocab_size": self.config["vocab_size"]} if "vocab_size" in self.config else {}
        return {"model_type": OWN, "implementation": self.implementation, "arguments": self.config, **size}


# Modules are made one by one, so this bounds the time to inspect a model. The deepest published language models have
# 1,000 layers (DeepNet, arXiv 2203.00555).
_COUNTS = (
    (re.compile(r"layers?$|^n_layers?$|blocks?$|^depth$"), 10_000, "layers"),
    (re.compile(r"experts?$"), 100_000, "experts"),
    (re.compile(r"heads?$"), 1_000_000, "heads"),
    (re.compile(r"^vocab_size$"), 100_000_000, "tokens"),
)
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_POSITIVE = re.compile(r"^(vocab|hidden|intermediate)_size$|^head_dim$|^num_.*(layers|heads)$")
_LARGEST = 2**40  # of any number: more than the parameters of today's largest models
_DEEPEST = 64


def check_config_sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the problem for every impossible number."""
    stack: list[tuple[str, Any, int]] = [("", config, 0)]
    while stack:
        key_path, value, depth = stack.pop()
        if isinstance(value, Mapping) and depth < _DEEPEST:
            stack += [(f"{key_path}.{key}" if key_path else str(key), item, depth + 1) for key, item in value.items()]
        elif isinstance(value, int) and not isinstance(value, bool) and (reason := _check_size(key_path, value)):
            yield key_path, reason


def check_sizes(config: Mapping[str, Any], origin: str) -> None:
    """Check a configuration before anything is built from it. Raises RequestError, which begins with ``origin``."""
    if lines := [f"{origin}: {key}: {reason}" for key, reason in check_config_sizes(config)]:
        raise RequestError("\n".join(lines[:10]))


def _check_size(key: str, value: int) -> str | None:
    name = key.rpartition(".")[2]
    if value < 0 and _POSITIVE.search(name):
        return f"{_format_number(value)} is negative"
    if value == 0 and name in _WIDTHS:
        return "0 is no width of a model"
    if abs(value) > _LARGEST:
        return f"{_format_number(value)} is too large for a model's configuration"
    for pattern, limit, noun in _COUNTS:
        if pattern.search(name) and value > limit:
            return f"{_format_number(value)} {noun} are too many (at most {limit:,})"
    return None


def _format_number(value: int) -> str:
    return f"{value:,}" if abs(value) < 10**30 else f"a number of {value.bit_length() * 3 // 10} digits"
