"""Run files packed into one: the same runs come back, less is written, and what is damaged is refused."""

from __future__ import annotations

import hashlib
import json
import random
import shutil

import pytest
from studies import grid

from espalier import BadInput, Corrupt, records
from espalier.report import read
from results import pack


def anything(draw, depth=3):
    """A JSON value of any form, empty ones among them."""
    kind = draw.randrange(8 if depth else 5)
    if kind < 5:
        return [None, draw.random(), draw.randrange(9), draw.choice(["", "ä", "null"]), draw.random() < 0.5][kind]
    if kind == 5:
        return [anything(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice("abcdef"): anything(draw, depth - 1) for _ in range(draw.randrange(4))}


@pytest.mark.parametrize("seed", range(20))
def test_any_json_comes_back(tmp_path, seed):
    draw, content = random.Random(seed), {}
    for name in ("s/one/a.jsonl", "s/one/b.json", "s/two/c.jsonl"):
        lines = [{"x": anything(draw)} for _ in range(1 if name.endswith("json") else 5)]
        path = tmp_path / "runs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in lines))
        content[name] = lines
    pack(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    again = records.packed(tmp_path / records.PACKED)
    assert json.dumps(again, sort_keys=True) == json.dumps(content, sort_keys=True)
    assert {path.relative_to(tmp_path / "runs").as_posix() for path in records.unpack(tmp_path)} == set(content)
    for name, whole in content.items():
        lines = (tmp_path / "runs" / name).read_text().splitlines()
        assert [json.dumps(json.loads(line)) for line in lines] == [json.dumps(one) for one in whole]


def test_a_report_reads_packed_runs_as_it_reads_files(tmp_path):
    grid(tmp_path)
    before = read(tmp_path).runs
    files = sum(path.stat().st_size for path in (tmp_path / "runs").rglob("*.json"))
    assert pack(tmp_path).stat().st_size < 0.35 * files
    shutil.rmtree(tmp_path / "runs")
    after = read(tmp_path).runs
    assert len(after) == 27
    assert [(run.name, run.path, run.record) for run in after] == [(run.name, run.path, run.record) for run in before]


def resealed(text):
    body = text.partition("\n")[2]
    head = json.loads(text.partition("\n")[0]) | {"sha256": hashlib.sha256(body.encode()).hexdigest()}
    return f"{json.dumps(head)}\n{body}"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text.replace("0.06", "0.05", 1), "checksum"),
        (lambda text: text[:-100], "checksum"),
        (lambda text: text.replace("espalier.runs/1", "espalier.runs/2", 1), "schema"),
        (lambda text: "", "packed runs"),
        (lambda text: resealed(text.replace('{"file":"digits-4_epochs', '{"file":"..', 1)), "no name of a run file"),
        (lambda text: resealed(text + "[99,1]\n"), "packed runs"),
        (lambda text: resealed(text.replace('"files": 27', '"files": 26').replace('"files":27', '"files":26')), "27"),
    ],
    ids=["changed", "cut off", "another schema", "empty", "leads elsewhere", "no such template", "too many"],
)
def test_what_is_damaged_is_refused(tmp_path, spoil, words):
    grid(tmp_path)
    path = pack(tmp_path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(Corrupt, match=words):
        read(tmp_path)


def test_nothing_to_pack_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no run files"):
        pack(tmp_path)
