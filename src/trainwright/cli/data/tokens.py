"""``trainwright data tokenize`` and ``data train-tokenizer``: convert text to the input of pretraining."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import MachineError, RequestError
from trainwright.text import draw, is_terminal, plural, say

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="Text, JSON, JSONL, CSV or Parquet files, a directory, a Hub dataset, or openwebtext, wikitext, "
        "simple-wikipedia, tinystories, orca-math, stdlib.",
    ),
]
_SECONDS = 1.0


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
    from trainwright.data.stream.pretraining import identity_of
    from trainwright.data.tokens.shard_writer import tokenize as write
    from trainwright.errors import Stopped
    from trainwright.machine.detect import detect
    from trainwright.models.load import load_tokenizer
    from trainwright.recipe.sections.data import SourceSection
    from trainwright.recipe.sections.model import ModelSection

    chosen = load_tokenizer(ModelSection(config={"model_type": "gpt"}, tokenizer=tokenizer))
    kind = "documents" if documents else "auto"
    named = [(SourceSection(source=source, format=kind, limit=limit), "data tokenize") for source in sources]
    begun = time.monotonic()
    try:
        with _written(out), _shown() as report:
            about = write(
                named,
                chosen,
                out,
                identity=identity_of(named),
                processes=processes or detect().cpu_cores,
                shard_tokens=shard_tokens,
                report=report,
            )
    except KeyboardInterrupt:
        raise Stopped(f"stopped; run the same command again to continue {out}") from None
    seconds = time.monotonic() - begun
    shards = plural(len(about["shards"]), "shard")
    say(
        f"{out}: {plural(about['tokens'], 'token')} ({about['dtype']}) of {plural(about['documents'], 'document')}, "
        f"{about['characters'] / max(1, about['tokens']):.2f} characters per token, {shards}, "
        f"in {seconds:.1f} s"
    )
    for note in about.get("notes", ()):
        say(note)


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
    from trainwright.models.files import replacing
    from trainwright.models.tokenization import make_tokenizer
    from trainwright.recipe.sections.data import SourceSection

    if out.exists():
        raise RequestError(f"--out: {out} already exists; choose a new directory")
    named = [(SourceSection(source=source, limit=limit), "data train-tokenizer") for source in sources]
    made = make_tokenizer(named, None if characters else vocab_size)
    with _written(out), replacing(out) as scratch:
        made.save_pretrained(scratch)
    if not characters and len(made) < vocab_size:
        say(f"note: the text yields only {plural(len(made), 'token')}")
    say(f"{out}: {plural(len(made), 'token')}; use it as model.tokenizer")


@contextmanager
def _written(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"--out: {out} cannot be written: {error.strerror or error}; free space there, or choose another directory"
        ) from error


@contextmanager
def _shown() -> Iterator[_Shown]:
    """Show the progress; on a terminal the line disappears at the end."""
    try:
        yield _Shown()
    finally:
        if is_terminal(sys.stderr):
            draw("", sys.stderr)


class _Shown:
    """Progress on one line of a terminal, and occasional lines elsewhere."""

    def __init__(self) -> None:
        self._begun = self._shown = time.monotonic()
        self._first: int | None = None

    def __call__(self, characters: int, tokens: int, documents: int) -> None:
        self._first = characters if self._first is None else self._first
        now, terminal = time.monotonic(), is_terminal(sys.stderr)
        if now - self._shown < (_SECONDS if terminal else 10 * _SECONDS):
            return
        self._shown = now
        speed = (characters - self._first) / (now - self._begun) / 1e6
        line = f"{documents:,} documents, {tokens:,} tokens, {characters / 1e6:,.1f} MB of text, {speed:.1f} MB/s"
        if terminal:
            draw(line, sys.stderr)
        else:
            say(line, file=sys.stderr)
