"""A server on this machine that speaks the few endpoints of the Hugging Face Hub that publishing needs, and fails where told to.

`fail` maps a step ("whoami", "create", "branch", "preupload", "upload", "commit", ..) to a status code; to "cut": the connection ends
without an answer; or to "cut after": the work is done, and then the connection ends.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_" + "Secret" * 5
STEPS = [
    ("whoami", "GET", r"/api/whoami-v2"),
    ("info", "GET", r"/api/models/([^/]+/[^/]+)"),
    ("revision", "GET", r"/api/models/([^/]+/[^/]+)/revision/([^/]+)"),
    ("create", "POST", r"/api/repos/create"),
    ("branch", "POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)"),
    ("yaml", "POST", r"/api/validate-yaml"),
    ("preupload", "POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)"),
    ("batch", "POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch"),
    ("upload", "PUT", r"/lfs/(\w+)"),
    ("commit", "POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)"),
]


class FakeHub:
    """repos: name -> {"private": bool, "branches": {branch: {path: bytes}}, "commits": int}. seen: the steps that were asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict] = {}
        self.blobs: dict[str, bytes] = {}
        self.fail: dict[str, int | str] = {}
        self.seen: list[str] = []
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def sha(self, repo: str) -> str:
        return f"{self.repos[repo]['commits']:040x}"

    # --- steps: (groups of the path, body) -> JSON, or a status code ---

    def whoami(self, body):
        return {"type": "user", "name": "me", "orgs": []}

    def info(self, body, repo):
        return {"id": repo, "sha": self.sha(repo), "siblings": []} if repo in self.repos else 404

    def revision(self, body, repo, branch):
        return self.info(body, repo) if branch in self.repos.get(repo, {"branches": {}})["branches"] else 404

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.repos[name] = {"private": private, "branches": {"main": {}}, "commits": 1}
        return {"url": f"{self.url}/{name}", "name": name}

    def branch(self, body, repo, branch):
        self.repos[repo]["branches"].setdefault(branch, {})
        return {}

    def yaml(self, body):
        return {"errors": [], "warnings": []}

    def preupload(self, body, repo, branch):
        paths = [file["path"] for file in json.loads(body)["files"]]
        mode = {True: "lfs", False: "regular"}
        return {
            "files": [{"path": p, "uploadMode": mode[p.endswith(".safetensors")], "shouldIgnore": False} for p in paths]
        }

    def batch(self, body, repo):
        objects = json.loads(body)["objects"]
        return {
            "transfer": "basic",
            "objects": [o | {"actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in objects],
        }

    def upload(self, body, oid):
        self.blobs[oid] = body
        return {}

    def commit(self, body, repo, branch):
        files = self.repos[repo]["branches"][branch]
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                files[item["value"]["path"]] = self.blobs[item["value"]["oid"]]
        self.repos[repo]["commits"] += 1
        return {"commitUrl": f"{self.url}/{repo}/commit/{self.sha(repo)}", "commitOid": self.sha(repo)}


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(self.path.split("?")[0])
        for step, method, pattern in STEPS:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                return self.run(step, match.groups(), body)
        return self.send(404, {"error": f"the fake hub knows no {self.command} {path}"})

    do_GET = do_POST = do_PUT = answer

    def run(self, step, groups, body) -> None:
        self.hub.seen.append(step)
        failure = self.hub.fail.get(step)
        if failure == "cut":
            return self.cut()
        if isinstance(failure, int):
            return self.send(failure, {"error": f"no {step} with {self.headers.get('Authorization')}"})
        if step != "upload" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(401, {"error": "Invalid username or password."})
        found = getattr(self.hub, step)(body, *groups)
        if failure == "cut after":
            return self.cut()
        if found == 404:
            return self.send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return self.send(200, found)

    def cut(self) -> None:
        self.close_connection = True
        self.connection.close()

    def send(self, status, value, headers=None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)
