//! The micro-batches of one step.

use std::fmt;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
#[cfg(feature = "distributed")]
use crate::distributed::{ProcessGroup, ReduceOp, any_is_averaged};
use crate::error::{Error, Result, ensure, ensure_defined};
use crate::ffi::{self, FoundInf, OutsideRegions, Unscaling};
use crate::gradients::{Gradients, Plan, StashedGradients, overflow};
use crate::optim::AmpOptimizer;
use crate::variables::{Variable, each_once};
use crate::{GradScaler, capture};

/// The micro-batches whose gradients are accumulated for one step, with the weight of each. PyTorch has no counterpart;
/// its loops multiply the losses by hand.
///
/// Make a new one for each step: the last window of an epoch then has as many weights as there are micro-batches left.
/// Neither `update` nor `zero_grad` may be called while a window lasts. Only [`dropped`](Self::dropped) synchronizes,
/// and saving a window in the middle, [`with_gradients`](Self::with_gradients).
#[derive(Debug)]
pub struct Accumulation {
    /// The factors by which the mean losses of the micro-batches are multiplied.
    pub(super) shares: Vec<f64>,
    pub(super) next: usize,
    pub(super) kept: Kept,
}

impl Accumulation {
    /// Makes a window of micro-batches with these weights: their numbers of tokens or samples, over which their losses
    /// are means. Padding does not count. A weight of zero is that of a micro-batch without tokens.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if a weight is negative or not finite, or if all are zero.
    pub fn of_weights(weights: impl AsRef<[f64]>) -> Result<Self> {
        let weights = weights.as_ref();
        check(weights)?;
        let total: f64 = weights.iter().sum();
        ensure("the sum of the weights", total, total > 0.0 && total.is_finite(), "more than 0")?;
        Ok(Self::with_total(weights, total))
    }

    /// Makes a window of micro-batches of the same size.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if there is no micro-batch.
    pub fn of_equal(micro_batches: usize) -> Result<Self> {
        Self::of_weights(vec![1.0; micro_batches])
    }

    /// Makes a window whose tokens count the same on all ranks of a group, however many each rank has. The gradients of
    /// `DistributedDataParallel` are means over the ranks, which this takes into account. Communicates, so all ranks
    /// must call it. They need the same number of micro-batches, because `DistributedDataParallel` compares their
    /// passes: a rank with fewer runs further ones with a weight of zero, on any batch with a finite loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`], on all ranks, if a weight of any of them is negative or not finite, or if all are
    /// zero; the errors of [`ProcessGroup::all_reduce`].
    #[cfg(feature = "distributed")]
    pub fn of_weights_over(group: &ProcessGroup, weights: impl AsRef<[f64]>) -> Result<Self> {
        let weights = weights.as_ref();
        // A rank whose weights are refused still takes part, so that the others do not wait for it.
        let checked = check(weights);
        let sum: f64 = if checked.is_ok() { weights.iter().sum() } else { f64::NAN };
        let mut total = ffi::number_new(sum, Kind::Double, Device::Cpu)?;
        group.all_reduce(&mut total, ReduceOp::Sum)?;
        checked?;
        let total = {
            let _own = ffi::OutsideRegions::enter();
            total.f_double_value(&[])?
        };
        let holds = total > 0.0 && total.is_finite();
        ensure("the sum of the weights of all ranks", total, holds, "more than 0 and finite")?;
        Ok(Self::with_total(weights, total / group.size() as f64))
    }

    fn with_total(weights: &[f64], total: f64) -> Self {
        let shares = weights.iter().map(|weight| weight / total).collect();
        Self { shares, next: 0, kept: Kept::default() }
    }

    /// Returns the number of micro-batches.
    pub fn micro_batches(&self) -> usize {
        self.shares.len()
    }

    /// Returns the number of micro-batches that have been taken: the index of the next one.
    pub fn taken(&self) -> usize {
        self.next
    }

    /// Returns whether the next micro-batch is the last one, whose backward pass is not in a `no_sync` of
    /// `DistributedDataParallel`.
    pub fn is_last(&self) -> bool {
        self.next + 1 == self.shares.len()
    }

