"""What differential privacy costs: epsilon by Rényi divergences, counted by dp-accounting (the extra `privacy`)."""

import logging
import math
from functools import cache
from typing import Any

from fedloom.errors import ConfigError


def accounting() -> Any:
    """The package dp_accounting, or one sentence on what to install."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise ConfigError("noise needs dp-accounting to count epsilon: pip install 'fedloom[privacy]'") from None
    return dp_accounting


def epsilon(multiplier: float, delta: float, times: int, rate: float | None = None) -> float:
    """Epsilon of `times` Gaussian mechanisms, of Poisson samples of this rate; None: of who is known to take part.

    >>> round(epsilon(multiplier=1.12, delta=1e-5, times=14062, rate=256 / 60000), 2)
    2.52
    """
    if times == 0:
        return 0.0
    if multiplier == 0:
        return math.inf
    orders, once = _divergences(multiplier, rate)
    found, _ = accounting().rdp.compute_epsilon(orders, times * once, delta)
    return float(found)


@cache
def _divergences(multiplier: float, rate: float | None) -> tuple[Any, Any]:
    """Orders and the divergence of one mechanism at each: the slow part, which adds up over rounds."""
    dp = accounting()
    event = dp.GaussianDpEvent(multiplier)
    accountant = dp.rdp.RdpAccountant()
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of single orders that it leaves out, which can only make epsilon larger
    try:
        accountant.compose(event if rate is None else dp.PoissonSampledDpEvent(rate, event))
    finally:
        log.setLevel(level)
    return accountant.orders, accountant.rdp
