"""What an attack once broke, a test for each: files, runs and models that are damaged, changed, killed or hostile."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import espalier
from espalier import records, schema
from espalier.compact import Plan, store
from espalier.compact.apply import apply_plan
from espalier.data import from_arrays
from espalier.report import read, write
from espalier.report.tables import Table, readme_of
from espalier.space import BadInput, BadType, Corrupt
from espalier.study import Grid, PaperStudy, sources
from espalier.study.settings import GridSettings, Settings
from espalier.train import evaluate, feed, fingerprint
from espalier.train.batched import Run
from espalier.train.fingerprint import Hashes
from espalier.train.loop import Stop
from espalier.train.progress import Progress
from espalier.train.run_directory import LOCK, locked

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.GroupNorm(4, 12), nn.ReLU(), nn.Linear(12, 2))


def fit(folder: Path, **changes: Any) -> espalier.Result:
    given: dict[str, Any] = {"epochs": 2, "batch_size": 16, "target": 0.5, "quiet": True, "validation": (X, Y)}
    given |= changes
    return espalier.fit(net(), given.pop("data", (X, Y)), checkpoint=folder, **given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    fit(folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flipped(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# ---- row 2: changed data ---------------------------------------------------------------------------------------------


def test_a_sweep_on_changed_data_is_refused_and_shown(tmp_path: Path) -> None:
    def sweep(data: Any, **more: Any) -> Any:
        given = {
            "targets": [0.5],
            "epochs": 1,
            "batch_size": 16,
            "device": "cpu",
            "quiet": True,
            "checkpoint": tmp_path,
        }
        return espalier.sweep(net, data, **given | more)

    other = X.clone()
    other[40, 3] += 1e-6
    sweep((X, Y))
    with pytest.raises(BadInput, match=r"data: .*there.*here"):
        sweep((other, Y))
    assert sweep((X, Y))[0].finished
    assert sweep((other, Y), resume="anyway")[0].finished


def grid(out: Path, data: torch.Tensor, stop: Stop | None = None, force: bool = False, **changes: Any) -> bool:
    given = {"hidden": (5, 4), "epochs": 1, "trials": 1, "targets": (0.5,), "batch_size": 8, "methods": ("search",)}
    own = from_arrays((data, Y), (data, Y))
    settings = GridSettings(**given | changes)
    return Grid(settings, out, data=own, commit="abc", force=force).run(stop or Stop(), Progress())


def paper(out: Path, data: torch.Tensor, stop: Stop | None = None, force: bool = False, **changes: Any) -> bool:
    given = {"hidden": (5, 4), "epochs": 1, "trials": 1, "penalties": (0.0,), "batch_size": 8, "methods": ("search",)}
    own = from_arrays((data, Y), (data, Y))
    settings = Settings(**given | changes)
    return PaperStudy(settings, out, data=own, commit="abc", force=force).run(stop or Stop(), Progress())


class AfterOneUpdate(Stop):
    def now(self, spare: float = 0.0) -> bool:
        self.looks = getattr(self, "looks", 0) + 1
        return self.looks > 1


@pytest.mark.parametrize("study", [grid, paper])
def test_a_study_on_changed_data_is_refused_also_where_runs_are_finished(tmp_path: Path, study: Any) -> None:
    other = X.clone()
    other[40, 3] += 1e-6
    assert study(tmp_path, X)
    file = next(path for path in tmp_path.glob("runs/*/*/*.json*"))
    whole = file.read_bytes()
    for more in ({}, {"trials": 2}):  # all runs finished, or some
        with pytest.raises(BadInput, match=r"data_sha256: [0-9a-f]{64} there, [0-9a-f]{64} here.*--force"):
            study(tmp_path, other, **more)
    assert study(tmp_path, other, force=True, trials=2)
    assert file.read_bytes() == whole  # what is finished stays as it is; what is new says what differed
    new = next(path for path in tmp_path.glob("runs/*/*/*.json*") if path != file)
    head = json.loads(new.read_text() if new.suffix == ".json" else new.read_text().splitlines()[0])
    assert [line.partition(":")[0] for line in head["forced"]] == ["data_sha256"]
    assert "1 of 2 runs were gone on with by force: data, code or settings had changed" in read(tmp_path).notes


@pytest.mark.parametrize("study", [grid, paper])
def test_a_study_that_is_under_way_goes_on_with_changed_inputs_by_force_alone(tmp_path: Path, study: Any) -> None:
    other = X.clone()
    other[40, 3] += 1e-6
    assert not study(tmp_path, X, AfterOneUpdate())
    with pytest.raises(BadInput, match=r'data: "[0-9a-f]{64}" there, "[0-9a-f]{64}" here.*--force'):
        study(tmp_path, other)
    assert study(tmp_path, other, force=True)
    file = next(tmp_path.glob("runs/*/*/*.json*"))
    head = json.loads(file.read_text() if file.suffix == ".json" else file.read_text().splitlines()[0])
    assert [line.partition(":")[0] for line in head["forced"]] == ["data"]
    assert study(tmp_path, other)
    with pytest.raises(BadInput, match="data_sha256"):
        study(tmp_path, X)


def test_run_files_of_earlier_versions_are_gone_on_with(tmp_path: Path) -> None:
    """They do not say which data they are of."""
    assert grid(tmp_path, X)
    file = next(tmp_path.glob("runs/*/*/*.jsonl"))
    head, *lines = (json.loads(line) for line in file.read_text().splitlines())
    del head["data_sha256"]
    file.write_text(schema.sealed(head, lines))
    assert grid(tmp_path, X + 1)


class OfAFile:
    """Data in a file, and how often they were hashed."""

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.folder, self.count, plain = path, folder, 0, fingerprint.tensors

        def counted(given: Any) -> str:
            self.count += 1
            return plain(given)

        monkeypatch.setattr(fingerprint, "tensors", counted)
        monkeypatch.setattr(fingerprint, "RECENT", -1e9)
        self.write(X)

    def write(self, inputs: torch.Tensor) -> None:
        np.savez(self.path, x=inputs.numpy(), y=Y.numpy())
        os.utime(self.path, (1, 1))

    def hashed(self, change: float = 0.0) -> str:
        part, known = sources.read(str(self.path)).train, Hashes(self.folder)
        if change:
            part[0][3, 3] += change
        said: str = feed.read(part, 8, 0).describe(known)["sha256"]
        known.keep()
        return said


def test_a_data_file_is_hashed_once_and_again_when_it_or_what_is_known_of_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = OfAFile(tmp_path / "data.npz", tmp_path / "run", monkeypatch)
    first, kept = data.hashed(), tmp_path / "run" / "hashes.json"
    whole = kept.read_bytes()
    assert [data.hashed(), data.hashed()] == [first, first]
    assert data.count == 1
    for at in range(len(whole)):
        flipped(kept, at, at % 8)
        known = Hashes(tmp_path / "run").known
        assert known == {}
        kept.write_bytes(whole)
    for damage in (b"", b"espalier_sha256", whole[:-5], whole + whole):
        kept.write_bytes(damage)
        assert (data.hashed(), kept.read_bytes()) == (first, whole)
    assert data.count == 5
    assert data.hashed(change=0.5) not in (first, data.hashed(change=0.25))  # what was read, and then changed
    other = X.clone()
    other[40, 3] += 1e-6
    data.write(other)  # as long as before, its time set back
    assert data.hashed() != first
    kept.write_text("of somebody else")
    data.hashed()
    assert kept.read_text() == "of somebody else"
    monkeypatch.setattr(fingerprint, "RECENT", 60.0)  # a file of this minute may change again at the same time
    count = data.count
    assert data.hashed() == data.hashed() != first
    assert data.count == count + 2


def test_a_run_on_a_data_file_that_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = OfAFile(tmp_path / "data.npz", tmp_path / "run", monkeypatch)
    fit(tmp_path / "run", data=sources.read(str(data.path)).train)
    fit(tmp_path / "run", data=sources.read(str(data.path)).train)
    assert data.count == 3  # of the validation, which is of no file, each time
    other = X.clone()
    other[40, 3] += 1e-6
    data.write(other)
    with pytest.raises(BadInput, match=r"data: .*there.*here"):
        fit(tmp_path / "run", data=sources.read(str(data.path)).train)


# ---- row 3: two processes, and another host --------------------------------------------------------------------------


def test_a_lock_of_another_host_is_passed_over_by_force_alone(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 7 on elsewhere, since 2026-01-01 00:00:00\n")
    with pytest.raises(BadInput, match=r"process 7 on elsewhere, since 2026.*--force"), locked(tmp_path):
        pass
    with locked(tmp_path, force=True):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()
    assert (tmp_path / LOCK).read_text() == ""


def test_a_file_that_is_no_lock_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("the combination is 4711\n")
    with pytest.raises(BadInput, match="not a lock of ours"), locked(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == "the combination is 4711\n"


def test_a_lock_of_a_dead_process_of_this_host_is_taken_over(tmp_path: Path) -> None:
    with locked(tmp_path):
        left = (tmp_path / LOCK).read_text()
    (tmp_path / LOCK).write_text(left)  # as a kill leaves it
    with locked(tmp_path):
        pass


# ---- rows 4 and 5: saved models --------------------------------------------------------------------------------------


def small(seed: int) -> nn.Module:
    gated = espalier.attach(net(), X[:4])
    mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.6).float()
    return gated.compact(gated.canonical(mask))


def test_killed_between_its_two_files_a_save_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = small(1), small(2)
    espalier.save(old, tmp_path)
    plain = store.put_in_place

    def killing(partial: Path, path: Path) -> None:
        if path.name == "plan.json":
            raise KeyboardInterrupt
        plain(partial, path)

    monkeypatch.setattr(store, "put_in_place", killing)
    with pytest.raises(KeyboardInterrupt):
        espalier.save(new, tmp_path)
    monkeypatch.undo()
    assert torch.equal(espalier.load(tmp_path, net)(X), old(X))
    espalier.save(new, tmp_path)
    assert torch.equal(espalier.load(tmp_path, net)(X), new(X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "plan.json"]


def test_every_flipped_bit_of_a_plan_is_seen(tmp_path: Path) -> None:
    espalier.save(small(1), tmp_path)
    path = tmp_path / "plan.json"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        flipped(path, at, at % 8)
        with pytest.raises(Corrupt, match=r"plan\.json"):
            espalier.load(tmp_path, net)
        path.write_bytes(whole)


def test_another_type_in_the_header_of_the_tensors_is_seen(tmp_path: Path) -> None:
    espalier.save(small(1).to(torch.bfloat16), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    with pytest.raises(Corrupt, match="not the one that was saved"):
        espalier.load(tmp_path, net)


# ---- row 6: memory ---------------------------------------------------------------------------------------------------


def test_numbers_are_bounded_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small(1).espalier_plan
    name, dims = next(iter(plan["tensors"].items()))
    bomb = json.loads(json.dumps(plan))
    bomb["tensors"][name] = {dim: [[0, 1000000000000]] for dim in dims}
    with pytest.raises(Corrupt, match="from 0 to"):
        Plan.from_dict(bomb)
    bomb["tensors"][name] = {dim: [[0, 1 << 31]] for dim in dims}
    with pytest.raises(BadInput, match="it is not the model the plan was made for"):
        apply_plan(net(), Plan.from_dict(bomb))
    with pytest.raises(BadInput, match="label 1700000000"):
        from_arrays((X, Y), (X, torch.full_like(Y, 1_700_000_000)))
    path = tmp_path / "packed.npz"
    monkeypatch.setattr(sources, "LARGE", 1 << 24)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w", force_zip64=True) as part:
        np.lib.format.write_array_header_1_0(part, {"descr": "|u1", "fortran_order": False, "shape": (1 << 26,)})
        for _ in range(1 << 2):
            part.write(bytes(1 << 24))
    with pytest.raises(BadInput, match="unpacks to 671089"):
        sources.read(str(path))


def test_a_download_without_end_is_ended() -> None:
    from espalier.data.load import _Bar

    bar = _Bar("file", lambda *_: None, 1000)
    bar.update(900)
    with pytest.raises(Corrupt, match="more than 1000 bytes"):
        bar.update(200)


# ---- row 7: one decoder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"[" * 100_000, b"{}", b'{"format": 3}', b'{"format": 1}', b'{"format": ' + b"9" * 9999 + b"}", b"\xff",
     b"null", b'{"format": 1, "a": 1e999}', b'{"format": 1, "a": NaN}', b'{"format": 1, "a": "\\ud800"}',
     b'{"format": true}', b'{"format": 1, "a": ' + b"[" * 99 + b"]" * 99 + b"}"],
)  # fmt: skip
def test_what_is_not_the_format_is_corrupt_with_the_name_and_the_way_out(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"a\.json is damaged: .*\. Do this"):
        schema.read(path, schema.record({"a": schema.number()}), newest=2, way_out="Do this")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Corrupt, match="pipe is not a file"):
        schema.read(tmp_path / "pipe", schema.anything)


@pytest.mark.parametrize("name", ["README.md", "report.html"])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_a_page_that_is_no_file_is_neither_waited_for_nor_read_to_its_end(run: Path, name: str, kind: str) -> None:
    pytest.importorskip("jinja2")
    path = run / name
    {"pipe": os.mkfifo, "endless": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](path)
    if name == "README.md":
        assert readme_of(run) == run / "REPORT.md"
    else:
        with pytest.raises((BadInput, OSError), match=r"report\.html"):
            write(run, figures=False)


def test_packed_runs_do_not_unpack_to_more_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "VALUES", 1 << 16)
    lines = [json.dumps({"template": 0, "of": [[0]] * 5000}), json.dumps({"file": "a/b/c.json"})] + ["[0]"] * 5000
    body = "".join(f"{line}\n" for line in lines).encode()
    head = {"schema": records.PACKED_SCHEMA, "files": 1, "sha256": hashlib.sha256(body).hexdigest()}
    (tmp_path / records.PACKED).write_bytes(json.dumps(head).encode() + b"\n" + body)
    with pytest.raises(Corrupt, match="more than 65536 values"):
        read(tmp_path)
    for damage in (b"[" * 100_000, b'{"schema": NaN}', b"\xff", b""):
        (tmp_path / records.PACKED).write_bytes(damage + b"\n" + body)
        with pytest.raises(Corrupt, match="not a file of packed runs"):
            read(tmp_path)
    (tmp_path / records.PACKED).unlink()
    (tmp_path / records.PACKED).symlink_to("/dev/zero")
    with pytest.raises((BadInput, Corrupt)):
        read(tmp_path)


# ---- row 8: links ----------------------------------------------------------------------------------------------------


def lead_away(folder: Path, outside: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    outside.mkdir()
    folder.symlink_to(outside)


@pytest.mark.parametrize("name", ["tables", "figures"])
def test_a_report_writes_through_no_link(run: Path, tmp_path: Path, name: str) -> None:
    lead_away(run / name, tmp_path / "outside")
    with pytest.raises(BadInput, match=f"{name} is a link, and nothing is written outside of"):
        write(run, figures=name == "figures", page=False)
    assert not list((tmp_path / "outside").iterdir())


def test_runs_write_through_no_link(tmp_path: Path) -> None:
    def sweep(out: Path) -> None:
        espalier.sweep(net, (X, Y), targets=[0.5], epochs=1, device="cpu", quiet=True, checkpoint=out)

    cases = [(fit, ["small"]), (sweep, ["run-000", "batch-000", "run-000/small"])]
    cases += [(lambda out: grid(out, X), ["runs", "state"]), (lambda out: paper(out, X), ["runs", "state"])]
    number = 0
    for call, names in cases:
        for name in names:
            number += 1
            out, outside = tmp_path / f"run-{number}", tmp_path / f"outside-{number}"
            lead_away(out / name, outside)
            with pytest.raises(BadInput, match=f"{name} is a link"):
                call(out)
            assert not list(outside.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "place")  # the folder that is named may be one
    (tmp_path / "place").mkdir()
    assert fit(tmp_path / "link").finished


def test_what_is_exported_goes_through_no_link(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from espalier.ship import onnx, program

    (tmp_path / "mine").write_text("mine")
    for name in ("model.onnx.partial", "partial.model.pt2", "model.onnx", "model.pt2"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    for export, name in ((onnx.export, "model.onnx"), (program.export, "model.pt2")):
        export(net().eval(), X[:4], tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


# ---- row 10: odd arguments -------------------------------------------------------------------------------------------


def test_odd_arguments_are_named() -> None:
    with pytest.raises(BadInput, match="seed is 1000"):
        fit(None, seed=10**23)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="meta"):
        fit(None, device="meta")  # type: ignore[arg-type]
    with pytest.raises(BadType, match="model is a torch module"):
        evaluate(None, (X, Y), loss=F.cross_entropy)  # type: ignore[arg-type]
    with pytest.raises(BadType, match="seed of a run is an integer"):
        espalier.sweep(net, (X, Y), targets=[0.5], epochs=1, seeds=torch.tensor([float("nan")]))  # type: ignore[arg-type]
    run = Run(torch.tensor(3), target=np.float32(0.5))  # type: ignore[arg-type]
    assert json.dumps([run.seed, run.target]) == "[3, 0.5]"
    inner = torch.optim.SGD(net().parameters(), 0.1)
    with pytest.raises(BadType, match="come a Search and a gated model, not NoneType"):
        espalier.StructureOptimizer(inner, None, None)  # type: ignore[arg-type]


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("typer")
    from espalier.cli import main

    monkeypatch.chdir(tmp_path)
    for words in (["--out", ""], ["--out="], ["--out", "r", "--seed", "1e23"], ["--out", "r", "--device", "meta"]):
        monkeypatch.setattr("sys.argv", ["espalier", "train", "--model", "mlp", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# ---- row 11: run directories -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["result.json", "metrics.jsonl", "theta.safetensors", "settings.json", "manifest.json"]
)
def test_a_changed_digit_is_seen_and_the_same_call_mends_it(run: Path, name: str) -> None:
    whole = (run / name).read_bytes()
    digits = [at for at, byte in enumerate(whole) if chr(byte).isdigit()]
    flipped(run / name, digits[len(digits) // 2], 0)
    if name == "theta.safetensors":
        assert read(run).runs[0].theta is None
    else:
        with pytest.raises(Corrupt, match=f"{name} is damaged"):
            read(run)
    assert fit(run).finished
    if name == "result.json":
        ours, theirs = json.loads((run / name).read_text()), json.loads(whole)
        assert ours | {"seconds": 0} == theirs | {"seconds": 0}
    assert read(run).notes == ()


def test_the_card_repeats_no_number_that_was_changed(run: Path, tmp_path: Path) -> None:
    path = run / "result.json"
    path.write_text(path.read_text().replace('"validation_error": 0', '"validation_error": 1', 1))
    with pytest.raises(Corrupt, match=r"result\.json is damaged: its checksum is not the one in manifest\.json"):
        espalier.ship(run, tmp_path / "small", model=net)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("study", [grid, paper])
def test_killed_between_the_run_files_and_the_clean_up_a_study_leaves_no_state_for_good(
    tmp_path: Path, study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path, X)
    assert list(tmp_path.glob("runs/*/*/*.json*"))
    assert list(tmp_path.glob("state/**/checkpoint-*"))
    assert study(tmp_path, X)
    assert not [path for path in tmp_path.glob("state/**/*") if path.is_file()]


def test_damaged_settings_do_not_block_what_is_whole(tmp_path: Path) -> None:
    fit(tmp_path, time_limit=1e-6)
    (tmp_path / "settings.json").write_text("{")
    assert fit(tmp_path).finished
    assert read(tmp_path).notes == ()


def test_a_folder_without_a_manifest_is_read_as_before(run: Path) -> None:
    (run / "manifest.json").unlink()
    assert read(run).runs[0].finished
    assert fit(run).finished
    assert (run / "manifest.json").exists()


def test_a_folder_that_is_removed_on_the_way_is_no_dead_end(tmp_path: Path) -> None:
    class Remove(espalier.Callback):
        def on_epoch(self, loop: Any, rows: Any) -> None:
            if loop.update < loop.updates:
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").mkdir()

    fit(tmp_path / "run", callbacks=[Remove()])
    assert fit(tmp_path / "run").finished
    assert read(tmp_path / "run").notes == ()


# ---- row 12: modes and cells -----------------------------------------------------------------------------------------


def test_files_have_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fit(tmp_path)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o640}


def test_no_cell_is_a_formula() -> None:
    rows = (("=cmd()", -1.5), ("@x", None), ("-1+cmd|x", 2), ("-2.7 [-5.3; 1]", 3), ("-2.7 [-5.3 -1]", 4))
    table = Table("t", "c", (("a", ""), ("n", "g")), rows)
    assert table.csv() == "a,n\n'=cmd(),-1.5\n'@x,\n'-1+cmd|x,2\n'-2.7 [-5.3; 1],3\n-2.7 [-5.3 -1],4\n"


def test_nothing_here_is_loaded_that_was_not_saved(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(Corrupt, match=r"plan\.json is missing"):
        espalier.load(tmp_path, net)
