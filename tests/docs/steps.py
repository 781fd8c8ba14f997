"""Steps of a page: its commands and Python blocks, each with what it must show."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.docs.expectations import EXPECTED, TAKEN_ON_TRUST, Check
from tests.docs.fences import Block, blocks_of
from tests.docs.reader import ROOT, Reader, squeezed


@dataclass(frozen=True)
class Step:
    """A command, or a Python block where ``command`` is empty, and what it must show."""

    page: str
    block: Block
    command: str
    check: Check

    def take(self, reader: Reader) -> None:
        if self.command:
            shown = reader.run(self.command)
            missing = [line for line in self.block.outputs if squeezed(line) not in squeezed(shown)]
            assert missing == [], f"{self.place}\n{shown}"
        else:
            shown = reader.execute(self.page, self.block)
        is_shown = self.check in shown if isinstance(self.check, str) else self.check(shown, reader)
        assert is_shown, f"{self.place}\n{shown}"

    @property
    def place(self) -> str:
        return f"{self.page}:{self.block.line}: {self.command}"


def shown_blocks(page: str) -> list[Block]:
    return blocks_of((ROOT / page).read_text())


def commands_of(block: Block) -> list[str]:
    return [text for text in block.commands if not text.startswith(tuple(TAKEN_ON_TRUST))]


def steps_of(page: str) -> Iterator[Step]:
    """Yield the steps of a page with their checks, which are in the same order."""
    checks = {heading: list(each) for heading, each in EXPECTED[page].items()}
    for block in shown_blocks(page):
        if block.language == "console":
            for command in commands_of(block):
                yield Step(page, block, command, checks[block.heading].pop(0))
        elif block.language == "python":
            yield Step(page, block, "", checks[block.heading].pop(0))
