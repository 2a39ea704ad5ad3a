//! The arithmetic, compared with plain loops in f64.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, Lion, MasterWeights, Muon, NAdam, RmsProp, Sgd,
};

use crate::optim::{algorithms, build, one, set_grad, step_with, to_f64};
use testkit::bits::bits;
use testkit::for_each_device;
use testkit::simulation::rounds_as_the_cpu;
use testkit::tensors::leaf;

/// One element and its state, as in the papers and in PyTorch's documentation.
#[derive(Clone, Debug, Default)]
struct Element {
    value: f64,
    step: f64,
    first: Option<f64>,
    second: f64,
    max: f64,
    mean: f64,
}

impl Element {
    fn step(&mut self, algorithm: &Algorithm, lr: f64, gradient: f64) {
        if let Algorithm::Muon(Muon { adamw, adamw_lr_factor, .. }) = *algorithm {
            return self.step(&adamw.into(), lr * adamw_lr_factor, gradient);
        }
        self.step += 1.0;
        match *algorithm {
            Algorithm::AdamW(AdamW { betas, eps, weight_decay, amsgrad, maximize, .. }) => {
                self.value *= 1.0 - lr * weight_decay;
                let gradient = if maximize { -gradient } else { gradient };
                self.adam(gradient, lr, betas, eps, amsgrad);
            }
            Algorithm::Adam(Adam { betas, eps, weight_decay, amsgrad, maximize, .. }) => {
                let gradient = if maximize { -gradient } else { gradient };
                self.adam(gradient + weight_decay * self.value, lr, betas, eps, amsgrad);
            }
            Algorithm::Sgd(Sgd {
                momentum, dampening, weight_decay, nesterov, maximize, ..
            }) => {
                let gradient = if maximize { -gradient } else { gradient };
                let gradient = gradient + weight_decay * self.value;
                let buffer =
                    self.first.map_or(gradient, |b| momentum * b + (1.0 - dampening) * gradient);
                self.first = Some(buffer);
                let along = if nesterov { gradient + momentum * buffer } else { buffer };
                self.value -= lr * if momentum == 0.0 { gradient } else { along };
            }
            Algorithm::Adagrad(Adagrad {
                lr_decay,
                weight_decay,
                initial_accumulator_value,
                eps,
                maximize,
                ..
            }) => {
                let gradient = if maximize { -gradient } else { gradient };
                let gradient = gradient + weight_decay * self.value;
                let sum = self.first.unwrap_or(initial_accumulator_value) + gradient * gradient;
                self.first = Some(sum);
                let lr = lr / (1.0 + (self.step - 1.0) * lr_decay);
                self.value -= lr * gradient / (sum.sqrt() + eps);
            }
            Algorithm::RmsProp(config) => {
                let RmsProp { alpha, eps, weight_decay, momentum, centered, maximize, .. } = config;
                let gradient = if maximize { -gradient } else { gradient };
                let gradient = gradient + weight_decay * self.value;
                self.second = alpha * self.second + (1.0 - alpha) * gradient * gradient;
                self.mean = alpha * self.mean + (1.0 - alpha) * gradient;
                let mean = if centered { self.mean } else { 0.0 };
                let along = gradient / ((self.second - mean * mean).sqrt() + eps);
                let buffer = momentum * self.first.unwrap_or(0.0) + along;
                self.first = Some(buffer);
                self.value -= lr * buffer;
            }
            Algorithm::Lion(Lion { betas, weight_decay, maximize, .. }) => {
                let gradient = if maximize { -gradient } else { gradient };
                let average = self.first.unwrap_or(0.0);
                let along = betas.0 * average + (1.0 - betas.0) * gradient;
                let sign = if along == 0.0 { 0.0 } else { along.signum() };
                self.value -= lr * (sign + weight_decay * self.value);
                self.first = Some(betas.1 * average + (1.0 - betas.1) * gradient);
            }
            Algorithm::NAdam(config) => {
                let NAdam { betas, eps, weight_decay, momentum_decay, maximize, .. } = config;
                let gradient = if maximize { -gradient } else { gradient };
                let gradient = if config.decoupled_weight_decay {
                    self.value *= 1.0 - lr * weight_decay;
                    gradient
                } else {
                    gradient + weight_decay * self.value
                };
                let first = betas.0 * self.first.unwrap_or(0.0) + (1.0 - betas.0) * gradient;
                self.first = Some(first);
                self.second = betas.1 * self.second + (1.0 - betas.1) * gradient * gradient;
                let momentum = |t: f64| betas.0 * (1.0 - 0.5 * 0.96f64.powf(t * momentum_decay));
                // An f32, as in PyTorch.
                let steps = 1..=self.step as i32;
                let product: f32 = steps.map(|t| momentum(t.into()) as f32).product();
                let product = f64::from(product);
                let (now, next) = (momentum(self.step), momentum(self.step + 1.0));
                let along = (1.0 - now) / (1.0 - product) * gradient
                    + next / (1.0 - product * next) * first;
                let correction = 1.0 - betas.1.powf(self.step);
                self.value -= lr * along / ((self.second / correction).sqrt() + eps);
            }
            ref other => panic!("the tests know no {other:?}"),
        }
    }

