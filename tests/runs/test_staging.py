"""`validate --stage`: files that compute nodes cannot download are fetched or checked on the login node."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ppoctl.recipe.loading.load import Loaded, load
from ppoctl.run import staging

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.toml"
MODEL = ROOT / "recipes" / "quickstart" / "model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ppoctl" / "digests.json"


def recipe(*sets: str) -> Loaded:
    return load([QUICKSTART], sets, {})


def findings_of(loaded: Loaded) -> list[tuple[str, str | None]]:
    return [(str(problem), problem.hint) for problem in staging.faults(loaded)]


def secrets(folder: Path, text: str = "export HF_TOKEN=x\n", mode: int = 0o600) -> Path:
    file = folder / "secrets.sh"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_staging_lists_all_files_of_a_job_and_keeps_digests(tmp_path: Path, cache: Path) -> None:
    image = tmp_path / "image.sif"
    image.write_bytes(b"image")
    os.utime(image, (1, 1))
    container = f"slurm.container={{kind='apptainer', image='{image}'}}"
    loaded = recipe(container, f"slurm.secrets={secrets(tmp_path)}", "slurm.setup=['module load x']")
    found = {asset.key: asset for asset in staging.assets(loaded.recipe)}
    assert list(found) == [
        "model.path",
        "tokenizer and template",
        "data.train.path",
        "data.eval.heldout.path",
        "slurm.container.image",
        "slurm.secrets",
        "slurm.setup",
    ]
    assert found["slurm.container.image"].sha256 == hashlib.sha256(b"image").hexdigest()
    assert found["model.path"].size is not None
    assert found["model.path"].size > 3 * 2**20
    assert found["slurm.secrets"].sha256 == ""
    assert str(image) in json.loads(cache.read_text())
    assert findings_of(loaded) == []


def test_registry_image_is_left_to_the_nodes() -> None:
    loaded = recipe("slurm.container={kind='pyxis', image='nvcr.io#nvidia/pytorch:25.01-py3'}")
    [image] = [asset for asset in staging.assets(loaded.recipe) if asset.key == "slurm.container.image"]
    assert (image.size, image.where) == (
        None,
        "nvcr.io#nvidia/pytorch:25.01-py3 (the nodes fetch it from its registry)",
    )


def test_all_missing_files_are_reported_with_their_origin(tmp_path: Path) -> None:
    loaded = recipe(
        f"data.eval.heldout.path={tmp_path}/none.jsonl",
        f"slurm.container={{kind='apptainer', image='{tmp_path}/none.sif'}}",
        f"slurm.secrets={tmp_path}/none.sh",
        "slurm.setup=['module load cuda', 'if then']",
        "tracking.uri=$MLFLOW_AT",
    )
    assert findings_of(loaded) == [
        (
            f"--set: `data.eval.heldout.path` is `{tmp_path}/none.jsonl`: no such file",
            f"ls -l {tmp_path}/none.jsonl",
        ),
        (f"--set: `slurm.container.image` is `{tmp_path}/none.sif`: no such file", f"ls -l {tmp_path}/none.sif"),
        (f"--set: `slurm.secrets` is `{tmp_path}/none.sh`: no such file or directory", f"ls -l {tmp_path}/none.sh"),
        (
            "--set: line 2 of `slurm.setup` is not valid shell: syntax error near unexpected token `then'",
            "ppoctl plan RECIPE --sbatch | bash -n",
        ),
        (
            "--set: `tracking.uri` is `$MLFLOW_AT`, but a job does not receive `MLFLOW_AT` from this shell",
            "export it in a file of mode 600 and name the file: --set slurm.secrets=FILE",
        ),
    ]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o660])
def test_secrets_file_must_be_private(tmp_path: Path, mode: int) -> None:
    file = secrets(tmp_path, mode=mode)
    says = f"--set: `slurm.secrets` is `{file}`, but others may read it (mode {mode:o})"
    assert findings_of(recipe(f"slurm.secrets={file}")) == [(says, f"chmod 600 {file}")]


def test_syntax_error_in_a_secrets_file_is_reported_without_text(tmp_path: Path) -> None:
    file = secrets(tmp_path, "export A=1\nexport B=(hunter2\n")
    [(says, hint)] = findings_of(recipe(f"slurm.secrets={file}"))
    assert says.startswith(f"--set: `slurm.secrets` is `{file}`: line ")
    assert "hunter2" not in f"{says} {hint}"


@pytest.mark.parametrize(
    "uri",
    [
        "slurm.environment.MLFLOW_AT=http://host",
        "slurm.pass_on=['MLFLOW_AT']",
        "slurm.secrets={secrets}",
    ],
)
def test_mlflow_address_from_secrets_reaches_the_job(tmp_path: Path, uri: str) -> None:
    file = secrets(tmp_path, "export MLFLOW_AT=http://user:word@host\n")
    assert findings_of(recipe("tracking.uri=$MLFLOW_AT", uri.format(secrets=file))) == []


def test_submission_checks_faults_that_only_a_job_would_notice(tmp_path: Path) -> None:
    loaded = recipe(f"slurm.secrets={secrets(tmp_path, mode=0o644)}", f"data.eval.heldout.path={tmp_path}/none")
    assert [problem.where for problem in staging.job_faults(loaded)] == ["--set"]
    assert "others may read it" in staging.job_faults(loaded)[0].what


class Hub(BaseHTTPRequestHandler):
    """A hub with one model, the quickstart's with a second chat template, and unneeded files."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"
    FILES: ClassVar[dict[str, bytes]] = {
        **{path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()},
        "pytorch_model.bin": b"x",
        "onnx/config.json": b"{}",
        "additional_chat_templates/rag.jinja": b"rag",
    }

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        headers = {"X-Repo-Commit": self.COMMIT}
        if path.startswith("/api/models/org/tiny") and "/xet" not in path:
            found = [{"rfilename": file, "size": len(data)} for file, data in self.FILES.items()]
            body = json.dumps({"id": "org/tiny", "sha": self.COMMIT, "siblings": found}).encode()
            if "/tree/" in path:
                tree = [{"type": "file", "path": f, "size": len(d), "oid": "0" * 40} for f, d in self.FILES.items()]
                body = json.dumps(tree).encode()
            headers["Content-Type"] = "application/json"
        elif "/resolve/" in path and name in self.FILES:
            body = self.FILES[name]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    """Yield the address of the hub, which answers inside the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


SCRIPT = """
import contextlib, io, json, sys
from ppoctl.cli.app import run
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(json.loads(line))
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@contextmanager
def validating(home: Path, endpoint: str) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Yield a function that returns code, stdout and stderr of `validate`; all of its commands run in one new
    process."""
    left = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name[:3] != "HF_"}
    environ = {**left, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        typed, printed = process.stdin, process.stdout

        def validate(*words: str) -> tuple[int, str, str]:
            typed.write(json.dumps(["validate", str(QUICKSTART), *words]) + "\n")
            typed.flush()
            code, out, err = json.loads(printed.readline())
            return code, out, err

        yield validate


def test_hub_model_is_fetched_and_then_found_offline(tmp_path: Path) -> None:
    words = ("--set", "model.path=org/tiny", "--stage", "--json")
    with ExitStack() as stack:
        with hub() as endpoint:
            validate = stack.enter_context(validating(tmp_path / "hf", endpoint))
            code, first, says = validate(*words)
        code_offline, again, says_offline = validate(*words)
        unreachable = validate("--set", "model.path=org/absent", "--stage")
    assert code == 0, says
    assert "fetching `org/tiny`" in says
    found = {asset["key"]: asset for asset in json.loads(first)["assets"]}
    folder = Path(found["model.path"]["where"])
    assert (folder / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    assert (folder / "additional_chat_templates/rag.jinja").read_text() == "rag"
    assert not any((folder / name).exists() for name in ("pytorch_model.bin", "onnx"))
    assert code_offline == 0, says_offline
    assert json.loads(again)["assets"] == json.loads(first)["assets"]
    assert unreachable[0] == 3
    assert "`model.path` is `org/absent`: it cannot be fetched: " in unreachable[2]
    assert "hf download org/absent" in unreachable[2]
