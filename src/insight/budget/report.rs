//! The findings of a budget.

use std::fmt;

use run_report::Table;
use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::error::{Number, list};
use crate::insight::dtype::Dtype;
use crate::insight::measure::{Deviation, Noise, of_factors};
use crate::insight::numbers;

/// How many lines of a kind are printed.
const MOST_LINES: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Serialize, Deserialize)]
pub(super) enum BudgetQuantity {
    Loss,
    Output,
    Buffer,
    Gradient,
    Update,
    Factor,
}

impl BudgetQuantity {
    /// The multiple of the noise up to which a quantity is rounding. Correct training stays below half of each limit,
    /// except for some gradients, updates and factors with four noise runs; if a limit is exceeded, more runs decide.
    pub(super) fn limit(self) -> f64 {
        match self {
            Self::Output | Self::Buffer | Self::Gradient => 3.0,
            Self::Loss | Self::Update | Self::Factor => 10.0,
        }
    }

    /// Returns whether it matters if its numbers are too small for fp16. Updates are f32, and a loss is only printed.
    pub(super) fn can_underflow(self) -> bool {
        matches!(self, Self::Output | Self::Buffer | Self::Gradient)
    }
}

/// Beyond this multiple of the noise of its error, a gradient is over budget whatever its median.
const LIMIT_OF_ERROR: f64 = 12.0;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BudgetRow {
    pub(super) quantity: BudgetQuantity,
    name: String,
    #[serde(with = "numbers")]
    error: f64,
    #[serde(with = "numbers")]
    factor: f64,
    #[serde(with = "numbers")]
    multiple: f64,
    limit: f64,
    pub(super) lost: Option<f64>,
}

impl BudgetRow {
    /// Returns whether it is further from f32 than rounding explains.
    pub(super) fn is_over(&self) -> bool {
        self.multiple > self.limit || self.lost.is_some()
    }
}

/// A difference that rounding does not explain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum BudgetProblem {
    /// No operator returned half precision, and the region is not switched off: it was not opened, has another device,
    /// or its rules keep every operator in f32.
    NothingInHalf,
    /// Operators returned another half-precision dtype than that of the region.
    OtherHalf(Dtype),
    /// Operators returned half precision in the f32 run: the program casts by hand instead of to
    /// [`BudgetRun::dtype`](super::BudgetRun::dtype), or it opens a region of tch.
    HalfInF32(Dtype),
    /// A parameter, gradient, buffer or tensor of an optimizer's state has another dtype than in f32.
    Dtype {
        /// Its name, such as `layer.weight.exp_avg`.
        name: String,
        /// The dtype in f32.
        f32: Dtype,
        /// The dtype in half precision.
        half: Dtype,
    },
    /// Parameters have a gradient in one of the two runs.
    Gradients {
        /// Those without one in half precision, such as what is detached there.
        missing: Vec<String>,
        /// Those without one in f32.
        added: Vec<String>,
    },
    /// Parameters have a gradient of zeros in one of the two runs.
    ZeroGradients {
        /// Those with zeros in half precision.
        half: Vec<String>,
        /// Those with zeros in f32.
        f32: Vec<String>,
    },
    /// Parameters have no gradient, or one of zeros, in both runs.
    /// [`Budget::allow_unused`](super::Budget::allow_unused) allows it.
    Untrained(Vec<String>),
    /// The step changed parameters in one of the two runs.
    Unchanged {
        /// Those that it left unchanged in half precision.
        half: Vec<String>,
        /// Those that it left unchanged in f32.
        f32: Vec<String>,
    },
    /// The optimizer stepped a parameter so many times in f32 and in half precision.
    Steps {
        /// The parameter.
        name: String,
        /// The steps in f32.
        f32: u64,
        /// The steps in half precision.
        half: u64,
    },
    /// No step was seen, and no parameter changed, in any run.
    NotStepped,
    /// The iteration scales a loss and steps, or unscales, and ends without [`update`](crate::GradScaler::update), so
    /// that the scale never changes.
    NotUpdated,
    /// The program's use of the loss scale changes its numbers in f32, where scaling by a power of two is exact.
    Scaling {
        /// The scale at which that was seen.
        #[serde(with = "numbers")]
        scale: f64,
        /// The fault, by the factor of the gradients.
        fault: ScaleFault,
        /// The parameters whose gradients are concerned, if not all are; or what else changes.
        names: Vec<String>,
    },
    /// These move in f32 if the scaler is enabled, regions are on and [`BudgetRun::dtype`](super::BudgetRun::dtype) is
    /// half precision, although nothing is rounded: the program takes another branch then. The noise runs take it as
    /// well, so that they do not show what rounding does.
    OtherThanRounding(Vec<String>),
    /// The gradients of the iteration before were not cleared.
    NotCleared,
    /// The runs drew different random numbers: dropout is off in one of them, for instance.
    RandomNumbers,
    /// Quantities that are finite in f32 and not in half precision.
    NotFinite(Vec<String>),
    /// The scale is no power of two, so that scaling rounds.
    Scale(#[serde(with = "numbers")] f64),
    /// The step is skipped at every scale.
    Skipped,
}

