"""The small language model: every method ends within its share, and a table is made of the lines."""

from __future__ import annotations

import json
import sys

import pytest

import language


def test_every_method_ends_within_its_share(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("torch_pruning")
    monkeypatch.setattr(language, "documentation", lambda held_out: (language.__doc__ or "").encode())
    out, page = tmp_path / "gpt.jsonl", tmp_path / "page.md"
    small = {"device": "cpu", "seeds": 0, "updates": 4, "batch": 2, "width": 32, "heads": 1, "blocks": 3, "fine": 3}
    words = [f"--{name}={value}" for name, value in (small | {"targets": 0.75}).items()]
    for _ in range(2):  # the second finds every line there
        monkeypatch.setattr(sys, "argv", ["language.py", "--out", str(out), *words])
        language.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["method"] for line in lines] == list(language.METHODS)
    assert all(0 < line["share"] <= line["target"] for line in lines)
    assert all(1 < line["perplexity"] < 1000 for line in lines)
    page.write_text("\n".join(language.MARKS))
    monkeypatch.setattr(sys, "argv", ["language.py", "--out", str(out), "--into", str(page)])
    language.main()
    assert page.read_text().count("n = 1") == len(lines)
