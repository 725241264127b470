"""Training the demo verifier on exactly what it will be served.

That is a prompt as the chat template renders it, and the completion that follows it.
"""

import logging
import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast
from transformers.models.kimi_k25 import Kimi_K25ForConditionalGeneration

from kimi_eagle.demo.checkpoint import END_OF_TURN

logger = logging.getLogger(__name__)

BATCH_ROWS = 16
POOL_BATCHES = 32
MUON_RATE, ADAM_RATE = 4e-3, 2.5e-3
WARMUP_STEPS = 40
FALLING_SHARE = 0.5
# Prompts are weighted lightly: learning them helps the first layers, but nobody decodes them.
PROMPT_WEIGHT = 0.1
IGNORED = -100


class Row(NamedTuple):
    """One assistant turn as token ids: what serving sends, and what follows, its end included."""

    prompt: list[int]
    completion: list[int]


def turn_rows(dialogue: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """One row for each assistant turn; one without reasoning is served with ``thinking=false``."""
    rows = []
    messages = dialogue["messages"]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        reasoning = message.get("reasoning_content")
        prompt = tokenizer.apply_chat_template(
            messages[:index],
            tokenize=False,
            add_generation_prompt=True,
            thinking=reasoning is not None,
        )
        opening = "" if reasoning is None else f"{reasoning}</think>"
        completion = f"{opening}{message['content']}{END_OF_TURN}"
        # The prompt ends in an added token, so both parts encode to what the whole text would.
        rows.append(
            Row(
                *(tokenizer.encode(text, add_special_tokens=False) for text in (prompt, completion))
            )
        )
    return rows


def batches(
    dialogues: Iterator[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    excluded: frozenset[str],
) -> Iterator[list[Row]]:
    """Batches of ``BATCH_ROWS`` rows of about one length, so that little is padding.

    Dialogues with a message among the ``excluded`` ones are left out.
    """
    rows = (
        row
        for dialogue in dialogues
        if not excluded.intersection(message["content"] for message in dialogue["messages"])
        for row in turn_rows(dialogue, tokenizer)
    )
    rng = random.Random(0)  # noqa: S311
    while pool := sorted(
        islice(rows, BATCH_ROWS * POOL_BATCHES),
        key=lambda row: len(row.prompt) + len(row.completion),
    ):
        grouped = [pool[start : start + BATCH_ROWS] for start in range(0, len(pool), BATCH_ROWS)]
        rng.shuffle(grouped)
        yield from grouped


def tensors(rows: list[Row], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded input ids, next-token targets and whether the target is of the completion.

    All are ``[rows, longest - 1]``; int64, int64 and bool. Causal attention never looks right, so
    padding needs no attention mask.
    """
    length = max(len(row.prompt) + len(row.completion) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), IGNORED)
    completion = torch.zeros((len(rows), length), dtype=torch.bool)
    for index, row in enumerate(rows):
        end = len(row.prompt) + len(row.completion)
        ids[index, :end] = targets[index, :end] = torch.tensor(row.prompt + row.completion)
        completion[index, len(row.prompt) : end] = True
    return ids[:, :-1], targets[:, 1:], completion[:, 1:]


def _share_of_peak(step: int, steps: int) -> float:
    """Learning rate over its peak: a linear warm-up, level, then a linear fall to about nothing."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return min(warm, max(0.01, (1 - step / steps) / FALLING_SHARE))


def _optimizers(model: Kimi_K25ForConditionalGeneration) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if "vision_tower" in name or "mm_projector" in name:
            continue
        hidden = parameter.ndim == 2 and "layers" in name and "mlp.gate.weight" not in name
        (matrices if hidden else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(
    model: Kimi_K25ForConditionalGeneration, rows: Iterator[list[Row]], steps: int, pad_id: int
) -> None:
    """Train the language model in place for ``steps`` batches, in float32."""
    model.train()
    optimizers = _optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_peak(step, steps))
        for optimizer in optimizers
    ]
    started = time.monotonic()
    for step, batch in enumerate(islice(rows, steps)):
        ids, targets, completion = tensors(batch, pad_id)
        logits = model(input_ids=ids, use_cache=False).logits
        losses = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        weights = torch.where(completion, 1.0, PROMPT_WEIGHT) * (targets != IGNORED)
        loss = (losses * weights.flatten()).sum() / weights.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0 or step == steps - 1:
            accuracy = (logits.argmax(-1) == targets)[completion].float().mean().item()
            logger.info(
                "step %d loss %.4f accuracy %.4f seconds %.0f",
                step,
                loss.item(),
                accuracy,
                time.monotonic() - started,
            )


@torch.no_grad()  # type: ignore[untyped-decorator]
def next_token_scores(
    model: Kimi_K25ForConditionalGeneration, rows: list[Row], pad_id: int
) -> tuple[float, float]:
    """The share of the completions' tokens predicted right, and their mean entropy in nats."""
    model.eval()
    right, entropies = [], []
    for start in range(0, len(rows), BATCH_ROWS):
        ids, targets, completion = tensors(rows[start : start + BATCH_ROWS], pad_id)
        logits = model(input_ids=ids, use_cache=False).logits.float()[completion]
        right.append((logits.argmax(-1) == targets[completion]).float())
        logs = logits.log_softmax(-1)
        entropies.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(right).mean().item(), torch.cat(entropies).mean().item()
