//! The budget of rounding that an iteration in half precision may use.

mod program;
mod report;
mod unrounded;

use std::cell::RefCell;
use std::collections::BTreeSet;

use program::{Iterate, Iterated, Mode, Observed, Program, Value};
use report::{BudgetOperator, BudgetQuantity, BudgetRow, KEPT, Measured, MeasuredQuantity};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use unrounded::Unrounded;

use crate::error::{Error, Result};
use crate::ffi::OutsideRegions;
use crate::ffi::emulation::Rounding;
use crate::ffi::insight::{Compared, EventKind, RecordingMode, Reference};
use crate::insight::dtype::Dtype;
use crate::insight::measure::{self, Deviation, multiple, relative, root_mean_square};
use crate::insight::recording::Recording;
use crate::optim::AmpOptimizer;
use crate::patterns::matches_any;
use crate::{Autocast, GradScaler, capture};

pub use report::{BudgetFile, BudgetProblem, BudgetReport, ScaleFault};

/// The scale that the first iteration in half precision begins with.
const SCALE: f64 = 1024.0;

/// The smallest scale that is tried.
const LEAST_SCALE: f64 = 1.0 / 256.0;

/// How many runs with noise that are not finite are repeated.
const MOST_REPEATS: usize = 3;

/// How many iterations with noise there are at first, and how many more if something is over budget.
const RUNS: usize = 4;
const MORE_RUNS: usize = 8;

/// How many runs show the noise that a dtype would have if its numbers could be as small as in f32.
const UNBOUNDED_RUNS: usize = 2;

/// Tests that training in half precision differs from training in f32 by rounding alone: one whole iteration of a
/// program is run in both and compared, in units of what rounding explains.
///
/// The unit is *noise*: how far f32 moves when everything that autocast would put into half precision is rounded at
/// random to one of its two neighbours. Rounding to nearest, as half precision does it, has about 0.7 of this noise. A
/// quantity that moves by more than its limit is over budget, and so is a difference that rounding cannot make, for
/// instance in which parameters have a gradient. No tolerance is set by hand. The guide's page on
/// [budgets](crate::guide::budgets) says what this sees and what it cannot see.
///
/// PyTorch has no counterpart; its tests compare with tolerances.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
/// use tch_amp::insight::Budget;
/// use tch_amp::optim::AdamW;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::seq()
///     .add(nn::linear(vs.root() / 0, 32, 64, Default::default()))
///     .add_fn(|xs| xs.relu())
///     .add(nn::linear(vs.root() / 1, 64, 10, Default::default()));
/// let xs = Tensor::randn([64, 32], (Kind::Float, Device::Cpu));
/// let ys = Tensor::randint(10, [64], (Kind::Int64, Device::Cpu));
///
/// let budget = Budget::new(&vs, Autocast::new(Device::Cpu).dtype(Kind::BFloat16));
/// let report = budget.measure(
///     || AdamW::default().build(&vs, 1e-3),
///     |run, optimizer| {
///         optimizer.zero_grad()?;
///         let loss = run.region(|| run.output("logits", &net.forward(&xs)).cross_entropy_for_logits(&ys))?;
///         run.scaler().backward(&loss)?;
///         run.scaler().step_clip_norm(optimizer, 1.0)?;
///         run.scaler().update()?;
///         Ok(loss)
///     },
/// )?;
/// report.assert();
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Budget<'a> {
    vs: &'a VarStore,
    region: Autocast,
    runs: usize,
    scale: f64,
    unused: Vec<String>,
    underflow: Vec<String>,
}

/// One run of an iteration: its region, its scaler and its outputs. A [`Budget`] makes it for each run.
#[derive(Debug)]
pub struct BudgetRun {
    region: Autocast,
    mode: Mode,
    dtype: Kind,
    scaler: GradScaler,
    is_scaled: bool,
    outputs: RefCell<Vec<(String, Tensor)>>,
}

impl<'a> Budget<'a> {
    /// Creates a budget for the model of `vs`, whose half-precision runs have this region. A region that is switched
    /// off, for instance by a plan in f32, leaves nothing to compare, and the report says that. What does not depend on
    /// half precision, such as whether gradients are unscaled, is checked all the same.
    pub fn new(vs: &'a VarStore, region: Autocast) -> Self {
        let (unused, underflow) = (Vec::new(), Vec::new());
        Self { vs, region, runs: RUNS, scale: SCALE, unused, underflow }
    }

