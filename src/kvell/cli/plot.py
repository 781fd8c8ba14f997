"""``kvell plot``: plots of the timelines of replays."""

from pathlib import Path
from typing import Literal

import click

from kvell.cli.terminal.files import writing
from kvell.cli.terminal.session import debug_option
from kvell.errors import ChangeSomething


@click.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE…",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The picture: a .png, .svg or .html file.",
)
@click.option(
    "--over",
    type=click.Choice(["step", "time"]),
    default="step",
    show_default=True,
    help="What runs from left to right: steps, or virtual seconds.",
)
@click.option("--title", "titles", multiple=True, help="A file's title, once for each.")
@debug_option
def plot(
    files: tuple[Path, ...], out: Path, over: Literal["step", "time"], titles: tuple[str, ...]
) -> None:
    """Draw timelines side by side: memory by owner and state, the batch below.

    \b
    kvell replay … --manager paged --timeline paged.jsonl
    kvell replay … --manager kvell --timeline kvell.jsonl
    kvell plot paged.jsonl kvell.jsonl --out memory.png
    """
    from kvell.simulator.report.plot import Run, draw
    from kvell.simulator.report.timeline import read_timeline

    if titles and len(titles) != len(files):
        problem = f"are titles for {len(files)} files"
        raise ChangeSomething("--title", f"{len(titles)}", problem, "give one for each, or none")
    names = titles or tuple(default_title(path) for path in files)
    runs = [Run(name, read_timeline(path)) for name, path in zip(names, files, strict=True)]
    with writing("--out", out):
        draw(runs, out, over)


def default_title(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
