"""Sessions after the workloads of the MemServe paper (§8.2): chats, documents, agents.

The paper's figure 7 has no numbers; the generators follow its text, and
:mod:`kvell.simulator.traces.published` compares that with their statistics.
"""

from collections.abc import Callable
from functools import partial

from kvell.simulator.traces.drawing import REQUESTS_PER_SECOND, Draw, NewIds
from kvell.simulator.traces.rows import BlockIds, TraceRow

MakeSession = Callable[[Draw, str, float], list[TraceRow]]
"""Maker of a session's rows from its name and the time at which it begins."""

BLOCK_TOKENS = 16
DOCUMENT_TOKENS = 1_024
"""The first 1K tokens of a document."""
QUESTIONS_PER_DOCUMENT = 5
DOCUMENT_QUESTION_TOKENS, DOCUMENT_ANSWER_TOKENS = (12, 48), (8, 64)
EXAMPLES_TOKENS = 1_280
"""The two worked examples that every agent's prompt begins with."""
TASK_TOKENS, THOUGHT_TOKENS, OBSERVATION_TOKENS = (15, 60), (40, 180), (60, 240)
STEPS_PER_TASK = (2, 7)
CHAT_TOKENS = 4_096
"""Context of the paper's model, where a conversation ends."""
LAST_TURN = 0.25
QUESTION_MU_SIGMA, ANSWER_MU_SIGMA = (4.55, 1.1), (5.535, 0.83)
LONGEST_TURN_TOKENS = 2_048
MEAN_PAUSE_SECONDS, MEAN_TOOL_SECONDS = 20.0, 2.0


def loogle_like(draw: Draw, count: int) -> list[TraceRow]:
    """Generate documents of 1K tokens with five questions, each after the previous answer."""
    ids = NewIds()

    def document(draw: Draw, session: str, now_s: float) -> list[TraceRow]:
        text = ids.take(DOCUMENT_TOKENS // BLOCK_TOKENS)
        rows = []
        for _ in range(QUESTIONS_PER_DOCUMENT):
            prompt = DOCUMENT_TOKENS + _evenly(draw, DOCUMENT_QUESTION_TOKENS)
            answer = _evenly(draw, DOCUMENT_ANSWER_TOKENS)
            rows.append(TraceRow(now_s, prompt, answer, text, BLOCK_TOKENS, session))
            now_s += float(draw.exponential(MEAN_TOOL_SECONDS))
        return rows

    return _sessions(draw, count, document)


def react_like(draw: Draw, count: int) -> list[TraceRow]:
    examples = NewIds().take(EXAMPLES_TOKENS // BLOCK_TOKENS)
    return _sessions(draw, count, lambda *place: _task(examples, *place))


def _task(examples: BlockIds, draw: Draw, session: str, now_s: float) -> list[TraceRow]:
    prompt = EXAMPLES_TOKENS + _evenly(draw, TASK_TOKENS)
    first = TraceRow(now_s, prompt, _evenly(draw, THOUGHT_TOKENS), examples, BLOCK_TOKENS, session)
    rows = [first]
    for _ in range(_evenly(draw, STEPS_PER_TASK) - 1):
        result, thought = _evenly(draw, OBSERVATION_TOKENS), _evenly(draw, THOUGHT_TOKENS)
        rows.append(
            next_turn(rows[-1], result, thought, float(draw.exponential(MEAN_TOOL_SECONDS)))
        )
    return rows


def _conversation(draw: Draw, session: str, now_s: float) -> list[TraceRow]:
    question, answer = _turn(draw)
    rows = [TraceRow(now_s, question, answer, session=session)]
    while draw.random() > LAST_TURN:
        question, answer = _turn(draw)
        if rows[-1].num_tokens + question + answer > CHAT_TOKENS:
            break
        pause_s = float(draw.exponential(MEAN_PAUSE_SECONDS))
        rows.append(next_turn(rows[-1], question, answer, pause_s))
    return rows


def _turn(draw: Draw) -> tuple[int, int]:
    lengths = [draw.lognormal(*shape) + 1 for shape in (QUESTION_MU_SIGMA, ANSWER_MU_SIGMA)]
    question, answer = (min(LONGEST_TURN_TOKENS, int(length)) for length in lengths)
    return question, answer


def next_turn(last: TraceRow, question: int, answer: int, pause_s: float) -> TraceRow:
    prompt = last.num_tokens + question
    at_s = last.arrival_s + pause_s
    return TraceRow(at_s, prompt, answer, session=last.session, continues=True)


def _evenly(draw: Draw, bounds: tuple[int, int]) -> int:
    return int(draw.integers(*bounds, endpoint=True))


def _sessions(draw: Draw, count: int, make: MakeSession) -> list[TraceRow]:
    rows: list[TraceRow] = []
    while len(rows) < count:
        now_s = len(rows) / REQUESTS_PER_SECOND * float(draw.uniform(0.5, 1.5))
        rows += make(draw, f"session-{len(rows)}", now_s)
    return sorted(rows[:count], key=lambda row: row.arrival_s)


sharegpt_like = partial(_sessions, make=_conversation)
"""Conversations after ShareGPT's."""
