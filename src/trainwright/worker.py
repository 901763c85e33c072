"""The entry point for the processes of a run that other launchers start.

    python -m trainwright.worker RECIPE [SECTION.KEY=VALUE]... [--resume [RUN]]
    torchrun --nproc-per-node 4 -m trainwright.worker RECIPE
    accelerate launch --config_file FILE -m trainwright.worker RECIPE
    srun --ntasks-per-node 4 python -m trainwright.worker RECIPE
    mpirun -np 4 python -m trainwright.worker RECIPE

The recipe must ask for the number of processes that the launcher starts; parallel.num_processes: auto adopts it.
"""

from __future__ import annotations

import argparse
import os
import sys

from trainwright.errors import EXIT_STOPPED, Interrupted, TrainwrightError
from trainwright.recipe.loading import split_words
from trainwright.run.group.environment import RENDEZVOUS_SECONDS, rank_from_variables
from trainwright.run.group.failure_report import should_report
from trainwright.run.joined import run_joined
from trainwright.run.request import TrainingRequest, is_bare_resume
from trainwright.run.shutdown.exit_code import record_exit_code
from trainwright.run.shutdown.stop import interrupt_on_stop
from trainwright.utils.paths import leave_out_working_directory
from trainwright.utils.text import say


def main() -> None:
    """Run one worker and exit with its code: those of `trainwright train`."""
    leave_out_working_directory()
    arguments = _parse(sys.argv[1:])
    try:
        with interrupt_on_stop():
            recipe, overrides = split_words(arguments.recipe)
            request = TrainingRequest(
                recipe,
                tuple(overrides),
                arguments.resume,
                rendezvous_timeout=arguments.rendezvous_timeout,
                force=arguments.force,
                until=arguments.until,
                time_limit=arguments.time_limit,
            )
            code = run_joined(request)[0]
    except TrainwrightError as error:
        if should_report(rank_from_variables(os.environ), str(error)):
            say(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except Interrupted:
        code = EXIT_STOPPED
        stopped = "stopped before the first step; nothing was changed; run the same command again"
        if should_report(rank_from_variables(os.environ), stopped):
            say(stopped, file=sys.stderr)
    sys.exit(record_exit_code(code))


def _parse(words: list[str]) -> argparse.Namespace:
    explained = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog="python -m trainwright.worker",
        description="One process of a training run that another launcher starts.",
        epilog=explained,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # No option may start like one of torchrun's or accelerate's, which would take it for their own.
    parser.add_argument("recipe", nargs="*", metavar="RECIPE [SECTION.KEY=VALUE]...", help="as for trainwright train")
    parser.add_argument("--force", action="store_true", help="start even if the plan does not fit")
    parser.add_argument(
        "--resume",
        metavar="[RUN]",
        help="resume this run, or the recipe's newest run; auto: start it if it is not there",
    )
    parser.add_argument(
        "--rendezvous-timeout",
        type=float,
        default=RENDEZVOUS_SECONDS,
        metavar="SECONDS",
        help=f"seconds to wait for the other processes ({RENDEZVOUS_SECONDS:.0f})",
    )
    parser.add_argument("--until", metavar="TIME", help="stop after a checkpoint before this time, such as 06:00")
    parser.add_argument("--time-limit", metavar="TIME", help="stop after a checkpoint within this time, such as 4h")
    following = [*words[1:], None]
    bare = [a == "--resume" and is_bare_resume(next_) for a, next_ in zip(words, following, strict=True)]
    return parser.parse_args(["--resume=" if is_bare else a for a, is_bare in zip(words, bare, strict=True)])


if __name__ == "__main__":
    main()
