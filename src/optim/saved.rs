//! The saved form of the state of an optimizer.

use std::collections::BTreeMap;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use tch::{Device, Kind, Tensor};

use crate::dtype::{count_beyond, holds};
use crate::error::Result;
use crate::ffi::{self, OutsideRegions};
#[cfg(doc)]
use crate::optim::Optimizer;
use crate::optim::ParamGroup;
use crate::optim::algorithms::OptionFields;

/// The complete state of an optimizer, from which training resumes as if it had not been interrupted. The counterpart
/// of what PyTorch's `state_dict` returns, with parameter names instead of numbers.
#[derive(Debug)]
#[non_exhaustive]
pub struct OptimizerState {
    /// The tensors of each parameter that has been stepped (with Adagrad, of all parameters), under PyTorch's keys:
    /// `step` (f32, 0-dim) and, in the parameter's shape, `exp_avg`, `exp_avg_sq` and `max_exp_avg_sq` of Adam,
    /// `momentum_buffer` of SGD and Muon, `sum` of Adagrad, `square_avg`, `momentum_buffer` and `grad_avg` of RMSprop,
    /// `exp_avg`, `exp_avg_sq` and `mu_product` (f32, 0-dim) of NAdam, `row_var` and `col_var` (with one column and one
    /// row) or `variance` of Adafactor,
    /// or `exp_avg` of Lion; with [`MasterWeights`](crate::optim::MasterWeights) also `master_param`, in f32. With
    /// [`MomentDtype::BFloat16`](crate::optim::MomentDtype) the moments are bf16; with `EightBit` `exp_avg` is i8 and
    /// `exp_avg_sq` u8, with `exponents` (u8, one for each 32 elements in row-major order). `step` is an i64 in both,
    /// also beside the bf16 `momentum_buffer` of Muon.
    pub state: BTreeMap<String, BTreeMap<String, Tensor>>,
    /// The groups, in order.
    pub param_groups: Vec<ParamGroupState>,
}

/// The saved form of a parameter group.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ParamGroupState {
    /// The options of the group.
    #[serde(flatten)]
    pub options: ParamGroup,
    /// The names of its parameters.
    pub params: Vec<String>,
}

impl OptimizerState {
    /// Makes a state, for example of one in another format, to be loaded with
    /// [`load_state_dict`](Optimizer::load_state_dict), which checks it.
    pub fn new(
        state: BTreeMap<String, BTreeMap<String, Tensor>>,
        param_groups: Vec<ParamGroupState>,
    ) -> Self {
        Self { state, param_groups }
    }
}

impl ParamGroupState {
    /// Makes the saved form of a group.
    pub fn new(options: ParamGroup, params: Vec<String>) -> Self {
        Self { options, params }
    }
}

impl<'de> Deserialize<'de> for ParamGroupState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut fields = OptionFields::deserialize(deserializer)?;
        // Taken out first: there may be far more parameters than options, which are copied.
        let params = fields.remove("params").ok_or_else(|| D::Error::missing_field("params"))?;
        let state = || {
            Ok(Self {
                options: ParamGroup::read(&fields)?,
                params: serde_json::from_value(params)?,
            })
        };
        state().map_err(|error: serde_json::Error| D::Error::custom(error))
    }
}

/// A tensor of a saved state, in memory or in a file.
pub(crate) trait Saved: Sized {
    fn shape(&self) -> Vec<i64>;

    /// `None` if there is no tensor, or one that tch does not know.
    fn kind(&self) -> Option<Kind>;

    fn is_complex(&self) -> bool;

    /// Returns the only element.
    fn item(&self) -> Result<f64>;

    /// Overwrites a tensor that has as many elements.
    fn copy_to(&self, to: &mut Tensor) -> Result<()>;

    /// Returns the elements on the CPU.
    fn to_tensor(&self) -> Result<Tensor>;

    /// Returns how many elements another dtype cannot hold. Reads them only if there can be any.
    fn beyond(&self, kind: Kind) -> Result<usize> {
        match self.kind() {
            Some(own) if !holds(kind, own) => count_beyond(&self.to_tensor()?, kind),
            _ => Ok(0),
        }
    }
}

impl Saved for Tensor {
    fn shape(&self) -> Vec<i64> {
        // A tensor without a shape gets one that no parameter has.
        ffi::sizes(self).unwrap_or_else(|_| vec![-1])
    }

    fn kind(&self) -> Option<Kind> {
        self.f_kind().ok()
    }

    fn is_complex(&self) -> bool {
        Tensor::is_complex(self)
    }

    fn item(&self) -> Result<f64> {
        let _own = OutsideRegions::enter();
        Ok(self.f_reshape([1i64])?.f_double_value(&[0])?)
    }

    fn copy_to(&self, to: &mut Tensor) -> Result<()> {
        let _own = OutsideRegions::enter();
        let from = self.f_detach()?.f_reshape(to.size())?;
        tch::no_grad(|| to.f_copy_(&from))?;
        Ok(())
    }

    fn to_tensor(&self) -> Result<Tensor> {
        let _own = OutsideRegions::enter();
        Ok(self.f_detach()?.f_to_device(Device::Cpu)?)
    }
}
