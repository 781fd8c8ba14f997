"""The ``kvell`` command."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

import kvell
from kvell.cli.late_commands import LateCommands, LateGroup
from kvell.cli.terminal.environment import (
    kvell_variables,
    prepare_process,
    process_cache_dir,
)
from kvell.cli.terminal.faults import run_guarded
from kvell.cli.terminal.session import Session, debug_option
from kvell.device.available import available_bytes


@click.group(
    cls=LateGroup,
    commands=LateCommands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(kvell.__version__, prog_name="kvell")
@debug_option
def root() -> None:
    """Kvell serves language models from one pool of memory pages.

    \b
    Try:  kvell generate "What is a page?"
          kvell plan llama3-8b --kv-memory 16GiB
          kvell serve smollm2 --port 8000
    """


def run(args: Sequence[str], session: Session) -> int:
    def work() -> None:
        # Not root.main(): it would handle a closed stdout and the end of input itself.
        with root.make_context("kvell", list(args), obj=session) as context:
            root.invoke(context)

    return run_guarded(work, session.debug)


def main() -> None:
    prepare_process()
    session = Session(
        cache_dir=process_cache_dir(),
        program=shown_program(Path(sys.argv[0])),
        available_bytes=available_bytes,
        environ=kvell_variables(),
    )
    sys.exit(run(sys.argv[1:], session))


def shown_program(script: Path, here: Path | None = None) -> str:
    """Return the user's command for this program: a path if it is below ``here``."""
    if script.suffix == ".py":  # python -m kvell.cli.main
        return "kvell"
    try:
        return str(script.absolute().relative_to(here or Path.cwd()))
    except ValueError:
        return "kvell"


if __name__ == "__main__":
    main()
