"""A bundle for a node without a network, from an index on this machine, and what refuses it."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pospre.errors import UserError
from tests.disk import flip, full_disk, snapshot

ROOT = Path(__file__).parents[2]
TORCH = version("torch").partition("+")[0]
PYTHON = "{}.{}".format(*sys.version_info[:2])
PROJECT = """
[project]
requires-python = ">=3.11,<3.14"
dependencies = ["torch>=2", "fakevision", "mosaicml>=0.3", "fakeold>=2", "tqdm"]
[project.optional-dependencies]
evaluate = ["fakeextra"]
"""
NODE = f"""Python {PYTHON}.9
# from a system's package
distro-info==1.1build1
torch=={TORCH}+cu130
fakeold==1.0
fakethere==5.0a0+ours
tqdm=={version("tqdm")}
"""
# (name, version): what it needs
INDEX: dict[tuple[str, str], list[str]] = {
    ("fakevision", "1.0"): ["torch==9.0"],  # newer and pinned, but for another torch
    ("fakevision", "0.9"): [f"torch=={TORCH}"],
    ("mosaicml", "0.3"): ["torch<2", "fakehelper", "fakethere<2", "fakegone; extra == 'all'"],
    ("fakehelper", "1.0"): [],  # pinned, though 2.0 is newer
    ("fakehelper", "2.0"): [],
    ("fakeold", "2.0"): [],
    ("fakeold", "1.0"): [],
    ("fakeextra", "1.0"): ["fakethere<2"],
}


def wheel(folder: Path, name: str, number: str, needs: list[str]) -> None:
    """Write a wheel of one module of 100 kB."""
    stem, inside = f"{name}-{number}", f"{name}-{number}.dist-info"
    files = {
        f"{name}.py": f"version = {number!r}\n" + f"#{'-' * 98}\n" * 1000,
        f"{inside}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{inside}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={digest(text.encode())},{len(text)}\n" for path, text in files.items()]
    files[f"{inside}/RECORD"] = "".join(rows) + f"{inside}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


class Index(BaseHTTPRequestHandler):
    """``/NAME/`` lists the wheels of a package with sizes and hashes; ``/files/`` has them."""

    wheels: Path

    def do_GET(self) -> None:
        _, first, last = self.path.split("/", 2)
        if first == "files":
            content, kind = (self.wheels / last).read_bytes(), "application/zip"
        else:
            files = [self.entry(path) for path in self.wheels.glob(f"{first}-*")]
            page = json.dumps({"meta": {"api-version": "1.0"}, "name": first, "files": files})
            content, kind = page.encode(), "application/vnd.pypi.simple.v1+json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def entry(self, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        hashes = {"sha256": hashlib.sha256(content).hexdigest()}
        url = f"/files/{path.name}"
        return {"filename": path.name, "url": url, "hashes": hashes, "size": len(content)}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for (name, number), needs in INDEX.items():
        wheel(folder, name, number, needs)
    return folder


@pytest.fixture
def program(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The script's functions in a project of its own, with an index of INDEX."""
    shutil.copytree(ROOT / ".setup", tmp_path / ".setup")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "requirements.txt").write_text("fakevision==1.0  # why\nfakehelper==1.0\n")
    (tmp_path / "node.txt").write_text(NODE)
    monkeypatch.chdir(tmp_path)
    handler = type("Handler", (Index,), {"wheels": wheels})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        for name in [name for name in os.environ if re.match("(PIP|UV)_|.*_proxy$", name, re.I)]:
            monkeypatch.delenv(name)
        for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("UV_NO_CACHE", "1")
        specification = importlib.util.spec_from_file_location("bundle", ".setup/bundle.py")
        assert specification and specification.loader
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, "bundle", module)
        specification.loader.exec_module(module)
        vars(module).update(ROOT=tmp_path, NEEDED=["fakevision", "fakehelper", "mosaicml"])
        yield vars(module)
        server.shutdown()


