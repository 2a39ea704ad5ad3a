//! How often the host synchronizes.

use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::gradients::ClipNorm;
use tch_amp::loss_scale::{DynamicLossScale, LossScale, StaticLossScale, all_finite, select_tree};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, Optimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, StepCounter};
use tch_amp::{GradScaler, Result};

use crate::iteration::{Nothing, ONE, TWO, Training, backward, losses, parameters, scaler};
use testkit::optimizers::algorithms;
use testkit::simulation::{Counts, Simulation};
use testkit::to_f64;

/// The calls between backward and update.
const WAYS: [&str; 8] = [
    "step",
    "unscale_ and step",
    "unscale_, clip_grad_norm and step",
    "unscale_, clip_grad_value and step",
    "a transaction",
    "a transaction that clips the norm",
    "a transaction that clips the values",
    "step_clip_norm",
];

fn step(way: &str, clip: ClipNorm, opt: &mut Optimizer, scaler: &mut GradScaler) -> Result<()> {
    if way.starts_with("unscale_") {
        scaler.unscale_(opt)?;
    }
    if way.contains("clip_grad_norm") {
        let _norm = opt.clip_grad_norm(clip)?;
    }
    if way.contains("clip_grad_value") {
        opt.clip_grad_value(0.1)?;
    }
    let outcome = if way == "step_clip_norm" {
        scaler.step_clip_norm(opt, clip)?
    } else if way.starts_with("a transaction") {
        let mut unscaled = scaler.unscale(opt)?;
        if way.ends_with("norm") {
            let _norm = unscaled.clip_grad_norm(clip)?;
        }
        if way.ends_with("values") {
            unscaled.clip_grad_value(0.1)?;
        }
        unscaled.step()?
    } else {
        scaler.step(opt)?
    };
    drop(outcome);
    scaler.update()
}

/// Counts three iterations, the second of which overflows and halves the scale.
fn count_three(
    simulation: &Simulation,
    mut training: Training,
    way: &str,
    clip: ClipNorm,
    what: &str,
) -> Counts {
    let ((), counts) = simulation.count(|| {
        for factor in [0.5, f64::INFINITY, 0.5] {
            training.backward(factor);
            step(way, clip, &mut training.opt, &mut training.scaler).unwrap();
        }
    });
    assert_eq!(training.scaler.get_scale().unwrap(), 4.0, "{what}");
    counts
}

#[test]
fn an_iteration_of_a_fused_optimizer_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let kinds = [
        (Kind::Float, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::None),
        (Kind::BFloat16, MasterWeights::Float),
        (Kind::BFloat16, MasterWeights::Remainder),
        (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 7 }),
    ];
    for algorithm in algorithms() {
        // The first gradient is not dampened: whether a step was the first depends on whether it was taken.
        let is_dampened =
            matches!(algorithm, Algorithm::Sgd(Sgd { dampening, .. }) if dampening > 0.0);
        for (kind, masters) in kinds {
            for devices in [ONE, TWO] {
                for way in WAYS {
                    let all = parameters(devices, kind, 2);
                    let training = Training::new(algorithm, masters, all, devices);
                    let places = devices.len();
                    let what =
                        format!("{algorithm:?}, {kind:?}, {masters:?}, {places} devices, {way}");
                    let counts = count_three(&simulation, training, way, 0.1.into(), &what);
                    assert!(counts.launches > 0, "{what}");
                    assert_eq!(counts.host_syncs, i64::from(is_dampened), "{what}");
                }
            }
        }
    }
}

/// Their scale is kept on the device, and so is its quotient and the present one.
#[test]
fn a_step_with_gradients_from_before_an_update_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let device = Device::Cuda(0);
    for way in WAYS {
        let [a, b] =
            [0, 1].map(|_| Tensor::ones([8], (Kind::Float, device)).set_requires_grad(true));
        let [mut of_a, mut of_b] =
            [&a, &b].map(|w| Sgd::default().build(&[w.shallow_clone()], 0.5).unwrap());
        let config = GradScalerConfig { init_scale: 8.0, growth_interval: 1, ..Default::default() };
        let mut scaler = config.build(device).unwrap();
        let ((), counts) = simulation.count(|| {
            scaler.backward(&(&a + &b).sum(Kind::Float)).unwrap();
            drop(scaler.step(&mut of_a).unwrap());
            scaler.update().unwrap();
            step(way, 1000.0.into(), &mut of_b, &mut scaler).unwrap();
        });
        assert_eq!(counts.host_syncs, 0, "{way}");
        assert_eq!(scaler.get_scale().unwrap(), 32.0, "{way}");
        // The gradient is 1, or 0.1 if its values are clipped.
        let moved = if way.contains("value") { 0.05 } else { 0.5 };
        let far = (1.0 - moved - to_f64(&b)[0]).abs();
        assert!(far < 1e-6, "{way}: {b:?}");
    }
}

