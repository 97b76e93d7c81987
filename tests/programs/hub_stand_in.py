"""Stands in for the Hugging Face Hub: serves folders as data sets over HTTP, as much of its API as reading a data set needs.

    with serve({"org/name": folder}) as url: ...      # HF_ENDPOINT=url

There is one revision. What it does not know: accounts, models, Git, large files' pointers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "0" * 40


@contextmanager
def serve(data_sets: dict[str, Path]) -> Iterator[str]:
    """The URL of a server on this machine that ends with the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.data_sets = data_sets
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """/api/datasets/ORG/NAME[/revision/R | /tree/R/FOLDER | /paths-info/R], /datasets/ORG/NAME/resolve/R/FILE"""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, body: bytes) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api, parts = parts[0] == "api", parts[1:] if parts[0] == "api" else parts
        name, rest = "/".join(parts[1:3]), parts[3:]
        folder = self.server.data_sets.get(name)
        if parts[0] != "datasets" or folder is None:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif not is_api:
            self.send_file(folder / "/".join(rest[2:]))
        elif rest[:1] == ["tree"]:
            self.reply(200, self.as_json([entry(folder, path) for path in files(folder / "/".join(rest[2:]))]))
        elif rest[:1] == ["paths-info"]:
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            self.reply(200, self.as_json([entry(folder, folder / path) for path in asked if (folder / path).exists()]))
        else:
            siblings = [{"rfilename": str(path.relative_to(folder))} for path in files(folder)]
            info = {"id": name, "sha": REVISION, "private": False, "gated": False, "disabled": False, "tags": []}
            self.reply(200, self.as_json({**info, "downloads": 0, "likes": 0, "siblings": siblings}))

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        data, status = path.read_bytes(), 200
        headers = {"ETag": f'"{len(data)}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            last = min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[int(first) : last + 1], 206
        self.reply(status, data, headers)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @staticmethod
    def as_json(value: object) -> bytes:
        return json.dumps(value).encode()

    def log_message(self, *words: object) -> None:
        pass


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def entry(folder: Path, path: Path) -> dict[str, object]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": REVISION}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": f"{path.stat().st_size:040d}"}
