"""The papers' own grids, by name: which values the authors tried for which method.

FedGLAD, Table 17 and Table 15; RADFed, section IV-D; AdaBest, section 4.3. A grid is laid over a method's text: what
is written there already stays as it is.
"""

from collections.abc import Mapping
from dataclasses import replace

from fedloom.errors import ConfigError, nearest
from fedloom.experiment.tune.search import Search, Template
from fedloom.method import REGISTRY, filled_by
from fedloom.spec import Call

Values = tuple[float | int, ...]
Grid = Mapping[str, Mapping[str, Values]]  # method, parameter

_RATES: Values = (0.5, *map(float, range(1, 11)))
_MOMENTUM_RATES: Values = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0)
_ADAM_ON_IMAGES: Values = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 1e-2, 2e-2, 3e-2, 4e-2, 5e-2)
_ADAM_ON_TEXT: Values = (1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4)
_REDISTRIBUTIONS: Values = (10, 15, 20, 22, 25, 28, 30, 50, 80, 100, 120)
_GAMMA: Values = (0.6, 0.7, 0.8, 0.9, 0.95)
_SMALL: Values = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12)
_ADAPTIVE: Mapping[str, Values] = {
    "lr": (1e-1, 1e-2, 1e-3, 1e-4),
    "tau": (1e-2, 1e-4, 1e-8),
    "v_init": (0.0, 1e-1, 1e-2, 1e-3),
}
PLAIN_SERVER = ("fedavg", "fedprox", "scaffold")  # FedGLAD tunes their server's rate, which `fedavg(lr=...)` is here
FEW = 0.01  # AdaBest: share of the clients in a round up to which beta is searched lower
NAMES = ("adabest", "fedglad", "radfed")


def find_grid(name: str, *, text: bool, share: float) -> Grid:
    """A paper's grid, for samples that are `text` or not and a `share` of the clients in a round."""
    if name == "fedglad":
        return {
            "fedavg": {"lr": _RATES},
            "fedprox": {"mu": (1.0, 0.1, 0.01, 0.001)},
            "fedavgm": {"lr": _MOMENTUM_RATES},
            "fedadam": {"lr": _ADAM_ON_TEXT if text else _ADAM_ON_IMAGES},
        }
    if name == "radfed":
        return {
            "radfed": {"redistributions": _REDISTRIBUTIONS},
            "radfedi": {"redistributions": _REDISTRIBUTIONS, "gamma": _GAMMA},
            "importance": {"gamma": _GAMMA},
            "fedprox": {"mu": _SMALL},
            "fedadam": _ADAPTIVE,
            "fedyogi": _ADAPTIVE,
            "fedadagrad": _ADAPTIVE,
            "fedasync": {"rho": _SMALL, "alpha": (0.3, 0.6, 0.9)},
        }
    if name == "adabest":
        return {
            "adabest": {"beta": (0.2, 0.4, 0.6) if share <= FEW else (0.94, 0.96, 0.98, 1.0)},
            "feddyn": {"mu": (0.002, 0.02, 0.2)},
        }
    raise ConfigError(f"unknown grid {name!r}: {nearest(name, NAMES)}")


def lay_over(template: Template, name: str, grid: Grid) -> Template:
    """The template with the grid's values to choose from wherever nothing is written."""
    calls = list(template.calls)
    members = {call.name for call in calls}
    other_server = any("server" in filled_by(REGISTRY.find(member)) for member in members)
    if name == "fedglad" and members & set(PLAIN_SERVER) and "fedavg" not in members and not other_server:
        calls.append(Call("fedavg"))
    laid = []
    for call in calls:
        offered = {} if call.name == "fedavg" and other_server else grid.get(call.name, {})
        searches = {parameter: Search("choice", tuple(values)) for parameter, values in offered.items()}
        laid.append(replace(call, named={**searches, **call.named}))
    return replace(template, calls=tuple(laid))
