"""Ends of requests that never reach the core."""

from dataclasses import replace

from kvell.engine.protocol.messages import Finished, Submit
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import FinishReason


def without_images(command: Submit) -> Finished:
    problem = ChangeSomething("images", "…", "are unknown", "give them with the prompt")
    return refuse(command, problem)


def refuse(command: Submit, problem: ChangeSomething | TryLater) -> Finished:
    """Return the end of a request that is refused for a problem."""
    finished = replace(end(command, "refused"), message=str(problem), bound=problem.bound)
    if isinstance(problem, TryLater):
        return replace(finished, try_later=True)
    return replace(finished, field=problem.field)


def end(command: Submit, reason: FinishReason) -> Finished:
    return Finished(command.request_id, command.attempt, reason, command.spec.prompt_tokens)
