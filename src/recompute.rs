//! Activation checkpointing: parts of a model that keep no activations, and compute them again in the backward pass.
//!
//! Training needs memory for the activations of the forward pass, which the backward pass uses. [`checkpointed`] runs a
//! part of the model without keeping them. When the backward pass comes to the part, it runs it a second time, with the
//! same inputs, autocast state and random numbers, and continues through that second run. The gradients are the same
//! bit by bit, except for the order of sums where an input or a weight is used several times. The memory falls to the
//! inputs of the parts and the activations of one part; the time grows by one more forward pass. [`Recomputed`] does so
//! for a module of tch.
//!
//! The counterpart of `torch.utils.checkpoint.checkpoint` with `use_reentrant=True`: the other form needs hooks of
//! saved tensors, which libtorch's C++ interface does not offer. Unlike in PyTorch, the weights in the part are trained
//! even if none of its inputs requires a gradient.
//!
//! Source: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, <https://arxiv.org/abs/1604.06174>.
//!
//! # Examples
//!
//! ```
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//! use tch_amp::autocast;
//! use tch_amp::recompute::Recomputed;
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let mut model = nn::seq();
//! for i in 0..4 {
//!     let root = vs.root() / i;
//!     let block = nn::seq()
//!         .add(nn::linear(&root / "up", 8, 32, Default::default()))
//!         .add_fn(|xs| xs.gelu("none").dropout(0.1, true))
//!         .add(nn::linear(&root / "down", 32, 8, Default::default()));
//!     // Only the input of each block is kept until the backward pass.
//!     model = model.add(Recomputed::new(block));
//! }
//! let xs = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
//! let loss = autocast(Device::Cpu, || model.forward(&xs).square().mean(Kind::Float))?;
//! loss.backward();
//! assert!(vs.trainable_variables().iter().all(|w| w.grad().defined()));
//! # Ok::<(), tch_amp::Error>(())
//! ```

use std::borrow::Borrow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::nn::{Module, ModuleT};
use tch::{Device, Kind, Tensor, with_grad};

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, FunctionError};
use crate::ffi;
use crate::function::{
    BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs, Outputs,
};

/// Runs `f` on the inputs without keeping its activations, and runs it again in the backward pass. The counterpart of
/// `torch.utils.checkpoint.checkpoint(f, *inputs)`.
///
/// Both runs have the autocast state of the call and the same random numbers: the generator of the CPU and those of the
/// inputs' devices are set back for the second run, and continue afterwards as if it had not happened
/// (`preserve_rng_state` in PyTorch). The backward pass through the second run has the autocast state of the backward
/// pass around it, so that operators that a region in `f` keeps in f32 have their gradients computed in f32. Calls may
/// be nested. If no gradients are recorded, under `tch::no_grad` for instance, `f` simply runs. Does not synchronize.
///
/// `f` must compute the same both times:
///
/// - It may capture weights and other leaves, which get their gradients. A tensor with a history must be an input,
///   because the backward pass of the part would run through that history separately, and free it.
/// - It must not change its inputs in place. What it changes beside its result, such as the running averages of a batch
///   norm, it changes twice, as in PyTorch.
/// - The generator of the CPU belongs to the process. If another thread draws from it during the forward or the
///   backward pass of the part, the second run may have other random numbers: on ranks that are threads, or beside a
///   thread that shuffles data. Random numbers on a device that holds none of the inputs differ as well.
///
/// As with PyTorch's reentrant form, gradients are computed with `backward()`, not with
/// [`grad`](crate::function::grad()), and cannot be differentiated again. Under `DistributedDataParallel`,
/// `find_unused_parameters` does not see what `f` uses, and a parameter that several parts use is an error. The outputs
/// require a gradient even if nothing in `f` does.
///
/// # Errors
///
/// [`FunctionError::Forward`] if `f` fails, and [`FunctionError::Misuse`] if libtorch refuses to record the call, for
/// instance for a tensor that was made in inference mode. The `backward()` fails if the outputs of the second run
/// differ in number, shape, dtype or device from those of the first, if `f` fails in it, and if an input was changed in
/// place after the first run. [`grad`](crate::function::grad()) fails for a tensor before the part, and
/// reports a tensor that only `f` uses as unused.
///
/// # Panics
///
/// If `f` panics in the first run. A panic in the second is an error of the `backward()`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::recompute::checkpointed;
///
/// let w = Tensor::eye(3, (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu));
/// let weight = w.shallow_clone();
/// let y: Tensor = checkpointed(&[&x], move |x| Ok(x[0].matmul(&weight).relu()))?;
/// y.sum(Kind::Float).backward();
/// assert_eq!(w.grad(), Tensor::full([3, 3], 2.0, (Kind::Float, Device::Cpu)));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[doc(alias = "checkpoint")]
pub fn checkpointed<T, F, O>(inputs: &[T], f: F) -> Result<O>
where
    T: Borrow<Tensor>,
    F: Fn(&[&Tensor]) -> FunctionResult<O> + Send + 'static,
    O: Outputs,
{
    // Without an input that requires a gradient, nothing would be recorded, and the weights in `f` would not be
    // trained.
    let anchor = Tensor::f_zeros([0], (Kind::Float, Device::Cpu))?.f_set_requires_grad(true)?;
    let inputs = std::iter::once(&anchor).chain(inputs.iter().map(Borrow::borrow));
    Checkpointed { f }.apply(&inputs.collect::<Vec<&Tensor>>())
}