    /// Sets the number of noise runs; 4 by default, and 2 instead of fewer. If something is over budget, eight more
    /// decide.
    #[must_use]
    pub fn runs(self, runs: usize) -> Self {
        Self { runs: runs.max(2), ..self }
    }

    /// Sets the loss scale of the first of the two iterations in half precision, a power of two; 1024 by default. The
    /// second, which is compared, has twice this scale if the first calls [`update`](GradScaler::update). Both are
    /// repeated with half of it until they are finite, as in training.
    #[must_use]
    pub fn scale(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Allows that parameters whose names match the pattern, such as `head.*`, have no gradient, or one of zeros.
    #[must_use]
    pub fn allow_unused(mut self, pattern: &str) -> Self {
        self.unused.push(pattern.to_owned());
        self
    }

    /// Allows that outputs, buffers and gradients whose names match the pattern consist of numbers that are too small
    /// for fp16, so that rounding is as large as they are and nothing can be told about them. Without this such a
    /// quantity is over budget.
    #[must_use]
    pub fn allow_underflow(mut self, pattern: &str) -> Self {
        self.underflow.push(pattern.to_owned());
        self
    }

    /// Runs the iteration eight times and compares: twice in half precision; in f32; in f32 with a scale and with
    /// regions that are on, which must not change a bit; and in four noise runs. If a quantity is over its limit and
    /// nothing else differs, eight more noise runs decide; if it is the loss, an output or a buffer, six more runs find
    /// the first operator. If a bit changes without rounding and there is a scaler, three to eight more runs, and one
    /// more for each scale that overflows, find out why; and in fp16 two more tell numbers that are too small for it
    /// from those that are rounding alone.
    ///
    /// `iteration` is one whole step of training and returns its unscaled loss, one number; with accumulation, the sum
    /// over the micro-batches. It clears gradients, computes the loss in [`BudgetRun::region`], runs backward and steps
    /// with [`BudgetRun::scaler`], and updates the scaler. Regions of this crate that it opens by itself follow the run
    /// as well. It has to do the same in each call: give it the same batch. `optimizer` makes a new optimizer for each
    /// run, of this crate, of tch or of the program.
    ///
    /// All runs begin with the same parameters, buffers and random numbers of libtorch, and these and the gradients are
    /// put back in place when it returns or panics. The first iteration in half precision has other parameters than the
    /// second, which exposes copies that are kept from one to the next. Variables in half precision are f32 in the f32
    /// run and in noise runs; their updates are compared by their master weights, if
    /// the optimizer has some. Synchronizes.
    ///
    /// # Errors
    ///
    /// The errors of `iteration` and of `optimizer`; [`Error::InvalidArgument`] for a scale that is no power of two, a
    /// `VarStore` without parameters, or an optimizer with other tensors than its variables; [`Error::Torch`] if the
    /// thread runs another budget already, or if libtorch fails.
    pub fn measure<O, E>(
        &self,
        optimizer: impl FnMut() -> std::result::Result<O, E>,
        iteration: impl FnMut(&mut BudgetRun, &mut O) -> Result<Tensor>,
    ) -> Result<BudgetReport>
    where
        O: AmpOptimizer,
        E: Into<Error>,
    {
        capture::refuse("a report of iterations", "make it of iterations without a graph")?;
        let mut iterate = iterate(optimizer, iteration);
        Runner::new(self, &mut iterate)?.measure()
    }

    /// Runs the iteration four times and compares with the noise that an earlier run measured: twice in half precision,
    /// in f32, and in f32 with a scale and with regions that are on. The limits are a quarter larger, because libtorch,
    /// the number of threads or the machine may be others.
    ///
    /// # Errors
    ///
    /// The same as [`measure`](Self::measure), and [`Error::InvalidArgument`] for a file of another dtype, another type
    /// of device or another program: one whose numbers in f32 are not those of the file.
    pub fn check<O, E>(
        &self,
        file: &BudgetFile,
        optimizer: impl FnMut() -> std::result::Result<O, E>,
        iteration: impl FnMut(&mut BudgetRun, &mut O) -> Result<Tensor>,
    ) -> Result<BudgetReport>
    where
        O: AmpOptimizer,
        E: Into<Error>,
    {
        let mut iterate = iterate(optimizer, iteration);
        Runner::new(self, &mut iterate)?.check(file)
    }
}

/// One closure from the two of a program.
fn iterate<O: AmpOptimizer, E: Into<Error>>(
    mut optimizer: impl FnMut() -> std::result::Result<O, E>,
    mut iteration: impl FnMut(&mut BudgetRun, &mut O) -> Result<Tensor>,
) -> impl FnMut(&mut BudgetRun) -> Result<Iterated> {
    move |run| {
        let mut optimizer = optimizer().map_err(Into::into)?;
        let loss = iteration(run, &mut optimizer)?;
        let state = optimizer.state_tensors()?;
        let parameters = optimizer.parameters();
        let parameters = parameters.as_slice().iter().map(Tensor::shallow_clone).collect();
        Ok(Iterated { loss, parameters, state })
    }
}

impl BudgetRun {
    fn new(region: Autocast, mode: Mode, dtype: Kind, scaler: GradScaler) -> Self {
        Self { region, mode, dtype, scaler, is_scaled: false, outputs: RefCell::default() }
    }

