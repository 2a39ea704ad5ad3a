//! The text of a report for a terminal.

use std::fmt::{self, Display, Formatter};

use super::lists::{AutocastList, LINKED};
use super::report::{CastReason, CastRow, OperatorReport, OperatorRow};
use crate::insight::numbers::total;
use crate::insight::recording::Pass;

/// How many rows of the table are shown.
const MOST_OPERATORS: usize = 15;

/// How many rows of each section below it are shown.
const MOST: usize = 6;

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
    fn ms(&self, seconds: f64) -> f64 {
        seconds * 1e3 / self.runs.max(1) as f64
    }

    fn calls(&self, calls: u64) -> u64 {
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
            self.wrapper_calls,
            self.wrapper_seconds,
        )
    }

    /// A row of the table of operators.
    pub(in crate::insight) fn cells(&self, row: &OperatorRow) -> [String; 10] {
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

impl OperatorReport {
    fn cast_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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
            percent(seconds / self.own_seconds().max(f64::MIN_POSITIVE))
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

    fn moved_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    fn padding_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    fn list_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    fn gain_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

fn more(f: &mut Formatter<'_>, count: usize) -> fmt::Result {
    if count > MOST { writeln!(f, "       and {}", others(count - MOST)) } else { Ok(()) }
}

fn others(count: usize) -> String {
    if count == 1 { "1 more row".to_owned() } else { format!("{count} more rows") }
}
