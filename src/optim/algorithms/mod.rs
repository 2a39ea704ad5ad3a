//! The algorithms of the optimizers, one in each file with all that is particular to it: its options and their ranges,
//! the tensors of its state, what a step tells the shim, and its names in the files of `torch.optim`.
//!
//! Options are deserialized by hand: serde's derive for tagged and flattened fields buffers numbers, and cannot read
//! them again if any crate of the program enables serde_json's feature `arbitrary_precision`.

mod adafactor;
mod adagrad;
mod adam;
mod lion;
mod muon;
mod nadam;
mod rmsprop;
mod sgd;

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Map;
use torch_files::Value;

use crate::error::{Result, ensure};
use crate::ffi::{MomentFormat, OptimOptions, StateShape};

pub use adafactor::Adafactor;
pub use adagrad::Adagrad;
pub use adam::{Adam, AdamW};
pub use lion::Lion;
pub use muon::{AdjustLr, Muon};
pub use nadam::NAdam;
pub use rmsprop::RmsProp;
pub use sgd::Sgd;

/// The largest number of tensors that are kept for a parameter, without its step.
pub(crate) const KEPT: usize = 3;

/// The key of the exponents of 8-bit moments. It stands for the codes: others would have another key.
pub(crate) const EXPONENTS: &str = "exponents";

/// A tensor that an algorithm keeps for each parameter.
pub(crate) struct StateTensor {
    /// Its key in PyTorch.
    pub(crate) key: &'static str,
    /// Whether a state that was begun has it with any options.
    pub(crate) is_required: bool,
    /// Its shape, unless the moments have fewer bits.
    pub(crate) shape: StateShape,
}

impl StateTensor {
    const fn required(key: &'static str) -> Self {
        Self { key, is_required: true, shape: StateShape::Like }
    }

    const fn optional(key: &'static str) -> Self {
        Self { is_required: false, ..Self::required(key) }
    }

    const fn shaped(self, shape: StateShape) -> Self {
        Self { shape, ..self }
    }
}

/// Whether an algorithm has moments of fewer bits than f32.
pub(crate) enum LowBit {
    Possible,
    /// Not in this mode or with these options, for a reason.
    Refused(&'static str),
    Never,
}

/// The options of a group, under the names of `torch.optim`.
pub(crate) type Fields = Vec<(Value, Value)>;

/// The answers of an algorithm to what the rest of the optimizer asks.
pub(crate) trait Spec {
    /// Returns an error for an option that is outside its range.
    fn check(&self, lr: f64) -> Result<()>;

    /// The options of a step, as the shim takes them.
    fn options(&self, lr: f64) -> OptimOptions;

    /// The options of the parameters that the algorithm leaves to another one.
    fn other_options(&self, lr: f64) -> OptimOptions {
        self.options(lr)
    }

    /// The tensors that may be kept for each parameter, in the order of the shim. `step` is not among them.
    fn tensors(&self, kept_as: MomentFormat) -> &'static [StateTensor];

    /// Which of them these options need for a parameter of so many dimensions.
    fn used(&self, _kept_as: MomentFormat, _dims: usize) -> [bool; KEPT] {
        [true, false, false]
    }

    /// The initial value of the elements of a tensor.
    fn initial(&self, _place: usize) -> f64 {
        0.0
    }

    /// Returns whether the state is there before the first step.
    fn begins_with_state(&self) -> bool {
        false
    }

    /// Returns whether the arithmetic depends on the number of steps.
    fn counts_steps(&self) -> bool {
        true
    }

    /// Returns whether the first gradient becomes the momentum.
    fn starts_with_gradient(&self) -> bool {
        false
    }

    /// Returns whether the first gradient enters the momentum in another way than later ones.
    fn first_step_differs(&self) -> bool {
        false
    }

    /// Sets the weight decay, for Muon also that of its AdamW.
    fn set_weight_decay(&mut self, weight_decay: f64);

    /// The momentum; for Adam, AdamW, NAdam and Lion the first beta, as in tch.
    fn momentum_mut(&mut self) -> Option<&mut f64> {
        None
    }

    /// The betas by which 8-bit moments are scaled.
    fn betas(&self) -> (f64, f64) {
        (0.0, 0.0)
    }