    /// Returns whether all micro-batches have been taken, so that the step is due.
    pub fn is_complete(&self) -> bool {
        self.next == self.shares.len()
    }

    /// Multiplies the mean loss of the next micro-batch by its share of the window, in f32, or in f64 for a loss in
    /// f64. For loops that run the backward pass themselves, such as
    /// `ddp.backward_scaled(&mut scaler, &window.weigh(&loss)?)`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a loss that is not one floating-point number, for one more than the window has,
    /// and after [`backward_or_drop`](Self::backward_or_drop), which must then take all micro-batches of the window.
    pub fn weigh(&mut self, loss: &Tensor) -> Result<Tensor> {
        self.refuse_mixing(self.kept.batches() == 0)?;
        let weighed = self.weighed(loss)?;
        // Not only from the second on: tch zeroes gradients in place, which leaves them in one memory.
        ffi::gradients_separate_leaves(&weighed)?;
        self.advance();
        Ok(weighed)
    }

    fn weighed(&self, loss: &Tensor) -> Result<Tensor> {
        let problem = |problem: String| Error::InvalidArgument { name: "loss", problem };
        let Some(&share) = self.shares.get(self.next) else {
            let all = self.shares.len();
            return Err(problem(format!(
                "is one more than the {all} of the window; begin a new one"
            )));
        };
        ensure_defined("loss", loss)?;
        let kind = match loss.f_kind()? {
            Kind::Double => Kind::Double,
            Kind::Float | Kind::Half | Kind::BFloat16 => Kind::Float,
            other => {
                return Err(problem(format!("is {other:?}, but must be a floating-point number")));
            }
        };
        let sizes = ffi::sizes(loss)?;
        if ffi::elements(&sizes) != 1 {
            return Err(problem(format!("is {sizes:?}, but must be one number")));
        }
        let factor = ffi::number_new(share, kind, Device::Cpu)?;
        ffi::scaled(loss, &factor)
    }

    /// Goes on to the next micro-batch, and tells the graph of the iteration, if there is one, whether the window began
    /// with this one, and whether it is complete.
    fn advance(&mut self) {
        let is_begun = self.next == 0;
        self.next += 1;
        capture::note_window(is_begun, self.is_complete());
    }

    /// Returns an error unless [`backward_or_drop`](Self::backward_or_drop) took all micro-batches or none. If it left
    /// one out, those that other calls took would have the wrong weights.
    fn refuse_mixing(&self, same: bool) -> Result<()> {
        if same {
            return Ok(());
        }
        let problem = "mixes `backward_or_drop` with other calls; use it for all micro-batches of a window or for none";
        Err(Error::InvalidArgument { name: "the window", problem: problem.to_owned() })
    }

    /// Runs the backward pass of the next micro-batch, whose loss is the mean over its tokens or samples.
    ///
    /// # Errors
    ///
    /// The same as [`weigh`](Self::weigh) and [`GradScaler::backward`]. The window then still waits for this
    /// micro-batch.
    pub fn backward(&mut self, scaler: &mut GradScaler, loss: &Tensor) -> Result<()> {
        self.refuse_mixing(self.kept.batches() == 0)?;
        let weighed = self.weighed(loss)?;
        scaler.backward(&weighed)?;
        self.advance();
        Ok(())
    }

