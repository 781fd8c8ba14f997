"""Requests whose pages are pulled while their last chunk is computed, over tiny models."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvell.engine.engine import Engine
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running.pool_link import PoolLink
from kvell.engine.running.runner import ModelRunner
from kvell.mempool.rendezvous import PageTransport
from kvell.mempool.transports.mover import PullExecutor
from kvell.pages.stages import stages_of
from tests.models.harness import prompt_ids
from tests.models.serving.pairs import (
    GREEDY,
    PROMPTS,
    SEEDED,
    Pair,
    alone,
    case_and_transport,
    every_transport,
    pair_of,
)


def mover_of(engine: Engine) -> PullExecutor:
    link = engine.link
    assert isinstance(link, PoolLink)
    return link.node.mover


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def num_stages(engine: Engine) -> int:
    return len(stages_of(engine.core.memory.layout.groups))


class Streams:
    """The transfers that streamed from an engine, and what was told of them."""

    def __init__(self, engine: Engine, told: Callable[[int], None] = lambda _: None) -> None:
        self.plans: list[StepPlan] = []
        self.stages: list[int] = []
        runner = runner_of(engine)
        tells, run = runner.tells_written, runner.run
        assert tells is not None

        def tells_and_notes(numbers: Sequence[int], stage: int) -> None:
            tells(tuple(numbers), stage)
            self.stages.append(stage)
            told(stage)

        def runs_and_notes(plan: StepPlan) -> object:
            self.plans += [plan] if plan.streams else []
            return run(plan)

        runner.tells_written = tells_and_notes
        runner.run = runs_and_notes  # type: ignore[method-assign, assignment]


@case_and_transport
def test_answers_are_those_of_one_engine(
    architecture: str, is_fused: bool, transport: PageTransport, tmp_path: Path
) -> None:
    """In both directions at once, whole prompts and those of which the other has a part."""
    expected = alone(architecture, is_fused, SEEDED)
    with pair_of(architecture, is_fused, tmp_path, transport, method="by_layer") as pair:
        streams = [Streams(engine) for engine in pair.engines]
        for turn in range(2):
            for at, (name, prompt) in enumerate(PROMPTS.items()):
                pair.submit(f"{name}/{turn}", prompt, at % 2, SEEDED)
            pair.run()
            told = {name: pair.tokens[f"{name}/{turn}"] for name in PROMPTS}
            assert told == expected
        assert sorted(pair.moved) == sorted(pair.tokens), "a transfer was abandoned"
        has_stages = num_stages(pair.engines[0]) > 1
        assert all(bool(one.plans) == has_stages for one in streams)
        pair.check_pools()


@case_and_transport
def test_stages_come_while_the_pass_computes(
    architecture: str, is_fused: bool, transport: PageTransport, tmp_path: Path
) -> None:
    """The pass goes on only when the stage that it has written has come."""
    prompt = prompt_ids(90)
    expected = alone(architecture, is_fused, GREEDY, {"q": prompt})
    with pair_of(architecture, is_fused, tmp_path, transport, method="by_layer") as pair:
        sender, receiver = pair.engines
        mover, came = mover_of(receiver), [0]

        def wait(stage: int) -> None:
            while mover.copied_bytes == came[-1]:
                pair.take(receiver.woken())
                pair.listen(0.05)
            came.append(mover.copied_bytes)

        streams = Streams(sender, wait)
        pair.submit("q", prompt, 0, GREEDY)
        pair.run()
        assert pair.tokens == expected
        assert pair.moved == ["q"]
        stages = num_stages(sender)
        assert streams.stages == (list(range(stages)) if stages > 1 else [])
        check_bytes(pair, came)
        pair.check_pools()


def check_bytes(pair: Pair, came: Sequence[int]) -> None:
    """No byte of a page by layer came twice: what came in all is no more than whole pages."""
    groups = pair.engines[0].core.memory.layout.groups
    used = sum(group.page_stride_bytes * -(-90 // group.page_tokens) for group in groups)
    assert came[-1] <= mover_of(pair.engines[1]).copied_bytes
    assert mover_of(pair.engines[1]).copied_bytes <= used


@every_transport
def test_a_hint_that_came_too_early_would_be_seen(transport: PageTransport, tmp_path: Path) -> None:
    """Told before it is written, a stage is read as it was: the answer shows it."""
    case = ("LlamaForCausalLM", True)
    prompt = prompt_ids(90)
    expected = alone(*case, GREEDY, {"q": prompt})
    with pair_of(*case, tmp_path, transport, method="by_layer") as pair:
        sender, receiver = pair.engines
        mover, link = mover_of(receiver), sender.link
        runner = runner_of(sender)
        assert isinstance(link, PoolLink)
        tells, run = runner.tells_written, runner.run
        assert tells is not None

        def run_late(plan: StepPlan) -> object:
            if plan.streams:
                tells(plan.streams, num_stages(sender) - 1)
                while not mover.copied_bytes:
                    pair.take(receiver.woken())
                    pair.listen(0.05)
            return run(plan)

        runner.run = run_late  # type: ignore[method-assign, assignment]
        pair.submit("q", prompt, 0, GREEDY)
        pair.run()
        assert pair.moved == ["q"]
        assert pair.tokens != expected


@every_transport
def test_a_request_that_ends_with_its_first_token_gives_its_pages_back(
    transport: PageTransport, tmp_path: Path
) -> None:
    """Its pages were offered, and maybe read; nobody may read them any more."""
    case = ("LlamaForCausalLM", True)
    prompt = prompt_ids(90)
    one = type(GREEDY)(temperature=0, max_tokens=1, ignore_eos=True)
    expected = alone(*case, one, {"q": prompt})
    with pair_of(*case, tmp_path, transport, method="by_layer") as pair:
        streams = Streams(pair.engines[0])
        pair.submit("q", prompt, 0, one)
        pair.run()
        assert (len(streams.plans), pair.moved, pair.tokens) == (1, [], expected)
        pair.run(lambda: not pair.holds())
        pair.check_pools()
