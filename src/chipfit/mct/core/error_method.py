"""MCT's names of range rules."""

from enum import Enum


class QuantizationErrorMethod(Enum):
    """The error between a tensor and its quantized values that a range search minimizes."""

    NOCLIPPING = 0  #: the whole observed range
    MSE = 1  #: mean squared error
    MAE = 2  #: mean absolute error
    KL = 4  #: Kullback-Leibler divergence
    LP = 5  #: mean |error|^p
    HMSE = 6  #: squared error weighted by the Hessian; also for weights without gradient tuning

    def rule(self, p: float = 2.0) -> str:
        """Return the name of the range rule; `p` is the exponent of LP."""
        return {"NOCLIPPING": "no_clipping", "LP": f"lp(p={p})"}.get(self.name, self.name.lower())
