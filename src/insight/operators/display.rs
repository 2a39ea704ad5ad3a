//! The text of a report.

use std::fmt::{self, Display, Formatter};

use super::report::{OperatorReport, OperatorRow};
use super::sections::others;
use crate::insight::Pass;

/// How many rows of the table are shown.
const MOST_OPERATORS: usize = 15;

impl Display for OperatorReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.summary(f)?;
        self.table(f)?;
        self.cast_lines(f)?;
        self.moved_lines(f)?;
        self.padding_lines(f)?;
        self.list_lines(f)?;
        self.gain_lines(f)
    }
}

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
        writeln!(
            f,
            "\n{:<38} {:<5} {:<7} {:<8} {:>6} {:>9} {:>5} {:>9} {:>9} {:>7}",
            "operator",
            "dtype",
            "device",
            "pass",
            "calls",
            "ms",
            "%",
            "MB read",
            "written",
            "GFLOP/s"
        )?;
        for row in self.operators.iter().take(MOST_OPERATORS) {
            self.operator_line(row, f)?;
        }
        let rest = &self.operators[self.operators.len().min(MOST_OPERATORS)..];
        if !rest.is_empty() {
            let seconds = rest.iter().map(|row| row.seconds).sum();
            let calls = rest.iter().map(|row| row.calls).sum();
            self.other_line(f, &others(rest.len()), calls, seconds)?;
        }
        self.other_line(
            f,
            "calls of other operators, views, allocations",
            self.wrappers.calls,
            self.wrappers.seconds,
        )
    }

    fn operator_line(&self, row: &OperatorRow, f: &mut Formatter<'_>) -> fmt::Result {
        let mega = |bytes: u64| bytes as f64 / 1e6 / self.runs.max(1) as f64;
        let speed = if row.flops > 0 && row.seconds > 0.0 {
            format!("{:.1}", giga(row.flops) / row.seconds)
        } else {
            String::new()
        };
        writeln!(
            f,
            "{:<38} {:<5} {:<7} {:<8} {:>6} {:>9.3} {:>5.1} {:>9.3} {:>9.3} {:>7}",
            row.operator.trim_start_matches("aten::"),
            row.dtype,
            row.device,
            words(row.pass),
            self.calls(row.calls),
            self.ms(row.seconds),
            100.0 * row.seconds / self.own_seconds().max(f64::MIN_POSITIVE),
            mega(row.bytes_read),
            mega(row.bytes_written),
            speed
        )
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

fn words(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
    }
}

fn giga(flops: u64) -> f64 {
    flops as f64 / 1e9
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}
