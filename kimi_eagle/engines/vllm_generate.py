"""Generate greedily with vLLM, one prompt at a time, with or without a draft: a program.

One request at a time: batch shape alone changes bf16 sums, so that only single streams can be
compared token for token. The engine is stepped by hand, which shows how many tokens each forward
pass committed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_eagle.engines.launch import main
from kimi_eagle.engines.vllm_options import common_options
from kimi_eagle.job import EventWriter


def generate(job: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options = common_options(job)
    if job["draft"] is not None:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": job["draft"],
            "num_speculative_tokens": job["draft_tokens"],
        }
    events = EventWriter(Path(job["events"]))
    llm = LLM(**options, max_num_seqs=1, disable_log_stats=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    prompts = job["prompts"]
    # The first generation sets kernels up; it is done once and thrown away.
    llm.generate(
        [{"prompt_token_ids": prompts[0]}],
        SamplingParams(temperature=0.0, max_tokens=4),
        use_tqdm=False,
    )
    before = _counters(llm)
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(_stream(llm, str(number), prompt, sampling))
        events.progress(number + 1, len(prompts), f"prompts {job['label']}")
    after = _counters(llm)
    return {
        "requests": requests,
        "counters": {name: after[name] - before.get(name, 0) for name in after},
    }


def _stream(llm: Any, name: str, prompt: list[int], sampling: Any) -> dict[str, Any]:
    """One request: its tokens, how many each forward pass committed, and the seconds it took."""
    engine = llm.llm_engine
    started = time.perf_counter()
    first: float | None = None
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    tokens: list[int] = []
    committed: list[int] = []
    reason = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = list(output.outputs[0].token_ids)
            if len(now) > len(tokens):
                first = first if first is not None else time.perf_counter() - started
                committed.append(len(now) - len(tokens))
                tokens = now
            reason = output.outputs[0].finish_reason or reason
    return {
        "token_ids": tokens,
        # The first pass is prefill: its one token belongs to no draft step.
        "committed": committed[1:],
        "prefill": committed[0] if committed else 0,
        "seconds": time.perf_counter() - started,
        "first_token_seconds": first,
        "finish_reason": reason,
    }


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's own counters of speculative decoding, for comparison."""
    found: dict[str, int] = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            if hasattr(metric, "values"):
                for position, value in enumerate(metric.values):
                    found[f"{metric.name}.{position}"] = int(value)
            else:
                found[metric.name] = int(metric.value)
    return found


if __name__ == "__main__":
    sys.exit(main(generate))
