//! The exponents of gradients, compared with plain loops over the same numbers in f64, and what is advised.

use serde::Deserialize;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::gradients::GradientError;
use tch_amp::insight::{HealthReport, ScaleHealth, Verdict};
use tch_amp::optim::Sgd;
use tch_amp::scaler::{GradScalerConfig, ScalerError};
use tch_amp::{Error, GradScaler};

use testkit::assert_refused;
use testkit::rng::Rng;
use testkit::rows::rows;
use testkit::tensors::{TIES, tie};
use testkit::{for_each_device, to_f64};

#[derive(Debug, Deserialize)]
struct Layer {
    name: String,
    zeros: f64,
    now: Now,
    exponents: Exponents,
}

#[derive(Debug, Deserialize)]
struct Now {
    below_normal: f64,
    lost: f64,
    edge: f64,
    overflowing: f64,
    headroom: Option<i32>,
}

#[derive(Debug, Deserialize)]
struct Exponents {
    zeros: u64,
    infinite: u64,
    nan: u64,
    first: i32,
    counts: Vec<u64>,
}

impl Exponents {
    fn elements(&self) -> u64 {
        self.zeros + self.infinite + self.nan + self.counts.iter().sum::<u64>()
    }
}

fn layers(report: &HealthReport) -> Vec<Layer> {
    rows(report, "layers")
}

fn model(report: &HealthReport) -> Layer {
    serde_json::from_value(serde_json::to_value(report).unwrap()["model"].take()).unwrap()
}

fn variable(vs: &VarStore, name: &str, size: &[i64]) -> Tensor {
    let (modules, last) = name.rsplit_once('.').unwrap_or(("", name));
    let parts = modules.split('.').filter(|part| !part.is_empty());
    parts.fold(vs.root(), |path, part| path / part).zeros(last, size)
}

/// Adds a variable whose gradient is `gradient`.
fn with_gradient(vs: &VarStore, name: &str, gradient: &Tensor) -> Tensor {
    let mut w = variable(vs, name, &gradient.size());
    no_grad(|| w.set_data(&gradient.zeros_like()));
    give_gradient(&w, gradient);
    w
}

fn give_gradient(w: &Tensor, gradient: &Tensor) {
    // The derivative of each element is exactly its factor.
    (w * gradient).sum(gradient.kind()).backward();
}

fn of_slice(values: &[f64], kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).to_device(device)
}

fn scaler(scale: f64, device: Device) -> GradScaler {
    let config = GradScalerConfig { init_scale: scale, ..Default::default() };
    config.build(device).unwrap()
}

/// A report on one layer that has these gradients at a scale.
fn report(values: &[f64], scale: f64) -> HealthReport {
    let vs = VarStore::new(Device::Cpu);
    let _w = with_gradient(&vs, "layer.w", &of_slice(values, Kind::Float, Device::Cpu));
    let mut health = ScaleHealth::new(&vs);
    health.observe(&scaler(scale, Device::Cpu)).unwrap();
    health.report().unwrap()
}

/// The whole part of log2|x|, by doubling and halving.
fn exponent(x: f64) -> i32 {
    let (mut x, mut exponent) = (x.abs(), 0);
    while x >= 2.0 {
        (x, exponent) = (x / 2.0, exponent + 1);
    }
    while x < 1.0 {
        (x, exponent) = (x * 2.0, exponent - 1);
    }
    exponent
}

/// Numbers of all magnitudes that a dtype has, and more, among them zeros, infinities and NaNs.
fn random(rng: &mut Rng, n: usize, kind: Kind) -> Vec<f64> {
    let (lowest, highest) = match kind {
        Kind::Half => (-28, 17),
        Kind::Double => (-1080, 1023),
        _ => (-152, 127),
    };
    let one = |rng: &mut Rng| match rng.below(40) {
        0 => 0.0,
        1 => -0.0,
        2 => f64::INFINITY,
        3 => f64::NEG_INFINITY,
        4 => f64::NAN,
        // Powers of two, at which exponents change.
        choice => {
            let power = lowest + rng.below((highest - lowest) as usize) as i32;
            let digits =
                if choice < 10 { 0.0 } else { rng.below(1 << 20) as f64 / f64::from(1 << 20) };
            let sign = if rng.one_in(2) { -1.0 } else { 1.0 };
            // In two steps, because 2^-1080 is zero.
            sign * (1.0 + digits) * 2f64.powi(power / 2) * 2f64.powi(power - power / 2)
        }
    };
    (0..n).map(|_| one(rng)).collect()
}

