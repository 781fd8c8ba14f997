"""A worker: a fork of the template that compiles and follows grammars under bounds."""

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
"""Processor time that a grammar may take to be compiled, or for one mask."""
REPLAYED_TOKENS_PER_SECOND = 10_000
"""Further time to read an output anew."""


def allowed_seconds(fresh_tokens: int) -> float:
    """Processor time for a mask behind so many tokens that were not read yet."""
    return GRAMMAR_SECONDS + fresh_tokens / REPLAYED_TOKENS_PER_SECOND


def serve_worker(descriptor: int, tokenizer: Any, room_bytes: int) -> None:
    """Answer until the instance hangs up; the system may end the process earlier."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a failed allocation would write there
    line, matchers = Line(socket.socket(fileno=descriptor)), Matchers(tokenizer)
    bound_memory(room_bytes)
    first_bytes = anonymous_bytes()
    while True:
        try:
            asked = line.receive()
            if isinstance(asked, Check):
                with bounded_seconds(GRAMMAR_SECONDS):
                    checked = matchers.check(asked.asked)
                line.send(checked)
            elif isinstance(asked, AskMasks):
                _answer_masks(line, matchers, asked)
        except LineEnded:
            return
        if anonymous_bytes() - first_bytes > room_bytes // 2:
            matchers.drop_compiled()
            give_back_freed()


def _answer_masks(line: Line, matchers: Matchers, asked: AskMasks) -> None:
    matchers.forget(asked.forget)
    for need in asked.needs:
        with bounded_seconds(allowed_seconds(len(need.fresh) // 4)):
            mask = matchers.mask(need)
        line.send(mask)
