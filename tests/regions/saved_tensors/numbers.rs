//! The numbers of what is kept in fewer bits, beside plain loops.

use tch::{Device, Kind, Tensor};
use tch_amp::memory::SavedTensors;

use testkit::{for_each_device, to_f64};

use super::{activation, forms, random};

/// The gradient of `sum(sin(x))` at the numbers of an activation, so that its cosines are of what was kept.
fn cosines(form: SavedTensors, x: &Tensor, leaf: &Tensor) -> Vec<f64> {
    let sines = form.run(|| x.sin()).unwrap();
    assert_eq!(sines, x.sin(), "the forward pass stays");
    let mut grad = leaf.grad();
    if grad.defined() {
        let _zero = grad.zero_();
    }
    sines.to_kind(Kind::Double).sum(Kind::Double).backward();
    to_f64(&leaf.grad())
}

/// The positive numbers of e4m3, in their order, by their definition: four bits of exponent, three of fraction.
fn e4m3() -> Vec<f64> {
    let number = |code: i32| {
        let (exponent, fraction) = (code / 8, f64::from(code % 8));
        match exponent {
            0 => fraction / 8.0 * 2f64.powi(-6),
            _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
        }
    };
    (0..127).map(number).collect()
}

/// The nearest number of e4m3, and of two that are as near the one whose code is even.
fn rounded(x: f64, numbers: &[f64]) -> f64 {
    let size = x.abs();
    let above = numbers.partition_point(|number| *number < size).min(numbers.len() - 1);
    let below = above.saturating_sub(1);
    let (down, up) = (size - numbers[below], numbers[above] - size);
    let place = match down.partial_cmp(&up).unwrap() {
        _ if numbers[above] == size => above,
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Greater => above,
        std::cmp::Ordering::Equal => {
            if below % 2 == 0 {
                below
            } else {
                above
            }
        }
    };
    numbers[place].copysign(x)
}

/// A row in eight bits, by a plain loop.
fn fp8(row: &[f64]) -> Vec<f64> {
    let numbers = e4m3();
    if row.iter().any(|x| x.is_nan()) {
        return vec![f64::NAN; row.len()];
    }
    let largest = row.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
    let mut factor = 2f64.powi(-126);
    while largest / factor > 448.0 {
        factor *= 2.0;
    }
    // The largest finite number stays finite where rounding would take it above.
    let kept = |x: &f64| match x.is_finite() {
        true => {
            // The smallest code takes the place of 0 for a number that is not 0.
            let least = if *x == 0.0 { 0.0 } else { 2f64.powi(-9) };
            let rounded = rounded(x / factor, &numbers).abs().max(least).copysign(*x) * factor;
            rounded.clamp(-f64::from(f32::MAX), f64::from(f32::MAX))
        }
        false => *x,
    };
    row.iter().map(kept).collect()
}

fn assert_cosines(got: &[f64], kept: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), kept.len());
    for (i, (got, kept)) in got.iter().zip(kept).enumerate() {
        let want = kept.cos();
        let fits = if want.is_nan() { got.is_nan() } else { (got - want).abs() <= tolerance };
        assert!(fits, "{what}: gradient {i} is {got}, and cos({kept}) is {want}");
    }
}

#[test]
fn half_keeps_f32_numbers_in_bf16() {
    for_each_device(|device| {
        let (leaf, x) = activation(device, Kind::Float, [96, 64]);
        let kept = to_f64(&x.to_kind(Kind::BFloat16));
        assert_cosines(&cosines(SavedTensors::half(), &x, &leaf), &kept, 1e-6, "half");
        // Others it leaves alone.
        for (kind, tolerance) in [(Kind::Double, 1e-15), (Kind::BFloat16, 4e-3)] {
            let (leaf, x) = activation(device, kind, [96, 64]);
            let got = cosines(SavedTensors::half(), &x, &leaf);
            assert_cosines(&got, &to_f64(&x), tolerance, "another dtype");
        }
    });
}

