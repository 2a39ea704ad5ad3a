//! Whether a tool names what is to blame: one rule for all tools, applied to what their output says.

use serde_json::Value;
use tch_amp::insight::{Cause, Explanation, Pass};

use super::cases::Culprit;

/// What a tool names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    Nothing,
    /// An operator, by any of these names, or none; a part of the model, if it is known; and a pass.
    Operator(Vec<String>, Option<String>, Pass),
    Parameter(String),
    Input,
    Scale,
}

/// What is right (`Some(true)`) or wrong. `None`: it was not named, or there is no such thing to name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub operator: Option<bool>,
    pub part: Option<bool>,
    pub pass: Option<bool>,
    /// Whether it names the part and the pass, and no wrong operator. Where no operator is to blame, whether it names
    /// what is.
    pub right: bool,
    /// It names nothing, although there is something to blame.
    pub silent: bool,
}

/// The rule.
pub fn judge(culprit: Culprit, named: &Named) -> Verdict {
    let other = |right| Verdict { right, ..Verdict::default() };
    match (culprit, named) {
        (Culprit::Nothing, named) => other(*named == Named::Nothing),
        (_, Named::Nothing) => Verdict { silent: true, ..Verdict::default() },
        (Culprit::Forward(names, part), Named::Operator(operators, found, pass)) => {
            fields(names, part, operators, found.as_deref(), *pass == Pass::Forward)
        }
        (Culprit::Backward(names, part), Named::Operator(operators, found, pass)) => {
            fields(names, part, operators, found.as_deref(), *pass == Pass::Backward)
        }
        (Culprit::Parameter(expected), Named::Parameter(name)) => other(expected == name),
        (Culprit::Input, Named::Input) | (Culprit::Scale, Named::Scale) => other(true),
        _ => other(false),
    }
}

fn fields(
    names: &[&str],
    part: &str,
    operators: &[String],
    found: Option<&str>,
    pass: bool,
) -> Verdict {
    let is_one =
        |operator: &String| names.iter().any(|name| operator_name(name) == operator_name(operator));
    let operator = (!operators.is_empty()).then(|| operators.iter().any(is_one));
    let part = found.map(|found| found == part);
    let right = pass && part == Some(true) && operator != Some(false);
    Verdict { operator, part, pass: Some(pass), right, silent: false }
}

/// What `aten::sqrt_`, `SqrtBackward0` and `sqrt` have in common.
pub fn operator_name(name: &str) -> String {
    let name = name.trim_start_matches("aten::").to_lowercase().replace('_', "");
    let node = name.trim_end_matches(|c: char| c.is_ascii_digit());
    node.strip_suffix("backward").map_or(name.clone(), str::to_owned)
}

/// A derivative is known by its forward operator.
pub fn tracer(explanation: &Explanation) -> Named {
    match (&explanation.cause, &explanation.culprit) {
        (Cause::Finite, _) => Named::Nothing,
        (Cause::Parameter { name }, _) => Named::Parameter(name.clone()),
        (Cause::Input { .. }, _) => Named::Input,
        (Cause::Scale { .. }, _) => Named::Scale,
        (_, Some(culprit)) => {
            let operators = match (culprit.pass, &culprit.forward_operator) {
                (Pass::Backward, Some(forward)) => vec![forward.clone()],
                _ => [Some(&culprit.operator), culprit.within.as_ref()]
                    .into_iter()
                    .flatten()
                    .cloned()
                    .collect(),
            };
            Named::Operator(operators, culprit.path.clone(), culprit.pass)
        }
        // It says that something overflowed, but not what.
        _ => Named::Operator(Vec::new(), None, Pass::Forward),
    }
}

/// The node that returned NaN in the backward pass, and the part in the traceback of its forward operator.
pub fn anomaly(answer: &Value) -> Named {
    let text = |name: &str| answer[name].as_str().map(str::to_owned);
    match text("node") {
        Some(node) => Named::Operator(vec![node], text("part"), Pass::Backward),
        None => Named::Nothing,
    }
}

/// The last module of the report, and the first line of it with inf or nan: a weight, an input or an output. The hooks
/// know the forward pass only. The inputs of the first module are the batch.
pub fn hooks(answer: &Value) -> Named {
    let (Some(module), Some(line)) = (answer["module"].as_str(), answer["line"].as_str()) else {
        return Named::Nothing;
    };
    if line.starts_with("input") && module == "first" {
        Named::Input
    } else if line.starts_with("input") || line.starts_with("output") {
        Named::Operator(Vec::new(), Some(module.to_owned()), Pass::Forward)
    } else {
        Named::Parameter(format!("{module}.{line}"))
    }
}
