//! An audit as text.

use std::fmt;

use super::{Audit, AuditedPart, Suspicion};
use crate::error::Number;

/// How many parts without suspicions are listed.
const MOST_CLEAN: usize = 20;

impl fmt::Display for Suspicion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotFinite => "is not finite",
            Self::MagnifiesRounding => "magnifies the rounding of its inputs",
            Self::LosesPrecision => "loses more than the rounding of its results",
            Self::Underflow => "has gradients that become zero: use a larger scale or bf16",
            Self::Gradient => "has gradients far from those in f32",
        })
    }
}

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suspicious = self.suspicious();
        let clean = || self.parts.iter().filter(|part| part.suspicions.is_empty());
        let [f32, lower] = self.losses;
        writeln!(
            f,
            "{} at a scale of {}: the loss is {lower:.6}, and {f32:.6} in f32",
            self.dtype,
            Number(self.scale)
        )?;
        let shown: Vec<&AuditedPart> =
            suspicious.iter().copied().chain(clean().take(MOST_CLEAN)).collect();
        let width = shown.iter().map(|part| part.path.chars().count()).max().unwrap_or(0).max(4);
        writeln!(
            f,
            "{:width$}  {:>9} {:>10}  {:>9} {:>8} {:>10}  dtypes",
            "part", "error", "× expected", "gradient", "cosine", "underflow"
        )?;
        for part in &shown {
            line(f, part, width)?;
        }
        let rest = clean().count().saturating_sub(MOST_CLEAN);
        if rest > 0 {
            writeln!(f, "and {rest} more parts without suspicions")?;
        }
        if suspicious.is_empty() {
            return write!(f, "verdict: no part is suspicious in {}", self.dtype);
        }
        write!(f, "verdict: {} of {} parts are suspicious", suspicious.len(), self.parts.len())?;
        for part in &suspicious {
            let all: Vec<String> = part.suspicions.iter().map(Suspicion::to_string).collect();
            write!(f, "\n  {} {}", part.path, all.join(", and "))?;
            if let Some(output) = part.output.as_ref().filter(|_| part.has_suspicious_output()) {
                write!(f, " ({})", output.operator)?;
            }
        }
        let keep = self.keep_in_f32();
        if !keep.is_empty() {
            write!(f, "\nkeep in f32: {}", keep.join(", "))?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, part: &AuditedPart, width: usize) -> fmt::Result {
    write!(f, "{:width$}  ", part.path)?;
    match &part.output {
        Some(output) => write!(f, "{:>9.1e} {:>10.1}  ", output.error, output.multiple)?,
        None => write!(f, "{:>9} {:>10}  ", "", "")?,
    }
    match &part.gradient {
        Some(gradient) => write!(
            f,
            "{:>9.1e} {:>8.5} {:>9.2}%  ",
            gradient.error,
            gradient.cosine,
            100.0 * gradient.underflow
        )?,
        None => write!(f, "{:>9} {:>8} {:>10}  ", "", "", "")?,
    }
    let dtypes = part.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}"));
    writeln!(f, "{}", dtypes.collect::<Vec<_>>().join(", "))
}
