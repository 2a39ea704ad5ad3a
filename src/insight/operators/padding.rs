//! Sizes of matrix products that tensor cores cannot use well in half precision.

use std::collections::{BTreeMap, BTreeSet};

use super::report::{OperatorReport, Padding, ProductKind, is_half};

/// From NVIDIA's "Matrix Multiplication Background User's Guide", for numbers of 16 bits.
const MULTIPLE: u64 = 8;

/// The products with a size that is not a multiple of 8, together for each part of the model and set of sizes, because
/// the products of a backward pass have the sizes of the forward pass in another order.
pub(super) fn padding(report: &OperatorReport) -> Vec<Padding> {
    let all = report.flops();
    let mut found: BTreeMap<_, (BTreeSet<&str>, u64)> = BTreeMap::new();
    let products = report.products.iter();
    // cuDNN pads the channels of a convolution, and flash attention the size of a head.
    let products = products.filter(|row| row.kind == ProductKind::Matrix && is_half(&row.dtype));
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
