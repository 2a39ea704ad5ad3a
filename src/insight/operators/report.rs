//! The findings of a profiler.

use std::fmt::{self, Display, Formatter, Write};

use run_report::{Column, Table};
use serde::{Deserialize, Serialize};

use super::autocast_lists::{AutocastList, LINKED};
use crate::insight::dtype::Dtype;
use crate::insight::numbers::total;
use crate::insight::recording::Pass;

/// The operators that a stretch of a program ran, and their costs. Made by a [`Profiler`](super::Profiler). Its text,
/// by `Display`, is meant for a terminal; its fields for programs. All numbers are sums over the recorded runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperatorReport {
    /// How many runs were recorded.
    pub runs: u64,
    /// The time of the recorded runs in seconds, which includes the work of recording.
    pub seconds: f64,
    /// The time in seconds of one run that was not recorded, the last of the warm-up; `None` without a warm-up.
    pub unrecorded_seconds: Option<f64>,
    /// The operators that compute, by own time.
    pub operators: Vec<OperatorRow>,
    /// How often operators were called that only call others, allocate memory or make views, in all recorded runs.
    pub wrapper_calls: u64,
    /// Their own time in seconds, in all recorded runs.
    pub wrapper_seconds: f64,
    /// The matrix products, convolutions and attentions, by FLOPs. These are among `operators`, too.
    pub products: Vec<ProductRow>,
    /// The casts between floating dtypes, by time. These are among `operators`, too.
    pub casts: Vec<CastRow>,
    /// The operators with half-precision inputs that autocast ran in f32, by time.
    pub moved_to_f32: Vec<MovedOperator>,
    /// The sizes of matrix products in half precision that tensor cores cannot use well, by FLOPs.
    pub padding: Vec<Padding>,
    /// The operators that were called inside of a region, and their lists.
    pub lists: Vec<ListedOperator>,
    /// The gains of half precision, if the [`Profiler`](super::Profiler) was given measured speeds. Estimates.
    pub gains: Vec<Gain>,
}

/// Calls of one operator in one dtype on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperatorRow {
    /// libtorch's name of the operator, such as `aten::addmm`.
    pub operator: String,
    /// The dtype of its first result, or of its first input if it has none.
    pub dtype: Dtype,
    /// The device of that tensor, such as `cpu` or `cuda:0`.
    pub device: String,
    /// The pass in which it ran.
    pub pass: Pass,
    /// How often it was called, in all recorded runs.
    pub calls: u64,
    /// Its own time in seconds, in all recorded runs: without that of operators that it called.
    pub seconds: f64,
    /// The size in bytes of the tensors that it read, each counted once per call.
    pub bytes_read: u64,
    /// The size in bytes of the tensors that it wrote, each counted once per call.
    pub bytes_written: u64,
    /// The floating-point operations of matrix products: two for each multiplication and addition.
    pub flops: u64,
}

/// The kind of an operator that computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ProductKind {
    /// A product of matrices, or of a matrix and a vector.
    Matrix,
    /// A convolution, or the backward of one.
    Convolution,
    /// A fused scaled-dot-product attention, or the backward of one.
    Attention,
}

/// Products of the same sizes in the same part of the model: `batch` times `m`×`k` by `k`×`n`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProductRow {
    /// libtorch's name of the operator.
    pub operator: String,
    /// The kind.
    pub kind: ProductKind,
    /// The part of the model: the module of a parameter, or a name given by [`named`](crate::insight::named).
    pub path: Option<String>,
    /// The pass in which it ran.
    pub pass: Pass,
    /// The dtype in which it was computed.
    pub dtype: Dtype,
    /// The number of products in one call: the batch, the groups of a convolution, or the batch times the heads.
    pub batch: u64,
    /// Rows: those of the first matrix, the pixels of a convolution, or the length of the queries.
    pub m: u64,
    /// Columns: those of the second matrix, the output channels of a group, or the length of the keys.
    pub n: u64,
    /// The length of the sums: columns of the first matrix, input channels times kernel, or the size of a head.
    pub k: u64,
    /// How often it was called, in all recorded runs.
    pub calls: u64,
    /// The own time in seconds, in all recorded runs.
    pub seconds: f64,
    /// The floating-point operations, in all recorded runs.
    pub flops: u64,
}

