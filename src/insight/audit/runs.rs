//! The runs of an audit.

use std::collections::BTreeMap;

use tch::nn::VarStore;
use tch::{Kind, Tensor};

use super::gradients::{self, UnscaledGradients};
use super::{Audit, AuditedPart, parts};
use crate::Autocast;
use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::ffi::emulation::{Emulation, Regions, Rounding};
use crate::ffi::insight::{RecordingMode, Reference};
use crate::insight::dtype::Dtype;
use crate::insight::recording::Recording;
use crate::insight::rerun::{Passes, Repeatable, Rerun, SCALED_LOSS, emulated};

/// How many runs show how far rounding alone moves the results.
const NOISY: u64 = 4;

/// How often the time is measured in f32 and in the region, in turn.
const ROUNDS: usize = 3;

/// The seconds of each part, forward and backward.
type PartTimes = BTreeMap<String, f64>;

/// A recorded run.
struct AuditedRun {
    recording: Recording,
    loss: f64,
    gradients: UnscaledGradients,
}

pub(super) fn audit(
    vs: &VarStore,
    region: Autocast,
    scale: f64,
    mut loss: impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Audit> {
    let repeatable = Repeatable::new(vs)?;
    check_parameters(&repeatable)?;
    let mut beginning = repeatable.begin()?;
    let mut rerun = repeatable.rerun(&mut beginning)?;
    let off = region.enabled(false);
    let reference = Reference::new()?;
    let f32 = record(&mut rerun, RecordingMode::Reference(&reference), scale, &mut || loss(off))?;
    let mut audit = beside(&mut rerun, (&reference, &f32), region, scale, NOISY, &mut loss)?;
    let mut measured = [PartTimes::new(), PartTimes::new()];
    for _ in 0..ROUNDS {
        for (fastest, region) in measured.iter_mut().zip([off, region]) {
            let (recording, _) = rerun.record(RecordingMode::Times, scale, &mut || loss(region))?;
            keep_fastest(fastest, times(&recording));
        }
    }
    add_times(&mut audit.parts, &measured);
    audit.seconds = measured.map(|times| times.values().sum());
    Ok(audit)
}

/// The audits of regions, without times. It runs the loss once in f32, and two or three times for each region.
pub(in crate::insight) fn without_times(
    rerun: &mut Rerun<'_>,
    regions: [Autocast; 2],
    scale: f64,
    loss: &mut impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<[Audit; 2]> {
    let off = regions[0].enabled(false);
    let reference = Reference::new()?;
    let f32 = record(rerun, RecordingMode::Reference(&reference), scale, &mut || loss(off))?;
    let mut of = |region| beside(rerun, (&reference, &f32), region, scale, 0, loss);
    Ok([of(regions[0])?, of(regions[1])?])
}

/// The audit of a region beside a run in f32, without times, and with so many runs that round at random.
fn beside(
    rerun: &mut Rerun<'_>,
    (reference, f32): (&Reference, &AuditedRun),
    region: Autocast,
    scale: f64,
    noisy: u64,
    loss: &mut impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Audit> {
    let lower = record(rerun, RecordingMode::Compared(reference), scale, &mut || loss(region))?;
    let kind = parts::lower_kind(&lower.recording);
    let off = region.enabled(false);
    let rounded = kind.map(|kind| {
        record(rerun, RecordingMode::Rounded(reference, kind), scale, &mut || loss(off))
    });
    let rounded = rounded.transpose()?;
    let noisy = if kind.is_some() { noisy } else { 0 };
    let noisy = (0..noisy).map(|seed| with_noise(rerun, reference, region, scale, seed, loss));
    let noisy = noisy.collect::<Result<Vec<_>>>()?;
    let unscaled = match scale == 1.0 {
        true => None,
        false => {
            let Passes { gradients, .. } = rerun.run(1.0, &mut || loss(region))?;
            Some(UnscaledGradients::new(gradients, 1.0))
        }
    };
    let gradients = gradients::compare(
        &f32.gradients,
        &lower.gradients,
        rounded.as_ref().map(|run| &run.gradients),
        unscaled.as_ref().unwrap_or(&lower.gradients),
    )?;
    let rounded = rounded.as_ref().map(|run| &run.recording);
    let parts = parts::parts(&lower.recording, rounded, &noisy, kind, &gradients);
    let dtype = kind.map_or(Dtype::F32, Dtype::from);
    Ok(Audit { dtype, scale, seconds: [0.0; 2], losses: [f32.loss, lower.loss], parts })
}

/// A run in f32 that rounds at random what the region would round.
fn with_noise(
    rerun: &mut Rerun<'_>,
    reference: &Reference,
    region: Autocast,
    scale: f64,
    seed: u64,
    loss: &mut impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Recording> {
    let emulated = emulated(&region)?;
    let mut emulation = None;
    let mut emulating = || {
        emulation =
            Some(Emulation::begin(&emulated, Regions::Emulated, Rounding::Random { seed })?);
        loss(region)
    };
    Ok(record(rerun, RecordingMode::Compared(reference), scale, &mut emulating)?.recording)
}

pub(in crate::insight) fn check_parameters(repeatable: &Repeatable) -> Result<()> {
    for (name, parameter) in repeatable.parameters() {
        if matches!(parameter.f_kind()?, Kind::Half | Kind::BFloat16) {
            let problem = format!(
                "has the parameter {name} in half precision: audit the model with parameters in f32"
            );
            return Err(Error::InvalidArgument { name: "vs", problem });
        }
    }
    Ok(())
}

fn record(
    rerun: &mut Rerun<'_>,
    mode: RecordingMode<'_>,
    scale: f64,
    loss: &mut impl FnMut() -> Result<Tensor>,
) -> Result<AuditedRun> {
    let (recording, Passes { scaled, gradients, .. }) = rerun.record(mode, scale, loss)?;
    if recording.differs() {
        let problem =
            "calls other operators in f32 than in the region, so they cannot be compared: use the region that \
             the closure is given, and nothing that depends on the dtype"
                .to_owned();
        return Err(Error::InvalidArgument { name: "loss", problem });
    }
    let _own = OutsideRegions::enter();
    let loss = scaled.f_double_value(&[])? / scale;
    Ok(AuditedRun { recording, loss, gradients: UnscaledGradients::new(gradients, scale) })
}

/// Adds up the own times of the operators of each part.
fn times(recording: &Recording) -> PartTimes {
    let mut times = PartTimes::new();
    for (index, nanoseconds) in recording.times().0.into_iter().enumerate() {
        if nanoseconds > 0 {
            let path = recording.part(index).unwrap_or_else(|| {
                let forward = recording.pass(index).1;
                parts::place(recording, forward.unwrap_or(index))
            });
            *times.entry(path).or_default() += nanoseconds as f64 / 1e9;
        }
    }
    times.remove(SCALED_LOSS);
    times
}

/// Keeps the shorter time of each part.
fn keep_fastest(fastest: &mut PartTimes, other: PartTimes) {
    for (path, seconds) in other {
        fastest
            .entry(path)
            .and_modify(|fastest| *fastest = fastest.min(seconds))
            .or_insert(seconds);
    }
}

/// Gives the parts of an audit their times in f32 and in the region.
fn add_times(parts: &mut [AuditedPart], measured: &[PartTimes; 2]) {
    for part in parts {
        let seconds = |times: &PartTimes| times.get(&part.path).copied().unwrap_or(0.0);
        part.seconds = measured.each_ref().map(seconds);
    }
}
