"""The command `trainwright`. Each command imports what it needs when it runs."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from trainwright import __version__
from trainwright.cli import data, machine, models, names_in_help, recipe, train, words_of_others
from trainwright.clusters import commands as jobs
from trainwright.compatibility import commands as setup
from trainwright.compatibility import launch_commands as launch
from trainwright.doctor import commands as doctor
from trainwright.errors import EXIT_REQUEST, EXIT_STOPPED, EXIT_TRAINING, TrainwrightError
from trainwright.observe import commands as runs
from trainwright.observe import study_commands as studies
from trainwright.planning import commands as plan
from trainwright.utils.text import say

app = typer.Typer(
    name="trainwright",
    cls=words_of_others.Commands,
    help="Plan, run and verify training from a recipe.",
    # Options of every command may be typed with underscores, as other tools spell theirs.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("train", cls=train.TrainCommand)(train.train)
app.command("under", context_settings=launch.UNDER_SETTINGS)(launch.under)
app.command("submit")(jobs.submit)
app.command("jobs")(jobs.jobs)
app.command("stop")(jobs.stop)
app.command("checkpoint")(jobs.checkpoint)
app.command("runs")(runs.runs)
app.command("watch")(runs.watch)
app.command("gpus")(runs.gpus)
app.command("report")(runs.report)
app.command("compare")(runs.compare)
app.command("ablate")(studies.ablate)
app.command("collect")(data.collect)
app.command("plan", cls=names_in_help.NamesInHelp)(plan.plan)
app.command("verify")(doctor.verify)
app.command("doctor")(doctor.doctor)
app.command("drill")(doctor.drill)
app.command("eval")(models.evaluate)
app.command("unlearn-study")(studies.unlearn_study)
app.command("generate")(models.generate)
app.command("merge")(models.merge)
app.command("export")(models.export)
app.command("push")(models.push)
app.command("tensorboard", cls=runs.TensorboardCommand, context_settings=runs.CONTEXT_SETTINGS)(runs.tensorboard)
app.command("setup")(setup.setup)
app.command("launch", context_settings=launch.CONTEXT_SETTINGS)(launch.launch)
app.add_typer(data.app, name="data")
app.add_typer(recipe.app, name="recipe")
app.add_typer(machine.app, name="machine")


def _version(is_requested: bool) -> None:
    if is_requested:
        say(f"trainwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; exit with the code of the error, if any."""
    try:
        app()
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
