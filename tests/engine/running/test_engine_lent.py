"""A step's queries over connections, and what creditors answer: the bits of a local pass."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.requests.plan import BorrowedPages, StepPlan
from kvell.engine.running.batching import PageTables
from kvell.engine.running.lent import queries as queries_file
from kvell.engine.running.lent.queries import Queries
from kvell.engine.running.pool_link import SectionAnswers
from kvell.mempool.transports.tcp.partials import PartialsLine
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.vocabulary import SECTION_TOKENS, StepNumber
from tests.depth import few
from tests.engine.running.batches import FULL, SLIDING, tables, work
from tests.mempool.transports.partials import Creditor
from tests.models.lent_pass import (
    NAMES,
    Lender,
    Prefix,
    Work,
    lent_logits,
    local_logits,
    prefix_of,
    rows_of,
)
from tests.oracle.tables import ReferenceTables

ARCHITECTURES = ["LlamaForCausalLM", "Gemma2ForCausalLM"]
HANDLES = (11, 12, 13)
OWNERS = ("x", "y")


@pytest.fixture(params=[ReferenceTables, PageTables])
def kind(request: pytest.FixtureRequest) -> type[PageTables]:
    found: type[PageTables] = request.param
    return found


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    """Models last as long as this file's tests."""
    yield
    prefix_of.cache_clear()


class TcpLender:
    """A creditor with a pool of its own, and a connection to it."""

    def __init__(self, prefix: Prefix, seed: int) -> None:
        self.pool = Lender(prefix, seed, starts=False)
        self.sections = SectionAnswers({0: self.pool.layers}, self.pool.words)
        self._creditor = Creditor(self.sections.answer)
        self.line = PartialsLine(self._creditor.opens)

    def lend(self, name: str, section: int) -> int:
        """Hold a copy of a request's section for the debtor; returns the right to read it."""
        served = self.pool.service
        self.pool.service = _ToDebtor(self.sections)  # type: ignore[assignment]
        right = self.pool.lend(name, section)
        self.pool.service = served
        return right

    def close(self) -> None:
        self.line.close()
        self._creditor.close()
        self.sections.close()


class _ToDebtor:
    """Lends to the debtor that connections are of."""

    def __init__(self, sections: SectionAnswers) -> None:
        self._sections = sections

    def lend(self, right: int, _debtor: int, pages: Sequence[Sequence[int]]) -> None:
        self._sections.lend(right, "p", pages)


@contextmanager
def lenders(prefix: Prefix) -> Iterator[dict[str, TcpLender]]:
    with ExitStack() as stack:
        found = {name: TcpLender(prefix, seed) for seed, name in enumerate(OWNERS)}
        for one in found.values():
            stack.callback(one.close)
        yield found


def plan_of(found: dict[str, TcpLender], works: Sequence[Work]) -> StepPlan:
    """A plan whose work has its first sections at these creditors."""
    borrowed = [
        BorrowedPages(HANDLES[index], owner, 1, found[owner].lend(NAMES[index], section), True)
        for index, one in enumerate(works)
        for section, owner in enumerate(one.owners)
    ]
    parts = [work(HANDLES[index], one.before, one.new) for index, one in enumerate(works)]
    return StepPlan(StepNumber(1), work=tuple(parts), borrowed=tuple(borrowed))


def asked(prefix: Prefix, works: Sequence[Work], queries: Queries, plan: StepPlan) -> torch.Tensor:
    def expecting(batch: ForwardBatch) -> ForwardBatch:
        queries.begin(plan)
        queries.expect(0, plan.work)
        return batch

    logits = lent_logits(prefix, works, queries.remote[0], [], change=expecting)
    queries.note(0, plan.work)
    return logits


def test_steps_in_turn_have_the_bits_of_local_ones() -> None:
    """Decodes and chunks, more creditors and fewer, over the same connections."""
    prefix = prefix_of(ARCHITECTURES[0], torch.float32, 1)
    turns = [
        [Work(1300, 1, ("x", "y")), Work(700, 1)],
        [Work(1100, 40, ("x", "x")), Work(1650, 1, ("y", "x", "y"))],
        [Work(600, 3), Work(900, 1, ("y",)), Work(1540, 9, ("x", "x"))],
    ]
    with lenders(prefix) as found:
        queries = Queries(lambda name, _: found[name].line)
        for works in turns:
            plan = plan_of(found, works)
            assert torch.equal(asked(prefix, works, queries, plan), local_logits(prefix, works))
            assert queries.lacking == set()


