//! The text of a report below the table of operators.

use std::fmt::{self, Display, Formatter};

use super::display::percent;
use super::lists::{AutocastList, LINKED};
use super::report::{CastReason, CastRow, OperatorReport};
use crate::insight::numbers::total;

/// How many rows of each part are shown.
const MOST: usize = 6;

impl OperatorReport {
    pub(super) fn cast_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    pub(super) fn moved_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    pub(super) fn padding_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    pub(super) fn list_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

    pub(super) fn gain_lines(&self, f: &mut Formatter<'_>) -> fmt::Result {
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

pub(super) fn others(count: usize) -> String {
    if count == 1 { "1 more row".to_owned() } else { format!("{count} more rows") }
}
