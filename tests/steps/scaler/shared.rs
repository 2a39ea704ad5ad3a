//! Several optimizers of the same parameters in one iteration, as in soft actor-critic programs: each zeroes the
//! gradients, runs the backward of its own loss and steps, and one `update` ends the iteration.

use rstest::rstest;
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::GradientError;
use tch_amp::optim::{AdamW, AmpOptimizer, MasterWeights, Sgd};
use tch_amp::scaler::{PerLossScalers, ScalerError, SpikeConfig, StepOutcome};
use tch_amp::{Error, GradScaler, Result};

use crate::scaler::{Descent, INF, drop_gradients, loss, ones, scaler, with_scale};
use testkit::rng::Rng;
use testkit::tensors::leaf;
use testkit::{assert_refused, for_each_device, to_f64};

/// A name, and how an optimizer takes its step.
type Way = (&'static str, fn(&mut GradScaler, &mut dyn AmpOptimizer) -> Result<StepOutcome>);

const WAYS: [Way; 5] = [
    ("step", |scaler, opt| scaler.step(opt)),
    ("unscale_ and step", |scaler, opt| {
        scaler.unscale_(opt)?;
        scaler.step(opt)
    }),
    ("a transaction that clips", |scaler, opt| {
        let mut unscaled = scaler.unscale(opt)?;
        let _norm = unscaled.clip_grad_norm(0.5)?;
        unscaled.step()
    }),
    // Within the limit: a fused step on a GPU unscales and clips with one factor, which rounds otherwise than clipping
    // alone.
    ("step_clip_norm", |scaler, opt| scaler.step_clip_norm(opt, 1000.0)),
    ("step_clip_value", |scaler, opt| scaler.step_clip_value(opt, 0.25)),
];

/// An optimizer with a learning rate of 1, which may be fused.
fn descent<'a>(list: impl IntoIterator<Item = &'a Tensor>, fused: bool) -> Box<dyn AmpOptimizer> {
    let descent = Descent::of(list);
    match fused {
        true => Box::new(Sgd::default().build(descent.0, 1.0).unwrap()),
        false => Box::new(descent),
    }
}

fn zero(ws: &[Tensor], in_place: bool) {
    match in_place {
        true => ws.iter().for_each(|w| w.shallow_clone().zero_grad()),
        false if ws.is_empty() => {}
        false => drop_gradients(ws),
    }
}

/// Three optimizers of one store with a loss each, of which the first does not use all parameters.
fn actor_critic(
    device: Device,
    fused: bool,
    (name, step): Way,
    in_place: bool,
    scaler: &mut GradScaler,
) -> Vec<Vec<f64>> {
    let vs = VarStore::new(device);
    let ws = ["actor", "critic", "temperature"].map(|name| vs.root().ones(name, &[3]));
    let mut opts = [0.1, 0.2, 0.3].map(|lr| -> Box<dyn AmpOptimizer> {
        match fused {
            true => Box::new(AdamW::default().build(&vs, lr).unwrap()),
            false => Box::new(nn::Adam::default().build(&vs, lr).unwrap()),
        }
    });
    for iteration in 0..4 {
        for index in 0..3 {
            zero(&ws, in_place);
            let used = &ws[..ws.len().min(index + 2)];
            let terms = used.iter().enumerate().map(|(place, w)| {
                loss(w, &[0.5, -0.25, 0.125 * (iteration + index + place) as f64])
                    * &w.square().sum(None)
            });
            scaler.backward(&terms.sum::<Tensor>()).unwrap();
            let outcome = step(scaler, &mut *opts[index]).unwrap();
            assert!(outcome.is_stepped().unwrap(), "{name} of optimizer {index}");
        }
        scaler.update().unwrap();
    }
    ws.iter().map(to_f64).collect()
}

#[rstest]
fn three_optimizers_of_one_store_train_as_without_a_scale(
    #[values(false, true)] fused: bool,
    #[values(false, true)] in_place: bool,
) {
    for_each_device(|device| {
        for way in WAYS {
            let mut enabled = with_scale(1024.0).build(device).unwrap();
            let scaled = actor_critic(device, fused, way, in_place, &mut enabled);
            assert_eq!(enabled.get_growth_tracker().unwrap(), 4);
            let mut skip_only = GradScaler::skip_only(device).unwrap();
            let checked = actor_critic(device, fused, way, in_place, &mut skip_only);
            let plain = actor_critic(device, fused, way, in_place, &mut GradScaler::disabled());
            assert_eq!(scaled, plain, "{}", way.0);
            assert_eq!(checked, plain, "{}", way.0);
        }
    });
}