/// What a report must say of scaled gradients.
fn assert_shares(now: &Now, numbers: &[f64], context: &str) {
    let numbers = numbers.iter().filter(|x| x.is_finite() && **x != 0.0);
    let scaled: Vec<_> = numbers.map(|x| x.abs()).collect();
    let share = |which: &dyn Fn(f64) -> bool| match scaled.len() {
        0 => 0.0,
        all => scaled.iter().filter(|x| which(**x)).count() as f64 / all as f64,
    };
    let [normal, smallest, too_large] = [-14, -24, 16].map(|power| 2f64.powi(power));
    assert_eq!(now.below_normal, share(&|x| x < normal), "{context}");
    assert_eq!(now.lost, share(&|x| x < smallest), "{context}");
    assert_eq!(now.edge, share(&|x| x >= smallest && x < 2.0 * smallest), "{context}");
    assert_eq!(now.overflowing, share(&|x| x >= too_large), "{context}");
    let largest = scaled.iter().copied().fold(0.0, f64::max);
    // Beyond, the last bin is all that is known.
    if largest > 2f64.powi(-100) && largest < 2f64.powi(90) {
        assert_eq!(now.headroom, Some(15 - exponent(largest)), "{context}");
    }
}

#[test]
fn counts_and_shares_are_those_of_a_plain_loop() {
    const KINDS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double];
    for_each_device(|device| {
        for (seed, kind) in (0..).zip(KINDS.into_iter().cycle().take(12)) {
            let mut rng = Rng::new(seed);
            let scale_power = *rng.pick(&[0, 5, 13, 16, -3]);
            let vs = VarStore::new(device);
            let mut gradients = Vec::new();
            for layer in 0..4 {
                let size = *rng.pick(&[1, 7, 300, 2000]);
                let gradient = of_slice(&random(&mut rng, size, kind), kind, device);
                gradients.push(to_f64(&gradient));
                let _w = with_gradient(&vs, &format!("layers.{layer}.w"), &gradient);
            }
            let mut health = ScaleHealth::new(&vs);
            health.observe(&scaler(2f64.powi(scale_power), device)).unwrap();
            let report = health.report().unwrap();
            let layers = layers(&report);
            for (layer, numbers) in layers.iter().zip(&gradients) {
                let context = format!("seed {seed}, {kind:?}, {}", layer.name);
                let count = |which: &dyn Fn(&f64) -> bool| {
                    numbers.iter().filter(|x| which(x)).count() as u64
                };
                let exponents = &layer.exponents;
                assert_eq!(exponents.zeros, count(&|x| *x == 0.0), "{context}");
                assert_eq!(exponents.infinite, count(&|x| x.is_infinite()), "{context}");
                assert_eq!(exponents.nan, count(&|x| x.is_nan()), "{context}");
                assert_eq!(exponents.elements(), numbers.len() as u64, "{context}");
                for (place, counted) in (0i32..).zip(&exponents.counts) {
                    let wanted = exponents.first + place;
                    let here = |x: &f64| {
                        x.is_finite()
                            && *x != 0.0
                            && (exponent(*x) - scale_power).clamp(-160, 128) == wanted
                    };
                    assert_eq!(*counted, count(&here), "{context}, exponent {wanted}");
                }
                assert_shares(&layer.now, numbers, &context);
            }
            let all: Vec<_> = gradients.concat();
            assert_shares(&model(&report).now, &all, &format!("seed {seed}, all"));
            let bad = u64::from(all.iter().any(|x| !x.is_finite()));
            assert_eq!((report.observed, report.skipped, layers.len()), (1, bad, 4));
        }
    });
}

