//! Rules for the operators of a region, and plans: rules as data, with the place for which they were made.

use std::fmt;
use std::result::Result as StdResult;

use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tch::{Device, Kind};

use crate::device::check_usable;
use crate::error::{AutocastError, Result, strict};
use crate::ffi;
use crate::precision::bf16_is_native;

/// How an operator runs inside a region, for a [`Rule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum RunAs {
    /// In f32, as with [`Autocast::keep_in_f32`](crate::Autocast::keep_in_f32).
    F32,
    /// In the dtype of the region, as with [`Autocast::prefer_half`](crate::Autocast::prefer_half).
    Half,
    /// For `scaled_dot_product_attention` alone: as a product, a softmax and a product in the dtype of the region,
    /// instead of by a fused kernel. It takes the same arguments with the same meaning: masks of numbers or booleans,
    /// `is_causal`, `scale`, dropout and grouped heads. Rows without any key are zero.
    ///
    /// On CPUs it can be several times as fast for short sequences, and it takes more memory: the probabilities, which
    /// are kept for the backward pass, have a number in half precision for each head, query and key, and three with
    /// dropout. The scores are rounded once to half precision, which fused kernels do not do. From a mask of numbers
    /// the largest of each row is subtracted first, which changes no probability: beside a large number, such as -10000
    /// on all keys of a padded row, half precision has no digits left for the scores.
    Composed {
        /// The limit on the bytes of these probabilities in one call. Where they would take more, and for calls that
        /// cannot be composed, such as those with f64, the rule does not apply.
        most_bytes: u64,
    },
}

impl RunAs {
    /// How it is said after the name of an operator.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::F32 => "in f32",
            Self::Half => "in half precision",
            Self::Composed { .. } => "composed",
        }
    }
}

/// How the calls of an operator run inside a region, all of them or those of some sizes.
///
/// The size of a matrix product is the number of its multiplications: rows × columns × depth, times the batch. That of
/// a convolution is the number of its input or output channels, whichever is smaller; that of an attention the length
/// of its queries or keys, whichever is longer; and that of any other operator the number of elements of its first
/// tensor, or list of tensors.
///
/// A rule that holds for no size, because `below` is not above `at_least`, is refused when it is read and by
/// [`Autocast::plan`](crate::Autocast::plan). So are unknown keys in a file, which could be misspelled limits.
///
/// # Examples
///
/// ```
/// use tch_amp::autocast::{Rule, RunAs};
///
/// let narrow = Rule { below: Some(100_000), ..Rule::new("linear", RunAs::F32) };
/// let short = Rule { below: Some(512), ..Rule::new("scaled_dot_product_attention", RunAs::Composed { most_bytes: 1 << 28 }) };
/// assert_eq!(narrow.to_string(), "linear of size below 100000: in f32");
/// assert_eq!(short.to_string(), "scaled_dot_product_attention of size below 512: composed, up to 256 MiB");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Rule {
    /// The operator, by the names of [`Autocast::keep_in_f32`](crate::Autocast::keep_in_f32).
    pub operator: String,
    /// How it runs.
    pub run_as: RunAs,
    /// The smallest size to which the rule applies.
    pub at_least: u64,
    /// The size from which on the rule no longer applies; `None` if there is no such size.
    pub below: Option<u64>,
}

/// A rule as it is read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFields {
    operator: String,
    run_as: RunAs,
    #[serde(default)]
    at_least: u64,
    #[serde(default)]
    below: Option<u64>,
}

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> StdResult<Self, D::Error> {
        let RuleFields { operator, run_as, at_least, below } = strict(deserializer)?;
        let rule = Self { operator, run_as, at_least, below };
        rule.check().map_err(D::Error::custom)?;
        Ok(rule)
    }
}

impl Rule {
    /// Creates a rule for calls of all sizes.
    pub fn new(operator: impl Into<String>, run_as: RunAs) -> Self {
        Self { operator: operator.into(), run_as, at_least: 0, below: None }
    }

