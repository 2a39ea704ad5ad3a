//! Data-parallel training.

use std::any::Any;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use crate::autocast::first_dtype;
use crate::distributed::collectives::refuse_unusable;
use crate::distributed::data_parallel::records;
use crate::distributed::group::Comparison;
use crate::distributed::group::{LivingModel, ProcessGroup};
use crate::error::{DistributedError, Error, Result, VariableChange, ensure_defined};
use crate::ffi::distributed::{Reducer, ReducerOptions, unwritable};
use crate::ffi::{self, Gradient, gradients_drop, sizes};
use crate::optim::parameters::{Named, TrackedVariables};
use crate::panics;
use crate::scaler::{self, GradScaler};
use crate::variables::{named, variables};

/// Averages the gradients of a model over the ranks of a group while the backward pass runs, so that all ranks train
/// the same model on different data. Corresponds to `torch.nn.parallel.DistributedDataParallel`, and uses its engine,
/// c10d's `Reducer`: on the CPU the results are the same bit by bit. Each gradient is averaged in the dtype of its
/// parameter, even if an optimizer with master weights has converted it to f32.
///
/// Each rank makes its own model, loss and optimizer. Wrap the forward pass in [`forward`](Self::forward), and run the
/// backward pass with [`backward`](Self::backward), or [`backward_scaled`](Self::backward_scaled) if there is a scaler.
/// Everything else stays as it is on one device. The gradients of an infinite or NaN batch are infinite or NaN on all
/// ranks, so that the scalers of all ranks skip the same steps and keep the same scale.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::distributed::{DistributedDataParallel, ProcessGroup, Store};
/// use tch_amp::optim::Sgd;
/// use tch_amp::{GradScaler, try_autocast};
///
/// fn train(group: &ProcessGroup) -> tch_amp::Result<f64> {
///     let vs = nn::VarStore::new(Device::Cpu);
///     let net = nn::linear(vs.root(), 4, 1, Default::default());
///     let mut ddp = DistributedDataParallel::new(group, &vs)?;
///     let mut opt = Sgd::default().build(&vs, 0.1)?;
///     let mut scaler = GradScaler::new(Device::Cpu)?;
///     for _ in 0..3 {
///         opt.zero_grad()?;
///         let xs = Tensor::rand([8, 4], (Kind::Float, Device::Cpu)); // different data on each rank
///         let loss = try_autocast(Device::Cpu, || ddp.forward(|| net.forward(&xs).square().mean(Kind::Float)))?;
///         ddp.backward_scaled(&mut scaler, &loss)?;
///         scaler.step(&mut opt)?;
///         scaler.update()?;
///     }
///     Ok(net.ws.sum(Kind::Float).double_value(&[]))
/// }
///
/// let store = Store::in_process()?;
/// let weights: Vec<f64> = std::thread::scope(|scope| {
///     let rank = |rank| {
///         let store = &store;
///         scope.spawn(move || train(&ProcessGroup::new(store, rank, 2).unwrap()).unwrap())
///     };
///     let ranks = [rank(0), rank(1)];
///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
/// });
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct DistributedDataParallel {
    // Before the group, because it uses the group until it ends.
    reducer: Reducer,
    /// The ranks, of which only this model uses the connections.
    own: ProcessGroup,
    /// The group in which the ranks compare their passes.
    group: ProcessGroup,
    model: DistributedModel,
    _living: LivingModel,
    /// The number of the model in the group.
    number: usize,
    compare_passes: bool,
    broadcast_buffers: bool,
    /// Whether the next backward pass averages the gradients.
    syncs: bool,
    /// Whether the last forward pass was one whose gradients are averaged, so that buffers are broadcast in the next.
    synced_forward: bool,
    /// Whether nothing else has communicated over the group in the forward passes since the last backward pass; `None`
    /// if there were none.
    quiet_forward: Option<bool>,
    /// The dtype of the region of the last forward pass whose gradients are averaged; `None` in f32.
    dtype: Option<Kind>,
}

