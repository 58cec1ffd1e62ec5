"""An MCP server without the SDK, for what no honest server does: ``plain_server.py MODE``.

Modes: plain, hang (never answers), crash (ends at once, with words on stderr), pages (a list without an end), cursor
(the same page for ever), many (600 tools), wrong (a list that is none), junk (noise between messages), stubborn
(ignores the end of its input and SIGTERM), asks (asks people once two calls are open, and answers both with what it is
told).
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable

MODE = sys.argv[1]
Answer = dict[str, object]
open_calls: list[object] = []


def tool(name: str, schema: object = None, **more: object) -> Answer:
    return {"name": name, "description": name, "inputSchema": schema or {"type": "object"}, **more}


ODD = [
    tool("remote", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}),
    tool("nowhere", {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}),
    tool("old", {"type": "object", "properties": {"a": {"type": "number", "exclusiveMinimum": True}}}),
    tool("loop", {"type": "object", "allOf": [{"$ref": "#"}]}),
    tool("pattern", {"type": "object", "properties": {"a": {"type": "string", "pattern": "(x+x+)+y"}}}),
    tool("local", {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}),
    tool("x" * 100),
    tool("hinted", annotations={"readOnlyHint": True}),
    tool("hinted", annotations={"readOnlyHint": True}),
    tool("die"),
    tool("die_reading", annotations={"readOnlyHint": True}),
]


def send(message: Answer) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def list_tools(params: Answer) -> Answer:
    if MODE == "pages":
        number = int(str(params.get("cursor", "0")))
        return {"tools": [tool(f"t{number}")], "nextCursor": str(number + 1)}
    if MODE == "cursor":
        return {"tools": [tool("same")], "nextCursor": "again"}
    if MODE == "many":
        return {"tools": [tool(f"t{number}") for number in range(600)]}
    if MODE == "wrong":
        return {"tools": 5}
    return {"tools": [tool(name) for name in ("pid", "leak", "variable", "huge", "shape", "both", "context")] + ODD}


def call_tool(params: Answer, number: object) -> Answer:
    args = dict(params.get("arguments") or {})  # type: ignore[call-overload]
    match params["name"]:
        case "pid":
            text = str(os.getpid())
        case "leak":
            sys.stderr.write(f"token {os.environ['TOKEN']}\n")
            text = os.environ["TOKEN"]
            return {"content": [{"type": "text", "text": f"no {text}"}], "isError": True}
        case "die" | "die_reading":
            os._exit(3)
        case "variable":
            text = os.environ.get(str(args["name"]), "")
        case "huge":
            text = "x" * int(args["size"])
        case "shape":
            return {"content": "not a list"}
        case "both":
            return {"content": [], "structuredContent": {"b": 1, "a": [1.5]}}
        case _:
            text = json.dumps(args)
    return {"content": [{"type": "text", "text": text}]}


def answer(request: Answer) -> None:
    number, params = request["id"], dict(request.get("params") or {})  # type: ignore[call-overload]
    methods: dict[object, Callable[[], Answer]] = {
        "initialize": lambda: {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "plain", "version": "1"},
        },
        "tools/list": lambda: list_tools(params),
        "tools/call": lambda: call_tool(params, number),
    }
    if request["method"] == "tools/call" and MODE == "asks":
        open_calls.append(number)
        if len(open_calls) == 2:
            schema = {"type": "object", "properties": {"a": {"type": "string"}}}
            send({"id": "q", "method": "elicitation/create", "params": {"message": "hm", "requestedSchema": schema}})
        return
    method = methods.get(request["method"])
    if method is None:
        send({"id": number, "error": {"code": -32601, "message": "Method not found"}})
    else:
        send({"id": number, "result": method()})


def take_reply(reply: Answer) -> None:
    for number in open_calls:
        send({"id": number, "result": {"content": [{"type": "text", "text": json.dumps(reply.get("error"))}]}})


def main() -> None:
    if MODE == "crash":
        sys.stderr.write(f"starting\nno licence for {os.environ.get('TOKEN', 'you')}\n")
        sys.exit(4)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        message = json.loads(line)
        if MODE == "junk":
            sys.stdout.write("Welcome!\n\n{]\n" + json.dumps({"jsonrpc": "2.0", "id": 999, "result": {}}) + "\n")
        if MODE != "hang" and "id" in message and "method" in message:
            answer(message)
        elif message.get("id") == "q":
            take_reply(message)
    while MODE in ("stubborn", "hang"):
        time.sleep(60)


if __name__ == "__main__":
    main()