    fn low_bit(&self, _kept_as: MomentFormat) -> LowBit {
        LowBit::Never
    }

    /// The options, including those that only PyTorch has. `has_fused_kernels` says whether it could step the
    /// parameters of the group by fused ones.
    fn torch_options(&self, has_fused_kernels: bool) -> Fields;

    /// Returns whether PyTorch has fused kernels on GPUs, if it has any.
    fn is_fused_on_gpus(&self) -> bool {
        true
    }

    /// Returns whether a group of `torch.optim`, which does not name its algorithm, is one of this.
    fn is_in(group: TorchGroup<'_>) -> bool
    where
        Self: Sized;
}

/// The options of a group of `torch.optim`.
#[derive(Clone, Copy)]
pub(crate) struct TorchGroup<'a>(pub(crate) &'a [(Value, Value)]);

impl TorchGroup<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(key, _)| key.text() == Some(name));
        found.map(|(_, value)| value)
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn is_true(&self, name: &str) -> bool {
        self.get(name) == Some(&Value::Bool(true))
    }

    /// Returns whether it is a group of the FusedAdam of apex, which has no AMSGrad, and whose option says that it is
    /// an Adam like PyTorch's. Its FusedLAMB and FusedNovoGrad have this option and one more.
    pub(crate) fn is_fused_adam(&self) -> bool {
        let has_own = ["betas", "eps", "weight_decay"].iter().all(|name| self.has(name));
        let has_others = ["amsgrad", "grad_averaging"].iter().any(|name| self.has(name));
        has_own && self.is_true("bias_correction") && !has_others
    }
}

fn float(name: &str, value: f64) -> (Value, Value) {
    (name.into(), Value::Float(value))
}

fn flag(name: &str, value: bool) -> (Value, Value) {
    (name.into(), Value::Bool(value))
}

fn pair(name: &str, (first, second): (f64, f64)) -> (Value, Value) {
    (name.into(), Value::Tuple(vec![Value::Float(first), Value::Float(second)]))
}

/// The options of all algorithms that have fused kernels in PyTorch.
///
/// PyTorch loads all options from the file, including `fused`. An optimizer that was built with `fused=True` then fails
/// with a scaler if a group is not fused. Conversely, an optimizer without `fused=True` works and uses the fused
/// kernels, as with any file saved by a fused optimizer in Python. Therefore `fused` is true wherever the kernels
/// exist.
fn fused(has_fused_kernels: bool) -> [(Value, Value); 3] {
    let fused = if has_fused_kernels { Value::Bool(true) } else { Value::None };
    [flag("differentiable", false), ("foreach".into(), Value::None), ("fused".into(), fused)]
}

fn non_negative(field: &'static str, value: f64) -> Result<()> {
    ensure(field, value, value >= 0.0 && value.is_finite(), "finite and at least 0")
}

fn check_betas((first, second): (f64, f64)) -> Result<()> {
    for beta in [first, second] {
        ensure("betas", beta, (0.0..1.0).contains(&beta), "from 0 to below 1")?;
    }
    Ok(())
}

/// Calls a macro with the struct of options of each algorithm and its name in PyTorch.
macro_rules! each_algorithm {
    ($call:ident) => {
        $call! {
            Adam "Adam"
            AdamW "AdamW"
            Sgd "SGD"
            Adagrad "Adagrad"
            RmsProp "RMSprop"
            Lion "Lion"
            Muon "Muon"
            NAdam "NAdam"
            Adafactor "Adafactor"
        }
    };
}

pub(crate) use each_algorithm;