    /// The scaler, whether the iteration has used it, and the outputs.
    fn finish(self) -> (GradScaler, bool, Vec<(String, Tensor)>) {
        (self.scaler, self.is_scaled, self.outputs.into_inner())
    }

    /// Runs `f` in the region of this run: half precision, f32, or f32 with noise.
    ///
    /// # Errors
    ///
    /// The same as [`Autocast::run`].
    pub fn region<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        self.region.run(f)
    }

    /// The scaler of this run, which is disabled in the f32 run. It keeps its scale from the first iteration in half
    /// precision to the second. A program that owns its scaler can swap it with this one for the iteration.
    pub fn scaler(&mut self) -> &mut GradScaler {
        self.is_scaled = true;
        &mut self.scaler
    }

    /// Names a tensor, such as the model's result, for the comparison, and returns it. The n-th tensor of a name is
    /// compared with the n-th in f32.
    pub fn output(&self, name: &str, output: &Tensor) -> Tensor {
        let _own = OutsideRegions::enter();
        let mut outputs = self.outputs.borrow_mut();
        let count =
            outputs.iter().filter(|(known, _)| known.split(" #").next() == Some(name)).count();
        let name = if count == 0 { name.to_owned() } else { format!("{name} #{}", count + 1) };
        outputs.push((name, output.detach().copy()));
        output.shallow_clone()
    }

    /// The dtype for tensors that the iteration casts by itself: f32 in the f32 run, and otherwise that of the region,
    /// which is f32 for one that is switched off, unless the model has variables in half precision.
    pub fn dtype(&self) -> Kind {
        if self.mode == Mode::F32 { Kind::Float } else { self.dtype }
    }

    /// Returns whether this run is in half precision, as opposed to those that it is compared with. Use it to plant a
    /// fault, to see that the test finds it.
    pub fn is_half(&self) -> bool {
        self.mode == Mode::Half
    }
}

/// Runs the iterations of a budget, and counts them.
struct Runner<'a> {
    budget: &'a Budget<'a>,
    program: Program,
    iterate: &'a mut Iterate<'a>,
    /// The scale that the first iteration in half precision begins with.
    scale: f64,
    iterations: usize,
    /// Whether one of them left the scaler without an `update`.
    is_update_due: bool,
    seed: u64,
}

impl<'a> Runner<'a> {
    fn new(budget: &'a Budget<'a>, iterate: &'a mut Iterate<'a>) -> Result<Self> {
        let scale = budget.scale;
        if !(scale.is_normal() && scale > 0.0 && scale.log2().fract() == 0.0) {
            let problem = format!("is {scale}: use a power of two, so that scaling does not round");
            return Err(Error::InvalidArgument { name: "scale", problem });
        }
        let program = Program::new(budget.vs, budget.region)?;
        let (iterations, is_update_due, seed) = (0, false, 0);
        Ok(Self { budget, program, iterate, scale, iterations, is_update_due, seed })
    }

