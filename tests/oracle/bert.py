"""The forward pass of BERT, written from its formulas, with random weights or with those in a folder.

Arguments: the folder, and `random` to write a small model with random weights there first. Standard input: the numbers
of the tokens of each sentence, a JSON list of lists. Standard output: the mean of the last hidden states of each
sentence, computed in float64 and for each sentence alone, without padding."""

import json
import math
import pathlib
import struct
import sys

import torch

SMALL = {"vocab_size": 12, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 16, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
         "hidden_act": "gelu"}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b", "c", "##d", "e", ".", ","]


def shapes(config):
    """The variables of a model, with a prefix, old names of layer norms, and a pooler."""
    width, wide = config["hidden_size"], config["intermediate_size"]
    norm = lambda name: [(name + ".gamma", [width]), (name + ".beta", [width])]
    dense = lambda name, a, b: [(name + ".weight", [b, a]), (name + ".bias", [b])]
    yield "embeddings.word_embeddings.weight", [config["vocab_size"], width]
    yield "embeddings.position_embeddings.weight", [config["max_position_embeddings"], width]
    yield "embeddings.token_type_embeddings.weight", [config["type_vocab_size"], width]
    yield from norm("embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for name in ("query", "key", "value"):
            yield from dense(layer + "attention.self." + name, width, width)
        yield from dense(layer + "attention.output.dense", width, width)
        yield from norm(layer + "attention.output.LayerNorm")
        yield from dense(layer + "intermediate.dense", width, wide)
        yield from dense(layer + "output.dense", wide, width)
        yield from norm(layer + "output.LayerNorm")
    yield from dense("pooler.dense", width, width)


def write(folder):
    torch.manual_seed(5)
    header, data = {}, b""
    for name, shape in shapes(SMALL):
        values = torch.randn(shape).flatten().tolist()
        packed = struct.pack(f"<{len(values)}f", *values)
        header["bert." + name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(SMALL))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")


def read(folder):
    file = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", file[:8])[0]
    weights = {}
    for name, entry in json.loads(file[8:8 + size]).items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        values = torch.frombuffer(bytearray(file[begin:end]), dtype=torch.float32)
        name = name.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias")
        weights[name] = values.double().reshape(entry["shape"])
    return weights


def norm(xs, weights, name, eps):
    centred = xs - xs.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weights[name + ".weight"] + weights[name + ".bias"]


def dense(xs, weights, name):
    return xs @ weights[name + ".weight"].T + weights[name + ".bias"]


def forward(tokens, weights, config, types=None):
    """The last hidden state of each token."""
    eps, heads = config["layer_norm_eps"], config["num_attention_heads"]
    size = config["hidden_size"] // heads
    embeddings = [weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    types = types or [0] * len(tokens)
    xs = torch.stack([embeddings[0][token] + embeddings[1][i] + embeddings[2][types[i]]
                      for i, token in enumerate(tokens)])
    xs = norm(xs, weights, "embeddings.LayerNorm", eps)
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        q, k, v = (dense(xs, weights, layer + "attention.self." + name) for name in ("query", "key", "value"))
        seen = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = torch.exp(q[:, part] @ k[:, part].T / math.sqrt(size))
            seen.append(scores / scores.sum(-1, keepdim=True) @ v[:, part])
        attended = dense(torch.cat(seen, -1), weights, layer + "attention.output.dense")
        xs = norm(xs + attended, weights, layer + "attention.output.LayerNorm", eps)
        up = dense(xs, weights, layer + "intermediate.dense")
        up = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
        xs = norm(xs + dense(up, weights, layer + "output.dense"), weights, layer + "output.LayerNorm", eps)
    return xs


def classify(weights, config, tokens, types):
    """The logits of BertForSequenceClassification for a sentence."""
    weights = {name.removeprefix("bert."): value for name, value in weights.items()}
    first = forward(tokens, weights, config, types)[0]
    return dense(torch.tanh(dense(first, weights, "pooler.dense")), weights, "classifier")


def main():
    folder = pathlib.Path(sys.argv[1])
    if sys.argv[2:] == ["random"]:
        write(folder)
    weights, config = read(folder), json.loads((folder / "config.json").read_text())
    sentences = json.loads(sys.stdin.read())
    print(json.dumps([forward(tokens, weights, config).mean(0).tolist() for tokens in sentences]))


if __name__ == "__main__":
    main()
