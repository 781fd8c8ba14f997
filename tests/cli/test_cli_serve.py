"""``kvell serve``, the instance process that it starts, and its traces."""

import itertools
import socket
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvell.cli.main import root
from kvell.cli.terminal.session import Session
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.fleet.instance.command import instance_command, placed_command
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.fleet.instance.price_settings import PriceSettings
from kvell.server.api.door.face_options import CrossOrigin, FaceOptions
from kvell.server.text.served_text import ServedText
from kvell.server.text.text_model import TextModel
from tests.cli.conftest import Served

Kvell = Callable[..., Any]

ALL_SET = EngineSettings(
    model="some/model",
    kv_memory_bytes=123456789,
    dtype="float32",
    device="cuda",
    max_model_len=4096,
    max_num_batched_tokens=7,
    max_num_seqs=3,
    manager="paged",
    num_speculative_tokens=5,
    speculative_model="some/draft",
    prompt_lookup_max=4,
    prompt_lookup_min=3,
    beside=("other/model", "small=some/dir"),
    memory_bytes=987654321,
    cpu_buffer_bytes=55555555,
    slo_ttft_seconds=2.5,
    slo_tpot_seconds=0.125,
    enable_chunked_prefill=False,
    threads=2,
)


class TestServe:
    @pytest.mark.parametrize("chosen", ["auto", "vllm"])
    def test_recommended_sampling_is_taken_or_left(
        self, kvell: Kvell, served: Served, monkeypatch: pytest.MonkeyPatch, chosen: str
    ) -> None:
        monkeypatch.setattr(ServedText, "load", lambda name, path, config, *_: f"{name} {config}")
        assert (
            kvell("serve", *(("--generation-config", chosen) if chosen != "auto" else ())).code == 0
        )
        (_, texts, _) = served.calls[0]
        assert texts.load().models == [f"smollm2 {chosen}"]

    def test_overrides_of_the_config_reach_the_first_text_alone(
        self, kvell: Kvell, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ServedText, "load", lambda *given: (given[0], given[4:]))
        flags = ("--model", "smollm2", "--model", "small=some/dir", "--hf-overrides", "{}")
        assert kvell("serve", *flags).code == 0
        command, texts, _ = served.calls[0]
        assert texts.load().models == [("smollm2", ("{}", None)), ("small", ())]
        assert "--hf-overrides" in command

    def test_listens_on_localhost_unless_told_otherwise(self, kvell: Kvell, served: Served) -> None:
        assert kvell("serve").code == 0
        (_, texts, options) = served.calls[0]
        assert texts.names == ["smollm2"]
        assert texts.load().models == ["text of smollm2 in where smollm2 is"]
        assert (options.host, options.port, options.api_key) == ("127.0.0.1", 8000, None)

    def test_its_floor_is_taken_before_anything_is_read(
        self, kvell: Kvell, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The contract's allowance covers the memory of tokenizers."""
        sizes = iter([111, 999])
        monkeypatch.setattr("kvell.device.available.process_bytes", lambda: next(sizes))
        monkeypatch.setattr(ServedText, "load", lambda model, *_: next(sizes))
        assert kvell("serve").code == 0
        loaded = served.calls[0][1].load()
        assert (loaded.floor_bytes, loaded.models) == (111, [999])

    def test_several_models_in_their_order(self, kvell: Kvell, served: Served) -> None:
        assert kvell("serve", "--model", "smollm2", "--model", "small=some/dir").code == 0
        command, texts, _ = served.calls[0]
        assert texts.names == ["smollm2", "small"]
        assert texts.load().models[1] == "text of small in where some/dir is"
        given = [word for flag, word in itertools.pairwise(command) if flag == "--model"]
        assert given == ["smollm2", "small=some/dir"]

    def test_two_models_of_one_name_are_refused(self, kvell: Kvell, served: Served) -> None:
        ended = kvell("serve", "--model", "a=x", "--model", "a=y")
        assert (ended.code, served.calls) == (2, [])
        assert "--model=a: is the name of two models; give each a name" in ended.stderr

    def test_address_and_key_arrive(self, kvell: Kvell, served: Served) -> None:
        kvell("serve", "--host", "::1", "--port", "0", "--api-key", "secret")
        options = served.calls[0][2]
        assert (options.host, options.port, options.api_key) == ("::1", 0, "secret")

    def test_the_seed_of_requests_without_one_arrives(self, kvell: Kvell, served: Served) -> None:
        kvell("serve")
        kvell("serve", "--seed", "7")
        assert [options.seed for _, _, options in served.calls] == [None, 7]
        assert "--seed" not in served.calls[1][0]
        assert kvell("serve", "--seed", "-1").code == 2

    def test_what_browsers_and_proxies_need_arrives(self, kvell: Kvell, served: Served) -> None:
        assert kvell("serve").code == 0
        assert served.calls[-1][2].face == FaceOptions()
        flags = ["--allowed-origins", '["https://a.b"]', "--allowed-origins", "https://c.d"]
        flags += ("--allowed-methods", '["GET"]', "--allowed-headers", "x-mine")
        flags += ("--allow-credentials", "--root-path", "/llm", "--enable-tokenizer-info-endpoint")
        flags += ("--disable-docs", "--allowed-hosts", '["kvell.lan"]', "--allowed-hosts", "*.b")
        assert kvell("serve", *flags).code == 0
        cross_origin = CrossOrigin(("https://a.b", "https://c.d"), ("GET",), ("x-mine",), True)
        hosts = ("kvell.lan", "*.b")
        assert served.calls[-1][2].face == FaceOptions((), "/llm", hosts, cross_origin, True, True)
        ended = kvell("serve", "--allowed-hosts", "http://a.b")
        assert "--allowed-hosts=http://a.b: is not a host name; give a name" in ended.stderr
        ended = kvell("serve", "--allowed-origins", "a.b")
        assert (ended.code, len(served.calls)) == (2, 2)
        assert "--allowed-origins=a.b: is not an origin; give a scheme and a host" in ended.stderr

    def test_the_first_model_has_the_names_that_are_given(
        self, kvell: Kvell, served: Served
    ) -> None:
        names = ("--served-model-name", "owner/name", "--served-model-name", "gpt-4")
        assert kvell("serve", *names, "--model", "some/dir", "--model", "small=x").code == 0
        command, texts, options = served.calls[0]
        assert texts.names == ["owner/name", "small"]
        assert texts.load().models[0] == "text of owner/name in where some/dir is"
        assert options.face.served_names == ("owner/name", "gpt-4")
        assert "owner/name" not in command, "instances know the model by its source"
        for wrong in (("small",), ("a", "a"), ("",)):
            flags = [word for name in wrong for word in ("--served-model-name", name)]
            ended = kvell("serve", *flags, "--model", "some/dir", "--model", "small=x")
            assert ended.code == 2 and "--served-model-name=" in ended.stderr

    def test_says_where_it_serves(self, kvell: Kvell, served: Served) -> None:
        ended = kvell("serve")
        assert "serving http://127.0.0.1:8000/v1" in ended.stderr
        assert ended.stdout == ""

    def test_how_pages_travel_arrives(self, kvell: Kvell, served: Served) -> None:
        kvell("serve")
        kvell("serve", "--page-transport", "tcp")
        found = [options.pool.page_transport for _, _, options in served.calls]
        assert found == ["memory", "tcp"]
        ended = kvell("serve", "--page-transport", "pigeon")
        assert ended.code == 2 and "--page-transport" in ended.stderr

    def test_the_key_stays_out_of_the_instance(self, kvell: Kvell, served: Served) -> None:
        kvell("serve", "--api-key", "secret")
        assert "secret" not in served.calls[0][0]

    def test_port_in_use(self, kvell: Kvell, served: Served) -> None:
        served.fails = ChangeSomething("port", 8000, "is in use", "try --port 8001")
        ended = kvell("serve")
        assert ended.code == 2
        assert ended.stderr.endswith("kvell: --port=8000: is in use; try --port 8001\n")

    def test_what_the_instance_said_is_not_said_again(self, kvell: Kvell, served: Served) -> None:
        served.fails = InstanceStartError("the instance ended", exit_code=2)
        ended = kvell("serve")
        assert ended.code == 2
        assert "the instance ended" not in ended.stderr

    def test_an_instance_that_crashes_is_a_bug(self, kvell: Kvell, served: Served) -> None:
        served.fails = InstanceStartError("the instance ended", exit_code=1)
        ended = kvell("serve")
        assert ended.code == 1
        assert ended.stderr.endswith("kvell: the instance ended\n")


class TestPool:
    def test_who_caches_what(self, kvell: Kvell, served: Served) -> None:
        assert kvell("serve", "--instances", "prefill=1,decode=1", "--pd-caching", "1").code == 0
        assert served.calls[-1][2].pool.pd_caching == 1
        assert kvell("serve", "--instances", "prefill=1,decode=1").code == 0
        assert served.calls[-1][2].pool.pd_caching == 3

    def test_without_prefill_instances_there_is_nothing_to_say(
        self, kvell: Kvell, served: Served
    ) -> None:
        ended = kvell("serve", "--pd-caching", "1")
        assert ended.code == 2
        assert "--pd-caching=1: applies to prefill and decode instances" in ended.stderr


class TestInstanceCommand:
    @pytest.mark.parametrize("settings", [ALL_SET, EngineSettings(model="smollm2")])
    def test_reads_back_as_the_same_settings(self, settings: EngineSettings) -> None:
        flags = settings.flags()
        session = Session(cache_dir=Path("unused"))
        args, names = [*flags, "--socket-fd", "3"], {field.name for field in fields(settings)}
        with root.commands["instance"].make_context("instance", args, obj=session) as context:
            read = {name: value for name, value in context.params.items() if name in names}
            read["model"], *beside = context.params["models"]
        assert EngineSettings(**read, beside=tuple(beside)) == settings

    def test_is_this_python_and_leaves_the_socket_to_the_front(self) -> None:
        command = instance_command(ALL_SET)
        assert command[:4] == [sys.executable, "-m", "kvell.cli.main", "instance"]
        names = ["socket_fd", "incarnation", "processors", "threads", "memory_parts", "weights_fd"]
        names += ["instance_id", "role", "pool_dir", "pd_caching", "page_transport"]
        flags = {"threads": "most_threads"}
        words = [(f"--{flags.get(name, name).replace('_', '-')}", f"{{{name}}}") for name in names]
        assert command[-22:] == [word for pair in words for word in pair]

    def test_prices_are_passed_on(self, tmp_path: Path) -> None:
        words = instance_command(ALL_SET, PriceSettings(tmp_path / "here.json"))
        assert words[words.index("--calibration") + 1] == str(tmp_path / "here.json")
        assert "--no-calibration" in placed_command(ALL_SET, PriceSettings(no_calibration=True))
        with pytest.raises(ChangeSomething, match="contradicts"):
            PriceSettings(Path("here.json"), no_calibration=True)

    def test_debug_is_passed_on(self) -> None:
        assert "--debug" in instance_command(ALL_SET, debug=True)
        assert "--debug" not in instance_command(replace(ALL_SET, model="m"))


class TestInstance:
    def test_serves_its_engine_over_the_inherited_socket(
        self, kvell: Kvell, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model.engine, freeze = Mock(), Mock()
        monkeypatch.setattr("gc.freeze", freeze)

        def serve_instance(engine: Mock, sock: socket.socket) -> None:
            assert engine is model.engine
            freeze.assert_called_once_with()
            engine.warm.assert_called_once_with()
            sock.sendall(b"ready")

        monkeypatch.setattr("kvell.serving.lone.serve_instance", serve_instance)
        ours, theirs = socket.socketpair()
        with ours:
            ended = kvell("instance", "--socket-fd", str(theirs.detach()))
            assert (ended.code, ours.recv(5)) == (0, b"ready")
            assert ours.recv(1) == b""  # the instance's end is closed

    @pytest.mark.parametrize(
        ("flags", "is_priced"),
        [
            ((), False),
            (("--memory-parts", "2"), True),
            (("--cpu-buffer", "64MiB"), True),
            (("--memory-parts", "2", "--no-calibration"), False),
            (("--calibration", "here.json"), True),
        ],
    )
    def test_calibrates_where_prices_are_used(
        self,
        kvell: Kvell,
        model: Any,
        monkeypatch: pytest.MonkeyPatch,
        flags: tuple[str, ...],
        is_priced: bool,
    ) -> None:
        model.engine = Mock()
        monkeypatch.setattr("kvell.serving.lone.serve_instance", lambda engine, sock: None)
        ours, theirs = socket.socketpair()
        with ours:
            assert kvell("instance", "--socket-fd", str(theirs.detach()), *flags).code == 0
        assert (model.pricing is not None) == is_priced

    def test_needs_a_socket(self, kvell: Kvell) -> None:
        ended = kvell("instance")
        assert ended.code == 2
        assert "--socket-fd=-1: is not a socket; use kvell serve" in ended.stderr


class FakeTokenizer:
    eos_token_ids = frozenset({2})
    special_ids = frozenset({6})
    decoder = template = gap_tokens = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(text)]

    most_token_bytes = 9

    def rendered_chat(self, messages: Any, tools: Any = (), fields: Any = ()) -> str:
        return f"{len(messages)} messages"

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(f"<{token}>" for token in token_ids)

    def spelling(self, token_id: int) -> str:
        return f"<{token_id}>"


class TestServedText:
    def test_offers_what_the_front_needs(self) -> None:
        tokenizer: Any = FakeTokenizer()
        text: TextModel = ServedText("m", 1000, tokenizer)
        assert (text.name, text.vocab_size, text.eos_token_ids) == ("m", 1000, frozenset({2}))
        assert list(text.encode("abc")) == [3]
        assert text.rendered_chat([{"role": "user", "content": "x"}]) == "1 messages"
        assert text.most_token_bytes == 9
        assert (text.decode([3, 4]), text.token_text(5), text.token_bytes(6)) == (
            "<3><4>",
            "<5>",
            b"<6>",
        )
        assert not text.takes_images


FLAG, URL = "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"


def test_the_address_arrives(kvell: Kvell, served: Served) -> None:
    assert kvell("serve", FLAG, URL).code == 0
    assert kvell("serve").code == 0
    assert [options.otlp_traces_endpoint for _, _, options in served.calls] == [URL, None]


def test_what_is_no_address_starts_nothing(kvell: Kvell, served: Served) -> None:
    ended = kvell("serve", FLAG, "localhost:4317")
    assert (ended.code, served.calls) == (2, [])
    assert ended.stderr.splitlines()[-1] == (
        f"kvell: {FLAG}=localhost:4317: is not an address of a collector; use one like {URL}"
    )


def test_without_the_extra_the_flag_says_how_to_install_it(
    kvell: Kvell, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry.sdk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvell.server.tracing.exporting", raising=False)
    monkeypatch.delattr("kvell.server.tracing.exporting", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    ended = kvell("serve", FLAG, URL)
    assert (ended.code, served.calls) == (2, [])
    assert ended.stderr.startswith(f"kvell: {FLAG}={URL}: needs packages")
    assert ended.stderr.endswith("; pip install 'kvell[otel]'\n")
