//! An audit as text.

use std::fmt;

use super::parts::keep_in_f32;
use super::{AFTER, Audit, AuditedPart, Suspicion};
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
        write!(f, "{}", Verdict(self))
    }
}

/// The lines below the table of parts.
pub(in crate::insight) struct Verdict<'a>(pub(in crate::insight) &'a Audit);

impl fmt::Display for Verdict<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(audit) = self;
        let suspicious = audit.suspicious();
        if suspicious.is_empty() {
            return write!(f, "verdict: no part is suspicious in {}", audit.dtype);
        }
        write!(f, "verdict: suspicious parts: {} of {}", suspicious.len(), audit.parts.len())?;
        for part in &suspicious {
            let all: Vec<String> = part.suspicions.iter().map(Suspicion::to_string).collect();
            write!(f, "\n  {} {}", part.path, all.join(", and "))?;
            if let Some(output) = part.output.as_ref().filter(|_| part.has_suspicious_output()) {
                write!(f, " ({})", output.operator)?;
            }
        }
        let keep = keep_in_f32(&audit.parts);
        if !keep.is_empty() {
            let is_said = |path: &&str| keep.contains(&format!("{AFTER}{path}").as_str());
            let said: Vec<_> =
                keep.iter().filter(|path| !is_said(path)).map(with_followers).collect();
            write!(f, "\nkeep in f32: {}", said.join(", "))?;
            let [_, whole] = audit.seconds;
            let share = 100.0 * audit.f32_seconds() / whole.max(f64::MIN_POSITIVE);
            write!(
                f,
                "\n  measured cost: {share:+.1} % of the {:.2} ms of an iteration",
                1e3 * whole
            )?;
        }
        Ok(())
    }
}

/// How a part to keep in f32 is called.
fn with_followers(path: &&str) -> String {
    let after = path.strip_prefix(AFTER);
    after.map_or_else(|| (*path).to_owned(), |module| format!("{module} and what follows it"))
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
