"""How a command is declared, other than by its signature."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from trainwright.errors import RequestError
from trainwright.recipe.extensions import set_trust
from trainwright.utils.text import quote_word

F = TypeVar("F", bound=Callable[..., Any])


def command(**options: Any) -> Callable[[F], F]:
    """Declare arguments for typer's ``command``, with which ``main`` registers the function."""

    def declare(function: F) -> F:
        function.__dict__["command_options"] = options
        return function

    return declare


class NamesInHelp(TyperCommand):
    """List the names that recipes can use, by key, at the end of a command's help."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the names after the options."""
        from trainwright.recipe.registries import KEYS

        super().format_epilog(ctx, formatter)
        with formatter.section("Names in recipes, or module:Name"):
            formatter.write_dl(
                [(key, ", ".join(registry.names()) or "none is installed") for key, registry in KEYS.items()]
            )


def _trust_code(context: typer.Context, trusted: bool) -> bool:
    context.with_resource(set_trust(trusted))  # until the command ends
    return trusted


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        callback=_trust_code,
        help="Import the code that a recipe names as module:Name. Without it nothing of it is run.",
    ),
]


# By what to write: the names of other tools, separated by spaces.
COMMANDS = {
    "train RECIPE": "finetune fine-tune finetuning sft dpo cpt pretrain unlearn fit run tune",
    "train --resume": "resume continue",
    "under": "accelerate torchrun deepspeed",
    "submit RECIPE": "sbatch slurm kubernetes ray skypilot",
    "plan RECIPE": "estimate estimate-memory memory cost",
    "recipe new NAME": "init new config",
    "recipe check RECIPE": "validate lint",
    "recipe from FILE": "import migrate translate",
    "ablate RECIPE": "sweep grid tune-hyperparameters",
    "data prepare": "prepare preprocess dataset",
    "data tokenize": "tokenize",
    "eval": "evaluate evaluation test benchmark lm-eval",
    "generate": "chat infer inference predict sample complete",
    "export": "convert",
    "push": "upload publish",
    "doctor": "diagnose env",
    "machine": "hardware",
    "runs": "ls list status",
    "watch": "dashboard ui monitor",
    "jobs": "queue squeue",
    "--version": "version",
    "--help": "help",
}
_RECIPE = ("config", "config-file", "config-name", "config-path", "cfg", "recipe", "yaml")
_FILES = (".yaml", ".yml")
_PROGRAM, _WORDS = "trainwright", "trainwright.words"
_OF_A_SCRIPT = (
    "options of the script come after it; how it is distributed is set in an Accelerate file, --config-file FILE, "
    "which `trainwright setup` writes"
)


class Commands(TyperGroup):
    """The commands, where a command or an option of another tool is answered with ours.

    Raises RequestError, with exit code 2, where an answer is known; else typer's own error.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them for messages."""
        words = ctx.meta.setdefault(_WORDS, list(args))
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            raise _replace_error(error, words) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line."""
        name, path = args[0], _format_command_path(ctx)
        if self.get_command(ctx, name) is None:
            word = name.lower().replace("_", "-")
            meant = [f"{_PROGRAM} {ours}" for ours, theirs in COMMANDS.items() if word in theirs.split()]
            near = [f"{path} {command}" for command in get_close_matches(word, self.commands, 1)]
            if ctx.parent is None and name.endswith(_FILES):
                meant = [f"{_PROGRAM} train {quote_word(name)}"]
            # In a group its own commands count, then those elsewhere.
            answers = [*(ours for ours in meant if ours.startswith(path)), *near, *meant]
            answer = f"did you mean {answers[0]}?" if answers else f"choose from {', '.join(self.commands)}"
            raise RequestError(f"{name}: {path} has no such command; {answer}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            raise _replace_error(error, ctx.meta[_WORDS]) from None


def _format_command_path(ctx: Any) -> str:
    """Return the words of a command, however it was started."""
    return _PROGRAM if ctx.parent is None else f"{_format_command_path(ctx.parent)} {ctx.info_name}"


def _replace_error(error: Any, words: list[str]) -> Exception:
    """Return the error to raise in place of ``error``: an answer to an unknown option, else ``error`` itself."""
    # Recognized by its attributes: the class for unknown options is not public.
    answer = _describe_answer(error, words) if hasattr(error, "possibilities") else None
    return error if answer is None else RequestError(answer)


def _describe_answer(error: Any, words: list[str]) -> str | None:
    """Return the message for an unknown option; None if nothing better is known than the options spelled alike."""
    option, command = error.option_name, error.ctx.command
    options = {name for parameter in command.params for name in parameter.opts}
    path = _format_command_path(error.ctx)
    problem = f"{option}: {path} has no such option"
    metavars = [getattr(parameter, "metavar", None) or "" for parameter in command.params]
    takes_recipe = any("SECTION.KEY=VALUE" in metavar for metavar in metavars)
    before, command_line = "", f"{path} RECIPE"
    if error.ctx.parent is None:
        takes_recipe, command_line = True, f"{_PROGRAM} train RECIPE"
        before = f"{command_line} "
    if not takes_recipe and "SCRIPT" not in metavars:
        return None
    name = option.lstrip("-")
    if takes_recipe and name in _RECIPE:
        file = "; an Accelerate file: --accelerate-config FILE" if "--accelerate-config" in options else ""
        return f"{problem}; the recipe is the first argument: {command_line}{file}"
    from trainwright.recipe.problems import find_meaning
    from trainwright.recipe.synonyms import look_up_value

    meant = find_meaning(name.replace("-", "_"))
    if meant is None or isinstance(meant, str):
        return f"{problem}; {meant}" if meant else None
    if not takes_recipe:
        return f"{problem}; {_OF_A_SCRIPT}"
    note, value = f" ({meant.note})" if meant.note else "", _find_option_value(option, words)
    if meant.value is not None:
        value = "VALUE" if value.lower() in ("false", "no") else meant.value
    return f"{problem}; write {before}{quote_word(f'{meant.key}={look_up_value(meant.key, value) or value}')}{note}"


def _find_option_value(option: str, words: list[str]) -> str:
    """Return the value that an option was given on the command line, or VALUE."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != option:
            continue
        if equals:
            return value
        if following and not following.startswith("--") and not following.endswith(_FILES):
            return following
    return "VALUE"
