"""An MCP server over stdio that shakes hands, lists its tools, and answers a call as its argument says.

python stdio_liar.py endless | wrong_id | twice | many | pages | no_listing | honest
"""

from __future__ import annotations

import json
import sys
from typing import Any

manner = sys.argv[1]


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def listing(cursor: str | None) -> dict[str, Any]:
    if manner == "pages":
        return {"tools": [], "nextCursor": str(int(cursor or 0) + 1)}
    names = [f"t{number}" for number in range(1500)] if manner == "many" else ["add"]
    return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}


for line in sys.stdin:
    asked = json.loads(line)
    number, method, given = asked.get("id"), asked.get("method"), asked.get("params") or {}
    if method == "initialize":
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "liar", "version": "1"}}
        send(id=number, result={"protocolVersion": given["protocolVersion"], **about})
    elif method == "tools/list" and manner == "no_listing":
        send(id=number, error={"code": -32601, "message": "no such method"})
    elif method == "tools/list":
        send(id=number, result=listing(given.get("cursor")))
    elif method == "tools/call":
        answer = {"content": [{"type": "text", "text": "x" * int(given.get("arguments", {}).get("size", 1))}]}
        if manner == "endless":
            sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {number}, "result": {{"content": [{{"text": "')
            while True:
                sys.stdout.write("x" * 65536)
        if manner == "wrong_id":
            send(id=99999, result=answer)
            continue
        send(id=number, result=answer)
        if manner == "twice":
            send(id=number, result=answer)
    elif number is not None:
        send(id=number, error={"code": -32601, "message": "no such method"})
