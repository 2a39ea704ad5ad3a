"""Says in a line of JSON what machine this is. Fails if torch can use no GPU, or multiplies matrices wrongly. With
TCH_AMP_WITHOUT_GPU=1 the CPU, or what takes the place of a GPU, is enough.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time

import torch

COPIED = 1 << 28  # f32 numbers


def driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device, numbers):
    """GB/s read and written."""
    source = torch.ones(numbers, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return round(8 * numbers / best / 1e9, 1)


def main():
    without_gpu = os.environ.get("TCH_AMP_WITHOUT_GPU") == "1"
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if has_cuda else "cpu")
    product = torch.full((64, 64), 2.0, device=device) @ torch.full((64, 64), 3.0, device=device)
    is_right = bool((product.cpu() == 384.0).all())
    says = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gpu": None,
        "tools": [name for name in ("compute-sanitizer", "nvidia-smi", "taskset") if shutil.which(name)],
        "copy_gb_per_s": copy_bandwidth(device, COPIED if has_cuda and not without_gpu else COPIED >> 6),
    }
    if has_cuda and not without_gpu:
        says["gpu"] = torch.cuda.get_device_name(0)
        says["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        says["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        says["driver"] = driver()
    print(json.dumps(says), flush=True)
    if not is_right:
        sys.exit("a product of matrices is wrong")
    if not has_cuda and not without_gpu:
        sys.exit("torch can use no GPU here")


main()
