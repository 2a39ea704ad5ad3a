//! fp16 parameters with f32 master weights, compared with Python's Adam for them: the structure of labml's `AdamFP16`,
//! bit by bit with PyTorch's arithmetic, and within a bound with labml's.

mod bound;
mod python;

use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::optim::{Adam, AdamW, MasterWeights, Optimizer};
use tch_amp::scaler::GradScalerConfig;

use bound::Bound;
use python::theirs;
use testkit::bits::bits;
use testkit::python::Oracle;
use testkit::rng::Rng;
use testkit::to_f64;

const STEPS: usize = 20;
/// The step at which one gradient is infinite.
const OVERFLOW: usize = 9;
const LR: f64 = 1e-3;
const BETAS: (f64, f64) = (0.9, 0.999);
/// Whole vectors, remainders, and a tensor without dimensions.
const SIZES: [&[i64]; 4] = [&[3, 32], &[35], &[7], &[]];
const KEYS: [&str; 3] = ["master_param", "exp_avg", "exp_avg_sq"];

/// The options of one training run.
#[derive(Clone, Copy, Debug)]
struct Case {
    scale: f64,
    weight_decay: f64,
    decoupled: bool,
    eps: f64,
}

/// fp16 parameters, and for each step their scaled fp16 gradients, as backward leaves them.
struct Data {
    params: Vec<Tensor>,
    grads: Vec<Vec<Tensor>>,
}

/// `size` fp16 numbers of either sign, with exponents from `low` up to, but not including, `high`.
fn halves(rng: &mut Rng, size: &[i64], low: i32, high: i32) -> Tensor {
    let mut number = || {
        let power = low + rng.below((high - low) as usize) as i32;
        let magnitude = (1.0 + rng.below(1024) as f64 / 1024.0) * 2f64.powi(power);
        if rng.one_in(2) { -magnitude } else { magnitude }
    };
    let numbers: Vec<_> = (0..size.iter().product::<i64>()).map(|_| number()).collect();
    Tensor::from_slice(&numbers).view(size).to_kind(Kind::Half)
}

impl Data {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let params = SIZES.map(|size| halves(&mut rng, size, -2, 1)).into();
        let mut step = |index: usize| {
            let grads: Vec<_> = SIZES.iter().map(|size| halves(&mut rng, size, -20, 4)).collect();
            if index == OVERFLOW {
                let _infinite = grads[1].get(30).fill_(f64::INFINITY);
            }
            grads
        };
        let grads = (0..STEPS).map(&mut step).collect();
        Self { params, grads }
    }

    /// How many nonzero gradients would become zero if they were unscaled in fp16.
    fn underflows(&self, scale: f64) -> i64 {
        let lost = |grad: &Tensor| {
            let unscaled = (grad.to_kind(Kind::Double) / scale).to_kind(Kind::Half);
            grad.ne(0.0).logical_and(&unscaled.eq(0.0)).sum(Kind::Int64).int64_value(&[])
        };
        self.grads.iter().flatten().map(lost).sum()
    }
}

/// The state of all parameters after a step.
struct Told {
    params: Vec<Tensor>,
    /// For each of [`KEYS`].
    states: [Vec<Tensor>; 3],
    scale: f64,
}

fn our_optimizer(case: Case, params: &[Tensor]) -> Optimizer {
    let Case { weight_decay, eps, decoupled, .. } = case;
    let (amsgrad, maximize, betas) = (false, false, BETAS);
    let masters = MasterWeights::Float;
    let adam = Adam { betas, eps, weight_decay, amsgrad, maximize };
    let adamw = AdamW { betas, eps, weight_decay, amsgrad, maximize };
    if decoupled {
        adamw.master_weights(masters).build(params, LR).unwrap()
    } else {
        adam.master_weights(masters).build(params, LR).unwrap()
    }
}

fn ours(case: Case, data: &Data) -> Vec<Told> {
    let leaf = |values: &Tensor| values.copy().set_requires_grad(true);
    let params: Vec<_> = data.params.iter().map(leaf).collect();
    let mut opt = our_optimizer(case, &params);
    let config = GradScalerConfig { init_scale: case.scale, ..Default::default() };
    let mut scaler = config.build(Device::Cpu).unwrap();
    drop(scaler.scale(&Tensor::from(1f32)).unwrap());
    let mut step = |(index, grads): (usize, &Vec<Tensor>)| {
        opt.zero_grad().unwrap();
        for (param, grad) in params.iter().zip(grads) {
            (param * grad).sum(Kind::Half).backward();
        }
        // Unscaled in the step, or before it.
        if index % 2 == 1 {
            scaler.unscale_(&mut opt).unwrap();
        }
        let stepped = scaler.step(&mut opt).unwrap().is_stepped().unwrap();
        assert_eq!(stepped, index != OVERFLOW, "{case:?} step {index}");
        scaler.update().unwrap();
        told(&mut opt, &params, &scaler)
    };
    data.grads.iter().enumerate().map(&mut step).collect()
}