#[test]
fn no_type_of_norm_synchronizes() {
    let Some(simulation) = Simulation::find() else { return };
    for kinds in [&[Kind::Float][..], &[Kind::Double], &[Kind::BFloat16, Kind::Double]] {
        for devices in [ONE, TWO] {
            for way in WAYS.into_iter().filter(|way| way.contains("norm")) {
                for norm_type in [1.0, 2.0, 2.5, f64::INFINITY] {
                    let all = kinds.iter().flat_map(|kind| parameters(devices, *kind, 2));
                    let (adamw, masters) = (AdamW::default().into(), MasterWeights::None);
                    let training = Training::new(adamw, masters, all.collect(), devices);
                    let clip = ClipNorm { norm_type, ..0.1.into() };
                    let what = format!("{kinds:?}, {} devices, {way}, {clip:?}", devices.len());
                    let counts = count_three(&simulation, training, way, clip, &what);
                    assert_eq!(counts.host_syncs, 0, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_host_optimizer_synchronizes_once() {
    let Some(simulation) = Simulation::find() else { return };
    let vs = VarStore::new(Device::Cuda(0));
    let w = vs.root().ones("w", &[3]);
    let built = [nn::AdamW::default().build(&vs, 0.1), nn::Sgd::default().build(&vs, 0.1)];
    for opt in built {
        let mut opt = opt.unwrap();
        for way in 0..3 {
            let mut scaler = scaler();
            opt.zero_grad();
            backward(&scaler, &losses(&[w.shallow_clone()], ONE, 0.5)).unwrap();
            let ((), counts) = simulation.count(|| {
                match way {
                    0 => drop(scaler.step(&mut opt).unwrap()),
                    1 => {
                        scaler.unscale_(&mut opt).unwrap();
                        drop(scaler.step(&mut opt).unwrap());
                    }
                    _ => drop(scaler.step_clip_norm(&mut opt, 0.1).unwrap()),
                }
                scaler.update().unwrap();
            });
            assert_eq!(counts.host_syncs, 1, "way {way}");
        }
    }
}

/// The flags of two devices are read in one transfer.
#[test]
fn a_host_optimizer_synchronizes_once_for_two_devices() {
    let Some(simulation) = Simulation::find() else { return };
    let mut opt = Nothing(parameters(TWO, Kind::Float, 2));
    let mut scaler = scaler();
    backward(&scaler, &losses(&opt.0, TWO, 0.5)).unwrap();
    let (stepped, counts) = simulation.count(|| {
        let outcome = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        outcome.is_stepped().unwrap()
    });
    assert_eq!((stepped, counts.host_syncs), (true, 1));
}

/// A scaler whose current scale only the device has.
fn unknown(config: GradScalerConfig) -> GradScaler {
    let (sgd, all) = (Sgd::default().into(), parameters(ONE, Kind::Float, 1));
    let mut training = Training::new(sgd, MasterWeights::None, all, ONE);
    training.scaler = GradScalerConfig { init_scale: 8.0, ..config }.build(ONE[0]).unwrap();
    drop(training.iterate(f64::INFINITY));
    training.scaler
}

#[test]
fn the_scale_and_its_state_are_read_in_one_transfer() {
    let Some(simulation) = Simulation::find() else { return };
    for config in [
        GradScalerConfig::default(),
        GradScalerConfig { hysteresis: 2, ..Default::default() },
        GradScalerConfig { tolerance: 0.5, ..Default::default() },
    ] {
        let want = if config.hysteresis == 2 { 8.0 } else { 4.0 };
        let scaler = unknown(config);
        let (scale, counts) = simulation.count(|| scaler.get_scale().unwrap());
        assert_eq!((scale, counts.host_syncs), (want, 1), "{config:?}");
        let (tracker, counts) = simulation.count(|| scaler.get_growth_tracker().unwrap());
        assert_eq!((tracker, counts.host_syncs), (0, 0), "{config:?}");
        let scaler = unknown(config);
        let (state, counts) = simulation.count(|| scaler.state_dict().unwrap());
        assert_eq!((state.scale, counts.host_syncs), (Some(want), 1), "{config:?}");
        if config.hysteresis == 2 {
            assert_eq!(state.hysteresis_tracker, Some(1));
            assert_eq!(state.overflows_since_rescale, Some(1));
        }
    }
    let mut scale = DynamicLossScale::new(Device::Cuda(0)).unwrap();
    scale.adjust(&Tensor::from(true)).unwrap();
    let (state, counts) = simulation.count(|| scale.state().unwrap());
    assert_eq!((state.loss_scale, state.counter, counts.host_syncs), (32768.0, 1, 1));
    let (_, counts) = simulation.count(|| (scale.state_dict().unwrap(), scale.value().unwrap()));
    assert_eq!(counts.host_syncs, 0, "the host already has the value");
}

#[test]
fn a_new_scale_on_the_device_is_not_read() {
    let Some(simulation) = Simulation::find() else { return };
    for device in [Device::Cuda(0), Device::Cuda(1)] {
        let mut scaler = unknown(GradScalerConfig::default());
        let new_scale = Tensor::from(16f32).to_device(device);
        let ((), counts) = simulation.count(|| scaler.update_with_tensor(&new_scale).unwrap());
        assert_eq!(counts.host_syncs, 0, "{device:?}");
        let (scale, counts) = simulation.count(|| scaler.get_scale().unwrap());
        assert_eq!((scale, counts.host_syncs), (16.0, 1), "{device:?}");
    }
}

/// As in PyTorch, outputs on one device share a copy of the scale.
#[test]
fn the_scale_is_copied_once_to_each_device() {
    let Some(simulation) = Simulation::find() else { return };
    let scaler = scaler();
    let scaled = |device, count| {
        let losses: Vec<_> = (0..count).map(|_| Tensor::ones([], (Kind::Float, device))).collect();
        simulation.count(|| scaler.scale(&losses).unwrap()).1
    };
    for count in [1, 5] {
        let [here, there, on_host] =
            [Device::Cuda(0), Device::Cuda(1), Device::Cpu].map(|device| scaled(device, count));
        assert_eq!((here.launches, there.launches), (count, count + 1));
        assert_eq!([here, there, on_host].map(|counts| counts.host_syncs), [0, 0, 1]);
    }
}

#[test]
fn counting_steps_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let mut training = Training::usual(TWO, 1);
    let mut taken = StepCounter::default();
    for factor in [0.5, f64::INFINITY, 0.5] {
        training.backward(factor);
        let ((), counts) = simulation.count(|| {
            let outcome = training.step();
            assert!(outcome.poll().is_ok());
            taken.record(&outcome);
            let _known = (taken.count().unwrap(), taken.skipped().unwrap());
            let _row = taken.consecutive_skips().unwrap();
            training.scaler.update().unwrap();
        });
        assert_eq!(counts.host_syncs, 0);
    }
}

/// Reading an outcome synchronizes, but only once.
#[test]
fn an_outcome_is_read_once() {
    let Some(simulation) = Simulation::find() else { return };
    let mut training = Training::usual(TWO, 1);
    training.backward(0.5);
    let outcome = training.step();
    let (stepped, counts) = simulation.count(|| {
        let stepped = outcome.is_stepped().unwrap();
        stepped && !outcome.is_skipped().unwrap()
    });
    assert_eq!((stepped, counts.host_syncs), (true, 1));
    let (stepped, counts) = simulation.count(|| outcome.clone().is_stepped().unwrap());
    assert_eq!((stepped, counts.host_syncs), (true, 0));
}

/// Clones learn what one of them has asked, and polling never synchronizes.
#[test]
fn the_clones_of_an_outcome_share_its_answer() {
    let Some(simulation) = Simulation::find() else { return };
    let Training { all, mut opt, mut scaler, .. } = Training::usual(TWO, 1);
    let loss = losses(&all, ONE, 0.5).remove(0);
    let (outcome, counts) = simulation.count(|| scaler.backward_step(&mut opt, &loss).unwrap());
    assert_eq!(counts.host_syncs, 0);
    let [asked, polled] = [(); 2].map(|()| outcome.clone());
    let (_answer, counts) = simulation.count(|| polled.poll().unwrap());
    assert_eq!(counts.host_syncs, 0);
    assert!(asked.is_stepped().unwrap());
    let (answers, counts) = simulation.count(|| {
        let of_others = [&outcome, &polled].map(|other| other.is_stepped().unwrap());
        (of_others, polled.poll().unwrap())
    });
    assert_eq!((answers, counts.host_syncs), (([true; 2], Some(true)), 0));
}

#[test]
fn functional_loss_scales_do_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let cuda = Device::Cuda(0);
    let mut adaptive = DynamicLossScale::new(cuda).unwrap();
    let fixed = StaticLossScale::new(cuda, 8.0).unwrap();
    let new = parameters(TWO, Kind::BFloat16, 2);
    let old = parameters(TWO, Kind::BFloat16, 2);
    let (chosen, counts) = simulation.count(|| {
        for scaled in [adaptive.scale(&new).unwrap(), fixed.scale(&new).unwrap()] {
            drop((adaptive.unscale(&scaled).unwrap(), fixed.unscale(&scaled).unwrap()));
        }
        let finite = all_finite(&new).unwrap();
        adaptive.adjust(&finite).unwrap();
        select_tree(&finite, &new, &old).unwrap()
    });
    assert_eq!((chosen.len(), counts.host_syncs), (4, 0));
    let (here, finite) = (StaticLossScale::new(Device::Cpu, 8.0).unwrap(), Tensor::from(true));
    let (chosen, counts) = simulation.count(|| {
        drop(here.unscale(&here.scale(&new).unwrap()).unwrap());
        select_tree(&finite, &new, &old).unwrap()
    });
    assert_eq!(
        (chosen.len(), counts.host_syncs),
        (4, 0),
        "a number on the host is sent without a synchronization"
    );
}
