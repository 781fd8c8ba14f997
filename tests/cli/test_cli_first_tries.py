"""The first command lines of a user of vLLM or SGLang, and what each answers."""

import json
from pathlib import Path

import pytest

from kvell.cli.late_commands import COMMANDS
from kvell.equivalents.table import EQUIVALENTS, OTHER_COMMANDS
from kvell.errors import ChangeSomething
from kvell.models.sources.missing_model import ollama_name
from kvell.models.sources.source import resolve_as, resolve_model
from tests.cli.conftest import Kvell, Served

HONOURED = [
    ("serve some/model", "--model some/model"),
    ("serve some/model small=some/dir", "--model some/model --model small=some/dir"),
    ("serve --model some/model", "--model some/model"),
    ("serve --model-path some/model", "--model some/model"),
    ("serve --max-model-len 1024", "--max-model-len 1024"),
    ("serve --max_num_seqs 8", "--max-num-seqs 8"),
    ("serve --context-length 1024", "--max-model-len 1024"),
    ("serve --max-running-requests 8", "--max-num-seqs 8"),
    ("serve --chunked-prefill-size 512", "--max-num-batched-tokens 512"),
    ("serve --chunked-prefill-size -1", "--no-enable-chunked-prefill"),
    ("serve --kv-offloading-size 2", "--cpu-buffer 2GiB"),
    ("serve --swap-space 1.5", "--cpu-buffer 1.5GiB"),
    ("serve --kv-cache-memory-bytes 1GiB", "--kv-memory 1GiB"),
    ("serve --dtype float", "--dtype float32"),
    ("serve --kv-cache-dtype fp8_e4m3", "--kv-cache-dtype fp8"),
    ("serve --max-model-len 8k", "--max-model-len 8000"),
    ("serve --max-model-len 1K", "--max-model-len 1024"),
    ("serve --max-num-batched-tokens 2.5k", "--max-num-batched-tokens 2500"),
    ("serve --max-model-len=8K --enforce-eager", "--max-model-len 8192"),
    (
        "serve --speculative-config.method ngram --speculative-config.num_speculative_tokens=3",
        "--num-speculative-tokens 3",
    ),
    (
        "serve -sc.num_speculative_tokens 3 --port 1 --speculative-config.prompt_lookup_max 7",
        "--prompt-lookup-max 7",
    ),
    ("serve --hf-overrides.rope.factor 4", '--hf-overrides {"rope":~{"factor":~4}}'),
    ("serve --gpu-memory-utilization 0.9", "--gpu-memory-utilization 0.9"),
    ("serve --mem-fraction-static 0.8", "--gpu-memory-utilization 0.8"),
    ("serve --enforce-eager", "--enforce-eager"),
    ("serve --enable-prefix-caching", "--enable-prefix-caching"),
    ("serve --no-enable-prefix-caching", "--no-enable-prefix-caching"),
    ("serve --disable-radix-cache", "--no-enable-prefix-caching"),
    ("serve --tokenizer some/tokenizer", "--tokenizer some/tokenizer"),
    ("serve --load-format dummy", "--load-format dummy"),
    ("serve -m some/model -c 1024 -np 8", "--model some/model --max-model-len 1024"),
    ("serve -m some/model --parallel 8", "--model some/model --max-num-seqs 8"),
    ("serve --ctx-size 1024 -c 0", "--max-model-len 1024"),
    ("serve --batch-size 512 -t 1", "--max-num-batched-tokens 512 --threads 1"),
    ("""serve --hf-overrides {"rope_theta":1}""", """--hf-overrides {"rope_theta":1}"""),
    (
        """serve --speculative-config {"method":"ngram","num_speculative_tokens":4}""",
        "--num-speculative-tokens 4",
    ),
    (
        """serve -sc {"model":"some/draft","num_speculative_tokens":3}""",
        "--num-speculative-tokens 3 --speculative-model some/draft",
    ),
]
"""Command lines, and flags of the instance that they start."""
WITHOUT_EFFECT = [
    "serve -tp 1",
    "serve --tensor-parallel-size=1",
    "serve --pipeline-parallel-size 1",
    "serve --enable-auto-tool-choice --tool-call-parser hermes",
    "serve --trust-remote-code",
    "serve --block-size 16",
    "serve --distributed-executor-backend mp",
    "serve --disable-log-requests",
    "serve --enable-metrics",
    "serve --runner generate",
    "serve --runner pooling",
    "serve -O3",
    "serve -O=2",
    "serve -O 1",
    "serve --compilation-config {}",
    "serve --compilation-config.level 3 --compilation-config.sizes+ 1",
    "serve --uvicorn-log-level info",
    "serve --limit-mm-per-prompt.image 4",
    """serve --limit-mm-per-prompt {"image":4}""",
    "serve --mm-processor-kwargs {}",
    "serve --response-role assistant",
    "serve --enable-request-id-headers",
    "serve --enable-prompt-tokens-details",
    "serve --api-server-count 1",
    "serve --attention-backend FLASH_ATTN",
    "serve --model-impl auto",
    "serve -ngl 0",
    "serve --jinja",
    "serve -cb",
    "serve --cache-type-k bf16",
]
"""Command lines whose flag is what Kvell does anyway."""
REFUSED = [
    ("serve -tp 2", "-tp=2: Kvell has no tensor parallelism; use --instances mixed=2"),
    ("serve --dtype half", "--dtype=half: is not served; use bfloat16"),
    ("serve --max-logprobs 50", "--max-logprobs=50: the limit is 20; use at most 20"),
    ("serve --response-role user", "--response-role=user: answers are the assistant's; leave"),
    ("serve --return-tokens-as-token-ids", "--return-tokens-as-token-ids=on: tokens are not"),
    ("serve --api-server-count 4", "--api-server-count=4: one process serves HTTP; use --cluster"),
    ("serve --override-generation-config.top_k 1", '--override-generation-config={"top_k": 1}: d'),
    (
        """serve --structured-outputs-config {"backend":"outlines"}""",
        "--structured-outputs-config backend=outlines: is not served: one compiler of grammars",
    ),
    (
        "serve --structured-outputs-config.enable_in_reasoning true",
        "--structured-outputs-config enable_in_reasoning=True: is not served",
    ),
    ("serve --speculative-config.method", "--speculative-config.method=nothing: needs a value"),
    ("serve --load-format gguf", "--load-format=gguf: follows from the model; name the file"),
    ("serve llama3-8b", "--model=llama3-8b: names a config without weights; give a directory"),
    ("serve --enable-lora", "--enable-lora=on: Kvell serves no adapters; merge the adapter"),
    ("serve --cpu-offload-gb 4", "--cpu-offload-gb=4: weights stay on their device; use"),
    ("serve --ssl-keyfile key.pem", "--ssl-keyfile=key.pem: Kvell serves HTTP without TLS; put"),
    ("serve --data-parallel-size none", "--data-parallel-size=none: is not a whole number above"),
    (
        """serve --speculative-config {"method":"eagle"}""",
        "--speculative-config method=eagle: is not served; use one of ngram, draft_model",
    ),
    ("serve --speculative-config eagle", "--speculative-config=eagle: is not a JSON object; write"),
    ("serve -ngl 99", "-ngl=99: all layers of a model are on one device; use --device cuda"),
    (
        "serve --n-gpu-layers all",
        "--n-gpu-layers=all: all layers of a model are on one device; use",
    ),
    (
        "serve -hf some/model-GGUF:Q4_K_M",
        "-hf=some/model-GGUF:Q4_K_M: a file on the hub is a model; use --model",
    ),
    ("serve -ctk q8_0", "-ctk=q8_0: keys and values have one dtype; use --kv-cache-dtype fp8 or"),
    ("generate --alias name hello", "--alias=name: needs --served-model-name, which only a server"),
    ("generate -dp 2 hello", "-dp=2: needs --instances, which only a server has; use kvell serve"),
]


