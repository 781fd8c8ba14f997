"""Requests that move between two real engines, over tiny models of every kind of group."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.mempool.rendezvous import (
    PD_CACHINGS,
    PageTransport,
    PdCaching,
)
from tests.models.cases import covering
from tests.models.harness import prompt_ids
from tests.models.serving.engines import MARKED
from tests.models.serving.pairs import (
    GREEDY,
    PROMPTS,
    SEEDED,
    TRANSPORTS,
    alone,
    case_and_transport,
    pair_of,
)

SAMPLING = [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")]


@covering({"architecture,is_fused": MARKED, "params": SAMPLING}, together=1)
def test_answers_are_those_of_one_engine(
    architecture: str, is_fused: bool, params: SamplingParams, tmp_path: Path
) -> None:
    """In both directions at once; the second round finds the first one's pages on both sides."""
    expected = alone(architecture, is_fused, params)
    with pair_of(architecture, is_fused, tmp_path) as pair:
        for turn in range(2):
            for at, (name, prompt) in enumerate(PROMPTS.items()):
                pair.submit(f"{name}/{turn}", prompt, at % 2, params)
            pair.run()
            told = {name: pair.tokens[f"{name}/{turn}"] for name in PROMPTS}
            assert told == expected
        assert sorted(pair.moved) == sorted(pair.tokens)
        pair.check_pools()


FIRST = prompt_ids(90)
MORE = prompt_ids(12, seed=3)


@covering({"architecture,is_fused": MARKED, "pd_caching": PD_CACHINGS, "transport": TRANSPORTS})
def test_a_second_turn_in_every_mode(
    architecture: str,
    is_fused: bool,
    pd_caching: PdCaching,
    transport: PageTransport,
    tmp_path: Path,
) -> None:
    """Its hit joins what either side has computed of the first turn, as the mode says."""
    [answer] = alone(architecture, is_fused, GREEDY, {"first": FIRST}).values()
    second = [*FIRST, *answer, *MORE]
    expected = alone(architecture, is_fused, SEEDED, {"second": second})
    with pair_of(architecture, is_fused, tmp_path, transport, pd_caching) as pair:
        pair.submit("first", FIRST, 0, GREEDY)
        pair.run()
        assert pair.tokens["first"] == answer
        pair.submit("second", second, 0, SEEDED)
        pair.run()
        assert pair.tokens["second"] == expected["second"]
        assert pair.moved == ["first", "second"]
        cached = pair.ends["second"].cached_tokens
        known = [0, len(FIRST), len(FIRST), len(FIRST) + len(answer) - 1][pd_caching]
        assert cached == known
        pair.check_pools()


@covering({"architecture,is_fused": MARKED, "made": [1, 5, 10]}, together=1)
def test_a_request_migrates_in_the_middle_of_its_answer(
    architecture: str, is_fused: bool, made: int, tmp_path: Path
) -> None:
    """With its penalties, beside another that stays."""
    prompts = {"goes": FIRST, "stays": prompt_ids(40, seed=2)}
    params = replace(SEEDED, max_tokens=40)
    expected = alone(architecture, is_fused, params, prompts)
    with pair_of(architecture, is_fused, tmp_path) as pair:
        for name, prompt in prompts.items():
            pair.submit(name, prompt, 0, params, goes_to="")
        pair.run(lambda: len(pair.tokens["goes"]) >= made)
        pair.migrate("goes", 0, "b")
        pair.run(lambda: bool(pair.moved), listens_seconds=1.0)
        assert made < len(pair.tokens["goes"]) < 40, "it went on while it was copied"
        pair.run()
        assert pair.tokens == expected
        assert pair.moved == ["goes"]
        pair.check_pools()


@case_and_transport
def test_a_prefix_is_pulled_from_a_third_instance(
    architecture: str, is_fused: bool, transport: PageTransport, tmp_path: Path
) -> None:
    """One computes what follows, and the other goes on."""
    [answer] = alone(architecture, is_fused, GREEDY, {"first": FIRST}).values()
    second = [*FIRST, *answer, *MORE]
    expected = alone(architecture, is_fused, SEEDED, {"second": second})
    with pair_of(architecture, is_fused, tmp_path, transport, names="abc") as pair:
        pair.submit("first", FIRST, 2, GREEDY, goes_to="")
        pair.run()
        pair.submit("second", second, 0, SEEDED, pulls_from="c")
        pair.run()
        assert pair.tokens["second"] == expected["second"]
        assert pair.moved == ["second"]
        assert pair.ends["second"].cached_tokens == len(FIRST) + len(answer) - 1
        pair.check_pools()
