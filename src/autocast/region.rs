//! Regions and their guards.

use std::marker::PhantomData;

use tch::{Device, Kind};

use crate::autocast::overrides::Overrides;
use crate::autocast::plan::{Plan, Rule, RunAs};
use crate::autocast::stack;
use crate::device::check_usable;
use crate::error::{AutocastError, Error, Result};
use crate::ffi::RawAutocastState;
#[cfg(feature = "insight")]
use crate::ffi::emulation::Regions;

/// The operators of log-probabilities, likelihoods and divergences, for [`Autocast::keep_in_f32`]: `atanh`, `exp`,
/// `exp2`, `expm1`, `log`, `log10`, `log1p`, `log2`, `log_sigmoid`, `log_softmax`, `logaddexp`, `logit`, `logsumexp`,
/// `pow`, `sigmoid`, `softmax`, `softplus` and `tanh`.
///
/// In half precision, losses that are written by hand lose their correct digits in terms such as log(1 - tanh(x)²) of a
/// tanh-squashed Gaussian, 1 - p, or a difference of two log-probabilities. On CUDA autocast's lists keep most of these
/// operators in f32, but not `tanh`, `sigmoid`, `log_sigmoid` and a few others; on the CPU they keep none. The regions
/// of [`Amp`](crate::Amp) on the CPU keep all but `softmax`. A loss that begins with a sum, a difference or a product
/// of the outputs of a network needs `to_kind(Kind::Float)` instead: the guide has a [table of
/// losses](crate::guide::losses).
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
/// use tch_amp::autocast::LOG_PROBABILITIES;
///
/// let x = Tensor::from_slice(&[2f32]).to_kind(Kind::BFloat16);
/// let region = Autocast::new(Device::Cpu).keep_in_f32(LOG_PROBABILITIES);
/// let log = region.run(|| (1i64 - x.tanh().square() + 1e-6).log())?;
/// assert!((log.double_value(&[0]) - -2.6499913).abs() < 1e-4);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub const LOG_PROBABILITIES: [&str; 18] = [
    "atanh",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_sigmoid",
    "log_softmax",
    "logaddexp",
    "logit",
    "logsumexp",
    "pow",
    "sigmoid",
    "softmax",
    "softplus",
    "tanh",
];

/// The options of an autocast region: its device, its dtype, whether it is enabled, whether it caches weights, and
/// which operators it runs otherwise than by the lists.
///
/// Only operations on tensors of that device's type are affected; the index of a CUDA device does not matter. Regions
/// nest, for the same device or for several. The counterpart of
/// `torch.autocast(device_type, dtype, enabled, cache_enabled)`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
///
/// let (a, b) = (Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::ones([3, 2], (Kind::Float, Device::Cpu)));
/// let product = Autocast::new(Device::Cpu).dtype(Kind::Half).run(|| a.matmul(&b))?;
/// assert_eq!(product.kind(), Kind::Half);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "a region begins with `enter` or `run`"]
pub struct Autocast {
    device: Device,
    dtype: Option<Kind>,
    enabled: bool,
    cache: Option<bool>,
    overrides: Option<Overrides>,
}

impl Autocast {
    /// Creates a region on `device` with PyTorch's defaults: enabled, with the dtype and the cache flag that the thread
    /// has when the region is opened. Outside of other regions these are bf16 on the CPU, fp16 on CUDA and MPS, and a
    /// cache that is on.
    pub fn new(device: Device) -> Self {
        Self { device, dtype: None, enabled: true, cache: None, overrides: None }
    }