@pytest.mark.parametrize(("line", "flags"), HONOURED)
def test_is_honoured(kvell: Kvell, served: Served, line: str, flags: str) -> None:
    ended = kvell(*line.split(" "))
    assert (ended.code, ended.stderr) == (
        0,
        "kvell: serving http://127.0.0.1:8000/v1 (Ctrl-C ends it)\n",
    )
    own = served.calls[0][0]
    sizes = {"2GiB": str(2 << 30), "1.5GiB": str(3 << 29), "1GiB": str(1 << 30)}
    for pair in flags.split(" --"):
        flag, *value = ("--" + pair.removeprefix("--")).split(" ")
        expected = [flag, *(sizes.get(word, word.replace("~", " ")) for word in value)]
        places = [own[n : n + len(expected)] for n in range(len(own))]
        assert expected in places, own


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_is_accepted_with_one_line(kvell: Kvell, served: Served, line: str) -> None:
    ended = kvell(*line.split(" "))
    assert ended.code == 0
    note, serving = ended.stderr.splitlines()
    assert " has no effect: " in note
    assert serving.startswith("kvell: serving ")
    assert served.calls[0][0] == _command_without(kvell, served, line)


def _command_without(kvell: Kvell, served: Served, line: str) -> list[str]:
    """Return the instance's command of a server without other systems' flags."""
    served.calls.clear()
    assert kvell("serve").code == 0
    command: list[str] = served.calls[0][0]
    return command