    fn adam(&mut self, gradient: f64, lr: f64, betas: (f64, f64), eps: f64, amsgrad: bool) {
        let first = betas.0 * self.first.unwrap_or(0.0) + (1.0 - betas.0) * gradient;
        self.first = Some(first);
        self.second = betas.1 * self.second + (1.0 - betas.1) * gradient * gradient;
        self.max = self.max.max(self.second);
        let square = if amsgrad { self.max } else { self.second };
        let correction1 = 1.0 - betas.0.powf(self.step);
        let correction2 = 1.0 - betas.1.powf(self.step);
        self.value -= lr / correction1 * first / ((square / correction2).sqrt() + eps);
    }
}

/// Steps all elements of a vector.
fn step_vector(
    elements: &mut [Element],
    algorithm: &Algorithm,
    lr: f64,
    gradients: &[f64],
    eps: f64,
) {
    let Algorithm::Adafactor(config) = algorithm else {
        let both = elements.iter_mut().zip(gradients);
        return both.for_each(|(element, &gradient)| element.step(algorithm, lr, gradient));
    };
    let values: Vec<_> = elements.iter().map(|element| element.value).collect();
    let step = elements[0].step + 1.0;
    let weight = step.powf(config.beta2_decay);
    let squares: Vec<_> = elements
        .iter_mut()
        .zip(gradients)
        .map(|(element, gradient)| {
            element.step = step;
            element.second += weight * (gradient * gradient - element.second);
            element.second
        })
        .collect();
    let moved = adafactor(config, lr, eps, step, &values, &squares, gradients);
    elements.iter_mut().zip(moved).for_each(|(element, value)| element.value = value);
}

