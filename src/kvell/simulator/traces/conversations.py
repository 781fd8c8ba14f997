"""Conversations: each turn begins with all earlier questions and answers."""

from kvell.simulator.traces.drawing import REQUESTS_PER_SECOND, Draw, NewIds
from kvell.simulator.traces.rows import BlockIds, TraceRow

SYSTEM_BLOCK_TOKENS = 16
SYSTEM_PROMPT_TOKENS = (128, 256, 512, 1_024)
TEMPLATE_TOKENS = 4
"""Tokens that mark a turn, in addition to its text."""
LAST_TURN = 0.25
"""Chance that a turn is the last: four turns on average."""
MAX_ANSWER_TOKENS = 1_000
MEAN_PAUSE_SECONDS = 30.0
"""Mean time from one turn of a conversation to the next."""


def chat(draw: Draw, count: int) -> list[TraceRow]:
    """Generate conversations of about four turns after one of four system prompts.

    Of 1,000 turns with seed 0: prompts have 1,621 tokens on average (139 to 7,416), answers 198; an
    unbounded cache hits 90 % of the prompt tokens.
    """
    rows: list[TraceRow] = []
    ids = NewIds()
    systems = [ids.take(length // SYSTEM_BLOCK_TOKENS) for length in SYSTEM_PROMPT_TOKENS]
    while len(rows) < count:
        rows += _conversation(draw, systems[int(draw.integers(len(systems)))], len(rows))
    return sorted(rows[:count], key=lambda row: row.arrival_s)


def _conversation(draw: Draw, system: BlockIds, before: int) -> list[TraceRow]:
    now_s = before / REQUESTS_PER_SECOND * float(draw.uniform(0.5, 1.5))
    rows = [_first_turn(draw, system, now_s, f"chat-{before}")]
    for _ in range(int(draw.geometric(LAST_TURN)) - 1):
        rows.append(_next_turn(draw, rows[-1]))
    return rows


def _first_turn(draw: Draw, system: BlockIds, now_s: float, session: str) -> TraceRow:
    prompt = len(system) * SYSTEM_BLOCK_TOKENS + _question_tokens(draw)
    return TraceRow(now_s, prompt, _answer_tokens(draw), system, SYSTEM_BLOCK_TOKENS, session)


def _next_turn(draw: Draw, last: TraceRow) -> TraceRow:
    return TraceRow(
        last.arrival_s + float(draw.exponential(MEAN_PAUSE_SECONDS)),
        last.num_tokens + _question_tokens(draw),
        _answer_tokens(draw),
        session=last.session,
        continues=True,
    )


def _question_tokens(draw: Draw) -> int:
    return int(draw.lognormal(4.5, 1.0)) + TEMPLATE_TOKENS


def _answer_tokens(draw: Draw) -> int:
    return min(MAX_ANSWER_TOKENS, int(draw.lognormal(5.0, 0.8)) + 1)
