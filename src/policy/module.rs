//! Modules under a policy, and layers that stay in f32.

use tch::nn::{Module, ModuleT};
use tch::{Device, Kind, Tensor};

use crate::Autocast;
use crate::autocast::is_autocast_enabled;
use crate::error::{Error, PolicyError, Result};
use crate::policy::Policy;
use crate::policy::dtypes::cast;
use crate::tree::{Tree, floating_kind, leaves};

/// A `Module` that runs under a [`Policy`] or in f32; see [`Policy::apply_to`] and [`run_in_f32`].
#[derive(Debug)]
pub struct PolicyModule<M> {
    /// The wrapped module.
    pub module: M,
    way: Way,
}

/// A `ModuleT` that runs under a [`Policy`] or in f32; see [`Policy::apply_to_t`] and [`run_in_f32_t`].
#[derive(Debug)]
pub struct PolicyModuleT<M> {
    /// The wrapped module.
    pub module: M,
    way: Way,
}

/// How a wrapped module runs.
#[derive(Debug)]
enum Way {
    Under(ModulePolicy),
    InF32,
}

impl Way {
    fn run(&self, xs: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Result<Tensor> {
        match self {
            Self::Under(policy) => policy.run(xs, |xs| f(&xs)),
            Self::InF32 => in_f32(xs, f),
        }
    }
}

impl Policy {
    /// Wraps a `Module` in this policy: its input is cast to `compute`, and its output to `output`. apex patches a
    /// model's `forward` in the same way.
    ///
    /// If `param` and `compute` differ, the module runs in an [`Autocast`] region of the dtype `compute`. Where jmp
    /// casts all parameters, autocast casts those of the operations on its list of half precision, such as matrix
    /// products and convolutions; operations on its list of f32, such as losses, run in f32 ([all
    /// lists](crate::guide::operations)). If `param` and `compute` are the same, the module runs without autocast, even
    /// inside an enclosing region, and its variables must have that dtype (see
    /// [`cast_variables`](Self::cast_variables)).
    ///
    /// # Errors
    ///
    /// - [`PolicyError::Module`] if `param` and `compute` differ and autocast does not support the pair: `compute` must
    ///   be fp16 or bf16, and `param` f32, fp16 or bf16.
    /// - [`PolicyError::Dtype`] if a field is not f32, fp16, bf16 or f64.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn};
    /// use tch_amp::Policy;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let net = nn::linear(vs.root(), 4, 2, Default::default());
    /// let net = Policy::MIXED_BF16.apply_to(net)?;
    /// let ys = Tensor::ones([3, 4], (Kind::Float, Device::Cpu)).apply(&net);
    /// assert_eq!((ys.kind(), net.module.ws.kind()), (Kind::Float, Kind::Float));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn apply_to<M: Module>(&self, module: M) -> Result<PolicyModule<M>> {
        Ok(PolicyModule { module, way: Way::Under(ModulePolicy::new(*self)?) })
    }

    /// Wraps a `ModuleT` in this policy, like [`apply_to`](Self::apply_to) for a `Module`.
    ///
    /// # Errors
    ///
    /// The same as [`apply_to`](Self::apply_to).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn};
    /// use tch_amp::Policy;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let net = nn::seq_t()
    ///     .add(nn::linear(vs.root(), 4, 2, Default::default()))
    ///     .add_fn_t(|xs, train| xs.dropout(0.5, train));
    /// let net = Policy { output: Kind::BFloat16, ..Policy::MIXED_BF16 }.apply_to_t(net)?;
    /// let ys = net.f_forward_t(&Tensor::ones([3, 4], (Kind::Float, Device::Cpu)), false)?;
    /// assert_eq!((ys.size(), ys.kind()), (vec![3, 2], Kind::BFloat16));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn apply_to_t<M: ModuleT>(&self, module: M) -> Result<PolicyModuleT<M>> {
        Ok(PolicyModuleT { module, way: Way::Under(ModulePolicy::new(*self)?) })
    }

    /// Runs a closure under the policy, like [`apply_to`](Self::apply_to) for a module. It suits models with several
    /// inputs or outputs. The floating-point tensors of the inputs are cast to `compute`, and those that the closure
    /// returns to `output`.
    ///
    /// The region is one for the device of the first tensor of the inputs, or for the CPU if there is no tensor.
    ///
    /// # Errors
    ///
    /// The same as [`apply_to`](Self::apply_to) and [`PolicyModule::f_forward`].
    ///
    /// # Panics
    ///
    /// If the closure panics, for instance because the variables do not have the policy's dtype: call
    /// [`cast_variables`](Self::cast_variables) first.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn};
    /// use tch_amp::Policy;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let embed = nn::embedding(vs.root() / "embed", 10, 4, Default::default());
    /// let head = nn::linear(vs.root() / "head", 4, 2, Default::default());
    /// let model = |tokens: &Tensor, mask: &Tensor| (tokens.apply(&embed) * mask.unsqueeze(-1)).apply(&head);
    ///
    /// let tokens = Tensor::from_slice(&[1i64, 7, 0]);
    /// let mask = Tensor::from_slice(&[1f32, 1.0, 0.0]);
    /// let ys = Policy::MIXED_BF16.run(&(tokens, mask), |(tokens, mask)| model(&tokens, &mask))?;
    /// assert_eq!((ys.kind(), ys.size()), (Kind::Float, vec![3, 2]));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn run<T: Tree + ?Sized, U: Tree>(
        &self,
        inputs: &T,
        f: impl FnOnce(T::Output) -> U,
    ) -> Result<U::Output> {
        ModulePolicy::new(*self)?.run(inputs, f)
    }
}