/// The weights after a step, from the estimates of the squares of their gradients.
fn adafactor(
    config: &Adafactor,
    lr: f64,
    eps: f64,
    step: f64,
    values: &[f64],
    squares: &[f64],
    gradients: &[f64],
) -> Vec<f64> {
    let rms = |numbers: &[f64]| {
        (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt()
    };
    let sign = if config.maximize { -1.0 } else { 1.0 };
    let eps = config.eps.0.unwrap_or(eps);
    let updates: Vec<_> = squares
        .iter()
        .zip(gradients)
        .map(|(square, gradient)| sign * gradient / square.max(eps * eps).sqrt())
        .collect();
    let rate = rms(values).max(config.eps.1) * lr.min(step.powf(-0.5))
        / (rms(&updates) / config.d).max(1.0);
    let decayed = 1.0 - lr * config.weight_decay;
    values.iter().zip(updates).map(|(value, update)| value * decayed - rate * update).collect()
}

/// A matrix, and two in one parameter, whose layout may be another one.
#[rstest]
fn adafactor_computes_what_plain_loops_do(#[values(Kind::Double, Kind::Float)] kind: Kind) {
    const LR: f64 = 0.1;
    let (eps, tolerance) = match kind {
        Kind::Double => (f64::EPSILON, 1e-14),
        _ => (f64::from(f32::EPSILON), 3e-6),
    };
    let plain = Adafactor::default();
    for config in [
        plain,
        Adafactor { maximize: true, eps: (Some(1.0), 0.5), d: 2.0, weight_decay: 0.1, ..plain },
    ] {
        for_each_device(|device| {
            for (matrices, rows, columns, is_turned) in
                [(1, 6, 5, false), (1, 6, 5, true), (2, 3, 7, false), (1, 1, 9, false)]
            {
                let count = matrices * rows * columns;
                let mut values: Vec<f64> =
                    (0..count).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
                let size = [matrices as i64, rows as i64, columns as i64];
                let size = if matrices == 1 { &size[1..] } else { &size[..] };
                let start = Tensor::from_slice(&values).view(size).to_kind(kind).to_device(device);
                let start = if is_turned { start.tr().contiguous().tr() } else { start };
                let w = start.set_requires_grad(true);
                let mut opt = build(config.into(), vec![w.shallow_clone()], LR);
                let (mut of_rows, mut of_columns) =
                    (vec![0.0; count / columns], vec![0.0; count / rows]);
                for step in 0..4 {
                    let gradients = gradients(count, step);
                    step_with(&mut opt, &w, &gradients);
                    let weight = f64::from(step as i32 + 1).powf(config.beta2_decay);
                    let square = |m: usize, r: usize, c: usize| {
                        gradients[(m * rows + r) * columns + c].powi(2)
                    };
                    for (index, kept) in of_rows.iter_mut().enumerate() {
                        let (m, r) = (index / rows, index % rows);
                        let mean =
                            (0..columns).map(|c| square(m, r, c)).sum::<f64>() / columns as f64;
                        *kept += weight * (mean - *kept);
                    }
                    for (index, kept) in of_columns.iter_mut().enumerate() {
                        let (m, c) = (index / columns, index % columns);
                        let mean = (0..rows).map(|r| square(m, r, c)).sum::<f64>() / rows as f64;
                        *kept += weight * (mean - *kept);
                    }
                    let squares: Vec<_> = (0..count)
                        .map(|i| {
                            let (m, r, c) = (i / columns / rows, i / columns % rows, i % columns);
                            let mean =
                                of_rows[m * rows..][..rows].iter().sum::<f64>() / rows as f64;
                            of_rows[m * rows + r] * of_columns[m * columns + c]
                                / mean.max(config.eps.0.unwrap_or(eps))
                        })
                        .collect();
                    values = adafactor(
                        &config,
                        LR,
                        eps,
                        f64::from(step as i32 + 1),
                        &values,
                        &squares,
                        &gradients,
                    );
                }
                for (got, want) in to_f64(&w).into_iter().zip(&values) {
                    assert!((got - want).abs() <= tolerance, "{config:?} {size:?}: {got} {want}");
                }
            }
        });
    }
}

/// PyTorch takes the epsilon of the first parameter for all, and fails for one without elements.
#[test]
fn adafactor_steps_each_parameter_as_if_it_were_alone() {
    let moved = |kinds: &[Kind]| {
        let leaves = kinds.iter().map(|&kind| leaf(&[1.0; 2], kind, Device::Cpu));
        let empty = Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let all: Vec<_> = leaves.chain([empty]).collect();
        let mut opt = build(Adafactor::default().into(), all.as_slice(), 0.1);
        for (w, _) in all.iter().zip(kinds) {
            set_grad(w, &[1e-12; 2]);
        }
        step_with(&mut opt, &all[kinds.len()], &[]);
        to_f64(&all[kinds.len() - 1])
    };
    assert_eq!(moved(&[Kind::Double, Kind::Float]), moved(&[Kind::Float]));
}

/// None of them cancels the weight decay: a sum that is mostly rounding error would make Adam's step one as well.
fn gradients(count: usize, step: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7 + step * 13) % 33) as f64 / 4.0 - 4.13).collect()
}

