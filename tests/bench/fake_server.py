"""A llama-server without a model: a program, and a server in this process.

    python fake_server.py --port PORT ...

It keeps its command line in the file that $FAKE_SERVER_LOG names.  $FAKE_SERVER_FAILS: it ends at once, telling that.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

PROPERTIES = {"model_path": "/models/served.gguf", "build_info": "b1", "default_generation_settings": {"n_ctx": 512}}


class Handler(BaseHTTPRequestHandler):
    """Answers every prompt with its server's tokens, one accepted draft among them, in 10 ms each."""

    def do_GET(self) -> None:
        self._reply({"/health": {"status": "ok"}, "/props": PROPERTIES}.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        tokens = self.server.tokens[: body["n_predict"]]
        timings = {"predicted_n": len(tokens), "predicted_ms": 10.0 * len(tokens), "draft_n": 3, "draft_n_accepted": 1}
        ended = self.server.stop_type if len(tokens) == len(self.server.tokens) else "limit"
        reply = {"tokens": tokens, "timings": timings, "stop_type": ended}
        self._reply(reply if self.server.tokens else {"content": "Hi"})

    def _reply(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def listen(port: int = 0, tokens: tuple[int, ...] = (5, 6, 7)) -> HTTPServer:
    server = HTTPServer(("127.0.0.1", port), Handler)
    server.tokens, server.asked, server.stop_type = tokens, [], "limit"
    return server


if __name__ == "__main__":
    with open(os.environ["FAKE_SERVER_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if "FAKE_SERVER_FAILS" in os.environ:
        print(f"0.01 I starting\n0.02 E {os.environ['FAKE_SERVER_FAILS']}\n0.03 I cleaning up", file=sys.stderr)
        sys.exit(3)
    listen(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
