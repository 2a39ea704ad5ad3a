//! Advice on precision: casts between floating dtypes, who asked for them, and which cast the same numbers again; and
//! the gains of matrix products from half precision, an estimate from measured speeds, and from sizes that tensor cores
//! use well.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use tch::{Device, Kind, Tensor};

use super::report::{CastReason, CastRow, Gain, OperatorReport, Padding, ProductKind, ProductRow};
use super::work::{Work, written};
use crate::error::Result;
use crate::ffi::insight::{EventKind, RecordedEvent, RecordedTensor};
use crate::insight::dtype::Dtype;
use crate::insight::recording::Pass;
use crate::precision::{self, Gains};

/// Operators of which a cast consists.
const CASTS: &[&str] = &[
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::type_as",
    "aten::_autocast_to_reduced_precision",
    "aten::_autocast_to_full_precision",
];

/// The dtypes, the reason, the operator, the part of the model, the parameter and the pass.
type CastKey = (Dtype, Dtype, CastReason, Option<String>, Option<String>, Option<String>, Pass);

/// The identity of a cast of a memory: where the numbers begin, the version, the sizes and the dtype.
type CastPart = (i64, i64, Vec<i64>, i8);

/// Their seconds are nanoseconds as yet.
pub(super) type CastRows = BTreeMap<CastKey, CastRow>;

/// Adds the casts of one run.
pub(super) fn add(work: &Work<'_>, parameters: &[(String, Tensor)], rows: &mut CastRows) {
    // By memory: the versions, places, sizes and dtypes of its parts that were cast since an operator wrote to it. The
    // versions tell of writes that are no operators, such as those of an optimizer's kernel.
    let mut seen: HashMap<u64, HashSet<CastPart>> = HashMap::new();
    for (index, event) in work.operators().filter(|(index, _)| work.computes[*index]) {
        for memory in written(event) {
            seen.remove(&memory);
        }
        let Some((to, from)) = cast(event) else { continue };
        let row = row(work, index, (to, from), parameters);
        let again = from.memory.is_some_and(|memory| {
            let part = (from.version, from.offset, from.sizes().to_vec(), to.dtype);
            !seen.entry(memory).or_default().insert(part)
        });
        let cacheable =
            again && row.reason == CastReason::Autocast && is_cached(from, to, parameters);
        let (operator, path) = (row.operator.clone(), row.path.clone());
        let key = (row.from, row.to, row.reason, operator, path, row.parameter.clone(), row.pass);
        let row = rows.entry(key).or_insert(row);
        row.calls += 1;
        row.bytes += u64::try_from(from.bytes() + to.bytes()).unwrap_or(0);
        row.seconds += work.own[index] as f64;
        if again {
            row.repeats += 1;
            row.repeat_seconds += work.own[index] as f64;
        }
        row.cacheable += u64::from(cacheable);
    }
}

/// The result and the source of a cast between floating dtypes.
fn cast(event: &RecordedEvent) -> Option<(&RecordedTensor, &RecordedTensor)> {
    let (to, from) = match event.inputs.as_slice() {
        [to, from, ..] if event.name == "aten::copy_" => (to, from),
        _ => return None,
    };
    // A number of the program is an f64 tensor without dimensions before it takes part in an operator.
    let is_number = from.kind == Some(Kind::Double) && from.dims == 0;
    let differ = to.kind.is_some() && from.kind.is_some() && to.kind != from.kind;
    (differ && !is_number).then_some((to, from))
}

/// The row of a cast, as yet without numbers, with the operator that asked for it.
fn row(
    work: &Work<'_>,
    index: usize,
    (to, from): (&RecordedTensor, &RecordedTensor),
    parameters: &[(String, Tensor)],
) -> CastRow {
    let (pass, path) = work.place(index);
    let asked_by = asking(work, index);
    let (reason, operator) = match asked_by.map(|index| &work.recording.events[index]) {
        Some(event) => {
            // An operator on no list is not called again: it casts on its own, even inside of a region.
            let by_autocast = asked_by.is_some_and(|index| work.called_again[index]);
            let reason = if by_autocast { CastReason::Autocast } else { CastReason::Operator };
            (reason, Some(event.name.clone()))
        }
        None if pass == Pass::Backward => {
            let forward = work.recording.pass(index).1;
            let forward = forward.and_then(|index| asking(work, index));
            let name = |index: usize| work.recording.events[index].name.clone();
            (CastReason::Derivative, forward.map(name))
        }
        None => (CastReason::Program, None),
    };
    let parameter = from.parameter.and_then(|index| parameters.get(index));
    CastRow {
        from: Dtype::of(from),
        to: Dtype::of(to),
        reason,
        operator,
        path,
        parameter: parameter.map(|(name, _)| name.clone()),
        pass,
        calls: 0,
        bytes: 0,
        seconds: 0.0,
        repeats: 0,
        cacheable: 0,
        repeat_seconds: 0.0,
    }
}