#[test]
fn scaled_and_unscaled_gradients_are_counted_alike() {
    for_each_device(|device| {
        for scale in [1024.0, 1.0] {
            let vs = VarStore::new(device);
            let w = vs.root().zeros("w", &[4]);
            let v = vs.root().zeros("v", &[2]);
            let mut opt = Sgd::default().build(vec![w.shallow_clone()], 0.1).unwrap();
            let mut scaler = scaler(scale, device);
            let factors = Tensor::from_slice(&[1f32, 1e-3, 1e-7, 0.0]).to_device(device);
            scaler.backward(&((&w * factors).sum(None) + (&v * 3.0).sum(None))).unwrap();
            let mut health = ScaleHealth::new(&vs);
            health.observe(&scaler).unwrap();
            let before = health.report().unwrap();
            health.clear();
            // Only the gradient of `w` is unscaled.
            scaler.unscale_(&mut opt).unwrap();
            health.observe(&scaler).unwrap();
            let after = health.report().unwrap();
            assert_eq!(before, after);
            // It stays so after an update.
            scaler.update().unwrap();
            health.clear();
            health.observe(&scaler).unwrap();
            assert_eq!(before, health.report().unwrap());
            let Exponents { first, counts, .. } = model(&after).exponents;
            assert_eq!(first + counts.len() as i32 - 1, 1);
            assert_eq!(after.scale, scale);
        }
    });
}

#[test]
fn observations_add_up_and_follow_the_scale() {
    let vs = VarStore::new(Device::Cpu);
    let w = with_gradient(&vs, "w", &Tensor::from_slice(&[1f32, f32::INFINITY]));
    let mut health = ScaleHealth::new(&vs);
    health.observe(&scaler(8.0, Device::Cpu)).unwrap();
    w.grad().copy_(&Tensor::from_slice(&[4f32, 0.0]));
    health.observe(&scaler(32.0, Device::Cpu)).unwrap();
    let report = health.report().unwrap();
    assert_eq!((report.observed, report.skipped, report.scale), (2, 1, 32.0));
    // 1 at 8 and 4 at 32 are the same gradient.
    let Layer { zeros, now, exponents, .. } = model(&report);
    assert_eq!((exponents.first, exponents.counts.as_slice()), (-3, [2].as_slice()));
    assert_eq!((exponents.zeros, exponents.infinite, zeros), (1, 1, 0.25));
    assert_eq!(now.headroom, Some(13));
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<HealthReport>(&text).unwrap(), report);
}

#[test]
fn layers_are_modules_in_their_order_or_what_the_program_says() {
    let vs = VarStore::new(Device::Cpu);
    let ones = Tensor::ones([2], (Kind::Float, Device::Cpu));
    for name in ["h.10.a.weight", "h.2.a.weight", "h.2.a.bias", "h.2.b.weight", "head"] {
        let _w = with_gradient(&vs, name, &ones);
    }
    // It has no gradient.
    let _unused = variable(&vs, "unused.w", &[3]);
    let scaler = scaler(1.0, Device::Cpu);
    let names = |mut health: ScaleHealth| {
        health.observe(&scaler).unwrap();
        let layers = layers(&health.report().unwrap());
        layers.into_iter().map(|l| (l.name, l.exponents.elements())).collect::<Vec<_>>()
    };
    let own = |list: &[(&str, u64)]| {
        list.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect::<Vec<_>>()
    };
    let modules = own(&[("h.2.a", 4), ("h.2.b", 2), ("h.10.a", 2), ("", 2)]);
    assert_eq!(names(ScaleHealth::new(&vs)), modules);
    let block = |name: &str| name.split('.').take(2).collect::<Vec<_>>().join(".");
    let blocks = own(&[("h.2", 6), ("h.10", 2), ("head", 2)]);
    assert_eq!(names(ScaleHealth::with_layers(&vs, block)), blocks);
}

