//! What half precision would gain: an estimate from measured speeds.

use serde::{Deserialize, Serialize};
use tch::Kind;

use super::report::{OperatorReport, ProductRow};
use crate::precision::MatmulSpeed;

/// An estimate of what a half-precision dtype gains, from the measured speeds of square matrix products (Amdahl's law).
/// It knows neither the casts that would be added nor what fused kernels or the memory's bandwidth change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gain {
    /// The dtype, `bf16` or `fp16`.
    pub dtype: String,
    /// The time of products in f32, which would be faster.
    pub f32_seconds: f64,
    /// How many times as fast the program would be if these products ran in the dtype.
    pub possible: f64,
    /// How many times as fast it would be if these products took no time.
    pub limit: f64,
    /// How many times as fast it already is because of the products that run in the dtype.
    pub reached: f64,
}

/// The estimates for the dtypes whose speeds are known.
pub(super) fn gains(report: &OperatorReport, speeds: &[MatmulSpeed]) -> Vec<Gain> {
    let kinds = [Kind::BFloat16, Kind::Half].into_iter();
    kinds.filter_map(|kind| gain(report, speeds, kind)).collect()
}

fn gain(report: &OperatorReport, speeds: &[MatmulSpeed], kind: Kind) -> Option<Gain> {
    let half = |speed: &MatmulSpeed| match kind {
        Kind::Half => speed.fp16,
        _ => speed.bf16,
    };
    let dtype = if kind == Kind::Half { "fp16" } else { "bf16" };
    let measured: Vec<(f64, f64)> = speeds
        .iter()
        .filter_map(|speed| Some((speed.size as f64, half(speed)? / speed.f32)))
        .filter(|(_, ratio)| ratio.is_finite() && *ratio > 0.0)
        .collect();
    let now = report.own_seconds();
    // Without such a product there is nothing to estimate.
    let concerns = |row: &ProductRow| row.dtype == "fp32" || row.dtype == dtype;
    if measured.is_empty() || now <= 0.0 || !report.products.iter().any(concerns) {
        return None;
    }
    let (mut f32_seconds, mut saved, mut slower) = (0.0, 0.0, 0.0);
    for row in &report.products {
        let size = (row.m as f64 * row.n as f64 * row.k as f64).cbrt();
        let ratio = ratio_at(&measured, size);
        if row.dtype == "fp32" {
            f32_seconds += row.seconds;
            saved += row.seconds * (1.0 - 1.0 / ratio);
        } else if row.dtype == dtype {
            slower += row.seconds * (ratio - 1.0);
        }
    }
    Some(Gain {
        dtype: dtype.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::insight::Pass;
    use crate::insight::operators::report::{ProductKind, Wrappers};

    fn product(dtype: &str, size: u64, seconds: f64) -> ProductRow {
        ProductRow {
            operator: "aten::mm".to_owned(),
            kind: ProductKind::Matrix,
            path: None,
            pass: Pass::Forward,
            dtype: dtype.to_owned(),
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
        let wrappers = Wrappers { calls: 1, seconds: 10.0 };
        OperatorReport { products, wrappers, ..Default::default() }
    }

    fn speeds() -> Vec<MatmulSpeed> {
        let speed = |size, bf16| MatmulSpeed::new(size, 100.0, None, Some(bf16), None);
        vec![speed(64, 50.0), speed(1024, 400.0)]
    }

    #[test]
    fn a_gain_follows_amdahls_law_at_the_size_of_each_product() {
        let gains = gains(&report(vec![product("fp32", 1000, 4.0)]), &speeds());
        assert_eq!(gains.len(), 1, "fp16 was not measured");
        assert_eq!((gains[0].possible, gains[0].reached), (10.0 / (6.0 + 1.0), 1.0));
        assert_eq!((gains[0].limit, gains[0].f32_seconds), (10.0 / 6.0, 4.0));
    }

    #[test]
    fn small_products_can_lose_and_what_is_in_half_precision_has_gained() {
        let small = &gains(&report(vec![product("fp32", 60, 4.0)]), &speeds())[0];
        assert_eq!(small.possible, 10.0 / 14.0);
        let half = &gains(&report(vec![product("bf16", 1024, 2.0)]), &speeds())[0];
        assert_eq!((half.possible, half.reached), (1.0, 1.6));
        assert!(gains(&report(vec![product("fp64", 1024, 2.0)]), &speeds()).is_empty());
    }
}
