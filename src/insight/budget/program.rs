//! An iteration that is run in f32, in half precision and with noise, and put back each time.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

use tch::{Device, Kind, Tensor, no_grad};

use super::{BudgetQuantity, BudgetRun};
use crate::autocast::Regions;
use crate::buffers::{self, BufferSnapshot};
use crate::error::{Error, Result};
use crate::ffi::emulation::{Emulated, Emulation};
use crate::ffi::insight::RecordingMode;
use crate::ffi::{self, OutsideRegions};
use crate::gradients::Taken;
use crate::insight::dtype::Dtype;
use crate::insight::recording::{RecordedModel, Recording};
use crate::insight::rerun::{emulated, is_finite};
use crate::optim::{AmpOptimizer, Optimizer, Step, watched};
use crate::precision::{MatmulPrecision, MatmulPrecisionGuard};
use crate::recompute::random::RandomStates;
use crate::scaler::GradScalerConfig;
use crate::variables;
use crate::{Autocast, GradScaler};
use tch::nn::VarStore;

/// How an iteration runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    F32,
    Half,
    /// In f32, with what half precision rounds rounded at random.
    Noise {
        seed: u64,
    },
}

/// A parameter and its numbers before the iteration.
#[derive(Debug)]
struct Kept {
    name: String,
    parameter: Tensor,
    /// The memory of the parameter.
    own: Tensor,
    numbers: Tensor,
}

impl Kept {
    fn is_half(&self) -> bool {
        matches!(self.own.kind(), Kind::Half | Kind::BFloat16)
    }
}

/// What an iteration of a program begins with. It is put back when this is dropped.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) region: Autocast,
    pub(super) device: Device,
    devices: Vec<Device>,
    model: RecordedModel,
    parameters: Vec<Kept>,
    buffers: Vec<(String, Tensor)>,
    snapshot: BufferSnapshot,
    random: RandomStates,
    emulated: Emulated,
    _gradients: Taken,
}

/// What an iteration left.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The quantities in f32, in the order of the program.
    pub(super) values: Vec<(BudgetQuantity, String, Tensor)>,
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
    /// The scale during the iteration.
    pub(super) scale: f64,
    pub(super) is_skipped: bool,
    pub(super) recording: Option<Recording>,
}

/// The steps that were taken, by the identity of the parameter.
#[derive(Debug, Default)]
struct Watched {
    steps: HashMap<usize, u64>,
    gradients: HashMap<usize, Tensor>,
    is_skipped: bool,
}

impl Watched {
    /// Notes the gradients as the optimizer uses them: unscaled and clipped.
    fn note(&mut self, optimizer: &dyn AmpOptimizer, step: &Step<'_>) -> Result<()> {
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
                self.gradients.insert(identity, seen);
            }
        }
        Ok(())
    }
}

/// A copy in f32, or f64, that is dense.
fn widened(tensor: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let dense =
        if tensor.is_sparse() { tensor.f_to_dense(None, false)? } else { tensor.f_detach()? };
    let kind = if dense.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    Ok(dense.f_to_dtype(kind, false, true)?)
}

impl Program {
    pub(super) fn new(vs: &VarStore, region: Autocast) -> Result<Self> {
        let named = variables::named(variables::variables(vs)?);
        let trainable = named.iter().filter(|(_, tensor)| tensor.requires_grad());
        let mut devices = vec![Device::Cpu];
        let keep = |(name, parameter): &(String, Tensor)| {
            if !devices.contains(&parameter.device()) {
                devices.push(parameter.device());
            }
            let (own, numbers) = (parameter.f_detach()?, parameter.f_detach_copy()?);
            let (name, parameter) = (name.clone(), parameter.shallow_clone());
            Ok(Kept { name, parameter, own, numbers })
        };
        let _own = OutsideRegions::enter();
        let parameters: Vec<Kept> = trainable.map(keep).collect::<Result<_>>()?;
        if parameters.is_empty() {
            let problem = "has no parameter to train".to_owned();
            return Err(Error::InvalidArgument { name: "vs", problem });
        }
        let buffers = buffers::buffers(vs)?;
        let snapshot = BufferSnapshot::of(buffers.iter().map(|(_, buffer)| buffer))?;
        let random = RandomStates::of(&devices)?;
        let handles: Vec<Tensor> =
            parameters.iter().map(|kept| kept.parameter.shallow_clone()).collect();
        let emulated = emulated(&region)?;
        let gradients = Taken::from(handles)?;
        let device = vs.device();
        Ok(Self {
            region,
            device,
            devices,
            model: RecordedModel::new(named),
            parameters,
            buffers,
            snapshot,
            random,
            emulated,
            _gradients: gradients,
        })
    }

