"""``trainwright generate``: ask a model, once, at a terminal, or a file of questions."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.activity import Activity, doing
from trainwright.errors import RequestError
from trainwright.text import say

if TYPE_CHECKING:
    from trainwright.inference.sampling import Sampling
    from trainwright.machine.detect import Machine
    from trainwright.parallel.world import World

_FIELD = "generated"


@dataclass(frozen=True)
class _Asked:
    """What a user wants to have answered, and how."""

    model: str
    adapter: str | None
    checkpoint: str | None
    dtype: str
    plain: bool
    system: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    seed: int
    batch_size: int | None
    file: str | None
    out: Path | None


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's directory, one of its checkpoints, an adapter, a model directory or a hub id.",
        ),
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this, and end.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer every line of a .txt file, or every row of .jsonl, .json or .csv, with or without its answer.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Where the rows go, each with its answer as {_FIELD!r}: .jsonl, .json or .csv; must be new.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system turn of every conversation.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue texts, as a model without a chat template does anyway.")
    ] = False,
    adapter: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="An adapter to put on MODEL.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="WHICH", help="Of a run: final, best, newest or a step. Default: the first there is."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Draw from the likeliest so much.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from so many of the likeliest.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="With a row's number it decides what is drawn for it. Default: 0.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16. auto: bf16 on GPUs that have it.")] = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows that are answered at once.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="For --file. Default: one a GPU, or one.")] = None,
) -> None:
    """Have a model answer: --prompt once, --file a file, and without either whoever types.

    Ends with 0: done, 2: wrong request, 3: unfit machine, 4: failed, 75: stopped by a signal.
    """
    from trainwright.api.workers import dtype_name, process_count
    from trainwright.launch.environment import refuse_worker
    from trainwright.machine.accelerators import refuse_unusable
    from trainwright.machine.detect import detect

    refuse_worker("generate")
    _check(prompt, file, out, num_processes, batch_size)
    if temperature == 0 and (top_p < 1 or top_k is not None or seed is not None):
        raise RequestError(
            "--top-p, --top-k and --seed: nothing is drawn at temperature 0; set --temperature, for instance to 0.7"
        )
    machine = detect()
    refuse_unusable(machine)
    asked = _Asked(
        model=model,
        adapter=None if adapter is None else str(adapter),
        checkpoint=checkpoint,
        dtype=dtype_name(dtype, machine),
        plain=plain,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed or 0,
        batch_size=batch_size,
        file=file,
        out=out,
    )
    if file is None:
        _talk(asked, machine, prompt)
    else:
        _answer_file(asked, machine, process_count(machine, num_processes))


def _check(
    prompt: str | None, file: str | None, out: Path | None, num_processes: int | None, batch_size: int | None
) -> None:
    if prompt is not None and file is not None:
        raise RequestError("--prompt and --file: give one of the two")
    if (file is None) != (out is None):
        raise RequestError("--file and --out belong together: what is answered, and where the answers go")
    if file is None and (num_processes is not None or batch_size is not None):
        raise RequestError("--num-processes and --batch-size are for --file; one question is answered by one process")
    if file is not None:
        from trainwright.data.sources import check_source

        check_source(file, "--file")
    if out is not None:
        from trainwright.inference.answer_file import check_answer_file

        check_answer_file(out)


def _talk(asked: _Asked, machine: Machine, prompt: str | None) -> None:
    """Answer one prompt, or whoever types, in this process."""
    from trainwright.launch.process import limit_threads

    limit_threads(machine.cpu_cores, 1)
    with Activity(sys.stderr, "importing torch and transformers"):
        import torch

        from trainwright.inference.chat import HELP, Speaker, chat, typed
        from trainwright.inference.finding import find_model
        from trainwright.inference.loading import DTYPES, check_fits, load

        doing("reading the model")
        found = find_model(asked.model, asked.adapter, asked.checkpoint)
        check_fits(found, DTYPES[asked.dtype], machine, 1)
        loaded = load(found, DTYPES[asked.dtype], torch.device(machine.device))
    plain = _is_plain(asked, loaded.chat)
    speaker = Speaker(loaded, _sampling(asked), _say, plain=plain, system=asked.system)
    if prompt is not None:
        speaker.answer(prompt if plain else [{"role": "user", "content": prompt}])
        _say("\n")
        return
    interactive = sys.stdin.isatty()
    if interactive:
        what = "it continues what you type" if plain else HELP
        say(f"{found.origin}: {what}", file=sys.stderr)
    chat(speaker, typed("> "), _say)


def _is_plain(asked: _Asked, chat: bool) -> bool:
    """Whether texts are continued; ``chat``: the model was made for conversations."""
    plain = asked.plain or not chat
    if plain and asked.system is not None:
        raise RequestError("--system: the model continues texts, which have no system turn")
    return plain


def _say(text: str) -> None:
    say(text, end="")


def _answer_file(asked: _Asked, machine: Machine, processes: int) -> None:
    from trainwright.api.workers import in_processes, work_directory

    assert asked.out is not None
    with work_directory("generate") as work:
        in_processes(
            functools.partial(_prepare, asked, machine, processes, work),
            functools.partial(_answer, asked, work),
            modules=[
                "trainwright.inference.answering",
                "trainwright.inference.loading",
                "trainwright.inference.asking",
            ],
            machine=machine,
            processes=processes,
            work=work,
        )
    say(str(asked.out))


def _prepare(asked: _Asked, machine: Machine, processes: int, work: Path) -> None:
    """Find the model, read the rows and turn them into tokens, once."""
    from trainwright.inference.asking import Asker, read_questions
    from trainwright.inference.finding import find_model
    from trainwright.inference.loading import DTYPES, check_fits
    from trainwright.models.load import load_config, load_tokenizer

    found = find_model(asked.model, asked.adapter, asked.checkpoint)
    check_fits(found, DTYPES[asked.dtype], machine, processes)
    found.save(work / "found.json")
    questions = read_questions(str(asked.file), "--file")
    for note in questions.notes:
        say(note, file=sys.stderr)
    tokenizer = load_tokenizer(found.section)
    plain = _is_plain(asked, tokenizer.chat_template is not None)
    asker = Asker(tokenizer, plain=plain, system=asked.system)
    positions = getattr(load_config(found.section, tokenizer).get_text_config(), "max_position_embeddings", None)
    prompts = []
    for row, question, place in zip(questions.rows, questions.asked, questions.places, strict=True):
        try:
            prompts.append(asker(question))
            if positions is not None and len(prompts[-1]) >= positions:
                raise RequestError(f"{len(prompts[-1]):,} tokens, and the model has only {positions:,} positions")
            if _FIELD in row:
                raise RequestError(f"it has a field {_FIELD} already, where the answer should go")
        except RequestError as error:
            raise RequestError(f"--file: {place}: {error}") from None
    about = {"rows": questions.rows, "prompts": prompts, "plain": plain}
    (work / "questions.json").write_text(json.dumps(about, default=str), encoding="utf-8")


def _answer(asked: _Asked, work: Path, world: World) -> None:
    """This rank's share of the answers; rank 0 writes all of them, or nothing."""
    from trainwright.api.workers import counted
    from trainwright.inference.answer_file import write_answers
    from trainwright.inference.answering import answer_all
    from trainwright.inference.finding import Found
    from trainwright.inference.loading import DTYPES, load
    from trainwright.inference.stopping import stop_of

    about = json.loads((work / "questions.json").read_text(encoding="utf-8"))
    loaded = load(Found.open(work / "found.json"), DTYPES[asked.dtype], world.device)
    stop = stop_of(loaded.lm.model, loaded.tokenizer, chat=not about["plain"])
    done = counted(world, "answers", len(about["prompts"]))
    with loaded.lm.for_generation() as model:
        answers = answer_all(
            model,
            loaded.tokenizer,
            about["prompts"],
            _sampling(asked),
            stop,
            world,
            rows=asked.batch_size,
            done=done,
        )
    if world.is_main:
        texts = [answer.text if about["plain"] else answer.text.strip() for answer in answers]
        assert asked.out is not None
        write_answers(asked.out, [{**row, _FIELD: text} for row, text in zip(about["rows"], texts, strict=True)])


def _sampling(asked: _Asked) -> Sampling:
    from trainwright.inference.sampling import Sampling

    return Sampling(asked.max_new_tokens, asked.temperature, asked.top_p, asked.top_k, asked.seed)
