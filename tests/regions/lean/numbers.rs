//! Errors beside f64, and bits beside autocast.

use tch::{Device, Kind, Tensor};
use tch_amp::Autocast;
use tch_amp::lean::LinearCrossEntropyConfig;

use testkit::bits::bits;

use super::{Operands, region, relative, usual};

/// The loss and the gradients without their scale, as f64.
fn run(
    operands: &Operands,
    kind: Kind,
    scale: f64,
    loss: impl Fn(&Operands) -> Tensor,
) -> (Tensor, Vec<Tensor>) {
    let own = operands.to(Kind::Float);
    let loss = region(own.hidden.device(), kind).run(|| loss(&own)).unwrap();
    assert_eq!(loss.kind(), Kind::Float);
    (&loss * scale).backward();
    (loss.detach().to_kind(Kind::Double), own.gradients().iter().map(|g| g / scale).collect())
}

/// The dtypes of a device with the scales of their losses.
fn dtypes(device: Device) -> Vec<(Kind, f64)> {
    let mut dtypes = vec![(Kind::Float, 1.0), (Kind::BFloat16, 1.0)];
    dtypes.extend([(Kind::Half, 1.0), (Kind::Half, 65536.0)]);
    if device != Device::Cpu {
        dtypes.retain(|(kind, _)| *kind != Kind::Float);
    }
    dtypes
}

/// Sizes with so many rows that the errors of single numbers even out.
const SIZES: [[i64; 3]; 2] = [[400, 24, 600], [250, 40, 999]];

/// The errors are those of autocast within a twentieth, also of blocks, and at any scale.
#[test]
fn errors_are_those_of_autocast_or_smaller() {
    testkit::for_each_device(|device| {
        for (size, has_bias) in SIZES.into_iter().flat_map(|size| [(size, false), (size, true)]) {
            let operands = Operands::random(device, size, has_bias);
            let exact = operands.to(Kind::Double);
            let usual_config = LinearCrossEntropyConfig::default();
            let exact_loss = usual(&exact, &usual_config);
            exact_loss.backward();
            let exact_gradients = exact.gradients();
            for (kind, scale) in dtypes(device) {
                let autocast = run(&operands, kind, scale, |own| usual(own, &usual_config));
                for max_bytes in [None, Some(4000), Some(1 << 20)] {
                    let config = LinearCrossEntropyConfig { max_bytes, ..Default::default() };
                    let lean = run(&operands, kind, scale, |own| own.loss(&config));
                    let what = format!("{device:?} {size:?} {kind:?} at {scale}, {max_bytes:?}");
                    // The logits are the same; what is left are roundings of f32 sums.
                    let [ours, theirs] =
                        [&lean.0, &autocast.0].map(|loss| relative(loss, &exact_loss));
                    assert!(ours <= (theirs * 1.05).max(1e-6), "{what}: loss {ours}, {theirs}");
                    for (place, exact) in exact_gradients.iter().enumerate() {
                        let [ours, theirs] =
                            [&lean.1, &autocast.1].map(|all| relative(&all[place], exact));
                        assert!(
                            ours <= (theirs * 1.05).max(1e-6),
                            "{what}: gradient {place} {ours}, {theirs}"
                        );
                    }
                }
            }
        }
    });
}

/// Without blocks, nearly all numbers have autocast's bits, and the others are next to them.
#[test]
fn gradients_have_the_bits_of_autocast() {
    testkit::for_each_device(|device| {
        for size in SIZES {
            let operands = Operands::random(device, size, true);
            let ignored = operands.targets.masked_fill(&operands.targets.remainder(5).eq(0), -100);
            let operands = Operands { targets: ignored, ..operands };
            let config = LinearCrossEntropyConfig::default();
            for (kind, scale) in dtypes(device) {
                let autocast = run(&operands, kind, scale, |own| usual(own, &config));
                let lean = run(&operands, kind, scale, |own| own.loss(&config));
                let what = format!("{device:?} {size:?} {kind:?} at {scale}");
                for (place, (ours, theirs)) in lean.1.iter().zip(&autocast.1).enumerate() {
                    let equal = ours.eq_tensor(theirs).to_kind(Kind::Double).mean(Kind::Double);
                    let (equal, apart) = (equal.double_value(&[]), relative(ours, theirs));
                    println!("{what}: gradient {place}: {equal} equal, {apart} apart");
                    if kind != Kind::Float && ours.numel() > 10_000 {
                        assert!(equal >= 0.995, "{what}: gradient {place}: {equal}");
                    }
                    let most = if kind == Kind::Float { 1e-6 } else { 1e-3 };
                    assert!(apart <= most, "{what}: gradient {place}: {apart}");
                }
            }
        }
    });
}

/// A region that keeps linear layers in f32 keeps this one, too.
#[test]
fn an_override_of_linear_holds() {
    let operands = Operands::random(Device::Cpu, [12, 8, 30], true);
    for max_bytes in [None, Some(256)] {
        let config = LinearCrossEntropyConfig { max_bytes, ..Default::default() };
        let of = |region: Autocast| {
            let own = operands.to(Kind::Float);
            let loss = region.run(|| own.loss(&config)).unwrap();
            loss.backward();
            [bits(&loss), bits(&own.hidden.grad()), bits(&own.weight.grad())]
        };
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let outside = of(region.enabled(false));
        assert_eq!(of(region.keep_in_f32(["linear"])), outside, "{max_bytes:?}");
        assert_ne!(of(region), outside, "{max_bytes:?}");
    }
}

/// Gradients of blocks have no scale in them, nor what a mean divides by: without a scale they lose nothing that
/// autocast's have at a large one.
#[test]
fn blocks_of_fp16_need_no_scale() {
    let operands = Operands::random(Device::Cpu, SIZES[0], false);
    let exact = operands.to(Kind::Double);
    usual(&exact, &LinearCrossEntropyConfig::default()).backward();
    let config = LinearCrossEntropyConfig { max_bytes: Some(1 << 14), ..Default::default() };
    let of = |scale| run(&operands, Kind::Half, scale, |own| own.loss(&config)).1;
    let autocast =
        |scale| run(&operands, Kind::Half, scale, |own| usual(own, &Default::default())).1;
    let (small, large) = (of(1.0), of(65536.0));
    let (lossy, scaled) = (autocast(1.0), autocast(65536.0));
    for (place, exact) in exact.gradients().iter().enumerate() {
        assert_eq!(small[place], large[place]);
        let error = |all: &[Tensor]| relative(&all[place], exact);
        let [ours, lossy, scaled] = [&small, &lossy, &scaled].map(|all| error(all));
        assert!(ours <= scaled * 1.05, "{ours} {scaled}");
        assert!(ours * 1.1 < lossy, "{ours} {lossy}: autocast's lose some at a scale of 1");
    }
}

/// Rows are computed on libtorch's threads, each by one.
#[test]
fn threads_change_no_bit() {
    let operands = Operands::random(Device::Cpu, [80, 16, 1001], true);
    let threads = tch::get_num_threads();
    let config = LinearCrossEntropyConfig::default();
    let of = |count| {
        tch::set_num_threads(count);
        let own = operands.to(Kind::BFloat16);
        let loss = own.loss(&config);
        loss.backward();
        tch::set_num_threads(threads);
        (bits(&loss), bits(&own.hidden.grad()))
    };
    assert_eq!(of(1), of(2));
}