#[test]
fn every_layout_is_counted() {
    let vs = VarStore::new(Device::Cpu);
    let table = variable(&vs, "table.w", &[4, 3]);
    let rows = Tensor::from_slice(&[1i64, 1, 3]);
    let looked_up = Tensor::embedding(&table, &rows, -1, false, true);
    (looked_up * 4.0).sum(None).backward();
    assert!(table.grad().is_sparse());
    // A gradient with gaps and one that was expanded.
    let gaps = variable(&vs, "gaps.w", &[2, 3]);
    gaps.repeat([1, 2]).slice(1, 0, 6, 2).sum(None).backward();
    let frozen = with_gradient(&vs, "frozen.w", &Tensor::ones([5], (Kind::Float, Device::Cpu)));
    let _frozen = frozen.set_requires_grad(false);
    let mut health = ScaleHealth::new(&vs);
    health.observe(&GradScaler::disabled()).unwrap();
    let layers = layers(&health.report().unwrap());
    let counts: Vec<_> = layers.iter().map(|l| (l.name.as_str(), &l.exponents)).collect();
    assert_eq!(counts.len(), 2);
    // Three looked-up rows, two of which are the same row of the table.
    assert_eq!((counts[1].0, counts[1].1.first, &counts[1].1.counts), ("table", 2, &vec![9]));
    assert_eq!(counts[0].1.elements(), 6);
}

/// More elements than one thread counts.
#[test]
fn many_elements_are_counted() {
    for_each_device(|device| {
        let vs = VarStore::new(device);
        let exponents = Tensor::arange(300_000, (Kind::Float, device)).remainder(40) - 20;
        for name in ["a.w", "b.w"] {
            let _w = with_gradient(&vs, name, &exponents.exp2());
        }
        let mut health = ScaleHealth::new(&vs);
        for _ in 0..2 {
            health.observe(&GradScaler::disabled()).unwrap();
        }
        let layers = layers(&health.report().unwrap());
        for layer in &layers {
            assert_eq!((layer.exponents.first, layer.exponents.counts.len()), (-20, 40));
            assert!(layer.exponents.counts.iter().all(|count| *count == 15_000), "{layer:?}");
        }
        assert_eq!(layers.len(), 2);
    });
}

#[test]
fn what_cannot_be_counted_is_refused_and_nothing_is_counted() {
    let vs = VarStore::new(Device::Cpu);
    let w = variable(&vs, "layer.w", &[2]);
    let mut health = ScaleHealth::new(&vs);
    let mut scaler = scaler(8.0, Device::Cpu);
    assert_refused!(health.observe(&scaler), Error::InvalidArgument { name: "health", .. });
    assert_eq!(
        health.report().unwrap().to_string(),
        "at 1: no gradient that is neither zero nor infinite: nothing to judge"
    );

    let mut opt = Sgd::default().build(&vs, 0.1).unwrap();
    scaler.backward(&w.sum(None)).unwrap();
    health.observe(&scaler).unwrap();
    let before = health.report().unwrap();
    scaler.step(&mut opt).unwrap();
    let late = health.observe(&scaler);
    assert!(matches!(late, Err(Error::Scaler(ScalerError::AlreadyStepped))), "{late:?}");
    scaler.update().unwrap();
    assert_eq!(health.report().unwrap(), before);

    let eighth = variable(&vs, "eighth.w", &[2]);
    let mut health = ScaleHealth::new(&vs);
    opt.zero_grad().unwrap();
    scaler.backward(&(&w + &eighth).sum(None)).unwrap();
    health.observe(&scaler).unwrap();
    let before = health.report().unwrap();
    let narrow = eighth.grad().to_kind(Kind::Float8e5m2);
    no_grad(|| eighth.grad().set_data(&narrow));
    let error = health.observe(&scaler).unwrap_err();
    assert!(matches!(error, Error::Gradient(GradientError::Unsupported { .. })), "{error}");
    assert!(error.to_string().contains("`eighth.w` [2]"), "{error}");
    assert_eq!(before, health.report().unwrap());
}

