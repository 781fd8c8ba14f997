"""Fenced blocks of a Markdown file, and the commands in those of a console."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^\$ ((?:[^'\"\\\n]|\\\n|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\")*)$", re.MULTILINE | re.DOTALL
)
"""A command up to the end of its line; quotes and backslashes continue it on further lines."""
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
        """Commands after ``$``, with the lines that continue them."""
        found = COMMAND.findall(self.text)
        return [command.replace("\\\n", " ").strip() for command in found]

    @property
    def outputs(self) -> list[str]:
        """The lines that a console shows after its commands, without those that are left out."""
        lines = COMMAND.sub("", self.text).splitlines()
        return [line.strip() for line in lines if line.strip() not in ("", "…")]


def blocks_of(markdown: str) -> list[Block]:
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
    return blocks_of((DOCS / name).read_text())
