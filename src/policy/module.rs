//! Modules under a policy, and layers that stay in f32.

use tch::Tensor;
use tch::nn::{Module, ModuleT};

#[cfg(doc)]
use crate::Autocast;
use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, PolicyError};
use crate::policy::Policy;
use crate::policy::run::{Run, in_f32};
use crate::tree::Tree;

macro_rules! wrapper {
    ($(#[$doc:meta])* $name:ident $(, $field:ident: $type:ty)*) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name<M> {
            module: M,
            $($field: $type,)*
        }

        impl<M> $name<M> {
            /// Returns the module inside.
            pub fn module(&self) -> &M {
                &self.module
            }

            /// Takes the module out.
            pub fn into_inner(self) -> M {
                self.module
            }
        }
    };
}

wrapper!(
    /// A [`Module`] under a [`Policy`]: made by [`Policy::apply_to`].
    PolicyModule, run: Run
);
wrapper!(
    /// A [`ModuleT`] under a [`Policy`]: made by [`Policy::apply_to_t`].
    PolicyModuleT, run: Run
);
wrapper!(
    /// A [`Module`] that computes in f32: made by [`keep_in_f32`].
    KeptInF32
);
wrapper!(
    /// A [`ModuleT`] that computes in f32: made by [`keep_in_f32_t`].
    KeptInF32T
);

impl Policy {
    /// Puts a module under the policy: its input is cast to the kind to compute in, and its output to that of outputs.
    /// The twin of what apex does to a model's `forward`.
    ///
    /// With different kinds to compute in and for parameters the module runs in an [`Autocast`] region of the kind to
    /// compute in: what jmp does by casting the parameters, autocast does to those of the operations that it runs in
    /// half. The operations that need f32, such as softmax and losses, run in f32 then. With one kind for both it runs
    /// without autocast, also inside of a region; its variables must have that kind (see
    /// [`cast_variables`](Self::cast_variables)).
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn};
    /// use tch_amp::Policy;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let net = nn::linear(vs.root(), 4, 2, Default::default());
    /// let net = Policy::MIXED_BF16.apply_to(net)?;
    /// let ys = Tensor::ones([3, 4], (Kind::Float, Device::Cpu)).apply(&net);
    /// assert_eq!((ys.kind(), net.module().ws.kind()), (Kind::Float, Kind::Float));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PolicyError::Module`] when the two kinds differ and autocast cannot bring the one to the other: it computes in
    /// fp16 and bf16 over parameters of f32, fp16 or bf16. [`PolicyError::Dtype`] for a field that is no kind to cast
    /// to.
    pub fn apply_to<M: Module>(&self, module: M) -> Result<PolicyModule<M>> {
        Ok(PolicyModule { module, run: Run::new(*self)? })
    }

    /// Puts a module that is told whether it trains under the policy, as [`apply_to`](Self::apply_to) does.
    ///
    /// # Errors
    ///
    /// As [`apply_to`](Self::apply_to).
    pub fn apply_to_t<M: ModuleT>(&self, module: M) -> Result<PolicyModuleT<M>> {
        Ok(PolicyModuleT { module, run: Run::new(*self)? })
    }

    /// Runs a closure under the policy, as [`apply_to`](Self::apply_to) runs modules: for models of several inputs or
    /// outputs. The floating tensors of the inputs are cast to the kind to compute in, and those that the closure
    /// returns to that of outputs.
    ///
    /// Autocast is on, or off, for the device of the first tensor of the inputs; for the CPU where there is none.
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
    ///
    /// # Errors
    ///
    /// As [`apply_to`](Self::apply_to) and [`PolicyModule::f_forward`].
    ///
    /// # Panics
    ///
    /// Where the closure does, as it does when the variables have other kinds than the policy's: call
    /// [`cast_variables`](Self::cast_variables) first.
    pub fn run<T: Tree + ?Sized, U: Tree>(
        &self,
        inputs: &T,
        f: impl FnOnce(T::Output) -> U,
    ) -> Result<U::Output> {
        Run::new(*self)?.run(inputs, f)
    }
}

impl<M: Module> PolicyModule<M> {
    /// Runs the module under the policy.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] when a cast fails; what [`Autocast::run`] says of the device of the input.
    ///
    /// # Panics
    ///
    /// Where the module inside does, as it does when its variables have other kinds than the policy's: call
    /// [`cast_variables`](Policy::cast_variables) first.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.run.run(xs, |xs| self.module.forward(&xs))
    }
}

