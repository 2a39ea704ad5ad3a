//! bf16 gradients on a GPU, for which libtorch has no AMP kernel: checking them only reads, and unscaling rounds once.

use half::bf16;
use tch::{Device, Kind, Tensor};
use tch_amp::{GradScaler, autocast};

use crate::iteration::Nothing;
use testkit::optimizers::scaler;
use testkit::simulation::Simulation;
use testkit::to_f64;

/// A weight whose gradient is `gradient`.
fn with_gradient(gradient: &Tensor) -> Tensor {
    let w = gradient.zeros_like().set_requires_grad(true);
    (&w * gradient).sum(Kind::Float).backward();
    w
}

#[test]
fn checking_bf16_gradients_only_reads() {
    let Some(simulation) = Simulation::find() else { return };
    let cuda = (Kind::BFloat16, Device::Cuda(0));
    for bad in [None, Some(f64::NAN), Some(f64::NEG_INFINITY)] {
        let gradients = [Tensor::randn([1 << 16], cuda), Tensor::randn([7], cuda)];
        if let Some(bad) = bad {
            let _filled = gradients[1].get(3).fill_(bad);
        }
        let mut opt = Nothing(gradients.iter().map(with_gradient).collect());
        let before: Vec<_> = opt.0.iter().map(|w| to_f64(&w.grad())).map(bits).collect();
        let mut scaler = GradScaler::skip_only(Device::Cuda(0)).unwrap();
        let versions = |opt: &Nothing| -> Vec<_> {
            opt.0.iter().map(|w| w.grad().f_internal_version().unwrap()).collect()
        };
        let known = versions(&opt);
        let ((), counts) = simulation.count(|| scaler.unscale_(&mut opt).unwrap());
        assert_eq!(versions(&opt), known, "checking has written to a gradient");
        assert!(counts.peak_bytes < 64 * 512, "checking has copied a gradient: {counts:?}");
        let after: Vec<_> = opt.0.iter().map(|w| to_f64(&w.grad())).map(bits).collect();
        assert_eq!(after, before);
        assert_eq!(scaler.step(&mut opt).unwrap().is_stepped().unwrap(), bad.is_none());
        scaler.update().unwrap();
    }
}

fn bits(values: Vec<f64>) -> Vec<u64> {
    // All NaNs count as equal.
    values.into_iter().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }).collect()
}

/// Layouts with and without gaps and without elements, in an fp16 region, in which stacking would cast bf16 to fp16.
#[test]
fn bf16_gradients_are_multiplied_in_f32_and_rounded_once() {
    let Some(simulation) = Simulation::find() else { return };
    let cuda = (Kind::BFloat16, Device::Cuda(0));
    let gradients = [
        Tensor::randn([1000], cuda),
        Tensor::randn([30, 20], cuda).transpose(0, 1),
        Tensor::randn([40, 30], cuda).slice(1, 0, 30, 3),
        Tensor::randn([0, 3], cuda),
        Tensor::randn([], cuda),
    ];
    let weights: Vec<_> = gradients.iter().map(with_gradient).collect();
    for (w, gradient) in weights.iter().zip(&gradients) {
        // Sets the exact layout, which backward does not keep.
        w.grad().set_data(gradient);
    }
    let scaled: Vec<_> = weights.iter().map(|w| to_f64(&w.grad())).collect();
    let mut opt = Nothing(weights);
    let mut scaler = scaler(Device::Cuda(0), 3.0);
    let elements: usize = scaled.iter().map(Vec::len).sum();
    let unscale = || autocast(Device::Cuda(0), || scaler.unscale_(&mut opt)).unwrap().unwrap();
    let ((), counts) = simulation.count(unscale);
    // A small tensor takes 512 bytes, whatever its size.
    let most = 4 * elements + 64 * 512;
    assert!(counts.peak_bytes <= most as i64, "{counts:?} for {elements} elements");
    let inverse = (1.0 / 3.0) as f32;
    for (w, scaled) in opt.0.iter().zip(scaled) {
        let want = scaled.iter().map(|g| bf16::from_f32(*g as f32 * inverse).to_f64());
        assert_eq!(to_f64(&w.grad()), want.collect::<Vec<_>>(), "{:?}", w.size());
    }
    assert!(scaler.step(&mut opt).unwrap().is_stepped().unwrap());
}

/// Together more than the scratch memory holds at a time, and one that alone is larger than it.
#[test]
fn large_bf16_gradients_are_converted_in_parts() {
    let Some(simulation) = Simulation::find() else { return };
    let sizes = [9i64 << 20, 9 << 20, 17 << 20, 1 << 20];
    let cuda = (Kind::BFloat16, Device::Cuda(0));
    let weights = sizes.map(|size| {
        let w = Tensor::zeros([size], cuda).set_requires_grad(true);
        (&w * 24.0).sum(Kind::Float).backward();
        w
    });
    let mut opt = Nothing(weights.into());
    let mut scaler = scaler(Device::Cuda(0), 8.0);
    let ((), counts) = simulation.count(|| scaler.unscale_(&mut opt).unwrap());
    let most = (4 * sizes[2]) + 64 * 512;
    assert!(counts.peak_bytes <= most, "{counts:?}");
    for w in &opt.0 {
        assert_eq!(w.grad().min().double_value(&[]), 3.0);
        assert_eq!(w.grad().max().double_value(&[]), 3.0);
    }
}

/// Rounding to bf16 yields infinities that f32 does not have.
#[test]
fn an_overflow_in_unscaling_is_found_before_it_is_written() {
    let Some(_simulation) = Simulation::find() else { return };
    let most = f64::from(f32::from_bits(0x7f7f_0000));
    for (gradient, scale, is_stepped) in
        [(most, 1.0, true), (most, 0.5, false), (-most, 0.997, false), (1.0, 0.5, true)]
    {
        let gradient = Tensor::from_slice(&[0.0, gradient]).to_kind(Kind::BFloat16);
        let mut opt = Nothing(vec![with_gradient(&gradient.to_device(Device::Cuda(0)))]);
        let mut scaler = scaler(Device::Cuda(0), scale);
        scaler.unscale_(&mut opt).unwrap();
        let stepped = scaler.step(&mut opt).unwrap().is_stepped().unwrap();
        assert_eq!(stepped, is_stepped, "{scale}");
    }
}
