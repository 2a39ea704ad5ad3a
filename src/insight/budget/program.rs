//! An iteration that is run in f32, in half precision and with noise, and put back each time.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use super::{BudgetQuantity, BudgetRun};
use crate::error::{Error, Result, ensure_defined};
use crate::ffi::emulation::{Emulated, Emulation, Regions, Rounding};
use crate::ffi::insight::RecordingMode;
use crate::ffi::{self, OutsideRegions};
use crate::gradients::StashedGradients;
use crate::insight::dtype::Dtype;
use crate::insight::measure::dense;
use crate::insight::recording::Recording;
use crate::insight::rerun::{Repeatable, emulated, is_finite};
use crate::optim::{AmpOptimizer, Step, watched};
use crate::precision::{MatmulPrecision, MatmulPrecisionGuard};
use crate::recompute::RandomStates;
use crate::scaler::GradScalerConfig;
use crate::{Autocast, GradScaler};

/// The results of an iteration, and the optimizer as it left it.
pub(super) struct Iterated {
    pub(super) loss: Tensor,
    /// The optimizer's parameters, and the tensors that it keeps for each.
    pub(super) parameters: Vec<Tensor>,
    pub(super) state: Vec<BTreeMap<String, Tensor>>,
}

/// Makes an optimizer and runs the program's iteration with it.
pub(super) type Iterate<'a> = dyn FnMut(&mut BudgetRun) -> Result<Iterated> + 'a;

/// How an iteration runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    F32,
    Half,
    /// In f32, with all that is different in half precision but the precision: regions are open, and what half
    /// precision rounds is rounded so.
    Emulated(Rounding),
}

/// A variable and its numbers before the iteration.
#[derive(Debug)]
struct Kept {
    name: String,
    variable: Tensor,
    /// Whether it is a parameter; if not, it is a buffer or frozen.
    is_trained: bool,
    /// The memory of the variable.
    own: Tensor,
    numbers: Tensor,
}

impl Kept {
    fn is_half(&self) -> bool {
        matches!(self.own.kind(), Kind::Half | Kind::BFloat16)
    }
}

/// The state with which an iteration of a program begins. It is put back when this is dropped.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) region: Autocast,
    pub(super) device: Device,
    repeatable: Repeatable,
    variables: Vec<Kept>,
    /// The identities of the variables.
    known: Rc<HashSet<usize>>,
    random: RandomStates,
    emulated: Emulated,
    /// Whether everything is in f32: the region is switched off, and no variable is in half precision.
    pub(super) is_f32: bool,
    _gradients: StashedGradients,
}

/// A quantity of an iteration, its name and its numbers.
pub(super) type Value = (BudgetQuantity, String, Tensor);

/// The state that an iteration left.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The quantities in f32, in the order of the program.
    pub(super) values: Vec<Value>,
    pub(super) loss: f64,
    pub(super) dtypes: BTreeMap<String, Dtype>,
    pub(super) without_gradient: BTreeSet<String>,
    pub(super) zero_gradient: BTreeSet<String>,
    pub(super) unchanged: BTreeSet<String>,
    pub(super) steps: BTreeMap<String, u64>,
    pub(super) not_finite: BTreeSet<String>,
    /// The states of the generators afterwards.
    pub(super) random: Vec<Tensor>,
    /// The half-precision dtypes that operators returned.
    pub(super) returned: Vec<Kind>,
    /// The scale during the iteration, and whether it used the scaler.
    pub(super) scale: f64,
    pub(super) is_scaled: bool,
    pub(super) is_skipped: bool,
    /// Whether it left the scaler without an `update`.
    pub(super) is_update_due: bool,
    pub(super) recording: Option<Recording>,
}

/// The steps that were taken, by the identity of the parameter.
#[derive(Debug, Default)]
struct Watched {
    steps: HashMap<usize, u64>,
    /// One for each step.
    gradients: HashMap<usize, Vec<Tensor>>,
    is_skipped: bool,
}