@pytest.mark.parametrize(("line", "answer"), REFUSED)
def test_is_refused_with_a_remedy(kvell: Kvell, served: Served, line: str, answer: str) -> None:
    ended = kvell(*line.split(" "))
    assert ended.code == 2
    assert ended.stderr.startswith(f"kvell: {answer}")
    assert ended.stderr.count("\n") == 1
    assert served.calls == []


@pytest.mark.parametrize("name", OTHER_COMMANDS)
def test_a_command_of_another_system_has_a_remedy(kvell: Kvell, name: str) -> None:
    ended = kvell(name, "smollm2", "--verbose")
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    other = OTHER_COMMANDS[name]
    assert ended.stderr.startswith(f"kvell: command={name}: is {other.system}'s: {other.problem}; ")
    assert name not in COMMANDS


def test_an_unknown_command_is_not_another_systems(kvell: Kvell) -> None:
    assert "No such command 'frobnicate'" in kvell("frobnicate").stderr


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        (
            "qwen3:0.6b",
            "is a name of Ollama's library, which Kvell does not read; use the model on",
        ),
        ("library/qwen3:0.6b", "is a name of Ollama's library"),
        ("ollama.com/library/qwen3", "is a name of Ollama's library"),
        ("hf.co/x/y:latest", "has a tag, latest, that names no type of GGUF's matrices; name one"),
        ("hf.co/x/y", "is Ollama's name or an address; use x/y"),
        ("https://huggingface.co/x/y", "is Ollama's name or an address; use x/y"),
        ("smollm2:latest", "is Ollama's name with a tag; use smollm2"),
        ("smollm2:135m", "is Ollama's name with a tag; use smollm2"),
    ],
)
def test_a_name_of_ollamas_is_told_from_a_hub_id(model: str, answer: str, tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething) as caught:
        resolve_model(model, tmp_path, fetch=lambda _: tmp_path)
    assert str(caught.value).startswith(f"model={model}: {answer}")
    with pytest.raises(ChangeSomething, match=r"^speculative_model="):
        resolve_as("speculative_model", model, tmp_path)


@pytest.mark.parametrize("model", ["owner/name", "gpt2", "owner/name-v1.5_GGUF", "/a:b", "./a:b"])
def test_hub_ids_and_paths_are_no_names_of_ollamas(model: str) -> None:
    assert ollama_name(model) is None


def test_a_seed_is_the_servers(kvell: Kvell, served: Served) -> None:
    assert kvell("serve", "--seed", "7").code == 0
    assert served.calls[0][2].seed == 7


