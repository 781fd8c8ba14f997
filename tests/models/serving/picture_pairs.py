"""Engines that hand requests with images over."""

import copy
from typing import Any

import numpy as np
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.running.sent_images import to_sent
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB, RequestId
from tests.models.pictures import (
    Prompt,
    picture_module,
)


def engine_of(architecture: str, kv_bytes: int = 8 * MIB, **more: Any) -> Engine:
    longest = more.get("max_model_len", 256)
    module = copy.deepcopy(picture_module(architecture, max(256, longest)))
    description = describe_as(module.config, torch.float32, torch.float32)
    model = PagedModel(module, description, choose_kernels(torch.device("cpu")), torch.float32)
    options = EngineOptions(
        kv_memory_bytes=kv_bytes,
        max_model_len=more.pop("max_model_len", 256),
        max_num_batched_tokens=more.pop("max_num_batched_tokens", 256),
        **more,
    )
    return build_engine(model, architecture, options)


def submit_of(name: str, prompt: Prompt, params: SamplingParams, **more: Any) -> Submit:
    tensors = tuple(to_sent(key, tensor) for key, tensor in prompt.tensors.items())
    ids = np.asarray(prompt.token_ids, "<i4").tobytes()
    return Submit(RequestSpec(RequestId(name), ids, params, tensors=tensors), **more)
