"""The command `trainwright`. Each command imports what it needs when it runs."""

from __future__ import annotations

import inspect
import sys
import traceback
from copy import copy
from typing import Annotated

import typer

from trainwright import __version__
from trainwright.cli.command import Commands
from trainwright.errors import EXIT_REQUEST, EXIT_STOPPED, EXIT_TRAINING, TrainwrightError
from trainwright.recipe.registries import COMMANDS
from trainwright.utils.text import say

app = typer.Typer(
    name="trainwright",
    cls=Commands,
    help="Plan, run and verify training from a recipe.",
    # Options of every command may be typed with underscores, as other tools spell theirs.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _add_commands() -> None:
    groups = {"": app}
    for name in filter(COMMANDS.is_present, COMMANDS.names()):
        group, _, word = name.rpartition(" ")
        command = COMMANDS.get(name)
        if isinstance(command, typer.Typer):
            groups[name] = command
            groups[group].add_typer(command, name=word)
        else:
            groups[group].command(word, **getattr(command, "command_options", {}))(command)


_add_commands()


def _show_version(is_requested: bool) -> None:
    if is_requested:
        say(f"trainwright {__version__}")
        raise typer.Exit


@app.callback()
def _declare_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _select_commands(words: list[str]) -> typer.Typer:
    """Return the commands with parameters only for the one that ``words`` run: reading those of all takes longest."""
    word = next((word.replace("_", "-") for word in words if not word.startswith("-")), None)
    commands = copy(app)
    commands.registered_groups = [group if group.name == word else copy(group) for group in app.registered_groups]
    commands.registered_commands = [info if info.name == word else copy(info) for info in app.registered_commands]
    for group in commands.registered_groups:
        if group.name != word and group.typer_instance is not None:
            group.typer_instance = copy(group.typer_instance)
            group.typer_instance.registered_commands = []
    for command in commands.registered_commands:
        if command.name != word:
            command.help = command.help or inspect.getdoc(command.callback)
            command.callback = lambda: None
    return commands


def main() -> None:
    """Run the command line; exit with the code of the error, if any."""
    try:
        _select_commands(sys.argv[1:])()
    except TrainwrightError as error:
        message = str(error) if error.exit_code == EXIT_STOPPED else f"error: {error}"
        for line in (message, *getattr(error, "__notes__", ())):
            say(line, file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        # Unexpected, so a bug of ours: a report needs the traceback.
        say(traceback.format_exc(), file=sys.stderr, end="")
        sys.exit(EXIT_TRAINING)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a Rust library; the input of tokenizers comes with a model
            raise
        say(f"error: the tokenizer failed: {error}; check its tokenizer.json", file=sys.stderr)
        sys.exit(EXIT_REQUEST)
