"""A worker: a fork of the template that compiles grammars and computes masks under limits."""

import os
import socket
from typing import Any

from kvell.device.process_size import give_back_freed
from kvell.engine.sampling.grammar_process.limits import (
    anonymous_bytes,
    bound_memory,
    bounded_seconds,
)
from kvell.engine.sampling.grammar_process.matchers import Matchers
from kvell.engine.sampling.grammar_process.messages import (
    AskMasks,
    Check,
    Line,
    LineEnded,
)

GRAMMAR_SECONDS = 1.0
"""The most processor time for compiling a grammar, or for one mask."""
REPLAYED_TOKENS_PER_SECOND = 10_000
"""The speed of reading unread output, which extends the time of a mask."""


def allowed_seconds(fresh_tokens: int) -> float:
    """Return the most processor time for a mask after ``fresh_tokens`` unread tokens."""
    return GRAMMAR_SECONDS + fresh_tokens / REPLAYED_TOKENS_PER_SECOND


def serve_worker(descriptor: int, tokenizer: Any, room_bytes: int) -> None:
    """Answer until the instance closes the connection; the system may end the process earlier."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed allocation would write there
    line = Line(socket.socket(fileno=descriptor))
    matchers = Matchers(tokenizer)
    bound_memory(room_bytes)
    first_bytes = anonymous_bytes()
    while True:
        try:
            request = line.receive()
            if isinstance(request, Check):
                with bounded_seconds(GRAMMAR_SECONDS):
                    checked = matchers.check(request.asked)
                line.send(checked)
            elif isinstance(request, AskMasks):
                _answer_masks(line, matchers, request)
        except LineEnded:
            return
        if anonymous_bytes() - first_bytes > room_bytes // 2:
            matchers.drop_compiled()
            give_back_freed()


def _answer_masks(line: Line, matchers: Matchers, request: AskMasks) -> None:
    matchers.forget(request.forget)
    for need in request.needs:
        with bounded_seconds(allowed_seconds(len(need.fresh) // 4)):
            mask = matchers.mask(need)
        line.send(mask)