/// A wrong use of the loss scale, recognized by its effect on the gradients at two scales in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ScaleFault {
    /// They are too large by the scale: they are not unscaled, or the loss is scaled twice.
    NotUnscaled,
    /// They are too large by the square of the scale: the loss is scaled twice, and they are not unscaled.
    ScaledTwice,
    /// They are divided by this number instead of the scale, such as the scale of another iteration.
    UnscaledByAnother(#[serde(with = "numbers")] f64),
    /// They are too small by the scale, apart from what clipping changes in one of two runs: they are unscaled twice,
    /// or clipped before they are unscaled, or their loss was not scaled.
    UnscaledTwice,
    /// This part of their norm is too small by the scale: that of one of several losses that was not scaled, or what
    /// the program adds to the gradients before they are unscaled.
    PartNotScaled(#[serde(with = "numbers")] f64),
    /// This part of their norm is too large by the scale: that of one of several losses that was scaled twice, or what
    /// is added after the rest is unscaled.
    PartNotUnscaled(#[serde(with = "numbers")] f64),
    /// They are clipped, or changed otherwise, before they are unscaled, or divided by another number than the scale
    /// and then clipped.
    ChangedBeforeUnscaling,
    /// They are clipped to a norm while they are too large, or too small, by a factor that depends on the scale, and
    /// little or nothing of it is left: they are not unscaled, or a loss is scaled twice or not at all.
    HiddenByClipping,
    /// They are right, and something else depends on the scale, such as the loss that is returned or a step; or nearly
    /// every scale overflows, so that no more can be told.
    Other,
}

impl BudgetProblem {
    /// The parameters of a difference that is in one run: in half precision and in f32, and how it is called.
    fn in_one_run(&self) -> Option<([&str; 2], [&[String]; 2])> {
        let (words, half, f32) = match self {
            Self::Gradients { missing, added } => (["no gradient", "in"], missing, added),
            Self::ZeroGradients { half, f32 } => (["a gradient of zeros", "not in"], half, f32),
            Self::Unchanged { half, f32 } => (["left unchanged by the step", "not in"], half, f32),
            _ => return None,
        };
        Some((words, [half, f32]))
    }

    /// Returns whether it is about parameters, but none.
    pub(super) fn is_empty(&self) -> bool {
        self.in_one_run().is_some_and(|(_, names)| names.concat().is_empty())
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct BudgetOperator {
    pub(super) part: String,
    pub(super) operator: String,
    #[serde(default, with = "numbers::option")]
    pub(super) multiple: Option<f64>,
}

/// The comparison of an iteration in half precision with f32, which shows whether they differ by rounding alone. Made
/// by [`Budget`](super::Budget).
///
/// Its text, by `Display`, is the verdict and, if it is over budget, what is.
///
/// A program that wants the numbers behind the text serializes the report, which has these beside the fields below. A
/// number that is infinite or NaN is a text in JSON, such as `inf`.
///
/// - `first_operator`: the first operator of the forward pass whose results are further from f32 than rounding explains,
///   if the loss, an output or a buffer is over and nothing else differs, and null otherwise. It has `part` (of the
///   model: a module, a name given by [`named`](crate::insight::named), or `after` the last module), `operator`
///   (libtorch's name without namespace) and `multiple` (how far its results are from f32, as a multiple of how far
///   rounding moves them; null if f32 calls another operator at this place).
/// - `rows`: the quantities that were compared: first the loss, outputs and buffers, then what is of parameters and the
///   factors, each by their multiples. A row has `quantity` (`Loss`; `Output`, what the iteration gave to
///   [`BudgetRun::output`](super::BudgetRun::output); `Buffer`, the change of a buffer, such as running
///   statistics; `Gradient`, the gradient of a parameter as the optimizer saw it, unscaled and clipped; `Update`, the
///   change of a parameter in the step; `Factor`, the common factor of all outputs, or of all gradients), `name` (of the
///   output, the buffer or the parameter), `error` (the norm of the difference, divided by the norm in f32), `factor`
///   (how many times as large it is as in f32: ⟨h, f⟩ / ⟨f, f⟩ for h in half precision and f in f32), `multiple` (how
///   far it is from f32, as a multiple of the noise: by the norm of the difference; for an update by its median; and for
///   a gradient by the smaller of the two, or a quarter of that by the norm if this is larger), `limit` (the multiple
///   that is allowed; always less than that of an error as large as the quantity, unless the quantity is rounding
///   alone) and `lost` (if nothing can be told, because the numbers are so small in fp16 that rounding is as large as
///   they are: the share that becomes zero, and otherwise null). A row with `lost` is over budget;
///   [`Budget::allow_underflow`](super::Budget::allow_underflow) makes it one that is judged by its multiple.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BudgetReport {
    /// The dtype of the region; f32 if it is switched off and no variable is in half precision.
    pub dtype: Dtype,
    /// The loss scale of the iteration in half precision that is compared.
    #[serde(with = "numbers")]
    pub scale: f64,
    /// How many iterations were run.
    pub iterations: usize,
    /// The loss in f32, and in half precision.
    #[serde(with = "numbers::pair")]
    pub losses: [f64; 2],
    /// The differences that rounding does not explain.
    pub problems: Vec<BudgetProblem>,
    pub(super) first_operator: Option<BudgetOperator>,
    pub(super) rows: Vec<BudgetRow>,
    /// The type of the region's device, and what else a [`BudgetFile`] keeps.
    pub(super) device: String,
    pub(super) measured: Measured,
}

/// The numbers of the runs that are not in half precision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Measured {
    pub(super) quantities: Vec<MeasuredQuantity>,
}

/// A quantity in f32, and how far each run with noise was from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MeasuredQuantity {
    pub(super) quantity: BudgetQuantity,
    pub(super) name: String,
    /// The norm in f32.
    #[serde(with = "numbers")]
    pub(super) norm: f64,
    pub(super) noise: Vec<Deviation>,
    /// In fp16 the error of runs with noise that knows no smallest number, if it was measured.
    #[serde(default, with = "numbers::option")]
    pub(super) unbounded: Option<f64>,
}

/// From this relative noise on, a quantity is rounding, and is not judged exactly.
const ONLY_NOISE: f64 = 0.5;

/// An error as large as the quantity.
const AS_LARGE: Deviation = Deviation { error: 1.0, factor: 0.0, median: 1.0 };

impl MeasuredQuantity {
    /// How far a run is from f32, as a multiple of the noise.
    fn multiple(&self, deviation: &Deviation) -> f64 {
        let noise = Noise::of(&self.noise);
        let of_error = noise.of_error(deviation);
        match self.quantity {
            // Both limits in one number.
            BudgetQuantity::Gradient => {
                noise.of_gradient(deviation).max(of_error / LIMIT_OF_ERROR * self.quantity.limit())
            }
            BudgetQuantity::Update => noise.of_update(deviation),
            _ => of_error,
        }
    }

    /// The multiple of the noise that is allowed: less than the quantity itself, unless this is rounding.
    fn limit(&self, allowance: f64) -> f64 {
        let limit = allowance * self.quantity.limit();
        if self.norm == 0.0 || self.is_only_noise() || self.underflows() {
            return limit;
        }
        // The next smaller number of two digits.
        limit.min(((100.0 * self.multiple(&AS_LARGE)).ceil() - 1.0) / 100.0)
    }

    /// Returns whether the noise is about as large as the quantity.
    pub(super) fn is_only_noise(&self) -> bool {
        let Noise { error, median } = Noise::of(&self.noise);
        // An update is judged by its median.
        let noise = if self.quantity == BudgetQuantity::Update { error.max(median) } else { error };
        if self.norm > 0.0 { noise >= ONLY_NOISE } else { noise > 0.0 }
    }

    /// Returns whether the noise is so large that an error as large as the quantity would be within its limit.
    pub(super) fn is_without_limit(&self) -> bool {
        self.norm > 0.0 && self.multiple(&AS_LARGE) <= self.quantity.limit()
    }

    /// Returns whether it is so because the numbers are too small for fp16, and not because they cancel out, for
    /// instance.
    pub(super) fn underflows(&self) -> bool {
        let noise = Noise::of(&self.noise).error;
        let is_told =
            |unbounded: f64| unbounded < noise / 2.0 && unbounded * self.quantity.limit() < 1.0;
        self.is_without_limit() && self.unbounded.is_some_and(is_told)
    }
}

/// A quantity with its name, if it has one.
pub(super) fn named(quantity: BudgetQuantity, name: &str) -> String {
    if name.is_empty() { quantity.to_string() } else { format!("{quantity} {name}") }
}

/// The noise of an iteration, with which later runs of the same program are compared. It replaces a file of expected
/// values, and also holds for another libtorch if the program takes its numbers from elsewhere: libtorch's generators
/// draw others in other versions. Made by [`BudgetReport::file`], and kept with serde.
///
/// # Examples
///
/// ```
/// # use tch::nn::{self, Module};
/// # use tch::{Device, Kind, Tensor};
/// # use tch_amp::insight::{Budget, BudgetFile};
/// # use tch_amp::optim::AdamW;
/// # use tch_amp::Autocast;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # tch::manual_seed(0);
/// # let vs = nn::VarStore::new(Device::Cpu);
/// # let net = nn::linear(vs.root(), 64, 8, Default::default());
/// # let xs = Tensor::randn([32, 64], (Kind::Float, Device::Cpu));
/// # let optimizer = || AdamW::default().build(&vs, 1e-3);
/// # let mut iteration = |run: &mut tch_amp::insight::BudgetRun, optimizer: &mut tch_amp::optim::Optimizer| {
/// #     let loss = run.region(|| run.output("y", &net.forward(&xs)).square().mean(Kind::Float))?;
/// #     run.scaler().backward_step(optimizer, &loss)?;
/// #     Ok(loss)
/// # };
/// let budget = Budget::new(&vs, Autocast::new(Device::Cpu));
/// let report = budget.measure(optimizer, &mut iteration)?;
/// let json = serde_json::to_string(&report.file())?;
/// // In later runs:
/// let file: BudgetFile = serde_json::from_str(&json)?;
/// let report = budget.check(&file, optimizer, &mut iteration)?;
/// assert_eq!(report.iterations, 4);
/// report.assert();
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetFile {
    pub(super) dtype: Dtype,
    pub(super) device: String,
    pub(super) measured: Measured,
}

/// Factor of the limits for noise that another libtorch measured.
pub(super) const KEPT: f64 = 1.25;

impl BudgetReport {
    /// Returns whether half precision does no more than rounding.
    pub fn is_within(&self) -> bool {
        self.problems.is_empty() && !self.rows.iter().any(BudgetRow::is_over)
    }

    /// Names the quantities over budget, as the report's text does: `loss`; `output`, `buffer`, `gradient` or `update`
    /// with a space and the name of the tensor, such as `gradient layers.3.weight`; `factor of all outputs`; or `factor
    /// of all gradients`. First are the loss, outputs and buffers, then the others, each by their multiples. What is in
    /// [`problems`](Self::problems) is not among them.
    pub fn over(&self) -> Vec<String> {
        self.rows_over().map(|row| named(row.quantity, &row.name)).collect()
    }

    fn rows_over(&self) -> impl Iterator<Item = &BudgetRow> {
        self.rows.iter().filter(|row| row.is_over())
    }

    /// Panics with the report if something is over budget, for tests.
    #[track_caller]
    #[expect(clippy::panic, reason = "it is the purpose of an assertion")]
    pub fn assert(&self) {
        if !self.is_within() {
            panic!("{self}");
        }
    }

    /// The measured noise, for later runs.
    pub fn file(&self) -> BudgetFile {
        let (device, measured) = (self.device.clone(), self.measured.clone());
        BudgetFile { dtype: self.dtype, device, measured }
    }

    /// Returns the fault that a factor of the gradients shows, if it shows one.
    fn sentence(&self) -> Option<String> {
        let row = self.rows.iter().find(|row| {
            row.quantity == BudgetQuantity::Factor && row.name == GRADIENTS && row.is_over()
        })?;
        let is = |factor: f64| (row.factor / factor - 1.0).abs() < 0.02;
        let scale = self.scale;
        if scale != 1.0 && is(scale) {
            Some(format!("the gradients are {} × too large: not unscaled", Number(scale)))
        } else if scale != 1.0 && is(1.0 / scale) {
            Some(format!("the gradients are {} × too small: unscaled twice", Number(scale)))
        } else if scale != 1.0 && is(scale * scale) {
            Some("the gradients are too large by the square of the scale".to_owned())
        } else if is(2.0) || is(0.5) {
            let (far, lost) = if is(2.0) { ("large", "added twice") } else { ("small", "lost") };
            let by_scale =
                if scale == 1.0 { "" } else { "unscaled by another iteration's scale, or " };
            Some(format!("the gradients are 2 × too {far}: {by_scale}a half of them is {lost}"))
        } else {
            (row.factor.abs() < 1e-3)
                .then(|| "the gradients are unrelated to those in f32".to_owned())
        }
    }
}

impl Measured {
    pub(super) fn gradient(&self, name: &str) -> Option<&MeasuredQuantity> {
        let is = |known: &&MeasuredQuantity| {
            known.quantity == BudgetQuantity::Gradient && known.name == name
        };
        self.quantities.iter().find(is)
    }

    /// Returns how these show that they are of another program, if they do: by their quantities or their norms in f32.
    pub(super) fn differs_from(&self, present: &Self) -> Option<String> {
        let (kept, now) = (self.quantities.len(), present.quantities.len());
        if kept != now {
            return Some(format!("has {kept} quantities, and the program {now}"));
        }
        present.quantities.iter().find_map(|now| {
            let MeasuredQuantity { quantity, name, norm, .. } = now;
            let Some(kept) = self.find(now) else {
                return Some(format!("does not have the {quantity} {name}"));
            };
            let is_off = (norm - kept.norm).abs() > 0.01 * kept.norm.abs();
            (is_off && Noise::of(&kept.noise).error < ONLY_ROUNDING).then(|| {
                let kept = kept.norm;
                format!(
                    "has the norm {kept:.6e} for the {quantity} {name}, and the program {norm:.6e}"
                )
            })
        })
    }

    fn find(&self, wanted: &MeasuredQuantity) -> Option<&MeasuredQuantity> {
        let is = |known: &&MeasuredQuantity| {
            known.quantity == wanted.quantity && known.name == wanted.name
        };
        self.quantities.iter().find(is)
    }

    /// The noise of these quantities, in their order.
    pub(super) fn in_order_of(&self, present: &Self) -> Self {
        let known = present.quantities.iter().filter_map(|wanted| self.find(wanted).cloned());
        Self { quantities: known.collect() }
    }
}

/// From this noise on, a norm is that of rounding alone, and another libtorch has another one.
const ONLY_ROUNDING: f64 = 0.05;

/// The names of the common factors.
pub(super) const OUTPUTS: &str = "of all outputs";
pub(super) const GRADIENTS: &str = "of all gradients";

/// Judges half precision by the noise.
pub(super) fn rows(
    dtype: Kind,
    measured: &Measured,
    half: &[Deviation],
    lost: &[Option<f64>],
    allowance: f64,
) -> Vec<BudgetRow> {
    // One rounding more, such as that of gradients that are stored in half precision, moves a factor by the unit
    // roundoff at most, even where the noise cancels, as in gradients that are clipped to a norm.
    let roundoff = if dtype == Kind::Half { 2f64.powi(-12) } else { 2f64.powi(-9) };
    let least = roundoff / BudgetQuantity::Factor.limit();
    let pairs = || measured.quantities.iter().zip(half);
    let mut rows: Vec<BudgetRow> = Vec::new();
    for ((known, deviation), &lost) in pairs().zip(lost) {
        let &Deviation { error, factor, .. } = deviation;
        let (quantity, name) = (known.quantity, known.name.clone());
        let (multiple, limit) = (known.multiple(deviation), known.limit(allowance));
        rows.push(BudgetRow { quantity, name, error, factor, multiple, limit, lost });
    }
    for (quantity, name) in
        [(BudgetQuantity::Output, OUTPUTS), (BudgetQuantity::Gradient, GRADIENTS)]
    {
        if pairs().all(|(known, _)| known.quantity != quantity) {
            continue;
        }
        let of = pairs().filter(|(known, _)| known.quantity == quantity);
        let (multiple, factor) = of_factors(
            least,
            of.map(|(known, deviation)| (known.norm, deviation, known.noise.as_slice())),
        );
        let (error, name) = ((factor - 1.0).abs(), name.to_owned());
        let limit = allowance * BudgetQuantity::Factor.limit();
        let quantity = BudgetQuantity::Factor;
        rows.push(BudgetRow { quantity, name, error, factor, multiple, limit, lost: None });
    }
    rows.sort_by(|a, b| {
        let is_forward = |row: &BudgetRow| row.quantity <= BudgetQuantity::Buffer;
        is_forward(b).cmp(&is_forward(a)).then(b.multiple.total_cmp(&a.multiple))
    });
    rows
}

impl fmt::Display for BudgetQuantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Loss => "loss",
            Self::Output => "output",
            Self::Buffer => "buffer",
            Self::Gradient => "gradient",
            Self::Update => "update",
            Self::Factor => "factor",
        })
    }
}

