"""Serve with and without the draft, and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.engines.launch import cpu_build, environment, has_gpu, run_program
from kimi_eagle.job import EVENTS, StageFailed
from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.prompts import BadPrompt, read_prompts
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.evaluate.acceptance import pool


def run(context: Context) -> dict[str, Any]:
    params, verifier = context.params, context.verifier
    prompts = _prompts(context)
    cpu = not has_gpu()
    if cpu != cpu_build():
        raise StageFailed("vLLM here is not the build for this machine (extras `cpu` and `gpu`)")
    job = {
        "model": str(verifier.path),
        "prompts": prompts,
        "max_tokens": params.max_tokens,
        "draft_tokens": params.draft_tokens,
        "max_model_len": max(map(len, prompts)) + params.max_tokens + params.draft_tokens + 1,
        "multimodal": verifier.facts.model_type == "kimi_k25",
        "cpu": cpu,
        "engine": params.engine.model_dump(mode="json"),
        "events": str(Path(context.job.folder) / EVENTS),
    }
    env = environment(params.engine.cpu_kv_cache_gib)
    program = "kimi_eagle.engines.vllm_generate"
    plain = run_program(
        program, {**job, "draft": None, "label": "without the draft"}, context.scratch("plain"), env
    )
    drafted = run_program(
        program,
        {**job, "draft": str(context.path("checkpoint")), "label": "with the draft"},
        context.scratch("drafted"),
        env,
    )
    return _report(context, prompts, plain, drafted)


def _prompts(context: Context) -> list[list[int]]:
    params = context.params
    renderer = Renderer(load_tokenizer(context.verifier.path))
    thinking = False if params.thinking == "never" else None
    try:
        asked = read_prompts(context.path("prompts"), params.prompts.limit)
    except (BadPrompt, ValueError) as error:
        raise StageFailed(str(error)) from None
    prompts = [_ids(renderer, item, thinking, number) for number, item in enumerate(asked, 1)]
    limit = context.verifier.facts.max_positions - params.max_tokens - params.draft_tokens - 1
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) > limit:
            raise StageFailed(
                f"prompt {number} has {len(prompt)} tokens; with max_tokens {params.max_tokens} "
                f"the verifier has room for {limit}"
            )
    return prompts


def _ids(renderer: Renderer, messages: Any, thinking: bool | None, number: int) -> list[int]:
    try:
        return renderer.prompt_ids(messages, thinking=thinking)
    except Rejected as error:
        raise StageFailed(f"prompt {number}: {error}") from None


def _report(
    context: Context, prompts: list[list[int]], plain: dict[str, Any], drafted: dict[str, Any]
) -> dict[str, Any]:
    params = context.params
    acceptance = pool(
        [request["committed"] for request in drafted["requests"]], params.draft_tokens
    )
    equal = [
        a["token_ids"] == b["token_ids"]
        for a, b in zip(plain["requests"], drafted["requests"], strict=True)
    ]
    evaluation = {
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_length_per_request": acceptance.acceptance_length_per_request,
        "acceptance_length_reason": acceptance.reason,
        "includes_bonus": True,
        "per_position": list(acceptance.per_position),
        "draft_steps": acceptance.draft_steps,
        "draft_tokens": params.draft_tokens,
        "temperature": 0.0,
        "batch": 1,
        "engine": "vllm",
        "prompts": len(prompts),
        "tokens": sum(len(request["token_ids"]) for request in drafted["requests"]),
        "outputs_equal": sum(equal),
        "outputs_identical": all(equal),
    }
    out = context.out("evaluation")
    write_json(out / "evaluation.json", evaluation)
    write_json(
        out / "outputs.json",
        [
            {
                "prompt": prompt,
                "without_draft": a["token_ids"],
                "with_draft": b["token_ids"],
                "committed": b["committed"],
                "finish_reason": b["finish_reason"],
            }
            for prompt, a, b in zip(prompts, plain["requests"], drafted["requests"], strict=True)
        ],
    )
    # Speed is recorded with the run and kept out of the artifact: it is never the same twice.
    rates = {name: _rate(found) for name, found in (("plain", plain), ("drafted", drafted))}
    return {
        **evaluation,
        "tokens_per_second": rates["drafted"],
        "tokens_per_second_without_draft": rates["plain"],
        "speedup": rates["drafted"] / rates["plain"] if rates["plain"] else None,
        "engine_counters": drafted["counters"],
    }


def _rate(found: dict[str, Any]) -> float:
    seconds = sum(request["seconds"] for request in found["requests"])
    tokens = sum(len(request["token_ids"]) for request in found["requests"])
    return round(tokens / seconds, 2) if seconds else 0.0
