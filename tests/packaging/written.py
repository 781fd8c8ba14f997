"""Reads a Dockerfile and a systemd unit, and what they tell ``kvell`` to do."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from kvell.cli.main import root
from kvell.cli.terminal.session import Session

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, its lines joined."""

    word: str
    text: str

    @property
    def words(self) -> list[str]:
        found: list[str] = json.loads(self.text[self.text.index("[") :])
        return found


def instructions_of(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    pairs = (line.strip().partition(" ") for line in joined if line.strip())
    return [Instruction(word.upper(), " ".join(rest.split())) for word, _, rest in pairs]


def stages_of(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    starts = [place for place, one in enumerate(instructions) if one.word == "FROM"]
    ends = [*starts[1:], len(instructions)]
    return [list(instructions[start:end]) for start, end in zip(starts, ends, strict=True)]


def settings_of(unit: str) -> Mapping[str, list[str]]:
    """The values of each setting of a unit, in order; all sections together."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in re.sub(r"\\\n", " ", unit).splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def parameters_of(words: Sequence[str]) -> Mapping[str, object]:
    """What ``kvell`` would take from a command line; nothing is run.

    :raises click.UsageError: for a flag or a value that it does not have.
    """
    name, *arguments = words
    above = click.Context(root, obj=Session(Path("cache")))
    command = root.get_command(above, name)
    if command is None:
        raise click.UsageError(f"kvell has no command {name}")
    return command.make_context(name, arguments, parent=above).params
