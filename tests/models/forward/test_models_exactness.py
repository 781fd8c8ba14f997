"""The paged forward pass against transformers' own, for every architecture listed as exact."""

import pytest
import torch

from kvell.models.families.families import EXACT
from kvell.models.loading.random_weights import varies
from tests.models.cases import families
from tests.models.harness import (
    FAMILIES,
    assert_exact,
    oracle_logits,
    paged,
    prompt_ids,
    runner_over,
    tiny_module,
)

every_family = pytest.mark.parametrize("architecture", families(FAMILIES))


def test_every_architecture_listed_as_exact_is_compared_here() -> None:
    assert set(FAMILIES) == set(EXACT)


@every_family
def test_random_outputs_vary(architecture: str) -> None:
    """On prompts other than those that chose the scale."""
    assert all(varies(tiny_module(architecture), seed, share=0.25) for seed in (11, 12, 13))


@every_family
def test_one_request_in_one_step(architecture: str) -> None:
    module, ids = tiny_module(architecture), prompt_ids(29)
    assert_exact(runner_over(paged(module)).step([("a", ids)]), oracle_logits(module, ids))


@every_family
def test_ragged_batch(architecture: str) -> None:
    module = tiny_module(architecture)
    prompts = {name: prompt_ids(length) for name, length in (("a", 23), ("b", 1), ("c", 12))}
    logits = runner_over(paged(module)).step(list(prompts.items()))
    parts = torch.split(logits, [len(ids) for ids in prompts.values()])
    for part, ids in zip(parts, prompts.values(), strict=True):
        assert_exact(part, oracle_logits(module, ids))


@every_family
def test_prefill_in_chunks_of_seven_tokens(architecture: str) -> None:
    module, ids = tiny_module(architecture), prompt_ids(30)
    runner = runner_over(paged(module))
    parts = [runner.step([("a", ids[start : start + 7])]) for start in range(0, 30, 7)]
    assert_exact(torch.cat(parts), oracle_logits(module, ids))


@every_family
def test_prefill_then_decode_beside_another_prefill(architecture: str) -> None:
    """Windows pass whole pages by, decodes and prefill chunks share steps."""
    module, ids, other = tiny_module(architecture), prompt_ids(27), prompt_ids(19, seed=1)
    runner = runner_over(paged(module))
    mine, others = [runner.step([("a", ids[:8])])], []
    for index, token in enumerate(ids[8:]):
        logits = runner.step([("a", [token]), ("b", other[index : index + 1])])
        mine.append(logits[:1])
        others.append(logits[1:])
    assert_exact(torch.cat(mine), oracle_logits(module, ids))
    assert_exact(torch.cat(others), oracle_logits(module, other))


@every_family
def test_results_do_not_depend_on_where_pages_lie(architecture: str) -> None:
    model, ids = paged(tiny_module(architecture)), prompt_ids(26)
    first = runner_over(model, shuffle_seed=1).step([("a", ids)])
    second = runner_over(model, shuffle_seed=2).step([("a", ids)])
    assert torch.equal(first, second)


@every_family
def test_an_early_token_changes_the_output(architecture: str) -> None:
    """Within reach of the windows stacked over the layers."""
    model, ids = paged(tiny_module(architecture)), prompt_ids(12)
    changed = [ids[0] + 1 if ids[0] < 500 else 3, *ids[1:]]
    first = runner_over(model).step([("a", ids)])[-1]
    second = runner_over(model).step([("a", changed)])[-1]
    assert (first - second).abs().max() > 1e-3 * first.abs().max()


@every_family
def test_decoding_reads_the_pages(architecture: str) -> None:
    """Whatever stands in a page that is in reach decides the next token's logits."""
    ids, model = prompt_ids(14), paged(tiny_module(architecture))
    for group in range(len(runner_over(model).layout.groups)):
        last = []
        for tamper in (False, True):
            runner = runner_over(model)
            runner.step([("a", ids[:-1])])
            if tamper:
                page = runner.requests["a"].pages[group][:3][-1]
                runner.page_bytes(group, page).view(torch.float32).mul_(-3.0)
            last.append(runner.step([("a", ids[-1:])])[0])
        assert (last[0] - last[1]).abs().max() > 1e-3 * last[0].abs().max()
