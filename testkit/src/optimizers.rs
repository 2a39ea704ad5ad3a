//! Each algorithm, each way to keep what half precision cannot hold, and the bits of all that an optimizer has.

use tch::{Device, Kind};
use tch_amp::GradScaler;
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, Lion, MasterWeights, Muon, NAdam, Optimizer,
    OptimizerState, RmsProp, Sgd,
};
use tch_amp::scaler::GradScalerConfig;

use crate::bits::bits;

/// Every algorithm, with options that use all of its code.
pub fn algorithms() -> Vec<Algorithm> {
    vec![
        AdamW::default().into(),
        AdamW { amsgrad: true, ..Default::default() }.into(),
        Adam { weight_decay: 0.1, ..Default::default() }.into(),
        Sgd::default().into(),
        Sgd { momentum: 0.9, nesterov: true, weight_decay: 0.01, ..Default::default() }.into(),
        Sgd { momentum: 0.9, dampening: 0.5, ..Default::default() }.into(),
        Adagrad { lr_decay: 0.01, ..Default::default() }.into(),
        rmsprop().into(),
        Lion { weight_decay: 0.1, ..Default::default() }.into(),
        Muon::default().into(),
        NAdam { weight_decay: 0.1, ..Default::default() }.into(),
        Adafactor::default().into(),
    ]
}

/// RMSprop with everything that makes it take more operations.
pub fn rmsprop() -> RmsProp {
    RmsProp {
        momentum: 0.9,
        centered: true,
        weight_decay: 0.1,
        maximize: true,
        ..Default::default()
    }
}

/// The name of an algorithm.
pub fn name(algorithm: &Algorithm) -> String {
    let told = format!("{algorithm:?}");
    told.split('(').next().unwrap_or_default().to_owned()
}

/// Each way to step parameters in half precision.
pub const MASTERS: [MasterWeights; 4] = [
    MasterWeights::None,
    MasterWeights::Float,
    MasterWeights::Remainder,
    MasterWeights::StochasticRounding { seed: 3 },
];

/// The dtypes of parameters, with how an optimizer keeps what they cannot hold.
pub const WEIGHTS: [(Kind, MasterWeights); 6] = [
    (Kind::Float, MasterWeights::None),
    (Kind::BFloat16, MasterWeights::None),
    (Kind::BFloat16, MasterWeights::Float),
    (Kind::BFloat16, MasterWeights::Remainder),
    (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 3 }),
    (Kind::Half, MasterWeights::Float),
];

/// The bits of a state, each with its name.
pub fn state_bits(state: &OptimizerState) -> Vec<(String, Vec<u8>)> {
    let tensors = state.state.iter().flat_map(|(name, tensors)| {
        tensors.iter().map(move |(key, tensor)| (format!("{key} of {name}"), bits(tensor)))
    });
    tensors.collect()
}

/// The bits of all that a step can change: parameters, states and master weights.
pub fn all_bits(opt: &mut Optimizer) -> Vec<(String, Vec<u8>)> {
    let state = state_bits(&opt.state_dict().expect("every state can be saved"));
    let parameters = opt.trainable_variables();
    let parameters = parameters.iter().map(|w| ("a parameter".to_owned(), bits(w)));
    parameters.chain(state).collect()
}

/// A scaler with this scale.
pub fn scaler(device: Device, init_scale: f64) -> GradScaler {
    let config = GradScalerConfig { init_scale, ..Default::default() };
    config.build(device).expect("the device is there")
}
