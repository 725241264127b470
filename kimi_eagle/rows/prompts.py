"""Read evaluation prompts: messages without their answer. Pure but for the file it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_eagle.rows.sources import read_records


class BadPrompt(ValueError):
    """A prompt that cannot be asked; the message says which."""


def read_prompts(path: Path, limit: int | None) -> list[list[dict[str, Any]]]:
    """The messages of each prompt: from `messages`, the first of `turns` (MT-Bench), or `prompt`.

    Raises:
        BadPrompt: a line that is none of these, or no prompt at all.
    """
    prompts: list[list[dict[str, Any]]] = []
    for record in read_records(path):
        if limit is not None and len(prompts) >= limit:
            break
        where = f"{path}:{record.number}"
        if record.error is not None:
            raise BadPrompt(f"{where}: {record.error}")
        value = record.value if isinstance(record.value, dict) else {}
        if isinstance(value.get("messages"), list) and value["messages"]:
            messages = value["messages"]
        elif isinstance(value.get("turns"), list) and value["turns"]:
            messages = [{"role": "user", "content": value["turns"][0]}]
        elif isinstance(value.get("prompt"), str):
            messages = [{"role": "user", "content": value["prompt"]}]
        else:
            raise BadPrompt(f"{where}: a prompt has `messages`, `turns` or `prompt`")
        if messages[-1].get("role") == "assistant":
            raise BadPrompt(
                f"{where}: the last message is the assistant's; a prompt ends before it"
            )
        prompts.append(messages)
    if not prompts:
        raise BadPrompt(f"{path} holds no prompt")
    return prompts
