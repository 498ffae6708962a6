"""MCT's names of range rules."""

from enum import Enum


class QuantizationErrorMethod(Enum):
    """How the range of a grid is found: by which error between a tensor and its codes."""

    NOCLIPPING = 0  #: the whole range that was seen
    MSE = 1  #: mean squared error
    MAE = 2  #: mean absolute error
    KL = 4  #: Kullback-Leibler divergence
    LP = 5  #: mean |error|^p
    HMSE = 6  #: squared error weighed by the Hessian; of weights as well where nothing is tuned by gradients

    def rule(self, p: float = 2.0) -> str:
        """The range rule of this name; `p` is the exponent of LP."""
        return {"NOCLIPPING": "no_clipping", "LP": f"lp(p={p})"}.get(self.name, self.name.lower())