/// Why numbers were cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CastReason {
    /// Autocast cast an input of the operator.
    Autocast,
    /// The operator itself copied one of its inputs into another dtype.
    Operator,
    /// The derivative of a cast in the forward pass.
    Derivative,
    /// The program asked for it, for example by `to_kind`.
    Program,
}

/// Casts of the same kind for the same reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CastRow {
    /// The dtype before.
    pub from: Dtype,
    /// The dtype after.
    pub to: Dtype,
    /// Why they were cast.
    pub reason: CastReason,
    /// The operator that needed it, or the operator of the forward pass of whose input it is the derivative.
    pub operator: Option<String>,
    /// The part of the model.
    pub path: Option<String>,
    /// The parameter that was cast, if it was one.
    pub parameter: Option<String>,
    /// The pass in which it ran.
    pub pass: Pass,
    /// How often, in all recorded runs.
    pub calls: u64,
    /// The bytes that were read and written, in all recorded runs.
    pub bytes: u64,
    /// The time in seconds, in all recorded runs.
    pub seconds: f64,
    /// How many of the calls cast the same unchanged tensor to the same dtype as an earlier one of the same run.
    pub repeats: u64,
    /// How many of the repeats autocast's cache would have saved: it keeps the casts of trainable f32 parameters until
    /// the outermost region ends, on any thread. These repeats come from a region without the cache, from several
    /// regions, or from the end of another thread's region.
    pub cacheable: u64,
    /// The time of the repeats in seconds.
    pub repeat_seconds: f64,
}

/// An operator that autocast ran in f32 although it had inputs in half precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MovedOperator {
    /// libtorch's name of the operator.
    pub operator: String,
    /// The part of the model.
    pub path: Option<String>,
    /// The last module before, in the order of execution, if `path` is unknown.
    pub after: Option<String>,
    /// The list because of which it ran in f32; [`AutocastList::Widest`] if another input was f32.
    pub list: AutocastList,
    /// How often, in all recorded runs.
    pub calls: u64,
    /// The time in seconds with all operators that it called, including casts, in all recorded runs.
    pub seconds: f64,
}

/// A size that is not a multiple of 8, in matrix products in half precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Padding {
    /// The part of the model.
    pub path: Option<String>,
    /// The operators that compute these products.
    pub operators: Vec<String>,
    /// Each such size, and the next multiple of 8.
    pub sizes: Vec<(u64, u64)>,
    /// The floating-point operations of these products.
    pub flops: u64,
    /// Their share of those of all products, from 0 to 1.
    pub share: f64,
}

/// An operator that was called inside of a region.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ListedOperator {
    /// libtorch's name of the operator.
    pub operator: String,
    /// The list that it is on, for this device and the libtorch that is linked.
    pub list: AutocastList,
    /// How often it was called, in all recorded runs.
    pub calls: u64,
    /// The other versions of libtorch in which it is on another list. Known are those of the guide's page
    /// [operations](crate::guide::operations).
    pub elsewhere: Vec<(String, AutocastList)>,
}

