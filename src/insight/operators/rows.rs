//! The sums of a report.

use std::collections::{BTreeMap, HashSet};

use tch::Tensor;

use crate::ffi::insight::{RecordedEvent, RecordedTensor, Usage};
use crate::insight::Pass;

use super::casts::{self, CastRows};
use super::computing::is_written;
use super::flops::Product;
use super::lists::{AutocastList, LINKED, VERSIONS, list_in};
use super::moved::{self, MovedRows};
use super::report::{ListedOperator, OperatorReport, OperatorRow, ProductRow, Wrappers};
use super::words;
use super::work::Work;

/// An operator, its dtype, its device and its pass.
type OperatorKey = (String, &'static str, String, bool);

/// An operator, the part of the model, its pass, its dtype and the sizes.
type ProductKey = (String, Option<String>, bool, &'static str, Product);

/// What the rows of all kinds have in common.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    pub(super) calls: u64,
    pub(super) nanoseconds: i64,
    read: u64,
    written: u64,
    flops: u64,
}

/// The sums of all recorded runs.
#[derive(Debug, Default)]
pub(super) struct Rows {
    operators: BTreeMap<OperatorKey, Sums>,
    products: BTreeMap<ProductKey, Sums>,
    wrappers: Sums,
    casts: CastRows,
    moved: MovedRows,
    lists: BTreeMap<(String, bool), u64>,
}

impl Rows {
    /// Adds a recorded run.
    pub(super) fn add(&mut self, work: &Work<'_>, parameters: &[(String, Tensor)]) {
        for (index, event) in work.operators() {
            self.add_to_lists(event, work.computes[index]);
            if work.computes[index] {
                self.add_operator(work, index, event);
            } else {
                self.wrappers.calls += 1;
                self.wrappers.nanoseconds += work.own[index];
            }
        }
        casts::add(work, parameters, &mut self.casts);
        moved::add(work, &mut self.moved);
    }

    fn add_operator(&mut self, work: &Work<'_>, index: usize, event: &RecordedEvent) {
        let (pass, path) = work.place(index);
        let tensor = event.outputs.first().or(event.inputs.first());
        let dtype = tensor.map_or("other", words::dtype);
        let device = tensor.map_or_else(|| "cpu".to_owned(), words::device);
        let (read, written) = bytes(event);
        let product = work.products[index];
        let sums = Sums {
            calls: 1,
            nanoseconds: work.own[index],
            read,
            written,
            flops: product.map_or(0, |product| product.flops),
        };
        let is_backward = pass == Pass::Backward;
        let key = (event.name.clone(), dtype, device, is_backward);
        self.operators.entry(key).or_default().add(sums);
        if let Some(product) = product {
            let key = (event.name.clone(), path, is_backward, dtype, product);
            self.products.entry(key).or_default().add(sums);
        }
    }

    fn add_to_lists(&mut self, event: &RecordedEvent, computes: bool) {
        if event.autocast.is_none() {
            return;
        }
        let on_cuda = event.inputs.iter().any(|tensor| tensor.device.0 == 1);
        let is_listed = list_in(LINKED, on_cuda, &event.name) != AutocastList::Untouched;
        if is_listed || computes {
            *self.lists.entry((event.name.clone(), on_cuda)).or_default() += 1;
        }
    }

    /// The sums as a report.
    pub(super) fn report(self) -> OperatorReport {
        let mut operators: Vec<_> = self.operators.into_iter().map(operator_row).collect();
        operators.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let mut products: Vec<_> = self.products.into_iter().map(product_row).collect();
        products.sort_by_key(|row| std::cmp::Reverse(row.flops));
        let mut lists: Vec<_> = self.lists.into_iter().map(listed).collect();
        lists.sort_by_key(|listed| (listed.list, std::cmp::Reverse(listed.calls)));
        let wrappers =
            Wrappers { calls: self.wrappers.calls, seconds: seconds(self.wrappers.nanoseconds) };
        OperatorReport {
            operators,
            products,
            wrappers,
            lists,
            casts: casts::rows(self.casts),
            moved_to_f32: moved::rows(self.moved),
            ..Default::default()
        }
    }
}

impl Sums {
    pub(super) fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.nanoseconds += other.nanoseconds;
        self.read += other.read;
        self.written += other.written;
        self.flops = self.flops.saturating_add(other.flops);
    }
}

fn operator_row((key, sums): (OperatorKey, Sums)) -> OperatorRow {
    let (operator, dtype, device, is_backward) = key;
    OperatorRow {
        operator,
        dtype: dtype.to_owned(),
        device,
        pass: pass(is_backward),
        calls: sums.calls,
        seconds: seconds(sums.nanoseconds),
        bytes_read: sums.read,
        bytes_written: sums.written,
        flops: sums.flops,
    }
}

fn product_row((key, sums): (ProductKey, Sums)) -> ProductRow {
    let (operator, path, is_backward, dtype, product) = key;
    ProductRow {
        operator,
        kind: product.kind,
        path,
        pass: pass(is_backward),
        dtype: dtype.to_owned(),
        batch: product.batch,
        m: product.m,
        n: product.n,
        k: product.k,
        calls: sums.calls,
        seconds: seconds(sums.nanoseconds),
        flops: sums.flops,
    }
}

fn listed(((operator, on_cuda), calls): ((String, bool), u64)) -> ListedOperator {
    let list = list_in(LINKED, on_cuda, &operator);
    let elsewhere = VERSIONS
        .iter()
        .map(|version| ((*version).to_owned(), list_in(version, on_cuda, &operator)))
        .filter(|(_, other)| *other != list)
        .collect();
    ListedOperator { operator, list, calls, elsewhere }
}

pub(super) fn pass(is_backward: bool) -> Pass {
    if is_backward { Pass::Backward } else { Pass::Forward }
}

pub(super) fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// The bytes that an operator reads and writes: each tensor once.
fn bytes(event: &RecordedEvent) -> (u64, u64) {
    let size = |tensor: &RecordedTensor| u64::try_from(tensor.bytes()).unwrap_or(0);
    // Parts of one tensor, such as queries and keys, share its memory.
    let place = |tensor: &RecordedTensor| (tensor.memory, tensor.offset, tensor.elements);
    let (mut read, mut written) = (0, 0);
    let (mut seen, mut made) = (HashSet::new(), HashSet::new());
    for tensor in event.inputs.iter().filter(|tensor| tensor.usage != Usage::Overwrite) {
        if tensor.memory.is_none() || seen.insert(place(tensor)) {
            read += size(tensor);
        }
    }
    // What is written in place can be missing among the results.
    for tensor in event.outputs.iter().chain(&event.inputs) {
        if is_written(tensor) && (tensor.memory.is_none() || made.insert(place(tensor))) {
            written += size(tensor);
        }
    }
    (read, written)
}