    /// Refuses a rule that holds for no size.
    fn check(&self) -> StdResult<(), AutocastError> {
        match self.below {
            Some(below) if below <= self.at_least => Err(AutocastError::EmptyRange {
                operator: self.operator.clone(),
                at_least: self.at_least,
                below,
            }),
            _ => Ok(()),
        }
    }

    /// Returns whether this rule applies to every call, so that none before it can apply any more.
    pub(super) fn is_for_all(&self) -> bool {
        let may_not_apply = matches!(self.run_as, RunAs::Composed { .. });
        self.at_least == 0 && self.below.is_none() && !may_not_apply
    }
}

/// Where a [`Plan`] holds: a type of device, a version of libtorch, and a number of threads. Two models of GPUs, or of
/// CPUs, for which these fields are the same are not told apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Platform {
    /// The type of the device, such as `cpu` or `cuda`.
    pub device: String,
    /// Whether the device [computes in bf16](crate::precision::bf16_is_native) by instructions of its own.
    pub bf16_is_native: bool,
    /// The version of libtorch, such as `2.13.0`.
    pub libtorch: String,
    /// How many threads libtorch uses within an operator; `None` if the device is not the CPU.
    pub threads: Option<u64>,
}

impl Platform {
    /// Describes a device in this process, with the number of threads that libtorch uses now.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) if the device cannot be used here.
    pub fn of(device: Device) -> Result<Self> {
        check_usable(device)?;
        let name = match device {
            Device::Cpu => "cpu",
            Device::Cuda(_) => "cuda",
            Device::Mps => "mps",
            Device::Vulkan => "vulkan",
        };
        let threads = u64::try_from(tch::get_num_threads()).ok();
        Ok(Self {
            device: name.to_owned(),
            bf16_is_native: bf16_is_native(device)?,
            libtorch: ffi::libtorch_version(),
            threads: threads.filter(|_| device == Device::Cpu),
        })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bf16 = if self.bf16_is_native { "with" } else { "without" };
        write!(f, "{} {bf16} instructions for bf16, libtorch {}", self.device, self.libtorch)?;
        match self.threads {
            None => Ok(()),
            Some(1) => f.write_str(", 1 thread"),
            Some(threads) => write!(f, ", {threads} threads"),
        }
    }
}

/// The precision of every operator of a region, for [`Autocast::plan`](crate::Autocast::plan): a dtype, and rules for
/// operators that are faster otherwise. It is plain data, to be kept in a file beside a model.
///
#[cfg_attr(
    feature = "insight",
    doc = "An [`insight::Tuner`](crate::insight::Tuner) measures which plan is the fastest for a model. "
)]
/// A plan holds on the [`Platform`] for which it was made, and regions elsewhere refuse it. Its serialized form has a
/// version under the key `_version`: one of a newer version is refused, and so is an unknown key, with the nearest
/// known one in the message. PyTorch has no counterpart.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
/// use tch_amp::autocast::{Plan, Rule, RunAs};
///
/// let narrow = Rule { below: Some(100_000), ..Rule::new("matmul", RunAs::F32) };
/// let plan = Plan { dtype: Some(Kind::BFloat16), rules: vec![narrow], ..Plan::new(Device::Cpu)? };
/// let text = serde_json::to_string(&plan).expect("a plan is plain data");
///
/// let plan: Plan = serde_json::from_str(&text).expect("it is what was written");
/// let region = Autocast::new(Device::Cpu).plan(&plan)?;
/// let product = |size| {
///     let x = Tensor::ones([size, size], (Kind::Float, Device::Cpu));
///     region.run(|| x.matmul(&x).kind())
/// };
/// assert_eq!((product(10)?, product(50)?), (Kind::Float, Kind::BFloat16));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(into = "PlanFields")]
pub struct Plan {
    /// Where the plan holds.
    pub platform: Platform,
    /// The dtype of the region, `"bf16"` or `"fp16"` as data. `None` leaves every operator in f32: the region is
    /// switched off.
    pub dtype: Option<Kind>,
    /// The rules. Of those for an operator, the last that applies to a call counts; where none does, autocast's lists
    /// do.
    pub rules: Vec<Rule>,
}

