//! Apex's levels of mixed precision, O0 to O3.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::amp::MixedPrecision;
use crate::error::{Error, PolicyError, Result};
use crate::optim::MasterWeights;
use crate::policy::{KeepF32, Policy, half_dtype};
use crate::scaler::GradScaler;

/// The four levels of mixed precision, with the names of NVIDIA's apex.
///
/// | | parameters | computation | outputs | norms | f32 master weights | loss scale |
/// |---|---|---|---|---|---|---|
/// | `O0` | f32 | f32 | f32 | f32 | no | none |
/// | `O1` | f32 | half, by autocast | f32 | f32 | no: the parameters are f32 | dynamic for fp16; bf16 only skips steps |
/// | `O2` | half | half | f32 | kept in f32 | yes, in the optimizer | dynamic for fp16; bf16 only skips steps |
/// | `O3` | half | half | half | half | no | none |
///
/// In the table, *half* is the [`half_dtype`] of the device. Start with `O1`, which corresponds to `torch.autocast`.
/// The same training loop works for `O0` to `O2`. For `O3`, where norms are in half precision, leave
/// [`run_in_f32`](crate::policy::run_in_f32) out. In apex the outputs of `O3` are f32.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::optim::AdamW;
/// use tch_amp::policy::run_in_f32;
/// use tch_amp::Policy;
/// use tch_amp::policy::OptLevel;
///
/// let level: OptLevel = "O2".parse()?;
/// let policy = level.policy(Device::Cpu);
/// assert_eq!(policy, "params=bf16,compute=bf16,output=f32".parse::<Policy>()?);
///
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let norm = nn::layer_norm(vs.root() / "norm", vec![4], Default::default());
/// let out = nn::linear(vs.root() / "out", 4, 2, Default::default());
/// let kept = policy.cast_variables(&mut vs, level.keep_f32())?;
/// assert_eq!(kept, ["norm.bias", "norm.weight"]);
///
/// let net = policy.apply_to(nn::seq().add(run_in_f32(norm)).add(out))?;
/// let mut opt = AdamW::default().master_weights(level.master_weights()).build(&vs, 1e-3)?;
/// let mut scaler = level.grad_scaler(vs.device())?;
/// scaler.backward(&net.forward(&Tensor::ones([8, 4], (Kind::Float, Device::Cpu))).square().mean(None))?;
/// assert!(scaler.step(&mut opt)?.is_stepped()?);
/// scaler.update()?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OptLevel {
    /// Training in f32.
    #[default]
    O0,
    /// Parameters in f32. Autocast computes in half precision where that is safe.
    O1,
    /// Parameters in half precision, except for norms, with f32 master weights in the optimizer.
    O2,
    /// Everything in half precision.
    O3,
}

impl OptLevel {
    const ALL: [Self; 4] = [Self::O0, Self::O1, Self::O2, Self::O3];

    /// Returns the policy of the level on a device, in the device's [`half_dtype`]. For another dtype, see
    /// [`MixedPrecision::policy`].
    pub fn policy(self, device: Device) -> Policy {
        self.policy_in(half_dtype(device))
    }

    fn policy_in(self, half: Kind) -> Policy {
        match self {
            Self::O0 => Policy::FULL,
            Self::O1 => Policy { compute: half, ..Policy::FULL },
            Self::O2 => Policy { param: half, compute: half, ..Policy::FULL },
            Self::O3 => Policy { param: half, compute: half, output: half },
        }
    }

    /// Returns which variables stay in f32 when the others are [cast](Policy::cast_variables): the norms, except at
    /// `O3`.
    pub fn keep_f32(self) -> KeepF32<'static> {
        if self == Self::O3 { KeepF32::Nothing } else { KeepF32::Norms }
    }

    /// Returns the level's option [`master_weights`](crate::optim::AdamW::master_weights) of an optimizer:
    /// [`MasterWeights::Float`] at `O2`, otherwise [`MasterWeights::None`].
    pub fn master_weights(self) -> MasterWeights {
        if self == Self::O2 { MasterWeights::Float } else { MasterWeights::None }
    }

    /// Creates the scaler of the level. At `O1` and `O2` it is a [dynamic](GradScaler::new) one for fp16, and for bf16
    /// one that [only skips](GradScaler::skip_only) the steps whose gradients are non-finite; at `O0` and `O3` it is
    /// [disabled](GradScaler::disabled).
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::new`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Device;
    /// use tch_amp::policy::OptLevel;
    ///
    /// assert!(!OptLevel::O0.grad_scaler(Device::Cpu)?.is_enabled());
    /// // On the CPU half precision is bf16, whose losses need no scale.
    /// let scaler = OptLevel::O1.grad_scaler(Device::Cpu)?;
    /// assert_eq!((scaler.is_enabled(), scaler.get_scale()?), (true, 1.0));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn grad_scaler(self, device: Device) -> Result<GradScaler> {
        match (self, half_dtype(device)) {
            (Self::O0 | Self::O3, _) => Ok(GradScaler::disabled()),
            (Self::O1 | Self::O2, Kind::Half) => GradScaler::new(device),
            (Self::O1 | Self::O2, _) => GradScaler::skip_only(device),
        }
    }
}

impl MixedPrecision {
    /// Returns the policy of a level in the dtype of this precision; if it is f32, that of [`OptLevel::O0`]. The
    /// [`skipping_scaler`](Self::skipping_scaler) of the precision is that of `O1` and `O2`; `O0` and `O3` have none.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind};
    /// use tch_amp::policy::OptLevel;
    /// use tch_amp::Amp;
    ///
    /// let amp = Amp::Fp16.on(Device::Cpu)?;
    /// assert_eq!(amp.policy(OptLevel::O2).compute, Kind::Half);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn policy(&self, level: OptLevel) -> Policy {
        self.dtype().map_or(Policy::FULL, |half| level.policy_in(half))
    }
}

impl fmt::Display for OptLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for OptLevel {
    type Err = Error;

    /// Parses `O0` to `O3`, in upper or lower case.
    fn from_str(text: &str) -> Result<Self> {
        let fits = |level: &Self| text.trim().eq_ignore_ascii_case(&level.to_string());
        let unknown = || Error::Policy(PolicyError::LevelText { text: text.to_owned() });
        Self::ALL.into_iter().find(fits).ok_or_else(unknown)
    }
}