impl fmt::Display for BudgetProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(([what, but], [half, f32])) = self.in_one_run() {
            let sides = [(half, "half precision", "f32"), (f32, "f32", "half precision")];
            let said = sides.iter().filter(|(names, ..)| !names.is_empty());
            let said = said.map(|(names, here, there)| {
                format!("{what} in {here}, but {but} {there}: {}", list(names))
            });
            return f.write_str(&said.collect::<Vec<_>>().join("; "));
        }
        match self {
            Self::Gradients { .. } | Self::ZeroGradients { .. } | Self::Unchanged { .. } => Ok(()),
            Self::NothingInHalf => f.write_str(
                "nothing is in half precision: the region was not opened, it has another device, or its rules keep every \
                 operator in f32",
            ),
            Self::OtherHalf(dtype) => {
                write!(
                    f,
                    "operators returned {dtype}, which is not the dtype of the region: another region or a cast asks for it"
                )
            }
            Self::HalfInF32(dtype) => write!(
                f,
                "operators returned {dtype} in the f32 run: cast to `run.dtype()`, and use regions of this crate instead of \
                 `tch::autocast`"
            ),
            Self::Dtype { name, f32, half } => write!(f, "{name} is {half} instead of {f32}"),
            Self::Untrained(names) => write!(
                f,
                "no gradient, or a zero one, in both runs: {} (`allow_unused` allows it)",
                list(names)
            ),
            Self::Steps { name, f32, half } => {
                write!(f, "{name} was stepped {half} times instead of {f32}")
            }
            Self::NotStepped => f.write_str(
                "no step was seen, and no parameter changed, in f32 and in half precision",
            ),
            Self::NotUpdated => f.write_str(
                "the iteration ends without `update` of the scaler, whose scale then never changes, not even after an \
                 overflow",
            ),
            Self::Scaling { scale, fault, names } => write_fault(f, *scale, *fault, names),
            Self::OtherThanRounding(names) => write!(
                f,
                "another branch of the program: with regions that are on, `run.dtype()` in half precision and an enabled \
                 scaler, but without any rounding, it moves {}",
                list(names)
            ),
            Self::NotCleared => f.write_str("the gradients of the iteration before were not cleared"),
            Self::RandomNumbers => {
                f.write_str("the runs drew different random numbers: is dropout off in one of them?")
            }
            Self::NotFinite(names) => {
                write!(f, "not finite, though finite in f32: {}", list(names))
            }
            Self::Scale(scale) => {
                write!(f, "the scale {} is not a power of two, so scaling rounds", Number(*scale))
            }
            Self::Skipped => f.write_str(
                "infinite or NaN gradients at every scale down to 2^-8, so that the step is always skipped",
            ),
        }
    }
}

