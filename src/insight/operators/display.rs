//! The text of a report.

use std::fmt::{self, Display, Formatter};

use super::report::{OperatorReport, OperatorRow};
use super::sections::others;
use crate::insight::Pass;
use crate::insight::numbers::total;

/// How many rows of the table are shown.
const MOST_OPERATORS: usize = 15;

impl Display for OperatorReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Summary(self))?;
        self.table(f)?;
        write!(f, "{}", Sections(self))
    }
}

/// The lines above the table of operators.
pub(in crate::insight) struct Summary<'a>(pub(in crate::insight) &'a OperatorReport);

impl Display for Summary<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.summary(f)
    }
}

/// The sections below the table of operators.
pub(in crate::insight) struct Sections<'a>(pub(in crate::insight) &'a OperatorReport);

impl Display for Sections<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(report) = self;
        report.cast_lines(f)?;
        report.moved_lines(f)?;
        report.padding_lines(f)?;
        report.list_lines(f)?;
        report.gain_lines(f)
    }
}

/// The columns of the table of operators. The numbers are those of one run.
pub(in crate::insight) const COLUMNS: [&str; 10] =
    ["operator", "dtype", "device", "pass", "calls", "ms", "%", "MB read", "written", "GFLOP/s"];

impl OperatorReport {
    /// The milliseconds of one run.
    pub(super) fn ms(&self, seconds: f64) -> f64 {
        seconds * 1e3 / self.runs.max(1) as f64
    }

    pub(super) fn calls(&self, calls: u64) -> u64 {
        calls.div_ceil(self.runs.max(1))
    }

    fn summary(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    fn table(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        line(f, &COLUMNS.map(str::to_owned))?;
        for row in self.operators.iter().take(MOST_OPERATORS) {
            line(f, &self.cells(row))?;
        }
        let rest = &self.operators[self.operators.len().min(MOST_OPERATORS)..];
        if !rest.is_empty() {
            let seconds = rest.iter().map(|row| row.seconds).sum();
            let calls = total(rest.iter().map(|row| row.calls));
            self.other_line(f, &others(rest.len()), calls, seconds)?;
        }
        self.other_line(
            f,
            "calls of other operators, views, allocations",
            self.wrappers.calls,
            self.wrappers.seconds,
        )
    }

    /// A row of the table of operators.
    pub(in crate::insight) fn cells(&self, row: &OperatorRow) -> [String; 10] {
        let mega = |bytes: u64| format!("{:.3}", bytes as f64 / 1e6 / self.runs.max(1) as f64);
        let has_speed = row.flops > 0 && row.seconds > 0.0;
        let speed = has_speed.then(|| format!("{:.1}", row.flops as f64 / 1e9 / row.seconds));
        [
            row.operator.trim_start_matches("aten::").to_owned(),
            row.dtype.clone(),
            row.device.clone(),
            row.pass.to_string(),
            self.calls(row.calls).to_string(),
            format!("{:.3}", self.ms(row.seconds)),
            format!("{:.1}", 100.0 * row.seconds / self.own_seconds().max(f64::MIN_POSITIVE)),
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
        let share = 100.0 * seconds / self.own_seconds().max(f64::MIN_POSITIVE);
        let (calls, ms) = (self.calls(calls), self.ms(seconds));
        writeln!(f, "{what:<61} {calls:>6} {ms:>9.3} {share:>5.1}")
    }
}

fn line(f: &mut Formatter<'_>, cells: &[String; 10]) -> fmt::Result {
    let [operator, dtype, device, pass, calls, ms, share, read, written, speed] = cells;
    writeln!(
        f,
        "{operator:<38} {dtype:<5} {device:<7} {pass:<8} {calls:>6} {ms:>9} {share:>5} {read:>9} {written:>9} {speed:>7}"
    )
}

pub(in crate::insight) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}