#[rstest]
fn the_overflow_of_any_of_three_steps_backs_the_scale_off(
    #[values(0, 1, 2)] bad: usize,
    #[values(false, true)] fused: bool,
) {
    for_each_device(|device| {
        let w = ones(Kind::Float, device);
        let mut scaler = scaler(device);
        for index in 0..3 {
            drop_gradients(&[w.shallow_clone()]);
            let value = if index == bad { INF } else { 0.25 };
            scaler.backward(&loss(&w, &[value; 3])).unwrap();
            let outcome = scaler.step(&mut *descent([&w], fused)).unwrap();
            assert_eq!(outcome.is_skipped().unwrap(), index == bad);
        }
        scaler.update().unwrap();
        assert_eq!((to_f64(&w), scaler.get_scale().unwrap()), (vec![0.5; 3], 4.0));
    });
}

#[test]
fn spikes_are_judged_for_each_of_three_optimizers() {
    for_each_device(|device| {
        let w = ones(Kind::Float, device);
        let mut scaler = scaler(device);
        for _ in 0..3 {
            drop_gradients(&[w.shallow_clone()]);
            scaler.backward(&loss(&w, &[0.25; 3])).unwrap();
            let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0).unwrap();
            let mut spikes = SpikeConfig::default().build().unwrap();
            let outcome = scaler.step_unless_spike(&mut opt, INF, &mut spikes).unwrap();
            assert!(outcome.is_stepped().unwrap());
        }
        scaler.update().unwrap();
        assert_eq!(to_f64(&w), [0.25; 3]);
    });
}

fn is_stepped_twice(error: &Error) -> bool {
    matches!(error, Error::Scaler(ScalerError::AlreadyStepped | ScalerError::UnscaleAfterStep))
}

/// The list is that of the first optimizer, a part of it, or more than it, in another order or after it.
#[rstest]
fn the_gradients_of_a_step_are_not_divided_again(
    #[values(&[0, 1], &[1], &[2, 1, 0], &[0, 1, 2])] again: &[usize],
    #[values(false, true)] fused: bool,
) {
    for_each_device(|device| {
        for (name, step) in WAYS {
            let ws = [(); 3].map(|()| ones(Kind::Float, device));
            let mut scaler = scaler(device);
            ws.iter().for_each(|w| scaler.backward(&loss(w, &[1.0; 3])).unwrap());
            let mut first = descent(&ws[..2], fused);
            assert!(scaler.step(&mut *first).unwrap().is_stepped().unwrap());
            let state = || ws.each_ref().map(|w| (to_f64(w), to_f64(&w.grad())));
            let before = state();
            let mut opt = Descent::of(again.iter().map(|&i| &ws[i]));
            let error = step(&mut scaler, &mut opt).unwrap_err();
            let expected = match again {
                [0, 1] => is_stepped_twice(&error),
                _ => matches!(error, Error::Gradient(GradientError::Shared { .. })),
            };
            assert!(expected, "{name}: {error}");
            assert_eq!(before, state(), "{name} changed something");
            scaler.update().unwrap();
        }
    });
}

