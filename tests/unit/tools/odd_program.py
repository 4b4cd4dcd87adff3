"""An MCP server over stdio that does something odd when its tool is called, or before.

python odd_program.py <manner>
"""

from __future__ import annotations

import json
import sys
from typing import Any

manner = sys.argv[1]
answer: dict[str, Any] = {"content": [{"type": "text", "text": "5"}]}
schemas: dict[str, Any] = {
    "a plain schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "a costly schema": {"type": "object", "properties": {"n": {"type": "string", "pattern": "^(a+)+$"}}},
}


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def send(**message: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}))


def flood(text: str) -> None:
    while True:
        sys.stdout.write((text + "\n") * 100)


def ask() -> None:
    """Put four questions to the client, and wait for each answer before anything else."""
    said = []
    for number, method in enumerate(("ping", "sampling/createMessage", "elicitation/create", "roots/list")):
        params = {} if method in ("ping", "roots/list") else {"messages": [], "maxTokens": 1, "message": "who?"}
        send(id=f"q{number}", method=method, params=params)
        told = json.loads(sys.stdin.readline())
        said.append("result" if "result" in told and told["id"] == f"q{number}" else "error")
    answer["content"] = [{"type": "text", "text": " ".join(said)}]


def call(number: Any) -> None:
    lines = {
        "print": "Traceback (most recent call last): ...",
        "batch": json.dumps([{"jsonrpc": "2.0", "id": number, "result": answer}]),
        "a number": json.dumps({"jsonrpc": "2.0", "id": number, "result": 5}),
        "null": json.dumps({"jsonrpc": "2.0", "id": number, "result": None}),
        "both": json.dumps({"jsonrpc": "2.0", "id": number, "result": answer, "error": {"code": 1, "message": ""}}),
        "no version": json.dumps({"id": number, "result": answer}),
        "version 1.0": json.dumps({"jsonrpc": "1.0", "id": number, "result": answer}),
        "no id": json.dumps({"jsonrpc": "2.0", "id": None, "result": answer}),
        "no id, an error": json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "what?"}}),
        "the id as text": json.dumps({"jsonrpc": "2.0", "id": str(number), "result": answer}),
        "the id as a fraction": json.dumps({"jsonrpc": "2.0", "id": float(number), "result": answer}),
        "a name": '"5"',
        "not a number": json.dumps({"jsonrpc": "2.0", "id": number, "result": {"n": float("nan")}}),
    }
    if manner in lines:
        write(lines[manner])
    elif manner == "no text":
        sys.stdout.buffer.write(b"\xff\xfe\n")
        sys.stdout.flush()
    elif manner == "noise":
        flood("noise")
    elif manner == "blank lines":
        flood("")
    elif manner == "notifications":
        params = {"level": "info", "data": "x" * 60_000}
        flood(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": params}))
    elif manner == "questions":
        flood(json.dumps({"jsonrpc": "2.0", "id": "q", "method": "ping"}))
    else:
        if manner == "asks":
            ask()
        if manner == "talks":
            for part in range(200):
                send(method="notifications/message", params={"level": "info", "data": f"part {part}"})
                write("  \r")
        if "schema" in manner:
            answer["structuredContent"] = {"n": "b"}
        send(id=number, result=answer)


if manner == "early answer":
    send(id=1, result=answer)
if manner.startswith("banner of"):
    for welcome in range(int(manner.split()[-1])):
        write(f"Welcome, line {welcome} " + "=" * 5000)
for line in sys.stdin:
    asked = json.loads(line)
    number, method, given = asked.get("id"), asked.get("method"), asked.get("params") or {}
    if method == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "odd", "version": "1"}}
        send(id=number, result={"protocolVersion": given["protocolVersion"], **about})
    elif method == "notifications/initialized" and manner.startswith("banner"):
        write("Ready.")
    elif method == "tools/list":
        entry: dict[str, Any] = {"name": "add", "inputSchema": {"type": "object"}}
        if manner in schemas:
            entry["outputSchema"] = schemas[manner]
        send(id=number, result={"tools": [entry]})
    elif method == "tools/call":
        call(number)
    elif number is not None:
        send(id=number, error={"code": -32601, "message": "no such method"})