@pytest.mark.parametrize(
    "given",
    [
        ("""{"backend":"xgrammar"}""",),
        ("auto",),
        ("""{"backend":"guidance","disable_fallback":true,"reasoning_parser":"qwen3"}""",),
    ],
)
def test_backends_of_grammars_are_read(
    kvell: Kvell, served: Served, given: tuple[str, ...]
) -> None:
    assert kvell("serve", "--structured-outputs-config", *given).code == 0
    expected = "qwen3" if "qwen3" in given[0] else None
    assert served.calls[0][2].reasoning_parser == expected


def test_log_probabilities_up_to_the_limit_are_accepted(kvell: Kvell, served: Served) -> None:
    assert kvell("serve", "--max-logprobs", "20").code == 0


def test_a_length_that_is_no_count_is_refused(kvell: Kvell) -> None:
    for length in ("8x", "1.0001k", "k", "0", "-2"):
        ended = kvell("serve", f"--max-model-len={length}")
        assert ended.code == 2
        assert "is neither a whole number above 0 nor 'auto'" in ended.stderr


def test_copies_are_instances(kvell: Kvell, served: Served) -> None:
    assert kvell("serve", "--data-parallel-size", "3").code == 0
    assert served.calls[0][2].instances == {"mixed": 3}


def test_a_log_in_json_has_no_line_that_is_not_json(kvell: Kvell, served: Served) -> None:
    [line] = kvell("serve", "--log-format", "json", "--trust-remote-code").stderr.splitlines()
    event = json.loads(line)
    assert event["event"] == "flag_without_effect"
    assert "--trust-remote-code has no effect" in event["note"]


def test_a_slip_is_corrected_and_a_distant_name_is_not(kvell: Kvell) -> None:
    assert (
        "'--max-num-seq'; did you mean --max-num-seqs?"
        in kvell("serve", "--max-num-seq", "1").stderr
    )
    assert "mean" not in kvell("serve", "--frobnicate", "1").stderr


def test_values_that_look_like_flags_are_values(kvell: Kvell) -> None:
    assert kvell("generate", "--raw", "--prompt", "-tp").stdout == "-TP\n"
    assert kvell("generate", "--raw", "--", "--enable-lora").stdout == "--ENABLE-LORA\n"


class TestVariables:
    def test_each_flag_has_one(self, kvell: Kvell, served: Served, environ: dict[str, str]) -> None:
        environ |= {
            "KVELL_PORT": "9000",
            "KVELL_MODEL": "some/model",
            "KVELL_API_KEY": "secret",
            "KVELL_KV_MEMORY": "1GiB",
            "KVELL_ENFORCE_EAGER": "true",
            "KVELL_SERVED_MODEL_NAME": '["one", "two"]',
        }
        assert kvell("serve").code == 0
        command, _, options = served.calls[0]
        assert (options.port, options.api_key) == (9000, "secret")
        assert options.face.served_names == ("one", "two")
        assert {"some/model", str(1 << 30), "--enforce-eager"} <= set(command)

    def test_the_command_line_wins(
        self, kvell: Kvell, served: Served, environ: dict[str, str]
    ) -> None:
        environ |= {"KVELL_PORT": "9000", "KVELL_MODEL": "some/model"}
        assert kvell("serve", "smollm2", "--port", "9001").code == 0
        command, _, options = served.calls[0]
        assert options.port == 9001
        assert "some/model" not in command

    @pytest.mark.parametrize(
        ("variable", "text", "answer"),
        [
            ("KVELL_PORT", "many", "Invalid value for 'KVELL_PORT': 'many'"),
            ("KVELL_KV_MEMORY", "much", "KVELL_KV_MEMORY=much: is not a size"),
        ],
    )
    def test_an_error_names_the_variable(
        self, kvell: Kvell, environ: dict[str, str], variable: str, text: str, answer: str
    ) -> None:
        environ[variable] = text
        ended = kvell("serve")
        assert (ended.code, ended.stderr.count("\n")) == (2, 1)
        assert answer in ended.stderr

    def test_a_slip_in_a_name_is_reported(
        self, kvell: Kvell, served: Served, environ: dict[str, str]
    ) -> None:
        environ["KVELL_KV_MEMROY"] = "1GiB"
        line = "KVELL_KV_MEMROY is not read; the nearest variable is KVELL_KV_MEMORY"
        assert line in kvell("serve").stderr

    def test_other_variables_are_not_reported(
        self, kvell: Kvell, served: Served, environ: dict[str, str]
    ) -> None:
        environ["KVELL_CACHE_DIR"] = "/somewhere"
        assert "KVELL" not in kvell("serve").stderr