impl DistributedDataParallel {
    /// Wraps the variables of a `VarStore` with the default options: see [`DdpConfig::build`].
    ///
    /// # Errors
    ///
    /// As for [`DdpConfig::build`].
    pub fn new(group: &ProcessGroup, vs: &VarStore) -> Result<Self> {
        DdpConfig::default().build(group, vs)
    }

    fn with_options(group: &ProcessGroup, vs: &VarStore, options: &DdpConfig) -> Result<Self> {
        const NAME: &str = "DistributedDataParallel";
        let prepared = prepared(group, vs, options);
        let _order = group.begin();
        let call = |_: &_| format!("{NAME} with {options:?}");
        let (reducer_options, model) = group.compare_checked(NAME, prepared, call)?;
        model.compare(group)?;
        let all = model.parameters.iter().chain(&model.others);
        let all: Vec<_> = all.map(|(_, tensor)| tensor.shallow_clone()).collect();
        let (number, own) = group.for_model()?;
        no_grad(|| own.run(NAME, |group| group.broadcast_all(&all, 0)))?;
        let make = |group: &_| Reducer::new(group, &model.parameters, &reducer_options);
        Ok(Self {
            reducer: own.run(NAME, make)?,
            own,
            group: group.clone(),
            number,
            compare_passes: options.compare_passes,
            broadcast_buffers: options.broadcast_buffers && !model.buffers.is_empty(),
            model,
            _living: group.living_model(),
            syncs: true,
            synced_forward: true,
            quiet_forward: None,
            dtype: None,
        })
    }

    /// Returns the group.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Copies the buffers of rank 0 to the other ranks, runs a forward pass, and returns its result. As in PyTorch,
    /// buffers are not copied in the pass that follows one within [`no_sync`](Self::no_sync) or under `tch::no_grad`.
    /// Without gradients nothing else is communicated, so ranks may evaluate different numbers of batches if the model
    /// has no buffers or `broadcast_buffers` is off. Corresponds to calling the module in PyTorch.
    ///
    /// If `forward` panics and gradients were to be averaged, the other ranks get a [`DistributedError::Communication`]
    /// with its message, and neither the model nor the group can be used any more. The panic then continues. An `Err`
    /// that `forward` returns is a result like any other, which the other ranks do not hear of.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Parameter`] if variables have been added, cast, frozen, unfrozen or resized since this was
    /// made, or buffers that are copied;
    /// [`DistributedError::Mismatch`] if the other ranks do something else, where the pass communicates, or have such
    /// an error;
    /// [`DistributedError::Communication`] if a rank does not answer, or the previous backward pass has failed.
    pub fn forward<T>(&mut self, forward: impl FnOnce() -> T) -> Result<T> {
        const NAME: &str = "forward";
        let syncs = self.syncs;
        let broadcast = self.broadcast_buffers && self.synced_forward;
        let may_rebuild = self.check_variables().and_then(|()| self.reducer.may_rebuild());
        match may_rebuild {
            Ok(may_rebuild) if broadcast || may_rebuild => self.compare_pass(NAME, "")?,
            Ok(_) => {}
            // The others come to this pass or to the backward pass, unless neither communicates.
            Err(error) if broadcast || (syncs && records().unwrap_or(true)) => {
                return Err(self.refuse(NAME, error));
            }
            Err(error) => return Err(error),
        }
        let (reducer, buffers) = (&self.reducer, &self.model.buffers);
        let recorded = self.run(NAME, |group| {
            let recorded = reducer.before_forward(syncs)?;
            if broadcast {
                no_grad(|| group.broadcast_all(buffers, 0))?;
            }
            Ok(recorded)
        })?;
        self.synced_forward = syncs && recorded;
        let begun = self.group.begun();
        let device = self.model.device();
        let (result, dtype) = first_dtype(device, || catch_unwind(AssertUnwindSafe(forward)));
        if self.synced_forward {
            self.dtype = dtype;
        }
        let result = match result {
            // The others would wait for this one in the backward pass.
            Err(panic) if self.synced_forward => self.end_and_resume(NAME, panic),
            result => result.unwrap_or_else(|panic| resume_unwind(panic)),
        };
        let is_quiet = self.group.begun() == begun;
        self.quiet_forward = Some(is_quiet && self.quiet_forward != Some(false));
        Ok(result)
    }

