"""Studies: grids of runs trained as batches, continued after an interruption, and recorded one file for each run."""
