//! The gradients of two runs, parameter by parameter.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ffi::OutsideRegions;

/// The gradients of a run, and the scale by which they are divided before they are compared.
pub(super) struct UnscaledGradients {
    gradients: Vec<Option<Tensor>>,
    scale: f64,
}

/// The gradient of a parameter in the region, beside that in f32. Sums of squares of several can be added.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ComparedGradient {
    pub(super) difference: f64,
    pub(super) rounded_difference: f64,
    pub(super) norm: f64,
    pub(super) own: f64,
    pub(super) product: f64,
    /// Elements that are not zero in f32.
    pub(super) elements: f64,
    /// Those of them that are zero in the region, and with a scale of 1.
    pub(super) zeros: f64,
    pub(super) zeros_unscaled: f64,
}

impl UnscaledGradients {
    pub(super) fn new(gradients: Vec<Option<Tensor>>, scale: f64) -> Self {
        Self { gradients, scale }
    }

    /// A gradient as it would be without the scale, in f64; `None` if there is none.
    fn get(&self, index: usize) -> Result<Option<Tensor>> {
        let Some(gradient) = self.gradients.get(index).and_then(Option::as_ref) else {
            return Ok(None);
        };
        let dense = if gradient.is_sparse() {
            gradient.f_to_dense(None, false)?
        } else {
            gradient.f_detach()?
        };
        let scale = crate::ffi::number_new(self.scale, Kind::Double, dense.device())?;
        Ok(Some(dense.f_to_kind(Kind::Double)?.f_div(&scale)?))
    }
}

/// Compares the gradients of every parameter; `None` for a parameter without one in f32 or in the region.
pub(super) fn compare(
    f32: &UnscaledGradients,
    lower: &UnscaledGradients,
    rounded: Option<&UnscaledGradients>,
    unscaled: &UnscaledGradients,
) -> Result<Vec<Option<ComparedGradient>>> {
    let _own = OutsideRegions::enter();
    let one = |index| {
        let (Some(f32), Some(lower)) = (f32.get(index)?, lower.get(index)?) else {
            return Ok(None);
        };
        let rounded = rounded.map(|run| run.get(index)).transpose()?.flatten();
        let unscaled = unscaled.get(index)?;
        let nonzero = f32.f_ne_tensor(&f32.f_zeros_like()?)?;
        let zeros = |other: &Tensor| {
            number(&other.f_eq_tensor(&other.f_zeros_like()?)?.f_logical_and(&nonzero)?)
        };
        let difference = |other: &Tensor| number(&other.f_sub(&f32)?.f_square()?);
        Ok(Some(ComparedGradient {
            difference: difference(&lower)?,
            rounded_difference: rounded.as_ref().map_or(Ok(0.0), difference)?,
            norm: number(&f32.f_square()?)?,
            own: number(&lower.f_square()?)?,
            product: number(&lower.f_mul(&f32)?)?,
            elements: number(&nonzero)?,
            zeros: zeros(&lower)?,
            zeros_unscaled: unscaled.as_ref().map_or(Ok(0.0), zeros)?,
        }))
    };
    (0..f32.gradients.len()).map(one).collect()
}

/// The sum of a tensor.
fn number(tensor: &Tensor) -> Result<f64> {
    Ok(tensor.f_sum(Kind::Double)?.f_double_value(&[])?)
}

impl std::ops::AddAssign for ComparedGradient {
    fn add_assign(&mut self, other: Self) {
        self.difference += other.difference;
        self.rounded_difference += other.rounded_difference;
        self.norm += other.norm;
        self.own += other.own;
        self.product += other.product;
        self.elements += other.elements;
        self.zeros += other.zeros;
        self.zeros_unscaled += other.zeros_unscaled;
    }
}