    /// Runs the backward pass of the next micro-batch like [`backward`](Self::backward), but leaves its gradients out
    /// if any of them is infinite or NaN. After the last micro-batch the gradients are those of the others alone, with
    /// their weights in proportion. [`dropped`](Self::dropped) says which ones were left out.
    ///
    /// If none is left, the gradients are infinite or NaN, and the scaler skips the step and lowers its scale. (A
    /// disabled scaler skips it only in [`step_unless_spike`](GradScaler::step_unless_spike).) With a scaler in fp16, a
    /// micro-batch is also left out if its gradients overflow only because of the scale, which stays as it is until all
    /// micro-batches of a window overflow.
    ///
    /// Gradients that are there from before an update of the scale get the present scale first.
    ///
    /// The decision is made on the device. It takes one more pass over the gradients, and for each micro-batch but the
    /// first, memory for a second set of them.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for an optimizer of a `DistributedDataParallel` model, whose ranks would leave out
    /// different micro-batches; with [`weigh`](Self::weigh) instead, all ranks skip a window that is not finite.
    /// The same as [`backward`](Self::backward), and [`Error::InvalidArgument`] after micro-batches that another call
    /// took, and for an optimizer that has been unscaled and not stepped; the errors of
    /// [`unscale_`](GradScaler::unscale_) for gradients that are not supported, such as sparse ones, and for a sum of
    /// gradients of two scales.
    pub fn backward_or_drop(
        &mut self,
        scaler: &mut GradScaler,
        optimizer: &dyn AmpOptimizer,
        loss: &Tensor,
    ) -> Result<()> {
        self.refuse_mixing(self.kept.batches() == self.next)?;
        refuse_averaged(optimizer)?;
        let weighed = self.weighed(loss)?;
        let (share, is_last) = (self.shares[self.next], self.is_last());
        let aside = scaler.set_aside(optimizer)?;
        let parameters = optimizer.parameters().into_owned();
        let done = self.kept.backward(optimizer, share, is_last, || scaler.backward(&weighed));
        scaler.put_back(aside, &parameters, done.is_ok());
        done?;
        self.advance();
        Ok(())
    }

    /// Returns which micro-batches [`backward_or_drop`](Self::backward_or_drop) has left out, from 0 on. Synchronizes
    /// on a GPU.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the answers cannot be read from the device.
    pub fn dropped(&self) -> Result<Vec<usize>> {
        let answers = self.kept.answers()?.into_iter().enumerate();
        Ok(answers.filter_map(|(index, dropped)| dropped.then_some(index)).collect())
    }
}

/// Returns an error for parameters whose gradients are averaged over ranks.
#[cfg(feature = "distributed")]
fn refuse_averaged(optimizer: &dyn AmpOptimizer) -> Result<()> {
    if !any_is_averaged(optimizer.parameters().as_slice())? {
        return Ok(());
    }
    let problem = "has parameters of a DistributedDataParallel model, whose ranks would leave out different \
        micro-batches; use `ddp.backward_scaled(&mut scaler, &window.weigh(&loss)?)`, and the scalers of all ranks skip \
        the window";
    Err(Error::InvalidArgument { name: "optimizer", problem: problem.to_owned() })
}

#[cfg(not(feature = "distributed"))]
fn refuse_averaged(_: &dyn AmpOptimizer) -> Result<()> {
    Ok(())
}

pub(super) fn check(weights: &[f64]) -> Result<()> {
    for &weight in weights {
        let holds = weight >= 0.0 && weight.is_finite();
        ensure("a weight", weight, holds, "finite and at least 0")?;
    }
    Ok(())
}

/// The micro-batches of `backward_or_drop` so far, and which of them were left out.
#[derive(Debug, Default)]
pub(super) struct Kept {
    batches: Vec<Batch>,
}

/// A micro-batch: its share of the window, and for each device whether its gradients were not finite.
#[derive(Debug)]
struct Batch {
    share: f64,
    flags: Vec<FoundInf>,
}

impl Kept {
    /// Makes what a checkpoint has: the shares of the micro-batches, and which of them were left out.
    pub(super) fn resumed(batches: impl IntoIterator<Item = (f64, bool)>) -> Result<Self> {
        let batches = batches.into_iter().map(|(share, dropped)| {
            let tensor = ffi::number_new(f64::from(dropped), Kind::Float, Device::Cpu)?;
            Ok(Batch { share, flags: vec![FoundInf { tensor, host: Some(dropped) }] })
        });
        Ok(Self { batches: batches.collect::<Result<_>>()? })
    }

