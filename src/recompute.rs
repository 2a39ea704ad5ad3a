//! Activation checkpointing: parts of a model that keep no activations, and compute them again in the backward pass.
//!
//! Training keeps the activations of the forward pass in memory until the backward pass has used them. [`checkpointed`]
//! runs a part of the model without keeping them. When the backward pass first asks for one of them, it runs the part a
//! second time, with the same inputs, autocast state and random numbers. The gradients are the same bit by bit. The
//! memory falls to the inputs of the parts and the activations of one part; the time grows by one more forward pass.
//! [`Recomputed`] does so for a module of tch.
//!
//! The counterpart of `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`.
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
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};

use tch::nn::{Module, ModuleT};
use tch::{Device, Tensor, with_grad};

use crate::autocast::{AutocastState, callback};
use crate::error::{Error, FunctionError, Result, chain};
use crate::ffi::{self, OutsideRegions};
use crate::function::{FunctionResult, Outputs};
use crate::panics::lock;

/// Runs `f` on the inputs, keeps none of its activations once it has run, and runs it again in the backward pass. The
/// counterpart of `torch.utils.checkpoint.checkpoint(f, *inputs)`.
///
/// Both runs have the autocast state of the call and the same random numbers: the generator of the CPU and those of the
/// inputs' devices are set back for the second run, and continue afterwards as if it had not happened
/// (`preserve_rng_state` in PyTorch). The backward pass itself goes through what the first run has recorded, so that
/// [`grad`](crate::function::grad()), `create_graph`, hooks, captured tensors with a history and
/// `DistributedDataParallel` work as without recomputation. A pass that needs none of the part's activations does not
/// run it again. Calls may be nested. If no gradients are recorded, under `tch::no_grad` for instance, `f` simply runs.
/// Does not synchronize by itself.
///
/// `f` must compute the same both times:
///
/// - It must not change its inputs in place. Other state that it changes, such as the running averages of a batch norm,
///   changes twice, as in PyTorch.
/// - It must not keep tensors of its own run that have a history, in a module for instance: they would never be freed.
/// - The generator of the CPU belongs to the process. If another thread draws from it while the part runs, for instance
///   a rank that is a thread or one that shuffles data, the second run may draw other random numbers. So does a part
///   that draws on a device that holds none of its inputs.
/// - A part whose operators run on several devices, the CPU included, must not compute gradients inside.
///
/// Whatever region of [`SavedTensors`](crate::memory::SavedTensors) is around it, what autograd saves in `f` is
/// recomputed, and the inputs are kept bit by bit. A region of `SavedTensors` inside `f` keeps its tensors in its own
/// form; they are not recomputed. Nor is what nodes of this crate keep by themselves, such as the logits of
/// [`linear_cross_entropy`](crate::lean::linear_cross_entropy). PyTorch stops the second run once it has what it needs
/// (`early_stop`). Here it runs to the end, because only a panic could stop it inside tch's functions.
///
/// # Errors
///
/// [`FunctionError::Forward`] if `f` fails, [`FunctionError::Misuse`] if an input cannot be saved, for instance because
/// it was made in inference mode, and [`Error::OtherEngine`] if something else has replaced autograd's engine. The
/// backward pass fails if `f` fails in its second run, if the tensors that are saved in the second run differ in
/// number, shape, dtype or device from those of the first, and if an input or a saved tensor was changed in place
/// between the runs.
///
/// # Panics
///
/// If `f` panics in the first run. A panic in the second is an error of the backward pass.
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
    let inputs: Vec<&Tensor> = inputs.iter().map(Borrow::borrow).collect();
    let part = Arc::new(Checkpointed(Mutex::new(Runs {
        f,
        autocast: AutocastState::current()?,
        random: RandomStates::default(),
        requires_grad: inputs.iter().map(|x| x.defined() && x.requires_grad()).collect(),
    })));
    // The second run needs the inputs of the first, bit by bit, however other saved tensors are kept.
    let saved = ffi::SavedTensors::exactly(|| ffi::SavedTensors::recomputed(&part, &inputs))?;
    let name = || "checkpointed".to_owned();
    let saved = saved.map_err(|error| match error {
        Error::Torch(problem) => Error::Function(FunctionError::Misuse { name: name(), problem }),
        other => other,
    })?;
    let mut runs = lock(&part.0);
    let outputs = match &saved {
        None => (runs.f)(&inputs),
        Some(saved) => {
            let random = RandomStates::read(&inputs)?;
            let outputs = saved.during(|| (runs.f)(&inputs))?;
            runs.random = random.without_unused_cpu()?;
            outputs
        }
    };
    outputs.map_err(|cause| Error::Function(FunctionError::Forward { name: name(), cause }))
}