macro_rules! algorithms {
    ($($config:ident $torch:literal)*) => {
        /// The algorithm of a fused optimizer, with its options.
        ///
        /// # Examples
        ///
        /// ```
        /// use tch::{Device, nn};
        /// use tch_amp::optim::{AdamW, Algorithm};
        ///
        /// let configured = r#"{"algorithm": "AdamW", "weight_decay": 0.1}"#;
        /// let algorithm: Algorithm = serde_json::from_str(configured)?;
        /// assert_eq!(algorithm, AdamW { weight_decay: 0.1, ..Default::default() }.into());
        /// let opt = algorithm.build(&nn::VarStore::new(Device::Cpu), 1e-3)?;
        /// assert_eq!(opt.param_group(0)?.algorithm, algorithm);
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
        #[serde(tag = "algorithm")]
        #[non_exhaustive]
        pub enum Algorithm {
            $(
                #[doc = concat!("[`", stringify!($config), "`].")]
                $config($config),
            )*
        }

        impl Algorithm {
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Self::$config(_) => stringify!($config),)*
                }
            }

            pub(crate) fn spec(&self) -> &dyn Spec {
                match self {
                    $(Self::$config(config) => config,)*
                }
            }

            pub(crate) fn spec_mut(&mut self) -> &mut dyn Spec {
                match self {
                    $(Self::$config(config) => config,)*
                }
            }

            /// Infers the algorithm of a group of `torch.optim`, and returns its name.
            pub(crate) fn name_in(group: TorchGroup<'_>) -> std::result::Result<&'static str, String> {
                $(
                    if $config::is_in(group) {
                        return Ok(stringify!($config));
                    }
                )*
                let mut known = vec![$($torch),*];
                let last = known.pop().unwrap_or_default();
                Err(format!("are not those of {} or {last}", known.join(", ")))
            }

            fn read(fields: &OptionFields) -> JsonResult<Self> {
                let options = serde_json::Value::Object(fields.clone());
                let name: String = field(fields, "algorithm")?;
                $(
                    if name == stringify!($config) {
                        return Ok(Self::$config(serde_json::from_value(options)?));
                    }
                )*
                Err(serde_json::Error::unknown_variant(&name, &[$(stringify!($config)),*]))
            }
        }

        $(
            impl From<$config> for Algorithm {
                fn from(config: $config) -> Self {
                    Self::$config(config)
                }
            }
        )*
    };
}

each_algorithm!(algorithms);

impl Algorithm {
    pub(crate) fn check(&self, lr: f64) -> Result<()> {
        non_negative("lr", lr)?;
        self.spec().check(lr)
    }

    /// The momentum; for Adam, AdamW, NAdam and Lion the first beta, as in tch.
    pub(crate) fn momentum(mut self) -> Option<f64> {
        self.spec_mut().momentum_mut().map(|momentum| *momentum)
    }
}

/// The options of a parameter group.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::optim::{AdamW, ParamGroup};
///
/// let mut opt = AdamW::default().build(&nn::VarStore::new(Device::Cpu), 1e-3)?;
/// let options = ParamGroup::new(1e-4, AdamW { weight_decay: 0.1, ..Default::default() });
/// opt.set_param_group(0, options)?;
/// assert_eq!(opt.param_group(0)?, &options);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ParamGroup {
    /// The learning rate.
    pub lr: f64,
    /// The algorithm, which is the same for all groups, and its options.
    #[serde(flatten)]
    pub algorithm: Algorithm,
}

impl ParamGroup {
    /// Makes the options of a group, for example from an [`AdamW`](crate::optim::AdamW).
    pub fn new(lr: f64, algorithm: impl Into<Algorithm>) -> Self {
        Self { lr, algorithm: algorithm.into() }
    }

    /// The options of a step, as the shim takes them: those of the algorithm, and those of AdamW for what Muon leaves
    /// to it.
    pub(crate) fn options(&self) -> [OptimOptions; 2] {
        let spec = self.algorithm.spec();
        [spec.options(self.lr), spec.other_options(self.lr)]
    }
}

/// The fields of a saved form.
pub(in crate::optim) type OptionFields = Map<String, serde_json::Value>;

type JsonResult<T> = std::result::Result<T, serde_json::Error>;

impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(&OptionFields::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for ParamGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(&OptionFields::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl ParamGroup {
    /// Reads the options, whatever other fields there are.
    pub(in crate::optim) fn read(fields: &OptionFields) -> JsonResult<Self> {
        Ok(Self { lr: field(fields, "lr")?, algorithm: Algorithm::read(fields)? })
    }
}

fn field<T: DeserializeOwned>(fields: &OptionFields, name: &'static str) -> JsonResult<T> {
    let value = fields.get(name).ok_or_else(|| serde_json::Error::missing_field(name))?;
    T::deserialize(value)
}