fn told(opt: &mut Optimizer, params: &[Tensor], scaler: &GradScaler) -> Told {
    let state = opt.state_dict().unwrap().state;
    let all = |key: &str| (0..params.len()).map(|i| state[&i.to_string()][key].copy()).collect();
    let scale = scaler.get_scale().unwrap();
    Told {
        params: params.iter().map(|param| param.detach().copy()).collect(),
        states: KEYS.map(all),
        scale: Tensor::from(scale).double_value(&[]),
    }
}

/// Training runs with two scales, three kinds of weight decay, and the given values of eps.
fn runs(eps: &[f64]) -> Vec<(Case, Data)> {
    let mut runs = Vec::new();
    for scale in [1024.0, 65536.0] {
        for (weight_decay, decoupled) in [(0.0, false), (0.1, false), (0.1, true)] {
            for &eps in eps {
                let data = Data::new(runs.len() as u64);
                assert!(data.underflows(scale) > 100, "unscaling in fp16 would lose gradients");
                runs.push((Case { scale, weight_decay, decoupled, eps }, data));
            }
        }
    }
    runs
}

/// PyTorch's arithmetic, applied to the f32 copies. One kernel for all (`fused=True`) gives the same bits everywhere.
/// The operations one by one give them in whole vectors. In the remainder of a tensor, the scalar loops of libtorch's
/// fused kernel, and so those of this crate, contract a different product of the second moment.
#[test]
fn masters_moments_and_parameters_equal_those_of_pytorch_with_f32_copies() {
    let Some(oracle) = Oracle::find("adam_fp16.py") else { return };
    let runs = runs(&[1e-16, 1e-8]);
    for order in ["single", "fused"] {
        let part = |tensor: &Tensor| {
            let count = tensor.numel() as i64;
            let whole = if order == "single" { count - count % 8 } else { count };
            bits(&tensor.reshape([-1]).slice(0, 0, whole, 1))
        };
        for ((case, data), theirs) in runs.iter().zip(theirs(&oracle, &runs, order, Kind::Float)) {
            for (index, (one, other)) in ours(*case, data).iter().zip(&theirs).enumerate() {
                let context = format!("{case:?} {order} step {index}");
                assert_eq!(one.scale, other.scale, "{context}");
                for place in 0..SIZES.len() {
                    let params = [one, other].map(|told| part(&told.params[place]));
                    assert_eq!(params[0], params[1], "{context} parameter {place}");
                    for (key, name) in KEYS.iter().enumerate() {
                        let states = [one, other].map(|told| part(&told.states[key][place]));
                        assert_eq!(states[0], states[1], "{context} {name} {place}");
                    }
                }
            }
        }
    }
}

/// The largest difference between two lists of master weights over all steps, and its largest share of the bound.
fn apart(case: Case, data: &Data, unit: f64, lists: [&[Told]; 2]) -> (f64, f64) {
    let (mut largest, mut share) = (0f64, 0f64);
    for place in 0..SIZES.len() {
        let values = to_f64(&data.params[place]);
        let mut bounds: Vec<_> = values.iter().map(|&x| Bound::new(case, x, unit)).collect();
        let mut scale = case.scale;
        for (index, grads) in data.grads.iter().enumerate() {
            let masters = lists.map(|told| to_f64(&told[index].states[0][place]));
            for (number, gradient) in to_f64(&grads[place]).into_iter().enumerate() {
                if index != OVERFLOW {
                    bounds[number].step(gradient / scale);
                }
                let difference = (masters[0][number] - masters[1][number]).abs();
                let bound = bounds[number].apart();
                let context = format!("{case:?} step {index}: {:?}", bounds[number]);
                assert!(difference <= bound, "{difference:e} > {bound:e} in {context}");
                assert!(
                    bound < LR / 10.0,
                    "the bound is so wide that a missing step would pass: {context}"
                );
                largest = largest.max(difference);
                share = share.max(difference / bound);
            }
            scale = lists[0][index].scale;
        }
    }
    (largest, share)
}

/// labml moves the bias corrections into the step size. In f64 the result is PyTorch's, except for the meaning of eps;
/// in f32 it is rounded differently.
#[test]
fn the_difference_from_labmls_order_is_within_the_rounding_bound() {
    let Some(oracle) = Oracle::find("adam_fp16.py") else { return };
    let runs = runs(&[1e-16]);
    let [double, pytorch, single] =
        [("labml", Kind::Double), ("single", Kind::Double), ("labml", Kind::Float)]
            .map(|(order, wide)| theirs(&oracle, &runs, order, wide));
    for (index, (case, data)) in runs.iter().enumerate() {
        let wide = apart(*case, data, 2f64.powi(-53), [&double[index], &pytorch[index]]);
        let ours = ours(*case, data);
        let narrow = apart(*case, data, 2f64.powi(-24), [&single[index], &ours]);
        println!("{case:?}: difference and share of the bound: f64 {wide:?}, f32 {narrow:?}");
        assert!(narrow.0 > wide.0, "f32 rounds much more than f64");
    }
}
