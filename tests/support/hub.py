"""A stand-in for the Hugging Face Hub: it takes commits of small files, and can refuse them.

What uploads to it reads its address when the library is imported.
"""

from __future__ import annotations

import base64
import json
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def command(module: str, *arguments: str) -> None:
    """`python -m MODULE ARGUMENTS`, in a process that was forked for it, which imports the library again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Hub:
    """Serves until it is closed. ``files``: by repository and path; ``private``: by repository; ``tokens``: seen.

    ``refused``: number of commits that are still to be refused.
    """

    def __init__(self, refused: int = 0) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.tokens: set[str] = set()
        self.refused = refused
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                hub.tokens.add(str(self.headers["Authorization"]))
                code, answer = hub.answer(self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: str) -> tuple[int, dict[str, Any]]:
        if path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values.get('organization', 'me')}/{values['name']}"
            self.private[name] = values.get("private") or values.get("visibility") == "private"
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path.startswith("/api/validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        repository = path.removeprefix("/api/models/").partition("/preupload")[0].partition("/commit")[0]
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        if self.refused:
            self.refused -= 1
            return 403, {"error": "the stand-in refuses"}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.files.setdefault(repository, {})[line["value"]["path"]] = content
        return 200, {"commitUrl": f"{self.url}/{repository}/commit/1", "commitOid": "1", "hookOutput": ""}
