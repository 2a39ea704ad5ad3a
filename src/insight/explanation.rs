//! What a tracer found out, and its advice.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::dtype::Dtype;
use super::numbers;
use super::recording::{Pass, Recording, is_bad};
use crate::error::Number;
use crate::ffi::insight::RecordedTensor;

/// Why a step was skipped. Its text, by `Display`, is meant for a terminal; its fields for programs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The iteration, counted from 1 by [`Tracer::begin`](super::Tracer::begin).
    pub iteration: u64,
    /// The loss scale of the iteration.
    #[serde(with = "numbers")]
    pub scale: f64,
    /// The loss scale when the explanation was asked for.
    #[serde(with = "numbers")]
    pub scale_now: f64,
    /// Why the gradients were not finite.
    pub cause: Cause,
    /// The operator that made the first non-finite number; `None` if no operator did.
    pub culprit: Option<Culprit>,
    /// The names of the parameters whose gradients were not finite.
    pub gradients: Vec<String>,
    /// How often in succession a too large scale has made the same part of the model overflow, this time included,
    /// while the scale fell; 0 for another cause.
    #[serde(default)]
    pub repeated: u32,
    /// What to do, in one sentence.
    #[serde(default)]
    pub advice: String,
}

/// Why gradients were not finite.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Cause {
    /// A parameter or buffer had non-finite elements before the iteration. Precision has nothing to do with it.
    Parameter {
        /// Its name in the `VarStore`.
        name: String,
    },
    /// A tensor that is neither a parameter nor computed in the iteration, such as an input or a target, had non-finite
    /// elements. Precision has nothing to do with it.
    Input {
        /// The operator that read it.
        operator: String,
        /// The part of the model that read it, if it is known, as in [`Culprit::path`].
        path: Option<String>,
        /// Its place among the tensors that the operator read, from 0.
        place: usize,
        /// What is wrong with it.
        values: Values,
    },
    /// Only the loss scale was too large: with a scale of 1 the same iteration is finite.
    Scale {
        /// The largest power of two, at least 1, with which the iteration is finite. It is estimated from the numbers
        /// of a run with a scale of 1, and verified by a run with this scale.
        largest_finite: f64,
    },
    /// The values themselves overflowed or were undefined, whatever the scale.
    Values,
    /// The replay was finite: the step was skipped for another reason, for example because of another rank's gradients,
    /// or because the iteration uses random numbers of its own.
    Finite,
}

/// What is wrong with the numbers of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Values {
    /// The number of elements that are +inf.
    pub positive_infinite: i64,
    /// The number of elements that are -inf.
    pub negative_infinite: i64,
    /// The number of elements that are NaN.
    pub nan: i64,
    /// The number of all elements.
    pub elements: i64,
}

/// The operator that made the first non-finite number from finite ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Culprit {
    /// libtorch's name of the operator, such as `aten::bmm`.
    pub operator: String,
    /// The operator that the program or the autograd engine called, if that is another one.
    pub within: Option<String>,
    /// The part of the model: the module of the parameter that it uses, or a name given by [`named`](super::named). For
    /// a backward operator, that of the forward operator to which it belongs.
    pub path: Option<String>,
    /// The last module before, in the order of execution, if `path` is unknown.
    pub after: Option<String>,
    /// The pass in which it ran.
    pub pass: Pass,
    /// The forward operator to which a backward operator belongs, or the name of the custom function.
    pub forward_operator: Option<String>,
    /// The dtype of its result.
    pub dtype: Dtype,
    /// What is wrong with its result.
    pub values: Values,
    /// For each floating-point tensor that it read, the largest of the finite absolute values.
    pub largest_inputs: Vec<f64>,
    /// The largest absolute value of the result if the operator is run in f32 instead, which has the range of bf16. It
    /// may be infinite or NaN. `None` if it was not run: its inputs or its result are not in half precision, it works
    /// in place or draws random numbers, it has no f32 kernel, or 32 operators of the iteration were already run again.
    #[serde(with = "numbers::option")]
    pub largest_in_f32: Option<f64>,
}

/// How often in succession a part overflows before the scale is no longer to blame.
const AGAIN: u32 = 3;