#[test]
fn fp8_keeps_rows_in_e4m3_with_a_power_of_two() {
    for_each_device(|device| {
        // Rows of very different sizes, one of zeros, ties between codes, and numbers that f32 has only subnormally.
        let scales: Vec<f32> = (0..96).map(|i| 2f32.powi((i * 5) % 240 - 145)).collect();
        let scales = Tensor::from_slice(&scales).view([96, 1]).to_device(device);
        let mut numbers = random(device, Kind::Float, [96, 64]) * scales;
        let ties: Vec<f32> = (0..64).map(|i| 448.0 - 16.0 * i as f32 / 2.0).collect();
        numbers.get(3).copy_(&Tensor::from_slice(&ties));
        let _zero = numbers.get(5).zero_();
        let _ones = numbers.get(7).fill_(1.875);
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            if kind == Kind::Half {
                // Its largest number stays finite as well.
                numbers = numbers.detach().clamp(-60000.0, 60000.0);
                let _largest = numbers.get(9).fill_(65504.0);
            }
            let leaf = numbers.detach().to_kind(kind).copy().set_requires_grad(true);
            let one = Tensor::ones([64], (kind, device)).set_requires_grad(true);
            let x = &leaf * one;
            let largest = if kind == Kind::Half { 65504.0 } else { f64::MAX };
            let mut kept: Vec<f64> = to_f64(&x).chunks(64).flat_map(fp8).collect();
            kept.iter_mut().for_each(|x| *x = x.clamp(-largest, largest));
            // The argument of a cosine is reduced in f32, and half precision rounds it.
            let tolerance = if kind == Kind::Float { 1e-6 } else { 4e-3 };
            let got = cosines(SavedTensors::fp8_rows(), &x, &leaf);
            assert_cosines(&got, &kept, tolerance, &format!("{kind:?}"));
        }
    });
}

/// The gradient of a product has the other operand as it was kept, without any further rounding.
#[test]
fn fp8_keeps_what_is_not_finite() {
    for_each_device(|device| {
        let numbers = random(device, Kind::Float, [128, 64]);
        let put = |row: i64, column: i64, x: f64| drop(numbers.get(row).get(column).fill_(x));
        put(1, 5, f64::INFINITY);
        put(2, 0, f64::NEG_INFINITY);
        put(2, 1, f64::INFINITY);
        put(3, 63, f64::NAN);
        put(4, 1, f64::from(f32::MAX));
        put(5, 1, -f64::from(f32::MIN_POSITIVE) / 8.0);
        let leaf = numbers.set_requires_grad(true);
        let one = Tensor::ones([64], (Kind::Float, device)).set_requires_grad(true);
        let x = &leaf * one;
        let other = Tensor::ones([128, 64], (Kind::Float, device)).set_requires_grad(true);
        let product = SavedTensors::fp8_rows().run(|| &x * &other).unwrap();
        product.sum(Kind::Float).backward();
        let kept: Vec<f64> = to_f64(&x).chunks(64).flat_map(fp8).collect();
        for (i, (got, kept)) in to_f64(&other.grad()).iter().zip(&kept).enumerate() {
            assert!(got == kept || (got.is_nan() && kept.is_nan()), "{i}: {got}, {kept}");
        }
    });
}

/// Short dimensions share a factor with the next ones, in the order of the memory.
#[test]
fn a_row_has_at_least_32_numbers() {
    let leaf = random(Device::Cpu, Kind::Float, [96, 64]).set_requires_grad(true);
    let x = leaf.view([24, 32, 8])
        * Tensor::ones([8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let kept: Vec<f64> = to_f64(&x).chunks(256).flat_map(fp8).collect();
    let other = x.detach().ones_like().set_requires_grad(true);
    SavedTensors::fp8_rows().run(|| &x * &other).unwrap().sum(Kind::Float).backward();
    assert_eq!(to_f64(&other.grad()), kept);
    // A transposed activation has the rows of its memory.
    let (_, x) = activation(Device::Cpu, Kind::Float, [96, 64]);
    let kept: Vec<f64> = to_f64(&x).chunks(64).flat_map(fp8).collect();
    let other = x.detach().tr().ones_like().set_requires_grad(true);
    SavedTensors::fp8_rows().run(|| x.tr() * &other).unwrap().sum(Kind::Float).backward();
    assert_eq!(to_f64(&other.grad().tr()), kept);
}

/// Views that leave parts of a storage out are kept with their own numbers, several of one storage at once.
#[test]
fn parts_of_a_tensor_are_kept_alone() {
    for (name, form) in forms() {
        let (_, x) = activation(Device::Cpu, Kind::Float, [128, 256]);
        let losses = [0, 1, 2, 3].map(|i| {
            let part = x.narrow(1, 64 * i, 64);
            let part = if i == 2 { part.tr() } else { part };
            let other = part.detach().ones_like().set_requires_grad(true);
            let loss = form.run(|| &part * &other).unwrap().sum(Kind::Float);
            (loss, part, other)
        });
        for (loss, part, other) in losses {
            let got = Tensor::run_backward(&[loss], &[&other], true, false);
            let rows = part.detach().copy();
            let kept = match name {
                "half" => to_f64(&rows.to_kind(Kind::BFloat16)),
                "fp8_rows" if part.size()[0] == 64 => {
                    let by_rows: Vec<f64> = to_f64(&part.tr()).chunks(64).flat_map(fp8).collect();
                    to_f64(&Tensor::from_slice(&by_rows).view([128, 64]).tr())
                }
                "fp8_rows" => to_f64(&rows).chunks(64).flat_map(fp8).collect(),
                _ => to_f64(&rows),
            };
            assert_eq!(to_f64(&got[0]), kept, "{name}");
        }
    }
}