    /// Runs the backward pass of a loss, and averages the gradients. Returns when all are averaged.
    ///
    /// As in PyTorch, a plain `loss.backward()` after [`forward`](Self::forward) averages them, too, unless
    /// `find_unused_parameters` is on. But then tch panics if a rank does not answer, the passes of the ranks are not
    /// compared, only the next forward pass notices a parameter that the loss does not depend on, and a scaler that
    /// refuses gradients of this rank alone goes on refusing.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an undefined loss, before the pass; the other ranks are told.
    /// [`DistributedError::Unused`] if the loss does not depend on a parameter, and `find_unused_parameters` is off.
    /// Ranks whose loss depends on it get a [`DistributedError::Communication`] with this cause;
    /// [`DistributedError::Repeated`] if custom functions run several backward passes of their own for a parameter;
    /// [`DistributedError::Mismatch`] if the other ranks do something else, or ran the forward pass in regions of
    /// another dtype. The gradients of the model are then those from before the call, but the pass may have run: begin
    /// again with the forward pass, and forget what the pass has added to gradients of other tensors. If the pass has
    /// failed as well, the model cannot be used any more;
    /// [`DistributedError::Communication`] if a rank does not answer, and if the backward pass fails on any rank,
    /// because the others then wait for it: all of them get the cause.
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_by(loss, || Ok(loss.f_backward()?))
    }

    /// Runs the backward pass of a loss that a scaler scales, as [`GradScaler::backward`] does, and averages the
    /// gradients.
    ///
    /// After a backward pass within [`no_sync`](Self::no_sync), the scaler refuses to unscale or to step the parameters
    /// of this model until their gradients have been averaged, and to update a scale that can change. Optimizers of
    /// other models can step. Models that accumulate over different numbers of batches need a scaler each.
    ///
    /// # Errors
    ///
    /// As for [`backward`](Self::backward) and [`GradScaler::backward`].
    pub fn backward_scaled(&mut self, scaler: &mut GradScaler, loss: &Tensor) -> Result<()> {
        let model: Arc<dyn scaler::Averaged> = self.model.averaged.clone();
        scaler.note_ranks(&model);
        if !self.syncs {
            return self.backward_by(loss, || scaler.backward(loss));
        }
        let scaled = scaler.scale(loss).map_err(|error| self.refuse("backward", error))?;
        self.backward_by(loss, || Ok(scaled.f_backward()?))
    }

    /// Runs `backward`, which does one backward pass of your own from `loss`, and averages the gradients. A second pass
    /// in it would add gradients of this rank alone to the averaged ones: sum several losses first.
    ///
    /// If `backward` fails or panics, the other ranks get a [`DistributedError::Communication`] with its message, and
    /// neither the model nor the group can be used any more. A panic then continues.
    ///
    /// # Errors
    ///
    /// As for [`backward`](Self::backward), and the errors of `backward`.
    pub fn backward_by(
        &mut self,
        loss: &Tensor,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        const NAME: &str = "backward";
        if !self.syncs {
            ensure_defined("loss", loss)?;
            self.model.averaged.set_alone(true);
            return backward();
        }
        ensure_defined("loss", loss).map_err(|error| self.refuse(NAME, error))?;
        let comparison = self.compare_backward(NAME)?;
        let reducer = &self.reducer;
        let was_alone = self.model.averaged.set_alone(true);
        self.run(NAME, |_| {
            let records = comparison.as_ref().map(|begun| &begun.records);
            let done = reducer.before_backward(loss, records).and_then(|()| backward());
            done.map_err(|error| self.explained(error, comparison.as_ref()))
        })?;
        if let Some(begun) = comparison
            && let Err(mismatch) = self.group.finish_comparison(&begun)
        {
            self.undo_backward()?;
            self.model.averaged.set_alone(was_alone);
            return Err(self.ended(NAME, mismatch));
        }
        if let Err(error) = reducer.after_backward() {
            let unused = self.unused(&error);
            self.own.report(&unused);
            self.own.await_reports();
            // Ranks whose loss depends on the parameters still wait for their gradients. The group can go on.
            self.own.close();
            self.own.await_reports();
            return Err(unused);
        }
        if let Some(index) = reducer.repeated()? {
            let name = self.parameter_name(index);
            return Err(DistributedError::Repeated { name }.into());
        }
        self.model.averaged.set_alone(false);
        Ok(())
    }

    /// Runs `iteration`, whose backward passes accumulate the gradients of this rank alone. The next backward pass
    /// outside averages the sum. Run the forward pass inside, too: the gradients of a forward pass outside are averaged
    /// wherever its backward pass runs. Corresponds to `DistributedDataParallel.no_sync()`.
    pub fn no_sync<T>(&mut self, iteration: impl FnOnce(&mut Self) -> T) -> T {
        let was = std::mem::replace(&mut self.syncs, false);
        let within = Within { ddp: self, was };
        iteration(within.ddp)
    }

    /// Returns an error unless all ranks are about to run this pass.
    fn compare_pass(&self, pass: &'static str, after: &str) -> Result<()> {
        let compared = self.begin_comparison(pass, after).and_then(|begun| {
            begun.map_or(Ok(()), |begun| self.group.finish_comparison(&begun).map(drop))
        });
        compared.map_err(|error| self.ended(pass, error))
    }

    /// Returns the error of a pass that this rank does not run, after telling it to the others, which wait for this
    /// one.
    fn refuse(&self, pass: &'static str, error: Error) -> Error {
        if !self.compare_passes {
            return self.ended(pass, error);
        }
        let _order = self.group.begin();
        self.group.refuse(pass, error)
    }

    /// Compares the backward passes that the ranks are about to run. Of a pass that can be undone, only the
    /// communication needs to wait for the comparison, which has begun and is returned. It can be undone unless
    /// something else may communicate in it: another model, or a function such as that of `SyncBatchNorm`, which has
    /// communicated in the forward pass as well.
    fn compare_backward(&mut self, pass: &'static str) -> Result<Option<Comparison>> {
        let is_quiet = self.quiet_forward.take() == Some(true);
        let is_alone = is_quiet && self.group.living_models() == 1;
        // Gradients of all precisions are alike, so that nothing else would tell.
        let after = match self.dtype.take() {
            None => "",
            Some(Kind::Half) => " after a forward pass in fp16",
            Some(_) => " after a forward pass in bf16",
        };
        if is_alone && self.reducer.can_undo()? {
            return self.begin_comparison(pass, after);
        }
        self.compare_pass(pass, after).map(|()| None)
    }

    /// Begins to compare a pass of the ranks, and what came before it.
    fn begin_comparison(&self, pass: &'static str, after: &str) -> Result<Option<Comparison>> {
        if !self.compare_passes {
            return Ok(None);
        }
        let call = format!("the {pass} pass of DistributedDataParallel {}{after}", self.number);
        let _order = self.group.begin();
        self.group.begin_comparison(pass, &call, false).map(Some)
    }

    /// The error of a backward pass: that of its comparison if that has failed, too. Ranks that fail there report it
    /// under the name of the group, not of the model.
    fn explained(&self, error: Error, comparison: Option<&Comparison>) -> Error {
        let Some(Err(failed)) = comparison.map(|begun| self.group.finish_comparison(begun)) else {
            return error;
        };
        // The reducer waits for the rest of the pass for ever.
        self.own.close();
        let _kept = self.drop_gradients();
        failed
    }

    /// Removes the gradients of a backward pass that has averaged nothing. No parameter had one before.
    fn undo_backward(&self) -> Result<()> {
        self.drop_gradients()?;
        self.reducer.after_backward().map_err(|error| self.unused(&error))
    }

    fn drop_gradients(&self) -> Result<()> {
        gradients_drop(self.model.parameters.iter().map(|(_, parameter)| parameter))
    }

    /// Runs a part of a pass that communicates. After one has failed, neither the group nor the connections of the
    /// model can be used any more.
    fn run<T>(
        &self,
        pass: &'static str,
        call: impl FnOnce(&ffi::distributed::Group) -> Result<T>,
    ) -> Result<T> {
        let handle = self.own.handle(pass)?;
        let result = catch_unwind(AssertUnwindSafe(|| call(&handle)));
        drop(handle);
        match result {
            Ok(result) => result.map_err(|error| self.ended(pass, error)),
            Err(panic) => self.end_and_resume(pass, panic),
        }
    }

    /// Ends the group, because the other ranks would wait for this one, and goes on with a panic of the program.
    fn end_and_resume(&self, pass: &'static str, panic: Box<dyn Any + Send>) -> ! {
        let message = panics::message(panic.as_ref());
        if self.end(&format_args!("the {pass} pass panicked: {message}")) {
            self.own.await_reports();
        }
        resume_unwind(panic)
    }

    /// The error of a pass that has failed. It has ended the group, unless the ranks disagree before they communicate.
    fn ended(&self, pass: &'static str, error: Error) -> Error {
        if matches!(error, Error::Distributed(DistributedError::Mismatch { .. })) {
            return error;
        }
        let was_open = self.end(&error);
        if matches!(error, Error::Torch(_)) {
            return self.own.failure(pass, error);
        }
        if was_open {
            self.own.await_reports();
        }
        error
    }

    /// Closes the connections of the model and the group, if they are open, and tells the other ranks why.
    fn end(&self, cause: &dyn Display) -> bool {
        let groups = [&self.own, &self.group].into_iter().filter(|group| !group.is_closed());
        let open: Vec<_> = groups.collect();
        // Before either is closed, because the ranks that notice it look for the cause.
        open.iter().for_each(|group| group.report(cause));
        open.iter().for_each(|group| group.close());
        !open.is_empty()
    }

    fn check_variables(&self) -> Result<()> {
        let parameter = |name: &str, change: VariableChange| {
            Err(DistributedError::Parameter { name: name.to_owned(), change }.into())
        };
        if self.model.has_more() {
            return parameter("a variable", VariableChange::Added);
        }
        let unfrozen = self.model.others.iter().find(|(_, tensor)| tensor.requires_grad());
        if let Some((name, _)) = unfrozen {
            return parameter(name, VariableChange::Unfrozen);
        }
        if self.broadcast_buffers
            && let Some((name, change)) = self.model.changed_buffer()?
        {
            return parameter(name, change);
        }
        let Some((index, change)) = self.reducer.changed()? else { return Ok(()) };
        parameter(&self.parameter_name(index), change)
    }

    fn parameter_name(&self, index: usize) -> String {
        let name = self.model.parameters.get(index).map_or("a parameter", |(name, _)| name);
        name.to_owned()
    }

    /// The error for parameters without gradients, which libtorch's message names by their indices.
    fn unused(&self, error: &Error) -> Error {
        let message = error.to_string();
        let begin = "Parameter indices which did not receive grad for rank ";
        let list = message.split(begin).nth(1).unwrap_or_default();
        let list = list.split_once(':').map_or("", |(_, list)| list);
        let indices = list.split([' ', ',', '\n']).filter(|word| !word.is_empty());
        let indices = indices.map_while(|word| word.trim_end_matches('.').parse::<usize>().ok());
        let named = indices.filter_map(|index| self.model.parameters.get(index));
        let names: Vec<_> = named.map(|(name, _)| name.clone()).collect();
        DistributedError::Unused { rank: self.group.rank(), names, message }.into()
    }
}

