"""A worker: a fork of the template that compiles grammars and computes masks under limits."""

import os
import socket
from time import process_time
from typing import Any

from msgspec.structs import replace

from kvell.device.available import give_back_freed
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
"""The most processor time for compiling a grammar."""


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
                began_seconds = process_time()
                with bounded_seconds(GRAMMAR_SECONDS):
                    checked = matchers.check(request.asked)
                line.send(replace(checked, seconds=process_time() - began_seconds))
            elif isinstance(request, AskMasks):
                _answer_masks(line, matchers, request)
        except LineEnded:
            return
        if anonymous_bytes() - first_bytes > room_bytes // 2:
            matchers.compiled.clear()  # answers keep their positions
            give_back_freed()


def _answer_masks(line: Line, matchers: Matchers, request: AskMasks) -> None:
    matchers.forget(request.forget)
    for need in request.needs:
        began_seconds = process_time()
        with bounded_seconds(need.seconds):
            masks = matchers.draft_masks(need) if need.drafts else matchers.mask(need)
        line.send(replace(masks, seconds=process_time() - began_seconds))
