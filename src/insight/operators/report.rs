//! The findings of a profiler.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use run_report::{Column, Table};
use serde::{Deserialize, Serialize};

use super::autocast_lists::{AutocastList, LINKED};
use crate::insight::dtype::Dtype;
use crate::insight::numbers::total;
use crate::insight::recording::{Pass, placed};

/// The operators that a stretch of a program ran, and their costs. Made by a [`Profiler`](super::Profiler). Its text,
/// by `Display`, is meant for a terminal. All numbers are sums over the recorded runs unless something else is said,
/// and times are in seconds.
///
/// A program that wants the rows behind the text serializes the report, which has these lists beside the fields below.
/// `operator` is libtorch's name, such as `aten::addmm`; `path` is the part of the model, if it is known: the module of
/// a parameter, or a name given by [`named`](crate::insight::named). A dtype is a [`Dtype`], `pass` a [`Pass`] and
/// `list` an [`AutocastList`].
///
/// - `operators`: the operators that compute, by own time. A row has the `operator`, `dtype` (of the first result, or
///   of the first input if there is none), `device` (of that tensor, such as `cpu` or `cuda:0`), `pass`, `calls`,
///   `seconds` (without the operators that it called), `bytes_read` and `bytes_written` (the sizes of the tensors, each
///   counted once per call), `flops` (the floating-point operations of matrix products: two for each multiplication and
///   addition).
/// - `products`: the matrix products, convolutions and attentions, which are among `operators`, too, by FLOPs. A row
///   has the products of the same sizes in the same part of the model: `operator`, `kind` (`Matrix`, also for a product
///   with a vector; `Convolution`; `Attention`, which is fused scaled-dot-product attention; the latter two also for
///   their backward), `path`, `pass`, `dtype` (in which it was computed), `batch` (how many products of `m`×`k` by
///   `k`×`n` one call computes: the batch, the groups of a convolution, or the batch times the heads), `m` (rows of the
///   first matrix, pixels of a convolution, or the length of the queries), `n` (columns of the second matrix, output
///   channels of a group, or the length of the keys), `k` (columns of the first matrix, input channels times kernel, or
///   the size of a head), `calls`, `seconds` (own time), `flops`.
/// - `casts`: the casts between floating dtypes, which are among `operators`, too, by time. A row has `from`, `to`,
///   `reason` (`Autocast`: autocast cast an input of the operator; `Operator`: the operator itself copied one of its
///   inputs into another dtype; `Derivative`: it is the derivative of a cast in the forward pass; `Program`: the
///   program asked for it, for example by `to_kind`), `operator` (that needed the cast, or the operator of the forward
///   pass of whose input it is the derivative), `path`, `parameter` (that was cast, if it was one), `pass`, `calls`,
///   `bytes` (read and written), `seconds`, `repeats` (how many of the calls cast the same unchanged tensor to the same
///   dtype as an earlier one of the same run), `cacheable` (how many of the repeats autocast's cache would have saved),
///   `repeat_seconds` (the time of the repeats). The cache keeps the casts of trainable f32 parameters until the
///   outermost region ends, on any thread. So repeats that it would have saved come from a region without the cache,
///   from several regions, or from the end of another thread's region.
/// - `moved_to_f32`: the operators with half-precision inputs that autocast ran in f32, by time. A row has `operator`,
///   `path`, `after` (the last module before, in the order of execution, if `path` is unknown), `list` (because of
///   which it ran in f32; `Widest` if another input was f32), `calls`, `seconds` (with all operators that it called,
///   including casts).
/// - `padding`: the sizes of matrix products in half precision that are not multiples of 8, which tensor cores cannot
///   use well, by FLOPs. A row has `path`, `operators` (the names of those that compute these products), `sizes` (pairs
///   of such a size and the next multiple of 8), `flops` (of these products), `share` (of these in the FLOPs of all
///   products, from 0 to 1).
/// - `lists`: the operators that were called inside of a region. A row has `operator`, `list` (that it is on, for this
///   device and the libtorch that is linked), `calls`, `elsewhere` (pairs of another version of libtorch and the list
///   on which it is there, if that differs). Known are the versions of the guide's page
///   [operations](crate::guide::operations).
/// - `gains`: estimates of what a half-precision dtype gains, by Amdahl's law and the measured speed of square products
///   of the nearest size; see [`estimate_gains`](super::Profiler::estimate_gains). They know neither the casts that
///   would be added nor what fused kernels or the memory's bandwidth change. A row has `dtype` (bf16 or fp16),
///   `f32_seconds` (the time of products in f32, which would be faster), `possible` (how many times as fast the program
///   would be if these products ran in the dtype), `limit` (how many times as fast if they took no time), `reached`
///   (how many times as fast it already is because of the products that run in the dtype).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperatorReport {
    /// How many runs were recorded.
    pub runs: u64,
    /// The time of the recorded runs in seconds, which includes the work of recording.
    pub seconds: f64,
    /// The time in seconds of one run that was not recorded, the last of the warm-up; `None` without a warm-up.
    pub unrecorded_seconds: Option<f64>,
    pub(in crate::insight) operators: Vec<OperatorRow>,
    /// How often operators were called that only call others, allocate memory or make views, in all recorded runs.
    pub wrapper_calls: u64,
    /// Their own time in seconds, in all recorded runs.
    pub wrapper_seconds: f64,
    pub(super) products: Vec<ProductRow>,
    pub(super) casts: Vec<CastRow>,
    pub(super) moved_to_f32: Vec<MovedOperator>,
    pub(super) padding: Vec<Padding>,
    pub(super) lists: Vec<ListedOperator>,
    pub(super) gains: Vec<Gain>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(in crate::insight) struct OperatorRow {
    pub(super) operator: String,
    pub(super) dtype: Dtype,
    pub(super) device: String,
    pub(super) pass: Pass,
    pub(super) calls: u64,
    pub(in crate::insight) seconds: f64,
    pub(super) bytes_read: u64,
    pub(super) bytes_written: u64,
    pub(super) flops: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum ProductKind {
    Matrix,
    Convolution,
    Attention,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ProductRow {
    pub(super) operator: String,
    pub(super) kind: ProductKind,
    pub(super) path: Option<String>,
    pub(super) pass: Pass,
    pub(super) dtype: Dtype,
    pub(super) batch: u64,
    pub(super) m: u64,
    pub(super) n: u64,
    pub(super) k: u64,
    pub(super) calls: u64,
    pub(super) seconds: f64,
    pub(super) flops: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum CastReason {
    Autocast,
    Operator,
    Derivative,
    Program,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct CastRow {
    pub(super) from: Dtype,
    pub(super) to: Dtype,
    pub(super) reason: CastReason,
    pub(super) operator: Option<String>,
    pub(super) path: Option<String>,
    pub(super) parameter: Option<String>,
    pub(super) pass: Pass,
    pub(super) calls: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) repeats: u64,
    pub(super) cacheable: u64,
    pub(super) repeat_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MovedOperator {
    pub(super) operator: String,
    pub(super) path: Option<String>,
    pub(super) after: Option<String>,
    pub(super) list: AutocastList,
    pub(super) calls: u64,
    pub(super) seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Padding {
    pub(super) path: Option<String>,
    pub(super) operators: Vec<String>,
    pub(super) sizes: Vec<(u64, u64)>,
    pub(super) flops: u64,
    pub(super) share: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ListedOperator {
    pub(super) operator: String,
    pub(super) list: AutocastList,
    pub(super) calls: u64,
    pub(super) elsewhere: Vec<(String, AutocastList)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Gain {
    pub(super) dtype: Dtype,
    pub(super) f32_seconds: f64,
    pub(super) possible: f64,
    pub(super) limit: f64,
    pub(super) reached: f64,
}

impl OperatorReport {
    /// Adds up the floating-point operations of all matrix products in all recorded runs.
    pub fn flops(&self) -> u64 {
        total(self.operators.iter().map(|row| row.flops))
    }

    /// Adds up the own times of all operators in seconds. At most `seconds`, unless a backward pass runs on the threads
    /// of several devices.
    pub fn own_seconds(&self) -> f64 {
        self.wrapper_seconds + self.operators.iter().map(|row| row.seconds).sum::<f64>()
    }

    /// Returns the share, from 0 to 1, of the floating-point operations of a pass, or of both, that are computed in
    /// half precision. `None` if there are no such operations.
    pub fn half_share(&self, pass: Option<Pass>) -> Option<f64> {
        let rows = || self.operators.iter().filter(|row| pass.is_none_or(|pass| row.pass == pass));
        let all = total(rows().map(|row| row.flops));
        let half = total(rows().filter(|row| row.dtype.is_half()).map(|row| row.flops));
        (all > 0).then(|| half as f64 / all as f64)
    }
}

pub(super) fn seconds(nanoseconds: i64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// How many rows of the table are shown.
const MOST_OPERATORS: usize = 15;

/// How many rows of each section below it are shown.
const MOST: usize = 6;

impl Display for OperatorReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let table = self.table(MOST_OPERATORS).plain();
        write!(f, "{}\n{table}{}{}", self.summary(), self.others(), self.sections())
    }
}

/// The columns of the table of operators, for a terminal and for a page. The numbers are those of one run.
fn columns() -> [Column; 10] {
    let column = |name, width| Column::new(name).width(width).gap(1);
    [
        column("operator", 38),
        column("dtype", 5).left(),
        column("device", 7).left(),
        column("pass", 8).left(),
        column("calls", 6),
        column("ms", 9),
        column("%", 5),
        column("MB read", 9),
        column("written", 9),
        column("GFLOP/s", 7),
    ]
}

impl OperatorReport {
    /// The lines above the table of operators.
    pub(in crate::insight) fn summary(&self) -> String {
        let plain = self.unrecorded_seconds.map(|seconds| seconds * 1e3);
        let plain = plain.map(|ms| format!(", {ms:.2} ms when it is not recorded"));
        let (own, plain) = (self.ms(self.own_seconds()), plain.unwrap_or_default());
        let mut text = format!("a run takes {own:.2} ms in operators{plain}\n");
        if let Some(share) = self.half_share(None) {
            let of = |pass| self.half_share(Some(pass)).map_or("none".to_owned(), percent);
            text += &format!(
                "matrix products: {:.3} MFLOP, {} of it in half precision (forward {}, backward {})\n",
                self.mega(self.flops() as f64),
                percent(share),
                of(Pass::Forward),
                of(Pass::Backward)
            );
        }
        text
    }

    /// The table of the operators that took longest.
    pub(in crate::insight) fn table(&self, most: usize) -> Table<10> {
        let rows = self.operators.iter().take(most).map(|row| self.cells(row));
        Table { columns: columns(), rows: rows.collect() }
    }

    /// The sections below the table of operators.
    pub(in crate::insight) fn sections(&self) -> String {
        let of_casts = self.cast_section() + &self.moved_section();
        of_casts + &self.padding_section() + &self.list_section() + &self.gain_section()
    }

    /// The share of the time of all operators.
    pub(in crate::insight) fn share(&self, seconds: f64) -> f64 {
        seconds / self.own_seconds().max(f64::MIN_POSITIVE)
    }

    /// The milliseconds of one run.
    fn ms(&self, seconds: f64) -> f64 {
        seconds * 1e3 / self.runs.max(1) as f64
    }

    fn calls(&self, calls: u64) -> u64 {
        calls.div_ceil(self.runs.max(1))
    }

    /// Millions of one run.
    fn mega(&self, amount: f64) -> f64 {
        amount / 1e6 / self.runs.max(1) as f64
    }

    /// The lines of what the table leaves out.
    fn others(&self) -> String {
        let line = |what: &str, calls: u64, seconds: f64| {
            let (calls, ms) = (self.calls(calls), self.ms(seconds));
            let share = 100.0 * self.share(seconds);
            format!("{what:<61} {calls:>6} {ms:>9.3} {share:>5.1}\n")
        };
        let rest = &self.operators[self.operators.len().min(MOST_OPERATORS)..];
        let calls = total(rest.iter().map(|row| row.calls));
        let rest = (!rest.is_empty())
            .then(|| line(&others(rest.len()), calls, rest.iter().map(|row| row.seconds).sum()));
        let wrappers = "calls of other operators, views, allocations";
        rest.unwrap_or_default() + &line(wrappers, self.wrapper_calls, self.wrapper_seconds)
    }

    /// A row of the table of operators.
    fn cells(&self, row: &OperatorRow) -> [String; 10] {
        let mega = |bytes: u64| format!("{:.3}", self.mega(bytes as f64));
        let has_speed = row.flops > 0 && row.seconds > 0.0;
        let speed = has_speed.then(|| format!("{:.1}", row.flops as f64 / 1e9 / row.seconds));
        [
            row.operator.trim_start_matches("aten::").to_owned(),
            row.dtype.to_string(),
            row.device.clone(),
            row.pass.to_string(),
            self.calls(row.calls).to_string(),
            format!("{:.3}", self.ms(row.seconds)),
            format!("{:.1}", 100.0 * self.share(row.seconds)),
            mega(row.bytes_read),
            mega(row.bytes_written),
            speed.unwrap_or_default(),
        ]
    }
}

pub(in crate::insight) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

impl OperatorReport {
    fn cast_section(&self) -> String {
        if self.casts.is_empty() {
            return "\ncasts: none\n".to_owned();
        }
        let rows = || self.casts.iter();
        let seconds = rows().map(|row| row.seconds).sum();
        let title = format!(
            "casts: {} of {:.3} MB, {:.3} ms ({})",
            self.calls(total(rows().map(|row| row.calls))),
            self.mega(rows().map(|row| row.bytes as f64).sum()),
            self.ms(seconds),
            percent(self.share(seconds))
        );
        let mut text = section(&title, &self.casts, |row| {
            let (calls, ms) = (self.calls(row.calls), self.ms(row.seconds));
            format!("{calls:>4} {} → {}  {ms:.3} ms  {}", row.from, row.to, reason(row))
        });
        let cacheable = total(rows().map(|row| row.cacheable));
        let others = total(rows().map(|row| row.repeats)).saturating_sub(cacheable);
        for (count, advice) in [
            (
                cacheable,
                "a parameter again: leave the cache on, and use one region for all of them",
            ),
            (others, "another tensor again: cast it once, before the operators that share it"),
        ] {
            if count > 0 {
                text += &format!("  {} cast {advice}\n", self.calls(count));
            }
        }
        text
    }

    fn moved_section(&self) -> String {
        let title = "run in f32 by autocast, with inputs in half precision:";
        section(title, &self.moved_to_f32, |row| {
            let MovedOperator { operator, path, after, list, .. } = row;
            let place = placed(path.as_deref(), after.as_deref());
            let (calls, ms) = (self.calls(row.calls), self.ms(row.seconds));
            format!("{calls:>4} {operator}{place}  {ms:.3} ms  (list: {list})")
        })
    }

    fn padding_section(&self) -> String {
        let title = "sizes that tensor cores use less efficiently (not multiples of 8):";
        section(title, &self.padding, |row| {
            let sizes = row.sizes.iter().map(|(size, padded)| format!("{size} to {padded}"));
            let (sizes, place) =
                (sizes.collect::<Vec<_>>().join(", "), placed(row.path.as_deref(), None));
            let (share, operators) = (percent(row.share), row.operators.join(", "));
            format!("{share} of FLOPs: pad {sizes}  {operators}{place}")
        })
    }

    fn list_section(&self) -> String {
        if self.lists.is_empty() {
            return "\nno operator was called inside of an autocast region\n".to_owned();
        }
        let mut names = BTreeMap::<_, Vec<_>>::new();
        for listed in &self.lists {
            let name = listed.operator.trim_start_matches("aten::");
            names.entry(listed.list).or_default().push(name);
        }
        let mut text = format!("\nautocast's lists in libtorch {LINKED}:\n");
        for (list, names) in names {
            text += &format!("  {list}: {}\n", names.join(", "));
        }
        for ListedOperator { operator, elsewhere, .. } in &self.lists {
            for (version, other) in elsewhere {
                text +=
                    &format!("  in libtorch {version}, {operator} is on another list: {other}\n");
            }
        }
        text
    }

    fn gain_section(&self) -> String {
        let mut text = String::new();
        for Gain { dtype, f32_seconds, possible, limit, reached } in &self.gains {
            text += &format!("\nestimate for {dtype}, from measured matrix products:");
            if *f32_seconds > 0.0 {
                text += &format!("\n  {possible:.2}x as fast if the products in f32 ran in it, ");
                text += &format!("and {limit:.2}x if these took no time");
            }
            if *reached != 1.0 {
                text += &format!("\n  {reached:.2}x as fast as in f32 because of the products ");
                text += "that already run in it";
            }
        }
        text + if self.gains.is_empty() { "" } else { "\n" }
    }
}

/// A section with a line for each of the first rows; nothing if there is none.
fn section<R>(title: &str, rows: &[R], line: impl Fn(&R) -> String) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let lines = rows.iter().take(MOST).map(|row| format!("  {}\n", line(row)));
    let mut text = format!("\n{title}\n{}", lines.collect::<String>());
    if rows.len() > MOST {
        text += &format!("       and {}\n", others(rows.len() - MOST));
    }
    text
}

/// Why numbers were cast.
fn reason(row: &CastRow) -> String {
    let operator = row.operator.as_deref();
    let why = match row.reason {
        CastReason::Autocast => format!("by autocast, for {}", operator.unwrap_or("an operator")),
        CastReason::Operator => format!("by {}", operator.unwrap_or("an operator")),
        CastReason::Derivative => {
            format!("derivative of a cast for {}", operator.unwrap_or("the program"))
        }
        CastReason::Program => "by the program".to_owned(),
    };
    match &row.parameter {
        Some(parameter) => format!("{why}: {parameter}"),
        None => why + &placed(row.path.as_deref(), None),
    }
}

fn others(count: usize) -> String {
    if count == 1 { "1 more row".to_owned() } else { format!("{count} more rows") }
}