impl Explanation {
    /// What to do about it.
    pub(super) fn advise(&self) -> String {
        match &self.cause {
            Cause::Parameter { name } => format!(
                "restore {name} from a checkpoint; if it is a buffer, such as a running mean, restore buffers after \
                 skipped steps (buffers::BufferSnapshot)"
            ),
            Cause::Input { .. } => {
                "check the data of this batch and the targets of the loss".to_owned()
            }
            Cause::Scale { .. } => match &self.culprit {
                Some(culprit) if self.repeated >= AGAIN && culprit.dtype == Dtype::F16 => format!(
                    "keep {} in f32, or use bf16: it has overflowed {} times in succession, and the scale falls for it alone",
                    culprit.place_or_after(),
                    self.repeated
                ),
                _ => "none is needed: the scaler has found its scale by such skips, and lowers it now"
                    .to_owned(),
            },
            Cause::Finite => {
                "with several ranks, ask the others; otherwise make the closure repeat the iteration, with the same \
                 batch and loss"
                    .to_owned()
            }
            Cause::Values => match &self.culprit {
                Some(culprit) => culprit.advice(),
                None => "look at the loss and the gradients: no recorded operator made the first non-finite \
                         number"
                    .to_owned(),
            },
        }
    }
}

impl Culprit {
    /// Describes an operator of a recording.
    pub(super) fn new(recording: &Recording, index: usize) -> Self {
        let event = &recording.events[index];
        let (pass, forward) = recording.pass(index);
        let path = recording.part(index);
        let after = match path {
            None => recording.module_before(forward.unwrap_or(index)),
            Some(_) => None,
        };
        let output = event.outputs.iter().find(|tensor| is_bad(tensor));
        let name = |index: usize| recording.events[index].name.clone();
        let largest = event.inputs.iter().filter_map(|tensor| tensor.numbers);
        Self {
            operator: event.name.clone(),
            within: recording.outermost(index).map(name).filter(|outer| *outer != event.name),
            path,
            after,
            pass,
            forward_operator: forward
                .map(|index| recording.outermost(index).map_or_else(|| name(index), name)),
            dtype: output.map_or(Dtype::Other, Dtype::of),
            values: output.map(Values::of).unwrap_or_default(),
            largest_inputs: largest.map(|numbers| numbers.largest).collect(),
            largest_in_f32: event.repeated,
        }
    }

    fn place(&self) -> &str {
        self.path.as_deref().unwrap_or("this part")
    }

    fn place_or_after(&self) -> String {
        match (&self.path, &self.after) {
            (None, Some(module)) => format!("what follows {module}"),
            _ => self.place().to_owned(),
        }
    }

    /// What to do about values that overflow or are undefined whatever the scale.
    fn advice(&self) -> String {
        let place = self.place();
        let operator = self.operator.trim_start_matches("aten::").trim_end_matches('_');
        let f32_is_finite = self.largest_in_f32.is_some_and(f64::is_finite);
        let is_cast = ["_to_copy", "to", "copy"].contains(&operator);
        if self.dtype == Dtype::F16 && is_cast {
            return format!(
                "use bf16, or keep {place} in f32: its numbers exceed 65504 before they are cast to fp16"
            );
        }
        if self.dtype == Dtype::F16 && f32_is_finite {
            return match operator {
                "bmm" | "matmul" | "baddbmm" => {
                    format!(
                        "scale one factor before the product (in attention, q by 1/sqrt(d)), keep {place} in f32, or use bf16"
                    )
                }
                _ => format!("keep {place} in f32, or use bf16"),
            };
        }
        match operator {
            "log" | "log2" | "log10" | "_log_softmax" => {
                format!(
                    "keep the argument of the logarithm in {place} above zero, for example by clamping it"
                )
            }
            "div" | "reciprocal" | "rsqrt" => {
                format!(
                    "keep the divisor in {place} away from zero, for example by adding an epsilon"
                )
            }
            "sqrt" | "norm" | "linalg_vector_norm" | "pow" if self.pass == Pass::Backward => {
                format!("the derivative in {place} is infinite at zero: add an epsilon before it")
            }
            "_softmax" | "softmax" => {
                format!(
                    "in {place}, a row of the softmax is masked as a whole; leave such rows out"
                )
            }
            "exp" | "expm1" | "sinh" | "cosh" => {
                format!("limit the argument of the exponential in {place}")
            }
            _ if self.dtype == Dtype::F16 && self.largest_in_f32.is_none() => {
                format!("look at {place}, and try it in f32 or bf16")
            }
            _ if self.dtype == Dtype::BF16 && self.largest_in_f32.is_none() => {
                format!("look at {place}, and try it in f32")
            }
            _ => format!(
                "look at {place}: it is not finite in f32 either, so precision is not the reason"
            ),
        }
    }
}

