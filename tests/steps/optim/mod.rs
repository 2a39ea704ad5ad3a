//! The rules of the fused optimizers, one test each. Random programs are compared with PyTorch in `programs/`.

mod build;
mod clip;
mod delayed;
mod f32_gradients;
mod groups;
mod labml;
mod low_bit;
mod masters;
mod muon;
mod norms;
mod numbers;
mod programs;
mod refused;
mod replaced;
mod scaled;
mod skipped;
mod stale;
mod state;

use tch::Tensor;
use tch::kind::Element;
use tch_amp::Result;
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, IntoParameters, Lion, MasterWeights, Muon, NAdam,
    Optimizer, OptimizerState, RmsProp, Sgd,
};
use testkit::to_f64;

/// One of each algorithm, with all the options that affect its arithmetic.
fn algorithms() -> Vec<Algorithm> {
    let adam = Adam { weight_decay: 0.1, ..Default::default() };
    let sgd = Sgd { momentum: 0.9, weight_decay: 0.1, ..Default::default() };
    let rmsprop = RmsProp { alpha: 0.9, weight_decay: 0.1, ..Default::default() };
    let nadam = NAdam { weight_decay: 0.1, ..Default::default() };
    let adafactor = Adafactor { weight_decay: 0.1, ..Default::default() };
    let lion = Lion { weight_decay: 0.1, ..Default::default() };
    vec![
        AdamW::default().into(),
        AdamW { amsgrad: true, maximize: true, betas: (0.4, 0.9), ..Default::default() }.into(),
        adam.into(),
        Adam { amsgrad: true, ..adam }.into(),
        Sgd { weight_decay: 0.1, maximize: true, ..Default::default() }.into(),
        sgd.into(),
        Sgd { dampening: 0.3, ..sgd }.into(),
        Sgd { nesterov: true, ..sgd }.into(),
        Adagrad { initial_accumulator_value: 0.5, lr_decay: 0.1, ..Default::default() }.into(),
        rmsprop.into(),
        RmsProp { momentum: 0.9, maximize: true, ..rmsprop }.into(),
        RmsProp { centered: true, ..rmsprop }.into(),
        RmsProp { centered: true, momentum: 0.5, weight_decay: 0.0, ..rmsprop }.into(),
        lion.into(),
        Lion { betas: (0.5, 0.75), maximize: true, ..lion }.into(),
        nadam.into(),
        NAdam { decoupled_weight_decay: true, maximize: true, betas: (0.4, 0.9), ..nadam }.into(),
        adafactor.into(),
        Adafactor { maximize: true, eps: (Some(1.0), 0.5), d: 2.0, weight_decay: 0.0, ..adafactor }
            .into(),
        // Steps vectors by AdamW.
        Muon { adamw_lr_factor: 0.5, ..Default::default() }.into(),
    ]
}

fn build(algorithm: Algorithm, parameters: impl IntoParameters, lr: f64) -> Optimizer {
    algorithm.build(parameters, lr).unwrap()
}

/// An optimizer of one parameter.
fn one(w: &Tensor, algorithm: impl Into<Algorithm>, masters: MasterWeights, lr: f64) -> Optimizer {
    algorithm.into().master_weights(masters).build(&[w.shallow_clone()], lr).unwrap()
}

/// Replaces or removes a tensor of a state.
fn replace(state: &mut OptimizerState, name: &str, key: &str, new: impl Into<Option<Tensor>>) {
    let tensors = state.state.get_mut(name).unwrap();
    let _old = match new.into() {
        Some(tensor) => tensors.insert(key.to_owned(), tensor),
        None => tensors.remove(key),
    };
}

/// Loads the optimizer's own state, in which a tensor of the first unnamed parameter is replaced or removed.
fn load_with(opt: &mut Optimizer, key: &str, new: impl Into<Option<Tensor>>) -> Result<()> {
    let mut state = opt.state_dict()?;
    replace(&mut state, "0", key, new);
    opt.load_state_dict(&state)
}

/// Steps with these gradients of `w`.
fn step_with(opt: &mut Optimizer, w: &Tensor, gradients: &[f64]) {
    set_grad(w, gradients);
    opt.step().unwrap();
}

/// Replaces the gradient of `w` with `values`.
fn set_grad<T: Element>(w: &Tensor, values: &[T]) {
    w.grad().defined().then(|| w.grad().detach_().zero_());
    let factors = Tensor::from_slice(values).to_kind(w.kind()).to_device(w.device());
    let mut old = w.grad();
    if old.defined() {
        tch::no_grad(|| old.copy_(&factors.view_as(w)));
    } else {
        (w * factors.view_as(w)).sum(w.kind()).backward();
    }
}

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;
