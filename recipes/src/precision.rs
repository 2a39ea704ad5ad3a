//! The precisions that a recipe can train in.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};
use tch_amp::{Autocast, GradScaler};

/// The dtype of the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// Plain f32, without autocast.
    Fp32,
    /// bf16 autocast. bf16 has f32's exponent range and needs no loss scaling.
    Bf16,
    /// fp16 autocast with a gradient scaler.
    Fp16,
}

impl Precision {
    /// All precisions, in the order in which they are compared.
    pub const ALL: [Self; 3] = [Self::Fp32, Self::Bf16, Self::Fp16];

    /// The value of `--amp`.
    pub fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "off" => Self::Fp32,
            "bf16" => Self::Bf16,
            "fp16" => Self::Fp16,
            _ => bail!("the precision is off, bf16 or fp16"),
        })
    }

    /// The name in tables, plots and style sheets.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }

    /// The region that the forward pass and the loss run in.
    pub fn region(self, device: Device) -> Autocast {
        match self {
            Self::Fp32 => Autocast::new(device).enabled(false),
            Self::Bf16 => Autocast::new(device).dtype(Kind::BFloat16),
            Self::Fp16 => Autocast::new(device).dtype(Kind::Half),
        }
    }

    /// The scaler of the loop. Only that of fp16 scales; the others skip steps with non-finite gradients.
    pub fn scaler(self, device: Device) -> tch_amp::Result<GradScaler> {
        match self {
            Self::Fp32 | Self::Bf16 => GradScaler::skip_only(device),
            Self::Fp16 => GradScaler::new(device),
        }
    }
}
