"""The agent that ships: a helpful assistant with a calculator and a clock.

It shows what an agent looks like and makes the first run work; ``DUALCLAW_AGENTS`` names your own.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dualclaw_server.engine.agent import Agent
from dualclaw_server.engine.tool import ToolRaised, tool

_MAX_EXPRESSION = 500
_MAX_BITS = 4_096

_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool(effect="read", timeout=5)
async def calculate(expression: str) -> str:
    """Calculate an arithmetic expression exactly.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as "17 * (23 + 4)".
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ToolRaised(f"the expression is longer than {_MAX_EXPRESSION} characters")
    try:
        return str(_evaluate(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError:
        raise ToolRaised(f"{expression!r} is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError, ValueError, RecursionError) as error:
        raise ToolRaised(str(error)) from None


@tool(effect="read", timeout=5)
async def current_time(timezone: str = "UTC") -> str:
    """Tell the current date and time.

    Args:
        timezone: IANA name of a time zone, such as "Asia/Shanghai".
    """
    try:
        zone = UTC if timezone.upper() == "UTC" else ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ToolRaised(f"no time zone is named {timezone!r}; use an IANA name such as Europe/Berlin") from None
    return datetime.now(zone).isoformat(timespec="seconds")


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_evaluate(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = _evaluate(node.left), _evaluate(node.right)
            _check_size(node.op, left, right)
            return _BINARY[type(node.op)](left, right)
        case _:
            raise ToolRaised("only numbers, parentheses and + - * / // % ** can be calculated")


def _check_size(operation: ast.operator, left: float, right: float) -> None:
    """Refuse what would take long or fill memory."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    bits = left.bit_length() * max(1, right) if isinstance(operation, ast.Pow) else 0
    if isinstance(operation, ast.Mult):
        bits = left.bit_length() + right.bit_length()
    if bits > _MAX_BITS:
        raise ToolRaised(f"the result would be larger than {_MAX_BITS} bits")


AGENT = Agent(
    name="assistant",
    description="A helpful assistant with a calculator and a clock.",
    instructions=(
        "You are a helpful assistant. Answer in the language of the question, briefly and to the point. "
        "Use calculate for arithmetic and current_time for dates and times instead of guessing."
    ),
    tools=(calculate, current_time),
)
"""The default agent; it answers with the engine's own model."""
