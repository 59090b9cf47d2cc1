"""Small sets in the real formats, a server that has them, and a machine that has none."""

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data folder of the machine that runs the tests is looked in."""
    monkeypatch.delenv("ESPALIER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


@dataclass
class Small:
    """A small set: file name to bytes, and the values that went in."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    files: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path, *, packed: bool = False, leave_out: tuple[str, ...] = ()) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            if name not in leave_out:
                contents = gzip.compress(data, mtime=0) if packed else data
                (folder / (f"{name}.gz" if packed else name)).write_bytes(contents)
        return folder

    def tar(self, path: Path, *, leave_out: tuple[str, ...] = ()) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz") as archive:
            for name in reversed([*self.files, "readme.html"]):  # the real one is in no order either
                if name not in leave_out:
                    data = self.files.get(name, b"<html>")
                    member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        return path


@pytest.fixture
def small_idx() -> Small:
    draw = np.random.default_rng(0)
    train = draw.integers(0, 256, (30, 28, 28), dtype=np.uint8), draw.integers(0, 10, 30, dtype=np.uint8)
    test = draw.integers(0, 256, (7, 28, 28), dtype=np.uint8), draw.integers(0, 10, 7, dtype=np.uint8)
    return Small(train, test, dict(zip(IDX, map(idx_bytes, (*train, *test)))))


@pytest.fixture
def small_cifar() -> Small:
    draw = np.random.default_rng(1)
    labels = draw.integers(0, 10, (6, 4), dtype=np.uint8)
    images = draw.integers(0, 256, (6, 4, 3, 32, 32), dtype=np.uint8)
    files = {
        name: b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels[i], images[i]))
        for i, name in enumerate(CIFAR)
    }
    return Small((images[:5].reshape(20, 3, 32, 32), labels[:5].reshape(20)), (images[5], labels[5]), files)


@dataclass
class Server:
    """A web server on this machine: path to bytes; everything else is 404."""

    address: str
    pages: dict[str, bytes]
    asked: list[str]


@pytest.fixture
def server() -> Iterator[Server]:
    pages: dict[str, bytes] = {}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            data = pages.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Server(f"http://127.0.0.1:{http.server_port}", pages, asked)
        http.shutdown()
        thread.join()


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a small set the published one of its name: checksums, lengths and addresses."""
    from dataclasses import replace

    from espalier.data import known_files

    def replace_known(name: str, files: dict[str, bytes], downloads: dict[str, bytes], bases: tuple[str, ...]) -> None:
        known = replace(
            known_files.KNOWN[name],
            files=tuple(known_files.File(f, len(b), hashlib.sha256(b).hexdigest()) for f, b in files.items()),
            downloads=tuple(
                known_files.Download(
                    f, f"sha256:{hashlib.sha256(b).hexdigest()}", tuple(f"{base}/{f}" for base in bases)
                )
                for f, b in downloads.items()
            ),
        )
        monkeypatch.setitem(known_files.KNOWN, name, known)

    return replace_known
