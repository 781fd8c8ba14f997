"""``python -m scripts.packages``: build, install, run; one line for each check at the end."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from scripts.packages.building import (
    build_sdist,
    build_wheel,
    check_metadata,
    check_sdist,
    check_wheel,
)
from scripts.packages.checks import Check, run_checks, status_of
from scripts.packages.installed import (
    check_compiled_parts,
    check_generate,
    check_help,
    check_version,
    install,
    install_model,
)
from scripts.packages.serving import check_serve
from scripts.packages.workplace import Workplace

REPOSITORY = Path(__file__).parents[2]


def checks_of(place: Workplace) -> list[Check]:
    """Return all checks, in their order."""
    return [
        Check("build the sdist", lambda: build_sdist(place), is_needed=True),
        Check("contents of the sdist", lambda: check_sdist(place)),
        Check("build the wheel from it", lambda: build_wheel(place), is_needed=True),
        Check("contents of the wheel", lambda: check_wheel(place)),
        Check("metadata", lambda: check_metadata(place)),
        Check("install", lambda: install(place), is_needed=True),
        Check("kvell --version", lambda: check_version(place)),
        Check("kvell --help", lambda: check_help(place)),
        Check("compiled parts", lambda: check_compiled_parts(place)),
        Check("install the model", lambda: install_model(place), is_needed=True),
        Check("kvell generate", lambda: check_generate(place)),
        Check("kvell serve", lambda: check_serve(place)),
    ]


@click.command()
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Copy the finished packages into this folder if all checks pass.",
)
def main(keep: Path | None) -> None:
    """Build Kvell's packages and try them in a fresh environment."""
    outcomes = []
    with TemporaryDirectory(prefix="kvell-packages-") as folder:
        place = Workplace(REPOSITORY, Path(folder))
        for outcome in run_checks(checks_of(place)):
            click.echo(f"{outcome.name}: {outcome.verdict}", err=True)
            outcomes.append(outcome)
        if keep is not None and status_of(outcomes) == 0:
            keep.mkdir(parents=True, exist_ok=True)
            for path in (place.sdist, place.wheel):
                (keep / path.name).write_bytes(path.read_bytes())
    click.echo("\n".join(outcome.line for outcome in outcomes))
    sys.exit(status_of(outcomes))


if __name__ == "__main__":
    main()
