"""``kvell instance`` with watches in its loop; writes their record when it ends.

``python -m bench.engine.seams.watched_instance RECORD instance FLAGS…``
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import sys
from pathlib import Path

from bench.engine.seams.recorder import Recorder
from bench.engine.seams.watched import watch_loop
from kvell.cli.main import main as kvell


def main() -> None:
    """Run the command line that follows the record's path."""
    path, recorder = Path(sys.argv.pop(1)), Recorder()
    watch_loop(recorder)
    try:
        kvell()
    finally:
        recorder.record.write(path)


if __name__ == "__main__":
    main()
