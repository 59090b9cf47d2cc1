"""The gated DenseNet's update of many runs, fast: one class behind one switch (``--step fast``).

``network.py`` knows the network; ``chunks.py`` holds what is done to a block's activations, in torch; ``launch.py``
does the same on a GPU, by the kernels in ``kernels.py``. :class:`espalier.models.DenseNet` is the definition.
"""

from espalier.models.densenet_fast.network import FLAT, FastDenseNet

__all__ = ["FLAT", "FastDenseNet"]
