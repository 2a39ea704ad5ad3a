//! What PyTorch's anomaly detection, the DebugUnderflowOverflow of Hugging Face's transformers, and an explanation of
//! this crate name, for the same steps with planted culprits. Not a timing: it prints a table.
//!
//! transformers has to be importable from TCH_AMP_PYTHON; `cargo xtask bench insight_tools` sees to that. Without it,
//! its column says so.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

#[path = "insight_tools/cases.rs"]
mod cases;
mod common;
#[path = "insight_tools/verdict.rs"]
mod verdict;

use cases::{CASES, Case, Culprit};
use common::Python;
use serde_json::Value;
use tch_amp::insight::{Cause, Explanation, Pass};
use verdict::{Named, Verdict, judge};

/// The columns of the tools.
const TOOLS: [&str; 3] = ["`Tracer`", "`detect_anomaly`", "`DebugUnderflowOverflow`"];

/// The verdicts on a tool, and the texts of its cells. `None`: it is not installed.
type Column = [Option<(Verdict, String)>; 3];

fn main() {
    let Some(mut python) = Python::start("insight_tools.py") else {
        return;
    };
    let versions: Value = serde_json::from_str(&python.ask("versions")).unwrap();
    let with_hooks = !versions["transformers"].is_null();
    let version =
        |name: &str| versions[name].as_str().unwrap_or("that is not installed").to_owned();
    println!("beside PyTorch {} and transformers {}", version("torch"), version("transformers"));
    if !with_hooks {
        eprintln!(
            "WARNING: transformers is NOT INSTALLED, so its column is empty: run `cargo xtask bench insight_tools`, \
             which installs it, or set PYTHONPATH to a folder that has it"
        );
    }
    println!("\n| planted | to blame | {} |\n|---|---|---|---|---|", TOOLS.join(" | "));
    let rows: Vec<Column> =
        CASES.iter().map(|case| compared(case, &mut python, with_hooks)).collect();
    for (case, row) in CASES.iter().zip(&rows) {
        let cells = row.iter().map(|cell| match cell {
            Some((verdict, text)) => format!("{} {text}", if verdict.right { "✓" } else { "✗" }),
            None => "not installed".to_owned(),
        });
        println!("| {} | {} | {} |", case.name, blame(case), cells.collect::<Vec<_>>().join(" | "));
    }
    let count_of = |f: fn(&Case) -> bool| CASES.iter().filter(|case| f(case)).count();
    let operators =
        |case: &Case| matches!(case.culprit, Culprit::Forward(..) | Culprit::Backward(..));
    let planted = |case: &Case| !matches!(case.culprit, Culprit::Nothing);
    let all = CASES.len();
    println!("\n| of all steps | steps | {} |\n|---|---|---|---|---|", TOOLS.join(" | "));
    print_counts("right (✓)", all, &rows, |verdict| verdict.right);
    print_counts("the operator is right", count_of(operators), &rows, |v| v.operator == Some(true));
    print_counts("the part is right", count_of(operators), &rows, |v| v.part == Some(true));
    print_counts("the pass is right", count_of(operators), &rows, |v| v.pass == Some(true));
    print_counts("silent, although something is to blame", count_of(planted), &rows, |verdict| {
        verdict.silent
    });
    print_counts("names something wrong", all, &rows, |v| !v.right && !v.silent);
}

fn print_counts(name: &str, steps: usize, rows: &[Column], is: fn(&Verdict) -> bool) {
    let counts = [0, 1, 2].map(|tool| {
        let verdicts: Option<Vec<_>> =
            rows.iter().map(|row| row[tool].as_ref().map(|(verdict, _)| verdict)).collect();
        match verdicts {
            Some(verdicts) => {
                verdicts.into_iter().filter(|verdict| is(verdict)).count().to_string()
            }
            None => "not installed".to_owned(),
        }
    });
    println!("| {name} | {steps} | {} |", counts.join(" | "));
}

/// What the three tools say about a step.
fn compared(case: &Case, python: &mut Python, with_hooks: bool) -> Column {
    let (finite, explanation) = cases::explained(case).unwrap();
    let answer: Value = serde_json::from_str(&python.ask(case.name)).unwrap();
    let theirs = ["loss", "gradient"].map(|what| answer[what] == true);
    assert_eq!(finite, theirs, "{}: the two sides compute different results", case.name);
    let judged = |named: &Named, text| (judge(case.culprit, named), text);
    let anomaly = verdict::anomaly(&answer["anomaly"]);
    let hooks = verdict::hooks(&answer["hooks"]);
    [
        Some(judged(&verdict::tracer(&explanation), ours(&explanation))),
        Some(judged(&anomaly, theirs_in_words(&anomaly))),
        with_hooks.then(|| judged(&hooks, theirs_in_words(&hooks))),
    ]
}

fn blame(case: &Case) -> String {
    match case.culprit {
        Culprit::Forward(names, part) => format!("{} in {part}", names[0]),
        Culprit::Backward(names, part) => format!("backward of {} in {part}", names[0]),
        Culprit::Scale => "the scale".to_owned(),
        Culprit::Parameter(name) => name.to_owned(),
        Culprit::Input => "the batch".to_owned(),
        Culprit::Nothing => "nothing".to_owned(),
    }
}

/// The first line of an explanation without its beginning, or what it says instead of an operator.
fn ours(explanation: &Explanation) -> String {
    let short = |operator: &str| operator.trim_start_matches("aten::").to_owned();
    let culprit = explanation.culprit.as_ref().map_or_else(String::new, |culprit| {
        let operator = short(&culprit.operator);
        let part = culprit.path.as_deref().unwrap_or("an unknown part");
        match (culprit.pass, &culprit.forward_operator) {
            (Pass::Backward, Some(forward)) => {
                format!("{operator} in the backward of {} in {part}", short(forward))
            }
            (Pass::Backward, None) => format!("{operator} in the backward pass of {part}"),
            (Pass::Forward, _) => format!("{operator} in {part}"),
        }
    });
    match &explanation.cause {
        Cause::Parameter { name } => name.clone(),
        Cause::Input { operator, .. } => format!("an input of {}", short(operator)),
        Cause::Scale { largest_finite } => format!("the scale; {largest_finite} is finite"),
        Cause::Finite => "nothing".to_owned(),
        _ => culprit,
    }
}

fn theirs_in_words(named: &Named) -> String {
    match named {
        Named::Nothing => "nothing".to_owned(),
        Named::Operator(operators, part, _) => {
            let part = part.as_deref().unwrap_or("an unknown part");
            operators.first().map_or_else(|| part.to_owned(), |node| format!("{node} in {part}"))
        }
        Named::Parameter(name) => name.clone(),
        Named::Input => "the input of first".to_owned(),
        Named::Scale => "the scale".to_owned(),
    }
}