/// What happens to the gradients of a step before the backward of the next optimizer.
#[rstest]
fn only_new_gradients_are_new_work(
    #[values(false, true)] same_list: bool,
    #[values(false, true)] fused: bool,
) {
    let halve = |ws: &[Tensor]| no_grad(|| drop(ws[0].grad().g_mul_scalar_(0.5)));
    type Between<'a> = &'a dyn Fn(&[Tensor]);
    let cases: [(&str, Between<'_>, bool); 7] = [
        ("nothing", &|_| (), false),
        ("halve", &halve, false),
        ("drop one", &|ws| zero(&ws[..1], false), false),
        ("zero one", &|ws| zero(&ws[..1], true), false),
        ("zero all", &|ws| zero(ws, true), true),
        ("drop all", &|ws| zero(ws, false), true),
        (
            "halve and zero",
            &|ws| {
                halve(ws);
                zero(ws, true);
            },
            true,
        ),
    ];
    for_each_device(|device| {
        for (name, between, is_new) in cases {
            for micro_batches in [1, 3] {
                let ws = [(); 2].map(|()| ones(Kind::Float, device));
                let mut scaler = scaler(device);
                let both = || loss(&ws[0], &[0.25; 3]) + loss(&ws[1], &[0.25; 3]);
                scaler.backward(&both()).unwrap();
                let stepped = scaler.step(&mut *descent(&ws, fused)).unwrap();
                assert!(stepped.is_stepped().unwrap());
                between(&ws);
                (0..micro_batches).for_each(|_| scaler.backward(&both()).unwrap());
                let mut next = Descent::of(&ws);
                if !same_list {
                    next.0.reverse();
                }
                let outcome = scaler.step(&mut next);
                assert_eq!(outcome.is_ok(), is_new, "{name}: {outcome:?}");
                let steps = if is_new { 1.0 + f64::from(micro_batches) } else { 1.0 };
                assert_eq!(to_f64(&ws[0]), [1.0 - 0.25 * steps; 3], "{name}");
                scaler.update().unwrap();
            }
        }
    });
}

/// What the error advises.
#[test]
fn after_a_refused_step_zeroing_and_another_backward_help() {
    let ws = [ones(Kind::Float, Device::Cpu)];
    let mut opt = Descent::of(&ws);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&ws[0], &[0.25; 3])).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    // Zeroed in place only after the loss was scaled: what the scaler saw last was not zero.
    let scaled = scaler.scale(&loss(&ws[0], &[0.25; 3])).unwrap();
    zero(&ws, true);
    scaled.backward();
    let error = scaler.step(&mut opt).unwrap_err();
    assert!(is_stepped_twice(&error), "{error}");
    zero(&ws, false);
    scaler.backward(&loss(&ws[0], &[0.25; 3])).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&ws[0]), [0.5; 3]);
    scaler.update().unwrap();
}

#[test]
fn gradients_of_an_open_record_stay_its_own() {
    let ws = [(); 2].map(|()| ones(Kind::Float, Device::Cpu));
    let list = |places: &[usize]| Descent::of(places.iter().map(|&i| &ws[i]));
    let mut scaler = scaler(Device::Cpu);
    let both = || loss(&ws[0], &[0.25; 3]) + loss(&ws[1], &[0.25; 3]);
    // Stepped, and then unscaled for another optimizer of the same parameters.
    scaler.backward(&both()).unwrap();
    assert!(scaler.step(&mut list(&[0, 1])).unwrap().is_stepped().unwrap());
    drop_gradients(&ws);
    scaler.backward(&both()).unwrap();
    scaler.unscale_(&mut list(&[0, 1])).unwrap();
    assert_refused!(
        scaler.unscale_(&mut list(&[0, 1])),
        Error::Scaler(ScalerError::AlreadyUnscaled)
    );
    for other in [&[1][..], &[1, 0]] {
        assert_refused!(
            scaler.step(&mut list(other)),
            Error::Gradient(GradientError::Shared { .. })
        );
    }
    assert_eq!(to_f64(&ws[1].grad()), [0.25; 3]);
    assert!(scaler.step(&mut list(&[0, 1])).unwrap().is_stepped().unwrap());
    assert_eq!(to_f64(&ws[0]), [0.5; 3]);
    // A gradient that is recreated while the record is open belongs to nobody's step.
    drop_gradients(&ws);
    scaler.backward(&both()).unwrap();
    scaler.unscale_(&mut list(&[0, 1])).unwrap();
    drop_gradients(&ws);
    scaler.backward(&both()).unwrap();
    let replaced = scaler.step(&mut list(&[0, 1]));
    assert_refused!(replaced, Error::Gradient(GradientError::Changed { .. }));
    scaler.abandon(&mut list(&[0, 1])).unwrap();
    assert!(scaler.step(&mut list(&[0, 1])).unwrap().is_stepped().unwrap());
    scaler.update().unwrap();
}

#[test]
fn an_optimizer_with_a_longer_list_finds_its_own_record() {
    let ws = [(); 2].map(|()| ones(Kind::Float, Device::Cpu));
    let list = |places: &[usize]| Descent::of(places.iter().map(|&i| &ws[i]));
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&ws[0], &[0.25; 3])).unwrap();
    assert!(scaler.step(&mut list(&[0])).unwrap().is_stepped().unwrap());
    drop_gradients(&ws);
    scaler.backward(&(loss(&ws[0], &[0.25; 3]) + loss(&ws[1], &[0.25; 3]))).unwrap();
    scaler.unscale_(&mut list(&[0, 1])).unwrap();
    assert!(scaler.step(&mut list(&[0, 1])).unwrap().is_stepped().unwrap());
    assert_eq!((to_f64(&ws[0]), to_f64(&ws[1])), (vec![0.5; 3], vec![0.75; 3]));
    scaler.update().unwrap();
    assert_eq!(scaler.get_growth_tracker().unwrap(), 1);
}

