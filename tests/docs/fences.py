"""Fenced blocks of a Markdown file, and the commands in those of a console."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    :param heading: the nearest one above it.
    :param line: of the file where the block's text begins, counted from 1.
    """

    language: str
    heading: str
    text: str
    line: int

    @property
    def commands(self) -> list[str]:
        """What a reader types: lines after ``$``, with those that they go on in."""
        joined = self.text.replace("\\\n", " ")
        return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks_of(markdown: str) -> list[Block]:
    """All fenced blocks, in order."""
    found, inside = [], [match.span() for match in FENCE.finditer(markdown)]
    headings = [
        match
        for match in HEADING.finditer(markdown)
        if not any(start <= match.start() < end for start, end in inside)
    ]
    for match in FENCE.finditer(markdown):
        above = [one[1] for one in headings if one.start() < match.start()]
        line = markdown.count("\n", 0, match.start(2)) + 1
        found.append(Block(match[1], above[-1] if above else "", match[2], line))
    return found


def blocks_in(name: str) -> list[Block]:
    """The blocks of a file in ``docs/``."""
    return blocks_of((DOCS / name).read_text())
