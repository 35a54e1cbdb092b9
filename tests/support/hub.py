"""A stand-in for the hub: repositories in memory, for the real huggingface_hub client.

It knows what a push and a download ask for: creating a repository, the upload of large files by the
LFS protocol, a commit, files and their listing. Like the hub, it answers 404 to strangers of a
private repository.
"""

import base64
import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TOKEN = "hf_StandInForATokenOfTheHub"
COMMIT = "1" * 40


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"x"})
    messages: list[str] = field(default_factory=list)


def _missing():
    return Response(status_code=404, headers={"X-Error-Code": "RepoNotFound"})


class Hub:
    """Its address is `url`; `repositories` by their names; `large`: files by their digests.

    takes_large: for clients with HF_HUB_DISABLE_XET=1; the others use a protocol of the hub's own
    for large files. Otherwise, every file comes with the commit.
    """

    def __init__(self, takes_large=True):
        self.takes_large = takes_large
        self.repositories = {}
        self.large = {}
        self.uploads = 0
        self.asked = []
        routes = [
            ("/api/repos/create", self.create, "POST"),
            ("/api/validate-yaml", self.validate, "POST"),
            ("/api/models/{user}/{name}/tree/{revision}", self.tree, "GET"),
            ("/api/models/{user}/{name}/preupload/{revision}", self.preupload, "POST"),
            ("/api/models/{user}/{name}/commit/{revision}", self.commit, "POST"),
            ("/{user}/{name}.git/info/lfs/objects/batch", self.batch, "POST"),
            ("/large/{oid}", self.store, "PUT"),
            ("/{user}/{name}/resolve/{revision}/{path:path}", self.resolve, "GET"),
        ]
        app = Starlette(routes=[Route(path, do, methods=[method]) for path, do, method in routes])
        config = uvicorn.Config(app, port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join()

    def _knows(self, request: Request):
        self.asked.append(f"{request.method} {request.url.path}")
        return request.headers.get("authorization") == f"Bearer {TOKEN}"

    def _repository(self, request: Request):
        known = self._knows(request)
        name = f"{request.path_params['user']}/{request.path_params['name']}"
        found = self.repositories.get(name)
        if found is None or (found.private and not known):
            return None
        return found

    async def create(self, request: Request):
        if not self._knows(request):
            return Response(status_code=401)
        asked = await request.json()
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            return JSONResponse({"error": "exists"}, 409)
        self.repositories[name] = Repository(asked.get("visibility") == "private")
        return JSONResponse({"url": f"{self.url}/{name}", "id": name})

    async def validate(self, request: Request):
        text = (await request.json())["content"]
        errors = []
        with contextlib.suppress(IndexError):
            try:
                yaml.safe_load(text.split("---\n")[1])
            except yaml.YAMLError as error:
                errors = [{"message": str(error)}]
        return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)

    async def tree(self, request: Request):
        repository = self._repository(request)
        if repository is None:
            return _missing()
        return JSONResponse(
            [
                {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
                for path, content in repository.files.items()
            ]
        )

    async def preupload(self, request: Request):
        if self._repository(request) is None:
            return _missing()
        files = (await request.json())["files"]
        return JSONResponse(
            {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if self._is_large(one["path"]) else "regular",
                        "shouldIgnore": False,
                    }
                    for one in files
                ]
            }
        )

    def _is_large(self, path):
        return self.takes_large and path.endswith(".safetensors")

    async def batch(self, request: Request):
        if self._repository(request) is None:
            return _missing()
        objects = []
        for one in (await request.json())["objects"]:
            answer = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.large:
                answer["actions"] = {"upload": {"href": f"{self.url}/large/{one['oid']}"}}
            objects.append(answer)
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def store(self, request: Request):
        content = await request.body()
        assert hashlib.sha256(content).hexdigest() == request.path_params["oid"]
        self.large[request.path_params["oid"]] = content
        self.uploads += 1
        return Response()

    async def commit(self, request: Request):
        repository = self._repository(request)
        if repository is None:
            return _missing()
        for line in (await request.body()).splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "header":
                repository.messages.append(value["summary"])
            elif part["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif part["key"] == "lfsFile":
                repository.files[value["path"]] = self.large[value["oid"]]
            elif part["key"] == "deletedFile":
                del repository.files[value["path"]]
        name = f"{request.path_params['user']}/{request.path_params['name']}"
        return JSONResponse(
            {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{self.url}/{name}/commit/{COMMIT}",
            }
        )

    async def resolve(self, request: Request):
        repository = self._repository(request)
        if repository is None:
            return _missing()
        content = repository.files.get(request.path_params["path"])
        if content is None:
            return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Content-Length": str(len(content)),
        }
        return Response(content, headers=headers)
