"""The console script `baton`: what happens when the user leaves before the program has begun.

The command line takes a third of a second to import. An interrupt meanwhile ends it with one line.
"""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run `baton`."""
    try:
        from cluster.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
