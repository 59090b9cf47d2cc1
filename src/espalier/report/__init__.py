"""Reports: tables, figures and pages made from run files and nothing else."""
