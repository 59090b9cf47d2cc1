"""Sets in their standard formats: found in the layouts people have, read exactly, refused when something is wrong."""

import gzip
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from espalier import data
from espalier.space import BadInput, BadType, Corrupt


def same(part, expected) -> bool:
    images, labels = expected
    return bool((part[0].numpy().reshape(images.shape) == images).all() and (part[1].numpy() == labels).all())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("mnist", "MNIST"),
        ("mnist", "."),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "."),
    ],
)
def test_an_idx_set_is_found_and_read(small_idx, tmp_path, name, folder, packed):
    small_idx.write(tmp_path / "data" / folder, packed=packed)
    found = data.load(name, tmp_path / "data", download=False)
    assert same(found.train, small_idx.train)
    assert same(found.test, small_idx.test)
    assert found.name == name
    assert found.shape == (1, 28, 28)
    assert len(found.classes) == 10
    assert found.train_inputs.dtype == torch.uint8
    assert found.train_labels.dtype == torch.int64
    assert not found.standard


@pytest.mark.parametrize("packed", [False, True])
def test_dotted_names_are_read(small_idx, tmp_path, packed):
    small_idx.files = {name.replace("-idx", ".idx"): contents for name, contents in small_idx.files.items()}
    small_idx.write(tmp_path, packed=packed)
    assert same(data.load("mnist", tmp_path, download=False).train, small_idx.train)


@pytest.mark.parametrize("folder", ["cifar10", "CIFAR10/cifar-10-batches-bin", "cifar-10-batches-bin", "."])
def test_cifar_batches_are_found_and_read(small_cifar, tmp_path, folder):
    small_cifar.write(tmp_path / folder)
    found = data.load("cifar10", tmp_path, download=False)
    assert same(found.train, small_cifar.train)
    assert same(found.test, small_cifar.test)
    assert found.shape == (3, 32, 32)


def test_cifar_is_read_out_of_its_archive(small_cifar, tmp_path):
    small_cifar.tar(tmp_path / "cifar10" / "cifar-10-binary.tar.gz")
    found = data.load("cifar10", tmp_path, download=False)
    assert same(found.train, small_cifar.train)
    assert same(found.test, small_cifar.test)
    assert [path.name for path in (tmp_path / "cifar10").iterdir()] == ["cifar-10-binary.tar.gz"]  # nothing unpacked


def test_the_argument_goes_before_the_variable_and_the_cache(small_idx, small_cifar, tmp_path, monkeypatch):
    monkeypatch.setenv("ESPALIER_DATA", str(tmp_path / "variable"))
    small_idx.write(tmp_path / "cache" / "espalier" / "data" / "mnist")
    assert data.verify("mnist", tmp_path / "argument").folder == tmp_path / "cache" / "espalier" / "data" / "mnist"
    small_idx.write(tmp_path / "variable" / "mnist")
    assert data.verify("mnist", tmp_path / "argument").folder == tmp_path / "variable" / "mnist"
    small_idx.write(tmp_path / "argument" / "mnist")
    assert data.verify("mnist", tmp_path / "argument").folder == tmp_path / "argument" / "mnist"
    assert data.verify("mnist").folder == tmp_path / "variable" / "mnist"


def test_a_whole_set_goes_before_part_of_one(small_idx, tmp_path):
    small_idx.write(tmp_path / "mnist", leave_out=("t10k-labels-idx1-ubyte",))
    small_idx.write(tmp_path / "MNIST" / "raw")
    assert data.verify("mnist", tmp_path).folder == tmp_path / "MNIST" / "raw"


def test_what_is_incomplete_is_said(small_cifar, tmp_path):
    small_cifar.write(tmp_path / "cifar10", leave_out=("data_batch_3.bin", "test_batch.bin"))
    with pytest.raises(BadInput) as refusal:
        data.load("cifar10", tmp_path, download=False)
    message = str(refusal.value)
    assert "lacks data_batch_3.bin, test_batch.bin" in message
    assert str(tmp_path / "cifar10") in message
    assert "cifar-10-binary.tar.gz" in message
    assert "ESPALIER_DATA" in message
    assert "data_batch_1.bin" not in message


