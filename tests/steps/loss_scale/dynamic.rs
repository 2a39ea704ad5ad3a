//! How a dynamic loss scale adapts.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::loss_scale::{DynamicLossScale, DynamicLossScaleState, LossScale};

use crate::loss_scale::stands;
use testkit::for_each_device;
use testkit::rng::Rng;

/// The largest power of two in f32.
const TOP: f64 = 1.7014118346046923e38;

/// The results of jmp 0.0.4 (with JAX 0.10.2 on a CPU): a dot is a step with finite gradients, `!` one with non-finite
/// gradients. Each is followed by the scale and the counter.
#[rstest]
#[case::defaults_but_the_period(
    [32768.0, 2.0, 2.0, 1.0],
    ". 32768 1, . 65536 0, . 65536 1, . 131072 0, ! 65536 0, . 65536 1, ! 32768 0, ! 16384 0, \
     . 16384 1, . 32768 0, . 32768 1, . 65536 0"
)]
#[case::the_minimum([8.0, 1.0, 2.0, 1.0], "! 4 0, ! 2 0, ! 1 0, ! 1 0, ! 1 0, . 2 0, . 4 0")]
#[case::a_larger_factor(
    [8.0, 3.0, 4.0, 2.0],
    ". 8 1, . 8 2, . 32 0, . 32 1, . 32 2, . 128 0, ! 32 0, ! 8 0, ! 2 0, ! 2 0, . 2 1"
)]
#[case::no_growth_to_infinity(
    [TOP, 1.0, 2.0, 1.0],
    ". 1.7014118346046923e38 0, . 1.7014118346046923e38 0, ! 8.507059173023462e37 0, \
     . 1.7014118346046923e38 0, . 1.7014118346046923e38 0"
)]
#[case::a_factor_that_does_not_divide(
    [10.0, 2.0, 3.0, 0.5],
    "! 3.3333332538604736 0, ! 1.111111044883728 0, ! 0.5 0, ! 0.5 0, . 0.5 1, . 1.5 0, . 1.5 1, \
     . 4.5 0"
)]
#[case::a_longer_program(
    [1000.0, 3.0, 3.0, 1.0],
    ". 1000 1, . 1000 2, ! 333.3333435058594 0, ! 111.11111450195312 0, ! 37.03703689575195 0, \
     . 37.03703689575195 1, . 37.03703689575195 2, . 111.11111450195312 0, \
     . 111.11111450195312 1, ! 37.03703689575195 0, . 37.03703689575195 1, \
     . 37.03703689575195 2, . 111.11111450195312 0, . 111.11111450195312 1, \
     . 111.11111450195312 2, ! 37.03703689575195 0, ! 12.34567928314209 0, \
     ! 4.1152262687683105 0, . 4.1152262687683105 1, . 4.1152262687683105 2"
)]
#[case::a_minimum_between([6.0, 1.0, 2.0, 4.0], "! 4 0, . 8 0")]
fn the_scale_adapts_as_jmps(#[case] options: [f64; 4], #[case] program: &str) {
    let [loss_scale, period, factor, min_loss_scale] = options;
    for_each_device(|device| {
        let period = period as i64;
        let state =
            DynamicLossScaleState { loss_scale, counter: 0, period, factor, min_loss_scale };
        let mut loss_scale = state.build(device).unwrap();
        for step in program.split(',') {
            let [finite, scale, counter] = *step.split_whitespace().collect::<Vec<_>>() else {
                panic!("a step has three words: {step}");
            };
            loss_scale.adjust(&Tensor::from(finite == ".").to_device(device)).unwrap();
            let want = (scale.parse().unwrap(), counter.parse().unwrap());
            assert_eq!(stands(&loss_scale), want, "{step}");
        }
    });
}

/// The pseudo-code of the documentation, in f32 like jmp.
fn naive(state: &mut DynamicLossScaleState, finite: bool) {
    let (scale, factor) = (state.loss_scale as f32, state.factor as f32);
    if !finite {
        state.counter = 0;
        state.loss_scale = f64::from((scale / factor).max(state.min_loss_scale as f32));
        return;
    }
    state.counter += 1;
    if state.counter == state.period {
        state.counter = 0;
        if (scale * factor).is_finite() {
            state.loss_scale = f64::from(scale * factor);
        }
    }
}

#[test]
fn long_random_runs_match_the_pseudo_code() {
    for_each_device(|device| {
        for seed in 0..30 {
            let mut rng = Rng::new(seed);
            let mut want = DynamicLossScaleState {
                loss_scale: f64::from(1.0 + rng.below(1 << 20) as f32 / 3.0),
                counter: 0,
                period: 1 + rng.below(6) as i64,
                factor: [2.0, 3.0, 4.0, 10.0][rng.below(4)],
                min_loss_scale: [1.0, 0.5, 1e-3f32.into()][rng.below(3)],
            };
            let mut loss_scale = want.build(device).unwrap();
            let rare = 1 + rng.below(8);
            for step in 0..300 {
                let finite = !rng.one_in(rare);
                naive(&mut want, finite);
                loss_scale.adjust(&Tensor::from(finite).to_device(device)).unwrap();
                assert_eq!(loss_scale.state().unwrap(), want, "seed {seed}, step {step}");
            }
        }
    });
}

