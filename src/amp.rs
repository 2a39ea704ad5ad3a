//! One switch for the precision of a run: its regions and its scaler.

use std::fmt;
use std::result::Result as StdResult;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::autocast::Plan;
use crate::autocast::region::{Autocast, LOG_PROBABILITIES};
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::device::check_usable;
#[cfg(feature = "distributed")]
use crate::distributed::ProcessGroup;
use crate::error::{Error, Result};
use crate::precision::{Gain, Gains};
use crate::scaler::GradScaler;

/// The precision of a training run, as its user chooses it, for instance with `--amp` on a command line.
///
/// [`on`](Self::on) a device it becomes a [`MixedPrecision`], which opens the regions and makes the scaler. It is
/// parsed from `off`, `bf16`, `fp16` and `auto`, and printed and serialized as these. Corresponds to the flag
/// `mixed_precision` of Hugging Face's Accelerate; `torch.amp` has no counterpart.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module, OptimizerConfig};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Amp;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::cuda_if_available();
/// let amp = "bf16".parse::<Amp>()?.on(device)?;
/// println!("{amp}");
/// let vs = nn::VarStore::new(device);
/// let net = nn::linear(vs.root(), 20, 3, Default::default());
/// let mut opt = nn::Adam::default().build(&vs, 1e-2)?;
/// let mut scaler = amp.scaler()?;
/// let xs = Tensor::randn([64, 20], (Kind::Float, device));
/// let ys = xs.slice(1, 0, 3, 1).argmax(1, false);
/// for _ in 0..3 {
///     let loss = amp.autocast(|| net.forward(&xs).cross_entropy_for_logits(&ys))?;
///     scaler.backward_step(&mut opt, &loss)?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Amp {
    /// Plain f32.
    Off,
    /// Regions in bf16. bf16 has the exponents of f32 and needs no loss scaling.
    Bf16,
    /// Regions in fp16, with a scaler.
    Fp16,
    /// The default. By the speed of the device: bf16 if products are at least 1.5 times as fast in it as in f32;
    /// otherwise fp16 on a GPU where that holds for fp16; otherwise f32. Where the machine is too busy to tell, it is
    /// f32 as well, and the [`MixedPrecision`] says so when it is printed.
    #[default]
    Auto,
}

impl Amp {
    const ALL: [Self; 4] = [Self::Off, Self::Bf16, Self::Fp16, Self::Auto];

    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Auto => "auto",
        }
    }

    /// Decides the precision on a device. [`Auto`](Self::Auto) times matrix products in each dtype, in turns, until the
    /// middle half of the measured ratios is on one side of 1.5. That takes at most about half a second, or one round
    /// of products if these are slower, and synchronizes, once for each device in a process. The others only check the
    /// device.
    ///
    /// A run that is resumed keeps its precision if the [`MixedPrecision`] is a part of its checkpoint. With several
    /// ranks, call `MixedPrecision::agree_over` of the feature `distributed`, which gives all of them the choice of
    /// rank 0.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] if the device cannot be used here; with `Auto`, [`Error::Torch`] if libtorch fails.
    pub fn on(self, device: Device) -> Result<MixedPrecision> {
        check_usable(device)?;
        if self != Self::Auto {
            return Ok(MixedPrecision::plain(device, self.dtype(), None));
        }
        let (dtype, reason) = fastest(&Gains::of(device)?);
        Ok(MixedPrecision {
            is_measured: true,
            ..MixedPrecision::plain(device, dtype, Some(reason))
        })
    }

    /// Measures what half precision is worth on a device, and returns advice that prints itself. It is what
    /// [`Auto`](Self::Auto) decides by, measured once for each device in a process, and synchronizes. While it measures
    /// on a GPU, libtorch's setting of TensorFloat-32, which is the process's, changes back and forth.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] if the device cannot be used here; [`Error::Torch`] if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tch::Device;
    /// use tch_amp::Amp;
    ///
    /// println!("{}", Amp::advice(Device::cuda_if_available())?);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    ///
    /// It prints, for instance, `train in bf16 on Cpu: bf16 products are 3.1 times as fast as f32 here`.
    pub fn advice(device: Device) -> Result<Advice> {
        check_usable(device)?;
        let gains = Gains::of(device)?;
        let (dtype, reason) = fastest(&gains);
        let measured = [(Kind::BFloat16, gains.bf16), (Kind::Half, gains.fp16)];
        let speedups = measured.into_iter().filter_map(|(kind, gain)| {
            let Gain { low, median, high, is_worth: _ } = gain?;
            Some((kind, [low, median, high]))
        });
        let all = [gains.bf16, gains.fp16].into_iter().flatten();
        let is_decided =
            dtype.is_some() || all.map(|gain| gain.is_worth).all(|worth| worth.is_some());
        Ok(Advice { device, dtype, speedups: speedups.collect(), is_decided, reason })
    }

    /// The dtype of the regions; `None` for f32, and before `Auto` is decided.
    fn dtype(self) -> Option<Kind> {
        match self {
            Self::Off | Self::Auto => None,
            Self::Bf16 => Some(Kind::BFloat16),
            Self::Fp16 => Some(Kind::Half),
        }
    }
}