def install(bundle: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(bundle / "install.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def names(bundle: Path) -> list[str]:
    return sorted(path.name.split("-py3")[0] for path in (bundle / "wheels").iterdir())


def test_a_bundle_is_what_the_node_lacks_and_installs_offline(
    program: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    for name in ("manifest.json", "of an earlier one"):
        (bundle / name).touch()
    program["make_bundle"](Path("node.txt"), ["evaluate"], Path("bundle"))
    has = ["fakeextra-1.0", "fakehelper-1.0", "fakeold-2.0", "fakevision-0.9", "mosaicml-0.3"]
    found = ["install.py", "manifest.json", "requirements.txt", "wheels"]
    assert sorted(path.name for path in bundle.iterdir()) == found
    assert names(bundle) == has
    size = sum(path.stat().st_size for path in (bundle / "wheels").iterdir())
    said, errors = capfd.readouterr()
    assert errors == "" and said.splitlines() == [
        "bundle: the node's fakeold 1.0 is not >=2; the bundle has its own",
        f"bundle: 5 wheels, {size / 1e6:.1f} MB, for Python {PYTHON} and torch {TORCH}+cu130",
        "bundle: bundle is ready; on the node: python3 bundle/install.py FOLDER",
    ]
    assert size > 4e5 and sorted(path.name for path in tmp_path.glob("bundle*")) == ["bundle"]

    site = tmp_path / "a site"
    done = install(bundle, site)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == [
        "bundle: fakeextra 1.0 is for fakethere <2; here: none",
        f"bundle: mosaicml 0.3 is for torch <2; here: {TORCH}",
        "bundle: mosaicml 0.3 is for fakethere <2; here: none",
        f"bundle: {site} is ready, all imports work. Now:",
        f"export PYTHONPATH='{site}'${{PYTHONPATH:+:$PYTHONPATH}} PATH='{site}'/bin:$PATH",
    ]
    assert sorted(path.stem for path in site.glob("*.dist-info")) == has


def test_a_node_that_has_everything_needs_no_bundle(
    program: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "fakevision==0.9\nfakehelper==2\nmosaicml==0.3\n"
    (tmp_path / "node.txt").write_text(NODE.replace("fakeold==1.0", "fakeold==2.1") + more)
    program["make_bundle"](Path("node.txt"), [], Path("bundle"))
    assert "there is nothing to bundle" in capsys.readouterr().out
    assert not [*tmp_path.glob("bundle*")]


@pytest.mark.parametrize(
    ("before", "after", "extras", "message"),
    [
        (NODE, "", [], "node.txt has no torch==…, which the bundle does not hold"),
        ("tqdm==", "tqdm @ file:///build/", [], "'tqdm @ file:///build/.*' is not NAME==VERSION; "),
        (f"Python {PYTHON}.9", "Python 3.14.1", [],
         "has Python 3.14; pospre needs >=3.11,<3.14 on"),
        (f"torch=={TORCH}", "torch==1.13.1", [],
         r"torch 1.13.1\+cu130; pospre needs torch>=2: upd"),
        ("", "", ["evaluat"], "--extra evaluat is unknown. Did you mean 'evaluate'"),
        (f"torch=={TORCH}", "torch==8.0", [], "(?s)no wheels fit .* uv says:\n.*fakevision"),
    ],
)  # fmt: skip
def test_a_node_that_no_bundle_fits_is_refused(
    program: dict[str, Any],
    tmp_path: Path,
    before: str,
    after: str,
    extras: list[str],
    message: str,
) -> None:
    (tmp_path / "node.txt").write_text(NODE.replace(before, after) if before else NODE)
    earlier = tmp_path / "bundle/manifest.json"
    earlier.parent.mkdir()
    earlier.write_text("{}")
    with pytest.raises(UserError, match=message):
        program["make_bundle"](Path("node.txt"), extras, Path("bundle"))
    assert earlier.read_text() == "{}" and len([*tmp_path.glob("bundle*")]) == 1


def test_files_and_folders_that_do_not_fit_are_refused(
    program: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = program["make_bundle"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    (tmp_path / "picture").write_bytes(b"\xff\xd8")
    for freeze in ("nowhere.txt", "picture", "other"):
        with pytest.raises(UserError, match=f"FREEZE={freeze} cannot be read .*pip list --format"):
            make(Path(freeze), [], Path("bundle"))
    with pytest.raises(UserError, match="--output other is not a bundle; give another folder"):
        make(Path("node.txt"), [], Path("other"))

    with monkeypatch.context() as patch:
        usage = shutil._ntuple_diskusage(10**9, 10**9, 3000)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(UserError, match=r"its disk has 0\.0 MB left; make room"):
            make(Path("node.txt"), [], Path("bundle"))
    load = program["load"]

    def load_while_full(*given: Any) -> None:
        with full_disk(50_000):
            load(*given)

    program["load"] = load_while_full
    with pytest.raises(UserError, match="pip could not load the wheels, see above"):
        make(Path("node.txt"), [], Path("bundle"))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]
    assert not [*tmp_path.glob("*partial*"), *tmp_path.glob("bundle*")]


def test_a_bundle_for_another_node_or_a_damaged_one_changes_nothing(
    program: dict[str, Any], tmp_path: Path
) -> None:
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    program["NEEDED"] = ["fakevision", "fakegone"]
    program["make_bundle"](Path("node.txt"), [], bundle)
    done = install(bundle, site)
    assert done.returncode == 2 and "is ready" not in done.stdout
    assert "site is installed, but these cannot be imported: fakegone (No module" in done.stderr
    before = snapshot(site)

    def refused(*, into: Path = site) -> str:
        done = install(bundle, into)
        assert done.returncode == 2 and done.stdout == "", done
        assert snapshot(site) == before and not [*tmp_path.glob("*.partial")]
        return done.stderr

    manifest = bundle / "manifest.json"
    whole = manifest.read_text()
    for key, other in {"Python": "3.99", "torch": "1.0", "machine": "Linux s390x"}.items():
        manifest.write_text(json.dumps({**json.loads(whole), key: other}))
        said = refused()
        assert said.startswith(f"error: {bundle} is for {key} {other}; here: ")
        assert said.count("\n") == 1
    manifest.write_text(whole[:20])
    assert "is not a whole bundle" in refused()
    manifest.write_text(whole)
    assert "exists and has no bundle; give a new folder" in refused(into=tmp_path)
    flip(bundle / "wheels/fakehelper-1.0-py3-none-any.whl", 5000)
    said = refused()
    assert "DO NOT MATCH THE HASHES" in said and "nothing was changed" in said