    fn measure(&mut self) -> Result<BudgetReport> {
        let runs = self.budget.runs;
        let (half, mut problems, f32, mut measured) = loop {
            let (half, problems, f32) = self.both()?;
            let mut measured = self.measured(&f32)?;
            let is_finite = self.add_noise(runs, &f32, half.scale, &mut measured)?;
            let is_least = !half.is_scaled || self.scale <= LEAST_SCALE;
            if is_finite || is_least || !half.not_finite.is_empty() {
                break (half, problems, f32, measured);
            }
            // The largest numbers are so near to infinity that rounding decides.
            self.scale /= 2.0;
        };
        self.add_unbounded(&f32, half.scale, &mut measured)?;
        let unrounded = unrounded::look(self, &f32, &half)?;
        problems.extend(self.problems(&f32, &half, &measured, unrounded));
        let mut rows = self.rows(&f32, &half, &measured, 1.0)?;
        let is_undecided = |row: &BudgetRow| row.is_over() && row.lost.is_none();
        if rows.iter().any(is_undecided) && problems.is_empty() {
            let _finite = self.add_noise(MORE_RUNS, &f32, half.scale, &mut measured)?;
            rows = self.rows(&f32, &half, &measured, 1.0)?;
        }
        let is_forward = |row: &&BudgetRow| row.quantity <= BudgetQuantity::Buffer;
        let mut first_operator = None;
        if problems.is_empty() && rows.iter().filter(is_forward).any(BudgetRow::is_over) {
            first_operator = self.first_operator(half.scale)?;
        }
        let report = self.report([&f32, &half], problems, rows, measured);
        Ok(BudgetReport { first_operator, ..report })
    }

    fn check(&mut self, file: &BudgetFile) -> Result<BudgetReport> {
        let refuse =
            |problem: String| Error::InvalidArgument { name: "the budget's file", problem };
        let (dtype, device) =
            (Dtype::from(self.program.dtype()), device_name(self.program.region.device()));
        if file.dtype != dtype || file.device != device {
            return Err(refuse(format!(
                "is of {} on {}, and the region has {dtype} on {device}: measure again",
                file.dtype, file.device
            )));
        }
        let (half, mut problems, f32) = self.both()?;
        let now = self.measured(&f32)?;
        if let Some(problem) = file.measured.differs_from(&now) {
            return Err(refuse(format!(
                "{problem}: its inputs, weights or program are others, so fix the seed or measure again"
            )));
        }
        let measured = file.measured.in_order_of(&now);
        let unrounded = unrounded::look(self, &f32, &half)?;
        problems.extend(self.problems(&f32, &half, &measured, unrounded));
        let rows = self.rows(&f32, &half, &measured, KEPT)?;
        Ok(self.report([&f32, &half], problems, rows, measured))
    }

    /// Returns the differences that rounding does not explain.
    fn problems(
        &self,
        f32: &Observed,
        half: &Observed,
        measured: &Measured,
        unrounded: Unrounded,
    ) -> Vec<BudgetProblem> {
        let branches = unrounded.branches(measured);
        let mut problems = unrounded.problems;
        problems.extend(of_operators(f32, half, self.program.dtype()));
        problems.extend(of_dtypes(f32, half));
        problems.extend(of_gradients(f32, half, &self.budget.underflow, measured));
        problems.extend(untrained(f32, half, &self.budget.unused));
        problems.extend(of_steps(f32, half));
        problems.extend(self.is_update_due.then_some(BudgetProblem::NotUpdated));
        problems.extend((f32.random != half.random).then_some(BudgetProblem::RandomNumbers));
        let not_finite = names(half.not_finite.difference(&f32.not_finite));
        problems.extend((!not_finite.is_empty()).then_some(BudgetProblem::NotFinite(not_finite)));
        let is_power = half.scale.log2().fract() == 0.0;
        problems.extend((!is_power).then_some(BudgetProblem::Scale(half.scale)));
        problems.extend(branches);
        problems
    }

    fn rows(
        &self,
        f32: &Observed,
        half: &Observed,
        measured: &Measured,
        allowance: f64,
    ) -> Result<Vec<BudgetRow>> {
        let lost = lost(f32, half, measured, &self.budget.underflow)?;
        Ok(report::rows(self.program.dtype(), measured, &compared(f32, half)?, &lost, allowance))
    }

    fn run(
        &mut self,
        mode: Mode,
        scaler: GradScaler,
        recorded: Option<RecordingMode<'_>>,
    ) -> Result<(Observed, GradScaler)> {
        self.iterations += 1;
        let (observed, scaler) = self.program.run(mode, scaler, recorded, self.iterate)?;
        self.is_update_due |= observed.is_update_due;
        Ok((observed, scaler))
    }