/// What half precision is worth on a device, by [`Amp::advice`].
///
/// Only the speed of matrix products is measured. A model gains less, by the share of its time that products take and
/// by the casts; it gains memory besides, on any device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Advice {
    /// The device.
    pub device: Device,
    /// The dtype that [`Amp::Auto`] chooses for its regions; `None` for f32.
    pub dtype: Option<Kind>,
    /// For each half-precision dtype, how many times as fast as in f32 matrix products are in it: the lower quartile,
    /// the median and the upper quartile. fp16 is not measured on a CPU.
    pub speedups: Vec<(Kind, [f64; 3])>,
    /// Whether the machine was idle enough to tell.
    is_decided: bool,
    reason: String,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_decided {
            return write!(f, "no advice for {:?}: {}", self.device, self.reason);
        }
        let choice = MixedPrecision::plain(self.device, self.dtype, Some(self.reason.clone()));
        write!(f, "train in {choice}")
    }
}

/// The region of a dtype; one that is switched off for f32.
fn region(device: Device, dtype: Option<Kind>) -> Autocast {
    let region = Autocast::new(device);
    match dtype {
        None => region.enabled(false),
        Some(dtype) if device == Device::Cpu => {
            // The softmax of attention takes twice the memory in f32.
            let kept = LOG_PROBABILITIES.into_iter().filter(|operator| *operator != "softmax");
            region.dtype(dtype).keep_in_f32(kept)
        }
        Some(dtype) => region.dtype(dtype),
    }
}

/// A ratio with one digit after the point, or two where it would be 0.0.
fn shown(ratio: f64) -> String {
    if ratio < 0.095 { format!("{ratio:.2}") } else { format!("{ratio:.1}") }
}

/// The dtype whose products are fast enough, and why; `None` for f32. fp16 needs a scaler and, on CPUs, has few fast
/// kernels, so that it is measured on a GPU alone, and comes after bf16. What could be otherwise in the next start is
/// not chosen.
fn fastest(gains: &Gains) -> (Option<Kind>, String) {
    let mut others = Vec::new();
    let gains = [("bf16", Kind::BFloat16, gains.bf16), ("fp16", Kind::Half, gains.fp16)];
    for (name, kind, gain) in gains {
        let Some(Gain { low, median, high, is_worth }) = gain else { continue };
        match is_worth {
            Some(true) => {
                let reason = format!("{name} products are {median:.1} times as fast as f32 here");
                return (Some(kind), reason);
            }
            Some(false) => {
                others.push(format!(
                    "{name} products are only {} times as fast as f32 here",
                    shown(median)
                ));
            }
            None => {
                others.push(format!(
                    "{name} products are {low:.1} to {high:.1} times as fast as f32 here, which is too uncertain to \
                     choose by; name the precision, or begin when nothing else runs"
                ));
                break;
            }
        }
    }
    (None, others.join(", and "))
}

impl fmt::Display for Amp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Amp {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|amp| amp.name() == text).ok_or_else(|| Error::InvalidArgument {
            name: "amp",
            problem: format!("is {text:?}, but must be off, bf16, fp16 or auto"),
        })
    }
}