/// Products in f32, which jmp computes, would give other numbers.
#[test]
fn a_factor_that_is_not_an_f32_is_multiplied_in_f64_and_rounded_once() {
    for_each_device(|device| {
        let state = DynamicLossScaleState { factor: 1.1, period: 1, ..Default::default() };
        let (mut loss_scale, mut jmp) = (state.build(device).unwrap(), state);
        let mut want = state.loss_scale;
        for finite in [[true; 50], [false; 50]].concat() {
            let factor = if finite { 1.1 } else { 1.0 / 1.1 };
            want = f64::from((want * factor) as f32);
            naive(&mut jmp, finite);
            loss_scale.adjust(&Tensor::from(finite).to_device(device)).unwrap();
            assert_eq!(loss_scale.value().unwrap(), want);
        }
        assert_ne!(want, jmp.loss_scale);
        assert!((want / jmp.loss_scale - 1.0).abs() < 1e-5);
    });
}

#[test]
fn the_defaults_equal_jmps() {
    let state = DynamicLossScale::new(Device::Cpu).unwrap().state().unwrap();
    let DynamicLossScaleState { loss_scale, counter, period, factor, min_loss_scale, .. } = state;
    assert_eq!((loss_scale, counter, min_loss_scale), (32768.0, 0, 1.0));
    assert_eq!((period, factor), (2000, 2.0));
}

#[rstest]
fn any_tensor_of_one_element_says_whether_gradients_are_finite(
    #[values(Kind::Bool, Kind::Uint8, Kind::Int64, Kind::Half, Kind::Float, Kind::Double)]
    kind: Kind,
    #[values(&[], &[1], &[1, 1])] shape: &[i64],
) {
    for_each_device(|device| {
        for home in [Device::Cpu, device] {
            let mut loss_scale = DynamicLossScale::new(device).unwrap();
            for (finite, want) in [(1.0, 1), (1.0, 2), (0.0, 0)] {
                let flag = Tensor::from(finite).to_kind(kind).reshape(shape).to_device(home);
                loss_scale.adjust(&flag).unwrap();
                assert_eq!(stands(&loss_scale).1, want);
            }
            assert_eq!(loss_scale.value().unwrap(), 16384.0);
        }
    });
}

#[test]
fn other_tensors_are_refused_and_change_nothing() {
    for mut loss_scale in crate::loss_scale::all_three(Device::Cpu) {
        for (flag, count) in [(Tensor::new(), 0.0), (Tensor::from_slice(&[true, true]), 2.0)] {
            let error = loss_scale.adjust(&flag).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
            let message =
                format!("the number of elements of grads_finite is {count}, but must be 1");
            assert_eq!(error.to_string(), message);
        }
        assert!([1.0, 8.0].contains(&loss_scale.value().unwrap()));
    }
}

/// Like in jmp, where an adjustment creates a new loss scale, tensors that were handed out do not change.
#[test]
fn an_adjustment_leaves_tensors_clones_and_graphs_unchanged() {
    for_each_device(|device| {
        let state = DynamicLossScaleState { loss_scale: 8.0, period: 1, ..Default::default() };
        let mut loss_scale = state.build(device).unwrap();
        let before = loss_scale.loss_scale().unwrap().shallow_clone();
        let clone = loss_scale.clone();
        let w = crate::loss_scale::of(&[2.0], Kind::Float, device).set_requires_grad(true);
        let loss = loss_scale.scale(&w).unwrap();
        loss_scale.adjust(&Tensor::from(true).to_device(device)).unwrap();
        loss.sum(Kind::Float).backward();
        assert_eq!(w.grad().double_value(&[0]), 8.0);
        assert_eq!(f64::try_from(before).unwrap(), 8.0);
        assert_eq!((stands(&clone).0, stands(&loss_scale).0), (8.0, 16.0));
    });
}

/// The scale and the counter of the last adjustment may not have been read yet when a clone is made.
#[test]
fn a_loss_scale_and_its_clone_are_adjusted_independently() {
    for_each_device(|device| {
        let state = DynamicLossScaleState { loss_scale: 8.0, ..Default::default() };
        let flag = |finite: bool| Tensor::from(finite).to_device(device);
        for (finite, want) in [(true, (8.0, 2)), (false, (4.0, 0))] {
            let mut one = state.build(device).unwrap();
            one.adjust(&flag(true)).unwrap();
            let mut two = one.clone();
            one.adjust(&flag(finite)).unwrap();
            assert_eq!((stands(&one), stands(&two)), (want, (8.0, 1)));
            two.adjust(&flag(!finite)).unwrap();
            assert_eq!(stands(&one), want);
        }
    });
}
