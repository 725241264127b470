"""The conversations of the real material, each in a form that `prepare` reads.

Where a file has a form of its own it is put into `messages`; nothing is left out, whatever it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SPOKEN = re.compile(r"^(user|assistant|tool): ", re.MULTILINE)


def conversations(folder: Path) -> Iterator[dict[str, Any]]:
    """Records of `messages` (and `tools`), file by file."""
    for path in sorted([*folder.glob("*/*.json"), *folder.glob("*/*.jsonl")]):
        text = path.read_text("utf-8")
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in text.splitlines()]
        else:
            records = json.loads(text)
        for record in records:
            yield _conversation(record)


def _conversation(record: dict[str, Any]) -> dict[str, Any]:
    if "traj" in record:
        return {"messages": record["traj"]}
    if "messages_display" in record:
        return {"messages": _display(record["messages_display"])}
    if "instruction" in record:
        asked = "\n\n".join(filter(None, [record["instruction"], record.get("input")]))
        answer = record.get("output", record.get("response"))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    elif "messages" in record:
        turns = list(_parts(record["messages"]))
    else:
        chosen = [record["chosen"]] if "chosen" in record else []
        turns = list(_calls([*record["conversations"], *chosen]))
    tools = record.get("tools") or "[]"
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {
        "messages": turns,
        "tools": [
            tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
        ],
    }


def _call(number: int, value: str) -> dict[str, Any]:
    said = json.loads(value)
    arguments = json.dumps(said["arguments"], ensure_ascii=False)
    return {
        "id": f"functions.{said['name']}:{number}",
        "type": "function",
        "function": {"name": said["name"], "arguments": arguments},
    }


def _calls(turns: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """ShareGPT with calls and observations as turns of their own."""
    number, last = 0, "functions.unknown:0"
    for turn in turns:
        origin, value = turn["from"], turn["value"]
        if origin == "function_call":
            call = _call(number, value)
            number, last = number + 1, call["id"]
            yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif origin == "observation":
            yield {"role": "tool", "tool_call_id": last, "content": value}
        else:
            role = {"human": "user", "gpt": "assistant", "system": "system"}[origin]
            yield {"role": role, "content": value}


def _parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of parts: text, reasoning, tool calls."""
    number, open_calls = 0, ["functions.unknown:0"]
    for message in messages:
        found: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
        for part in message["content"]:
            found[part["type"]].append(part["value"])
        turn: dict[str, Any] = {"role": message["role"], "content": "".join(found["text"])}
        if found["reasoning"]:
            turn["reasoning_content"] = "".join(found["reasoning"])
        if found["tool_call"]:
            calls = [_call(number + i, value) for i, value in enumerate(found["tool_call"])]
            number += len(calls)
            open_calls += [call["id"] for call in calls]
            turn["tool_calls"] = calls
        if message["role"] == "tool":
            turn["tool_call_id"] = open_calls[-1]
        yield turn


def _display(text: str) -> list[dict[str, str]]:
    """A transcript; what tools returned is shown to the assistant as a user's turn."""
    pieces = _SPOKEN.split(text)[1:]
    return [
        {"role": "user" if role == "tool" else role, "content": said.strip()}
        for role, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