/// The precision of a run on one device, made by [`Amp::on`]: opens its regions and makes its scaler.
///
/// Printed, it says what was chosen and, after [`Amp::Auto`] or with a plan, why: `bf16 on Cpu: bf16 products are 3.1
/// times as fast as f32 here`.
///
/// It is [`Stateful`]: a checkpoint with it keeps the precision of a run that is resumed, whatever [`Amp::Auto`] would
/// choose by now.
///
/// # Examples
///
/// A loop that is resumed restores the precision first, because the scaler depends on it:
///
/// ```
/// use tch::Device;
/// use tch_amp::Amp;
/// use tch_amp::checkpoint::Checkpoint;
///
/// # let resumed = Some({
/// #     let mut amp = Amp::Fp16.on(Device::Cpu)?;
/// #     let mut checkpoint = Checkpoint::new();
/// #     checkpoint.add("amp", &amp)?;
/// #     checkpoint.add("scaler", &mut amp.scaler()?)?;
/// #     checkpoint
/// # });
/// let mut amp = Amp::Auto.on(Device::Cpu)?;
/// if let Some(checkpoint) = &resumed {
///     checkpoint.restore().add("amp", &mut amp).apply()?;
/// }
/// let mut scaler = amp.scaler()?;
/// if let Some(checkpoint) = &resumed {
///     checkpoint.restore().add("scaler", &mut scaler).apply()?; // and the model, the optimizer …
/// }
/// # assert_eq!(amp.to_string(), "fp16 on Cpu: restored from a checkpoint");
/// // … train, and save:
/// let mut checkpoint = Checkpoint::new();
/// checkpoint.add("amp", &amp)?;
/// checkpoint.add("scaler", &mut scaler)?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct MixedPrecision {
    device: Device,
    dtype: Option<Kind>,
    plan: Option<Plan>,
    region: Autocast,
    reason: Option<String>,
    /// Whether the dtype was measured here, so that it could be another one elsewhere.
    is_measured: bool,
}

impl MixedPrecision {
    /// A precision without a plan.
    fn plain(device: Device, dtype: Option<Kind>, reason: Option<String>) -> Self {
        let region = region(device, dtype);
        Self { device, dtype, plan: None, region, reason, is_measured: false }
    }

    /// Takes the precision of every operator from a plan, and the dtype with it, as [`Autocast::plan`] does.
    ///
    /// # Errors
    ///
    /// The same as [`Autocast::plan`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind};
    /// use tch_amp::Amp;
    /// use tch_amp::autocast::{Plan, Rule, RunAs};
    ///
    /// let softmax = Rule::new("softmax", RunAs::Half);
    /// let plan = Plan { dtype: Some(Kind::BFloat16), rules: vec![softmax], ..Plan::new(Device::Cpu)? };
    /// let amp = Amp::Auto.on(Device::Cpu)?.plan(&plan)?;
    /// assert_eq!(amp.dtype(), Some(Kind::BFloat16));
    /// assert_eq!(amp.to_string(), "bf16 on Cpu: a plan with 1 rule");
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn plan(self, plan: &Plan) -> Result<Self> {
        let rules = match plan.rules.len() {
            1 => "1 rule".to_owned(),
            count => format!("{count} rules"),
        };
        let region = region(self.device, plan.dtype).plan(plan)?;
        let reason = Some(format!("a plan with {rules}"));
        let (device, dtype, plan) = (self.device, plan.dtype, Some(plan.clone()));
        Ok(Self { device, dtype, plan, region, reason, is_measured: false })
    }