/// Checks the arguments of a distributed model.
fn prepared(
    group: &ProcessGroup,
    vs: &VarStore,
    options: &DdpConfig,
) -> Result<(ReducerOptions, DistributedModel)> {
    let reducer_options = options.to_ffi()?;
    let model = DistributedModel::new(vs)?;
    let refuse = |problem| Err(Error::InvalidArgument { name: "vs", problem });
    if model.parameters.is_empty() {
        return refuse("has no variable that requires gradients".to_owned());
    }
    for (name, tensor) in model.parameters.iter().chain(&model.others) {
        match refuse_unusable(group, tensor) {
            Err(Error::InvalidArgument { problem, .. }) => {
                return refuse(format!("has the variable {name:?}, which {problem}"));
            }
            other => other?,
        }
    }
    Ok((reducer_options, model))
}

/// Ends [`DistributedDataParallel::no_sync`], after a panic as well.
struct Within<'a> {
    ddp: &'a mut DistributedDataParallel,
    was: bool,
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.ddp.syncs = self.was;
    }
}

/// The parameters of a distributed model, which keeps them alive for longer than this, and their identities.
#[derive(Debug)]
pub(super) struct Averaged {
    identities: Arc<HashSet<usize>>,
    /// Locked, because threads cannot share tensors.
    parameters: Mutex<Vec<Tensor>>,
    /// Whether gradients of this rank alone have been accumulated.
    is_alone: AtomicBool,
}