@few()
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    before=st.integers(1030, 1690),
    new=st.integers(1, 10),
    owners=st.lists(st.sampled_from(OWNERS), min_size=1, max_size=2),
)
def test_wherever_sections_lie_the_bits_are_the_same(
    architecture: str, before: int, new: int, owners: list[str]
) -> None:
    prefix = prefix_of(architecture, torch.float32, 1)
    works = [Work(before, new, tuple(owners)), Work(777, 1)]
    with lenders(prefix) as found:
        plan = plan_of(found, works)
        queries = Queries(lambda name, _: found[name].line)
        assert torch.equal(asked(prefix, works, queries, plan), local_logits(prefix, works))


@pytest.mark.parametrize("what", ["gone", "revoked", "another's", "unknown"])
def test_rows_that_lack_records_are_named_and_no_others_change(what: str) -> None:
    prefix = prefix_of(ARCHITECTURES[0], torch.float32, 1)
    works = [Work(1300, 1, ("x", "y")), Work(1290, 2, ("x",)), Work(700, 1)]
    with lenders(prefix) as found:
        plan = plan_of(found, works)
        gone = next(one for one in plan.borrowed if one.instance == "y")
        lines = {"x": found["x"].line, "y": found["y"].line}
        if what == "gone":
            del lines["y"]
        elif what == "revoked":
            found["y"].pool.revoke(gone.right)
            found["y"].sections.end(gone.right)
        elif what == "another's":
            found["y"].sections.end(gone.right)
            pages = found["y"].pool.pages()
            found["y"].sections.lend(gone.right, "another", pages)
        else:
            changed = [one if one != gone else one._replace(right=63) for one in plan.borrowed]
            plan = StepPlan(plan.step, work=plan.work, borrowed=tuple(changed))
        queries = Queries(lambda name, _: lines.get(name))
        logits, local = asked(prefix, works, queries, plan), local_logits(prefix, works)
        assert queries.lacking == {HANDLES[0]}
        for index in (1, 2):
            assert torch.equal(logits[rows_of(works, index)], local[rows_of(works, index)])
        later = plan_of(found, works)
        queries = Queries(lambda name, _: found[name].line)
        assert torch.equal(asked(prefix, works, queries, later), local)


def test_a_creditor_that_does_not_answer_in_time_is_asked_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = prefix_of(ARCHITECTURES[0], torch.float32, 1)
    works = [Work(1300, 1, ("x", "y")), Work(700, 1)]
    with lenders(prefix) as found:
        plan = plan_of(found, works)
        queries = Queries(lambda name, _: found[name].line)
        monkeypatch.setattr(queries_file, "PATIENCE_SECONDS", 0.0)
        asked(prefix, works, queries, plan)
        assert queries.lacking == {HANDLES[0]}
        monkeypatch.undo()
        assert torch.equal(asked(prefix, works, queries, plan), local_logits(prefix, works))
        assert queries.lacking == set()


def test_what_is_lent_again_after_its_end_is_answered_again() -> None:
    prefix = prefix_of(ARCHITECTURES[0], torch.float32, 1)
    with lenders(prefix) as found:
        sections = found["x"].sections
        right = found["x"].lend("a", 0)
        with pytest.raises(ValueError, match="lent already"):
            sections.lend(right, "p", found["x"].pool.pages())
        sections.end(right)
        sections.end(right)
        sections.lend(right, "p", found["x"].pool.pages())
        sections.close()
        sections.end(right)
        assert sections.answer("p", b"") == b""


def test_tables_begin_behind_what_is_away(kind: type[PageTables]) -> None:
    """Only those of full attention, only in the step that says so."""
    rows = [(5, 0, at, 10 + at) for at in range(3)] + [(5, 1, at, 20 + at) for at in range(3)]
    made = tables(kind, *rows)
    size = FULL.page_tokens
    start = 2 * size
    made.update(StepPlan(StepNumber(1), away=((5, size),)))
    found = made.arrays(0, [work(5, start, 1)])
    assert found.first_positions.tolist() == [1]
    assert found.page_ids.tolist() == [11, 12] and found.write_page_ids.tolist() == [12]
    windowed = made.arrays(1, [work(5, start, 1)])
    made.update(StepPlan(StepNumber(2)))
    assert made.arrays(0, [work(5, start, 1)]).page_ids.tolist() == [10, 11, 12]
    assert made.arrays(1, [work(5, start, 1)]).page_ids.tolist() == windowed.page_ids.tolist()
    assert SLIDING.window_tokens and SECTION_TOKENS % size == 0


def test_a_token_before_what_is_away_has_no_page() -> None:
    rows = [(5, 0, at, 10 + at) for at in range(3)]
    made = tables(PageTables, *rows)
    made.update(StepPlan(StepNumber(1), away=((5, 2 * FULL.page_tokens),)))
    with pytest.raises(ValueError, match="has no page"):
        made.arrays(0, [work(5, 0, 1)])
