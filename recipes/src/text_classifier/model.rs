//! The model: BERT, whose variables have the names of Hugging Face's models.

use super::batch::Batch;
use anyhow::{Result, bail};
use tch::nn::{self, Module, Path};
use tch::{Kind, Tensor};
use tch_amp::lean::{Activation, activation_linear};

/// The size of a model, under the names of `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize)]
pub struct Config {
    pub vocab_size: i64,
    pub hidden_size: i64,
    pub num_hidden_layers: i64,
    pub num_attention_heads: i64,
    pub intermediate_size: i64,
    /// The most tokens of a sentence.
    pub max_position_embeddings: i64,
    pub type_vocab_size: i64,
    pub layer_norm_eps: f64,
}

impl Config {
    /// The least number of bytes that training takes with this many tokens in a batch: weights, gradients, the averages
    /// of the optimizer and the best weights so far, and what the layers keep for the backward pass, in half precision.
    pub fn least_bytes(&self, tokens: f64) -> f64 {
        let numbers = [self.hidden_size, self.intermediate_size, self.num_hidden_layers];
        let [width, wide, layers] = numbers.map(|number| number as f64);
        let words = (self.vocab_size + self.max_position_embeddings) as f64;
        let weights = layers * width * (4.0 * width + 2.0 * wide) + words * width;
        20.0 * weights + 2.0 * 12.0 * layers * width * tokens
    }
}

/// What of a sentence the layer gets that classifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over the tokens.
    Mean,
    /// The first token, through BERT's pooler.
    First,
}

impl Pooling {
    /// The value of `--pooling`.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "mean" => Ok(Self::Mean),
            "first" => Ok(Self::First),
            _ => bail!("must be mean or first"),
        }
    }

    /// The value of `--pooling` that means it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::First => "first",
        }
    }
}

/// Shares of numbers that are replaced by zeros in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Of the activations.
    pub hidden: f64,
    /// Of the weights with which tokens look at each other.
    pub attention: f64,
}

/// A BERT and a layer that classifies. With the pooler it is Hugging Face's `BertForSequenceClassification`.
#[derive(Debug)]
pub struct Classifier {
    bert: Bert,
    pooler: Option<nn::Linear>,
    head: nn::Linear,
    dropout: f64,
}

impl Classifier {
    /// Makes the model with variables under `path`.
    pub fn new(
        path: &Path<'_>,
        config: Config,
        pooling: Pooling,
        labels: usize,
        dropout: Dropout,
    ) -> Self {
        let (width, body) = (config.hidden_size, path / "bert");
        let head = linear(&(path / "classifier"), width, labels as i64);
        let bert = Bert::new(&body, config, dropout);
        let pooler = match pooling {
            Pooling::First => Some(linear(&(&body / "pooler" / "dense"), width, width)),
            Pooling::Mean => None,
        };
        Self { bert, pooler, head, dropout: dropout.hidden }
    }

    /// What the layer gets that classifies: a row for each sentence.
    pub fn pooled(&self, batch: &Batch, train: bool) -> tch_amp::Result<Tensor> {
        let xs = self.bert.forward(batch, train)?;
        Ok(match &self.pooler {
            Some(pooler) => pooler.forward(&xs.select(1, 0)).tanh(),
            None => mean(&xs, &batch.mask),
        })
    }

    /// The logits of each sentence.
    pub fn logits(&self, batch: &Batch, train: bool) -> tch_amp::Result<Tensor> {
        let xs = self.pooled(batch, train)?.dropout(self.dropout, train);
        Ok(self.head.forward(&xs).to_kind(Kind::Float))
    }
}

/// The mean over the tokens that are not padding.
pub fn mean(outputs: &Tensor, mask: &Tensor) -> Tensor {
    let weights = mask.unsqueeze(-1).to_kind(Kind::Float);
    let sum = (outputs.to_kind(Kind::Float) * &weights).sum_dim_intlist(1, false, Kind::Float);
    sum / weights.sum_dim_intlist(1, false, Kind::Float)
}

/// The encoder.
#[derive(Debug)]
pub struct Bert {
    words: nn::Embedding,
    places: nn::Embedding,
    types: nn::Embedding,
    norm: nn::LayerNorm,
    layers: Vec<Layer>,
    dropout: f64,
}