/// The version of the serialized form of a plan. Builds from before it wrote none.
const VERSION: u64 = 1;

/// A plan as it is written and read.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFields {
    /// It is read before the others, which a newer version may have changed: it comes first, also among sorted keys.
    #[serde(rename = "_version", default, deserialize_with = "read_version")]
    version: u64,
    platform: Platform,
    #[serde(serialize_with = "write_dtype", deserialize_with = "read_dtype")]
    dtype: Option<Kind>,
    rules: Vec<Rule>,
}

impl From<Plan> for PlanFields {
    fn from(Plan { platform, dtype, rules }: Plan) -> Self {
        Self { version: VERSION, platform, dtype, rules }
    }
}

impl<'de> Deserialize<'de> for Plan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> StdResult<Self, D::Error> {
        let PlanFields { version: _, platform, dtype, rules } = strict(deserializer)?;
        Ok(Self { platform, dtype, rules })
    }
}

fn read_version<'de, D: Deserializer<'de>>(deserializer: D) -> StdResult<u64, D::Error> {
    let version = u64::deserialize(deserializer)?;
    if version <= VERSION {
        return Ok(version);
    }
    Err(D::Error::custom(format!(
        "the plan has version {version}, and this build of tch-amp reads plans up to version {VERSION}: update tch-amp, or \
         make the plan again"
    )))
}

impl Plan {
    /// Creates a plan without rules for a device as it is here, which leaves every operator in f32.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) if the device cannot be used here.
    pub fn new(device: Device) -> Result<Self> {
        Ok(Self { platform: Platform::of(device)?, dtype: None, rules: Vec::new() })
    }

    /// Refuses the plan if it does not hold for a device as it is here, or a rule for no size.
    pub(super) fn check(&self, device: Device) -> Result<()> {
        let here = Platform::of(device)?;
        if self.platform != here {
            let plan = self.platform.to_string();
            return Err(AutocastError::PlanElsewhere { plan, here: here.to_string() }.into());
        }
        Ok(self.rules.iter().try_for_each(Rule::check)?)
    }
}

const DTYPES: [(Kind, &str); 2] = [(Kind::BFloat16, "bf16"), (Kind::Half, "fp16")];

fn name_of(dtype: Kind) -> Option<&'static str> {
    DTYPES.iter().find(|(kind, _)| *kind == dtype).map(|(_, name)| *name)
}

#[allow(clippy::ref_option, reason = "serde calls it with a reference to the field")]
fn write_dtype<S: Serializer>(dtype: &Option<Kind>, serializer: S) -> StdResult<S::Ok, S::Error> {
    let unknown = || S::Error::custom("the dtype of a plan is neither bf16 nor fp16");
    let name = dtype.map(|dtype| name_of(dtype).ok_or_else(unknown)).transpose()?;
    name.serialize(serializer)
}

fn read_dtype<'de, D: Deserializer<'de>>(deserializer: D) -> StdResult<Option<Kind>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    let found = DTYPES.iter().find(|(_, name)| *name == text);
    let unknown = || D::Error::unknown_variant(&text, &["bf16", "fp16"]);
    found.map(|(kind, _)| Some(*kind)).ok_or_else(unknown)
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.operator)?;
        match (self.at_least, self.below) {
            (0, None) => {}
            (0, Some(below)) => write!(f, " of size below {below}")?,
            (at_least, None) => write!(f, " of size {at_least} or more")?,
            (at_least, Some(below)) => write!(f, " of size {at_least} to below {below}")?,
        }
        write!(f, ": {}", self.run_as.words())?;
        match self.run_as {
            RunAs::Composed { most_bytes } => write!(f, ", up to {} MiB", most_bytes >> 20),
            RunAs::F32 | RunAs::Half => Ok(()),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtype = self.dtype.map_or("f32", |dtype| name_of(dtype).unwrap_or("an unknown dtype"));
        write!(f, "{dtype} on {}", self.platform)?;
        self.rules.iter().try_for_each(|rule| write!(f, "\n  {rule}"))
    }
}