fn write_fault(
    f: &mut fmt::Formatter<'_>,
    scale: f64,
    fault: ScaleFault,
    names: &[String],
) -> fmt::Result {
    let scale = Number(scale);
    write!(f, "in f32 at a scale of {scale}, which must not change anything, ")?;
    if fault == ScaleFault::Other {
        write!(f, "these change: {}", list(names))?;
        let is_loss = names.contains(&BudgetQuantity::Loss.to_string());
        let advice = if is_loss { " (the iteration has to return its unscaled loss)" } else { "" };
        return f.write_str(advice);
    }
    match names {
        [] => write!(f, "the gradients are ")?,
        _ => write!(f, "the gradients of {} are ", list(names))?,
    }
    let percent = |share: f64| Number((share * 1000.0).round() / 10.0);
    match fault {
        ScaleFault::NotUnscaled => {
            write!(f, "{scale} × too large: not unscaled, or the loss is scaled twice")
        }
        ScaleFault::ScaledTwice => f.write_str(
            "too large by the square of the scale: the loss is scaled twice, and they are not unscaled",
        ),
        ScaleFault::UnscaledByAnother(other) => {
            let other = Number(other);
            write!(f, "divided by {other} instead: the scale of another iteration, or a constant")
        }
        ScaleFault::UnscaledTwice => f.write_str(
            "divided by the scale once too often: unscaled twice, or clipped before they are unscaled, or the loss is \
             not scaled",
        ),
        ScaleFault::PartNotScaled(share) => write!(
            f,
            "too small by a part of {} % that is not scaled: one of several losses, or what is added before they are unscaled",
            percent(share)
        ),
        ScaleFault::PartNotUnscaled(share) => write!(
            f,
            "too large by a part of {} % that is scaled once too often: one of several losses, or what is added after \
             they are unscaled",
            percent(share)
        ),
        ScaleFault::ChangedBeforeUnscaling | ScaleFault::Other => f.write_str(
            "clipped, or changed otherwise, before they are unscaled, or divided by another number and then clipped",
        ),
        ScaleFault::HiddenByClipping => f.write_str(
            "clipped to a norm while a factor is wrong, which hides it: they are not unscaled, or a loss is scaled \
             twice or not at all",
        ),
    }
}

