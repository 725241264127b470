"""Extract hidden states with vLLM: a program (see `engines.launch`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_eagle.engines.extraction import CONNECTOR, WORKER
from kimi_eagle.engines.gathering import Gathering, gather
from kimi_eagle.engines.launch import main
from kimi_eagle.engines.vllm_options import common_options, start_engine
from kimi_eagle.job import StageFailed

# What the engine has before it at any time, in tokens: enough to fill its next batches whatever
# the client does meanwhile, so that what shares a batch does not depend on timing.
QUEUE_TOKENS = 262_144
_LOOK_SECONDS = 0.1


def extract(job: Mapping[str, Any]) -> dict[str, Any]:
    gathering = gather(job, Path(job["shards"]))
    llm = start(job)
    most = max(QUEUE_TOKENS, 4 * job["engine"]["max_batched_tokens"])
    feed(llm, gathering, most, job["by"])
    gathering.wait()
    return gathering.document()


def start(job: Mapping[str, Any], **more: Any) -> Any:
    """A `vllm.LLM` that hands hidden states to a writer which writes into the job's `shards`.

    Args: `more`: keyword arguments of it besides.
    """
    if job["by"] == CONNECTOR:
        return start_engine({**common_options(job), **_connecting(job), **more})
    llm = start_engine({**common_options(job), **_capturing(job), **more})
    settings = {name: job[name] for name in ("rows", "contract", "shard_bytes", "ring_bytes")}
    llm.collective_rpc("capture", args=({**settings, "spool": job["shards"]},))
    return llm


def _connecting(job: Mapping[str, Any]) -> dict[str, Any]:
    options = {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": job["contract"]["layers"]}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "kimi_eagle.engines.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "spool": job["shards"],
                "dtype": job["contract"]["dtype"],
                "shard_bytes": job["shard_bytes"],
                "ring_bytes": job["ring_bytes"],
            },
        },
    }
    if job["block_tokens"] is not None:
        options["block_size"] = job["block_tokens"]
    return options


def _capturing(job: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "worker_cls": "kimi_eagle.engines.capturing_worker.CapturingWorker",
        "additional_config": {"capture_layers": job["contract"]["layers"]},
    }
    if not job["engine"]["enforce_eager"]:
        # A pass that is one graph calls no Python, and hands nothing over.
        options["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
    return options


def feed(llm: Any, gathering: Gathering, most: int, by: str) -> None:
    """Run every row through the engine, with at most about `most` tokens in its queue.

    Raises: StageFailed.
    """
    from vllm import SamplingParams

    engine, todo = llm.llm_engine, gathering.todo
    sent = outstanding = 0
    looked = time.monotonic()

    def fill(upto: int) -> None:
        nonlocal sent, outstanding
        while sent < len(todo) and outstanding < upto:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                # The engine's own choice at every position of the first rows, to prove by.
                prompt_logprobs=1 if sent < gathering.probing else None,
                extra_args=None if by == WORKER else {"kv_transfer_params": gathering.asks(sent)},
                skip_clone=True,  # it is this request's alone
            )
            engine.add_request(str(sent), {"prompt_token_ids": todo.ids(sent).tolist()}, sampling)
            outstanding += todo.tokens(sent)
            sent += 1

    if by == WORKER:
        llm.collective_rpc("capture_into", args=(gathering.inside,))
    with _paused(llm):
        fill(most // 2)  # two batches at least; the next are there before these have been run
    fill(most)
    try:
        while outstanding:
            for output in engine.step():
                if output.finished:
                    row = int(output.request_id)
                    outstanding -= todo.tokens(row)
                    if row < gathering.probing:
                        gathering.ranked(row, _first_ranked(output))
            fill(most)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                gathering.look()
                looked = time.monotonic()
        if by == WORKER:
            llm.collective_rpc("flush_captured")
            gathering.close()
    except StageFailed:
        raise
    except Exception as error:
        gathering.look()  # the writer may have said why
        raise StageFailed(f"the engine ended: {error}; see the log of the stage") from error


@contextmanager
def _paused(llm: Any) -> Iterator[None]:
    """Queue requests before the engine, a process of its own, takes the first of them.

    Otherwise how many have reached it by then decides what shares a batch, and so the last bits of
    the sums: the same rows would come out another now and then. An older vLLM cannot be paused.
    """
    if not hasattr(llm, "enqueue"):
        yield
        return
    llm.sleep(level=0, mode="keep")
    yield
    llm.wake_up(tags=["scheduling"])


def _first_ranked(output: Any) -> list[int]:
    """The token the engine ranks first after each position of a prompt, the last included."""
    after = [
        next(token for token, entry in ranked.items() if entry.rank == 1)
        for ranked in output.prompt_logprobs[1:]
    ]
    return [*after, output.outputs[0].token_ids[0]]


if __name__ == "__main__":
    sys.exit(main(extract))
