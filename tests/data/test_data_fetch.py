"""Downloads, against a real server on this machine: checked, from the second address if need be, refused clearly."""

import gzip
import sys

import pytest

from espalier import data
from espalier.space import BadInput, Corrupt


@pytest.fixture
def mnist(small_idx, server, publish):
    """A small MNIST that is published on the server at /a and /b; returns what is downloaded: name to bytes."""
    packed = {f"{name}.gz": gzip.compress(contents, mtime=0) for name, contents in small_idx.files.items()}
    publish("mnist", small_idx.files, packed, (f"{server.address}/a", f"{server.address}/b"))
    return packed


def test_a_missing_set_is_downloaded_once(mnist, server, small_idx, tmp_path):
    server.pages.update({f"/a/{name}": contents for name, contents in mnist.items()})
    seen: list[tuple[str, int, int]] = []
    found = data.load("mnist", tmp_path / "data", progress=lambda *step: seen.append(step))
    assert found.standard
    assert (found.train_labels.numpy() == small_idx.train[1]).all()
    assert server.asked == [f"/a/{name}" for name in mnist]
    assert sorted(path.name for path in (tmp_path / "data" / "mnist").iterdir()) == sorted(mnist)
    for name, contents in mnist.items():
        steps = [(done, total) for file, done, total in seen if file == name]
        assert steps[-1] == (len(contents), len(contents))
        assert all(done <= total for done, total in steps)
    data.load("mnist", tmp_path / "data")
    assert data.get("mnist", tmp_path / "data").state == "verified"
    assert len(server.asked) == 4


def test_cifar_comes_as_one_archive(small_cifar, server, publish, tmp_path):
    archive = small_cifar.tar(tmp_path / "made.tar.gz").read_bytes()
    publish("cifar10", small_cifar.files, {"cifar-10-binary.tar.gz": archive}, (server.address,))
    server.pages["/cifar-10-binary.tar.gz"] = archive
    status = data.get("cifar10", tmp_path / "data")
    assert (status.state, status.folder) == ("verified", tmp_path / "data" / "cifar10")
    assert (data.load("cifar10", tmp_path / "data").test_labels.numpy() == small_cifar.test[1]).all()


def test_without_a_folder_it_goes_to_the_variable_or_the_cache(mnist, server, tmp_path, monkeypatch):
    server.pages.update({f"/a/{name}": contents for name, contents in mnist.items()})
    assert data.get("mnist").folder == tmp_path / "cache" / "espalier" / "data" / "mnist"
    for name in mnist:
        (tmp_path / "cache" / "espalier" / "data" / "mnist" / name).unlink()
    monkeypatch.setenv("ESPALIER_DATA", str(tmp_path / "variable"))
    assert data.get("mnist").folder == tmp_path / "variable" / "mnist"


def test_the_second_address_is_tried(mnist, server, tmp_path):
    names = list(mnist)
    server.pages.update({f"/b/{name}": contents for name, contents in mnist.items()})
    server.pages[f"/a/{names[1]}"] = b"an advertisement"
    assert data.get("mnist", tmp_path).state == "verified"
    assert server.asked == [f"/{base}/{name}" for name in names for base in "ab"]


def test_only_what_is_missing_is_downloaded(mnist, server, small_idx, tmp_path):
    small_idx.write(tmp_path / "mnist", packed=True, leave_out=("t10k-labels-idx1-ubyte",))
    server.pages.update({f"/a/{name}": contents for name, contents in mnist.items()})
    assert data.get("mnist", tmp_path).state == "verified"
    assert server.asked == ["/a/t10k-labels-idx1-ubyte.gz"]


def test_a_download_with_another_checksum_is_not_kept(mnist, server, tmp_path):
    server.pages.update({f"/{base}/{name}": b"something else" for name in mnist for base in "ab"})
    with pytest.raises(Corrupt, match=r"train-images-idx3-ubyte.gz could not be downloaded: .* another checksum"):
        data.load("mnist", tmp_path)
    assert list((tmp_path / "mnist").iterdir()) == []


def test_a_file_of_the_users_is_not_overwritten(mnist, server, small_idx, tmp_path):
    server.pages.update({f"/a/{name}": contents for name, contents in mnist.items()})
    (tmp_path / "mnist").mkdir()
    mine = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    mine.write_bytes(b"mine")
    with pytest.raises(BadInput, match="would overwrite it; move or delete it first"):
        data.load("mnist", tmp_path)
    assert mine.read_bytes() == b"mine"


def test_no_such_file_on_any_server(mnist, server, tmp_path):
    with pytest.raises(BadInput, match=r"/a/train-images-idx3-ubyte.gz answers 404; .*/b/.* answers 404"):
        data.load("mnist", tmp_path)


def says_everything(message: str, folder: str) -> bool:
    """One line that names the files, the folders looked in, and the ways out."""
    wanted = ("mnist", "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", folder, "data_dir", "ESPALIER_DATA")
    return "\n" not in message and all(word in message for word in wanted)


def test_no_network(small_idx, publish, tmp_path):
    packed = {f"{name}.gz": contents for name, contents in small_idx.files.items()}
    publish("mnist", small_idx.files, packed, ("http://127.0.0.1:9",))  # the discard port: nobody answers
    with pytest.raises(BadInput, match=r"no connection to 127.0.0.1:9 \(ConnectionError\)") as refusal:
        data.load("mnist", tmp_path)
    assert says_everything(str(refusal.value), str(tmp_path))


def test_no_pooch(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(BadInput, match=r"pip install 'espalier\[data\]'") as refusal:
        data.load("mnist", tmp_path)
    assert says_everything(str(refusal.value), str(tmp_path))


def test_downloads_can_be_forbidden(mnist, server, tmp_path):
    with pytest.raises(BadInput, match="`espalier data get mnist` downloads it") as refusal:
        data.load("mnist", tmp_path, download=False)
    assert says_everything(str(refusal.value), str(tmp_path))
    assert server.asked == []


def test_a_folder_that_cannot_be_written(mnist, server, tmp_path):
    server.pages.update({f"/a/{name}": contents for name, contents in mnist.items()})
    (tmp_path / "mnist").write_bytes(b"a file where the folder should be")
    with pytest.raises(BadInput, match="cannot be written to"):
        data.load("mnist", tmp_path)
