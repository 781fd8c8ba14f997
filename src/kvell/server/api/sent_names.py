"""Errors that name a field as the client sent it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvell.errors import ChangeSomething
from kvell.server.text.text_stream import RequestRefused


@contextmanager
def named_as_sent(name: Callable[[str], str]) -> Iterator[None]:
    """Rename fields in errors of the block to the client's names.

    :param name: returns the client's name of a field.
    """
    try:
        yield
    except ChangeSomething as error:
        parts = (name(error.field), error.value, error.problem, error.remedy)
        raise type(error)(*parts, bound=error.bound) from error
    except RequestRefused as error:
        field = name(error.field)
        message = str(error)
        if error.field and message.startswith(error.field):
            message = field + message.removeprefix(error.field)
        raise RequestRefused(message, field, error.bound) from error