/// Every size around the width of a vector, and one large enough for several threads. A step may be off by the rounding
/// of a few operations; over a few steps with a learning rate of 0.1, the errors add up to less than `tolerance`.
#[rstest]
#[case(Kind::Double, 1e-14)]
#[case(Kind::Float, 3e-6)]
#[case(Kind::BFloat16, 0.15)]
#[case(Kind::Half, 0.03)]
fn every_algorithm_computes_what_a_plain_loop_does(#[case] kind: Kind, #[case] tolerance: f64) {
    const LR: f64 = 0.1;
    let eps = if kind == Kind::Double { f64::EPSILON } else { f32::EPSILON.into() };
    for_each_device(|device| {
        for algorithm in algorithms() {
            for count in [1, 7, 8, 15, 16, 33, 140_000] {
                let start: Vec<f64> = (0..count).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
                let w = leaf(&start, kind, device);
                let mut opt = build(algorithm, vec![w.shallow_clone()], LR);
                let mut want: Vec<_> =
                    start.iter().map(|&value| Element { value, ..Element::default() }).collect();
                for step in 0..4 {
                    let gradients = gradients(count, step);
                    step_with(&mut opt, &w, &gradients);
                    step_vector(&mut want, &algorithm, LR, &gradients, eps);
                }
                for (got, want) in to_f64(&w).into_iter().zip(&want) {
                    let off = (got - want.value).abs();
                    assert!(off <= tolerance, "{algorithm:?} {count}: {got} {want:?}");
                }
            }
        }
    });
}

/// Powers of two and their sums, which no operation rounds: each step is the paper's to the last bit. A gradient of zero
/// and the average that it decays to nothing do not move a weight, except by weight decay.
#[test]
fn lion_computes_exactly_what_its_paper_says() {
    let config = Lion { betas: (0.5, 0.75), weight_decay: 0.5, ..Default::default() };
    for_each_device(|device| {
        for kind in [Kind::Double, Kind::Float] {
            for algorithm in
                [config, Lion { maximize: true, ..config }, Lion { weight_decay: 0.0, ..config }]
            {
                let algorithm = algorithm.into();
                let start: Vec<f64> = (0..37).map(|i| f64::from(i - 18) / 4.0).collect();
                let w = leaf(&start, kind, device);
                let mut opt = build(algorithm, vec![w.shallow_clone()], 0.25);
                let mut want: Vec<_> =
                    start.iter().map(|&value| Element { value, ..Element::default() }).collect();
                for step in 0..4i32 {
                    // The second gradient cancels the average of some elements.
                    let gradient = |i: i32| f64::from((i * 5 + step * 3) % 9 - 4) / 4.0;
                    let gradients: Vec<_> = (0..37).map(gradient).collect();
                    step_with(&mut opt, &w, &gradients);
                    for (element, gradient) in want.iter_mut().zip(gradients) {
                        element.step(&algorithm, 0.25, gradient);
                    }
                }
                let averages = to_f64(&opt.state_dict().unwrap().state["0"]["exp_avg"]);
                let wanted: Vec<_> = want.iter().map(|element| element.value).collect();
                assert_eq!(to_f64(&w), wanted, "{algorithm:?}");
                let wanted: Vec<_> = want.iter().filter_map(|element| element.first).collect();
                assert_eq!(averages, wanted, "{algorithm:?}");
            }
        }
    });
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let run = |threads| {
        tch::set_num_threads(threads);
        let values: Vec<f64> = (0..200_003).map(|i| (i % 91) as f64 / 7.0).collect();
        let w = leaf(&values, Kind::Float, Device::Cpu);
        let small = leaf(&[0.3; 5], Kind::Float, Device::Cpu);
        let mut opt = build(AdamW::default().into(), vec![w.copy_leaf(), small.copy_leaf()], 0.1);
        let all = opt.trainable_variables();
        for step in 0..3 {
            for w in &all {
                set_grad(w, &gradients(w.numel(), step));
            }
            let _norm = opt.clip_grad_norm(0.7).unwrap();
            opt.step().unwrap();
        }
        all.iter().map(bits).collect::<Vec<_>>()
    };
    let before = tch::get_num_threads();
    let (one, four) = (run(1), run(4));
    tch::set_num_threads(before);
    assert_eq!(one, four);
}