    /// Runs an iteration that begins as the program does, without a scaler if there is no scale.
    fn run_afresh(
        &mut self,
        mode: Mode,
        scale: Option<f64>,
        recorded: Option<RecordingMode<'_>>,
    ) -> Result<Observed> {
        let scaler = match scale {
            Some(scale) => self.program.scaler(scale)?,
            None => GradScaler::disabled(),
        };
        self.program.restore(mode)?;
        self.program.clear_gradients()?;
        Ok(self.run(mode, scaler, recorded)?.0)
    }

    /// Runs an iteration with other random roundings than all before.
    fn run_with_noise(
        &mut self,
        scale: f64,
        recorded: Option<RecordingMode<'_>>,
    ) -> Result<Observed> {
        self.seed += 1;
        let mode = Mode::Emulated(Rounding::Random { seed: self.seed });
        self.run_afresh(mode, Some(scale), recorded)
    }

    /// Runs two iterations in half precision, the first with other parameters.
    fn pair(&mut self, spoil: bool) -> Result<Observed> {
        self.program.restore(Mode::Half)?;
        self.program.clear_gradients()?;
        self.program.move_parameters()?;
        let scaler = self.program.scaler(self.scale)?;
        let (before, scaler) = self.run(Mode::Half, scaler, None)?;
        self.program.restore(Mode::Half)?;
        if spoil {
            self.program.spoil_gradients(&before)?;
        } else {
            self.program.clear_gradients()?;
        }
        Ok(self.run(Mode::Half, scaler, None)?.0)
    }

    /// Runs the iteration in half precision, with a scale at which it is finite, and in f32. Returns what is wrong with
    /// the first, too.
    fn both(&mut self) -> Result<(Observed, Vec<BudgetProblem>, Observed)> {
        let mut problems = Vec::new();
        let half = loop {
            let half = self.pair(true)?;
            if !half.is_spoilt() {
                break half;
            }
            let cleared = self.pair(false)?;
            if !cleared.is_spoilt() {
                problems.push(BudgetProblem::NotCleared);
                break cleared;
            }
            if self.scale <= LEAST_SCALE || !cleared.is_scaled {
                problems.extend(cleared.is_skipped.then_some(BudgetProblem::Skipped));
                break cleared;
            }
            self.scale /= 2.0;
        };
        let f32 = self.run_afresh(Mode::F32, None, None)?;
        Ok((half, problems, f32))
    }

    /// The norms in f32, as yet without noise.
    fn measured(&self, f32: &Observed) -> Result<Measured> {
        let _own = OutsideRegions::enter();
        let quantity = |(quantity, name, value): &Value| {
            let norm = measure::norm(&value.f_to_kind(Kind::Double)?)?;
            let (noise, unbounded) = (Vec::new(), None);
            Ok(MeasuredQuantity { quantity: *quantity, name: name.clone(), norm, noise, unbounded })
        };
        Ok(Measured { quantities: f32.values.iter().map(quantity).collect::<Result<_>>()? })
    }

    /// Adds runs with noise. One that is not finite is repeated with other random numbers, a few times; returns whether
    /// all were finite in the end.
    fn add_noise(
        &mut self,
        runs: usize,
        f32: &Observed,
        scale: f64,
        measured: &mut Measured,
    ) -> Result<bool> {
        let mut repeats = MOST_REPEATS;
        for _ in 0..runs {
            let noisy = loop {
                let noisy = self.run_with_noise(scale, None)?;
                let is_finite = noisy.not_finite.is_subset(&f32.not_finite) && !noisy.is_skipped;
                if is_finite || repeats == 0 {
                    break noisy;
                }
                repeats -= 1;
            };
            let deviations = compared(f32, &noisy)?;
            for (quantity, deviation) in measured.quantities.iter_mut().zip(deviations) {
                quantity.noise.push(deviation);
            }
        }
        Ok(repeats > 0)
    }

    /// Where noise in fp16 is as large as the quantity, measures how large it would be without the limits of fp16's
    /// exponents.
    fn add_unbounded(&mut self, f32: &Observed, scale: f64, measured: &mut Measured) -> Result<()> {
        let is_large =
            |known: &MeasuredQuantity| known.quantity.can_underflow() && known.is_without_limit();
        if self.program.dtype() != Kind::Half || !measured.quantities.iter().any(is_large) {
            return Ok(());
        }
        let mut runs = Vec::new();
        for _ in 0..UNBOUNDED_RUNS {
            self.seed += 1;
            let mode = Mode::Emulated(Rounding::Unbounded { seed: self.seed });
            runs.push(compared(f32, &self.run_afresh(mode, Some(scale), None)?)?);
        }
        for (index, quantity) in measured.quantities.iter_mut().enumerate() {
            let errors = runs.iter().map(|deviations| deviations[index].error);
            quantity.unbounded = Some(root_mean_square(errors));
        }
        Ok(())
    }