    /// The number of micro-batches that had a backward pass here.
    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Runs a backward pass, and leaves its gradients out if one is not finite. On failure the gradients are as before.
    pub(super) fn backward(
        &mut self,
        optimizer: &dyn AmpOptimizer,
        share: f64,
        is_last: bool,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let earlier = StashedGradients::from(optimizer.parameters().into_owned())?;
        backward()?;
        let flags = found(optimizer)?;
        let batch = Batch { share, flags };
        self.add(&batch, optimizer, &earlier, is_last)?;
        earlier.settle();
        self.batches.push(batch);
        Ok(())
    }

    /// Adds the gradients of a micro-batch to the earlier ones, unless one is not finite. The earlier ones are not
    /// written to before the last call, which changes all gradients or none.
    fn add(
        &self,
        batch: &Batch,
        optimizer: &dyn AmpOptimizer,
        earlier: &StashedGradients,
        is_last: bool,
    ) -> Result<()> {
        match overflow(&batch.flags) {
            Some(false) => {}
            // If nothing is left, the scaler has to see why.
            Some(true) if is_last && self.all_are_known_to_be(true, batch) => return Ok(()),
            Some(true) => ffi::gradients_drop(earlier.parameters())?,
            None => {
                // They are zeroed in place, and their memory may be that of a weight.
                ffi::gradients_separate(earlier.parameters())?;
                batch.clear_if_not_finite(earlier.parameters())?;
            }
        }
        earlier.add()?;
        match is_last && !self.all_are_known_to_be(false, batch) {
            true => self.reweigh(batch, optimizer),
            false => Ok(()),
        }
    }

    /// All micro-batches, of which `last` has not been recorded yet.
    fn all<'a>(&'a self, last: &'a Batch) -> impl Iterator<Item = &'a Batch> {
        self.batches.iter().chain([last])
    }

    /// Returns whether the host knows that all micro-batches were left out, or that none was.
    fn all_are_known_to_be(&self, dropped: bool, last: &Batch) -> bool {
        self.all(last).all(|batch| overflow(&batch.flags) == Some(dropped))
    }

    /// Divides the gradients by the share of the window that was kept. It is exactly one if nothing was left out, and
    /// zero if everything was, which makes the gradients NaN.
    fn reweigh(&self, last: &Batch, optimizer: &dyn AmpOptimizer) -> Result<()> {
        let mut gradients = gradients_of(optimizer)?;
        gradients.separate()?;
        let plan = Plan::new(&gradients, true)?;
        let _own = OutsideRegions::enter();
        let first = gradients.parameters().first();
        let device = first.map_or(Device::Cpu, Tensor::device);
        let mut total = ffi::number_new(0.0, Kind::Float, device)?;
        let mut kept = total.f_zeros_like()?;
        for Batch { share, flags } in self.all(last) {
            let share = ffi::number_new(*share, Kind::Float, device)?;
            total = total.f_add(&share)?;
            kept = kept.f_add(&share.f_mul(&any(flags, device)?.f_logical_not()?)?)?;
        }
        let scale = kept.f_div(&total)?;
        let unscaled = plan.unscale(gradients.parameters(), &scale, Unscaling::new(false, false));
        unscaled.map(drop).map_err(|interrupted| interrupted.error)
    }

    /// Returns whether each micro-batch was left out. Synchronizes on a GPU.
    pub(super) fn answers(&self) -> Result<Vec<bool>> {
        let _own = OutsideRegions::enter();
        let answer = |Batch { flags, .. }: &Batch| match overflow(flags) {
            Some(found) => Ok(found),
            None => Ok(any(flags, Device::Cpu)?.f_int64_value(&[])? != 0),
        };
        self.batches.iter().map(answer).collect()
    }
}

impl Batch {
    /// Replaces the gradients by zeros, where they are, if this micro-batch is not finite.
    fn clear_if_not_finite(&self, parameters: &[Tensor]) -> Result<()> {
        let _own = OutsideRegions::enter();
        for parameter in parameters {
            let mut gradient = parameter.f_grad()?;
            if gradient.defined() {
                let is_bad = any(&self.flags, gradient.device())?;
                // The host reads the number, for which it would wait if it were on the device.
                let zero = ffi::number_new(0.0, gradient.f_kind()?, Device::Cpu)?;
                let _cleared = gradient.f_masked_fill_tensor_(&is_bad, &zero)?;
            }
        }
        Ok(())
    }
}

