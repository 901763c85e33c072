"""The section ``data`` of a recipe: the training data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from trainwright.errors import RequestError
from trainwright.recipe.contradiction import Contradiction, Contradictions
from trainwright.recipe.sections.fields import Count, Positive, Section, Text, ValidationRows, whole
from trainwright.registries import SOURCES

DataFormat = Literal[
    "auto",
    "messages",
    "conversations",
    "prompt_completion",
    "instruction",
    "question_answer",
    "text",
    "documents",
    "preference",
    "labelled",
]

# The keys of unlearning that replace `train`.
PARTS = ("forget", "retain", "holdout", "idk")
_OF_A_TASK = ("train", "benchmark", *PARTS)


class SourceSection(Section):
    """One source of a mixture."""

    source: Text = Field(description="The rows: a file, a directory, a Hugging Face dataset or what is built in.")
    weight: Positive = Field(
        1.0,
        description="The source's share of the examples of every epoch is its weight over the sum of all weights; its "
        "rows are repeated, or passed over in some epochs, evenly and in an order of their own.",
    )
    format: DataFormat = Field(
        "auto", description="How a row is laid out. auto: found from the first rows and printed."
    )
    limit: Count | None = Field(None, description="Use only the first this many rows.")


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


Sources = Annotated[
    Annotated[Text, Tag("one")] | Annotated[Annotated[list[SourceSection], Field(min_length=1)], Tag("several")],
    Discriminator(_one_or_several),
]


class DataSection(Section):
    """The training data. Relative paths are relative to the working directory of the command."""

    train: Sources | None = Field(
        description="The rows to train on: a JSON, JSONL, CSV, TSV, Parquet, Arrow or text file, a directory of such "
        "files or one that save_to_disk of datasets wrote (directory:split where it has several), a "
        "Hugging Face dataset (owner/name, owner/name:split or owner/name:config:split), or a built-in one made from "
        "Python's own documentation: pydoc has questions and answers, pydoc-pairs a right and a wrong answer to each. "
        "Documents of text, Markdown, code or Word are read whole. A list of {source, weight, format, limit} is a "
        "mixture. Or a source of another package by its name, or module:Name.",
        json_schema_extra=lambda schema: schema.update(examples=[*SOURCES.names()]),
    )
    benchmark: Text | None = Field(
        None,
        description="unlearn: a benchmark that forget, retain, holdout and idk are taken from where they are not "
        "given: tofu:forget01, tofu:forget05, tofu:forget10, muse:news, muse:books or wmdp:cyber, with @DIRECTORY "
        "where it is on this machine.",
    )
    forget: Text | None = Field(None, description="unlearn: the rows to be forgotten, a source as train has it.")
    retain: Text | None = Field(
        None,
        description="unlearn: rows that are to stay known; one stands beside each forget row, another every epoch.",
    )
    holdout: Text | None = Field(
        None, description="unlearn: rows that were never trained on, to compare with the forgotten ones."
    )
    idk: Text | None = Field(
        None,
        description="unlearn: a file with a refusal a line, such as I do not know, for the objectives that teach one.",
    )
    validation: ValidationRows = Field(
        0.05,
        description="The rows held back to measure on: a fraction of train (of a mixture, of each source), a number of "
        "its rows (of a mixture, from each by weight), or a source of their own. null: none. unlearn: how many of the "
        "forget rows are measured, with as many retain rows; they are trained on too.",
    )
    format: DataFormat = Field(
        "auto",
        description="How a row is laid out. auto: found from the first rows and printed. documents: a file is a row.",
    )
    max_length: Annotated[int, Field(ge=2), BeforeValidator(whole)] = Field(
        1024,
        description="Longest example in tokens, of a pair each side; what is longer is cut, counted and reported, or "
        "split as long_documents says.",
    )
    long_documents: Literal["auto", "cut", "split"] = Field(
        "auto",
        description="What becomes of an example of more than max_length tokens. cut: its end is lost. split: it is "
        "several, each beginning with the last token of the one before, so that every token is learnt once. auto: "
        "plain text is split, and conversations are cut.",
    )
    pack_length: Count | None = Field(
        None,
        description="Put several examples into one row of at most this many tokens, none seeing another. "
        "At least max_length, and twice that for pairs. null: one example a row.",
    )
    limit: Count | None = Field(
        None,
        description="Use only the first this many rows of train, those held back for validation among them; of forget "
        "and of retain each. A validation source of its own is read whole.",
    )
    _part: str | None = PrivateAttr(None)  # the key that `train` was filled in from

    @model_validator(mode="before")
    @classmethod
    def _of_the_benchmark(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(name := values.get("benchmark"), str):
            return values
        from trainwright.recipe.benchmarks import find_benchmark

        key = "data.benchmark"
        try:
            found = find_benchmark(name, key).training
        except RequestError as error:
            raise Contradictions([Contradiction((key,), str(error).removeprefix(f"{key}: "))]) from None
        return {**values, **{key: found[key] for key in PARTS if key in found and values.get(key) is None}}

    @model_serializer(mode="wrap")
    def _without_other_rows(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        return {key: value for key, value in values.items() if value is not None or key not in _OF_A_TASK}

    def part(self, key: str) -> DataSection:
        """Return the data of one of ``PARTS`` alone, as training data; no validation rows are held back."""
        nothing = dict.fromkeys(("benchmark", "validation", *PARTS))
        found = self.model_copy(update={**nothing, "train": getattr(self, key)})
        found._part = f"data.{key}"
        return found

    @property
    def sources(self) -> tuple[SourceSection, ...]:
        """Return the training sources, one or several."""
        if self.train is None:
            parts = (self.forget, self.retain)
            return tuple(SourceSection(source=one, format=self.format, limit=self.limit) for one in parts if one)
        if isinstance(self.train, str):
            return (SourceSection(source=self.train, format=self.format, limit=self.limit),)
        return tuple(self.train)

    @property
    def source_keys(self) -> tuple[str, ...]:
        """Return the recipe keys of ``sources``, for messages."""
        if self.train is None:
            return tuple(f"data.{key}" for key in ("forget", "retain") if getattr(self, key))
        if isinstance(self.train, str):
            return (self._part or "data.train",)
        return tuple(f"data.train[{index}]" for index in range(len(self.train)))

    @property
    def validation_source(self) -> SourceSection | None:
        """Return the validation source, if it is a separate one."""
        if not isinstance(self.validation, str):
            return None
        return SourceSection(source=self.validation, format=self.format)

    @property
    def name(self) -> str:
        """Return the name of the training data, for messages."""
        return " + ".join(source.source for source in self.sources)
