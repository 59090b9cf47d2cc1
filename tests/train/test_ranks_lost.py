"""One rank of several is killed, or hangs: the others end in time with one line, and the same command goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from ranks_lost import TIMEOUT
from safetensors.torch import load_file

HERE = Path(__file__).parent


def test_a_rank_is_lost_and_the_command_goes_on_with_another_number_of_them(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(HERE / "ranks_lost.py"), str(tmp_path)]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])

    assert told["undisturbed"][0] == 0, told["undisturbed"]
    for case, others in (("killed", 2), ("hung", 1)):
        assert len(told[case]["others"]) == others
        for code, _, said in told[case]["others"]:
            assert code == 75, said
            assert said.count("\n") == 1
            assert "has lost another one" in said
        assert told[case]["seconds"] < TIMEOUT + 5  # the machine may be busy
    assert told["hung"]["seconds"] > TIMEOUT - 1

    code, printed, said = told["finished"]
    assert code == 0, said
    finished = json.loads(printed.splitlines()[-1])
    assert finished["finished"]
    assert finished["updates"] == json.loads(told["undisturbed"][1].splitlines()[-1])["updates"]
    for name in ("theta.safetensors", "small/model.safetensors"):
        expected, found = (load_file(tmp_path / run / name) for run in ("whole", "broken"))
        assert found.keys() == expected.keys()
        ends = {key: value[-1] if key == "theta" else value for key, value in found.items() if key != "updates"}
        for key, value in ends.items():  # the run of three, then two ranks, then one, is that of one
            own = expected[key][-1] if key == "theta" else expected[key]
            torch.testing.assert_close(value, own, rtol=0, atol=1e-6)

    for rank in (0, 1):
        code, _, said = told["disagreed"][rank]
        assert code == 2
        assert said.count("\n") == 1
        assert "seed: 3 there, 4 here" in said
        code, _, said = told["missing"][rank]
        assert code == 2
        assert "nowhere.npz" in said
        assert said.startswith("espalier: rank 1 on" if rank == 0 else "espalier: ")
    assert told["written"] == []