impl<M: ModuleT> PolicyModuleT<M> {
    /// Runs the module under the policy.
    ///
    /// # Errors
    ///
    /// As [`PolicyModule::f_forward`].
    ///
    /// # Panics
    ///
    /// As [`PolicyModule::f_forward`].
    pub fn f_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.run.run(xs, |xs| self.module.forward_t(&xs, train))
    }
}

/// Panics with an error, as tch's own modules do: the trait leaves no other way.
fn or_panic(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|error| panic!("{error}"))
}

impl<M: Module> Module for PolicyModule<M> {
    /// Runs the module under the policy. Panics where [`f_forward`](PolicyModule::f_forward) fails.
    fn forward(&self, xs: &Tensor) -> Tensor {
        or_panic(self.f_forward(xs))
    }
}

impl<M: ModuleT> ModuleT for PolicyModuleT<M> {
    /// Runs the module under the policy. Panics where [`f_forward_t`](PolicyModuleT::f_forward_t) fails.
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_t(xs, train))
    }
}

/// Keeps a layer in f32 in a half model: its input is cast up, it runs without autocast, and its output is cast back to
/// the kind that came in.
///
/// The layer's variables must be f32. Which layers are wrapped and which names [`KeepF32`](crate::policy::KeepF32)
/// keeps are two lists that must agree: a layer on one of them only fails, or runs with an input and weights of
/// different kinds. [`cast_variables`](Policy::cast_variables) returns the second.
///
/// On the CPU libtorch's `batch_norm`, `layer_norm` and `group_norm` take half inputs with f32 weights as they are, and
/// compute in f32. On other devices do not rely on that. A wrapped layer norm does not need it:
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::Policy;
/// use tch_amp::policy::{KeepF32, keep_in_f32};
///
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let root = vs.root();
/// let net = nn::seq()
///     .add(nn::linear(&root / "in", 4, 8, Default::default()))
///     .add(keep_in_f32(nn::layer_norm(&root / "norm", vec![8], Default::default())))
///     .add(nn::linear(&root / "out", 8, 2, Default::default()));
/// drop(root);
/// let policy = Policy::BF16.with_output(Kind::Float)?;
/// policy.cast_variables(&mut vs, KeepF32::Norms)?;
/// let net = policy.apply_to(net)?;
/// let ys = Tensor::ones([3, 4], (Kind::Float, Device::Cpu)).apply(&net);
/// assert_eq!(ys.kind(), Kind::Float);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn keep_in_f32<M: Module>(layer: M) -> KeptInF32<M> {
    KeptInF32 { module: layer }
}

/// Keeps a layer that is told whether it trains, such as a batch norm, in f32, as [`keep_in_f32`] does.
pub fn keep_in_f32_t<M: ModuleT>(layer: M) -> KeptInF32T<M> {
    KeptInF32T { module: layer }
}

impl<M: Module> KeptInF32<M> {
    /// Runs the layer in f32.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] when a cast fails.
    ///
    /// # Panics
    ///
    /// Where the layer inside does.
    pub fn f_forward(&self, xs: &Tensor) -> Result<Tensor> {
        in_f32(xs, |xs| self.module.forward(xs))
    }
}

impl<M: ModuleT> KeptInF32T<M> {
    /// Runs the layer in f32.
    ///
    /// # Errors
    ///
    /// As [`KeptInF32::f_forward`].
    ///
    /// # Panics
    ///
    /// Where the layer inside does.
    pub fn f_forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        in_f32(xs, |xs| self.module.forward_t(xs, train))
    }
}

impl<M: Module> Module for KeptInF32<M> {
    /// Runs the layer in f32. Panics where [`f_forward`](KeptInF32::f_forward) fails, as tch's modules do.
    fn forward(&self, xs: &Tensor) -> Tensor {
        or_panic(self.f_forward(xs))
    }
}

impl<M: ModuleT> ModuleT for KeptInF32T<M> {
    /// Runs the layer in f32. Panics where [`f_forward_t`](KeptInF32T::f_forward_t) fails, as tch's modules do.
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        or_panic(self.f_forward_t(xs, train))
    }
}
