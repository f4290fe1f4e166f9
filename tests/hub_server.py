"""A local stand-in for the Hugging Face Hub: what `huggingface_hub` asks to upload and download a model.

`HF_ENDPOINT` has to be set before `huggingface_hub` is imported, so clients run in processes of their own,
with `HubServer.environment`. Uploads go through Git LFS; Xet is switched off there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "someone"
TOKEN = "hf_of_someone"
INVALID_CREDENTIALS = "Invalid credentials in Authorization header"
_HEX40 = re.compile(r"[0-9a-f]{40}")


@dataclass
class Repository:
    """A model: branches, and commits as path -> (SHA-256 of the content, whether it is in LFS)."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, tuple[str, bool]]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, tuple[str, bool]], message: str) -> str:
        text = json.dumps([branch, len(self.commits), files], sort_keys=True)
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits[oid], self.messages[oid], self.branches[branch] = files, message, oid
        return oid


class Refusal(Exception):
    """An answer that is an error, with the code the real Hub sends in a header."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class HubServer:
    """The stand-in, listening on a free port while its context is open.

    Attributes:
        requests: method and path of every request so far.
        received: SHA-256 of every blob that arrived whole, in order of arrival.
        stall_after: accept this many blobs and leave the sender of the next one waiting; None accepts all.
        stalled: set when a sender waits.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.received: list[str] = []
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self.lock = threading.RLock()
        self._closing = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def environment(self, cache: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Variables that turn a process to this server."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
        return {**variables, **({"HF_TOKEN": token} if token else {})}

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        """The content of a branch."""
        repository = self.repositories[repo_id]
        files = repository.commits[repository.branches[branch]]
        return {path: self.read(digest) for path, (digest, _) in files.items()}

    def changes(self) -> list[tuple[str, str]]:
        """The requests that could have changed something."""
        return [(method, path) for method, path in self.requests if method not in ("GET", "HEAD")]

    def read(self, digest: str) -> bytes:
        return (self.folder / digest).read_bytes()

    def store(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / digest).write_bytes(data)
        return digest

    def wait_if_stalled(self) -> None:
        """Called by the sender of a blob."""
        if self.stall_after is None:
            return
        with self.lock:
            self.stall_after -= 1
            if self.stall_after >= 0:
                return
        self.stalled.set()
        while self.stall_after is not None and not self._closing.is_set():
            time.sleep(0.01)
        raise ConnectionAbortedError


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    data: bytes
    _routes: tuple[tuple[str, str, str], ...] = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/verify", "lfs_verify"),
        ("PUT", r"/lfs/(?P<digest>[0-9a-f]{64})", "lfs_put"),
        ("GET|HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    # ------------------------------------------------------------------ plumbing

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        path = urlsplit(self.path).path
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
        try:
            if self.command == "PUT":
                self.hub.wait_if_stalled()
            self.data = self.read_body()
            for methods, pattern, name in self._routes:
                if self.command in methods.split("|") and (match := re.fullmatch(pattern, path)):
                    values = {key: unquote(value) for key, value in match.groupdict().items() if value}
                    action: Callable[..., None] = getattr(self, name)
                    return action(**values)
            raise Refusal(404, f"the stand-in has no {self.command} {path}")
        except Refusal as refusal:
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            self.answer({"error": str(refusal)}, refusal.status, {"X-Error-Message": str(refusal), **code})
        except ConnectionError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return b"".join(iter(self._chunk, b""))

    def _chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    # ------------------------------------------------------------------ who may do what

    def is_user(self) -> bool:
        """Whether the request has the user's token; none at all is allowed, a wrong one is refused."""
        header = self.headers.get("Authorization")
        if header and header != f"Bearer {TOKEN}":
            raise Refusal(401, INVALID_CREDENTIALS)
        return header is not None

    def may_write(self, repo: str) -> None:
        if not self.is_user():
            raise Refusal(401, "Invalid username or password.")
        if repo.split("/")[0] != USER:
            raise Refusal(403, f"You don't have the rights to create a model under {repo.split('/')[0]}")

    def repository(self, repo: str, write: bool = False) -> Repository:
        user = self.is_user()
        if write:
            self.may_write(repo)
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not user):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return found

    def snapshot(self, repo: str, revision: str) -> tuple[str, dict[str, tuple[str, bool]]]:
        repository = self.repository(repo)
        oid = revision if _HEX40.fullmatch(revision) else repository.branches.get(revision, "")
        if oid not in repository.commits:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repository.commits[oid]

    # ------------------------------------------------------------------ repositories

    def whoami(self) -> None:
        if not self.is_user():
            raise Refusal(401, INVALID_CREDENTIALS)
        self.answer({"type": "user", "name": USER, "orgs": []})

    def validate_yaml(self) -> None:
        text = json.loads(self.data)["content"]
        errors = [] if re.match(r"---\n.*?\n---\n", text, re.DOTALL) else [{"message": "no metadata"}]
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self) -> None:
        wanted = json.loads(self.data)
        repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
        self.may_write(repo)
        url = f"{self.hub.url}/{repo}"
        with self.hub.lock:
            if repo in self.hub.repositories:
                return self.answer({"error": "You already created this model repo", "url": url}, 409)
            visibility = wanted.get("visibility") or ("private" if wanted.get("private") else "public")
            repository = Repository(private=visibility == "private")
            attributes = self.hub.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
            repository.commit("main", {".gitattributes": (attributes, False)}, "initial commit")
            self.hub.repositories[repo] = repository
        self.answer({"url": url, "name": repo})

    def branch(self, repo: str, revision: str) -> None:
        repository = self.repository(repo, write=True)
        if revision in repository.branches:
            raise Refusal(409, f"Reference already exists: {revision}")
        repository.branches[revision] = repository.branches["main"]
        self.answer({})

    def info(self, repo: str, revision: str = "main") -> None:
        oid, files = self.snapshot(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        private = self.repository(repo).private
        self.answer({"id": repo, "sha": oid, "private": private, "siblings": siblings, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        files = self.snapshot(repo, revision)[1]
        entries = []
        for path, (digest, in_lfs) in files.items():
            data = self.hub.read(digest)
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
            if in_lfs:
                text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(data)}\n"
                entry["oid"] = git_oid(text.encode())
                entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": len(text)}
            entries.append(entry)
        self.answer(entries)

    # ------------------------------------------------------------------ uploads

    def preupload(self, repo: str, revision: str) -> None:
        self.repository(repo, write=True)
        files = self.snapshot(repo, revision)[1]
        answers = []
        for file in json.loads(self.data)["files"]:
            path = file["path"]
            in_lfs = path.endswith(".safetensors") or file["size"] > 10 * 2**20
            digest = files[path][0] if path in files else None
            oid = digest if in_lfs or digest is None else git_oid(self.hub.read(digest))
            mode = "lfs" if in_lfs else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": answers})

    def lfs_batch(self, repo: str) -> None:
        self.repository(repo, write=True)
        objects = []
        for wanted in json.loads(self.data)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            if not (self.hub.folder / wanted["oid"]).is_file():
                links = {"upload": f"lfs/{wanted['oid']}", "verify": f"{repo}.git/info/lfs/verify"}
                entry["actions"] = {name: {"href": f"{self.hub.url}/{link}"} for name, link in links.items()}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, digest: str) -> None:
        if hashlib.sha256(self.data).hexdigest() != digest:
            raise Refusal(400, "the content is not what its SHA-256 says")
        with self.hub.lock:
            self.hub.received.append(self.hub.store(self.data))
        self.answer({})

    def lfs_verify(self, repo: str) -> None:
        self.repository(repo, write=True)
        wanted = json.loads(self.data)
        if len(self.hub.read(wanted["oid"])) != wanted["size"]:
            raise Refusal(400, "the size is not the announced one")
        self.answer({})

    def commit(self, repo: str, revision: str) -> None:
        repository = self.repository(repo, write=True)
        files = dict(self.snapshot(repo, revision)[1])
        message = ""
        for key, value in self._operations():
            if key == "header":
                message = f"{value['summary']}\n{value['description']}"
            elif key == "file":
                files[value["path"]] = (self.hub.store(base64.b64decode(value["content"])), False)
            elif key == "lfsFile":
                if not (self.hub.folder / value["oid"]).is_file():
                    raise Refusal(400, f"{value['path']}: its content was never uploaded")
                files[value["path"]] = (value["oid"], True)
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, f"the stand-in does not know the operation {key}")
        with self.hub.lock:
            oid = repository.commit(revision, files, message)
        self.answer({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    def _operations(self) -> Iterator[tuple[str, Any]]:
        for line in self.data.splitlines():
            item = json.loads(line)
            yield item["key"], item["value"]

    # ------------------------------------------------------------------ downloads

    def resolve(self, repo: str, revision: str, path: str) -> None:
        oid, files = self.snapshot(repo, revision)
        if path not in files:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        digest, in_lfs = files[path]
        data = self.hub.read(digest)
        headers = {"X-Repo-Commit": oid, "ETag": f'"{digest if in_lfs else git_oid(data)}"'}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            span = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
            return self.answer(data[first : last + 1], 206, {**headers, **span})
        self.answer(data, 200, {**headers, "Accept-Ranges": "bytes"})


def git_oid(data: bytes) -> str:
    """The name git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