fn gradients_of(optimizer: &dyn AmpOptimizer) -> Result<Gradients<'_>> {
    let names = Box::new(|index, _| optimizer.parameter_name(index));
    Gradients::of(optimizer.parameters(), names)
}

/// Returns whether any gradient is not finite, for each device.
fn found(optimizer: &dyn AmpOptimizer) -> Result<Vec<FoundInf>> {
    let gradients = gradients_of(optimizer)?;
    let plan = Plan::new(&gradients, true)?;
    let one = ffi::number_new(1.0, Kind::Float, Device::Cpu)?;
    Ok(plan.check(gradients.parameters(), &one, false)?.found)
}

/// Returns whether any of the flags is set, as a boolean tensor on a device.
fn any(flags: &[FoundInf], device: Device) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let mut any = ffi::number_new(0.0, Kind::Float, device)?;
    for flag in flags {
        let flag = ffi::number_on(&flag.tensor, device, Kind::Float)?.f_view_as(&any)?;
        any = any.f_add(&flag)?;
    }
    Ok(any.f_to_kind(Kind::Bool)?)
}

/// The name of what is not a gradient.
const WINDOW: &str = "window";

/// A window of micro-batches and the gradients that it has accumulated, which a checkpoint saves and restores.
#[derive(Debug)]
struct WithGradients<'w> {
    window: &'w mut Accumulation,
    named: Vec<(String, Tensor)>,
}

/// Where a window is.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct WindowState {
    shares: Vec<f64>,
    taken: usize,
    /// Whether each of the micro-batches was left out; empty if the window leaves none out.
    dropped: Vec<bool>,
}

/// A window and its gradients that have been loaded.
#[derive(Debug)]
struct Loaded {
    window: Accumulation,
    gradients: Vec<Option<Tensor>>,
}

impl Accumulation {
    /// Pairs the window with the gradients of these named parameters, so that a checkpoint can be saved between two
    /// micro-batches. The resumed run goes on with the micro-batch whose index is [`taken`](Self::taken). PyTorch has
    /// no counterpart.
    ///
    /// A checkpoint without it must be saved between two windows. Pass all parameters that the backward passes reach;
    /// variables without gradients may be among them. Resume with the same optimizer: a gradient that
    /// [`accumulate_in_f32`](crate::optim::Optimizer::accumulate_in_f32) has made f32 is restored in f32.
    ///
    /// Under `DistributedDataParallel`, each rank has gradients of its own until the window is complete, so each rank
    /// needs a file of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::nn::{self, Module};
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::accumulation::Accumulation;
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// # let name = format!("tch-amp-doc-window-{}.safetensors", std::process::id());
    /// # let path = std::env::temp_dir().join(name);
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let net = nn::linear(vs.root(), 4, 1, Default::default());
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// let mut window = Accumulation::of_equal(4)?;
    /// let xs = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
    /// window.backward(&mut scaler, &net.forward(&xs).mean(Kind::Float))?;
    ///
    /// let mut checkpoint = Checkpoint::new();
    /// checkpoint.add("model", &vs)?;
    /// checkpoint.add("scaler", &mut scaler)?;
    /// checkpoint.add("window", window.with_gradients(vs.variables()))?;
    /// checkpoint.save(&path)?;
    ///
    /// // Any window will do: its weights are replaced.
    /// let mut resumed = Accumulation::of_equal(1)?;
    /// # vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    /// Checkpoint::load(&path)?
    ///     .restore()
    ///     .add("model", &vs)
    ///     .add("scaler", &mut scaler)
    ///     .add("window", resumed.with_gradients(vs.variables()))
    ///     .apply()?;
    /// assert_eq!((resumed.taken(), resumed.micro_batches()), (1, 4));
    /// # std::fs::remove_file(&path)?;
    /// # assert_eq!(net.bs.as_ref().map(|bias| bias.grad()), Some(Tensor::from_slice(&[16384f32])));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_gradients(
        &mut self,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
    ) -> impl Stateful + fmt::Debug {
        WithGradients { window: self, named: parameters.into_iter().collect() }
    }
}