trait CopyLeaf {
    fn copy_leaf(&self) -> Tensor;
}

impl CopyLeaf for Tensor {
    fn copy_leaf(&self) -> Tensor {
        self.detach().copy().set_requires_grad(true)
    }
}

/// Layouts for which a single index does not traverse the memory of all tensors in the same order.
#[test]
fn the_layout_of_parameters_and_gradients_does_not_change_the_result() {
    let is_muon = |algorithm: &Algorithm| matches!(algorithm, Algorithm::Muon(_));
    for algorithm in algorithms().into_iter().filter(|algorithm| !is_muon(algorithm)) {
        let values: Vec<f64> = (0..24).map(|i| f64::from(i) / 8.0).collect();
        let plain = leaf(&values, Kind::Float, Device::Cpu);
        let wide = Tensor::stack(&[plain.detach(), plain.detach()], -1);
        let strided = wide.select(-1, 0).set_requires_grad(true);
        let matrix = plain.detach().reshape([4, 6]).tr().contiguous().tr().set_requires_grad(true);
        let all = vec![plain, strided, matrix];
        let mut opt = build(algorithm, all.as_slice(), 0.1);
        for step in 0..3 {
            for w in &all {
                set_grad(w, &gradients(24, step));
            }
            opt.step().unwrap();
        }
        assert_eq!(to_f64(&all[0]), to_f64(&all[1]), "{algorithm:?}");
        if !matches!(algorithm, Algorithm::Adafactor(_)) {
            // The squares of a matrix are not those of a vector.
            assert_eq!(to_f64(&all[0]), to_f64(&all[2]), "{algorithm:?}");
        }
        assert_eq!(to_f64(&wide.select(-1, 1)), values, "the gaps are unchanged");
    }
}

/// A momentum buffer starts with the first gradient of its parameter, at whichever step that comes.
#[test]
fn a_parameter_that_is_added_later_starts_its_own_state() {
    for algorithm in algorithms() {
        let (a, b) = (
            leaf(&[1.0; 3], Kind::Double, Device::Cpu),
            leaf(&[1.0; 3], Kind::Double, Device::Cpu),
        );
        let mut opt = build(algorithm, vec![a.shallow_clone(), b.shallow_clone()], 0.1);
        let mut want = [(); 3].map(|()| Element { value: 1.0, ..Element::default() });
        for step in 0..3 {
            set_grad(&a, &[0.5; 3]);
            if step > 0 {
                set_grad(&b, &[0.25; 3]);
                step_vector(&mut want, &algorithm, 0.1, &[0.25; 3], f64::EPSILON);
            }
            opt.step().unwrap();
        }
        assert!((to_f64(&b)[1] - want[1].value).abs() < 1e-14, "{algorithm:?}");
    }
}

/// A gradient whose minus sign is a bit of the tensor and not in its memory.
#[test]
fn a_gradient_with_a_negative_bit_is_negated() {
    let run = |negative: bool| {
        let w = leaf(&[1.0, 2.0], Kind::Float, Device::Cpu);
        let view = move |t: &Tensor| if negative { t.internal_neg_view() } else { t.neg() };
        let function =
            tch_amp::function(|_, x| Ok(x[0] * 1.0), move |_, grads| Ok(view(&grads[0])));
        function.apply(&[&w]).unwrap().sum(Kind::Float).backward();
        let mut opt = build(Sgd::default().into(), vec![w.shallow_clone()], 0.5);
        opt.step().unwrap();
        to_f64(&w)
    };
    assert_eq!(run(true), [1.5, 2.5]);
    assert_eq!(run(false), [1.5, 2.5]);
}

