"""The runner of requests of ``kvell.LLM``, over readers of its engine."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from tqdm.auto import tqdm

from kvell.clock import Clock
from kvell.engine.failed_steps import FailedSteps
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import Event, Finished, Submit, Tokens
from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import TryLater
from kvell.local.jobs import AnswerJob, Job, raise_if_failed
from kvell.models.images.image_content import ImagePrompt
from kvell.serving.readers import EventReader
from kvell.vocabulary import RequestId

UseTqdm = bool | Callable[..., Any]
"""The switch of the progress bar, or a function with the arguments of ``tqdm``."""


@contextmanager
def progress_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[], object]]:
    """Yield a function to call when one of ``total`` requests has ended."""
    if not use_tqdm:
        yield lambda: None
        return
    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, desc="Processed prompts") as bar:
        yield bar.update


class JobRunner:
    """A runner of requests over readers of one engine; it may be called from any thread.

    :param failed: the engine's failed steps; requests of a failed step raise the last of them.
    """

    def __init__(self, failed: FailedSteps, clock: Clock) -> None:
        self._failed, self._clock = failed, clock
        self._numbers = count()  # atomic, so that any thread may call it

    def run(
        self, reader: EventReader, jobs: Sequence[Job], ended: Callable[[], object] = lambda: None
    ) -> None:
        """Run requests until all have ended.

        :raises TryLater: if the engine refused a request.
        :raises Exception: the error of a step that computed a request.
        """
        running = {self.submit(reader, job): job for job in jobs}
        while running:
            for event in reader.take():
                self.deliver(event, running, reader)
                if isinstance(event, Finished):
                    running.pop(event.request_id, None)
                    ended()

    def stream(self, reader: EventReader, job: AnswerJob) -> Generator[str, None, str]:
        """Yield a request's text as it is generated; return the reason of its end.

        :raises RequestFailed: if the model's logits are not numbers.
        """
        running: dict[RequestId, Job] = {self.submit(reader, job): job}
        shown = 0
        while job.finished is None:
            for event in reader.take():
                self.deliver(event, running, reader)
            if len(job.text) > shown:
                yield job.text[shown:]
                shown = len(job.text)
        raise_if_failed(job.finished)
        reason = job.finish_reason
        assert reason is not None, "the request has ended"
        return reason

    def spec(
        self,
        prompt: ImagePrompt,
        sampling: SamplingParams,
        model: str,
        pooling: Pooling = "",
        priority: int = 0,
    ) -> RequestSpec:
        """Return a request with an id that no other request has.

        :param model: "" is the first.
        :param priority: requests with lower numbers are admitted first.
        """
        return RequestSpec(
            RequestId(f"r{next(self._numbers)}"),
            to_token_bytes(prompt.token_ids),
            sampling,
            model=model,
            images=prompt.images,
            pooling=pooling,
            priority=priority,
        )

    def submit(self, reader: EventReader, job: Job) -> RequestId:
        """Give a request to the engine; its events are for :meth:`deliver`."""
        job.begin(self._clock.now_seconds())
        reader.send(Submit(job.spec))
        return job.spec.request_id

    def deliver(self, event: Event, jobs: Mapping[RequestId, Job], reader: EventReader) -> None:
        """Let a request take its event; events of other requests are ignored.

        :raises TryLater: if the engine refused the request.
        :raises Exception: the error of a step that computed it.
        """
        now = self._clock.now_seconds()
        if isinstance(event, Tokens) and event.request_id in jobs:
            if jobs[event.request_id].take(event.token_ids, event.logprobs, now):
                reader.cancel(event.request_id)
        elif isinstance(event, PromptLogprobs) and event.request_id in jobs:
            jobs[event.request_id].add_prompt_logprobs(event.logprobs)
        elif isinstance(event, Finished) and event.request_id in jobs:
            if event.reason == "refused":
                raise TryLater(event.message)
            if event.step_failed and (cause := self._failed.last):
                raise cause
            jobs[event.request_id].end(event, now)
