//! The arithmetic, compared with [`Plain`]: formulas in f64.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adafactor, Adagrad, Adam, AdamW, Algorithm, Lion, MasterWeights, RmsProp, Sgd,
};

use crate::optim::{algorithms, build, one, set_grad, step_with, to_f64};
use testkit::bits::bits;
use testkit::optimizers::WEIGHTS;
use testkit::plain::Plain;
use testkit::simulation::rounds_as_the_cpu;
use testkit::tensors::leaf;
use testkit::{assert_says, for_each_device};

fn is_muon(algorithm: &Algorithm) -> bool {
    matches!(algorithm, Algorithm::Muon(_))
}

/// The size of a matrix whose columns are beside each other in memory.
const TURNED: &[i64] = &[5, 6];

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

/// Every size around the width of a vector, one large enough for several threads, and matrices, of which one is turned
/// and one parameter has two. A step may be off by the rounding of a few operations; over a few steps with a learning
/// rate of 0.1, the errors add up to less than `tolerance`.
#[rstest]
#[case(Kind::Double, 1e-14)]
#[case(Kind::Float, 3e-6)]
#[case(Kind::BFloat16, 0.15)]
#[case(Kind::Half, 0.03)]
fn every_algorithm_computes_what_a_plain_loop_does(#[case] kind: Kind, #[case] tolerance: f64) {
    const LR: f64 = 0.1;
    let vectors: [&[i64]; 7] = [&[1], &[7], &[8], &[15], &[16], &[33], &[140_000]];
    let matrices: [&[i64]; 4] = [&[6, 5], TURNED, &[2, 3, 7], &[1, 9]];
    for_each_device(|device| {
        for algorithm in algorithms() {
            // Those of Muon are rounded to bf16: see `muon`.
            let matrices = if is_muon(&algorithm) { &[][..] } else { &matrices };
            for size in vectors.iter().chain(matrices) {
                let count = size.iter().product::<i64>() as usize;
                let start: Vec<f64> = (0..count).map(|i| (i % 17) as f64 / 8.0 - 1.0).collect();
                let start = leaf(&start, kind, device).detach().view(*size);
                let start = if *size == TURNED { start.tr().contiguous().tr() } else { start };
                let w = start.set_requires_grad(true);
                let mut opt = build(algorithm, vec![w.shallow_clone()], LR);
                let mut want = Plain::new(&w);
                for step in 0..4 {
                    let gradients = gradients(count, step);
                    step_with(&mut opt, &w, &gradients);
                    want.step(algorithm, LR, &Tensor::from_slice(&gradients).view(*size));
                }
                for (got, want) in to_f64(&w).into_iter().zip(to_f64(&want.value)) {
                    let off = (got - want).abs();
                    assert!(off <= tolerance, "{algorithm:?} {size:?}: {got} {want}");
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
            for lion in
                [config, Lion { maximize: true, ..config }, Lion { weight_decay: 0.0, ..config }]
            {
                let start: Vec<f64> = (0..37).map(|i| f64::from(i - 18) / 4.0).collect();
                let w = leaf(&start, kind, device);
                let mut opt = build(lion.into(), vec![w.shallow_clone()], 0.25);
                let mut want = Plain::new(&w);
                for step in 0..4i32 {
                    // The second gradient cancels the average of some elements.
                    let gradient = |i: i32| f64::from((i * 5 + step * 3) % 9 - 4) / 4.0;
                    let gradients: Vec<_> = (0..37).map(gradient).collect();
                    step_with(&mut opt, &w, &gradients);
                    want.step(lion, 0.25, &Tensor::from_slice(&gradients));
                }
                let average = &opt.state_dict().unwrap().state["0"]["exp_avg"];
                assert_eq!(to_f64(&w), to_f64(&want.value), "{lion:?}");
                assert_eq!(to_f64(average), to_f64(&want.first), "{lion:?}");
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
        let mut opt = build(AdamW::default().into(), vec![w, small], 0.1);
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

/// Layouts for which a single index does not traverse the memory of all tensors in the same order.
#[test]
fn the_layout_of_parameters_and_gradients_does_not_change_the_result() {
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
        let [a, b] = [(); 2].map(|()| leaf(&[1.0; 3], Kind::Double, Device::Cpu));
        let mut opt = build(algorithm, vec![a.shallow_clone(), b.shallow_clone()], 0.1);
        let mut want = Plain::new(&b);
        for step in 0..3 {
            set_grad(&a, &[0.5; 3]);
            if step > 0 {
                set_grad(&b, &[0.25; 3]);
                want.step(algorithm, 0.1, &Tensor::from_slice(&[0.25; 3]));
            }
            opt.step().unwrap();
        }
        assert!((to_f64(&b)[1] - to_f64(&want.value)[1]).abs() < 1e-14, "{algorithm:?}");
    }
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
#[test]
fn a_step_is_a_change_in_place_that_autograd_detects() {
    for_each_device(|device| {
        for (kind, masters) in WEIGHTS.into_iter().chain([(Kind::Double, MasterWeights::None)]) {
            for algorithm in algorithms() {
                let w = leaf(&[1.0, 2.0], kind, device);
                let mut opt = one(&w, algorithm, masters, 0.5);
                let product = (&w * &w).sum(kind);
                step_with(&mut opt, &w, &[1.0, -1.0]);
                assert_says(product.f_backward(), "modified by an inplace operation");
            }
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