#[test]
fn a_step_without_any_new_gradient_has_nothing_to_do() {
    let w = ones(Kind::Float, Device::Cpu);
    let mut opt = Descent::of([&w]);
    let mut scaler = scaler(Device::Cpu);
    scaler.backward(&loss(&w, &[0.25; 3])).unwrap();
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    drop_gradients(&[w.shallow_clone()]);
    assert!(scaler.step(&mut opt).unwrap().has_no_gradients());
    scaler.unscale_(&mut opt).unwrap();
    scaler.abandon(&mut opt).unwrap();
    scaler.update().unwrap();
    assert_eq!(scaler.get_growth_tracker().unwrap(), 1, "the step of the first gradients counts");
}

#[test]
fn half_parameters_with_masters_are_shared() {
    let w = leaf(&[1.0, 1.0], Kind::BFloat16, Device::Cpu);
    let sgd = Sgd::default().master_weights(MasterWeights::Float);
    let mut scaler = scaler(Device::Cpu);
    for _ in 0..3 {
        drop_gradients(&[w.shallow_clone()]);
        scaler.backward(&loss(&w, &[0.25; 2])).unwrap();
        let mut opt = sgd.build(vec![w.shallow_clone()], 1.0).unwrap();
        scaler.unscale_(&mut opt).unwrap();
        assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
    }
    scaler.update().unwrap();
    assert_eq!(to_f64(&w), [0.25; 2]);
}

/// What a gradient holds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Content {
    Nothing,
    /// What losses have added since it was zeroed.
    New,
    /// Something that a step has used.
    Used,
}

/// Three optimizers of four parameters: with one list, overlapping lists, or lists of their own.
struct Trio {
    ws: [Tensor; 4],
    opts: [Box<dyn AmpOptimizer>; 3],
}

const LISTS: [[&[usize]; 3]; 4] = [
    [&[0, 1, 2, 3], &[0, 1, 2, 3], &[0, 1, 2, 3]],
    [&[0, 1], &[1, 2, 3], &[3, 0]],
    [&[0, 1, 2], &[0, 1, 2, 3], &[0]],
    [&[0], &[1, 2], &[3]],
];

impl Trio {
    fn new(lists: &[&[usize]; 3], fused: bool, device: Device) -> Self {
        let ws = [(); 4].map(|()| ones(Kind::Float, device));
        let sgd = Sgd { momentum: 0.5, ..Default::default() };
        let opts = lists.map(|list| -> Box<dyn AmpOptimizer> {
            let descent = Descent::of(list.iter().map(|&i| &ws[i]));
            match fused {
                true => Box::new(sgd.build(descent.0, 0.25).unwrap()),
                false => Box::new(descent),
            }
        });
        Self { ws, opts }
    }

    fn bits(&self) -> Vec<Vec<f64>> {
        self.ws.iter().map(to_f64).collect()
    }
}

