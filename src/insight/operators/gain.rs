//! What the matrix products of a report would gain: from half precision, an estimate from measured speeds, and from
//! sizes that tensor cores use well.

use std::collections::{BTreeMap, BTreeSet};

use super::report::{Gain, OperatorReport, Padding, ProductKind, ProductRow};
use crate::insight::dtype::Dtype;
use crate::precision::MatmulSpeed;

/// From NVIDIA's "Matrix Multiplication Background User's Guide", for numbers of 16 bits.
const MULTIPLE: u64 = 8;

/// The estimates for the dtypes whose speeds are known.
pub(super) fn gains(report: &OperatorReport, speeds: &[MatmulSpeed]) -> Vec<Gain> {
    [
        gain(report, speeds, Dtype::BF16, |speed| speed.bf16),
        gain(report, speeds, Dtype::F16, |speed| speed.fp16),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn gain(
    report: &OperatorReport,
    speeds: &[MatmulSpeed],
    dtype: Dtype,
    half: fn(&MatmulSpeed) -> Option<f64>,
) -> Option<Gain> {
    let measured: Vec<(f64, f64)> = speeds
        .iter()
        .filter_map(|speed| Some((speed.size as f64, half(speed)? / speed.f32)))
        .filter(|(_, ratio)| ratio.is_finite() && *ratio > 0.0)
        .collect();
    let now = report.own_seconds();
    // Without such a product there is nothing to estimate.
    let concerns = |row: &ProductRow| row.dtype == Dtype::F32 || row.dtype == dtype;
    if measured.is_empty() || now <= 0.0 || !report.products.iter().any(concerns) {
        return None;
    }
    let (mut f32_seconds, mut saved, mut slower) = (0.0, 0.0, 0.0);
    for row in &report.products {
        let size = (row.m as f64 * row.n as f64 * row.k as f64).cbrt();
        let ratio = ratio_at(&measured, size);
        if row.dtype == Dtype::F32 {
            f32_seconds += row.seconds;
            saved += row.seconds * (1.0 - 1.0 / ratio);
        } else if row.dtype == dtype {
            slower += row.seconds * (ratio - 1.0);
        }
    }
    Some(Gain {
        dtype,
        f32_seconds,
        possible: now / (now - saved),
        // Only clocks of low resolution leave nothing.
        limit: now / (now - f32_seconds).max(now * 1e-6),
        reached: (now + slower) / now,
    })
}

/// The ratio at the measured size that is nearest by its factor.
fn ratio_at(measured: &[(f64, f64)], size: f64) -> f64 {
    let distance = |measured: f64| (measured / size.max(1.0)).ln().abs();
    let nearest = measured.iter().min_by(|a, b| distance(a.0).total_cmp(&distance(b.0)));
    nearest.map_or(1.0, |(_, ratio)| *ratio)
}

/// The products with a size that is not a multiple of 8, together for each part of the model and set of sizes, because
/// the products of a backward pass have the sizes of the forward pass in another order.
pub(super) fn padding(report: &OperatorReport) -> Vec<Padding> {
    let all = report.flops();
    let mut found: BTreeMap<_, (BTreeSet<&str>, u64)> = BTreeMap::new();
    let products = report.products.iter();
    // cuDNN pads the channels of a convolution, and flash attention the size of a head.
    let products = products.filter(|row| row.kind == ProductKind::Matrix && row.dtype.is_half());
    // The memory limits the speed of a product with a vector, and padding would only add to it.
    for row in products.filter(|row| ![row.m, row.n, row.k].contains(&1)) {
        let odd = [row.m, row.n, row.k].into_iter().filter(|size| size % MULTIPLE != 0);
        let sizes: BTreeSet<u64> = odd.collect();
        if !sizes.is_empty() {
            let (operators, flops) = found.entry((row.path.as_deref(), sizes)).or_default();
            operators.insert(&row.operator);
            *flops += row.flops;
        }
    }
    let padded = |size: u64| (size, size.div_ceil(MULTIPLE) * MULTIPLE);
    let row = |((path, sizes), (operators, flops)): ((Option<&str>, BTreeSet<u64>), _)| Padding {
        path: path.map(str::to_owned),
        operators: BTreeSet::into_iter(operators).map(str::to_owned).collect(),
        sizes: sizes.into_iter().map(padded).collect(),
        flops,
        share: flops as f64 / all as f64,
    };
    let mut rows: Vec<_> = found.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.flops));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::recording::Pass;

    fn product(dtype: Dtype, size: u64, seconds: f64) -> ProductRow {
        ProductRow {
            operator: "aten::mm".to_owned(),
            kind: ProductKind::Matrix,
            path: None,
            pass: Pass::Forward,
            dtype,
            batch: 1,
            m: size,
            n: size,
            k: size,
            calls: 1,
            seconds,
            flops: 2 * size * size * size,
        }
    }

    fn report(products: Vec<ProductRow>) -> OperatorReport {
        OperatorReport { products, wrapper_seconds: 10.0, ..Default::default() }
    }

    fn speeds() -> Vec<MatmulSpeed> {
        let speed = |size, bf16| MatmulSpeed::new(size, 100.0, None, Some(bf16), None);
        vec![speed(64, 50.0), speed(1024, 400.0)]
    }

    #[test]
    fn a_gain_follows_amdahls_law_at_the_size_of_each_product() {
        let gains = gains(&report(vec![product(Dtype::F32, 1000, 4.0)]), &speeds());
        assert_eq!(gains.len(), 1, "fp16 was not measured");
        assert_eq!((gains[0].possible, gains[0].reached), (10.0 / (6.0 + 1.0), 1.0));
        assert_eq!((gains[0].limit, gains[0].f32_seconds), (10.0 / 6.0, 4.0));
    }

    #[test]
    fn small_products_can_lose_and_what_is_in_half_precision_has_gained() {
        let small = &gains(&report(vec![product(Dtype::F32, 60, 4.0)]), &speeds())[0];
        assert_eq!(small.possible, 10.0 / 14.0);
        let half = &gains(&report(vec![product(Dtype::BF16, 1024, 2.0)]), &speeds())[0];
        assert_eq!((half.possible, half.reached), (1.0, 1.6));
        assert!(gains(&report(vec![product(Dtype::F64, 1024, 2.0)]), &speeds()).is_empty());
    }
}
