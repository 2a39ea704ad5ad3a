//! The effect of half precision on the numbers of a model.

mod parts;

use std::collections::BTreeMap;
use std::fmt;

use parts::{Scaled, needs_f32};
use run_report::{Column, Table};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Kind, Tensor};

use super::numbers;
use super::saved::SavedReport;
use crate::error::{Error, Number, Result};
use crate::ffi::OutsideRegions;
use crate::ffi::insight::{RecordingMode, Reference};
use crate::insight::dtype::Dtype;
use crate::insight::measure::ratio;
use crate::insight::recording::{AFTER, Recording};
use crate::insight::rerun::{Passes, Repeatable, Runs, SCALED_LOSS};
use crate::{Autocast, GradScaler, capture};

/// How many parts without suspicions are listed.
const MOST_CLEAN: usize = 20;

/// The effect of half precision on the numbers of a model, part by part. Made by [`audit`].
///
/// Its text, by `Display`, is a table with the most suspicious parts first, a verdict and advice, also on what takes
/// most of the memory for the backward pass (see [`saved_tensors`](super::saved_tensors())).
///
/// A program that wants the numbers behind the text serializes the audit, which has the list `parts` beside the fields
/// below. A number that is infinite or NaN is a text in JSON, such as `inf`.
///
/// - `parts`: the parts of the model, in the order of execution. A row has `path` (its name, as in
///   [`suspicious`](Self::suspicious)), `dtypes` (how many operators that the program calls returned each [`Dtype`]
///   inside of the region), `output` and `gradient` (below), `seconds` (the time of its operators, forward and backward,
///   in f32 and in the region, the shortest of three runs each, with the dispatcher and, on a GPU, the launch of each
///   kernel) and `suspicions` (their names in the [guide](crate::guide::insight), such as `NotFinite`).
/// - `output` of a part: the forward results in the region, beside those in f32, of its operator for which the smaller
///   of `multiple` and `growth` is largest; null if only the gradients are those of this part. It has `operator`
///   (libtorch's name), `error` (the norm of the difference, divided by the norm in f32; infinite if the results are
///   not finite in the region, and 0 if all are zero in f32), `cosine` (of the angle between the two), `expected` (the
///   error that is expected at this depth: each operator that returns half precision adds one rounding to those of its
///   inputs, as in a random walk), `rounded` (the error of f32 operators whose results are rounded to half precision),
///   `noise` (the error of f32 operators that round at random what the region rounds, the root mean square of four
///   runs; half precision that does no more than rounding has about 0.7 of it, as in a [`Budget`](super::Budget); null
///   if the region returns no half precision), `multiple` (the error as a multiple of `expected`), `growth` (the
///   multiple, divided by the largest one of what this part was given; at most 1 for a single finite number, which can
///   be near zero by chance) and `inputs` (the parts that computed what the operator read).
/// - `gradient` of a part: the gradients of its parameters in the region, beside those in f32; null if it has none. It
///   has `error` (the norm of the difference, divided by the norm in f32; infinite if they are not finite in the
///   region), `cosine` (as above), `rounded` (the error of f32 operators whose results and gradients are rounded to
///   half precision), `underflow` (the share of zeros in the region, from 0 to 1, among the elements that are not zero
///   in f32) and `underflow_unscaled` (the same with a scale of 1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Audit {
    /// The half-precision dtype that the operators of the region returned; [`Dtype::F32`] if none did.
    pub dtype: Dtype,
    /// The loss scale.
    #[serde(with = "numbers")]
    pub scale: f64,
    /// The time in seconds of one iteration's operators, in f32 and in the region.
    pub seconds: [f64; 2],
    /// The loss in f32, and in the region.
    #[serde(with = "numbers::pair")]
    pub losses: [f64; 2],
    parts: Vec<AuditedPart>,
    /// What the iteration keeps most of, and what keeps less.
    #[serde(default)]
    kept: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct AuditedPart {
    path: String,
    dtypes: BTreeMap<Dtype, usize>,
    output: Option<AuditedOutput>,
    gradient: Option<AuditedGradient>,
    seconds: [f64; 2],
    suspicions: Vec<Suspicion>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct AuditedOutput {
    operator: String,
    #[serde(with = "numbers")]
    error: f64,
    #[serde(with = "numbers")]
    cosine: f64,
    #[serde(with = "numbers")]
    expected: f64,
    #[serde(with = "numbers")]
    rounded: f64,
    #[serde(default, with = "numbers::option")]
    noise: Option<f64>,
    #[serde(with = "numbers")]
    multiple: f64,
    #[serde(with = "numbers")]
    growth: f64,
    inputs: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct AuditedGradient {
    #[serde(with = "numbers")]
    error: f64,
    #[serde(with = "numbers")]
    cosine: f64,
    #[serde(with = "numbers")]
    rounded: f64,
    #[serde(with = "numbers")]
    underflow: f64,
    #[serde(with = "numbers")]
    underflow_unscaled: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Suspicion {
    NotFinite,
    MagnifiesRounding,
    LosesPrecision,
    Underflow,
    Gradient,
}

impl Audit {
    /// The names of the parts with suspicions, the most suspicious first: each is the module of a parameter, a name
    /// given by [`named`](super::named), `after` the last such part, or `start`.
    pub fn suspicious(&self) -> Vec<String> {
        self.suspicious_parts().into_iter().map(|part| part.path.clone()).collect()
    }

    fn suspicious_parts(&self) -> Vec<&AuditedPart> {
        let mut parts: Vec<_> =
            self.parts.iter().filter(|part| !part.suspicions.is_empty()).collect();
        parts.sort_by(|a, b| b.severity().total_cmp(&a.severity()));
        parts
    }

    /// A line for each suspicion, the most suspicious part first.
    pub(in crate::insight) fn suspicions(&self) -> Vec<String> {
        let parts = self.suspicious_parts().into_iter();
        let all = parts.flat_map(|part| part.suspicions.iter().map(move |found| (part, found)));
        all.map(|(part, found)| format!("{} {found}", part.path)).collect()
    }

    /// The modules and named parts that should be computed in f32: with a region switched off, or with patterns of
    /// [`KeepF32`](crate::policy::KeepF32) such as `layers.3.*`, which match modules but no names given by
    /// [`named`](super::named). If a part magnifies the rounding of its inputs, the parts that computed them are listed
    /// as well. For operators without a name, which the audit calls `after` a module, the module is listed: keep what
    /// follows it in f32, too, or give it a name.
    pub fn needs_f32(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for path in needs_f32(&self.parts) {
            let name = path.strip_prefix(AFTER).unwrap_or(path);
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        names
    }

    /// Estimates how many seconds longer an iteration takes with the parts of [`needs_f32`](Self::needs_f32) in
    /// f32: the difference of the times that they take there and in the region. Casts between these parts and
    /// others are not included.
    pub fn f32_seconds(&self) -> f64 {
        let keep = needs_f32(&self.parts);
        // Where operators after a module are to be kept, so is the module.
        let is_kept = |part: &&AuditedPart| {
            let followers = format!("{AFTER}{}", part.path);
            keep.contains(&part.path.as_str()) || keep.contains(&followers.as_str())
        };
        let kept = self.parts.iter().filter(is_kept);
        kept.map(|part| part.seconds[0] - part.seconds[1]).sum()
    }
}

impl AuditedPart {
    /// Returns whether a suspicion is about its forward results.
    fn has_suspicious_output(&self) -> bool {
        use Suspicion::{LosesPrecision, MagnifiesRounding, NotFinite};
        self.suspicions.iter().any(|s| matches!(s, NotFinite | MagnifiesRounding | LosesPrecision))
    }

    /// For the order of a table.
    fn severity(&self) -> f64 {
        let forward = self.output.as_ref().map_or(0.0, |output| output.multiple);
        let suspicions = self.suspicions.len() as f64;
        if forward.is_nan() { f64::INFINITY } else { 1e6 * suspicions.min(1.0) + forward }
    }
}

/// Compares the forward and backward pass inside of a region with those in f32, part by part.
///
/// `loss` computes the unscaled loss in the region that it is given: `region` itself, or the same switched off. It is
/// run up to fifteen times with the same random numbers: in f32; in the region with the scale of `scaler`; in f32 with
/// rounded results, and four times with results that are rounded at random, which show what rounding alone does, if the
/// region returns half precision; in the region with a scale of 1, if the scale is another one; three times in f32 and
/// in the region to measure their times; and forward only, for what it keeps. Gradients, buffers and random numbers are
/// put back afterwards, so that training goes on as without the call; `loss` must not change anything else.
///
/// The parts are the modules of the parameters in `vs`, and what the program calls by [`named`](super::named). PyTorch
/// has no counterpart.
///
/// Synchronizes after every operator, and keeps a copy of every result in f32 until it returns.
///
/// # Errors
///
/// [`Error::InvalidArgument`] if a parameter is in half precision, which has no f32 counterpart here, or if `loss`
/// calls other operators in f32 than in the region, besides casts; the error of `loss`; [`Error::Torch`] if a run
/// cannot be recorded.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::{Autocast, GradScaler, insight};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
/// let x = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
/// let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
/// let audit = insight::audit(&vs, &region, &GradScaler::disabled(), |region| {
///     region.run(|| x.apply(&layer).tanh().square().mean(Kind::Float))
/// })?;
/// assert!(audit.suspicious().is_empty(), "{audit}");
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn audit(
    vs: &VarStore,
    region: &Autocast,
    scaler: &GradScaler,
    loss: impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Audit> {
    capture::refuse("a report of iterations", "make it of iterations without a graph")?;
    audited(vs, *region, scaler.get_scale()?, loss)
}

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
        let [f32, lower] = self.losses;
        let scale = Number(self.scale);
        writeln!(
            f,
            "{} at a scale of {scale}: the loss is {lower:.6}, and {f32:.6} in f32",
            self.dtype
        )?;
        let (table, rest) = self.table(self.suspicious_parts().len() + MOST_CLEAN);
        f.write_str(&table.plain())?;
        if rest > 0 {
            writeln!(f, "and {rest} more parts without suspicions")?;
        }
        f.write_str(&self.conclusion())?;
        self.kept.iter().try_for_each(|kept| write!(f, "\nmemory: {kept}"))
    }
}

/// The columns of the table of parts, for a terminal and for a page.
fn columns() -> [Column; 11] {
    [
        Column::new("part"),
        Column::new("suspicion").only_in_html(),
        Column::new("error").width(9),
        Column::new("× expected").width(10).gap(1),
        Column::new("× noise").width(7).gap(1),
        Column::new("gradient error").name_in_text("gradient").width(9),
        Column::new("cosine").width(8).gap(1),
        Column::new("underflow").width(10).gap(1),
        Column::new("ms in f32").only_in_html(),
        Column::new("ms in the region").only_in_html(),
        Column::new("dtypes").left().width(0),
    ]
}

impl AuditedPart {
    /// The cells of its row.
    fn cells(&self) -> [String; 11] {
        let output = |text: fn(&AuditedOutput) -> String| {
            self.output.as_ref().map_or_else(String::new, text)
        };
        let gradient = |text: fn(&AuditedGradient) -> String| {
            self.gradient.as_ref().map_or_else(String::new, text)
        };
        let milliseconds = |seconds: f64| format!("{:.3}", 1e3 * seconds);
        let dtypes = self.dtypes.iter().map(|(dtype, count)| format!("{count} {dtype}"));
        [
            self.path.clone(),
            self.reasons(),
            output(|output| format!("{:.1e}", output.error)),
            output(|output| format!("{:.1}", output.multiple)),
            output(|output| {
                let of_noise = output.noise.map(|noise| ratio(output.error, noise));
                of_noise.map_or_else(String::new, |of_noise| format!("{of_noise:.1}"))
            }),
            gradient(|gradient| format!("{:.1e}", gradient.error)),
            gradient(|gradient| format!("{:.5}", gradient.cosine)),
            gradient(|gradient| format!("{:.2}%", 100.0 * gradient.underflow)),
            milliseconds(self.seconds[0]),
            milliseconds(self.seconds[1]),
            dtypes.collect::<Vec<_>>().join(", "),
        ]
    }

    /// Its suspicions in words.
    fn reasons(&self) -> String {
        let all: Vec<String> = self.suspicions.iter().map(Suspicion::to_string).collect();
        all.join(", and ")
    }
}

impl Audit {
    /// The table of at most so many parts, with the most suspicious ones first, and how many it leaves out.
    pub(in crate::insight) fn table(&self, most: usize) -> (Table<11>, usize) {
        let clean = self.parts.iter().filter(|part| part.suspicions.is_empty());
        let parts = self.suspicious_parts().into_iter().chain(clean).take(most);
        let table = Table { columns: columns(), rows: parts.map(AuditedPart::cells).collect() };
        (table, self.parts.len().saturating_sub(most))
    }

    /// The lines below the table of parts.
    pub(in crate::insight) fn conclusion(&self) -> String {
        let suspicious = self.suspicious_parts();
        if suspicious.is_empty() {
            return format!("verdict: no part is suspicious in {}", self.dtype);
        }
        let mut text =
            format!("verdict: suspicious parts: {} of {}", suspicious.len(), self.parts.len());
        for part in suspicious {
            text += &format!("\n  {} {}", part.path, part.reasons());
            if let Some(output) = part.output.as_ref().filter(|_| part.has_suspicious_output()) {
                text += &format!(" ({})", output.operator);
            }
        }
        let keep = needs_f32(&self.parts);
        if !keep.is_empty() {
            let is_said = |path: &&str| keep.contains(&format!("{AFTER}{path}").as_str());
            let said: Vec<_> =
                keep.iter().filter(|path| !is_said(path)).map(with_followers).collect();
            let [_, whole] = self.seconds;
            let share = 100.0 * self.f32_seconds() / whole.max(f64::MIN_POSITIVE);
            text += &format!(
                "\nkeep in f32: {}\n  measured cost: {share:+.1} % of the {:.2} ms of an iteration",
                said.join(", "),
                1e3 * whole
            );
        }
        text
    }
}

/// How a part to keep in f32 is called.
fn with_followers(path: &&str) -> String {
    let after = path.strip_prefix(AFTER);
    after.map_or_else(|| (*path).to_owned(), |module| format!("{module} and what follows it"))
}

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
    gradients: Vec<Option<Tensor>>,
    scale: f64,
}

impl AuditedRun {
    fn new((recording, passes): (Recording, Passes), scale: f64) -> Result<Self> {
        if recording.differs() {
            let problem =
                "calls other operators in f32 than in the region, so they cannot be compared: use the region that \
                 the closure is given, and nothing that depends on the dtype"
                    .to_owned();
            return Err(Error::InvalidArgument { name: "loss", problem });
        }
        let _own = OutsideRegions::enter();
        let loss = passes.scaled.f_double_value(&[])? / scale;
        Ok(Self { recording, loss, gradients: passes.gradients, scale })
    }

    fn gradients(&self) -> Scaled<'_> {
        (&self.gradients, self.scale)
    }
}

fn audited(
    vs: &VarStore,
    region: Autocast,
    scale: f64,
    loss: impl FnMut(Autocast) -> Result<Tensor>,
) -> Result<Audit> {
    let repeatable = Repeatable::new(vs)?;
    check_parameters(&repeatable)?;
    let mut beginning = repeatable.begin()?;
    let mut runs = Runs::new(repeatable.rerun(&mut beginning)?, scale, loss);
    let mut f32 = InF32::record(&mut runs, region)?;
    let mut audit = f32.audit(region, NOISY)?;
    let mut measured = [PartTimes::new(), PartTimes::new()];
    for _ in 0..ROUNDS {
        for (fastest, region) in measured.iter_mut().zip([f32.off, region]) {
            let (recording, _) = f32.runs.record(RecordingMode::Times, region)?;
            keep_fastest(fastest, times(&recording));
        }
    }
    add_times(&mut audit.parts, &measured);
    audit.seconds = measured.map(|times| times.values().sum());
    audit.kept = match f32.runs.saved(region) {
        Ok((recording, saved)) => SavedReport::new(&recording, &saved).advice().into_iter().next(),
        // The other numbers of the audit stand without it.
        Err(_) => None,
    };
    Ok(audit)
}

/// The audits of regions, without times. It runs the loss once in f32, and two or three times for each region.
pub(in crate::insight) fn without_times<F: FnMut(Autocast) -> Result<Tensor>>(
    runs: &mut Runs<'_, F>,
    [one, other]: [Autocast; 2],
) -> Result<[Audit; 2]> {
    let mut f32 = InF32::record(runs, one)?;
    Ok([f32.audit(one, 0)?, f32.audit(other, 0)?])
}

/// A run in f32, recorded once, and the runs that are compared with it.
struct InF32<'r, 'a, F> {
    runs: &'r mut Runs<'a, F>,
    off: Autocast,
    reference: Reference,
    run: AuditedRun,
}

impl<'r, 'a, F: FnMut(Autocast) -> Result<Tensor>> InF32<'r, 'a, F> {
    fn record(runs: &'r mut Runs<'a, F>, region: Autocast) -> Result<Self> {
        let (off, reference) = (region.enabled(false), Reference::new()?);
        let run = runs.record(RecordingMode::Reference(&reference), off)?;
        Ok(Self { off, run: AuditedRun::new(run, runs.scale)?, runs, reference })
    }

    /// The audit of a region, without times, and with so many runs that round at random.
    fn audit(&mut self, region: Autocast, noisy: u64) -> Result<Audit> {
        let Self { runs, off, reference, run: f32 } = self;
        let scale = runs.scale;
        let lower = runs.record(RecordingMode::Compared(reference), region)?;
        let lower = AuditedRun::new(lower, scale)?;
        let kind = parts::lower_kind(&lower.recording);
        let rounded = kind.map(|kind| runs.record(RecordingMode::Rounded(reference, kind), *off));
        let rounded = rounded.transpose()?.map(|run| AuditedRun::new(run, scale)).transpose()?;
        let noisy = (0..if kind.is_some() { noisy } else { 0 }).map(|seed| {
            let run = runs.record_noise(RecordingMode::Compared(reference), region, seed)?;
            Ok(AuditedRun::new(run, scale)?.recording)
        });
        let noisy = noisy.collect::<Result<Vec<_>>>()?;
        let at_one = (scale != 1.0).then(|| runs.run(region, Some(1.0))).transpose()?;
        let at_one = at_one.as_ref().map(|run| (run.gradients.as_slice(), 1.0));
        let gradients = parts::compare(
            lower.recording.modules(),
            [f32.gradients(), lower.gradients(), at_one.unwrap_or(lower.gradients())],
            rounded.as_ref().map(AuditedRun::gradients),
        )?;
        let rounded = rounded.as_ref().map(|run| &run.recording);
        let parts = parts::parts(&lower.recording, rounded, &noisy, kind, gradients);
        let dtype = kind.map_or(Dtype::F32, Dtype::from);
        let losses = [f32.loss, lower.loss];
        Ok(Audit { dtype, scale, seconds: [0.0; 2], losses, parts, kept: None })
    }
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

/// Adds up the own times of the operators of each part.
fn times(recording: &Recording) -> PartTimes {
    let mut times = PartTimes::new();
    for (index, nanoseconds) in recording.times().0.into_iter().enumerate() {
        if nanoseconds > 0 {
            let path = recording.part(index).unwrap_or_else(|| {
                let forward = recording.pass(index).1;
                recording.unnamed_part(forward.unwrap_or(index))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_that_overflows_is_not_taken_for_none() -> serde_json::Result<()> {
        let written = r#"{"operator": "aten::add", "error": 0.5, "cosine": 1.0, "expected": 0.1, "rounded": 0.1,
                          "noise": "inf", "multiple": 5.0, "growth": 5.0, "inputs": []}"#;
        let output: AuditedOutput = serde_json::from_str(written)?;
        assert_eq!(output.noise, Some(f64::INFINITY));
        assert_eq!(
            serde_json::to_value(&output)?,
            serde_json::from_str::<serde_json::Value>(written)?
        );
        // What an earlier version wrote.
        let none: AuditedOutput = serde_json::from_str(&written.replace(r#""inf""#, "null"))?;
        assert_eq!(none.noise, None);
        Ok(())
    }
}
