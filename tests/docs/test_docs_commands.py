"""Documents do what they say: every command and every Python block, in the page's order."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.expectations import EXPECTED, TAKEN_ON_TRUST
from tests.docs.fences import DOCS, blocks_of
from tests.docs.reader import ROOT, SERVE, URL, Reader, make_home, reading
from tests.docs.steps import Step, commands_of, shown_blocks, steps_of
from tests.llm.thinking_model import write_thinking

QUICK = ("kvell plan ", "echo ")
"""Commands that need neither a model nor a server."""
NOT_QUICK = (
    *("kvell plan smollm2", "kvell plan qwen3-8b"),
    'echo "What is a page?" | kvell chat',
)
"""Commands that read the packaged model, or import transformers for a changed config."""

QUICK_STEPS = [
    step
    for page in EXPECTED
    for step in steps_of(page)
    if step.command.startswith(QUICK) and not step.command.startswith(NOT_QUICK)
]


@pytest.mark.parametrize("page", EXPECTED)
def test_every_command_has_one_expectation(page: str) -> None:
    counts: dict[str, int] = {}
    for block in shown_blocks(page):
        number = len(commands_of(block)) + (block.language == "python")
        if number:
            counts[block.heading] = counts.get(block.heading, 0) + number
    assert counts == {heading: len(checks) for heading, checks in EXPECTED[page].items()}


def test_pages_with_commands_are_all_here() -> None:
    elsewhere = {"docs/install.md", "docs/memory-library.md", "docs/mempool.md"}
    """Commands that install, and the libraries, whose examples run in tests of their own."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    with_commands = {
        str(page.relative_to(ROOT))
        for page in pages
        if any(
            block.commands or block.language == "python" for block in blocks_of(page.read_text())
        )
    }
    assert with_commands - elsewhere == set(EXPECTED)


def test_what_is_taken_on_trust_is_in_a_page() -> None:
    commands = [
        command for page in EXPECTED for block in shown_blocks(page) for command in block.commands
    ]
    for trusted in TAKEN_ON_TRUST:
        assert any(command.startswith(trusted) for command in commands), trusted


@pytest.mark.parametrize("step", QUICK_STEPS, ids=lambda step: " ".join(step.place.split())[:60])
def test_quick_commands(step: Step, tmp_path: Path) -> None:
    step.take(Reader(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("page", EXPECTED)
def test_a_page_does_what_it_says(
    page: str, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = make_home(tmp_path_factory.mktemp("home"), smollm2_path)
    thinking = write_thinking(smollm2_path, tmp_path_factory.mktemp("thinking"))
    for block in shown_blocks(page):
        if block.language == "toml":
            (home / "keys.toml").write_text(block.text)
            (home / "keys.toml").chmod(0o600)
    with reading(home, {"Qwen/Qwen3-0.6B": thinking}) as reader:
        for step in steps_of(page):
            step.take(reader)


STEPS = [step for step in steps_of("docs/quickstart.md") if step.command]
[START] = [step for step in STEPS if step.command.startswith(SERVE)]
ASKING = ("curl ", "kvell top", "kvell cluster")


@pytest.fixture(scope="module")
def reader(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader who has started the server as the page does, only at a free port."""
    home = make_home(tmp_path_factory.mktemp("home"), smollm2_path)
    with reading(home) as reader:
        START.take(reader)
        yield reader


@pytest.mark.parametrize(
    "step",
    [step for step in STEPS if step.command.startswith(ASKING)],
    ids=lambda step: " ".join(step.command.split()[:3]),
)
def test_every_command_does_what_it_says(reader: Reader, step: Step) -> None:
    step.take(reader)


def test_the_page_that_a_browser_opens_is_the_memory_map(reader: Reader) -> None:
    assert f"Open `{URL}/` in a browser" in (DOCS / "quickstart.md").read_text()
    assert "<!doctype html>" in httpx.get(f"{reader.url}/").text
