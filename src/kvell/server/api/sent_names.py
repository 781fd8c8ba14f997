"""Errors that name a field as the client sent it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvell.errors import ChangeSomething
from kvell.server.text.text_stream import RequestRefused


@contextmanager
def named_as_sent(name: Callable[[str], str]) -> Iterator[None]:
    """Give errors of the block the names of the client.

    :param name: returns what the client called a field.
    """
    try:
        yield
    except ChangeSomething as error:
        said = (name(error.field), error.value, error.problem, error.remedy)
        raise type(error)(*said, bound=error.bound) from error
    except RequestRefused as error:
        field, told = name(error.field), str(error)
        if error.field and told.startswith(error.field):
            told = field + told.removeprefix(error.field)
        raise RequestRefused(told, field, error.bound) from error
