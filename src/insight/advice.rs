//! One sentence on what to do.

use super::explanation::{Cause, Culprit, Explanation, Pass};

/// The advice for an explanation.
pub(super) fn advice(explanation: &Explanation) -> String {
    match &explanation.cause {
        Cause::Parameter { name } => format!(
            "restore {name} from a checkpoint; if it is a buffer, such as a running mean, restore buffers after \
             skipped steps (buffers::BufferSnapshot)"
        ),
        Cause::Input { .. } => {
            "check the data of this batch and the targets of the loss".to_owned()
        }
        Cause::Scale { .. } => match &explanation.culprit {
            Some(culprit) if explanation.repeated >= AGAIN && culprit.dtype == "fp16" => format!(
                "keep {} in f32, or use bf16: it has overflowed {} times in succession, and the scale falls for it alone",
                place_or_after(culprit),
                explanation.repeated
            ),
            _ => "none is needed: the scaler has found its scale by such skips, and lowers it now"
                .to_owned(),
        },
        Cause::Finite => {
            "with several ranks, ask the others; otherwise make the closure repeat the iteration, \
                          with the same batch and loss"
                .to_owned()
        }
        Cause::Values => match &explanation.culprit {
            Some(culprit) => of_values(culprit),
            None => "look at the loss and the gradients: no recorded operator made the first non-finite \
                     number"
                .to_owned(),
        },
    }
}

/// How often in succession a part overflows before the scale is no longer to blame.
const AGAIN: u32 = 3;

fn place(culprit: &Culprit) -> &str {
    culprit.path.as_deref().unwrap_or("this part")
}

fn place_or_after(culprit: &Culprit) -> String {
    match (&culprit.path, &culprit.after) {
        (None, Some(module)) => format!("what follows {module}"),
        _ => place(culprit).to_owned(),
    }
}

fn of_values(culprit: &Culprit) -> String {
    let place = place(culprit);
    let operator = culprit.operator.trim_start_matches("aten::").trim_end_matches('_');
    let f32_is_finite = culprit.largest_in_f32.is_some_and(f64::is_finite);
    let is_cast = ["_to_copy", "to", "copy"].contains(&operator);
    if culprit.dtype == "fp16" && is_cast {
        return format!(
            "use bf16, or keep {place} in f32: its numbers exceed 65504 before they are cast to fp16"
        );
    }
    if culprit.dtype == "fp16" && f32_is_finite {
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
            format!("keep the divisor in {place} away from zero, for example by adding an epsilon")
        }
        "sqrt" | "norm" | "linalg_vector_norm" | "pow" if culprit.pass == Pass::Backward => {
            format!("the derivative in {place} is infinite at zero: add an epsilon before it")
        }
        "_softmax" | "softmax" => {
            format!("in {place}, a row of the softmax is masked as a whole; leave such rows out")
        }
        "exp" | "expm1" | "sinh" | "cosh" => {
            format!("limit the argument of the exponential in {place}")
        }
        _ if culprit.dtype == "fp16" && culprit.largest_in_f32.is_none() => {
            format!("look at {place}, and try it in f32 or bf16")
        }
        _ if culprit.dtype == "bf16" && culprit.largest_in_f32.is_none() => {
            format!("look at {place}, and try it in f32")
        }
        _ => format!(
            "look at {place}: it is not finite in f32 either, so precision is not the reason"
        ),
    }
}
