"""Which rows of a step give a vector, and what is made of them."""

import numpy as np
import torch

from kvell.engine.protocol.pooling import POOLED, vector_of
from kvell.engine.requests.plan import TokenWork
from kvell.engine.running.model_part import NOTHING_POOLED, PooledRows, pooled_rows
from tests.engine.works import work_of


def work(
    handle: int, count: int, *, samples: bool = True, pools: bool = False, scores: bool = False
) -> TokenWork:
    return work_of(
        f"r{handle}",
        handle,
        0,
        count,
        sampling=POOLED if samples else None,
        prompt_tokens=count + 1,
        scores=0 if scores else None,
        pools=pools,
    )


def test_the_last_row_of_each_work_that_pools() -> None:
    step = [
        work(1, 1),
        work(2, 9, pools=True),
        work(3, 5, samples=False),
        work(4, 4, scores=True),
        work(5, 1, pools=True),
        work(6, 2, samples=False, scores=True),
        work(7, 3, pools=True),
    ]
    assert sum(one.num_logits for one in step) == 10
    assert pooled_rows(step) == PooledRows((1, 6, 9), (2, 5, 7))


def test_answers_alone_give_none() -> None:
    assert pooled_rows([work(1, 1), work(2, 7)]) == NOTHING_POOLED == PooledRows()
    assert pooled_rows([]) == NOTHING_POOLED


def test_vectors_have_length_one_whatever_they_were() -> None:
    hidden = torch.tensor([[3.0, 4.0], [1e30, 0.0], [0.0, 0.0], [0.0, -2e-5]])
    told = PooledRows((0, 1, 2, 3), (10, 11, 12, 13)).vectors(hidden)
    vectors = {handle: vector_of(data).tolist() for handle, data in told.items()}
    assert np.allclose(vectors[10], [0.6, 0.8])
    assert vectors[12] == [0.0, 0.0], "nothing has no direction"
    assert np.allclose(vectors[13], [0.0, -1.0])


def test_16_bits_are_scaled_in_32() -> None:
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    [data] = PooledRows((1,), (9,)).vectors(hidden).values()
    expected = hidden[1].double() / hidden[1].double().norm()
    assert np.allclose(vector_of(data), expected.numpy(), atol=1e-7)