#[test]
fn momentum_can_be_disabled() {
    let w = leaf(&[1.0], Kind::Double, Device::Cpu);
    let sgd = Sgd { momentum: 0.5, ..Default::default() };
    let mut opt = build(sgd.into(), vec![w.shallow_clone()], 1.0);
    for (momentum, want) in [(0.5, 0.0), (0.5, -1.5), (0.0, -2.5)] {
        opt.set_momentum(momentum).unwrap();
        step_with(&mut opt, &w, &[1.0]);
        assert_eq!(to_f64(&w), [want]);
    }
}

/// The state is copied back from a contiguous copy, including the maximum that AMSGrad keeps while the gradients
/// shrink.
#[test]
fn a_gradient_in_another_order_of_memory_belongs_to_the_same_elements() {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            let plain = leaf(&values, Kind::Float, device).detach().view([2, 3]);
            let turned = plain.tr().contiguous().tr();
            let all = [plain, turned].map(|w| w.set_requires_grad(true));
            let mut opt = build(algorithm, &all, 0.1);
            for factor in [8.0, 0.25, 0.25] {
                all.iter().for_each(|w| set_grad(w, &values.map(|value| value * factor)));
                let mut gradient = all[1].grad();
                let ordered = gradient.contiguous();
                tch::no_grad(|| gradient.set_data(&ordered));
                assert_ne!(all[1].grad().stride(), all[1].stride());
                opt.step().unwrap();
            }
            assert_eq!(to_f64(&all[0]), to_f64(&all[1]), "{algorithm:?} on {device:?}");
            let state = opt.state_dict().unwrap().state;
            for (key, tensor) in state.get("0").into_iter().flatten() {
                assert_eq!(to_f64(tensor), to_f64(&state["1"][key]), "{key}, {algorithm:?}");
            }
        }
    });
}

/// A graph that has saved a parameter must not continue with other numbers.
#[rstest]
#[case(Kind::Float, MasterWeights::None)]
#[case(Kind::Double, MasterWeights::None)]
#[case(Kind::BFloat16, MasterWeights::None)]
#[case(Kind::BFloat16, MasterWeights::Float)]
#[case(Kind::BFloat16, MasterWeights::Remainder)]
#[case(Kind::BFloat16, MasterWeights::StochasticRounding { seed: 1 })]
#[case(Kind::Half, MasterWeights::Float)]
fn a_step_is_a_change_in_place_that_autograd_detects(
    #[case] kind: Kind,
    #[case] masters: MasterWeights,
) {
    for_each_device(|device| {
        for algorithm in algorithms() {
            let w = leaf(&[1.0, 2.0], kind, device);
            let mut opt = one(&w, algorithm, masters, 0.5);
            let product = (&w * &w).sum(kind);
            step_with(&mut opt, &w, &[1.0, -1.0]);
            let error = product.f_backward().unwrap_err().to_string();
            assert!(error.contains("modified by an inplace operation"), "{algorithm:?}: {error}");
        }
    });
}

