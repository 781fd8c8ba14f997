"""Grammar processes under attack and under faults: what others asked for does not change."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammar_process import checking, masking, processes
from kvell.engine.sampling.grammar_process.checking import GrammarChecks, Verdict
from kvell.engine.sampling.grammar_process.processes import Worker
from kvell.engine.sampling.grammars import Allowed, Grammars
from kvell.errors import ChangeSomething, TryLater
from kvell.models.text.tokenizer import Tokenizer
from tests.engine.sampling.random_schemas import random_schema
from tests.engine.sampling.seen import num_waiting, use_parts
from tests.engine.sampling.walking import END, VOCAB, masked, masks_of, release, walk
from tests.engine.sampling.workers import children, workers_of
from tests.models.cases import some_fast
from tests.patience import until

ISSUE = "start: A\nA: /.*d.{15}/ & /.*r.{14}/ & ~/.*0.{13}/"
BOMBS = [
    (ISSUE, "takes more than 1 s or 32 MiB"),
    ("start: A\nA: /.*a.{14}/ & /.*b.{15}/ & ~/.*c.{16}/", "fuel exhausted"),
]
SCHEMAS = [StructuredOutputs(json=json.dumps(random_schema(seed))) for seed in (1, 2)]
PATIENCE_SECONDS = 60.0
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture
def own(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer.as_json, VOCAB, [END])
    yield grammars
    grammars.close()


def with_checks(grammars: Grammars) -> set[int]:
    """Check the schemas, so that their masks are quick; the workers of checks."""
    for asked in SCHEMAS:
        grammars.check(asked)
    return workers_of(grammars)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def steps(
    grammars: Grammars, outputs: list[list[int]], between: Callable[[int], None] = lambda _: None
) -> list[dict[int, Allowed | None]]:
    """The masks of two requests, token by token."""
    found = []
    for end in range(min(map(len, outputs))):
        wanted = [
            masked(handle, SCHEMAS[handle], output[:end]) for handle, output in enumerate(outputs)
        ]
        grammars.answers.ask(wanted)
        between(end)
        found.append(masks_of(grammars, wanted))
    release(grammars, [0, 1])
    return found


def assert_same(
    found: list[dict[int, Allowed | None]], expected: list[dict[int, Allowed | None]]
) -> None:
    for one, other in zip(found, expected, strict=True):
        for handle in (0, 1):
            mask, due = one[handle], other[handle]
            assert mask is not None and due is not None and np.array_equal(mask, due)


@pytest.mark.parametrize(("bomb", "why"), BOMBS)
def test_a_grammar_that_explodes_is_refused_and_others_are_not(
    own: Grammars, bomb: str, why: str
) -> None:
    asked = StructuredOutputs(grammar=bomb)
    own.check(SCHEMAS[0])
    for _ in range(2):  # the second time it is known
        with pytest.raises(ChangeSomething, match=f"is too complex: .*{why}") as told:
            own.check(asked)
        assert (told.value.field, told.value.bound) == ("structured_outputs.grammar", "grammar")
    own.check(SCHEMAS[1])


def test_a_check_waits_for_nobody_and_masks_wait_for_no_check(
    own: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "ANSWER_SECONDS", PATIENCE_SECONDS)
    output = walk(own, SCHEMAS[0], 1)
    own.check(SCHEMAS[1])
    checker = own.checks.worker
    assert checker is not None
    os.kill(checker.pid, signal.SIGSTOP)
    bomb = own.checks.check(StructuredOutputs(grammar=ISSUE))
    wanted = masked(9, SCHEMAS[0], output)
    assert masks_of(own, [wanted])[9] is not None
    assert not bomb.done(), "the mask came first"
    os.kill(checker.pid, signal.SIGCONT)
    assert bomb.result(PATIENCE_SECONDS).is_too_complex


@pytest.mark.parametrize("number", some_fast(SIGNALS, [signal.SIGSTOP]))
def test_a_worker_that_ends_or_hangs_costs_only_time(
    own: Grammars, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masking, "LATER_SECONDS", 0.5)
    checkers = with_checks(own)
    outputs = [walk(own, asked, 1) for asked in SCHEMAS]
    expected = steps(own, outputs)
    hit: list[int] = []

    def strike(end: int) -> None:
        if end % 2 and len(hit) < 2:
            [worker] = workers_of(own) - checkers
            os.kill(worker, number)
            hit.append(worker)

    assert_same(steps(own, outputs, strike), expected)
    assert len(set(hit)) == 2, "each was another"
    until(lambda: not set(hit) & workers_of(own))


@pytest.mark.parametrize("number", some_fast(SIGNALS, [signal.SIGKILL]))
def test_a_template_that_ends_or_hangs_is_started_again(
    own: Grammars, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FORK_SECONDS", 0.5)
    checkers = with_checks(own)
    outputs = [walk(own, asked, 1) for asked in SCHEMAS]
    expected = steps(own, outputs)
    before = own.processes.template
    assert before is not None
    [worker] = children(before.pid) - checkers
    os.kill(before.pid, number)
    if number == signal.SIGSTOP:  # else the worker ends with the template
        os.kill(worker, signal.SIGKILL)
    until(lambda: has_ended(worker))  # before, nobody needs the template
    assert_same(steps(own, outputs), expected)
    after = own.processes.template
    assert after is not None and after.pid != before.pid


def test_a_worker_that_hangs_at_every_check_is_no_fault_of_the_grammar(
    own: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.check(SCHEMAS[0])
    monkeypatch.setattr(checking, "ANSWER_SECONDS", 0.3)
    fork = own.processes.fork

    def stopped(room_bytes: int, niceness: int = 0) -> processes.Worker:
        worker = fork(room_bytes, niceness)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    monkeypatch.setattr(own.processes, "fork", stopped)
    [worker] = workers_of(own)
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(TryLater, match="too busy"):
        own.check(SCHEMAS[1])
    monkeypatch.undo()
    own.check(SCHEMAS[1])


def test_a_mask_that_takes_too_long_ends_its_request_only(
    own: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bomb goes off in the worker of masks: it came from another instance, say."""
    output: list[int] = []
    wanted = [
        masked(0, SCHEMAS[0], output),
        masked(1, StructuredOutputs(grammar=ISSUE), output),
        masked(2, SCHEMAS[1], output),
    ]
    for _ in range(2):
        found = masks_of(own, wanted)
        assert found[0] is not None and found[1] is None and found[2] is not None
    with pytest.raises(ChangeSomething, match="is too complex"):
        own.check(wanted[1].asked)