class TestConfigFile:
    def write(self, tmp_path: Path, text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return str(path)

    def test_has_flags_as_keys(self, kvell: Kvell, served: Served, tmp_path: Path) -> None:
        text = """
            model: some/model
            port: 9000
            max_num_seqs: 8
            enforce-eager: true
            enable-chunked-prefill: false
            served-model-name: [one, two]
            data-parallel-size: 2
            trust-remote-code: true
            speculative-config: {method: ngram, num_speculative_tokens: 4}
            uvicorn-log-level: info
            max-model-len: 4k
        """
        ended = kvell("serve", "--config", self.write(tmp_path, text))
        assert ended.code == 0
        assert "--trust-remote-code has no effect" in ended.stderr
        command, _, options = served.calls[0]
        assert (options.port, options.instances) == (9000, {"mixed": 2})
        assert options.face.served_names == ("one", "two")
        assert "--uvicorn-log-level has no effect" in ended.stderr
        assert command[command.index("--max-model-len") + 1] == "4000"
        words = ["some/model", "--enforce-eager", "--no-enable-chunked-prefill"]
        assert set(words) <= set(command)
        assert command[command.index("--max-num-seqs") + 1] == "8"
        assert command[command.index("--num-speculative-tokens") + 1] == "4"

    def test_variables_and_the_command_line_win(
        self, kvell: Kvell, served: Served, environ: dict[str, str], tmp_path: Path
    ) -> None:
        path = self.write(tmp_path, "port: 1\nmax-num-seqs: 1\nhost: 127.0.0.2\n")
        environ |= {"KVELL_PORT": "2", "KVELL_MAX_NUM_SEQS": "2"}
        assert kvell("serve", "--port", "3", "--config", path).code == 0
        command, _, options = served.calls[0]
        assert (options.port, options.host) == (3, "127.0.0.2")
        assert command[command.index("--max-num-seqs") + 1] == "2"

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("prot: 1", "serve.yaml: prot=1: is not a flag of this command; use port"),
            ("frobnicate: 1", "serve.yaml: frobnicate=1: is not a flag of this command; see"),
            ("port: many", "Invalid value for '{path}: port': 'many'"),
            ("- port", "is not a mapping of flags to values; write lines like port: 8000"),
            ("a: b: c", "is not YAML"),
            ("tensor-parallel-size: 2", "Kvell has no tensor parallelism"),
        ],
    )
    def test_an_error_names_the_key(
        self, kvell: Kvell, tmp_path: Path, text: str, answer: str
    ) -> None:
        path = self.write(tmp_path, text)
        ended = kvell("serve", "--config", path)
        assert (ended.code, ended.stderr.count("\n")) == (2, 1)
        assert answer.replace("{path}", path) in ended.stderr

    def test_a_missing_file_is_refused(self, kvell: Kvell) -> None:
        assert (
            "--config=/none.yaml: cannot be read (No such file"
            in kvell("serve", "--config", "/none.yaml").stderr
        )


def test_no_name_has_two_entries_and_sentences_end_with_a_remedy() -> None:
    names = [name for entry in EQUIVALENTS for name in entry.names]
    assert len(names) == len(set(names))
    for entry in EQUIVALENTS:
        if entry.action == "refused":
            assert "; " in entry.sentence, entry.names
