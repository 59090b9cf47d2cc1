"""Checkpoints: exact, atomic, checksummed, the last two kept, and never of another run."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import espalier
from espalier import files
from espalier.train import checkpoint
from espalier.train.checkpoint import Checkpoint, NotSaved

SETTINGS = {"seed": 3, "target": 0.25}


def same(a: object, b: object) -> bool:
    """Equal in value, type and, for tensors, dtype and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        return a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        assert isinstance(b, (list, tuple))
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def state(update: int = 7) -> dict[str, object]:
    generator = torch.Generator().manual_seed(update)
    return {
        "update": update,
        "weights": {
            "half": torch.randn(3, 4, generator=generator).bfloat16(),
            "double": torch.randn(5, generator=generator, dtype=torch.float64),
            "flags": torch.tensor([True, False]),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2, dtype=torch.int64),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(4.0)}, 1: {}}, "betas": (0.9, 0.999), "best": math.inf},
        "milestones": Counter({10: 2}),
        "history": [{"loss": 0.1, "error": None, "kept": True}, []],
        "name": 'a "quoted" name, "sha256":"' + "0" * 64 + '"',
        "generator": generator.get_state(),
    }


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    Checkpoint(tmp_path, SETTINGS).save(state(), 7)
    assert same(Checkpoint(tmp_path, SETTINGS).load(), state())


def test_a_nan_and_a_noncontiguous_tensor_come_back(tmp_path: Path) -> None:
    original = torch.arange(12.0).reshape(3, 4)
    Checkpoint(tmp_path, {}).save({"nan": math.nan, "turned": original.T, "row": original[1]}, 0)
    loaded = Checkpoint(tmp_path, {}).load()
    assert loaded is not None
    assert math.isnan(loaded["nan"])
    assert loaded["turned"].equal(original.T)
    assert loaded["row"].equal(original[1])


def test_tied_tensors_are_stored_once() -> None:
    shared = torch.ones(1000)
    _, tensors = checkpoint.split_state(
        {"a": shared, "b": shared, "view": shared[:10], "e1": torch.empty(0), "e2": torch.empty(0)}
    )
    assert sorted(tensors) == ["a", "e1", "e2", "view"]