def of_tenant(own: Grammars, name: str) -> Future[Verdict]:
    """Try a grammar of the tenant that its name begins with."""
    return own.checks.check(StructuredOutputs(choice=(name, "other")), name[0])


def _note(order: list[str], name: str, _done: Future[Verdict]) -> None:
    order.append(name)


def test_tenants_take_turns_and_have_equal_parts(own: Grammars) -> None:
    """b's and c's grammars do not wait for all of a's."""
    own.check(SCHEMAS[0])  # the worker is there
    use_parts(own, 6)
    [checker] = workers_of(own)
    os.kill(checker, signal.SIGSTOP)
    order: list[str] = []
    futures = []
    for name in ("a0", "a1", "a2", "a3", "b4", "c5"):
        futures.append(of_tenant(own, name))
        futures[-1].add_done_callback(partial(_note, order, name))
    with pytest.raises(TryLater, match="4 grammars are waiting to be compiled"):
        of_tenant(own, "a6")
    os.kill(checker, signal.SIGCONT)
    assert all(one.result(PATIENCE_SECONDS) == checking.GOOD for one in futures)
    assert max(order.index("b4"), order.index("c5")) < order.index("a2")
    until(lambda: not num_waiting(own))


def test_a_worker_that_others_end_says_nothing_of_the_grammar(
    own: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = GrammarChecks.ask_worker

    def killed(checks: GrammarChecks, worker: Worker, grammar: StructuredOutputs) -> Verdict:
        os.kill(worker.pid, signal.SIGKILL)
        return asked(checks, worker, grammar)

    monkeypatch.setattr(GrammarChecks, "ask_worker", killed)
    with pytest.raises(TryLater, match="something else ended"):
        own.check(SCHEMAS[1])
    monkeypatch.setattr(GrammarChecks, "ask_worker", asked)
    own.check(SCHEMAS[1])


def test_no_more_than_so_many_grammars_wait(own: Grammars) -> None:
    use_parts(own, 2)
    first = own.checks.check(StructuredOutputs(grammar=ISSUE))
    second = own.checks.check(SCHEMAS[0])
    assert own.checks.check(SCHEMAS[0]) is second, "the same grammar waits once"
    with pytest.raises(TryLater, match="2 grammars are waiting to be compiled") as told:
        own.checks.check(SCHEMAS[1])
    assert told.value.bound == "grammar"
    assert first.result(PATIENCE_SECONDS).is_too_complex
    assert not second.result(PATIENCE_SECONDS).problem
    own.check(SCHEMAS[1])


def test_processes_end_with_their_grammars(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer.as_json, VOCAB, [END])
    grammars.check(SCHEMAS[0])
    template = grammars.processes.template
    assert template is not None
    pids = {template.pid, *children(template.pid)}
    assert len(pids) == 2
    del template, grammars  # nobody closes it
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_what_others_hold_open_is_not_inherited(own: Grammars) -> None:
    with os.fdopen(os.memfd_create("of-the-instance"), "wb") as held:
        os.set_inheritable(held.fileno(), True)
        own.check(SCHEMAS[0])
        template = own.processes.template
        assert template is not None
        for pid in (template.pid, *children(template.pid)):
            names = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
            assert not any("of-the-instance" in name for name in names)
            assert sum(name.startswith("socket:") for name in names) == 1