/// Those of all distributed models of the process.
static MODELS: Mutex<Vec<Weak<HashSet<usize>>>> = Mutex::new(Vec::new());

impl Averaged {
    pub(super) fn note(parameters: &[(String, Tensor)]) -> Result<Self> {
        let tensors: Vec<_> = parameters.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
        let identities: Arc<HashSet<_>> =
            Arc::new(ffi::identities(&tensors)?.into_iter().collect());
        let mut models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
        models.retain(|model| model.strong_count() > 0);
        models.push(Arc::downgrade(&identities));
        let parameters = Mutex::new(tensors);
        Ok(Self { identities, parameters, is_alone: AtomicBool::new(false) })
    }
}

impl Averaged {
    /// Notes whether gradients of this rank alone have been accumulated, and returns whether they had before.
    pub(super) fn set_alone(&self, is_alone: bool) -> bool {
        self.is_alone.swap(is_alone, Ordering::Relaxed)
    }

    /// Returns whether there are gradients. If they cannot be inspected, there may be some.
    fn has_gradients(&self) -> bool {
        let parameters = self.parameters.lock().unwrap_or_else(PoisonError::into_inner);
        let gradients = ffi::gradients_inspect(&parameters);
        gradients.map_or(true, |gradients| gradients.iter().any(Gradient::exists))
    }
}