    /// Sets the dtype of the region: `Kind::BFloat16` or `Kind::Half`. Defaults to that of the enclosing region.
    ///
    /// On a CPU use bf16. libtorch has few fast fp16 kernels there: a region in fp16 takes several times to tens of
    /// times as long as one in f32, depending on the CPU, and an LSTM fails in it on CPUs without fp16 instructions.
    pub fn dtype(mut self, dtype: Kind) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Switches autocast on (the default) or off inside the region. A disabled region inside an enabled one runs its
    /// operations in the dtypes of their inputs. A disabled region may name a device that cannot be used. The operators
    /// that it names must exist. As in PyTorch, a backward pass inside of the enabled region casts their products
    /// nevertheless: call `backward` outside of it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::{Autocast, try_autocast};
    ///
    /// let x = Tensor::eye(2, (Kind::Float, Device::Cpu));
    /// let exact = try_autocast(Device::Cpu, || Autocast::new(Device::Cpu).enabled(false).run(|| x.matmul(&x)))?;
    /// assert_eq!(exact.kind(), Kind::Float);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Sets whether the cast of a weight is cached for its next use in the region. Defaults to the thread's flag, which
    /// is initially on. All threads share one cache, which does not distinguish dtypes: switch it off where two threads
    /// use the same weights in regions of different dtypes at the same time.
    ///
    /// As in libtorch, an outermost region that opens or ends on any thread empties the cache of all. While other
    /// threads open or close regions, or step, a weight that a region uses several times is therefore cast once in one
    /// run and several times in another, and the gradients of its uses are added in half precision or in f32. The
    /// numbers stay within the precision of the dtype, but their last bits differ from run to run; with the cache off
    /// they do not.
    pub fn cache(mut self, cache: bool) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Runs these operators in f32 inside the region, forward and backward, whatever autocast's lists say: their inputs
    /// in half precision are cast to f32, and their results are f32. That holds for a backward pass inside of the
    /// region and for second derivatives, too. Regions inside inherit this, and can override it; the last call for an
    /// operator wins. In a region that is switched off it has no effect, but the names must exist. PyTorch has no
    /// counterpart.
    ///
    /// An operator has the name that libtorch gives it, such as `softmax`, or `extension::scan` for one of an
    /// extension; [`Profiler`](crate::insight::Profiler) lists those of a program. All of its overloads are meant, but
    /// for those that write to their inputs. What counts is the operator that the program calls, or one that it runs
    /// while autocast is on: in a `linear`, which autocast casts as a whole, no `addmm` is overridden. Running
    /// statistics of normalizations are updated in f32 and keep their dtype. What this crate computes itself is not
    /// overridden.
    ///
    /// Other threads and other regions are not affected. An overridden operator takes about 0.1 µs longer than with
    /// casts by hand, and 0.3 µs more if its gradients are recorded and it does not work element by element. An
    /// operator that only other regions of the program name takes 0.1 µs longer in this one, and all others cost
    /// nothing extra. The first region with a list of names takes 0.5 ms more to look them up among libtorch's
    /// operators, and the first in a program 4 ms. The list is kept until the program ends, once however often it is
    /// used.
    ///
    /// # Errors
    ///
    /// None here. [`enter`](Self::enter) and [`run`](Self::run) return [`AutocastError::UnknownOperator`] and
    /// [`AutocastError::NotOverridable`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::Autocast;
    ///
    /// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    /// let region = Autocast::new(Device::Cpu).keep_in_f32(["softmax"]).prefer_half(["exp"]);
    /// let (product, shares) = region.run(|| (x.matmul(&x), x.matmul(&x).softmax(-1, None::<Kind>)))?;
    /// assert_eq!((product.kind(), shares.kind()), (Kind::BFloat16, Kind::Float));
    /// assert_eq!(region.run(|| x.exp())?.kind(), Kind::BFloat16);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn keep_in_f32<S: AsRef<str>>(mut self, operators: impl IntoIterator<Item = S>) -> Self {
        let rules = operators.into_iter().map(|name| Rule::new(name.as_ref(), RunAs::F32));
        self.overrides = Some(Overrides::with(self.overrides, rules));
        self
    }

    /// Runs these operators in the dtype of the region, forward and backward, whatever autocast's lists say: their f32
    /// inputs are cast to it, those of weights through the cache. Of a normalization with running statistics only the
    /// first input is cast, as libtorch's kernels take it beside parameters and statistics in f32. Otherwise it is like
    /// [`keep_in_f32`](Self::keep_in_f32).
    ///
    /// # Errors
    ///
    /// The same as [`keep_in_f32`](Self::keep_in_f32).
    pub fn prefer_half<S: AsRef<str>>(mut self, operators: impl IntoIterator<Item = S>) -> Self {
        let rules = operators.into_iter().map(|name| Rule::new(name.as_ref(), RunAs::Half));
        self.overrides = Some(Overrides::with(self.overrides, rules));
        self
    }

    /// Runs the operators as a plan says: sets the dtype of the region and switches it on, or off for a plan in f32,
    /// and adds the rules of the plan, which are inherited and overridden like those of
    /// [`keep_in_f32`](Self::keep_in_f32) and cost the same. Of several calls of this, [`dtype`](Self::dtype) and
    /// [`enabled`](Self::enabled), the last wins; `dtype` does not switch a region on. Make the region once, outside of
    /// the training loop. PyTorch has no counterpart.
    ///
    /// # Errors
    ///
    /// [`AutocastError::PlanElsewhere`] if the plan was made for another type of device, libtorch or number of threads,
    /// [`AutocastError::EmptyRange`] for a rule that holds for no size, and [`Error::DeviceUnavailable`].
    /// [`enter`](Self::enter) and [`run`](Self::run) return the other errors of its rules.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::Autocast;
    /// use tch_amp::autocast::{Plan, Rule, RunAs};
    ///
    /// let softmax = Rule::new("softmax", RunAs::Half);
    /// let plan = Plan { dtype: Some(Kind::BFloat16), rules: vec![softmax], ..Plan::new(Device::Cpu)? };
    /// let region = Autocast::new(Device::Cpu).plan(&plan)?;
    /// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    /// assert_eq!(region.run(|| x.softmax(-1, None::<Kind>))?.kind(), Kind::BFloat16);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn plan(mut self, plan: &Plan) -> Result<Self> {
        plan.check(self.device)?;
        self.enabled = plan.dtype.is_some();
        self.dtype = plan.dtype.or(self.dtype);
        self.overrides = Some(Overrides::with(self.overrides, plan.rules.iter().cloned()));
        Ok(self)
    }

    /// Opens the region and returns the guard that closes it. Corresponds to `torch.autocast.__enter__`.
    ///
    /// # Errors
    ///
    /// - [`Error::DeviceUnavailable`], with the reason, if the region is enabled and the device cannot be used; PyTorch
    ///   warns and continues in full precision.
    /// - [`AutocastError::Dtype`] for a dtype that autocast does not support; PyTorch warns on the CPU and does not
    ///   check on CUDA.
    /// - [`AutocastError::ThreadEnding`] inside a destructor of a thread-local value.
    /// - [`AutocastError::UnknownOperator`] and [`AutocastError::NotOverridable`] for an operator of
    ///   [`keep_in_f32`](Self::keep_in_f32), [`prefer_half`](Self::prefer_half) or a [`plan`](Self::plan),
    ///   [`AutocastError::NotComposable`] for one of a plan, also in a region that is switched off, and
    ///   [`Error::Torch`] if another extension of libtorch uses the dispatch key of these.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind};
    /// use tch_amp::Autocast;
    /// use tch_amp::autocast::autocast_dtype;
    ///
    /// let region = Autocast::new(Device::Cpu).dtype(Kind::Half).enter()?;
    /// assert_eq!(autocast_dtype(Device::Cpu)?, Kind::Half);
    /// drop(region);
    /// assert_eq!(autocast_dtype(Device::Cpu)?, Kind::BFloat16);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn enter(self) -> Result<AutocastGuard> {
        let (previous, next) = self.states()?;
        AutocastGuard::open(previous, next)
    }

    /// Runs `f` inside the region and restores the previous state when `f` returns or panics. The counterpart of the
    /// `with` statement around `torch.autocast`.
    ///
    /// Regions whose guards `f` leaked are closed, too.
    ///
    /// # Errors
    ///
    /// The same as [`enter`](Self::enter); then `f` is not run.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> Result<T> {
        let (previous, next) = self.states()?;
        stack::within(previous, next, f)
    }

    /// Runs a closure that can fail inside the region like [`run`](Self::run), and returns its error or that of the
    /// region.
    ///
    /// # Errors
    ///
    /// The error of `f`, and the same as [`enter`](Self::enter).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::{Autocast, Error};
    ///
    /// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
    /// let product = Autocast::new(Device::Cpu).try_run(|| Ok::<_, Error>(x.f_matmul(&x)?))?;
    /// assert_eq!(product.kind(), Kind::BFloat16);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn try_run<T, E: From<Error>>(
        self,
        f: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.run(f)?
    }

    /// Turns a function into one that opens the region whenever it is called. Corresponds to the decorator
    /// `@torch.autocast(…)`, for instance on the `forward` of a model.
    ///
    /// The function takes a reference, to a tuple if there are several arguments. There is no attribute macro: it would
    /// see the text of a function, but not the device, which is known only when the program runs. A region without a
    /// dtype takes that of the region around the call; PyTorch's decorator takes that of the region around itself.
    ///
    /// # Errors
    ///
    /// None here. The new function returns the errors of [`run`](Self::run); then `f` is not run.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::nn::{self, Module};
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::Autocast;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let net = nn::linear(vs.root(), 4, 2, Default::default());
    /// let forward = Autocast::new(vs.device()).wrap(|xs: &Tensor| net.forward(xs));
    /// for _ in 0..3 {
    ///     let xs = Tensor::randn([8, 4], (Kind::Float, vs.device()));
    ///     assert_eq!(forward(&xs)?.kind(), Kind::BFloat16);
    /// }
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn wrap<A: ?Sized, T>(self, f: impl Fn(&A) -> T) -> impl Fn(&A) -> Result<T> {
        move |argument| self.run(|| f(argument))
    }

    /// The device.
    #[cfg(feature = "insight")]
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The dtype that the region has when it is opened now.
    #[cfg(feature = "insight")]
    pub(crate) fn kind(&self) -> Result<Kind> {
        self.dtype.map_or_else(|| stack::read(&[self.device])?.dtype(self.device), Ok)
    }

    #[cfg(feature = "insight")]
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the thread's state before the region and the state inside it.
    fn states(self) -> Result<(RawAutocastState, RawAutocastState)> {
        let device = self.device;
        #[cfg(feature = "insight")]
        let (off, emulated) = match Regions::here() {
            Regions::AsGiven => (false, false),
            Regions::Off => (true, false),
            Regions::Emulated => (false, true),
        };
        #[cfg(not(feature = "insight"))]
        let (off, emulated) = (false, false);
        let enabled = self.enabled && !off;
        if enabled {
            check_usable(device)?;
        }
        let previous = stack::read(&[device])?;
        let mut next = previous;
        if let Some(cache) = self.cache {
            next.set_cache_enabled(cache);
        }
        match self.overrides {
            Some(overrides) if enabled => {
                next.set_overrides(overrides.inside(previous.overrides())?)
            }
            // They have no effect, and a misspelled name must not wait until the region is switched on.
            Some(overrides) => overrides.check()?,
            None => {}
        }
        next.set_enabled(device, enabled);
        if enabled && emulated {
            next.set_dtype(device, Kind::Float);
            return Ok((previous, next));
        }
        let dtype = self.dtype.map_or_else(|| previous.dtype(device), Ok)?;
        // The dtype of a disabled region is never used, and PyTorch accepts any. `set_dtype` still refuses those that
        // are not floating, which can only be mistakes.
        let allowed = !enabled || matches!(dtype, Kind::BFloat16 | Kind::Half);
        if allowed && next.set_dtype(device, dtype) {
            Ok((previous, next))
        } else {
            Err(AutocastError::Dtype { device, dtype }.into())
        }
    }
}