    /// Runs the forward pass and the loss in a region of this precision; in f32, without autocast. It is
    /// [`Autocast::run`] of [`region`](Self::region).
    ///
    /// # Errors
    ///
    /// The same as [`Autocast::run`].
    pub fn autocast<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        self.region().run(f)
    }

    /// Runs a closure that can fail like [`autocast`](Self::autocast), and returns its error or that of the region.
    ///
    /// # Errors
    ///
    /// The error of `f`, and the same as [`Autocast::run`].
    pub fn try_autocast<T, E: From<Error>>(
        &self,
        f: impl FnOnce() -> StdResult<T, E>,
    ) -> StdResult<T, E> {
        self.region().try_run(f)
    }

    /// Returns the region, for further options; a region that is switched off if the precision is f32.
    ///
    /// On the CPU it keeps the operators of [`LOG_PROBABILITIES`](crate::autocast::LOG_PROBABILITIES) but `softmax` in
    /// f32, as CUDA's lists do with most of them: PyTorch's lists for the CPU leave them in half precision, in which
    /// hand-written losses go wrong without any error. Matrix products, convolutions and attention are not affected,
    /// nor are activations, except for those of the list, such as `tanh`, `sigmoid` and `softplus`. This costs what
    /// [`Autocast::keep_in_f32`] says. [`Autocast::new`] gives a region with PyTorch's lists alone.
    pub fn region(&self) -> Autocast {
        self.region
    }

    /// Makes the scaler that this precision needs: with PyTorch's defaults for fp16, and a disabled one, which skips no
    /// step, for bf16 and f32; see [`skipping_scaler`](Self::skipping_scaler). For one with options, set
    /// [`enabled`](crate::scaler::GradScalerConfig::enabled) to [`needs_scaling`](Self::needs_scaling).
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::new`].
    pub fn scaler(&self) -> Result<GradScaler> {
        if self.needs_scaling() { GradScaler::new(self.device) } else { Ok(GradScaler::disabled()) }
    }

    /// Makes the scaler of [`scaler`](Self::scaler), or in bf16 and f32 [`GradScaler::skip_only`]: in each precision,
    /// a step with an infinite or NaN gradient is skipped, and schedules and averages do not advance for it.
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::new`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::Amp;
    /// use tch_amp::optim::Sgd;
    ///
    /// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
    /// let mut scaler = Amp::Bf16.on(Device::Cpu)?.skipping_scaler()?;
    /// assert!(scaler.backward_step(&mut opt, &(&w * f64::NAN).sum(None))?.is_skipped()?);
    /// assert_eq!(w.double_value(&[0]), 1.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn skipping_scaler(&self) -> Result<GradScaler> {
        if self.needs_scaling() {
            GradScaler::new(self.device)
        } else {
            GradScaler::skip_only(self.device)
        }
    }

    /// Returns whether losses must be scaled: in fp16.
    pub fn needs_scaling(&self) -> bool {
        self.dtype == Some(Kind::Half)
    }

    /// Returns what was chosen: after [`Amp::Auto`] one of the others.
    pub fn amp(&self) -> Amp {
        match self.dtype {
            None => Amp::Off,
            Some(Kind::Half) => Amp::Fp16,
            Some(_) => Amp::Bf16,
        }
    }

    /// Makes all ranks of a group train in one precision: what [`Amp::Auto`] has chosen on rank 0 holds on all of them,
    /// and a precision that was named, or restored from a checkpoint, must be the same on all, with the same plan. All
    /// ranks call this, before they make their scalers. Blocks until the ranks have answered. PyTorch has no
    /// counterpart.
    ///
    /// Without it, [`DistributedDataParallel`](crate::distributed::DistributedDataParallel) refuses the first backward
    /// pass of ranks whose forward passes ran in different dtypes.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch), on all ranks and before anything
    /// else is communicated, if they have named different precisions, or one has measured and another has not: name the
    /// same precision on all ranks, or restore the same checkpoint on all of them before this call.
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer. Nothing is changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Device;
    /// use tch_amp::Amp;
    /// use tch_amp::distributed::{ProcessGroup, Store};
    ///
    /// let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
    /// let mut amp = Amp::Auto.on(Device::Cpu)?;
    /// amp.agree_over(&group)?;
    /// let scaler = amp.scaler()?;
    /// # drop(scaler);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    #[cfg(feature = "distributed")]
    pub fn agree_over(&mut self, group: &ProcessGroup) -> Result<()> {
        const NAME: &str = "agree_over of a MixedPrecision";
        let plan =
            self.plan.as_ref().map_or_else(String::new, |plan| format!(" with the plan {plan}"));
        let own = if self.is_measured { Amp::Auto } else { self.amp() };
        group.compare_call(NAME, &format!("{NAME} that is {own}{plan}"))?;
        if !self.is_measured {
            return Ok(());
        }
        let chosen = || Ok::<_, Error>((self.amp(), self.reason.clone()));
        let (amp, reason) = group.from_rank_0(chosen)?;
        let reason = reason
            .map(|reason| if group.rank() == 0 { reason } else { format!("on rank 0, {reason}") });
        *self = Self { is_measured: true, ..Self::plain(self.device, amp.dtype(), reason) };
        Ok(())
    }

    /// Returns the dtype of the regions; `None` if the precision is f32.
    pub fn dtype(&self) -> Option<Kind> {
        self.dtype
    }

    /// Returns the device.
    pub fn device(&self) -> Device {
        self.device
    }
}

