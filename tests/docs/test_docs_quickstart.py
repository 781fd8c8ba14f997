"""The quickstart's server and the commands that ask it; the long suite runs the whole page."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.fences import DOCS
from tests.docs.reader import SERVE, URL, Reader, make_home, reading
from tests.docs.steps import Step, steps_of

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
