"""Serve with and without the draft, simulate it, and compare."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kimi_eagle.artifacts.files import write_json
from kimi_eagle.engines.launch import (
    cpu_build,
    engine_environment,
    environment,
    has_gpu,
    run_program,
)
from kimi_eagle.job import EVENTS, StageFailed
from kimi_eagle.rows.conversations import Rejected
from kimi_eagle.rows.prompts import BadPrompt, read_prompts
from kimi_eagle.rows.render import Renderer
from kimi_eagle.rows.tokenizer import load_tokenizer
from kimi_eagle.stages.context import Context
from kimi_eagle.stages.evaluate.report import Decoded, gap, headline, measured, speed
from kimi_eagle.states.layout import CONTRACT

# Tokens that a chat template writes around one more turn, amply.
_AROUND = 64


def run(context: Context) -> dict[str, Any]:
    params = context.params
    if params.engine.kind == "vllm" and has_gpu() == cpu_build():
        raise StageFailed("vLLM here is not the build for this machine (extras `cpu` and `gpu`)")
    job = _job(context, _conversations(context))
    plain_job = {**job, "draft": None, "single": True}
    ended = context.scratch("simulated") / "ended"
    if job["cpu"] and params.engine.kind == "vllm":
        # An engine starts on one core and waits for much of it: the simulator takes the other.
        # What is timed begins when it has ended.
        with ThreadPoolExecutor(1) as beside:
            simulation = beside.submit(_simulated, context, ended)
            plain = _decode(context, {**plain_job, "after": str(ended)}, "without the draft")
            simulated = simulation.result()
    else:
        simulated = _simulated(context, ended)
        plain = _decode(context, plain_job, "without the draft")
    drafted = {
        number: _decode(
            context,
            {
                **job,
                "draft": str(context.path("checkpoint")),
                "draft_tokens": number,
                "runs": plain["runs"],
                "single": params.batch == 1,
            },
            _label(params, number),
        )
        for number in params.lengths
    }
    decoded = [
        _decoded(params.batch, number, place, plain, found)
        for number, found in drafted.items()
        for place in range(len(params.temperatures))
    ]
    return _report(context, decoded, simulated)


def _label(params: Any, number: int) -> str:
    return "with the draft" + (f", {number} tokens" if len(params.lengths) > 1 else "")


def _conversations(context: Context) -> list[dict[str, Any]]:
    params = context.params
    renderer = Renderer(load_tokenizer(context.verifier.path))
    thinking = False if params.thinking == "never" else None
    limit = context.verifier.facts.max_positions - params.max_tokens - max(params.lengths) - 1
    found = []
    # By name: the order they are written in is not part of the key.
    for name, given in sorted(params.named_sets.items()):
        role = "prompts" if params.prompts is not None else f"sets.{name}"
        try:
            asked = read_prompts(
                context.path(role), given.limit, given.turns, by_category=given.by_category
            )
        except (BadPrompt, ValueError) as error:
            raise StageFailed(str(error)) from None
        for number, one in enumerate(asked):
            try:
                prompt = renderer.prompt_ids(one.messages, thinking=thinking)
            except Rejected as error:
                raise StageFailed(f"prompt {number + 1} of {name}: {error}") from None
            if len(prompt) > limit:
                raise StageFailed(
                    f"prompt {number + 1} of {name} has {len(prompt)} tokens; with max_tokens "
                    f"{params.max_tokens} the verifier has room for {limit}"
                )
            room = len(prompt) + params.max_tokens
            for question in one.later:
                room += len(renderer.encode(question)) + _AROUND + params.max_tokens
            found.append(
                {
                    "set": f"{name}/{one.category or 'none'}" if given.by_category else name,
                    "conversation": number,
                    "messages": list(one.messages),
                    "later": list(one.later),
                    "prompt": prompt,
                    "room": room,
                }
            )
    return found


def _job(context: Context, conversations: list[dict[str, Any]]) -> dict[str, Any]:
    params, verifier = context.params, context.verifier
    room = max(one["room"] for one in conversations) + max(params.lengths) + 1
    return {
        "model": str(verifier.path),
        "tokenizer": str(verifier.path),
        "conversations": conversations,
        "runs": None,
        "max_tokens": params.max_tokens,
        "draft_tokens": max(params.lengths),
        "temperatures": list(params.temperatures),
        "seed": params.seed,
        "after": None,
        "batch": params.batch,
        "thinking": params.thinking,
        "max_model_len": min(room, verifier.facts.max_positions),
        "multimodal": verifier.facts.model_type == "kimi_k25",
        "mla": verifier.facts.mla,
        "heads": verifier.facts.num_heads,
        "draft_heads": _draft_heads(context),
        "cpu": not has_gpu(),
        "engine": params.engine.model_dump(mode="json"),
        "events": str(Path(context.job.folder) / EVENTS),
    }


def _draft_heads(context: Context) -> int:
    config = json.loads((context.path("checkpoint") / "config.json").read_text("utf-8"))
    return int(config["transformer_layer_config"]["num_attention_heads"])


def _decode(context: Context, job: dict[str, Any], label: str) -> dict[str, Any]:
    engine = context.params.engine
    env = engine_environment(engine) if engine.kind == "vllm" else environment()
    return run_program(
        f"kimi_eagle.engines.{engine.kind}_generate",
        {**job, "label": label},
        context.scratch(label.replace(" ", "-").replace(",", "")),
        env,
    )


def _decoded(
    batch: int, number: int, place: int, plain: dict[str, Any], drafted: dict[str, Any]
) -> Decoded:
    if batch == 1:
        return Decoded(number, drafted["runs"][place], plain["runs"][place])
    return Decoded(
        number,
        drafted["batched"][place],
        plain["batched"][place],
        plain["runs"][place],
        batch,
    )


def _simulated(context: Context, ended: Path) -> dict[str, Any] | None:
    """What the simulator says of the checkpoint; None without states. However it ends, the file
    `ended` is there afterwards."""
    try:
        return _simulate(context)
    finally:
        ended.touch()


def _simulate(context: Context) -> dict[str, Any] | None:
    params, verifier = context.params, context.verifier
    if params.states is None:
        return None
    states = context.path("states")
    contract = json.loads((states / CONTRACT).read_text("utf-8"))
    config = json.loads((context.path("checkpoint") / "config.json").read_text("utf-8"))
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if contract["layers"][:-1] != layers:
        raise StageFailed(
            f"the draft reads layers {layers}, `states` hold {contract['layers'][:-1]}: name "
            "states of the layers that it was trained on"
        )
    head = verifier.head_tensors()
    job = {
        "checkpoints": [str(context.path("checkpoint"))],
        "rows": str(context.path("rows")),
        "states": str(states),
        "root": str(context.root),
        "registry": context.job.registry,
        "head": {plain: [str(path), name] for plain, (path, name) in head.items()},
        "rms_norm_eps": verifier.facts.rms_norm_eps,
        "draft_tokens": list(params.lengths),
        "max_tokens": params.max_tokens,
        "rows_limit": params.simulate_rows,
        "device": "cuda" if has_gpu() else "cpu",
    }
    # A process of its own gives the memory back before an engine takes it.
    found = run_program(
        "kimi_eagle.draft.simulator", job, context.scratch("simulated"), environment()
    )
    (lengths,) = found.pop("checkpoints")
    return {**found, "lengths": lengths}


def _report(
    context: Context, decoded: list[Decoded], simulated: dict[str, Any] | None
) -> dict[str, Any]:
    params = context.params
    measurements = [measured(one, name, params.seed) for one in decoded for name in one.sets()]
    first = headline(measurements)
    _warn(context, measurements)
    expected = simulated["lengths"][0]["acceptance_length"] if simulated else None
    evaluation = {
        **first,
        "engine": "vllm",
        "engine_kind": params.engine.kind,
        "simulated_acceptance_length": expected,
        "simulated_gap": gap(expected, first),
        "checkpoint": context.input("checkpoint").digest,
        "verifier": context.input("verifier").digest,
    }
    sets = {
        name: [
            given.digest
            for given in context.job.inputs[
                "prompts" if params.prompts is not None else f"sets.{name}"
            ]
        ]
        for name in sorted(params.named_sets)
    }
    out = context.out("evaluation")
    write_json(
        out / "evaluation.json",
        {
            **evaluation,
            "max_tokens": params.max_tokens,
            "thinking": params.thinking,
            "sets": sets,
            "measurements": measurements,
            "simulated": simulated,
        },
    )
    write_json(out / "outputs.json", [line for one in decoded for line in _outputs(one)])
    # Speed is recorded with the run and kept out of the artifact: it is never the same twice.
    speeds = [speed(one, name) for one in decoded for name in one.sets()]
    fastest = headline(speeds)
    return {
        **evaluation,
        **{name: fastest[name] for name in fastest if name.startswith(("tokens_per", "speedup"))},
        "speeds": speeds,
        "engine_counters": decoded[0].drafted["counters"],
    }


def _warn(context: Context, measurements: list[dict[str, Any]]) -> None:
    """Say what a person should read before the figures."""
    for one in measurements:
        if one.get("sampled_alike") is False:
            drawn, plain = one["log_probability"], one["log_probability_without_draft"]
            context.events.note(
                f"{one['set']}, {one['draft_tokens']} draft tokens, temperature "
                f"{one['temperature']:g}: tokens drawn with the draft have a log-probability of "
                f"{drawn:.2f}, without it {plain:.2f}: this vLLM does not keep the verifier's "
                "distribution when it samples with a draft"
            )


def _outputs(decoded: Decoded) -> list[dict[str, Any]]:
    pairs = zip(decoded.plain["requests"], decoded.drafted["requests"], strict=True)
    return [
        {
            "set": b["set"],
            "conversation": b["conversation"],
            "turn": b["turn"],
            "draft_tokens": decoded.draft_tokens,
            "temperature": decoded.temperature,
            "prompt": b["prompt"],
            "without_draft": a["token_ids"],
            "with_draft": b["token_ids"],
            "committed": b["committed"],
            "finish_reason": b["finish_reason"],
        }
        for a, b in pairs
    ]
