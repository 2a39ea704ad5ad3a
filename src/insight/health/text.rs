//! The texts of reports on the loss scale.

use std::fmt;

use super::report::{AtScale, HealthReport, LayerHealth, Verdict, exponent};
use crate::error::Number;

/// How many layers a text names.
const MOST_LAYERS: usize = 3;

/// Layers in which a larger share than this underflows are named.
const NAMED_SHARE: f64 = 0.01;

/// A scale, as a power of two if it is one.
pub(super) struct Scale(pub(super) f64);

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(scale) = *self;
        let power = exponent(scale);
        if scale == 2f64.powi(power) && power != 0 {
            write!(f, "2^{power}")
        } else {
            write!(f, "{}", Number(scale))
        }
    }
}

/// A share in percent, with two digits that count.
struct Percent(f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.0;
        match percent {
            0.0 => write!(f, "0 %"),
            _ if percent < 0.01 => write!(f, "<0.01 %"),
            _ if percent < 1.0 => write!(f, "{percent:.2} %"),
            _ if percent < 10.0 => write!(f, "{percent:.1} %"),
            _ if percent < 100.0 && percent > 99.0 => write!(f, ">99 %"),
            _ => write!(f, "{percent:.0} %"),
        }
    }
}

/// The numbers of an `AtScale` without the scale.
struct Shares<'a>(&'a AtScale);

impl fmt::Display for Shares<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AtScale { lost, edge, overflowing, headroom, .. } = *self.0;
        let Some(headroom) = headroom else {
            return write!(f, "no gradient that is neither zero nor infinite");
        };
        write!(f, "{} underflow", Percent(lost))?;
        if edge > lost {
            write!(f, " and {} at its edge", Percent(edge))?;
        }
        match headroom {
            1 => write!(f, ", 1 binade of headroom"),
            0.. => write!(f, ", {headroom} binades of headroom"),
            _ => write!(f, ", {} overflow", Percent(overflowing)),
        }
    }
}

/// Prints such as `at 2^13: 0.02 % underflow, 3 binades of headroom`.
impl fmt::Display for AtScale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", Scale(self.scale), Shares(self))
    }
}

/// Prints such as `layers.3.q: 31 % underflow, 5 binades of headroom, 12 % zeros`.
impl fmt::Display for LayerHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {} zeros", self.name, Shares(&self.now), Percent(self.zeros))
    }
}

/// Prints the advice.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => write!(f, "nothing to judge"),
            Self::Healthy => write!(f, "healthy"),
            Self::TooLow { scale } => {
                write!(f, "too low, raise init_scale to at least {}", Scale(*scale))
            }
            Self::TooWide => {
                write!(
                    f,
                    "no scale fits: use bf16, or keep the layers in f32 whose gradients differ most"
                )
            }
            Self::Overflowing => {
                write!(f, "most iterations overflow: a Tracer names the operation, or use bf16")
            }
            Self::BelowOne => write!(
                f,
                "the scale keeps falling below 1: the model itself overflows fp16, use bf16"
            ),
        }
    }
}

/// Prints such as `at 2^13: 0.02 % underflow, 3 binades of headroom: healthy`, and the layers of which most underflows.
impl fmt::Display for HealthReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { observed, skipped, verdict, model, layers, .. } = self;
        write!(f, "{}", model.now)?;
        if *skipped > 0 {
            write!(f, ", {skipped} of {observed} iterations skipped")?;
        }
        write!(f, ": {verdict}")?;
        let lost = |layer: &LayerHealth| layer.now.lost.max(layer.now.edge);
        let mut worst: Vec<_> = layers.iter().filter(|layer| lost(layer) > NAMED_SHARE).collect();
        worst.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
        worst.iter().take(MOST_LAYERS).try_for_each(|layer| write!(f, "\n  {layer}"))
    }
}
