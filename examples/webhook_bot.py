"""The other side of the webhook connector, with nothing but the standard library: a chat in this terminal.

SECRET="a secret of 16 characters or more" python examples/webhook_bot.py http://127.0.0.1:8090/webhook/bot 9090

with DUALCLAW_IM_WEBHOOK_REPLY_URL=http://127.0.0.1:9090/ and the same secret at ``dualclaw-im``.
"""

import hashlib
import hmac
import json
import os
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

SECRET = os.environ["SECRET"].encode()
had: set[str] = set()


def signature(timestamp: str, body: bytes) -> str:
    """Sign the bytes TIMESTAMP.BODY."""
    return "v1=" + hmac.new(SECRET, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


class Replies(BaseHTTPRequestHandler):
    """Takes replies, each once."""

    def do_POST(self) -> None:
        """Check a reply and show it."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        timestamp = self.headers["Dualclaw-Timestamp"]
        lately = abs(time.time() - int(timestamp)) < 300
        good = lately and hmac.compare_digest(signature(timestamp, body), self.headers["Dualclaw-Signature"])
        if good and self.headers["Idempotency-Key"] not in had:  # a part may come again after a crash
            had.add(self.headers["Idempotency-Key"])
            reply = json.loads(body)
            sys.stdout.write((reply["text"] if reply["type"] == "text" else f"[{reply['type']}] {reply['url']}") + "\n")
            sys.stdout.flush()
        self.send_response(200 if good else 401)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing of requests."""


threading.Thread(
    target=ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Replies).serve_forever, daemon=True
).start()
for line in sys.stdin:
    message = {"message_id": uuid.uuid4().hex, "chat_id": "terminal", "user_id": "me", "text": line.rstrip("\n")}
    body, timestamp = json.dumps(message).encode(), str(int(time.time()))
    headers = {"Dualclaw-Timestamp": timestamp, "Dualclaw-Signature": signature(timestamp, body)}
    # 200: stored, and answered later; after a 503 or no answer, send the same message again.
    urlopen(Request(sys.argv[1], body, headers), timeout=10).close()  # noqa: S310  # the address of our own bot