impl fmt::Display for BudgetReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_within() { "within budget" } else { "over budget" };
        let (scale, iterations) = (Number(self.scale), self.iterations);
        write!(f, "{} at a scale of {scale}: {verdict} after {iterations} iterations", self.dtype)?;
        let [f32, half] = self.losses;
        if self.is_within() && self.dtype == Dtype::F32 {
            return write!(
                f,
                "\nthe region keeps everything in f32, as its plan or `enabled(false)` says, so that there is nothing to compare"
            );
        }
        write!(f, "\nloss {half:.6}, and {f32:.6} in f32")?;
        if self.is_within() {
            let largest = self
                .rows
                .iter()
                .max_by(|a, b| (a.multiple / a.limit).total_cmp(&(b.multiple / b.limit)));
            return match largest {
                Some(row) => write!(f, "\nclosest to its limit: {row}"),
                None => Ok(()),
            };
        }
        for problem in &self.problems {
            write!(f, "\n{problem}")?;
        }
        if let Some(sentence) = self.sentence() {
            write!(f, "\n{sentence}")?;
        }
        if let Some(first) = &self.first_operator {
            write!(f, "\n{first}")?;
        }
        for row in self.rows_over().take(MOST_LINES) {
            write!(f, "\n{row}")?;
        }
        match self.rows_over().count().saturating_sub(MOST_LINES) {
            0 => Ok(()),
            rest => write!(f, "\nand {rest} more"),
        }
    }
}

