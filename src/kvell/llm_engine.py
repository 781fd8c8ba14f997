"""``kvell.LLMEngine``: an engine in this process whose steps the caller runs, as vLLM's."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Self

from kvell.engine.arg_utils import EngineArgs
from kvell.engine.protocol.messages import Event, Finished
from kvell.engine.protocol.pooling import EmbeddingOutput, PoolingParams
from kvell.engine.protocol.sampling_params import RequestOutputKind, SamplingParams
from kvell.equivalents.arguments import CALL_OTHERS, ENGINE_OTHERS
from kvell.equivalents.other import check_others
from kvell.errors import ChangeSomething
from kvell.llm import LLM, Prompt
from kvell.local.jobs import AnswerJob, EmbeddingJob, output_of
from kvell.local.outputs import RequestOutput, delta_of
from kvell.vocabulary import RequestId

Jobs = list[AnswerJob] | list[EmbeddingJob]


class LLMEngine:
    """Requests to an ``LLM``, and their outputs while they are computed.

    Only one thread may use an object.  Requests that others make of the same ``LLM`` share its
    steps.

    :param llm: the model, which stays open.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._requests = llm.requests
        self._reader = llm.requests.local.shared.reader()
        self._jobs: dict[str, Jobs] = {}
        self._kinds: dict[str, RequestOutputKind] = {}
        self._shown: dict[str, RequestOutput] = {}
        self._by_id: dict[RequestId, tuple[str, AnswerJob | EmbeddingJob]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: object) -> Self:
        """Load a model.

        :raises ChangeSomething: as :class:`kvell.LLM`.
        """
        check_others("LLMEngine.from_engine_args", others, (), ENGINE_OTHERS)
        return cls(LLM(**vars(engine_args)))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        **others: object,
    ) -> str:
        """Begin a request, whose outputs :meth:`step` returns; return its id.

        :param params: the model's defaults if None.
        :raises ChangeSomething: if the id is in use, or the prompt can never be served.
        """
        check_others("LLMEngine.add_request", others, ("prompt", "params"), CALL_OTHERS)
        if request_id in self._jobs:
            raise ChangeSomething("request_id", request_id, "is in use", "choose another")
        jobs: Jobs
        if isinstance(params, PoolingParams):
            jobs = self._requests.embedding_jobs([prompt], "last", priority, request_id)
        else:
            sampling = params or self.llm.get_default_sampling_params()
            [jobs] = self._requests.answer_jobs(
                self._reader, [prompt], sampling, priority, request_id
            )
            self._kinds[request_id] = sampling.output_kind
        self._jobs[request_id] = jobs
        for job in jobs:
            self._by_id[self._requests.runner.submit(self._reader, job)] = (request_id, job)
        return request_id

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            for job in self._jobs.get(name, ()):
                self._reader.cancel(job.spec.request_id)
            self._forget(name)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request has not ended."""
        return bool(self._jobs)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._jobs)

    def step(self) -> list[RequestOutput | EmbeddingOutput]:
        """Wait for the next tokens or ends, and return the outputs of their requests.

        :raises TryLater: if the engine refused a request, which has then ended.
        :raises RequestFailed: if a vector is not numbers; its request has then ended.
        :raises Exception: the error of a step; its requests have then ended.
        """
        changed: dict[str, None] = {}
        while self._jobs and not changed:
            for event in self._reader.take():
                name = self._take(event)
                if name is not None:
                    changed[name] = None
        outputs = [self._output(name) for name in changed]
        return [output for output in outputs if output is not None]

    def close(self) -> None:
        """End all requests of this object, and the model."""
        self._jobs.clear()
        self._reader.close()
        self.llm.close()

    def _take(self, event: Event) -> str | None:
        """Give an event to its request; return the request's id if it has an output."""
        request_id: RequestId | None = getattr(event, "request_id", None)
        if request_id not in self._by_id:
            return None
        name, job = self._by_id[request_id]
        try:
            self._requests.runner.deliver(event, {request_id: job}, self._reader)
        except BaseException:
            self._forget(name)
            raise
        if isinstance(event, Finished):
            del self._by_id[request_id]
        return name

    def _output(self, name: str) -> RequestOutput | EmbeddingOutput | None:
        """Return the output of a request so far; None if there is none yet."""
        jobs = self._jobs[name]
        is_over = all(job.finished is not None for job in jobs)
        kind = self._kinds.get(name)
        earlier = self._shown.get(name)
        if is_over:
            self._forget(name)
        answers = [job for job in jobs if isinstance(job, AnswerJob)]
        if not answers:
            [vector] = [job for job in jobs if isinstance(job, EmbeddingJob)]
            return vector.output() if is_over else None
        if kind is RequestOutputKind.FINAL_ONLY and not is_over:
            return None
        output = output_of(answers)
        if kind is not RequestOutputKind.DELTA:
            return output
        if not is_over:
            self._shown[name] = output
        before = [None] * len(answers) if earlier is None else earlier.outputs
        deltas = [delta_of(*pair) for pair in zip(output.outputs, before, strict=True)]
        first = deltas[0]
        return replace(output, outputs=deltas, text=first.text, token_ids=first.token_ids)

    def _forget(self, name: str) -> None:
        for job in self._jobs.pop(name, ()):
            self._by_id.pop(job.spec.request_id, None)
        self._kinds.pop(name, None)
        self._shown.pop(name, None)
