//! One scale for each loss, compared with the same training without scaling.

mod iterations;

use rstest::rstest;
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::gradients::GradientError::Unsupported;
use tch_amp::optim::{AmpOptimizer, MasterWeights, Sgd, Step};
use tch_amp::scaler::ScalerError::{AlreadyStepped, IterationOpen, NoInfChecks, NoSuchLoss};
use tch_amp::scaler::{GradScalerConfig, GradScalerState, PerLossScalers};

use crate::scaler::{Descent, INF, loss, model, ones, rows, sgd, with_scale};
use testkit::tensors::leaf;
use testkit::{assert_refused, for_each_device, to_f64};

/// Two losses with scales of 8 and 1024.
fn two(device: Device) -> PerLossScalers {
    let configs =
        [8.0, 1024.0].map(|scale| GradScalerConfig { growth_interval: 3, ..with_scale(scale) });
    PerLossScalers::with_configs(device, &configs).unwrap()
}

/// A weight of ones, its optimizer and the two losses.
fn begin(device: Device) -> (Tensor, Descent, PerLossScalers) {
    let w = ones(Kind::Float, device);
    let opt = Descent::of([&w]);
    (w, opt, two(device))
}

fn scales(scalers: &PerLossScalers) -> [f64; 2] {
    [0, 1].map(|loss| scalers.get_scale(loss).unwrap())
}

#[test]
fn gradients_are_the_sum_of_the_unscaled_gradients() {
    for_each_device(|device| {
        let (w, mut opt, mut scalers) = begin(device);
        scalers.backward(0, &loss(&w, &[1.0, 2.0, 3.0]), &mut opt).unwrap();
        assert_eq!(to_f64(&w.grad()), [1.0, 2.0, 3.0]);
        scalers.backward(1, &loss(&w, &[10.0, 20.0, 30.0]), &mut opt).unwrap();
        assert_eq!(to_f64(&w.grad()), [11.0, 22.0, 33.0]);
        scalers.backward(0, &loss(&w, &[0.5; 3]), &mut opt).unwrap();
        assert_eq!(to_f64(&w.grad()), [11.5, 22.5, 33.5], "a second micro-batch");
        assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
        assert_eq!(to_f64(&w), [-10.5, -21.5, -32.5]);
        scalers.update().unwrap();
        assert_eq!(scales(&scalers), [8.0, 1024.0]);
    });
}

/// Adds the gradients of a loss to those of the variables, and retains the graph.
fn add_gradients(vs: &VarStore, loss: &Tensor) {
    for w in vs.trainable_variables() {
        let part = Tensor::run_backward(&[loss], &[&w], true, false).remove(0);
        if part.defined() {
            // The gradient of this expression is `part` itself.
            (&w * part).sum(None).backward();
        }
    }
}

/// Numbers from -1 to 1 that do not come from libtorch's generator, because other tests use it at the same time.
fn wild(size: &[i64], seed: usize, device: Device) -> Tensor {
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    let numbers = ((places + 1000.0 * seed as f64) * 12.9898).sin() * 43_758.545;
    numbers.sin().reshape(size).to_kind(Kind::Float).to_device(device)
}

