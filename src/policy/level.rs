//! The levels O0 to O3.

#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::error::{Error, Result};
use crate::policy::{KeepF32, Policy, half_kind};

/// The four usual ways to train, under the names that NVIDIA's apex gave them.
///
/// | | parameters | computation | outputs | norms | f32 master weights | loss scale |
/// |---|---|---|---|---|---|---|
/// | `O0` | f32 | f32 | f32 | f32 | no | none |
/// | `O1` | f32 | half, by autocast | f32 | f32 | no: the parameters are f32 | dynamic for fp16 |
/// | `O2` | half | half | f32 | kept in f32 | yes, in the optimizer | dynamic for fp16 |
/// | `O3` | half | half | half | half | no | none |
///
/// `O1` is what `torch.autocast` does and the one to begin with. `half` is [`half_kind`] of the device. In apex outputs
/// of `O3` are f32.
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::{OptLevel, Policy};
///
/// let level: OptLevel = "O2".parse()?;
/// let policy = level.policy(Device::Cpu);
/// assert_eq!(policy, "params=bf16,compute=bf16,output=f32".parse::<Policy>()?);
///
/// let mut vs = nn::VarStore::new(Device::Cpu);
/// let _norm = nn::layer_norm(vs.root() / "norm", vec![4], Default::default());
/// let _out = nn::linear(vs.root() / "out", 4, 2, Default::default());
/// let kept = policy.cast_variables(&mut vs, level.keeps())?;
/// assert_eq!(kept, ["norm.bias", "norm.weight"]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OptLevel {
    /// Plain f32 training.
    #[default]
    O0,
    /// Parameters in f32; autocast computes in half where that is safe.
    O1,
    /// Parameters in half, but for norms, with f32 copies of them in the optimizer.
    O2,
    /// Everything in half.
    O3,
}

impl OptLevel {
    const ALL: [Self; 4] = [Self::O0, Self::O1, Self::O2, Self::O3];

    /// Returns the kinds of the level on a device.
    pub fn policy(self, device: Device) -> Policy {
        let half = half_kind(device);
        match self {
            Self::O0 => Policy::FULL,
            Self::O1 => Policy { compute: half, ..Policy::FULL },
            Self::O2 => Policy { param: half, compute: half, ..Policy::FULL },
            Self::O3 => Policy { param: half, compute: half, output: half },
        }
    }

    /// Returns which variables stay in f32 when the others are [cast](Policy::cast_variables): norms, but in `O3`.
    pub fn keeps(self) -> KeepF32<'static> {
        if self == Self::O3 { KeepF32::Nothing } else { KeepF32::Norms }
    }

    /// Tells whether the optimizer is to keep f32 copies of the parameters and update those: in `O2`.
    pub fn has_master_weights(self) -> bool {
        self == Self::O2
    }
}

impl fmt::Display for OptLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for OptLevel {
    type Err = Error;

    /// Reads `O0` to `O3`, with a capital or a small letter.
    fn from_str(text: &str) -> Result<Self> {
        let problem = || "it is none of the levels O0, O1, O2 and O3".to_owned();
        let fits = |level: &Self| text.trim().eq_ignore_ascii_case(&level.to_string());
        let unknown = || Error::PolicyText { text: text.to_owned(), problem: problem() };
        Self::ALL.into_iter().find(fits).ok_or_else(unknown)
    }
}
