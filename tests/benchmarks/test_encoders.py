"""The encoders: every method ends within its share, lines are not made twice, and a table is made of them."""

from __future__ import annotations

import json
import sys

import encoders


def test_every_method_ends_within_its_share(tmp_path, monkeypatch) -> None:
    out, page = tmp_path / "encoders.jsonl", tmp_path / "page.md"
    words = ["--images=64", "--epochs=2", "--seeds=0", "--networks", "nn.TransformerEncoder"]
    for _ in range(2):  # the second finds every line there
        monkeypatch.setattr(sys, "argv", ["encoders.py", "--out", str(out), *words])
        encoders.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["method"] for line in lines] == list(encoders.METHODS)
    least = {"blocks": 0.1}  # eight blocks of the stream are coarse
    assert all(least.get(line["method"], 0.2) < line["share"] <= 0.25 for line in lines[:-1])
    assert lines[-1]["share"] == 1
    assert all(0 < line["error"] < 1 for line in lines)
    page.write_text("\n".join(encoders.MARKS))
    monkeypatch.setattr(sys, "argv", ["encoders.py", "--out", str(out), "--into", str(page)])
    encoders.main()
    assert page.read_text().count("n = 1") == len(lines)
