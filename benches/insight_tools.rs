//! What PyTorch's anomaly detection, the DebugUnderflowOverflow of Hugging Face's transformers, and an explanation of
//! this crate name, for the same steps with planted culprits. Not a timing: it prints a table.
//!
//! transformers has to be importable from TCH_AMP_PYTHON, for instance with PYTHONPATH set to a folder to which
//! `pip install --target` has installed it. Without it, its column says so.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

#[path = "insight_tools/cases.rs"]
mod cases;
mod common;

use cases::{CASES, Case, Culprit};
use common::Python;
use serde_json::Value;

fn main() {
    let Some(mut python) = Python::start("insight_tools.py") else {
        return;
    };
    let versions = python.ask("versions");
    println!("beside {versions}\n");
    println!("| planted | to blame | `Tracer` | `detect_anomaly` | `DebugUnderflowOverflow` |");
    println!("|---|---|---|---|---|");
    let mut right = [0; 3];
    for case in CASES {
        let (finite, explanation) = cases::explained(case).unwrap();
        let answer: Value = serde_json::from_str(&python.ask(case.name)).unwrap();
        let theirs = ["loss", "gradient"].map(|what| answer[what] == true);
        assert_eq!(finite, theirs, "{}: the two sides compute different results", case.name);
        let ours = Verdict::of(cases::is_right(case, &explanation), ours(&explanation));
        let anomaly = anomaly(case, answer["anomaly"].as_str());
        let hooks = hooks(case, answer["hooks"].as_str());
        let verdicts = [ours, anomaly, hooks];
        for (right, verdict) in right.iter_mut().zip(&verdicts) {
            *right += usize::from(verdict.is_right);
        }
        let [ours, anomaly, hooks] = verdicts.map(|verdict| verdict.text);
        println!("| {} | {} | {ours} | {anomaly} | {hooks} |", case.name, blame(case));
    }
    let [ours, anomaly, hooks] = right;
    println!("| right | {} | {ours} | {anomaly} | {hooks} |", CASES.len());
}

struct Verdict {
    is_right: bool,
    text: String,
}

impl Verdict {
    fn of(is_right: bool, names: String) -> Self {
        let mark = if is_right { "✓" } else { "✗" };
        Self { is_right, text: format!("{mark} {names}") }
    }
}

fn blame(case: &Case) -> String {
    match case.culprit {
        Culprit::Forward(operator, part) => format!("{operator} in {part}"),
        Culprit::Backward(operator, part) => format!("backward of {operator} in {part}"),
        Culprit::Scale => "the scale".to_owned(),
        Culprit::Parameter(name) => name.to_owned(),
        Culprit::Input => "the batch".to_owned(),
        Culprit::Nothing => "nothing".to_owned(),
    }
}

/// The first line of an explanation without its beginning, or what it says instead of an operator.
fn ours(explanation: &tch_amp::insight::Explanation) -> String {
    use tch_amp::insight::{Cause, Pass};
    let culprit = explanation.culprit.as_ref().map_or_else(String::new, |culprit| {
        let operator = culprit.operator.trim_start_matches("aten::");
        let part = culprit.path.as_deref().unwrap_or("an unknown part");
        let pass = if culprit.pass == Pass::Backward { "backward, " } else { "" };
        format!("{pass}{operator} in {part}")
    });
    match &explanation.cause {
        Cause::Parameter { name } => name.clone(),
        Cause::Input { operator, .. } => {
            format!("an input of {}", operator.trim_start_matches("aten::"))
        }
        Cause::Scale { largest_finite } => format!("the scale; {largest_finite} is finite"),
        Cause::Finite => "nothing".to_owned(),
        _ => culprit,
    }
}

/// Anomaly detection names a backward node, and is right if it belongs to the operator to blame, in whichever pass that
/// was.
fn anomaly(case: &Case, node: Option<&str>) -> Verdict {
    let Some(node) = node else {
        return Verdict::of(matches!(case.culprit, Culprit::Nothing), "nothing".to_owned());
    };
    // Such as `NativeLayerNormBackward0`.
    let name = node.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches("Backward");
    let is_same = |operator: &str| name.to_lowercase().contains(&operator.replace('_', ""));
    let is_right = match case.culprit {
        Culprit::Forward(operator, _) => is_same(operator),
        Culprit::Backward(operator, _) => is_same(operator),
        _ => false,
    };
    Verdict::of(is_right, node.to_owned())
}

/// The hooks name the module after which they stop. They are right if it is the part to blame, whatever the operator.
fn hooks(case: &Case, module: Option<&str>) -> Verdict {
    let Some(module) = module else {
        return Verdict::of(matches!(case.culprit, Culprit::Nothing), "nothing".to_owned());
    };
    if module == "not installed" {
        return Verdict { is_right: false, text: module.to_owned() };
    }
    let is_right = match case.culprit {
        Culprit::Forward(_, part) => module == part,
        // Its report lists the weights of a module.
        Culprit::Parameter(name) => name.starts_with(&format!("{module}.")),
        // It lists the inputs of the first module.
        Culprit::Input => module == "first",
        _ => false,
    };
    Verdict::of(is_right, module.to_owned())
}
