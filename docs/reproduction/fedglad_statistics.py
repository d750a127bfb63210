"""Do averaged statistics of batch norms belong to a model that FedGLAD has scaled tensor by tensor?

    python docs/reproduction/fedglad_statistics.py "fedavg(lr=0.5)+fedglad" 85 FILE.csv

A small residual net on CIFAR-10, with the settings of FedGLAD's Table 1. Every fifth round the model is tested twice:
with the statistics that clients have made on average, and with statistics measured anew on training images.
"""

import csv
import sys

import torch
from torch import nn

import fedloom as fl
from fedloom.models.resnet import Basic

EVERY, MEASURED, TESTED, BATCH = 5, 4096, 4000, 512


def net() -> nn.Module:
    first = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(
        *first, Basic(16, 32, 2), Basic(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def accuracy_anew(model: nn.Module, params: torch.Tensor, federation: fl.Federation) -> float:
    """Of these parameters, with statistics of training images."""
    nn.utils.vector_to_parameters(params, model.parameters())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
    images = federation.x[torch.randperm(len(federation.x), generator=torch.Generator().manual_seed(0))[:MEASURED]]
    test = federation.test
    with torch.no_grad():
        model.train()
        for some in images.split(BATCH):
            model(federation.preparation.clean(some, torch.float32))
        model.eval()
        guesses = [model(federation.preparation.clean(x, torch.float32)) for x in test.x[:TESTED].split(BATCH)]
    return float((torch.cat(guesses).argmax(1) == test.y[:TESTED]).double().mean())


def main(method: str, rounds: int, path: str) -> None:
    data = fl.load("cifar10", partition="fednlp(alpha=0.1)", clients=100, seed=0, augment="crop+flip+cutout")
    torch.manual_seed(0)
    model, other = net(), net()
    local = fl.Local(epochs=5, batch_size=64, lr=0.1, momentum=0.9, clip_norm=1.0, last_batch="drop")
    with open(path, "w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["method", "round", "train_loss", "averaged", "anew"])

        def note(event: fl.Event) -> None:
            tested = event.round % EVERY == 0
            averaged = 100 * event.metrics["test_accuracy"] if tested else ""
            anew = 100 * accuracy_anew(other, event.params, data) if tested else ""
            lines.writerow([method, event.round, event.metrics["train_loss"], averaged, anew])
            file.flush()

        settings = {"rounds": rounds, "clients_per_round": 10, "local": local, "eval_every": EVERY, "device": "cpu"}
        fl.fit(model, data, method, callbacks=[note], **settings)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
