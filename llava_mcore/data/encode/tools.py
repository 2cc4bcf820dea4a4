"""Functions that the assistant may call, and its calls, in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llava_mcore.data.encode.record_keys import TOOLS_KEYS, decoded, full_value, is_full
from llava_mcore.data.samples import Turn
from llava_mcore.errors import DataError


def tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the calls of functions in a message. DataError if one has no name."""
    calls = decoded(message.get("tool_calls"))
    if is_full(message.get("function_call")):
        calls = [*calls, message["function_call"]] if is_full(calls) else message["function_call"]
    return calls_of(decoded(calls), where) if is_full(calls) else []


def calls_of(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return calls of functions as chat templates expect them, with their arguments as objects."""
    listed = calls if isinstance(calls, (list, tuple)) else [calls]
    result = []
    for call in listed:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f'{where}: a call must be {{"name": …, "arguments": {{…}}}}, found {call!r:.80}')
        arguments = decoded(function.get("arguments"))
        about = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        call_id = {"id": call["id"]} if is_full(call.get("id")) else {}
        result.append({"type": "function", **call_id, "function": about})
    return result


def tools_of(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the functions that the assistant may call, each as {"type": "function", "function": …}."""
    tools = decoded(full_value(row, TOOLS_KEYS))
    if not is_full(tools):
        return ()
    listed = [decoded(tool) for tool in tools] if isinstance(tools, (list, tuple)) else [tools]
    if not all(isinstance(tool, Mapping) and is_full(tool) for tool in listed):
        raise DataError(f"`tools` must be a list of functions, or its JSON; found {tools!r:.80}")
    return tuple(_tool(tool if _is_wrapped(tool) else {"type": "function", "function": tool}) for tool in listed)


def _is_wrapped(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    if "function" in tool and not isinstance(function, Mapping):
        raise DataError(f"`function` of a tool must be an object, found {function!r:.80}")
    return "function" in tool


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function without the parameters that are null, which no JSON schema has: a table has filled them in."""
    properties = _properties(tool)
    if properties is None:
        return dict(tool)
    named = {name: schema for name, schema in properties.items() if schema is not None}
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": {**function["parameters"], "properties": named}}}


def without_filling(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> Sequence[Turn]:
    """Return the turns without arguments of calls that are null and that the called function does not have.

    A table whose rows were written as JSON lines has them: each call has the arguments of all functions.
    """
    properties = {str(tool["function"].get("name")): _properties(tool) for tool in tools}
    return [replace(turn, fields=_own_arguments(turn.fields, properties)) for turn in turns]


def _own_arguments(fields: Mapping[str, Any], properties: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    calls = []
    for call in fields.get("tool_calls", ()):
        about = call["function"]
        known, arguments = properties.get(about["name"]), about["arguments"]
        if known is not None and isinstance(arguments, Mapping):
            written = {key: value for key, value in arguments.items() if value is not None or key in known}
            call = {**call, "function": {**about, "arguments": written}}
        calls.append(call)
    return {**fields, "tool_calls": calls} if calls else dict(fields)


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schemas of a function's parameters by name; None if it says nothing about them."""
    parameters = tool["function"].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else None
