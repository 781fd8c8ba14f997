import math

import pytest
import torch

from bench.engine.perplexity import quality, windows
from kvell.attention.choice import choose_kernels
from tests.models.harness import tiny_config
from tests.models.random_model import random_paged_model


def test_windows_are_whole() -> None:
    parts = windows(torch.arange(11), 4)
    assert parts.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="3 tokens do not fill a window of 4"):
        windows(torch.arange(3), 4)


def test_draft_tokens_are_those_of_the_model() -> None:
    model = random_paged_model(tiny_config("LlamaForCausalLM"), choose_kernels(torch.device("cpu")))
    draw = torch.Generator().manual_seed(1)
    parts = torch.randint(0, 509, (2, 24), generator=draw)
    one, exact = quality("float32", model, parts, None)
    assert (one.same_first, one.distance) == (1.0, 0.0)
    assert exact.shape == (2, 23, 509)
    wanted = [[exact[i, j, parts[i, j + 1]] for j in range(23)] for i in range(2)]
    assert one.nats == pytest.approx(-torch.tensor(wanted).double().mean().item(), rel=1e-5)
    assert one.perplexity == pytest.approx(math.exp(one.nats))
    shifted = exact.roll(1, -1)
    other, _ = quality("again", model, parts, shifted)
    assert other.same_first < 1.0
    assert other.distance > 0.0