/// The part of a precision in a checkpoint. Its device is that of the program which restores it, and what the program
/// has added to a region is the program's.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AmpState {
    amp: Amp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    plan: Option<Plan>,
}

impl MixedPrecision {
    fn state(&self) -> AmpState {
        // Destructured exhaustively, so that a new field does not compile until it is saved.
        let Self { device: _, dtype: _, plan, region: _, reason: _, is_measured: _ } = self;
        AmpState { amp: self.amp(), plan: plan.clone() }
    }

    /// The precision on the same device with a saved state.
    fn restored(&self, saved: &SavedState<'_>) -> Result<Self> {
        let AmpState { amp, plan } = saved.whole_value()?;
        let refuse = |problem: &str| {
            let problem = format!("{problem}; it was not saved by a MixedPrecision");
            Err(Error::InvalidArgument { name: "the saved precision", problem })
        };
        check_usable(self.device)?;
        if amp == Amp::Auto {
            return refuse("is auto, which stands for another one");
        }
        const REASON: &str = "restored from a checkpoint";
        let plain = Self::plain(self.device, amp.dtype(), Some(REASON.to_owned()));
        let Some(plan) = plan else { return Ok(plain) };
        if plan.dtype != amp.dtype() {
            return refuse("has the plan of another dtype");
        }
        let planned = plain.plan(&plan)?;
        let reason = planned.reason.as_ref().map(|plan| format!("{plan}, {REASON}"));
        Ok(Self { reason, ..planned })
    }
}

/// Saves the dtype and the plan, without the device and without what the program adds to a
/// [`region`](MixedPrecision::region). Restore it before the scaler is made, which depends on the dtype: a disabled
/// scaler ignores the state of one that scales.
impl Stateful for MixedPrecision {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.whole_value(&self.state())
    }

    /// Prepares to take the saved dtype and plan, on the device that the precision has.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a state that no precision has saved;
    /// [`AutocastError::PlanElsewhere`](crate::autocast::AutocastError::PlanElsewhere) for the plan of another
    /// platform: leave the precision out of the restore, and make it anew; [`Error::DeviceUnavailable`].
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let restored = self.restored(saved)?;
        Ok(Prepared::new(move || *self = restored))
    }
}

/// Saves the dtype and the plan. A shared reference cannot be changed, so that a restore only checks that the
/// checkpoint has the same precision, and fails otherwise.
impl Stateful for &MixedPrecision {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.whole_value(&self.state())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let restored = self.restored(saved)?;
        if restored.state() == self.state() {
            return Ok(Prepared::default());
        }
        let problem = format!(
            "is {self}, and the checkpoint has {restored}; pass `&mut amp` to take that over, before the scaler is made"
        );
        Err(Error::InvalidArgument { name: "the precision", problem })
    }
}

