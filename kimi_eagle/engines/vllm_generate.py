"""Decode prompts with vLLM, with or without a draft: a program (see `engines.launch`).

One request at a time unless a batch is asked for: batch shape alone changes bf16 sums, so that
only single streams can be compared token for token. The engine is stepped by hand, which shows how
many tokens each forward pass committed.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_eagle.engines.asking import Answer, single_streams
from kimi_eagle.engines.launch import main
from kimi_eagle.engines.vllm_options import (
    attention_options,
    common_options,
    draft_options,
    start_engine,
)
from kimi_eagle.job import EventWriter


def generate(job: Mapping[str, Any]) -> dict[str, Any]:
    """Decode, first in single streams, then in batches where the job asks for them.

    Args (of `job`): those of `common_options` and `single_streams`; `draft`: a checkpoint folder
        or None; `draft_tokens`, `max_tokens`; `batch`: requests together, or 1; `single`: whether
        single streams are decoded too when there is a batch; `after`: a file that must be there
        before anything is decoded, or None.

    Returns: `runs`, see `single_streams`, and `batched`: the same in batches, or None.
    """
    import torch
    from vllm import SamplingParams

    options = {**common_options(job), **attention_options(job)}
    if job["draft"] is not None:
        # By torch's private word, since vLLM goes by it when it takes the verifier's kernel.
        amx = torch.cpu._is_amx_tile_supported()
        options |= draft_options(job, machine=platform.machine(), amx=amx)
    # No more can ever come together. Besides, vLLM 0.26's sources warm a GPU up with all of these
    # tokens, dealt out to `max_num_seqs` requests: one longer than a request may be has no blocks.
    most = job["batch"] * job["max_model_len"]
    options["max_num_batched_tokens"] = min(options["max_num_batched_tokens"], most)
    llm = start_engine({**options, "max_num_seqs": job["batch"], "disable_log_stats": False})
    while job["after"] is not None and not Path(job["after"]).exists():
        time.sleep(0.05)

    def sampling(temperature: float, seed: int, tokens: int) -> Any:
        # A seed makes vLLM draw row by row: greedy decoding needs none. What is drawn is proven by
        # how likely the verifier finds it: that of the drawn token alone is asked for.
        drawn = {"seed": seed, "logprobs": 0} if temperature else {}
        return SamplingParams(temperature=temperature, max_tokens=tokens, **drawn)

    # The first generation sets kernels up; it is done once and thrown away.
    first = job["conversations"][0]["prompt"]
    for temperature in job["temperatures"]:
        warm = sampling(temperature, 0, min(4, job["max_tokens"]))
        llm.generate([{"prompt_token_ids": first}], warm, use_tqdm=False)

    def ask(prompt: list[int], temperature: float, seed: int) -> Answer:
        said = sampling(temperature, seed, job["max_tokens"])
        return together(llm, [(prompt, said)])[0]

    runs = None
    if job["single"] or job["batch"] == 1:
        runs = single_streams(ask, lambda: counters(llm), job)
    batched = None
    if job["batch"] > 1:
        events = EventWriter(Path(job["events"]))
        batched = []
        for asked in job["runs"] or runs or []:
            requests, temperature = asked["requests"], asked["temperature"]
            prompts = [
                (one["prompt"], sampling(temperature, job["seed"] + number, job["max_tokens"]))
                for number, one in enumerate(requests)
            ]
            before, started = counters(llm), time.perf_counter()
            answers = together(llm, prompts)
            seconds = time.perf_counter() - started
            after = counters(llm)
            events.progress(len(answers), len(answers), f"prompts in batches {job['label']}")
            batched.append(
                {
                    "temperature": temperature,
                    "requests": [
                        {
                            **{name: one[name] for name in ("set", "conversation", "turn")},
                            "prompt": one["prompt"],
                            "token_ids": said.token_ids,
                            "committed": said.committed,
                            "finish_reason": said.finish_reason,
                            "log_probability": said.log_probability,
                        }
                        for one, said in zip(requests, answers, strict=True)
                    ],
                    "seconds": seconds,
                    "counters": {name: after[name] - before.get(name, 0) for name in after},
                }
            )
    return {"runs": runs, "batched": batched}


def together(llm: Any, prompts: Sequence[tuple[list[int], Any]]) -> list[Answer]:
    """Decode prompts, each with its sampling parameters, as many at once as the engine takes.

    All are in the queue before the first is taken from it: otherwise how many have reached the
    engine by then decides what shares a batch, and so the last bits of the sums.
    """
    engine = llm.llm_engine
    held = len(prompts) > 1 and hasattr(llm, "enqueue")
    started = time.perf_counter()
    if held:
        llm.sleep(level=0, mode="keep")
    tokens: list[list[int]] = [[] for _ in prompts]
    committed: list[list[int]] = [[] for _ in prompts]
    seconds = [0.0] * len(prompts)
    reasons: list[str | None] = [None] * len(prompts)
    likely: list[float | None] = [None] * len(prompts)
    for number, (prompt, sampling) in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    if held:
        llm.wake_up(tags=["scheduling"])
    while engine.has_unfinished_requests():
        for output in engine.step():
            at = int(output.request_id)
            now = list(output.outputs[0].token_ids)
            if len(now) > len(tokens[at]):
                committed[at].append(len(now) - len(tokens[at]))
                tokens[at] = now
            reasons[at] = output.outputs[0].finish_reason or reasons[at]
            likely[at] = output.outputs[0].cumulative_logprob
            seconds[at] = time.perf_counter() - started
    return [
        Answer(tokens[at], committed[at][1:], seconds[at], reasons[at], likely[at])
        for at in range(len(prompts))
    ]


def counters(llm: Any) -> dict[str, int]:
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
