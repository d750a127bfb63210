"""Does a server's estimate of drift stay bounded?

AdaBest. Varno, Saghayi, Rafiee Sevyeri, Gupta, Matwin, Havaei: AdaBest: Minimizing Client Drift in Federated Learning
via Adaptive Bias Estimation. ECCV 2022 (Theorem 1, on FedDyn; norms as in Figs. 1, 4 and 6).
"""

from torch import Tensor

from fedloom.diagnose.vectors import cosine, norm


def feddyn_margin(h: Tensor, mean_update: Tensor, per_round: int, clients: int) -> float:
    """cos(h, g) + r/(2N) |g| / |h|, with h of FedDyn's server before the round and g the mean update of its r clients
    of N. |h| does not grow if and only if this is at most 0.

    nan where h is zero; 0 where g is zero and h stays as it was.
    """
    length, step = norm(h), norm(mean_update)
    if step == 0 and length > 0:
        return 0.0
    return cosine(h, mean_update) + per_round / (2 * clients) * float(step / length)


def norms(**vectors: Tensor) -> dict[str, float]:
    """The Euclidean norm of each.

    >>> import torch
    >>> norms(h=torch.zeros(2), theta=torch.tensor([3.0, 4.0]))
    {'h': 0.0, 'theta': 5.0}
    """
    return {name: float(norm(vector)) for name, vector in vectors.items()}