    /// Records the iteration in f32, in half precision and with noise, compares operator by operator, and returns the
    /// first one whose results rounding does not explain.
    fn first_operator(&mut self, scale: f64) -> Result<Option<BudgetOperator>> {
        let reference = Reference::new()?;
        let recorded = RecordingMode::Reference(&reference);
        // With a scale in f32 as well, so that all runs call the same operators.
        let _f32 = self.run_afresh(Mode::F32, Some(scale), Some(recorded))?;
        let beside = RecordingMode::Compared(&reference);
        let half = self.run_afresh(Mode::Half, Some(scale), Some(beside))?.recording;
        let mut noisy = Vec::new();
        for _ in 0..RUNS {
            noisy.extend(self.run_with_noise(scale, Some(beside))?.recording);
        }
        Ok(half.and_then(|half| first_over(&half, &noisy)))
    }

    fn report(
        &self,
        [f32, half]: [&Observed; 2],
        problems: Vec<BudgetProblem>,
        rows: Vec<BudgetRow>,
        measured: Measured,
    ) -> BudgetReport {
        BudgetReport {
            dtype: self.program.dtype().into(),
            scale: half.scale,
            iterations: self.iterations,
            losses: [f32.loss, half.loss],
            problems,
            first_operator: None,
            rows,
            device: device_name(self.program.region.device()),
            measured,
        }
    }
}

/// How far each quantity of another run is from that in f32. One that the other run lacks is infinitely far.
fn compared(f32: &Observed, other: &Observed) -> Result<Vec<Deviation>> {
    let beside = f32.values.iter().zip(f32.beside(other));
    let deviation = |((.., f), h): (&Value, Option<&Tensor>)| {
        h.map_or(Ok(Deviation::MISSING), |h| Deviation::of(h, f))
    };
    beside.map(deviation).collect()
}

fn first_over(half: &Recording, noisy: &[Recording]) -> Option<BudgetOperator> {
    let noise: Vec<Vec<Option<Compared>>> = noisy
        .iter()
        .map(|run| forward(run).map(|index| run.events[index].compared).collect())
        .collect();
    for (position, index) in forward(half).enumerate() {
        let event = &half.events[index];
        let found = |multiple| BudgetOperator {
            part: half.path(index).unwrap_or_else(|| half.unnamed_part(index)),
            operator: event.name.trim_start_matches("aten::").to_owned(),
            multiple,
        };
        let Some(compared) = event.compared else { return Some(found(None)) };
        let errors = noise.iter().map(|run| Some(relative((*run.get(position)?)?)));
        let errors = errors.collect::<Option<Vec<f64>>>()?;
        let multiple = multiple(relative(compared), root_mean_square(errors.into_iter()));
        if multiple > BudgetQuantity::Output.limit() {
            return Some(found(Some(multiple)));
        }
    }
    None
}

/// The operators that the program called before the backward pass and that are compared.
fn forward(recording: &Recording) -> impl Iterator<Item = usize> {
    let backward = recording.events.iter().position(|event| event.kind == EventKind::Node);
    let end = backward.unwrap_or(recording.events.len());
    let ended = recording.ended().into_iter();
    ended.filter(move |&index| index < end && recording.events[index].is_counted)
}

