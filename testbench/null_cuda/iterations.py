"""What an iteration launches in Python: `cargo xtask null-cuda --values python iterations.py`.

`iterations.tsv` has the numbers, to which tests/devices/iterations.rs compares the crate.
"""

import ctypes
import pathlib

import torch

RUNTIME = ctypes.CDLL("libcudart.so.13")
RUNTIME.null_cuda_count.restype = ctypes.c_int64

LR = 1e-3

# Muon of PyTorch takes matrices alone; the crate steps the vectors as well.
OPTIMIZERS = {
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), LR, fused=True),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), LR, foreach=True),
    "centered RMSprop with momentum": lambda net: torch.optim.RMSprop(
        net.parameters(), LR, momentum=0.9, centered=True, foreach=True
    ),
    "Muon": lambda net: torch.optim.Muon([p for p in net.parameters() if p.dim() == 2], LR),
}


class Run:
    """Three layers, an optimizer and a scaler."""

    def __init__(self, optimizer):
        layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128)]
        layers += [torch.nn.ReLU(), torch.nn.Linear(128, 10)]
        self.net = torch.nn.Sequential(*layers).cuda()
        self.optimizer = optimizer(self.net)
        self.scaler = torch.amp.GradScaler("cuda")
        self.x = torch.randn(32, 64, device="cuda")
        self.classes = torch.randint(0, 10, (32,), device="cuda")

    def iterate(self):
        self.net.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(self.net(self.x), self.classes)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def launches(optimizer):
    run = Run(optimizer)
    for _ in range(3):
        run.iterate()
    RUNTIME.null_cuda_reset()
    run.iterate()
    return RUNTIME.null_cuda_count(-1, b"launch/")


table = pathlib.Path(__file__).with_suffix(".tsv").read_text().splitlines()
said = {name: int(number) for name, number in (line.split("\t") for line in table)}
counted = {name: launches(optimizer) for name, optimizer in OPTIMIZERS.items()}
assert counted == said, f"iterations.tsv says {said}, and Python launches {counted}"
print(f"an iteration in Python launches what iterations.tsv says: {counted}")
