"""The section ``data`` of a recipe: the training data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from trainwright.recipe.registries import SOURCES
from trainwright.recipe.sections.fields import (
    Count,
    HeldOutRows,
    Length,
    NotNegative,
    Positive,
    Section,
    Text,
    Until,
    UntilText,
    ValidationRows,
    parse_until,
)

_Layout = Literal[
    "messages",
    "conversations",
    "prompt_completion",
    "instruction",
    "question_answer",
    "text",
    "segments",
    "tokens",
    "preference",
    "labelled",
]


def _discriminate_sources(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


DataFormat = Annotated[
    Annotated[Literal["auto", "documents"] | _Layout, Tag("one")]
    | Annotated[list[_Layout], Field(min_length=1), Tag("several")],
    Discriminator(_discriminate_sources),
]


def _check_prompt(value: Any) -> Any:
    """Check a text with {fields}; braces that are no fields are doubled."""
    if isinstance(value, str):
        try:
            fields = [name for _, name, spec, conversion in Formatter().parse(value) if name is not None]
        except ValueError as error:
            raise PydanticCustomError("prompt", "a text with {fields}: {reason}", {"reason": str(error)}) from None
        if not fields or not all(name.isidentifier() for name in fields):
            raise PydanticCustomError(
                "prompt", "a text with columns in braces, such as {question}; write {{ for a brace"
            )
    return value


def _check_targets(value: Any) -> Any:
    if isinstance(value, str) and value not in ("answers", "all", "last"):
        if not (len(value) > 2 and value[0] == value[-1] == "/"):
            raise PydanticCustomError("targets", "answers, all, last or a regular expression between slashes")
        try:
            re.compile(value[1:-1])
        except re.error as error:
            raise PydanticCustomError("targets", "a regular expression: {reason}", {"reason": str(error)}) from None
    return value


Prompt = Annotated[str, BeforeValidator(_check_prompt)]


def _check_mixing(value: Any) -> Any:
    is_temperature = isinstance(value, int | float) and not isinstance(value, bool) and value >= 1
    if value not in ("weights", "concatenate") and not is_temperature:
        raise PydanticCustomError("mixing", "weights, concatenate, or a temperature of at least 1")
    return value


class RowSettings(NamedTuple):
    """How the rows of a source are read: the keys of that name of `SourceSection`."""

    format: str | Sequence[str] = "auto"  # several: the first that fits
    columns: dict[str, str] = {}
    system: str | None = None
    prompt: str | None = None
    prompt_without_input: str | None = None
    drop_system_message: bool = False


_COLUMNS = (
    "The columns that fields are read from, if they are called otherwise: {field: column}, such as {question: query, "
    "answer: gold}. Fields are those of data.format, system and tools."
)
_SYSTEM = "Text of a system turn for conversations that begin without one."
_PROMPT = (
    "The user's turn, made from the columns of a row: a text such as '{instruction} in {language}'. For rows with one "
    "answer."
)
_WITHOUT_INPUT = "prompt for rows whose field input is empty."
_DROP_SYSTEM = (
    "Leave out the system turns of the rows, from their turns or a column; system then gives every row its own."
)


class RowsSection(Section):
    """Rows, and how they are read."""

    source: Text = Field(description="A file, a directory, a Hugging Face dataset or a built-in dataset.")
    format: DataFormat = Field(
        "auto", description="Format of the rows. auto: detected from the first rows and printed."
    )
    limit: Count | None = Field(None, description="Use only the first N rows.")
    columns: dict[Text, Text] = Field(default_factory=dict, description=_COLUMNS)
    system: Text | None = Field(None, description=_SYSTEM)
    prompt: Prompt | None = Field(None, description=_PROMPT)
    prompt_without_input: Prompt | None = Field(None, description=_WITHOUT_INPUT)
    drop_system_message: bool = Field(False, description=_DROP_SYSTEM)


class SourceSection(RowsSection):
    """One source of a mixture."""

    name: Text | None = Field(None, description="The name by which data.stages gives its weight. Default: the source.")
    weight: Positive = Field(
        1.0,
        description="Sampling weight: the source's share of each epoch is its weight divided by the sum of all "
        "weights. Rows are repeated, or skipped in some epochs, evenly and in shuffled order.",
    )

    @property
    def rows(self) -> RowSettings:
        """How its rows are read."""
        return RowSettings(**{name: getattr(self, name) for name in RowSettings._fields})

    @property
    def is_documents(self) -> bool:
        """Whether each file is one row."""
        return self.format == "documents"


def _check_weights(weights: dict[str, float] | None) -> dict[str, float] | None:
    if weights is not None and not any(weights.values()):
        raise PydanticCustomError("weights", "at least one source with a weight above 0")
    return weights


class StageSection(Section):
    """A part of a run with a mixture of its own."""

    until: UntilText | None = Field(
        None,
        description="The end of the stage, counted from the first step of the run: '1000 steps', or '2B tokens' (k, M, "
        "B, T), which ends it with the step that reaches them. The last stage has none: it ends with the run.",
    )
    weights: Annotated[dict[Text, NotNegative], AfterValidator(_check_weights)] | None = Field(
        None,
        description="Weights of the sources by name (or by source, if they have no name); sources that are not listed "
        "are not used in the stage. null: the weights of data.train.",
    )
    max_length: Annotated[Length, Field(ge=2)] | None = Field(
        None,
        description="For a corpus: divide its windows of data.max_length tokens into sequences of at most so many, "
        "each of which begins with the last token of the one before it: the same tokens, in shorter contexts.",
    )

    @property
    def end(self) -> Until | None:
        """The end of the stage; None: that of the run."""
        return None if self.until is None else parse_until(self.until)


class StreamingSection(Section):
    """Tokenizing while a run trains."""

    buffer_size: Count = Field(
        10_000,
        description="Examples of a shard. The examples of each shard are shuffled, and shards follow the order of the "
        "rows.",
    )
    disk_gb: Positive = Field(
        10.0,
        description="The most gigabytes (10^9 bytes) that tokenized examples take in the cache of each machine: those "
        "of the present step, and those ahead of it.",
    )


Sources = Annotated[
    Annotated[Text, Tag("one")] | Annotated[Annotated[list[SourceSection], Field(min_length=1)], Tag("several")],
    Discriminator(_discriminate_sources),
]


def _set_name(name: str) -> str:
    if re.fullmatch(r"\w[\w-]*", name) is None:
        raise PydanticCustomError("set_name", "a name of letters, digits, _ and -")
    return name


def _check_one_held_out(sets: dict[str, Any]) -> dict[str, Any]:
    if sum(isinstance(rows, int | float) for rows in sets.values()) > 1:
        raise PydanticCustomError("held_out", "at most one set of rows of train; the others are sources")
    return sets


SetName = Annotated[Text, AfterValidator(_set_name)]
ValidationSet = Annotated[
    Annotated[HeldOutRows, Tag("rows")] | Annotated[RowsSection, Tag("section")],
    Discriminator(lambda value: "section" if isinstance(value, dict | Section) else "rows"),
]
Validation = Annotated[
    Annotated[ValidationRows, Tag("one")]
    | Annotated[dict[SetName, ValidationSet], Field(min_length=1), AfterValidator(_check_one_held_out), Tag("sets")],
    Discriminator(lambda value: "sets" if isinstance(value, dict) else "one"),
]


class DataSection(Section):
    """The training data. Relative paths are relative to the working directory of the command."""

    train: Sources | None = Field(
        description="The rows to train on: a JSON, JSONL, CSV, TSV, Parquet, Arrow or text file, a directory of such "
        "files or one written by save_to_disk of datasets (directory:split if it has several splits), a Hugging Face "
        "dataset (owner/name, owner/name:split, owner/name:config:split, or owner/name:data/rows.jsonl for one of its "
        "files), or a built-in dataset made from Python's "
        "documentation: pydoc (questions and answers) or pydoc-pairs (a right and a wrong answer to each question). "
        "Text, Markdown, code and Word documents are read whole. A list of {source, weight, format, limit, …} is a "
        "mixture. Sources of other packages are given by name or as module:Name.",
        json_schema_extra=lambda schema: schema.update(examples=[*SOURCES.names()]),
    )
    mixing: Annotated[str | float, BeforeValidator(_check_mixing)] = Field(
        "weights",
        description="How several sources make up an epoch, which has as many examples as all of them. weights: by "
        "their weights. concatenate: every example of every source once. A number, the temperature: by weight times "
        "the number of examples to the power of 1 / temperature (arXiv 1910.10683, section 3.5.2).",
    )
    stages: Annotated[list[StageSection], Field(min_length=1)] | None = Field(
        None,
        description="Stages of the run, each with its own mixture of the sources of train: a list of {until, weights, "
        "max_length}. The examples of a step follow from the recipe and the data alone. A source goes on in a later "
        "stage where it stopped. Needs train.max_steps or train.max_tokens.",
    )
    streaming: Annotated[
        StreamingSection | None,
        BeforeValidator(lambda value: {True: {}, False: None}[value] if isinstance(value, bool) else value),
    ] = Field(
        None,
        description="Tokenize the rows of train, in their order, while training: for sources that are longer than the "
        "disk, or whose tokens are. true: with the defaults. Behind its last row, a source begins again. Needs "
        "train.max_steps, and a data.validation that is a source of its own or null. With tasks sft and pretrain.",
    )
    validation: Validation = Field(
        0.05,
        description="Validation rows: a fraction of train (of each source in a mixture), a number of rows of train "
        "(divided by weight in a mixture), or a separate source. A mapping of names has several sets, each one of "
        "these or {source, format, limit, …}, whose metrics are NAME/METRIC beside those of all together. null: no "
        "validation. unlearn: how many forget rows to measure, with the same number of retain rows; they are also "
        "trained on.",
    )
    format: DataFormat = Field(
        "auto",
        description="Format of the rows. auto: detected from the first rows and printed. A list: the first of these "
        "formats that the rows fit. documents: each file is one row.",
    )
    columns: dict[Text, Text] = Field(default_factory=dict, description=_COLUMNS)
    system: Text | None = Field(None, description=_SYSTEM)
    prompt: Prompt | None = Field(None, description=_PROMPT)
    prompt_without_input: Prompt | None = Field(None, description=_WITHOUT_INPUT)
    drop_system_message: bool = Field(False, description=_DROP_SYSTEM)
    targets: Annotated[str, BeforeValidator(_check_targets)] = Field(
        "answers",
        description="Which tokens of a conversation are trained on. answers: the assistant's turns with their stop "
        "tokens, except turns marked otherwise. last: the last of these turns. all: every token, as TRL and Unsloth do "
        "by default. /regular expression/: what it matches in the text that the chat template writes, or its first "
        "group.",
    )
    max_length: Annotated[Length, Field(ge=2)] = Field(
        1024,
        description="Maximum length of an example in tokens; for pairs, of each answer with its prompt. Longer "
        "examples are truncated, counted and reported, or split according to long_documents.",
    )
    long_documents: Literal["auto", "cut", "split", "drop"] = Field(
        "auto",
        description="How to handle examples longer than max_length. cut: truncate. split: split into several "
        "examples, each starting with the last token of the previous one, so that every token is a target once. "
        "drop: leave them out. auto: split plain text, truncate conversations.",
    )
    pack_length: Length | None = Field(
        None,
        description="Pack several examples into one row of at most this many tokens; examples do not attend to each "
        "other. At least max_length, or twice that for pairs. null: one example per row.",
    )
    example_per_turn: bool = Field(
        False,
        description="Make one example of each assistant turn: the conversation up to it, with this turn as the only "
        "target. For chat templates that write the reasoning of the last turn only. For conversations of task sft.",
    )
    accept_omissions: bool = Field(
        False,
        description="Accept that the chat template leaves out reasoning, content or names: the rows are still counted, "
        "without the ways to keep it.",
    )
    deduplicate: bool = Field(
        False,
        description="Leave out rows of train that have the same tokens and targets as an earlier row, of any of its "
        "sources, before some are held out; and rows of a separate validation set that repeat an earlier one of it. "
        "They are counted.",
    )
    limit: Count | None = Field(
        None,
        description="Use only the first N rows of train (including those held out for validation), or of forget and "
        "of retain each. A separate validation source is not limited.",
    )

    @model_serializer(mode="wrap")
    def _without_other_rows(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        base_keys = DataSection.model_fields.keys() - {"train"}  # not those of a task
        return {key: value for key, value in values.items() if value is not None or key in base_keys}

    @property
    def sources(self) -> tuple[SourceSection, ...]:
        """Return the training sources, one or several."""
        if self.train is None:
            return ()
        if isinstance(self.train, str):
            return (SourceSection(source=self.train, limit=self.limit, **self._select_row_keys()),)
        return tuple(self.train)

    def weights(self, sizes: Sequence[int]) -> list[float]:
        """Return the shares of sources with ``sizes`` examples in an epoch, in any unit."""
        weights_set = [source.weight for source in self.sources]
        if self.mixing == "weights":
            return weights_set
        power = 1.0 if self.mixing == "concatenate" else 1 / float(self.mixing)
        return [weight * size**power for weight, size in zip(weights_set, sizes, strict=True)]

    @property
    def source_names(self) -> list[str]:
        """Return the names of ``sources`` in ``stages``."""
        return [source.name or source.source for source in self.sources]

    def list_stage_weights(self, sizes: Sequence[int]) -> list[tuple[float, ...]]:
        """Return the weights of the sources, with ``sizes`` examples, in each stage; 0 where one is not used."""
        names = self.source_names
        return [
            tuple(self.weights(sizes) if stage.weights is None else [stage.weights.get(name, 0.0) for name in names])
            for stage in self.stages or ()
        ]

    @property
    def source_keys(self) -> tuple[str, ...]:
        """Return the recipe keys of ``sources``, for messages."""
        if self.train is None:
            return ()
        if isinstance(self.train, str):
            return ("data.train",)
        return tuple(f"data.train[{index}]" for index in range(len(self.train)))

    @property
    def validation_sets(self) -> dict[str, SourceSection | float | None]:
        """Return the validation sets by name, in the order in which they are stored: a separate source, or a fraction
        or number of rows of ``train``. A single set has the name "".
        """
        sets = self.validation if isinstance(self.validation, dict) else {"": self.validation}
        return {
            name: SourceSection(source=rows, **self._select_row_keys())
            if isinstance(rows, str)
            else SourceSection(**dict(rows))
            if isinstance(rows, RowsSection)
            else rows
            for name, rows in sets.items()
            if rows is not None
        }

    @property
    def held_out(self) -> float | None:
        """Return the fraction (a float) or number (an int) of the rows of ``train`` that are held out."""
        return next((rows for rows in self.validation_sets.values() if not isinstance(rows, SourceSection)), None)

    @property
    def validation_sources(self) -> list[tuple[SourceSection, str]]:
        """Return the separate validation sources with the recipe keys that name them."""
        keys = {name: f"data.validation.{name}" if name else "data.validation" for name in self.validation_sets}
        sets = self.validation_sets.items()
        return [(rows, keys[name]) for name, rows in sets if isinstance(rows, SourceSection)]

    def _select_row_keys(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in RowSettings._fields}

    @property
    def keyed_sources(self) -> list[tuple[SourceSection, str]]:
        """Return every source, separate validation sources last, with the recipe key that names it."""
        return [*zip(self.sources, self.source_keys, strict=True), *self.validation_sources]

    @property
    def name(self) -> str:
        """Return the name of the training data, for messages."""
        return " + ".join(source.source for source in self.sources)
