"""The engine of ``kvell.LLM`` on its thread: checks of requests, images, and its end."""

import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from kvell.device.available import give_back_freed
from kvell.engine.engine import Engine
from kvell.engine.protocol.given import GivenPrompt
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.admissible import request_problem, sampling_problem
from kvell.errors import ChangeSomething
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_store import take_images
from kvell.models.text.tokenizer import Tokenizer
from kvell.serving.readers import EngineEnded, EventReader, SharedInstance


class LocalEngine:
    """An engine of this process that several threads use, until it is closed.

    :param begin: called first on the engine's thread.
    """

    def __init__(self, engine: Engine, begin: Callable[[], None]) -> None:
        self._shared = SharedInstance(engine, begin)
        self._engine: Engine | None = engine

    @property
    def engine(self) -> Engine:
        """The engine.

        :raises EngineEnded: after :meth:`close`.
        """
        if self._engine is None:
            raise EngineEnded("this LLM is closed; make a new one")
        return self._engine

    @property
    def name(self) -> str:
        return self.engine.contract.model

    @property
    def shared(self) -> SharedInstance:
        """The engine's thread and its readers.

        :raises EngineEnded: after :meth:`close`.
        """
        _ = self.engine
        return self._shared

    def close(self) -> None:
        """End the engine's thread and free its memory; requests in progress fail."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._shared.close()
        engine.close()
        del engine
        gc.collect()  # an engine and its parts refer to each other
        give_back_freed()

    def with_images(
        self, reader: EventReader, token_ids: npt.NDArray[np.int32], prompt: GivenPrompt
    ) -> ImagePrompt:
        """Return a prompt in the engine's form; its images are released with the reader."""
        images = prompt.images
        if not images:
            return ImagePrompt(token_ids, ())

        def take() -> ImagePrompt:
            image_prompt = take_images(self.engine.images, token_ids, images)
            if self.engine.images is not None:
                reader.undo.append(partial(self.engine.images.release, image_prompt))
            return image_prompt

        return self.shared.call(take)

    def check(
        self, prompt: ImagePrompt, sampling: SamplingParams, model: str, tokenizer: Tokenizer
    ) -> None:
        """Check that the engine would not refuse a request.

        :param model: name of one of several models; "" is the first.
        :raises ChangeSomething: with the field.
        """
        rules = self.engine.core.entrance.rules(model)
        max_tokens = sampling.max_tokens or 1
        ids, images = prompt.token_ids, prompt.images
        if sampling.stop and not tokenizer.knows_text:
            why = "needs the model's tokenizer, and it has none"
            raise ChangeSomething("stop", sampling.stop[0], why, "leave it out")
        if problem := (
            rules.head_problem(model or self.engine.contract.model)
            or sampling_problem(sampling, rules.limits, bool(images))
            or request_problem(ids, images, max_tokens, rules.limits, rules.layout)
        ):
            raise problem
        if (form := sampling.structured_outputs) is not None:
            grammars = self.engine.grammars
            if begun := self.shared.call(partial(grammars.begin_check, form, model)):
                begun.result()  # on this thread, so that other callers' steps continue
            self.shared.call(partial(grammars.check, form, model))
