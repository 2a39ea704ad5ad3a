//! The network: two convolutions and a linear layer, small enough for fp16 on a CPU.

use tch::nn::{self, Module, Path};

/// 8 x 8 grey pixels in, ten logits out.
pub fn network(vs: &Path<'_>) -> impl Module + use<> {
    let padded = nn::ConvConfig { padding: 1, ..Default::default() };
    nn::seq()
        .add(nn::conv2d(vs / "conv1", 1, 16, 3, padded))
        .add_fn(|xs| xs.relu().max_pool2d_default(2))
        .add(nn::conv2d(vs / "conv2", 16, 32, 3, padded))
        .add_fn(|xs| xs.relu().max_pool2d_default(2).flat_view())
        .add(nn::linear(vs / "linear", 32 * 2 * 2, 10, Default::default()))
}
