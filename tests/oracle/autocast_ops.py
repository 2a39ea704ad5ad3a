"""Runs PyTorch's own autocast op lists, and every op that AutocastCPU or AutocastCUDA registers, under autocast on the
CPU.

With `--cuda` the ops run in regions on the first GPU, with the same arguments; without a GPU nothing is printed.

Prints one JSON object per line: first the torch version, the registered ops and the lists of CUDA, then one line per
case with the op, the region's dtype, all arguments and what came out: the tensors' bits, or the first line of the error.
"""

import json
import os
import re
import struct
import sys
import types
import warnings
from pathlib import Path

# Half of the ops are deprecated and say so.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
warnings.simplefilter("ignore")

import torch  # noqa: E402

import bits  # noqa: E402
from autocast_cases import cases as cases_of_cpu  # noqa: E402
from autocast_cuda_cases import cases as cases_of_cuda  # noqa: E402


DEVICE = torch.device("cuda", 0) if sys.argv[1:] == ["--cuda"] else torch.device("cpu")


def import_lists():
    """PyTorch's op lists, without the test framework (and its dependencies) that their module imports."""
    framework = types.ModuleType("torch.testing._internal.common_utils")
    framework.TEST_WITH_ROCM = False
    framework.TestCase = object
    sys.modules[framework.__name__] = framework
    from torch.testing._internal import autocast_test_lists

    return autocast_test_lists


def encode(value):
    """A value as JSON; floats and tensors go as bits, so that nothing is rounded on the way."""
    if isinstance(value, torch.Tensor):
        return bits.encode(value)
    if isinstance(value, float):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    assert value is None or isinstance(value, (bool, int, str)), f"no encoding for {type(value)}"
    return value


def outputs(value):
    """What an op returned, as a list of tensors; None stands for an undefined tensor."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [torch.tensor(item) if isinstance(item, bool) else item for item in values]


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_device, value))
    return value


def run(where, name, function, args, kwargs, dtype):
    case = {"list": where, "op": name, "dtype": str(dtype).removeprefix("torch.")}
    case["args"] = encode(args)
    case["kwargs"] = {key: encode(value) for key, value in kwargs.items()}
    try:
        args, kwargs = on_device(args), {key: on_device(value) for key, value in kwargs.items()}
        with torch.autocast(DEVICE.type, dtype):
            result = function(*args, **kwargs)
        case["outputs"] = encode(outputs(result))
    except RuntimeError as error:
        case["error"] = str(error).splitlines()[0]
    print(json.dumps(case))


def function_of(name, module):
    """The op as PyTorch's own test calls it: the module's function, or else the tensor's method."""
    if hasattr(module, name):
        return getattr(module, name)
    return getattr(torch.Tensor, name)


def module_of(list_name):
    if list_name.startswith("nn_") or list_name == "banned":
        return torch._C._nn
    if list_name == "linalg_fp16":
        return torch._C._linalg
    return torch.Tensor if list_name.startswith("methods_") else torch


def entries(entry):
    """The argument tuples and the keyword arguments of one entry of a list."""
    name, rest = entry[0], entry[1:]
    kwargs = next((item for item in rest if isinstance(item, dict)), {})
    return name, [item for item in rest if isinstance(item, tuple)], kwargs


def run_lists(prefix, lists, dtype):
    for list_name, content in vars(lists).items():
        for entry in content:
            name, tuples, kwargs = entries(entry)
            if name == "einsum":
                # Its arguments stand where the list's reader looks for a "skip me" flag: PyTorch never runs it, either.
                continue
            function = function_of(name, module_of(list_name))
            for args in tuples:
                run(f"{prefix}.{list_name}", name, function, args, kwargs, dtype)


def run_own(dtype):
    for name, args, kwargs in (*cases_of_cpu(dtype), *cases_of_cuda(dtype)):
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, packet), overload or "default")
        run("aten", name, function, args, kwargs, dtype)


def registered(key):
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return sorted({name.removeprefix("aten::") for name in names if name.startswith("aten::")})


def cuda_lists():
    """The list that each op is in on CUDA, by the macros of libtorch's header."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def body(macro):
        return re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?[^\\])\n", header, re.DOTALL).group(1)

    lists = {}
    for name in ("lower_precision_fp", "fp32", "fp32_set_opt_dtype", "promote"):
        for op, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body(name.upper())):
            lists[f"{op}.{overload}" if overload else op] = name
    # Each entry has the name in quotes and the list at its end.
    entry = r'"([\w.]+)".*?(\w+)\)\s*(?:\\|$)\s*(?:_\(|$)'
    return lists | dict(re.findall(entry, body("DIFFERENT_REDISPATCH_SIGNATURE"), re.DOTALL))


def main():
    torch.set_num_threads(1)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        return
    cuda = {"registered": registered("AutocastCUDA"), "lists": cuda_lists()}
    print(json.dumps({"torch": torch.__version__, "registered": registered("AutocastCPU"), "cuda": cuda}))
    lists = import_lists()
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(20)
        run_lists("cpu", lists.AutocastCPUTestLists("cpu"), dtype)
        run_lists("cuda", lists.AutocastTestLists("cpu"), dtype)
        run_own(dtype)


main()