struct Checkpointed<F> {
    f: F,
}

/// The state that the first run leaves for the second.
struct FirstRun {
    /// Before the run.
    random: RandomStates,
    /// Whether the inputs required a gradient.
    requires_grad: Vec<bool>,
    outputs: Vec<Description>,
}

/// The properties that must be the same in both runs.
#[derive(Debug, PartialEq)]
struct Description {
    size: Vec<i64>,
    kind: Kind,
    device: Device,
}

impl<F, O> Function for Checkpointed<F>
where
    F: Fn(&[&Tensor]) -> FunctionResult<O> + Send + 'static,
    O: Outputs,
{
    type Outputs = O;
    type Gradients = Vec<Option<Tensor>>;

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<O> {
        let is_recorded = ctx.needs_input_grad(0)?;
        let inputs = &inputs[1..];
        if !is_recorded {
            return (self.f)(inputs);
        }
        let random = RandomStates::read(inputs)?;
        let mut outputs = (self.f)(inputs)?;
        let descriptions = outputs.as_mut_slice().iter().map(Description::of);
        let descriptions = descriptions.collect::<Result<_>>()?;
        ctx.save_for_backward(inputs);
        let requires_grad = inputs.iter().map(|x| x.defined() && x.requires_grad()).collect();
        ctx.save_value(FirstRun { random, requires_grad, outputs: descriptions });
        ctx.set_materialize_grads(false);
        Ok(outputs)
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        if !ffi::backward_accumulates()? {
            return Err("it works with `backward()` only: `grad` would not get the gradients of what the closure \
                        uses"
                .into());
        }
        let first: &FirstRun = ctx.saved_value()?;
        let inputs = leaves(&ctx.saved_tensors_vec()?, &first.requires_grad)?;
        let again = || with_grad(|| (self.f)(&inputs.iter().collect::<Vec<_>>()));
        let outputs: Vec<_> = {
            let mut outputs = first.random.during(again)??;
            outputs.as_mut_slice().iter().map(Tensor::shallow_clone).collect()
        };
        check_same(&first.outputs, &outputs)?;
        ctx.in_state_of_pass(|| run_backward(outputs, grads))??;
        let gradient =
            |input: &Tensor| (input.defined() && input.grad().defined()).then(|| input.grad());
        Ok(std::iter::once(None).chain(inputs.iter().map(gradient)).collect())
    }

    fn name(&self) -> &str {
        "checkpointed"
    }

    fn once_differentiable(&self) -> bool {
        true
    }
}

/// The inputs of the second run: the same numbers, without a history.
fn leaves(inputs: &[Tensor], requires_grad: &[bool]) -> Result<Vec<Tensor>> {
    let leaf = |(input, &requires_grad): (&Tensor, &bool)| {
        if !input.defined() {
            return Ok(Tensor::new());
        }
        Ok(input.f_detach()?.f_set_requires_grad(requires_grad)?)
    };
    inputs.iter().zip(requires_grad).map(leaf).collect()
}

impl Description {
    fn of(tensor: &Tensor) -> Result<Self> {
        if !tensor.defined() {
            return Ok(Self { size: Vec::new(), kind: Kind::Bool, device: Device::Cpu });
        }
        Ok(Self { size: ffi::sizes(tensor)?, kind: tensor.f_kind()?, device: tensor.device() })
    }
}

fn check_same(first: &[Description], outputs: &[Tensor]) -> FunctionResult<()> {
    if first.len() != outputs.len() {
        let (before, now) = (first.len(), outputs.len());
        return Err(format!("the second run returned {now} outputs, and the first {before}").into());
    }
    for (i, (before, now)) in first.iter().zip(outputs).enumerate() {
        let now = Description::of(now)?;
        if *before != now {
            let problem = format!(
                "output {i} of the second run is {now:?}, and that of the first was {before:?}; the closure must compute \
                 the same both times"
            );
            return Err(problem.into());
        }
    }
    Ok(())
}

