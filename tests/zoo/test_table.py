"""The page of architectures says what the committed results say, and the results are all there and good."""

import json

from .catalogue import BY_NAME
from .checks import TOLERANCE
from .odd_layers import ODD
from .table import PAGE, RESULTS, committed_page
from .traps import TRAPS


def test_page_is_written_from_the_results():
    assert PAGE.read_text() == committed_page(), "run `python -m tests.zoo.table`"


def test_results_cover_the_zoo_and_hold_the_laws():
    results = json.loads(RESULTS.read_text())
    assert [row["name"] for row in results["architectures"]] == list(BY_NAME)
    assert [trap["name"] for trap in results["traps"]] == [entry.name for entry, _ in TRAPS]
    assert [odd["name"] for odd in results["odd"]] == [entry.name for entry in ODD]
    assert all(odd.get("error", 0.0) <= TOLERANCE for odd in results["odd"])
    assert results["random_graphs"]["mismatches"] == []
    for row in results["architectures"]:
        assert "refused" not in row, row["name"]
        assert row["smallest_share"] <= row["share_bound"], row["name"]
        assert max(row[key] for key in row if key.startswith("error_")) <= BY_NAME[row["name"]].tolerance
        assert row["cost_difference"] == 0, row["name"]