def test_the_pickled_cifar_is_pointed_out(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(BadInput, match=r"cifar-10-batches-py is the Python version, which needs pickle"):
        data.load("cifar10", tmp_path, download=False)


def cut(contents: bytes) -> bytes:
    return contents[:-1]


def grown(contents: bytes) -> bytes:
    return contents + b"\0"


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "spoil", "says"),
    [
        (IMAGES, cut, r"23519 bytes where its header \(30, 28, 28\) asks for 23520: the file is cut short"),
        (IMAGES, grown, "something follows its end"),
        (IMAGES, lambda b: b"", "too few for an IDX header"),
        (IMAGES, lambda b: b[:9], "too few for an IDX header"),
        (IMAGES, lambda b: b"<html>" + b, "starts with 3c68746d"),
        (IMAGES, lambda b: b[:4] + bytes([255] * 4) + b[8:], "cut short"),
        (IMAGES, lambda b: b[:8] + b[12:16] + bytes([0, 0, 0, 14]) + b[16 : 16 + 30 * 28 * 14], "images of 28 x 14"),
        (IMAGES, lambda b: b[:4] + bytes([0, 0, 0, 29]) + b[8 : 16 + 29 * 784], "29 images, but 30 labels"),
        (LABELS, cut, "cut short"),
        (LABELS, lambda b: b[:20] + bytes([10]) + b[21:], "example 12 has label 10; labels are 0 to 9"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_spoilt_idx_file_is_refused(small_idx, tmp_path, file, spoil, says, packed):
    small_idx.files[file] = spoil(small_idx.files[file])
    small_idx.write(tmp_path / "mnist", packed=packed)
    with pytest.raises(Corrupt, match=says) as refusal:
        data.load("mnist", tmp_path)
    assert file in str(refusal.value)
    assert "`espalier data get mnist`" in str(refusal.value)
    status = data.verify("mnist", tmp_path)
    assert (status.state, status.usable) == ("corrupt", False)
    assert status.detail == str(refusal.value)


def test_an_empty_set_is_refused(small_idx, tmp_path):
    small_idx.files[IMAGES] = small_idx.files[IMAGES][:4] + bytes(4) + small_idx.files[IMAGES][8:16]
    small_idx.files[LABELS] = small_idx.files[LABELS][:4] + bytes(4)
    small_idx.write(tmp_path)
    with pytest.raises(Corrupt, match="holds no examples"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[: len(b) // 2],  # a download that stopped
        lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 4]) + b[len(b) // 2 + 1 :],  # one bit turned
        lambda b: b[:10] + b"\xff" + b[11:],  # no such kind of block
        lambda b: b"not gzip" + b,
        lambda b: b[:-8] + bytes(8),  # its own checksum
    ],
)
def test_a_spoilt_gzip_is_refused(small_idx, tmp_path, spoil):
    small_idx.write(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / f"{IMAGES}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(Corrupt, match="does not unpack") as refusal:
        data.load("mnist", tmp_path)
    assert str(path) in str(refusal.value)
    assert "Delete it" in str(refusal.value)


def test_a_file_that_unpacks_without_end_is_refused(small_idx, tmp_path, monkeypatch):
    monkeypatch.setattr("espalier.data.known_files.LIMIT", 1 << 22)
    small_idx.write(tmp_path, packed=True)
    (tmp_path / f"{IMAGES}.gz").write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(Corrupt, match="unpacks to more than"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("file", "spoil", "says"),
    [
        ("data_batch_2.bin", cut, "12291 bytes where its like have 12292"),
        ("data_batch_2.bin", lambda b: b[: len(b) // 2], "6146 bytes where its like have 12292"),  # between two images
        ("data_batch_2.bin", lambda b: b"", "0 bytes where its like have 12292"),
        ("test_batch.bin", cut, "not whole records of 3073: 3 images and 3072 bytes more"),
        ("test_batch.bin", lambda b: b"", "holds no examples"),
        ("test_batch.bin", lambda b: bytes([77]) + b[1:], "example 0 has label 77"),
    ],
)
@pytest.mark.parametrize("archive", [False, True])
def test_a_spoilt_cifar_batch_is_refused(small_cifar, tmp_path, file, spoil, says, archive):
    small_cifar.files[file] = spoil(small_cifar.files[file])
    if archive:
        small_cifar.tar(tmp_path / "cifar-10-binary.tar.gz")
    else:
        small_cifar.write(tmp_path)
    with pytest.raises(Corrupt, match=says) as refusal:
        data.load("cifar10", tmp_path)
    assert file in str(refusal.value)
    assert "`espalier data get cifar10`" in str(refusal.value)


def test_a_test_batch_cut_between_two_images_is_refused(small_cifar, tmp_path, publish):
    """The training batches are as long as the published ones, so the test batch must be too."""
    publish("cifar10", small_cifar.files, {}, ())
    small_cifar.files["test_batch.bin"] = small_cifar.files["test_batch.bin"][: 2 * 3073]
    small_cifar.write(tmp_path)
    with pytest.raises(Corrupt, match=r"test_batch.bin: 6146 bytes where its like have 12292"):
        data.load("cifar10", tmp_path)


@pytest.mark.parametrize("keep", [0, 50, 0.3, 0.9])
def test_a_cut_archive_is_refused(small_cifar, tmp_path, keep):
    path = small_cifar.tar(tmp_path / "cifar-10-binary.tar.gz")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(Corrupt, match=r"cifar-10-binary.tar.gz (does not unpack|lacks).*espalier data get cifar10"):
        data.load("cifar10", tmp_path)


def test_an_archive_that_lacks_a_batch_is_refused(small_cifar, tmp_path):
    small_cifar.tar(tmp_path / "cifar-10-binary.tar.gz", leave_out=("data_batch_4.bin",))
    with pytest.raises(Corrupt, match=r"lacks data_batch_4.bin"):
        data.load("cifar10", tmp_path)


def test_the_published_files_are_known_by_their_bytes(small_idx, tmp_path, publish):
    publish("mnist", small_idx.files, {}, ())
    small_idx.write(tmp_path / "mnist", packed=True)
    assert data.load("mnist", tmp_path).standard
    assert data.verify("mnist", tmp_path).state == "verified"
    # As long as the published file and in perfect format, but one pixel differs: it was altered.
    spoilt = bytearray(small_idx.files[IMAGES])
    spoilt[100] ^= 1
    small_idx.files[IMAGES] = bytes(spoilt)
    small_idx.write(tmp_path / "mnist", packed=True)
    with pytest.raises(Corrupt, match=r"is as long as mnist's but differs \(SHA-256"):
        data.load("mnist", tmp_path)


def test_another_sets_files_are_told_apart(small_idx, tmp_path, publish):
    publish("fashion-mnist", small_idx.files, {}, ())
    small_idx.write(tmp_path)
    with pytest.raises(Corrupt, match="is fashion-mnist's, not mnist's"):
        data.load("mnist", tmp_path)
    assert data.load("fashion-mnist", tmp_path).standard


def test_states(small_idx, small_cifar, tmp_path):
    small_idx.write(tmp_path / "mnist")
    small_cifar.write(tmp_path / "cifar10", leave_out=("test_batch.bin",))
    states = {status.name: status.state for status in data.available(tmp_path)}
    assert states == {"digits": "embedded", "mnist": "here", "fashion-mnist": "missing", "cifar10": "incomplete"}
    assert tuple(states) == data.names()
    assert data.verify("digits").state == "embedded"
    assert data.verify("mnist", tmp_path).state == "other"
    assert "30 + 7 examples" in data.verify("mnist", tmp_path).detail
    assert data.verify("cifar10", tmp_path).state == "incomplete"
    assert data.verify("fashion-mnist", tmp_path).state == "missing"


def test_names_and_folders_that_cannot_be(tmp_path):
    with pytest.raises(BadInput, match="no dataset is named 'minst'; there are digits, mnist"):
        data.load("minst")
    with pytest.raises(BadType, match="named by a string"):
        data.load(7)  # type: ignore[arg-type]
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(BadInput, match="data_dir is the folder"):
        data.load("mnist", file)
    with pytest.raises(BadType, match="data_dir is a path"):
        data.load("mnist", 3)  # type: ignore[arg-type]


def test_the_embedded_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    reference = load_digits()
    images, labels = data.all_digits()
    assert np.array_equal(images[:, 0].numpy(), reference.images)
    assert np.array_equal(labels.numpy(), reference.target)


def test_digits_need_nothing_and_never_change():
    digits = data.load()
    assert (len(digits.train_labels), len(digits.test_labels)) == (1347, 450)
    assert digits.standard
    assert not digits.hold_out(100).standard
    # The two parts together are the 1,797, each once.
    images, labels = data.all_digits()
    rows = torch.cat([digits.train_inputs, digits.test_inputs]).flatten(1)
    assert sorted(map(bytes, rows.numpy())) == sorted(map(bytes, images.flatten(1).numpy()))
    counts = torch.stack([digits.test_labels.bincount(), labels.bincount()])
    assert (counts[0] - counts[1] * 450 / 1797).abs().max() < 1
    # Results on digits are compared between versions: the split must not move.
    assert digits.fingerprint() == "d96e702384875b4fb267954e824c7a1bb7f9327b4e2ddbe1fdcdff64824fc1c3"


def test_a_bad_embedded_file_is_refused(monkeypatch, tmp_path):
    module = importlib.import_module("espalier.data.load")

    for contents in (b"", b"PK\x03\x04 no archive"):
        (tmp_path / "digits.npz").write_bytes(contents)
        monkeypatch.setattr(module, "files", lambda _: Path(tmp_path))
        module._arrays.cache_clear()
        try:
            with pytest.raises(Corrupt, match="install espalier again"):
                data.load("digits")
        finally:
            module._arrays.cache_clear()
