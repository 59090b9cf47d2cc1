"""Reports: a folder of runs, read once, and the tables, figures and page made from it and nothing else."""

from espalier.report.run_reader import Run, Setting
from espalier.report.study_reader import Point, Section, Series, Study, read
from espalier.report.writer import write

__all__ = ["Point", "Run", "Section", "Series", "Setting", "Study", "read", "write"]
