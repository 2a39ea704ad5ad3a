//! The numbers of averages.

use serde_json::json;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::average::{Averaging, Ema, Swa};
use tch_amp::optim::Sgd;

use super::{model, random, set};
use testkit::python::Oracle;
use testkit::rng::Rng;
use testkit::{for_each_device, to_f64};

#[test]
fn random_averages_have_pytorchs_bits() {
    let Some(oracle) = Oracle::find("averages.py") else { return };
    let mut rng = Rng::new(3);
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    let cases: Vec<_> = (0..120)
        .map(|i| {
            let decays = [Some(0.0), Some(0.3), Some(0.5), Some(0.9), Some(0.999), None];
            // PyTorch rounds the weight of an equal average to f32, in f64, too.
            let choices = if kinds[i % 4] == Kind::Double { &decays[..5] } else { &decays };
            let decay = *rng.pick(choices);
            let size = 1 + rng.below(70) as i64;
            let updates: Vec<_> = (0..6).map(|_| random(&mut rng, size)).collect();
            (kinds[i % 4], decay, updates)
        })
        .collect();
    let input: Vec<_> = cases
        .iter()
        .map(|(kind, decay, updates)| {
            json!({"dtype": format!("{kind:?}"), "decay": decay, "updates": updates})
        })
        .collect();
    let output = oracle.run(&[], &json!(input).to_string());
    let theirs: Vec<Vec<Vec<f64>>> =
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(theirs.len(), cases.len());
    for (i, ((kind, decay, updates), theirs)) in cases.iter().zip(&theirs).enumerate() {
        let (vs, w) = model(*kind, updates[0].len() as i64);
        let averaging: Averaging = decay
            .map_or_else(|| Swa::default().into(), |decay| Ema { decay, ..Ema::default() }.into());
        let mut average = averaging.build(&vs).unwrap();
        for (numbers, expected) in updates.iter().zip(theirs) {
            set(&w, numbers);
            average.advance().unwrap();
            let bits = |values: &[f64]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let ours = to_f64(&average.average("w").unwrap());
            assert_eq!(bits(&ours), bits(expected), "case {i}: {kind:?}, {decay:?}");
        }
        assert_eq!(average.updates().unwrap(), 6);
    }
}

/// The average of the updates so far by its definition: a weighted mean, with the start as the first update unless
/// `debias` removes it.
fn by_definition(ema: Ema, updates: &[f64]) -> f64 {
    let decay = |t: usize| {
        let least = (1.0 + t as f64) / (10.0 + t as f64);
        if ema.warmup { ema.decay.min(least) } else { ema.decay }
    };
    let (mut sum, mut total) = (0.0, 0.0);
    for (t, value) in updates.iter().enumerate() {
        let share = if t == 0 && !ema.debias { 1.0 } else { 1.0 - decay(t) };
        let kept: f64 = (t + 1..updates.len()).map(decay).product();
        sum += share * kept * value;
        total += share * kept;
    }
    if ema.debias { sum / total } else { sum }
}

#[test]
fn warmup_and_debiasing_are_weighted_means() {
    let mut rng = Rng::new(4);
    for warmup in [false, true] {
        for debias in [false, true] {
            let ema = Ema { decay: 0.97, warmup, debias, ..Ema::default() };
            let (vs, w) = model(Kind::Double, 1);
            let mut average = ema.build(&vs).unwrap();
            let mut updates = Vec::new();
            for _ in 0..60 {
                updates.extend(random(&mut rng, 1));
                set(&w, &updates[updates.len() - 1..]);
                average.advance().unwrap();
                let (ours, expected) =
                    (to_f64(&average.average("w").unwrap())[0], by_definition(ema, &updates));
                assert!((ours - expected).abs() < 1e-12, "{ema:?}: {ours} is not {expected}");
            }
        }
    }
}

#[test]
fn an_equal_average_in_f64_is_the_mean() {
    let mut rng = Rng::new(5);
    let (vs, w) = model(Kind::Double, 1);
    let mut average = Swa::default().build(&vs).unwrap();
    let mut updates = Vec::new();
    for _ in 0..60 {
        updates.extend(random(&mut rng, 1));
        set(&w, &updates[updates.len() - 1..]);
        average.advance().unwrap();
        let mean = updates.iter().sum::<f64>() / updates.len() as f64;
        assert!((to_f64(&average.average("w").unwrap())[0] - mean).abs() < 1e-13);
    }
}