impl Watched {
    /// Notes the gradients as the optimizer uses them: unscaled and clipped.
    fn note(
        &mut self,
        known: &HashSet<usize>,
        optimizer: &dyn AmpOptimizer,
        step: &Step<'_>,
    ) -> Result<()> {
        let _own = OutsideRegions::enter();
        if let Some(found) = step.found_inf()
            && found.f_double_value(&[])? != 0.0
        {
            self.is_skipped = true;
            return Ok(());
        }
        let parameters = optimizer.parameters();
        let parameters = parameters.as_slice();
        for (parameter, identity) in parameters.iter().zip(ffi::identities(parameters)?) {
            if !known.contains(&identity) {
                let problem = "has parameters that are no variables of the budget's VarStore, which would not be put back: \
                               make all models with one VarStore"
                    .to_owned();
                return Err(Error::InvalidArgument { name: "optimizer", problem });
            }
            *self.steps.entry(identity).or_default() += 1;
            let gradient = parameter.f_grad()?;
            if gradient.defined() {
                let mut seen = widened(&gradient)?;
                if let Some(scale) = step.grad_scale() {
                    seen = seen.f_div(&scale.f_to_device(seen.device())?)?;
                }
                if let Some(clip) = step.clip_factor() {
                    seen = seen.f_mul(&clip.f_to_device(seen.device())?)?;
                }
                self.gradients.entry(identity).or_default().push(seen);
            }
        }
        Ok(())
    }
}

/// A copy in f32, or f64, that is dense.
fn widened(tensor: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let dense = dense(tensor)?;
    let kind = if dense.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    Ok(dense.f_to_dtype(kind, false, true)?)
}

impl Program {
    pub(super) fn new(vs: &VarStore, region: Autocast) -> Result<Self> {
        let _own = OutsideRegions::enter();
        let repeatable = Repeatable::new(vs)?;
        let keep = |(name, variable): &(String, Tensor)| {
            Ok(Kept {
                name: name.clone(),
                variable: variable.shallow_clone(),
                is_trained: variable.requires_grad(),
                own: variable.f_detach()?,
                numbers: variable.f_detach_copy()?,
            })
        };
        let variables: Vec<Kept> =
            repeatable.parameters().iter().map(keep).collect::<Result<_>>()?;
        let trained = variables.iter().filter(|kept| kept.is_trained);
        let handles: Vec<Tensor> = trained.map(|kept| kept.variable.shallow_clone()).collect();
        if handles.is_empty() {
            let problem = "has no parameter to train".to_owned();
            return Err(Error::InvalidArgument { name: "vs", problem });
        }
        let all: Vec<Tensor> = variables.iter().map(|kept| kept.variable.shallow_clone()).collect();
        Ok(Self {
            is_f32: !region.is_enabled() && !variables.iter().any(Kept::is_half),
            region,
            device: vs.device(),
            random: RandomStates::of(repeatable.devices())?,
            known: Rc::new(ffi::identities(&all)?.into_iter().collect()),
            repeatable,
            variables,
            emulated: emulated(&region)?,
            _gradients: StashedGradients::from(handles)?,
        })
    }

    /// The parameters.
    fn parameters(&self) -> impl Iterator<Item = &Kept> {
        self.variables.iter().filter(|kept| kept.is_trained)
    }

    fn handles(&self) -> Vec<Tensor> {
        self.parameters().map(|kept| kept.variable.shallow_clone()).collect()
    }

    /// The dtype of what is not in the f32 run: that of the region.
    pub(super) fn dtype(&self) -> Kind {
        if self.is_f32 { Kind::Float } else { self.emulated.dtype }
    }

    /// A scaler that grows in each iteration, so that what is kept from one to the next shows.
    pub(super) fn scaler(&self, scale: f64) -> Result<GradScaler> {
        let config =
            GradScalerConfig { init_scale: scale, growth_interval: 1, ..Default::default() };
        config.build(self.device)
    }