impl scaler::Averaged for Averaged {
    fn is_alone(&self) -> bool {
        // Gradients that were accumulated and then dropped are no part of a sum.
        self.is_alone.load(Ordering::Relaxed) && self.has_gradients()
    }

    fn has_any(&self, identities: &[usize]) -> bool {
        identities.iter().any(|identity| self.identities.contains(identity))
    }
}

/// Returns whether a distributed model averages the gradients of any of these parameters.
pub(crate) fn any_is_averaged(parameters: &[Tensor]) -> Result<bool> {
    let models: Vec<_> = {
        let models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
        models.iter().filter_map(Weak::upgrade).collect()
    };
    if models.is_empty() {
        return Ok(false);
    }
    let identities = ffi::identities(parameters)?;
    Ok(identities.iter().any(|identity| models.iter().any(|model| model.contains(identity))))
}

/// The model on which the ranks have to agree.
#[derive(Debug)]
pub(super) struct DistributedModel {
    // Before the parameters, because it counts on their being alive.
    pub(super) averaged: Arc<Averaged>,
    store: TrackedVariables,
    /// How many names the variables had when the ranks compared them.
    names: usize,
    /// The variables that require gradients, in the order in which they were added.
    pub(super) parameters: Vec<(String, Tensor)>,
    /// All others: the frozen ones, and then the buffers in the order of their names. They are broadcast once.
    pub(super) others: Vec<(String, Tensor)>,
    /// The buffers among these, which are broadcast before each forward pass.
    pub(super) buffers: Vec<Tensor>,
    /// The dtypes, devices and shapes of the buffers when the ranks compared them.
    compared: Vec<(Kind, Device, Vec<i64>)>,
}

/// Returns the properties that have to be the same on all ranks for a broadcast.
fn form(tensor: &Tensor) -> Result<(Kind, Device, Vec<i64>)> {
    Ok((tensor.f_kind()?, tensor.device(), sizes(tensor)?))
}