/// The algorithms divide by the root of an infinite sum of squares. The number of elements decides which of them are
/// processed as vectors.
#[rstest]
#[case(Kind::Float, MasterWeights::None, 1e25)]
#[case(Kind::Double, MasterWeights::None, 1e200)]
#[case(Kind::BFloat16, MasterWeights::None, 1e25)]
#[case(Kind::BFloat16, MasterWeights::Float, 1e25)]
#[case(Kind::BFloat16, MasterWeights::Remainder, 1e25)]
fn a_gradient_whose_square_is_infinite_changes_no_parameter(
    #[case] kind: Kind,
    #[case] masters: MasterWeights,
    #[case] gradient: f64,
    #[values(1, 8, 37)] count: usize,
) {
    let (adam, adamw) = (Adam::default(), AdamW { weight_decay: 0.0, ..Default::default() });
    let adams: [Algorithm; 4] = [
        adam.into(),
        Adam { amsgrad: true, ..adam }.into(),
        adamw.into(),
        AdamW { maximize: true, ..adamw }.into(),
    ];
    for_each_device(|device| {
        let others = [Adagrad::default().into(), RmsProp::default().into()];
        for algorithm in adams.into_iter().chain(others) {
            let w = leaf(&vec![1.0; count], kind, device);
            let mut opt = one(&w, algorithm, masters, 0.1);
            for _ in 0..2 {
                set_grad(&w, &vec![gradient; count]);
                opt.step().unwrap();
                let is_adam = matches!(algorithm, Algorithm::Adam(_) | Algorithm::AdamW(_));
                // CUDA's kernels interpolate between the sum and the square, as those of PyTorch's optimizers do. The sum
                // becomes NaN, and so does the parameter; with `amsgrad`, the largest sum stays zero.
                if is_adam && device.is_cuda() && !rounds_as_the_cpu() {
                    assert!(
                        to_f64(&w).iter().all(|w| w.is_nan() || w.abs() > 1e8),
                        "{algorithm:?}"
                    );
                } else {
                    assert_eq!(to_f64(&w), vec![1.0; count], "{algorithm:?}");
                }
            }
        }
    });
}

/// libtorch keeps the sign of such gradients, or all of their numbers, outside of their memory.
#[test]
fn gradients_whose_numbers_are_not_in_memory_are_those_of_plain_ones() {
    let memory = || Tensor::from_slice(&[0.5f32, -0.25, 3.0]);
    let complex = Tensor::complex(&memory(), &memory());
    let options = (Kind::Float, Device::Cpu);
    let gradients = [
        (memory().internal_neg_view(), [-0.5, 0.25, -3.0]),
        (complex.conj().imag(), [-0.5, 0.25, -3.0]),
        (Tensor::internal_efficientzerotensor([3], options), [0.0; 3]),
    ];
    for (gradient, numbers) in gradients {
        for algorithm in algorithms() {
            let all = [(); 2].map(|()| leaf(&[1.0, 2.0, -3.0], Kind::Float, Device::Cpu));
            let mut opt = build(algorithm, &all, 0.1);
            for w in &all {
                set_grad(w, &numbers);
            }
            tch::no_grad(|| all[0].grad().set_data(&gradient));
            opt.step().unwrap();
            assert_eq!(to_f64(&all[0]), to_f64(&all[1]), "{algorithm:?} {gradient:?}");
        }
    }
}

/// PyTorch's side is tested in `oracle/optim_deviations.py`. The kernels of a GPU are libtorch's own.
#[rstest]
fn amsgrad_does_not_hide_a_nan(
    #[values(Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half)] kind: Kind,
    #[values("exp_avg_sq", "max_exp_avg_sq")] key: &str,
    #[values(false, true)] has_masters: bool,
) {
    let masters = if has_masters { MasterWeights::Float } else { MasterWeights::None };
    let algorithms: [Algorithm; 2] = [
        AdamW { amsgrad: true, ..Default::default() }.into(),
        Adam { amsgrad: true, ..Default::default() }.into(),
    ];
    for algorithm in algorithms {
        // Of 19 elements some are processed in vectors and some are not.
        let w = leaf(&[1.0; 19], kind, Device::Cpu);
        let mut opt = one(&w, algorithm, masters, 0.1);
        set_grad(&w, &[1.0; 19]);
        opt.step().unwrap();
        let state = opt.state_dict().unwrap().state;
        for place in [0, 7, 18] {
            let _nan = state["0"][key].get(place).fill_(f64::NAN);
        }
        opt.step().unwrap();
        let are_nan = |values: Vec<f64>| values.iter().map(|x| x.is_nan()).collect::<Vec<_>>();
        let want: Vec<_> = (0..19).map(|place| [0, 7, 18].contains(&place)).collect();
        assert_eq!(are_nan(to_f64(&w)), want, "{algorithm:?}");
        assert_eq!(are_nan(to_f64(&state["0"]["max_exp_avg_sq"])), want, "{algorithm:?}");
    }
}
