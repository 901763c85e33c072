"""``trainwright data`` and ``collect``: prepare, show, check and tokenize what is trained on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.cli.command import Commands, TrustCode
from trainwright.cli.recipe import Overrides, RecipeFile
from trainwright.errors import MachineError, RequestError, Stopped
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import draw, escape_controls, format_clause, format_plural, is_terminal, say

if TYPE_CHECKING:
    from trainwright.data.check import Checked
    from trainwright.data.rows.preparing import Statistics
    from trainwright.data.stream.stream import Stream
    from trainwright.data.tokens.dataset import TokenDataset
    from trainwright.recipe.schema import RecipeSchema


app = typer.Typer(cls=Commands, no_args_is_help=True, help="Prepare, show and check training data.")

Asked = Annotated[
    str, typer.Argument(metavar="RECIPE|FILE", help="A recipe (.yaml), or rows: a file, directory or Hugging Face id.")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With FILE: the model whose tokenizer and chat template to use; bytes: the built-in tokenizer.",
    ),
]
MaxLength = Annotated[
    int | None, typer.Option(min=2, help="With FILE: maximum length of an example in tokens. Default: 1024.")
]
_RECIPES = (".yaml", ".yml")
_BAR = 40
_TARGET = "bold green"
# The beginning of messages about a file of rows, replacing a recipe's keys.
_OPTIONS = {
    "data.train": "",
    "data.max_length": "--max-length: ",
    "model.name": "--model: ",
    "model.tokenizer": "--model: ",
}


@app.command()
def show(
    source: Asked,
    overrides: Overrides = None,
    model: Model = None,
    max_length: MaxLength = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Number of examples.")] = 3,
    trust_code: TrustCode = False,
) -> None:
    """Show training examples: with their targets marked, lengths, how full packs are, what is truncated and left
    out.

    Targets are colored, or marked by ⟦…⟧ without colors. The examples are the first that training uses.
    """
    from rich.console import Console

    from trainwright.data.check import check_data
    from trainwright.machine.cache import find_cache_root
    from trainwright.models.load import load_tokenizer

    with _name_options_in_errors(model):
        recipe = _load_recipe(source, overrides or [], model, max_length)
        check_data(recipe)
        from trainwright.data.stream.streamed import StreamedDataset
        from trainwright.tasks.language_model import prepare_data, stream_of  # with torch, which takes seconds

        tokenizer = load_tokenizer(recipe.model)
        prepared_data = prepare_data(recipe, tokenizer, find_cache_root())
        train = prepared_data.train.first if isinstance(prepared_data.train, StreamedDataset) else prepared_data.train
        stream = stream_of(recipe, train, len(train), training=True, shuffle=recipe.data.streaming is None)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    _show_examples(console, tokenizer, stream, count)
    for line in prepared_data.summary:
        say(line)
    _show_lengths(recipe, stream)


@app.command()
def check(
    source: Asked,
    overrides: Overrides = None,
    model: Model = None,
    max_length: MaxLength = None,
    trust_code: TrustCode = False,
) -> None:
    """Read and format every row, and report invalid rows with their places.

    Ends with 2 if there are any. A file alone is checked for its layout; with --model also against a chat template.
    """
    from trainwright.data.check import check_rows, check_sources
    from trainwright.data.rows.formats import look_up_reader
    from trainwright.data.rows.pairs import ANY
    from trainwright.recipe.sections.data import RowSettings

    if Path(source).suffix in _RECIPES or model is not None:
        from trainwright.models.load import load_tokenizer
        from trainwright.tasks.language_model import count_embeddings

        with _name_options_in_errors(model):
            recipe = _load_recipe(source, overrides or [], model, max_length)
            kind = ANY if model is not None else look_up_reader(recipe)
            tokenizer = load_tokenizer(recipe.model)
            checks = check_sources(recipe, kind, tokenizer, count_embeddings(recipe.model, tokenizer))
        _report(checks, recipe.data.max_length)
        return
    if overrides or max_length is not None:
        raise RequestError("without --model, only the layout of a file is checked; pass --model to count tokens")
    _report([check_rows(source, ANY, RowSettings(), key="data check")], None)


@app.command()
def prepare(
    raw: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="JSON, JSONL, CSV, Parquet or other data files.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", help="Output directory; must not exist.")],
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="THEIRS=OURS", help="Rename field THEIRS to OURS, such as frage=question; repeatable."
        ),
    ] = None,
    validation: Annotated[float, typer.Option(min=0, max=1, help="Fraction of the rows for validation.")] = 0.05,
    test: Annotated[float, typer.Option(min=0, max=1, help="Fraction of the rows for testing.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
    deduplicate: Annotated[
        str,
        typer.Option(
            help="Duplicates to remove. exact: equal rows. near: also rows that share most word sequences. none: "
            "keep all."
        ),
    ] = "exact",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Also write this column (all: every column), in addition to those of the layout; repeatable.",
        ),
    ] = None,
    skip_wrong: Annotated[bool, typer.Option("--skip-wrong", help="Skip invalid rows and count them.")] = False,
) -> None:
    """Convert raw rows to one layout, without duplicates, split, with statistics.

    Fields are recognized by their usual names, and others named with --map. Writes JSON lines of messages (or of texts
    or preferences, if the rows are of that kind) and statistics.json, completely or not at all.
    """
    from trainwright.data.rows.preparing import SplitSettings, prepare_raw

    names = {}
    for pair in rename or []:
        theirs, equals, ours = pair.partition("=")
        if not (theirs and equals and ours):
            raise RequestError(f"--map {pair}: expected THEIRS=OURS, such as frage=question")
        names[theirs] = ours
    statistics = prepare_raw(
        raw,
        out,
        SplitSettings(validation, test, seed, deduplicate),
        renamed=names,
        keep=keep or (),
        skip_wrong=skip_wrong,
    )
    _show_statistics(statistics, out)


@app.command()
def style(
    file: Annotated[str, typer.Argument(metavar="SOURCE", help="Conversations of any layout.")],
    system: Annotated[str, typer.Option(metavar="TEXT|@FILE", help="The system prompt.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file, as JSON lines; must not exist.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing system prompts.")] = False,
) -> None:
    """Add a system prompt to the start of every conversation."""
    from trainwright.data.rows.preparing import style_rows
    from trainwright.recipe.files import read_text

    if system.startswith("@"):
        try:
            system = read_text(expand_user_path(system[1:])).strip()
        except RequestError as error:
            raise RequestError(f"--system: {error}") from None
    outcome = style_rows(file, system, out, replace=replace)
    say(
        f"{out}: {format_plural(outcome.added, 'prompt')} added, {outcome.replaced:,} replaced, {outcome.kept:,} "
        "unchanged"
    )
    for note in outcome.notes:
        say(note)
    if outcome.kept:
        say("pass --replace to replace those too")
    for why, count in outcome.left_out.items():
        say(f"{format_plural(count, 'row')} left out: {why}")


@contextmanager
def _name_options_in_errors(model: str | None) -> Iterator[None]:
    """Name the command's options in place of the recipe's keys in messages about a file of rows."""
    try:
        yield
    except RequestError as error:
        key, colon, rest = str(error).partition(": ")
        if model is None or not colon or key not in _OPTIONS:
            raise
        raise RequestError(f"{_OPTIONS[key]}{rest}") from None


def _load_recipe(source: str, overrides: list[str], model: str | None, max_length: int | None) -> RecipeSchema:
    """Return the recipe, or one made for a file of rows."""
    import json

    from trainwright.recipe.loading import build_recipe, load_recipe

    if Path(source).suffix in _RECIPES:
        if model is not None or max_length is not None:
            raise RequestError(
                "--model and --max-length are for a file of rows; for a recipe, set model.name and data.max_length"
            )
        recipe = load_recipe(Path(source), overrides)
        if not recipe.has_texts:
            raise RequestError(f"{source}: task {recipe.task} reads no texts, so there are no rows to show")
        return recipe
    if model is None:
        raise RequestError(f"{source}: pass --model for its tokenizer and chat template, or pass a recipe (.yaml)")
    alone = f"model={{config: {{model_type: llama}}, tokenizer: {json.dumps(model)}}}"
    has_only_tokenizer = (Path(model) / "tokenizer.json").is_file() and not (Path(model) / "config.json").exists()
    about = alone if model == "bytes" or has_only_tokenizer else f"model.name={model}"
    length = [f"data.max_length={max_length}"] if max_length is not None else []
    data = f"data={{train: {json.dumps(source)}, validation: null}}"
    tasks = [] if any(word.startswith("task=") for word in overrides) else ["task=sft"]
    return build_recipe([*tasks, about, data, *length, *overrides], "--model")


def _show_examples(console: Any, tokenizer: Any, stream: Stream[TokenDataset], count: int) -> None:
    from rich.text import Text

    from trainwright.data.show import decode_pieces, list_first_examples

    colored, dataset = console.is_terminal and not console.no_color, stream.dataset
    stages = list_first_examples(stream, count)
    examples = [(stage, *pair) for stage, some in enumerate(stages, start=1) for pair in enumerate(some, start=1)]
    for stage, number, example in examples:
        name = f"example {number}" if stream.staged is None else f"stage {stage}, example {number}"
        sequences = dataset.sequences(example)
        for sequence in sequences:
            length, targets = dataset.sequence_length(sequence), dataset.sequence_targets(sequence)
            role = "" if len(sequences) == 1 else (" chosen", " rejected")[dataset.role(sequence)]
            tokens = format_plural(length, "token")
            console.rule(f"{name}{role}: {tokens}, {targets:,} of them targets", align="left")
            text = Text()
            for piece, target in decode_pieces(tokenizer, dataset, sequence):
                piece_text = escape_controls(piece) if colored or not target else f"⟦{escape_controls(piece)}⟧"
                text.append(piece_text, style=_TARGET if target else "")
            console.print(text)
    if count:
        console.rule()


def _show_lengths(recipe: RecipeSchema, stream: Stream[TokenDataset]) -> None:
    from trainwright.data.show import build_histogram, fill

    dataset = stream.dataset
    bins = build_histogram(dataset)
    most_examples = max(bin.examples for bin in bins)
    width = len(f"{bins[-1].high:,}")
    say("\nlength in tokens: examples")
    for bin in bins:
        bar = "█" * max(round(bin.examples / most_examples * _BAR), bool(bin.examples))
        say(f"{bin.low:>{width},} - {bin.high:>{width},} {bin.examples:>8,} {bar}")
    data, train = recipe.data, recipe.train
    batch_settings: dict[str, Any] = {
        "global_batch_size": train.global_batch_size,
        "seed": train.seed,
        "stages": stream.settings.stages,
    }
    pack = data.pack_length or data.max_length * dataset.sequences_per_example
    packing = fill(dataset, **batch_settings, rows=None, pack_length=pack, unit=train.batch_unit)
    say()
    if data.pack_length is None:
        rows = train.micro_batch_size if isinstance(train.micro_batch_size, int) else None
        padding = fill(dataset, **batch_settings, rows=rows, pack_length=None)
        together = f"{format_plural(rows or train.global_batch_size, 'example')}, padded to the longest"
        say(f"rows of {together}: {padding.fill:.1%} of the positions are tokens")
    batch = format_plural(train.global_batch_size, train.batch_unit.removesuffix("s"))
    how = "packs" if data.pack_length is not None else f"with data.pack_length {pack}: packs"
    rows_of_batch = f"a batch of {batch} is {packing.rows:.1f} of them, {packing.fill:.1%} full"
    say(f"{how} of {format_plural(pack, 'token')}: {rows_of_batch}")


def _report(checks: list[Checked], max_length: int | None) -> None:
    for source_check in checks:
        for line in source_check.lines(max_length):
            say(line)
    wrong = sum(source_check.wrong for source_check in checks)
    problems = [problem for source_check in checks for problem in source_check.problems]
    if wrong:
        more = f"\nand {wrong - len(problems):,} more" if wrong > len(problems) else ""
        raise RequestError(f"{wrong:,} row{'s are' if wrong != 1 else ' is'} invalid:\n" + "\n".join(problems) + more)
    if not any(source_check.examples for source_check in checks):
        raise RequestError("no row has a token to train on")
    say("ok")


def _show_statistics(statistics: Statistics, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    for source in statistics.sources:
        rows_written = source.rows - source.duplicates - source.wrong - sum(source.left_out.values())
        names = ", ".join(f"{theirs} as {ours}" for theirs, ours in source.renamed.items())
        read = f" (read {names})" if names else ""
        say(f"{source.source}: {format_plural(source.rows, 'row')} of {source.layout}{read}: {rows_written:,} kept")
        for note in source.notes:
            say(f"  {note}")
        if source.kept:
            say(f"  columns kept: {', '.join(source.kept)}")
        if source.not_kept:
            columns = ", ".join(
                name if count == source.rows else f"{name} ({format_plural(count, 'row')})"
                for name, count in source.not_kept.most_common()
            )
            say(f"  columns not kept: {columns}; --keep COLUMN writes one too, --map COLUMN=FIELD uses it")
        if source.duplicates:
            differ = f"; a column not kept differs in {source.differing:,}" if source.differing else ""
            say(f"  {format_clause(source.duplicates, 'row', 'repeat an earlier one')}, left out{differ}")
        if source.wrong:
            say(f"  {format_clause(source.wrong, 'row', 'are invalid')} and left out, such as")
        for problem in source.first_wrong:
            say(f"    {problem}")
        for why, count in source.left_out.items():
            say(f"  {format_plural(count, 'row')} left out: {why}")
        for remark, count in source.remarks.items():
            say(f"  {format_clause(count, 'row', remark)}")
    table = Table("file", "rows", "turns", "mean characters", "longest", "roles", box=None, pad_edge=False)
    for name, side in statistics.sides.items():
        roles = ", ".join(f"{count:,} {escape_controls(role)}" for role, count in side.roles.most_common())
        mean = f"{side.characters / max(1, side.rows):,.0f}"
        table.add_row(f"{name}.jsonl", f"{side.rows:,}", f"{side.turns:,}", mean, f"{side.longest:,}", roles or "-")
    Console(highlight=False, markup=False, emoji=False, soft_wrap=True).print(table)
    say(f"written to {out}")


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Text, JSON, JSONL, CSV or Parquet files, a directory, a Hub dataset, or openwebtext, wikitext, "
        "simple-wikipedia, tinystories, orca-math, stdlib.",
    ),
]
_SECONDS = 1.0


@app.command()
def tokenize(
    sources: Sources,
    tokenizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="A tokenizer's id or directory, bytes, characters:FILE or bpe:SIZE:SOURCE."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", help="Output directory; an unfinished one is continued.")],
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes. Default: one per core.")] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens per shard.")] = 100_000_000,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N documents of each source.")] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="Read every file of a directory as one document, whatever its type.")
    ] = False,
) -> None:
    """Convert a corpus to memory-mapped token shards, for data.train of a pretraining recipe.

    Runs on all cores in constant memory. If stopped or killed, the same command continues, without losing or repeating
    a document.
    """
    from trainwright.data.stream.windows import build_identity
    from trainwright.data.tokens.shard_writer import tokenize as write
    from trainwright.machine.detect import detect
    from trainwright.models.load import load_tokenizer
    from trainwright.recipe.sections.data import SourceSection
    from trainwright.recipe.sections.model import ModelSection

    loaded_tokenizer = load_tokenizer(ModelSection(config={"model_type": "gpt"}, tokenizer=tokenizer))
    kind = "documents" if documents else "auto"
    sections = [(SourceSection(source=source, format=kind, limit=limit), "data tokenize") for source in sources]
    started_at = time.monotonic()
    try:
        with _report_write_errors(out), _show_progress() as report:
            about = write(
                sections,
                loaded_tokenizer,
                out,
                identity=build_identity(sections),
                processes=processes or detect().cpu_cores,
                shard_tokens=shard_tokens,
                report=report,
            )
    except KeyboardInterrupt:
        raise Stopped(f"stopped; run the same command again to continue {out}") from None
    seconds = time.monotonic() - started_at
    shards = format_plural(len(about["shards"]), "shard")
    say(
        f"{out}: {format_plural(about['tokens'], 'token')} ({about['dtype']}) of "
        f"{format_plural(about['documents'], 'document')}, {about['characters'] / max(1, about['tokens']):.2f} "
        f"characters per token, {shards}, in {seconds:.1f} s"
    )
    for note in about.get("notes", ()):
        say(note)


@app.command()
def train_tokenizer(
    sources: Sources,
    out: Annotated[Path, typer.Option(metavar="DIRECTORY", help="Output directory; must not exist.")],
    vocab_size: Annotated[int, typer.Option(min=257, help="Vocabulary size, including the end-of-text token.")] = 32768,
    characters: Annotated[
        bool, typer.Option("--characters", help="Use one token per character of the text instead of BPE.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N documents of each source.")] = None,
) -> None:
    """Train a byte-level BPE tokenizer on your own text."""
    from trainwright.models.files import replace_directory
    from trainwright.models.tokenization import make_tokenizer
    from trainwright.recipe.sections.data import SourceSection

    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new directory")
    sections = [(SourceSection(source=source, limit=limit), "data train-tokenizer") for source in sources]
    new_tokenizer = make_tokenizer(sections, None if characters else vocab_size)
    with _report_write_errors(out), replace_directory(out) as scratch:
        new_tokenizer.save_pretrained(scratch)
    if not characters and len(new_tokenizer) < vocab_size:
        say(f"note: the text yields only {format_plural(len(new_tokenizer), 'token')}")
    say(f"{out}: {format_plural(len(new_tokenizer), 'token')}; use it as model.tokenizer")


@contextmanager
def _report_write_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"--out: {out} cannot be written: {error.strerror or error}; free space there, or choose another directory"
        ) from error


@contextmanager
def _show_progress() -> Iterator[_LineProgress]:
    """Show the progress; on a terminal the line disappears at the end."""
    try:
        yield _LineProgress()
    finally:
        if is_terminal(sys.stderr):
            draw("", sys.stderr)


class _LineProgress:
    """Progress on one line of a terminal, and occasional lines elsewhere."""

    def __init__(self) -> None:
        self._started_at = self._shown = time.monotonic()
        self._first: int | None = None

    def __call__(self, characters: int, tokens: int, documents: int) -> None:
        self._first = characters if self._first is None else self._first
        now, terminal = time.monotonic(), is_terminal(sys.stderr)
        if now - self._shown < (_SECONDS if terminal else 10 * _SECONDS):
            return
        self._shown = now
        speed = (characters - self._first) / (now - self._started_at) / 1e6
        line = f"{documents:,} documents, {tokens:,} tokens, {characters / 1e6:,.1f} MB of text, {speed:.1f} MB/s"
        if terminal:
            draw(line, sys.stderr)
        else:
            say(line, file=sys.stderr)


def collect(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe with task algorithm_distillation.")],
    overrides: Overrides = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes, one core each. Default: one per core.")
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Plot the algorithm's learning curve to this file.")
    ] = None,
) -> None:
    """Collect the histories that a recipe trains on.

    If stopped, the same command continues: finished tasks are kept. Ends with 75 when stopped by a signal.
    """
    from trainwright.api.agents import collect_and_show

    say(str(collect_and_show(recipe, tuple(overrides or ()), num_processes, chart)))


@app.command()
def alternates(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file, as JSON lines.")],
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="Alternates for each row.")] = 5,
    temperature: Annotated[float, typer.Option(min=1e-3, help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an alternate, in tokens.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Answers to generate per batch.")] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes. Default: one per GPU, or one.")
    ] = None,
) -> None:
    """Let an unlearning recipe's model write other plausible answers to its rows to forget.

    Every row of data.forget is written with its answers as alternate, for unlearn.objective=altpo. If stopped, the same
    command continues. Ends with 0: done, 2: wrong request, 3: this machine cannot do it, 4: failed, 75: stopped by a
    signal.
    """
    import trainwright as tw

    file = tw.alternates(
        recipe,
        *(overrides or []),
        out=out,
        count=count,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        num_processes=num_processes,
        progress=True,
    )
    say(f"{file}; train with unlearn.objective=altpo data.forget={file}")