/// Continues the backward pass through the second run, from the gradients of its outputs.
fn run_backward(outputs: Vec<Tensor>, grads: &GradOutputs<'_>) -> Result<()> {
    let (mut roots, mut seeds) = (Vec::new(), Vec::new());
    for (output, grad) in outputs.into_iter().zip(grads.iter()) {
        let is_part = output.defined() && output.requires_grad();
        if let (Some(grad), true) = (grad, is_part) {
            seeds.push(grad.shallow_clone());
            roots.push(output);
        }
    }
    if roots.is_empty() {
        return Ok(());
    }
    let root = with_grad(|| Seed { grads: seeds }.apply(&roots))?;
    // The roots would keep their history alive.
    drop(roots);
    // The gradients of what the closure uses may have been made by another part of the same backward pass, which goes
    // on to add to them.
    ffi::gradients_separate_leaves(&root)?;
    root.f_backward()?;
    ffi::gradients_separate_leaves(&root)
}

/// A number whose backward begins with given gradients.
struct Seed {
    grads: Vec<Tensor>,
}

impl Function for Seed {
    type Outputs = Tensor;
    type Gradients = Vec<Tensor>;

    fn forward(&self, _ctx: &mut ForwardContext, _inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        Ok(Tensor::f_zeros([], (Kind::Float, Device::Cpu))?)
    }

    fn backward(
        &self,
        _: &BackwardContext<'_>,
        _: &GradOutputs<'_>,
    ) -> FunctionResult<Vec<Tensor>> {
        Ok(self.grads.iter().map(Tensor::shallow_clone).collect())
    }
}

/// A `Module` that keeps only its input for the backward pass and runs again there. See [`checkpointed`].
///
/// The module is behind a lock, because the backward pass may run on a thread of libtorch's. A module that calls itself
/// through this wrapper deadlocks.
#[derive(Debug)]
pub struct Recomputed<M>(Arc<Mutex<M>>);

/// A `ModuleT` that keeps only its input for the backward pass and runs again there. See [`Recomputed`].
#[derive(Debug)]
pub struct RecomputedT<M>(Arc<Mutex<M>>);

/// The module, even after a panic in it: it changes only its tensors.
fn lock<M>(module: &Mutex<M>) -> MutexGuard<'_, M> {
    module.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<M: Module + Send + 'static> Recomputed<M> {
    /// Wraps a module.
    pub fn new(module: M) -> Self {
        Self(Arc::new(Mutex::new(module)))
    }

    /// Runs the module. `Module::forward` does the same, and panics instead of returning an error.
    ///
    /// # Errors
    ///
    /// Those of [`checkpointed`].
    ///
    /// # Panics
    ///
    /// If the module itself panics, as those of tch do.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        let module = Arc::clone(&self.0);
        checkpointed(&[xs], move |xs| Ok(lock(&module).forward(xs[0])))
    }
}

impl<M: ModuleT + Send + 'static> RecomputedT<M> {
    /// Wraps a module.
    pub fn new(module: M) -> Self {
        Self(Arc::new(Mutex::new(module)))
    }

    /// Runs the module. `ModuleT::forward_t` does the same, and panics instead of returning an error.
    ///
    /// # Errors
    ///
    /// Those of [`checkpointed`].
    ///
    /// # Panics
    ///
    /// If the module itself panics, as those of tch do.
    pub fn f_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let module = Arc::clone(&self.0);
        checkpointed(&[xs], move |xs| Ok(lock(&module).forward_t(xs[0], train)))
    }
}

impl<M: Module + Send + 'static> Module for Recomputed<M> {
    fn forward(&self, xs: &Tensor) -> Tensor {
        self.f_forward(xs).unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<M: ModuleT + Send + 'static> ModuleT for RecomputedT<M> {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(xs, train).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// The states of the generators of the CPU and of some other devices.
#[derive(Debug)]
pub(crate) struct RandomStates(Vec<(Device, Tensor)>);

impl RandomStates {
    /// Reads the states of the generators of the CPU and of the tensors' devices. They are on the host; nothing waits.
    pub(super) fn read(tensors: &[&Tensor]) -> Result<Self> {
        let mut devices = vec![Device::Cpu];
        for tensor in tensors.iter().filter(|tensor| tensor.defined()) {
            let device = tensor.device();
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        Self::of(&devices)
    }

    pub(crate) fn of(devices: &[Device]) -> Result<Self> {
        let state = |&device| Ok((device, ffi::rng_state(device)?));
        Ok(Self(devices.iter().map(state).collect::<Result<_>>()?))
    }

    fn set(&self) -> Result<()> {
        self.0.iter().try_for_each(|(device, state)| ffi::rng_set_state(*device, state))
    }

    /// Runs `f` with these states, and sets the present ones back when it returns or panics.
    pub(crate) fn during<T>(&self, f: impl FnOnce() -> T) -> Result<T> {
        let devices: Vec<_> = self.0.iter().map(|(device, _)| *device).collect();
        let back = SetOnDrop(Self::of(&devices)?);
        self.set()?;
        let result = f();
        drop(back);
        Ok(result)
    }
}

struct SetOnDrop(RandomStates);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        // A generator takes its own state; if it fails, so will the next use of the generator.
        drop(self.0.set());
    }
}