impl fmt::Display for MixedPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.amp() {
            Amp::Off => "f32",
            amp => amp.name(),
        };
        write!(f, "{name} on {:?}", self.device)?;
        self.reason.iter().try_for_each(|reason| write!(f, ": {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;

    fn gain(median: f64, is_worth: Option<bool>) -> Option<Gain> {
        Some(Gain { low: median / 2.0, median, high: median * 2.0, is_worth })
    }

    #[test]
    fn advice_that_is_uncertain_says_so() {
        let (dtype, reason) = (None, "bf16 products are 1.4 to 1.6 times as fast".to_owned());
        let advice = |is_decided| {
            let (device, reason) = (Device::Cpu, reason.clone());
            Advice { device, dtype, speedups: Vec::new(), is_decided, reason }.to_string()
        };
        assert_eq!(advice(false), format!("no advice for Cpu: {reason}"));
        assert_eq!(advice(true), format!("train in f32 on Cpu: {reason}"));
    }

    #[test]
    fn auto_takes_bf16_where_it_is_worth_it_and_then_fp16_and_nothing_that_is_uncertain() {
        let chosen = |bf16, fp16| fastest(&Gains { bf16, fp16, spent: std::time::Duration::ZERO });
        let (no, yes, unknown) = (Some(false), Some(true), None);
        let cases = [
            (
                gain(3.1, yes),
                gain(9.0, yes),
                Some(Kind::BFloat16),
                "bf16 products are 3.1 times as fast as f32 here",
            ),
            (
                gain(0.2, no),
                gain(5.0, yes),
                Some(Kind::Half),
                "fp16 products are 5.0 times as fast as f32 here",
            ),
            (gain(0.2, no), None, None, "bf16 products are only 0.2 times as fast as f32 here"),
            (gain(0.02, no), None, None, "bf16 products are only 0.02 times as fast as f32 here"),
            (
                gain(1.2, no),
                gain(0.5, no),
                None,
                "bf16 products are only 1.2 times as fast as f32 here, and fp16 products are only 0.5 times as fast as \
                 f32 here",
            ),
            // fp16 would be chosen in some starts, and bf16 in others.
            (
                gain(1.6, unknown),
                gain(5.0, yes),
                None,
                "bf16 products are 0.8 to 3.2 times as fast as f32 here, which is too uncertain to choose by; name the \
                 precision, or begin when nothing else runs",
            ),
            (
                gain(0.2, no),
                gain(2.0, unknown),
                None,
                "bf16 products are only 0.2 times as fast as f32 here, and fp16 products are 1.0 to 4.0 times as fast \
                 as f32 here, which is too uncertain to choose by; name the precision, or begin when nothing else runs",
            ),
            (None, None, None, ""),
        ];
        for (bf16, fp16, dtype, reason) in cases {
            assert_eq!(chosen(bf16, fp16), (dtype, reason.to_owned()));
        }
    }

    #[test]
    fn the_names_are_parsed_printed_and_serialized() {
        for (amp, name) in Amp::ALL.into_iter().zip(["off", "bf16", "fp16", "auto"]) {
            assert_eq!((name.parse::<Amp>().ok(), amp.to_string()), (Some(amp), name.to_owned()));
            let text = serde_json::to_string(&amp).unwrap_or_default();
            assert_eq!(text, format!("\"{name}\""));
        }
        let error = "half".parse::<Amp>().map_err(|error| error.to_string());
        assert_eq!(error, Err("amp is \"half\", but must be off, bf16, fp16 or auto".to_owned()));
    }

    #[test]
    fn a_precision_opens_its_regions_and_makes_its_scaler() -> Result<()> {
        let here = Device::cuda_if_available();
        let x = Tensor::eye(2, (Kind::Float, here));
        let cases = [
            (Amp::Off, Kind::Float, false),
            (Amp::Bf16, Kind::BFloat16, false),
            (Amp::Fp16, Kind::Half, true),
        ];
        for (amp, kind, scales) in cases {
            let on = amp.on(here)?;
            assert_eq!(on.amp(), amp);
            assert_eq!(on.autocast(|| x.matmul(&x))?.kind(), kind);
            // A region around it does not change what was chosen.
            let inside =
                Autocast::new(here).dtype(Kind::Half).try_run(|| on.autocast(|| x.matmul(&x)))?;
            assert_eq!(inside.kind(), kind);
            assert_eq!((on.scaler()?.is_enabled(), on.needs_scaling()), (scales, scales));
        }
        let small = Tensor::from(2f32).to_kind(Kind::BFloat16);
        let squashed = |on: &MixedPrecision| on.autocast(|| (1i64 - small.tanh().square()).log());
        let error = squashed(&Amp::Bf16.on(Device::Cpu)?)?.double_value(&[]) + 2.6500054947;
        assert!(error.abs() < 1e-5, "{error}");
        let failed =
            Amp::Bf16.on(here)?.try_autocast(|| Ok::<_, Error>(x.f_matmul(&x.narrow(0, 0, 1))?));
        assert!(matches!(failed, Err(Error::Torch(_))), "{failed:?}");
        assert!(matches!(Amp::Auto.on(Device::Cuda(99)), Err(Error::DeviceUnavailable { .. })));
        // Simulated GPUs compute the large products of a GPU on the CPU, for minutes.
        let auto = Amp::Auto.on(Device::Cpu)?;
        let text = auto.to_string();
        let name = if auto.amp() == Amp::Off { "f32" } else { auto.amp().name() };
        assert!(text.starts_with(&format!("{name} on Cpu: bf16 products are ")), "{text}");
        // A new measurement would have other numbers in the reason.
        assert_eq!(Amp::Auto.on(Device::Cpu)?, auto);
        Ok(())
    }

    #[test]
    fn what_was_measured_is_saved_as_if_it_had_been_named() -> Result<()> {
        use crate::autocast::{Rule, RunAs};
        use crate::checkpoint::Checkpoint;

        let saved = |amp: &MixedPrecision| {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add("amp", amp)?;
            Ok::<_, Error>(checkpoint)
        };
        // As `Auto` measures it: what was chosen is saved, and not that it was measured.
        let reason = Some("bf16 products are 3.1 times as fast as f32 here".to_owned());
        let plain = MixedPrecision::plain(Device::Cpu, Some(Kind::BFloat16), reason);
        let measured = MixedPrecision { is_measured: true, ..plain };
        let mut amp = Amp::Off.on(Device::Cpu)?;
        saved(&measured)?.restore().add("amp", &mut amp).apply()?;
        assert_eq!((amp.amp(), amp.is_measured), (Amp::Bf16, false));
        assert_eq!(amp.region(), measured.region());
        let softmax = Rule::new("softmax", RunAs::Half);
        let plan =
            Plan { dtype: Some(Kind::Half), rules: vec![softmax], ..Plan::new(Device::Cpu)? };
        let planned = measured.plan(&plan)?;
        saved(&planned)?.restore().add("amp", &mut amp).apply()?;
        assert_eq!((amp.region(), amp.state()), (planned.region(), planned.state()));
        let text = amp.to_string();
        assert_eq!(text, "fp16 on Cpu: a plan with 1 rule, restored from a checkpoint");
        Ok(())
    }

    #[cfg(feature = "distributed")]
    #[test]
    fn the_measured_choice_of_rank_0_holds_on_all_ranks() -> Result<()> {
        use crate::distributed::Store;

        let store = Store::in_process()?;
        let measured = [Some(Kind::BFloat16), None, Some(Kind::Half)];
        let rank = |rank: usize| {
            let group = ProcessGroup::new(&store, rank, measured.len())?;
            let plain = MixedPrecision::plain(Device::Cpu, measured[rank], Some(rank.to_string()));
            let mut amp = MixedPrecision { is_measured: true, ..plain };
            amp.agree_over(&group)?;
            Ok::<_, Error>(amp)
        };
        let rank = &rank;
        let chosen = std::thread::scope(|scope| {
            let ranks = [0, 1, 2].map(|number| scope.spawn(move || rank(number)));
            let chosen = ranks.into_iter().map(|rank| {
                rank.join().map_err(|_| Error::Torch("a rank has panicked".to_owned()))?
            });
            chosen.collect::<Result<Vec<_>>>()
        })?;
        for (amp, text) in chosen.iter().zip(["0", "on rank 0, 0", "on rank 0, 0"]) {
            assert_eq!((amp.amp(), amp.region()), (Amp::Bf16, chosen[0].region()));
            assert_eq!(amp.to_string(), format!("bf16 on Cpu: {text}"));
        }
        Ok(())
    }
}