impl BudgetReport {
    /// The table of at most so many rows, with what is over the budget first, and how many it leaves out.
    pub(in crate::insight) fn table(&self, most: usize) -> (Table<7>, usize) {
        let mut table = Table::new(["quantity", "name", "error", "factor", "× noise", "limit", ""]);
        let within = self.rows.iter().filter(|row| !row.is_over());
        let rows = self.rows_over().chain(within).take(most);
        table.rows.extend(rows.map(BudgetRow::cells));
        (table, self.rows.len().saturating_sub(most))
    }
}

impl BudgetRow {
    fn cells(&self) -> [String; 7] {
        [
            self.quantity.to_string(),
            self.name.clone(),
            format!("{:.1e}", self.error),
            format!("{:.4}", self.factor),
            format!("{:.2}", self.multiple),
            self.limit.to_string(),
            if self.is_over() { "over" } else { "" }.to_owned(),
        ]
    }
}

impl fmt::Display for BudgetRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { quantity, name, error, factor, multiple, limit, lost } = self;
        write!(f, "{}: ", named(*quantity, name))?;
        if let Some(lost) = lost {
            let percent = (100.0 * lost).round();
            write!(f, "nothing can be told here: ")?;
            match percent == 0.0 {
                true => {
                    write!(f, "what the numbers are computed from is at the end of fp16's range")?
                }
                false => write!(f, "{percent} % of the numbers are below fp16's range")?,
            }
            return write!(f, "; use a larger scale, or `allow_underflow`");
        }
        if !error.is_finite() {
            return write!(f, "missing, not finite, or of another shape");
        }
        write!(f, "{multiple:.1} × noise, limit {limit} (error {error:.1e}, {factor:.4} × f32)")
    }
}

impl fmt::Display for BudgetOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, operator, multiple } = self;
        match multiple {
            Some(multiple) => {
                write!(f, "first operator over budget: {operator} ({part}), {multiple:.1} × noise")
            }
            None => {
                write!(f, "first operator that f32 does not call at its place: {operator} ({part})")
            }
        }
    }
}