    pub(super) fn dtype(&self) -> Kind {
        self.emulated.dtype
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
        for kept in &mut self.parameters {
            if kept.is_half() && mode != Mode::Half {
                // The same numbers in a dtype that does not round them.
                kept.parameter.f_set_data(&kept.numbers.f_to_kind(Kind::Float)?)?;
            } else {
                if kept.is_half() {
                    kept.parameter.f_set_data(&kept.own)?;
                }
                no_grad(|| kept.parameter.f_copy_(&kept.numbers))?;
            }
        }
        self.snapshot.restore()
    }

    /// Moves the parameters a little, so that whatever is kept of them shows when they are put back.
    pub(super) fn move_parameters(&mut self) -> Result<()> {
        let _own = OutsideRegions::enter();
        let parameters = &mut self.parameters;
        self.random.during(|| {
            no_grad(|| {
                for kept in parameters.iter_mut() {
                    let parameter = &mut kept.parameter;
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
        for kept in &self.parameters {
            ffi::gradients_drop(std::slice::from_ref(&kept.parameter))?;
        }
        Ok(())
    }

    /// Writes NaN to the gradients that are left and not zero, which an iteration that clears them does not read.
    pub(super) fn spoil_gradients(&self) -> Result<()> {
        let _own = OutsideRegions::enter();
        for kept in &self.parameters {
            let mut gradient = kept.parameter.f_grad()?;
            if gradient.defined()
                && !gradient.is_sparse()
                && gradient.f_any()?.f_int64_value(&[])? != 0
            {
                let nan = ffi::number_new(f64::NAN, gradient.kind(), gradient.device())?;
                no_grad(|| gradient.f_copy_(&nan))?;
            }
        }
        Ok(())
    }

    /// Runs an iteration with the parameters as they are now.
    pub(super) fn run<O: AmpOptimizer + 'static, E: Into<Error>>(
        &self,
        mode: Mode,
        scaler: GradScaler,
        recorded: Option<RecordingMode<'_>>,
        optimizer: &mut impl FnMut() -> std::result::Result<O, E>,
        iteration: &mut impl FnMut(&mut BudgetRun, &mut O) -> Result<Tensor>,
    ) -> Result<(Observed, GradScaler)> {
        let scale = scaler.get_scale()?;
        let _precision = self.precision(mode)?;
        let mut optimizer = optimizer().map_err(Into::into)?;
        let watched = Rc::new(RefCell::new(Watched::default()));
        let mut run = BudgetRun::new(self.region, mode, self.dtype(), scaler);
        let (loss, recording, returned, random) = self.random.during(|| {
            let emulation = match mode {
                Mode::Noise { seed } => Emulation::begin(&self.emulated, seed)?,
                Mode::F32 | Mode::Half => Emulation::observe(&self.emulated)?,
            };
            if mode != Mode::Half {
                let in_half = self.parameters.iter().filter(|kept| kept.is_half());
                let in_half: Vec<_> = in_half.map(|kept| kept.parameter.shallow_clone()).collect();
                emulation.mark(&in_half)?;
            }
            let regions = match mode {
                Mode::F32 => Regions::Off,
                Mode::Half => Regions::AsGiven,
                Mode::Noise { .. } => Regions::Emulated,
            };
            let watch = {
                let watched = Rc::clone(&watched);
                move |optimizer: &dyn AmpOptimizer, step: &Step<'_>| {
                    watched.borrow_mut().note(optimizer, step)
                }
            };
            let iterate = || {
                watched::during(Rc::new(watch), || {
                    regions.during(|| iteration(&mut run, &mut optimizer))
                })
            };
            let (recording, loss) = match recorded {
                Some(how) => {
                    let (recording, loss) = Recording::of(&self.model, how, iterate)?;
                    (Some(recording), loss)
                }
                None => (None, iterate()?),
            };
            let returned = emulation.returned();
            drop(emulation);
            let random = self.devices.iter().map(|&device| ffi::rng_state(device));
            Ok::<_, Error>((loss, recording, returned, random.collect::<Result<_>>()?))
        })??;
        let _own = OutsideRegions::enter();
        let mut observed = Observed { returned, random, scale, recording, ..Observed::default() };
        let (scaler, outputs) = run.finish();
        observed.loss = loss.f_double_value(&[])?;
        observed.values.push((BudgetQuantity::Loss, String::new(), widened(&loss)?));
        for (name, output) in outputs {
            observed.values.push((BudgetQuantity::Output, name, widened(&output)?));
        }
        self.observe_buffers(&mut observed)?;
        let watched = watched.take();
        self.observe_parameters(&mut observed, &watched, &mut optimizer)?;
        let after = scaler.get_scale()?;
        observed.is_skipped = watched.steps.is_empty()
            && (watched.is_skipped || after < scale || !observed.not_finite.is_empty())
            && scaler.is_enabled();
        Ok((observed, scaler))
    }

    /// Keeps the products of f32 from being as coarse as half precision.
    fn precision(&self, mode: Mode) -> Result<Option<MatmulPrecisionGuard>> {
        let is_coarse = mode != Mode::Half && matches!(self.device, Device::Cuda(_));
        is_coarse.then(|| MatmulPrecision::Highest.enter()).transpose()
    }

    fn observe_buffers(&self, observed: &mut Observed) -> Result<()> {
        let _own = OutsideRegions::enter();
        for ((name, buffer), before) in self.buffers.iter().zip(self.snapshot.copies()) {
            observed.dtypes.insert(name.clone(), buffer.kind().into());
            if before.is_floating_point() {
                let change = widened(buffer)?.f_sub(&widened(before)?)?;
                observed.note_finite(name, &change)?;
                observed.values.push((BudgetQuantity::Buffer, name.clone(), change));
            }
        }
        Ok(())
    }

    fn observe_parameters<O: AmpOptimizer + 'static>(
        &self,
        observed: &mut Observed,
        watched: &Watched,
        optimizer: &mut O,
    ) -> Result<()> {
        let _own = OutsideRegions::enter();
        let handles: Vec<_> =
            self.parameters.iter().map(|kept| kept.parameter.shallow_clone()).collect();
        let identities = ffi::identities(&handles)?;
        let state = (optimizer as &mut dyn Any).downcast_mut::<Optimizer>();
        let state = state.map(Optimizer::state_dict).transpose()?;
        let state = state.map(|state| state.state).unwrap_or_default();
        for (kept, identity) in self.parameters.iter().zip(identities) {
            let name = &kept.name;
            let present = kept.parameter.f_grad()?;
            if !kept.is_half() {
                observed.dtypes.insert(name.clone(), kept.parameter.kind().into());
                if present.defined() {
                    observed.dtypes.insert(format!("{name}.grad"), present.kind().into());
                }
            }
            let entries = state.get(name);
            for (key, tensor) in entries.into_iter().flatten() {
                observed.dtypes.insert(format!("{name}.{key}"), tensor.kind().into());
            }
            observed.steps.insert(name.clone(), watched.steps.get(&identity).copied().unwrap_or(0));
            let seen = match watched.gradients.get(&identity) {
                Some(seen) => Some(seen.shallow_clone()),
                None => present.defined().then(|| widened(&present)).transpose()?,
            };
            match seen {
                None => drop(observed.without_gradient.insert(name.clone())),
                Some(seen) => {
                    if seen.f_any()?.f_int64_value(&[])? == 0 {
                        observed.zero_gradient.insert(name.clone());
                    }
                    observed.note_finite(&format!("{name}.grad"), &seen)?;
                    observed.values.push((BudgetQuantity::Gradient, name.clone(), seen));
                }
            }
            let master = entries.and_then(|entries| entries.get("master_param"));
            let after = widened(master.unwrap_or(&kept.parameter))?;
            let update = after.f_sub(&widened(&kept.numbers)?)?;
            if update.f_any()?.f_int64_value(&[])? == 0 {
                observed.unchanged.insert(name.clone());
            }
            observed.note_finite(name, &update)?;
            observed.values.push((BudgetQuantity::Update, name.clone(), update));
        }
        Ok(())
    }

    /// Whether every gradient that [`spoil_gradients`](Self::spoil_gradients) wrote to is still NaN.
    pub(super) fn is_spoilt(&self, observed: &Observed) -> bool {
        observed.is_skipped || observed.not_finite.iter().any(|name| name.ends_with(".grad"))
    }
}

impl Observed {
    fn note_finite(&mut self, name: &str, numbers: &Tensor) -> Result<()> {
        if !is_finite(numbers)? {
            self.not_finite.insert(name.to_owned());
        }
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The same copies were possible the other way round.
        drop(self.restore(Mode::Half));
    }
}