/// Normal numbers by the sum of twelve uniform ones.
fn normal(rng: &mut Rng, n: usize, deviation: f64) -> Vec<f64> {
    let mut uniform = || rng.below(1 << 30) as f64 / f64::from(1 << 30);
    let mut one = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
    (0..n).map(|_| one() * deviation).collect()
}

#[test]
fn planted_cases_get_their_advice() {
    let mut rng = Rng::new(1);
    let scale = 2f64.powi(13);
    let healthy = report(&normal(&mut rng, 20_000, 800.0), scale);
    assert_eq!(healthy.verdict, Verdict::Healthy);
    assert_eq!(healthy.to_string(), "at 2^13: 0 % underflow, 4 binades of headroom: healthy");

    // One in five is far below the rest.
    let mut low = normal(&mut rng, 8000, 1e-3);
    low.extend(normal(&mut rng, 2000, 2f64.powi(-27)));
    let at = |better: f64| {
        let scaled: Vec<_> = low.iter().map(|x| x * (better / scale)).collect();
        model(&report(&scaled, better)).now
    };
    let low = report(&low, scale);
    let Verdict::TooLow { scale: better } = low.verdict else { panic!("{low}") };
    assert!(at(scale).lost > 0.1 && at(better).lost <= 0.01, "{low}");
    assert!(at(better / 2.0).lost.max(at(better / 2.0).edge) > 0.01, "{low}");
    assert!(low.to_string().contains(": too low, raise init_scale to at least 2^"), "{low}");
    assert!(low.to_string().ends_with("0 % zeros"), "{low}");

    // These have been fp16: what underflowed is zero.
    let rounded = of_slice(&normal(&mut rng, 20_000, 2f64.powi(-22)), Kind::Half, Device::Cpu);
    let rounded = report(&to_f64(&rounded), scale);
    let Layer { zeros, now, .. } = model(&rounded);
    assert_eq!(now.lost, 0.0);
    assert!(zeros > 0.05 && now.edge > 0.05, "{rounded}");
    assert!(matches!(rounded.verdict, Verdict::TooLow { .. }), "{rounded}");

    let mut wide = normal(&mut rng, 5000, 2f64.powi(-30));
    wide.extend(normal(&mut rng, 5000, 20_000.0));
    let wide = report(&wide, scale);
    assert_eq!(wide.verdict, Verdict::TooWide, "{wide}");
    assert!(wide.to_string().contains("use bf16"), "{wide}");

    let below = report(&[1.0, f64::INFINITY], 0.5);
    assert_eq!(below.verdict, Verdict::BelowOne);
    let advice = "the scale keeps falling below 1: the model itself overflows fp16, use bf16";
    assert!(below.to_string().ends_with(advice), "{below}");

    let overflowing = report(&[1.0, f64::NAN], scale);
    assert_eq!(overflowing.verdict, Verdict::Overflowing);
    assert!(overflowing.to_string().contains("1 of 1 iterations skipped"), "{overflowing}");
    assert_eq!(report(&[0.0, 0.0], scale).verdict, Verdict::Unknown);
}

#[test]
fn a_tied_weight_is_counted_in_the_layer_of_its_first_name() {
    for way in TIES {
        for _ in 0..8 {
            let vs = VarStore::new(Device::Cpu);
            let gradient = of_slice(&[1.0, 2.0], Kind::Float, Device::Cpu);
            let w = with_gradient(&vs, "head", &gradient);
            tie(&vs, way, "embedding", &w);
            let mut health = ScaleHealth::with_layers(&vs, str::to_owned);
            health.observe(&GradScaler::disabled()).unwrap();
            let report = health.report().unwrap();
            let layers = layers(&report);
            let layers: Vec<_> = layers.iter().map(|layer| layer.name.as_str()).collect();
            assert_eq!(layers, ["embedding"], "{way:?}");
        }
    }
}