/// The place of a device in a list, which it is added to.
fn place_of(devices: &mut Vec<Device>, device: Device) -> usize {
    devices.iter().position(|known| *known == device).unwrap_or_else(|| {
        devices.push(device);
        devices.len() - 1
    })
}

impl DistributedModel {
    /// The device of the first parameter.
    pub(super) fn device(&self) -> Device {
        self.parameters.first().map_or(Device::Cpu, |(_, parameter)| parameter.device())
    }

    pub(super) fn new(vs: &VarStore) -> Result<Self> {
        let mut store = TrackedVariables::new(vs);
        let (added, count) = store.added(&HashSet::new())?;
        store.taken(count);
        let names = store.named();
        let mut rest: BTreeMap<_, _> = named(variables(vs)?).into_iter().collect();
        let (mut parameters, mut others) = (Vec::new(), Vec::new());
        for Named { names, tensor, .. } in added {
            let name = names.map(|names| names.first).unwrap_or_default();
            drop(rest.remove(&name));
            let list = if tensor.requires_grad() { &mut parameters } else { &mut others };
            list.push((name, tensor));
        }
        let buffers: Vec<_> = rest.values().map(Tensor::shallow_clone).collect();
        let compared = buffers.iter().map(form).collect::<Result<_>>()?;
        others.extend(rest);
        let averaged = Arc::new(Averaged::note(&parameters)?);
        Ok(Self { averaged, store, names, parameters, others, buffers, compared })
    }

    /// Returns a buffer that can no longer be broadcast, by its name, and what has happened to it.
    pub(super) fn changed_buffer(&self) -> Result<Option<(&str, VariableChange)>> {
        let names = self.others.iter().skip(self.others.len() - self.buffers.len());
        let names: Vec<_> = names.map(|(name, _)| name.as_str()).collect();
        for ((buffer, compared), name) in self.buffers.iter().zip(&self.compared).zip(&names) {
            let (kind, device, size) = form(buffer)?;
            let change = match compared {
                _ if buffer.is_sparse() => VariableChange::MadeSparse,
                (was, ..) if *was != kind => VariableChange::Cast,
                (_, was, _) if *was != device => VariableChange::Moved,
                (.., was) if *was != size => VariableChange::Reshaped,
                _ => continue,
            };
            return Ok(Some((name, change)));
        }
        let unwritable = unwritable(&self.buffers)?.and_then(|index| names.get(index));
        Ok(unwritable.map(|name| (*name, VariableChange::Expanded)))
    }

    /// Returns whether variables were added since.
    pub(super) fn has_more(&self) -> bool {
        self.store.has_more() || self.store.named() > self.names
    }

    /// One line for each variable. The devices are counted, because those of two ranks may have different numbers.
    fn lines(&self) -> String {
        let mut devices = Vec::new();
        let mut line = |what: &str, (name, tensor): &(String, Tensor)| {
            let place = match place_of(&mut devices, tensor.device()) {
                0 => String::new(),
                place => format!(" on device {} of the model", place + 1),
            };
            format!("{what} {name:?}, {:?} {:?}{place}\n", tensor.kind(), tensor.size())
        };
        let parameters: String =
            self.parameters.iter().map(|named| line("the parameter", named)).collect();
        let others = self.others.iter().map(|named| line("the buffer or frozen parameter", named));
        parameters + &others.collect::<String>()
    }

    /// Returns an error unless all ranks have the same model. It names the first difference.
    pub(super) fn compare(&self, group: &ProcessGroup) -> Result<()> {
        let lines = self.lines();
        let hash = xxhash_rust::xxh3::xxh3_64(lines.as_bytes());
        group.compare_lines("DistributedDataParallel of a model", Ok(hash), || lines)
    }
}

