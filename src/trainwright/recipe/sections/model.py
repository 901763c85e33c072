"""The sections of the model and of its adapter."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trainwright.recipe.sections.fields import BelowOne, Count, Positive, Section, Text

# Short forms of an adapter, and what they stand for.
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {"type": "none"},
    "lora": {"type": "lora"},
    "rslora": {"type": "lora", "rank_stabilised": True},
    "dora": {"type": "dora"},
    "qlora": {"type": "lora", "quantisation": "nf4"},
}


class AdapterSection(Section):
    """An adapter: small weights trained in place of the model's own. Short form: lora, rslora, dora or qlora."""

    type: Literal["none", "lora", "rslora", "dora", "qlora"] = Field(
        "none",
        description="none: train the model's own weights. lora: low-rank matrices beside frozen ones (arXiv "
        "2106.09685). dora: these, and the magnitudes of the weights (arXiv 2402.09353). In short: rslora is lora with "
        "rank_stabilised, qlora is lora with quantisation nf4; a recipe that was read has lora for both.",
    )
    rank: Count | None = Field(None, description="Rank of the matrices. Default: 16, or as start_from has it.")
    alpha: Positive | None = Field(
        None,
        description="What the matrices add is scaled by alpha / rank. Default: 32, or as start_from has it.",
    )
    rank_stabilised: bool = Field(
        False, description="Scale by alpha / sqrt(rank) instead, so that high ranks learn too (arXiv 2312.03732)."
    )
    dropout: BelowOne = Field(0.0, description="Dropout on what enters the matrices.")
    targets: Literal["all-linear"] | list[Text] | None = Field(
        None,
        description="The linear modules that get matrices, by the ends of their names, such as [q_proj, v_proj]. "
        "all-linear: all but the head. Default: all-linear, or as start_from has them.",
    )
    modules_to_save: list[Text] = Field(
        [],
        description="Further modules, by the ends of their names, that are trained whole and saved with the adapter, "
        "such as [embed_tokens, lm_head].",
    )
    quantisation: Literal["none", "nf4", "int8"] = Field(
        "none",
        description="Keep the frozen weights of linear modules, the head aside, in 4 bits (nf4, arXiv 2305.14314) or 8 "
        "(int8, a scale for every row); they are multiplied in the precision of the run.",
    )
    double_quantisation: bool = Field(True, description="nf4: store the scales themselves in 8 bits.")
    start_from: Text | None = Field(
        None, description="Directory of an existing adapter of the same model, to go on training it."
    )
    stack: bool = Field(
        False,
        description="Keep the adapter of start_from as it is and train a new one on top; what is saved is both in one.",
    )

    @model_validator(mode="before")
    @classmethod
    def _in_one_word(cls, values: Any) -> Any:
        if values is None or isinstance(values, str):
            values = {"type": values or "none"}
        if not isinstance(values, dict) or "type" not in values:
            return values
        word = values["type"]
        meant = ADAPTERS.get(word) if isinstance(word, str) else None
        if meant is None:
            return values
        if word == "qlora" and values.get("quantisation") == "none":
            raise PydanticCustomError("adapter", "a quantisation with type qlora")
        if word == "rslora" and values.get("rank_stabilised") is False:
            raise PydanticCustomError("adapter", "rank_stabilised: true with type rslora")
        return {**meant, **values, "type": meant["type"]}


def _or_one_word(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"enum": list(ADAPTERS)}, {"$ref": schema.pop("$ref")}]


class ModelSection(Section):
    """The model to train, and its tokenizer."""

    name: Text | None = Field(
        None, description="A Hugging Face id or a local directory with the weights to start from."
    )
    config: dict[str, Any] | None = Field(
        None,
        description="A transformers configuration, model_type included, for a fresh model with random "
        "weights. Give either this or name.",
    )
    gguf_file: Text | None = Field(
        None, description="The GGUF file to read inside the repository or directory that name gives."
    )
    implementation: Literal["transformers", "gpt"] = Field(
        "transformers",
        description="Whose code computes the model that name gives. gpt: Trainwright's own decoder, for a gpt2, a "
        "llama or a qwen3; what is saved is the same architecture again. A config says it by model_type gpt.",
    )
    tokenizer: Text | None = Field(
        None,
        description="A tokenizer's id or directory, or bytes for the built-in byte-level one. characters: a token for "
        "each character of data.train; bpe:4096: byte-level BPE of so many tokens trained on data.train; for another "
        "text characters:FILE and bpe:4096:SOURCE. Default: the tokenizer that comes with name.",
    )
    chat_template: Text | None = Field(
        None,
        description="A Jinja chat template, or the path of a file with one. Default: the tokenizer's own.",
    )
    dropout: BelowOne | None = Field(
        None,
        description="Sets every dropout probability of the model. Default: as its configuration has them.",
    )
    adapter: AdapterSection = Field(
        default_factory=AdapterSection,
        description="Train small added weights in place of the model's own: none, lora, rslora, dora or qlora, or a "
        "section that says more.",
        json_schema_extra=_or_one_word,
    )
