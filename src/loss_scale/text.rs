//! Loss scales as text.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Number, Result, ScalerError};
use crate::loss_scale::fixed::check_static;
use crate::loss_scale::{DynamicLossScaleState, LossScaleState};

/// The result of parsing, or the problem.
type Read<T> = std::result::Result<T, String>;

impl FromStr for LossScaleState {
    type Err = Error;

    /// Parses a loss scale; see the [type](LossScaleState#as-text) for the grammar.
    fn from_str(text: &str) -> Result<Self> {
        let small = text.to_ascii_lowercase();
        read(small.trim()).map_err(|problem| {
            Error::Scaler(ScalerError::LossScaleText { text: text.to_owned(), problem })
        })
    }
}

fn read(text: &str) -> Read<LossScaleState> {
    let (kind, start) = match text.split_once(':') {
        Some((kind, start)) => (kind.trim(), Some(start.trim())),
        None => (text, None),
    };
    match (kind, start) {
        ("", None) => Err("it is empty".to_owned()),
        ("none" | "noop", None) => Ok(LossScaleState::NoOp),
        ("none" | "noop", Some(_)) => Err(format!("`{kind}` takes no number")),
        ("static", None) => Err("`static` takes a number".to_owned()),
        ("static", Some(scale)) => fixed(scale),
        ("dynamic", start) => dynamic(start),
        (scale, None) => fixed(scale),
        _ => Err(format!("there is no `{kind}` loss scale")),
    }
}

fn fixed(text: &str) -> Read<LossScaleState> {
    let loss_scale = number(text)?;
    check_static(loss_scale).map_err(|error| error.to_string())?;
    Ok(LossScaleState::Static { loss_scale })
}

fn dynamic(start: Option<&str>) -> Read<LossScaleState> {
    let mut state = DynamicLossScaleState::default();
    if let Some(start) = start {
        state.loss_scale = number(start)?;
    }
    let lowest = Number(state.min_loss_scale);
    let outside = |_| format!("a dynamic one starts at {lowest} or more, up to the largest f32");
    state.checked().map(LossScaleState::Dynamic).map_err(outside)
}

fn number(text: &str) -> Read<f64> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

impl fmt::Display for LossScaleState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoOp => f.write_str("none"),
            Self::Static { loss_scale } => write!(f, "static:{loss_scale}"),
            Self::Dynamic(state) => write!(f, "dynamic:{}", state.loss_scale),
        }
    }
}
