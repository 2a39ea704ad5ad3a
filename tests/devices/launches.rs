//! How many kernels the scaler launches: as many for 40 parameters as for 4, and few more for 400.

use tch::{Kind, Tensor};
use tch_amp::gradients::ClipNorm;
use tch_amp::loss_scale::all_finite;
use tch_amp::optim::{AdamW, MasterWeights};
use tch_amp::scaler::GradScalerConfig;

use crate::iteration::{ONE, TWO, Training, parameters, scaler};
use testkit::simulation::Simulation;

/// A part of an iteration, with the calls that precede it.
type Part = (&'static str, fn(&mut Training), fn(&mut Training));

fn nothing(_: &mut Training) {}

fn unscale(training: &mut Training) {
    training.scaler.unscale_(&mut training.opt).unwrap();
}

fn step(training: &mut Training) {
    drop(training.step());
}

fn step_clip_norm(training: &mut Training) {
    drop(training.scaler.step_clip_norm(&mut training.opt, 0.1).unwrap());
}

/// Clips by another norm than two.
fn clip_norm(training: &mut Training, norm_type: f64) {
    let clip = ClipNorm { norm_type, ..0.1.into() };
    let _norm = tch_amp::gradients::clip_grad_norm(&training.all, clip).unwrap();
}

const PARTS: [Part; 11] = [
    ("unscale_", nothing, unscale),
    ("step", nothing, step),
    ("step_clip_norm", nothing, step_clip_norm),
    ("step after unscale_", unscale, step),
    ("update", step, |training| training.scaler.update().unwrap()),
    ("clip_grad_norm", unscale, |training| {
        let _norm = tch_amp::gradients::clip_grad_norm(&training.all, 0.1).unwrap();
    }),
    ("sum", unscale, |training| clip_norm(training, 1.0)),
    ("powers", unscale, |training| clip_norm(training, 2.5)),
    ("largest", unscale, |training| clip_norm(training, f64::INFINITY)),
    ("clip_grad_value", unscale, |training| {
        tch_amp::gradients::clip_grad_value(&training.all, 0.1).unwrap();
    }),
    ("all_finite", nothing, |training| {
        let gradients: Vec<_> = training.all.iter().map(Tensor::grad).collect();
        let _finite = all_finite(&gradients).unwrap();
    }),
];

/// The launches of each part with `count` parameters of each dtype on each device.
fn launches(simulation: &Simulation, count: usize, kinds: &[Kind], two: bool) -> Vec<i64> {
    let devices = if two { TWO } else { ONE };
    let all = kinds.iter().flat_map(|kind| parameters(devices, *kind, count));
    let adamw = AdamW::default().into();
    let mut training = Training::new(adamw, MasterWeights::None, all.collect(), devices);
    // The first step creates the state of each parameter.
    drop(training.iterate(0.5));
    let launches = PARTS.iter().map(|(_, prepare, part)| {
        training.scaler = scaler();
        training.backward(0.5);
        prepare(&mut training);
        simulation.count(|| part(&mut training)).1.launches
    });
    launches.collect()
}

/// The most launches that 400 parameters of one dtype on one device take beyond those for 4. The arguments of a kernel
/// have room for 128 of the norms that are put together, of all dtypes, and for 252 parameters with AdamW's four lists.
const MORE_FOR_400: i64 = 5;

#[test]
fn launches_grow_with_the_number_of_parameters_only_by_full_lists() {
    let Some(simulation) = Simulation::find() else { return };
    let mut grown = Vec::new();
    for kinds in [&[Kind::Float][..], &[Kind::BFloat16], &[Kind::Float, Kind::BFloat16]] {
        for two in [false, true] {
            let lists = kinds.len() as i64 * if two { 2 } else { 1 };
            let counts = [4, 40, 400].map(|count| launches(&simulation, count, kinds, two));
            for (place, (part, ..)) in PARTS.iter().enumerate() {
                let [few, some, many] = counts.each_ref().map(|of_parts| of_parts[place]);
                let is_bounded = few == some && (few..=few + lists * MORE_FOR_400).contains(&many);
                if few == 0 || !is_bounded {
                    grown.push(format!("{kinds:?} two {two} {part}: {few}, {some}, {many}"));
                }
            }
        }
    }
    assert!(grown.is_empty(), "{grown:#?}");
}

/// A scale below 1 takes a further check, for which the host has to know how low the scale can be. It learns that from
/// copies that arrive late.
#[test]
fn a_scale_that_the_host_has_not_read_for_long_costs_no_further_launch() {
    let Some(simulation) = Simulation::find() else { return };
    let steps = |scale: f64| {
        let mut training = Training::usual(ONE, 4);
        let config = GradScalerConfig { init_scale: scale, ..Default::default() };
        training.scaler = config.build(ONE[0]).unwrap();
        let mut iterate = || {
            training.backward(1.0 / 1024.0);
            let ((), step) = simulation.count(|| drop(training.step()));
            let ((), update) = simulation.count(|| training.scaler.update().unwrap());
            assert_eq!(step.host_syncs + update.host_syncs, 0);
            step.launches
        };
        (0..100).map(|_| iterate()).collect::<Vec<_>>()
    };
    let high = steps(65536.0);
    assert_eq!(high[1..], [high[1]; 99]);
    let low = steps(0.5);
    assert!(low.iter().skip(1).all(|launches| *launches > high[1]), "{low:?} {high:?}");
}
