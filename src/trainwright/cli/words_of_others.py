"""Commands and options of other tools, answered with what to write instead."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from trainwright.errors import RequestError
from trainwright.text import quoted

# By what to write: the names of other tools, separated by spaces.
COMMANDS = {
    "train RECIPE": "finetune fine-tune finetuning sft dpo cpt pretrain unlearn fit run tune",
    "train --resume": "resume continue",
    "under": "accelerate torchrun deepspeed",
    "submit RECIPE": "sbatch slurm kubernetes ray skypilot",
    "plan RECIPE": "estimate estimate-memory memory cost",
    "recipe new NAME": "init new config",
    "recipe check RECIPE": "validate lint",
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
_WORDS = "trainwright.words"
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
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line."""
        name = args[0]
        if self.get_command(ctx, name) is None:
            ours = next(
                (ours for ours, theirs in COMMANDS.items() if name.lower().replace("_", "-") in theirs.split()), ""
            )
            if name.endswith(_FILES):
                ours = f"train {quoted(name)}"
            if ours:
                raise RequestError(f"{name}: no such command; did you mean trainwright {ours}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Recognized by its attributes: the class for unknown options is not public.
            if hasattr(error, "possibilities") and (answer := _answer(error, ctx.meta[_WORDS])):
                raise RequestError(answer) from None
            raise


def _answer(error: Any, words: list[str]) -> str | None:
    """Return the message for an unknown option; None if nothing better is known than the options spelled alike."""
    option, command = error.option_name, error.ctx.command
    options = {name for parameter in command.params for name in parameter.opts}
    problem = f"{option}: {error.ctx.command_path} has no such option"
    metavars = [getattr(parameter, "metavar", None) or "" for parameter in command.params]
    takes_recipe = any("SECTION.KEY=VALUE" in metavar for metavar in metavars)
    if not takes_recipe and "SCRIPT" not in metavars:
        return None
    name = option.lstrip("-")
    if takes_recipe and name in _RECIPE:
        file = "; an Accelerate file: --accelerate-config FILE" if "--accelerate-config" in options else ""
        return f"{problem}; the recipe is the first argument: {error.ctx.command_path} RECIPE{file}"
    from trainwright.recipe.problems import meaning_of
    from trainwright.recipe.synonyms import our_value

    meant = meaning_of(name.replace("-", "_"))
    if meant is None or isinstance(meant, str):
        return f"{problem}; {meant}" if meant else None
    if not takes_recipe:
        return f"{problem}; {_OF_A_SCRIPT}"
    note, value = f" ({meant.note})" if meant.note else "", _value_of(option, words)
    if meant.value is not None:
        value = "VALUE" if value.lower() in ("false", "no") else meant.value
    return f"{problem}; write {quoted(f'{meant.key}={our_value(meant.key, value) or value}')}{note}"


def _value_of(option: str, words: list[str]) -> str:
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
