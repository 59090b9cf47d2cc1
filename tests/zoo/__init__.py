"""The proving ground for gates: architectures from configuration only, random graphs, and an independent counter."""