/// A part of a model, which is locked while it runs.
struct Checkpointed<F>(Mutex<Runs<F>>);

/// What runs, and the state that the first run leaves for the second.
struct Runs<F> {
    f: F,
    autocast: AutocastState,
    /// Before the first run.
    random: RandomStates,
    /// Whether the inputs required a gradient.
    requires_grad: Vec<bool>,
}

impl<F, O> ffi::RunsAgain for Checkpointed<F>
where
    F: Fn(&[&Tensor]) -> FunctionResult<O> + Send + 'static,
{
    fn run_again(
        &self,
        inputs: &[ManuallyDrop<Tensor>],
        how: &ffi::SavedTensors,
    ) -> std::result::Result<(), String> {
        let runs = lock(&self.0);
        let run = || -> FunctionResult<()> {
            let inputs = leaves(inputs, &runs.requires_grad)?;
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            let again = || with_grad(|| (runs.f)(&inputs).map(drop));
            runs.random.during(|| how.during(again))??
        };
        match callback(|| runs.autocast.restore(run)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("the second run failed: {}", chain(&*error))),
            Err(error) => Err(error.to_string()),
        }
    }

    fn free(self: Arc<Self>) {
        callback(|| drop(self));
    }
}

/// The inputs of the second run: the same numbers, without a history.
fn leaves(inputs: &[ManuallyDrop<Tensor>], requires_grad: &[bool]) -> Result<Vec<Tensor>> {
    let _own = OutsideRegions::enter();
    let leaf = |(input, &requires_grad): (&ManuallyDrop<Tensor>, &bool)| {
        if !input.defined() {
            return Ok(Tensor::new());
        }
        let leaf = input.f_detach()?.f_set_requires_grad(requires_grad)?;
        // Not the leaf itself, whose casts autocast would cache like those of a weight.
        Ok(with_grad(|| leaf.f_alias())?)
    };
    inputs.iter().zip(requires_grad).map(leaf).collect()
}

/// A `Module` that keeps only its input for the backward pass and runs again there. See [`checkpointed`].
///
/// The module is behind a lock, because the backward pass may run on one of libtorch's threads. A module that calls
/// itself through this wrapper deadlocks.
#[derive(Debug)]
pub struct Recomputed<M>(Arc<Mutex<M>>);

/// A `ModuleT` that keeps only its input for the backward pass and runs again there. See [`Recomputed`].
#[derive(Debug)]
pub struct RecomputedT<M>(Arc<Mutex<M>>);

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
#[derive(Debug, Default)]
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

    /// Leaves out that of the CPU's generator if it still has that state. Parts that run again at the same time, on the
    /// threads of several devices, then do not set it back for each other.
    fn without_unused_cpu(mut self) -> Result<Self> {
        let _own = OutsideRegions::enter();
        let is_cpu = |(device, _): &(Device, Tensor)| *device == Device::Cpu;
        if let Some(place) = self.0.iter().position(is_cpu)
            && ffi::rng_state(Device::Cpu)?.f_equal(&self.0[place].1)?
        {
            let _unused = self.0.remove(place);
        }
        Ok(self)
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
