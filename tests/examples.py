"""Every method, with parameters under which it does something in a few rounds."""

import fedloom as fl

EXAMPLES = {
    "fixed": "fixed(cohorts=[[0, 1, 2], [3, 1]])",
    "radfed": "radfed(redistributions=2)",
    "radfedp": "radfedp(redistributions=2)",
    "radfedm": "radfedm(redistributions=2)",
    "radfeda": "radfeda(redistributions=2)",
    "radfedi": "radfedi(redistributions=2)",
    "2dlrd": "2dlrd(c=0.5, window=1)",
    "attack": "attack(kind=noise, fraction=0.4)",
    "clip": "clip(norm=0.01)",
    "krum": "krum(byzantine=0)",
    "noise": "clip(norm=0.1)+noise(multiplier=0.5, seed=3)",
    "fedasync": "fedasync(staleness=poly, max_staleness=3)",
    "adabest": "adabest(deploy=latest_of_all)",
    "feddyn": "feddyn(deploy=running_mean)",
    "importance": "importance(start=full)",
}
STACK = "radfed(redistributions=3)+adabest+dgt(alpha=0.5)+fedglad+2dlrd(c=0.5, window=1)"
METHODS = [*(EXAMPLES.get(entry.name, entry.name) for entry in fl.list_methods()), STACK]