#[test]
fn a_skipped_step_leaves_the_averages_alone() {
    let (vs, w) = model(Kind::Float, 3);
    let mut opt = Sgd::default().build(&vs, 1.0).unwrap();
    let mut scaler = GradScaler::new(Device::Cpu).unwrap();
    let mut average = Ema { decay: 0.5, ..Ema::default() }.build(&vs).unwrap();
    for gradient in [1.0, f64::INFINITY, f64::NAN, 1.0] {
        opt.zero_grad().unwrap();
        scaler.backward(&(&w * gradient).sum(Kind::Float)).unwrap();
        let outcome = scaler.step(&mut opt).unwrap();
        scaler.update().unwrap();
        average.update(&outcome).unwrap();
    }
    // Nor does a step of a model without gradients move them.
    for _ in 0..3 {
        opt.zero_grad().unwrap();
        let outcome = scaler.step(&mut opt).unwrap();
        assert!(outcome.has_no_gradients());
        average.update(&outcome).unwrap();
    }
    // The weights are -1 and then -2.
    assert_eq!(to_f64(&average.average("w").unwrap()), [-1.5; 3]);
    assert_eq!(average.updates().unwrap(), 2);
}

#[test]
fn many_layouts_and_sizes_are_averaged() {
    let vs = tch::nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let mut variables = vec![
        root.var_copy("large", &Tensor::rand([300, 301], (Kind::Float, Device::Cpu))),
        root.var_copy("transposed", &Tensor::rand([20, 31], (Kind::Float, Device::Cpu))),
        root.var_copy("gapped", &Tensor::rand([6, 8], (Kind::Float, Device::Cpu))),
        root.var_copy("empty", &Tensor::rand([0, 3], (Kind::Float, Device::Cpu))),
        root.var_copy("scalar", &Tensor::rand([], (Kind::Float, Device::Cpu))),
        root.var_copy("reordered", &Tensor::rand([20, 31], (Kind::Float, Device::Cpu))),
    ];
    let other = Tensor::rand([31, 20], (Kind::Float, Device::Cpu));
    variables[1].set_data(&other.transpose(0, 1));
    variables[2].set_data(&Tensor::rand([6, 16], (Kind::Float, Device::Cpu)).slice(1, 0, 16, 2));
    let mut average = Ema { decay: 0.75, ..Ema::default() }.build(&vs).unwrap();
    average.advance().unwrap();
    let before: Vec<_> = variables.iter().map(|w| w.detach().copy()).collect();
    // The average keeps its order in memory.
    let reordered = before[5].transpose(0, 1).contiguous().transpose(0, 1);
    variables[5].set_data(&reordered);
    for w in &mut variables {
        drop(tch::no_grad(|| w.shallow_clone().g_mul_(&Tensor::from(3f32))));
    }
    average.advance().unwrap();
    let names = ["large", "transposed", "gapped", "empty", "scalar", "reordered"];
    for ((name, before), after) in names.iter().zip(before).zip(&variables) {
        let expected = before.lerp(&after.detach(), 0.25);
        assert_eq!(average.average(name).unwrap(), expected, "{name}");
    }
}

/// The average of a model that is cast later keeps its dtype.
#[test]
fn an_average_in_f64_follows_a_model_that_is_cast() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for decay in [0.0, 0.25, 0.75, 0.99] {
                let mut vs = VarStore::new(device);
                let w = vs.root().zeros("w", &[69]);
                vs.double();
                let mut rng = Rng::new(6);
                let start = random(&mut rng, 69);
                let set = |numbers: &[f64]| set(&w, numbers);
                let of_w = || to_f64(&w);
                set(&start);
                let mut average = Ema { decay, ..Ema::default() }.build(&vs).unwrap();
                average.advance().unwrap();
                let mut expected = of_w();
                vs.set_kind(kind);
                for _ in 0..3 {
                    set(&random(&mut rng, 69));
                    average.advance().unwrap();
                    for (mean, number) in expected.iter_mut().zip(of_w()) {
                        *mean = decay * *mean + (1.0 - decay) * number;
                    }
                }
                let ours = average.average("w").unwrap();
                assert_eq!(ours.kind(), Kind::Double);
                for (ours, mean) in to_f64(&ours).iter().zip(&expected) {
                    let off = (ours - mean).abs();
                    assert!(off < 1e-14, "{device:?} {kind:?} {decay}: {ours} is not {mean}");
                }
                average.copy_to_model().unwrap();
                let rounded = Tensor::from_slice(&to_f64(&ours));
                assert_eq!(of_w(), to_f64(&rounded.to_kind(kind)), "{device:?} {kind:?} {decay}");
            }
        }
    });
}
