"""The packaged model's tokenizer, and grammars over it."""

from pathlib import Path

import pytest

from kvell.engine.sampling.grammars import Grammars
from kvell.models.text.tokenizer import Tokenizer
from tests.engine.sampling.walking import END, VOCAB


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.as_json, VOCAB, [END])