/// Each round zeroes some gradients, runs a backward and steps one optimizer. The step is refused if, and only if, it
/// would use a part of a gradient twice; otherwise all weights are those of a training without a scale.
#[rstest]
fn random_orders_are_refused_or_train_as_without_a_scale(#[values(false, true)] fused: bool) {
    for_each_device(|device| {
        let (mut taken, mut refused) = (0, 0);
        for seed in 0..60u64 {
            let mut rng = Rng::new(seed);
            let lists = rng.pick(&LISTS);
            let mut scalers = [with_scale(1024.0).build(device).unwrap(), GradScaler::disabled()];
            let mut trios = [(); 2].map(|()| Trio::new(lists, fused, device));
            let mut contents = [Content::Nothing; 4];
            let mut is_open = false;
            for round in 0..12 {
                let text = format!("round {round} of {lists:?}, seed {seed} on {device:?}");
                let opt = rng.below(3);
                let zeroed = *rng.pick(&[&[][..], lists[opt], &[0, 1, 2, 3]]);
                let in_place = rng.one_in(3);
                let mut used: Vec<_> = (0..4).filter(|_| !rng.one_in(3)).collect();
                used.push(rng.below(4));
                let factors = [rng.eighth(), rng.eighth(), rng.eighth()];
                let (name, step) = *rng.pick(&WAYS);
                for &index in zeroed {
                    contents[index] = match contents[index] {
                        Content::Nothing => Content::Nothing,
                        _ if in_place => Content::New,
                        _ => Content::Nothing,
                    };
                }
                for &index in &used {
                    if contents[index] == Content::Nothing {
                        contents[index] = Content::New;
                    }
                }
                let is_allowed = lists[opt].iter().all(|&index| contents[index] != Content::Used);
                let before = trios[0].bits();
                for (trio, scaler) in trios.iter_mut().zip(&mut scalers) {
                    zero(&Descent::of(zeroed.iter().map(|&index| &trio.ws[index])).0, in_place);
                    let terms = used.iter().map(|&index| loss(&trio.ws[index], &factors));
                    scaler.backward(&terms.sum::<Tensor>()).unwrap();
                    if is_allowed || scaler.is_enabled() {
                        let stepped = step(scaler, trio.opts[opt].as_mut());
                        assert_eq!(stepped.is_ok(), is_allowed, "{name} in {text}: {stepped:?}");
                    }
                }
                if is_allowed {
                    assert_eq!(trios[0].bits(), trios[1].bits(), "{name} in {text}");
                    let its = lists[opt].iter().copied();
                    let its: Vec<_> =
                        its.filter(|&index| contents[index] == Content::New).collect();
                    is_open |= !its.is_empty();
                    its.into_iter().for_each(|index| contents[index] = Content::Used);
                    taken += 1;
                } else {
                    assert_eq!(trios[0].bits(), before, "{text}");
                    trios.iter().for_each(|trio| drop_gradients(&trio.ws));
                    contents = [Content::Nothing; 4];
                    refused += 1;
                }
                if is_open && rng.one_in(5) {
                    scalers.iter_mut().for_each(|scaler| scaler.update().unwrap());
                    // What is left counts as new in the next iteration, but was divided.
                    trios.iter().for_each(|trio| drop_gradients(&trio.ws));
                    (contents, is_open) = ([Content::Nothing; 4], false);
                }
            }
        }
        assert!(taken > 200 && refused > 50, "{taken} steps were taken and {refused} refused");
    });
}

fn three_losses(device: Device) -> PerLossScalers {
    PerLossScalers::with_configs(device, &[8.0, 64.0, 512.0].map(with_scale)).unwrap()
}

/// One loss of three overflows: only the step of its optimizer is skipped, although all have the same parameters.
#[rstest]
fn each_of_three_losses_decides_about_its_own_optimizer(
    #[values(0, 1, 2)] bad: usize,
    #[values(false, true)] in_place: bool,
) {
    for_each_device(|device| {
        let w = ones(Kind::Float, device);
        let mut scalers = three_losses(device);
        for index in 0..3 {
            zero(&[w.shallow_clone()], in_place);
            let mut opt = Descent::of([&w]);
            let value = if index == bad { INF } else { 0.25 };
            scalers.backward(index, &loss(&w, &[value; 3]), &mut opt).unwrap();
            let outcome = scalers.step(&mut opt).unwrap();
            assert_eq!(outcome.is_skipped().unwrap(), index == bad, "{index}");
            let again = scalers.backward(index, &loss(&w, &[1.0; 3]), &mut opt);
            assert_refused!(again, Error::Scaler(ScalerError::AlreadyStepped));
        }
        scalers.update().unwrap();
        let scales = [0, 1, 2].map(|index| scalers.get_scale(index).unwrap());
        let factor = |index| if index == bad { 0.5 } else { 1.0 };
        assert_eq!(scales, [8.0 * factor(0), 64.0 * factor(1), 512.0 * factor(2)]);
        assert_eq!(to_f64(&w), [0.5; 3]);
    });
}

#[test]
fn abandoning_one_of_three_losses_keeps_the_overflow_of_a_step() {
    let w = ones(Kind::Float, Device::Cpu);
    let mut opt = Descent::of([&w]);
    let mut scalers = three_losses(Device::Cpu);
    scalers.backward(0, &loss(&w, &[INF; 3]), &mut opt).unwrap();
    assert!(scalers.step(&mut opt).unwrap().is_skipped().unwrap());
    drop_gradients(&[w.shallow_clone()]);
    scalers.backward(1, &loss(&w, &[INF; 3]), &mut opt).unwrap();
    scalers.abandon(&mut opt).unwrap();
    assert_eq!(scalers.overflowed().unwrap(), [true, false, false]);
    scalers.update().unwrap();
    assert_eq!((scalers.get_scale(0).unwrap(), scalers.get_scale(1).unwrap()), (4.0, 64.0));
}