/// Closes its autocast region when dropped. The counterpart of the `with` statement around `torch.autocast`.
///
/// Guards may be dropped in any order: a region that contains others closes with the last of them, and the thread then
/// has the state from before the first. If a guard is leaked (`std::mem::forget`), its region stays open until the
/// closure of an enclosing [`Autocast::run`] ends. A guard that is returned from such a closure is already closed.
///
/// The backward of a [custom function](mod@crate::function) and the destructors of what a graph holds behave like such
/// closures: every region that they open ends with them. If one of them drops a guard that was created outside, that
/// region closes when the running `backward()` returns, because until then libtorch restores the thread's state.
///
/// # A guard around a whole training loop
///
/// Inside a region libtorch casts a weight once and uses the cast until the region ends. If a guard is opened before
/// the loop, and tch's own optimizer steps in it, **the loss no longer falls, without any error**. Open the region
/// around the forward pass and the loss of each step; the page on [common errors](crate::guide::errors) has the example
/// and the remedies.
///
/// # Thread pools
///
/// A rayon worker that blocks inside a region (in `join`, `scope` or a parallel iterator) runs other jobs meanwhile,
/// and they run inside the region, too. Open regions inside the jobs instead of around the call that blocks;
/// [`AutocastState`](crate::autocast::AutocastState) carries the caller's state into them.
///
/// The guard cannot leave its thread:
///
/// ```compile_fail,E0277
/// fn assert_send<T: Send>() {}
/// assert_send::<tch_amp::autocast::AutocastGuard>();
/// ```
#[derive(Debug)]
#[must_use = "the region ends as soon as its guard is dropped; bind it to a variable such as `_guard`"]
pub struct AutocastGuard {
    id: u64,
    _not_send: PhantomData<*mut ()>,
}