impl Values {
    /// Counted by a recording.
    pub(super) fn of(tensor: &RecordedTensor) -> Self {
        let numbers = tensor.numbers.unwrap_or_default();
        Self {
            positive_infinite: numbers.positive_infinite,
            negative_infinite: numbers.negative_infinite,
            nan: numbers.nan,
            elements: tensor.elements,
        }
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts =
            [(self.positive_infinite, "+inf"), (self.negative_infinite, "-inf"), (self.nan, "NaN")];
        let counts = counts.iter().filter(|(count, _)| *count > 0);
        let counts: Vec<_> = counts.map(|(count, name)| format!("{name} in {count}")).collect();
        write!(f, "{} of {} elements", counts.join(", "), self.elements)
    }
}

impl fmt::Display for Culprit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.path, &self.after) {
            (Some(path), _) => write!(f, "{path}  ")?,
            (None, Some(module)) => write!(f, "after {module}  ")?,
            (None, None) => {}
        }
        write!(f, "{}", self.operator)?;
        if let Some(within) = &self.within {
            write!(f, " in {within}")?;
        }
        write!(f, "  {}, {}", self.dtype, self.pass)?;
        if let Some(forward) = &self.forward_operator {
            write!(f, " of {forward}")?;
        }
        write!(f, "\n  first non-finite: {}", self.values)?;
        match self.largest_inputs.iter().copied().map(short).collect::<Vec<_>>().as_slice() {
            [] => {}
            [one] => write!(f, "; the largest finite number of its input is {one}")?,
            all => write!(f, "; the largest finite numbers of its inputs are {}", all.join(", "))?,
        }
        match self.largest_in_f32 {
            Some(largest) if largest.is_finite() => {
                write!(
                    f,
                    "\n  the same operator in bf16 or f32 is finite (largest {})",
                    short(largest)
                )
            }
            Some(_) => write!(f, "\n  the same operator in f32 is not finite either"),
            None => Ok(()),
        }
    }
}

/// A number with four significant digits.
fn short(x: f64) -> String {
    match x.abs() {
        size if size != 0.0 && !(1e-3..1e5).contains(&size) => format!("{x:.2e}"),
        size if size.fract() == 0.0 => format!("{x}"),
        size => format!("{x:.*}", 3usize.saturating_sub(size.log10().max(0.0) as usize)),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "iteration {} skipped, scale {}", self.iteration, Number(self.scale))?;
        if self.scale_now != self.scale {
            write!(f, " → {}", Number(self.scale_now))?;
        }
        match &self.cause {
            Cause::Parameter { name } => {
                write!(f, "\n  {name} was not finite before the iteration")?;
            }
            Cause::Input { operator, path, place, values } => {
                let path = path.as_ref().map(|path| format!(" in {path}")).unwrap_or_default();
                write!(
                    f,
                    "\n  an input of the iteration is not finite: tensor {place} of {operator}{path}, {values}"
                )?;
            }
            Cause::Finite => {
                write!(f, "\n  every gradient is finite when the iteration is run again here")?
            }
            Cause::Scale { .. } | Cause::Values => {}
        }
        if let Some(culprit) = &self.culprit {
            write!(f, ". Culprit: {culprit}")?;
        }
        if let (Some(first), Some(last)) = (self.gradients.first(), self.gradients.last()) {
            match self.gradients.len() {
                1 => write!(f, "\n  carried on into the gradient of {first}")?,
                count => write!(f, "\n  carried on into {count} gradients ({first} … {last})")?,
            }
        }
        if let Cause::Scale { largest_finite } = self.cause {
            let largest = Number(largest_finite);
            write!(
                f,
                "\n  with a scale of 1 it is finite; the largest finite scale is about {largest}"
            )?;
        }
        match self.advice.as_str() {
            // Earlier builds saved none.
            "" => write!(f, "\n  advice: {}", self.advise()),
            advice => write!(f, "\n  advice: {advice}"),
        }
    }
}