/// The options of [`DistributedDataParallel`], with PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DdpConfig {
    /// Whether buffers, such as the statistics of BatchNorm, are overwritten by those of rank 0 before a forward pass;
    /// `true` by default.
    pub broadcast_buffers: bool,
    /// The size in MiB of the buckets in which gradients are communicated; 25 by default, with a first one of 1 MiB.
    pub bucket_cap_mb: Option<f64>,
    /// Whether the loss may depend on different parameters in each iteration. Finding those that it does not depend on
    /// takes time in every iteration; `false` by default.
    pub find_unused_parameters: bool,
    /// Whether the gradients are views of the buckets, which saves the memory of the gradients, and a copy; `false` by
    /// default.
    pub gradient_as_bucket_view: bool,
    /// The half-precision dtype in which gradients are communicated, which halves the traffic of f32 parameters; `None`
    /// by default.
    /// Corresponds to the communication hooks `fp16_compress_hook` and `bf16_compress_hook`.
    pub compression: Option<Kind>,
    /// Whether gradients are divided by the number of ranks before they are converted. PyTorch's hooks convert first,
    /// so that fp16 overflows if the scaled gradient of a rank exceeds 65504; `false` by default, which gives PyTorch's
    /// bits.
    pub divide_first: bool,
    /// Whether the ranks compare which model's pass they are about to run, before it communicates; `true` by default.
    /// If they disagree, each gets an error. Without the comparison they would wait for each other, or gloo would abort
    /// the process. It costs a message of 256 bytes in each backward pass, and in each forward pass that communicates.
    /// A backward pass computes while the ranks compare, on a GPU until the first bucket is full, if it can be undone:
    /// no parameter has a gradient before it, it is not the first one, and neither another model nor a function of this
    /// one, such as that of [`SyncBatchNorm`](crate::distributed::SyncBatchNorm), uses the group. Any other pass waits
    /// until they have compared. A function of your own that uses the group in its backward pass has to use it in its
    /// forward pass as well, or to turn the comparison off. PyTorch compares only with
    /// `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
    pub compare_passes: bool,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            broadcast_buffers: true,
            bucket_cap_mb: None,
            find_unused_parameters: false,
            gradient_as_bucket_view: false,
            compression: None,
            divide_first: false,
            compare_passes: true,
        }
    }
}

impl DdpConfig {
    /// Distributes a model: from now on, the gradients of all variables of `vs` that require gradients are averaged
    /// over the ranks, which all call this. The parameters and buffers of rank 0 are copied to the other ranks. The
    /// model communicates through connections of its own, so other uses of the group do not disturb its passes.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Mismatch`](crate::distributed::DistributedError::Mismatch) if the options of the ranks
    /// differ, or the names, shapes or dtypes of their variables, or how these are divided among devices, with the
    /// first difference;
    /// [`DistributedError::Communication`](crate::distributed::DistributedError::Communication) if a rank does not
    /// answer;
    /// [`Error::InvalidArgument`] for an option that cannot be used, for a `VarStore` without trainable variables, and
    /// for a variable that cannot be sent, such as an expanded or a complex one.
    pub fn build(&self, group: &ProcessGroup, vs: &VarStore) -> Result<DistributedDataParallel> {
        DistributedDataParallel::with_options(group, vs, self)
    }

    pub(super) fn to_ffi(self) -> Result<ReducerOptions> {
        let bucket_bytes = match self.bucket_cap_mb {
            None => 0,
            Some(size) if size > 0.0 && size <= 1e6 => ((size * 1048576.0) as i64).max(1),
            Some(size) => {
                let rule = "more than 0 and at most 1000000";
                return Err(Error::out_of_range("bucket_cap_mb", size, rule));
            }
        };
        let compression = match self.compression {
            None => ffi::distributed::Compression::None,
            Some(Kind::Half) => ffi::distributed::Compression::Fp16,
            Some(Kind::BFloat16) => ffi::distributed::Compression::Bf16,
            Some(kind) => {
                let problem = format!("is {kind:?}, but must be Half or BFloat16");
                return Err(Error::InvalidArgument { name: "compression", problem });
            }
        };
        Ok(ReducerOptions {
            bucket_bytes,
            compression,
            divide_first: self.divide_first,
            find_unused_parameters: self.find_unused_parameters,
            gradient_as_bucket_view: self.gradient_as_bucket_view,
        })
    }
}
