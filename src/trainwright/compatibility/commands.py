"""``trainwright launch`` and ``setup``: start a script; write an Accelerate file for this machine, or show one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from trainwright.cli.command import command
from trainwright.cli.train import HostFile, Hosts, NodeRank, Nodes, Rendezvous, RendezvousTimeout
from trainwright.errors import MachineError, RequestError
from trainwright.recipe.registries import HOST_LAUNCHERS
from trainwright.utils.paths import expand_user_path
from trainwright.utils.text import quote_word, say

if TYPE_CHECKING:
    from trainwright.compatibility.accelerate.writing import Answers
    from trainwright.machine.machine import Machine


# Options after the script are the script's: the first word that is not an option of ours ends our own.
@command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a module with --module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Passed to the script unchanged.")
    ] = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of processes on all nodes. Default: from the Accelerate file, otherwise one per GPU."
        ),
    ] = None,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    rendezvous_timeout: RendezvousTimeout = None,
    hosts: Hosts = None,
    hostfile: HostFile = None,
    config_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An Accelerate file. Default: Accelerate's default file, if it exists."),
    ] = None,
    mixed_precision: Annotated[
        str | None, typer.Option(metavar="TYPE", help="no, bf16, fp16 or fp8, for Accelerate, in place of the file's.")
    ] = None,
    dynamo_backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Such as inductor, for Accelerate, in place of the file's.")
    ] = None,
    gpu_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="GPUs of this machine to use, such as 0,1, or all.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="Run SCRIPT as a module, as in python -m.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there are GPUs.")] = False,
    logs: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Directory for one log per process. Default: a new one under runs/."),
    ] = None,
) -> None:
    """Start a script of your own, written for Accelerate or torch.distributed, in several processes.

    Options of launch come before SCRIPT. Ends with the script's own exit code if it sets one.
    """
    from trainwright.compatibility.script_run import NodeOptions, ScriptOptions, launch_script

    node_options = NodeOptions(nodes, node_rank, rendezvous, rendezvous_timeout)
    options = {"mixed_precision": mixed_precision, "dynamo_backend": dynamo_backend, "gpu_ids": gpu_ids}
    settings = {key: value for key, value in options.items() if value is not None}
    if hosts is not None or hostfile is not None:
        words = [*(["--cpu"] if cpu else []), *([f"--config-file={config_file}"] if config_file else [])]
        words += [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
        script_command = (script, module, tuple(arguments or ()))
        raise typer.Exit(
            HOST_LAUNCHERS.get("ssh script")(script_command, words, num_processes, logs, node_options, hosts, hostfile)
        )
    script_options = ScriptOptions(config_file, num_processes, cpu, node_options, settings)
    raise typer.Exit(launch_script(script, tuple(arguments or ()), script_options, module=module, logs=logs))


T = TypeVar("T")

_PORT = 29500
_SUBMIT = "a job plans and distributes by itself: trainwright submit RECIPE --to {}"
# By answer to the question of the place: what to do there.
_ELSEWHERE = {
    **{name: _SUBMIT.format(name) for name in ("slurm", "kubernetes", "skypilot", "ray")},
    "cloud": "SkyPilot rents machines of AWS, Google Cloud, Azure and others: trainwright submit RECIPE --to skypilot",
    "sagemaker": "SageMaker is not supported; on other machines of AWS: trainwright submit RECIPE --to skypilot",
}


def setup(
    config_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write or show. Default: Accelerate's default path.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show the file and its effect on this machine.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Accept all suggested answers; an existing file is kept as FILE.bak.")
    ] = False,
) -> None:
    """Write an Accelerate file for this machine, with suggested answers; replaces `accelerate config`.

    The file is for `accelerate launch`, `trainwright train --accelerate-config` and `trainwright launch`.
    """
    from trainwright.compatibility.accelerate.reading import locate_default_file

    path = config_file or locate_default_file()
    if config_file is None and path.parts[0] == "~":
        raise RequestError("this user has no home directory; set the file's path with --config-file")
    if show and yes:
        raise RequestError("--yes and --show: pass only one of them")
    if show:
        _show(path, is_default=config_file is None)
        return
    _write(path, is_default=config_file is None, yes=yes)


def _show(path: Path, is_default: bool) -> None:
    import shutil

    from trainwright.compatibility.accelerate.machine import show
    from trainwright.compatibility.accelerate.reading import read
    from trainwright.compatibility.accelerate.translation import interpret
    from trainwright.machine.detect import detect

    if is_default and not path.is_file():
        raise RequestError(f"{path}: no such Accelerate file; write one with `trainwright setup`")
    source = read(path)
    say(show(source, interpret(source), detect(), shutil.get_terminal_size((100, 24)).columns))


def _write(path: Path, is_default: bool, yes: bool) -> None:
    from trainwright.compatibility.accelerate.writing import build_values, suggest_answers, write
    from trainwright.machine.detect import detect

    machine = detect()
    answers = suggest_answers(machine)
    say(f"This machine: {machine.describe()}")
    replacing = yes
    if not yes:
        say("Press Enter to accept the answer in brackets.\n")
        if path.exists():
            replacing = _ask(
                f"{path} already exists; replace it?", "no", _parse_yes_or_no, "the old one is kept as .bak"
            )
            if not replacing:
                say(
                    f"nothing written; `trainwright setup --show --config-file {quote_word(path)}` shows the existing "
                    "file"
                )
                return
        new_answers = _ask_questions(answers, machine)
        if new_answers is None:
            return
        answers = new_answers
    values = build_values(answers)
    backup = write(path, values, replace=replacing)
    if backup is not None:
        say(f"the previous file is now {backup}")
    _say_how_to_use(path, answers, machine, is_default)


def _ask_questions(answers: Answers, machine: Machine) -> Answers | None:
    """Return the answers to all questions; None if the training runs where no file is needed."""
    parse = _build_choice_parser(("here", *_ELSEWHERE))
    environment = _ask("where it runs", "here", parse, f"here, {', '.join(_ELSEWHERE)}")
    if environment != "here":
        say(f"nothing written: {_ELSEWHERE[environment]}")
        return None
    answers = _ask_devices(answers, machine)
    answers = _ask_machines(answers, machine)
    limit = _count_gpus(answers, machine) if answers.device == "gpu" else None
    why = "one for each GPU" if answers.device == "gpu" else "more than two on a CPU gain nothing"
    local_processes = _ask("processes on this machine", str(answers.processes), _build_count_parser(1, limit), why)
    answers = replace(answers, processes=local_processes * answers.machines)
    if answers.device == "gpu" or answers.processes > 1:
        answers = _ask_distribution(answers)
    compiled = _ask(
        "compile with torch's inductor", "no", _parse_yes_or_no, "dynamo: slower to start, faster steps on GPUs"
    )
    answers = replace(answers, compiled=compiled)
    if answers.deepspeed_file is not None:
        return answers
    why = "this machine supports bf16 in hardware" if machine.has_bf16 else "no hardware support for bf16"
    choices = ("no", "bf16", "fp16") if answers.device == "gpu" else ("no", "bf16")
    precision = _ask(
        "mixed precision", answers.precision, _build_choice_parser(choices), f"{', '.join(choices)}; {why}"
    )
    return replace(answers, precision=precision)


def _ask_devices(answers: Answers, machine: Machine) -> Answers:
    if not machine.gpus:
        return answers
    number = len(machine.gpus)
    if _ask("device: gpu or cpu", "gpu", _build_choice_parser(("gpu", "cpu")), f"{number} found here") == "cpu":
        return replace(answers, device="cpu", processes=min(2, machine.cpu_cores), precision="no")
    ids = _ask("GPUs of this machine", "all", _build_gpu_ids_parser(number), "all, or their numbers, such as 0,1")
    answers = replace(answers, gpu_ids=ids)
    return replace(answers, processes=_count_gpus(answers, machine))


def _count_gpus(answers: Answers, machine: Machine) -> int:
    return len(answers.gpu_ids.split(",")) if answers.gpu_ids else len(machine.gpus)


def _ask_machines(answers: Answers, machine: Machine) -> Answers:
    count = _ask("machines", "1", _build_count_parser(1), "that train together; each needs a file with its own number")
    if count == 1:
        return answers
    rank = _ask("number of this machine", "0", _build_count_parser(0, count - 1), "counted from 0")
    host = _ask("address of machine 0", machine.hostname, str, "a name or IP that all machines can reach")
    port = _ask(
        "port on machine 0", str(_PORT), _build_count_parser(1, 65535), "a free port, open between the machines"
    )
    return replace(answers, machines=count, machine_rank=rank, main_ip=host, main_port=port)


def _ask_distribution(answers: Answers) -> Answers:
    """Ask for the strategy, and for its options that its spec has."""
    from trainwright.compatibility.accelerate.writing import list_offered_strategies
    from trainwright.recipe.strategy_spec import look_up_strategy

    explanation = "; ".join(f"{name}: {spec.summary}" for name, spec in list_offered_strategies().items())
    answers = replace(answers, strategy=_ask("strategy", answers.strategy, _parse_strategy, explanation))
    spec = look_up_strategy(answers.strategy)
    if "deepspeed_config" in spec.keys:
        file = _ask(
            "a DeepSpeed file of your own", "none", _parse_json_file, "JSON; its stage and sizes are then followed"
        )
        if file is not None:
            return replace(answers, deepspeed_file=file)
    if answers.device == "gpu" and spec.offloads:
        offload = _ask("offload to the host's memory", "no", _parse_yes_or_no, "saves GPU memory, but is much slower")
        answers = replace(answers, offload=offload)
    if "deepspeed_config" in spec.keys:
        parse = _build_recipe_or_parser(_build_count_parser(1))
        steps = _ask("gradient accumulation steps", "recipe", parse, "recipe: what the recipe says")
        norm = _ask(
            "gradient clipping norm", "recipe", _build_recipe_or_parser(_parse_norm), "recipe: what the recipe says"
        )
        return replace(answers, accumulation=steps, max_grad_norm=norm)
    if "reshard_after_forward" in spec.keys:
        reshard = _ask("reshard after the forward pass", "yes", _parse_yes_or_no, "no: faster, and needs more memory")
        wrap = _ask(
            "classes to shard as units", "blocks", _parse_classes, "blocks: the model's own, found automatically"
        )
        recompute = _ask(
            "activation checkpointing", "no", _parse_yes_or_no, "saves memory; each block is computed twice"
        )
        answers = replace(answers, reshard=reshard, wrap=wrap, recompute=recompute)
    return answers


def _ask(question: str, filled_in: str, read: Callable[[str], T], explained: str) -> T:
    """Ask one question, with the reason for the suggested answer, until the answer is valid."""
    while True:
        say(f"{question} ({explained}) [{filled_in}]: ", end="")
        line = sys.stdin.readline()
        if not line:
            say()
            raise RequestError("setup: standard input ended; use --yes to accept the suggested answers")
        try:
            return read(line.strip() or filled_in)
        except ValueError as error:
            say(f"  {error}")


def _build_choice_parser(choices: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"one of {', '.join(choices)}, not {text!r}")
        return text.lower()

    return read


def _parse_strategy(text: str) -> str:
    from trainwright.compatibility.accelerate.writing import list_offered_strategies
    from trainwright.recipe.strategy_spec import check_library

    name = _build_choice_parser(tuple(list_offered_strategies()))(text)
    try:
        check_library(name)
    except MachineError as error:
        raise ValueError(str(error)) from None
    return name


def _build_count_parser(least: int, limit: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() else None
        if number is None or number < least or (limit is not None and number > limit):
            upper = "" if limit is None else f" to {limit}"
            raise ValueError(f"a whole number from {least}{upper}{' on' * (limit is None)}, not {text!r}")
        return number

    return read


def _build_gpu_ids_parser(number: int) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        ids = text.replace(" ", "").split(",")
        if ids == ["all"]:
            return None
        if len(set(ids)) != len(ids) or not set(ids) <= set(map(str, range(number))):
            raise ValueError(f"all, or different numbers from 0 to {number - 1} such as 0,1, not {text!r}")
        return ",".join(ids)

    return read


def _parse_json_file(text: str) -> str | None:
    if text == "none":
        return None
    from trainwright.compatibility.accelerate.reading import read_json

    try:
        read_json(expand_user_path(text))
    except RequestError as error:
        raise ValueError(str(error)) from None
    return text


def _build_recipe_or_parser(read: Callable[[str], T]) -> Callable[[str], T | None]:
    return lambda text: None if text == "recipe" else read(text)


def _parse_norm(text: str) -> float:
    try:
        norm = float(text)
    except ValueError:
        norm = 0.0
    if not 0 < norm < float("inf"):
        raise ValueError(f"a number above 0, such as 1.0, not {text!r}")
    return norm


def _parse_classes(text: str) -> str | None:
    return None if text == "blocks" else text.replace(" ", "")


def _parse_yes_or_no(text: str) -> bool:
    if text.lower() not in ("yes", "y", "no", "n"):
        raise ValueError(f"yes or no, not {text!r}")
    return text.lower() in ("yes", "y")


def _say_how_to_use(path: Path, answers: Answers, machine: Machine, is_default: bool) -> None:
    from trainwright.compatibility.accelerate.machine import is_run_as_ddp, list_commands, list_remarks
    from trainwright.compatibility.accelerate.reading import read
    from trainwright.compatibility.accelerate.translation import interpret

    option = "" if is_default else f" --config-file {quote_word(path)}"
    accelerate_option = "" if is_default else f" --config_file {quote_word(path)}"
    number = f"{answers.processes} process{'es' * (answers.processes > 1)}"
    source = read(path)
    translation = interpret(source)
    precision = translation.value("train.mixed_precision") or "of the recipe"
    say(f"wrote {path}: {number}, {translation.strategy}, mixed precision {precision}\n")
    for line in list_commands(translation, machine):
        of_scripts = line.endswith("SCRIPT")
        say(f"  {line}{'    your own Accelerate or torch script' * of_scripts}")
    if not is_run_as_ddp(translation, machine):
        say(f"  accelerate launch{accelerate_option} SCRIPT")
    say(f"  trainwright setup --show{option}    its effect here")
    for remark in list_remarks(source, translation):
        say(f"note: {remark}")