    /// Puts parameters and buffers back, in place.
    pub(super) fn restore(&mut self, mode: Mode) -> Result<()> {
        let _own = OutsideRegions::enter();
        for kept in &mut self.variables {
            if kept.is_half() && mode != Mode::Half {
                // The same numbers in a dtype that does not round them.
                kept.variable.f_set_data(&kept.numbers.f_to_kind(Kind::Float)?)?;
                continue;
            }
            if kept.is_half() {
                kept.variable.f_set_data(&kept.own)?;
            }
            no_grad(|| kept.variable.f_copy_(&kept.numbers))?;
        }
        Ok(())
    }

    /// Moves the parameters a little, so that whatever is kept of them shows when they are put back.
    pub(super) fn move_parameters(&mut self) -> Result<()> {
        let _own = OutsideRegions::enter();
        let variables = &mut self.variables;
        self.random.during(|| {
            no_grad(|| {
                for kept in variables.iter_mut().filter(|kept| kept.is_trained) {
                    let parameter = &mut kept.variable;
                    let number = |x| ffi::number_new(x, parameter.kind(), parameter.device());
                    let (fifth, one) = (number(0.2)?, number(1.0)?);
                    let factor = parameter.f_randn_like()?.f_mul(&fifth)?.f_add(&one)?;
                    let _moved = parameter.f_mul_(&factor)?;
                }
                Ok(())
            })
        })?
    }

    pub(super) fn clear_gradients(&self) -> Result<()> {
        ffi::gradients_drop(&self.handles())
    }

    /// Writes NaN to the gradients that are left and not zero, which an iteration that clears them does not read. Those
    /// of parameters that the iteration before has not stepped are dropped.
    pub(super) fn spoil_gradients(&self, before: &Observed) -> Result<()> {
        let _own = OutsideRegions::enter();
        for kept in self.parameters() {
            let mut gradient = kept.variable.f_grad()?;
            if !gradient.defined() {
                continue;
            }
            if !before.is_stepped(&kept.name) {
                ffi::gradients_drop(std::slice::from_ref(&kept.variable))?;
            } else if !gradient.is_sparse() && has_any(&gradient)? {
                let nan = ffi::number_new(f64::NAN, gradient.kind(), gradient.device())?;
                no_grad(|| gradient.f_copy_(&nan))?;
            }
        }
        Ok(())
    }

