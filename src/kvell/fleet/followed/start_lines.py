"""Log lines about what a start waits for, every few seconds."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LINE_SECONDS = 5.0
logger = logging.getLogger(__name__)


@asynccontextmanager
async def start_lines(
    what: Callable[[], str], pause_seconds: float = LINE_SECONDS
) -> AsyncIterator[None]:
    """Log what a start waits for while the block runs, so that people see progress.

    :param what: called before each line.
    """

    async def repeat() -> None:
        while True:
            await asyncio.sleep(pause_seconds)
            logger.info("waiting for %s", what())

    lines = asyncio.create_task(repeat())
    try:
        yield
    finally:
        lines.cancel()
