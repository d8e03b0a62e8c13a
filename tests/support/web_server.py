"""A real HTTP server on loopback that gives scripted answers and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebServer:
    """`answers` maps a path to (status, body); what is not there is 404. With `pause`, an answer stays open
    after its body until it is set, or the client leaves."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.pause: threading.Event | None = None
        self.client_left = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = server.answers.get(self.path, (404, b'{"error": {"message": "not here"}}'))
                server.keys.append(self.headers["Authorization"])
                self.send_response(status)
                if server.pause is None:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                if server.pause is not None:
                    self.close_connection = True
                    while not server.pause.wait(0.02):
                        try:
                            self.wfile.write(b": ping\n\n")
                        except OSError:
                            server.client_left.set()
                            return

            def do_POST(self) -> None:
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.do_GET()

            def log_message(self, *_: object) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def __enter__(self) -> WebServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pause is not None:
            self.pause.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