@pytest.mark.parametrize("adam", [True, False])
def test_an_optimizer_and_its_scheduler_go_on_as_if_never_stopped(tmp_path: Path, adam: bool) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.MultiStepLR]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        more = {} if adam else {"momentum": 0.9}
        optimizer = kind(model.parameters(), lr=0.1, **more)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])

    def steps(count: int, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            scheduler.step()  # type: ignore[attr-defined]

    whole = parts()
    steps(8, *whole)
    first = parts()
    steps(4, *first)
    Checkpoint(tmp_path, {}).save(dict(zip("mos", (part.state_dict() for part in first), strict=True)), 4)
    second = parts()
    loaded = Checkpoint(tmp_path, {}).load()
    assert loaded is not None
    for part, name in zip(second, "mos", strict=True):
        part.load_state_dict(loaded[name])
    steps(4, *second)
    assert whole[0].weight.equal(second[0].weight)  # type: ignore[operator]
    assert whole[1].param_groups[0]["lr"] == second[1].param_groups[0]["lr"]


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    run = Checkpoint(tmp_path, SETTINGS)
    for update in (1, 2, 30, 400):
        run.save(state(update), update)
    assert [path.name for path in run.files()] == [
        "checkpoint-000000000400.safetensors",
        "checkpoint-000000000030.safetensors",
    ]
    loaded = run.load()
    assert loaded is not None
    assert loaded["update"] == 400


def test_an_empty_or_absent_folder_holds_nothing(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path, {}).load() is None
    assert Checkpoint(tmp_path / "none", {}).load() is None


DAMAGE = {
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a few bytes": lambda data: data[:5],
    "one bit in the header": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "one bit in the last tensor": lambda data: data[:-3] + bytes([data[-3] ^ 16]) + data[-2:],
    "bytes added": lambda data: data + b"\0",
    "something else": lambda data: pickle.dumps({"weights": list(range(1000))}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_newest_one_falls_back_to_the_previous(tmp_path: Path, damage: object) -> None:
    run = Checkpoint(tmp_path, SETTINGS)
    run.save(state(1), 1)
    newest = run.save(state(2), 2)
    newest.write_bytes(damage(newest.read_bytes()))  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"000002\.safetensors.*Going on from checkpoint-000000000001"):
        loaded = run.load()
    assert loaded is not None
    assert loaded["update"] == 1
    run.save(state(3), 3)
    assert len(run.files()) == 2
    again = run.load()  # without a warning: the damaged one is gone
    assert again is not None
    assert again["update"] == 3


def test_every_single_flipped_bit_is_seen() -> None:
    data = checkpoint.pack({"format": 1, "state": {"tensor": "a"}, "settings": {}}, {"a": torch.tensor([1.5, 2.5])})
    checkpoint.unpack(data)
    for position in range(len(data)):
        for bit in (0, 3, 7):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(espalier.Corrupt):
                checkpoint.unpack(bytes(flipped))


def test_both_damaged_is_corrupt_and_names_both(tmp_path: Path) -> None:
    run = Checkpoint(tmp_path, SETTINGS)
    for update in (1, 2):
        run.save(state(update), update).write_bytes(b"rubbish")
    with pytest.raises(espalier.Corrupt, match=r"000002.*000001.*Remove the folder"):
        run.load()


def test_other_settings_are_refused_with_both_shown(tmp_path: Path) -> None:
    Checkpoint(tmp_path, {"seed": 3, "target": 0.25, "old": 1}).save(state(), 7)
    with pytest.raises(espalier.BadInput) as caught:
        Checkpoint(tmp_path, {"seed": 3, "target": 0.5, "new": "x"}).load()
    text = str(caught.value)
    assert "target: 0.25 there, 0.5 here" in text
    assert 'new: not set there, "x" here' in text
    assert "old: 1 there, not set here" in text
    assert "seed" not in text


def test_a_newer_format_is_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    run = Checkpoint(tmp_path, {})
    run.save({"update": 1}, 1)
    newer = checkpoint.pack({"format": 2, "state": None, "settings": {}}, {})
    (tmp_path / "checkpoint-000000000002.safetensors").write_bytes(newer)
    with pytest.raises(espalier.Corrupt, match="format 2"):
        run.load()
    assert len(run.files()) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_previous_one_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    run = Checkpoint(tmp_path, SETTINGS)
    run.save(state(1), 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write":
        real = open

        def opened(path: object, mode: str = "r") -> object:
            file = real(path, mode)  # type: ignore[call-overload]
            if "w" not in mode:
                return file

            class Full:
                def __enter__(self) -> Full:
                    return self

                def __exit__(self, *_: object) -> None:
                    file.close()

                def write(self, data: bytes) -> None:
                    file.write(data[:100])
                    full()

            return Full()

        monkeypatch.setattr(files, "open", opened, raising=False)
    else:
        monkeypatch.setattr(os, call, full)
    with pytest.raises(NotSaved, match=r"the disk is full.*intact.*same call again") as caught:
        run.save(state(2), 2)
    monkeypatch.undo()
    assert isinstance(caught.value, espalier.EspalierError)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000000001.safetensors"]
    loaded = run.load()
    assert loaded is not None
    assert loaded["update"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_device_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Checkpoint(tmp_path, SETTINGS)
    run.save(state(1), 1)
    full = Path("/dev/full").open
    monkeypatch.setattr(files, "open", lambda handle, mode: full(mode), raising=False)
    with pytest.raises(NotSaved, match="the disk is full"):
        run.save(state(2), 2)
    assert len(list(tmp_path.iterdir())) == 1
    loaded = run.load()
    assert loaded is not None
    assert loaded["update"] == 1


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("not a folder")
    with pytest.raises(NotSaved, match="could not be written"):
        Checkpoint(tmp_path / "run", {}).save({"a": 1}, 1)


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000000000001.safetensors.partial").write_bytes(b"half")
    run = Checkpoint(tmp_path, {})
    assert run.load() is None
    run.save({"a": 1}, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000000002.safetensors"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": {"b": object()}}, r"a\.b is of type object"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ({"a": torch.eye(3).to_sparse()}, "a is a torch.sparse_coo tensor"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, value: dict[str, object], says: str) -> None:
    with pytest.raises(espalier.BadInput, match=says):
        Checkpoint(tmp_path, {}).save(value, 1)
    assert not list(tmp_path.iterdir())


def test_settings_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(espalier.BadInput, match="JSON-able"):
        Checkpoint(tmp_path, {"loss": json.dumps, "b": 1})
    with pytest.raises(espalier.BadInput, match="JSON-able"):
        Checkpoint(tmp_path, {"penalty": math.nan})


def test_no_link_is_followed_and_two_writers_do_not_meet(tmp_path: Path) -> None:
    """Whoever may write to the folder knows the old names of partial files, and cannot lead a write through them."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json.partial").symlink_to(mine)
    (tmp_path / "run" / "result.json").symlink_to(mine)
    files.write(tmp_path / "run" / "result.json", b"new")
    assert mine.read_text() == "mine"
    assert (tmp_path / "run" / "result.json").read_text() == "new"
    assert not (tmp_path / "run" / "result.json").is_symlink()
    first, second = (files.write_beside(tmp_path / "a", data) for data in (b"1", b"2"))
    assert first != second


# ---- in parts --------------------------------------------------------------------------------------------------------

PART = 4096  # the tensors below need three such files beside the header's


def large(update: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(update)
    return {"update": update, "weights": torch.randn(2900, generator=generator), "slots": [torch.ones(7) * update]}


def load(folder: Path, **more: int) -> dict[str, object]:
    loaded = Checkpoint(folder, SETTINGS, **more).load()
    assert loaded is not None
    return loaded


def test_parts_are_the_file_cut(tmp_path: Path) -> None:
    """Whoever reads them needs no part_size, and who asks for parts reads a single file."""
    Checkpoint(tmp_path / "one", SETTINGS).save(large(7), 7)
    first = Checkpoint(tmp_path / "parts", SETTINGS, part_size=PART).save(large(7), 7)
    parts = sorted((tmp_path / "parts").iterdir(), key=lambda path: (path != first, path.name))
    assert [path.stat().st_size for path in parts[:2]] == [PART, PART]
    assert len(parts) == 3
    (single,) = (tmp_path / "one").iterdir()
    assert single.name == first.name
    assert len(single.read_bytes()) == sum(path.stat().st_size for path in parts)
    for folder, more in (("one", {"part_size": PART}), ("parts", {}), ("parts", {"part_size": 9})):
        assert same(load(tmp_path / folder, **more), large(7))


def test_a_header_is_never_cut(tmp_path: Path) -> None:
    first = Checkpoint(tmp_path, SETTINGS, part_size=10).save(state(), 7)
    others = [path for path in tmp_path.iterdir() if path != first]
    assert others
    assert all(path.stat().st_size <= first.stat().st_size for path in others)
    assert same(load(tmp_path), state())
    with pytest.raises(espalier.BadInput, match="from 1 up, not 0"):
        Checkpoint(tmp_path, SETTINGS, part_size=0)


def test_parts_of_the_last_two_are_kept_and_no_others(tmp_path: Path) -> None:
    run = Checkpoint(tmp_path, SETTINGS, part_size=PART)
    for update in (1, 2, 2, 30):
        run.save(large(update), update)
    run.save(large(400), 30)  # another state of the same update
    assert len(run.files()) == 2
    assert len(list(tmp_path.iterdir())) == 6
    assert same(load(tmp_path), large(400))
    Checkpoint(tmp_path, SETTINGS).save(large(500), 500)
    Checkpoint(tmp_path, SETTINGS).save(large(501), 501)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("step", [5, 6], ids=["the same update", "a later one"])
@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_killed_at_any_write_point_the_state_before_is_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, step: int
) -> None:
    """A kill leaves what was written so far under its name: an exception that nobody catches does the same here."""

    class Killed(BaseException):
        pass

    real, points = getattr(os, call), 0
    while True:
        folder = tmp_path / str(points)
        run = Checkpoint(folder, SETTINGS, part_size=PART)
        run.save(large(4), 4)
        run.save(large(5), 5)
        left = [points]

        def dying(*given: object, left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            real(*given)

        monkeypatch.setattr(os, call, dying)
        try:
            run.save(large(99), step)
        except Killed:
            monkeypatch.undo()
        else:
            break
        # Only what ends in the last rename has replaced the state before.
        assert load(folder)["update"] in ((5, 99) if call == "fsync" and points == 5 else (5,))
        assert same(load(folder), large(int(load(folder)["update"])))  # type: ignore[call-overload]
        run.save(large(7), 7)
        assert same(load(folder), large(7))
        assert len(list(folder.iterdir())) == 6  # nothing of the one that was not finished
        points += 1
    assert points == {"replace": 3, "fsync": 6}[call]


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped"])
def test_a_damaged_part_falls_back_to_the_previous(tmp_path: Path, harm: str) -> None:
    run = Checkpoint(tmp_path, SETTINGS, part_size=PART)
    run.save(large(1), 1)
    first = run.save(large(2), 2)
    part = next(path for path in tmp_path.iterdir() if path.name.startswith(first.stem) and path.suffix == ".part1")
    content = part.read_bytes()
    part.unlink() if harm == "gone" else part.write_bytes(
        content[:-1] if harm == "cut" else content[:-1] + bytes([content[-1] ^ 1])
    )
    with pytest.warns(UserWarning, match="one may be missing.*Going on from checkpoint-000000000001"):
        assert same(load(tmp_path), large(1))
    for path in tmp_path.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    with pytest.raises(espalier.Corrupt, match=r"one may be missing.*Remove the folder"):
        load(tmp_path)


def test_parts_without_the_first_are_spoken_of(tmp_path: Path) -> None:
    Checkpoint(tmp_path, SETTINGS, part_size=PART).save(large(1), 1).unlink()
    with pytest.warns(UserWarning, match="without the first of them.*Starting anew"):
        assert Checkpoint(tmp_path, SETTINGS).load() is None
