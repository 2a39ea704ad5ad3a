//! What a pass through the loss takes above its operands.

use tch::{Device, Kind, Tensor};
use tch_amp::lean::LinearCrossEntropyConfig;
use tch_amp::memory::peak_during;

use super::{Operands, region, usual};

/// The peak of the bytes that the loss and its backward pass allocate.
fn peak(operands: &Operands, loss: impl Fn(&Operands) -> Tensor) -> u64 {
    let own = operands.to(Kind::Float);
    let ((), bytes) = peak_during(|| {
        region(Device::Cpu, Kind::BFloat16).run(|| loss(&own)).unwrap().backward();
    })
    .unwrap();
    bytes
}

/// What libtorch takes above the logits for their product in half precision: on a processor without instructions for
/// bf16, the logits in f32.
fn scratch(operands: &Operands, logits: u64) -> u64 {
    let own = operands.to(Kind::BFloat16);
    let (product, bytes) =
        peak_during(|| tch::no_grad(|| own.hidden.linear(&own.weight, None::<&Tensor>))).unwrap();
    assert_eq!(product.numel() as u64 * 2, logits);
    bytes - logits
}

/// The logits are most of what a wide head takes: kept once in half precision, or not at all.
#[test]
fn logits_are_kept_once_or_by_the_block() {
    let operands = Operands::random(Device::Cpu, [512, 16, 8192], false);
    let logits: u64 = 512 * 8192 * 2;
    let config = LinearCrossEntropyConfig::default();
    let autocast = peak(&operands, |own| usual(own, &config));
    let kept = peak(&operands, |own| own.loss(&config));
    let blocks = LinearCrossEntropyConfig { max_bytes: Some(1 << 20), ..Default::default() };
    let in_blocks = peak(&operands, |own| own.loss(&blocks));
    println!("{autocast} bytes with autocast, {kept} kept, {in_blocks} in blocks of a MiB");
    let scratch = scratch(&operands, logits);
    let (kept, autocast) = (kept - scratch, autocast - scratch);
    assert!(kept as f64 <= 0.40 * autocast as f64, "{kept} of {autocast} without {scratch}");
    // The logits, the gradients of the operands and their casts.
    let operands: u64 = 8192 * 16 * 8;
    assert!(kept <= logits + 2 * operands, "{kept} for {logits} of logits");
    assert!(in_blocks <= (1 << 20) + 4 * operands, "{in_blocks} in blocks");
}

/// Of a wide head, blocks take a gradient of the weight in f32, and the weight in half precision.
#[test]
fn blocks_take_the_gradient_of_the_weight_once() {
    let operands = Operands::random(Device::Cpu, [64, 512, 32768], false);
    let config = LinearCrossEntropyConfig { max_bytes: Some(1 << 20), ..Default::default() };
    let own = operands.to(Kind::Float);
    let region = region(Device::Cpu, Kind::BFloat16);
    let pass = || region.run(|| own.loss(&config)).unwrap().backward();
    // The first one makes the gradients.
    pass();
    let ((), bytes) = peak_during(pass).unwrap();
    let weight = 32768 * 512;
    let products = (4 << 20) * 6;
    assert!(bytes <= weight * (4 + 2) + products + (3 << 20), "{bytes} for {weight} weights");
}
