//! The model: a stack of transformer blocks over the tokens of a text.
//!
//! What its backward pass needs is kept once: the logits in half precision, and in front of linear layers the inputs of
//! activations and normalizations. Without [`Config::lean`] it is composed of tch's operators, with the same numbers.

use super::vocabulary::Vocabulary;
use tch::nn::{self, Module, ModuleT, Path};
use tch::{Device, Kind, Tensor};
use tch_amp::lean::{
    Activation, LinearCrossEntropyConfig, NormConfig, activation_linear, linear_cross_entropy,
    norm_linear,
};
use tch_amp::recompute::RecomputedT;

/// The size of a model, and how it is trained.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The number of different tokens.
    pub vocabulary: i64,
    pub width: i64,
    pub layers: i64,
    pub heads: i64,
    /// The largest number of tokens that it looks at.
    pub length: i64,
    /// The share of activations that are replaced by zeros in training.
    pub dropout: f64,
    /// Whether the blocks keep only their inputs for the backward pass, and compute the rest again.
    pub recompute: bool,
    /// Whether the functions of `tch_amp::lean` take the place of operators.
    pub lean: bool,
}

impl Config {
    /// The least number of bytes that training takes with this many excerpts in a batch: weights, gradients and
    /// averaged weights, and what the blocks keep for the backward pass, in half precision.
    pub fn least_bytes(&self, rows: usize) -> f64 {
        let [width, layers, length] = [self.width, self.layers, self.length].map(|n| n as f64);
        let words = 2.0 * self.vocabulary as f64;
        let weights = layers * 12.0 * width * width + width * (words + length);
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
        let Config { vocabulary, width, layers, length, .. } = config;
        let small = nn::EmbeddingConfig {
            ws_init: nn::Init::Randn { mean: 0.0, stdev: 0.02 },
            ..Default::default()
        };
        let block = |i| -> Box<dyn ModuleT> {
            let block = Block::new(&(path / "blocks" / i), config);
            if config.recompute { Box::new(RecomputedT::new(block)) } else { Box::new(block) }
        };
        Self {
            embedding: nn::embedding(path / "embedding", vocabulary, width, small),
            places: nn::embedding(path / "places", length, width, small),
            blocks: (0..layers).map(block).collect(),
            norm: nn::layer_norm(path / "norm", vec![width], Default::default()),
            head: nn::linear(path / "head", width, vocabulary, Default::default()),
            config,
        }
    }

    /// The mean loss of predicting `targets` from `tokens`, in nats per token.
    pub fn loss(
        &self,
        tokens: &Tensor,
        targets: &Tensor,
        train: bool,
    ) -> Result<Tensor, tch_amp::Error> {
        let hidden = self.norm.forward(&self.blocks(tokens, train));
        let Self { head, config, .. } = self;
        if config.lean {
            let mean = LinearCrossEntropyConfig::default();
            return linear_cross_entropy(&hidden, &head.ws, head.bs.as_ref(), targets, &mean);
        }
        let logits = head.forward(&hidden).to_kind(Kind::Float).view([-1, config.vocabulary]);
        Ok(logits.cross_entropy_for_logits(&targets.reshape([-1])))
    }

    /// Continues a text by `count` tokens, drawn at a temperature of 0.7. It ends earlier if the weights have diverged.
    pub fn write(
        &self,
        vocabulary: &Vocabulary,
        prompt: &str,
        count: usize,
        device: Device,
    ) -> String {
        let mut tokens: Vec<i64> =
            vocabulary.tokens(prompt.as_bytes()).into_iter().map(i64::from).collect();
        for _ in 0..count {
            let from = tokens.len().saturating_sub(self.config.length as usize);
            let last = Tensor::from_slice(&tokens[from..]).unsqueeze(0).to_device(device);
            let logits = self.forward_t(&last, false).to_kind(Kind::Float).select(1, -1) / 0.7;
            if logits.isfinite().all().int64_value(&[]) == 0 {
                break;
            }
            let next = logits.softmax(-1, Kind::Float).multinomial(1, false).int64_value(&[0, 0]);
            tokens.push(next);
        }
        vocabulary.text(&tokens)
    }

    /// What the last block returns.
    fn blocks(&self, tokens: &Tensor, train: bool) -> Tensor {
        let places = Tensor::arange(tokens.size()[1], (Kind::Int64, tokens.device()));
        let xs = self.embedding.forward(tokens) + self.places.forward(&places);
        let xs = xs.dropout(self.config.dropout, train);
        self.blocks.iter().fold(xs, |xs, block| block.forward_t(&xs, train))
    }
}

impl ModuleT for Gpt {
    /// The logits.
    fn forward_t(&self, tokens: &Tensor, train: bool) -> Tensor {
        self.head.forward(&self.norm.forward(&self.blocks(tokens, train)))
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
    config: Config,
}

impl Block {
    fn new(path: &Path<'_>, config: Config) -> Self {
        let width = config.width;
        let linear = |name: &str, from, to| nn::linear(path / name, from, to, Default::default());
        let norm = |name: &str| nn::layer_norm(path / name, vec![width], Default::default());
        Self {
            norm1: norm("norm1"),
            norm2: norm("norm2"),
            qkv: linear("qkv", width, 3 * width),
            out: linear("out", width, width),
            up: linear("up", width, 4 * width),
            down: linear("down", 4 * width, width),
            config,
        }
    }

    /// A linear layer of a layer norm.
    fn norm_linear(&self, xs: &Tensor, norm: &nn::LayerNorm, linear: &nn::Linear) -> Tensor {
        if !self.config.lean {
            return linear.forward(&norm.forward(xs));
        }
        // The norms have the usual `eps`.
        let config = NormConfig::layer(&[self.config.width]);
        let (ws, bs) = (norm.ws.as_ref(), norm.bs.as_ref());
        or_panic(norm_linear(xs, &config, ws, bs, &linear.ws, linear.bs.as_ref()))
    }

    /// A linear layer of GELU.
    fn gelu_linear(&self, xs: &Tensor, linear: &nn::Linear) -> Tensor {
        if !self.config.lean {
            return linear.forward(&xs.gelu("none"));
        }
        or_panic(activation_linear(xs, Activation::Gelu, &linear.ws, linear.bs.as_ref()))
    }

    fn attention(&self, xs: &Tensor) -> Tensor {
        let [rows, length, width] = <[i64; 3]>::try_from(xs.size()).unwrap_or_default();
        let heads = self.config.heads;
        let qkv = self.norm_linear(xs, &self.norm1, &self.qkv);
        let qkv = qkv.view([rows, length, 3, heads, width / heads]);
        let qkv = qkv.permute([2, 0, 3, 1, 4]);
        let (q, k, v, mask) = (qkv.get(0), qkv.get(1), qkv.get(2), None::<Tensor>);
        let ys = Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, true, None, false);
        self.out.forward(&ys.transpose(1, 2).reshape([rows, length, width]))
    }
}

impl ModuleT for Block {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        let drop = |xs: Tensor| xs.dropout(self.config.dropout, train);
        let xs = xs + drop(self.attention(xs));
        let hidden = self.norm_linear(&xs, &self.norm2, &self.up);
        &xs + drop(self.gelu_linear(&hidden, &self.down))
    }
}

/// A layer's result. `ModuleT` returns no error, and panics where tch's own layers have one.
fn or_panic(ys: Result<Tensor, tch_amp::Error>) -> Tensor {
    ys.unwrap_or_else(|error| panic!("{error}"))
}