fn device_name(device: Device) -> String {
    match device {
        Device::Cuda(_) => "cuda".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn of_operators(f32: &Observed, half: &Observed, dtype: Kind) -> Vec<BudgetProblem> {
    let other = half.returned.iter().find(|&&kind| kind != dtype);
    // A region that is switched off has f32, which is not among these.
    let nothing = dtype != Kind::Float && !half.returned.contains(&dtype);
    let in_f32 = f32.returned.first();
    let other = other.map(|&kind| BudgetProblem::OtherHalf(kind.into()));
    let in_f32 = in_f32.map(|&kind| BudgetProblem::HalfInF32(kind.into()));
    let nothing = nothing.then_some(BudgetProblem::NothingInHalf);
    [other, nothing, in_f32].into_iter().flatten().collect()
}

fn of_dtypes(f32: &Observed, half: &Observed) -> Vec<BudgetProblem> {
    let beside = f32.dtypes.iter().map(|(name, &of_f32)| (name, of_f32, half.dtypes.get(name)));
    let differ = beside.filter_map(|(name, f32, half)| Some((name, f32, *half?)));
    let differ = differ.filter(|(_, f32, half)| f32 != half);
    differ.map(|(name, f32, half)| BudgetProblem::Dtype { name: name.clone(), f32, half }).collect()
}

/// Where a gradient is rounding alone, that decides whether it is zero, and whether it is too small to change a
/// parameter.
fn of_gradients(
    f32: &Observed,
    half: &Observed,
    underflow: &[String],
    measured: &Measured,
) -> Vec<BudgetProblem> {
    let alone = |one: &BTreeSet<String>, other: &BTreeSet<String>| names(one.difference(other));
    let exact = |one: &BTreeSet<String>, other: &BTreeSet<String>| {
        let mut names = alone(one, other);
        names.retain(|name| {
            let is_allowed = matches_any(underflow, name);
            let known = measured.gradient(name);
            let is_left_out = |known: &MeasuredQuantity| {
                if known.underflows() { is_allowed } else { known.is_only_noise() }
            };
            !known.is_some_and(is_left_out)
        });
        names
    };
    let all = [
        BudgetProblem::Gradients {
            missing: alone(&half.without_gradient, &f32.without_gradient),
            added: alone(&f32.without_gradient, &half.without_gradient),
        },
        BudgetProblem::ZeroGradients {
            half: exact(&half.zero_gradient, &f32.zero_gradient),
            f32: exact(&f32.zero_gradient, &half.zero_gradient),
        },
        BudgetProblem::Unchanged {
            half: exact(&half.unchanged, &f32.unchanged),
            f32: exact(&f32.unchanged, &half.unchanged),
        },
    ];
    all.into_iter().filter(|problem| !problem.is_empty()).collect()
}

fn untrained(f32: &Observed, half: &Observed, unused: &[String]) -> Option<BudgetProblem> {
    let nothing = |run: &Observed| &run.without_gradient | &run.zero_gradient;
    let mut untrained = names(nothing(f32).intersection(&nothing(half)));
    untrained.retain(|name| !matches_any(unused, name));
    (!untrained.is_empty()).then_some(BudgetProblem::Untrained(untrained))
}

/// No step at all, or the first parameter that was stepped more or less often. A skipped step is another problem.
fn of_steps(f32: &Observed, half: &Observed) -> Option<BudgetProblem> {
    let is_still = |run: &Observed| {
        run.steps.keys().all(|name| run.unchanged.contains(name))
            && run.steps.values().all(|&steps| steps == 0)
    };
    if is_still(f32) && is_still(half) && !half.is_skipped {
        return Some(BudgetProblem::NotStepped);
    }
    let beside = f32
        .steps
        .iter()
        .map(|(name, &of_f32)| (name.clone(), of_f32, half.steps.get(name).copied().unwrap_or(0)));
    let mut differ = beside.filter(|(_, f32, half)| f32 != half);
    let (name, f32, of_half) = differ.next().filter(|_| !half.is_skipped)?;
    Some(BudgetProblem::Steps { name, f32, half: of_half })
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> Vec<String> {
    names.cloned().collect()
}

/// For each quantity that is too small for the dtype, so that noise is as large as it is, the share of its numbers that
/// become zero in half precision.
fn lost(
    f32: &Observed,
    half: &Observed,
    measured: &Measured,
    underflow: &[String],
) -> Result<Vec<Option<f64>>> {
    let share = |((known, (.., f)), half): ((&MeasuredQuantity, &Value), Option<&Tensor>)| {
        if !known.quantity.can_underflow()
            || !known.underflows()
            || matches_any(underflow, &known.name)
        {
            return Ok(None);
        }
        half.map(|half| share_of_zeros(f, half)).transpose()
    };
    measured.quantities.iter().zip(&f32.values).zip(f32.beside(half)).map(share).collect()
}

/// The share of the numbers of `f` that are not zero and are in `h`.
fn share_of_zeros(f: &Tensor, h: &Tensor) -> Result<f64> {
    let _own = OutsideRegions::enter();
    if f.size() != h.size() {
        return Ok(0.0);
    }
    let is_number = f.f_to_kind(Kind::Bool)?;
    let zeros = measure::sum(&is_number.f_logical_and(&h.f_logical_not()?)?)?;
    Ok(zeros / measure::sum(&is_number)?.max(1.0))
}