    /// Runs an iteration with the parameters as they are now. The scaler goes on from one iteration to the next.
    pub(super) fn run(
        &self,
        mode: Mode,
        scaler: GradScaler,
        recorded: Option<RecordingMode<'_>>,
        iterate: &mut Iterate<'_>,
    ) -> Result<(Observed, GradScaler)> {
        let before = scaler.get_scale()?;
        let _precision = self.precision(mode)?;
        let watched = Rc::new(RefCell::new(Watched::default()));
        let mut run = BudgetRun::new(self.region, mode, self.dtype(), scaler);
        let mut observed = Observed::default();
        let iterated = self.random.during(|| {
            let emulation = self.emulate(mode)?;
            let (watching, known) = (Rc::clone(&watched), Rc::clone(&self.known));
            let watch = move |optimizer: &dyn AmpOptimizer, step: &Step<'_>| {
                watching.borrow_mut().note(&known, optimizer, step)
            };
            let iterate = || watched::during(Rc::new(watch), || iterate(&mut run));
            let iterated = match recorded {
                Some(how) => {
                    let (recording, iterated) =
                        Recording::of(self.repeatable.model(), how, iterate)?;
                    observed.recording = Some(recording);
                    iterated
                }
                None => iterate()?,
            };
            observed.returned = emulation.returned();
            let random = self.repeatable.devices().iter().map(|&device| ffi::rng_state(device));
            observed.random = random.collect::<Result<_>>()?;
            Ok::<_, Error>(iterated)
        })??;
        let (scaler, is_scaled, outputs) = run.finish();
        (observed.is_scaled, observed.scale) = (is_scaled, if is_scaled { before } else { 1.0 });
        observed.note_results(&iterated.loss, outputs)?;
        self.observe_buffers(&mut observed)?;
        let watched = watched.take();
        self.observe_parameters(&mut observed, &watched, &iterated)?;
        observed.is_skipped = scaler.is_enabled()
            && watched.steps.is_empty()
            && (watched.is_skipped
                || scaler.get_scale()? < before
                || !observed.not_finite.is_empty());
        // An iteration that neither steps nor updates leaves out its batch.
        let is_changed = |kept: &Kept| !observed.unchanged.contains(&kept.name);
        let is_stepped = !watched.steps.is_empty() || self.parameters().any(is_changed);
        observed.is_update_due = scaler.is_enabled()
            && (scaler.is_between_step_and_update()
                || is_stepped && scaler.is_between_scale_and_update());
        Ok((observed, scaler))
    }

    /// Begins what makes the run one of its mode.
    fn emulate(&self, mode: Mode) -> Result<Emulation> {
        let (regions, rounding) = match mode {
            Mode::F32 => (Regions::Off, Rounding::None),
            Mode::Half => (Regions::AsGiven, Rounding::None),
            Mode::Emulated(rounding) => (Regions::Emulated, rounding),
        };
        let emulation = Emulation::begin(&self.emulated, regions, rounding)?;
        if mode != Mode::Half {
            let in_half = self.variables.iter().filter(|kept| kept.is_half());
            let in_half: Vec<_> = in_half.map(|kept| kept.variable.shallow_clone()).collect();
            emulation.mark(&in_half)?;
        }
        Ok(emulation)
    }

    /// Keeps the products of f32 from being as coarse as half precision.
    fn precision(&self, mode: Mode) -> Result<Option<MatmulPrecisionGuard>> {
        let is_coarse = mode != Mode::Half && matches!(self.device, Device::Cuda(_));
        is_coarse.then(|| MatmulPrecision::Highest.enter()).transpose()
    }

    fn observe_buffers(&self, observed: &mut Observed) -> Result<()> {
        let _own = OutsideRegions::enter();
        for kept in self.variables.iter().filter(|kept| !kept.is_trained) {
            if !kept.is_half() {
                observed.dtypes.insert(kept.name.clone(), kept.variable.kind().into());
            }
            if kept.numbers.is_floating_point() {
                let change = widened(&kept.variable)?.f_sub(&widened(&kept.numbers)?)?;
                observed.note_finite(&kept.name, &change)?;
                observed.values.push((BudgetQuantity::Buffer, kept.name.clone(), change));
            }
        }
        Ok(())
    }

    fn observe_parameters(
        &self,
        observed: &mut Observed,
        watched: &Watched,
        iterated: &Iterated,
    ) -> Result<()> {
        let _own = OutsideRegions::enter();
        let of_optimizer = ffi::identities(&iterated.parameters)?;
        let states: HashMap<_, _> = of_optimizer.into_iter().zip(&iterated.state).collect();
        let identities = ffi::identities(&self.handles())?;
        for (kept, identity) in self.parameters().zip(identities) {
            let name = &kept.name;
            let state = states.get(&identity);
            for (key, tensor) in state.into_iter().copied().flatten() {
                observed.dtypes.insert(format!("{name}.{key}"), tensor.kind().into());
            }
            if !kept.is_half() {
                observed.dtypes.insert(name.clone(), kept.variable.kind().into());
            }
            observed.steps.insert(name.clone(), watched.steps.get(&identity).copied().unwrap_or(0));
            // Gradients of parameters that the optimizer does not have do not matter.
            if watched.steps.is_empty() || watched.steps.contains_key(&identity) {
                let seen = watched.gradients.get(&identity).map_or(&[][..], Vec::as_slice);
                observed.note_gradients(kept, seen)?;
            }
            let master = state.and_then(|state| state.get("master_param"));
            let after = widened(master.unwrap_or(&kept.variable))?;
            let update = after.f_sub(&widened(&kept.numbers)?)?;
            if update.numel() > 0 && !has_any(&update)? {
                observed.unchanged.insert(name.clone());
            }
            observed.note_finite(name, &update)?;
            observed.values.push((BudgetQuantity::Update, name.clone(), update));
        }
        Ok(())
    }
}