/// The operator that a cast belongs to, if it ran in one.
fn asking(work: &Work<'_>, index: usize) -> Option<usize> {
    let above = work.recording.ancestors(index);
    let mut operators = above.take_while(|(_, event)| event.kind == EventKind::Operator);
    operators.find(|(_, event)| !CASTS.contains(&event.name.as_str())).map(|(index, _)| index)
}

/// Returns whether autocast's cache keeps this cast: that of a trainable f32 parameter, as a whole.
fn is_cached(from: &RecordedTensor, to: &RecordedTensor, parameters: &[(String, Tensor)]) -> bool {
    let parameter = from.parameter.and_then(|index| parameters.get(index));
    from.kind == Some(Kind::Float)
        && Dtype::of(to).is_half()
        && parameter.is_some_and(|(_, tensor)| {
            tensor.requires_grad() && tensor.is_leaf() && tensor.size() == from.sizes()
        })
}

/// The rows of the report, by time.
pub(super) fn rows(rows: CastRows) -> Vec<CastRow> {
    let mut rows: Vec<_> = rows.into_values().collect();
    for row in &mut rows {
        row.seconds /= 1e9;
        row.repeat_seconds /= 1e9;
    }
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    rows
}

/// From NVIDIA's "Matrix Multiplication Background User's Guide", for numbers of 16 bits.
const MULTIPLE: u64 = 8;

/// The sizes of the square products by which a gain is estimated, on a CPU, and those on a GPU besides.
const SIZES: [i64; 5] = [64, 128, 256, 512, 1024];
const LARGE_SIZES: [i64; 2] = [2048, 4096];

/// If it takes longer to measure one size, no larger ones are measured, as where half precision is emulated.
const SLOW: Duration = Duration::from_secs(1);

/// Measures how many times as fast as f32 products of each size are.
pub(super) fn speeds(device: Device) -> Result<Vec<(i64, Gains)>> {
    let large = LARGE_SIZES.into_iter().filter(|_| device != Device::Cpu);
    speeds_of(SIZES.into_iter().chain(large), |size| Gains::at(device, size))
}

fn speeds_of(
    sizes: impl IntoIterator<Item = i64>,
    measure: impl Fn(i64) -> Result<Gains>,
) -> Result<Vec<(i64, Gains)>> {
    let mut speeds: Vec<(i64, Gains)> = Vec::new();
    for size in sizes {
        if speeds.last().is_some_and(|(_, gains)| gains.spent > SLOW) {
            break;
        }
        speeds.push((size, measure(size)?));
    }
    Ok(speeds)
}

/// The estimates for the dtypes whose speeds are known.
pub(super) fn gains(report: &OperatorReport, speeds: &[(i64, Gains)]) -> Vec<Gain> {
    [
        gain(report, speeds, Dtype::BF16, |gains| gains.bf16),
        gain(report, speeds, Dtype::F16, |gains| gains.fp16),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn gain(
    report: &OperatorReport,
    speeds: &[(i64, Gains)],
    dtype: Dtype,
    half: fn(&Gains) -> Option<precision::Gain>,
) -> Option<Gain> {
    let known = |(size, gains): &(i64, Gains)| Some((*size as f64, half(gains)?.median));
    let measured: Vec<(f64, f64)> = speeds.iter().filter_map(known).collect();
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

    fn speeds() -> Vec<(i64, Gains)> {
        let at = |size, bf16| {
            let gain = precision::Gain { low: bf16, median: bf16, high: bf16, is_worth: None };
            (size, Gains { bf16: Some(gain), fp16: None, spent: Duration::ZERO })
        };
        vec![at(64, 0.5), at(1024, 4.0)]
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

    #[test]
    fn no_larger_size_is_measured_after_one_that_took_long() -> Result<()> {
        let measure = |size| {
            let spent = Duration::from_millis(if size < 256 { 10 } else { 1500 });
            Ok(Gains { bf16: None, fp16: None, spent })
        };
        let sizes: Vec<_> = speeds_of(SIZES, measure)?.into_iter().map(|(size, _)| size).collect();
        assert_eq!(sizes, [64, 128, 256]);
        Ok(())
    }
}
