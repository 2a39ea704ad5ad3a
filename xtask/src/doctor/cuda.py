"""Says which GPUs this torch can use, and which precision suits them, or why it can use none."""

try:
    import torch
except ImportError:  # The tests need none.
    torch = None


def described(index, name, capability):
    if capability >= (8, 0):
        says = "tensor cores for fp16 and bf16: both should be faster than fp32; bf16 needs no GradScaler, fp16 does."
    elif capability >= (7, 0):
        says = "tensor cores for fp16: with a GradScaler it should be faster than fp32; none for bf16."
    else:
        says = "no tensor cores: autocast saves memory there and hardly any time."
    major, minor = capability
    return f"cuda:{index} is {name}, compute {major}.{minor}, with {says}"


def main():
    try:
        torch.cuda.init()
    except Exception as problem:
        print(f"not usable here: {str(problem).splitlines()[0]}")
        return
    for index in range(torch.cuda.device_count()):
        print(described(index, torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)))


if __name__ == "__main__":
    main()