/// Trains two layers with two losses. The scales are powers of two, so all bits must be equal.
fn train(device: Device, fused: bool, scalers: Option<&mut PerLossScalers>) -> Vec<Vec<f64>> {
    let vs = VarStore::new(device);
    let first = nn::linear(vs.root() / "first", 6, 5, Default::default());
    let second = nn::linear(vs.root() / "second", 5, 1, Default::default());
    for (index, w) in vs.trainable_variables().iter().enumerate() {
        let numbers = wild(&w.size(), index, device) * 0.5;
        tch::no_grad(|| w.shallow_clone().copy_(&numbers));
    }
    let mut plain = nn::Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.05).unwrap();
    let mut own = Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.05).unwrap();
    let mut scalers = scalers;
    for step in 0..10 {
        let xs = wild(&[4, 6], 100 + step, device);
        let hidden = xs.apply(&first);
        // The second loss does not use the second layer.
        let losses = [hidden.relu().apply(&second).square().mean(None), hidden.abs().mean(None)];
        let opt: &mut dyn AmpOptimizer = if fused { &mut own } else { &mut plain };
        vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
        match &mut scalers {
            Some(scalers) => {
                scalers.backward_retain_graph(0, &losses[0], opt).unwrap();
                scalers.backward(1, &losses[1], opt).unwrap();
                assert!(scalers.step(opt).unwrap().is_stepped().unwrap());
                scalers.update().unwrap();
            }
            None => {
                // tch cannot retain a graph for a second backward.
                losses.iter().for_each(|loss| add_gradients(&vs, loss));
                opt.update(&Step::default()).unwrap();
            }
        }
    }
    let variables = vs.variables();
    let mut names: Vec<_> = variables.keys().collect();
    names.sort();
    names.iter().map(|name| to_f64(&variables[*name])).collect()
}

#[rstest]
fn training_is_that_without_scales(#[values(false, true)] fused: bool) {
    for_each_device(|device| {
        let mut scalers = two(device);
        let scaled = train(device, fused, Some(&mut scalers));
        assert_eq!(scaled, train(device, fused, None));
        assert_eq!(
            scales(&scalers),
            [64.0, 8192.0],
            "each scale grew three times in ten iterations"
        );
        let disabled = GradScalerConfig { enabled: false, ..Default::default() };
        let mut scalers = PerLossScalers::with_configs(device, &[disabled; 2]).unwrap();
        assert_eq!(scaled, train(device, fused, Some(&mut scalers)));
    });
}

#[rstest]
fn the_loss_that_overflowed_backs_off_alone(#[values(false, true)] fused: bool) {
    for_each_device(|device| {
        let (vs, w, _) = model(device);
        let mut opt = sgd(&vs, fused);
        let mut scalers = two(device);
        scalers.backward(0, &loss(&w, &[1.0; 3]), &mut *opt).unwrap();
        scalers.backward(1, &loss(&w, &[1.0, INF, 1.0]), &mut *opt).unwrap();
        assert!(scalers.step(&mut *opt).unwrap().is_skipped().unwrap());
        scalers.update().unwrap();
        assert_eq!(scales(&scalers), [8.0, 512.0]);
        assert_eq!(scalers.get_growth_tracker(0).unwrap(), 1);
        assert_eq!(to_f64(&w), [1.0; 3]);
    });
}

/// An overflow that the caller has made finite again must not be stepped with.
#[test]
fn an_overflow_that_was_clamped_is_still_skipped() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scalers = two(device);
        scalers.backward(0, &loss(&w, &[INF; 3]), &mut opt).unwrap();
        let _clamped = tch::no_grad(|| w.grad().clamp_(-1.0, 1.0));
        assert!(scalers.step(&mut opt).unwrap().is_skipped().unwrap());
        assert_eq!(to_f64(&w), [1.0; 3]);
    });
}

#[test]
fn sums_that_overflow_are_skipped_and_back_no_scale_off() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scalers = PerLossScalers::with_configs(device, &[with_scale(1.0); 2]).unwrap();
        for index in 0..2 {
            scalers.backward(index, &loss(&w, &[3e38; 3]), &mut opt).unwrap();
        }
        assert!(scalers.step(&mut opt).unwrap().is_skipped().unwrap());
        scalers.update().unwrap();
        assert_eq!((scales(&scalers), to_f64(&w)), ([1.0, 1.0], vec![1.0; 3]));
    });
}

