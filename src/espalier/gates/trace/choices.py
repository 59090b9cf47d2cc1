"""What the watcher needs to know of a choice: that all of its options are to run while it looks."""

from __future__ import annotations

from torch import nn


class Options(nn.Module):
    """One of several operations. ``tracing``: run all of them and add what they give, which ties their channels."""

    tracing = False