fn has_any(numbers: &Tensor) -> Result<bool> {
    let _own = OutsideRegions::enter();
    Ok(numbers.f_any()?.f_int64_value(&[])? != 0)
}

impl Observed {
    /// Returns whether gradients are not finite: they overflowed, or those that
    /// [`spoil_gradients`](Program::spoil_gradients) wrote to were not cleared.
    pub(super) fn is_spoilt(&self) -> bool {
        self.is_skipped || self.not_finite.iter().any(|name| name.ends_with(".grad"))
    }

    fn note_results(&mut self, loss: &Tensor, outputs: Vec<(String, Tensor)>) -> Result<()> {
        let _own = OutsideRegions::enter();
        ensure_defined("loss", loss)?;
        self.loss = loss.f_double_value(&[])?;
        self.note_finite("the loss", loss)?;
        self.values.push((BudgetQuantity::Loss, String::new(), widened(loss)?));
        for (name, output) in outputs {
            self.note_finite(&name, &output)?;
            self.values.push((BudgetQuantity::Output, name, widened(&output)?));
        }
        Ok(())
    }

    fn note_finite(&mut self, name: &str, numbers: &Tensor) -> Result<()> {
        if !is_finite(numbers)? {
            self.not_finite.insert(name.to_owned());
        }
        Ok(())
    }

    /// Notes the gradients that the steps saw, or, if there was none that could be watched, the present one.
    fn note_gradients(&mut self, kept: &Kept, seen: &[Tensor]) -> Result<()> {
        let _own = OutsideRegions::enter();
        let name = &kept.name;
        let present = kept.variable.f_grad()?;
        if present.defined() && !kept.is_half() {
            self.dtypes.insert(format!("{name}.grad"), present.kind().into());
        }
        let mut gradients: Vec<Tensor> = seen.iter().map(Tensor::shallow_clone).collect();
        if gradients.is_empty() && present.defined() {
            gradients.push(widened(&present)?);
        }
        if gradients.is_empty() {
            self.without_gradient.insert(name.clone());
        }
        for (i, gradient) in gradients.into_iter().enumerate() {
            let name = if i == 0 { name.clone() } else { format!("{name} #{}", i + 1) };
            if gradient.numel() > 0 && !has_any(&gradient)? {
                self.zero_gradient.insert(name.clone());
            }
            self.note_finite(&format!("{name}.grad"), &gradient)?;
            self.values.push((BudgetQuantity::Gradient, name, gradient));
        }
        Ok(())
    }

    /// The numbers that another run has for each quantity of this one, if it has some.
    pub(super) fn beside<'o>(&self, other: &'o Self) -> Vec<Option<&'o Tensor>> {
        let all = other.values.iter();
        let all: HashMap<_, _> =
            all.map(|(quantity, name, value)| ((*quantity, name.as_str()), value)).collect();
        let find = |(quantity, name, _): &Value| all.get(&(*quantity, name.as_str())).copied();
        self.values.iter().map(find).collect()
    }

    /// Returns whether a parameter was stepped, as far as that is known.
    fn is_stepped(&self, name: &str) -> bool {
        let none = self.steps.values().all(|&steps| steps == 0);
        none || self.steps.get(name).is_some_and(|&steps| steps > 0)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The same copies were possible the other way round.
        drop(self.restore(Mode::Half));
    }
}