#[test]
fn a_loss_without_a_backward_keeps_its_scale_and_tracker() {
    let (w, mut opt, mut scalers) = begin(Device::Cpu);
    assert_refused!(scalers.update(), Error::Scaler(NoInfChecks));
    scalers.backward(1, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
    drop(scalers.step(&mut opt).unwrap());
    assert_refused!(scalers.step(&mut opt), Error::Scaler(AlreadyStepped));
    scalers.update().unwrap();
    let tracker = |loss| scalers.get_growth_tracker(loss).unwrap();
    assert_eq!([tracker(0), tracker(1)], [0, 1]);
}

#[test]
fn a_failed_backward_leaves_the_previous_gradients() {
    for_each_device(|device| {
        let (_vs, w, mut opt) = model(device);
        let mut scalers = two(device);
        scalers.backward(0, &loss(&w, &[1.0, 2.0, 3.0]), &mut opt).unwrap();
        let spent = loss(&w, &[5.0; 3]).square();
        spent.backward();
        tch::no_grad(|| w.grad().copy_(&Tensor::from_slice(&[1.0f32, 2.0, 3.0]).to_device(device)));
        assert!(scalers.backward(1, &spent, &mut opt).is_err(), "its graph was freed");
        assert_eq!(to_f64(&w.grad()), [1.0, 2.0, 3.0]);
        assert!(scalers.backward(1, &Tensor::ones([], (Kind::Int64, device)), &mut opt).is_err());
        assert!(scalers.backward(2, &loss(&w, &[1.0; 3]), &mut opt).is_err());
        assert_eq!(to_f64(&w.grad()), [1.0, 2.0, 3.0]);
        assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
        scalers.update().unwrap();
        assert_eq!(scales(&scalers), [8.0, 1024.0]);
        assert_eq!(to_f64(&w), [0.0, -1.0, -2.0]);
    });
}

#[test]
fn a_gradient_that_cannot_be_unscaled_is_refused_and_the_previous_gradients_stay() {
    let w = leaf(&[1.0, 1.0], Kind::Half, Device::Cpu);
    let mut opt = Descent::of([&w]);
    let mut scalers = two(Device::Cpu);
    loss(&w, &[3.0, 4.0]).backward();
    assert_refused!(
        scalers.backward(0, &loss(&w, &[1.0, 1.0]), &mut opt),
        Error::Gradient(Unsupported { .. })
    );
    assert_eq!(to_f64(&w.grad()), [3.0, 4.0]);
    assert!(scalers.state_dict().is_ok(), "no iteration has begun");
}

#[test]
fn a_later_gradient_that_cannot_be_unscaled_leaves_the_sums_of_the_earlier_ones() {
    let first = leaf(&[1.0, 1.0], Kind::Float, Device::Cpu);
    let second = leaf(&[1.0, 1.0], Kind::Half, Device::Cpu);
    let mut opt = Descent::of([&first, &second]);
    let mut scalers = two(Device::Cpu);
    scalers.backward(0, &loss(&first, &[3.0, 4.0]), &mut opt).unwrap();
    let both = loss(&first, &[1.0, 1.0]) + loss(&second, &[1.0, 1.0]);
    assert_refused!(scalers.backward(1, &both, &mut opt), Error::Gradient(Unsupported { .. }));
    assert_eq!(to_f64(&first.grad()), [3.0, 4.0]);
    assert!(!second.grad().defined());
    // The open iteration continues.
    scalers.backward(1, &loss(&first, &[1.0, 1.0]), &mut opt).unwrap();
    assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&first), [-3.0, -4.0]);
    scalers.update().unwrap();
}

#[test]
fn the_sum_is_clipped() {
    for_each_device(|device| {
        let w = leaf(&[0.0, 0.0], Kind::Float, device);
        let mut opt = Sgd::default().build(vec![w.shallow_clone()], 1.0).unwrap();
        let mut scalers = two(device);
        scalers.backward(0, &loss(&w, &[30.0, 0.0]), &mut opt).unwrap();
        scalers.backward(1, &loss(&w, &[0.0, 40.0]), &mut opt).unwrap();
        let outcome = scalers.step_clip_norm(&mut opt, 5.0).unwrap();
        assert_eq!(outcome.total_norm().unwrap().double_value(&[]), 50.0);
        let got = to_f64(&w);
        // PyTorch divides by the norm plus 1e-6.
        for (got, want) in got.iter().zip([-3.0, -4.0]) {
            assert!((got - want).abs() < 1e-6, "{got} and {want}");
        }
        scalers.update().unwrap();
    });
}

