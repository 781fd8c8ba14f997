"""Attention over pages that lie in another engine's pool: the same bits as over one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.vocabulary import MIB
from tests.models.harness import prompt_ids
from tests.models.serving.engines import engine_of, marked
from tests.models.serving.lending import (
    PARAMS,
    SECTION_TOKENS,
    Lending,
    Said,
    said_by,
    small_sections,
)

STEP_BELOW_ONE = 2.0**-22
"""Probabilities are float32: those that are nearly one have no logarithms between."""
LONG = prompt_ids(130)
SHORT = {f"s{length}": prompt_ids(length, seed=9) for length in (5, 40, 70)}
MOST = 3
CASES = [
    ("LlamaForCausalLM", True),
    ("LlamaForCausalLM", False),
    ("Gemma3ForCausalLM", True),
    ("FalconH1ForCausalLM", True),
    ("FalconH1ForCausalLM", False),
    ("MiniCPM3ForCausalLM", False),
]
FAST = (CASES[0], CASES[3], CASES[5])
every_case = pytest.mark.parametrize(("architecture", "is_fused"), marked(CASES, FAST))


def check(said: dict[str, Said], expected: dict[str, Said], is_fused: bool) -> None:
    """The same bits, but for what torch's modules make of requests that share a step: those are
    short, and lie at one instance.
    """
    assert {name: one.tokens for name, one in said.items()} == {
        name: one.tokens for name, one in expected.items()
    }
    exact = expected if is_fused else {"long": expected["long"]}
    assert {name: said[name] for name in exact} == exact
    for name, one in expected.items():
        told = [each.logprob for each in said[name].logprobs]
        due = [each.logprob for each in one.logprobs]
        assert told == pytest.approx(due, rel=1e-3, abs=STEP_BELOW_ONE)


@contextmanager
def lending(
    architecture: str, is_fused: bool, folder: Path, names: str = "abc", batched: int = 256
) -> Iterator[Lending]:
    make_folder(folder)
    engines = [
        engine_of(
            architecture,
            is_fused,
            8 * MIB,
            batched,
            pool_place=FolderRendezvous(name, folder),
        )
        for name in names
    ]
    with small_sections(engines):
        yield Lending(engines)


def alone(
    architecture: str, is_fused: bool, prompts: dict[str, list[int]], batched: int = 256
) -> dict[str, Said]:
    return said_by(engine_of(architecture, is_fused, batched=batched), prompts)


@every_case
def test_an_answer_is_the_same_bits_while_its_sections_go(
    architecture: str, is_fused: bool, tmp_path: Path
) -> None:
    """Sections go one after the other, to two creditors, who answer short requests meanwhile."""
    expected = alone(architecture, is_fused, {"long": LONG, **SHORT})
    with lending(architecture, is_fused, tmp_path) as several:
        several.submit("long", LONG, 0, PARAMS, goes_to="")
        several.run(several.answers("long"))
        for index, (name, prompt) in enumerate(SHORT.items()):
            several.submit(name, prompt, 1 + index % 2, PARAMS, goes_to="")
        seen = []
        for section in range(MOST):
            several.move("long", 1, "bc"[section % 2])
            several.hear(several.has_filled("long", section + 1))
            several.run(several.has_away("long", section + 1), 0.05)
            seen.append(several.away("long"))
        assert seen == [1, 2, 3] and "long" not in several.ends
        several.run()
        check(several.said, expected, is_fused)
        several.check_pools()


@every_case
def test_a_prompt_goes_while_it_is_computed(
    architecture: str, is_fused: bool, tmp_path: Path
) -> None:
    expected = alone(architecture, is_fused, {"long": LONG}, batched=8)
    with lending(architecture, is_fused, tmp_path, "ab", batched=8) as several:
        several.submit("long", LONG, 0, PARAMS, goes_to="")
        core = several.engines[0].core
        several.run(lambda: any(one.settled >= SECTION_TOKENS for one in core.running))
        several.move("long", MOST, "b")
        several.hear(several.has_filled("long", 1))
        most = 0

        def ended() -> bool:
            nonlocal most
            if not several.tokens["long"]:
                most = max(most, several.away("long"))
            return len(several.ends) == 1

        several.run(ended, 0.02)
        assert most, "nothing was away before the prompt was computed"
        several.run()
        check(several.said, expected, is_fused)
        several.check_pools()