impl WithGradients<'_> {
    /// The parameters, each once: a gradient must not be restored several times.
    fn parameters(&self) -> Result<Vec<Variable>> {
        each_once(self.named.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())))
    }

    /// Where the window is. Synchronizes if micro-batches may have been left out.
    fn state(&self) -> Result<WindowState> {
        let Accumulation { shares, next, kept } = &*self.window;
        Ok(WindowState { shares: shares.clone(), taken: *next, dropped: kept.answers()? })
    }

    /// Replaces the window and the gradients. On failure both are as before.
    fn resume(&mut self, loaded: Loaded) -> Result<()> {
        let parameters: Vec<_> =
            self.parameters()?.into_iter().map(|variable| variable.tensor).collect();
        let earlier = StashedGradients::from(parameters)?;
        ffi::gradients_add(earlier.parameters(), &loaded.gradients)?;
        earlier.settle();
        *self.window = loaded.window;
        Ok(())
    }
}

impl Loaded {
    /// Checks what was loaded. The gradients are in the order of the parameters.
    fn new(state: WindowState, gradients: Vec<Option<Tensor>>) -> Result<Self> {
        let WindowState { shares, taken, dropped } = state;
        check(&shares)?;
        let all = shares.len();
        ensure(
            "the saved `taken`",
            taken as f64,
            taken <= all,
            "at most the number of micro-batches",
        )?;
        let known = dropped.len();
        let holds = known == 0 || known == taken;
        ensure(
            "the number of saved `dropped`",
            known as f64,
            holds,
            "that of the micro-batches taken",
        )?;
        let kept = Kept::resumed(shares.iter().copied().zip(dropped))?;
        Ok(Self { window: Accumulation { shares, next: taken, kept }, gradients })
    }
}

impl Stateful for WithGradients<'_> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value(WINDOW, &self.state()?)?;
        for Variable { names, tensor } in self.parameters()? {
            let gradient = tensor.f_grad()?;
            if gradient.defined() {
                state.tensors(names.iter().map(|name| (name, &gradient)))?;
            }
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let (mut gradients, mut targets) = (Vec::new(), Vec::new());
        for Variable { names, tensor } in self.parameters()? {
            let kinds: Vec<_> = names.iter().map(|name| saved.kind(name)).collect::<Result<_>>()?;
            let Some(kind) = kinds.into_iter().flatten().next() else {
                gradients.push(None);
                continue;
            };
            let is_skipped = names.iter().any(|name| saved.skips(name));
            // One that is skipped is not copied, and needs no memory.
            let to = if is_skipped { tensor } else { empty(&tensor, kind)? };
            gradients.push((!is_skipped).then(|| to.shallow_clone()));
            targets.extend(names.iter().map(|name| (name.clone(), to.shallow_clone())));
        }
        let pairs = targets.iter().map(|(name, to)| (name, to));
        let copies = saved.copy(pairs, "in the model")?;
        let loaded = Loaded::new(saved.value(WINDOW)?, gradients)?;
        Ok(copies.and(Prepared::step(move || self.resume(loaded))))
    }
}

/// Returns memory for a gradient that was saved in a dtype. It is the parameter's, except for the f32 gradients that
/// parameters in half precision can have.
fn empty(parameter: &Tensor, saved: Kind) -> Result<Tensor> {
    let kind = match (parameter.f_kind()?, saved) {
        (Kind::Half | Kind::BFloat16, Kind::Float) => Kind::Float,
        (kind, _) => kind,
    };
    let size = ffi::sizes(parameter)?;
    Ok(Tensor::f_empty(size, (kind, parameter.device()))?)
}