impl<M: Module> PolicyModule<M> {
    /// Runs the module under its policy, or in f32.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a cast fails, and the errors of [`Autocast::run`] for the device of the input.
    ///
    /// # Panics
    ///
    /// If the wrapped module panics, for instance because its variables do not have the policy's dtype: call
    /// [`cast_variables`](Policy::cast_variables) first.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.way.run(xs, |xs| self.module.forward(xs))
    }
}

impl<M: ModuleT> PolicyModuleT<M> {
    /// Runs the module under its policy, or in f32.
    ///
    /// # Errors
    ///
    /// The same as [`PolicyModule::f_forward`].
    ///
    /// # Panics
    ///
    /// The same as [`PolicyModule::f_forward`].
    pub fn f_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.way.run(xs, |xs| self.module.forward_t(xs, train))
    }
}

/// Panics with an error, as tch's own modules do, because `Module` has no other way to report it.
fn or_panic(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| panic!("{error}"))
}

impl<M: Module> Module for PolicyModule<M> {
    /// Runs the module. Panics if [`f_forward`](PolicyModule::f_forward) fails.
    fn forward(&self, xs: &Tensor) -> Tensor {
        or_panic(self.f_forward(xs))
    }
}

impl<M: ModuleT> ModuleT for PolicyModuleT<M> {
    /// Runs the module. Panics if [`f_forward_t`](PolicyModuleT::f_forward_t) fails.
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_t(xs, train))
    }
}

/// Wraps a layer so that it runs in f32 inside a half-precision model: a half-precision input is cast to f32, the layer
/// runs without autocast, and its output is cast back to the input's dtype.
///
/// The layer's variables must be f32: wrap exactly the layers whose variables [`KeepF32`](crate::policy::KeepF32)
/// keeps, which are those that [`cast_variables`](Policy::cast_variables) returns. A layer to which only one of the two
/// applies fails, or runs with an input and weights of different dtypes.
///
/// On the CPU libtorch's `batch_norm`, `layer_norm` and `group_norm` accept half-precision inputs with f32 weights and
/// compute in f32. Do not rely on that on other devices; a wrapped norm does not need it:
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::Policy;
/// use tch_amp::policy::{KeepF32, run_in_f32};
///
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let root = vs.root();
/// let net = nn::seq()
///     .add(nn::linear(&root / "in", 4, 8, Default::default()))
///     .add(run_in_f32(nn::layer_norm(&root / "norm", vec![8], Default::default())))
///     .add(nn::linear(&root / "out", 8, 2, Default::default()));
/// drop(root);
/// let policy = Policy { output: Kind::Float, ..Policy::BF16 };
/// policy.cast_variables(&mut vs, KeepF32::Norms)?;
/// let net = policy.apply_to(net)?;
/// let ys = Tensor::ones([3, 4], (Kind::Float, Device::Cpu)).apply(&net);
/// assert_eq!(ys.kind(), Kind::Float);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn run_in_f32<M: Module>(layer: M) -> PolicyModule<M> {
    PolicyModule { module: layer, way: Way::InF32 }
}

/// Wraps a `ModuleT`, such as a batch norm, so that it runs in f32, like [`run_in_f32`] for a `Module`.
pub fn run_in_f32_t<M: ModuleT>(layer: M) -> PolicyModuleT<M> {
    PolicyModuleT { module: layer, way: Way::InF32 }
}

/// Runs `f` without autocast on the input, which is cast to f32 if it is in half precision, and the output back.
fn in_f32(xs: &Tensor, f: impl FnOnce(&Tensor) -> Tensor) -> Result<Tensor> {
    let device = device_of(xs);
    match floating_kind(xs) {
        Some(kind @ (Kind::Half | Kind::BFloat16)) => {
            let xs = cast(xs, Kind::Float)?;
            let ys = without_autocast(device, || f(&xs))?;
            cast(&ys, kind)
        }
        _ => without_autocast(device, || f(xs)),
    }
}

/// Returns the device of the first tensor, or the CPU if there is none.
fn device_of<T: Tree + ?Sized>(inputs: &T) -> Device {
    leaves(inputs).first().map_or(Device::Cpu, |tensor| tensor.device())
}

fn without_autocast<R>(device: Device, f: impl FnOnce() -> R) -> Result<R> {
    if is_autocast_enabled(device) { Autocast::new(device).enabled(false).run(f) } else { Ok(f()) }
}

/// A checked policy, under which modules and closures run.
#[derive(Debug)]
struct ModulePolicy(Policy);

impl ModulePolicy {
    fn new(policy: Policy) -> Result<Self> {
        let Policy { param, compute, .. } = policy.checked()?;
        let casts = matches!(compute, Kind::Half | Kind::BFloat16) && param != Kind::Double;
        if param == compute || casts {
            Ok(Self(policy))
        } else {
            Err(Error::Policy(PolicyError::Module { param, compute }))
        }
    }

    fn run<T: Tree + ?Sized, U: Tree>(
        &self,
        inputs: &T,
        f: impl FnOnce(T::Output) -> U,
    ) -> Result<U::Output> {
        let Policy { param, compute, .. } = self.0;
        let device = device_of(inputs);
        let inputs = self.0.cast_to_compute(inputs)?;
        let outputs = if param == compute {
            without_autocast(device, || f(inputs))?
        } else {
            Autocast::new(device).dtype(compute).run(|| f(inputs))?
        };
        self.0.cast_to_output(&outputs)
    }
}
