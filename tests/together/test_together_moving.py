"""Requests move and borrow with every mechanism of an engine: the answers stay the same bits."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from kvell.engine.moving.handovers import Handovers
from kvell.engine.running import pool_link
from kvell.engine.running.pool_link import SectionAnswers
from kvell.memory import GroupKind
from kvell.mempool.rendezvous import PageTransport
from kvell.mempool.transports.lent_attention import RightsWords
from kvell.models.partials.served_layers import ServedLayers
from tests.models.cases import long_unless
from tests.models.harness import prompt_ids
from tests.models.serving.lending import said_by
from tests.together.engines import (
    ALONE,
    CHANGES_ANSWERS,
    GREEDY,
    LONG,
    LONGEST,
    PAIRS,
    PROMPTS,
    Mechanisms,
    engine_with,
    pool_of,
)

every_mechanism = pytest.mark.parametrize(
    "mechanisms",
    [
        pytest.param(mechanisms, id="+".join(mechanisms), marks=long_unless(mechanisms in ALONE))
        for mechanisms in (*ALONE, *PAIRS)
    ],
)


def expected(name: str, mechanisms: Mechanisms, model: str = "") -> list[int]:
    own = tuple(one for one in CHANGES_ANSWERS if one in mechanisms)
    return _alone(name, own, model)


@cache
def _alone(name: str, mechanisms: Mechanisms, model: str) -> list[int]:
    prompt = LONG if name == "long" else PROMPTS[name]
    [said] = said_by(engine_with(mechanisms), {name: prompt}, GREEDY, model).values()
    return said.tokens


@every_mechanism
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_prompt_is_computed_at_one_and_answered_by_the_other(
    mechanisms: Mechanisms, transport: PageTransport, tmp_path: Path
) -> None:
    models = ("", "m1") if "two models" in mechanisms else ("",)
    with pool_of(mechanisms, tmp_path, "ab", transport) as several:
        for turn in range(2):
            for at, (name, prompt) in enumerate(PROMPTS.items()):
                for model in models:
                    each = f"{name}/{turn}/{model}"
                    several.submit(each, prompt, at % 2, GREEDY, model=model)
            several.run()
        for name, tokens in several.tokens.items():
            prompt_name, _, model = name.split("/")
            assert tokens == expected(prompt_name, mechanisms, model), name
        assert sorted(several.moved) == sorted(several.tokens)
        several.check_pools()


@every_mechanism
def test_a_request_migrates_in_the_middle_of_its_answer(
    mechanisms: Mechanisms, tmp_path: Path
) -> None:
    with pool_of(mechanisms, tmp_path, "ab") as several:
        several.submit("q90", PROMPTS["q90"], 0, GREEDY, goes_to="")
        several.submit("q64", PROMPTS["q64"], 0, GREEDY, goes_to="")
        several.run(lambda: len(several.tokens["q90"]) >= 3)
        several.migrate("q90", 0, "b")
        several.run(lambda: bool(several.moved), listens_seconds=1.0)
        several.run()
        assert several.moved == ["q90"]
        assert several.tokens == {name: expected(name, mechanisms) for name in ("q90", "q64")}
        several.check_pools()


@every_mechanism
def test_sections_of_a_request_are_read_at_creditors(
    mechanisms: Mechanisms, tmp_path: Path
) -> None:
    models = ("", "m1") if "two models" in mechanisms else ("",)
    with pool_of(mechanisms, tmp_path) as several:
        for model in models:
            name = f"long/{model}"
            several.submit(name, LONG, 0, GREEDY, goes_to="", model=model)
            several.run(several.answers(name))
            for section in range(2):
                several.move(name, 1, "bc"[section])
                several.run(several.has_filled(name, section + 1), 0.02)
                several.run(several.has_away(name, section + 1), 0.05)
            several.run()
            assert several.tokens[name] == expected("long", mechanisms, model)
        several.check_pools()


@every_mechanism
def test_creditors_compute_attention_over_sections(mechanisms: Mechanisms, tmp_path: Path) -> None:
    """Over TCP no page is read in place: sections have the tokens of real ones."""
    models = ("", "m1") if "two models" in mechanisms else ("",)
    longer = prompt_ids(1100)
    with pool_of(mechanisms, tmp_path, "ab", "tcp", section_tokens=512) as several:
        for model in models:
            name = f"long/{model}"
            [said] = said_by(
                engine_with(mechanisms, max_model_len=LONGEST),
                {"long": longer},
                GREEDY,
                model,
            ).values()
            several.submit(name, longer, 0, GREEDY, goes_to="", model=model)
            several.run(several.answers(name))
            several.move(name, 1, "b")
            several.run(several.has_away(name, 1), 0.02)
            several.run()
            assert several.tokens[name] == said.tokens
        several.check_pools()
        stats = several.engines[0].core.stats()
        assert stats.sections["lost"] == 0, "the creditor has answered all queries"


@pytest.mark.parametrize("mechanisms", [("draft",), ("two models",), ("draft", "two models")])
def test_a_creditor_answers_each_model_over_its_own_groups(
    mechanisms: Mechanisms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[Mapping[int, ServedLayers]] = []

    class Recorded(SectionAnswers):
        def __init__(self, models: Mapping[int, ServedLayers], words: RightsWords) -> None:
            answered.append(models)
            super().__init__(models, words)

    monkeypatch.setattr(pool_link, "SectionAnswers", Recorded)
    with pool_of(mechanisms, tmp_path, "a", "tcp") as several:
        core = several.engines[0].core
        layout = core.memory.layout
        [models] = answered
        owners = [(group.model, group.is_draft) for group in layout.groups]
        expected = [
            [i for i, g in enumerate(layout.groups) if owners[i] == own and g.kind.value == "full"]
            for own in sorted(set(owners), key=lambda own: (own[1], own))
        ]
        assert [models[number].full_groups for number in sorted(models)] == expected
        assert isinstance(core.pool, Handovers)
        assert core.pool.agent.asked_models == {model for model, _ in owners}


def test_the_largest_section_of_several_models_is_reported(tmp_path: Path) -> None:
    with pool_of(("two models",), tmp_path, "a") as several:
        groups = several.engines[0].core.memory.layout.groups
        sizes = {
            model: sum(
                group.token_bytes
                for group in groups
                if (group.model, group.kind) == (model, GroupKind.FULL)
            )
            for model in ("m0", "m1")
        }
        assert 0 < min(sizes.values()) < max(sizes.values())
        assert several.engines[0].ready().facts.section_bytes == 512 * max(sizes.values())
