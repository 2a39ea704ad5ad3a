//! The words and bits of an answer, in the oracle's form.

use std::fmt::Write as _;

use tch::Tensor;
use tch_amp::gradients::GradientError;
use tch_amp::scaler::{ScalerError, StepOutcome};
use tch_amp::{Error, Result};
use testkit::bits::canonical;

pub fn told(outcome: &StepOutcome) -> Result<String> {
    assert_ne!(outcome.is_stepped()?, outcome.is_skipped()? || outcome.has_no_gradients());
    let word = if outcome.has_no_gradients() {
        "no-gradients"
    } else if outcome.is_stepped()? {
        "stepped"
    } else {
        "skipped"
    };
    Ok(word.to_owned())
}

/// The oracle's word for this error: for its counterpart in PyTorch, or for one that PyTorch lacks.
pub fn word(error: &Error) -> String {
    match error {
        Error::Scaler(ScalerError::AlreadyUnscaled) => "unscaled-twice".to_owned(),
        Error::Scaler(ScalerError::UnscaleAfterStep) => "unscaled-after-step".to_owned(),
        Error::Scaler(ScalerError::AlreadyStepped) => "stepped-twice".to_owned(),
        Error::Scaler(ScalerError::NoInfChecks) => "no-inf-checks".to_owned(),
        Error::Scaler(ScalerError::IterationOpen { .. }) => "iteration-open".to_owned(),
        Error::Gradient(GradientError::Shared { .. }) => "shared".to_owned(),
        Error::Gradient(GradientError::Changed { .. }) => "changed".to_owned(),
        other => format!("error: {other}"),
    }
}

pub fn write_bits(out: &mut String, tensor: &Tensor) {
    if !tensor.defined() {
        out.push('-');
        return;
    }
    let mut bytes = [0; 64];
    let length = tensor.numel() * tensor.kind().elt_size_in_bytes();
    tensor.copy_data_u8(&mut bytes[..length], tensor.numel());
    write_hex(out, &canonical(tensor.kind(), bytes[..length].to_vec()));
}

pub fn write_hex(out: &mut String, bytes: &[u8]) {
    for byte in bytes {
        write!(out, "{byte:02x}").unwrap();
    }
}
