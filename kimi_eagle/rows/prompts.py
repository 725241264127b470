"""Read evaluation prompts: messages without their answer. Pure but for the file it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.rows.conversations import Rejected, read_messages
from kimi_eagle.rows.sources import BadRecord, read_records


class BadPrompt(ValueError):
    """A prompt that cannot be asked; the message says which."""


def read_prompts(path: Path, limit: int | None) -> list[list[dict[str, Any]]]:
    """The messages of each prompt: from `messages`, the first of `turns` (MT-Bench), or `prompt`.

    Raises:
        BadPrompt: a line that is none of these, or no prompt at all.
    """
    prompts: list[list[dict[str, Any]]] = []
    try:
        for record in read_records(path):
            if limit is not None and len(prompts) >= limit:
                break
            where = f"{path}:{record.number}"
            if record.error is not None:
                raise BadPrompt(f"{where}: {record.error}")
            prompts.append(_messages(record.value, where))
    except BadRecord as error:
        raise BadPrompt(str(error)) from None
    if not prompts:
        raise BadPrompt(f"{path} holds no prompt")
    return prompts


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    given: Any = None
    if isinstance(value, dict):
        turns = value.get("turns")
        asked = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
        given = value.get("messages") or (asked and [{"role": "user", "content": asked}])
    if not given:
        raise BadPrompt(f"{where}: a prompt has `messages`, `turns` or `prompt`")
    try:
        messages = read_messages(given)
    except Rejected as error:
        raise BadPrompt(f"{where}: {error}") from None
    if messages[-1]["role"] == "assistant":
        raise BadPrompt(f"{where}: the last message is the assistant's; a prompt ends before it")
    return messages
