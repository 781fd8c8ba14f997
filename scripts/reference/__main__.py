"""``python -m scripts.reference``: build the reference into ``build/reference``."""

import sys

import click

from scripts.reference.build import REPOSITORY, build


def main() -> int:
    """Build, and say where the first page is."""
    output = REPOSITORY / "build" / "reference"
    code = build(output)
    if code == 0:
        click.echo(f"open {output / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
