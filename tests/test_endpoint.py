"""What is refused of a server that runs already; real ones are asked in `test_serving.py`."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.engines.endpoint_generate import Server, _whole, generate, read_counters
from kimi_eagle.job import StageFailed

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 195.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 84.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 6.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
"""


def test_counters_are_named_as_in_process_ones_and_summed_over_engines() -> None:
    assert read_counters(METRICS) == {
        "vllm:spec_decode_num_drafts": 195,
        "vllm:spec_decode_num_accepted_tokens_per_pos.0": 90,
    }


def _run(drafts: int, *committed: list[int]) -> dict[str, Any]:
    return {
        "requests": [{"committed": one} for one in committed],
        "counters": {"vllm:spec_decode_num_drafts": drafts},
    }


def test_pieces_that_are_draft_steps_are_taken() -> None:
    _whole(_run(3, [4, 1], [2]), 3, "http://x")
    _whole(_run(0, []), 3, "http://x")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (_run(2, [5, 1]), "commits 5 tokens at once"),
        (_run(3, [4, 1]), "counts 3 draft steps, 2 were seen"),  # two steps were joined
        (_run(1, [4, 1]), "others use it"),
    ],
)
def test_pieces_that_are_not_are_refused(run: Any, says: str) -> None:
    with pytest.raises(StageFailed, match=says):
        _whole(run, 3, "http://x")


def test_a_server_that_does_not_answer_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StageFailed, match=rf"{url}/v1/models does not answer"):
            Server(f"{url}/v1/")


def test_batches_are_not_for_an_endpoint(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="set batch to 1"):
        generate(json.loads('{"batch": 4}'))
