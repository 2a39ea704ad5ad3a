//! The page for a terminal, and words that its sections share.

use std::fmt::{self, Display, Formatter};

use super::Page;
use crate::insight::{Cause, Culprit, Explanation};

impl Display for Page {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.title)?;
        if let Some(history) = &self.history {
            write!(f, "\n\n{history}")?;
        }
        for explanation in &self.explanations {
            write!(f, "\n\n{explanation}")?;
        }
        if let Some((step, health)) = self.health.last() {
            write!(f, "\n\nstep {step}, gradients {health}")?;
        }
        for audit in &self.audits {
            write!(f, "\n\n{audit}")?;
        }
        for report in &self.operators {
            write!(f, "\n\n{}", report.to_string().trim_end())?;
        }
        Ok(())
    }
}

/// Why a step was skipped, in a few words.
pub(super) fn reason(explanation: &Explanation) -> String {
    let culprit = explanation.culprit.as_ref().map(operator);
    let culprit = || culprit.unwrap_or_else(|| "an unknown operator".to_owned());
    match &explanation.cause {
        Cause::Parameter { name } => format!("{name} was not finite before"),
        Cause::Input { operator, .. } => format!("an input of {operator} was not finite"),
        Cause::Scale { .. } => format!("the scale was too large for {}", culprit()),
        Cause::Values => culprit(),
        Cause::Finite => "finite when it was run again".to_owned(),
    }
}

/// An operator with its part of the model.
fn operator(culprit: &Culprit) -> String {
    let Culprit { operator, dtype, pass, path, after, .. } = culprit;
    let place = match (path, after) {
        (Some(path), _) => format!(" in {path}"),
        (None, Some(module)) => format!(" after {module}"),
        (None, None) => String::new(),
    };
    format!("{operator}{place}, {dtype}, {pass}")
}

/// A time in milliseconds.
pub(super) fn milliseconds(seconds: f64) -> String {
    format!("{:.3}", 1e3 * seconds)
}