/// An estimate of what a half-precision dtype gains, from the measured speeds of square matrix products (Amdahl's law).
/// It knows neither the casts that would be added nor what fused kernels or the memory's bandwidth change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Gain {
    /// The dtype, bf16 or fp16.
    pub dtype: Dtype,
    /// The time of products in f32, which would be faster.
    pub f32_seconds: f64,
    /// How many times as fast the program would be if these products ran in the dtype.
    pub possible: f64,
    /// How many times as fast it would be if these products took no time.
    pub limit: f64,
    /// How many times as fast it already is because of the products that run in the dtype.
    pub reached: f64,
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
        write!(f, "{}\n{}", self.summary(), self.table(MOST_OPERATORS).plain())?;
        self.write_others(f)?;
        f.write_str(&self.sections())
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
        text(|out| self.write_summary(out))
    }

    /// The table of the operators that took longest.
    pub(in crate::insight) fn table(&self, most: usize) -> Table<10> {
        let rows = self.operators.iter().take(most).map(|row| self.cells(row));
        Table { columns: columns(), rows: rows.collect() }
    }

    /// The sections below the table of operators.
    pub(in crate::insight) fn sections(&self) -> String {
        text(|out| {
            self.cast_lines(out)?;
            self.moved_lines(out)?;
            self.padding_lines(out)?;
            self.list_lines(out)?;
            self.gain_lines(out)
        })
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

    fn write_summary(&self, f: &mut String) -> fmt::Result {
        let plain = match self.unrecorded_seconds {
            Some(seconds) => format!(", {:.2} ms when it is not recorded", seconds * 1e3),
            None => String::new(),
        };
        let own = self.own_seconds();
        writeln!(f, "a run takes {:.2} ms in operators{plain}", self.ms(own))?;
        if let Some(share) = self.half_share(None) {
            let of = |pass| self.half_share(Some(pass)).map_or("none".to_owned(), percent);
            writeln!(
                f,
                "matrix products: {:.3} MFLOP, {} of it in half precision (forward {}, backward {})",
                self.flops() as f64 / 1e6 / self.runs.max(1) as f64,
                percent(share),
                of(Pass::Forward),
                of(Pass::Backward)
            )?;
        }
        Ok(())
    }

    /// Writes the lines of what the table leaves out.
    fn write_others(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rest = &self.operators[self.operators.len().min(MOST_OPERATORS)..];
        if !rest.is_empty() {
            let seconds = rest.iter().map(|row| row.seconds).sum();
            let calls = total(rest.iter().map(|row| row.calls));
            self.other_line(f, &others(rest.len()), calls, seconds)?;
        }
        let wrappers = "calls of other operators, views, allocations";
        self.other_line(f, wrappers, self.wrapper_calls, self.wrapper_seconds)
    }

    /// A row of the table of operators.
    fn cells(&self, row: &OperatorRow) -> [String; 10] {
        let mega = |bytes: u64| format!("{:.3}", bytes as f64 / 1e6 / self.runs.max(1) as f64);
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

    fn other_line(
        &self,
        f: &mut Formatter<'_>,
        what: &str,
        calls: u64,
        seconds: f64,
    ) -> fmt::Result {
        let share = 100.0 * self.share(seconds);
        let (calls, ms) = (self.calls(calls), self.ms(seconds));
        writeln!(f, "{what:<61} {calls:>6} {ms:>9.3} {share:>5.1}")
    }
}

/// The text that is written.
fn text(write: impl FnOnce(&mut String) -> fmt::Result) -> String {
    let mut text = String::new();
    // A text in memory takes everything.
    write(&mut text).unwrap_or_default();
    text
}

pub(in crate::insight) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

impl OperatorReport {
    fn cast_lines(&self, f: &mut String) -> fmt::Result {
        let sum = |of: fn(&CastRow) -> f64| self.casts.iter().map(of).sum::<f64>();
        if self.casts.is_empty() {
            return writeln!(f, "\ncasts: none");
        }
        let seconds = sum(|row| row.seconds);
        writeln!(
            f,
            "\ncasts: {} of {:.3} MB, {:.3} ms ({})",
            self.calls(total(self.casts.iter().map(|row| row.calls))),
            sum(|row| row.bytes as f64) / 1e6 / self.runs.max(1) as f64,
            self.ms(seconds),
            percent(self.share(seconds))
        )?;
        for row in self.casts.iter().take(MOST) {
            writeln!(
                f,
                "  {:>4} {} → {}  {:.3} ms  {}",
                self.calls(row.calls),
                row.from,
                row.to,
                self.ms(row.seconds),
                Reason(row)
            )?;
        }
        more(f, self.casts.len())?;
        let cacheable = total(self.casts.iter().map(|row| row.cacheable));
        let repeats = total(self.casts.iter().map(|row| row.repeats));
        if cacheable > 0 {
            writeln!(
                f,
                "  {} cast a parameter again: leave the cache on, and use one region for all of them",
                self.calls(cacheable)
            )?;
        }
        if repeats > cacheable {
            let others = self.calls(repeats - cacheable);
            writeln!(
                f,
                "  {others} cast another tensor again: cast it once, before the operators that share it"
            )?;
        }
        Ok(())
    }

    fn moved_lines(&self, f: &mut String) -> fmt::Result {
        if self.moved_to_f32.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nrun in f32 by autocast, with inputs in half precision:")?;
        for row in self.moved_to_f32.iter().take(MOST) {
            let place = match &row.after {
                Some(module) => format!(" after {module}"),
                None => In(row.path.as_deref()).to_string(),
            };
            let (calls, ms) = (self.calls(row.calls), self.ms(row.seconds));
            writeln!(f, "  {calls:>4} {}{place}  {ms:.3} ms  (list: {})", row.operator, row.list)?;
        }
        more(f, self.moved_to_f32.len())
    }

    fn padding_lines(&self, f: &mut String) -> fmt::Result {
        if self.padding.is_empty() {
            return Ok(());
        }
        writeln!(f, "\nsizes that tensor cores use less efficiently (not multiples of 8):")?;
        for row in self.padding.iter().take(MOST) {
            let sizes = row.sizes.iter().map(|(size, padded)| format!("{size} to {padded}"));
            let sizes = sizes.collect::<Vec<_>>().join(", ");
            let operators = row.operators.join(", ");
            let place = In(row.path.as_deref());
            writeln!(f, "  {} of FLOPs: pad {sizes}  {operators}{place}", percent(row.share))?;
        }
        more(f, self.padding.len())
    }

    fn list_lines(&self, f: &mut String) -> fmt::Result {
        if self.lists.is_empty() {
            return writeln!(f, "\nno operator was called inside of an autocast region");
        }
        writeln!(f, "\nautocast's lists in libtorch {LINKED}:")?;
        for list in [
            AutocastList::LowerPrecision,
            AutocastList::F32,
            AutocastList::F32UnlessAsked,
            AutocastList::Widest,
            AutocastList::Refused,
            AutocastList::Untouched,
        ] {
            let names = self.lists.iter().filter(|listed| listed.list == list);
            let names = names.map(|listed| listed.operator.trim_start_matches("aten::"));
            let names = names.collect::<Vec<_>>().join(", ");
            if !names.is_empty() {
                writeln!(f, "  {list}: {names}")?;
            }
        }
        for listed in &self.lists {
            for (version, other) in &listed.elsewhere {
                writeln!(
                    f,
                    "  in libtorch {version}, {} is on another list: {other}",
                    listed.operator
                )?;
            }
        }
        Ok(())
    }

    fn gain_lines(&self, f: &mut String) -> fmt::Result {
        for gain in &self.gains {
            write!(f, "\nestimate for {}, from measured matrix products:", gain.dtype)?;
            if gain.f32_seconds > 0.0 {
                let (possible, limit) = (gain.possible, gain.limit);
                write!(f, "\n  {possible:.2}x as fast if the products in f32 ran in it, ")?;
                write!(f, "and {limit:.2}x if these took no time")?;
            }
            if gain.reached != 1.0 {
                write!(
                    f,
                    "\n  {:.2}x as fast as in f32 because of the products that already run in it",
                    gain.reached
                )?;
            }
        }
        if self.gains.is_empty() { Ok(()) } else { writeln!(f) }
    }
}

/// Why numbers were cast.
struct Reason<'a>(&'a CastRow);

impl Display for Reason<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(row) = self;
        let operator = row.operator.as_deref();
        match row.reason {
            CastReason::Autocast => {
                write!(f, "by autocast, for {}", operator.unwrap_or("an operator"))?
            }
            CastReason::Operator => write!(f, "by {}", operator.unwrap_or("an operator"))?,
            CastReason::Derivative => {
                write!(f, "derivative of a cast for {}", operator.unwrap_or("the program"))?;
            }
            CastReason::Program => write!(f, "by the program")?,
        }
        match &row.parameter {
            Some(parameter) => write!(f, ": {parameter}"),
            None => write!(f, "{}", In(row.path.as_deref())),
        }
    }
}

/// The part of the model, if it is known.
struct In<'a>(Option<&'a str>);

impl Display for In<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |path| write!(f, " in {path}"))
    }
}

fn more(f: &mut String, count: usize) -> fmt::Result {
    if count > MOST { writeln!(f, "       and {}", others(count - MOST)) } else { Ok(()) }
}

fn others(count: usize) -> String {
    if count == 1 { "1 more row".to_owned() } else { format!("{count} more rows") }
}
