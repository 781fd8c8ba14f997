"""Operators with prices that tests know, and the steps that follow from them."""

from kvell.cost.amounts import AttentionSpan, ModelShape
from kvell.cost.fit import MeasuredStep
from kvell.cost.operators import Attention, Constants, Operators, Waves
from kvell.cost.work import Chunk

SHAPE = ModelShape(
    (AttentionSpan(3, 128), AttentionSpan(2)), token_bytes=256, window_bytes=((128, 384),)
)
TOKEN_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROW_KNOTS = (0, 1, 4, 16)
FIRST_SECONDS = 8e-3
TOKEN_SECONDS = (FIRST_SECONDS, 1e-3, 5e-4, 5e-4, 3e-4, 3e-4, 3e-4, 2e-4, 2e-4, 2e-4, 2e-4)
ROW_SECONDS = (2e-3, 1e-4, 1e-4, 5e-5)


def oracle(shape: ModelShape = SHAPE, tile: int = 1) -> Operators:
    """A machine on which everything is known."""
    return Operators(
        shape,
        Waves(tile, TOKEN_KNOTS, TOKEN_SECONDS),
        Waves(1, ROW_KNOTS, ROW_SECONDS),
        Attention(pair_seconds=2e-8, read_seconds=6e-8, prompt_seconds=1e-3),
        Constants(step_seconds=1e-3, sequence_seconds=5e-5, round_seconds=2e-3),
    )


def decodes(batch: int, context: int) -> tuple[Chunk, ...]:
    return (Chunk(context, 1),) * batch


def prompt(cached: int, new: int) -> tuple[Chunk, ...]:
    return (Chunk(cached, new),)


def steps_of(machine: Operators) -> list[MeasuredStep]:
    """Steps of all kinds, timed without noise."""
    works = [
        *(decodes(n, s) for n in (1, 2, 4, 8, 9, 16, 17, 32, 64) for s in (16, 100, 512, 2048)),
        *(prompt(c, x) for c in (0, 64, 512, 2048) for x in (2, 4, 8, 16, 32, 64, 128, 256, 700)),
        *(decodes(n, 256) + prompt(0, x) for n in (4, 16) for x in (33, 200)),
        *(prompt(c, 1024)[:1] for c in (0, 100)),
        (Chunk(0, 512, num_logits=0),),
        (Chunk(512, 512, num_logits=0),),
    ]
    return [MeasuredStep(work, machine.step_seconds(work)) for work in works]


def unseen() -> list[tuple[Chunk, ...]]:
    """Work of other sizes."""
    return [
        *(decodes(n, s) for n in (3, 6, 24, 48) for s in (64, 300, 1200)),
        *(prompt(c, x) for c in (0, 256, 1000) for x in (24, 48, 96, 384)),
        decodes(10, 300) + prompt(0, 100),
    ]
