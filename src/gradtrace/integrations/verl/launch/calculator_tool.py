"""The calculator of `task.name=calculator` for verl's agent loop with tools.

verl loads this file by its path (`rollout.multi_turn.function_tool_path`), in its agent-loop workers. It brings the
tool, and the parser that finds calls in what the policy wrote (`rollout.multi_turn.format`).
"""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

from gradtrace.tasks.calculator import CALL_END, VOCABULARY, Calculator


@ToolParser.register("gradtrace_calculator")
class CallParser(ToolParser):
    """A turn that ends with </calc> is a call, as in the embedded loop."""

    @property
    def stop_token_ids(self) -> list[int]:
        return [CALL_END]

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text, ids = written(responses_ids), [int(token) for token in responses_ids]
        if not ids or ids[-1] != CALL_END:
            return text, []
        return text, [FunctionCall(name=Calculator.name, arguments=json.dumps({"turn": ids}))]


@function_tool(Calculator.name)
def calculate(turn: list[int]) -> str:
    """Work out one operation.

    Args:
        turn: The tokens that the policy wrote, with the call at their end.
    """
    reply = Calculator().reply(turn)
    assert reply is not None
    return written(reply[0])


def written(ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)