impl Bert {
    /// Makes the encoder with variables under `path`.
    pub fn new(path: &Path<'_>, config: Config, dropout: Dropout) -> Self {
        let Config { vocab_size, hidden_size, max_position_embeddings, type_vocab_size, .. } =
            config;
        let path_of = path / "embeddings";
        let ws_init = small();
        let embedding = |name: &str, count| {
            let options = nn::EmbeddingConfig { ws_init, ..Default::default() };
            nn::embedding(&path_of / name, count, hidden_size, options)
        };
        let layers = path / "encoder" / "layer";
        Self {
            words: embedding("word_embeddings", vocab_size),
            places: embedding("position_embeddings", max_position_embeddings),
            types: embedding("token_type_embeddings", type_vocab_size),
            norm: norm(&(&path_of / "LayerNorm"), config),
            layers: (0..config.num_hidden_layers)
                .map(|number| Layer::new(&(&layers / number), config, dropout))
                .collect(),
            dropout: dropout.hidden,
        }
    }

    /// The last hidden state of each token.
    pub fn forward(&self, batch: &Batch, train: bool) -> tch_amp::Result<Tensor> {
        let Batch { tokens, types, mask, .. } = batch;
        let places = Tensor::arange(tokens.size()[1], (Kind::Int64, tokens.device()));
        let xs = self.words.forward(tokens) + self.types.forward(types);
        let xs = self.norm.forward(&(xs + self.places.forward(&places)));
        let xs = xs.dropout(self.dropout, train);
        // One row for all heads and all tokens that look.
        let mask = mask.unsqueeze(1).unsqueeze(1);
        self.layers.iter().try_fold(xs, |xs, layer| layer.forward(&xs, &mask, train))
    }
}

/// Attention and a feed-forward network, each with a layer norm after it.
#[derive(Debug)]
struct Layer {
    qkv: [nn::Linear; 3],
    attended: nn::Linear,
    attended_norm: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
    down_norm: nn::LayerNorm,
    heads: i64,
    dropout: Dropout,
}

impl Layer {
    fn new(path: &Path<'_>, config: Config, dropout: Dropout) -> Self {
        let Config { hidden_size: width, intermediate_size: wide, .. } = config;
        let attention = path / "attention";
        let qkv = ["query", "key", "value"];
        Self {
            qkv: qkv.map(|name| linear(&(&attention / "self" / name), width, width)),
            attended: linear(&(&attention / "output" / "dense"), width, width),
            attended_norm: norm(&(&attention / "output" / "LayerNorm"), config),
            up: linear(&(path / "intermediate" / "dense"), width, wide),
            down: linear(&(path / "output" / "dense"), wide, width),
            down_norm: norm(&(path / "output" / "LayerNorm"), config),
            heads: config.num_attention_heads,
            dropout,
        }
    }

    fn forward(&self, xs: &Tensor, mask: &Tensor, train: bool) -> tch_amp::Result<Tensor> {
        let drop = |xs: Tensor| xs.dropout(self.dropout.hidden, train);
        let xs = self.attended_norm.forward(&(xs + drop(self.attention(xs, mask, train))));
        // What `up` returns is kept, and not what GELU makes of it. The result of the norm is kept anyway: it is added to
        // what follows.
        let (hidden, down) = (self.up.forward(&xs), &self.down);
        let ys = activation_linear(&hidden, Activation::Gelu, &down.ws, down.bs.as_ref())?;
        Ok(self.down_norm.forward(&(&xs + drop(ys))))
    }

    fn attention(&self, xs: &Tensor, mask: &Tensor, train: bool) -> Tensor {
        let [rows, length, width] = <[i64; 3]>::try_from(xs.size()).unwrap_or_default();
        let [q, k, v] = self.qkv.each_ref().map(|linear| {
            let heads = [rows, length, self.heads, width / self.heads];
            linear.forward(xs).view(heads).transpose(1, 2)
        });
        let dropout = if train { self.dropout.attention } else { 0.0 };
        let (mask, is_causal, scale, gqa) = (Some(mask), false, None, false);
        let ys =
            Tensor::scaled_dot_product_attention(&q, &k, &v, mask, dropout, is_causal, scale, gqa);
        self.attended.forward(&ys.transpose(1, 2).reshape([rows, length, width]))
    }
}

fn small() -> nn::Init {
    nn::Init::Randn { mean: 0.0, stdev: 0.02 }
}

fn linear(path: &Path<'_>, from: i64, to: i64) -> nn::Linear {
    let bs_init = Some(nn::Init::Const(0.0));
    nn::linear(path, from, to, nn::LinearConfig { ws_init: small(), bs_init, bias: true })
}

fn norm(path: &Path<'_>, config: Config) -> nn::LayerNorm {
    let options = nn::LayerNormConfig { eps: config.layer_norm_eps, ..Default::default() };
    nn::layer_norm(path, vec![config.hidden_size], options)
}
