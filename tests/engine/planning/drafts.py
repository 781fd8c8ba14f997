from typing import Any

from kvell.engine.protocol.sampling_params import SamplingParams
from tests.engine.speculating import (
    GREEDY,
    Served,
    blurred,
    prompts,
    served,
    words_module,
)


def answers(run: Served, sampling: SamplingParams = GREEDY) -> dict[str, list[int]]:
    """Two waves: the second begins like the first."""
    for seed in (0, 1):
        run.ask(prompts(5, seed), sampling)
    run.ask({f"again-{name}": prompt for name, prompt in prompts(2, 0).items()}, sampling)
    return run.outputs


_plain: dict[tuple[str, str], Served] = {}


def plain(architecture: str, sampling: SamplingParams = GREEDY) -> Served:
    """An engine without draft tokens that has given its answers: one for all tests."""
    key = architecture, repr(sampling)
    if key not in _plain:
        run = served(words_module(architecture))
        answers(run, sampling)
        _plain[key] = run
    return _plain[key]


def assert_drafted_both_ways(run: Served) -> None:
    stats = run.stats
    assert 0 < stats.spec_decode_accepted_tokens < stats.spec_decode_draft_tokens
    assert max(work.proposed for plan in run.plans for work in plan.work) > 1


def draft_of(module: Any, kind: str) -> Any:
    if kind == "blurred":
        return blurred(module, 0.05)
    return words_module(kind, seed=8)
