"""lm-eval's ``local-completions`` and ``local-chat-completions``."""

from checks import BASE_URL, MODEL, MODEL_DIRECTORY, run
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

TO = {"model": MODEL, "num_concurrent": 2, "max_retries": 1}


def completions(**more: object) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{BASE_URL}/completions",
        tokenizer=MODEL_DIRECTORY,
        tokenizer_backend="huggingface",
        **TO,
        **more,
    )


def asked(kind: str, *arguments: object) -> Instance:
    return Instance(kind, {}, arguments, 0)


def likelihood() -> None:
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " qx")]
    told = completions().loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
    assert told[0][0] > told[1][0], told


def likelihood_in_batches() -> None:
    pairs = [("One, two,", " three"), ("Monday, Tuesday,", " Wednesday"), ("A, B,", " C")]
    alone = completions().loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
    batch = completions(batch_size=3)
    told = batch.loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
    assert all(abs(a[0] - b[0]) < 0.05 for a, b in zip(alone, told, strict=True)), (alone, told)


def rolling() -> None:
    told = completions().loglikelihood_rolling([asked("loglikelihood_rolling", "Hello world.")])
    assert told[0] < 0


def generate() -> None:
    how = {"until": ["\n"], "max_gen_toks": 10, "do_sample": False}
    told = completions().generate_until([asked("generate_until", "Once upon a time", how)])
    assert told[0] and "\n" not in told[0]


def chat() -> None:
    model = LocalChatCompletion(base_url=f"{BASE_URL}/chat/completions", **TO)
    how = {"until": ["\n\n"], "max_gen_toks": 10, "do_sample": False}
    message = '[{"role": "user", "content": "Say hello."}]'
    from lm_eval.models.api_models import JsonChatStr

    told = model.generate_until([asked("generate_until", JsonChatStr(message), how)])
    assert told[0]


run(
    likelihood=likelihood,
    likelihood_in_batches=likelihood_in_batches,
    rolling=rolling,
    generate=generate,
    chat=chat,
)