impl AutocastGuard {
    /// Opens a region on `device` with the defaults of [`Autocast::new`].
    ///
    /// # Errors
    ///
    /// The same as [`Autocast::enter`].
    pub fn new(device: Device) -> Result<Self> {
        Autocast::new(device).enter()
    }

    pub(super) fn open(previous: RawAutocastState, next: RawAutocastState) -> Result<Self> {
        Ok(Self { id: stack::open(previous, next)?, _not_send: PhantomData })
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        stack::close(self.id);
    }
}

/// Runs `f` under autocast on `device` with PyTorch's defaults, and restores the previous state when `f` returns or
/// panics. By PyTorch's lists a region on the CPU computes logarithms, exponentials and the like in the dtype of their
/// inputs: a hand-written log-probability of half-precision outputs can be off by 50 % there. A region of
/// [`Amp`](crate::Amp), which chooses the dtype as well, keeps them in f32; so does [`LOG_PROBABILITIES`] by hand.
///
/// [`Autocast`] has the options. The counterpart of `with torch.autocast(device_type):`. The notes of [`AutocastGuard`]
/// on training loops and thread pools apply here as well.
///
/// # Errors
///
/// The same as [`Autocast::enter`]; then `f` is not run.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Reduction, Tensor};
/// use tch_amp::autocast;
///
/// let (xs, w) = (Tensor::ones([2, 2], (Kind::Float, Device::Cpu)), Tensor::eye(2, (Kind::Float, Device::Cpu)));
/// let (ys, loss) = autocast(Device::Cpu, || {
///     let ys = xs.matmul(&w);
///     let loss = ys.mse_loss(&xs, Reduction::Mean);
///     (ys, loss)
/// })?;
/// assert_eq!((ys.kind(), loss.kind()), (Kind::BFloat16, Kind::Float));
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn autocast<T>(device: Device, f: impl FnOnce() -> T) -> Result<T> {
    Autocast::new(device).run(f)
}

/// Runs a closure that can fail like [`autocast`], and returns its error or that of the region.
///
/// # Errors
///
/// The error of `f`, and the same as [`Autocast::enter`].
pub fn try_autocast<T, E: From<Error>>(
    device: Device,
    f: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    Autocast::new(device).try_run(f)
}
