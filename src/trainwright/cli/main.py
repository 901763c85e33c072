"""The command `trainwright`. One small module per command; each imports what it needs when it runs."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from trainwright import __version__
from trainwright.cli import (
    collect,
    doctor,
    drill,
    machine,
    names_in_help,
    plan,
    recipe,
    setup,
    stop,
    tensorboard,
    train,
    verify,
    words_of_others,
)
from trainwright.cli.clusters import jobs, submit
from trainwright.cli.data import rows as data
from trainwright.cli.launching import launch, under
from trainwright.cli.models import evaluate, generate, publish
from trainwright.cli.seeing import gpus, report, runs, watch
from trainwright.cli.studies import ablate, study
from trainwright.errors import EXIT_REQUEST, EXIT_STOPPED, EXIT_TRAINING, TrainwrightError
from trainwright.text import say

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
app.command("under", context_settings=under.CONTEXT_SETTINGS)(under.under)
app.command("submit")(submit.submit)
app.command("jobs")(jobs.jobs)
app.command("stop")(stop.stop)
app.command("checkpoint")(stop.checkpoint)
app.command("runs")(runs.runs)
app.command("watch")(watch.watch)
app.command("gpus")(gpus.gpus)
app.command("report")(report.report)
app.command("compare")(report.compare)
app.command("ablate")(ablate.ablate)
app.command("collect")(collect.collect)
app.command("plan", cls=names_in_help.NamesInHelp)(plan.plan)
app.command("verify")(verify.verify)
app.command("doctor")(doctor.doctor)
app.command("drill")(drill.drill)
app.command("eval")(evaluate.evaluate)
app.command("unlearn-study")(study.unlearn_study)
app.command("generate")(generate.generate)
app.command("merge")(publish.merge)
app.command("export")(publish.export)
app.command("push")(publish.push)
app.command("tensorboard", cls=tensorboard.TensorboardCommand, context_settings=tensorboard.CONTEXT_SETTINGS)(
    tensorboard.tensorboard
)
app.command("setup")(setup.setup)
app.command("launch", context_settings=launch.CONTEXT_SETTINGS)(launch.launch)
app.add_typer(data.app, name="data")
app.add_typer(recipe.app, name="recipe")
app.add_typer(machine.app, name="machine")


def _version(wanted: bool) -> None:
    if wanted:
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
