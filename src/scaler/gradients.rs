//! Which gradients can be unscaled. Everything is looked at before anything is changed.

#![forbid(unsafe_code)]

use tch::{Kind, Tensor};

use crate::device::dtype_code;
use crate::error::{Error, Result};
use crate::ffi;
use crate::scaler::addresses::AddressMap;
use crate::sys::{self, Gradient};

/// A device as libtorch numbers it: type and index.
pub(crate) type Place = (i8, i8);

/// What to do with the gradients of one optimizer.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Indices of the parameters whose gradients are to be unscaled, by device.
    pub(crate) groups: Vec<(Place, Vec<usize>)>,
    /// Indices of frozen parameters that still carry a gradient, which no optimizer may apply.
    pub(crate) frozen: Vec<usize>,
}

impl Plan {
    /// Sorts the gradients, or names the first that cannot be unscaled.
    pub(crate) fn new(
        gradients: &[Gradient],
        allow_fp16: bool,
        describe: &dyn Fn(usize) -> String,
    ) -> Result<Self> {
        let mut plan = Self::default();
        let mut seen = AddressMap::default();
        for (index, gradient) in gradients.iter().enumerate() {
            let refuse = |problem| Error::Gradient { parameter: describe(index), problem };
            if gradient.parameter == 0 {
                return Err(refuse("cannot exist: the parameter is an undefined tensor"));
            }
            // A parameter that stands in two groups is unscaled once.
            if gradient.gradient == 0 || seen.insert(gradient.parameter, ()).is_some() {
                continue;
            }
            if gradient.flags & sys::GRADIENT_REQUIRES_GRAD == 0 {
                plan.frozen.push(index);
                continue;
            }
            if let Some(problem) = problem(gradient, allow_fp16) {
                return Err(refuse(problem));
            }
            plan.add(gradient.place(), index);
        }
        Ok(plan)
    }

    fn add(&mut self, place: Place, index: usize) {
        match self.groups.iter_mut().find(|(known, _)| *known == place) {
            Some((_, indices)) => indices.push(index),
            None => self.groups.push((place, vec![index])),
        }
    }
}

/// Names the first gradient whose norm cannot be taken.
pub(crate) fn refuse_sparse(
    gradients: &[Gradient],
    describe: &dyn Fn(usize) -> String,
) -> Result<()> {
    let kept = |g: &Gradient| g.gradient != 0 && g.flags & sys::GRADIENT_REQUIRES_GRAD != 0;
    let sparse = |g: &Gradient| kept(g) && g.flags & sys::GRADIENT_STRIDED == 0;
    let problem = "is sparse, and has no norm in libtorch; make it dense with `to_dense` first";
    match gradients.iter().position(sparse) {
        Some(index) => Err(Error::Gradient { parameter: describe(index), problem }),
        None => Ok(()),
    }
}

const COMPLEX_HALF: i8 = 8;
const COMPLEX: [i8; 2] = [9, 10];

fn problem(gradient: &Gradient, allow_fp16: bool) -> Option<&'static str> {
    let half = dtype_code(Kind::Half);
    let is_half = Some(gradient.dtype) == half || gradient.dtype == COMPLEX_HALF;
    if is_half && !allow_fp16 {
        return Some(
            "is fp16, in which small values are lost: keep parameters in f32 and let autocast do the casts, or set allow_fp16_gradients",
        );
    }
    let floating =
        [half, dtype_code(Kind::Float), dtype_code(Kind::Double), dtype_code(Kind::BFloat16)]
            .contains(&Some(gradient.dtype));
    if !(floating || is_half || COMPLEX.contains(&gradient.dtype)) {
        return Some("is neither floating nor complex and cannot be unscaled");
    }
    if gradient.flags & (sys::GRADIENT_STRIDED | sys::GRADIENT_SPARSE) == 0 {
        return Some("is neither strided nor COO sparse, or holds no data; convert it first");
    }
    (gradient.flags & sys::GRADIENT_OVERLAPS != 0).then_some(
        "has elements that share memory (an expanded tensor) and would be unscaled more than once; copy it first",
    )
}

impl Gradient {
    pub(crate) fn place(&self) -> Place {
        (self.device_type, self.device_index)
    }
}

/// How a gradient differs from the one that was unscaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// The same tensor with other numbers: clipping does that, and so does a backward.
    Numbers,
    /// Another tensor, or one where there was none.
    Replaced(&'static str),
}

/// Compares a gradient with `before`, its description after unscaling; `None` for a parameter that was added since.
pub(crate) fn change(before: Option<&Gradient>, now: &Gradient) -> Change {
    let before = before.copied().unwrap_or_default();
    if now.gradient == 0 {
        // A gradient that is gone is applied by nobody.
        Change::None
    } else if before.gradient == 0 {
        Change::Replaced("appeared")
    } else if before.gradient != now.gradient || before.memory != now.memory {
        Change::Replaced("was replaced")
    } else if before.version != now.version {
        Change::Numbers
    } else {
        Change::None
    }
}

/// What a message calls a parameter.
pub(crate) fn describe(index: usize, tensor: &Tensor, name: Option<String>) -> String {
    let shape = ffi::sizes(tensor).unwrap_or_default();
    match name {
        Some(name) => format!("parameter `{name}` {shape:?}"),
        None => format!("parameter {index} {shape:?}"),
    }
}
