"""Runs the requests of ``kvell.LLM`` over readers of its engine."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from kvell.engine.failed_steps import FailedSteps
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.errors import TryLater
from kvell.llm_jobs import AnswerJob, Job, raise_if_failed
from kvell.serving.readers import EventReader
from kvell.vocabulary import RequestId


class JobRunner:
    """Runs requests over readers of one engine; from any thread.

    :param failed: the engine's failed steps, of which requests raise the last one.
    """

    def __init__(self, failed: FailedSteps) -> None:
        self._failed = failed
        self._numbers = count()  # atomic, whichever thread counts

    def run(self, reader: EventReader, jobs: Sequence[Job]) -> None:
        """Run requests until all have ended.

        :raises TryLater: if the engine refused one.
        :raises Exception: what a step raised that was to compute one.
        """
        running = {self._submit(reader, job): job for job in jobs}
        while running:
            for event in reader.take():
                self._deliver(event, running, reader)
                if isinstance(event, Finished):
                    running.pop(event.request_id, None)

    def stream(self, reader: EventReader, job: AnswerJob) -> Iterator[str]:
        """Yield a request's text as it is generated.

        :raises RequestFailed: if the model's logits are no numbers.
        """
        running: dict[RequestId, Job] = {self._submit(reader, job): job}
        shown = 0
        while job.finished is None:
            for event in reader.take():
                self._deliver(event, running, reader)
            if len(job.text) > shown:
                yield job.text[shown:]
                shown = len(job.text)
        raise_if_failed(job.finished)

    def _submit(self, reader: EventReader, job: Job) -> RequestId:
        request_id = RequestId(f"r{next(self._numbers)}")
        reader.send(job.submission(request_id))
        return request_id

    def _deliver(self, event: Event, jobs: Mapping[RequestId, Job], reader: EventReader) -> None:
        if isinstance(event, Tokens) and event.request_id in jobs:
            if jobs[event.request_id].take(event.token_ids, event.logprobs):
                reader.cancel(event.request_id)
        elif isinstance(event, PromptLogprobs) and event.request_id in jobs:
            jobs[event.request_id].score(event.logprobs)
        elif isinstance(event, Finished) and event.request_id in jobs:
            if event.reason == "refused":
                raise TryLater(event.message)
            if event.step_failed and (cause := self._failed.last):
                raise cause
            jobs[event.request_id].end(event)
