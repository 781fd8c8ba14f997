"""What tests of several rooms share: the packaged model, converted once."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from kvell.models.sources.packaged import packaged_model
from tests.server.metrics.exported import Exported, exported_by_a_server

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where Triton is first imported

# A busy machine is slow; no test fails for that.  Tests that need more examples say so.
settings.register_profile("kvell", deadline=None, max_examples=50)
settings.load_profile("kvell")


FAKE_INSTANCE = Path(__file__).parent / "fleet" / "fake_instance.py"


@pytest.fixture
def instance_command() -> Callable[..., list[str]]:
    """Command line of a fake instance with further arguments."""

    def command(*arguments: str) -> list[str]:
        script = str(FAKE_INSTANCE)
        fixed = ["--socket-fd", "{socket_fd}", "--incarnation", "{incarnation}"]
        return [sys.executable, script, *fixed, *arguments]

    return command


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The packaged model's directory, kept between test runs."""
    mkdir: Callable[[str], Path] = request.config.cache.mkdir
    return packaged_model(mkdir("smollm2"))


@pytest.fixture(scope="session")
def exported(smollm2_path: Path) -> Exported:
    """What a real server's ``/metrics`` shows."""
    return exported_by_a_server(smollm2_path.parent)
