"""The packaged model, shared by the tests of this room."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvell.models.packaged import packaged_model
from kvell.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_path(request: pytest.FixtureRequest) -> Path:
    """The packaged model, converted once and kept between test runs."""
    mkdir: Callable[[str], Path] = request.config.cache.mkdir
    return packaged_model(mkdir("smollm2"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)
