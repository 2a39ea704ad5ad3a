//! The model: a stack of transformer blocks over bytes.

use tch::nn::{self, Module, ModuleT, Path};
use tch::{Device, Kind, Tensor};
use tch_amp::recompute::RecomputedT;

/// The number of different bytes.
pub const VOCABULARY: i64 = 256;

/// The size of a model, and how it is trained.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub width: i64,
    pub layers: i64,
    pub heads: i64,
    /// The largest number of bytes that it looks at.
    pub length: i64,
    /// The share of activations that are replaced by zeros in training.
    pub dropout: f64,
    /// Whether the blocks keep only their inputs for the backward pass, and compute the rest again.
    pub recompute: bool,
}

impl Config {
    /// The least number of bytes that training takes with this many excerpts in a batch: weights, gradients and
    /// averaged weights, and what the blocks keep for the backward pass, in half precision.
    pub fn least_bytes(&self, rows: usize) -> f64 {
        let [width, layers, length] = [self.width, self.layers, self.length].map(|n| n as f64);
        let weights = layers * 12.0 * width * width + width * (2.0 * VOCABULARY as f64 + length);
        let kept = if self.recompute { 1.0 } else { 12.0 };
        12.0 * weights + 2.0 * kept * layers * width * length * rows as f64
    }
}

/// A decoder-only transformer.
#[derive(Debug)]
pub struct Gpt {
    embedding: nn::Embedding,
    places: nn::Embedding,
    blocks: Vec<Box<dyn ModuleT>>,
    norm: nn::LayerNorm,
    head: nn::Linear,
    config: Config,
}

impl Gpt {
    /// Makes the model with variables under `path`.
    pub fn new(path: &Path<'_>, config: Config) -> Self {
        let Config { width, layers, length, .. } = config;
        let small = nn::EmbeddingConfig {
            ws_init: nn::Init::Randn { mean: 0.0, stdev: 0.02 },
            ..Default::default()
        };
        let block = |i| -> Box<dyn ModuleT> {
            let block = Block::new(&(path / "blocks" / i), config);
            if config.recompute { Box::new(RecomputedT::new(block)) } else { Box::new(block) }
        };
        Self {
            embedding: nn::embedding(path / "embedding", VOCABULARY, width, small),
            places: nn::embedding(path / "places", length, width, small),
            blocks: (0..layers).map(block).collect(),
            norm: nn::layer_norm(path / "norm", vec![width], Default::default()),
            head: nn::linear(path / "head", width, VOCABULARY, Default::default()),
            config,
        }
    }

    /// The mean loss of predicting `targets` from `tokens`, in nats per byte.
    pub fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Tensor {
        let logits = self.forward_t(tokens, train).to_kind(Kind::Float);
        logits.view([-1, VOCABULARY]).cross_entropy_for_logits(&targets.reshape([-1]))
    }

    /// Continues a text by `count` bytes, drawn at a temperature of 0.7. It ends earlier if the weights have diverged.
    pub fn write(&self, prompt: &str, count: usize, device: Device) -> String {
        let mut bytes: Vec<i64> = prompt.bytes().map(i64::from).collect();
        for _ in 0..count {
            let from = bytes.len().saturating_sub(self.config.length as usize);
            let tokens = Tensor::from_slice(&bytes[from..]).unsqueeze(0).to_device(device);
            let logits = self.forward_t(&tokens, false).to_kind(Kind::Float).select(1, -1) / 0.7;
            if logits.isfinite().all().int64_value(&[]) == 0 {
                break;
            }
            let byte = logits.softmax(-1, Kind::Float).multinomial(1, false).int64_value(&[0, 0]);
            bytes.push(byte);
        }
        let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte as u8).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl ModuleT for Gpt {
    fn forward_t(&self, tokens: &Tensor, train: bool) -> Tensor {
        let places = Tensor::arange(tokens.size()[1], (Kind::Int64, tokens.device()));
        let xs = self.embedding.forward(tokens) + self.places.forward(&places);
        let xs = xs.dropout(self.config.dropout, train);
        let xs = self.blocks.iter().fold(xs, |xs, block| block.forward_t(&xs, train));
        self.head.forward(&self.norm.forward(&xs))
    }
}

/// Attention and a feed-forward network, each after a layer norm.
#[derive(Debug)]
struct Block {
    norm1: nn::LayerNorm,
    norm2: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
    up: nn::Linear,
    down: nn::Linear,
    heads: i64,
    dropout: f64,
}

impl Block {
    fn new(path: &Path<'_>, config: Config) -> Self {
        let Config { width, heads, dropout, .. } = config;
        let linear = |name: &str, from, to| nn::linear(path / name, from, to, Default::default());
        let norm = |name: &str| nn::layer_norm(path / name, vec![width], Default::default());
        Self {
            norm1: norm("norm1"),
            norm2: norm("norm2"),
            qkv: linear("qkv", width, 3 * width),
            out: linear("out", width, width),
            up: linear("up", width, 4 * width),
            down: linear("down", 4 * width, width),
            heads,
            dropout,
        }
    }

    fn attention(&self, xs: &Tensor) -> Tensor {
        let [rows, length, width] = <[i64; 3]>::try_from(xs.size()).unwrap_or_default();
        let qkv = self.qkv.forward(xs).view([rows, length, 3, self.heads, width / self.heads]);
        let qkv = qkv.permute([2, 0, 3, 1, 4]);
        let (q, k, v, mask) = (qkv.get(0), qkv.get(1), qkv.get(2), None::<Tensor>);
        let ys = Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, true, None, false);
        self.out.forward(&ys.transpose(1, 2).reshape([rows, length, width]))
    }
}

impl ModuleT for Block {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        let drop = |xs: Tensor| xs.dropout(self.dropout, train);
        let xs = xs + drop(self.attention(&self.norm1.forward(xs)));
        &xs + drop(self.down.forward(&self.up.forward(&self.norm2.forward(&xs)).gelu("none")))
    }
}
