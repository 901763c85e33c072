"""The command line with processes that are spawned, as on macOS; the spawned ones import this file too."""

from __future__ import annotations

from trainwright.run.shutdown import stop

stop.START_METHOD = "spawn"

if __name__ == "__main__":
    from trainwright.__main__ import main

    main()
