"""`python -m trainwright` is the command `trainwright`."""

from __future__ import annotations

import gc
import sys
from contextlib import AbstractContextManager, nullcontext

from trainwright.errors import EXIT_STOPPED, Interrupted
from trainwright.utils.activity import Activity
from trainwright.utils.paths import leave_out_working_directory
from trainwright.utils.text import say

_INTERRUPTED = 130  # the shell's exit code of a program ended by ctrl-C
# New objects between collections. A plan makes about 150,000 and few cycles: with Python's 700, a tenth is collecting.
_BETWEEN_COLLECTIONS = 200_000


def main() -> None:
    """Run the command line. Imports take seconds, so handle a stop during them, too."""
    leave_out_working_directory()
    gc.set_threshold(_BETWEEN_COLLECTIONS)
    try:
        with (
            _interrupt_on_stop() if sys.argv[1:2] == ["train"] else nullcontext(),
            Activity(sys.stderr, "starting", until_output=True),
        ):
            from trainwright.cli.main import main as command

            command()
    except Interrupted:
        outcome = (
            "the existing run was not changed"
            if any(word.startswith("--resume") for word in sys.argv)
            else "nothing was kept"
        )
        say(f"stopped before the first step; {outcome}; run the same command again", file=sys.stderr)
        sys.exit(EXIT_STOPPED)
    except KeyboardInterrupt:
        sys.exit(_report_interruption())
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            _report_interruption()
        raise
    finally:
        gc.freeze()  # as Python ends it looks for cycles in what is left: a fifth of the time of a plan


def _interrupt_on_stop() -> AbstractContextManager[None]:
    from trainwright.run.shutdown.stop import interrupt_on_stop

    return interrupt_on_stop(to_the_end=True)


def _report_interruption() -> int:
    say(f"trainwright {' '.join(sys.argv[1:2])}: interrupted", file=sys.stderr)
    return _INTERRUPTED


if __name__ == "__main__":
    main()
