"""Generation: a model's answers to prompts, to a file of them, or interactively."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trainwright.api import separate_process
from trainwright.errors import RequestError
from trainwright.machine.accelerators import refuse_unusable
from trainwright.machine.detect import detect
from trainwright.recipe.arguments import to_request
from trainwright.recipe.sections.fields import Count, NotNegative, Positive
from trainwright.run.process import limit_product_caches, prepare_environment
from trainwright.utils.activity import Activity, begin_activity
from trainwright.utils.text import say

if TYPE_CHECKING:
    from trainwright.inference.generation import Sampling
    from trainwright.machine.machine import Machine
    from trainwright.parallel.world import World

FIELD = "generated"  # the field of a row for its answer
_ANSWERS = "answers.json"


def generate(
    model: str | PathLike[str],
    prompts: str | Sequence[str | Sequence[Mapping[str, Any]]] | None = None,
    *,
    file: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    system: str | None = None,
    plain: bool = False,
    adapter: str | PathLike[str] | None = None,
    checkpoint: str | int | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    dtype: str = "auto",
    batch_size: int | None = None,
    num_processes: int | None = None,
    progress: bool = False,
    trust_code: bool = False,
) -> list[str]:
    """Generate a model's answers; what ``trainwright generate`` does.

    Args:
        model: a `Run`, one of its checkpoints, an adapter, a model directory or a Hub id.
        prompts: a text, or a list of texts and conversations (lists of ``{"role": …, "content": …}``).
        file: answer this instead: every line of a ``.txt`` file, or every row of ``.jsonl``, ``.json`` or ``.csv``.
        out: with ``file``: the output file of the rows, each with its answer as ``generated``; must be new.
        system: the system turn of every conversation.
        plain: continue texts, as always with a model without a chat template.
        adapter: an adapter to apply to the model.
        checkpoint: of a run: ``"final"``, ``"best"``, ``"newest"`` or a step. Default: the first that exists.
        max_new_tokens: the maximum length of an answer, in tokens.
        temperature: 0: always the most probable token.
        top_p: sample from the most probable tokens with this total probability.
        top_k: sample from this number of most probable tokens.
        seed: determines the sampling together with a prompt's number. Default: 0.
        dtype: ``fp32``, ``bf16`` or ``fp16``. auto: bf16 on GPUs that support it.
        batch_size: the number of prompts answered at once.
        num_processes: for a list or a file. Default: one per GPU, or one.
        progress: show how many prompts are answered.
        trust_code: import the code that the recipe of a run names as ``module:Name``; otherwise none of it runs.

    Returns:
        The answers, in the order of the prompts or rows; one for a single text.

    Raises:
        RequestError: the model, a prompt or the arguments are invalid.
        MachineError: the model does not fit this machine.

    Examples:
        >>> import trainwright as tw
        >>> answers = tw.generate("runs/tiny", ["What is a list?", "What is a tuple?"], max_new_tokens=4)
        >>> len(answers)
        2
    """
    options = {**locals()}
    del options["prompts"]
    request = to_request(GenerationRequest, options)
    if prompts is None and file is None:
        raise RequestError("generate: pass prompts, or a file of them")
    if prompts is not None and file is not None:
        raise RequestError("--prompt and --file: pass only one of them")
    if isinstance(prompts, str):
        return [separate_process.run_in_process(answer, request, prompts, progress=progress, trust_code=trust_code)]
    if prompts is None:
        return separate_process.run_in_process(answer_file, request, progress=progress, trust_code=trust_code)
    if not (prompt_list := list(prompts)):
        raise RequestError("generate: prompts has none; pass at least one")
    return separate_process.run_in_process(_answer_list, request, prompt_list, progress=progress, trust_code=trust_code)


@dataclass(frozen=True)
class GenerationRequest:
    """What to answer and how, with the options of ``trainwright generate``; None: not given."""

    model: str
    file: str | None = None
    out: str | None = None
    system: str | None = None
    plain: bool = False
    adapter: str | None = None
    checkpoint: str | None = None
    max_new_tokens: Count = 512
    temperature: NotNegative = 0.0
    top_p: Annotated[Positive, Field(le=1)] = 1.0
    top_k: Count | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    dtype: str = "auto"
    batch_size: Count | None = None
    num_processes: Count | None = None

    def sampling(self) -> Sampling:
        """Return the sampling settings."""
        from trainwright.inference.generation import Sampling

        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, self.seed or 0)


def answer(request: GenerationRequest, prompt: str | None = None) -> str:
    """Answer one prompt, or with None prompts typed by the user, in this process; return the last answer."""
    machine = _check_request(request)
    prepare_environment(machine.cpu_cores, 1)
    with Activity(sys.stderr, "importing torch and transformers"):
        import torch

        from trainwright.inference.chat import HELP, ChatSession, chat, read_lines
        from trainwright.inference.finding import find_model
        from trainwright.inference.loading import DTYPES, check_fits, load
        from trainwright.parallel.openmp import limit_spinning

        limit_product_caches()
        limit_spinning()

        begin_activity("reading the model")
        dtype = DTYPES[separate_process.choose_dtype(request.dtype, machine)]
        model = find_model(request.model, request.adapter, request.checkpoint)
        check_fits(model, dtype, machine, 1)
        loaded_model = load(model, dtype, torch.device(machine.device))
    plain = _is_plain(request, loaded_model.chat)
    session = ChatSession(loaded_model, request.sampling(), _say, plain=plain, system=request.system)
    if prompt is not None:
        text = session.answer(prompt if plain else [{"role": "user", "content": prompt}]).text
        _say("\n")
        return text if plain else text.strip()
    if sys.stdin.isatty():
        hint = "it continues what you type" if plain else HELP
        say(f"{model.origin}: {hint}", file=sys.stderr)
    chat(session, read_lines("> "), _say)
    return ""


def answer_file(request: GenerationRequest) -> list[str]:
    """Answer the rows of a file; return the answers, which are written to ``request.out`` too. Changes this process."""
    machine = _check_request(request)
    processes = separate_process.choose_process_count(machine, request.num_processes)
    request = replace(request, dtype=separate_process.choose_dtype(request.dtype, machine))
    with separate_process.create_work_directory("generate") as work:
        separate_process.run_in_processes(
            functools.partial(_prepare, request, machine, processes, work),
            functools.partial(_answer, request, work),
            modules=[
                "trainwright.inference.answering",
                "trainwright.inference.loading",
                "trainwright.inference.prompts",
            ],
            machine=machine,
            processes=processes,
            work=work,
        )
        answers: list[str] = json.loads((work / _ANSWERS).read_text(encoding="utf-8"))
    return answers


def _answer_list(request: GenerationRequest, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[str]:
    """Answer prompts by writing them to a file first."""
    rows = [{"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)} for prompt in prompts]
    with tempfile.TemporaryDirectory(prefix="trainwright-prompts-") as scratch:
        file = Path(scratch, "prompts.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return answer_file(replace(request, file=str(file), out=str(Path(scratch, "answers.jsonl"))))


def _check_request(request: GenerationRequest) -> Machine:
    """Return the machine to use, after checking the options. Raises RequestError, MachineError."""
    from trainwright.models.resolve_model import check_exists
    from trainwright.run.group.environment import refuse_worker

    refuse_worker("generate")
    _check(request.file, request.out, request.num_processes, request.batch_size)
    has_sampling_options = request.top_p < 1 or request.top_k is not None or request.seed is not None
    if request.temperature == 0 and has_sampling_options:
        raise RequestError(
            "--top-p, --top-k and --seed: have no effect at temperature 0; set --temperature, for instance to 0.7"
        )
    check_exists(request.model, "MODEL")
    machine = detect()
    refuse_unusable(machine)
    return machine


def _check(file: str | None, out: str | None, num_processes: int | None, batch_size: int | None) -> None:
    if (file is None) != (out is None):
        raise RequestError("--file and --out must be used together: the prompts, and the file for the answers")
    if file is None and (num_processes is not None or batch_size is not None):
        raise RequestError("--num-processes and --batch-size are for --file; one prompt is answered by one process")
    if file is not None:
        from trainwright.data.sources.reading import check_source

        check_source(file, "--file")
    if out is not None:
        from trainwright.inference.answering import check_answer_file

        check_answer_file(Path(out))


def _is_plain(request: GenerationRequest, chat: bool) -> bool:
    """Return whether texts are continued; ``chat``: the model was trained for conversations."""
    plain = request.plain or not chat
    if plain and request.system is not None:
        raise RequestError("--system: has no effect for a model that continues texts; remove it")
    return plain


def _say(text: str) -> None:
    say(text, end="")


def _prepare(request: GenerationRequest, machine: Machine, processes: int, work: Path) -> None:
    """Find the model, read the rows and tokenize them, once."""
    from trainwright.inference.finding import find_model
    from trainwright.inference.loading import DTYPES, check_fits
    from trainwright.inference.prompts import PromptEncoder, read_questions
    from trainwright.models.load import load_config, load_tokenizer

    model = find_model(request.model, request.adapter, request.checkpoint)
    check_fits(model, DTYPES[request.dtype], machine, processes)
    model.save(work / "found.json")
    questions = read_questions(str(request.file), "--file")
    for note in questions.notes:
        say(note, file=sys.stderr)
    tokenizer = load_tokenizer(model.section)
    plain = _is_plain(request, tokenizer.chat_template is not None)
    encode = PromptEncoder(tokenizer, plain=plain, system=request.system)
    positions = getattr(load_config(model.section, tokenizer).get_text_config(), "max_position_embeddings", None)
    prompts = []
    for row, question, location in zip(questions.rows, questions.questions, questions.locations, strict=True):
        try:
            prompts.append(encode(question))
            if positions is not None and len(prompts[-1]) >= positions:
                raise RequestError(f"{len(prompts[-1]):,} tokens, but the model has only {positions:,} positions")
            if FIELD in row:
                raise RequestError(f"the row already has a field {FIELD}, which is used for the answer")
        except RequestError as error:
            raise RequestError(f"--file: {location}: {error}") from None
    about = {"rows": questions.rows, "prompts": prompts, "plain": plain}
    (work / "questions.json").write_text(json.dumps(about, default=str), encoding="utf-8")


def _answer(request: GenerationRequest, work: Path, world: World) -> None:
    """Answer this rank's share of the rows; rank 0 writes all answers, or nothing."""
    from trainwright.inference.answering import AnswerSettings, answer_all, write_answers
    from trainwright.inference.finding import UnloadedModel
    from trainwright.inference.generation import stop_of
    from trainwright.inference.loading import DTYPES, load

    about = json.loads((work / "questions.json").read_text(encoding="utf-8"))
    loaded_model = load(UnloadedModel.open(work / "found.json"), DTYPES[request.dtype], world.device)
    stop = stop_of(loaded_model.lm.model, loaded_model.tokenizer, chat=not about["plain"])
    progress = separate_process.show_progress(world, "answers", len(about["prompts"]))
    settings = AnswerSettings(request.sampling(), stop, request.batch_size)
    with loaded_model.lm.open_for_generation() as model:
        answers = answer_all(model, loaded_model.tokenizer, about["prompts"], settings, world, progress)
    if world.is_main:
        texts = [answer.text if about["plain"] else answer.text.strip() for answer in answers]
        assert request.out is not None
        write_answers(Path(request.out), [{**row, FIELD: text} for row, text in zip(about["rows"], texts, strict=True)])
        (work / _ANSWERS).write_text(json.dumps(texts), encoding="utf-8")
