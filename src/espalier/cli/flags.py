"""Flags that several commands have, each with one type and one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path, typer.Option(help="Folder of the run files; the same command goes on with what is in it.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data sets are.")]
Trials = Annotated[int, typer.Option(help="Runs of each setting; trial k has the seed first-seed + k.")]
FirstSeed = Annotated[int, typer.Option(help="Seed of the first trial.")]
BatchSize = Annotated[int, typer.Option(help="Of the search, under each of two masks; the others read twice as many.")]
LearningRate = Annotated[float, typer.Option(help="Of the weights; a tenth at 1/2 and at 3/4 of the run.")]
Samples = Annotated[int, typer.Option(help="Masks compared in one update, at equal examples per update.")]
Settle = Annotated[float, typer.Option(help="The share of the run, at its end, under the structure found.")]
Adaptive = Annotated[bool, typer.Option("--adaptive", help="The step size of theta adapts itself (ASNG).")]
Permuted = Annotated[bool, typer.Option("--permuted", help="The control: losses shuffled before they are ranked.")]
ThetaRate = Annotated[float | None, typer.Option(help="Learning rate of theta; default 1/d.")]
HeldOut = Annotated[int, typer.Option(help="For tuning: so many training images stand in for the test set.")]
Points = Annotated[int, typer.Option(help="Measurements over a run.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")]
Precision = Annotated[str, typer.Option(help="float32, tf32 or bf16 matrix products; default: tf32 on cuda.")]
Autotune = Annotated[bool, typer.Option("--autotune", help="Look longer for faster kernels.")]
Inductor = Annotated[str, typer.Option(help="Options of torch's compiler, as JSON.")]
UpdatesAtOnce = Annotated[int, typer.Option(help="Updates recorded as one CUDA graph.")]
TimeLimit = Annotated[float | None, typer.Option(help="Stop cleanly after so many seconds.")]
Commit = Annotated[str, typer.Option(help="The revision to record, where git cannot tell.")]
Report = Annotated[bool, typer.Option(help="Write tables and figures of what is in the folder.")]
Reproduction = Annotated[Path | None, typer.Option(help="A page whose generated part is to be replaced as well.")]
AsJson = Annotated[bool, typer.Option("--json", help="The outcome as one JSON object, the last line of stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
