"""The packaged model, shared by the tests of this room."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvell.models.loading.random_weights import write_random_model
from kvell.models.text.tokenizer import Tokenizer
from tests.models.harness import tiny_config


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("LlamaForCausalLM")
    return write_random_model(tmp_path_factory.mktemp("model") / "llama", config, seed=5)