#[test]
fn sparse_and_dense_gradients_add_up() {
    for first_is_sparse in [true, false] {
        let table = Tensor::zeros([3, 1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let mut opt = Descent::of([&table]);
        let mut scalers = two(Device::Cpu);
        for step in 0..2 {
            let sparse = (step == 0) == first_is_sparse;
            let value = match sparse {
                true => rows(&table, &[1, 1]).sum(None),
                false => table.sum(None) * 10.0,
            };
            scalers.backward(step, &value, &mut opt).unwrap();
        }
        assert_eq!(to_f64(&table.grad().to_dense(None, false)), [10.0, 12.0, 10.0]);
    }
}

#[rstest]
fn half_parameters_with_masters_take_both_losses_in_f32(
    #[values(Kind::BFloat16, Kind::Half)] kind: Kind,
) {
    for_each_device(|device| {
        let w = leaf(&[1.0, 1.0], kind, device);
        let sgd = Sgd::default().master_weights(MasterWeights::Float);
        let mut opt = sgd.build(vec![w.shallow_clone()], 1.0).unwrap();
        opt.accumulate_in_f32().unwrap();
        let mut scalers = two(device);
        let small = 2f64.powi(-20);
        // The sum of 1 and 2^-20 needs more than the 8 or 11 significant bits of half precision.
        scalers.backward(0, &loss(&w, &[0.25, 0.25]), &mut opt).unwrap();
        scalers.backward(1, &loss(&w, &[small, small]), &mut opt).unwrap();
        assert!(scalers.step(&mut opt).unwrap().is_stepped().unwrap());
        let master = opt.master_weight(0).unwrap().unwrap();
        assert_eq!(to_f64(&master), [0.75 - small; 2]);
    });
}

#[test]
fn states_are_restored_in_order() {
    let (w, mut opt, mut scalers) = begin(Device::Cpu);
    scalers.backward(0, &loss(&w, &[1.0; 3]), &mut opt).unwrap();
    assert_refused!(scalers.state_dict(), Error::Scaler(IterationOpen { .. }));
    let loading =
        scalers.load_state_dict(&[GradScalerState::default(), GradScalerState::default()]);
    assert_refused!(loading, Error::Scaler(IterationOpen { .. }));
    drop(scalers.step(&mut opt).unwrap());
    scalers.update().unwrap();
    let states = scalers.state_dict().unwrap();
    let mut loaded = PerLossScalers::new(Device::Cpu, 2).unwrap();
    assert_refused!(loaded.load_state_dict(&states[..1]), Error::InvalidArgument { .. });
    let mut broken = states.clone();
    broken[1].scale = Some(-1.0);
    assert!(loaded.load_state_dict(&broken).is_err());
    assert_eq!(scales(&loaded), [65536.0, 65536.0], "nothing has changed");
    loaded.load_state_dict(&states).unwrap();
    assert_eq!(loaded.state_dict().unwrap(), states);
}

#[test]
fn a_loaded_scale_is_not_an_option() {
    let saved = PerLossScalers::with_configs(Device::Cpu, &[with_scale(8.0)]).unwrap();
    let saved = saved.state_dict().unwrap();
    let mut scalers = PerLossScalers::new(Device::Cpu, 1).unwrap();
    scalers.load_state_dict(&saved).unwrap();
    assert_eq!(scalers.get_scale(0).unwrap(), 8.0);
    assert_eq!(scalers.config(0).unwrap().init_scale, GradScalerConfig::default().init_scale);
}

#[test]
fn invalid_loss_counts_and_ids_are_refused() {
    assert_refused!(PerLossScalers::new(Device::Cpu, 0), Error::InvalidArgument { .. });
    let mut scalers = two(Device::Cpu);
    assert_eq!(scalers.loss_count(), 2);
    assert_refused!(
        scalers.set_config(2, GradScalerConfig::default()),
        Error::Scaler(NoSuchLoss { loss_id: 2, losses: 2 })
    );
}
